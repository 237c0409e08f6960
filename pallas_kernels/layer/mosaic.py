"""Pallas Mosaic kernels for NVIDIA Hopper and short windows: products, sum and norm.

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
from ..hopper import MULTIPROCESSORS, SHARED_BYTES, load_scales, next_buffer, swizzled
from ..hopper.products import products_of_parts
from ..lowered import lowered_once
from .fp8 import DTYPE as FP8
from .fp8 import Fp8Groups, Fp8Matrix, Fp8Rows, Fp8Sums, factors_of, factors_of_scalar
from .routed import RoutedRows

_ROWS = 64  # rows of a warpgroup's product
MOST_ROWS = 2 * _ROWS  # the registers hold the sums of two warpgroups
ROW_MULTIPLE = 8  # rows of a swizzled tile
_STEP = 64  # least columns of a tile
_LINE_BYTES = 128  # depth of a tile: the longest line that can be swizzled
_LINE = 16  # 16-bit columns of the shortest line that can be swizzled
_MOST_STAGES = 8
_LEAST_DEEP = 3  # least stages of double depth; with two, gate and up take 9 to 26 % longer
# Bytes in flight of all thread blocks together. With 2 to 3 MiB more, SDAR-8B's down projection
# takes 29.1 us instead of 28.2, gate and up 51.8 instead of 50.8.
_IN_FLIGHT_BYTES = 22 * 2**20
_MOST_SPLITS = 4
GROUP = 64  # least columns of a group with one scale
PART = 32  # 8-bit columns of one instruction
_SHALLOW = 2048  # up to this depth, tiles of half the columns win (8 bits, few rows)
_THREADS, _VECTOR = 128, 4  # threads that norm a row, and numbers that each loads at once
_WIDEST = 4096  # longest row that was measured
_ROUNDED_VECTOR, _WIDEST_ROUNDED = 8, 16384  # the same two for rows that are rounded to 8 bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """The work of one thread block.

    Attributes:
        columns: Columns of the weights.
        depth: Depth of both operands in one step.
        stages: Steps in flight.
        splits: Blocks that split the depth of a tile; the reader adds up their partial sums.
    """

    columns: int = 64
    depth: int = 64
    stages: int = 4
    splits: int = 1


def unsupported(x: Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the kernels cannot take such rows here, or None."""
    if reason := hopper.unsupported() or hopper.unsupported_version():
        return reason
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs a 16-bit type, got {x.dtype}"
    return None if x.size else "needs at least one row"


def unsupported_pair(x: Array, w: Array | Fp8Matrix) -> str | None:
    """Why no kernel can multiply these operands, or None."""
    if w.dtype not in (x.dtype, FP8):
        return f"needs operands of one type, got {x.dtype} and {w.dtype}"
    if isinstance(w, Fp8Matrix) and w.values.shape[-1] != w.shape[0]:
        return f"needs inputs that are whole lines of {_LINE_BYTES} bytes, got {w.shape[0]}"
    return None


def unsupported_row(x: Array) -> str | None:
    """Why `add_rms_norm` cannot take such rows, or None."""
    width = x.shape[-1]
    step = _THREADS * _VECTOR
    if width % step or width > _WIDEST:
        return f"needs rows of a multiple of {step} up to {_WIDEST}, got {width}"
    return None


def unsupported_sandwich(x: Array) -> str | None:
    """Why `sandwich_norm` cannot take such rows, or None."""
    width = x.shape[-1]
    if width % (2 * _THREADS) or width > _WIDEST:
        return f"needs rows of a multiple of {2 * _THREADS} up to {_WIDEST}, got {width}"
    return None


def unsupported_rounded(x: Array) -> str | None:
    """Why `quantize_rows` cannot take such rows, or None."""
    width, step = x.shape[-1], _THREADS * _VECTOR
    if width % step or width > _WIDEST_ROUNDED:
        return f"needs rows of a multiple of {step} up to {_WIDEST_ROUNDED}, got {width}"
    return None


def unsupported_turn(width: int) -> str | None:
    """Why `gated_matmul` cannot take gate and up interleaved by `width` columns, or None."""
    if width % _LINE:  # each piece of the result is swizzled separately
        return f"needs turns of a multiple of {_LINE} columns, got {width}"
    return None


def unsupported_product(x: Array, w: Array | Fp8Matrix, tiling: Tiling | None) -> str | None:
    """Why the products cannot take such operands, or None; `w` as [K N]."""
    rows = _num_rows(x)
    if reason := unsupported_pair(x, w):
        return reason
    if rows > MOST_ROWS or rows % ROW_MULTIPLE:
        return f"needs a multiple of {ROW_MULTIPLE} rows, at most {MOST_ROWS}, got {rows}"
    if tiling is None:
        tiles = f"tiles of {_STEP} columns or more, at most {MULTIPROCESSORS} side by side"
        return f"needs whole {tiles}, got {w.shape}"
    return None


def choose_tiling(
    x: Array | jax.ShapeDtypeStruct,
    w: Array | Fp8Matrix,
    columns: tuple[int, ...] = (_STEP,),
    is_gated: bool = False,
    dtype: Any = None,
    groups: int = 1,
    splits: int | None = None,
) -> Tiling | None:
    """A tiling for `x @ w` with `w` as [K N]; None if no whole tiles fit.

    All its thread blocks run at once. It is within 4 % of the fastest tiling tried on an H200 with
    the shapes of SDAR-1.7B and -8B (benchmarks/notes/few_row_products.md).

    Args:
        columns: Widths to try, in order.
        is_gated: Half the columns come out, without partial sums.
        dtype: Type of the resulting rows; None for that of `x`.
        groups: Number of scales of an 8-bit row.
        splits: Parts of the depth, if fixed (`segments`).
    """
    K, N = w.shape
    consumers = -(-_num_rows(x) // _ROWS)
    rows, itemsize = consumers * _ROWS, w.dtype.itemsize
    line = _LINE_BYTES // itemsize
    is_8_bit = w.dtype == FP8
    is_deep = consumers == 1 and (is_8_bit or not is_gated)
    if is_8_bit and is_deep and not is_gated and K <= _SHALLOW:
        columns = (_STEP // 2, *columns)
    depths = (2 * line, line) if is_deep else (line,)
    if is_deep and groups > 1:
        depths += (3 * line,)  # whole groups of 96
    # The 8-bit gate and up were timed with stages chosen by the unpadded number of rows.
    asked = _num_rows(x) if is_8_bit and is_gated else rows
    for width in columns:
        blocks = N // width
        if N % width or not 0 < blocks <= MULTIPROCESSORS:
            continue
        most = 1 if is_gated else min(MULTIPROCESSORS // blocks, _MOST_SPLITS)
        for depth in depths:
            several = range(most, 0, -1) if splits is None else (splits,)
            parts = next((n for n in several if K % (n * depth) == 0), 0)
            if not parts or (groups > 1 and depth * groups % K):  # of whole groups
                continue
            kind = _dtype(dtype or x.dtype, parts)
            staged = rows * (width // 2 if is_gated else width) * kind.itemsize
            staged = staged if _is_staged(_num_rows(x), kind) else 0
            staged += (rows * -(-groups // parts) + width) * 4 if is_8_bit else 0  # their scales
            step = depth * itemsize
            stages = (SHARED_BYTES - staged) // ((rows + width) * step)
            in_flight = _IN_FLIGHT_BYTES // ((asked + width) * step * blocks * parts)
            stages = min(stages, in_flight, _MOST_STAGES)
            if is_gated and depth > line and stages < _LEAST_DEEP:
                continue
            return Tiling(columns=width, depth=depth, stages=stages, splits=parts)
    return None


def segments(w: Array) -> int:
    """Number of parts of the depth in which sums of a product with `w` [K N] are accumulated.

    It depends on the matrix alone, so that the bits of a row do not depend on the number of rows.
    """
    tiling = choose_tiling(jax.ShapeDtypeStruct((MOST_ROWS, len(w)), w.dtype), w)
    return 1 if tiling is None else tiling.splits


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
        M, N = _row_shape(x), w.shape[1]
        kind = _dtype(dtype or x.dtype, tiling.splits)
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
    """See `api.gated_matmul`; `dtype` as in `split_matmul`.

    Args:
        is_quantized: Round the rows once more, to 8 bits; the columns of a thread block are a
            group with one scale.
    """
    _, C, _, W = w.shape
    kind = jnp.dtype(dtype or (x.values if isinstance(x, Fp8Rows) else x).dtype)

    def gated(sums):
        def rounded(first):
            return sums[:, first : first + W].astype(kind).astype(jnp.float32)

        def silu(gate):  # as in `mosaic_many`
            root = jax.lax.rsqrt(1 + jnp.exp(-gate))
            return gate * (root * root)

        turns = [(rounded(i), rounded(i + W)) for i in range(0, tiling.columns, 2 * W)]
        return [(silu(gate) * up).astype(kind) for gate, up in turns]

    def run(x, w):
        M = _row_shape(x)
        out = [jax.ShapeDtypeStruct((1, math.prod(M), C * W), kind)]
        if is_quantized:
            shape = 2 * C * W // tiling.columns, -(-math.prod(M) // _ROWS) * _ROWS
            out = [out[0].update(dtype=FP8), jax.ShapeDtypeStruct(shape, jnp.float32)]
        flat = w.flat if isinstance(w, Fp8Matrix) else w.reshape(len(w), -1)
        out, *scales = _launch("gated_matmul", x, flat, out, gated, W, tiling, interpret)
        out = out.reshape(*M, C * W)
        return Fp8Groups(out, *scales) if scales else out

    return jax.custom_batching.sequential_vmap(run)(x, w)


def _row_shape(x: Array | Fp8Rows | Fp8Groups) -> tuple[int, ...]:
    return (x if isinstance(x, jax.Array) else x.values).shape[:-1]


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
    consumers = -(-out.shape[1] // _ROWS)
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
        "rows": plgpu.SMEM((stages, consumers, _ROWS, depth), kind, transforms=transforms),
        "weights": plgpu.SMEM((stages, *tile), kind, transforms=transforms),
        "loaded": plgpu.Barrier(num_barriers=stages, num_arrivals=consumers + 1),
        "used": plgpu.Barrier(num_barriers=stages, num_arrivals=consumers),
    }
    if scales:
        groups = (K // group // tiling.splits,) if group else ()
        scratch["row_scales"] = plgpu.SMEM((*groups, consumers * _ROWS), jnp.float32)
        scratch["column_scales"] = plgpu.SMEM((columns,), jnp.float32)
        scratch["scaled"] = plgpu.Barrier(num_barriers=1, num_arrivals=len(scales))
    if _is_staged(out.shape[1], out.dtype):
        shape = (consumers, _ROWS, columns * out.shape[2] // N)
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
    down = pl.ds(pl.multiple_of(warpgroup * _ROWS, _ROWS), _ROWS)
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
        return [min(_ROWS, self.x.shape[0] - i * _ROWS) for i in range(self.consumers)]

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
            plgpu.copy_gmem_to_smem(self.x.at[pl.ds(group * _ROWS, rows), deep], target, loaded)
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
            sums = plgpu.WGMMAAccumulatorRef((_ROWS, self.tiling.columns), jnp.float32)
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
                total += product * load_scales(scales, 0, (_ROWS, columns))
            return next_buffer(slot, self.tiling.stages), total

        total = plgpu.layout_cast(jnp.zeros((_ROWS, columns), jnp.float32), plgpu.Layout.WGMMA)
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
                target = out.at[self.split, pl.ds(group * _ROWS, rows), self.across(width)]
                plgpu.copy_smem_to_gmem(_leading(staged, rows), target)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # writes end with the launch


def _leading(ref, rows):
    return ref if rows == _ROWS else ref.at[pl.ds(0, rows)]


@lowered_once(static_argnames=("eps", "is_quantized", "interpret"))
def add_rms_norm(
    x: Array,
    y: Array | tuple[Array | RoutedRows, ...],
    scale: Array,
    eps: float,
    *,
    is_quantized: bool = False,
    interpret: Any = None,
) -> tuple[Array, Array | Fp8Rows]:
    """See `api.add_rms_norm`."""

    def run(x, y, scale):
        D = x.shape[-1]
        rows = x.reshape(-1, D)
        given, groups = [], []  # addends: partial sums (one array) or routed rows (three)
        for each in y:
            if isinstance(each, RoutedRows):
                lists = each.place.reshape(len(rows), -1), each.weights.reshape(len(rows), -1)
                mine = [each.results, *lists]
            else:
                mine = [each.reshape(-1, *rows.shape)]
            given += mine
            groups.append(len(mine))
        kind = jax.ShapeDtypeStruct(rows.shape, x.dtype)
        out = [kind, kind]
        if is_quantized:
            out = [kind, kind.update(dtype=FP8), jax.ShapeDtypeStruct((len(rows),), jnp.float32)]
        total, normed, *scales = hopper.kernel(
            functools.partial(_add_rms_norm, groups=groups, eps=eps),
            out_type=out,
            grid=(len(rows),),
            grid_names=("row",),
            kernel_name="add_rms_norm",
            interpret=interpret,
        )(rows, scale, *given)
        total, normed = total.reshape(x.shape), normed.reshape(x.shape)
        return total, Fp8Rows(normed, scales[0].reshape(x.shape[:-1])) if scales else normed

    return jax.custom_batching.sequential_vmap(run)(x, y if isinstance(y, tuple) else (y,), scale)


def weighted(results, place, weights, row, layout):
    """The weighted sum over a row's experts, in their order; see `RoutedRows`."""
    total = None
    for j in range(place.shape[1]):
        at = place[row, j]
        is_there = at < results.shape[0]
        values = hopper.load(results.at[jnp.where(is_there, at, 0)], layout).astype(jnp.float32)
        share = jnp.where(is_there, weights[row, j], 0.0)
        part = jnp.where(jnp.broadcast_to(is_there, values.shape), values, 0.0) * share
        total = part if total is None else total + part
    assert total is not None
    return total


def _add_rms_norm(x, scale, *refs, groups, eps):
    """One row, by one warpgroup."""
    given, out = refs[: sum(groups)], refs[sum(groups) :]
    row, (_, D) = jax.lax.axis_index("row"), x.shape
    layout = plgpu.Layout.WG_STRIDED((D,), vec_size=_VECTOR)

    def load(ref):
        return hopper.load(ref, layout).astype(jnp.float32)

    addends = []
    for size in groups:
        own, given = given[:size], given[size:]
        if size == 3:
            results, place, weights = own
            addends.append(weighted(results, place, weights, row, layout))
        else:
            parts = [load(own[0].at[i, row]) for i in range(own[0].shape[0])]
            whole = functools.reduce(jnp.add, parts)
            # Round as a product of many rows does before it gets here, so that bits agree.
            is_alone = len(groups) == 1
            addends.append(whole.astype(x.dtype).astype(jnp.float32) if is_alone else whole)
    kept = (load(x.at[row]) + functools.reduce(jnp.add, addends)).astype(x.dtype)
    store_normed(kept, load(scale), row, out, eps)


def store_normed(kept, scale, row, out, eps):
    """Store a row and its norm; the norm has 8 bits if `out` has a third reference, for scales."""
    total, normed, *scales = out
    total[row] = kept
    dtype, kept = kept.dtype, kept.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.sum(kept * kept) / len(kept) + eps)
    scaled, by = (each.astype(dtype).astype(jnp.float32) for each in (kept * factor, scale))
    rounded = (scaled * by).astype(dtype)
    if not scales:
        normed[row] = rounded
        return
    rounded = rounded.astype(jnp.float32)
    factor, unit = factors_of_scalar(jnp.max(jnp.abs(rounded)), rounded.shape)
    normed[row] = (rounded * factor).astype(FP8)
    scales[0][row] = unit


@functools.partial(jax.jit, static_argnames=("eps", "is_quantized", "interpret"))
def sandwich_norm(  # layers lower once
    x: Array,
    branches: tuple[tuple[Array | Fp8Sums | RoutedRows, Array], ...],
    following: tuple[Array, ...],
    eps: float,
    *,
    outer: Array | None = None,
    factor: tuple[Array, Array] | None = None,
    is_quantized: bool = False,
    interpret: Any = None,
) -> tuple[Array, tuple[Array | Fp8Rows, ...]]:
    """See `api.sandwich_norm`."""

    def run(x, branches, following, outer, factor):
        rows = x.reshape(-1, x.shape[-1])
        named = {"x": rows}
        for i, (y, scale) in enumerate(branches):
            if isinstance(y, Fp8Sums):
                named |= {f"rows{i}": y.rows.reshape(-1), f"columns{i}": y.columns}
                y = y.sums
            if isinstance(y, RoutedRows):
                lists = {"place": y.place, "weights": y.weights}
                named |= {f"{name}{i}": a.reshape(len(rows), -1) for name, a in lists.items()}
                y = y.results
            else:
                y = y.reshape(rows.shape)
            named |= {f"branch{i}": y, f"scale{i}": scale}
        named |= {f"following{i}": scale for i, scale in enumerate(following)}
        if outer is not None:
            named["outer"] = outer
        if factor is not None:
            is_second = factor[1].astype(jnp.int32).reshape(-1)
            named |= {"factors": factor[0].astype(x.dtype), "is_second": is_second}
        out = [jax.ShapeDtypeStruct(rows.shape, x.dtype)] * (1 + len(following))
        if is_quantized:
            out[1] = out[1].update(dtype=FP8)
            out.append(jax.ShapeDtypeStruct((len(rows),), jnp.float32))
        out = hopper.kernel(
            functools.partial(_sandwich_norm, names=tuple(named), eps=eps),
            out_type=out,
            grid=(len(rows),),
            grid_names=("row",),
            kernel_name="sandwich_norm",
            interpret=interpret,
        )(*named.values())
        total, *normed = (one.reshape(x.shape) for one in out[: 1 + len(following)])
        if is_quantized:
            normed[0] = Fp8Rows(normed[0], out[-1].reshape(x.shape[:-1]))
        return total, tuple(normed)

    return jax.custom_batching.sequential_vmap(run)(x, branches, following, outer, factor)


def _sandwich_norm(*refs, names, eps):
    """One row, by one warpgroup."""
    given = dict(zip(names, refs, strict=False))
    total, *normed = refs[len(names) :]
    units = [normed.pop()] if len(normed[-1].shape) == 1 else []
    row, (_, D) = jax.lax.axis_index("row"), total.shape
    layout = plgpu.Layout.WG_STRIDED((D,), vec_size=math.gcd(D // _THREADS, _ROUNDED_VECTOR))

    def rounded(values):
        return values.astype(total.dtype).astype(jnp.float32)

    def norm(values, scale):
        return values * jax.lax.rsqrt(jnp.sum(values * values) / D + eps) * scale

    # Start all loads before the first sum, which synchronises the threads.
    factor = None
    if "factors" in given:
        first, second = (given["factors"][i].astype(jnp.float32) for i in range(2))
        factor = jnp.where(given.pop("is_second")[row] != 0, second, first)
        del given["factors"]

    by_row = {name: given.pop(name)[row] for name in names if name.startswith("rows")}
    sums = {}
    for i in [name.removeprefix("place") for name in names if name.startswith("place")]:
        own = (given.pop(f"{name}{i}") for name in ("branch", "place", "weights"))
        results, place, weights = own
        sums[f"branch{i}"] = rounded(weighted(results, place, weights, row, layout))
    at = {
        name: hopper.load(ref.at[row] if len(ref.shape) > 1 else ref, layout).astype(jnp.float32)
        for name, ref in given.items()
    }
    at |= sums
    count = sum(name.startswith("branch") for name in names)
    for i in range(count):
        if f"rows{i}" in by_row:
            whole = at[f"branch{i}"] * by_row[f"rows{i}"] * at[f"columns{i}"]
            at[f"branch{i}"] = rounded(whole)
    each = [rounded(norm(at[f"branch{i}"], at[f"scale{i}"])) for i in range(count)]
    out = functools.reduce(lambda a, b: rounded(a + b), each)
    if "outer" in at:
        out = rounded(norm(out, at["outer"]))
    kept = rounded(at["x"] + out)
    if factor is not None:
        kept = rounded(kept * factor)
    total[row] = kept.astype(total.dtype)
    root = jax.lax.rsqrt(jnp.sum(kept * kept) / D + eps)
    for i, to in enumerate(normed):
        value = kept * root * at[f"following{i}"]
        if i == 0 and units:
            value = rounded(value)
            by, units[0][row] = factors_of_scalar(jnp.max(jnp.abs(value)), value.shape)
            value = value * by
        to[row] = value.astype(to.dtype)


@lowered_once(static_argnames=("interpret",))
def quantize_rows(x: Float[Array, "*M K"], *, interpret: Any = None) -> Fp8Rows:
    """See `api.quantize_rows`."""

    def run(x):
        rows = x.reshape(-1, x.shape[-1])
        values, scales = hopper.kernel(
            _quantize_rows,
            out_type=[
                jax.ShapeDtypeStruct(rows.shape, FP8),
                jax.ShapeDtypeStruct((len(rows),), jnp.float32),
            ],
            grid=(len(rows),),
            grid_names=("row",),
            kernel_name="quantize_rows",
            interpret=interpret,
        )(rows)
        return Fp8Rows(values.reshape(x.shape), scales.reshape(x.shape[:-1]))

    return jax.custom_batching.sequential_vmap(run)(x)


def _quantize_rows(x, values, scales):
    """One row, by one warpgroup."""
    row, (_, K) = jax.lax.axis_index("row"), x.shape
    vector = math.gcd(K // _THREADS, _ROUNDED_VECTOR)
    layout = plgpu.Layout.WG_STRIDED((K,), vec_size=vector)
    kept = hopper.load(x.at[row], layout).astype(jnp.float32)
    factor, unit = factors_of_scalar(jnp.max(jnp.abs(kept)), kept.shape)
    values[row] = (kept * factor).astype(FP8)
    scales[row] = unit


def _dtype(dtype: Any, splits: int) -> jnp.dtype:
    """The type of a product's result: `dtype`, or float32 for partial sums."""
    return jnp.dtype(dtype if splits == 1 else jnp.float32)


def _is_staged(num_rows: int, dtype: jnp.dtype) -> bool:
    """Whether results are stored through shared memory and TMA.

    A tile with fewer rows needs it, since rows past the last must not be written. It also pays for
    16 bits: adjacent threads hold two numbers each, so a direct store fills half a sector only. It
    saves 1.2 us of SDAR-8B's qkv with 128 rows.
    """
    return num_rows % _ROWS > 0 or dtype.itemsize <= 2


def _num_rows(x: Array | jax.ShapeDtypeStruct) -> int:
    return x.size // x.shape[-1]
