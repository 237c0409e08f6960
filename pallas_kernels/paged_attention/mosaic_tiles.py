"""The tiles of keys that a thread block of the Mosaic kernel reads, and their loads."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ..hopper.operands import BOX, turn

ROWS = 64  # rows of a warpgroup's product
LINES = 8  # rows of a swizzle tile
FAR = 1 << 29  # beyond every position


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one thread block; all numbers are int32.

    Attributes:
        sequence, b, g: Sequence and KV head as one number, and each of them.
        split: Index of the share of the keys.
        is_whole: The block reads all keys of its rows; None if no block does.
        is_spare: The block is idle, because another cluster has its rows; None as above.
        unit_0, units: First unit of rows of the block, and number of units of the sequence.
        start, first, end, context_len, causal, cell_0: See `mask.facts`.
        is_used: Some row is live.
        cached_tiles, skipped: Number of context tiles that rows see, and index of the first one.
            The tiles of the window's fresh keys follow.
        fresh_first: First tile of the fresh keys.
        low, high: This block's share of the list of tiles.
        before: Tiles of keys that passed through the ring for earlier rows; None unless the block
            is resident.
        cached: Bounds of the cached tiles: their start, the range that every row sees without a
            mask, their end.
        fresh: The same for the fresh tiles, with those that every row sees first.
    """

    sequence: Array
    b: Array
    g: Array
    split: Array
    is_whole: Array | None
    is_spare: Array | None
    unit_0: Array
    units: int
    start: Array
    first: Array
    end: Array
    context_len: Array
    causal: Array
    cell_0: Array
    is_used: Array
    cached_tiles: Array
    skipped: Array
    fresh_first: Array
    low: Array
    high: Array
    before: Array | None
    cached: tuple[Array, Array, Array, Array]
    fresh: tuple[Array, Array, Array]


def work_of(shape, pool, numbers, place, before=None, *, has_bits, rules, tiling, chunk) -> Work:
    """The work of one thread block, for queries of `shape` and keys of shape `pool`.

    Args:
        place: Sequence and KV head as one number, share of the keys, tile of rows.
        before: As in `Work`.
    """
    keys, splits = tiling.keys, tiling.splits
    block_size, window = rules.block_size, rules.window
    _, T, N, _ = shape
    G = pool[1]
    n = N // G
    sequence, split, block = place
    slot, g = jax.lax.div(sequence, whole(G)), jax.lax.rem(sequence, whole(G))
    facts = (numbers[slot, i] for i in range(8))
    start, first, end, context_len, unmasked, causal, cell_0, b = facts

    # Unit u is tokens [u // n * chunk, + chunk) of the group's head u % n.
    per_warpgroup = ROWS // chunk
    units = n * (whole_tiles(T) // chunk)
    per_block = tiling.row_groups * per_warpgroup
    is_whole, is_spare = None, None
    if tiling.unsplit_keys:
        # A cluster takes one row tile of a sequence, its blocks splitting the keys; or, for a short
        # context, one row tile for each of its blocks. The clusters of these tiles are then idle.
        blocks = -(-units // per_block)
        item = g * blocks + block
        is_whole = context_len <= tiling.unsplit_keys
        is_spare = is_whole & (jax.lax.rem(item, whole(splits)) != 0)
        item = jnp.where(is_whole, item + split, item)
        split = jnp.where(is_whole, 0, split)
        g, block = jax.lax.div(item, whole(blocks)), jax.lax.rem(item, whole(blocks))
    unit_0 = block * per_block
    unit_1 = jnp.minimum(unit_0 + per_block, units) - 1
    least_cell = cell_0 + jax.lax.div(unit_0, whole(n)) * chunk
    most_cell = cell_0 + jax.lax.div(unit_1, whole(n)) * chunk + (chunk - 1)

    # The list of key tiles: those of the context, then those of the window.
    first_live, last_live = jnp.maximum(least_cell, first), jnp.minimum(most_cell, end - 1)
    is_used = first_live <= last_live
    if is_spare is not None:
        is_used &= ~is_spare
    cached_tiles = jnp.where(is_used, _ceil_div(context_len, keys), 0)
    skipped = whole(0)  # tiles of the context that end before any row's window
    near = cell_0 - FAR  # the first cell that is in every row's window
    if window is not None:
        near = window_cell(last_live, causal, rules) - (window - 1)
        from_cell = window_cell(first_live, causal, rules)
        nearest = jnp.maximum(start + from_cell - (window - 1), 0)
        skipped = jnp.minimum(jax.lax.div(nearest, whole(keys)), cached_tiles)
        cached_tiles -= skipped
    in_block = (jax.lax.div(last_live, whole(block_size)) + 1) * block_size
    reach = jnp.minimum(
        jnp.where(in_order(last_live, causal, rules) != 0, last_live + 1, in_block), end
    )
    reach = jnp.minimum(end if has_bits else reach, cell_0 + T) - cell_0
    fresh_first = jax.lax.div(jnp.maximum(first - cell_0, 0), whole(keys))
    fresh_tiles = jnp.where(is_used, jnp.maximum(_ceil_div(reach, keys) - fresh_first, 0), 0)
    tiles = cached_tiles + fresh_tiles
    share = _ceil_div(tiles, splits)
    share = share if is_whole is None else jnp.where(is_whole, tiles, share)
    low = jnp.minimum(split * share, tiles)
    high = jnp.minimum(low + share, tiles)
    cached_high = jnp.minimum(high, cached_tiles)
    cached_low = jnp.minimum(low, cached_high)
    fresh_low, fresh_high = jnp.maximum(low, cached_tiles), jnp.maximum(high, cached_tiles)
    # Fresh keys that every row sees come first, in a loop without a mask. For a single tile this
    # loop would not repay its compilation time.
    if not has_bits and keys < T:
        in_block = (jax.lax.div(first_live, whole(block_size)) + 1) * block_size
        plain = jnp.minimum(
            jnp.where(in_order(first_live, causal, rules) != 0, first_live + 1, in_block), end
        )
        if window is not None and not rules.by_block:
            plain = jnp.minimum(plain, first_live + window)
        plain = jnp.minimum(plain, cell_0 + T) - cell_0
        plain = jax.lax.div(plain, whole(keys)) - fresh_first
        plain = jnp.where(jnp.maximum(first, near) <= cell_0 + fresh_first * keys, plain, 0)
        fresh_middle = jnp.clip(cached_tiles + plain, fresh_low, fresh_high)
    else:
        fresh_middle = fresh_low
    plain_low = cached_low
    if window is not None:
        plain_low = _ceil_div(jnp.maximum(start + near, 0), keys) - skipped
        plain_low = jnp.clip(plain_low, cached_low, cached_high)
    plain_high = jax.lax.div(unmasked, whole(keys)) - skipped
    plain_high = jnp.clip(plain_high, plain_low, cached_high)
    return Work(
        sequence=b * G + g,
        b=b,
        g=g,
        split=split,
        is_whole=is_whole,
        is_spare=is_spare,
        unit_0=unit_0,
        units=units,
        start=start,
        first=first,
        end=end,
        context_len=context_len,
        causal=causal,
        cell_0=cell_0,
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


def page_of(work, table, page_size, j):
    """Page of cached position j, and the offset in the page."""
    C = table.shape[1]
    column = jax.lax.div(j, whole(page_size))
    page = jnp.where(column < C, table[work.b, jnp.minimum(column, C - 1)], -1)
    return page, jax.lax.rem(j, whole(page_size))


def slot_of(work, tiling, i):
    """Buffer of the ring that holds tile i."""
    return jax.lax.rem(_order_of(work, i), whole(tiling.stages))


def _order_of(work, i):
    """The number of tiles that pass through the ring before tile i."""
    order = i - work.low
    return order if work.before is None else order + work.before


def turns_of(work, warpgroup, from_, to):
    """First and number of the tiles in [from_, to) of one of two alternating warpgroups."""
    first = from_ + ((from_ - work.low + warpgroup) & 1)
    return first, jax.lax.div(to - first + 1, whole(2))


def load(work, fresh_keys, pools, table, scratch, tiling):
    """Load the tiles of this work in order, as the loading warpgroup; `drain` must follow."""
    keys, stages = tiling.keys, tiling.stages
    T, Z = whole_tiles(fresh_keys[0].shape[1]), pools[0].shape[2]
    is_8_bit = "q_8" in scratch

    def wait_until(name, slot, order):
        """Wait until the previous contents of a buffer have been used."""

        @pl.when(order >= stages)
        def _():
            plgpu.barrier_wait(scratch[name].at[slot])

    def fill(buffer, arrived, sources):
        """Load keys or values box by box."""
        size = keys // len(sources)
        for place, source in enumerate(sources):
            part = buffer if size == keys else buffer.at[pl.ds(place * size, size)]
            plgpu.copy_gmem_to_smem(source, part, arrived)
        for _spare in range(loads_of(keys, T, Z) - len(sources)):  # the barrier counts loads
            plgpu.barrier_arrive(arrived)

    def cached(i):
        """The boxes of a cached tile: whole pages, or some tokens of a larger page."""
        j = (i + work.skipped) * keys
        found = [page_of(work, table, Z, j + at) for at in range(0, keys, min(keys, Z))]
        tokens = pl.ds(0, Z)
        if keys < Z:
            tokens = pl.ds(pl.multiple_of(found[0][1], keys), keys)
        return [(jnp.maximum(page, 0), work.g) for page, _ in found], tokens

    def fresh(i, box):
        token = (i - work.cached_tiles + work.fresh_first) * keys
        # Copies of the last box fill the tile past the last key: the product needs whole tiles of
        # finite values, and the mask hides the copies.
        tokens = [jnp.minimum(token + at, T - box) for at in range(0, keys, box)]
        tokens = [pl.ds(pl.multiple_of(one, box), box) for one in tokens]
        return [(work.b, one, work.g) for one in tokens]

    def bring_values(i, is_cached, buffer, arrived):
        """Load 8-bit values, whose tokens are adjacent, page by page."""
        parts = keys // min(keys, Z)
        if is_cached:
            places, tokens = cached(i)
            for part, place in enumerate(places):
                plgpu.copy_gmem_to_smem(pools[1].at[*place, :, tokens], buffer.at[part], arrived)
            return
        boxes = [fresh_keys[1].at[place] for place in fresh(i, BOX)]
        each = len(boxes) // parts
        for part in range(parts):
            turn(boxes[part * each :][:each], buffer.at[part], "weights" in scratch)
        plgpu.commit_smem()
        for _part in range(parts):
            plgpu.barrier_arrive(arrived)

    def bring(i, _, is_cached):
        slot, order = slot_of(work, tiling, i), _order_of(work, i)
        if not tiling.shares_rows:
            wait_until("used", slot, order)
        pair = pools if is_cached else fresh_keys
        for array, name, used in zip(pair, "kv", ("k_used", "used"), strict=True):
            if tiling.shares_rows:
                wait_until(used, slot, order)
            ring, arrived = scratch[f"{name}_ring"].at[slot], scratch[f"{name}_in"].at[slot]
            if is_8_bit and name == "v":
                bring_values(i, is_cached, ring, arrived)
            elif is_cached:
                places, tokens = cached(i)
                fill(ring, arrived, [array.at[*place, tokens] for place in places])
            else:
                fill(ring, arrived, [array.at[place] for place in fresh(i, math.gcd(T, keys))])

    for span, is_cached in ((work.cached, True), (work.fresh, False)):
        jax.lax.fori_loop(span[0], span[-1], functools.partial(bring, is_cached=is_cached), None)


def loads_of(keys, rows, page_size) -> int:
    """Arrivals at the barrier of a tile: the number of smallest boxes in `keys`."""
    return keys // min(keys, page_size, math.gcd(rows, keys))


def drain(low, high, scratch, tiling):
    """Wait until the last tiles of [low, high) are used; a thread block must not end earlier."""

    def wait(i, _, name):
        plgpu.barrier_wait(scratch[name].at[jax.lax.rem(i - low, whole(tiling.stages))])

    for name in ("used", "k_used"):
        if name in scratch:
            body = functools.partial(wait, name=name)
            jax.lax.fori_loop(jnp.maximum(high - tiling.stages, low), high, body, None)


def whole_tiles(rows: int) -> int:
    """The number of rows in whole swizzle tiles."""
    return -(-rows // LINES) * LINES


def whole(x) -> Array:
    """Convert a number to int32, the type of all integers of the kernel."""
    return jnp.asarray(x, jnp.int32)


def _ceil_div(a: Array, b: int) -> Array:
    return jax.lax.div(a + jnp.asarray(b - 1, jnp.int32), jnp.asarray(b, jnp.int32))
