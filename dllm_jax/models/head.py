"""The last product of a network as data, so that a kernel can compute logits as it reads them.

An `Architecture.unembed` that is an `Unembed` has this form; any other function is called.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
from jaxtyping import Array, Float

from dllm_jax.kernels.layer.fp8 import Fp8Rows
from dllm_jax.kernels.token_readout.head import Fp8Head, products


@dataclasses.dataclass(frozen=True)
class Head:
    """Logits that are products with `weights`, times `scale`, then `cap * tanh(logits / cap)`.

    Attributes:
        embed_scale: The embedding of an id is its row of `embedding` times this, in their type.
            None: the weights are not the embedding's.
        table: The embedding, of which the weights may be a copy in 8 bits. None: it is the weights.
        axis: The axis of a mesh whose devices each have consecutive rows of the weights, zeros
            behind the last; None: one device has all.
    """

    weights: Float[Array, "V D"] | Fp8Head
    scale: float = 1.0
    cap: float | None = None
    embed_scale: float | None = None
    axis: str | None = None
    table: Float[Array, "V D"] | None = None

    @property
    def embedding(self) -> Float[Array, "V D"]:
        """The weights where they are the embedding's, which is never in 8 bits."""
        return cast(Array, self.weights) if self.table is None else self.table

    def __call__(self, hidden: Float[Array, "... D"] | Fp8Rows) -> Float[Array, "... V"]:
        """Logits in float32; rows in 8 bits only of such a head."""
        logits = products(hidden, self.weights)
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
        logits = self.head(params, cfg)(hidden)
        # A head that is placed on several devices may have rows of zeros at its end.
        if not 0 < cfg.vocab_size < logits.shape[-1]:
            return logits
        return logits[..., : cfg.vocab_size]
