"""Layer arithmetic shared by the model families: rotary angles, SwiGLU.

Pure functions of (weights, activations); norms and rotation are operations of
`pallas_kernels.layer`. Nothing here knows about pages, masks or strategies.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layer import LayerOps, split_matmul
from pallas_kernels.layer.reference import matmul


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


def _last(x: Array, ndim: int) -> Array:
    """`x` along the last of `ndim` axes: rank promotion is an error in our tests."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def swiglu(
    x: Float[Array, "... D"],
    w_gate_up: Float[Array, "D 2 F"],
    w_down: Float[Array, "F D"],
    ops: LayerOps | None = None,
) -> Array:
    """`(silu(x Wg) * (x Wu)) Wd`, gate and up in one product (Shazeer 2020, eq. 6).

    Args:
        ops: How the last product may be left, in parts (see `split_matmul`); None: as rows.
    """
    both = matmul(x, w_gate_up)
    inner = jax.nn.silu(both[..., 0, :]) * both[..., 1, :]
    if ops is None:
        return matmul(inner, w_down)
    return split_matmul(inner, w_down, implementation=ops.split_matmul)
