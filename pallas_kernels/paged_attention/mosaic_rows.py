"""The rows of a computing warpgroup in the Mosaic form, and which keys they see."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ..hopper import whole
from .mosaic_tiles import FAR, ROWS, Block, Work, in_order, key_cell, page_of, window_cell

LAYOUT = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a computing warpgroup."""

    block: Block
    work: Work
    warpgroup: Array
    group: Array  # index of the rows among those of the block
    buffer: Array  # that holds the rows
    unit: Array  # the first
    columns: Any  # this warpgroup's share of the head, if two have the same rows and keys

    @property
    def staged(self) -> Any:
        """The rows in shared memory."""
        return self.block.scratch["rows"].at[self.buffer]

    @property
    def arrived(self) -> Any:
        """The barrier at which the rows arrive."""
        return self.block.scratch["rows_in"].at[self.buffer]

    @property
    def width(self) -> int:
        """Columns of the head that this warpgroup computes."""
        return self.block.q.shape[3] // (1 if self.columns is None else 2)

    def box(self, array: Any, i: int, columns: Any = None) -> Any:
        """Unit i in an array like the queries."""
        n, chunk = self.block.heads, self.block.chunk
        one = jnp.minimum(self.unit + i, self.work.units - 1)
        token = jax.lax.div(one, whole(n)) * chunk
        tokens = pl.ds(pl.multiple_of(token, chunk), chunk)
        box = self.work.facts.b, tokens, self.work.g * n + jax.lax.rem(one, whole(n))
        return array.at[*box, columns] if columns is not None else array.at[*box]

    def of_unit(self, ref: Any, i: int) -> Any:
        """Unit i in a buffer of rows."""
        chunk = self.block.chunk
        return ref.at[pl.ds(i * chunk, chunk)] if self.block.units > 1 else ref

    def load(self) -> None:
        """Ask for the rows."""
        for i in range(self.block.units):
            source = self.box(self.block.q, i)
            plgpu.copy_gmem_to_smem(source, self.of_unit(self.staged, i), self.arrived)


def rows_of(block: Block, work: Work, warpgroup: Array, turn: Array | None) -> Rows:
    """The rows of a warpgroup; `turn` as in `mosaic_kernel.compute`."""
    tiling, columns = block.tiling, None
    group = whole(0) if tiling.shares_keys or tiling.shares_rows else warpgroup
    if tiling.shares_rows:
        width = block.q.shape[3] // 2
        columns = pl.ds(pl.multiple_of(warpgroup * width, width), width)
    buffer = group if turn is None else group + (turn & 1) * tiling.row_groups
    unit = work.unit_0 + group * block.units
    own = {"warpgroup": warpgroup, "group": group, "columns": columns}
    return Rows(block=block, work=work, buffer=buffer, unit=unit, **own)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sight:
    """Which keys rows see."""

    rows: Rows
    cell: Array  # of each row
    window_from: Array  # cell from which a row counts its window
    last_cached: Array  # last cached position and last cell that each row sees
    last_fresh: Array
    bits: Array | None  # which blocks each row sees; None: those up to its own

    def cached(self, i: Array, shape: tuple[int, int]) -> Array:
        """Whether rows see the keys of a tile of the context."""
        block, work = self.rows.block, self.rows.work
        keys, window, facts = block.tiling.keys, block.rules.window, work.facts
        rows_of_part = min(keys, block.pools[0].shape[2])
        j_0 = (i + work.skipped) * keys
        j = _columns_from(j_0, shape)
        seen = (j < facts.context_len) & (j <= down(self.last_cached, shape))
        seen &= (j < facts.start + facts.first) | (j >= facts.start + facts.end)
        for part in range(keys // rows_of_part):
            hole = j_0 + part * rows_of_part
            page, _ = page_of(block, work, hole)
            seen &= (j < hole) | (j >= jnp.where(page >= 0, hole, hole + rows_of_part))
        if window is not None:
            seen &= j > down(facts.start + self.window_from - window, shape)
        return seen

    def fresh(self, i: Array, shape: tuple[int, int]) -> Array:
        """Whether rows see the keys of a tile of the window."""
        block, work = self.rows.block, self.rows.work
        rules, facts = block.rules, work.facts
        key_0 = key_cell(block, facts)
        first = key_0 + (i - work.cached_tiles + work.fresh_first) * block.tiling.keys
        theirs = _columns_from(first, shape)
        seen = theirs >= facts.first
        seen &= theirs < jnp.minimum(facts.end, key_0 + block.num_fresh)
        seen &= theirs <= down(self.last_fresh, shape)
        if self.bits is not None:
            theirs_in = jax.lax.div(theirs, whole(rules.block_size))
            theirs_in = jnp.minimum(theirs_in, block.bits.shape[1] - 1)
            bit = jax.lax.shift_right_logical(down(self.bits, shape), theirs_in) & 1
            seen &= bit != 0
        if rules.window is not None:
            seen &= theirs > down(self.window_from - rules.window, shape)
        return seen


def sight_of(rows: Rows) -> Sight:
    """For each row, its cell and the last keys that it sees."""
    block, rules, facts = rows.block, rows.block.rules, rows.work.facts
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=LAYOUT.reduce(1))
    chunk, unit = whole(block.chunk), jax.lax.div(row, whole(block.chunk)) + rows.unit
    token = jax.lax.div(unit, whole(block.heads)) * block.chunk + jax.lax.rem(row, chunk)
    cell = facts.cell_0 + token
    anywhere = (1 - in_order(cell, facts.causal, rules)) * FAR
    window_from = window_cell(cell, facts.causal, rules)
    last_cached = facts.start + cell + anywhere
    last_fresh = cell + anywhere
    bits = None
    if block.bits is not None:
        K = block.bits.shape[1]
        mine_in = jnp.minimum(jax.lax.div(cell, whole(rules.block_size)), K - 1)
        of_mask = jnp.minimum(facts.b, block.bits.shape[0] - 1)
        bits = jnp.zeros_like(mine_in)
        for block_row in range(K):
            bits = jnp.where(mine_in == block_row, block.bits[of_mask, block_row], bits)
    else:
        ends = (jax.lax.div(cell, whole(rules.block_size)) + 1) * rules.block_size - 1
        last_fresh = jnp.minimum(last_fresh, ends)
    if rules.window is not None and not rules.by_block:  # otherwise only token order is a limit
        last_cached = jnp.minimum(last_cached, facts.start + cell + (rules.window - 1))
        last_fresh = jnp.minimum(last_fresh, cell + (rules.window - 1))
    limits = {"last_cached": last_cached, "last_fresh": last_fresh, "bits": bits}
    return Sight(rows=rows, cell=cell, window_from=window_from, **limits)


def down(values: Array, shape: tuple[int, ...]) -> Array:
    """Repeat one value a row in all columns."""
    return jax.lax.broadcast_in_dim(values, shape, [0])


def _columns_from(first, shape):
    return first + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=LAYOUT)
