"""Token merge: mixtures that cells show in the next forward, made from the statistics of this one.

A *descriptor* of a cell is a few ids with their probabilities, and the rest for the mask. It is
kept in the carry, so it slides with the window, and becomes a `TokenMix` at the next forward:

    stats -> `of_token` / `of_top` -> `remember` -> (slide) -> `beside_mask` / `beside_token`

The model makes embeddings of a `TokenMix`.

Source: DMax (arXiv 2604.08302), soft parallel decoding; Diffulex's `token_merge` for the second
form of mixture.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from .forward import TokenMix, TokenStats
from .knobs import Threshold, at_token
from .protocol import SlotSpec
from .state import DecodeState

_LEAVES = ("ids", "probs", "rest", "on")
_NAME = "merge_{}".format


class Descriptors(struct.PyTreeNode):
    """The mixtures of cells, where `on`.

    Attributes:
        ids: The M tokens of a mixture.
        probs: Their probabilities.
        rest: The remaining probability, for the mask.
        on: Cells that have a descriptor; the others show their token.
    """

    ids: Int[Array, "B K S M"]
    probs: Float[Array, "B K S M"]
    rest: Float[Array, "B K S"]
    on: Bool[Array, "B K S"]


def init(spec: SlotSpec, num_ids: int = 1) -> dict[str, Array]:
    """Leaves for `Carry(tokens=...)`: no cell has a descriptor.

    Args:
        num_ids: Tokens of a mixture (M).
    """
    empty = {
        "ids": jnp.full((1, 1, num_ids), spec.mask_id, jnp.int32),
        "probs": jnp.zeros((1, 1, num_ids)),
        "rest": jnp.zeros((1, 1)),
        "on": jnp.zeros((1, 1), bool),
    }
    return {_NAME(leaf): value for leaf, value in empty.items()}


def of_token(
    token: Int[Array, "B K S"], prob: Float[Array, "B K S"], on: Bool[Array, "B K S"]
) -> Descriptors:
    """One token with its probability, the rest for the mask."""
    sure = jnp.clip(prob, 0.0, 1.0)
    return Descriptors(token[..., None], sure[..., None], 1.0 - sure, on)


def of_top(stats: TokenStats, on: Bool[Array, "B K S"]) -> Descriptors:
    """The most probable tokens: the `num_top` that `predict` returned."""
    # Cells that `predict` was not asked for may hold anything.
    probs = jnp.where(on[..., None], stats.top_probs, 0.0)
    rest = jnp.maximum(0.0, 1.0 - jnp.sum(probs, axis=-1))
    return Descriptors(stats.top_ids, probs, rest, on)


def remember(state: DecodeState, new: Descriptors, where: Bool[Array, "B K S"]) -> DecodeState:
    """Keep `new` for the next forward, in place of what the cells in `where` had.

    A cell in `where` that is not `new.on` loses its descriptor.
    """
    old = recall(state)
    leaves = dict(state.carry.tokens)
    for leaf in _LEAVES:
        fresh, kept = getattr(new, leaf), getattr(old, leaf)
        chosen = jnp.where(where[..., None] if fresh.ndim > where.ndim else where, fresh, kept)
        leaves[_NAME(leaf)] = chosen.reshape(leaves[_NAME(leaf)].shape)
    return state.replace(carry=state.carry.replace(tokens=leaves))


def recall(state: DecodeState) -> Descriptors:
    """The descriptors of the window's cells."""
    shape = state.buffer.tokens.shape
    leaves = {leaf: state.carry.tokens[_NAME(leaf)] for leaf in _LEAVES}
    return Descriptors(**{k: v.reshape(*shape, *v.shape[2:]) for k, v in leaves.items()})


def beside_mask(shown: Descriptors, mask_id: int, renormalize: bool = True) -> TokenMix:
    """`rest * E[mask] + sum_m p_m * E[id_m]`, at the weighted mean of the norms if asked for.

    Source: DMax, hybrid embeddings (`dmax_topk` in Diffulex).
    """
    return TokenMix(
        base_ids=jnp.full(shown.rest.shape, mask_id, jnp.int32),
        base_weight=shown.rest,
        ids=shown.ids,
        probs=shown.probs,
        on=shown.on,
        renormalize=renormalize,
    )


def beside_token(shown: Descriptors, tokens: Int[Array, "B K S"], weight: Threshold) -> TokenMix:
    """`E[token] + weight * sum_m p_m * E[id_m]`, without mask and scaling.

    Source: Diffulex, `iter_smooth_topk`.
    """
    return TokenMix(
        base_ids=tokens,
        base_weight=jnp.ones_like(shown.rest),
        ids=shown.ids,
        probs=shown.probs * jnp.asarray(at_token(weight))[..., None],
        on=shown.on,
        renormalize=False,
    )
