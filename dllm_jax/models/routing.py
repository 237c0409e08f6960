"""Routing: the experts of each row and their weights, from the router's scores.

Everything is float32, the product with the router too: in 16 bits close scores tie, and another
choice of experts is another result. Among equal scores the lowest expert wins.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_EPS = 1e-20  # LLaDA2: added to the sum that its weights are divided by


def route(
    cfg: Any,
    x: Float[Array, "B T D"],
    router: Float[Array, "D E"],
    bias: Float[Array, " E"] | None,
    positions: Int[Array, "B T"],
    live: Bool[Array, "B T"] | None = None,
) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"]]:
    """The experts of each row and their weights.

    Args:
        cfg: A `moe.MoEConfig`.
        positions: Absolute positions, on whose grid the routing blocks lie.
        live: Rows that count; the others get the expert E, which is none. None: all.

    Source: Qwen3-MoE (softmax); DeepSeek-AI 2024 (DeepSeek-V3), §2.1.2 (sigmoid, bias, groups);
        LLaDA2.2 (routing blocks).
    """
    logits = jnp.einsum(
        "btd,de->bte",
        x.astype(jnp.float32),
        router.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    score = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[cfg.score]
    scores = score(logits)
    choice = scores if bias is None else scores + bias.astype(jnp.float32)[None, None]
    live = jnp.ones(positions.shape, bool) if live is None else live
    if cfg.expert_capacity:
        choice = _within_block(choice, positions, live, cfg.routing_block, cfg.expert_capacity)
    elif cfg.num_groups > 1:
        choice = _within_groups(choice, cfg.num_groups, cfg.groups_per_token)
    _, ids = jax.lax.top_k(choice, cfg.experts_per_token)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if cfg.norm_topk and cfg.score == "softmax":
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    elif cfg.norm_topk and cfg.experts_per_token > 1:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _EPS)
    return jnp.where(live[..., None], ids, cfg.num_experts), weights * cfg.routed_scale


def _within_groups(
    choice: Float[Array, "B T E"], num_groups: int, kept: int
) -> Float[Array, "B T E"]:
    """-inf outside of the groups whose two best experts together score highest."""
    grouped = choice.reshape(*choice.shape[:-1], num_groups, -1)
    best, _ = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))
    allowed = _largest(jnp.sum(best, axis=-1), kept)
    return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)


def _within_block(
    choice: Float[Array, "B T E"],
    positions: Int[Array, "B T"],
    live: Bool[Array, "B T"],
    block: int,
    capacity: int,
) -> Float[Array, "B T E"]:
    """-inf outside of the experts that some live row of the same routing block scores highest."""
    number = positions // block
    number = number - number[:, :1]  # rows are consecutive: so many blocks at most
    most = choice.shape[1] // block + 2

    def of_text(choice: Array, number: Array, live: Array) -> Array:
        said = jnp.where(live[:, None], choice, -jnp.inf)
        best = jax.ops.segment_max(said, number, num_segments=most)
        return _largest(best, capacity)[number]

    return jnp.where(jax.vmap(of_text)(choice, number, live), choice, -jnp.inf)


def _largest(x: Float[Array, "... E"], count: int) -> Bool[Array, "... E"]:
    """The `count` largest of the last axis, the first of equal ones."""
    _, ids = jax.lax.top_k(x, count)
    return jnp.any(jax.nn.one_hot(ids, x.shape[-1], dtype=bool), axis=-2)
