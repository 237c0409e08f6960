"""Which tiles of keys a thread block of the Mosaic kernel reads, and how it loads them."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .. import hopper

ROWS = 64  # of a warpgroup's product


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one thread block; all numbers are int32.

    Attributes:
        sequence: Sequence and KV head, and `b` and `g`, what they are alone.
        split: Which share of the keys.
        is_whole: All keys of the rows are this block's; None where that never is.
        is_spare: The block has nothing to do: another cluster has its rows; None as above.
        unit_0, units: Its first unit of rows, and how many the sequence has.
        start, first, end, context_len, causal, cell_0: See `mask.facts`.
        is_used: A row is live.
        cached_tiles, skipped: Tiles of the context from `skipped` on, then come the window's own.
        fresh_first: First of the window's own.
        low, high: Its share of them all.
        before: Tiles of keys that went through the ring for earlier rows; None where rows do not
            take turns.
        cached: Where the cached ones begin, where rows begin to differ, where they end.
        fresh: The same of the window's own, those that every row sees first.
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
    cached: tuple[Array, Array, Array]
    fresh: tuple[Array, Array, Array]


def work_of(shape, pool, numbers, place, before=None, *, has_bits, rules, tiling, chunk) -> Work:
    """The work of one thread block; `shape` of the queries and `pool` of the keys.

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
    units = n * (T // chunk)
    per_block = tiling.row_groups * per_warpgroup
    is_whole, is_spare = None, None
    if tiling.unsplit_keys:
        # Of a sequence's tiles of rows, a cluster takes one, or as many as it has blocks, one each;
        # then the clusters that would have had the others have nothing to do.
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

    # The list of tiles of keys, as the Triton form has it: the context's, then the window's.
    first_live, last_live = jnp.maximum(least_cell, first), jnp.minimum(most_cell, end - 1)
    is_used = first_live <= last_live
    if is_spare is not None:
        is_used &= ~is_spare
    cached_tiles = jnp.where(is_used, _ceil_div(context_len, keys), 0)
    skipped = whole(0)  # tiles of the context that end before any row's window
    if window is not None:
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
    # Fresh keys that every row sees come before those that some do, in their own loop. A single
    # tile does not pay for the time to compile that loop.
    if window is None and not has_bits and keys < T:
        in_block = (jax.lax.div(first_live, whole(block_size)) + 1) * block_size
        plain = jnp.minimum(
            jnp.where(in_order(first_live, causal, rules) != 0, first_live + 1, in_block), end
        )
        plain = jnp.minimum(plain, cell_0 + T) - cell_0
        plain = jax.lax.div(plain, whole(keys)) - fresh_first
        plain = jnp.where(first <= cell_0 + fresh_first * keys, plain, 0)
        fresh_middle = jnp.clip(cached_tiles + plain, fresh_low, fresh_high)
    else:
        fresh_middle = fresh_low
    middle = cached_low
    if window is None:
        middle = jnp.clip(jax.lax.div(unmasked, whole(keys)), cached_low, cached_high)
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
        cached=(cached_low, middle, cached_high),
        fresh=(fresh_low, fresh_middle, fresh_high),
    )


def in_order(cell, causal, rules):
    """1 where a cell's row is in token order, else 0."""
    if not rules.orders:
        return causal
    block = jax.lax.div(cell, whole(rules.block_size))
    return jax.lax.shift_right_logical(jnp.broadcast_to(causal, block.shape), block) & 1


def window_cell(cell, causal, rules):
    """The cell from which a row counts its window: its own, or its block's first."""
    if not rules.by_block:
        return cell
    behind = jax.lax.rem(cell, whole(rules.block_size))
    return cell - (1 - in_order(cell, causal, rules)) * behind


def page_of(work, table, page_size, j):
    """Page of cached position j, and where in the page that is."""
    C = table.shape[1]
    column = jax.lax.div(j, whole(page_size))
    page = jnp.where(column < C, table[work.b, jnp.minimum(column, C - 1)], -1)
    return page, jax.lax.rem(j, whole(page_size))


def slot_of(work, tiling, i):
    """Buffer of the ring that tile i is in."""
    return jax.lax.rem(_order_of(work, i), whole(tiling.stages))


def _order_of(work, i):
    """How many tiles went through the ring before tile i."""
    order = i - work.low
    return order if work.before is None else order + work.before


def turns_of(work, warpgroup, from_, to):
    """The first of tiles [from_, to) that is one of two warpgroups' in turns, and how many are."""
    first = from_ + ((from_ - work.low + warpgroup) & 1)
    return first, jax.lax.div(to - first + 1, whole(2))


def load(work, fresh_keys, pools, table, scratch, tiling, loader=0):
    """What a warpgroup that loads does: the tiles of this work, in order; `drain` comes last.

    Of two such warpgroups the first, `loader` 0, has the keys and the other the values.

    Keys and values of 8 bits come to buffers of their own, a piece of a tile each, and it writes
    them to the ring in 16 bits, which is exact: the tensor cores take 8-bit values only with the
    keys side by side.
    """
    keys, stages, staged = tiling.keys, tiling.stages, tiling.staged
    T, Z = fresh_keys[0].shape[1], pools[0].shape[2]
    piece = piece_of(tiling)
    pieces = keys // piece
    fresh_box, page_box = math.gcd(T, piece), min(piece, Z)  # keys of a box
    loads = piece // min(fresh_box, page_box)
    mine = "kv"[loader : loader + 1] if tiling.loaders == 2 else "kv"
    fresh_keys, pools = ([pair["kv".index(name)] for name in mine] for pair in (fresh_keys, pools))
    rings = [scratch[f"{name}_ring"] for name in mine]
    arrivals = [scratch[f"{name}_in"] for name in mine]
    targets = [f"{name}_{8 if staged else 'ring'}" for name in mine]
    landings = [f"{name}_8_in" if staged else f"{name}_in" for name in mine]

    def wait_for_ring(i, name="used"):
        """Wait until the ring's buffers for tile i are free."""
        slot = slot_of(work, tiling, i)

        @pl.when(_order_of(work, i) >= stages)
        def _():
            plgpu.barrier_wait(scratch[name].at[slot])

        return slot

    def fill(slot, i, arrays, boxes_of):
        """Load keys and values, box by box."""
        for array, target, landing in zip(arrays, targets, landings, strict=True):
            if tiling.shares_rows:
                wait_for_ring(i, "k_used" if target == "k_ring" else "used")
            buffer, arrived = scratch[target].at[slot], scratch[landing].at[slot]
            sources = boxes_of(array)
            size = piece // len(sources)
            for place, source in enumerate(sources):
                part = buffer if size == piece else buffer.at[pl.ds(place * size, size)]
                plgpu.copy_gmem_to_smem(source, part, arrived)
            for _spare in range(loads - len(sources)):  # the barrier counts loads
                plgpu.barrier_arrive(arrived)

    def cached(slot, i, offset: Array | int = 0):
        j = (i + work.skipped) * keys + offset
        found = [page_of(work, table, Z, j + at) for at in range(0, piece, page_box)]

        def boxes_of(pool):
            sources = [pool.at[jnp.maximum(page, 0), work.g] for page, _ in found]
            if piece >= Z:
                return sources
            return [sources[0].at[pl.ds(pl.multiple_of(found[0][1], piece), piece)]]

        fill(slot, i, pools, boxes_of)

    def fresh(slot, i, offset: Array | int = 0):
        token = (i - work.cached_tiles + work.fresh_first) * keys + offset
        # Copies of the last box fill the tile after the last key: the product needs whole
        # tiles of finite values, and the mask hides them.
        tokens = [jnp.minimum(token + at, T - fresh_box) for at in range(0, piece, fresh_box)]
        tokens = [pl.ds(pl.multiple_of(one, fresh_box), fresh_box) for one in tokens]
        fill(slot, i, fresh_keys, lambda array: [array.at[work.b, one, work.g] for one in tokens])

    if not staged:
        for span, bring in ((work.cached, cached), (work.fresh, fresh)):
            ready = (
                functools.partial(slot_of, work, tiling) if tiling.shares_rows else wait_for_ring
            )
            body = lambda i, _, bring=bring, ready=ready: bring(ready(i), i)  # noqa: E731
            jax.lax.fori_loop(span[0], span[2], body, None)
        return

    def staged_slot(i, part):
        return jax.lax.rem(_order_of(work, i) * pieces + part, whole(staged))

    def ask(number, _=None):
        i, part = jax.lax.div(number, whole(pieces)), jax.lax.rem(number, whole(pieces))
        slot, is_cached = staged_slot(i, part), i < work.cached_tiles
        pl.when(is_cached)(lambda: cached(slot, i, part * piece))
        pl.when(~is_cached)(lambda: fresh(slot, i, part * piece))

    def widen(i, _):
        """Write a tile to the ring, in 16 bits, and ask for what is to come after."""
        slot = wait_for_ring(i)
        for part in range(pieces):
            place = staged_slot(i, part)
            for ring, barrier, target, landing in zip(
                rings, arrivals, targets, landings, strict=True
            ):
                plgpu.barrier_wait(scratch[landing].at[place])
                values = _loaded(scratch[target].at[place])
                # By way of float32: before CUDA 13.2 the GPU has no other to bfloat16.
                wide, buffer = values.astype(jnp.float32).astype(ring.dtype), ring.at[slot]
                buffer = buffer if pieces == 1 else buffer.at[pl.ds(part * piece, piece)]
                buffer[...] = wide
                plgpu.commit_smem()
                if part == pieces - 1:
                    plgpu.barrier_arrive(barrier.at[slot])
            later = i * pieces + part + staged
            pl.when(later < last)(functools.partial(ask, later))

    first, last = work.low * pieces, work.high * pieces
    jax.lax.fori_loop(first, jnp.minimum(first + staged, last), ask, None)
    jax.lax.fori_loop(work.low, work.high, widen, None)


def drain(low, high, scratch, tiling):
    """Wait until the last tiles of [low, high) are used; a thread block may not end before."""

    def wait(i, _):
        for name in ("k_used", "used") if tiling.shares_rows else ("used",):
            plgpu.barrier_wait(scratch[name].at[jax.lax.rem(i - low, whole(tiling.stages))])

    jax.lax.fori_loop(jnp.maximum(high - tiling.stages, low), high, wait, None)


def piece_of(tiling) -> int:
    """Keys of a buffer that TMA fills: a tile, or what of it comes at once in 8 bits."""
    return min(tiling.keys, 64) if tiling.staged else tiling.keys


def _loaded(ref):
    """A tile of 8-bit numbers, eight in a row to a thread: the ring takes 16 bytes at once."""
    from jax.experimental.mosaic.gpu.fragmented_array import Tiling

    width = min(ref.shape[1], 128)
    lanes = width // 8
    rows = 32 // lanes  # of a warp
    layout = plgpu.Layout.TILED(
        Tiling(((4 * rows, width), (rows, width), (8,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )
    return hopper.load(ref, layout)


def whole(x) -> Array:
    """A number as int32, which all numbers of the kernel are."""
    return jnp.asarray(x, jnp.int32)


def _ceil_div(a: Array, b: int) -> Array:
    return jax.lax.div(a + jnp.asarray(b - 1, jnp.int32), jnp.asarray(b, jnp.int32))
