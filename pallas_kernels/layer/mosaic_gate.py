"""Pallas Mosaic kernel for NVIDIA Hopper: gate, up and the activation, from sums to rows of 8 bits.

A program has eight rows. Each of its warpgroups takes some groups of 32 columns of gate and of up,
and all its loads are in flight together. A warp has two rows: sixteen lanes share a group, each
with two adjacent numbers. The largest number of a row is a maximum over lanes, then over
warpgroups through shared memory. The activation is rounded to 16 bits and then to 8, as in the
reference.
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

_ROWS = 8  # rows of a program
_TURN = 32  # width of the interleaved groups of gate and up: a pair for each of sixteen lanes
_WARPGROUPS, _MOST_TURNS = 6, 16  # most warpgroups of a program, and most groups of each


def unsupported_sums(
    both: Array | Fp8Sums, is_quantized: bool, width: int | None = None
) -> str | None:
    """Why `gate` cannot take such sums, or None."""
    if not isinstance(both, Fp8Sums) or not is_quantized:
        return "needs a product of 8 bits, and gives rows of 8 bits"
    *rows, C, _, W = both.sums.shape
    if width is not None and width % W:
        return f"needs a width of whole turns of {W}, got {width}"
    if W != _TURN or C // _warpgroups(C) > _MOST_TURNS or both.rows.size % _ROWS:
        return (
            f"needs turns of {_TURN} columns, at most {_MOST_TURNS} for each warpgroup, and a "
            f"multiple of {_ROWS} rows, got {C} of {W} and {rows}"
        )
    return None


@lowered_once(static_argnames=("activation", "dtype", "width", "interpret"))
def gate(
    both: Fp8Sums,
    *,
    activation: Activation = "silu",
    dtype: Any,
    width: int | None = None,
    interpret: Any = None,
) -> Fp8Rows:
    """See `api.gate`; `interpret`, an `InterpretGPUParams`, runs it on a CPU, for tests."""

    def run(both):
        *lead, C, _, W = both.sums.shape
        M, warpgroups, L = both.rows.size, _warpgroups(C), width or C * W
        values, scales = hopper.kernel(
            functools.partial(_gate, activation=activation, dtype=dtype),
            out_type=[
                jax.ShapeDtypeStruct((M, L), DTYPE),
                jax.ShapeDtypeStruct((M,), jnp.float32),
            ],
            grid=(M // _ROWS,),
            grid_names=("rows",),
            kernel_name="gate",
            num_threads=warpgroups,
            thread_name="warpgroup",
            scratch_types=[
                plgpu.SMEM((warpgroups, _ROWS), jnp.float32),
                plgpu.Barrier(num_barriers=1, num_arrivals=warpgroups),
            ],
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpret,
        )(both.sums.reshape(M, C, 2, W), both.rows.reshape(M), both.columns)
        return Fp8Rows(values.reshape(*lead, L), scales.reshape(lead))

    # Mosaic kernels have no batching rule, so vmap runs them one after another.
    return jax.custom_batching.sequential_vmap(run)(both)


def _gate(sums, by_row, by_column, values, scales, most, told, *, activation, dtype):
    """Eight rows."""
    C, _, W = sums.shape[1:]
    warpgroups, mine = most.shape[0], jax.lax.axis_index("warpgroup")
    rows = pl.ds(pl.multiple_of(jax.lax.axis_index("rows") * _ROWS, _ROWS), _ROWS)
    tile, layout = (_ROWS, W), _layout()

    def across(row):
        return jax.lax.broadcast_in_dim(row, tile, [0])

    factor = across(hopper.load(by_row.at[rows], layout.reduce(1)))

    def rounded(value):
        return value.astype(dtype).astype(jnp.float32)

    def turn(c, halves):
        columns = [hopper.load(by_column.at[c, i], layout.reduce(0)) for i in range(2)]
        columns = [jax.lax.broadcast_in_dim(column, tile, [1]) for column in columns]
        halves = [half.astype(jnp.float32) for half in halves]
        opened, up = (rounded(a * factor * b) for a, b in zip(halves, columns, strict=True))
        slope = opened
        if activation == "gelu":
            slope = GELU_SLOPE * (opened + GELU_CUBE * opened * opened * opened)
        root = jax.lax.rsqrt(1 + jnp.exp(-slope))  # one instruction; a division takes about twenty
        return rounded(opened * (root * root) * up)

    first, count = mine * (C // warpgroups), C // warpgroups
    # Start all loads before the first sum, which synchronises the threads.
    each = [
        [hopper.load(sums.at[rows, first + i, j], layout) for j in (0, 1)] for i in range(count)
    ]
    turns = [turn(first + i, halves) for i, halves in enumerate(each)]
    most[mine] = jnp.max(functools.reduce(jnp.maximum, map(jnp.abs, turns)), axis=1)
    plgpu.barrier_arrive(told.at[0])
    plgpu.barrier_wait(told.at[0])
    found = [hopper.load(most.at[i], layout.reduce(1)) for i in range(warpgroups)]
    by, unit = factors_of(functools.reduce(jnp.maximum, found))

    @pl.when(mine == 0)
    def _():
        scales[rows] = unit

    by = across(by)
    for i, kept in enumerate(turns):
        columns = pl.ds(pl.multiple_of((first + i) * W, W), W)
        values[rows, columns] = (kept * by).astype(DTYPE)

    @pl.when(mine == 0)
    def _():
        for column in range(C * W, values.shape[1], W):  # padding for the next product
            values[rows, pl.ds(column, W)] = jnp.zeros_like(by).astype(DTYPE)


def _warpgroups(turns: int) -> int:
    return next(n for n in range(_WARPGROUPS, 0, -1) if turns % n == 0)


def _layout() -> Any:
    """A layout of eight rows of a group: two rows a warp, an adjacent pair a lane."""
    return hopper.tiled(((_ROWS, _TURN), (2, _TURN), (2,)), (-5,), (-3, -2))
