"""The truth: all logits at once, any device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.token_readout.result import Part, TokenReadout, told


def read(
    hidden: Array,
    head: Array,
    forbidden: Array,
    *,
    scale: float,
    cap: float | None,
    temperature: Array | None,
    keys: Array | None,
    penalty: tuple[Array, Array] | None,
    confidence: str,
    num_top: int,
) -> TokenReadout:
    """See `api.token_readout`."""
    logits = jax.lax.dot_general(
        hidden,
        head.astype(hidden.dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    logits = logits * scale
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    V = len(head)
    ids = jnp.arange(V, dtype=jnp.int32)
    logits = jnp.where(forbidden[None, :], -jnp.inf, logits)
    if penalty is not None:
        logits -= jnp.where(ids[None] == penalty[0][:, None], penalty[1][:, None], 0.0)
    law = drawn = logits
    if temperature is not None:
        tempered = temperature > 0
        law = logits / jnp.where(tempered, temperature, 1.0)[:, None]
        law = drawn = jnp.where(logits == -jnp.inf, -jnp.inf, law)
        if keys is not None:
            noise = jax.vmap(lambda key: jax.random.gumbel(key, (V,), jnp.float32))(keys)
            drawn = law + jnp.where(tempered[:, None], noise, 0.0)
    judged = law if confidence == "drawn" else logits
    token = jnp.argmax(drawn, axis=1).astype(jnp.int32)
    peak = jnp.max(judged, axis=1)
    down = judged - peak[:, None]
    weight = jnp.exp(down)
    whole = Part(
        best=jnp.max(drawn, axis=1),
        token=token,
        own=jnp.take_along_axis(judged, token[:, None], axis=1)[:, 0],
        peak=peak,
        mass=jnp.sum(weight, axis=1),
        spread=jnp.sum(jnp.where(weight > 0, weight * down, 0.0), axis=1),
    )
    top_logits, top_ids = jax.lax.top_k(judged, num_top)
    return told(whole, top_logits, top_ids.astype(jnp.int32))
