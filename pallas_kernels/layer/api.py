"""The operations of a layer other than attention and products: the interface and its back ends.

An argument `implementation` names a back end: "xla" (any device; the only one with gradients),
"mosaic" (Hopper and jax 0.11, with the limits that each function states), or None for the fastest.
All compute the same function. A named one never falls back: it raises NotImplementedError.

Letters: M rows (any leading axes), D model width, X partial sums, G KV heads, n query heads of a KV
head, H head size, R2 rotated pairs of a head.
"""

import dataclasses
import functools
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
    mosaic_norm,
    mosaic_reduce,
    mosaic_rotate,
    reference,
)
from .fp8 import Fp8Rows, Fp8Sums
from .routed import RoutedRows

Implementation = Literal["xla", "mosaic"]
# Most rows whose norm adds up the results of experts; more were not measured.
ROUTED_ROWS = 1024
# Most rows of `quantize_rows` with Mosaic: 3.6 us at 1,024 (H200); XLA takes 36 at 4,096.
MOSAIC_ROUNDED_ROWS = 4096


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
    norm_rotate: Implementation | None = None
    sandwich_norm: Implementation | None = None
    choose_experts: Implementation | None = None
    axis: str | None = None
    attends_in_groups: bool = False
    one_rounding: bool = False

    @classmethod
    def by(cls, implementation: Implementation, one_rounding: bool = False) -> "LayerOps":
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
            added and rounded first. A tuple of these and of `RoutedRows`, whose sums are not
            rounded, is added to `x` and rounded once.
        is_quantized: Round the norm once more, to 8 bits, for a product with an `Fp8Matrix`.
        implementation: "mosaic" takes 16 bits.
    """
    if dispatch.is_plain(implementation):
        return _plain_norm(is_quantized, x, y, scale, eps)
    back_ends = {
        "mosaic": BackEnd(
            functools.partial(mosaic_norm.add_rms_norm, is_quantized=is_quantized),
            mosaic.unsupported(x) or mosaic_norm.unsupported_row(x),
        ),
        "xla": BackEnd(functools.partial(_plain_norm, is_quantized)),
    }
    return dispatch.run(implementation, back_ends, x, y, scale, eps)


def takes_routed(
    x: Float[Array, "*M D"], ops: LayerOps, norm: Literal["add_rms_norm", "sandwich_norm"]
) -> bool:
    """Whether the following norm adds up `RoutedRows` faster than the experts' kernel does.

    With `LayerOps.one_rounding` it does, for any number of rows.
    """
    if ops.one_rounding:
        return True
    is_plain = norm == "add_rms_norm"
    fits = mosaic_norm.unsupported_row if is_plain else mosaic_norm.unsupported_sandwich
    if getattr(ops, norm) is not None or ops.axis is not None:
        return False
    is_few = not is_plain or mosaic.num_rows(x) <= ROUTED_ROWS
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
        y = jnp.stack([_summed(each, x) for each in y])
    total, normed = reference.add_rms_norm(x, y, scale, eps)
    return total, fp8.quantize_rows(normed) if is_quantized else normed


def _summed(y: Array | RoutedRows, x: Array) -> Array:
    """Rows or their parts as rows, in float32, the parts rounded to the type of `x`."""
    if isinstance(y, RoutedRows):
        return y.sums
    if y.ndim > x.ndim:
        y = jnp.sum(y.astype(jnp.float32), axis=0).astype(x.dtype)
    return y.astype(jnp.float32)


def sandwich_norm(
    x: Float[Array, "*M D"],
    branches: tuple[tuple[Float[Array, "*M D"] | Fp8Sums | RoutedRows, Float[Array, " D"]], ...],
    following: tuple[Float[Array, " D"], ...],
    eps: float,
    *,
    outer: Float[Array, " D"] | None = None,
    factor: tuple[Float[Array, "2"], Bool[Array, "*M"]] | None = None,
    is_quantized: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*M D"], tuple[Float[Array, "*M D"] | Fp8Rows, ...]]:
    """Residual stream plus normed branches, and norms of the sum, each rounded after its scale.

    Args:
        branches: Rows to norm and add up, each with the scale of its norm.
        following: Scales of the returned norms of the new stream.
        outer: Scale of a norm of the branches' sum; None: the sum is added without a norm.
        factor: Two factors of the new stream, and whether each row takes the second; None: 1.
        is_quantized: Round the first of the returned norms once more, to 8 bits.
        implementation: "mosaic" takes 16 bits.

    Returns:
        The new stream and its norms.

    Source: Ding et al. 2021 (arXiv 2105.13290), §2.4, sandwich norm.
    """
    back_ends: dict[Implementation, BackEnd] = {
        "mosaic": BackEnd(
            mosaic_norm.sandwich_norm,
            mosaic.unsupported(x) or mosaic_norm.unsupported_sandwich(x),
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


def quantize_rows(
    x: Float[Array, "*M K"], *, implementation: Implementation | None = None
) -> Fp8Rows:
    """Rows in 8 bits, each with the scale of its largest number.

    Args:
        implementation: "mosaic" takes 16 bits, in one launch, whose result suits XLA's products and
            Mosaic's.
    """
    back_ends = {
        "mosaic": BackEnd(
            mosaic_norm.quantize_rows,
            mosaic.unsupported(x) or mosaic_norm.unsupported_rounded(x),
            mosaic.num_rows(x) <= MOSAIC_ROUNDED_ROWS,
        ),
        "xla": BackEnd(fp8.quantize_rows),
    }
    return dispatch.run(implementation, back_ends, x)


def gate(
    both: Float[Array, "*M C 2 W"] | Fp8Sums,
    activation: Activation,
    *,
    dtype: jax.typing.DTypeLike,
    is_quantized: bool = False,
    width: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "*M C*W"] | Fp8Rows:
    """The activated gate times up, which are interleaved in groups of columns; in `dtype`.

    Args:
        is_quantized: Round the result once more, to 8 bits.
        width: Pad 8-bit rows with zeros to this width.
        implementation: "mosaic" goes from 8 bits to 8 bits, in groups of 32 columns.
    """
    like = jax.ShapeDtypeStruct((both.sums if isinstance(both, Fp8Sums) else both).shape, dtype)
    reason = mosaic.unsupported(like) or mosaic_gate.unsupported_sums(both, is_quantized, width)
    back_ends: dict[Implementation, BackEnd] = {
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
        implementation: "mosaic" gives 16 bits.

    Returns:
        Queries, keys and values; N = G n, with the query heads of a KV head adjacent.

    Raises:
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
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*M N H"], Float[Array, "*M G H"], Float[Array, "*M G H"]]:
    """Queries, keys and values with every head normed; queries and keys are rotated.

    Norms of values have no scale. A norm is rounded once, after its scale; rotation rounds again.

    Args:
        qkv: For each KV head its n query heads, its key and its value.
        cos, sin: As in `rotate_qkv`.
        shares_values: `qkv` has no values; they are computed from the head of the keys.
        dtype: Type of the results; None for that of `qkv`.
        implementation: "mosaic" gives 16 bits, from heads of 64 to 512 that are rotated entirely.

    Returns:
        Queries, keys and values, as in `rotate_qkv`.
    """
    sums = qkv.sums if isinstance(qkv, Fp8Sums) else qkv
    dtype = sums.dtype if dtype is None else jnp.dtype(dtype)
    back_ends: dict[Implementation, BackEnd] = {
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
