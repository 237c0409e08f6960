"""The operations of a layer other than attention: the interface and its back ends.

Every back end computes the same functions; only "xla" has gradients.

Letters: M rows (any leading axes), D model width, X partial sums, G KV heads, n query heads of a KV
head, H head size, R2 rotated pairs of a head.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .. import dispatch
from ..activation import Activation
from ..dispatch import BackEnd
from . import (
    fp8,
    mosaic,
    mosaic_gate,
    mosaic_heads,
    mosaic_many,
    mosaic_reduce,
    mosaic_rotate,
    reference,
)
from .fp8 import Fp8Groups, Fp8Matrix, Fp8Rows, Fp8Sums
from .routed import RoutedRows

Implementation = Literal["xla", "mosaic"]
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
# Most rows whose norm adds up the results of experts; more were not measured.
ROUTED_ROWS = 1024
# Most rows of a 16-bit product by Mosaic's form for many rows. ms a step of SDAR-1.7B on an H200,
# with this form and Mosaic's norm / by XLA: 512 rows 3.60 / 3.77, 1,024 rows 6.60 / 6.79, 2,048
# rows 11.9 / 11.7, 4,096 rows 24.5 / 23.1 to 23.4 (benchmarks/results/few_programs_h200.json).
MOSAIC_PRODUCT_ROWS = 1024
# Most rows of `quantize_rows` with Mosaic: 3.6 us at 1,024 (H200); XLA takes 36 at 4,096.
MOSAIC_ROUNDED_ROWS = 4096
# Columns of gate and up together for a thread block of `gated_matmul`, in order of preference.
GATED_COLUMNS = (128, 192, 256)
FEW_BLOCKS = 32  # below this number of blocks, tiles have half the columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOps:
    """The back end of each operation of a layer; None chooses the fastest one.

    Attributes:
        axis: Mesh axis whose devices each hold a part of the weights; None: one device.
        attends_in_groups: The layer's attention may return `Fp8Groups` (`is_quantized`).
        one_rounding: A row's bits do not depend on the number of rows; see `qkv_matmul`.
    """

    add_rms_norm: Implementation | None = None
    qkv_matmul: Implementation | None = None
    rotate_qkv: Implementation | None = None
    split_matmul: Implementation | None = None
    gated_matmul: Implementation | None = None
    norm_rotate: Literal["xla", "mosaic"] | None = None
    sandwich_norm: Literal["xla", "mosaic"] | None = None
    choose_experts: Literal["xla", "mosaic"] | None = None
    axis: str | None = None
    attends_in_groups: bool = False
    one_rounding: bool = False

    @classmethod
    def by(cls, implementation: Literal["xla", "mosaic"], one_rounding: bool = False) -> "LayerOps":
        """The same back end for every operation."""
        others = ("axis", "attends_in_groups", "one_rounding")
        names = [field.name for field in dataclasses.fields(cls) if field.name not in others]
        every: dict[str, Any] = dict.fromkeys(names, implementation)
        return cls(one_rounding=one_rounding, **every)


def add_rms_norm(
    x: Float[Array, "*M D"],
    y: Float[Array, "*M D"] | Float[Array, "X *M D"] | tuple[Array | RoutedRows, ...],
    scale: Float[Array, " D"],
    eps: float,
    *,
    is_quantized: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*M D"], Float[Array, "*M D"] | Fp8Rows]:
    """The sum `x + y` and its root-mean-square norm, times `scale`; both in the dtype of `x`.

    Args:
        y: Rows of any float type, or the float32 parts that `split_matmul` returns, which are
            added and rounded first. A tuple of these and of `RoutedRows` is added to `x` and
            rounded once.
        is_quantized: Round the norm once more, to 8 bits, for a product with an `Fp8Matrix`.
        implementation: "xla" (any device), "mosaic" (Hopper, 16-bit, jax 0.11), or None for the
            fastest.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    if dispatch.is_plain(implementation):
        return _plain_norm(is_quantized, x, y, scale, eps)
    back_ends = {
        "mosaic": BackEnd(
            functools.partial(mosaic.add_rms_norm, is_quantized=is_quantized),
            mosaic.unsupported(x) or mosaic.unsupported_row(x),
        ),
        "xla": BackEnd(functools.partial(_plain_norm, is_quantized)),
    }
    return dispatch.run(implementation, back_ends, x, y, scale, eps)


def takes_routed(
    x: Float[Array, "*M D"], ops: LayerOps, norm: Literal["add_rms_norm", "sandwich_norm"]
) -> bool:
    """Whether the following norm adds up `RoutedRows` faster than the experts' kernel does."""
    is_plain = norm == "add_rms_norm"
    fits = mosaic.unsupported_row if is_plain else mosaic.unsupported_sandwich
    if getattr(ops, norm) is not None or ops.axis is not None:
        return False
    is_few = not is_plain or _num_rows(x) <= ROUTED_ROWS
    return is_few and not (mosaic.unsupported(x) or fits(x))


def reduces(x: Float[Array, "*M D"]) -> bool:
    """Whether `reduction` and `reduced_rms_norm` support rows like `x`."""
    return mosaic_reduce.unsupported(x) is None


def reduction(y: Array, x: Float[Array, "*M D"], peers: Array) -> Float[Array, "*M D"]:
    """The sum over the devices of a host, in the dtype of `x`; see `mosaic_reduce`.

    Args:
        y: This device's terms, as in `add_rms_norm`.
        x: Rows with the shape and type of the sum.
        peers: This device's row of `mosaic_reduce.peers`.
    """
    return mosaic_reduce.total(y, x, peers)


def reduced_rms_norm(
    x: Float[Array, "*M D"],
    y: Float[Array, "*M D"] | Float[Array, "X *M D"],
    scale: Float[Array, " D"],
    eps: float,
    peers: Array,
    *,
    is_quantized: bool = False,
) -> tuple[Float[Array, "*M D"], Float[Array, "*M D"] | Fp8Rows]:
    """`add_rms_norm` with `y` rounded to the type of `x` and summed over the devices."""
    return mosaic_reduce.add_rms_norm(x, y, scale, eps, peers, is_quantized=is_quantized)


def _plain_norm(
    is_quantized: bool, x: Array, y: Any, scale: Array, eps: float
) -> tuple[Array, Array | Fp8Rows]:
    if isinstance(y, tuple):
        y = jnp.stack([_summed(each, x.ndim) for each in y])
    total, normed = reference.add_rms_norm(x, y, scale, eps)
    return total, fp8.quantize_rows(normed) if is_quantized else normed


def _summed(y: Array | RoutedRows, ndim: int) -> Array:
    """Rows or their parts as rows, in float32."""
    if isinstance(y, RoutedRows):
        return y.sums
    return jnp.sum(y.astype(jnp.float32), axis=0) if y.ndim > ndim else y.astype(jnp.float32)


def sandwich_norm(
    x: Float[Array, "*M D"],
    branches: tuple[tuple[Float[Array, "*M D"] | Fp8Sums | RoutedRows, Float[Array, " D"]], ...],
    following: tuple[Float[Array, " D"], ...],
    eps: float,
    *,
    outer: Float[Array, " D"] | None = None,
    factor: tuple[Float[Array, "2"], Bool[Array, "*M"]] | None = None,
    is_quantized: bool = False,
    implementation: Literal["xla", "mosaic"] | None = None,
) -> tuple[Float[Array, "*M D"], tuple[Float[Array, "*M D"] | Fp8Rows, ...]]:
    """Residual stream plus normed branches, and norms of the sum, each rounded after its scale.

    Args:
        branches: Rows to norm and add up, each with the scale of its norm.
        following: Scales of the returned norms of the new stream.
        outer: Scale of a norm of the branches' sum; None: the sum is added without a norm.
        factor: Two factors of the new stream, and whether each row takes the second; None: 1.
        is_quantized: Round the first of the returned norms once more, to 8 bits.
        implementation: "xla" (any device), "mosaic" (Hopper, 16-bit, jax 0.11), or None for the
            faster one.

    Returns:
        The new stream and its norms.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.

    Source: Ding et al. 2021 (arXiv 2105.13290), §2.4, sandwich norm.
    """
    back_ends: dict[Literal["mosaic", "xla"], BackEnd] = {
        "mosaic": BackEnd(
            mosaic.sandwich_norm,
            mosaic.unsupported(x) or mosaic.unsupported_sandwich(x),
        ),
        "xla": BackEnd(_plain_sandwich),
    }
    how = {"outer": outer, "factor": factor, "is_quantized": is_quantized}
    return dispatch.run(implementation, back_ends, x, branches, following, eps, **how)


def _plain_sandwich(
    x: Array, branches: Any, following: Any, eps: float, *, is_quantized: bool, **how: Any
) -> tuple[Array, tuple[Array | Fp8Rows, ...]]:
    branches = tuple(
        (y.sums.astype(x.dtype) if isinstance(y, RoutedRows) else fp8.rounded(y, x.dtype), scale)
        for y, scale in branches
    )
    total, normed = reference.sandwich_norm(x, branches, following, eps, **how)
    return total, (fp8.quantize_rows(normed[0]), *normed[1:]) if is_quantized else normed


def gate(
    both: Float[Array, "*M C 2 W"] | Fp8Sums,
    activation: Activation,
    *,
    dtype: jax.typing.DTypeLike,
    is_quantized: bool = False,
    width: int | None = None,
    implementation: Literal["xla", "mosaic"] | None = None,
) -> Float[Array, "*M C*W"] | Fp8Rows:
    """The activated gate times up, which are interleaved in groups of columns; in `dtype`.

    Args:
        is_quantized: Round the result once more, to 8 bits.
        width: Pad 8-bit rows with zeros to this width.
        implementation: "xla" (any device), "mosaic" (Hopper, jax 0.11; from 8 bits to 8 bits,
            groups of 32 columns), or None for the faster one.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    like = jax.ShapeDtypeStruct((both.sums if isinstance(both, Fp8Sums) else both).shape, dtype)
    reason = mosaic.unsupported(like) or mosaic_gate.unsupported_sums(both, is_quantized, width)
    back_ends: dict[Literal["mosaic", "xla"], BackEnd] = {
        "mosaic": BackEnd(functools.partial(mosaic_gate.gate, width=width), reason),
        "xla": BackEnd(functools.partial(_plain_gate, is_quantized, width)),
    }
    return dispatch.run(implementation, back_ends, both, activation=activation, dtype=dtype)


def _plain_gate(
    is_quantized: bool,
    width: int | None,
    both: Array | Fp8Sums,
    *,
    activation: Activation,
    dtype: Any,
) -> Array | Fp8Rows:
    out = reference.gated(fp8.rounded(both, dtype), activation)
    if not is_quantized:
        return out
    rows = fp8.quantize_rows(out)
    return Fp8Rows(fp8.filled(rows.values, width or out.shape[-1]), rows.scales)


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
        implementation: "xla" (any device), "mosaic" (Hopper, 16-bit, jax 0.11; up to 128 rows, or a
            multiple of 128), or None for the faster one.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
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


def _product(x: Array, w: Array, one_rounding: bool) -> BackEnd:
    """Mosaic's 16-bit product: float32 parts for few rows, whole rows for many."""
    rows, segments = _num_rows(x), mosaic.segments(w) if one_rounding else None
    if one_rounding and (spare := _spare_rows(rows)):
        return _with_spare(_product(_grown(x, spare), w, True), spare)
    if rows <= mosaic.MOST_ROWS:
        tiling = mosaic.choose_tiling(x, w, splits=segments)
        reason = mosaic.unsupported(x) or mosaic.unsupported_product(x, w, tiling)
        run = functools.partial(mosaic.split_matmul, tiling=tiling)
        return BackEnd(run, reason, _is_within(w, MOSAIC_WEIGHTS))
    segments = segments or 1
    reason = mosaic.unsupported(x) or mosaic_many.unsupported_product(x, w)
    columns = 0 if reason else mosaic_many.product_columns(rows, w, segments)

    def many(x: Array, w: Array) -> Array:
        flat = x.reshape(-1, x.shape[-1])
        out = mosaic_many.matmul(flat, w, columns=columns, segments=segments)
        return out.reshape(*x.shape[:-1], -1)

    is_fast = rows <= MOSAIC_PRODUCT_ROWS and _is_within(w, MOSAIC_WEIGHTS)
    return BackEnd(many, reason, is_fast)


def _spare_rows(rows: int) -> int:
    """Rows that are missing to a number that products by Mosaic take."""
    return -rows % (mosaic.ROW_MULTIPLE if rows <= mosaic.MOST_ROWS else mosaic.MOST_ROWS)


def _grown(x: Array, spare: int) -> Any:
    """Like rows, with more of them."""
    return jax.ShapeDtypeStruct((_num_rows(x) + spare, x.shape[-1]), x.dtype)


def _with_spare(kernel: BackEnd, spare: int) -> BackEnd:
    """A product of rows and of spare ones, whose results are dropped."""

    def run(x: Array, w: Array) -> Array:
        out = kernel.run(jnp.pad(x.reshape(-1, x.shape[-1]), ((0, spare), (0, 0))), w)
        return out[..., :-spare, :].reshape(*out.shape[:-2], *x.shape[:-1], -1)

    return kernel._replace(run=run)


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
        implementation: "xla" (any device), "mosaic" (Hopper, 16-bit, jax 0.11; parts for up to 128
            rows, rows for a multiple of 128), or None for the fastest including the addition.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    if isinstance(w, Fp8Matrix):
        rows, kind = _in_8_bits(x, dtype, axis)
        is_many = _num_rows(rows.values) > mosaic.MOST_ROWS
        back_ends = {
            "mosaic": (_many_rows_split_fp8 if is_many else _split_fp8)(rows, w, kind),
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
        implementation: "xla" (any device), "mosaic" (Hopper, 16-bit, jax 0.11; up to 128 rows, or a
            multiple of 128), or None for the faster one.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    if isinstance(w, Fp8Matrix):
        rows, kind = _in_8_bits(x, dtype)
        is_many = _num_rows(rows.values) > mosaic.MOST_ROWS
        few = functools.partial(_few_rows_fp8, reader=reader)
        back_ends = {
            "mosaic": (_many_rows_fp8 if is_many else few)(rows, w, kind),
            "xla": BackEnd(functools.partial(_plain_gated, kind)),
        }
        return dispatch.run(implementation, back_ends, rows, w)
    assert isinstance(x, jax.Array)
    # Flatten the leading axes: one compiled kernel for each number of rows.
    flat = x.reshape(-1, x.shape[-1])
    if dispatch.is_plain(implementation):
        return reference.gated_matmul(flat, w).reshape(*x.shape[:-1], -1)
    spare = _spare_rows(len(flat)) if one_rounding else 0
    whole = _grown(flat, spare)
    kernel = _many_rows(whole, w) if len(whole) > mosaic.MOST_ROWS else _few_rows(whole, w)
    kernel = _with_spare(kernel, spare) if spare else kernel
    back_ends = {"mosaic": kernel, "xla": BackEnd(reference.gated_matmul)}
    return dispatch.run(implementation, back_ends, flat, w).reshape(*x.shape[:-1], -1)


def _many_rows(x: Array, w: Array) -> BackEnd:
    reason = mosaic.unsupported(x) or mosaic_many.unsupported_rows(x, w)
    width, share = (0, 0.0) if reason else mosaic_many.choose_columns(x, w)
    return BackEnd(
        functools.partial(mosaic_many.gated_matmul, columns=width),
        reason,
        share >= MOSAIC_LEAST_SHARE and w.size >= MOSAIC_GATED_WEIGHTS[0],
    )


def _gated_columns(w: Array | Fp8Matrix) -> tuple[int, ...]:
    """Tile widths that hold whole groups of gate and up, in order of preference."""
    width = math.prod(w.shape[1:])
    half = GATED_COLUMNS[0] // 2
    every = GATED_COLUMNS if width >= FEW_BLOCKS * GATED_COLUMNS[0] else (half, *GATED_COLUMNS)
    return tuple(n for n in every if n % (2 * w.shape[-1]) == 0)


def _few_rows(x: Array, w: Array) -> BackEnd:
    flat = w.reshape(len(w), -1)
    W = w.shape[-1]
    columns = _gated_columns(w)
    tiling = mosaic.choose_tiling(x, flat, columns, is_gated=True)
    reason = mosaic.unsupported(x) or mosaic.unsupported_turn(W)
    return BackEnd(
        functools.partial(mosaic.gated_matmul, tiling=tiling),
        reason or mosaic.unsupported_product(x, flat, tiling),
        _is_within(w, MOSAIC_GATED_WEIGHTS),
    )


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


def quantize_rows(
    x: Float[Array, "*M K"], *, implementation: Literal["xla", "mosaic"] | None = None
) -> Fp8Rows:
    """Rows in 8 bits, each with the scale of its largest number.

    Args:
        implementation: "xla" (any device), "mosaic" (Hopper, 16-bit, jax 0.11; one launch, whose
            result suits XLA's products and Mosaic's), or None for the faster one.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    back_ends = {
        "mosaic": BackEnd(
            mosaic.quantize_rows,
            mosaic.unsupported(x) or mosaic.unsupported_rounded(x),
            _num_rows(x) <= MOSAIC_ROUNDED_ROWS,
        ),
        "xla": BackEnd(fp8.quantize_rows),
    }
    return dispatch.run(implementation, back_ends, x)


def _unsupported_fp8(
    rows: Fp8Rows | Fp8Groups, w: Fp8Matrix, tiling: mosaic.Tiling | None, dtype: Any
) -> str | None:
    result = jax.ShapeDtypeStruct(rows.values.shape, dtype)
    return mosaic.unsupported(result) or mosaic.unsupported_product(rows.values, w, tiling)


def _split_fp8(rows: Fp8Rows | Fp8Groups, w: Fp8Matrix, dtype: Any) -> BackEnd:
    groups = len(rows.scales) if isinstance(rows, Fp8Groups) else 1
    tiling = mosaic.choose_tiling(rows.values, w, dtype=dtype, groups=groups)
    return BackEnd(
        functools.partial(mosaic.split_matmul, tiling=tiling, dtype=dtype),
        _unsupported_fp8(rows, w, tiling, dtype),
        _is_within(w, MOSAIC_WEIGHTS),
    )


def takes_groups(shape: tuple[int, ...], w: Fp8Matrix, size: int, dtype: Any) -> bool:
    """Whether `split_matmul` of rows of this shape is fastest with `Fp8Groups`.

    Args:
        size: Columns of a group.
    """
    M, K = math.prod(shape[:-1]), shape[-1]
    if M > mosaic.MOST_ROWS or K % size or size < mosaic.GROUP or size % mosaic.PART:
        return False
    values: Any = jax.ShapeDtypeStruct(shape, fp8.DTYPE)
    scales: Any = jax.ShapeDtypeStruct((K // size, M), jnp.float32)
    back_end = _split_fp8(Fp8Groups(values, scales), w, dtype)
    return back_end.is_fast and not back_end.unsupported


def _many_rows_split_fp8(rows: Fp8Rows, w: Fp8Matrix, dtype: Any) -> BackEnd:
    result = jax.ShapeDtypeStruct(rows.values.shape, dtype)
    reason = mosaic.unsupported(result) or mosaic_many.unsupported_product(rows.values, w)
    width, share = (0, 0.0) if reason else mosaic_many.choose_columns(rows.values, w)
    return BackEnd(
        functools.partial(mosaic_many.matmul, columns=width, dtype=dtype),
        reason,
        _is_many_fp8(rows, share) and math.prod(w.shape) >= MOSAIC_WEIGHTS[0],
    )


def _few_rows_fp8(
    rows: Fp8Rows, w: Fp8Matrix, dtype: Any, reader: Fp8Matrix | None = None
) -> BackEnd:
    W = w.shape[-1]
    columns = _gated_columns(w)
    tiling = mosaic.choose_tiling(rows.values, w.flat, columns, True, dtype)
    is_quantized = False
    if reader is not None and tiling is not None:
        # Choosing other tiles to allow groups costs more than it saves: 3.4 us for 2.2 (SDAR-8B).
        shape = (*rows.values.shape[:-1], reader.shape[0])
        is_quantized = takes_groups(shape, reader, tiling.columns // 2, dtype)
    reason = mosaic.unsupported_turn(W) or _unsupported_fp8(rows, w.flat, tiling, dtype)
    call = functools.partial(mosaic.gated_matmul, is_quantized=is_quantized)
    return BackEnd(
        functools.partial(call, tiling=tiling, dtype=dtype),
        reason,
        _is_within(w, MOSAIC_GATED_WEIGHTS),
    )


def _many_rows_fp8(rows: Fp8Rows, w: Fp8Matrix, dtype: Any) -> BackEnd:
    result = jax.ShapeDtypeStruct(rows.values.shape, dtype)
    reason = mosaic.unsupported(result) or mosaic_many.unsupported_rows(rows.values, w)
    width, share = (0, 0.0) if reason else mosaic_many.choose_columns(rows.values, w)
    return BackEnd(
        functools.partial(mosaic_many.gated_matmul, columns=width, dtype=dtype),
        reason,
        _is_many_fp8(rows, share) and math.prod(w.shape) >= MOSAIC_GATED_WEIGHTS[0],
    )


def _is_many_fp8(rows: Fp8Rows, share: float) -> bool:
    """Whether to choose Mosaic's form for many rows, by the share of busy multiprocessors."""
    return _num_rows(rows.values) <= MOSAIC_MANY_FP8_ROWS and share >= MOSAIC_LEAST_SHARE


def _plain_gated(dtype: Any, rows: Fp8Rows, w: Fp8Matrix) -> Array:
    return reference.gated(fp8.matmul(rows, w, dtype))


def rotate_qkv(
    qkv: Float[Array, "*M G n+2 H"] | Float[Array, "X *M G n+2 H"],
    bias: Float[Array, "G n+2 H"] | None,
    q_norm: Float[Array, " H"] | None,
    k_norm: Float[Array, " H"] | None,
    cos: Float[Array, "*M R2"],
    sin: Float[Array, "*M R2"],
    eps: float,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*M N H"], Float[Array, "*M G H"], Float[Array, "*M G H"]]:
    """Queries, keys and values of one product: biased, normed head by head, rotated, split.

    Args:
        qkv: For each KV head its n query heads, its key and its value; or the partial sums that
            `qkv_matmul` returns, which are added and rounded to `dtype`.
        bias: Bias of the product, or None.
        q_norm, k_norm: Scales of the norms, or None for no norm; values are not normed.
        cos, sin: Cosines and sines of the rotary angles, float32. Components past 2 R2 are not
            rotated.
        dtype: Type of the results; None for that of `qkv`.
        implementation: "xla" (any device), "mosaic" (Hopper, jax 0.11, to 16 bits), or None for
            the fastest.

    Returns:
        Queries, keys and values; N = G n, with the query heads of a KV head adjacent.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
        ValueError: Only one of the norms is given.
    """
    if (q_norm is None) != (k_norm is None):
        given, missing = ("k_norm", "q_norm") if q_norm is None else ("q_norm", "k_norm")
        raise ValueError(f"{given} without {missing}; give both or neither")
    dtype = qkv.dtype if dtype is None else jnp.dtype(dtype)
    arguments = (qkv, bias, q_norm, k_norm, cos, sin, eps)
    if dispatch.is_plain(implementation):
        return reference.rotate_qkv(*arguments, dtype=dtype)
    back_ends = {
        "mosaic": BackEnd(
            mosaic_rotate.rotate_qkv,
            mosaic.unsupported(jax.ShapeDtypeStruct(qkv.shape, dtype))
            or mosaic_rotate.unsupported_heads(qkv, cos),
        ),
        "xla": BackEnd(reference.rotate_qkv),
    }
    return dispatch.run(implementation, back_ends, *arguments, dtype=dtype)


def norm_rotate(
    qkv: Float[Array, "*M G n+2 H"] | Float[Array, "*M G n+1 H"] | Fp8Sums,
    q_norm: Float[Array, " H"],
    k_norm: Float[Array, " H"],
    cos: Float[Array, "*M R2"],
    sin: Float[Array, "*M R2"],
    eps: float,
    *,
    shares_values: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Literal["xla", "mosaic"] | None = None,
) -> tuple[Float[Array, "*M N H"], Float[Array, "*M G H"], Float[Array, "*M G H"]]:
    """Queries, keys and values with every head normed; queries and keys are rotated.

    Norms of values have no scale. A norm is rounded once, after its scale; rotation rounds again.

    Args:
        qkv: For each KV head its n query heads, its key and its value.
        cos, sin: As in `rotate_qkv`.
        shares_values: `qkv` has no values; they are computed from the head of the keys.
        dtype: Type of the results; None for that of `qkv`.
        implementation: "xla" (any device), "mosaic" (Hopper, 16-bit, jax 0.11, heads of 64 to 512
            that are rotated entirely), or None for the faster one.

    Returns:
        Queries, keys and values, as in `rotate_qkv`.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    sums = qkv.sums if isinstance(qkv, Fp8Sums) else qkv
    dtype = sums.dtype if dtype is None else jnp.dtype(dtype)
    back_ends: dict[Literal["mosaic", "xla"], BackEnd] = {
        "mosaic": BackEnd(
            functools.partial(mosaic_heads.norm_rotate, dtype=dtype),
            mosaic.unsupported(jax.ShapeDtypeStruct(sums.shape, dtype))
            or mosaic_heads.unsupported_heads(sums, cos),
        ),
        "xla": BackEnd(functools.partial(_plain_heads, dtype)),
    }
    arguments = (qkv, q_norm, k_norm, cos, sin, eps)
    return dispatch.run(implementation, back_ends, *arguments, shares_values=shares_values)


def _plain_heads(dtype: Any, qkv: Array | Fp8Sums, *rest: Any, **how: Any) -> Any:
    return reference.norm_rotate(fp8.rounded(qkv, dtype), *rest, **how)


def _is_within(w: Array | Fp8Matrix, sizes: tuple[int, int]) -> bool:
    """Whether the number of weights is in a range."""
    least, most = sizes
    return least <= math.prod(w.shape) <= most


def _num_rows(x: Array) -> int:
    return x.size // x.shape[-1]
