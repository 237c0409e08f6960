"""The products of a layer: the interface and its back ends; conventions and letters as in `api`."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import dispatch
from ..dispatch import BackEnd
from . import (
    fp8,
    mosaic,
    mosaic_few,
    mosaic_few_tiling,
    mosaic_many,
    mosaic_many_tiling,
    reference,
)
from .api import Implementation, quantize_rows
from .fp8 import Fp8Groups, Fp8Matrix, Fp8Rows, values_of
from .mosaic import num_rows
from .mosaic_few_tiling import MOST_ROWS

# Least and most weights of a matrix whose product is faster with Mosaic, measured at 32 and 128
# rows with the matrices of SDAR-1.7B and -8B (benchmarks/notes/few_row_products.md) and of
# LLaDA2-mini's shared expert (benchmarks/notes/experts.md).
MOSAIC_WEIGHTS = (2**20, 2**26)
MOSAIC_GATED_WEIGHTS = (2**21, 2**27)
# Least mean share of busy multiprocessors for `gated_matmul` of many rows: from 0.9 on it is 3 to
# 16 % faster than XLA's product and SiLU; at 0.87 it is as fast.
MOSAIC_LEAST_SHARE = 0.88
# Most rows of an 8-bit product by Mosaic's form for many rows, measured at 1,024 rows
# (benchmarks/results/fp8_many_check_h200.json, fp8_many_steps_h200.json).
MOSAIC_MANY_FP8_ROWS = 1024
# Most rows of a 16-bit product by Mosaic's form for many rows. ms a step of SDAR-1.7B on an H200,
# with this form and Mosaic's norm / by XLA: 512 rows 3.60 / 3.77, 1,024 rows 6.60 / 6.79, 2,048
# rows 11.9 / 11.7, 4,096 rows 24.5 / 23.1 to 23.4 (benchmarks/results/few_programs_h200.json).
MOSAIC_PRODUCT_ROWS = 1024
# Columns of gate and up together for a thread block of `gated_matmul`, in order of preference.
GATED_COLUMNS = (128, 192, 256)
FEW_BLOCKS = 32  # below this number of blocks, tiles have half the columns


def qkv_matmul(
    x: Float[Array, "*M D"] | Fp8Rows,
    w: Float[Array, "D G n+2 H"] | Fp8Matrix,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    one_rounding: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "*M G n+2 H"] | Float[Array, "X *M G n+2 H"]:
    """`x @ w` for `rotate_qkv`: in `dtype`, or float32 parts that add up to it.

    Args:
        x: Rows; with an `Fp8Matrix` they are rounded to 8 bits unless they already are.
        dtype: With an `Fp8Matrix`, the type of the resulting rows; None for that of `x`.
        one_rounding: With "mosaic" and 16 bits, take any number of rows, and split the depth into
            the same segments for all, so that a row's bits do not depend on it.
        implementation: "mosaic" takes 16 or 8 bits, and up to 128 rows or a multiple of 128.
    """
    if isinstance(w, Fp8Matrix):
        out = split_matmul(x, w.flat, dtype=dtype, implementation=implementation)
        return out.reshape(*out.shape[:-1], *w.shape[1:])
    assert isinstance(x, jax.Array)
    if dispatch.is_plain(implementation):
        return reference.matmul(x, w)
    kernel = _product(x, w.reshape(w.shape[0], -1), one_rounding)

    def own(x: Array, w: Array) -> Array:
        out = kernel.run(x, w.reshape(w.shape[0], -1))
        return out.reshape(*out.shape[:-1], *w.shape[1:])

    back_ends = {
        "mosaic": kernel._replace(run=own),
        "xla": BackEnd(reference.matmul),
    }
    return dispatch.run(implementation, back_ends, x, w)


def split_matmul(
    x: Float[Array, "*M K"] | Fp8Rows | Fp8Groups,
    w: Float[Array, "K N"] | Fp8Matrix,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    axis: str | None = None,
    one_rounding: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "*M N"] | Float[Array, "X *M N"]:
    """`x @ w` for `add_rms_norm`: rows in `dtype`, or float32 parts that add up to them.

    Args:
        x, dtype, one_rounding: As in `qkv_matmul`.
        axis: Mesh axis whose devices each hold a part of K; each returns its term of the sum. With
            an `Fp8Matrix` the parts of a row share one scale, found across the devices.
        implementation: "mosaic" takes 16 or 8 bits, and returns parts for up to 128 rows, rows for
            a multiple of 128; None chooses the fastest including the addition.
    """
    if isinstance(w, Fp8Matrix):
        rows, kind = _in_8_bits(x, dtype, axis)
        back_ends = {
            "mosaic": _by_rows(_few_split, rows, w, kind),
            "xla": BackEnd(functools.partial(fp8.matmul, dtype=kind)),
        }
        return dispatch.run(implementation, back_ends, rows, w)
    assert isinstance(x, jax.Array)
    if dispatch.is_plain(implementation):
        return reference.matmul(x, w)
    back_ends = {"mosaic": _product(x, w, one_rounding), "xla": BackEnd(reference.matmul)}
    return dispatch.run(implementation, back_ends, x, w)


def gated_matmul(
    x: Float[Array, "*M D"] | Fp8Rows,
    w: Float[Array, "D C 2 W"] | Fp8Matrix,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    reader: Fp8Matrix | None = None,
    one_rounding: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "*M C*W"] | Fp8Groups:
    """`silu(x Wg) * (x Wu)`, with gate and up interleaved in `w` (Shazeer 2020, eq. 6).

    Args:
        x, dtype, one_rounding: As in `qkv_matmul`.
        w: Gate and up alternate every W columns, so that a tile holds matching columns of both.
        reader: The matrix of the `split_matmul` that follows. If that product is fastest with
            `Fp8Groups`, the result has this form.
        implementation: "mosaic" takes 16 or 8 bits, and up to 128 rows or a multiple of 128.
    """
    if isinstance(w, Fp8Matrix):
        rows, kind = _in_8_bits(x, dtype)
        few = functools.partial(_few_gated, reader=reader)
        back_ends = {
            "mosaic": _by_rows(few, rows, w, kind),
            "xla": BackEnd(functools.partial(_plain_gated, kind)),
        }
        return dispatch.run(implementation, back_ends, rows, w)
    assert isinstance(x, jax.Array)
    # Flatten the leading axes: one compiled kernel for each number of rows.
    flat = x.reshape(-1, x.shape[-1])
    if dispatch.is_plain(implementation):
        return reference.gated_matmul(flat, w).reshape(*x.shape[:-1], -1)
    spare = _spare_rows(len(flat)) if one_rounding else 0
    kernel = _by_rows(_few_gated, _grown(flat, spare), w)
    kernel = _with_spare(kernel, spare) if spare else kernel
    back_ends = {"mosaic": kernel, "xla": BackEnd(reference.gated_matmul)}
    return dispatch.run(implementation, back_ends, flat, w).reshape(*x.shape[:-1], -1)


def takes_groups(shape: tuple[int, ...], w: Fp8Matrix, size: int, dtype: Any) -> bool:
    """Whether `split_matmul` of rows of this shape is fastest with `Fp8Groups`.

    Args:
        size: Columns of a group.
    """
    M, K = math.prod(shape[:-1]), shape[-1]
    if M > MOST_ROWS or K % size or size < mosaic_few_tiling.GROUP or size % mosaic_few_tiling.PART:
        return False
    values: Any = jax.ShapeDtypeStruct(shape, fp8.DTYPE)
    scales: Any = jax.ShapeDtypeStruct((K // size, M), jnp.float32)
    back_end = _few_split(Fp8Groups(values, scales), w, dtype)
    return back_end.is_fast and not back_end.unsupported


def _by_rows(few: Callable[..., BackEnd], x: Any, w: Array | Fp8Matrix, *dtype: Any) -> BackEnd:
    """Mosaic's form for this number of rows: `few` makes the one for few."""
    return (few if num_rows(values_of(x)) <= MOST_ROWS else _many)(x, w, *dtype)


def _few_split(
    x: Any, w: Array | Fp8Matrix, dtype: Any = None, segments: int | None = None
) -> BackEnd:
    """A product of few rows; `segments` are the parts of its depth, if fixed."""
    values, groups = values_of(x), len(x.scales) if isinstance(x, Fp8Groups) else 1
    how = {"dtype": dtype, "groups": groups, "splits": segments}
    if segments is not None:
        how["columns"] = mosaic_few_tiling.ANY_COLUMNS
    tiling = mosaic_few_tiling.choose_tiling(values, w, **how)
    return BackEnd(
        functools.partial(mosaic_few.split_matmul, tiling=tiling, dtype=dtype),
        _unsupported_result(values, dtype)
        or mosaic_few_tiling.unsupported_product(values, w, tiling),
        _is_within(w, MOSAIC_WEIGHTS),
    )


def _few_gated(
    x: Any, w: Array | Fp8Matrix, dtype: Any = None, reader: Fp8Matrix | None = None
) -> BackEnd:
    """Gate and up of few rows."""
    values, columns = values_of(x), _gated_columns(w)
    flat = w.flat if isinstance(w, Fp8Matrix) else w.reshape(len(w), -1)
    tiling = mosaic_few_tiling.choose_tiling(values, flat, columns, is_gated=True, dtype=dtype)
    is_quantized = False
    if reader is not None and tiling is not None:
        # Choosing other tiles to allow groups costs more than it saves: 3.4 us for 2.2 (SDAR-8B).
        shape = (*values.shape[:-1], reader.shape[0])
        is_quantized = takes_groups(shape, reader, tiling.columns // 2, dtype)
    how = {"tiling": tiling, "dtype": dtype, "is_quantized": is_quantized}
    return BackEnd(
        functools.partial(mosaic_few.gated_matmul, **how),
        _unsupported_result(values, dtype)
        or mosaic_few_tiling.unsupported_turn(w.shape[-1])
        or mosaic_few_tiling.unsupported_product(values, flat, tiling),
        _is_within(w, MOSAIC_GATED_WEIGHTS),
    )


def _many(x: Any, w: Array | Fp8Matrix, dtype: Any = None) -> BackEnd:
    """A product of many rows, gated if `w` is, in tiles that keep most multiprocessors busy."""
    values = values_of(x)
    if len(w.shape) == 4:
        run, sizes = mosaic_many.gated_matmul, MOSAIC_GATED_WEIGHTS
        unsupported = mosaic_many_tiling.unsupported_gated
    else:
        run, sizes = mosaic_many.matmul, MOSAIC_WEIGHTS
        unsupported = mosaic_many_tiling.unsupported_product
    reason = _unsupported_result(values, dtype) or unsupported(values, w)
    columns, share = (0, 0.0) if reason else mosaic_many_tiling.choose_columns(values, w)
    is_short = not isinstance(w, Fp8Matrix) or num_rows(values) <= MOSAIC_MANY_FP8_ROWS
    is_fast = is_short and share >= MOSAIC_LEAST_SHARE and math.prod(w.shape) >= sizes[0]
    return BackEnd(functools.partial(run, columns=columns, dtype=dtype), reason, is_fast)


def _unsupported_result(values: Array, dtype: Any) -> str | None:
    """Why Mosaic cannot give results in `dtype`, or None; `dtype` None: that of the rows."""
    return mosaic.unsupported(jax.ShapeDtypeStruct(values.shape, dtype or values.dtype))


def _product(x: Array, w: Array, one_rounding: bool) -> BackEnd:
    """Mosaic's 16-bit product: float32 parts for few rows, whole rows for many."""
    segments = mosaic_few_tiling.segments(w) if one_rounding else None
    rows = num_rows(x)
    if one_rounding and (spare := _spare_rows(rows)):
        return _with_spare(_product(_grown(x, spare), w, True), spare)
    if rows <= MOST_ROWS:
        return _few_split(x, w, segments=segments)
    segments = segments or 1
    reason = mosaic.unsupported(x) or mosaic_many_tiling.unsupported_product(x, w)
    columns = 0 if reason else mosaic_many_tiling.product_columns(rows, w, segments)

    def many(x: Array, w: Array) -> Array:
        flat = x.reshape(-1, x.shape[-1])
        out = mosaic_many.matmul(flat, w, columns=columns, segments=segments)
        return out.reshape(*x.shape[:-1], -1)

    is_fast = rows <= MOSAIC_PRODUCT_ROWS and _is_within(w, MOSAIC_WEIGHTS)
    return BackEnd(many, reason, is_fast)


def _spare_rows(rows: int) -> int:
    """Rows that are missing to a number that products by Mosaic take."""
    return -rows % (mosaic_few_tiling.ROW_MULTIPLE if rows <= MOST_ROWS else MOST_ROWS)


def _grown(x: Array, spare: int) -> Any:
    """Like rows, with more of them."""
    return jax.ShapeDtypeStruct((num_rows(x) + spare, x.shape[-1]), x.dtype)


def _with_spare(kernel: BackEnd, spare: int) -> BackEnd:
    """A product of rows and of spare ones, whose results are dropped."""

    def run(x: Array, w: Array) -> Array:
        out = kernel.run(jnp.pad(x.reshape(-1, x.shape[-1]), ((0, spare), (0, 0))), w)
        return out[..., :-spare, :].reshape(*out.shape[:-2], *x.shape[:-1], -1)

    return kernel._replace(run=run)


def _gated_columns(w: Array | Fp8Matrix) -> tuple[int, ...]:
    """Tile widths that hold whole groups of gate and up, in order of preference."""
    width = math.prod(w.shape[1:])
    half = GATED_COLUMNS[0] // 2
    every = GATED_COLUMNS if width >= FEW_BLOCKS * GATED_COLUMNS[0] else (half, *GATED_COLUMNS)
    return tuple(n for n in every if n % (2 * w.shape[-1]) == 0)


def _in_8_bits(
    x: Array | Fp8Rows | Fp8Groups, dtype: jax.typing.DTypeLike | None, axis: str | None = None
) -> tuple[Any, Any]:
    """The rows in 8 bits, and the type of the result computed from them."""
    if isinstance(x, Fp8Rows | Fp8Groups):
        if dtype is None:
            raise ValueError("rows in 8 bits do not say the type of the result; give dtype")
        return x, jnp.dtype(dtype)
    rows = quantize_rows(x) if axis is None else fp8.quantize_rows(x, axis)
    return rows, jnp.dtype(dtype or x.dtype)


def _plain_gated(dtype: Any, rows: Fp8Rows, w: Fp8Matrix) -> Array:
    return reference.gated(fp8.matmul(rows, w, dtype))


def _is_within(w: Array | Fp8Matrix, sizes: tuple[int, int]) -> bool:
    """Whether the number of weights is in a range."""
    least, most = sizes
    return least <= math.prod(w.shape) <= most
