"""Layer arithmetic shared by the model families: rotary angles, SwiGLU.

Pure functions of (weights, activations); norms and rotation are operations of
`dllm_jax.kernels.layer`.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dllm_jax.kernels.layer import (
    Fp8Groups,
    Fp8Matrix,
    Fp8Rows,
    LayerOps,
    gated_matmul,
    split_matmul,
)

GATE_TURN = 32  # columns: half a line of shared memory, so whole lines hold whole groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Rotary frequencies stretched for longer texts, except the high ones.

    Attributes:
        original_max_position: Longest text, in tokens, before the stretching.
        attention_factor: Factor of all rotated numbers.

    Source: Grattafiori et al. 2024 (Llama 3), §3.4.2; `rope_type` "llama3" of transformers.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int
    attention_factor = 1.0

    def __call__(self, frequency: Float[Array, " R2"], theta: float) -> Float[Array, " R2"]:
        """The stretched frequencies, in radians a token."""
        del theta
        turns = self.original_max_position * frequency / (2 * jnp.pi)  # in the original length
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Rotary frequencies stretched for longer texts, pair by pair from the fast to the slow ones.

    Attributes:
        original_max_position: Longest text, in tokens, before the stretching.
        beta_fast, beta_slow: Turns within that text: a pair with more than `beta_fast` is
            kept, one with fewer than `beta_slow` is stretched by `factor`, with a ramp between.
        attention_factor: Factor of all rotated numbers, so that scores grow by its square.
        truncate: Round the ends of the ramp to whole pairs.

    Source: Peng et al. 2023 (YaRN, arXiv 2309.00071), §3.2 and §3.4; `rope_type` "yarn" of
    transformers.
    """

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __call__(self, frequency: Float[Array, " R2"], theta: float) -> Float[Array, " R2"]:
        """The stretched frequencies, in radians a token."""
        size = 2 * frequency.shape[0]

        def pair(turns: float) -> float:  # index of the pair that makes this many turns
            ratio = self.original_max_position / (turns * 2 * math.pi)
            return size * math.log(ratio) / (2 * math.log(theta))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        high += 0.001 if high == low else 0.0
        number = jnp.arange(size // 2, dtype=jnp.float32)
        stretched = jnp.clip((number - low) / (high - low), 0.0, 1.0)
        return stretched * frequency / self.factor + (1 - stretched) * frequency


RopeScaling = Llama3Scaling | YarnScaling


def rope_tables(
    positions: Int[Array, "... T"],
    rotary_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
) -> tuple[Float[Array, "... T R2"], Float[Array, "... T R2"]]:
    """Cosine and sine of the rotary angles at absolute `positions`, in float32.

    Args:
        scaling: Stretches the frequencies; its `attention_factor` is included in both tables.

    Source: Su et al. 2021 (RoFormer), §3.4.2; angle of pair j is `pos * theta^(-2j/R)`.
    """
    exponent = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    frequency = jnp.power(jnp.float32(theta), -exponent)
    if scaling is not None:
        frequency = scaling(frequency, theta)
    # Reshaped, for tests forbid rank promotion.
    angle = positions.astype(jnp.float32)[..., None] * frequency.reshape(
        (1,) * positions.ndim + (-1,)
    )
    if scaling is None:
        return jnp.cos(angle), jnp.sin(angle)
    return scaling.attention_factor * jnp.cos(angle), scaling.attention_factor * jnp.sin(angle)


def gate_up_shape(width: int, inner: int) -> tuple[int, int, int, int]:
    """Shape [D C 2 W] of gate and up in one matrix, interleaved by W columns; C W = `inner`.

    So a kernel that multiplies with a range of columns has matching columns of both, and reads
    contiguous memory.
    """
    turn = math.gcd(inner, GATE_TURN)
    return width, inner // turn, 2, turn


def swiglu(
    x: Float[Array, "... D"] | Fp8Rows,
    w_gate_up: Float[Array, "D C 2 W"] | Fp8Matrix,
    w_down: Float[Array, "F D"] | Fp8Matrix,
    ops: LayerOps,
    dtype: DTypeLike,
) -> Array:
    """`(silu(x Wg) * (x Wu)) Wd`, gate and up in one product (Shazeer 2020, eq. 6).

    Args:
        w_gate_up: Gate and up interleaved, see `gate_up_shape`.
        ops: Back ends of the products; the last one may return partial sums (see
            `split_matmul`).
        dtype: Type of the rows between the products, and of the result if they have 8 bits.
    """
    reader = None
    if isinstance(w_down, Fp8Matrix) and ops.axis is None and ops.split_matmul is None:
        reader = w_down
    how = {"one_rounding": ops.one_rounding, "implementation": ops.gated_matmul}
    inner = gated_matmul(x, w_gate_up, dtype=dtype, reader=reader, **how)
    if isinstance(inner, Fp8Groups):
        return split_matmul(inner, w_down, dtype=dtype)
    how = {"axis": ops.axis, "one_rounding": ops.one_rounding}
    return split_matmul(inner, w_down, **how, implementation=ops.split_matmul)
