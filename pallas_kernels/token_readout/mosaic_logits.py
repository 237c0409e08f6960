"""The logits of a warpgroup's tile, and their statistics: a `Part` for each row."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ..hopper import load
from .result import Part

ROWS = 64  # of a warpgroup
STEP = 64  # 16-bit components of a line
CHUNK = 16  # ids that a warpgroup reads at a time: 8 logits a thread
NEVER = -1e38  # logit of excluded ids; finite, so that differences are finite
_LOG2_E = 1.4426950408889634
_LARGEST = 75.1  # with logits up to this, float32 holds the sum of exp(logit) times embeddings


def hottest(cap: float | None) -> float:
    """The largest factor (1 / temperature) that keeps capped logits below `_LARGEST`."""
    return 0.0 if cap is None else _LARGEST / cap


def logits_of(product: Array, scale: Array | float, cap: float | None) -> Array:
    """Logits of products with the head."""
    logit = product if isinstance(scale, float) and scale == 1.0 else product * scale
    if cap is None:
        return logit
    # Not `tanh`: the hardware's has 11 bits.
    return cap - (2 * cap) / (jnp.exp(logit * (2 / cap)) + 1.0)


def powers_of(product: Array, scale: Array | float, heat: Array, cap: float | None) -> Array:
    """Logits times the heat of their rows, as exponents of 2."""
    shape, heat = product.shape, heat * _LOG2_E
    if cap is None:
        return product * scale * down(heat, shape)
    most, twice = (down(heat * (n * cap), shape) for n in (1, 2))
    return most - twice / (jnp.exp2(product * (scale * (2 * _LOG2_E / cap))) + 1.0)


def restricted(logit, special, row, start, first, given) -> Array:
    """Restrict the logits of a tile whose ids begin at `start`; ids below `first` are excluded."""
    layout = plgpu.Layout.WGMMA
    by_row, by_id = layout.reduce(1), layout.reduce(0)
    shape = logit.shape

    def restricted(logit):
        token = start + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        forbidden = load(given["forbidden"].at[pl.ds(start, shape[1])], by_id)
        forbidden = jax.lax.broadcast_in_dim(forbidden, shape, [1])
        logit = jnp.where((forbidden != 0) | (token < first), NEVER, logit)
        if "penalties" in given:
            which, loss = (
                load(given[name].at[pl.ds(row, ROWS)], by_row)
                for name in ("penalty_ids", "penalties")
            )
            logit -= jnp.where(token == down(which, shape), down(loss, shape), 0.0)
        return jnp.maximum(logit, NEVER)  # a penalty may be infinite

    return jax.lax.cond(special != 0, restricted, lambda logit: logit, logit)


def down(values, shape):
    """A value of each row, for all ids."""
    return jax.lax.broadcast_in_dim(values, shape, [0])


def part_of(logit, start) -> Part:
    """The readout of a warpgroup's tile, whose ids begin at `start`."""
    shape, peak = (ROWS, CHUNK), logit.max(axis=1)
    token, mass, spread = _none(logit.shape[1])
    for at in reversed(range(0, logit.shape[1], CHUNK)):  # the lowest id comes last and wins
        part = logit[:, at : at + CHUNK]
        token = jnp.where(part == down(peak, shape), at, token)
        below = (part - down(peak, shape)) * _LOG2_E
        weight = jnp.exp2(below)
        mass += weight
        spread += weight * below
    return _summed(peak, token, start, mass, spread)


def law_part(power, start, is_plain, weights, leaving) -> Part:
    """`part_of` of a law, whose logits are exponents of 2; also writes its weights.

    Args:
        is_plain: Rows whose weights are not relative to the tile's peak.
        weights: Target of the weights of the warpgroup's rows.
        leaving: Staging memory for the weights.
    """
    shape, peak = (ROWS, CHUNK), power.max(axis=1)
    lowered = None if is_plain is True else jnp.where(is_plain, 0.0, peak)
    token, mass, spread = _none(power.shape[1])
    for i, begin in enumerate(reversed(range(0, power.shape[1], STEP))):
        wide = power[:, begin : begin + STEP]
        weight = jnp.exp2(wide if lowered is None else wide - down(lowered, wide.shape))
        for at in reversed(range(0, STEP, CHUNK)):  # the lowest id comes last and wins
            part, own = wide[:, at : at + CHUNK], weight[:, at : at + CHUNK]
            token = jnp.where(part == down(peak, shape), begin + at, token)
            mass += own
            spread += own * (part - down(peak, shape))
        piece = leaving.at[i % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the previous contents have been copied
        piece[...] = weight.astype(piece.dtype)
        plgpu.commit_smem()
        place = pl.ds(pl.multiple_of(start + begin, STEP), STEP)
        plgpu.copy_smem_to_gmem(piece, weights.at[:, place])
    # The weight of the peak, bit for bit, so that the mass of a certain law is exactly 1.
    unit = jnp.exp2(peak if lowered is None else peak - lowered)
    return _summed(peak, token, start, mass, spread, unit)


def _none(ids):
    """Initial token, mass and spread of a warpgroup."""
    layout, shape = plgpu.Layout.WGMMA, (ROWS, CHUNK)
    none = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    return plgpu.layout_cast(jnp.full(shape, ids, jnp.int32), layout), none, none


def _summed(peak, token, start, mass, spread, unit: Any = None) -> Part:
    """Reduce over the columns of a thread and over threads to one `Part` a row.

    Args:
        unit: For a law, whose peak is an exponent of 2, the unit of its sums.
    """
    layout = plgpu.Layout.WGMMA
    token += plgpu.broadcasted_iota(jnp.int32, token.shape, 1, layout=layout)
    mass, spread = mass.sum(axis=1), spread.sum(axis=1) * (1 / _LOG2_E)
    some = peak != NEVER
    if unit is not None:
        peak, mass, spread = peak * (1 / _LOG2_E), mass / unit, spread / unit
    return Part(
        token=token.min(axis=1) + start,
        peak=jnp.where(some, peak, -jnp.inf),
        mass=jnp.where(some, mass, 0.0),
        spread=jnp.where(some, spread, 0.0),
    )
