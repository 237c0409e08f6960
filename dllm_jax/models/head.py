"""The last product of a network as data, so that a kernel can read tokens while it computes logits.

An `Architecture.unembed` of type `Unembed` has this form; any other function is called.
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
    """Logits are products with `weights`, times `scale`, then `cap * tanh(logits / cap)`.

    Attributes:
        embed_scale: Factor of a row of `embedding`, in its type. None: the head is not tied to the
            embedding.
        table: The embedding, if the weights are an 8-bit copy of it. None: the weights themselves.
    """

    weights: Float[Array, "V D"] | Fp8Head
    scale: float = 1.0
    cap: float | None = None
    embed_scale: float | None = None
    table: Float[Array, "V D"] | None = None

    @property
    def embedding(self) -> Float[Array, "V D"]:
        """The embedding of a tied head, which is never in 8 bits."""
        return cast(Array, self.weights) if self.table is None else self.table

    def __call__(self, hidden: Float[Array, "... D"] | Fp8Rows) -> Float[Array, "... V"]:
        """Logits in float32; 8-bit rows require an 8-bit head."""
        logits = products(hidden, self.weights)
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.cap is None else self.cap * jnp.tanh(logits / self.cap)


@dataclasses.dataclass(frozen=True)
class Unembed:
    """`(params, cfg, hidden [..., D]) -> float32 logits [..., V]`, by a head.

    Attributes:
        head: `(params, cfg) -> Head`.
    """

    head: Callable[[Any, Any], Head]

    def __call__(self, params: Any, cfg: Any, hidden: Array) -> Float[Array, "... V"]:
        """Logits in float32 of rows after the final norm."""
        logits = self.head(params, cfg)(hidden)
        # A head split over several devices may be padded with rows of zeros.
        if not 0 < cfg.vocab_size < logits.shape[-1]:
            return logits
        return logits[..., : cfg.vocab_size]
