"""Routed experts in 8 bits (e4m3), and their product in plain XLA.

Each output of each expert has a scale, and so has each row of an expert. As in `layer.fp8`, the
8-bit values of a row depend on that row alone.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..layer.fp8 import LINE, filled, quantize


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Fp8Experts:
    """Matrices [E K *N] of E experts as `values * scales`, the contracted axis last.

    Attributes:
        depth: K. The stored axis may be longer, with zeros in its last line.
    """

    values: Float[Array, "E *N L"]  # e4m3
    scales: Float[Array, " E *N"]  # float32
    depth: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the represented matrices, [E K *N]."""
        experts, *outputs, _ = self.values.shape
        return (experts, self.depth, *outputs)

    @property
    def dtype(self) -> Any:
        """Type of the stored values."""
        return self.values.dtype

    @property
    def flat(self) -> "Fp8Experts":
        """The same with one axis of outputs: [E K N]."""
        E, _, *N = self.shape
        values = self.values.reshape(E, -1, self.values.shape[-1])
        return Fp8Experts(values, self.scales.reshape(E, math.prod(N)), self.depth)

    def __len__(self) -> int:
        return len(self.values)


def quantize_experts(w: Float[Array, "E K *N"]) -> Fp8Experts:
    """Matrices of experts in 8 bits; the largest number of an output becomes 448.

    Converts one expert at a time: all of them in float32 would take four times the result.
    """
    depth = w.shape[1]

    def one(matrix: Array) -> tuple[Array, Array]:
        values, scales = quantize(jnp.moveaxis(matrix, 0, -1))
        return filled(values, -(-depth // LINE) * LINE if depth > LINE else depth), scales

    values, scales = jax.lax.map(one, w)
    return Fp8Experts(values, scales, depth)


def products(
    rows: Float[Array, "*E M K"], values: Float[Array, "*E N L"], scales: Float[Array, "*E N"]
) -> Float[Array, "*E M N"]:
    """Rows, rounded to 8 bits, times the matrices of their experts, in float32."""
    rounded, row_scales = quantize(rows, is_rows=True)
    rounded = filled(rounded, values.shape[-1])
    batch = tuple(range(rows.ndim - 2))
    last = (rows.ndim - 1,)
    sums = jax.lax.dot_general(
        rounded, values, ((last, last), (batch, batch)), preferred_element_type=jnp.float32
    )
    return sums * row_scales[..., None] * scales[..., None, :]
