"""The reference in plain XLA for any device, float32 throughout."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..layer.reference import late_rms_norm

_LEAST = 1e-20  # LLaDA2 adds it to the divisor of its weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """The rule that chooses the experts of a row from its logits.

    Attributes:
        k: Experts of a row.
        score: Function from logits to scores: a softmax over all experts, or a sigmoid of each.
        is_normed: Weights of the chosen experts are divided by their sum.
        factor: Factor of the weights.
        groups, kept_groups: Number of equal groups of experts, and number of groups that a row may
            choose from: those with the highest sum of their two best scores. 1 and 1: no groups.
    """

    k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    is_normed: bool = True
    factor: float = 1.0
    groups: int = 1
    kept_groups: int = 1

    @property
    def least(self) -> float:
        """Number added to the divisor of the weights."""
        return _LEAST if self.score == "sigmoid" else 0.0


def route(
    x: Array, router: Array, bias: Array | None, live: Array | None, *, rule: Rule
) -> tuple[Array, Array]:
    """See `api.route`."""
    scores, choice = scored(x, router, bias, rule)
    if rule.groups > 1:
        choice = _within_groups(choice, rule.groups, rule.kept_groups)
    return chosen(scores, choice, live, rule)


def scored(
    x: Float[Array, "*M D"], router: Float[Array, "D E"], bias: Array | None, rule: Rule
) -> tuple[Float[Array, "*M E"], Float[Array, "*M E"]]:
    """Scores of all experts, and scores plus bias, which decide the choice but not the weights."""
    logits = jnp.dot(
        x.astype(jnp.float32), router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    scores = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[rule.score](logits)
    if bias is None:
        return scores, scores
    return scores, scores + bias.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))


def chosen(
    scores: Float[Array, "*M E"],
    choice: Float[Array, "*M E"],
    live: Bool[Array, "*M"] | None,
    rule: Rule,
) -> tuple[Int[Array, "*M k"], Float[Array, "*M k"]]:
    """The experts with the highest `choice`, and their weights."""
    _, ids = jax.lax.top_k(choice, rule.k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if rule.is_normed:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + rule.least)
    if live is not None:
        ids = jnp.where(live[..., None], ids, scores.shape[-1])
    return ids, weights * rule.factor


def _within_groups(
    choice: Float[Array, "*M E"], num_groups: int, kept: int
) -> Float[Array, "*M E"]:
    """`choice` with -inf outside the groups with the highest sum of their two best experts."""
    grouped = choice.reshape(*choice.shape[:-1], num_groups, -1)
    best, _ = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))
    allowed = largest(jnp.sum(best, axis=-1), kept)
    return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)


def largest(x: Float[Array, "... E"], count: int) -> Bool[Array, "... E"]:
    """A mask of the `count` largest of the last axis; of equal numbers the first."""
    _, ids = jax.lax.top_k(x, count)
    return jnp.any(jax.nn.one_hot(ids, x.shape[-1], dtype=bool), axis=-2)


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
