"""Paths of a grammar's states through a window: the best one, or one drawn.

Of all paths that keep every filled cell and from which the text can end in the room left, the one
with the highest score is taken.

Source: DINGO (arXiv 2505.23061) for the chain over states; the room and the tail are ours.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .constraint import KNOWN, NEVER, NO_CLASS, NO_LABEL, SKIP, WRITTEN, Grammar, View

NO_ID = jnp.iinfo(jnp.int32).max
# Cells in one pass of the chain's loop: 128 cells of 256 states took 0.29 ms on an H200, by one
# cell a pass 1.62 (benchmarks/results/grammar_h200.json).
_UNROLL = 8
_PATH_STREAM = 0x9A7  # of paths; tokens are drawn with the cell's key itself


class Draw(struct.PyTreeNode):
    """Random draws of paths: which slots draw, and a key for each cell."""

    tempered: Bool[Array, " B"]
    keys: PRNGKeyArray


def best_paths(
    view: View, kind: Int[Array, "B W"], score: Float[Array, "B W L"]
) -> tuple[Int[Array, "B W1"], Float[Array, " B"]]:
    """The best path of each slot, and its score."""
    chained = view.at, view.room, kind, view.known, score
    if view.grammar.kernels is None:
        return jax.vmap(chain)(view.grammar, *chained)
    kinds = {"skip": SKIP, "is_known": KNOWN, "written": WRITTEN}
    return view.grammar.kernels.best_path(view.grammar, *chained, never=NEVER, **kinds)


def chain(
    grammar: Grammar,
    at: Array,
    room: Array,
    kind: Array,
    known: Array,
    score: Array,
    draw: Draw | None = None,
) -> tuple[Int[Array, " W1"], Float[Array, ""]]:
    """The best path of one slot [W + 1], or one drawn, and the score of the best or of all.

    Args:
        grammar: Of one slot, without the leading axis; so is `draw`.
        score: By cell and label.
    """
    last = jnp.where(grammar.distance <= room, 0.0, NEVER)

    def keeps(kind: Array, held: Array, free: Array) -> Array:
        return (kind == KNOWN) | ((kind == WRITTEN) & (held >= free))

    count = len(grammar.distance)

    def back(beta: Array, cell: tuple[Array, ...]) -> tuple[Array, Array]:
        kind, known, score, noise = cell
        through = score[grammar.label] + beta[grammar.target]
        best = jnp.argmax(through + noise[None], axis=1)[:, None]
        onto = jnp.take_along_axis(grammar.target, best, axis=1)[:, 0].astype(jnp.int32)
        free = likeliest = jnp.max(through, axis=1)
        if draw is not None:
            total = free + jnp.log(jnp.sum(jnp.exp(through - free[:, None]), axis=1))
            free = jnp.where(draw.tempered, total, free)
        kept = jax.lax.dynamic_index_in_dim(grammar.delta, known, 1, keepdims=False)
        kept = kept.astype(jnp.int32)
        held = beta[kept]
        value = jnp.where(keeps(kind, held, free), held, free)
        value = jnp.maximum(jnp.where(kind == SKIP, beta, value), NEVER)
        onto = jnp.where(keeps(kind, held, likeliest), kept, onto)
        return value, jnp.where(kind == SKIP, jnp.arange(count, dtype=jnp.int32), onto)

    noise = jnp.zeros((len(kind), grammar.target.shape[1]))
    if draw is not None:
        keys = jax.vmap(jax.random.fold_in, (0, None))(draw.keys, _PATH_STREAM)
        drawn = jax.vmap(lambda key: jax.random.gumbel(key, noise.shape[1:]))(keys)
        noise = jnp.where(draw.tempered, drawn, noise)
    cells = kind, known, score, noise
    first, onto = jax.lax.scan(back, last, cells, reverse=True, unroll=_UNROLL)
    return jnp.concatenate([at[None], followed(onto, at)]), first[at]


def followed(onto: Int[Array, "W G"], at: Array) -> Int[Array, " W"]:
    """The states after each cell, of maps from state to state.

    Maps are composed in a few gathers; a second scan would be several launches for each cell.
    """
    maps = jax.lax.associative_scan(lambda a, b: jnp.take_along_axis(b, a, axis=-1), onto)
    return maps[:, at]


def may_end(view: Any) -> Bool[Array, "W G"]:
    """States after each cell of one slot from which a text can end that keeps its filled cells."""
    grammar = view.grammar
    is_edge = grammar.label != NO_LABEL

    def back(ends: Array, cell: tuple[Array, Array]) -> tuple[Array, Array]:
        kind, known = cell
        kept = jax.lax.dynamic_index_in_dim(grammar.delta, known, 1, keepdims=False)
        through = jnp.any(is_edge & ends[grammar.target], axis=1)
        before = jnp.where(kind == KNOWN, ends[kept.astype(jnp.int32)], through)
        return jnp.where(kind == SKIP, ends, before), ends

    last = grammar.distance <= view.room
    return jax.lax.scan(back, last, (view.kind, view.known), reverse=True, unroll=_UNROLL)[1]


def classes_along(grammar: Grammar, path: Int[Array, " W1"]) -> Bool[Array, "W C"]:
    """Classes that lead along each step of a path."""
    leads = grammar.delta[path[:-1]].astype(jnp.int32) == path[1:, None]
    return leads & (jnp.arange(leads.shape[1]) != NO_CLASS)[None]


def is_tail(grammar: Grammar, path: Int[Array, " W1"]) -> Bool[Array, " W"]:
    """Cells after a stop id."""
    return path[:-1] == grammar.end
