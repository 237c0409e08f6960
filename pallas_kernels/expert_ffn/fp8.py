"""Routed experts in 8 bits (e4m3), and a product of theirs in plain XLA.

Each output of each expert has a scale, and each row that goes through an expert: as in `layer.fp8`,
what a row becomes depends on that row alone.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..layer.fp8 import quantize


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Fp8Experts:
    """Matrices [E K *N] of E experts as `values * scales`, the contracted axis last."""

    values: Float[Array, "E *N K"]  # e4m3
    scales: Float[Array, " E *N"]  # float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrices they stand for: [E K *N]."""
        experts, *outputs, depth = self.values.shape
        return (experts, depth, *outputs)

    @property
    def dtype(self) -> Any:
        """Type of the stored values."""
        return self.values.dtype

    @property
    def flat(self) -> "Fp8Experts":
        """The same with one axis of outputs: [E K N]."""
        E, K, *N = self.shape
        return Fp8Experts(self.values.reshape(E, -1, K), self.scales.reshape(E, math.prod(N)))

    def __len__(self) -> int:
        return len(self.values)


def quantize_experts(w: Float[Array, "E K *N"]) -> Fp8Experts:
    """Matrices of experts in 8 bits; the largest number of an output becomes 448.

    One expert after another: all of them in float32 would take four times the result.
    """
    return Fp8Experts(*jax.lax.map(lambda one: quantize(jnp.moveaxis(one, 0, -1)), w))


def products(
    rows: Float[Array, "*E M K"], values: Float[Array, "*E N K"], scales: Float[Array, "*E N"]
) -> Float[Array, "*E M N"]:
    """Rows, rounded to 8 bits, by the matrices of their experts; float32."""
    rounded, row_scales = quantize(rows)
    batch = tuple(range(rows.ndim - 2))
    last = (rows.ndim - 1,)
    sums = jax.lax.dot_general(
        rounded, values, ((last, last), (batch, batch)), preferred_element_type=jnp.float32
    )
    return sums * row_scales[..., None] * scales[..., None, :]
