"""A head in 8 bits (e4m3) with a scale for each id, for rows of 16 or 8 bits; float32 sums."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..layer.fp8 import Fp8Rows

DTYPE = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(DTYPE).max)  # 448


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Fp8Head:
    """A head [V D] as `values * scales[:, None]`."""

    values: Float[Array, "V D"]  # e4m3
    scales: Float[Array, " V"]  # float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the represented head."""
        return self.values.shape

    def __len__(self) -> int:
        return len(self.values)


def products(hidden: Float[Array, "... D"] | Fp8Rows, head: Float[Array, "V D"] | Fp8Head) -> Array:
    """`hidden @ head.T`, accumulated in float32; 8-bit rows require an `Fp8Head`."""
    if isinstance(hidden, Fp8Rows):
        return products(hidden.values, head) * hidden.scales[..., None]
    rows = head.values if isinstance(head, Fp8Head) else head
    out = jax.lax.dot_general(
        hidden,
        rows.astype(hidden.dtype),
        (((hidden.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    if not isinstance(head, Fp8Head):
        return out
    return out * head.scales.reshape(*(1,) * (hidden.ndim - 1), -1)


@jax.jit
def quantize_head(head: Float[Array, "V D"]) -> Fp8Head:
    """The head in 8 bits; the largest number of each row becomes 448."""
    largest = jnp.max(jnp.abs(head), axis=1).astype(jnp.float32)
    scales = jnp.where(largest > 0, largest, LARGEST) / LARGEST
    values = head.astype(jnp.float32) / scales[:, None]
    return Fp8Head(jnp.clip(values, -LARGEST, LARGEST).astype(DTYPE), scales)
