"""The reference: all logits at once. Any device."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .head import Fp8Head, products
from .result import SHARE, LawReadout, Part, TokenReadout, finish


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
    return finish(whole, top_logits, top_ids.astype(jnp.int32))


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


def of_law(law: Array, dtype: Any, best: tuple[Array, Array] | None = None) -> LawReadout:
    """The readout of a law [R V] that is there, as logits.

    Args:
        best: Peak and token of more ids than these, from the first of these on; None: of these.
    """
    num_rows, num_ids = law.shape
    if best is None:
        best = jnp.max(law, axis=1), jnp.argmax(law, axis=1).astype(jnp.int32)
    peak, token = best
    # By shares, all sums have one shape and one launch, which makes the rounded weights as well.
    wide = jnp.pad(law, ((0, 0), (0, -num_ids % SHARE)), constant_values=-jnp.inf)
    wide = wide.reshape(num_rows, -1, SHARE)
    down = wide - peak[:, None, None]  # NaN where nothing is allowed
    weight = jnp.exp(down)
    # Fused, a law's highest value and its peak may be rounded apart, by more than all others weigh.
    ids = jnp.arange(wide.shape[1] * SHARE, dtype=jnp.int32).reshape(1, -1, SHARE)
    other = jnp.where(ids != token[:, None, None], weight, 0.0)
    spread = jnp.where(other > 0, other * down, 0.0)
    shares, others, spreads = (jnp.sum(each, axis=2) for each in (weight, other, spread))
    return LawReadout(
        token=token,
        rest=jnp.sum(others, axis=1),
        spread=jnp.sum(spreads, axis=1),
        weights=weight.astype(dtype).reshape(num_rows, -1)[:, :num_ids],
        shares=shares,
    )


def _logits(hidden: Array, head: Array | Fp8Head, scale: float, cap: float | None) -> Array:
    logits = products(hidden, head) * scale
    return logits if cap is None else cap * jnp.tanh(logits / cap)
