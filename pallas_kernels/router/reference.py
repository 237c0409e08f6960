"""The reference in plain XLA, float32 throughout. Any device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..layer.reference import late_rms_norm


def choose_experts(
    x: Array, scale: Array, router: Array, expert_scale: Array, live: Array, *, k: int, eps: float
) -> tuple[Array, Array]:
    """See `api.choose_experts`."""
    scale = scale.astype(jnp.float32) * x.shape[1] ** -0.5
    rows = late_rms_norm(x.astype(jnp.float32), scale, eps)
    logits = jnp.dot(rows, router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    scores, ids = jax.lax.top_k(jax.nn.softmax(logits), k)
    weights = (
        scores / jnp.sum(scores, axis=-1, keepdims=True) * expert_scale.astype(jnp.float32)[ids]
    )
    return jnp.where(live[:, None], ids, router.shape[1]), weights
