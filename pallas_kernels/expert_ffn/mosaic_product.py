"""Pallas Mosaic kernel for NVIDIA Hopper: products of sorted rows with the weights of experts.

The grid is persistent: the blocks that run at once take the tiles at a stride. In a block one
warpgroup loads, by TMA through a ring of buffers, ahead of the current tile (`mosaic_tiles.py`).
The others compute 64 rows each, or a multiple of 64 with the same weights. A row's sums do not
depend on the size of its tile.

8-bit gate and up are adjacent in shared memory, so that one product with both reads the rows once;
those of a dense half are interleaved.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from .. import hopper
from ..hopper import MULTIPROCESSORS, SHARED_BYTES, load_scales, swizzled, whole
from ..layer.fp8 import Fp8Matrix, Fp8Rows
from .fp8 import Fp8Experts
from .mosaic_place import ALIGNED, THREADS, Tiles
from .mosaic_tiles import ROWS, Block, Sizes, Tile, load_tiles

PAIR = 2  # least numbers that a thread rounds to 8 bits at once
_SCALES = 32  # scales of 128 bytes: a copy of them begins at a whole line
_STAGED = 64  # columns of results that are stored at once
LINE_BYTES = 128  # most bytes of the depth of a step
_MOST_STAGES = 12
# By the number of computing warpgroups. All warpgroups share the registers of the launch (65,536
# over all threads, a multiple of 8 each); if they ask for more, the last one waits forever.
_REGISTERS = {1: 208, 2: 232, 3: 152, 4: 104}
_LOADING_REGISTERS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """The tile of one thread block."""

    groups: int = 1  # warpgroups that compute; at most 4
    rows: int = 0  # which the warpgroups take 64 at a time with the same weights; 0: 64 of each
    gate_up: int = 128  # columns of gate and up together
    down: int = 128  # columns of down
    blocks: int = MULTIPROCESSORS  # at most; each needs a multiprocessor to itself

    @property
    def tile_rows(self) -> int:
        """Most rows of a tile."""
        return self.rows or self.groups * ROWS


def product(
    x: Float[Array, "P K"] | Fp8Rows,
    w: Float[Array, "E K *N"] | Fp8Experts,
    more: Array | Fp8Matrix | None,
    finish: Callable[..., Array],
    *,
    tiles: Tiles,
    dtype: Any,
    parts: int,
    tiling: Tiling,
    interpret: Any,
) -> Array:
    """The rows of each tile times the weights of its expert, whose `parts` meet in `finish`.

    The dense half has the matrix `more`. Rows that will be rounded to 8 bits are padded to whole
    pairs of columns for every thread.
    """
    E, K = w.shape[:2]
    columns = tiling.gate_up if parts == 2 else tiling.down
    K = w.values.shape[-1] if isinstance(w, Fp8Experts) else K
    N, width = math.prod(w.shape[2:]) // parts, columns // parts
    if isinstance(x, Fp8Rows):
        assert isinstance(w, Fp8Experts)
        rows, flat, scales = x.values, w.values.reshape(-1, K), (x.scales, w.scales.reshape(-1))
    else:
        assert isinstance(w, jax.Array)
        rows, flat, scales = x, w.reshape(E * K, parts, N), ()
    others = ()
    if isinstance(more, Fp8Matrix):
        others = more.flat.values, more.flat.scales
    elif more is not None:
        others = (more.reshape(K, -1, width) if parts == 2 else more.reshape(-1, 1, N),)
    depth = math.gcd(K, LINE_BYTES // rows.dtype.itemsize)
    sizes = Sizes(
        N=N,
        parts=parts,
        width=width,
        depth=depth,
        steps=K // depth,
        # Zeros fill the last line of experts; the last step does not load them.
        short=w.shape[1] % depth if scales else 0,
        groups=tiling.groups,
        rows=tiling.tile_rows,
        piece=math.gcd(width, _STAGED) if tiling.rows else width,
        gate_turn=more.shape[-1] if more is not None and parts == 2 else None,
        beside=tiles.beside,
        is_scaled=bool(scales),
    )
    scratch = _scratch(sizes, rows.dtype, dtype, interpret)
    names = (*("of_rows", "of_columns")[: len(scales)], *("more", "of_more")[: len(others)])
    names = (*names, "result", *scratch)
    wide = THREADS * PAIR if scales and parts == 2 else 1
    return hopper.kernel(
        functools.partial(_run_block, names=names, sizes=sizes, finish=finish),
        out_type=jax.ShapeDtypeStruct((len(rows), -(-N // wide) * wide), dtype),
        grid=(min(len(tiles.table) * -(-N * parts // columns), tiling.blocks),),
        grid_names=("block",),
        kernel_name="expert_ffn_gate_up" if parts == 2 else "expert_ffn_down",
        num_threads=tiling.groups + 1,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(rows, flat, tiles.table, tiles.numbers, *scales, *others)


def _scratch(sizes: Sizes, kind: Any, dtype: Any, interpret: Any) -> dict[str, Any]:
    """Shared memory and barriers of a block, for operands of type `kind` and results of `dtype`."""
    depth, width, columns = sizes.depth, sizes.width, sizes.parts * sizes.width
    staged = sizes.groups, ROWS, sizes.piece
    apart = math.prod(staged) * jnp.dtype(dtype).itemsize
    held = -(-sizes.rows // _SCALES) * _SCALES
    apart += 2 * 4 * (held + columns) if sizes.is_scaled else 0
    step = (sizes.rows + columns) * depth * kind.itemsize
    stages = min((SHARED_BYTES - apart) // step, _MOST_STAGES)
    if sizes.is_scaled:  # the ring comes round within a tile: see `mosaic_tiles._load_scales`
        stages = min(stages, sizes.steps)
    # Both operands of a product have one swizzle; [K N] weights are swizzled along N.
    tile = (columns, depth) if sizes.is_scaled else (depth, sizes.parts, width)
    line = depth if sizes.is_scaled else math.gcd(depth, width)
    lies = swizzled(line, kind), swizzled(line, kind, parts=len(tile) - 1)
    scratch = {
        "rows": plgpu.SMEM((stages, sizes.rows, depth), kind, transforms=lies[0]),
        "weights": plgpu.SMEM((stages, *tile), kind, transforms=lies[1]),
    }
    if sizes.short:  # a view of the same memory for the shorter last step
        short = swizzled(sizes.short, kind)
        lasts = {
            f"last_{name}": plgpu.SMEM(
                (stages, lines * depth // sizes.short, sizes.short), kind, transforms=short
            )
            for name, lines in (("rows", sizes.rows), ("weights", columns))
        }
        if interpret is None:
            pairs = zip(scratch.items(), lasts.values(), strict=True)
            scratch = {name: plgpu.RefUnion(ring, last) for (name, ring), last in pairs}
        else:  # the interpreter does not support RefUnion
            scratch |= lasts
    scratch |= {
        "out": plgpu.SMEM(staged, dtype, transforms=swizzled(sizes.piece, dtype)),
        "loaded": plgpu.Barrier(num_barriers=stages, num_arrivals=sizes.copies),
        "used": plgpu.Barrier(num_barriers=stages, num_arrivals=sizes.groups),
    }
    if sizes.is_scaled:  # two buffers: the scales of the next tile are loaded early
        scratch["row_scales"] = plgpu.SMEM((2, held), jnp.float32)
        scratch["column_scales"] = plgpu.SMEM((2, sizes.parts, width), jnp.float32)
        scratch["scaled"] = plgpu.Barrier(num_barriers=2, num_arrivals=sizes.copies)
    return scratch


def _run_block(x, w, tiles, num_tiles, *refs, names, sizes: Sizes, finish) -> None:
    """One thread block: a tile of rows and columns, then further tiles at a stride of `blocks`."""
    named = dict(zip(names, refs, strict=True))
    if sizes.short and "last_rows" not in named:  # a union of both views
        for name in ("rows", "weights"):
            named[name], named[f"last_{name}"] = named[name]
    index, blocks = jax.lax.axis_index("block"), jax.lax.axis_size("block")
    warpgroup = jax.lax.axis_index("warpgroup")
    work = num_tiles[num_tiles.shape[0] - 1]
    if sizes.beside is not None:
        work += sizes.beside.count * sizes.beside.tiles
    work *= sizes.across
    count = jnp.maximum(jax.lax.div(work - index + (blocks - 1), whole(blocks)), 0)
    own = {"sizes": sizes, "finish": finish, "warpgroup": warpgroup, "index": index}
    block = Block(x=x, w=w, tiles=tiles, refs=named, count=count, **own)

    @pl.when((warpgroup == sizes.groups) & (count > 0))
    def _():
        plgpu.set_max_registers(_LOADING_REGISTERS, action="decrease")
        load_tiles(block)

    @pl.when((warpgroup < sizes.groups) & (count > 0))
    def _():
        plgpu.set_max_registers(_REGISTERS[sizes.groups], action="increase")
        start = whole(0), block.tile(whole(0))
        jax.lax.fori_loop(0, count, functools.partial(_compute_tile, block), start)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # writes end with the launch


def _compute_tile(block: Block, i, carry):
    """Multiply this warpgroup's rows of the i-th tile, as `_multiply` does; carry as in loading."""
    slot, tile = carry
    following = block.tile(i + 1)  # read early, as in the loading warpgroup
    sizes, tile = block.sizes, block.target(tile)
    is_dense = sizes.beside is not None and tile.expert >= sizes.beside.experts
    # Number of 64-row turns of this warpgroup.
    busy = jax.lax.div(tile.length + (ROWS - 1), whole(ROWS)) - block.warpgroup
    busy = jax.lax.div(busy + (sizes.groups - 1), whole(sizes.groups))

    kinds = (True, False) if sizes.short and sizes.beside is not None else (bool(sizes.short),)
    most = -(-sizes.rows // (sizes.groups * ROWS))
    for turns, is_short in itertools.product(range(1, most + 1), kinds):
        is_mine = busy == turns
        if len(kinds) > 1:
            is_mine &= is_dense != is_short

        @pl.when(is_mine)
        def _(turns=turns, is_short=is_short):
            sums = plgpu.WGMMAAccumulatorRef((ROWS, sizes.parts * sizes.width), jnp.float32)
            which = {"i": i, "slot": slot, "is_dense": is_dense, "is_short": is_short}
            run = functools.partial(_multiply, block=block, tile=tile, **which)
            pl.run_scoped(run, *[sums] * turns)

    def pass_by(_, slot):
        plgpu.barrier_wait(block.refs["loaded"].at[slot])
        plgpu.barrier_arrive(block.refs["used"].at[slot])
        return block.after(slot)

    @pl.when(busy <= 0)
    def _():
        jax.lax.fori_loop(0, sizes.steps, pass_by, slot)
        if sizes.is_scaled:
            plgpu.barrier_wait(block.refs["scaled"].at[i & 1])

    return jax.lax.rem(slot + sizes.steps, whole(block.stages)), following


def _multiply(*sums, block: Block, tile: Tile, i, slot, is_dense, is_short: bool) -> None:
    """Multiply 64 rows for each of `sums`, all with the same weights, and store the results."""
    refs, sizes = block.refs, block.sizes

    def step(k, slots, is_last=False):
        slot, before = slots
        rows, weights = refs["rows"], refs["weights"]
        if is_last:
            rows, weights = refs["last_rows"], refs["last_weights"]
        plgpu.barrier_wait(refs["loaded"].at[slot])
        line = weights.at[slot, pl.ds(0, sizes.width)] if is_last else weights.at[slot]
        flat = sizes.depth, sizes.parts * sizes.width
        operand = line.T if sizes.is_scaled else line.reshape(*flat)
        for turn, own in enumerate(sums):
            mine = rows.at[slot, pl.ds(block.begin_of(turn), ROWS)]
            plgpu.wgmma(own, mine, operand)
        plgpu.wgmma_wait(len(sums))  # the products of the step before are done

        @pl.when(k > 0)
        def _():
            plgpu.barrier_arrive(refs["used"].at[before])

        return block.after(slot), slot

    slots = jax.lax.fori_loop(0, sizes.steps - is_short, step, (slot, slot))
    _, last = step(whole(sizes.steps - 1), slots, is_last=True) if is_short else slots
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(refs["used"].at[last])
    if sizes.is_scaled:
        plgpu.barrier_wait(refs["scaled"].at[i & 1])
    for turn, own in enumerate(sums):
        both, width = own[...], sizes.width
        parts = [both[:, part * width : (part + 1) * width] for part in range(sizes.parts)]
        if sizes.is_scaled:
            parts = _scaled(block, parts, i & 1, turn)
        if sizes.gate_turn is not None:
            parts = _separated(parts, sizes.gate_turn, is_dense)
        _store(block, tile, block.finish(*parts).astype(refs["result"].dtype), turn)


def _scaled(block: Block, parts: list[Array], half, turn: int) -> list[Array]:
    """The sums of 8-bit products times the scales of rows and columns."""
    shape = ROWS, block.sizes.width
    by_row = block.refs["row_scales"].at[half, pl.ds(block.begin_of(turn), ROWS)]
    by_row = load_scales(by_row, 0, shape)
    columns = [block.refs["column_scales"].at[half, part] for part in range(len(parts))]
    return [
        own * by_row * load_scales(ref, 1, shape) for own, ref in zip(parts, columns, strict=True)
    ]


def _separated(halves: list[Array], gate_turn: int, is_dense) -> list[Array]:
    """Gate and up: two halves for experts, interleaved for a dense half."""
    begins = range(0, halves[0].shape[1], gate_turn)
    pieces = [half[:, at : at + gate_turn] for half in halves for at in begins]
    found = []
    for part, half in enumerate(halves):
        mine = jnp.concatenate(pieces[part::2], axis=1)
        found.append(jnp.where(jnp.broadcast_to(is_dense, mine.shape), mine, half))
    return found


def _store(block: Block, tile: Tile, values: Array, turn: int) -> None:
    """Store whole groups of 8 rows; the last may contain rows that are never read."""
    sizes, out = block.sizes, block.refs["result"]
    begin = (turn * sizes.groups + block.warpgroup) * ROWS
    early = begin - block.begin_of(turn)  # leading rows, which another warpgroup stores
    staged = block.refs["out"].at[block.warpgroup]
    there = jnp.minimum(tile.length - begin + (ALIGNED - 1), ROWS)
    for at in range(0, sizes.width, sizes.piece):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous result has been copied
        staged[...] = values[:, at : at + sizes.piece]
        plgpu.commit_smem()
        columns = pl.ds(pl.multiple_of(tile.column + at, sizes.aligned), sizes.piece)
        for rows in (64, 32, 16, 8):
            done = there & ~(2 * rows - 1)

            @pl.when((there & rows) != 0)
            def _(rows=rows, done=done, columns=columns):
                own = staged.at[pl.ds(pl.multiple_of(early + done, ALIGNED), rows)]
                down = pl.multiple_of(tile.first + begin + done, ALIGNED)
                plgpu.copy_smem_to_gmem(own, out.at[pl.ds(down, rows), columns])
