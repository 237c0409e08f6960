"""Pallas Mosaic kernels for NVIDIA Hopper: four launches, an expert's weights read once a tile.

1. `_place`: each pair (row, expert) gets a place in the list sorted by expert, where its row is
   copied. XLA counts the pairs in earlier launches. For up to 32 rows each program counts all pairs
   instead (`_place_few`), for up to 512 it adds up the counts of chunks (`_place_counted`).
2. Gate and up with the activation, and 3. down: `_multiply`, tiles of rows times columns of the
   weights of their expert.
4. `_combine`: the weighted sum over a row's experts, in the order of its choices; omitted if the
   following norm adds the results up (`RoutedRows`).

8-bit experts are stored as [N K] and multiplied with 8-bit rows. `_place` rounds the input rows; a
fifth launch, `_round`, rounds the rows between the products. The scales of row and column multiply
the float32 sums.

A dense half that all rows take may share these launches: its columns count as further experts. Its
rows lie before all other places, once for gate and up, and after that once for each region of its
inner columns. This saves its launches and their gaps, and its weights load while other blocks load
those of experts. Its gate and up are interleaved in shared memory too, so their sums are separated
by column groups; the sums of experts are two halves.

The rows of an expert begin at a multiple of 8 places, as a swizzled tile does. The places between
experts are never written; their results are garbage and never read. The grid is persistent: the
blocks that run at once take the tiles at a stride. In a block one warpgroup loads, by TMA through a
ring of buffers, ahead of the current tile. The others compute 64 rows each, or a multiple of 64
with the same weights. A row's sums do not depend on the size of its tile.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from .. import hopper
from ..activation import GELU_CUBE, GELU_SLOPE, Activation
from ..hopper import MULTIPROCESSORS, SHARED_BYTES, load, load_scales, next_buffer, swizzled
from ..layer.fp8 import DTYPE as FP8
from ..layer.fp8 import Fp8Matrix, Fp8Rows, factors_of, factors_of_scalar
from ..layer.mosaic import weighted
from ..layer.mosaic_heads import layout_of_rows
from ..layer.routed import RoutedRows
from ..lowered import lowered_once
from .fp8 import Fp8Experts
from .tiles import NO_PLACE, max_tiles

_ROWS = 64  # rows of a warpgroup's product
_ALIGNED = 8  # rows of a swizzled tile
_COLUMNS = 64  # an inner width is a multiple of this
_MOST_ROWS = 288  # rows of a tile: leaves four ring buffers; a thread holds three sums of 64 rows
_MOST_LOADED = 192  # rows of one copy; TMA takes up to 256
_SCALES = 32  # scales of 128 bytes: a copy of them begins at a whole line
_STAGED = 64  # columns of results that are stored at once
_LINE_BYTES = 128  # most bytes of the depth of a step
_MOST_STAGES = 12
_CHUNK = 32  # rows whose pairs are compared with each other; counts cover earlier chunks
_FEW_CHUNKS = 16  # most chunks whose counts each row's program adds up
_ROUNDED, _PIECE = 4, 256  # rows of a program that rounds, and columns that it loads at once
_AT_ONCE = 16  # pairs compared in one iteration of a loop
_BETWEEN = 24  # tiles of experts between those of a dense half
_THREADS, _PAIR = 128, 2  # threads of a row's program, and least numbers rounded to 8 bits at once
# By the number of computing warpgroups. All warpgroups share the registers of the launch (65,536
# over all threads, a multiple of 8 each); if they ask for more, the last one waits forever.
_REGISTERS = {1: 208, 2: 232, 3: 152, 4: 104}
_LOADING_REGISTERS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside:
    """The position of a dense half among the experts.

    Attributes:
        experts: Number of experts; higher expert numbers belong to the dense half.
        count: Number of experts that the dense half counts as, and of regions of inner columns.
        inner: Inner columns of the dense half.
        rows: Rows of the dense half.
        tile_rows: As in `_sorted_rows`.
    """

    experts: int
    count: int
    inner: int
    rows: int
    tile_rows: int

    @property
    def apart(self) -> int:
        """Places of one region of inner columns."""
        return -(-self.rows // _ALIGNED) * _ALIGNED

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """The tile of one thread block.

    Attributes:
        groups: Warpgroups that compute; at most 4.
        rows: Rows of a tile, which the warpgroups take 64 at a time with the same weights; 0 for
            64 a warpgroup.
        gate_up: Columns of gate and up together.
        down: Columns of down.
        blocks: Most thread blocks; each needs a multiprocessor to itself.
    """

    groups: int = 1
    rows: int = 0
    gate_up: int = 128
    down: int = 128
    blocks: int = MULTIPROCESSORS

    @property
    def tile_rows(self) -> int:
        """Most rows of a tile."""
        return self.rows or self.groups * _ROWS


# A dense half: its normed rows (None: those of the experts), gate and up interleaved, and down.
Dense = tuple[Fp8Rows | None, Array | Fp8Matrix, Array | Fp8Matrix]


def unsupported(x: Array, w_down: Array | Fp8Experts) -> str | None:
    """Why this back end cannot take these arguments here, or None."""
    return hopper.unsupported() or unsupported_arguments(x, w_down)


def unsupported_arguments(x: Array, w_down: Array | Fp8Experts) -> str | None:
    """Why no device can take these arguments, or None."""
    _, F, D = w_down.shape
    if reason := hopper.unsupported_version():
        return reason
    if not len(x):
        return "needs at least one row"
    if x.dtype not in (jnp.bfloat16, jnp.float16) or w_down.dtype not in (x.dtype, FP8):
        kinds = f"{x.dtype} and {w_down.dtype}"
        return f"needs rows and weights of one 16-bit type, or weights of 8 bits, got {kinds}"
    wide = _THREADS * _PAIR if w_down.dtype == FP8 else _THREADS
    if D % wide or F % _COLUMNS:
        return (
            f"needs a model width that is a multiple of {wide} and an inner one of {_COLUMNS}, "
            f"got {D=} and {F=}"
        )
    return None


def choose_tiling(num_pairs: int, w_down: Array | Fp8Experts) -> Tiling:
    """A tiling for `num_pairs` pairs that are spread evenly over the experts.

    Within 3 % of the best tried on an H200 (benchmarks/results/expert_ffn_mosaic_h200.json).
    """
    E, F, D = w_down.shape
    rows, wide = num_pairs / E, 128 if D % 256 else 256
    gated = 128 if F < 128 else 256
    if rows <= 24:  # most experts have fewer rows than a warpgroup takes
        # Narrow tiles spread few experts evenly over the blocks, though they read rows twice.
        is_narrow = F % 128 or rows <= 2 or isinstance(w_down, Fp8Experts)
        return Tiling(groups=1, gate_up=128 if is_narrow else gated, down=wide)
    if rows <= 96:
        return Tiling(groups=2, gate_up=128, down=wide)
    if rows <= 160:  # most experts have some more than the rows of two warpgroups
        return Tiling(groups=3, gate_up=128, down=128)
    if isinstance(w_down, Fp8Experts):
        return Tiling(groups=2, gate_up=128, down=128)
    # With evenly spread rows, one expert in forty exceeds the mean by two square roots.
    most = rows + 2 * math.sqrt(rows)
    each = most / math.ceil(most / _MOST_ROWS)
    return Tiling(groups=2, rows=math.ceil(each / 32) * 32, gate_up=128, down=128)


def unsupported_beside(w_down: Array | Fp8Experts, dense: Dense) -> str | None:
    """Why a dense half cannot share the launches of these experts, or None."""
    rows, w_gate_up, w_out = dense
    _, F, _ = w_down.shape
    inner, turn = w_out.shape[0], w_gate_up.shape[-1]
    if isinstance(w_down, Fp8Experts):
        of_kind = isinstance(rows, Fp8Rows | None)
        of_kind &= isinstance(w_gate_up, Fp8Matrix) and isinstance(w_out, Fp8Matrix)
    else:
        of_kind = rows is None and w_down.dtype == w_gate_up.dtype == w_out.dtype
    if not of_kind:
        return "needs rows and weights of the experts' type; other rows only in 8 bits"
    wide, least, count = F, 1, inner // F
    if isinstance(w_down, Fp8Experts):
        wide, least = w_down.values.shape[-1], _THREADS * _PAIR
        assert isinstance(w_out, Fp8Matrix)
        if w_out.values.shape[-1] % _LINE_BYTES:
            return f"needs inner columns that fill whole lines, got {inner}"
    if wide % least:  # width of the rows between the products
        return f"needs experts whose inner columns fill {least}s, got {wide}"
    if inner % F or -(-inner // wide) != count:
        return f"needs as many regions of {wide} inner columns as of {F}, got {inner}"
    if turn % 8 or _COLUMNS % turn:  # column groups of a product and of a tile
        return f"needs turns of 8s that divide {_COLUMNS}, got {turn}"
    return None


@lowered_once(static_argnames=("activation", "tiling", "interpret"))
def routed_rows(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    w_gate_up: Array | Fp8Experts,
    w_down: Array | Fp8Experts,
    dense: Dense | None = None,
    *,
    activation: Activation = "silu",
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> tuple[RoutedRows, ...]:
    """See `api.expert_ffn`; `interpret`, an `InterpretGPUParams`, runs it on a CPU, for tests.

    Returns:
        The results of the experts, and those of the dense half if given.
    """
    E, F, D = w_down.shape
    tiling = choose_tiling(expert_ids.size, w_down) if tiling is None else tiling
    if tiling.gate_up > 2 * F or tiling.down > D:
        raise ValueError(f"{tiling=} is wider than its matrices, {F=} and {D=}")
    is_small = isinstance(w_down, Fp8Experts)
    beside, held, more_gate_up, more_down = (None,) * 4
    if dense is not None:
        held, more_gate_up, more_down = dense
        inner = more_down.shape[0]
        if F % (tiling.gate_up // 2):
            raise ValueError(f"{tiling=} begins columns early; the dense half's lie in turns")
        numbers = {"experts": E, "count": inner // F, "inner": inner}
        beside = Beside(**numbers, rows=len(x), tile_rows=tiling.tile_rows)
    rows, place, tiles, num_tiles = _sorted_rows(
        x, expert_ids, E, tiling.tile_rows, is_small, interpret, held, beside
    )

    def gated(gate: Array, up: Array) -> Array:
        slope = gate
        if activation == "gelu":
            slope = GELU_SLOPE * (gate + GELU_CUBE * gate * gate * gate)
        root = jax.lax.rsqrt(1 + jnp.exp(-slope))  # one instruction; a division takes about twenty
        return gate * (root * root) * up

    how = {"tiles": tiles, "num_tiles": num_tiles, "tiling": tiling, "interpret": interpret}
    multiply = functools.partial(_product, dtype=x.dtype, beside=beside, **how)
    inner = multiply(rows, w_gate_up, more_gate_up, gated, parts=2, columns=tiling.gate_up)
    if is_small:
        inner = _rounded(inner, F, interpret, beside)
    results = multiply(inner, w_down, more_down, lambda sums: sums, parts=1, columns=tiling.down)
    routed = RoutedRows(results, place, expert_weights.astype(jnp.float32))
    if beside is None:
        return (routed,)
    at = np.arange(len(x))[:, None] + np.arange(beside.count)[None] * beside.apart
    ones = jnp.ones(at.shape, jnp.float32)
    return routed, RoutedRows(results, jnp.asarray(at, jnp.int32), ones)


@lowered_once(static_argnames=("activation", "tiling", "interpret"))
def expert_ffn(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    w_gate_up: Array | Fp8Experts,
    w_down: Array | Fp8Experts,
    *,
    activation: Activation = "silu",
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> Array:
    """The results of `routed_rows`, added up and rounded."""
    given = x, expert_ids, expert_weights, w_gate_up, w_down
    how = {"activation": activation, "tiling": tiling, "interpret": interpret}
    (routed,) = routed_rows.__wrapped__(*given, **how)
    return hopper.kernel(
        _combine,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(len(x),),
        grid_names=("row",),
        kernel_name="expert_ffn_combine",
        interpret=interpret,
    )(routed.results, routed.place, routed.weights)


def _sorted_rows(
    x: Float[Array, "T D"],
    expert_ids: Int[Array, "T k"],
    E: int,
    tile_rows: int,
    is_quantized: bool,
    interpret: Any,
    held: Fp8Rows | None = None,
    beside: Beside | None = None,
) -> tuple[Float[Array, "P D"] | Fp8Rows, Int[Array, "T k"], Int[Array, "N 3"], Int[Array, " n"]]:
    """Rows by place, the place of each pair, the tiles, and numbers that end in the tile count.

    A tile is its expert, the place of its first row and its number of rows. Places between experts
    and tiles past the last one are arbitrary. The count covers the tiles of experts only.

    Args:
        held: Rows of the dense half; None: `x`.
    """
    (T, k), K = expert_ids.shape, x.shape[1]
    chunks = -(-T // _CHUNK)
    pairs = -(-_CHUNK * k // _THREADS) * _THREADS  # of a chunk
    ids = jnp.pad(
        expert_ids.astype(jnp.int32), ((0, chunks * _CHUNK - T), (0, 0)), constant_values=-1
    )
    ids = ids.reshape(chunks, _CHUNK * k)
    ids = jnp.pad(ids, ((0, 0), (0, pairs - _CHUNK * k)), constant_values=-1)
    # Loads of a tile's rows may reach past the last place.
    places = T * k + min(T * k, E) * (_ALIGNED - 1) + tile_rows
    places = -(-places // _ALIGNED) * _ALIGNED
    most_tiles, given = max_tiles(T * k, E, tile_rows), (x,)
    if beside is not None:
        places += beside.count * beside.apart
        most_tiles += beside.count * beside.tiles
        given = (x,) if held is None else (x, held.values.reshape(T, K), held.scales.reshape(T))
    out = [
        jax.ShapeDtypeStruct((T, k), jnp.int32),
        jax.ShapeDtypeStruct((most_tiles, 3), jnp.int32),
        *_rows_like(places, x.shape[1], FP8 if is_quantized else x.dtype),
    ]

    def launch(body: Callable[..., Any], out_type: Any) -> Callable[..., Any]:
        body = functools.partial(body, beside=beside)
        if beside is not None:
            body = functools.partial(
                _place_beside,
                body=body,
                beside=beside,
                has_rows=held is not None,
                targets=len(out) - 2,
            )
        return hopper.kernel(
            body,
            out_type=out_type,
            grid=(T,),
            grid_names=("row",),
            kernel_name="expert_ffn_place",
            interpret=interpret,
        )

    if chunks == 1:
        body = functools.partial(_place_few, E=E, k=k, tile_rows=tile_rows)
        count = jax.ShapeDtypeStruct((1,), jnp.int32)
        num_tiles, place, tiles, rows, *scales = launch(body, [count, *out])(*given, ids)
        return Fp8Rows(rows, *scales) if scales else rows, place, tiles, num_tiles

    # Comparisons and sums fuse into one launch each; a sort or a running sum takes several.
    experts = jnp.arange(E, dtype=jnp.int32)
    counts = (ids[:, None, :] == experts[None, :, None]).sum(axis=2, dtype=jnp.int32)
    if chunks <= _FEW_CHUNKS and E % _THREADS == 0:
        body = functools.partial(_place_counted, k=k, tile_rows=tile_rows)
        count = jax.ShapeDtypeStruct((1,), jnp.int32)
        num_tiles, place, tiles, rows, *scales = launch(body, [count, *out])(*given, ids, counts)
        return Fp8Rows(rows, *scales) if scales else rows, place, tiles, num_tiles
    earlier = jnp.tri(chunks + 1, chunks, k=-1, dtype=bool)  # the last line: all chunks
    before = jnp.where(earlier[:, :, None], counts[None], 0).sum(axis=1, dtype=jnp.int32)
    count = before[-1]
    below = experts[None] < jnp.arange(E + 1, dtype=jnp.int32)[:, None]
    first, first_tile = (
        jnp.where(below, -(-count[None] // size), 0).sum(axis=1, dtype=jnp.int32)
        for size in (_ALIGNED, tile_rows)
    )
    body = functools.partial(_place, k=k, tile_rows=tile_rows)
    counts = ids, before, first, first_tile
    place, tiles, rows, *scales = launch(body, out)(*given, *counts)
    return Fp8Rows(rows, *scales) if scales else rows, place, tiles, first_tile


def _rows_like(count: int, width: int, dtype: Any) -> list[jax.ShapeDtypeStruct]:
    """Shapes of `count` rows and, for 8 bits, of their scales."""
    rows = jax.ShapeDtypeStruct((count, width), dtype)
    return [rows, jax.ShapeDtypeStruct((count,), jnp.float32)] if dtype == FP8 else [rows]


def _place_beside(x, *refs, body, beside, has_rows, targets):
    """Run `body` and place a row of the dense half; `body` counts the tiles of experts.

    Args:
        has_rows: The dense half has other rows than the experts.
        targets: Number of references that a row is written to: values and, for 8 bits, scales.
    """
    row, size = jax.lax.axis_index("row"), jnp.asarray(beside.tile_rows, jnp.int32)
    held = ()
    if has_rows:
        (numbers, units), refs = refs[:2], refs[2:]
        held = load(numbers.at[row], _strided(numbers.shape[1], 8)), units[row]
    count, values = body(x, *refs)
    tiles = refs[-targets - 1]
    for ref, value in zip(refs[-targets:], held or values, strict=True):
        ref[row] = value
    before = jax.lax.div(row, size)

    @pl.when(row == before * size)
    def _():
        for i in range(beside.count):
            to = beside.first_slot(i, count) + before
            tiles[to, 0] = beside.experts + i
            tiles[to, 1] = i * beside.apart + row
            tiles[to, 2] = jnp.minimum(beside.rows - row, size)


def _place(x, ids, before, first, first_tile, place, tiles, rows, *scales, k, tile_rows, beside):
    """One row: write it to the places of its pairs; return the number of tiles and the row."""
    row, number = jax.lax.axis_index("row"), functools.partial(jnp.asarray, dtype=jnp.int32)
    chunk = jax.lax.div(row, number(_CHUNK))
    start = (row - chunk * _CHUNK) * k  # of its pairs in the chunk
    theirs, index = _pairs_of(ids, chunk)
    values = _as(rows.dtype, load(x.at[row], _strided(x.shape[1], 8)))
    # All reads come before the writes, so that their latencies overlap.
    mine, routed = _experts_of(ids, chunk, start, k, before.shape[1])
    begin = [first[one] * _ALIGNED for one in mine]
    tile = [first_tile[one] for one in mine]
    length = [before[before.shape[0] - 1, one] for one in mine]
    ahead = [(theirs == one) & (index < start + j) for j, one in enumerate(mine)]
    rank = [before[chunk, one] + more for one, more in zip(mine, _counts(ahead), strict=True)]
    where = [mine, routed, begin, tile, length, rank]
    _write_row(row, where, values, place, tiles, (rows, *scales), tile_rows, beside)
    return first_tile[first_tile.shape[0] - 1], values


def _place_counted(x, ids, counts, num_tiles, place, tiles, rows, *scales, k, tile_rows, beside):
    """As `_place`, given the pairs of each expert by chunk; a row's program adds them up."""
    row, number = jax.lax.axis_index("row"), functools.partial(jnp.asarray, dtype=jnp.int32)
    chunks, E = counts.shape
    chunk = jax.lax.div(row, number(_CHUNK))
    start = (row - chunk * _CHUNK) * k
    theirs, index = _pairs_of(ids, chunk)
    layout = _strided(E, 4)
    each = [load(counts.at[i], layout) for i in range(chunks)]
    values = _as(rows.dtype, load(x.at[row], _strided(x.shape[1], 8)))
    mine, routed = _experts_of(ids, chunk, start, k, E)
    own = plgpu.broadcasted_iota(jnp.int32, (E,), 0, layout=layout)
    whole = functools.reduce(jnp.add, each)
    earlier = functools.reduce(
        jnp.add, [one * jnp.where(i < chunk, 1, 0) for i, one in enumerate(each)]
    )
    groups, cut = (jax.lax.div(whole + (size - 1), number(size)) for size in (_ALIGNED, tile_rows))
    half = 16  # bits of each of two numbers in one
    ahead = [jnp.sum(jnp.where(own < one, groups + (cut << half), 0)) for one in mine]
    at = [jnp.sum(jnp.where(own == one, whole + (earlier << half), 0)) for one in mine]
    low = (1 << half) - 1
    begin, tile = [_ALIGNED * (n & low) for n in ahead], [n >> half for n in ahead]
    before = _counts([(theirs == one) & (index < start + j) for j, one in enumerate(mine)])
    rank = [(n >> half) + more for n, more in zip(at, before, strict=True)]
    where = [mine, routed, begin, tile, [n & low for n in at], rank]
    _write_row(row, where, values, place, tiles, (rows, *scales), tile_rows, beside)
    count = jnp.sum(cut)

    @pl.when(row == 0)
    def _():
        num_tiles[0] = count

    return count, values


def _place_few(x, ids, num_tiles, place, tiles, rows, *scales, E, k, tile_rows, beside):
    """As `_place` for a single chunk: each row's program counts all pairs.

    A tile begins at each pair whose rank among those of its expert is a multiple of `tile_rows`.
    """
    row, zero = jax.lax.axis_index("row"), jnp.asarray(0, jnp.int32)
    start = row * k
    theirs, index = _pairs_of(ids, zero)
    values = _as(rows.dtype, load(x.at[row], _strided(x.shape[1], 8)))
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
        for size in (_ALIGNED, tile_rows)
    )
    found = [is_tile]
    for j, one in enumerate(mine):
        below = theirs < one
        same = theirs == one
        found += [begins & below, is_tile & below, same, same & (index < start + j)]
    count, *found = _counts(found)
    begin = [_ALIGNED * n for n in found[::4]]
    where = [mine, routed, begin, found[1::4], found[2::4], found[3::4]]
    _write_row(row, where, values, place, tiles, (rows, *scales), tile_rows, beside)

    @pl.when(row == 0)
    def _():
        num_tiles[0] = count

    return count, values


def _pairs_of(ids, chunk):
    """Experts of a chunk's pairs, and the pairs' numbers."""
    layout = _strided(ids.shape[1], 4)
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


def _write_row(row, where, values, place, tiles, targets, tile_rows, beside):
    """Write the row to the places of its pairs, and the tiles that begin with one of them."""
    for j, (expert, routed, begin, tile, length, rank) in enumerate(zip(*where, strict=True)):
        at = begin + rank
        if beside is not None:
            at = at + beside.count * beside.apart
        place[row, j] = jnp.where(routed, at, NO_PLACE)

        @pl.when(routed)
        def _(at=at):
            for ref, value in zip(targets, values, strict=True):
                ref[at] = value

        before = jax.lax.div(rank, jnp.asarray(tile_rows, jnp.int32))

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


def _rounded(
    inner: Float[Array, "P Fp"], F: int, interpret: Any, beside: Beside | None = None
) -> Fp8Rows:
    """The rows of all places in 8 bits; columns past the last one become 0.

    The last one is F, or the end of the dense half in its last region. Rows of unused places are
    arbitrary: to skip them, a program would first have to wait for a list.
    """
    P, width = inner.shape
    values, scales = hopper.kernel(
        functools.partial(_round, F=F, beside=beside),
        out_type=_rows_like(P, width, FP8),
        grid=(P // _ROUNDED,),
        grid_names=("rows",),
        kernel_name="expert_ffn_round",
        # The kernel never reads its own writes, so threads need not wait for their warpgroup.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(inner)
    return Fp8Rows(values, scales)


def _round(inner, values, scales, *, F, beside):
    """Round the rows of four places, one row a warp."""
    first = pl.multiple_of(jax.lax.axis_index("rows") * _ROUNDED, _ROUNDED)
    rows, width = pl.ds(first, _ROUNDED), inner.shape[1]
    columns, piece = F, math.gcd(width, _PIECE)
    if beside is not None:
        region = jax.lax.div(first, jnp.asarray(beside.apart, jnp.int32))
        columns = jnp.where(region < beside.count, beside.inner - region * width, F)
    layout, pieces = layout_of_rows(piece), [pl.ds(at, piece) for at in range(0, width, piece)]

    def load_piece(at):
        found = load(inner.at[rows, at], layout).astype(jnp.float32)
        if width == F:
            return found
        index = plgpu.broadcasted_iota(jnp.int32, found.shape, 1, layout=layout)
        return jnp.where(index < columns - at.start, found, 0.0)

    found = [load_piece(at) for at in pieces]
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(one), axis=1) for one in found])
    factors, scales[rows] = factors_of(largest)
    by = jax.lax.broadcast_in_dim(factors, found[0].shape, [0])
    for at, one in zip(pieces, found, strict=True):
        values[rows, at] = (one * by).astype(FP8)


def _combine(results, place, weights, out):
    """One row: the weighted sum of its experts' results."""
    row, layout = jax.lax.axis_index("row"), _strided(results.shape[1], 8)
    out[row] = weighted(results, place, weights, row, layout).astype(out.dtype)


def _product(
    x: Float[Array, "P K"] | Fp8Rows,
    w: Float[Array, "E K *N"] | Fp8Experts,
    more: Array | Fp8Matrix | None,
    finish: Callable[..., Array],
    *,
    dtype: Any,
    beside: Beside | None,
    tiles: Int[Array, "N 3"],
    num_tiles: Int[Array, " n"],
    parts: int,
    columns: int,
    tiling: Tiling,
    interpret: Any,
) -> Array:
    """The rows of each tile times the weights of its expert, whose `parts` meet in `finish`.

    The dense half has the matrix `more`. Rows that will be rounded to 8 bits are padded to whole
    pairs of columns for every thread.
    """
    E, K = w.shape[:2]
    K = w.values.shape[-1] if isinstance(w, Fp8Experts) else K
    N = math.prod(w.shape[2:]) // parts
    if isinstance(x, Fp8Rows):
        assert isinstance(w, Fp8Experts)
        rows, flat, scales = x.values, w.values.reshape(-1, K), (x.scales, w.scales.reshape(-1))
    else:
        assert isinstance(w, jax.Array)
        rows, flat, scales = x, w.reshape(E * K, parts, N), ()
    kind, most_rows = rows.dtype, tiling.tile_rows
    depth = math.gcd(K, _LINE_BYTES // kind.itemsize)
    width = columns // parts
    others = ()
    gate_turn = more.shape[-1] if more is not None and parts == 2 else None
    if isinstance(more, Fp8Matrix):
        others = more.flat.values, more.flat.scales
    elif more is not None:
        others = (more.reshape(K, -1, width) if parts == 2 else more.reshape(-1, 1, N),)
    tile = (columns, depth) if scales else (depth, parts, width)
    staged = (tiling.groups, _ROWS, math.gcd(width, _STAGED) if tiling.rows else width)
    apart = math.prod(staged) * jnp.dtype(dtype).itemsize
    held = -(-most_rows // _SCALES) * _SCALES
    apart += 2 * 4 * (held + columns) if scales else 0
    step = (most_rows + columns) * depth * kind.itemsize
    stages = min((SHARED_BYTES - apart) // step, _MOST_STAGES)
    if scales:  # the ring comes round within a tile: see `ask_for_scales`
        stages = min(stages, K // depth)
    # Both operands of a product have one swizzle; [K N] weights are swizzled along N.
    weight_copies = parts if scales else 1
    row_copies = -(-most_rows // _MOST_LOADED)
    line = depth if scales else math.gcd(depth, width)
    transforms = swizzled(line, kind)
    # Zeros fill the last line of experts; the last step does not load them.
    short = w.shape[1] % depth if scales else 0
    rings = {
        "rows": plgpu.SMEM((stages, most_rows, depth), kind, transforms=transforms),
        "weights": plgpu.SMEM(
            (stages, *tile), kind, transforms=swizzled(line, kind, parts=len(tile) - 1)
        ),
    }
    if short:  # a view of the same memory for the shorter last step
        lasts = {
            f"last_{name}": plgpu.SMEM(
                (stages, lines * depth // short, short), kind, transforms=swizzled(short, kind)
            )
            for name, lines in (("rows", most_rows), ("weights", columns))
        }
        if interpret is None:
            pairs = zip(rings, rings.values(), lasts.values(), strict=True)
            rings = {name: plgpu.RefUnion(ring, last) for name, ring, last in pairs}
        else:  # the interpreter does not support RefUnion
            rings |= lasts
    scratch = {
        **rings,
        "out": plgpu.SMEM(staged, dtype, transforms=swizzled(staged[2], dtype)),
        "loaded": plgpu.Barrier(num_barriers=stages, num_arrivals=weight_copies + row_copies),
        "used": plgpu.Barrier(num_barriers=stages, num_arrivals=tiling.groups),
    }
    if scales:  # two buffers: the scales of the next tile are loaded early
        scratch["row_scales"] = plgpu.SMEM((2, held), jnp.float32)
        scratch["column_scales"] = plgpu.SMEM((2, parts, width), jnp.float32)
        scratch["scaled"] = plgpu.Barrier(num_barriers=2, num_arrivals=weight_copies + row_copies)
    names = (*("of_rows", "of_columns")[: len(scales)], *("more", "of_more")[: len(others)])
    names = (*names, "result", *scratch)
    wide = _THREADS * _PAIR if scales and parts == 2 else 1
    return hopper.kernel(
        functools.partial(
            _multiply,
            names=names,
            N=N,
            groups=tiling.groups,
            width=width,
            parts=parts,
            depth=depth,
            short=short,
            gate_turn=gate_turn,
            beside=beside,
            finish=finish,
        ),
        out_type=jax.ShapeDtypeStruct((len(rows), -(-N // wide) * wide), dtype),
        grid=(min(len(tiles) * -(-N * parts // columns), tiling.blocks),),
        grid_names=("block",),
        kernel_name="expert_ffn_gate_up" if parts == 2 else "expert_ffn_down",
        num_threads=tiling.groups + 1,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(rows, flat, tiles, num_tiles, *scales, *others)


def _multiply(
    x,
    w,
    tiles,
    num_tiles,
    *refs,
    names,
    N,
    groups,
    width,
    parts,
    depth,
    short,
    gate_turn,
    beside,
    finish,
):
    """One thread block: a tile of rows and columns, then further tiles at a stride of `blocks`.

    8-bit gate and up are adjacent in shared memory, so that one product with both reads the rows
    once; those of a dense half are interleaved in groups of `gate_turn` columns. Of the experts'
    last line the first `short` columns are loaded, or all if it is 0.
    """
    scratch = dict(zip(names, refs, strict=True))
    if short and "last_rows" not in scratch:
        for name in ("rows", "weights"):
            scratch[name], scratch[f"last_{name}"] = scratch[name]
    ring = scratch["rows"], scratch["weights"]
    last_ring = (scratch["last_rows"], scratch["last_weights"]) if short else ring
    out, is_scaled = scratch["result"], "scaled" in scratch
    stages, most_rows, _ = scratch["rows"].shape
    turns, piece_width = -(-most_rows // (groups * _ROWS)), scratch["out"].shape[2]
    aligned = math.gcd(width, _COLUMNS)  # where a tile's columns begin
    number = functools.partial(jnp.asarray, dtype=jnp.int32)
    block, blocks = jax.lax.axis_index("block"), jax.lax.axis_size("block")
    warpgroup = jax.lax.axis_index("warpgroup")
    across = -(-N // width)
    zero, steps = number(0), (w.shape[1] if is_scaled else x.shape[1]) // depth
    work = num_tiles[num_tiles.shape[0] - 1]
    if beside is not None:
        work += beside.count * beside.tiles
    work *= across
    count = jnp.maximum(jax.lax.div(work - block + (blocks - 1), number(blocks)), 0)
    after = functools.partial(next_buffer, stages=stages)

    def place(i):
        """Expert, place of the first row, number of rows and first column of the i-th tile."""
        item = block + jnp.minimum(i, count - 1) * blocks
        tile = jax.lax.div(item, number(across))
        # The last tile of columns is moved left so that it ends at N.
        column = jnp.minimum((item - tile * across) * width, N - width)
        return (*(tiles[tile, j] for j in range(3)), pl.multiple_of(column, aligned))

    def piece(i, size):
        return pl.ds(pl.multiple_of(i * size, size), size)

    def of_parts(expert, column, copy):
        """Call `copy(i, start, part)` for each part of a tile's columns.

        `start` counts in the experts' matrices if i is None, else in the dense half's i-th expert.
        """

        def of_expert():
            for part in range(parts):
                start = (expert * parts + part) * N + column
                copy(None, pl.multiple_of(start, aligned), part)

        if beside is None:
            of_expert()
            return
        i = expert - beside.experts

        def of_more():
            for part in range(parts):
                start = 2 * (i * N + column) + part * width if parts == 2 else column
                copy(i, pl.multiple_of(start, aligned), part)

        pl.when(i < 0)(of_expert)
        pl.when(i >= 0)(of_more)

    # The experts of a dense half read the same rows for gate and up, and write separate regions.
    shared = beside if parts == 2 else None

    def source(expert, first):
        """Place of the first row of a tile's input."""
        if shared is None:
            return first
        return first - jnp.maximum(expert - shared.experts, 0) * shared.apart

    def target(expert, first, column):
        """Place of the first row, and first column, of a tile's results."""
        if shared is None:
            return first, column
        i, inner = expert - shared.experts, out.shape[1]
        region = jax.lax.div(jnp.maximum(i, 0) * N + column, number(inner))
        down = first + jnp.where(i < 0, 0, region - i) * shared.apart
        return down, jnp.where(i < 0, column, i * N + column - region * inner)

    def begin_of(turn):
        """First row of this warpgroup in a turn; the last 64 rows of a tile begin early."""
        begin = jnp.minimum((turn * groups + warpgroup) * _ROWS, most_rows - _ROWS)
        return pl.multiple_of(begin, math.gcd(most_rows, _ROWS))

    def sizes(most):
        """Row counts that a load may have: with many experts a tile has few rows."""
        return [*(n for n in (8, 16, 32, *range(_ROWS, most, _ROWS)) if n < most), most]

    def ask_for_scales(half, expert, first, column):
        """Load scales over those of the tile before the last, which is finished.

        The ring has come round since, so every warpgroup has reached the tile in between.
        """
        arrived = scratch["scaled"].at[half]
        for begin in range(0, most_rows, _MOST_LOADED):
            size = min(most_rows - begin, _MOST_LOADED)
            own = scratch["of_rows"].at[pl.ds(pl.multiple_of(first + begin, _ALIGNED), size)]
            there = scratch["row_scales"].at[half, pl.ds(begin, size)]
            plgpu.copy_gmem_to_smem(own, there, arrived)

        def copy(i, start, part):
            own = scratch["of_columns" if i is None else "of_more"].at[pl.ds(start, width)]
            plgpu.copy_gmem_to_smem(own, scratch["column_scales"].at[half, part], arrived)

        of_parts(expert, column, copy)

    def load_tile(i, carry):
        slot, (expert, first, length, column) = carry
        following = place(i + 1)  # read early, since a load from memory lasts many steps
        first = source(expert, first)

        def load_step(step, slot):
            @pl.when(i * steps + step >= stages)
            def _():
                plgpu.barrier_wait(scratch["used"].at[slot])

            if not short:
                load_line(step, slot)
            else:
                is_short = step == steps - 1
                if beside is not None:
                    is_short &= expert < beside.experts
                pl.when(is_short)(lambda: load_line(step, slot, is_last=True))
                pl.when(~is_short)(lambda: load_line(step, slot))
            if is_scaled:
                ask = functools.partial(ask_for_scales, i & 1, expert, first, column)
                pl.when(step == 0)(ask)
            return after(slot)

        def load_line(step, slot, is_last=False):
            rows, weights = last_ring if is_last else ring
            loaded, deep = scratch["loaded"].at[slot], piece(step, depth)
            if is_last:
                deep = pl.ds((steps - 1) * depth, short)

            def copy(i, start, part):
                matrix, own = (w, deep) if i is None else (scratch["more"], deep)
                if i is not None and parts == 1:  # a region of its inner columns
                    own = piece(i * steps + step, depth)
                there = weights.at[slot, pl.ds(part * width, width)]
                plgpu.copy_gmem_to_smem(matrix.at[pl.ds(start, width), own], there, loaded)

            if is_last:
                copy(None, pl.multiple_of(expert * N + column, aligned), 0)
            elif is_scaled:
                of_parts(expert, column, copy)
            else:
                columns = pl.ds(pl.multiple_of(column, aligned), width)

                def fetch(matrix, line, columns, there: Any = slice(None)):
                    own = matrix.at[piece(line, depth), there, columns]
                    plgpu.copy_gmem_to_smem(own, weights.at[slot], loaded)

                def of_expert():
                    fetch(w, expert * steps + step, columns)

                def of_more():
                    assert beside is not None
                    i, more = expert - beside.experts, scratch["more"]
                    if parts == 1:  # a region of its inner columns
                        fetch(more, i * steps + step, columns)
                    else:  # two column groups of a tile
                        at = jax.lax.div(i * N + column, number(width)) * 2
                        fetch(more, step, slice(None), pl.ds(at, 2))

                if beside is None:
                    of_expert()
                else:
                    pl.when(expert < beside.experts)(of_expert)
                    pl.when(expert >= beside.experts)(of_more)
            for begin in range(0, most_rows, _MOST_LOADED):
                most = min(most_rows - begin, _MOST_LOADED)
                left = jnp.clip(length - begin, 1, most)  # the barrier counts every copy
                for least, size in itertools.pairwise([0, *sizes(most)]):

                    @pl.when((left > least) & (left <= size))
                    def _(begin=begin, size=size):
                        own = pl.ds(pl.multiple_of(first + begin, _ALIGNED), size)
                        there = rows.at[slot, pl.ds(begin, size)]
                        plgpu.copy_gmem_to_smem(x.at[own, deep], there, loaded)

        return jax.lax.fori_loop(0, steps, load_step, slot), following

    def drain(_, slot):
        plgpu.barrier_wait(scratch["used"].at[slot])
        return after(slot)

    @pl.when((warpgroup == groups) & (count > 0))
    def _():
        plgpu.set_max_registers(_LOADING_REGISTERS, action="decrease")
        slot, _ = jax.lax.fori_loop(0, count, load_tile, (zero, place(zero)))
        # Drain the buffers that were not waited for yet, the oldest first.
        slot = jnp.where(count * steps < stages, 0, slot)
        jax.lax.fori_loop(0, jnp.minimum(count * steps, stages), drain, slot)

    def products(*sums, i, slot, is_dense, is_short, store):
        def step(k, slots, is_last=False):
            slot, before = slots
            rows, weights = last_ring if is_last else ring
            plgpu.barrier_wait(scratch["loaded"].at[slot])
            line = weights.at[slot, pl.ds(0, width)] if is_last else weights.at[slot]
            operand = line.T if is_scaled else line.reshape(depth, parts * width)
            for turn, own in enumerate(sums):
                mine = rows.at[slot, pl.ds(begin_of(turn), _ROWS)]
                plgpu.wgmma(own, mine, operand)
            plgpu.wgmma_wait(len(sums))  # the products of the step before are done

            @pl.when(k > 0)
            def _():
                plgpu.barrier_arrive(scratch["used"].at[before])

            return after(slot), slot

        slots = jax.lax.fori_loop(0, steps - is_short, step, (slot, slot))
        _, last = step(number(steps - 1), slots, is_last=True) if is_short else slots
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(scratch["used"].at[last])
        if is_scaled:
            plgpu.barrier_wait(scratch["scaled"].at[i & 1])
        for turn, own in enumerate(sums):
            both = own[...]
            each = [both[:, part * width : (part + 1) * width] for part in range(parts)]
            each = scaled(each, i & 1, turn)
            if gate_turn is not None:
                each = of_turns(each, is_dense)
            store(finish(*each).astype(out.dtype), turn)

    def of_turns(halves, is_dense):
        """Gate and up: two halves for experts, interleaved for a dense half."""
        begins = range(0, width, gate_turn)
        pieces = [half[:, at : at + gate_turn] for half in halves for at in begins]
        for part, half in enumerate(halves):
            mine = jnp.concatenate(pieces[part::2], axis=1)
            yield jnp.where(jnp.broadcast_to(is_dense, mine.shape), mine, half)

    def scaled(sums, half, turn):
        if not is_scaled:
            return sums
        by_row = scratch["row_scales"].at[half, pl.ds(begin_of(turn), _ROWS)]
        by_row = load_scales(by_row, 0, sums[0].shape)
        columns = [scratch["column_scales"].at[half, part] for part in range(parts)]
        return [
            own * by_row * load_scales(ref, 1, own.shape)
            for own, ref in zip(sums, columns, strict=True)
        ]

    def store(values, turn, first, length, column):
        """Store whole groups of 8 rows; the last may contain rows that are never read."""
        begin = (turn * groups + warpgroup) * _ROWS
        early = begin - begin_of(turn)  # leading rows, which another warpgroup stores
        staged = scratch["out"].at[warpgroup]
        there = jnp.minimum(length - begin + (_ALIGNED - 1), _ROWS)
        for at in range(0, width, piece_width):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous result has been copied
            staged[...] = values[:, at : at + piece_width]
            plgpu.commit_smem()
            columns = pl.ds(pl.multiple_of(column + at, aligned), piece_width)
            for rows in (64, 32, 16, 8):
                done = there & ~(2 * rows - 1)

                @pl.when((there & rows) != 0)
                def _(rows=rows, done=done, columns=columns):
                    own = staged.at[pl.ds(pl.multiple_of(early + done, _ALIGNED), rows)]
                    down = pl.multiple_of(first + begin + done, _ALIGNED)
                    plgpu.copy_smem_to_gmem(own, out.at[pl.ds(down, rows), columns])

    def compute_tile(i, carry):
        slot, (expert, first, length, column) = carry
        following = place(i + 1)  # read early, as in the loading warpgroup
        first, column = target(expert, first, column)
        is_dense = beside is not None and expert >= beside.experts
        # Number of 64-row turns of this warpgroup.
        busy = jax.lax.div(length + (_ROWS - 1), number(_ROWS)) - warpgroup + (groups - 1)
        busy = jax.lax.div(busy, number(groups))

        kinds = (True, False) if short and beside is not None else (bool(short),)
        for turns_of_tile, is_short in itertools.product(range(1, turns + 1), kinds):
            is_mine = busy == turns_of_tile
            if len(kinds) > 1:
                is_mine &= is_dense != is_short

            @pl.when(is_mine)
            def _(turns_of_tile=turns_of_tile, is_short=is_short):
                sums = plgpu.WGMMAAccumulatorRef((_ROWS, parts * width), jnp.float32)
                put = functools.partial(store, first=first, length=length, column=column)
                how = {"i": i, "slot": slot, "is_dense": is_dense, "is_short": is_short}
                run = functools.partial(products, **how, store=put)
                pl.run_scoped(run, *[sums] * turns_of_tile)

        def pass_by(_, slot):
            plgpu.barrier_wait(scratch["loaded"].at[slot])
            plgpu.barrier_arrive(scratch["used"].at[slot])
            return after(slot)

        @pl.when(busy <= 0)
        def _():
            jax.lax.fori_loop(0, steps, pass_by, slot)
            if is_scaled:
                plgpu.barrier_wait(scratch["scaled"].at[i & 1])

        return jax.lax.rem(slot + steps, number(stages)), following

    @pl.when((warpgroup < groups) & (count > 0))
    def _():
        plgpu.set_max_registers(_REGISTERS[groups], action="increase")
        jax.lax.fori_loop(0, count, compute_tile, (zero, place(zero)))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # writes end with the launch


def _strided(size: int, most: int):
    """A row spread over the threads of a warpgroup."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=math.gcd(size // _THREADS, most))
