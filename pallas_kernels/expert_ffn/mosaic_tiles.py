"""The tiles of a thread block of the experts' products on NVIDIA Hopper, and their loads."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ..hopper import next_buffer, whole
from .mosaic_place import ALIGNED, Beside

ROWS = 64  # rows of a warpgroup's product
COLUMNS = 64  # an inner width is a multiple of this
_MOST_LOADED = 192  # rows of one copy; TMA takes up to 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Static sizes of a launch."""

    N: int  # columns of one part of an expert's matrix
    parts: int  # 2 for gate and up, 1 for down
    width: int  # columns of one part in a tile
    piece: int  # columns of results that are stored at once
    rows: int  # most rows of a tile
    groups: int  # warpgroups that compute
    depth: int  # of a step
    steps: int  # of a tile
    short: int  # columns of the experts' last step that are loaded; 0: all of them
    gate_turn: int | None  # columns of interleaved groups of a dense half's gate and up
    beside: Beside | None
    is_scaled: bool  # 8 bits

    @property
    def across(self) -> int:
        """Tiles of columns."""
        return -(-self.N // self.width)

    @property
    def aligned(self) -> int:
        """A number that divides the first column of every tile."""
        return math.gcd(self.width, COLUMNS)

    @property
    def copies(self) -> int:
        """Copies that load a step of a tile, and those that load its scales."""
        return (self.parts if self.is_scaled else 1) + -(-self.rows // _MOST_LOADED)


class Tile(NamedTuple):
    """A tile of the result: an expert, the place of the first row, row count and first column."""

    expert: Array
    first: Array
    length: Array
    column: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A thread block, as one of its warpgroups sees it."""

    x: Any  # rows by place
    w: Any  # matrices of all experts
    tiles: Any  # `mosaic_place.Tiles.table`
    refs: dict[str, Any]  # scales, a dense half's matrix, the result, shared memory, barriers
    sizes: Sizes
    finish: Callable[..., Array]  # results of the parts' sums
    warpgroup: Array
    index: Array
    count: Array  # number of its tiles

    @property
    def stages(self) -> int:
        """Buffers of the ring."""
        return self.refs["rows"].shape[0]

    def after(self, slot: Array) -> Array:
        """The buffer that follows in the ring."""
        return next_buffer(slot, self.stages)

    def tile(self, i: Array) -> Tile:
        """The block's i-th tile; past its last tile, that one."""
        N, width, across = self.sizes.N, self.sizes.width, self.sizes.across
        item = self.index + jnp.minimum(i, self.count - 1) * jax.lax.axis_size("block")
        tile = jax.lax.div(item, whole(across))
        # The last tile of columns is moved left so that it ends at N.
        column = jnp.minimum((item - tile * across) * width, N - width)
        expert, first, length = (self.tiles[tile, j] for j in range(3))
        return Tile(expert, first, length, pl.multiple_of(column, self.sizes.aligned))

    # The experts of a dense half read the same rows for gate and up, and write separate regions.

    def source(self, tile: Tile) -> Tile:
        """A tile with the place of its input."""
        beside = self.sizes.beside
        if beside is None or self.sizes.parts == 1:
            return tile
        first = tile.first - jnp.maximum(tile.expert - beside.experts, 0) * beside.apart
        return tile._replace(first=first)

    def target(self, tile: Tile) -> Tile:
        """A tile with the place and the first column of its results."""
        N, beside = self.sizes.N, self.sizes.beside
        if beside is None or self.sizes.parts == 1:
            return tile
        i, inner = tile.expert - beside.experts, self.refs["result"].shape[1]
        region = jax.lax.div(jnp.maximum(i, 0) * N + tile.column, whole(inner))
        first = tile.first + jnp.where(i < 0, 0, region - i) * beside.apart
        column = jnp.where(i < 0, tile.column, i * N + tile.column - region * inner)
        return tile._replace(first=first, column=column)

    def begin_of(self, turn: int) -> Array:
        """First row of this warpgroup in a turn; the last 64 rows of a tile begin early."""
        rows = self.sizes.rows
        begin = jnp.minimum((turn * self.sizes.groups + self.warpgroup) * ROWS, rows - ROWS)
        return pl.multiple_of(begin, math.gcd(rows, ROWS))

    def for_parts(self, tile: Tile, copy: Callable[..., None]) -> None:
        """Call `copy(i, start, part)` for each part of a tile's columns.

        `start` counts in the experts' matrices if i is None, else in the dense half's i-th expert.
        """
        N, width, parts = self.sizes.N, self.sizes.width, self.sizes.parts

        def of_expert():
            for part in range(parts):
                start = (tile.expert * parts + part) * N + tile.column
                copy(None, pl.multiple_of(start, self.sizes.aligned), part)

        if self.sizes.beside is None:
            of_expert()
            return
        i = tile.expert - self.sizes.beside.experts

        def of_dense():
            for part in range(parts):
                start = 2 * (i * N + tile.column) + part * width if parts == 2 else tile.column
                copy(i, pl.multiple_of(start, self.sizes.aligned), part)

        pl.when(i < 0)(of_expert)
        pl.when(i >= 0)(of_dense)


def load_tiles(block: Block) -> None:
    """Load all tiles of the block, as the loading warpgroup, and wait until they are used."""
    start = whole(0), block.tile(whole(0))
    slot, _ = jax.lax.fori_loop(0, block.count, functools.partial(_load_tile, block), start)
    # Drain the buffers that were not waited for yet, the oldest first.
    total = block.count * block.sizes.steps
    slot = jnp.where(total < block.stages, 0, slot)
    drain = functools.partial(_wait_until_used, block)
    jax.lax.fori_loop(0, jnp.minimum(total, block.stages), drain, slot)


def _load_tile(block: Block, i, carry):
    """Load the block's i-th tile; the carry is the next buffer and the tile."""
    slot, tile = carry
    following = block.tile(i + 1)  # read early, since a load from memory lasts many steps
    step = functools.partial(_load_step, block, block.source(tile), i)
    return jax.lax.fori_loop(0, block.sizes.steps, step, slot), following


def _wait_until_used(block: Block, _, slot):
    plgpu.barrier_wait(block.refs["used"].at[slot])
    return block.after(slot)


def _load_step(block: Block, tile: Tile, i, step, slot):
    """Load one step of the depth, and the scales at the first one; return the next buffer."""
    sizes = block.sizes

    @pl.when(i * sizes.steps + step >= block.stages)
    def _():
        plgpu.barrier_wait(block.refs["used"].at[slot])

    whole = functools.partial(_load_line, block, tile, step, slot, is_last=False)
    if not sizes.short:
        whole()
    else:
        is_short = step == sizes.steps - 1
        if sizes.beside is not None:
            is_short &= tile.expert < sizes.beside.experts
        pl.when(is_short)(functools.partial(whole, is_last=True))
        pl.when(~is_short)(whole)
    if sizes.is_scaled:
        scales = functools.partial(_load_scales, block, tile, i & 1)
        pl.when(step == 0)(scales)
    return block.after(slot)


def _load_line(block: Block, tile: Tile, step, slot, is_last: bool) -> None:
    """Load rows and weights; `is_last`: the experts' last step, if it is shorter."""
    sizes, prefix = block.sizes, "last_" if is_last else ""
    rows, weights = (block.refs[f"{prefix}{name}"] for name in ("rows", "weights"))
    load = functools.partial(plgpu.copy_gmem_to_smem, barrier=block.refs["loaded"].at[slot])
    deep = _piece(step, sizes.depth)
    if is_last:
        deep = pl.ds((sizes.steps - 1) * sizes.depth, sizes.short)
    if not sizes.is_scaled:
        _load_16_bits(block, tile, step, weights.at[slot], load)
    elif is_last:
        start = pl.multiple_of(tile.expert * sizes.N + tile.column, sizes.aligned)
        there = weights.at[slot, pl.ds(0, sizes.width)]
        load(block.w.at[pl.ds(start, sizes.width), deep], there)
    else:

        def copy(i, start, part):
            matrix, own = (block.w if i is None else block.refs["more"]), deep
            if i is not None and sizes.parts == 1:  # a region of its inner columns
                own = _piece(i * sizes.steps + step, sizes.depth)
            there = weights.at[slot, pl.ds(part * sizes.width, sizes.width)]
            load(matrix.at[pl.ds(start, sizes.width), own], there)

        block.for_parts(tile, copy)
    for begin in range(0, sizes.rows, _MOST_LOADED):
        most = min(sizes.rows - begin, _MOST_LOADED)
        left = jnp.clip(tile.length - begin, 1, most)  # the barrier counts every copy
        # With many experts a tile has few rows.
        counts = [n for n in (8, 16, 32, *range(ROWS, most, ROWS)) if n < most]
        for least, size in itertools.pairwise([0, *counts, most]):

            @pl.when((left > least) & (left <= size))
            def _(begin=begin, size=size):
                own = pl.ds(pl.multiple_of(tile.first + begin, ALIGNED), size)
                load(block.x.at[own, deep], rows.at[slot, pl.ds(begin, size)])


def _load_16_bits(block: Block, tile: Tile, step, target, load: Callable[..., None]) -> None:
    """Load weights stored as [K N], all parts in one copy."""
    sizes, beside = block.sizes, block.sizes.beside
    columns = pl.ds(pl.multiple_of(tile.column, sizes.aligned), sizes.width)

    def copy(matrix, line, columns, parts: Any = slice(None)):
        load(matrix.at[_piece(line, sizes.depth), parts, columns], target)

    def of_expert():
        copy(block.w, tile.expert * sizes.steps + step, columns)

    if beside is None:
        of_expert()
        return

    def of_dense():
        i, more = tile.expert - beside.experts, block.refs["more"]
        if sizes.parts == 1:  # a region of its inner columns
            copy(more, i * sizes.steps + step, columns)
        else:  # two column groups of a tile
            at = jax.lax.div(i * sizes.N + tile.column, whole(sizes.width)) * 2
            copy(more, step, slice(None), pl.ds(at, 2))

    pl.when(tile.expert < beside.experts)(of_expert)
    pl.when(tile.expert >= beside.experts)(of_dense)


def _load_scales(block: Block, tile: Tile, half) -> None:
    """Load scales over those of the tile before the last, which is finished.

    The ring has come round since, so every warpgroup has reached the tile in between.
    """
    refs, sizes = block.refs, block.sizes
    load = functools.partial(plgpu.copy_gmem_to_smem, barrier=refs["scaled"].at[half])
    for begin in range(0, sizes.rows, _MOST_LOADED):
        size = min(sizes.rows - begin, _MOST_LOADED)
        own = pl.ds(pl.multiple_of(tile.first + begin, ALIGNED), size)
        load(refs["of_rows"].at[own], refs["row_scales"].at[half, pl.ds(begin, size)])

    def copy(i, start, part):
        own = refs["of_columns" if i is None else "of_more"].at[pl.ds(start, sizes.width)]
        load(own, refs["column_scales"].at[half, part])

    block.for_parts(tile, copy)


def _piece(i, size: int):
    return pl.ds(pl.multiple_of(i * size, size), size)
