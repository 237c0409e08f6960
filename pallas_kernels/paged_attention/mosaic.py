"""A Pallas kernel of the Mosaic kind, NVIDIA Hopper: flash attention fed by a warpgroup of its own.

A block of threads has one or two warpgroups that compute, of 64 query rows each, and one that
loads: tiles of cached keys by page, then tiles of the window's own, through a ring of buffers that
the tensor memory accelerator (TMA) fills. The query heads that share a KV head are rows of one
product. Long contexts are split among the blocks of a cluster, which merge their parts themselves:
each takes some columns of the result, so there is no second launch.

Rows come in units: `chunk` neighbouring tokens of one query head, one TMA box each. A unit's rows
are whole swizzle tiles, and so are the fresh keys of a tile: hence a number of rows that is a
multiple of 16. Others go to the Triton form.

Source: FlashAttention-2 and -3 (arXiv 2307.08691, 2407.08608), Flash-Decoding for the split.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.paged_attention.mask import WindowMask, facts

_ROWS = 64  # of a warpgroup's product
_LEAST = 16  # of the inner side of a product of 16-bit numbers
_MAX_CLUSTER = 8  # blocks of threads, on every Hopper
_MULTIPROCESSORS = 132
# What `choose_tiling` reckons with, fitted to an H200 (results/paged_attention_h200.json):
# a tile of 64 keys of head size 128 by one and by two warpgroups, what each block of threads costs
# beside, and each way to merge. The clusters that run at once: a GPC has 14 to 18 multiprocessors,
# so that 16 clusters of 8 blocks, or 32 of 4, took two turns.
_TILE_US = {1: 0.75, 2: 1.08}
_BLOCK_US, _CLUSTER_US, _XLA_US, _BYTES_PER_US = 3.0, 2.0, 5.0, 4.3e6
_CLUSTERS = {1: 132, 2: 64, 4: 28, 8: 12}
_BY_XLA = ((4, False), (8, False), (16, False), (32, False))
_RING_BYTES = 128 * 1024  # of 227 KiB shared memory; the rest is the rows' and the parts'
_MOST_BLOCKS = 32  # of a window whose visibility is a bit each
_HIDDEN = -1e30  # score of a key that is not seen; finite, so that differences are
_FLOOR = -1e28  # below every score, and far above a hidden one: exp2 of the distance is 0
_FAR = 1 << 29  # beyond every position
_LOG2_E = 1.4426950408889634


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """What one block of threads computes, and how many share a row.

    Attributes:
        consumers: Warpgroups that compute, of 64 rows each.
        keys: Keys they look at in one go.
        stages: Tiles of keys in flight.
        splits: Blocks that share the keys of a row.
        is_cluster: They form a cluster and merge their parts; else XLA merges.
        ping_pong: Two consumers take turns at the tensor cores.
    """

    consumers: int = 1
    keys: int = 64
    stages: int = 4
    splits: int = 1
    is_cluster: bool = True
    ping_pong: bool = False


def unsupported(q: Array, k_pages: Array, mask: WindowMask) -> str | None:
    """Why this back end cannot take these arguments here, or None."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if jax.default_backend() != "gpu" or capability != "9.0":
        return "needs an NVIDIA GPU of the Hopper kind"
    return unsupported_arguments(q, k_pages, mask)


def unsupported_arguments(q: Array, k_pages: Array, mask: WindowMask) -> str | None:
    """Why no device can take these arguments, or None."""
    _, T, _, H = q.shape
    Z = k_pages.shape[2]
    if jax.__version_info__ < (0, 11):
        return f"needs jax 0.11, got {jax.__version__}"
    if q.dtype != jnp.bfloat16:
        return f"needs bfloat16, got {q.dtype}"
    if H not in (64, 128, 256):
        return f"needs a head size of 64, 128 or 256, got {H}"
    if T % _LEAST:
        return f"needs a number of rows that is a multiple of {_LEAST}, got {T}"
    if Z & (Z - 1) or Z < _LEAST:
        return f"needs a page size that is a power of two from {_LEAST} up, got {Z}"
    if mask.visible is not None and mask.visible.shape[-1] > _MOST_BLOCKS:
        return f"needs a window of at most {_MOST_BLOCKS} blocks, got {mask.visible.shape[-1]}"
    return None


def choose_tiling(q: Array, k_pages: Array, page_table: Array) -> Tiling:
    """The tile that a model of the time, fitted to an H200, finds fastest for these shapes.

    Of contexts it knows the most that the page table holds. With several sequences it takes the
    mean of two cases: all as long as that, and a quarter of it on average.
    """
    B, T, N, H = q.shape
    G, Z = k_pages.shape[1:3]
    chunk = math.gcd(T, _ROWS)
    warpgroups = -(-(N // G) * (T // chunk) // (_ROWS // chunk))
    keys = 64
    tiles = -(-page_table.shape[1] * Z // keys) + -(-T // keys)  # of keys, for one row

    def microseconds(tiling):
        programs = B * G * -(-warpgroups // tiling.consumers)
        splits = tiling.splits
        at_once = _CLUSTERS[splits] if tiling.is_cluster else _MULTIPROCESSORS / splits
        tile_us = _TILE_US[tiling.consumers] * H / 128
        longest = -(-tiles // splits) * tile_us + _BLOCK_US
        merge = _CLUSTER_US if tiling.is_cluster else _XLA_US
        merge = 0.0 if splits == 1 else merge + 8 * splits * q.size / _BYTES_PER_US
        even = -(-programs // at_once) * longest
        if B == 1:
            return even + merge
        mean = tiles / splits / 4 * tile_us + _BLOCK_US
        return (even + max(longest, programs / at_once * mean)) / 2 + merge

    stages = min(_RING_BYTES // (keys * H * 4), 6)
    found = [
        Tiling(consumers=consumers, keys=keys, stages=stages, splits=splits, is_cluster=is_cluster)
        for consumers in range(1, min(warpgroups, 2) + 1)
        for splits, is_cluster in (*((1 << i, True) for i in range(4)), *_BY_XLA)
        if splits <= tiles
    ]
    return min(found, key=microseconds)


def attention(
    q: Array,
    k: Array,
    v: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    mask: WindowMask,
    *,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> Array:
    """See `api.paged_attention`; rows that are not live are zeros.

    `interpret`, an `InterpretGPUParams`, runs it on a CPU for tests. The interpreter has no product
    with an operand in registers and none that adds to what is there: the weights go through shared
    memory and the product is added apart; all else is the code that runs on a GPU.
    """
    tiling = choose_tiling(q, k_pages, page_table) if tiling is None else tiling
    bits = None
    if mask.visible is not None:  # the blocks that each block of rows sees, a bit each
        place = jnp.arange(mask.visible.shape[-1], dtype=jnp.int32)
        bits = jnp.sum(mask.visible.astype(jnp.int32) << place[None, None], axis=2, dtype=jnp.int32)
    settings = {"block_size": mask.block_size, "window": mask.window, "tiling": tiling}
    run = functools.partial(_run, **settings, interpret=interpret)
    # A kernel of the Mosaic kind has no batch rule: one of many is one after another.
    return jax.custom_batching.sequential_vmap(run)(
        (q, k, v), (k_pages, v_pages), page_table, facts(mask, page_table, k_pages.shape[2]), bits
    )


@functools.partial(jax.jit, static_argnames=("block_size", "window", "tiling", "interpret"))
def _run(fresh, pools, page_table, numbers, bits, *, block_size, window, tiling, interpret):
    """One launch, and a merge where the parts are not a cluster's. Layers lower once."""
    q, _, _ = fresh
    B, T, N, H = q.shape
    G, Z = pools[0].shape[1:3]
    n = N // G
    chunk = math.gcd(T, _ROWS)
    warpgroups = -(-n * (T // chunk) // (_ROWS // chunk))
    consumers = min(tiling.consumers, warpgroups)
    blocks = -(-warpgroups // consumers)
    keys, splits = tiling.keys, tiling.splits
    is_cluster = splits > 1 and tiling.is_cluster
    if is_cluster and (splits > _MAX_CLUSTER or splits & (splits - 1)):
        raise ValueError(f"{splits=} is no cluster; use a power of two up to {_MAX_CLUSTER}")
    if max(keys, Z) % min(keys, Z):
        raise ValueError(f"{keys=} and a page of {Z} must divide one another; use keys={Z}")
    whole = jax.ShapeDtypeStruct((B, T, N, H), q.dtype)
    parts = (
        jax.ShapeDtypeStruct((splits, B * G, blocks * consumers, _ROWS, H), jnp.float32),
        jax.ShapeDtypeStruct((splits, B * G, blocks * consumers, _ROWS), jnp.float32),
    )
    outputs = (whole,) if splits == 1 else (whole, *parts) if is_cluster else parts
    swizzled = _swizzled()
    ring = plgpu.SMEM((tiling.stages, keys, H), q.dtype, transforms=swizzled)
    loads = keys // min(keys, Z, math.gcd(T, keys))  # boxes of the smallest kind in a tile
    scratch = {
        "rows": plgpu.SMEM((consumers, _ROWS, H), q.dtype, transforms=swizzled),
        "k_ring": ring,
        "v_ring": ring,
        "rows_in": plgpu.Barrier(num_barriers=consumers, num_arrivals=_ROWS // chunk),
        "k_in": plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=loads),
        "v_in": plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=loads),
        "used": plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=consumers),
    }
    if tiling.ping_pong and consumers == 2:
        scratch["turn"] = plgpu.Barrier(num_barriers=1, num_arrivals=2)
    if is_cluster:
        scratch["columns"] = plgpu.SMEM((consumers, _ROWS, H // splits), q.dtype)
        scratch["parts_in"] = plgpu.ClusterBarrier(
            collective_axes=("split",), num_barriers=1, num_arrivals=consumers
        )
    if interpret is not None:
        scratch["weights"] = plgpu.SMEM((consumers, _ROWS, keys), q.dtype, transforms=swizzled)
    operands = [*fresh, *pools, page_table, numbers, *(() if bits is None else (bits,))]
    body = functools.partial(
        _attend,
        num_operands=len(operands),
        names=tuple(scratch),
        block_size=block_size,
        window=window,
        tiling=dataclasses.replace(tiling, consumers=consumers, is_cluster=is_cluster),
        chunk=chunk,
        num_warpgroups=warpgroups,
    )
    grid = {"sequence": B * G, "split": splits, "block": blocks}
    cluster = {"split": grid.pop("split")} if is_cluster else {}
    out = plgpu.kernel(
        body,
        out_type=outputs,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=tuple(cluster.values()),
        cluster_names=tuple(cluster),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*operands)
    if len(outputs) != 2:
        return out[0]
    rows = _merge(*out).astype(q.dtype)[:, : n * T]
    rows = rows.reshape(B, G, T // chunk, n, chunk, H)
    return rows.transpose(0, 2, 4, 1, 3, 5).reshape(B, T, N, H)


def _swizzled():
    """How rows lie in shared memory for products and TMA: 8 rows of 128 bytes, swizzled."""
    tiled = plgpu.TilingTransform((8, 64))  # pyright: ignore[reportAbstractUsage]
    return tiled, plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]


def _merge(out: Float[Array, "X S W R H"], log_mass: Float[Array, "X S W R"]) -> Array:
    """Parts weighted by the mass of their keys, [S WR H]."""
    weight = jnp.exp2(log_mass - jnp.max(log_mass, axis=0, keepdims=True))
    mean = jnp.sum(out * weight[..., None], axis=0) / jnp.sum(weight, axis=0)[..., None]
    return mean.reshape(len(mean), -1, mean.shape[-1])


def _attend(*refs, num_operands, names, block_size, window, tiling, chunk, num_warpgroups):
    """One block of threads: a tile of rows of a KV head, over its share of the keys."""
    q, k, v, k_pages, v_pages, table, numbers, *bits = refs[:num_operands]
    results = refs[num_operands : len(refs) - len(names)]
    scratch = dict(zip(names, refs[len(refs) - len(names) :], strict=True))
    consumers, keys, stages, splits = (
        tiling.consumers,
        tiling.keys,
        tiling.stages,
        tiling.splits,
    )
    _, T, N, H = q.shape
    G, Z = k_pages.shape[1:3]
    n, C = N // G, table.shape[1]
    piece = math.gcd(T, keys)  # fresh keys of a box
    whole = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    block, warpgroup = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")
    split = jax.lax.axis_index("split") if splits > 1 else whole(0)
    sequence = jax.lax.axis_index("sequence")
    b, g = jax.lax.div(sequence, whole(G)), jax.lax.rem(sequence, whole(G))
    start, first, end, context_len, unmasked, causal, cell_0 = (numbers[b, i] for i in range(7))

    # Unit u is tokens [u // n * chunk, + chunk) of the group's head u % n.
    per_warpgroup = _ROWS // chunk
    units = n * (T // chunk)
    unit_0 = block * (consumers * per_warpgroup)
    unit_1 = jnp.minimum(unit_0 + consumers * per_warpgroup, units) - 1
    least_cell = cell_0 + jax.lax.div(unit_0, whole(n)) * chunk
    most_cell = cell_0 + jax.lax.div(unit_1, whole(n)) * chunk + (chunk - 1)

    # The list of tiles of keys, as the Triton form has it: the context's, then the window's.
    first_live, last_live = jnp.maximum(least_cell, first), jnp.minimum(most_cell, end - 1)
    is_used = first_live <= last_live
    cached_tiles = jnp.where(is_used, _ceil_div(context_len, keys), 0)
    skipped = whole(0)  # tiles of the context that end before any row's window
    if window is not None:
        nearest = jnp.maximum(start + first_live - (window - 1), 0)
        skipped = jnp.minimum(jax.lax.div(nearest, whole(keys)), cached_tiles)
        cached_tiles -= skipped
    in_block = (jax.lax.div(last_live, whole(block_size)) + 1) * block_size
    reach = jnp.minimum(jnp.where(causal != 0, last_live + 1, in_block), end)
    reach = jnp.minimum(end if bits else reach, cell_0 + T) - cell_0
    fresh_first = jax.lax.div(jnp.maximum(first - cell_0, 0), whole(keys))
    fresh_tiles = jnp.where(is_used, jnp.maximum(_ceil_div(reach, keys) - fresh_first, 0), 0)
    tiles = cached_tiles + fresh_tiles
    share = _ceil_div(tiles, splits)
    low = jnp.minimum(split * share, tiles)
    high = jnp.minimum(low + share, tiles)
    cached_high = jnp.minimum(high, cached_tiles)
    cached_low = jnp.minimum(low, cached_high)
    fresh_low, fresh_high = jnp.maximum(low, cached_tiles), jnp.maximum(high, cached_tiles)
    if window is None and not bits:  # fresh keys that every row sees, before those that some do
        in_block = (jax.lax.div(first_live, whole(block_size)) + 1) * block_size
        plain = jnp.minimum(jnp.where(causal != 0, first_live + 1, in_block), end)
        plain = jnp.minimum(plain, cell_0 + T) - cell_0
        plain = jax.lax.div(plain, whole(keys)) - fresh_first
        plain = jnp.where(first <= cell_0 + fresh_first * keys, plain, 0)
        fresh_middle = jnp.clip(cached_tiles + plain, fresh_low, fresh_high)
    else:
        fresh_middle = fresh_low
    middle = cached_low
    if window is None:
        middle = jnp.clip(jax.lax.div(unmasked, whole(keys)), cached_low, cached_high)

    k_ring, v_ring, k_in, v_in, used = (
        scratch[name] for name in ("k_ring", "v_ring", "k_in", "v_in", "used")
    )

    def slot_of(i):
        return jax.lax.rem(i - low, whole(stages))

    def page_of(i, part):
        """Page of a part of a tile, and where in the page the tile begins."""
        j = (i + skipped) * keys + part * Z
        column = jax.lax.div(j, whole(Z))
        page = jnp.where(column < C, table[b, jnp.minimum(column, C - 1)], -1)
        return page, jax.lax.rem(j, whole(Z))

    parts = max(1, keys // Z)
    rows_of_part = keys // parts
    loads = keys // min(rows_of_part, piece)

    @pl.when(warpgroup == consumers)
    def _load():
        plgpu.set_max_registers(40, action="decrease")

        def fill(i, arrays, boxes_of):
            """Load a tile of keys and one of values, box by box, when their buffers are free."""
            slot = slot_of(i)

            @pl.when(i - low >= stages)
            def _():
                plgpu.barrier_wait(used.at[slot])

            for array, ring, arrived in zip(arrays, (k_ring, v_ring), (k_in, v_in), strict=True):
                sources = boxes_of(array)
                size = keys // len(sources)
                for place, source in enumerate(sources):
                    target = ring.at[slot]
                    target = target if size == keys else target.at[pl.ds(place * size, size)]
                    plgpu.copy_gmem_to_smem(source, target, arrived.at[slot])
                for _spare in range(loads - len(sources)):  # the barrier counts loads
                    plgpu.barrier_arrive(arrived.at[slot])

        def cached(i, _):
            found = [page_of(i, part) for part in range(parts)]

            def boxes_of(pool):
                sources = [pool.at[jnp.maximum(page, 0), g] for page, _ in found]
                if keys >= Z:
                    return sources
                return [sources[0].at[pl.ds(pl.multiple_of(found[0][1], keys), keys)]]

            fill(i, (k_pages, v_pages), boxes_of)

        def fresh(i, _):
            token = (i - cached_tiles + fresh_first) * keys
            # Behind the last key come copies of the last box: the product wants whole tiles of
            # finite values, and nobody sees them.
            tokens = [jnp.minimum(token + at, T - piece) for at in range(0, keys, piece)]
            tokens = [pl.ds(pl.multiple_of(one, piece), piece) for one in tokens]
            fill(i, (k, v), lambda array: [array.at[b, one, g] for one in tokens])

        jax.lax.fori_loop(cached_low, cached_high, cached, None)
        jax.lax.fori_loop(fresh_low, fresh_high, fresh, None)

        def drain(i, _):
            plgpu.barrier_wait(used.at[slot_of(i)])

        jax.lax.fori_loop(jnp.maximum(high - stages, low), high, drain, None)

    @pl.when(warpgroup < consumers)
    def _compute():
        plgpu.set_max_registers(232 if consumers == 2 else 208, action="increase")
        layout = plgpu.Layout.WGMMA
        per_row = layout.reduce(1)
        mine = scratch["rows"].at[warpgroup]
        unit = unit_0 + warpgroup * per_warpgroup

        def box_of(array, i, columns=None):
            """Unit i of this warpgroup in an array like the queries."""
            one = jnp.minimum(unit + i, units - 1)
            token = jax.lax.div(one, whole(n)) * chunk
            box = (
                b,
                pl.ds(pl.multiple_of(token, chunk), chunk),
                g * n + jax.lax.rem(one, whole(n)),
            )
            return array.at[*box, columns] if columns is not None else array.at[*box]

        def unit_rows(ref, i):
            return ref.at[pl.ds(i * chunk, chunk)] if per_warpgroup > 1 else ref

        @pl.when(is_used)
        def _():
            arrived = scratch["rows_in"].at[warpgroup]
            for i in range(per_warpgroup):
                plgpu.copy_gmem_to_smem(box_of(q, i), unit_rows(mine, i), arrived)
            plgpu.barrier_wait(arrived)

        # Of each row: its cell, and the last keys that it sees.
        row = plgpu.broadcasted_iota(jnp.int32, (_ROWS,), 0, layout=per_row)
        unit_of_row = jax.lax.div(row, whole(chunk)) + unit
        token = jax.lax.div(unit_of_row, whole(n)) * chunk + jax.lax.rem(row, whole(chunk))
        cell = cell_0 + token
        anywhere = (1 - causal) * _FAR
        last_cached = start + cell + anywhere
        last_fresh = cell + anywhere
        row_bits = None
        if bits:
            K = bits[0].shape[1]
            mine_in = jax.lax.div(cell, whole(block_size))
            mine_in = jnp.minimum(mine_in, K - 1)
            of_mask = jnp.minimum(b, bits[0].shape[0] - 1)
            row_bits = jnp.zeros_like(mine_in)
            for block_row in range(K):
                row_bits = jnp.where(mine_in == block_row, bits[0][of_mask, block_row], row_bits)
        else:
            ends = (jax.lax.div(cell, whole(block_size)) + 1) * block_size - 1
            last_fresh = jnp.minimum(last_fresh, ends)
        if window is not None:
            last_cached = jnp.minimum(last_cached, start + cell + (window - 1))
            last_fresh = jnp.minimum(last_fresh, cell + (window - 1))

        def across(values, shape):
            return jax.lax.broadcast_in_dim(values, shape, [0])

        def columns_from(zero, shape):
            return zero + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)

        def sees_cached(i, shape):
            j_0 = (i + skipped) * keys
            j = columns_from(j_0, shape)
            seen = (j < context_len) & (j <= across(last_cached, shape))
            seen &= (j < start + first) | (j >= start + end)
            for part in range(parts):
                page, _ = page_of(i, part)
                hole = j_0 + part * rows_of_part
                seen &= (j < hole) | (j >= jnp.where(page >= 0, hole, hole + rows_of_part))
            if window is not None:
                seen &= j > across(start + cell - window, shape)
            return seen

        def sees_fresh(i, shape):
            theirs = columns_from(cell_0 + (i - cached_tiles + fresh_first) * keys, shape)
            seen = (theirs >= first) & (theirs < jnp.minimum(end, cell_0 + T))
            seen &= theirs <= across(last_fresh, shape)
            if row_bits is not None:
                theirs_in = jax.lax.div(theirs, whole(block_size))
                theirs_in = jnp.minimum(theirs_in, bits[0].shape[1] - 1)
                bit = jax.lax.shift_right_logical(across(row_bits, shape), theirs_in) & 1
                seen &= bit != 0
            if window is not None:
                seen &= theirs > across(cell - window, shape)
            return seen

        def pass_turn():
            plgpu.barrier_arrive(scratch["turn"].at[0])
            plgpu.barrier_wait(scratch["turn"].at[0])

        takes_turns = "turn" in scratch
        scale = _LOG2_E * H**-0.5

        def look(i, carry, sees):
            """Take in a tile of keys; `sees` None: every row sees all of them."""
            total, peak, mass = carry
            slot = slot_of(i)
            shape = (_ROWS, keys)
            key, value = k_ring.at[slot], v_ring.at[slot]
            plgpu.barrier_wait(k_in.at[slot])

            def product(sums):
                plgpu.wgmma(sums, mine, key.T)
                if takes_turns:
                    pass_turn()
                return sums[...]

            score = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
            if sees is not None:
                score = jnp.where(sees(i, shape), score, _HIDDEN)
            higher = jnp.maximum(peak, score.max(axis=1) * scale)
            shrink = jnp.exp2(peak - higher)
            weight = jnp.exp2(score * scale - across(higher, shape))
            mass = mass * shrink + weight.sum(axis=1)
            total = total * across(shrink, total.shape)
            narrow = weight.astype(q.dtype)
            if takes_turns:
                total, mass, higher, narrow = jax.lax.optimization_barrier(
                    (total, mass, higher, narrow)
                )
                plgpu.barrier_arrive(scratch["turn"].at[0])  # the softmax is done
                plgpu.barrier_wait(v_in.at[slot])
                plgpu.barrier_wait(scratch["turn"].at[0])  # the tensor cores are free
            else:
                plgpu.barrier_wait(v_in.at[slot])
            if "weights" in scratch:
                total += _interpreted_product(scratch["weights"].at[warpgroup], narrow, value, H)
            else:
                add = lambda sums: plgpu.wgmma(sums, narrow, value)  # noqa: E731
                total = pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(total))
            plgpu.barrier_arrive(used.at[slot])
            return total, higher, mass

        if takes_turns:
            pl.when(warpgroup == 1)(pass_turn)
        carry = (
            plgpu.layout_cast(jnp.zeros((_ROWS, H), jnp.float32), layout),
            plgpu.layout_cast(jnp.full((_ROWS,), _FLOOR, jnp.float32), per_row),
            plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), per_row),
        )
        for from_, to, sees in (
            (cached_low, middle, None),
            (middle, cached_high, sees_cached),
            (fresh_low, fresh_middle, None),
            (fresh_middle, fresh_high, sees_fresh),
        ):
            if from_ is to:
                continue
            step = functools.partial(look, sees=sees)
            carry = jax.lax.fori_loop(from_, to, step, carry)
        if takes_turns:
            pl.when(warpgroup == 0)(pass_turn)
        total, peak, mass = carry

        live = (cell >= first) & (cell < end) & (mass > 0)
        share_of_row = jnp.where(live, 1.0 / jnp.where(live, mass, 1.0), 0.0)
        mean = total * across(share_of_row, total.shape)

        def store(staged, columns=None):
            """Bring this warpgroup's rows from shared memory to the result."""
            plgpu.commit_smem()
            for i in range(per_warpgroup):

                @pl.when(unit + i < units)
                def _(i=i):
                    plgpu.copy_smem_to_gmem(unit_rows(staged, i), box_of(results[0], i, columns))

            plgpu.wait_smem_to_gmem(0)

        if splits == 1:
            mine[...] = mean.astype(q.dtype)
            store(mine)
            return
        out, log_mass = results[-2:]
        place = (sequence, block * consumers + warpgroup)
        told = jnp.where(live, peak + jnp.log2(jnp.where(live, mass, 1.0)), _HIDDEN)
        out[split, *place] = mean
        log_mass[split, *place] = told
        if not tiling.is_cluster:
            return
        _fence(interpreted="weights" in scratch)
        plgpu.commit_smem()  # a barrier of the warpgroup: every thread of it has stored
        plgpu.barrier_arrive(scratch["parts_in"].at[0])
        plgpu.barrier_wait(scratch["parts_in"].at[0])
        _fence(interpreted="weights" in scratch)
        columns = pl.ds(pl.multiple_of(split * (H // splits), H // splits), H // splits)
        told = [
            plgpu.load(log_mass.at[i, *place], layout=per_row, optimized=False)
            for i in range(splits)
        ]
        peak = functools.reduce(jnp.maximum, told)
        weights = [jnp.exp2(one - peak) for one in told]
        merged = []
        for i, weight in enumerate(weights):
            part = plgpu.load(out.at[i, *place, :, columns], layout=layout, optimized=False)
            merged.append(part * across(weight, part.shape))
        merged = functools.reduce(jnp.add, merged)
        merged = merged / across(functools.reduce(jnp.add, weights), merged.shape)
        staged = scratch["columns"].at[warpgroup]
        staged[...] = merged.astype(q.dtype)
        store(staged, columns)


def _interpreted_product(staged, weight, value, width):
    """`weight @ value` as the interpreter can: from shared memory into sums of its own."""
    staged[...] = weight
    plgpu.commit_smem()

    def product(sums):
        plgpu.wgmma(sums, staged, value)
        return sums[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((_ROWS, width), jnp.float32))


def _fence(interpreted: bool):
    """Order what this thread stored to and loads from global memory with the cluster's barrier."""
    if interpreted:
        return

    @plgpu.inline_mgpu()
    def fence(_):
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], "fence.acq_rel.gpu;", "", has_side_effects=True)

    fence()  # pyright: ignore[reportCallIssue]


def _ceil_div(a: Array, b: int) -> Array:
    return jax.lax.div(a + jnp.asarray(b - 1, jnp.int32), jnp.asarray(b, jnp.int32))
