"""The differentiable reference in plain XLA; training uses it."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..activation import ACTIVATIONS, Activation


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, "... D"], eps: float) -> Array:
    """Root-mean-square norm of the last axis: statistics in float32, scale in the dtype of `x`.

    Source: Zhang & Sennrich 2019, eq. 4; the order of the casts is Hugging Face Qwen3's.
    """
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * as_row(scale, x)


def late_rms_norm(x: Float[Array, "... D"], scale: Float[Array, " D"] | None, eps: float) -> Array:
    """Root-mean-square norm of the last axis, rounded once, after the scale, as in Gemma 4."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 if scale is None else x32 * as_row(scale, x32)).astype(x.dtype)


def apply_rope(x: Float[Array, "... T N H"], cos: Array, sin: Array) -> Float[Array, "... T N H"]:
    """Rotate half-split pairs (j, j + R/2) in float32, return in the dtype of `x`.

    R is twice the width of the tables; components past it are unchanged.
    """
    half = cos.shape[-1]
    a, b = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    if 2 * half == x.shape[-1]:
        return turned
    return jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)


def as_row(row: Array, x: Array) -> Array:
    """A bias or a scale with the rank and type of its operand."""
    return row.astype(x.dtype).reshape((1,) * (x.ndim - row.ndim) + row.shape)


def add_rms_norm(x: Array, y: Array, scale: Array, eps: float) -> tuple[Array, Array]:
    """See `api.add_rms_norm`."""
    if y.ndim == x.ndim and y.dtype == x.dtype:
        total = x + y
    else:
        parts = (y if y.ndim > x.ndim else y[None]).astype(jnp.float32)
        total = (x.astype(jnp.float32) + jnp.sum(parts, axis=0)).astype(x.dtype)
    return total, rms_norm(total, scale, eps)


def sandwich_norm(
    x: Array,
    branches: tuple[tuple[Array, Array], ...],
    following: tuple[Array, ...],
    eps: float,
    *,
    outer: Array | None = None,
    factor: tuple[Array, Array] | None = None,
) -> tuple[Array, tuple[Array, ...]]:
    """See `api.sandwich_norm`."""
    out = functools.reduce(jnp.add, [late_rms_norm(y, scale, eps) for y, scale in branches])
    x = x + (out if outer is None else late_rms_norm(out, outer, eps))
    if factor is not None:
        (first, second), is_second = factor[0].astype(x.dtype), factor[1]
        # XLA fuses a select into the norm's launch; a gather would need a launch of its own.
        x = x * jnp.where(is_second, second, first)[..., None]
    return x, tuple(late_rms_norm(x, scale, eps) for scale in following)


def gated_matmul(
    x: Float[Array, "... K"], w: Float[Array, "K C 2 W"], activation: Activation = "silu"
) -> Array:
    """See `api_products.gated_matmul`; this one also takes other activations."""
    return gated(matmul(x, w), activation)


def gated(
    both: Float[Array, "... C 2 W"], activation: Activation = "silu"
) -> Float[Array, "... C*W"]:
    """The activated gate times up, which are interleaved in groups of W columns."""
    out = ACTIVATIONS[activation](both[..., 0, :]) * both[..., 1, :]
    return out.reshape(*both.shape[:-3], -1)


def matmul(x: Array, w: Array) -> Array:
    """`x @ w` over the last axis of `x` and the first of `w`; output in the dtype of `x`.

    The product is a flat [M, D] x [D, K] for any trailing axes of `w`: reshaping a parameter is
    free, and XLA tunes two-dimensional products best.
    """
    flat = w.reshape(w.shape[0], -1).astype(x.dtype)
    out = jax.lax.dot_general(x, flat, (((x.ndim - 1,), (0,)), ((), ())))
    return out.reshape(*x.shape[:-1], *w.shape[1:])


def rotate_qkv(
    qkv: Array,
    bias: Array | None,
    q_norm: Array | None,
    k_norm: Array | None,
    cos: Array,
    sin: Array,
    eps: float,
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[Array, Array, Array]:
    """See `api.rotate_qkv`; the rows, or the sum of parts, are rounded to `dtype` first."""
    if qkv.ndim > cos.ndim + 2:
        qkv = jnp.sum(qkv, axis=0)
    qkv = qkv.astype(dtype or qkv.dtype)
    *rows, G, both, H = qkv.shape
    n = both - 2
    if bias is not None:
        qkv = qkv + as_row(bias, qkv)
    # The queries and the key of a group are normed and rotated in one pass.
    qk, v = qkv[..., : n + 1, :], qkv[..., n + 1, :]
    if q_norm is not None and k_norm is not None:
        qk = rms_norm(qk, jnp.stack([q_norm] * n + [k_norm]), eps)
    qk = apply_rope(qk, cos[..., None, :], sin[..., None, :])
    return qk[..., :n, :].reshape(*rows, G * n, H), qk[..., n, :], v


def norm_rotate(
    qkv: Array,
    q_norm: Array,
    k_norm: Array,
    cos: Array,
    sin: Array,
    eps: float,
    *,
    shares_values: bool = False,
) -> tuple[Array, Array, Array]:
    """See `api.norm_rotate`."""
    *rows, G, both, H = qkv.shape
    n = both - (1 if shares_values else 2)
    q = late_rms_norm(qkv[..., :n, :].reshape(*rows, G * n, H), q_norm, eps)
    k = late_rms_norm(qkv[..., n, :], k_norm, eps)
    v = late_rms_norm(qkv[..., -1, :], None, eps)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v
