"""Deletes and inserts within blocks: what is written, whether it was before, and its consumption.

A block's text is one array: token ids, and HOLE where there is none.

Source: LLaDA2.2's decoder, as FluxServe's `levenshtein.py` ports it (docs/llada2_2_edits.md).
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..core import sampling
from ..core.forward import TokenStats

HOLE, NOTHING = -2, -3  # no ids; NO_TOKEN, of a readout that is not finite, is a third


def plain(stats: TokenStats, edit_ids: tuple[int, int]) -> Int[Array, "B K S"]:
    """The token of each cell, or the likeliest that is neither DELETE nor SPLIT: one of three."""
    token = stats.token
    for place in range(3):
        is_edit = functools.reduce(jnp.logical_or, (token == one for one in edit_ids))
        token = jnp.where(is_edit, stats.top_ids[..., place], token)
    return token


def repeats(text: Int[Array, "B K S"], written: Int[Array, "B K H S"]) -> Bool[Array, "B K"]:
    """Blocks whose text was written in an earlier forward."""
    return jnp.any(jnp.all(text[:, :, None] == written, axis=3), axis=2)


def remember(
    written: Int[Array, "B K H S"],
    text: Int[Array, "B K S"],
    step: Int[Array, "B K"],
    where: Bool[Array, "B K"],
) -> Int[Array, "B K H S"]:
    """The texts with that of forward `step`, if there is room, of the blocks `where`."""
    number = jnp.arange(written.shape[2])[None, None]
    now = (number == step[:, :, None]) & where[:, :, None]
    return jnp.where(now[..., None], text[:, :, None], written)


def escape(
    text: Int[Array, "B K S"],
    before: Int[Array, "B K S"],
    stats: TokenStats,
    where: Bool[Array, "B K"],
) -> Int[Array, "B K S"]:
    """In blocks `where` the least sure changed cell takes its likeliest other id, of the first two.

    The release takes any changed cell, at random; of equals this takes the first.
    """
    first, second = stats.top_ids[..., 0], stats.top_ids[..., 1]
    one = where.astype(jnp.int32)
    least = sampling.top_n(-stats.confidence, one, text != before)
    return jnp.where(least, jnp.where(text == first, second, first), text)


def consume(
    text: Int[Array, "B K S"],
    before: Int[Array, "B K S"],
    marked: Bool[Array, "B K S"],
    where: Bool[Array, "B K S"],
    edit_ids: tuple[int, int],
) -> tuple[Int[Array, "B K S"], Bool[Array, "B K S"]]:
    """Each block's text without the ids DELETE and SPLIT, at its own length.

    DELETE gives nothing, SPLIT a hole and what its cell held `before`, any other id itself. What is
    past the block's end is lost; holes fill up a shorter text.

    Args:
        marked: Of cells, and moves with them; new holes are not.
        where: Cells in which DELETE and SPLIT are edits. Others do not move if none of these stands
            before them.
        edit_ids: DELETE and SPLIT.
    """
    S, (delete, split) = text.shape[2], edit_ids
    is_split = where & (text == split)
    length = jnp.where(where & (text == delete), 0, jnp.where(is_split, 2, 1))
    end = jnp.cumsum(length, axis=2)
    place = jnp.arange(S)[None, None]
    # The cell that a place is filled from: the first that ends after it.
    source = jnp.sum(end[:, :, None] <= place[..., None], axis=3)
    cell = jnp.minimum(source, S - 1)

    def moved(leaf: Array) -> Array:
        return jnp.take_along_axis(leaf, cell, axis=2)

    from_split = moved(is_split)
    is_new = (source == S) | (from_split & (moved(end - length) == place))
    kept = jnp.where(from_split, moved(before), moved(text))
    return jnp.where(is_new, HOLE, kept), moved(marked) & ~is_new
