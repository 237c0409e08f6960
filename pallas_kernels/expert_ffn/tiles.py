"""Tiles of work of the experts: the pairs (row, expert), sorted by expert and cut.

Shapes are static: the number of tiles is that of the worst routing, and tiles past the last used
one are empty. This is arithmetic on ids; nothing here knows what a tile computes.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

NO_PLACE = jnp.iinfo(jnp.int32).max


class TileTable(NamedTuple):
    """Pair t * k + j is choice j of row t; places are positions in the list sorted by expert.

    Attributes:
        pair: Pair at each place; pairs of no expert come last.
        place: Place of each pair; a number past all places for a pair of no expert.
        expert: Expert of each tile.
        first: First place of a tile. Used tiles come first and follow each other without a gap.
        length: Pairs of a tile, 0 if it is unused.
    """

    pair: Int[Array, " P"]
    place: Int[Array, "T k"]
    expert: Int[Array, " N"]
    first: Int[Array, " N"]
    length: Int[Array, " N"]


def max_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Tiles of the worst routing: every expert has a tile, all but one a single pair."""
    touched = min(num_pairs, num_experts)
    return touched + (num_pairs - touched) // tile_rows


def tile_table(expert_ids: Int[Array, "T k"], num_experts: int, tile_rows: int) -> TileTable:
    """Sort the pairs by expert, then by row, and cut those of each expert into tiles."""
    num_pairs = expert_ids.size
    flat = expert_ids.reshape(-1)
    routed = (flat >= 0) & (flat < num_experts)
    flat = jnp.where(routed, flat, num_experts).astype(jnp.int32)
    pair = jnp.argsort(flat, stable=True).astype(jnp.int32)
    place = jnp.zeros_like(pair).at[pair].set(jnp.arange(num_pairs, dtype=jnp.int32))

    start = _num_below(flat, jnp.arange(num_experts + 1, dtype=jnp.int32))
    tiles_end = jnp.cumsum(-(-jnp.diff(start) // tile_rows), dtype=jnp.int32)
    tile = jnp.arange(max_tiles(num_pairs, num_experts, tile_rows), dtype=jnp.int32)
    expert = jnp.minimum(_num_below(tiles_end, tile + 1), num_experts - 1)
    tiles_before = jnp.where(expert > 0, tiles_end[expert - 1], 0)
    first = start[expert] + (tile - tiles_before) * tile_rows
    return TileTable(
        pair=pair,
        place=jnp.where(routed, place, NO_PLACE).reshape(expert_ids.shape),
        expert=expert,
        first=jnp.minimum(first, num_pairs),
        length=jnp.clip(start[expert + 1] - first, 0, tile_rows),
    )


def combine(results: Float[Array, "P_up D"], place: Int[Array, "T k"]) -> Float[Array, "T D"]:
    """Add up each row's results, found by their places; a pair of no expert adds zero."""
    return results.at[place].get(mode="fill", fill_value=0).sum(axis=1)


def _num_below(values: Int[Array, " P"], bounds: Int[Array, " N"]) -> Int[Array, " N"]:
    """The number of values below each bound: one fusion instead of a binary search's loop."""
    return (values[None, :] < bounds[:, None]).sum(axis=1, dtype=jnp.int32)
