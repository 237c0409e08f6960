"""The mask of paged attention: which keys each row of a window sees, in a form for kernels."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int


class Rules(NamedTuple):
    """What is known of a mask while tracing; see `WindowMask`.

    Attributes:
        orders: Blocks of a sequence differ in order, a bit each.
    """

    block_size: int
    window: int | None
    by_block: bool
    orders: bool


class WindowMask(struct.PyTreeNode):
    """Which keys each row sees, in a form small enough to pass to a kernel.

    Attributes:
        cell: Window cell of each computed row; its block is `cell // block_size`. The cells of a
            sequence follow one another.
        start: Absolute position of cell 0.
        live: First and one past the last live cell, [B 2]; other cells neither see nor are seen.
        context_len: Cached keys seen, counted from position 0.
        visible: Whether row block q sees key block k; leading axis B or 1. None: the blocks up to
            its own.
        causal: Rows in token order as well; [B K] says it of the rows of a block.
        block_size: Cells of a block.
        window: Keys of all kinds are seen only where they are fewer than so many positions away,
            before or behind; None: at any distance.
        by_block: Rows that are not in token order count the window from the first cell of their
            block, and see all of their block.
        context_is_before: Cached keys end where cell 0 begins, or before: what is known of a
            default `context_len` while tracing.
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

    @property
    def rules(self) -> Rules:
        """What is known while tracing."""
        return Rules(self.block_size, self.window, self.by_block, self.causal.ndim > 1)

    def rows_live(self) -> Bool[Array, "B T"]:
        """Which computed rows are live."""
        return (self.cell >= self.live[:, :1]) & (self.cell < self.live[:, 1:])

    def rows_in_order(self) -> Bool[Array, "B T 1"]:
        """Which computed rows are in token order; [B 1 1] where those of a sequence are alike."""
        if self.causal.ndim == 1:
            return self.causal[:, None, None]
        block = jnp.clip(self.cell // self.block_size, 0, self.causal.shape[1] - 1)
        return jnp.take_along_axis(self.causal, block, axis=1)[:, :, None]

    def sees_context(self, length: int) -> Bool[Array, "B T L"]:
        """Whether row i sees cached position j.

        A position that is both cached and live is seen fresh, not cached; in token order a row
        sees no cached position behind its own.
        """
        j = jnp.arange(length)[None, None, :]
        edges = (self.start[:, None] + self.live)[:, :, None, None]
        refreshed = (j >= edges[:, 0]) & (j < edges[:, 1])
        cached = (j < self.context_len[:, None, None]) & ~refreshed
        position = (self.start[:, None] + self.cell)[:, :, None]
        in_order = ~self.rows_in_order() | (j <= position)
        near = self._is_near(j - position)
        return cached & in_order & near & self.rows_live()[:, :, None]

    def sees_fresh(self) -> Bool[Array, "B T T"]:
        """Whether row i sees the fresh key of row j."""
        live = self.rows_live()
        block = self.cell // self.block_size
        if self.visible is None:
            pairs = block[:, None, :] <= block[:, :, None]
        else:
            block = jnp.clip(block, 0, self.visible.shape[1] - 1)
            visible = jnp.broadcast_to(self.visible, (len(block), *self.visible.shape[1:]))
            rows = jnp.take_along_axis(visible, block[:, :, None], axis=1)
            pairs = jnp.take_along_axis(rows, block[:, None, :], axis=2)
        ahead = self.cell[:, None, :] - self.cell[:, :, None]
        in_order = ~self.rows_in_order() | (ahead <= 0)
        return pairs & in_order & self._is_near(ahead) & live[:, :, None] & live[:, None, :]

    def _is_near(self, ahead: Int[Array, "B T U"]) -> Bool[Array, "B T U"]:
        """Whether keys so many positions ahead of each row are within its window."""
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

    They are all pages where the context may reach behind cell 0, or nothing limits how far back a
    row sees. Else they hold the `window - 1` positions before cell 0.
    """
    if mask.window is None or not (mask.by_block and mask.context_is_before):
        return mask, page_table
    reach = mask.window - 1
    most = max((reach - 2) // page_size + 2, 1)  # pages that so many positions can touch
    if most >= page_table.shape[1]:
        return mask, page_table
    first = jnp.maximum(mask.start - reach, 0) // page_size
    places = first[:, None] + jnp.arange(most, dtype=jnp.int32)[None]
    near = jnp.take_along_axis(page_table, places, axis=1, mode="fill", fill_value=-1)
    skipped = first * page_size
    start, context_len = mask.start - skipped, mask.context_len - skipped
    return mask.replace(start=start, context_len=context_len), near


def sees(mask: WindowMask, page_table: Int[Array, "B C"], page_size: int) -> Bool[Array, "B T U"]:
    """The whole mask over gathered context, then fresh keys."""
    context = mask.sees_context(page_table.shape[1] * page_size)
    present = jnp.repeat(page_table >= 0, page_size, axis=1)[:, None, :]
    return jnp.concatenate([context & present, mask.sees_fresh()], axis=-1)


def facts(mask: WindowMask, page_table: Array, page_size: int) -> Int[Array, "B 8"]:
    """What a kernel reads of each sequence, the longest first; the same in every layer of a step.

    Start, live range, context, the part of it that every row sees, token order (where blocks differ
    in it, a bit each), first cell, and which sequence it is. Programs begin in the order of a grid,
    and where contexts differ, all would wait for a long one that began last.
    """
    # Up to the first page that is missing, the end of the context or the first position that is
    # seen fresh, whichever comes first, a cached key is seen by every live row.
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
    """The order of the values: a sort as two sums, which is cheaper on a GPU."""
    place = jnp.arange(len(length), dtype=jnp.int32)
    tie = (length[None] == length[:, None]) & (place[None] < place[:, None])
    rank = jnp.sum((length[None] > length[:, None]) | tie, axis=1, dtype=jnp.int32)
    is_at = rank[None] == place[:, None]
    return jnp.sum(jnp.where(is_at, place[None], 0), axis=1, dtype=jnp.int32)
