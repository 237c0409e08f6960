"""Pallas Mosaic kernels for NVIDIA Hopper: products of many rows; gate, up and SiLU in one launch.

The tensor cores bound a product of many rows. XLA reads and writes the result of gate and up once
more for SiLU, and calls library kernels whose order of summation depends on the number of rows;
here it depends on the matrix alone. The grid is persistent: the thread blocks that run at once
share the tiles of the result. One warpgroup loads, by TMA through a ring of buffers. Two multiply,
and store a finished tile during the first steps of the next. Results are rounded to 16 bits
wherever the reference rounds, except inside SiLU.

8-bit operands have scales, which multiply the sums before they are rounded; their weights are
stored as [N K].
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

from .. import hopper
from ..hopper import MULTIPROCESSORS, SHARED_BYTES, load_scales, next_buffer, swizzled
from ..lowered import lowered_once
from .fp8 import Fp8Matrix, Fp8Rows
from .mosaic_many_tiling import CONSUMERS, DEPTH_BYTES, ROWS, TILE

_PIECE = 64  # columns of a product that are rounded and stored at a time
_BAND = 32  # row tiles processed for one tile of columns before the next: their rows fit in L2


# Layers lower once.
@lowered_once(static_argnames=("columns", "dtype", "blocks", "interpret"))
def gated_matmul(
    x: Float[Array, "*M D"] | Fp8Rows,
    w: Float[Array, "D C 2 W"] | Fp8Matrix,
    *,
    columns: int,
    dtype: Any = None,
    blocks: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> Float[Array, "*M C*W"]:
    """See `api_products.gated_matmul`; `matmul` is the product alone.

    Args:
        columns: Columns of a tile, see `choose_columns`.
        dtype: Type of the resulting rows; None for that of `x`.
        blocks: Most thread blocks; each needs a multiprocessor to itself.
        interpret: An `InterpretGPUParams` runs it on a CPU, for tests.
    """
    sizes = {"columns": columns, "dtype": dtype, "blocks": blocks, "interpret": interpret}
    run = functools.partial(_launch, "gated_matmul", **sizes)
    # Mosaic kernels have no batching rule, so vmap runs them one after another.
    return jax.custom_batching.sequential_vmap(run)(x, w)


@lowered_once(static_argnames=("columns", "segments", "dtype", "blocks", "interpret"))
def matmul(
    x: Float[Array, "*M K"] | Fp8Rows,
    w: Float[Array, "K N"] | Fp8Matrix,
    *,
    columns: int,
    segments: int = 1,
    dtype: Any = None,
    blocks: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> Float[Array, "*M N"]:
    """`x @ w` for a `w` of two axes; other arguments as in `gated_matmul`.

    Args:
        segments: Parts of the depth that are summed separately and then added in order, as
            `mosaic_few.split_matmul` and its reader do; more than 1 for 16 bits only.
    """
    sizes = {"columns": columns, "dtype": dtype, "blocks": blocks, "interpret": interpret}
    run = functools.partial(_launch, "matmul", segments=segments, **sizes)
    return jax.custom_batching.sequential_vmap(run)(x, w)


def _launch(name, x, w, *, columns, dtype, blocks, interpret, segments=1):
    """`x` times `w`, gated or not, as rows."""
    scales, is_gated = (), name == "gated_matmul"
    width = math.prod(w.shape[1:]) // (2 if is_gated else 1)
    piece = w.shape[-1] if is_gated else _PIECE  # columns that are finished at a time
    if isinstance(x, Fp8Rows):
        assert isinstance(w, Fp8Matrix)
        scales = (x.scales.reshape(-1), w.flat.scales)
        lead, flat = x.scales.shape, w.flat.values
        rows = x.values.reshape(-1, x.values.shape[-1])
    else:
        assert isinstance(w, jax.Array)
        lead, rows, flat = x.shape[:-1], x.reshape(-1, len(w)), w.reshape(len(w), -1)
    kind = jnp.dtype(dtype or rows.dtype)
    depth = DEPTH_BYTES // rows.dtype.itemsize
    transforms = swizzled(depth, rows.dtype)
    out = (CONSUMERS, ROWS, columns // 2 if is_gated else columns)
    step_bytes = (TILE + columns) * DEPTH_BYTES
    staged = math.prod(out) * kind.itemsize
    staged += 2 * 4 * (TILE + columns) if scales else 0
    stages = (SHARED_BYTES - staged) // step_bytes
    tile = (columns, depth) if scales else (depth, columns)
    scratch = {
        "rows": plgpu.SMEM((stages, CONSUMERS, ROWS, depth), rows.dtype, transforms=transforms),
        "weights": plgpu.SMEM((stages, *tile), rows.dtype, transforms=transforms),
        "out": plgpu.SMEM(out, kind, transforms=swizzled(piece, kind)),
        "loaded": plgpu.Barrier(num_barriers=stages, num_arrivals=CONSUMERS + 1),
        "used": plgpu.Barrier(num_barriers=stages, num_arrivals=CONSUMERS),
    }
    if scales:  # two buffers: the scales of the next tile are loaded early
        scratch["row_scales"] = plgpu.SMEM((2, CONSUMERS, ROWS), jnp.float32)
        scratch["column_scales"] = plgpu.SMEM((2, columns), jnp.float32)
        scratch["scaled"] = plgpu.Barrier(num_barriers=2, num_arrivals=CONSUMERS + 1)
    tiles = len(rows) // TILE * (width // out[-1])
    names = (*("of_rows", "of_columns")[: len(scales)], "result", *scratch)
    sizes = {"tiles": tiles, "columns": columns, "W": piece, "turns": range(out[-1] // piece)}
    sizes |= {"steps": rows.shape[1] // depth, "stages": stages, "segments": segments}
    sizes |= {"is_gated": is_gated, "is_scaled": bool(scales)}
    out = hopper.kernel(
        functools.partial(_multiply, names=names, **sizes),
        out_type=jax.ShapeDtypeStruct((len(rows), width), kind),
        grid=(min(tiles, blocks),),
        grid_names=("block",),
        kernel_name=name,
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(rows, flat, *scales)
    return out.reshape(*lead, width)


def origin(tile: Array, down: int, across: int) -> tuple[Array, Array]:
    """The row and the column, in tiles, of tile number `tile` of `down * across`."""
    tile = jnp.asarray(tile, jnp.int32)
    number = functools.partial(jnp.asarray, dtype=jnp.int32)
    band = jax.lax.div(tile, number(_BAND * across))
    place = tile - band * (_BAND * across)
    height = jnp.minimum(down - band * _BAND, _BAND).astype(jnp.int32)
    return band * _BAND + jax.lax.rem(place, height), jax.lax.div(place, height)


def _multiply(x, w, *refs, names, tiles, **settings):
    """One thread block: a tile of the result, then every further tile at a stride of `blocks`."""
    warpgroup, index = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("block")
    blocks = jax.lax.axis_size("block")
    count = jax.lax.div(tiles - 1 - index, jnp.asarray(blocks, jnp.int32)) + 1
    where = {"warpgroup": warpgroup, "index": index, "count": count}
    block = _Block(x=x, w=w, refs=dict(zip(names, refs, strict=True)), **where, **settings)
    pl.when(warpgroup == CONSUMERS)(block.load)
    pl.when(warpgroup < CONSUMERS)(block.compute)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Block:
    """A thread block, as one of its warpgroups sees it."""

    x: Any
    w: Any
    refs: dict[str, Any]  # scales, the result, shared memory and barriers
    columns: int  # of a tile of the weights
    W: int  # columns of the result that are finished at a time
    turns: range  # the pieces of a tile's result, W columns each
    steps: int  # of the depth
    stages: int  # buffers of the ring
    is_gated: bool
    is_scaled: bool  # 8 bits
    segments: int
    warpgroup: Array
    index: Array
    count: Array  # number of its tiles

    @property
    def staged(self) -> Any:
        """Shared memory for this warpgroup's rows of a tile's result."""
        return self.refs["out"].at[self.warpgroup]

    def place(self, i: Array) -> tuple[Array, Array]:
        """The row and the column, in tiles, of the i-th tile."""
        tile = self.index + i * jax.lax.axis_size("block")
        width = self.w.shape[0] if self.is_scaled else self.w.shape[1]
        return origin(tile, self.x.shape[0] // TILE, width // self.columns)

    def load(self) -> None:
        """Load all tiles, as the loading warpgroup, and wait until they are used."""

        def drain(_, slot):
            plgpu.barrier_wait(self.refs["used"].at[slot])
            return next_buffer(slot, self.stages)

        zero = jnp.asarray(0, jnp.int32)
        plgpu.set_max_registers(40, action="decrease")
        jax.lax.fori_loop(0, self.count, self._load_tile, zero)
        jax.lax.fori_loop(0, jnp.minimum(self.count * self.steps, self.stages), drain, zero)

    def _load_tile(self, i, slot):
        refs, depth = self.refs, self.refs["rows"].shape[3]
        row, column = self.place(i)

        def load(step, slot):
            @pl.when(i * self.steps + step >= self.stages)
            def _():
                plgpu.barrier_wait(refs["used"].at[slot])

            loaded, deep = refs["loaded"].at[slot], _piece(step, depth)
            across = _piece(column, self.columns)
            source = self.w.at[across, deep] if self.is_scaled else self.w.at[deep, across]
            plgpu.copy_gmem_to_smem(source, refs["weights"].at[slot], loaded)
            for group in range(CONSUMERS):
                source = self.x.at[_piece(row * CONSUMERS + group, ROWS), deep]
                plgpu.copy_gmem_to_smem(source, refs["rows"].at[slot, group], loaded)
            if self.is_scaled:  # the tile that used this buffer before is done by now
                pl.when(step == 0)(lambda: self._load_scales(i & 1, row, column))
            return next_buffer(slot, self.stages)

        return jax.lax.fori_loop(0, self.steps, load, slot)

    def _load_scales(self, half, row, column) -> None:
        refs, arrived = self.refs, self.refs["scaled"].at[half]
        source = refs["of_columns"].at[_piece(column, self.columns)]
        plgpu.copy_gmem_to_smem(source, refs["column_scales"].at[half], arrived)
        for group in range(CONSUMERS):
            source = refs["of_rows"].at[_piece(row * CONSUMERS + group, ROWS)]
            plgpu.copy_gmem_to_smem(source, refs["row_scales"].at[half, group], arrived)

    def compute(self) -> None:
        """Multiply and store this warpgroup's rows of all tiles."""
        W, dtype = self.W, self.refs["result"].dtype
        plgpu.set_max_registers(232, action="increase")
        none = plgpu.layout_cast(jnp.zeros((ROWS, W), dtype), plgpu.Layout.WGMMA)
        start = jnp.asarray(0, jnp.int32), (none,) * (self.columns // W)
        _, sums = jax.lax.fori_loop(0, self.count, self._compute_tile, start)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for j in self.turns:
            self._finish(sums, j)
        self._store(self.count - 1)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # writes end with the launch

    def _compute_tile(self, i, carry):
        """Multiply the i-th tile; the carry is the next buffer and the tile before, not stored."""

        def further(_, carry):
            slot, part = self._segment(i, carry[0])
            return slot, carry[1] + part

        slot, before = carry  # the first tile has none before it to store
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what `_store` began last
        slot, total = self._segment(i, slot, before)
        if self.segments > 1:
            slot, total = jax.lax.fori_loop(1, self.segments, further, (slot, total))
        return slot, self._rounded(total, i & 1)

    def _segment(self, i, slot, before=None):
        """The sums of one segment of a tile; the first one also stores the tile `before`."""
        run = functools.partial(self._products, i=i, slot=slot, before=before)
        return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((ROWS, self.columns), jnp.float32))

    def _products(self, sums, i, slot, before):
        refs = self.refs

        def step(k, slots, meanwhile=lambda: None):
            slot, last = slots
            plgpu.barrier_wait(refs["loaded"].at[slot])
            weights = refs["weights"].at[slot]
            weights = weights.T if self.is_scaled else weights
            plgpu.wgmma(sums, refs["rows"].at[slot, self.warpgroup], weights)
            meanwhile()
            plgpu.wgmma_wait(1)  # the products of the step before are done

            @pl.when(k > 0)
            def _():
                plgpu.barrier_arrive(refs["used"].at[last])

            return next_buffer(slot, self.stages), slot

        slots, first = (slot, slot), 0
        if before is not None:
            for j in self.turns:
                slots = step(j, slots, functools.partial(self._finish, before, j))
            pl.when(i > 0)(functools.partial(self._store, i - 1))
            first = len(self.turns)
        slot, last = jax.lax.fori_loop(first, self.steps // self.segments, step, slots)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(refs["used"].at[last])
        return slot, sums[...]

    def _rounded(self, sums, half) -> tuple[Array, ...]:
        """The sums of a tile in 16 bits, split into the groups of gate and of up."""
        refs, W = self.refs, self.W
        pieces = [sums[:, first : first + W] for first in range(0, self.columns, W)]
        if self.is_scaled:
            plgpu.barrier_wait(refs["scaled"].at[half])
            by_row = load_scales(refs["row_scales"].at[half, self.warpgroup], 0, (ROWS, W))
            for i in range(len(pieces)):
                by_column = refs["column_scales"].at[half, pl.ds(i * W, W)]
                pieces[i] = pieces[i] * by_row * load_scales(by_column, 1, (ROWS, W))
        return tuple(piece.astype(refs["result"].dtype) for piece in pieces)

    def _finish(self, sums, j: int) -> None:
        """Write the j-th group of a tile's rounded sums to shared memory."""
        target = self.staged.at[:, pl.ds(j * self.W, self.W)]
        if not self.is_gated:
            target[...] = sums[j]
            return
        gate, up = (each.astype(jnp.float32) for each in sums[2 * j : 2 * j + 2])
        root = jax.lax.rsqrt(1 + jnp.exp(-gate))  # one instruction; a division takes about twenty
        target[...] = (gate * (root * root) * up).astype(self.refs["result"].dtype)

    def _store(self, i) -> None:
        """Write the i-th tile, as `_finish` left it, to the result."""
        plgpu.commit_smem()
        row, column = self.place(i)
        rows = _piece(row * CONSUMERS + self.warpgroup, ROWS)
        target = self.refs["result"].at[rows, _piece(column, self.staged.shape[1])]
        plgpu.copy_smem_to_gmem(self.staged, target)


def _piece(i, size):
    return pl.ds(pl.multiple_of(i * size, size), size)
