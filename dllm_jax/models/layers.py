"""Layer arithmetic shared by the model families: norms, rotary embedding, SwiGLU.

Pure functions of (weights, activations). Nothing here knows about pages, masks or strategies.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, "... D"], eps: float) -> Array:
    """Root-mean-square norm of the last axis: statistics in float32, scale in the dtype of `x`.

    Source: Zhang & Sennrich 2019, eq. 4; the order of the casts is Hugging Face Qwen3's.
    """
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * _last(scale.astype(x.dtype), x.ndim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Rotary frequencies stretched for longer texts, the high ones left as they are.

    Attributes:
        original_max_position: Longest text, in tokens, before the stretching.

    Source: Grattafiori et al. 2024 (Llama 3), §3.4.2; `rope_type` "llama3" of transformers.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __call__(self, frequency: Float[Array, " R2"]) -> Float[Array, " R2"]:
        """The stretched frequencies, in radians a token."""
        turns = self.original_max_position * frequency / (2 * jnp.pi)  # in the original length
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1 - smooth) * frequency / self.factor + smooth * frequency


def rope_tables(
    positions: Int[Array, "... T"],
    rotary_dim: int,
    theta: float,
    scaling: Llama3Scaling | None = None,
) -> tuple[Float[Array, "... T R2"], Float[Array, "... T R2"]]:
    """Cosine and sine of the rotary angles at absolute `positions`, in float32.

    Source: Su et al. 2021 (RoFormer), §3.4.2; angle of pair j is `pos * theta^(-2j/R)`.
    """
    exponent = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    frequency = jnp.power(jnp.float32(theta), -exponent)
    if scaling is not None:
        frequency = scaling(frequency)
    angle = positions.astype(jnp.float32)[..., None] * _last(frequency, positions.ndim + 1)
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x: Float[Array, "... T N H"], cos: Array, sin: Array) -> Float[Array, "... T N H"]:
    """Rotate half-split pairs (j, j + R/2) in float32, return in the dtype of `x`.

    R is twice the tables' width; the components past it are left as they are.
    """
    half = cos.shape[-1]
    a, b = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    if 2 * half == x.shape[-1]:
        return turned
    return jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)


def _last(x: Array, ndim: int) -> Array:
    """`x` along the last of `ndim` axes: rank promotion is an error in our tests."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def swiglu(
    x: Float[Array, "... D"], w_gate_up: Float[Array, "D 2 F"], w_down: Float[Array, "F D"]
) -> Float[Array, "... D"]:
    """`(silu(x Wg) * (x Wu)) Wd`, gate and up in one product (Shazeer 2020, eq. 6)."""
    both = matmul(x, w_gate_up)
    return matmul(jax.nn.silu(both[..., 0, :]) * both[..., 1, :], w_down)


def matmul(x: Float[Array, "... D"], w: Array) -> Array:
    """`x @ w` over the last axis of `x` and the first of `w`; output in the dtype of `x`.

    One flat [M, D] x [D, K] product whatever the trailing axes of `w`: reshaping a parameter is
    free, and a two-dimensional dot is what XLA tunes best.
    """
    flat = w.reshape(w.shape[0], -1).astype(x.dtype)
    out = jax.lax.dot_general(x, flat, (((x.ndim - 1,), (0,)), ((), ())))
    return out.reshape(*x.shape[:-1], *w.shape[1:])
