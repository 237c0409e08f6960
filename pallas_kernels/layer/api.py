"""What stands between a layer's products and its attention: the interface, the choice of back end.

Every back end computes the same functions; "xla" also has gradients. Nothing here knows about
models, pages or strategies.

Letters: M rows (any leading axes), D model width, X parts of a sum, G KV heads, n query heads of
one, H head size, R2 rotated pairs of a head.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from . import mosaic, mosaic_many, mosaic_rotate, reference, triton

Implementation = Literal["xla", "triton", "mosaic"]
# `split_matmul` in Triton's form is for so many rows with matrices of so many numbers, and less;
# measured at 32, 128 and 1024 rows (benchmarks/LOG.md, "Fewer launches per layer").
SPLIT_WEIGHTS = ((32, 2**22), (128, 2**24))
# Least and most numbers of a matrix whose product is faster in Mosaic's form; measured at 32 and
# 128 rows with the matrices of SDAR-1.7B and -8B (benchmarks/LOG.md, "Products of few rows").
MOSAIC_WEIGHTS = (2**21, 2**26)
MOSAIC_GATED_WEIGHTS = (2**21, 2**27)
# The multiprocessors that have a tile of `gated_matmul` with many rows, of all, in the mean of its
# rounds: from 0.9 on it is 3 to 16 % faster than XLA's product and SiLU, at 0.87 as fast.
MOSAIC_LEAST_SHARE = 0.88
# Rows of `add_rms_norm` in Mosaic's form: 1 % of a step at 128 and at 1024; more were not measured.
MOSAIC_ROWS = 1024
# Rows of `rotate_qkv` in Mosaic's form: faster at all of 128 to 4,096; more were not measured.
MOSAIC_ROTATED_ROWS = 4096
# Columns, gate's and up's, of a block of threads of `gated_matmul`, in the order of preference.
GATED_COLUMNS = (128, 192, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOps:
    """Back end of each operation of a layer; None chooses the one measured to be fastest.

    Only "xla" has gradients.
    """

    add_rms_norm: Implementation | None = None
    qkv_matmul: Implementation | None = None
    rotate_qkv: Implementation | None = None
    split_matmul: Implementation | None = None
    gated_matmul: Implementation | None = None


def add_rms_norm(
    x: Float[Array, "*M D"],
    y: Float[Array, "*M D"] | Float[Array, "X *M D"],
    scale: Float[Array, " D"],
    eps: float,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*M D"], Float[Array, "*M D"]]:
    """The sum `x + y` and its root-mean-square norm, times `scale`; both in the dtype of `x`.

    Args:
        y: Rows of any float type, or the float32 parts of rows that `split_matmul` leaves: they are
            added first. The sum is rounded once.
        implementation: "xla" (any device), "triton" (NVIDIA GPU), "mosaic" (Hopper, 16-bit, jax
            0.11), or None: the fastest one.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    is_short = x.dtype.itemsize == 2
    back_ends = {
        "mosaic": (mosaic.unsupported(x) or mosaic.unsupported_row(x), _num_rows(x) <= MOSAIC_ROWS),
        "triton": (triton.unsupported_type(x) or triton.unsupported_row(x), is_short),
    }
    chosen = _chosen(implementation, back_ends)
    if chosen == "mosaic":
        return mosaic.add_rms_norm(x, y, scale, eps)
    if chosen == "triton":
        return triton.add_rms_norm(x, y, scale, eps)
    return reference.add_rms_norm(x, y, scale, eps)


def qkv_matmul(
    x: Float[Array, "*M D"],
    w: Float[Array, "D G n+2 H"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "*M G n+2 H"] | Float[Array, "X *M G n+2 H"]:
    """`x @ w` for `rotate_qkv`: in the dtype of `x`, or float32 parts that add up to it.

    Args:
        implementation: "xla" (any device), "mosaic" (Hopper, 16-bit, jax 0.11; at most 128 rows),
            or None: the faster one.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    flat = w.reshape(w.shape[0], -1)
    tiling = mosaic.choose_tiling(x, flat)
    reason = mosaic.unsupported(x) or mosaic.unsupported_product(x, flat, tiling)
    chosen = _chosen(implementation, {"mosaic": (reason, _is_within(w, MOSAIC_WEIGHTS))})
    if chosen == "mosaic" and tiling is not None:
        out = mosaic.split_matmul(x, flat, tiling=tiling)
        return out.reshape(*out.shape[:-1], *w.shape[1:])
    return reference.matmul(x, w)


def split_matmul(
    x: Float[Array, "*M K"],
    w: Float[Array, "K N"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "*M N"] | Float[Array, "X *M N"]:
    """`x @ w` for `add_rms_norm`: rows in the dtype of `x`, or float32 parts that add up to them.

    Args:
        implementation: "xla" (any device; rows), "triton" (NVIDIA GPU, 16-bit; parts), "mosaic"
            (Hopper, 16-bit, jax 0.11; at most 128 rows), or None: the fastest one, with the
            addition.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    tiling, of_mosaic = choose_tiling(x, w), mosaic.choose_tiling(x, w)
    back_ends = {
        "mosaic": (
            mosaic.unsupported(x) or mosaic.unsupported_product(x, w, of_mosaic),
            _is_within(w, MOSAIC_WEIGHTS),
        ),
        "triton": (
            triton.unsupported_type(x) or triton.unsupported_product(x, w, tiling),
            _is_small(x, w),
        ),
    }
    chosen = _chosen(implementation, back_ends)
    if chosen == "mosaic" and of_mosaic is not None:
        return mosaic.split_matmul(x, w, tiling=of_mosaic)
    if chosen == "triton":
        return triton.split_matmul(x, w, tiling=tiling)
    return reference.matmul(x, w)


def gated_matmul(
    x: Float[Array, "*M D"],
    w: Float[Array, "D C 2 W"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "*M C*W"]:
    """`silu(x Wg) * (x Wu)` of gate and up side by side in `w` (Shazeer 2020, eq. 6).

    Args:
        w: Gate and up in turns of W columns, so that a tile of columns has what belongs together.
        implementation: "xla" (any device), "mosaic" (Hopper, 16-bit, jax 0.11; up to 128 rows, or a
            multiple of 128), or None: the faster one.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    if _num_rows(x) > mosaic.MOST_ROWS:
        reason = mosaic.unsupported(x) or mosaic_many.unsupported_rows(x, w)
        width, share = (0, 0.0) if reason else mosaic_many.choose_columns(x, w)
        fast = share >= MOSAIC_LEAST_SHARE and w.size >= MOSAIC_GATED_WEIGHTS[0]
        if _chosen(implementation, {"mosaic": (reason, fast)}) == "mosaic":
            return mosaic_many.gated_matmul(x, w, columns=width)
        return reference.gated_matmul(x, w)
    flat = w.reshape(len(w), -1)
    W = w.shape[-1]
    columns = tuple(n for n in GATED_COLUMNS if n % (2 * W) == 0)
    tiling = mosaic.choose_tiling(x, flat, columns, is_gated=True)
    reason = mosaic.unsupported(x) or mosaic.unsupported_turn(W)
    reason = reason or mosaic.unsupported_product(x, flat, tiling)
    fast = _is_within(w, MOSAIC_GATED_WEIGHTS)
    chosen = _chosen(implementation, {"mosaic": (reason, fast)})
    if chosen == "mosaic" and tiling is not None:
        return mosaic.gated_matmul(x, w, tiling=tiling)
    return reference.gated_matmul(x, w)


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
        qkv: Per KV head its n query heads, its key, its value; or the parts of it that
            `qkv_matmul` leaves, whose sum is rounded to `dtype`.
        bias: Of the product, None for none.
        q_norm, k_norm: Scales of the norms, None for neither; values have no norm.
        cos, sin: Rotary angles' in float32; components past 2 R2 are left as they are.
        dtype: Of the results; None: of `qkv`.
        implementation: "xla" (any device), "triton" (NVIDIA GPU), "mosaic" (Hopper, jax 0.11, to
            16 bits), or None: the fastest one.

    Returns:
        N is G n, the query heads of a KV head side by side.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
        ValueError: One norm without the other.
    """
    if (q_norm is None) != (k_norm is None):
        given, missing = ("k_norm", "q_norm") if q_norm is None else ("q_norm", "k_norm")
        raise ValueError(f"{given} without {missing}; give both or neither")
    dtype = qkv.dtype if dtype is None else jnp.dtype(dtype)
    back_ends = {
        "mosaic": (
            mosaic.unsupported(jax.ShapeDtypeStruct(qkv.shape, dtype))
            or mosaic_rotate.unsupported_heads(qkv, cos),
            cos.size // cos.shape[-1] <= MOSAIC_ROTATED_ROWS,
        ),
        "triton": (
            triton.unsupported_type(qkv) or triton.unsupported_heads(qkv, cos),
            dtype.itemsize == 2,
        ),
    }
    arguments = (qkv, bias, q_norm, k_norm, cos, sin, eps)
    chosen = _chosen(implementation, back_ends)
    if chosen == "mosaic":
        return mosaic_rotate.rotate_qkv(*arguments, dtype=dtype)
    if chosen == "triton":
        return triton.rotate_qkv(*arguments, dtype=dtype)
    return reference.rotate_qkv(*arguments, dtype=dtype)


def choose_tiling(x: Array, w: Array) -> triton.Tiling:
    """A tile for these operands.

    Of those that benchmarks/layer_gpu.py tried, within 1 % of the best at 32 and at 128 rows, in
    half a layer whose product is left in parts (`SPLIT_WEIGHTS`); 33 to 127 rows were not measured.
    """
    rows = _num_rows(x)
    if rows <= 32:
        return triton.Tiling(rows=32, depth=128, num_stages=3)
    # Tiles of a narrow matrix are one to a processor; of others two share one.
    return triton.Tiling(
        rows=64 if rows <= 64 else 128, num_warps=8 if rows > 64 and w.shape[1] <= 2048 else 4
    )


def _is_small(x: Array, w: Array) -> bool:
    """Whether parts of Triton's are faster than XLA's product and the sum that it needs."""
    sizes = [size for rows, size in SPLIT_WEIGHTS if _num_rows(x) <= rows]
    return bool(sizes) and w.size <= sizes[0]


def _is_within(w: Array, sizes: tuple[int, int]) -> bool:
    """Whether a matrix has so many numbers."""
    least, most = sizes
    return least <= w.size <= most


def _num_rows(x: Array) -> int:
    return x.size // x.shape[-1]


def _chosen(
    implementation: Implementation | None, back_ends: dict[str, tuple[str | None, bool]]
) -> str:
    """The back end to run: the one that is named, or the first that can and is fast.

    Args:
        back_ends: Those beside "xla", best first: why one cannot, and whether it is fast here.
    """
    if implementation in back_ends:
        reason, _ = back_ends[implementation]
        if reason:
            raise NotImplementedError(f'implementation="{implementation}": {reason}; use "xla"')
        return implementation
    if implementation not in (None, "xla"):
        there = ", ".join(f'"{name}"' for name in ("xla", *back_ends))
        raise ValueError(f"{implementation=} is not one of {there}")
    fitting = [name for name, (reason, fast) in back_ends.items() if fast and not reason]
    return fitting[0] if implementation is None and fitting else "xla"
