"""Pallas Mosaic kernels for NVIDIA Hopper: products of few rows; gate, up and SiLU in one launch.

A product of few rows takes as long as the reading of its weights. A thread block has a warpgroup
that loads, by TMA through a ring of buffers, and a warpgroup that computes for every 64 rows. The
block that loads a tile of the weights multiplies all rows by it, and all blocks run at once.
Results are rounded to 16 bits wherever the reference rounds, except inside SiLU.
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
from jaxtyping import Array, Float

from .. import hopper
from ..hopper import load_scales, next_buffer, swizzled
from ..hopper.products import products_of_parts
from ..lowered import lowered_once
from .fp8 import DTYPE as FP8
from .fp8 import Fp8Groups, Fp8Matrix, Fp8Rows, factors_of, values_of
from .mosaic_few_tiling import ROWS, Tiling, is_staged, result_dtype


@lowered_once(static_argnames=("tiling", "dtype", "interpret"))
def split_matmul(
    x: Float[Array, "*M K"] | Fp8Rows | Fp8Groups,
    w: Float[Array, "K N"] | Fp8Matrix,
    *,
    tiling: Tiling,
    dtype: Any = None,
    interpret: Any = None,
) -> Float[Array, "*M N"] | Float[Array, "X *M N"]:
    """`x @ w` as rows, or its `tiling.splits` parts in float32.

    Args:
        dtype: Type of the rows; None for that of `x`.
        interpret: An `InterpretGPUParams` runs it on a CPU, for tests.
    """

    def run(x, w):
        M, N = values_of(x).shape[:-1], w.shape[1]
        kind = result_dtype(dtype or x.dtype, tiling.splits)
        out = jax.ShapeDtypeStruct((tiling.splits, math.prod(M), N), kind)
        whole = tiling.columns
        (out,) = _launch("split_matmul", x, w, [out], lambda sums: [sums], whole, tiling, interpret)
        out = out.reshape(-1, *M, N)
        return out if tiling.splits > 1 else out[0]

    # Mosaic kernels have no batching rule, so vmap runs them one after another.
    return jax.custom_batching.sequential_vmap(run)(x, w)


@lowered_once(static_argnames=("tiling", "dtype", "is_quantized", "interpret"))
def gated_matmul(
    x: Float[Array, "*M K"] | Fp8Rows,
    w: Float[Array, "K C 2 W"] | Fp8Matrix,
    *,
    tiling: Tiling,
    dtype: Any = None,
    is_quantized: bool = False,
    interpret: Any = None,
) -> Float[Array, "*M C*W"] | Fp8Groups:
    """See `api_products.gated_matmul`; `dtype` as in `split_matmul`.

    Args:
        is_quantized: Round the rows once more, to 8 bits; the columns of a thread block are a
            group with one scale.
    """
    _, C, _, W = w.shape
    kind = jnp.dtype(dtype or values_of(x).dtype)

    def gated(sums):
        def rounded(first):
            return sums[:, first : first + W].astype(kind).astype(jnp.float32)

        def silu(gate):  # as in `mosaic_many`
            root = jax.lax.rsqrt(1 + jnp.exp(-gate))
            return gate * (root * root)

        turns = [(rounded(i), rounded(i + W)) for i in range(0, tiling.columns, 2 * W)]
        return [(silu(gate) * up).astype(kind) for gate, up in turns]

    def run(x, w):
        M = values_of(x).shape[:-1]
        out = [jax.ShapeDtypeStruct((1, math.prod(M), C * W), kind)]
        if is_quantized:
            shape = 2 * C * W // tiling.columns, -(-math.prod(M) // ROWS) * ROWS
            out = [out[0].update(dtype=FP8), jax.ShapeDtypeStruct(shape, jnp.float32)]
        flat = w.flat if isinstance(w, Fp8Matrix) else w.reshape(len(w), -1)
        out, *scales = _launch("gated_matmul", x, flat, out, gated, W, tiling, interpret)
        out = out.reshape(*M, C * W)
        return Fp8Groups(out, *scales) if scales else out

    return jax.custom_batching.sequential_vmap(run)(x, w)


def _launch(
    name: str,
    x: Array | Fp8Rows | Fp8Groups,
    w: Array | Fp8Matrix,
    outputs: list[jax.ShapeDtypeStruct],
    finish: Callable[[Array], list[Array]],
    piece: int,
    tiling: Tiling,
    interpret: Any,
) -> list[Array]:
    """`x` [M K] times `w` [K N]; `finish` turns the sums into adjacent pieces of the rows.

    Args:
        outputs: The result and, if it has 8 bits, its scales.
    """
    depth, stages, columns = tiling.depth, tiling.stages, tiling.columns
    K, N = w.shape
    out = outputs[0]
    consumers = -(-out.shape[1] // ROWS)
    group = K // len(x.scales) if isinstance(x, Fp8Groups) else None
    if isinstance(x, Fp8Rows | Fp8Groups):
        assert isinstance(w, Fp8Matrix)
        scales = (x.scales if group else x.scales.reshape(-1), w.scales)
        rows, weights, tile = x.values.reshape(-1, K), w.values, (columns, depth)
    else:
        assert isinstance(w, jax.Array)
        rows, weights, scales, tile = x.reshape(-1, K), w, (), (depth, columns)
    kind = weights.dtype
    transforms = swizzled(depth if scales else min(columns, depth), kind)
    scratch = {
        "rows": plgpu.SMEM((stages, consumers, ROWS, depth), kind, transforms=transforms),
        "weights": plgpu.SMEM((stages, *tile), kind, transforms=transforms),
        "loaded": plgpu.Barrier(num_barriers=stages, num_arrivals=consumers + 1),
        "used": plgpu.Barrier(num_barriers=stages, num_arrivals=consumers),
    }
    if scales:
        groups = (K // group // tiling.splits,) if group else ()
        scratch["row_scales"] = plgpu.SMEM((*groups, consumers * ROWS), jnp.float32)
        scratch["column_scales"] = plgpu.SMEM((columns,), jnp.float32)
        scratch["scaled"] = plgpu.Barrier(num_barriers=1, num_arrivals=len(scales))
    if is_staged(out.shape[1], out.dtype):
        shape = (consumers, ROWS, columns * out.shape[2] // N)
        scratch["out"] = plgpu.SMEM(shape, out.dtype, transforms=swizzled(piece, out.dtype))
    body = functools.partial(
        _multiply,
        names=(
            *("of_rows", "of_columns")[: len(scales)],
            *("result", "result_scales")[: len(outputs)],
            *scratch,
        ),
        tiling=tiling,
        steps=K // (tiling.splits * depth),
        consumers=consumers,
        finish=finish,
        group_size=group,
        is_scaled=bool(scales),
        is_interpreted=interpret is not None,
    )
    return hopper.kernel(
        body,
        out_type=outputs,
        grid=(N // columns, tiling.splits),
        grid_names=("column", "split"),
        kernel_name=name,
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(rows, weights, *scales)


def _multiply(x, w, *refs, names, **settings):
    """One thread block: all rows, some columns, a share of the depth."""
    named = dict(zip(names, refs, strict=True))
    split, warpgroup = jax.lax.axis_index("split"), jax.lax.axis_index("warpgroup")
    where = {"split": split, "warpgroup": warpgroup, "tile": jax.lax.axis_index("column")}
    block = _Block(x=x, w=w, refs=named, **where, **settings)
    pl.when(warpgroup == block.consumers)(block.load)
    down = pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)
    pl.when(warpgroup < block.consumers)(functools.partial(block.compute, down))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Block:
    """A thread block of a product, as one of its warpgroups sees it.

    8-bit operands have scales, and their weights are stored as [N K]. If every `group_size` columns
    of a row have a scale, their sums are multiplied by it before they are added to the others.
    """

    x: Any
    w: Any
    refs: dict[str, Any]  # scales, results, shared memory and barriers
    tiling: Tiling
    steps: int
    consumers: int  # warpgroups that compute
    finish: Callable[[Array], list[Array]]  # see `_launch`
    group_size: int | None
    is_scaled: bool  # 8 bits
    is_interpreted: bool
    split: Array
    warpgroup: Array
    tile: Array  # index of the columns

    def across(self, width: int) -> Any:
        """Columns of the block, in a matrix where its tiles are `width` wide."""
        return pl.ds(pl.multiple_of(self.tile * width, width), width)

    def rows(self) -> list[int]:
        """Number of rows of each warpgroup."""
        return [min(ROWS, self.x.shape[0] - i * ROWS) for i in range(self.consumers)]

    def load(self) -> None:
        """Load everything, as the loading warpgroup, and wait until it is used."""
        plgpu.set_max_registers(40, action="decrease")
        # The first sums need the scales of groups. Loaded after the first weights, they would
        # arrive only after every load in flight. Other scales are needed after the last sum.
        if self.group_size is not None:
            self._load_scales()
        jax.lax.fori_loop(0, self.steps, self._load_step, jnp.asarray(0, jnp.int32))
        if self.is_scaled and self.group_size is None:
            self._load_scales()
        for i in range(max(0, self.steps - self.tiling.stages), self.steps):
            plgpu.barrier_wait(self.refs["used"].at[i % self.tiling.stages])

    def _load_step(self, i, slot):
        depth, refs = self.tiling.depth, self.refs

        @pl.when(i >= self.tiling.stages)
        def _():
            plgpu.barrier_wait(refs["used"].at[slot])

        loaded, columns = refs["loaded"].at[slot], self.tiling.columns
        deep = pl.ds(pl.multiple_of((self.split * self.steps + i) * depth, depth), depth)
        source = (self.across(columns), deep) if self.is_scaled else (deep, self.across(columns))
        plgpu.copy_gmem_to_smem(self.w.at[*source], refs["weights"].at[slot], loaded)
        for group, rows in enumerate(self.rows()):
            target = _leading(refs["rows"].at[slot, group], rows)
            plgpu.copy_gmem_to_smem(self.x.at[pl.ds(group * ROWS, rows), deep], target, loaded)
        return next_buffer(slot, self.tiling.stages)

    def _load_scales(self) -> None:
        refs, rows = self.refs, pl.ds(0, self.x.shape[0])
        arrived = refs["scaled"].at[0]
        source = refs["of_columns"].at[self.across(self.tiling.columns)]
        plgpu.copy_gmem_to_smem(source, refs["column_scales"], arrived)
        source, target = refs["of_rows"], refs["row_scales"]
        if self.group_size is None:  # rows past the last one are not read
            source, target = source.at[rows], target.at[rows]
        else:
            size = target.shape[0]
            source = source.at[pl.ds(pl.multiple_of(self.split * size, size), size)]
        plgpu.copy_gmem_to_smem(source, target, arrived)

    def compute(self, down: Any) -> None:
        """Multiply the rows `down` and store the result, as a computing warpgroup."""
        plgpu.set_max_registers(232 if self.consumers == 2 else 208, action="increase")
        if self.group_size is not None:
            sums = self._products_of_groups(self.group_size, down)
        else:
            sums = plgpu.WGMMAAccumulatorRef((ROWS, self.tiling.columns), jnp.float32)
            sums = pl.run_scoped(functools.partial(self._products, down=down), sums)
        pieces = self.finish(sums)
        if "result_scales" in self.refs:
            pieces = self._quantized(pieces, down)
        self._store([piece.astype(self.refs["result"].dtype) for piece in pieces], down)

    def _products(self, sums, down) -> Array:
        refs, zero = self.refs, jnp.asarray(0, jnp.int32)

        def step(i, slots):
            slot, before = slots
            plgpu.barrier_wait(refs["loaded"].at[slot])
            weights = refs["weights"].at[slot]
            weights = weights.T if self.is_scaled else weights
            plgpu.wgmma(sums, refs["rows"].at[slot, self.warpgroup], weights)
            plgpu.wgmma_wait(1)  # the products of the step before are done

            @pl.when(i > 0)
            def _():
                plgpu.barrier_arrive(refs["used"].at[before])

            return next_buffer(slot, self.tiling.stages), slot

        _, last = jax.lax.fori_loop(0, self.steps, step, (zero, zero))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(refs["used"].at[last])
        found = sums[...]
        if self.is_scaled:
            plgpu.barrier_wait(refs["scaled"].at[0])
            for axis, ref in enumerate((refs["row_scales"].at[down], refs["column_scales"])):
                found = found * load_scales(ref, axis, found.shape)
        return found

    def _products_of_groups(self, size, down) -> Array:
        depth, columns, refs = self.tiling.depth, self.tiling.columns, self.refs
        parts = [(first, size) for first in range(0, depth, size)]

        def step(i, carry):
            slot, total = carry
            plgpu.barrier_wait(refs["loaded"].at[slot])
            operands = refs["rows"].at[slot, self.warpgroup], refs["weights"].at[slot]
            products = products_of_parts(*operands, parts, self.is_interpreted)
            plgpu.barrier_arrive(refs["used"].at[slot])
            pl.when(i == 0)(lambda: plgpu.barrier_wait(refs["scaled"].at[0]))
            for j, product in enumerate(products):
                scales = refs["row_scales"].at[i * len(parts) + j, down]
                total += product * load_scales(scales, 0, (ROWS, columns))
            return next_buffer(slot, self.tiling.stages), total

        total = plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), plgpu.Layout.WGMMA)
        start = jnp.asarray(0, jnp.int32), total
        _, total = jax.lax.fori_loop(0, self.steps, step, start)
        return total * load_scales(refs["column_scales"], 1, total.shape)

    def _quantized(self, pieces: list[Array], down) -> list[Array]:
        """The pieces in 8 bits, with one scale for this block's columns of a row."""
        wide = [piece.astype(jnp.float32) for piece in pieces]
        largest = functools.reduce(jnp.maximum, (jnp.abs(one).max(axis=1) for one in wide))
        factors, units = factors_of(largest)
        self.refs["result_scales"][self.tile, down] = units
        return [
            (one * jax.lax.broadcast_in_dim(factors, one.shape, [0])).astype(FP8) for one in wide
        ]

    def _store(self, pieces: list[Array], down) -> None:
        out, width = self.refs["result"], sum(piece.shape[1] for piece in pieces)
        if "out" not in self.refs:
            (out[self.split, down, self.across(width)],) = pieces
            return
        staged = self.refs["out"].at[self.warpgroup]
        for i, piece in enumerate(pieces):
            side = piece.shape[1]
            (staged if side == width else staged.at[:, pl.ds(i * side, side)])[...] = piece
        plgpu.commit_smem()
        for group, rows in enumerate(self.rows()):

            @pl.when(self.warpgroup == group)
            def _(group=group, rows=rows):
                target = out.at[self.split, pl.ds(group * ROWS, rows), self.across(width)]
                plgpu.copy_smem_to_gmem(_leading(staged, rows), target)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # writes end with the launch


def _leading(ref, rows):
    return ref if rows == ROWS else ref.at[pl.ds(0, rows)]
