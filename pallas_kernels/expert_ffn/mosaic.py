"""Pallas Mosaic kernels for NVIDIA Hopper: four launches, each expert's weights read once.

1. `_place`: each pair (row, expert) gets a place in the order of experts, and the row goes there.
2. gate and up with the activation, and 3. down: `_multiply`, tiles of rows times columns of their
   expert's weights.
4. `_combine`: the weighted sum over a row's experts, in the order of its choices.

An expert's rows begin at a multiple of 8 places, as a swizzled tile does; places in between are
never written, and what is computed of them is never read. As many blocks of threads as run at once
take tiles in turns: one warpgroup loads, by TMA through a ring of buffers and ahead of the tile at
hand, the others compute 64 rows each. A row's sums are the same in tiles of any size.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from ..activation import GELU_CUBE, GELU_SLOPE, Activation
from ..layer.mosaic import MULTIPROCESSORS, SHARED_BYTES, next_buffer, swizzled
from ..lowered import lowered_once
from .tiles import NO_PLACE, max_tiles

_ROWS = 64  # of a warpgroup's product
_ALIGNED = 8  # rows of a swizzled tile
_DEPTH = 64  # of a step
_MOST_STAGES = 12
_CHUNK = 32  # rows whose pairs are compared with each other; XLA counts those of earlier chunks
_THREADS = 128
_REGISTERS = {1: 208, 2: 232, 3: 152, 4: 112}  # by the number of warpgroups that compute


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """What one thread block computes at a time.

    Attributes:
        groups: Warpgroups that compute, each 64 rows of a tile; at most 4.
        gate_up: Columns of gate and up together.
        down: Columns of down.
        blocks: Of threads, at most; each needs a multiprocessor for itself.
    """

    groups: int = 1
    gate_up: int = 128
    down: int = 128
    blocks: int = MULTIPROCESSORS


def unsupported(x: Array, w_down: Array) -> str | None:
    """Why this back end cannot take these arguments here, or None."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if jax.default_backend() != "gpu" or capability != "9.0":
        return "needs an NVIDIA GPU of the Hopper kind"
    return unsupported_arguments(x, w_down)


def unsupported_arguments(x: Array, w_down: Array) -> str | None:
    """Why no device can take these arguments, or None."""
    _, F, D = w_down.shape
    if jax.__version_info__ < (0, 11, 2):
        return f"needs jax 0.11.2, got {jax.__version__}"
    if not len(x):
        return "needs at least one row"
    if x.dtype not in (jnp.bfloat16, jnp.float16) or w_down.dtype != x.dtype:
        kinds = f"{x.dtype} and {w_down.dtype}"
        return f"needs rows and weights of one 16-bit type, got {kinds}"
    if D % _THREADS or F % _DEPTH:
        return (
            f"needs a model width that is a multiple of {_THREADS} and an inner one of {_DEPTH}, "
            f"got {D=} and {F=}"
        )
    return None


def choose_tiling(num_pairs: int, w_down: Array) -> Tiling:
    """A tile for so many pairs, if they are spread evenly over the experts.

    Within 3 % of the best tried on an H200 (benchmarks/results/expert_ffn_mosaic_h200.json).
    """
    E, F, D = w_down.shape
    rows, wide = num_pairs / E, 128 if D % 256 else 256
    gated = 128 if F < 128 else 256
    if rows <= 24:  # most experts have fewer than a warpgroup takes
        return Tiling(groups=1, gate_up=128 if F % 128 else gated, down=wide)
    if rows <= 96:
        return Tiling(groups=2, gate_up=128, down=wide)
    if rows <= 160:  # most have two warpgroups' rows and some more
        return Tiling(groups=3, gate_up=128, down=128)
    return Tiling(groups=2, gate_up=gated, down=wide)


@lowered_once(static_argnames=("activation", "tiling", "interpret"))
def expert_ffn(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    w_gate_up: Array,
    w_down: Array,
    *,
    activation: Activation = "silu",
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> Array:
    """See `api.expert_ffn`; `interpret`, an `InterpretGPUParams`, runs it on a CPU, for tests."""
    E, F, D = w_down.shape
    tiling = choose_tiling(expert_ids.size, w_down) if tiling is None else tiling
    if tiling.gate_up > 2 * F or tiling.down > D:
        raise ValueError(f"{tiling=} is wider than its matrices, {F=} and {D=}")
    rows, place, tiles, first_tile = _sorted_rows(x, expert_ids, E, tiling.groups, interpret)

    def gated(gate: Array, up: Array) -> Array:
        slope = gate
        if activation == "gelu":
            slope = GELU_SLOPE * (gate + GELU_CUBE * gate * gate * gate)
        root = jax.lax.rsqrt(1 + jnp.exp(-slope))  # one instruction; a division takes about twenty
        return gate * (root * root) * up

    multiply = functools.partial(_product, tiles=tiles, first_tile=first_tile, tiling=tiling)
    flat = w_gate_up.reshape(E * D, 2 * F)
    inner = multiply(rows, flat, gated, parts=2, columns=tiling.gate_up, interpret=interpret)
    flat = w_down.reshape(E * F, D)
    columns = tiling.down
    results = multiply(
        inner, flat, lambda sums: sums, parts=1, columns=columns, interpret=interpret
    )
    return plgpu.kernel(
        _combine,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(len(x),),
        grid_names=("row",),
        kernel_name="expert_ffn_combine",
        interpret=interpret,
    )(results, place, expert_weights.astype(jnp.float32))


def _sorted_rows(
    x: Float[Array, "T D"], expert_ids: Int[Array, "T k"], E: int, groups: int, interpret: Any
) -> tuple[Float[Array, "P D"], Int[Array, "T k"], Int[Array, "N 3"], Int[Array, " F"]]:
    """Rows by place, the place of each pair, the tiles, and the first tile of each expert.

    A tile is its expert, the place of its first row and how many it has; the last of the first
    tiles is how many there are. Places between experts and tiles past the last one hold anything.
    """
    T, k = expert_ids.shape
    chunks, tile_rows = -(-T // _CHUNK), groups * _ROWS
    pairs = -(-_CHUNK * k // _THREADS) * _THREADS  # of a chunk
    ids = jnp.pad(
        expert_ids.astype(jnp.int32), ((0, chunks * _CHUNK - T), (0, 0)), constant_values=-1
    )
    ids = ids.reshape(chunks, _CHUNK * k)
    ids = jnp.pad(ids, ((0, 0), (0, pairs - _CHUNK * k)), constant_values=-1)

    # Comparisons and sums, a fusion each: a sort or a running sum takes several launches.
    experts = jnp.arange(E, dtype=jnp.int32)
    counts = (ids[:, None, :] == experts[None, :, None]).sum(axis=2, dtype=jnp.int32)
    count, before = counts.sum(axis=0, dtype=jnp.int32), ()
    if chunks > 1:
        earlier = jnp.tri(chunks, k=-1, dtype=bool)
        before = (jnp.where(earlier[:, :, None], counts[None], 0).sum(axis=1, dtype=jnp.int32),)
    below = experts[None] < jnp.arange(E + 1, dtype=jnp.int32)[:, None]
    first, first_tile = (
        jnp.where(below, -(-count[None] // size), 0).sum(axis=1, dtype=jnp.int32)
        for size in (_ALIGNED, tile_rows)
    )
    # Loads of a tile's rows may reach past the last place.
    places = T * k + min(T * k, E) * (_ALIGNED - 1) + tile_rows
    places = -(-places // _ALIGNED) * _ALIGNED
    rows, place, tiles = plgpu.kernel(
        functools.partial(_place, k=k, tile_rows=tile_rows),
        out_type=[
            jax.ShapeDtypeStruct((places, x.shape[1]), x.dtype),
            jax.ShapeDtypeStruct((T, k), jnp.int32),
            jax.ShapeDtypeStruct((max_tiles(T * k, E, tile_rows), 3), jnp.int32),
        ],
        grid=(T,),
        grid_names=("row",),
        kernel_name="expert_ffn_place",
        interpret=interpret,
    )(x, ids, count, first, first_tile, *before)
    return rows, place, tiles, first_tile


def _place(x, ids, count, first, first_tile, *refs, k, tile_rows):
    """One row: the places of its pairs, and the row at each of them."""
    *before, rows, place, tiles = refs
    row = jax.lax.axis_index("row")
    number = functools.partial(jnp.asarray, dtype=jnp.int32)
    chunk = jax.lax.div(row, number(_CHUNK))
    start = (row - chunk * _CHUNK) * k  # of its pairs in the chunk
    layout = _strided(ids.shape[1], 4)
    theirs = _loaded(ids.at[chunk], layout)
    index = plgpu.broadcasted_iota(jnp.int32, theirs.shape, 0, layout=layout)
    values = _loaded(x.at[row], _strided(x.shape[1], 8))
    # What is read comes before what is written, so that nothing waits for memory in turn.
    experts = [ids[chunk, start + j] for j in range(k)]
    routed = [(expert >= 0) & (expert < count.shape[0]) for expert in experts]
    mine = [jnp.where(is_one, one, 0) for one, is_one in zip(experts, routed, strict=True)]
    begin = [first[one] * _ALIGNED for one in mine]
    tile = [first_tile[one] for one in mine]
    length = [count[one] for one in mine]
    rank = [sum(counted[chunk, one] for counted in before) for one in mine]

    # Sums of several pairs in one: a sum over threads takes as long as some 50 instructions.
    bits = ids.shape[1].bit_length()
    at_once = 31 // bits
    for j in range(0, k, at_once):
        packed = jnp.zeros_like(index)
        for i, expert in enumerate(experts[j : j + at_once]):
            ahead = (theirs == expert) & (index < start + j + i)
            packed += jnp.where(ahead, 1 << (bits * i), 0)
        total = jnp.sum(packed)
        for i in range(min(at_once, k - j)):
            rank[j + i] += (total >> (bits * i)) & ((1 << bits) - 1)

    for j in range(k):
        place[row, j] = jnp.where(routed[j], begin[j] + rank[j], NO_PLACE)

        @pl.when(routed[j])
        def _(j=j):
            rows[begin[j] + rank[j]] = values

        @pl.when(routed[j] & (jax.lax.rem(rank[j], number(tile_rows)) == 0))
        def _(j=j):
            to = tile[j] + jax.lax.div(rank[j], number(tile_rows))
            tiles[to, 0] = mine[j]
            tiles[to, 1] = begin[j] + rank[j]
            tiles[to, 2] = jnp.minimum(length[j] - rank[j], tile_rows)


def _combine(results, place, weights, out):
    """One row: the weighted sum of its experts' results, in their order."""
    row = jax.lax.axis_index("row")
    layout = _strided(results.shape[1], 8)
    total = None
    for j in range(place.shape[1]):
        at = place[row, j]
        is_there = at < NO_PLACE
        values = _loaded(results.at[jnp.where(is_there, at, 0)], layout).astype(jnp.float32)
        share = jnp.where(is_there, weights[row, j], 0.0)
        part = jnp.where(jnp.broadcast_to(is_there, values.shape), values, 0.0) * share
        total = part if total is None else total + part
    assert total is not None
    out[row] = total.astype(out.dtype)


def _product(
    x: Float[Array, "P K"],
    w: Float[Array, "EK N"],
    finish: Callable[..., Array],
    *,
    tiles: Int[Array, "N 3"],
    first_tile: Int[Array, " F"],
    parts: int,
    columns: int,
    tiling: Tiling,
    interpret: Any,
) -> Array:
    """Each tile's rows times its expert's weights, whose `parts` side by side meet in `finish`."""
    P, N, kind = len(x), w.shape[1], x.dtype
    width, rows = columns // parts, tiling.groups * _ROWS
    staged = (tiling.groups, _ROWS, width)
    step = (rows + columns) * _DEPTH * kind.itemsize
    stages = min((SHARED_BYTES - math.prod(staged) * kind.itemsize) // step, _MOST_STAGES)
    transforms = swizzled(_DEPTH, kind)
    scratch = {
        "rows": plgpu.SMEM((stages, rows, _DEPTH), kind, transforms=transforms),
        "weights": plgpu.SMEM((stages, parts, _DEPTH, width), kind, transforms=transforms),
        "out": plgpu.SMEM(staged, kind, transforms=transforms),
        "loaded": plgpu.Barrier(num_barriers=stages, num_arrivals=parts + 1),
        "used": plgpu.Barrier(num_barriers=stages, num_arrivals=tiling.groups),
    }
    most = len(tiles) * -(-N // columns)
    return plgpu.kernel(
        functools.partial(_multiply, names=tuple(scratch), finish=finish),
        out_type=jax.ShapeDtypeStruct((P, N // parts), kind),
        grid=(min(most, tiling.blocks),),
        grid_names=("block",),
        kernel_name="expert_ffn_gate_up" if parts == 2 else "expert_ffn_down",
        num_threads=tiling.groups + 1,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(x, w, tiles, first_tile)


def _multiply(x, w, tiles, first_tile, out, *scratch, names, finish):
    """One thread block: a tile of rows and columns, then the one `blocks` further on."""
    scratch = dict(zip(names, scratch, strict=True))
    stages, parts, _, width = scratch["weights"].shape
    most_rows = scratch["rows"].shape[1]
    groups = most_rows // _ROWS
    number = functools.partial(jnp.asarray, dtype=jnp.int32)
    block, blocks = jax.lax.axis_index("block"), jax.lax.axis_size("block")
    warpgroup = jax.lax.axis_index("warpgroup")
    (_, K), N = x.shape, out.shape[1]
    across = -(-N // width)
    zero, steps = number(0), K // _DEPTH
    work = first_tile[first_tile.shape[0] - 1] * across
    count = jnp.maximum(jax.lax.div(work - block + (blocks - 1), number(blocks)), 0)
    after = functools.partial(next_buffer, stages=stages)

    def place(i):
        """Expert, place of the first row, rows, and first column of the i-th tile."""
        item = block + jnp.minimum(i, count - 1) * blocks
        tile = jax.lax.div(item, number(across))
        # The last columns begin early instead of ending late.
        column = jnp.minimum((item - tile * across) * width, N - width)
        return (*(tiles[tile, j] for j in range(3)), pl.multiple_of(column, _DEPTH))

    def piece(i, size):
        return pl.ds(pl.multiple_of(i * size, size), size)

    # Rows of a load: a tile has few of them where experts are many.
    sizes = [n for n in (8, 16, 32) if n < most_rows] + [n * _ROWS for n in range(1, groups + 1)]

    def load_tile(i, carry):
        slot, (expert, first, length, column) = carry
        following = place(i + 1)  # read early: a load from memory takes as long as many steps

        def load(step, slot):
            @pl.when(i * steps + step >= stages)
            def _():
                plgpu.barrier_wait(scratch["used"].at[slot])

            loaded, deep = scratch["loaded"].at[slot], piece(step, _DEPTH)
            down = piece(expert * steps + step, _DEPTH)
            for part in range(parts):
                start = pl.multiple_of(part * N + column, _DEPTH)
                source = w.at[down, pl.ds(start, width)]
                plgpu.copy_gmem_to_smem(source, scratch["weights"].at[slot, part], loaded)
            for least, size in zip([0, *sizes], sizes, strict=False):

                @pl.when((length > least) & (length <= size))
                def _(size=size):
                    source = x.at[pl.ds(pl.multiple_of(first, _ALIGNED), size), deep]
                    target = scratch["rows"].at[slot, pl.ds(0, size)]
                    plgpu.copy_gmem_to_smem(source, target, loaded)

            return after(slot)

        return jax.lax.fori_loop(0, steps, load, slot), following

    def drain(_, slot):
        plgpu.barrier_wait(scratch["used"].at[slot])
        return after(slot)

    @pl.when((warpgroup == groups) & (count > 0))
    def _():
        plgpu.set_max_registers(40, action="decrease")
        slot, _ = jax.lax.fori_loop(0, count, load_tile, (zero, place(zero)))
        # The buffers that are not waited for yet, from the oldest on.
        slot = jnp.where(count * steps < stages, 0, slot)
        jax.lax.fori_loop(0, jnp.minimum(count * steps, stages), drain, slot)

    def products(*sums, slot):
        def step(k, slots):
            slot, last = slots
            plgpu.barrier_wait(scratch["loaded"].at[slot])
            mine = scratch["rows"].at[slot, piece(warpgroup, _ROWS)]
            for part, own in enumerate(sums):
                plgpu.wgmma(own, mine, scratch["weights"].at[slot, part])
            plgpu.wgmma_wait(parts)  # the products of the step before are done

            @pl.when(k > 0)
            def _():
                plgpu.barrier_arrive(scratch["used"].at[last])

            return after(slot), slot

        _, last = jax.lax.fori_loop(0, steps, step, (slot, slot))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(scratch["used"].at[last])
        return finish(*(own[...] for own in sums)).astype(out.dtype)

    def store(values, first, length, column):
        """Whole groups of 8 rows, of which the last may hold rows that are never read."""
        staged = scratch["out"].at[warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the result before
        staged[...] = values
        plgpu.commit_smem()
        there = jnp.minimum(length - warpgroup * _ROWS + (_ALIGNED - 1), _ROWS)
        for rows in (64, 32, 16, 8):
            done = there & ~(2 * rows - 1)

            @pl.when((there & rows) != 0)
            def _(rows=rows, done=done):
                source = staged.at[pl.ds(pl.multiple_of(done, _ALIGNED), rows)]
                down = pl.multiple_of(first + warpgroup * _ROWS + done, _ALIGNED)
                target = out.at[pl.ds(down, rows), pl.ds(pl.multiple_of(column, _DEPTH), width)]
                plgpu.copy_smem_to_gmem(source, target)

    def compute_tile(i, slot):
        _, first, length, column = place(i)
        is_busy = length > warpgroup * _ROWS

        @pl.when(is_busy)
        def _():
            sums = [plgpu.WGMMAAccumulatorRef((_ROWS, width), jnp.float32)] * parts
            values = pl.run_scoped(functools.partial(products, slot=slot), *sums)
            store(values, first, length, column)

        def pass_by(_, slot):
            plgpu.barrier_wait(scratch["loaded"].at[slot])
            plgpu.barrier_arrive(scratch["used"].at[slot])
            return after(slot)

        @pl.when(~is_busy)
        def _():
            jax.lax.fori_loop(0, steps, pass_by, slot)

        return jax.lax.rem(slot + steps, number(stages))

    @pl.when((warpgroup < groups) & (count > 0))
    def _():
        plgpu.set_max_registers(_REGISTERS[groups], action="increase")
        jax.lax.fori_loop(0, count, compute_tile, zero)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the end of the launch waits for the rest


def _strided(size: int, most: int):
    """A row spread over the threads of a warpgroup."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=math.gcd(size // _THREADS, most))


def _loaded(ref, layout):
    # jax 0.10 requires an index here.
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]
