"""The last product of a network as data, so that a kernel can compute logits as it reads them.

An `Architecture.unembed` that is an `Unembed` has this form; any other function is called.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Head:
    """Logits that are products with `weights`, times `scale`, then `cap * tanh(logits / cap)`.

    Attributes:
        embed_scale: The embedding of an id is its row of `weights` times this, in their type.
            None: the weights are not the embedding's.
    """

    weights: Float[Array, "V D"]
    scale: float = 1.0
    cap: float | None = None
    embed_scale: float | None = None

    def __call__(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Logits in float32."""
        logits = jax.lax.dot_general(
            hidden,
            self.weights.astype(hidden.dtype),
            (((hidden.ndim - 1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.cap is None else self.cap * jnp.tanh(logits / self.cap)


@dataclasses.dataclass(frozen=True)
class Unembed:
    """`(params, cfg, hidden [..., D]) -> float32 logits [..., V]`, those of a head.

    Attributes:
        head: `(params, cfg) -> Head`.
    """

    head: Callable[[Any, Any], Head]

    def __call__(self, params: Any, cfg: Any, hidden: Array) -> Float[Array, "... V"]:
        """Logits in float32 of rows that went through the final norm."""
        return self.head(params, cfg)(hidden)
