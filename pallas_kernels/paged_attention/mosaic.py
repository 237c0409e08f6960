"""A Pallas kernel of the Mosaic kind, NVIDIA Hopper: flash attention fed by a warpgroup of its own.

A block of threads has one or two warpgroups that compute, of 64 query rows each, and one that
loads: tiles of cached keys by page, then tiles of the window's own, through a ring of buffers that
the tensor memory accelerator (TMA) fills. The query heads that share a KV head are rows of one
product. Long contexts are split among the blocks of a cluster, which merge their parts themselves:
each takes some columns of the result, so there is no second launch. Where few tiles are left to a
block, its two warpgroups may have the same rows and take its tiles in turns.

Rows come in units: `chunk` neighbouring tokens of one query head, one TMA box each. A unit's rows
are whole swizzle tiles, and so are the fresh keys of a tile: hence a number of rows that is a
multiple of 16. `api.choose` sends others elsewhere.

Source: FlashAttention-2 and -3 (arXiv 2307.08691, 2407.08608), Flash-Decoding for the split.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.paged_attention.mask import WindowMask, facts
from pallas_kernels.paged_attention.mosaic_kernel import attend
from pallas_kernels.paged_attention.mosaic_merge import SWIZZLE, part_transforms
from pallas_kernels.paged_attention.mosaic_tiles import ROWS

_LEAST = 16  # of the inner side of a product of 16-bit numbers
_MAX_CLUSTER = 8  # blocks of threads, on every Hopper
_MULTIPROCESSORS = 132
# What `choose_tiling` reckons with, fitted to an H200 (results/paged_attention_h200.json): 64 keys
# of head size 128 in tiles of 64 or 128, by one and by two warpgroups; what each block of threads
# costs beside, and each way to merge: a cluster's takes as long for each warpgroup of a block. The
# clusters that run at once: a GPC has 14 to 18 multiprocessors, so that 16 clusters of 8 blocks, or
# 32 of 4, took two turns. Wide tiles won from so many tiles of 64 on, with ping-pong where two
# warpgroups compute; blocks that stay have them below that too (results/attention_stay_h200.json).
# Two that share keys were timed up to so many tiles of one sequence.
_TILE_US = {(1, 64): 0.75, (1, 128): 0.63, (2, 64): 1.08, (2, 128): 0.87}
_WIDE = 32
_MOST_SHARED = 41
_BLOCK_US, _CLUSTER_US, _XLA_US, _BYTES_PER_US = 3.0, 1.5, 5.0, 4.3e6
_CLUSTERS = {1: 132, 2: 64, 4: 28, 8: 12}
_BY_XLA = ((4, False), (8, False), (16, False), (32, False))
_RING_BYTES = 128 * 1024  # of shared memory; the rest is the rows' and the parts'
_SHARED_BYTES = 224 * 1024  # of a block of threads, less 3 KiB for barriers and sums over warps
_MOST_BLOCKS = 32  # of a window whose visibility is a bit each


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
        shares_keys: Its two warpgroups have the same rows and take tiles of keys in turns.
        unsplit_keys: Contexts of no more keys are not split: the blocks of a cluster take rows or
            heads of their own. At one compiled size a request's bits must not depend on its
            neighbours, so this is a number of keys and not a share of all.
        resident: So many blocks, at most, stay and take tiles of rows in turns: the next one's rows
            and keys come while one ends; rows take twice the shared memory. 0: a block for each
            tile, which the GPU starts where another ends.
    """

    consumers: int = 1
    keys: int = 64
    stages: int = 4
    splits: int = 1
    is_cluster: bool = True
    ping_pong: bool = False
    shares_keys: bool = False
    unsplit_keys: int = 0
    resident: int = 0

    @property
    def row_groups(self) -> int:
        """Sets of 64 rows of a block of threads."""
        return 1 if self.shares_keys else self.consumers

    @property
    def parts(self) -> int:
        """Warpgroups that share the keys of a row."""
        return self.splits * (self.consumers // self.row_groups)


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
    if jax.__version_info__ < (0, 11, 2):
        return f"needs jax 0.11.2, got {jax.__version__}"
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
    chunk = math.gcd(T, ROWS)
    warpgroups = -(-(N // G) * (T // chunk) // (ROWS // chunk))
    tiles = -(-page_table.shape[1] * Z // 64) + -(-T // 64)  # of 64 keys, for one row

    def microseconds(tiling):
        programs = B * G * -(-warpgroups // tiling.row_groups)
        splits = tiling.splits
        at_once = _CLUSTERS[splits] if tiling.is_cluster else _MULTIPROCESSORS / splits
        tile_us = _TILE_US[tiling.row_groups, tiling.keys] * H / 128
        longest = -(-tiles // tiling.parts) * tile_us + _BLOCK_US
        merge = _CLUSTER_US * tiling.consumers if tiling.is_cluster else _XLA_US
        merge = 0.0 if splits == 1 else merge + 8 * splits * q.size / _BYTES_PER_US
        even = -(-programs // at_once) * longest
        if B == 1:
            return even + merge
        if tiling.unsplit_keys:  # of blocks as many as without a cluster, and their keys
            splits, at_once = 1, at_once * splits
        mean = tiles / splits / 4 * tile_us + _BLOCK_US
        return (even + max(longest, programs / at_once * mean)) / 2 + merge

    def unsplit_keys(tiling):
        """A quarter more than each would have if all were shared evenly, by the second case."""
        items = G * -(-warpgroups // tiling.row_groups)
        if B == 1 or not tiling.is_cluster or tiling.splits == 1 or items % tiling.splits:
            return 0
        if B * items < _MULTIPROCESSORS - 4:  # blocks that would leave some without work
            return 0
        most = page_table.shape[1] * Z
        # The longest are split in any case, as one may be alone with many short ones.
        return min(B * items * most * 5 // (16 * _MULTIPROCESSORS), most * 3 // 4)

    def tile(consumers, keys):
        stages = min(_RING_BYTES // (keys * H * 4), 6)
        return {"keys": keys, "stages": stages, "ping_pong": keys == 128 and consumers == 2}

    found = []
    for consumers in range(1, min(warpgroups, 2) + 1):
        for splits, is_cluster in (*((1 << i, True) for i in range(4)), *_BY_XLA):
            # Wide tiles want many of them, and two of theirs in flight.
            keys = 128 if tiles >= _WIDE * splits and H <= 128 else 64
            shape = tile(consumers, keys)
            tiling = Tiling(consumers=consumers, splits=splits, is_cluster=is_cluster, **shape)
            if is_cluster and splits > 1 and not _holds_parts(q, tiling):
                # Three tiles in flight leave room for the parts; not measured against four.
                fewer = dataclasses.replace(tiling, stages=3)
                if tiling.stages > 3 and _holds_parts(q, fewer):
                    tiling = fewer
            tiling = dataclasses.replace(tiling, unsplit_keys=unsplit_keys(tiling))
            found += [tiling] if splits <= tiles else []
    shared = Tiling(consumers=2, splits=2, shares_keys=True)
    if B == 1 and shared.parts <= tiles <= _MOST_SHARED and H <= 128 and _holds_parts(q, shared):
        found.append(shared)
    best = min(found, key=microseconds)
    blocks = B * G * -(-warpgroups // best.row_groups)
    is_short = best.keys == 64 and H <= 128  # the wide tiles above are for long contexts
    if B > 1 and best.splits == 1 and is_short and blocks >= 2 * (_MULTIPROCESSORS - 4):
        # Each has tiles of its own, and does not take the next of all. Where contexts differ that
        # costs more than is gained if they are long, or if some blocks have two tiles, others one.
        best = dataclasses.replace(best, resident=_MULTIPROCESSORS, **tile(best.consumers, 128))
    return best


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
    chunk = math.gcd(T, ROWS)
    warpgroups = -(-n * (T // chunk) // (ROWS // chunk))
    keys, splits = tiling.keys, tiling.splits
    is_cluster = splits > 1 and tiling.is_cluster
    consumers = tiling.consumers if tiling.shares_keys else min(tiling.consumers, warpgroups)
    tiling = dataclasses.replace(tiling, consumers=consumers, is_cluster=is_cluster)
    if tiling.resident:
        _check_resident(tiling)
    if tiling.ping_pong and tiling.stages < 2:  # one waits for the keys that the other has left
        raise ValueError(f"stages={tiling.stages}: ping_pong wants 2 tiles in flight; use stages=2")
    if tiling.shares_keys:
        _check_shares_keys(tiling, H)
    groups = tiling.row_groups
    blocks = -(-warpgroups // groups)
    if tiling.unsplit_keys:
        _check_unsplit_keys(tiling, G * blocks)
    buffers = groups * 2 if tiling.resident else groups
    if is_cluster and (splits > _MAX_CLUSTER or splits & (splits - 1)):
        raise ValueError(f"{splits=} is no cluster; use a power of two up to {_MAX_CLUSTER}")
    if max(keys, Z) % min(keys, Z):
        raise ValueError(f"{keys=} and a page of {Z} must divide one another; use keys={Z}")
    whole = jax.ShapeDtypeStruct((B, T, N, H), q.dtype)
    parts = (
        jax.ShapeDtypeStruct((tiling.parts, B * G, blocks * groups, ROWS, H), jnp.float32),
        jax.ShapeDtypeStruct((tiling.parts, B * G, blocks * groups, ROWS), jnp.float32),
    )
    is_shared = is_cluster and interpret is None and _holds_parts(q, tiling)
    outputs = (whole,) if splits == 1 or is_shared else (whole, *parts) if is_cluster else parts
    swizzled = _swizzled()
    ring = plgpu.SMEM((tiling.stages, keys, H), q.dtype, transforms=swizzled)
    loads = keys // min(keys, Z, math.gcd(T, keys))  # boxes of the smallest kind in a tile
    scratch = {
        "rows": plgpu.SMEM((buffers, ROWS, H), q.dtype, transforms=swizzled),
        "k_ring": ring,
        "v_ring": ring,
        "rows_in": plgpu.Barrier(num_barriers=buffers, num_arrivals=ROWS // chunk),
        "k_in": plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=loads),
        "v_in": plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=loads),
        "used": plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=groups),
    }
    if tiling.ping_pong and consumers == 2:
        scratch["turn"] = plgpu.Barrier(num_barriers=1, num_arrivals=2)
    if is_cluster:
        part, width = (consumers, tiling.parts, ROWS), H // tiling.parts
        scratch["columns"] = plgpu.SMEM((consumers, ROWS, width), q.dtype)
        if is_shared:
            transforms = part_transforms()
            scratch["means"] = plgpu.SMEM((*part, width), jnp.float32, transforms=transforms)
            scratch["masses"] = plgpu.SMEM(part, jnp.float32)
        scratch["parts_in"] = plgpu.ClusterBarrier(
            collective_axes=("split",), num_barriers=1, num_arrivals=consumers
        )
    if interpret is not None:
        scratch["weights"] = plgpu.SMEM((consumers, ROWS, keys), q.dtype, transforms=swizzled)
    stay = min(B * G * blocks, tiling.resident)
    operands = [*fresh, *pools, page_table, numbers, *(() if bits is None else (bits,))]
    body = functools.partial(
        attend,
        num_operands=len(operands),
        names=tuple(scratch),
        block_size=block_size,
        window=window,
        tiling=tiling,
        chunk=chunk,
        places=(B * G * blocks, blocks, stay),
    )
    grid = {"sequence": B * G, "split": splits, "block": blocks}
    if tiling.resident:
        grid = {"block": stay}
    cluster = {"split": grid.pop("split")} if is_cluster else {}
    out = plgpu.kernel(
        body,
        out_type=outputs,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=tuple(cluster.values()),
        cluster_names=tuple(cluster),
        kernel_name="paged_attention",
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


def _check_resident(tiling):
    """Refuse what blocks that take rows in turns cannot do."""
    rule = f"resident={tiling.resident} wants"
    if tiling.resident < 0:
        raise ValueError(f"{rule} to be a number of blocks; use resident=0 for a block a tile")
    if tiling.splits > 1 or tiling.shares_keys or tiling.unsplit_keys:
        raise ValueError(
            f"splits={tiling.splits}, shares_keys={tiling.shares_keys}, unsplit_keys="
            f"{tiling.unsplit_keys}: {rule} keys that no blocks and no warpgroups share; use "
            "splits=1, shares_keys=False, unsplit_keys=0"
        )


def _check_shares_keys(tiling, head_size):
    """Refuse what two warpgroups with the same rows cannot do."""
    consumers, splits, stages = tiling.consumers, tiling.splits, tiling.stages
    rule = "shares_keys wants"
    if consumers != 2:
        raise ValueError(f"{consumers=}: {rule} two warpgroups of a block; use consumers=2")
    if not tiling.is_cluster:
        raise ValueError(
            f"{splits=} without a cluster: {rule} a cluster to merge; use splits=2, is_cluster=True"
        )
    if tiling.ping_pong:
        raise ValueError(f"ping_pong=True: {rule} no other turns; use ping_pong=False")
    if stages % 2:  # else a buffer of the ring changes hands, and a wait would miss a phase
        raise ValueError(f"{stages=}: {rule} an even number of stages; use stages={stages + 1}")
    if head_size * 4 < tiling.parts * SWIZZLE:
        raise ValueError(
            f"{splits=} of head size {head_size}: {rule} 8 columns for each of {tiling.parts} "
            f"warpgroups; use splits={head_size * 4 // SWIZZLE // 2}"
        )


def _check_unsplit_keys(tiling, items):
    """Refuse what leaves the blocks of a cluster no rows or heads of their own."""
    rule = f"unsplit_keys={tiling.unsplit_keys} wants"
    if not tiling.is_cluster or tiling.shares_keys:
        raise ValueError(f"{rule} a cluster, of which no block shares keys; use unsplit_keys=0")
    if items % tiling.splits:
        raise ValueError(
            f"{rule} tiles of rows of all KV heads ({items}) to be a multiple of splits="
            f"{tiling.splits}; use unsplit_keys=0"
        )


def _holds_parts(q, tiling):
    """Whether shared memory has room for what the blocks of a cluster tell one another."""
    H, parts = q.shape[-1], tiling.parts
    of_row = H * q.dtype.itemsize
    ring = 2 * tiling.stages * tiling.keys * of_row
    queries = tiling.row_groups * ROWS * of_row
    result, means_and_masses = of_row // parts, (H + parts) * 4
    return ring + queries + tiling.consumers * ROWS * (result + means_and_masses) <= _SHARED_BYTES


def _swizzled():
    """How rows lie in shared memory for products and TMA: 8 rows of 128 bytes, swizzled."""
    tiled = plgpu.TilingTransform((8, 64))  # pyright: ignore[reportAbstractUsage]
    return tiled, plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]


def _merge(out: Float[Array, "X S W R H"], log_mass: Float[Array, "X S W R"]) -> Array:
    """Parts weighted by the mass of their keys, [S WR H]."""
    weight = jnp.exp2(log_mass - jnp.max(log_mass, axis=0, keepdims=True))
    mean = jnp.sum(out * weight[..., None], axis=0) / jnp.sum(weight, axis=0)[..., None]
    return mean.reshape(len(mean), -1, mean.shape[-1])
