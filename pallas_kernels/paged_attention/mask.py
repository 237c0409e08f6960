"""The mask of paged attention: which keys each row of a window sees, in a form for kernels."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

TILE = 128  # positions; kernels' tiles of keys divide it
_HALF = 64


class Rules(NamedTuple):
    """The static facts of a mask; see `WindowMask`.

    Attributes:
        orders: The blocks of a sequence differ in token order, stored as one bit a block.
    """

    block_size: int
    window: int | None
    by_block: bool
    orders: bool
    keys_from_0: bool


class WindowMask(struct.PyTreeNode):
    """The keys that each row sees, in a form small enough to pass to a kernel.

    Attributes:
        cell: Window cell of each computed row; its block is `cell // block_size`. The cells of a
            sequence follow one another.
        start: Absolute position of cell 0.
        live: First live cell and one past the last, [B 2]; other cells neither see nor are seen.
        context_len: Cached keys seen, counted from position 0.
        visible: Whether row block q sees key block k; leading axis B or 1. None: the blocks up to
            its own.
        causal: Whether rows also see no key of a later token; [B K]: one value for each block.
        block_size: Cells of a block.
        window: A row sees keys only at a distance below this number of positions, in either
            direction; None: at any distance.
        by_block: Rows that are not in token order count the window from the first cell of their
            block, and see all of their block.
        context_is_before: Cached keys end at or before the position of cell 0. A static fact, true
            for the default `context_len`.
        keys_from_0: Fresh keys are those of the cells from 0 on, of any number (`whole_tile`);
            otherwise those of the computed rows.
    """

    cell: Int[Array, "B T"]
    start: Int[Array, " B"]
    live: Int[Array, "B 2"]
    context_len: Int[Array, " B"]
    visible: Bool[Array, "B K K"] | None
    causal: Bool[Array, " B"] | Bool[Array, "B K"]
    block_size: int = struct.field(pytree_node=False)
    window: int | None = struct.field(pytree_node=False, default=None)
    by_block: bool = struct.field(pytree_node=False, default=False)
    context_is_before: bool = struct.field(pytree_node=False, default=False)
    keys_from_0: bool = struct.field(pytree_node=False, default=False)

    @property
    def rules(self) -> Rules:
        """The static facts of the mask."""
        orders = self.causal.ndim > 1
        return Rules(self.block_size, self.window, self.by_block, orders, self.keys_from_0)

    def rows_live(self) -> Bool[Array, "B T"]:
        """Which computed rows are live."""
        return (self.cell >= self.live[:, :1]) & (self.cell < self.live[:, 1:])

    def rows_in_order(self) -> Bool[Array, "B T 1"]:
        """Which computed rows are in token order; [B 1 1] if it is one value a sequence."""
        if self.causal.ndim == 1:
            return self.causal[:, None, None]
        block = jnp.clip(self.cell // self.block_size, 0, self.causal.shape[1] - 1)
        return jnp.take_along_axis(self.causal, block, axis=1)[:, :, None]

    def sees_context(self, length: int) -> Bool[Array, "B T L"]:
        """Whether row i sees cached position j.

        A position that is both cached and live is read as a fresh key. In token order a row sees
        no cached position after its own.
        """
        j = jnp.arange(length)[None, None, :]
        edges = (self.start[:, None] + self.live)[:, :, None, None]
        refreshed = (j >= edges[:, 0]) & (j < edges[:, 1])
        cached = (j < self.context_len[:, None, None]) & ~refreshed
        position = (self.start[:, None] + self.cell)[:, :, None]
        in_order = ~self.rows_in_order() | (j <= position)
        near = self._is_near(j - position)
        return cached & in_order & near & self.rows_live()[:, :, None]

    def sees_fresh(self, num_keys: int) -> Bool[Array, "B T U"]:
        """Whether row i sees fresh key j."""
        keys = self.replace(cell=jnp.arange(num_keys)[None]) if self.keys_from_0 else self
        block, theirs = self.cell // self.block_size, keys.cell // self.block_size
        if self.visible is None:
            pairs = theirs[:, None, :] <= block[:, :, None]
        else:
            block, theirs = (jnp.clip(x, 0, self.visible.shape[1] - 1) for x in (block, theirs))
            visible = jnp.broadcast_to(self.visible, (len(block), *self.visible.shape[1:]))
            rows = jnp.take_along_axis(visible, block[:, :, None], axis=1)
            pairs = jnp.take_along_axis(rows, theirs[:, None, :], axis=2)
        ahead = keys.cell[:, None, :] - self.cell[:, :, None]
        in_order = ~self.rows_in_order() | (ahead <= 0)
        live = self.rows_live()[:, :, None] & keys.rows_live()[:, None, :]
        return pairs & in_order & self._is_near(ahead) & live

    def _is_near(self, ahead: Int[Array, "B T U"]) -> Bool[Array, "B T U"]:
        """Whether keys that are `ahead` positions after each row lie within its window."""
        if self.window is None:
            return jnp.ones_like(ahead, dtype=bool)
        near = jnp.abs(ahead) < self.window
        if not self.by_block:
            return near
        of_block = ahead + (self.cell % self.block_size)[:, :, None]
        return jnp.where(self.rows_in_order(), near, of_block > -self.window)


def within_reach(
    mask: WindowMask, page_table: Int[Array, "B C"], page_size: int
) -> tuple[WindowMask, Int[Array, "B D"]]:
    """The pages that some row may see, and the mask with positions counted from the first of them.

    With `window`, `by_block` and `context_is_before`, these pages hold the `window - 1` positions
    before cell 0. Otherwise they are all pages.
    """
    if mask.window is None or not (mask.by_block and mask.context_is_before):
        return mask, page_table
    reach = mask.window - 1
    most = max((reach - 2) // page_size + 2, 1)  # pages that these positions can touch
    if most >= page_table.shape[1]:
        return mask, page_table
    first = jnp.maximum(mask.start - reach, 0) // page_size
    places = first[:, None] + jnp.arange(most, dtype=jnp.int32)[None]
    near = jnp.take_along_axis(page_table, places, axis=1, mode="fill", fill_value=-1)
    skipped = first * page_size
    start, context_len = mask.start - skipped, mask.context_len - skipped
    return mask.replace(start=start, context_len=context_len), near


def whole_tile(
    k: Float[Array, "B T G H"],
    v: Float[Array, "B T G H"],
    k_pages: Float[Array, "P G Z H"],
    v_pages: Float[Array, "P G Z H"],
    page_table: Int[Array, "B C"],
    mask: WindowMask,
) -> tuple[Float[Array, "B U G H"], Float[Array, "B U G H"], WindowMask]:
    """Fresh keys and values from the last multiple of `TILE` positions on, cached ones first.

    Kernels divide keys into tiles from there, so a row has the same keys in a tile wherever its
    window begins. Cell 0 is then at that multiple. For windows whose first cell is live.
    """
    T, Z, C = k.shape[1], k_pages.shape[2], page_table.shape[1]
    before = mask.start % TILE
    begin = mask.start - before
    cell = jnp.arange(TILE + -(-T // _HALF) * _HALF, dtype=jnp.int32)[None]
    position = begin[:, None] + cell
    page = jnp.take_along_axis(page_table, jnp.minimum(position // Z, C - 1), axis=1)
    is_cached = (cell < before[:, None])[..., None, None]
    own = jnp.clip(cell - before[:, None], 0, T - 1)[..., None, None]

    def joined(fresh: Array, pages: Array) -> Array:
        cached = pages.at[jnp.maximum(page, 0), :, position % Z].get(mode="clip")
        return jnp.where(is_cached, cached, jnp.take_along_axis(fresh, own, axis=1))

    first, end = mask.live[:, 0], mask.live[:, 1]
    end = jnp.where(first < end, before + end, 0)
    mask = mask.replace(
        cell=before[:, None] + mask.cell,
        start=begin,
        live=jnp.stack([jnp.zeros_like(end), end], axis=1),
        context_len=jnp.minimum(mask.context_len, begin),
        keys_from_0=True,
    )
    return joined(k, k_pages), joined(v, v_pages), mask


def sees(
    mask: WindowMask, page_table: Int[Array, "B C"], page_size: int, num_keys: int
) -> Bool[Array, "B T U"]:
    """The full mask over the gathered context, then fresh keys."""
    context = mask.sees_context(page_table.shape[1] * page_size)
    present = jnp.repeat(page_table >= 0, page_size, axis=1)[:, None, :]
    return jnp.concatenate([context & present, mask.sees_fresh(num_keys)], axis=-1)


def facts(mask: WindowMask, page_table: Array, page_size: int) -> Int[Array, "B 8"]:
    """The numbers that kernels read of each sequence; the same in every layer of a step.

    Columns: start, live range (two), context length, length of the context that every row sees,
    token order (one bit a block if blocks differ), first cell, index of the sequence. Sequences
    are sorted, the longest first: programs start in grid order, and a launch would wait for a long
    sequence that started last.
    """
    # Every live row sees the cached keys up to the first missing page, the end of the context or
    # the first fresh position, whichever comes first.
    there = jnp.cumprod((page_table >= 0).astype(jnp.int32), axis=1)
    mapped = jnp.sum(there, axis=1, dtype=jnp.int32) * page_size
    context_len = jnp.minimum(mask.context_len, page_table.shape[1] * page_size)
    first, end = mask.live[:, 0], mask.live[:, 1]
    unmasked = jnp.minimum(jnp.minimum(context_len, mapped), mask.start + first)
    causal = mask.causal.astype(jnp.int32)
    if mask.rules.orders:
        place = jnp.arange(causal.shape[1], dtype=jnp.int32)
        causal = jnp.sum(causal << place[None], axis=1, dtype=jnp.int32)
    columns = [mask.start, first, end, context_len, unmasked, causal, mask.cell[:, 0]]
    columns += [jnp.arange(len(first), dtype=jnp.int32)]
    spans = jnp.stack(columns, axis=1)
    if len(first) == 1:
        return spans
    order = _longest_first(jnp.where(first < end, context_len, -1))
    return spans.at[order].get(mode="promise_in_bounds")


def _longest_first(length: Int[Array, " B"]) -> Int[Array, " B"]:
    """Indices that sort the values, longest first, by two sums: cheaper than a sort on a GPU."""
    place = jnp.arange(len(length), dtype=jnp.int32)
    tie = (length[None] == length[:, None]) & (place[None] < place[:, None])
    rank = jnp.sum((length[None] > length[:, None]) | tie, axis=1, dtype=jnp.int32)
    is_at = rank[None] == place[:, None]
    return jnp.sum(jnp.where(is_at, place[None], 0), axis=1, dtype=jnp.int32)
