"""Pallas Mosaic kernel for NVIDIA Hopper: gate, up and SiLU of many rows in one launch.

A product of many rows takes as long as the tensor cores do, by XLA as well, which then reads and
writes its result once more for SiLU. Here as many blocks of threads as run at once take the tiles
of the result in turns. One warpgroup loads, by TMA through a ring of buffers; two multiply, and
finish a tile, rounded, while the tensor cores are at the first steps of the next. Roundings to 16
bits are those of the reference, but for SiLU's own.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from .mosaic import MULTIPROCESSORS, SHARED_BYTES, next_buffer, swizzled, unsupported_pair

_CONSUMERS, _ROWS = 2, 64  # warpgroups that multiply, and rows of each
_TILE = _CONSUMERS * _ROWS
# Columns of a tile, gate's and up's, in the order of preference: the registers hold 256 sums a row;
# 192 are up to 2 % slower, and often fill the chip better.
_COLUMNS = (256, 192)
_DEPTH = 64  # of a step
_TURNS = (16, 32, 64)  # columns of gate, and as many of up, that lie side by side
_BAND = 32  # tiles of rows that all have a tile of columns before the next ones do: what L2 holds
_CLOSE = 0.02  # smaller differences of shares count as ties


def unsupported_rows(x: Array, w: Array) -> str | None:
    """Why `gated_matmul` cannot take such operands, or None; `w` as [D C 2 W]."""
    rows, (D, C, _, W) = x.size // x.shape[-1], w.shape
    if reason := unsupported_pair(x, w):
        return reason
    if rows % _TILE:
        return f"needs a multiple of {_TILE} rows where there are more, got {rows}"
    if W not in _TURNS or not _widths(w):
        return (
            f"needs turns of 16, 32 or 64 columns, 96 or 128 of gate in each tile, got {C} of {W}"
        )
    if D % _DEPTH or max(_widths(w)) * _DEPTH > D * 2 * W:
        return f"needs a multiple of {_DEPTH} as depth, a step of it for each turn, got {D}"
    return None


def choose_columns(x: Array, w: Array) -> tuple[int, float]:
    """Columns of a tile, and the mean share of multiprocessors that then have a tile."""
    shares = {}
    for columns in _widths(w):
        tiles = (x.size // x.shape[-1]) * (w.size // len(w)) / (_TILE * columns)
        shares[columns] = tiles / (MULTIPROCESSORS * -(-tiles // MULTIPROCESSORS))
    best = max(shares.values())
    return next((columns, share) for columns, share in shares.items() if share > best - _CLOSE)


def _widths(w: Array) -> list[int]:
    """The tile widths that divide the matrices and their turns."""
    _, C, _, W = w.shape
    return [n for n in _COLUMNS if n % (2 * W) == 0 and 2 * C * W % n == 0]


@functools.partial(jax.jit, static_argnames=("columns", "blocks", "interpret"))  # layers lower once
def gated_matmul(
    x: Float[Array, "*M D"],
    w: Float[Array, "D C 2 W"],
    *,
    columns: int,
    blocks: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> Float[Array, "*M C*W"]:
    """See `api.gated_matmul`.

    Args:
        columns: Of a tile, see `choose_columns`.
        blocks: Of threads, at most; each needs a multiprocessor for itself.
        interpret: An `InterpretGPUParams` runs it on a CPU, for tests.
    """
    D, C, _, W = w.shape

    def run(x, w):
        rows, flat = x.reshape(-1, D), w.reshape(D, -1)
        kind, transforms = x.dtype, swizzled(_DEPTH, x.dtype)
        step, staged = (_TILE + columns) * _DEPTH, _TILE * columns // 2
        stages = (SHARED_BYTES // kind.itemsize - staged) // step
        ring, out = (stages, _CONSUMERS, _ROWS, _DEPTH), (_CONSUMERS, _ROWS, columns // 2)
        scratch = {
            "rows": plgpu.SMEM(ring, kind, transforms=transforms),
            "weights": plgpu.SMEM((stages, _DEPTH, columns), kind, transforms=transforms),
            "out": plgpu.SMEM(out, kind, transforms=swizzled(W, kind)),
            "loaded": plgpu.Barrier(num_barriers=stages, num_arrivals=_CONSUMERS + 1),
            "used": plgpu.Barrier(num_barriers=stages, num_arrivals=_CONSUMERS),
        }
        tiles = len(rows) // _TILE * (flat.shape[1] // columns)
        out = plgpu.kernel(
            functools.partial(_multiply, names=tuple(scratch), tiles=tiles, W=W),
            out_type=jax.ShapeDtypeStruct((len(rows), C * W), kind),
            grid=(min(tiles, blocks),),
            grid_names=("block",),
            kernel_name="gated_matmul",
            num_threads=_CONSUMERS + 1,
            thread_name="warpgroup",
            scratch_types=list(scratch.values()),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpret,
        )(rows, flat)
        return out.reshape(*x.shape[:-1], C * W)

    # Mosaic kernels have no batching rule, so vmap runs them one after another.
    return jax.custom_batching.sequential_vmap(run)(x, w)


def origin(tile: Array, down: int, across: int) -> tuple[Array, Array]:
    """The row and the column, in tiles, of the tile with this number; there are `down * across`."""
    tile = jnp.asarray(tile, jnp.int32)
    number = functools.partial(jnp.asarray, dtype=jnp.int32)
    band = jax.lax.div(tile, number(_BAND * across))
    place = tile - band * (_BAND * across)
    height = jnp.minimum(down - band * _BAND, _BAND).astype(jnp.int32)
    return band * _BAND + jax.lax.rem(place, height), jax.lax.div(place, height)


def _multiply(x, w, out, *scratch, names, tiles, W):
    """One thread block: a tile of the result, then the tile `blocks` further on."""
    scratch = dict(zip(names, scratch, strict=True))
    stages, _, columns = scratch["weights"].shape
    warpgroup, block = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("block")
    blocks = jax.lax.axis_size("block")
    zero, steps = jnp.asarray(0, jnp.int32), x.shape[1] // _DEPTH
    count = jax.lax.div(tiles - 1 - block, jnp.asarray(blocks, jnp.int32)) + 1

    def place(i):
        return origin(block + i * blocks, x.shape[0] // _TILE, w.shape[1] // columns)

    def piece(i, size):
        return pl.ds(pl.multiple_of(i * size, size), size)

    after = functools.partial(next_buffer, stages=stages)

    def load_tile(i, slot):
        row, column = place(i)

        def load(step, slot):
            @pl.when(i * steps + step >= stages)
            def _():
                plgpu.barrier_wait(scratch["used"].at[slot])

            loaded, deep = scratch["loaded"].at[slot], piece(step, _DEPTH)
            source = w.at[deep, piece(column, columns)]
            plgpu.copy_gmem_to_smem(source, scratch["weights"].at[slot], loaded)
            for group in range(_CONSUMERS):
                source = x.at[piece(row * _CONSUMERS + group, _ROWS), deep]
                plgpu.copy_gmem_to_smem(source, scratch["rows"].at[slot, group], loaded)
            return after(slot)

        return jax.lax.fori_loop(0, steps, load, slot)

    def drain(_, slot):
        plgpu.barrier_wait(scratch["used"].at[slot])
        return after(slot)

    @pl.when(warpgroup == _CONSUMERS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        jax.lax.fori_loop(0, count, load_tile, zero)
        jax.lax.fori_loop(0, jnp.minimum(count * steps, stages), drain, zero)

    turns = range(columns // (2 * W))
    staged = scratch["out"].at[warpgroup]

    def finish(sums, j):
        """Write one turn of a tile's rounded sums to shared memory."""
        both = (sums[:, first : first + W] for first in (2 * j * W, (2 * j + 1) * W))
        gate, up = (each.astype(jnp.float32) for each in both)
        root = jax.lax.rsqrt(1 + jnp.exp(-gate))  # one instruction; a division takes about twenty
        staged[:, pl.ds(j * W, W)] = (gate * (root * root) * up).astype(out.dtype)

    def store(i):
        """Write the i-th tile, as `finish` left it, to the result."""
        plgpu.commit_smem()
        row, column = place(i)
        rows = piece(row * _CONSUMERS + warpgroup, _ROWS)
        plgpu.copy_smem_to_gmem(staged, out.at[rows, piece(column, columns // 2)])

    def products(sums, i, slot, before):
        def step(k, slots, meanwhile=lambda: None):
            slot, last = slots
            plgpu.barrier_wait(scratch["loaded"].at[slot])
            plgpu.wgmma(sums, scratch["rows"].at[slot, warpgroup], scratch["weights"].at[slot])
            meanwhile()
            plgpu.wgmma_wait(1)  # the products of the step before are done

            @pl.when(k > 0)
            def _():
                plgpu.barrier_arrive(scratch["used"].at[last])

            return after(slot), slot

        slots = slot, slot
        for j in turns:
            slots = step(j, slots, functools.partial(finish, before, j))
        pl.when(i > 0)(functools.partial(store, i - 1))
        slot, last = jax.lax.fori_loop(len(turns), steps, step, slots)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(scratch["used"].at[last])
        return slot, sums[...].astype(x.dtype)

    def compute_tile(i, carry):
        slot, before = carry  # the first step has no tile before it to store
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what `store` began last
        run = functools.partial(products, i=i, slot=slot, before=before)
        return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((_ROWS, columns), jnp.float32))

    @pl.when(warpgroup < _CONSUMERS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        none = plgpu.layout_cast(jnp.zeros((_ROWS, columns), x.dtype), plgpu.Layout.WGMMA)
        _, sums = jax.lax.fori_loop(0, count, compute_tile, (zero, none))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for j in turns:
            finish(sums, j)
        store(count - 1)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the end of the launch waits for the rest
