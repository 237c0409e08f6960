"""Routing: the experts of each row and their weights, from the router's scores.

Everything is computed in float32, including the product with the router: in 16 bits close scores
would tie and change the choice of experts. Among equal scores the lowest expert wins.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.kernels import router as kernels
from dllm_jax.kernels.router.reference import chosen, largest, scored


def route(
    cfg: Any,
    x: Float[Array, "B T D"],
    router: Float[Array, "D E"],
    bias: Float[Array, " E"] | None,
    positions: Int[Array, "B T"],
    live: Bool[Array, "B T"] | None = None,
    implementation: Literal["xla", "mosaic"] | None = None,
) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"]]:
    """The experts of each row and their weights.

    Args:
        cfg: A `moe.MoEConfig`.
        positions: Absolute positions; routing blocks are aligned to their grid.
        live: Rows that count; others get the invalid expert E. None: all rows.
        implementation: See `router.route`; routing blocks always use XLA.

    Source: LLaDA2.2 (routing blocks).
    """
    rule = kernels.Rule(
        k=cfg.experts_per_token,
        score=cfg.score,
        is_normed=cfg.norm_topk and (cfg.score == "softmax" or cfg.experts_per_token > 1),
        factor=cfg.routed_scale,
        groups=1 if cfg.expert_capacity else cfg.num_groups,
        kept_groups=cfg.groups_per_token,
    )
    if not cfg.expert_capacity:
        flat = x.reshape(-1, x.shape[-1]), router, bias, None if live is None else live.reshape(-1)
        ids, weights = kernels.route(*flat, rule=rule, implementation=implementation)
        return ids.reshape(*x.shape[:-1], -1), weights.reshape(*x.shape[:-1], -1)
    scores, choice = scored(x, router, bias, rule)
    live = jnp.ones(positions.shape, bool) if live is None else live
    choice = _within_block(choice, positions, live, cfg.routing_block, cfg.expert_capacity)
    return chosen(scores, choice, live, rule)


def _within_block(
    choice: Float[Array, "B T E"],
    positions: Int[Array, "B T"],
    live: Bool[Array, "B T"],
    block: int,
    capacity: int,
) -> Float[Array, "B T E"]:
    """`choice` with -inf outside the experts with the highest scores in the routing block."""
    number = positions // block
    number = number - number[:, :1]  # rows are consecutive, which bounds the number
    most = choice.shape[1] // block + 2

    def of_text(choice: Array, number: Array, live: Array) -> Array:
        said = jnp.where(live[:, None], choice, -jnp.inf)
        best = jax.ops.segment_max(said, number, num_segments=most)
        return largest(best, capacity)[number]

    return jnp.where(jax.vmap(of_text)(choice, number, live), choice, -jnp.inf)
