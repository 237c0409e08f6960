"""The differentiable reference: every expert over every row; each row keeps its own experts."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..activation import ACTIVATIONS, Activation
from .fp8 import Fp8Experts, products


def expert_ffn(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    w_gate_up: Array | Fp8Experts,
    w_down: Array | Fp8Experts,
    *,
    activation: Activation = "silu",
) -> Array:
    """See `api.expert_ffn`; E/k times the work, and [E T F] floats of memory."""
    E = len(w_gate_up)
    chosen = expert_ids[:, :, None] == jnp.arange(E)[None, None, :]
    routed = chosen.any(axis=1)
    # Values of a row without an expert must not reach a gradient.
    x = jnp.where(routed.any(axis=1)[:, None], x, 0)
    both = _products(jnp.broadcast_to(x, (E, *x.shape)), w_gate_up)
    gate, up = jnp.split(both, 2, axis=-1)
    out = _products((ACTIVATIONS[activation](gate) * up).astype(x.dtype), w_down)
    weight = jnp.where(chosen, expert_weights[:, :, None], 0).sum(axis=1)
    kept = jnp.where(routed.T[:, :, None], weight.T[:, :, None] * out, 0)
    return kept.sum(axis=0).astype(x.dtype)


def _products(
    rows: Float[Array, "E T D"], weights: Float[Array, "E D ..."] | Fp8Experts
) -> Float[Array, "E T F"]:
    """The rows of each expert times its weights, accumulated in float32."""
    if isinstance(weights, Fp8Experts):
        flat = weights.flat
        return products(rows, flat.values, flat.scales)
    return jax.lax.dot_general(
        rows,
        weights.reshape(*weights.shape[:2], -1).astype(rows.dtype),
        (((2,), (1,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )
