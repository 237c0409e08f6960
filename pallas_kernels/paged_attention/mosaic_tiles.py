"""The tiles of keys that a thread block of the Mosaic kernel reads, before any is loaded."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..hopper import whole
from .mask import Rules

ROWS = 64  # rows of a warpgroup's product
LINES = 8  # rows of a swizzle tile
FAR = 1 << 29  # beyond every position


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """What the warpgroups of a thread block share: references and static settings."""

    q: Any
    fresh: tuple[Any, Any]  # keys and values of the window
    pools: tuple[Any, Any]  # cached keys and values by page
    table: Any
    numbers: Any  # see `mask.facts`
    bits: Any  # which blocks each block sees, as bits; None: those up to its own
    kv_scales: Any  # None: keys of 16 bits
    results: Sequence[Any]
    scratch: dict[str, Any]
    rules: Rules
    scale: float
    tiling: Any  # a `mosaic_tiling.Tiling`
    chunk: int  # tokens of a unit of rows

    @property
    def heads(self) -> int:
        """Query heads that share a KV head."""
        return self.q.shape[2] // self.pools[0].shape[1]

    @property
    def num_fresh(self) -> int:
        """Fresh keys of a sequence."""
        return self.fresh[0].shape[1]

    @property
    def units(self) -> int:
        """Units of a warpgroup's rows; unit u is tokens [u // n * chunk, + chunk) of head u % n."""
        return ROWS // self.chunk

    @property
    def is_8_bit(self) -> bool:
        """Whether keys and values have 8 bits."""
        return "q_8" in self.scratch

    @property
    def is_interpreted(self) -> bool:
        """Whether the interpreter runs this, see `mosaic.attention`."""
        return "weights" in self.scratch


class Facts(NamedTuple):
    """The numbers of a sequence, see `mask.facts`."""

    start: Array
    first: Array
    end: Array
    context_len: Array
    unmasked: Array
    causal: Array
    cell_0: Array
    b: Array


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one thread block; all numbers are int32."""

    facts: Facts
    sequence: Array  # sequence and KV head as one number
    g: Array  # KV head
    split: Array  # index of the share of the keys
    is_whole: Array | None  # the block reads all keys of its rows; None if no block does
    is_spare: Array | None  # idle, because another cluster has its rows; None as above
    unit_0: Array  # first unit of rows of the block
    units: int  # of the sequence
    is_used: Array  # some row is live
    cached_tiles: Array  # of the context that rows see; those of the window's fresh keys follow
    skipped: Array  # index of the first cached tile
    fresh_first: Array  # first tile of the fresh keys
    low: Array  # this block's share of the list of tiles begins
    high: Array  # and ends
    # Tiles of keys that passed through the ring for earlier rows; None unless the block is resident
    before: Array | None
    # Bounds of the cached tiles: their start, the range that every row sees without a mask, their
    # end; then of the fresh tiles, with those that every row sees first.
    cached: tuple[Array, Array, Array, Array]
    fresh: tuple[Array, Array, Array]


def work_of(block: Block, place: tuple[Array, Array, Array], before: Array | None = None) -> Work:
    """The work of a thread block.

    Args:
        place: Sequence and KV head as one number, share of the keys, tile of rows.
        before: As in `Work`.
    """
    (_, T, _, _), G, n = block.q.shape, block.pools[0].shape[1], block.heads
    sequence, split, tile = place
    slot, g = jax.lax.div(sequence, whole(G)), jax.lax.rem(sequence, whole(G))
    facts = Facts(*(block.numbers[slot, i] for i in range(8)))

    units = n * (whole_tiles(T) // block.chunk)
    per_block = block.tiling.row_groups * block.units
    is_whole, is_spare = None, None
    if block.tiling.unsplit_keys:
        of_head = -(-units // per_block)
        is_whole, is_spare, split, g, tile = _unsplit(block, facts, split, g, tile, of_head)
    unit_0 = tile * per_block
    unit_1 = jnp.minimum(unit_0 + per_block, units) - 1
    least_cell = facts.cell_0 + jax.lax.div(unit_0, whole(n)) * block.chunk
    most_cell = facts.cell_0 + jax.lax.div(unit_1, whole(n)) * block.chunk + (block.chunk - 1)

    # The list of key tiles: those of the context, then those of the window.
    live = jnp.maximum(least_cell, facts.first), jnp.minimum(most_cell, facts.end - 1)
    is_used = live[0] <= live[1]
    if is_spare is not None:
        is_used &= ~is_spare
    cached_tiles, skipped, near = _cached_tiles(block, facts, live, is_used)
    fresh_tiles, fresh_first = _fresh_tiles(block, facts, live[1], is_used)
    tiles = cached_tiles + fresh_tiles
    share = _ceil_div(tiles, block.tiling.splits)
    share = share if is_whole is None else jnp.where(is_whole, tiles, share)
    low = jnp.minimum(split * share, tiles)
    high = jnp.minimum(low + share, tiles)
    cached_high = jnp.minimum(high, cached_tiles)
    cached_low = jnp.minimum(low, cached_high)
    fresh_low, fresh_high = jnp.maximum(low, cached_tiles), jnp.maximum(high, cached_tiles)
    fresh_middle = fresh_low
    # Fresh keys that every row sees come first, in a loop without a mask. For a single tile this
    # loop would not repay its compilation time.
    if block.bits is None and block.tiling.keys < block.num_fresh:
        plain = _plain_fresh_tiles(block, facts, live[0], fresh_first, near)
        fresh_middle = jnp.clip(cached_tiles + plain, fresh_low, fresh_high)
    plain_low = cached_low
    if block.rules.window is not None:
        plain_low = _ceil_div(jnp.maximum(facts.start + near, 0), block.tiling.keys) - skipped
        plain_low = jnp.clip(plain_low, cached_low, cached_high)
    plain_high = jax.lax.div(facts.unmasked, whole(block.tiling.keys)) - skipped
    plain_high = jnp.clip(plain_high, plain_low, cached_high)
    return Work(
        facts=facts,
        sequence=facts.b * G + g,
        g=g,
        split=split,
        is_whole=is_whole,
        is_spare=is_spare,
        unit_0=unit_0,
        units=units,
        is_used=is_used,
        cached_tiles=cached_tiles,
        skipped=skipped,
        fresh_first=fresh_first,
        low=low,
        high=high,
        before=before,
        cached=(cached_low, plain_low, plain_high, cached_high),
        fresh=(fresh_low, fresh_middle, fresh_high),
    )


def _unsplit(block, facts, split, g, tile, tiles):
    """Deal a row tile of `tiles` to the blocks of a cluster: `is_whole`, `is_spare` and the place.

    A cluster takes one row tile of a sequence, its blocks splitting the keys; or, for a short
    context, one row tile for each of its blocks. The clusters of these tiles are then idle.
    """
    item = g * tiles + tile
    is_whole = facts.context_len <= block.tiling.unsplit_keys
    is_spare = is_whole & (jax.lax.rem(item, whole(block.tiling.splits)) != 0)
    item = jnp.where(is_whole, item + split, item)
    split = jnp.where(is_whole, 0, split)
    g, tile = jax.lax.div(item, whole(tiles)), jax.lax.rem(item, whole(tiles))
    return is_whole, is_spare, split, g, tile


def _cached_tiles(block, facts, live, is_used):
    """Tiles of the context that rows see, those before them, and a cell in every row's window."""
    rules, keys = block.rules, block.tiling.keys
    cached_tiles = jnp.where(is_used, _ceil_div(facts.context_len, keys), 0)
    skipped, near = whole(0), facts.cell_0 - FAR
    if rules.window is None:
        return cached_tiles, skipped, near
    near = window_cell(live[1], facts.causal, rules) - (rules.window - 1)
    from_cell = window_cell(live[0], facts.causal, rules)
    nearest = jnp.maximum(facts.start + from_cell - (rules.window - 1), 0)
    skipped = jnp.minimum(jax.lax.div(nearest, whole(keys)), cached_tiles)
    return cached_tiles - skipped, skipped, near


def _fresh_tiles(block, facts, last_live, is_used):
    """Number of the window's tiles that rows see, and the first of them."""
    keys, key_0 = block.tiling.keys, key_cell(block, facts)
    reach = _reach(block.rules, facts, last_live)
    reach = facts.end if block.bits is not None else reach
    reach = jnp.minimum(reach, key_0 + block.num_fresh) - key_0
    fresh_first = jax.lax.div(jnp.maximum(facts.first - key_0, 0), whole(keys))
    tiles = jnp.maximum(_ceil_div(reach, keys) - fresh_first, 0)
    return jnp.where(is_used, tiles, 0), fresh_first


def _plain_fresh_tiles(block, facts, first_live, fresh_first, near):
    """Number of the window's first tiles that every row sees."""
    keys, rules, key_0 = block.tiling.keys, block.rules, key_cell(block, facts)
    plain = _reach(rules, facts, first_live)
    if rules.window is not None and not rules.by_block:
        plain = jnp.minimum(plain, first_live + rules.window)
    plain = jnp.minimum(plain, key_0 + block.num_fresh) - key_0
    plain = jax.lax.div(plain, whole(keys)) - fresh_first
    is_seen = jnp.maximum(facts.first, near) <= key_0 + fresh_first * keys
    return jnp.where(is_seen, plain, 0)


def key_cell(block: Block, facts: Facts) -> Array:
    """The cell of the first fresh key."""
    return whole(0) if block.rules.keys_from_0 else facts.cell_0


def _reach(rules, facts, cell):
    """One past the last cell that a cell sees if it sees the blocks up to its own."""
    of_block = (jax.lax.div(cell, whole(rules.block_size)) + 1) * rules.block_size
    is_ordered = in_order(cell, facts.causal, rules) != 0
    return jnp.minimum(jnp.where(is_ordered, cell + 1, of_block), facts.end)


def in_order(cell, causal, rules):
    """1 where a cell's row is in token order, else 0."""
    if not rules.orders:
        return causal
    block = jax.lax.div(cell, whole(rules.block_size))
    return jax.lax.shift_right_logical(jnp.broadcast_to(causal, block.shape), block) & 1


def window_cell(cell, causal, rules):
    """The cell from which a row counts its window: its own or the first of its block."""
    if not rules.by_block:
        return cell
    behind = jax.lax.rem(cell, whole(rules.block_size))
    return cell - (1 - in_order(cell, causal, rules)) * behind


def page_of(block: Block, work: Work, j: Array) -> tuple[Array, Array]:
    """Page of cached position j, and the offset in the page."""
    Z, C = block.pools[0].shape[2], block.table.shape[1]
    column = jax.lax.div(j, whole(Z))
    page = jnp.where(column < C, block.table[work.facts.b, jnp.minimum(column, C - 1)], -1)
    return page, jax.lax.rem(j, whole(Z))


def slot_of(work, tiling, i):
    """Buffer of the ring that holds tile i."""
    return jax.lax.rem(order_of(work, i), whole(tiling.stages))


def order_of(work, i):
    """The number of tiles that pass through the ring before tile i."""
    order = i - work.low
    return order if work.before is None else order + work.before


def turns_of(work, warpgroup, from_, to):
    """First and number of the tiles in [from_, to) of one of two alternating warpgroups."""
    first = from_ + ((from_ - work.low + warpgroup) & 1)
    return first, jax.lax.div(to - first + 1, whole(2))


def whole_tiles(rows: int) -> int:
    """The number of rows in whole swizzle tiles."""
    return -(-rows // LINES) * LINES


def _ceil_div(a: Array, b: int) -> Array:
    return jax.lax.div(a + whole(b - 1), whole(b))
