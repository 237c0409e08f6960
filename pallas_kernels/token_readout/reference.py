"""The reference: all logits at once. Any device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .head import Fp8Head, products
from .result import Part, TokenReadout, told


def read(
    hidden: Array,
    head: Array | Fp8Head,
    forbidden: Array,
    *,
    scale: float,
    cap: float | None,
    penalty: tuple[Array, Array] | None,
    num_top: int,
) -> TokenReadout:
    """See `api.token_readout`."""
    logits = products(hidden, head) * scale
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    ids = jnp.arange(len(head), dtype=jnp.int32)
    logits = jnp.where(forbidden[None, :], -jnp.inf, logits)
    if penalty is not None:
        logits -= jnp.where(ids[None] == penalty[0][:, None], penalty[1][:, None], 0.0)
    peak = jnp.max(logits, axis=1)
    down = logits - peak[:, None]
    weight = jnp.exp(down)
    whole = Part(
        token=jnp.argmax(logits, axis=1).astype(jnp.int32),
        peak=peak,
        mass=jnp.sum(weight, axis=1),
        spread=jnp.sum(jnp.where(weight > 0, weight * down, 0.0), axis=1),
    )
    top_logits, top_ids = jax.lax.top_k(logits, num_top)
    return told(whole, top_logits, top_ids.astype(jnp.int32))
