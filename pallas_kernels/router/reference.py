"""The reference in plain XLA, float32 throughout. Any device."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..layer.reference import late_rms_norm

_LEAST = 1e-20  # LLaDA2: added to the sum that its weights are divided by


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """How the experts of a row follow from its logits.

    Attributes:
        k: Experts of a row.
        score: What logits become: a law over all experts, or each its own probability.
        is_normed: Weights of the chosen experts are divided by their sum.
        factor: Of the weights.
        groups, kept_groups: Groups of equally many experts, and from how many of them a row may
            choose: those whose two best experts together score highest. 1 and 1: among all.
    """

    k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    is_normed: bool = True
    factor: float = 1.0
    groups: int = 1
    kept_groups: int = 1

    @property
    def least(self) -> float:
        """Added to the sum that weights are divided by."""
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
    """Scores of all experts, and what the choice goes by: with the bias, which weights ignore."""
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
    """The experts that `choice` is highest for, and their weights."""
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
    """-inf outside of the groups whose two best experts together score highest."""
    grouped = choice.reshape(*choice.shape[:-1], num_groups, -1)
    best, _ = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))
    allowed = largest(jnp.sum(best, axis=-1), kept)
    return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)


def largest(x: Float[Array, "... E"], count: int) -> Bool[Array, "... E"]:
    """The `count` largest of the last axis, the first of equal ones."""
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
