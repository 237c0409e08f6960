"""The division of the Mosaic kernel's work among thread blocks, and the rule that chooses it.

The constants of the rule were measured on an H200. It depends on shapes only, so that a text's bits
do not depend on its neighbours.
"""

import dataclasses
import math

import jax
from jaxtyping import Array

from ..hopper import MULTIPROCESSORS
from .mosaic_merge import SWIZZLE
from .mosaic_tiles import LINES, ROWS, whole_tiles

ALIKE = (32, 128)  # sequences and rows that `choose_alike` assumes
LEAST_8_BIT = 32  # least inner side of a product of 8-bit numbers
_MAX_CLUSTER = 8  # thread blocks, on every Hopper
# Cost model of `choose_tiling`, fitted to an H200 (results/paged_attention_h200.json).
# `_TILE_US`: us for 64 keys of head size 128, by computing warpgroups and keys of a tile.
# `_WIDE`: number of 64-key tiles from which 128-key tiles won (with ping-pong for two warpgroups).
# `_MOST_SHARED`: most tiles of one sequence at which warpgroups that share keys were timed.
# `_BLOCK_US`: fixed cost of a thread block. `_CLUSTER_US`, `_XLA_US`: merge by a cluster, for each
# warpgroup of a block, and by XLA. `_CLUSTERS`: clusters that run at once. A GPC has 14 to 18
# multiprocessors, so that 16 clusters of 8 blocks, or 32 of 4, took two turns.
_TILE_US = {(1, 64): 0.75, (1, 128): 0.63, (2, 64): 1.08, (2, 128): 0.87}
_WIDE = 32
_MOST_SHARED = 41
# Resident blocks for several short sequences, by computing warpgroups of a block: the least number
# of blocks at which they won or tied, and the keys of their tiles, most blocks first
# (results/attention_stay_h200.json). Below it they win for even contexts, and tie or lose for
# uneven ones.
_STAYING = {1: ((1024, 64),), 2: ((512, 128), (256, 64))}
_BLOCK_US, _CLUSTER_US, _XLA_US, _BYTES_PER_US = 3.0, 1.5, 5.0, 4.3e6
_CLUSTERS = {1: 132, 2: 64, 4: 28, 8: 12}
_BY_XLA = ((4, False), (8, False), (16, False), (32, False))
_WIDEST = 256  # largest head size whose sums fit in the registers of a warpgroup
_RING_BYTES = 128 * 1024  # of shared memory; rows and parts use the rest
_SHARED_BYTES = 224 * 1024  # of a thread block, less 3 KiB for barriers and sums over warps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """The work of one thread block, and the number of blocks that share a row.

    Attributes:
        consumers: Warpgroups that compute, of 64 rows each.
        keys: Keys of a tile.
        stages: Tiles of keys in flight.
        splits: Blocks that share the keys of a row.
        is_cluster: These blocks form a cluster and merge their parts; otherwise XLA merges.
        ping_pong: Two consumers alternate at the tensor cores.
        shares_keys: The two warpgroups have the same rows and alternate tiles of keys.
        shares_rows: The two warpgroups have the same rows and keys, and half of the head each: the
            sums of 512 columns do not fit in the registers of one warpgroup. They exchange the sums
            of scores; the ring frees keys and values separately.
        unsplit_keys: Contexts up to this number of keys are not split: each block of a cluster
            takes other rows or heads. It is a number and not a share of the keys of all requests,
            because a request's bits must not depend on its neighbours.
        resident: Most blocks that stay resident and compute several tiles of rows: the rows and
            keys of the next tile load while one ends, and rows take twice the shared memory. Fewer
            blocks are used if they need no more turns: 128 of 132 for 512 tiles. Blocks beyond the
            number of multiprocessors wait. 0: one block for each tile.
    """

    consumers: int = 1
    keys: int = 64
    stages: int = 4
    splits: int = 1
    is_cluster: bool = True
    ping_pong: bool = False
    shares_keys: bool = False
    shares_rows: bool = False
    unsplit_keys: int = 0
    resident: int = 0

    @property
    def row_groups(self) -> int:
        """Sets of 64 rows of a thread block."""
        return 1 if self.shares_keys or self.shares_rows else self.consumers

    @property
    def parts(self) -> int:
        """Warpgroups that share the keys of a row."""
        return self.splits * (2 if self.shares_keys else 1)


def choose_alike(q: Array, k_pages: Array, page_table: Array, any_rows: bool = False) -> Tiling:
    """The division of keys for `ALIKE`, whatever the numbers of sequences and of rows from 128 on.

    With 128 rows or more every context is split: a row's context length differs by chunk. Where
    warpgroups have rows of their own, their number in a block changes no bits: few sequences take
    one, for twice the blocks.

    Args:
        any_rows: Whatever the number of rows (`mask.whole_tile`).
    """
    B, T = ALIKE
    shape = B, T if any_rows else min(T, q.shape[1]), *q.shape[2:]
    tiling = choose_tiling(jax.ShapeDtypeStruct(shape, q.dtype), k_pages, page_table)
    if shape[1] >= T:
        tiling = dataclasses.replace(tiling, unsplit_keys=0)
    if tiling.splits > 1 or tiling.shares_rows:
        return tiling
    blocks = q.shape[0] * k_pages.shape[1] * warpgroups(q, k_pages)
    if blocks > MULTIPROCESSORS:
        return tiling
    return dataclasses.replace(tiling, consumers=1, ping_pong=False, resident=0)


def warpgroups(q: Array | jax.ShapeDtypeStruct, k_pages: Array) -> int:
    """Tiles of 64 rows of a sequence and a KV head."""
    rows, N = whole_tiles(q.shape[1]), q.shape[2]
    chunk = math.gcd(rows, ROWS)
    return -(-(N // k_pages.shape[1]) * (rows // chunk) // (ROWS // chunk))


def choose_tiling(q: Array | jax.ShapeDtypeStruct, k_pages: Array, page_table: Array) -> Tiling:
    """The fastest tiling for these shapes by a cost model fitted to an H200.

    The model knows only the capacity of the page table. With several sequences it takes the mean
    of two cases: all contexts are full, and contexts are a quarter full on average.
    """
    B, T, _, H = q.shape
    G, Z = k_pages.shape[1:3]
    groups = warpgroups(q, k_pages)
    if H > _WIDEST:  # one tile of keys and values fills the ring
        splits = 2 if 2 * B * G * groups <= MULTIPROCESSORS else 1
        return Tiling(consumers=2, stages=1, shares_rows=True, splits=splits, is_cluster=False)
    is_8_bit = k_pages.dtype.itemsize == 1
    # A few rows a sequence wait for memory: a second block of a multiprocessor loads meanwhile. us
    # on an H200, SDAR-1.7B at 1,000 keys, 1 row: 32 sequences 43.1 / 40.4, 8 sequences 14.4 / 13.8.
    is_thin = T <= LINES and B > 1 and H == 128 and not is_8_bit
    tiles = -(-page_table.shape[1] * Z // 64) + -(-T // 64)  # of 64 keys, for one row

    def microseconds(tiling):
        programs = B * G * -(-groups // tiling.row_groups)
        splits = tiling.splits
        at_once = _CLUSTERS[splits] if tiling.is_cluster else MULTIPROCESSORS / splits
        tile_us = _TILE_US[tiling.row_groups, tiling.keys] * H / 128
        longest = -(-tiles // tiling.parts) * tile_us + _BLOCK_US
        merge = _CLUSTER_US * tiling.consumers if tiling.is_cluster else _XLA_US
        merge = 0.0 if splits == 1 else merge + 8 * splits * q.size / _BYTES_PER_US
        even = -(-programs // at_once) * longest
        if B == 1:
            return even + merge
        if tiling.unsplit_keys:  # as without a cluster
            splits, at_once = 1, at_once * splits
        mean = tiles / splits / 4 * tile_us + _BLOCK_US
        return (even + max(longest, programs / at_once * mean)) / 2 + merge

    def unsplit_keys(tiling):
        """A quarter more than an even share of the keys in the case of quarter-full contexts."""
        items = G * -(-groups // tiling.row_groups)
        if B == 1 or not tiling.is_cluster or tiling.splits == 1 or items % tiling.splits:
            return 0
        if B * items < MULTIPROCESSORS - 4:  # fewer blocks than multiprocessors
            return 0
        most = page_table.shape[1] * Z
        # Always split the longest contexts: one of them may come with many short ones.
        return min(B * items * most * 5 // (16 * MULTIPROCESSORS), most * 3 // 4)

    found = []
    for consumers in range(1, min(groups, 2) + 1):
        for splits, is_cluster in (*((1 << i, True) for i in range(4)), *_BY_XLA):
            # Wide tiles pay only for many tiles with two of them in flight.
            keys = 128 if tiles >= _WIDE * splits and H <= 128 and not is_thin else 64
            tiling = Tiling(
                consumers=consumers,
                keys=keys,
                stages=3 if is_thin else buffers(keys, H, is_8_bit),
                splits=splits,
                is_cluster=is_cluster,
                ping_pong=keys == 128 and consumers == 2,
            )
            if is_cluster and splits > 1 and not holds_parts(q, tiling, is_8_bit):
                # Three tiles in flight leave room for the parts; four were not compared.
                fewer = dataclasses.replace(tiling, stages=3)
                if tiling.stages > 3 and holds_parts(q, fewer, is_8_bit):
                    tiling = fewer
            tiling = dataclasses.replace(tiling, unsplit_keys=unsplit_keys(tiling))
            found += [tiling] if splits <= tiles else []
    shared = Tiling(consumers=2, splits=2, shares_keys=True)
    if B == 1 and shared.parts <= tiles <= _MOST_SHARED and H <= 128:
        found += [shared] if holds_parts(q, shared, is_8_bit) else []
    best = min(found, key=microseconds)
    blocks = B * G * -(-groups // best.row_groups)
    if B == 1 or best.splits > 1 or tiles >= _WIDE or H != 128:
        return best
    for least, keys in _STAYING[best.consumers]:
        if blocks >= least:
            in_turns = {"resident": MULTIPROCESSORS, "ping_pong": best.consumers == 2}
            stages = buffers(keys, H, is_8_bit)
            return dataclasses.replace(best, keys=keys, stages=stages, **in_turns)
    return best


def buffers(keys: int, head_size: int, is_8_bit: bool = False) -> int:
    """The number of key and value tiles that fit in shared memory with the rows."""
    return min(_RING_BYTES // (keys * head_size * (2 if is_8_bit else 4)), 6)


def holds_parts(q: Array | jax.ShapeDtypeStruct, tiling: Tiling, is_8_bit: bool = False) -> bool:
    """Whether shared memory has room for the parts that a cluster exchanges."""
    H, parts = q.shape[-1], tiling.parts
    of_row = H * q.dtype.itemsize
    ring = 2 * tiling.stages * tiling.keys * (H if is_8_bit else of_row)
    queries = tiling.row_groups * ROWS * of_row
    if is_8_bit:
        queries += tiling.consumers * 2 * ROWS * H
    result, means_and_masses = of_row // parts, (H - H // parts + parts) * 4
    return ring + queries + tiling.consumers * ROWS * (result + means_and_masses) <= _SHARED_BYTES


def check_tiling(
    tiling: Tiling, head_size: int, page_size: int, items: int, is_8_bit: bool
) -> None:
    """Refuse a tiling that the kernel cannot run; `items`: row tiles of all KV heads.

    Raises:
        ValueError: A setting is wrong; the message names a valid one.
    """
    keys, splits = tiling.keys, tiling.splits
    if is_8_bit and (keys < LEAST_8_BIT or tiling.shares_rows):
        raise ValueError(
            f"{keys=}, shares_rows={tiling.shares_rows}: 8 bits want tiles of at least "
            f"{LEAST_8_BIT} keys and warpgroups with rows of their own; use keys=64, "
            "shares_rows=False"
        )
    if tiling.resident:
        _resident(tiling)
    if tiling.ping_pong and tiling.stages < 2:  # each warpgroup holds a tile
        raise ValueError(f"stages={tiling.stages}: ping_pong wants 2 tiles in flight; use stages=2")
    if tiling.shares_keys:
        _shares_keys(tiling, head_size)
    if tiling.shares_rows:
        _shares_rows(tiling)
    elif head_size > _WIDEST:
        raise ValueError(f"{head_size=} wants warpgroups that share rows; use shares_rows=True")
    if tiling.unsplit_keys:
        _unsplit_keys(tiling, items)
    if splits > 1 and tiling.is_cluster and (splits > _MAX_CLUSTER or splits & (splits - 1)):
        raise ValueError(f"{splits=} is no cluster; use a power of two up to {_MAX_CLUSTER}")
    if max(keys, page_size) % min(keys, page_size):
        raise ValueError(
            f"{keys=} and a page of {page_size} must divide one another; use keys={page_size}"
        )


def _resident(tiling):
    """Refuse settings that resident thread blocks do not support."""
    rule = f"resident={tiling.resident} wants"
    if tiling.resident < 0:
        raise ValueError(f"{rule} to be a number of blocks; use resident=0 for a block a tile")
    if tiling.splits > 1 or tiling.shares_keys or tiling.unsplit_keys:
        raise ValueError(
            f"splits={tiling.splits}, shares_keys={tiling.shares_keys}, unsplit_keys="
            f"{tiling.unsplit_keys}: {rule} keys that no blocks and no warpgroups share; use "
            "splits=1, shares_keys=False, unsplit_keys=0"
        )


def _shares_keys(tiling, head_size):
    """Refuse settings that two warpgroups with the same rows do not support."""
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
    if stages % 2:  # otherwise both warpgroups use one buffer, and a wait misses a phase
        raise ValueError(f"{stages=}: {rule} an even number of stages; use stages={stages + 1}")
    if head_size * 4 < tiling.parts * SWIZZLE:
        raise ValueError(
            f"{splits=} of head size {head_size}: {rule} 8 columns for each of {tiling.parts} "
            f"warpgroups; use splits={head_size * 4 // SWIZZLE // 2}"
        )


def _shares_rows(tiling):
    """Refuse settings that two warpgroups with half the columns each do not support."""
    # A second tile of keys would not wait until the sums of the first are exchanged.
    others = tiling.ping_pong, tiling.shares_keys, tiling.resident, tiling.stages > 1
    if tiling.consumers != 2 or any(others) or (tiling.splits > 1 and tiling.is_cluster):
        raise ValueError(
            f"{tiling} with shares_rows wants two warpgroups, no cluster, and nothing else that "
            "they take turns at; use Tiling(consumers=2, stages=1, shares_rows=True)"
        )


def _unsplit_keys(tiling, items):
    """Refuse shapes that would leave blocks of a cluster without rows or heads."""
    rule = f"unsplit_keys={tiling.unsplit_keys} wants"
    if not tiling.is_cluster or tiling.shares_keys:
        raise ValueError(f"{rule} a cluster, of which no block shares keys; use unsplit_keys=0")
    if items % tiling.splits:
        raise ValueError(
            f"{rule} tiles of rows of all KV heads ({items}) to be a multiple of splits="
            f"{tiling.splits}; use unsplit_keys=0"
        )
