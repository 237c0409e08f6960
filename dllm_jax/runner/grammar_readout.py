"""The readout of slots with a grammar: statistics by class, and the tokens to take.

Rows of slots with a grammar are read twice: as all rows are, and by the classes of the slot's
grammar, over which `grammar_plan.plan` finds the text. On an NVIDIA GPU one pass over the head does
both where no token is drawn.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.kernels.token_readout import (
    IdClasses,
    choose_with_classes,
    class_readout,
    most_rows,
)
from dllm_jax.models.head import Head
from dllm_jax.runner.cells import Cells
from dllm_jax.runner.chunks import in_chunks
from dllm_jax.runner.reader import Reader, ids_of
from dllm_jax.runner.readout import of_rows, read_rows, read_stats
from dllm_jax.strategies.core import grammar_plan
from dllm_jax.strategies.core.constraint import HOLE, KNOWN, NO_CLASS, Grammar, View
from dllm_jax.strategies.core.draw import Shard, gumbel, log_law, settled
from dllm_jax.strategies.core.grammar_plan import ClassStats, IdStats, Plan
from dllm_jax.strategies.core.protocol import Readout, TokenStats
from dllm_jax.strategies.core.state import NO_TOKEN, by_row

ROWS_OF_LOGITS = 128  # by classes at once: 78 MB of float32 logits at 152k ids


def read_planned(
    reader: Reader, rows: Float[Array, "R D"], ask: Readout, cells: Cells, seen: View
) -> TokenStats:
    """Statistics [B K S] in which slots with a grammar have the tokens of their plan.

    Args:
        rows: Of `cells`, which hold those of `ask.where`.
        ask: With a value a cell.
    """
    if ask.fixed is not None:
        is_free = (seen.kind == KNOWN) & ~ask.fixed.reshape(seen.kind.shape)
        seen = seen.replace(kind=jnp.where(is_free, HOLE, seen.kind))
    if _is_one_pass(reader, rows, ask):
        stats, plan, likeliest = _in_one_pass(reader, rows, ask, cells, seen)
        stats = cells.scatter(stats)
    else:
        stats = cells.scatter(read_rows(reader, rows, of_rows(ask, cells)))
        plan, likeliest = _plan_cells(reader, rows, ask, cells, seen), None
    bound = seen.bound[:, None, None]
    if ask.fixed is not None and ask.num_top:
        if likeliest is None:
            likeliest = _plan_cells(reader, rows, ask.replace(keys=None), cells, seen)
        best = likeliest.token.reshape(cells.shape)
        takes = bound & (best >= 0) & (stats.token != NO_TOKEN)
        top = jnp.where(takes, best, stats.top_ids[..., 0])
        stats = stats.replace(top_ids=stats.top_ids.at[..., 0].set(top))
    token, score = (leaf.reshape(cells.shape) for leaf in (plan.token, plan.confidence))
    return _with_plan(stats, token, score, bound, seen.grammar.by_mass[:, None, None])


def _plan_cells(
    reader: Reader, rows: Float[Array, "R D"], ask: Readout, cells: Cells, seen: View
) -> Plan:
    """The plan of windows; arguments as in `read_planned`."""
    B, W = seen.kind.shape
    classes = cells.widen(read_classes(reader, rows, of_rows(ask, cells), seen))
    wanted, draw = _wanted(ask, cells), None
    if ask.keys is not None:
        assert ask.sampling is not None
        draw = grammar_plan.Draw(ask.sampling.temperature > 0, ask.keys.reshape(B, W))
    if ask.behind is None:
        return grammar_plan.plan(seen, classes, wanted, draw)
    return grammar_plan.plan_each(seen, classes, wanted, ask.behind.reshape(B, W), draw)


def read_first(
    reader: Reader, rows: Float[Array, "B D"], ask: Readout, seen: View, stats: TokenStats
) -> TokenStats:
    """Statistics [B] with the tokens that the first cells of windows take in their grammars.

    Args:
        rows: Those that speak about the first cells.
        ask: Of the rows.
        stats: What `read_stats` says of them.
    """
    B, W = seen.kind.shape
    seen = seen.replace(kind=seen.kind.at[:, 0].set(HOLE))
    first = jnp.broadcast_to((jnp.arange(W) == 0)[None], (B, W))
    keys = None if ask.keys is None else jnp.broadcast_to(ask.keys[:, None], (B, W))
    of_window = ask.replace(where=first[:, None], keys=None if keys is None else keys[:, None])
    plan = _plan_cells(reader, rows, of_window, Cells((B, 1, W), 0, 1), seen)
    token, score = plan.token[:, 0], plan.confidence[:, 0]
    return _with_plan(stats, token, score, seen.bound, seen.grammar.by_mass)


def _with_plan(
    stats: TokenStats, token: Array, score: Array, bound: Array, by_mass: Array
) -> TokenStats:
    """Statistics with the plan's tokens, where it has one that the readout does not."""
    takes = bound & (token >= 0) & ((token != stats.token) | by_mass) & (stats.token != NO_TOKEN)
    return stats.replace(
        token=jnp.where(takes, token, stats.token),
        confidence=jnp.where(takes, jnp.exp(score), stats.confidence),
    )


def _wanted(ask: Readout, cells: Cells) -> Bool[Array, "B W"]:
    """Cells that are read out and may change."""
    where = jnp.broadcast_to(jnp.asarray(ask.where), cells.shape)
    where = where if ask.fixed is None else where & ~ask.fixed
    return where.reshape(-1, cells.width)


def _is_one_pass(reader: Reader, rows: Array, ask: Readout) -> bool:
    """Whether one pass over the head reads statistics and grammars of these rows."""
    if ask.soft or reader.shard is not None:
        return False
    if any(each is not None for each in (ask.behind, ask.guide, ask.ids)):
        return False
    return reads_ids(reader.unembed)


def _in_one_pass(
    reader: Reader, rows: Float[Array, "R D"], ask: Readout, cells: Cells, seen: View
) -> tuple[TokenStats, Plan, Plan]:
    """Statistics of the rows, the plan, and the plan of tokens that are not drawn."""
    own, sampling = of_rows(ask, cells), ask.sampling
    assert sampling is not None

    def alike() -> tuple[TokenStats, Plan]:
        stats, ids = read_ids(reader, rows, own, seen.grammar)
        return stats, grammar_plan.plan_of_ids(seen, cells.widen(ids), _wanted(ask, cells))

    # A slot's path must not depend on its neighbours: each has its own way in both.
    plain = sampling.is_plain
    mine = plain & ~(seen.bound & seen.grammar.by_mass)

    def mixed() -> tuple[TokenStats, Plan, Plan]:
        stats, likeliest = alike()
        by_logits = reader._replace(unembed=lambda rows: reader.unembed(rows))  # not by a kernel
        drawn = read_stats(by_logits, rows, own)
        stats = by_row(jnp.repeat(plain, cells.size), stats, drawn)
        others = seen.replace(bound=seen.bound & ~mine)
        plan = by_row(mine, likeliest, _plan_cells(reader, rows, ask, cells, others))
        return stats, plan, likeliest

    def one() -> tuple[TokenStats, Plan, Plan]:
        stats, plan = alike()
        return stats, plan, plan

    return jax.lax.cond(jnp.all(mine), one, mixed)


def reads_ids(unembed: Any) -> bool:
    """Whether `read_ids` is what reads rows here: a GPU would read the head again for each slot."""
    return isinstance(unembed, Head) and jax.default_backend() == "gpu"


def read_ids(
    reader: Reader, hidden: Float[Array, "R D"], ask: Readout, grammar: Grammar
) -> tuple[TokenStats, IdStats]:
    """Likeliest tokens, leading axis R, and what the rows say of the ids of their slot's grammar.

    Both come from one pass over the head, as `read_stats` of greedy rows.
    """
    head = reader.unembed
    assert isinstance(head, Head)
    never = reader.forbidden(np.arange(len(head.weights), dtype=np.int32))
    classes = IdClasses(**{name: getattr(grammar, name) for name in IdClasses._fields})
    B = len(classes.codes)
    T = len(hidden) // B

    def of_slots(rows: Any) -> Any:
        flat, classes = rows
        hidden, penalty = jax.tree.map(as_rows, flat)
        read, ids = class_readout(
            hidden,
            head.weights,
            never,
            classes,
            scale=head.scale,
            cap=head.cap,
            penalty=penalty,
            num_top=ask.num_top,
        )
        return by_slot((settled(TokenStats(**read._asdict())), IdStats(*ids)))

    def by_slot(rows: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape(len(leaf) // T, T, *leaf.shape[1:]), rows)

    def as_rows(leaf: Array) -> Array:
        return leaf.reshape(len(leaf) * T, *leaf.shape[2:])

    at_once = most_rows(head.weights)
    if choose_with_classes(hidden[:at_once], head.weights, ask.num_top, T) == "xla":
        at_once = ROWS_OF_LOGITS
    slots = max(1, at_once // T)
    stats, ids = in_chunks(of_slots, (by_slot((hidden, ask.penalty)), classes), slots, slots)
    return jax.tree.map(as_rows, stats), ids


def read_classes(
    reader: Reader, hidden: Float[Array, "R D"], ask: Readout, view: View
) -> ClassStats:
    """Statistics of each row by the classes of its slot's grammar; ties go to the lowest id.

    Args:
        hidden: Rows of slot after slot.
        ask: Of rows. Top-k and top-p do not apply.
        view: Slots without a grammar are not read.
    """
    B, C = view.grammar.lowest.shape
    T, shard, sampling = len(hidden) // B, reader.shard, ask.sampling
    assert sampling is not None

    def of_slot(leaf: Array) -> Array:
        return leaf.reshape(B, T, *leaf.shape[1:])

    def one(rows: tuple[Any, ...]) -> ClassStats:
        (hidden, away, penalty, keys), grammar, temperature, _ = rows
        logits = reader.logits(hidden, away, scale)
        ids = ids_of(logits, shard)
        own = _own_ids(grammar, ids, shard)
        logits = reader.restricted(logits, penalty)
        raw = log_law(logits, shard)

        def whole(law: Array) -> Array:
            nothing = jnp.zeros((T, C))
            return jax.lax.cond(
                grammar.by_mass, lambda: _class_masses(own, law, shard), lambda: nothing
            )

        def likeliest() -> ClassStats:
            best, token = _class_maxima(own, raw, shard)
            return ClassStats(token, best, best, best, whole(raw))

        def drawn() -> ClassStats:
            law = log_law(logits / temperature, shard)
            rank, token = _class_maxima(own, law + gumbel(keys, law, shard), shard)
            judged = raw if ask.confidence == "raw" else law
            place = token - ids[0]
            there = jnp.clip(place, 0, len(ids) - 1)
            said = jnp.take_along_axis(judged, there, axis=1)
            if shard is not None:
                is_mine = (place >= 0) & (place < len(ids))
                said = shard.total(jnp.where(is_mine, said, 0.0))
            return ClassStats(token, rank, _class_masses(own, law, shard), said, whole(judged))

        return likeliest() if keys is None else jax.lax.cond(temperature > 0, drawn, likeliest)

    def none(_: Any) -> ClassStats:
        nothing = jnp.zeros((T, C))
        return ClassStats(jnp.zeros((T, C), jnp.int32), nothing, nothing, nothing, nothing)

    away, scale = (None, 0.0) if ask.guide is None else ask.guide
    rows = jax.tree.map(of_slot, (hidden, away, ask.penalty))
    rows = *rows, None if ask.keys is None else ask.keys.reshape(B, T)
    given = rows, view.grammar, sampling.temperature, view.bound
    return jax.lax.map(lambda rows: jax.lax.cond(rows[-1], one, none, rows), given)


class _OwnIds(NamedTuple):
    """A slot's grammar as the ids have it that are read here: all, or those of a device."""

    ids: Int[Array, " V"]
    class_of: Int[Array, " V"]
    wide: Int[Array, " M"]
    narrow: Int[Array, " N"]  # as places in `ids`
    narrow_class: Int[Array, " N"]  # NO_CLASS for the ids of other devices
    num_classes: int
    num_ids: int  # of all devices


def _own_ids(grammar: Grammar, ids: Int[Array, " V"], shard: Shard | None) -> _OwnIds:
    class_of, narrow_class, place = grammar.class_of, grammar.narrow_class, grammar.narrow - ids[0]
    num_ids = len(class_of)
    if shard is not None:
        behind = len(ids) * jax.lax.axis_size(shard.axis) - num_ids
        class_of = jnp.pad(class_of, (0, behind), constant_values=NO_CLASS)
        class_of = jax.lax.dynamic_slice_in_dim(class_of, ids[0], len(ids))
        is_mine = (place >= 0) & (place < len(ids))
        narrow_class = jnp.where(is_mine, narrow_class, NO_CLASS)
        place = jnp.clip(place, 0, len(ids) - 1)
    return _OwnIds(ids, class_of, grammar.wide, place, narrow_class, len(grammar.lowest), num_ids)


def _class_maxima(
    own: _OwnIds, score: Float[Array, "T V"], shard: Shard | None
) -> tuple[Float[Array, "T C"], Int[Array, "T C"]]:
    """The best score of each class of one slot, and its id."""
    shape = len(score), own.num_classes
    of = own.narrow_class
    theirs = jnp.where((of == NO_CLASS)[None], -jnp.inf, score[:, own.narrow])
    best = jnp.full(shape, -jnp.inf).at[:, of].max(theirs)
    is_best = (theirs == best[:, of]) & (of != NO_CLASS)[None]
    ids = jnp.where(is_best, own.ids[own.narrow][None], own.num_ids)
    token = jnp.full(shape, own.num_ids).at[:, of].min(ids)

    def wide(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        number = own.wide[i]
        theirs = jnp.where((own.class_of == number)[None], score, -jnp.inf)
        top = jnp.argmax(theirs, axis=1)
        value = jnp.take_along_axis(theirs, top[:, None], axis=1)[:, 0]
        return found[0].at[:, number].set(value), found[1].at[:, number].set(own.ids[top])

    best, token = jax.lax.fori_loop(0, jnp.sum(own.wide != NO_CLASS), wide, (best, token))
    if shard is None:
        return best, token
    # Ids are below 2^24; of equals the first device, whose ids are lower.
    both = jnp.concatenate([best, token.astype(jnp.float32)], axis=1)
    bests, tokens = jnp.split(shard.of_all(both), 2, axis=-1)
    first = jnp.argmax(bests, axis=0)[None]
    best, token = (jnp.take_along_axis(every, first, axis=0)[0] for every in (bests, tokens))
    return best, token.astype(jnp.int32)


def _class_masses(
    own: _OwnIds, law: Float[Array, "T V"], shard: Shard | None
) -> Float[Array, "T C"]:
    """The log probability of each class of one slot."""
    of = own.narrow_class
    prob = jnp.exp(law)
    theirs = jnp.where((of == NO_CLASS)[None], 0.0, prob[:, own.narrow])
    mass = jnp.zeros((len(law), own.num_classes)).at[:, of].add(theirs)

    def wide(i: Array, mass: Array) -> Array:
        number = own.wide[i]
        theirs = jnp.where((own.class_of == number)[None], prob, 0.0)
        return mass.at[:, number].set(jnp.sum(theirs, axis=1))

    mass = jax.lax.fori_loop(0, jnp.sum(own.wide != NO_CLASS), wide, mass)
    return jnp.log(mass if shard is None else shard.total(mass))
