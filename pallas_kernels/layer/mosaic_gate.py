"""Pallas Mosaic kernel for NVIDIA Hopper: gate, up and the activation, from sums to rows of 8 bits.

A program is a warpgroup with eight rows, two to each warp: sixteen lanes have a turn of gate and of
up, neighbours in a lane, and a row's largest number is a maximum over them. Everything is computed
twice, once for that number: the second time its operands are in the first cache. What the
activation gives is rounded to 16 bits before it is rounded to 8, as by the reference.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .. import hopper
from ..activation import GELU_CUBE, GELU_SLOPE, Activation
from ..lowered import lowered_once
from .fp8 import DTYPE, Fp8Rows, Fp8Sums, factors_of

_ROWS = 8  # of a program
_TURN = 32  # columns of gate, and as many of up: a pair for each of sixteen lanes
_AT_ONCE = 6  # turns whose loads are under way together, at most


def unsupported_sums(both: Array | Fp8Sums, is_quantized: bool) -> str | None:
    """Why `gate` cannot take such sums, or None."""
    if not isinstance(both, Fp8Sums) or not is_quantized:
        return "needs a product of 8 bits, and gives rows of 8 bits"
    *rows, C, _, W = both.sums.shape
    if W != _TURN or both.rows.size % _ROWS:
        return (
            f"needs turns of {_TURN} columns and a multiple of {_ROWS} rows, got {C} of {W} and "
            f"{rows}"
        )
    return None


@lowered_once(static_argnames=("activation", "dtype", "interpret"))
def gate(
    both: Fp8Sums, *, activation: Activation = "silu", dtype: Any, interpret: Any = None
) -> Fp8Rows:
    """See `api.gate`; `interpret`, an `InterpretGPUParams`, runs it on a CPU, for tests."""

    def run(both):
        *lead, C, _, W = both.sums.shape
        M = both.rows.size
        values, scales = plgpu.kernel(
            functools.partial(_gate, activation=activation, dtype=dtype),
            out_type=[
                jax.ShapeDtypeStruct((M, C * W), DTYPE),
                jax.ShapeDtypeStruct((M,), jnp.float32),
            ],
            grid=(M // _ROWS,),
            grid_names=("rows",),
            kernel_name="gate",
            # Nothing reads what is written here, so threads need not wait for their warpgroup.
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
            interpret=interpret,
        )(both.sums.reshape(M, C, 2, W), both.rows.reshape(M), both.columns)
        return Fp8Rows(values.reshape(*lead, C * W), scales.reshape(lead))

    # Mosaic kernels have no batching rule, so vmap runs them one after another.
    return jax.custom_batching.sequential_vmap(run)(both)


def _gate(sums, by_row, by_column, values, scales, *, activation, dtype):
    """Eight rows, a turn after the other."""
    C, _, W = sums.shape[1:]
    rows = pl.ds(pl.multiple_of(jax.lax.axis_index("rows") * _ROWS, _ROWS), _ROWS)
    tile, layout = (_ROWS, W), _layout()

    def across(row):
        return jax.lax.broadcast_in_dim(row, tile, [0])

    factor = across(hopper.load(by_row.at[rows], layout.reduce(1)))

    def half(c, i):
        column = hopper.load(by_column.at[c, i], layout.reduce(0))
        column = jax.lax.broadcast_in_dim(column, tile, [1])
        value = hopper.load(sums.at[rows, c, i], layout) * factor * column
        return value.astype(dtype).astype(jnp.float32)

    def turn(c):
        opened, up = half(c, 0), half(c, 1)
        slope = opened
        if activation == "gelu":
            slope = GELU_SLOPE * (opened + GELU_CUBE * opened * opened * opened)
        root = jax.lax.rsqrt(1 + jnp.exp(-slope))  # one instruction; a division takes about twenty
        return (opened * (root * root) * up).astype(dtype).astype(jnp.float32)

    at_once = next(n for n in range(_AT_ONCE, 0, -1) if C % n == 0)

    def largest(i, most):
        for j in range(at_once):
            most = jnp.maximum(most, jnp.abs(turn(i * at_once + j)))
        return most

    none = plgpu.layout_cast(jnp.zeros(tile, jnp.float32), layout)
    most = jax.lax.fori_loop(0, C // at_once, largest, none)
    by, unit = factors_of(jnp.max(most, axis=1))
    scales[rows] = unit
    by = across(by)

    def store(i, carry):
        for j in range(at_once):
            c = i * at_once + j
            values[rows, pl.ds(pl.multiple_of(c * W, W), W)] = (turn(c) * by).astype(DTYPE)
        return carry

    jax.lax.fori_loop(0, C // at_once, store, 0)


def _layout() -> Any:
    """Eight rows of a turn: two a warp, a pair of neighbours a lane."""
    from jax.experimental.mosaic.gpu.fragmented_array import Tiling

    tiling = Tiling(((_ROWS, _TURN), (2, _TURN), (2,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
