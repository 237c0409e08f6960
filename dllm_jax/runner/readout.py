"""From hidden rows to token statistics, streamed: never a whole [rows, vocabulary] array.

On an NVIDIA GPU, of a network that says what its head is, a kernel reads likeliest tokens off the
product while it is made (`dllm_jax.kernels.token_readout`); all else is read out in chunks of rows.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dllm_jax.kernels.token_readout import (
    MOSAIC_ROWS,
    TRITON_ROWS,
    IdClasses,
    choose,
    choose_with_classes,
    class_readout,
    token_readout,
)
from dllm_jax.models.head import Head
from dllm_jax.strategies.core.constraint import NO_CLASS, ClassStats, Grammar, IdStats, View
from dllm_jax.strategies.core.protocol import TokenStats
from dllm_jax.strategies.core.sampling import (
    Shard,
    gumbel,
    log_law,
    normaliser,
    settled,
    token_stats,
)
from dllm_jax.strategies.core.state import Sampling

ROWS_AT_ONCE = 512  # float32 logits of one chunk: 311 MB at 152k ids
ROWS_DRAWN = 128  # of them at once: cuts and noise take several times the memory of the logits
FEW_ROWS = 64  # read in one chunk; more rows take at least two


def in_chunks(
    fn: Callable[[Any], Any], rows: Any, at_once: int = ROWS_AT_ONCE, whole: int = FEW_ROWS
) -> Any:
    """`fn` over the leading axis of `rows`, `at_once` at a time and at most half of them.

    Args:
        whole: So many rows are one chunk.
    """
    total = jax.tree.leaves(rows)[0].shape[0]
    if total <= whole:
        return fn(rows)
    chunks = max(2, -(-total // at_once))
    size = -(-total // chunks)

    # Places, not slices: XLA copies a slice by itself, and records no loop around such a copy.
    def places(chunk: Array) -> Array:
        return chunk * size + jnp.arange(size)

    def one(chunk: Array) -> Any:
        # Behind the last row is that one again: any row will do, its result is dropped.
        at = jnp.minimum(places(chunk), total - 1)
        return fn(jax.tree.map(lambda leaf: leaf[at], rows))

    def put(chunk: Array, found: Any) -> Any:
        how = {"mode": "drop", "unique_indices": True}
        at = places(chunk)
        return jax.tree.map(lambda old, new: old.at[at].set(new, **how), found, one(chunk))

    def zeros(like: Any) -> Array:
        whole = jnp.zeros((total, *like.shape[1:]), like.dtype)
        kind = getattr(like, "manual_axis_type", None)  # since jax 0.11
        axes = kind.varying if kind else getattr(like, "vma", None)
        return jax.lax.pcast(whole, tuple(axes), to="varying") if axes else whole

    like = jax.eval_shape(one, jax.ShapeDtypeStruct((), jnp.int32))
    return jax.lax.fori_loop(0, chunks, put, jax.tree.map(zeros, like))


def read_stats(
    unembed: Callable[[Array], Array],
    hidden: Float[Array, "R D"],
    sampling: Sampling,
    keys: PRNGKeyArray | None,
    *,
    forbidden: Callable[[Any], Any],
    penalty: tuple[Int[Array, " R"], Float[Array, " R"]] | None = None,
    confidence: Literal["drawn", "raw"] = "drawn",
    num_top: int = 0,
    guide: tuple[Float[Array, "R D"], float] | None = None,
    shard: Shard | None = None,
    one_rounding: bool = False,
) -> TokenStats:
    """Statistics of each row under its sampling, leading axis R.

    Args:
        unembed: Hidden rows to float32 logits; of a `Head` a kernel may read them.
        sampling: One value a row, or a slot; a slot's rows are then consecutive.
        keys: One a row, None where every row is greedy.
        forbidden: Ids, of NumPy or of JAX, to a mask of those never drawn.
        penalty: An id a row and what its logit loses.
        guide: Rows to move away from, and how far: see `ForwardOutput.predict`.
        shard: The head is a device's part, among several devices.
        one_rounding: A row's bits do not depend on the number of slots.
    """
    away, scale = (None, 0.0) if guide is None else guide
    of_slot = len(hidden) // len(sampling.temperature)

    def one(rows: tuple[Any, ...]) -> TokenStats:
        hidden, sampling, keys, penalty, away = rows
        logits = unembed(hidden)
        if away is not None:
            others = unembed(away)
            logits = others + (1.0 + scale) * (logits - others)
        return in_chunks(drawn, (logits, sampling, keys, penalty), ROWS_DRAWN, ROWS_DRAWN)

    def drawn(rows: tuple[Any, ...]) -> TokenStats:
        logits, sampling, keys, penalty = rows

        def restrict(logits: Array) -> Array:
            ids = ids_of(logits, shard)
            logits = jnp.where(forbidden(ids), -jnp.inf, logits)
            if penalty is None:
                return logits
            return logits - jnp.where(ids[None] == penalty[0][:, None], penalty[1][:, None], 0.0)

        return token_stats(
            logits,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            keys=keys,
            confidence=confidence,
            num_top=num_top,
            restrict=restrict,
            shard=shard,
        )

    def in_rows() -> TokenStats:
        # Build operands inside the branch: the inputs of a `cond` cost launches.
        each = jax.tree.map(lambda leaf: jnp.repeat(leaf, of_slot), sampling)
        # Every chunk reads the head again, and a device's part of it has fewer logits a row.
        whole = FEW_ROWS * (1 if shard is None else jax.lax.axis_size(shard.axis))
        rows = hidden, each, keys, penalty, away
        if one_rounding:  # a slot at a time
            return in_chunks(one, rows, of_slot, of_slot)
        return in_chunks(one, rows, whole=whole)

    # The kernels tell a whole vocabulary.
    head = unembed if isinstance(unembed, Head) and guide is None and shard is None else None
    if head is None:
        return in_rows()
    at_once = MOSAIC_ROWS  # the most rows of one kernel call
    implementation = choose(hidden[:at_once], head.weights, num_top)
    if one_rounding:
        implementation = "mosaic"
    elif implementation == "xla":
        at_once = TRITON_ROWS
        implementation = choose(hidden[:at_once], head.weights, num_top)
    if implementation == "xla":
        return in_rows()
    # From NumPy ids the mask is a constant of the program.
    never = forbidden(np.arange(len(head.weights), dtype=np.int32))

    def in_kernel(rows: tuple[Array, tuple[Array, Array] | None]) -> TokenStats:
        hidden, penalty = rows
        read = token_readout(
            hidden,
            head.weights,
            never,
            scale=head.scale,
            cap=head.cap,
            penalty=penalty,
            num_top=num_top,
            implementation=implementation,
        )
        return settled(TokenStats(**read._asdict()))

    # Top-k and the nucleus need all logits, and noise is cheaper outside the kernel. A row's path
    # must not depend on its neighbours: rows that are drawn must not change its rounding.
    plain = is_plain(sampling)

    def all_plain() -> TokenStats:
        return in_chunks(in_kernel, (hidden, penalty), at_once, at_once)

    def some_drawn() -> TokenStats:
        drawn = in_rows()
        plain_rows = jnp.repeat(plain, of_slot)
        return jax.lax.cond(
            jnp.any(plain),
            lambda: by_row(plain_rows, all_plain(), drawn),
            lambda: drawn,
        )

    return jax.lax.cond(jnp.all(plain), all_plain, some_drawn)


def is_plain(sampling: Sampling) -> Array:
    """Slots that a kernel reads: those that take likeliest tokens of whole laws."""
    return (sampling.temperature <= 0) & (sampling.top_k <= 0) & (sampling.top_p >= 1.0)


def reads_ids(unembed: Any, hidden: Array, num_top: int) -> bool:
    """Whether `read_ids` is what reads these rows here."""
    if not isinstance(unembed, Head):
        return False
    return choose_with_classes(hidden, unembed.weights, num_top, len(hidden)) != "xla"


def read_ids(
    head: Head,
    hidden: Float[Array, "R D"],
    grammar: Grammar,
    *,
    forbidden: Callable[[Any], Any],
    penalty: tuple[Int[Array, " R"], Float[Array, " R"]] | None = None,
    num_top: int = 0,
) -> tuple[TokenStats, IdStats]:
    """Likeliest tokens, leading axis R, and what the rows say of the ids of their slot's grammar.

    Both come from one pass over the head, as `read_stats` of greedy rows.
    """
    never = forbidden(np.arange(len(head.weights), dtype=np.int32))
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
            num_top=num_top,
        )
        return by_slot((settled(TokenStats(**read._asdict())), IdStats(*ids)))

    def by_slot(rows: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape(len(leaf) // T, T, *leaf.shape[1:]), rows)

    def as_rows(leaf: Array) -> Array:
        return leaf.reshape(len(leaf) * T, *leaf.shape[2:])

    at_once = TRITON_ROWS
    if choose_with_classes(hidden[:MOSAIC_ROWS], head.weights, num_top, T) == "mosaic":
        at_once = MOSAIC_ROWS
    slots = max(1, at_once // T)
    stats, ids = in_chunks(of_slots, (by_slot((hidden, penalty)), classes), slots, slots)
    return jax.tree.map(as_rows, stats), ids


def ids_of(logits: Array, shard: Shard | None) -> Int[Array, " V"]:
    """The ids that logits are of."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    return ids if shard is None else shard.first(logits) + ids


def read_classes(
    unembed: Callable[[Array], Array],
    hidden: Float[Array, "R D"],
    view: View,
    sampling: Sampling,
    keys: PRNGKeyArray | None,
    *,
    forbidden: Callable[[Any], Any],
    penalty: tuple[Int[Array, " R"], Float[Array, " R"]] | None = None,
    confidence: Literal["drawn", "raw"] = "drawn",
    guide: tuple[Float[Array, "R D"], float] | None = None,
    shard: Shard | None = None,
) -> ClassStats:
    """What each row says of the classes of its slot's grammar; ties to the lowest id.

    Args:
        hidden: Rows of slot after slot.
        view: Slots without a grammar are not read.
        sampling, keys, penalty, confidence, guide, shard: As of `read_stats`; no top-k, no
            nucleus.
    """
    B, C = view.grammar.lowest.shape
    away, scale = (None, 0.0) if guide is None else guide
    T = len(hidden) // B

    def of_slot(leaf: Array) -> Array:
        return leaf.reshape(B, T, *leaf.shape[1:])

    def one(rows: tuple[Any, ...]) -> ClassStats:
        (hidden, away, penalty, keys), grammar, temperature, _ = rows
        logits = unembed(hidden)
        if away is not None:
            others = unembed(away)
            logits = others + (1.0 + scale) * (logits - others)
        ids = ids_of(logits, shard)
        own = _own_ids(grammar, ids, shard)
        if penalty is not None:
            hit = ids[None] == penalty[0][:, None]
            logits = logits - jnp.where(hit, penalty[1][:, None], 0.0)
        logits = jnp.where(forbidden(ids)[None], -jnp.inf, logits)
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
            judged = raw if confidence == "raw" else law
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

    rows = jax.tree.map(of_slot, (hidden, away, penalty))
    rows = *rows, None if keys is None else keys.reshape(B, T)
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


def by_row(which: Array, a: Any, b: Any) -> Any:
    """Rows of `a` where `which` is, else of `b`."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(which.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, a, b)


def read_soft(
    unembed: Callable[[Array], Array],
    embedding: Float[Array, "V D"],
    hidden: Float[Array, "R D"],
    temperature: Float[Array, " R"],
    forbidden: Callable[[Array], Array],
    shard: Shard | None = None,
) -> Float[Array, "R D"]:
    """Expected embedding of each row under its tempered law.

    Args:
        embedding: Of the ids whose logits `unembed` gives.
        shard: These are a device's, among several devices.
    """

    def one(rows: tuple[Array, Array]) -> Array:
        hidden, temperature = rows
        logits = unembed(hidden)
        logits = jnp.where(forbidden(ids_of(logits, shard)), -jnp.inf, logits)
        if shard is not None:
            law = logits / temperature[:, None]
            peak, mass = normaliser(law, shard)
            prob = jnp.exp(law - peak[:, None]) / mass[:, None]
            part = (prob.astype(embedding.dtype) @ embedding).astype(hidden.dtype)
            return shard.total(part)
        prob = jax.nn.softmax(logits / temperature[:, None], axis=-1)
        return (prob.astype(embedding.dtype) @ embedding).astype(hidden.dtype)

    return in_chunks(one, (hidden, temperature))
