"""What stands between a layer's products and its attention: the interface, the choice of back end.

Every back end computes the same functions; "xla" also has gradients. Nothing here knows about
models, pages or strategies.

Letters: M rows (any leading axes), D model width, X parts of a sum, G KV heads, n query heads of
one, H head size, R2 rotated pairs of a head.
"""

import dataclasses
from typing import Literal

from jaxtyping import Array, Float

from pallas_kernels.layer import reference, triton

Implementation = Literal["xla", "triton"]
# `split_matmul` is a kernel for so many rows with matrices of so many numbers, and less; measured
# at 32, 128 and 1024 rows (benchmarks/LOG.md, "Fewer launches per layer").
SPLIT_WEIGHTS = ((32, 2**22), (128, 2**24))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOps:
    """Back end of each operation of a layer; None chooses the one measured to be fastest.

    Only "xla" has gradients.
    """

    add_rms_norm: Implementation | None = None
    split_matmul: Implementation | None = None
    rotate_qkv: Implementation | None = None


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
        implementation: "xla" (any device), "triton" (NVIDIA GPU), or None: the faster one.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    reason = triton.unsupported_type(x) or triton.unsupported_row(x)
    if _is_triton(implementation, reason, fast=x.dtype.itemsize == 2):
        return triton.add_rms_norm(x, y, scale, eps)
    return reference.add_rms_norm(x, y, scale, eps)


def split_matmul(
    x: Float[Array, "*M K"],
    w: Float[Array, "K N"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "*M N"] | Float[Array, "X *M N"]:
    """`x @ w` for `add_rms_norm`: rows in the dtype of `x`, or float32 parts that add up to them.

    Args:
        implementation: "xla" (any device; rows), "triton" (NVIDIA GPU, 16-bit; parts), or None:
            the faster one, with the addition.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    tiling = choose_tiling(x, w)
    reason = triton.unsupported_type(x) or triton.unsupported_product(x, w, tiling)
    if _is_triton(implementation, reason, fast=_is_small(x, w)):
        return triton.split_matmul(x, w, tiling=tiling)
    return reference.matmul(x, w)


def rotate_qkv(
    qkv: Float[Array, "*M G n+2 H"],
    bias: Float[Array, "G n+2 H"] | None,
    q_norm: Float[Array, " H"] | None,
    k_norm: Float[Array, " H"] | None,
    cos: Float[Array, "*M R2"],
    sin: Float[Array, "*M R2"],
    eps: float,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*M N H"], Float[Array, "*M G H"], Float[Array, "*M G H"]]:
    """Queries, keys and values of one product: biased, normed head by head, rotated, split.

    Args:
        qkv: Per KV head its n query heads, its key, its value.
        bias: Of the product, None for none.
        q_norm, k_norm: Scales of the norms, None for neither; values have no norm.
        cos, sin: Rotary angles' in float32; components past 2 R2 are left as they are.
        implementation: "xla" (any device), "triton" (NVIDIA GPU), or None: the faster one.

    Returns:
        All in the dtype of `qkv`; N is G n, the query heads of a KV head side by side.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
        ValueError: One norm without the other.
    """
    if (q_norm is None) != (k_norm is None):
        given, missing = ("k_norm", "q_norm") if q_norm is None else ("q_norm", "k_norm")
        raise ValueError(f"{given} without {missing}; give both or neither")
    reason = triton.unsupported_type(qkv) or triton.unsupported_heads(qkv, cos)
    arguments = (qkv, bias, q_norm, k_norm, cos, sin, eps)
    if _is_triton(implementation, reason, fast=qkv.dtype.itemsize == 2):
        return triton.rotate_qkv(*arguments)
    return reference.rotate_qkv(*arguments)


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
    """Whether parts are faster than XLA's product and the sum that it needs."""
    sizes = [size for rows, size in SPLIT_WEIGHTS if _num_rows(x) <= rows]
    return bool(sizes) and w.size <= sizes[0]


def _num_rows(x: Array) -> int:
    return x.size // x.shape[-1]


def _is_triton(implementation: Implementation | None, reason: str | None, fast: bool) -> bool:
    """Whether the kernel runs: where it is named, or fast, and can."""
    if implementation == "triton" and reason:
        raise NotImplementedError(f'implementation="triton": {reason}; use "xla"')
    if implementation not in (None, "xla", "triton"):
        raise ValueError(f'{implementation=} is not one of "xla", "triton"')
    return implementation == "triton" or (implementation is None and fast and not reason)
