"""Pallas Mosaic kernel for NVIDIA Hopper that rounds the rows between the experts' products."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from .. import hopper
from ..hopper import load
from ..layer.fp8 import DTYPE as FP8
from ..layer.fp8 import Fp8Rows, factors_of
from ..layer.mosaic_heads import layout_of_rows
from .mosaic_place import Beside, rows_like

_ROUNDED, _PIECE = 4, 256  # rows of a program, and columns that it loads at once


def rounded(
    inner: Float[Array, "P Fp"], F: int, interpret: Any, beside: Beside | None = None
) -> Fp8Rows:
    """The rows of all places in 8 bits; columns past the last one become 0.

    The last one is F, or the end of the dense half in its last region. Rows of unused places are
    arbitrary: to skip them, a program would first have to wait for a list.
    """
    P, width = inner.shape
    values, scales = hopper.kernel(
        functools.partial(_round, F=F, beside=beside),
        out_type=rows_like(P, width, FP8),
        grid=(P // _ROUNDED,),
        grid_names=("rows",),
        kernel_name="expert_ffn_round",
        # The kernel never reads its own writes, so threads need not wait for their warpgroup.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(inner)
    return Fp8Rows(values, scales)


def _round(inner, values, scales, *, F, beside):
    """Round the rows of four places, one row a warp."""
    first = pl.multiple_of(jax.lax.axis_index("rows") * _ROUNDED, _ROUNDED)
    rows, width = pl.ds(first, _ROUNDED), inner.shape[1]
    columns, piece = F, math.gcd(width, _PIECE)
    if beside is not None:
        region = jax.lax.div(first, jnp.asarray(beside.apart, jnp.int32))
        columns = jnp.where(region < beside.count, beside.inner - region * width, F)
    layout, pieces = layout_of_rows(piece), [pl.ds(at, piece) for at in range(0, width, piece)]

    def load_piece(at):
        found = load(inner.at[rows, at], layout).astype(jnp.float32)
        if width == F:
            return found
        index = plgpu.broadcasted_iota(jnp.int32, found.shape, 1, layout=layout)
        return jnp.where(index < columns - at.start, found, 0.0)

    found = [load_piece(at) for at in pieces]
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(one), axis=1) for one in found])
    factors, scales[rows] = factors_of(largest)
    by = jax.lax.broadcast_in_dim(factors, found[0].shape, [0])
    for at, one in zip(pieces, found, strict=True):
        values[rows, at] = (one * by).astype(FP8)
