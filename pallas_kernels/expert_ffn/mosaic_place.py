"""Pallas Mosaic kernel for NVIDIA Hopper that sorts rows by expert.

Each pair (row, expert) gets a place in the list sorted by expert, where its row is copied. XLA
counts the pairs in earlier launches. For up to 32 rows each program counts all pairs instead
(`_place_few`), for up to 512 it adds up the counts of chunks (`_place_counted`).

The rows of an expert begin at a multiple of 8 places, as a swizzled tile does. The places between
experts are never written; their results are garbage and never read.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from .. import hopper
from ..hopper import load, whole
from ..layer.fp8 import DTYPE as FP8
from ..layer.fp8 import Fp8Rows, factors_of_scalar
from .tiles import NO_PLACE, max_tiles

ALIGNED = 8  # rows of a swizzled tile
THREADS = 128  # of a row's program
_CHUNK = 32  # rows whose pairs are compared with each other; counts cover earlier chunks
_FEW_CHUNKS = 16  # most chunks whose counts each row's program adds up
_AT_ONCE = 16  # pairs compared in one iteration of a loop
_BETWEEN = 24  # tiles of experts between those of a dense half


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside:
    """The position of a dense half among the experts."""

    experts: int  # higher expert numbers belong to the dense half
    count: int  # experts that the dense half counts as, and regions of inner columns
    inner: int  # inner columns of the dense half
    rows: int  # of the dense half
    tile_rows: int  # as in `sorted_rows`

    @property
    def apart(self) -> int:
        """Places of one region of inner columns."""
        return -(-self.rows // ALIGNED) * ALIGNED

    @property
    def tiles(self) -> int:
        """Tiles of one expert of the dense half."""
        return -(-self.rows // self.tile_rows)

    def slot(self, tile: Array) -> Array:
        """Index in the table of a tile of an expert, with tiles of the dense half in between.

        Tiles of the dense half wait for L2, those of experts for memory, so they should overlap.
        """
        passed = [jnp.where(tile >= i * _BETWEEN, 1, 0) for i in range(self.count)]
        return tile + self.tiles * functools.reduce(jnp.add, passed)

    def first_slot(self, i: int, tiles: Array) -> Array:
        """Index of the first tile of the dense half's i-th expert; experts have `tiles` tiles."""
        return jnp.minimum(i * _BETWEEN, tiles) + i * self.tiles


class Tiles(NamedTuple):
    """Tiles of sorted rows; lines of the table past the last tile are arbitrary."""

    table: Int[Array, "N 3"]  # expert, place of the first row, number of rows
    numbers: Int[Array, " n"]  # the last one counts the tiles of experts, without a dense half's
    beside: Beside | None


class _Out(NamedTuple):
    """What a launch writes."""

    place: Any  # of pairs
    tiles: Any
    rows: Sequence[Any]  # by place; for 8 bits, values and scales
    tile_rows: int
    beside: Beside | None


def sorted_rows(
    x: Float[Array, "T D"],
    expert_ids: Int[Array, "T k"],
    E: int,
    tile_rows: int,
    is_quantized: bool,
    interpret: Any,
    held: Fp8Rows | None = None,
    beside: Beside | None = None,
) -> tuple[Float[Array, "P D"] | Fp8Rows, Int[Array, "T k"], Tiles]:
    """Rows by place, the place of each pair, and the tiles; rows between experts are arbitrary.

    Args:
        held: Rows of the dense half; None: `x`.
    """
    (T, k), K = expert_ids.shape, x.shape[1]
    ids = _by_chunks(expert_ids.astype(jnp.int32))
    # Loads of a tile's rows may reach past the last place.
    places = T * k + min(T * k, E) * (ALIGNED - 1) + tile_rows
    places = -(-places // ALIGNED) * ALIGNED
    most_tiles, given = max_tiles(T * k, E, tile_rows), (x,)
    if beside is not None:
        places += beside.count * beside.apart
        most_tiles += beside.count * beside.tiles
        given = (x,) if held is None else (x, held.values.reshape(T, K), held.scales.reshape(T))
    kinds = rows_like(places, K, FP8 if is_quantized else x.dtype)
    shapes = (T, k), (most_tiles, 3)
    out = [*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes), *kinds]

    def launch(body: Callable[..., Any], out_type: Any, *counts: Array) -> list[Array]:
        def run(x, *refs):
            of_dense, refs = refs[: len(given) - 1], refs[len(given) - 1 :]
            *more, place, tiles = refs[: -len(kinds)]
            written = _Out(place, tiles, refs[-len(kinds) :], tile_rows, beside)
            place_row = functools.partial(body, x, *more, written)
            if beside is None:
                place_row()
            else:
                _place_beside(place_row, of_dense, written, beside)

        return hopper.kernel(
            run,
            out_type=out_type,
            grid=(T,),
            grid_names=("row",),
            kernel_name="expert_ffn_place",
            interpret=interpret,
        )(*given, ids, *counts)

    count = jax.ShapeDtypeStruct((1,), jnp.int32)
    if len(ids) == 1:
        num_tiles, *found = launch(functools.partial(_place_few, E=E), [count, *out])
    else:
        # Comparisons and sums fuse into one launch each; a sort or a running sum takes several.
        experts = jnp.arange(E, dtype=jnp.int32)
        counts = (ids[:, None, :] == experts[None, :, None]).sum(axis=2, dtype=jnp.int32)
        if len(ids) <= _FEW_CHUNKS and E % THREADS == 0:
            num_tiles, *found = launch(_place_counted, [count, *out], counts)
        else:
            before, first, num_tiles = _sums_of_earlier(counts, experts, tile_rows)
            found = launch(_place, out, before, first, num_tiles)
    place, tiles, rows, *scales = found
    tiles = Tiles(tiles, num_tiles, beside)
    return Fp8Rows(rows, *scales) if scales else rows, place, tiles


def _by_chunks(ids: Int[Array, "T k"]) -> Int[Array, "C P"]:
    """The experts of pairs by chunks of rows, filled with -1 to whole rows for all threads."""
    T, k = ids.shape
    chunks = -(-T // _CHUNK)
    pairs = -(-_CHUNK * k // THREADS) * THREADS
    ids = jnp.pad(ids, ((0, chunks * _CHUNK - T), (0, 0)), constant_values=-1)
    ids = ids.reshape(chunks, _CHUNK * k)
    return jnp.pad(ids, ((0, 0), (0, pairs - _CHUNK * k)), constant_values=-1)


def _sums_of_earlier(
    counts: Int[Array, "C E"], experts: Int[Array, " E"], tile_rows: int
) -> tuple[Array, Array, Array]:
    """For each expert its pairs in earlier chunks, and its first group of 8 places and first tile.

    The last line of the first [C + 1, E] covers all chunks; the others [E + 1] end in their number.
    """
    chunks, E = counts.shape
    earlier = jnp.tri(chunks + 1, chunks, k=-1, dtype=bool)
    before = jnp.where(earlier[:, :, None], counts[None], 0).sum(axis=1, dtype=jnp.int32)
    count = before[-1]
    below = experts[None] < jnp.arange(E + 1, dtype=jnp.int32)[:, None]
    first, first_tile = (
        jnp.where(below, -(-count[None] // size), 0).sum(axis=1, dtype=jnp.int32)
        for size in (ALIGNED, tile_rows)
    )
    return before, first, first_tile


def rows_like(count: int, width: int, dtype: Any) -> list[jax.ShapeDtypeStruct]:
    """Shapes of `count` rows and, for 8 bits, of their scales."""
    rows = jax.ShapeDtypeStruct((count, width), dtype)
    return [rows, jax.ShapeDtypeStruct((count,), jnp.float32)] if dtype == FP8 else [rows]


def _place_beside(place_row, held, out: _Out, beside: Beside) -> None:
    """Place a row of the experts and one of the dense half, whose tiles follow those of experts.

    Args:
        held: Values and scales of the dense half's rows; empty if they are those of the experts.
    """
    row, size = jax.lax.axis_index("row"), whole(beside.tile_rows)
    own = ()
    if held:
        numbers, units = held
        own = load(numbers.at[row], strided(numbers.shape[1], 8)), units[row]
    count, values = place_row()
    for ref, value in zip(out.rows, own or values, strict=True):
        ref[row] = value
    before = jax.lax.div(row, size)

    @pl.when(row == before * size)
    def _():
        for i in range(beside.count):
            to = beside.first_slot(i, count) + before
            out.tiles[to, 0] = beside.experts + i
            out.tiles[to, 1] = i * beside.apart + row
            out.tiles[to, 2] = jnp.minimum(beside.rows - row, size)


def _place(x, ids, before, first, first_tile, out: _Out):
    """One row: write it to the places of its pairs; return the number of tiles and the row."""
    row = jax.lax.axis_index("row")
    chunk = jax.lax.div(row, whole(_CHUNK))
    k = out.place.shape[1]
    start = (row - chunk * _CHUNK) * k  # of its pairs in the chunk
    theirs, index = _pairs_of(ids, chunk)
    values = _as(out.rows[0].dtype, load(x.at[row], strided(x.shape[1], 8)))
    # All reads come before the writes, so that their latencies overlap.
    mine, routed = _experts_of(ids, chunk, start, k, before.shape[1])
    begin = [first[one] * ALIGNED for one in mine]
    tile = [first_tile[one] for one in mine]
    length = [before[before.shape[0] - 1, one] for one in mine]
    ahead = [(theirs == one) & (index < start + j) for j, one in enumerate(mine)]
    rank = [before[chunk, one] + more for one, more in zip(mine, _counts(ahead), strict=True)]
    where = [mine, routed, begin, tile, length, rank]
    _write_row(row, where, values, out)
    return first_tile[first_tile.shape[0] - 1], values


def _place_counted(x, ids, counts, num_tiles, out: _Out):
    """As `_place`, given the pairs of each expert by chunk; a row's program adds them up."""
    row = jax.lax.axis_index("row")
    (chunks, E), k = counts.shape, out.place.shape[1]
    chunk = jax.lax.div(row, whole(_CHUNK))
    start = (row - chunk * _CHUNK) * k
    theirs, index = _pairs_of(ids, chunk)
    layout = strided(E, 4)
    each = [load(counts.at[i], layout) for i in range(chunks)]
    values = _as(out.rows[0].dtype, load(x.at[row], strided(x.shape[1], 8)))
    mine, routed = _experts_of(ids, chunk, start, k, E)
    own = plgpu.broadcasted_iota(jnp.int32, (E,), 0, layout=layout)
    total = functools.reduce(jnp.add, each)
    earlier = functools.reduce(
        jnp.add, [one * jnp.where(i < chunk, 1, 0) for i, one in enumerate(each)]
    )
    groups, cut = (
        jax.lax.div(total + (size - 1), whole(size)) for size in (ALIGNED, out.tile_rows)
    )
    half = 16  # bits of each of two numbers in one
    ahead = [jnp.sum(jnp.where(own < one, groups + (cut << half), 0)) for one in mine]
    at = [jnp.sum(jnp.where(own == one, total + (earlier << half), 0)) for one in mine]
    low = (1 << half) - 1
    begin, tile = [ALIGNED * (n & low) for n in ahead], [n >> half for n in ahead]
    before = _counts([(theirs == one) & (index < start + j) for j, one in enumerate(mine)])
    rank = [(n >> half) + more for n, more in zip(at, before, strict=True)]
    where = [mine, routed, begin, tile, [n & low for n in at], rank]
    _write_row(row, where, values, out)
    count = jnp.sum(cut)

    @pl.when(row == 0)
    def _():
        num_tiles[0] = count

    return count, values


def _place_few(x, ids, num_tiles, out: _Out, E: int):
    """As `_place` for a single chunk: each row's program counts all pairs.

    A tile begins at each pair whose rank among those of its expert is a multiple of `tile_rows`.
    """
    row, zero = jax.lax.axis_index("row"), whole(0)
    k = out.place.shape[1]
    start = row * k
    theirs, index = _pairs_of(ids, zero)
    values = _as(out.rows[0].dtype, load(x.at[row], strided(x.shape[1], 8)))
    mine, routed = _experts_of(ids, zero, start, k, E)

    def count_ahead(i, ranks):
        for j in range(_AT_ONCE):
            at = i * _AT_ONCE + j
            ranks += jnp.where((theirs == ids[zero, at]) & (index > at), 1, 0)
        return ranks

    ranks = jax.lax.fori_loop(0, ids.shape[1] // _AT_ONCE, count_ahead, jnp.zeros_like(index))
    is_one = (theirs >= 0) & (theirs < E)
    begins, is_tile = (
        is_one & (ranks == jax.lax.div(ranks, jnp.int32(size)) * size)
        for size in (ALIGNED, out.tile_rows)
    )
    found = [is_tile]
    for j, one in enumerate(mine):
        below = theirs < one
        same = theirs == one
        found += [begins & below, is_tile & below, same, same & (index < start + j)]
    count, *found = _counts(found)
    begin = [ALIGNED * n for n in found[::4]]
    where = [mine, routed, begin, found[1::4], found[2::4], found[3::4]]
    _write_row(row, where, values, out)

    @pl.when(row == 0)
    def _():
        num_tiles[0] = count

    return count, values


def _pairs_of(ids, chunk):
    """Experts of a chunk's pairs, and the pairs' numbers."""
    layout = strided(ids.shape[1], 4)
    theirs = load(ids.at[chunk], layout)
    return theirs, plgpu.broadcasted_iota(jnp.int32, theirs.shape, 0, layout=layout)


def _experts_of(ids, chunk, start, k, E):
    """Experts of a row, 0 for an invalid one, and which of them are valid."""
    experts = [ids[chunk, start + j] for j in range(k)]
    routed = [(expert >= 0) & (expert < E) for expert in experts]
    return [jnp.where(is_one, one, 0) for one, is_one in zip(experts, routed, strict=True)], routed


def _counts(masks):
    """The number of true values of each mask.

    One sum counts several masks: a sum over threads takes as long as some 50 instructions.
    """
    bits = masks[0].shape[0].bit_length()
    at_once, found = 31 // bits, []
    for first in range(0, len(masks), at_once):
        together = masks[first : first + at_once]
        packed = [jnp.where(mask, 1 << (bits * i), 0) for i, mask in enumerate(together)]
        total = jnp.sum(functools.reduce(jnp.add, packed))
        found += [(total >> (bits * i)) & ((1 << bits) - 1) for i in range(len(together))]
    return found


def _write_row(row, where, values, out: _Out) -> None:
    """Write the row to the places of its pairs, and the tiles that begin with one of them."""
    tiles, tile_rows, beside = out.tiles, out.tile_rows, out.beside
    for j, (expert, routed, begin, tile, length, rank) in enumerate(zip(*where, strict=True)):
        at = begin + rank
        if beside is not None:
            at = at + beside.count * beside.apart
        out.place[row, j] = jnp.where(routed, at, NO_PLACE)

        @pl.when(routed)
        def _(at=at):
            for ref, value in zip(out.rows, values, strict=True):
                ref[at] = value

        before = jax.lax.div(rank, whole(tile_rows))

        @pl.when(routed & (rank == before * tile_rows))
        def _(at=at, to=tile + before, expert=expert, left=length - rank):
            to = to if beside is None else beside.slot(to)
            tiles[to, 0] = expert
            tiles[to, 1] = at
            tiles[to, 2] = jnp.minimum(left, tile_rows)


def _as(dtype: Any, row: Array) -> list[Array]:
    """A row in `dtype`, followed by its scale if `dtype` has 8 bits."""
    if dtype != FP8:
        return [row]
    row = row.astype(jnp.float32)
    factor, unit = factors_of_scalar(jnp.max(jnp.abs(row)), row.shape)
    return [(row * factor).astype(FP8), unit]


def strided(size: int, most: int) -> Any:
    """A row spread over the threads of a warpgroup, which load up to `most` numbers at once."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=math.gcd(size // THREADS, most))
