"""The reference: all logits at once. Any device."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .result import SHARE, LawReadout, Part, TokenReadout, told


def read(
    hidden: Array,
    head: Array,
    forbidden: Array,
    *,
    scale: float,
    cap: float | None,
    penalty: tuple[Array, Array] | None,
    num_top: int,
) -> TokenReadout:
    """See `api.token_readout`."""
    logits = _logits(hidden, head, scale, cap)
    logits = jnp.where(forbidden[None, :], -jnp.inf, logits)
    ids = jnp.arange(len(head), dtype=jnp.int32)
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


def read_law(
    hidden: Array,
    head: Array,
    forbidden: Array,
    temperature: Array,
    *,
    scale: float,
    cap: float | None,
) -> LawReadout:
    """See `api.law_readout`."""
    logits = _logits(hidden, head, scale, cap)
    logits = jnp.where(forbidden[None, :], -jnp.inf, logits)
    return of_law(logits / temperature[:, None], head.dtype)


def of_law(law: Array, dtype: Any) -> LawReadout:
    """The readout of a law [R V] that is there, as logits."""
    peak, token = jnp.max(law, axis=1), jnp.argmax(law, axis=1).astype(jnp.int32)
    down = law - peak[:, None]  # NaN where nothing is allowed
    weight = jnp.exp(down)
    # Fused, a law's highest value and its peak may be rounded apart, by more than all others weigh.
    others = jnp.arange(law.shape[1], dtype=jnp.int32)[None] != token[:, None]
    other = jnp.where(others & (weight > 0), weight, 0.0)
    padded = jnp.pad(weight, ((0, 0), (0, -law.shape[1] % SHARE)))
    shares = jnp.sum(padded.reshape(len(law), -1, SHARE), axis=2)
    return LawReadout(
        token=token,
        rest=jnp.sum(jnp.where(jnp.isnan(weight), weight, other), axis=1),
        spread=jnp.sum(jnp.where(other > 0, other * down, 0.0), axis=1),
        weights=weight.astype(dtype),
        shares=shares,
    )


def _logits(hidden: Array, head: Array, scale: float, cap: float | None) -> Array:
    logits = jax.lax.dot_general(
        hidden,
        head.astype(hidden.dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    logits = logits * scale
    return logits if cap is None else cap * jnp.tanh(logits / cap)
