"""The tokens along the best path of a window, which a strategy reads in place of its own.

Any of them may be written: the path shows that the text can go on.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from . import grammar_paths as paths
from .constraint import (
    DEAD,
    FLOOR,
    FREE,
    HOLE,
    KNOWN,
    NEVER,
    NO_CLASS,
    NO_LABEL,
    SKIP,
    Grammar,
    View,
)
from .grammar_paths import NO_ID, Draw


class ClassStats(struct.PyTreeNode):
    """Statistics of each cell by class of tokens, without an array over the vocabulary.

    Attributes:
        token: The token that each class would take: its likeliest, or one drawn.
        rank: What it is chosen by among the classes of an edge.
        mass: Log probability of the class: of its likeliest token, or of all where one is drawn.
        confidence: The token's log probability.
        whole: Log probability of all ids of the class, in slots with `Grammar.by_mass`.
    """

    token: Int[Array, "B W C"]
    rank: Float[Array, "B W C"]
    mass: Float[Array, "B W C"]
    confidence: Float[Array, "B W C"]
    whole: Float[Array, "B W C"]


class IdStats(NamedTuple):
    """Statistics of ids, from which those of the classes follow; no slot draws.

    Attributes:
        narrow: Logits of `Grammar.narrow`.
        wide, wide_token: The largest logit of each of `Grammar.wide`, and the lowest id with it.
        log_mass: Logarithm of the sum of `exp(logit)` over all ids.
    """

    narrow: Float[Array, "B W N"]
    wide: Float[Array, "B W M"]
    wide_token: Int[Array, "B W M"]
    log_mass: Float[Array, "B W"]


def classes_of_ids(grammar: Grammar, ids: IdStats) -> ClassStats:
    """The same of classes; logits that are no number count as those of forbidden ids."""

    def of_slot(grammar: Any, ids: IdStats) -> tuple[Array, Array]:
        narrow, wide = (jnp.where(jnp.isnan(leaf), -jnp.inf, leaf) for leaf in (ids[0], ids[1]))
        of, shape = grammar.narrow_class, (len(narrow), len(grammar.lowest))
        # What fills up a table is class 0, which nothing reads.
        best = jnp.full(shape, -jnp.inf).at[:, of].max(narrow).at[:, grammar.wide].set(wide)
        mine = jnp.where(narrow == best[:, of], grammar.narrow, NO_ID)
        token = jnp.full(shape, NO_ID).at[:, of].min(mine)
        return best, token.at[:, grammar.wide].set(ids.wide_token)

    best, token = jax.vmap(of_slot)(grammar, ids)
    mass = best - ids.log_mass[..., None]
    return ClassStats(token, best, mass, mass, jnp.zeros_like(mass))


class Plan(struct.PyTreeNode):
    """The result of `plan`.

    Attributes:
        path: States before each cell and after the last.
        value: Score of the best path, or of all where one is drawn; NEVER: there is none.
        token: The token of each cell's edge, -1 where any will do.
        confidence: Its log probability, or that of its share.
    """

    path: Int[Array, "B W1"]
    value: Float[Array, " B"]
    token: Int[Array, "B W"]
    confidence: Float[Array, "B W"]


def plan(view: View, stats: ClassStats, read: Bool[Array, "B W"], draw: Draw | None = None) -> Plan:
    """The most probable path through the windows, or one drawn by the product of the cells' laws.

    Args:
        read: Cells that were read out; the others take any token that fits.
        draw: None: no slot draws.
    """

    def found_by(draw: Draw | None) -> Plan:
        return jax.vmap(_planned)(view, stats, read, draw)

    if draw is None:
        found = found_by(None)
    else:
        draws = jnp.any(draw.tempered & view.bound)
        found = jax.lax.cond(draws, lambda: found_by(draw), lambda: found_by(None))
    return _with_rewrites(view, read, found, lambda: stats)


def plan_of_ids(view: View, ids: IdStats, read: Bool[Array, "B W"]) -> Plan:
    """`plan` where no slot draws or has `Grammar.by_mass`, of what is said of ids."""
    grammar, kernels = view.grammar, view.grammar.kernels
    if kernels is None:
        return plan(view, classes_of_ids(grammar, ids), read)
    scores = kernels.label_scores(
        grammar, ids.narrow, ids.wide, ids.log_mass, read, floor=FLOOR, never=NEVER, free=FREE
    )
    path, value = paths.best_paths(view, view.kind, scores)
    given = grammar, path, *ids
    token, confidence = kernels.tokens_along(*given, never=NEVER, no_class=NO_CLASS)
    tail = path[:, :-1] == grammar.end[:, None]
    anything = (view.kind == SKIP) | tail | (token == NO_ID)
    found = Plan(path, value, jnp.where(anything, -1, token), confidence)
    return _with_rewrites(view, read, found, lambda: classes_of_ids(grammar, ids))


def plan_each(
    view: View,
    stats: ClassStats,
    read: Bool[Array, "B W"],
    before: Int[Array, "B W"],
    draw: Draw | None = None,
) -> Plan:
    """The token of each cell after given ones, as it is chosen one token at a time.

    Args:
        before: Tokens of the window; those from the cell itself on count for nothing.

    Returns:
        A plan whose path and value are those of single cells [B W 2] and [B W].
    """

    def one(view: Any, stats: Any, read: Any, before: Any, draw: Any) -> Plan:
        grammar, mine = view.grammar, view.kind != SKIP
        ids = jnp.clip(before, 0, grammar.class_of.shape[0] - 1)

        def walk(at: Array, cell: tuple[Array, Array]) -> tuple[Array, Array]:
            number, mine = cell
            return jnp.where(mine, grammar.delta[at, number].astype(jnp.int32), at), at

        _, at = jax.lax.scan(walk, view.at, (grammar.class_of[ids], mine))
        left = jnp.cumsum(mine[::-1], dtype=jnp.int32)[::-1]  # from each cell on
        later = left - mine.astype(jnp.int32)
        cells = View(
            grammar,
            at,
            view.bound,
            jnp.where(mine, HOLE, SKIP)[:, None],
            jnp.zeros_like(before)[:, None],
            view.room + later,
        )
        axes = View(None, 0, None, 0, 0, 0)  # type: ignore[arg-type]
        own, asked = jax.tree.map(lambda leaf: leaf[:, None], (stats, read))
        alone = None
        if draw is not None:
            every = jnp.broadcast_to(draw.tempered, read.shape)
            alone = Draw(every, draw.keys[:, None])
        found = jax.vmap(_planned, in_axes=(axes, 0, 0, 0))(cells, own, asked, alone)
        return found.replace(token=found.token[:, 0], confidence=found.confidence[:, 0])

    return jax.vmap(one)(view, stats, read, before, draw)


def _planned(view: Any, stats: Any, read: Any, draw: Any) -> Plan:
    """The plan of one slot, all leaves without its axis."""
    grammar = view.grammar
    mass = jnp.maximum(jnp.nan_to_num(stats.mass, nan=FLOOR), FLOOR)
    scores = _label_scores(grammar, jnp.where(read[:, None], mass, 0.0), draw)
    chained = view.at, view.room, view.kind, view.known, scores, draw
    path, value = paths.chain(grammar, *chained)
    token, confidence = _chosen(grammar, stats, path, paths.classes_along(grammar, path))
    anything = (view.kind == SKIP) | paths.is_tail(grammar, path) | (token == NO_ID)
    return Plan(path, value, jnp.where(anything, -1, token), confidence)


def _label_scores(
    grammar: Grammar, mass: Float[Array, "W C"], draw: Draw | None
) -> Float[Array, "W L"]:
    """The best class of each label of one slot, or all its classes together.

    Greedy scores are relative to the best of the cell, so that a cell of the tail, which scores 0,
    costs what the model's own choice does. A text that is the model's own then has the highest
    score whenever the grammar allows it. A drawn path sums over texts: its tail has probability 1.
    """
    nothing = jnp.full((len(mass), grammar.num_labels), NEVER)
    pairs = mass[:, grammar.pair_class]
    pairs = jnp.where((grammar.pair_label == NO_LABEL)[None], NEVER, pairs)
    best = nothing.at[:, grammar.pair_label].max(pairs)
    score = best - jnp.max(best, axis=1, keepdims=True)
    if draw is not None:
        shares = jnp.exp(pairs - best[:, grammar.pair_label])
        total = best + jnp.log(jnp.zeros_like(nothing).at[:, grammar.pair_label].add(shares))
        score = jnp.where(draw.tempered, total, score)
    score = jnp.where(best > NEVER, score, NEVER)
    return score.at[:, NO_LABEL].set(NEVER).at[:, FREE].set(0.0)


def _chosen(
    grammar: Any, stats: Any, path: Int[Array, " W1"], fits: Bool[Array, "W C"]
) -> tuple[Int[Array, " W"], Float[Array, " W"]]:
    """The best token of each cell of one slot among some classes, and its confidence."""
    rank = jnp.where(fits, jnp.maximum(stats.rank, NEVER), 2 * NEVER)
    top = jnp.max(rank, axis=1, keepdims=True)
    token = jnp.min(jnp.where(fits & (rank == top), stats.token, NO_ID), axis=1)
    chosen = fits & (stats.token == token[:, None])
    confidence = jnp.max(jnp.where(chosen, stats.confidence, -jnp.inf), axis=1)
    goes_on = grammar.delta[path[:-1]] != DEAD
    total = jax.nn.logsumexp(jnp.where(goes_on, stats.whole, -jnp.inf), axis=1)
    share = jnp.where(total > NEVER, jnp.minimum(confidence - total, 0.0), confidence)
    return token, jnp.where(grammar.by_mass, share, confidence)


def _with_rewrites(
    view: View, read: Bool[Array, "B W"], found: Plan, stats: Callable[[], ClassStats]
) -> Plan:
    """A plan in which filled cells that were read take their own token, where a text can end so.

    Each is judged with all others as they stand; `conform` sees to several together.
    """
    own = read & (view.kind == KNOWN) & view.bound[:, None]

    def one(view: Any, stats: Any, own: Any, found: Any) -> Plan:
        grammar, path = view.grammar, found.path
        onto = grammar.delta[path[:-1]].astype(jnp.int32)
        fits = jnp.take_along_axis(paths.may_end(view), onto, axis=1)
        fits &= (jnp.arange(fits.shape[1]) != NO_CLASS)[None]
        token, confidence = _chosen(grammar, stats, path, fits)
        takes = own & ~paths.is_tail(grammar, path) & (token != NO_ID)
        return found.replace(
            token=jnp.where(takes, token, found.token),
            confidence=jnp.where(takes, confidence, found.confidence),
        )

    return jax.lax.cond(
        jnp.any(own), lambda: jax.vmap(one)(view, stats(), own, found), lambda: found
    )
