"""The engine's half of a grammar: the states after a step, with stray tokens put right.

A strategy may write outside every path that `grammar_plan` shows; what it wrote is then changed.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from . import constraint
from . import grammar_paths as paths
from .constraint import HOLE, KNOWN, NEVER, NO_LABEL, SKIP, WRITTEN, View
from .grammar_paths import NO_ID
from .state import DecodeState

_CHANGED = -1.0  # score of a written cell that takes another token


def walk(state: DecodeState) -> Int[Array, "B W1"]:
    """The automaton's states along the filled cells at the window's left; nothing after them."""
    seen = constraint.view(state)
    if seen.grammar.kernels is not None:
        given = seen.grammar, seen.at, seen.kind, seen.known
        return seen.grammar.kernels.walk(*given, skip=SKIP, hole=HOLE)
    count = seen.grammar.delta.shape[1]
    onto = jax.vmap(lambda delta, known: delta[:, known].T)(seen.grammar.delta, seen.known)
    stays = (seen.kind == SKIP)[..., None]
    onto = jnp.where(stays, jnp.arange(count, dtype=jnp.int32), onto.astype(jnp.int32))
    return jnp.concatenate([seen.at[:, None], jax.vmap(paths.followed)(onto, seen.at)], axis=1)


def conform(before: DecodeState, stepped: DecodeState) -> tuple[DecodeState, Int[Array, "B W1"]]:
    """The step with as few written cells as need be on another token; also the path through it.

    Cells that were filled and are as they were stay. Every other filled cell takes the token that
    it had, or the lowest of its edge, where its own leads nowhere.
    """
    seen = constraint.view(stepped)
    buffer = stepped.buffer
    same = before.buffer.filled & (before.buffer.tokens == buffer.tokens)
    kind = jnp.where((seen.kind == KNOWN) & ~same.reshape(seen.kind.shape), WRITTEN, seen.kind)

    grammar = seen.grammar
    cost = jnp.where(kind == WRITTEN, _CHANGED, 0.0)[..., None]
    labels = jnp.arange(grammar.num_labels)
    path, _ = paths.best_paths(seen, kind, jnp.where(labels == NO_LABEL, NEVER, cost))

    def one(view: View, kind: Array, path: Array, had: Array) -> Array:
        grammar = view.grammar
        fits = paths.classes_along(grammar, path)
        lowest = jnp.min(jnp.where(fits, grammar.lowest[None], NO_ID), axis=1)
        old = grammar.class_of[jnp.clip(had, 0, len(grammar.class_of) - 1)].astype(jnp.int32)
        keeps = (had >= 0) & jnp.take_along_axis(fits, old[:, None], axis=1)[:, 0]
        lowest = jnp.where(keeps, had, lowest)
        off = ~jnp.take_along_axis(fits, view.known[:, None], axis=1)[:, 0]
        off &= (kind == WRITTEN) & ~paths.is_tail(grammar, path) & (lowest != NO_ID) & view.bound
        return jnp.where(off, lowest, -1)

    had = jnp.where(before.buffer.filled, before.buffer.tokens, -1).reshape(kind.shape)
    put = jax.vmap(one)(seen, kind, path, had)
    put = put.reshape(buffer.tokens.shape)
    tokens = jnp.where(put >= 0, put, buffer.tokens)
    return stepped.replace(buffer=buffer.replace(tokens=tokens)), path
