"""A grammar over the window: the best path that can still end, and what was written off it.

A grammar is an automaton over classes of tokens, as arrays. State 0 is dead, and so is what fills
an array up to its bucket; class 0 is never taken. `plan` finds, of all paths of states that keep
every filled cell and from which the text can end in the room left, the most probable one. Cells
take tokens of its edges, and any of them may be written: the path shows that the text can go on.
`conform` is the engine's half: it puts right what a strategy wrote outside every such path.

Source: DINGO (arXiv 2505.23061) for the chain over states; the room, the tail and the engine's half
are ours.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from . import blocks
from .state import DecodeState

DEAD, NO_CLASS = 0, 0
NO_LABEL, FREE = 0, 1  # labels of no edge, and of the edge from the end to itself
UNREACHABLE = 1 << 30  # distance of a state from which no text ends

SKIP, KNOWN, HOLE, WRITTEN = range(4)  # what a cell is to the chain

NEVER = -1e9  # score of what cannot be
FLOOR = -80.0  # nats; a strategy may forbid the only token that fits, which then still has a score
_CHANGED = -1.0  # score of a written cell that takes another token


class Grammar(struct.PyTreeNode):
    """Automata of some slots: G states, D edges of a state, C classes, P pairs, V ids.

    Attributes:
        delta: Next state by class.
        target, label: Edges of a state to distinct states, and which set of classes leads along.
        pair_label, pair_class: Labels and their classes.
        distance: Fewest tokens from a state to one in which the text may end.
        class_of: Class of each id.
        wide: Classes with many ids.
        narrow, narrow_class: Ids of the other classes and their classes; also ids besides them,
            whose class is 0 here.
        narrow_from, whole_step, codes, wide_codes, wide_among: Of the readout (`IdClasses`).
        class_rows: Places of the narrow ids, class after class in columns.
        class_from: Where each class begins among the columns, and the end of all.
        label_rows, label_from: The same of labels, of whose classes there are numbers.
        num_states, num_edges, num_wide, num_narrow: How much of the tables is the grammar's own.
        lowest: The lowest id of a class.
        end: The state after a stop id.
        by_mass: Confidence is the token's share of all tokens that the grammar has there.
        num_labels: Labels, from the bucket.
        kernels: What does the work of this module's functions on the device it is on, by their
            results bit for bit (`kernels.grammar_path.PathKernels`); None: they do it.
    """

    delta: Int[Array, "B G C"]
    target: Int[Array, "B G D"]
    label: Int[Array, "B G D"]
    pair_label: Int[Array, "B P"]
    pair_class: Int[Array, "B P"]
    distance: Int[Array, "B G"]
    class_of: Int[Array, "B V"]
    wide: Int[Array, "B M"]
    narrow: Int[Array, "B N"]
    narrow_class: Int[Array, "B N"]
    narrow_from: Int[Array, "B X"]
    whole_step: Int[Array, "B X"]
    class_rows: Int[Array, "B 8 Q"]
    class_from: Int[Array, "B C1"]
    label_rows: Int[Array, "B 8 Y"]
    label_from: Int[Array, "B L1"]
    codes: Int[Array, "B V"]
    wide_codes: Int[Array, "B U"]
    wide_among: Int[Array, "B U8"]
    num_states: Int[Array, " B"]
    num_edges: Int[Array, " B"]
    num_wide: Int[Array, " B"]
    num_narrow: Int[Array, " B"]
    lowest: Int[Array, "B C"]
    end: Int[Array, " B"]
    by_mass: Bool[Array, " B"]
    num_labels: int = struct.field(pytree_node=False)
    kernels: Any = struct.field(pytree_node=False, default=None)


class View(struct.PyTreeNode):
    """The window of some slots as their grammars see it.

    Attributes:
        kind: SKIP, KNOWN, HOLE or WRITTEN.
        known: Class of the token in a cell that has one.
        room: Cells before the limit that are not in the window's live part yet.
    """

    grammar: Grammar
    at: Int[Array, " B"]
    bound: Bool[Array, " B"]
    kind: Int[Array, "B W"]
    known: Int[Array, "B W"]
    room: Int[Array, " B"]


class Constraint(struct.PyTreeNode):
    """The grammar of each slot.

    Attributes:
        at: The automaton's state at the window's first cell.
        bound: Slots with a grammar; of the others nothing counts.
    """

    grammar: Grammar
    at: Int[Array, " B"]
    bound: Bool[Array, " B"]


def view(state: DecodeState) -> View:
    """The window as it stands, of a state whose `constraint` is not None."""
    constraint: Constraint = state.constraint
    buffer = state.buffer
    B, K, S = buffer.tokens.shape
    live = blocks.live_cells(state)
    first, limit = buffer.prompt_len[:, None, None], buffer.limit[:, None, None]
    mine = live & (buffer.positions >= first) & (buffer.positions < limit)
    kind = jnp.where(mine, jnp.where(buffer.filled, KNOWN, HOLE), SKIP).reshape(B, K * S)
    tokens = jnp.clip(buffer.tokens.reshape(B, K * S), 0, constraint.grammar.class_of.shape[1] - 1)
    known = jnp.take_along_axis(constraint.grammar.class_of, tokens, axis=1).astype(jnp.int32)
    behind = buffer.start + jnp.sum(live, axis=(1, 2), dtype=jnp.int32)
    room = jnp.maximum(buffer.limit - behind, 0)
    return View(constraint.grammar, constraint.at, constraint.bound, kind, known, room)


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
        mine = jnp.where(narrow == best[:, of], grammar.narrow, _NO_ID)
        token = jnp.full(shape, _NO_ID).at[:, of].min(mine)
        return best, token.at[:, grammar.wide].set(ids.wide_token)

    best, token = jax.vmap(of_slot)(grammar, ids)
    mass = best - ids.log_mass[..., None]
    return ClassStats(token, best, mass, mass, jnp.zeros_like(mass))


class Draw(struct.PyTreeNode):
    """Random draws of paths: which slots draw, and a key for each cell."""

    tempered: Bool[Array, " B"]
    keys: PRNGKeyArray


def _chain(
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
    return jnp.concatenate([at[None], _followed(onto, at)]), first[at]


def _followed(onto: Int[Array, "W G"], at: Array) -> Int[Array, " W"]:
    """The states after each cell, of maps from state to state.

    Maps are composed in a few gathers; a second scan would be several launches for each cell.
    """
    maps = jax.lax.associative_scan(lambda a, b: jnp.take_along_axis(b, a, axis=-1), onto)
    return maps[:, at]


# Cells in one pass of the chain's loop: 128 cells of 256 states took 0.29 ms on an H200, by one
# cell a pass 1.62 (benchmarks/results/grammar_h200.json).
_UNROLL = 8
_PATH_STREAM = 0x9A7  # of paths; tokens are drawn with the cell's key itself


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

    def best() -> Plan:
        return jax.vmap(lambda *slot: _planned(*slot, draw=None))(view, stats, read)

    if draw is None:
        found = best()
    else:
        draws = jnp.any(draw.tempered & view.bound)
        found = jax.lax.cond(draws, lambda: jax.vmap(_planned)(view, stats, read, draw), best)
    return _with_rewrites(view, read, found, lambda: stats)


def plan_of_ids(view: View, ids: IdStats, read: Bool[Array, "B W"]) -> Plan:
    """`plan` where no slot draws or has `Grammar.by_mass`, of what is said of ids."""
    grammar, kernels = view.grammar, view.grammar.kernels
    if kernels is None:
        return plan(view, classes_of_ids(grammar, ids), read)
    scores = kernels.label_scores(
        grammar, ids.narrow, ids.wide, ids.log_mass, read, floor=FLOOR, never=NEVER, free=FREE
    )
    path, value = _paths(view, view.kind, scores)
    given = grammar, path, *ids
    token, confidence = kernels.tokens_along(*given, never=NEVER, no_class=NO_CLASS)
    tail = path[:, :-1] == grammar.end[:, None]
    anything = (view.kind == SKIP) | tail | (token == _NO_ID)
    found = Plan(path, value, jnp.where(anything, -1, token), confidence)
    return _with_rewrites(view, read, found, lambda: classes_of_ids(grammar, ids))


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
        fits = jnp.take_along_axis(_may_end(view), onto, axis=1)
        fits &= (jnp.arange(fits.shape[1]) != NO_CLASS)[None]
        token, confidence = _chosen(grammar, stats, path, fits)
        takes = own & ~_is_tail(grammar, path) & (token != _NO_ID)
        return found.replace(
            token=jnp.where(takes, token, found.token),
            confidence=jnp.where(takes, confidence, found.confidence),
        )

    return jax.lax.cond(
        jnp.any(own), lambda: jax.vmap(one)(view, stats(), own, found), lambda: found
    )


def _may_end(view: Any) -> Bool[Array, "W G"]:
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


def _paths(
    view: View, kind: Int[Array, "B W"], score: Float[Array, "B W L"]
) -> tuple[Int[Array, "B W1"], Float[Array, " B"]]:
    """The best path of each slot, and its score."""
    chained = view.at, view.room, kind, view.known, score
    if view.grammar.kernels is None:
        return jax.vmap(_chain)(view.grammar, *chained)
    kinds = {"skip": SKIP, "is_known": KNOWN, "written": WRITTEN}
    return view.grammar.kernels.best_path(view.grammar, *chained, never=NEVER, **kinds)


def _planned(view: Any, stats: Any, read: Any, draw: Any) -> Plan:
    """The plan of one slot, all leaves without its axis."""
    grammar = view.grammar
    mass = jnp.maximum(jnp.nan_to_num(stats.mass, nan=FLOOR), FLOOR)
    scores = _label_scores(grammar, jnp.where(read[:, None], mass, 0.0), draw)
    chained = view.at, view.room, view.kind, view.known, scores, draw
    path, value = _chain(grammar, *chained)
    token, confidence = _chosen(grammar, stats, path, _classes_along(grammar, path))
    anything = (view.kind == SKIP) | _is_tail(grammar, path) | (token == _NO_ID)
    return Plan(path, value, jnp.where(anything, -1, token), confidence)


def _chosen(
    grammar: Any, stats: Any, path: Int[Array, " W1"], fits: Bool[Array, "W C"]
) -> tuple[Int[Array, " W"], Float[Array, " W"]]:
    """The best token of each cell of one slot among some classes, and its confidence."""
    rank = jnp.where(fits, jnp.maximum(stats.rank, NEVER), 2 * NEVER)
    top = jnp.max(rank, axis=1, keepdims=True)
    token = jnp.min(jnp.where(fits & (rank == top), stats.token, _NO_ID), axis=1)
    chosen = fits & (stats.token == token[:, None])
    confidence = jnp.max(jnp.where(chosen, stats.confidence, -jnp.inf), axis=1)
    goes_on = grammar.delta[path[:-1]] != DEAD
    total = jax.nn.logsumexp(jnp.where(goes_on, stats.whole, -jnp.inf), axis=1)
    share = jnp.where(total > NEVER, jnp.minimum(confidence - total, 0.0), confidence)
    return token, jnp.where(grammar.by_mass, share, confidence)


def plan_each(
    view: View,
    stats: ClassStats,
    read: Bool[Array, "B W"],
    behind: Int[Array, "B W"],
    draw: Draw | None = None,
) -> Plan:
    """The token of each cell after given ones, as it is chosen one token at a time.

    Args:
        behind: Tokens of the window; what they are from the cell itself on counts for nothing.

    Returns:
        A plan whose path and value are those of single cells [B W 2] and [B W].
    """

    def one(view: Any, stats: Any, read: Any, behind: Any, draw: Any) -> Plan:
        grammar, mine = view.grammar, view.kind != SKIP
        ids = jnp.clip(behind, 0, grammar.class_of.shape[0] - 1)

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
            jnp.zeros_like(behind)[:, None],
            view.room + later,
        )
        axes = View(None, 0, None, 0, 0, 0)  # type: ignore[arg-type]
        own, asked = jax.tree.map(lambda leaf: leaf[:, None], (stats, read))
        alone = None
        if draw is not None:
            every = jnp.broadcast_to(draw.tempered, read.shape)
            alone = Draw(every, draw.keys[:, None])
        in_axes = (axes, 0, 0, None if alone is None else 0)
        plan = jax.vmap(_planned, in_axes=in_axes)
        found = plan(cells, own, asked, alone)
        return found.replace(token=found.token[:, 0], confidence=found.confidence[:, 0])

    if draw is None:
        return jax.vmap(lambda *slot: one(*slot, draw=None))(view, stats, read, behind)
    return jax.vmap(one)(view, stats, read, behind, draw)


_NO_ID = jnp.iinfo(jnp.int32).max


def _classes_along(grammar: Grammar, path: Int[Array, " W1"]) -> Bool[Array, "W C"]:
    """Classes that lead along each step of a path."""
    leads = grammar.delta[path[:-1]].astype(jnp.int32) == path[1:, None]
    return leads & (jnp.arange(leads.shape[1]) != NO_CLASS)[None]


def _is_tail(grammar: Grammar, path: Int[Array, " W1"]) -> Bool[Array, " W"]:
    """Cells after a stop id."""
    return path[:-1] == grammar.end


def walk(state: DecodeState) -> Int[Array, "B W1"]:
    """The automaton's states along the filled cells at the window's left; nothing after them."""
    seen = view(state)
    if seen.grammar.kernels is not None:
        given = seen.grammar, seen.at, seen.kind, seen.known
        return seen.grammar.kernels.walk(*given, skip=SKIP, hole=HOLE)
    count = seen.grammar.delta.shape[1]
    onto = jax.vmap(lambda delta, known: delta[:, known].T)(seen.grammar.delta, seen.known)
    stays = (seen.kind == SKIP)[..., None]
    onto = jnp.where(stays, jnp.arange(count, dtype=jnp.int32), onto.astype(jnp.int32))
    return jnp.concatenate([seen.at[:, None], jax.vmap(_followed)(onto, seen.at)], axis=1)


def conform(before: DecodeState, stepped: DecodeState) -> tuple[DecodeState, Int[Array, "B W1"]]:
    """The step with as few written cells as need be on another token; also the path through it.

    Cells that were filled and are as they were stay. Every other filled cell takes the token that
    it had, or the lowest of its edge, where its own leads nowhere.
    """
    seen = view(stepped)
    buffer = stepped.buffer
    same = before.buffer.filled & (before.buffer.tokens == buffer.tokens)
    kind = jnp.where((seen.kind == KNOWN) & ~same.reshape(seen.kind.shape), WRITTEN, seen.kind)

    grammar = seen.grammar
    cost = jnp.where(kind == WRITTEN, _CHANGED, 0.0)[..., None]
    labels = jnp.arange(grammar.num_labels)
    path, _ = _paths(seen, kind, jnp.where(labels == NO_LABEL, NEVER, cost))

    def one(view: View, kind: Array, path: Array, had: Array) -> Array:
        grammar = view.grammar
        fits = _classes_along(grammar, path)
        lowest = jnp.min(jnp.where(fits, grammar.lowest[None], _NO_ID), axis=1)
        old = grammar.class_of[jnp.clip(had, 0, len(grammar.class_of) - 1)].astype(jnp.int32)
        keeps = (had >= 0) & jnp.take_along_axis(fits, old[:, None], axis=1)[:, 0]
        lowest = jnp.where(keeps, had, lowest)
        off = ~jnp.take_along_axis(fits, view.known[:, None], axis=1)[:, 0]
        off &= (kind == WRITTEN) & ~_is_tail(grammar, path) & (lowest != _NO_ID) & view.bound
        return jnp.where(off, lowest, -1)

    had = jnp.where(before.buffer.filled, before.buffer.tokens, -1).reshape(kind.shape)
    put = jax.vmap(one)(seen, kind, path, had)
    put = put.reshape(buffer.tokens.shape)
    tokens = jnp.where(put >= 0, put, buffer.tokens)
    return stepped.replace(buffer=buffer.replace(tokens=tokens)), path
