"""From hidden rows to token statistics, streamed: never a whole [rows, vocabulary] array.

A `Readout` says what is asked of the cells of a window. `of_rows` narrows it to the rows to read,
`read_rows` reads them, `Cells.scatter` brings the statistics back to the cells. Likeliest tokens
are read off the product by a kernel where there is one (`dllm_jax.kernels.token_readout`), else
from the logits of a chunk of rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dllm_jax.kernels.layer import quantize_rows
from dllm_jax.kernels.token_readout import (
    SHARE,
    LawReadout,
    choose,
    choose_law,
    is_warm_row,
    law_readout,
    most_rows,
    of_law,
    token_readout,
)
from dllm_jax.kernels.token_readout.head import Fp8Head
from dllm_jax.models.head import Head
from dllm_jax.models.sharding import first_of
from dllm_jax.runner.cells import Cells
from dllm_jax.runner.chunks import FEW_ROWS, by_row, in_chunks
from dllm_jax.strategies.core.draw import Shard, drawn_law, normaliser, settled, token_stats
from dllm_jax.strategies.core.protocol import Readout, TokenStats
from dllm_jax.strategies.core.state import Sampling

LEAST_ROWS = 16  # of a slot read at once with one rounding: its windows differ in width
ROWS_DRAWN = 128  # of them at once: cuts and noise take several times the memory of the logits
LAW_ROWS = 512  # at once: 537 MB of logits at 262k ids, which an H200 makes in the time of 3 reads
KERNEL_LAW_ROWS = 1024  # of which a kernel leaves no logits: 537 MB of weights


class Reader(NamedTuple):
    """How rows become logits, and which ids count.

    Attributes:
        unembed: Hidden rows to float32 logits; of a `Head` a kernel may read them.
        forbidden: Ids, of NumPy or of JAX, to a mask of those never drawn.
        shard: The head is a device's part, among several devices.
        one_rounding: A row's bits do not depend on the number of slots.
    """

    unembed: Callable[[Array], Array]
    forbidden: Callable[[Any], Any]
    shard: Shard | None = None
    one_rounding: bool = False

    def logits(self, hidden: Array, away: Array | None, scale: float) -> Float[Array, "R V"]:
        """Logits, moved by `scale` from those of `away` if given: `ForwardOutput.predict`."""
        logits = self.unembed(hidden)
        if away is None:
            return logits
        others = self.unembed(away)
        return others + (1.0 + scale) * (logits - others)

    def restricted(
        self, logits: Float[Array, "R V"], penalty: tuple[Array, Array] | None = None
    ) -> Float[Array, "R V"]:
        """-inf for forbidden ids; less the penalty of an id a row."""
        ids = ids_of(logits, self.shard)
        logits = jnp.where(self.forbidden(ids), -jnp.inf, logits)
        if penalty is None:
            return logits
        return logits - jnp.where(ids[None] == penalty[0][:, None], penalty[1][:, None], 0.0)


def of_rows(ask: Readout, cells: Cells) -> Readout:
    """A readout of a window's cells as that of the rows of some of them."""
    guide = None if ask.guide is None else (cells.rows(ask.guide[0]), ask.guide[1])
    keys = None if ask.keys is None else cells.rows(ask.keys)
    penalty = jax.tree.map(cells.rows, ask.penalty)
    ids = None if ask.ids is None else cells.rows(ask.ids)
    own = ask.replace(keys=keys, penalty=penalty, guide=guide, ids=ids)
    return own.replace(where=None, fixed=None, behind=None)


def read_rows(reader: Reader, hidden: Float[Array, "R D"], ask: Readout) -> TokenStats:
    """Statistics of each row, leading axis R."""
    if ask.soft:
        return read_expected(reader, hidden, ask)
    stats = read_stats(reader, hidden, ask.replace(ids=None))
    if ask.ids is None:
        return stats
    return stats.replace(id_probs=read_probs(reader, hidden, ask.ids, stats))


def read_log_probs(
    reader: Reader,
    hidden: Float[Array, "R D"],
    tokens: Int[Array, " R"],
    ask: Readout,
    num_top: int = 0,
) -> Float[Array, "R F"]:
    """Log-probabilities of a token a row, and the likeliest ids: `ForwardOutput.log_probs`.

    Args:
        reader: Of whole logits.
        ask: Of rows, as of `read_stats`.
    """
    sampling = ask.sampling
    assert sampling is not None
    each = sampling.of_rows(len(hidden) // len(sampling.temperature))

    def one(rows: tuple[Any, ...]) -> Array:
        hidden, tokens, sampling, penalty, away = rows
        raw = reader.unembed(hidden)
        moved = raw if away is None else reader.logits(hidden, away, scale)
        law = drawn_law(reader.restricted(moved, penalty), sampling)
        both, token = jnp.stack([law, raw], axis=1), tokens[:, None, None]
        own = jnp.take_along_axis(both, token, axis=2)
        is_own = jnp.arange(both.shape[2], dtype=jnp.int32)[None, None] == token
        # 1 + rest rounds to 1 where a token is all but sure.
        rest = jnp.sum(jnp.where(is_own, 0.0, jnp.exp(both - own)), axis=2)
        logs = jax.nn.log_softmax(both)
        said = jnp.take_along_axis(logs, token, axis=2)[..., 0]
        said = jnp.where(rest < 1.0, -jnp.log1p(rest), said)
        top, ids = jax.lax.top_k(logs[:, 1], num_top)
        return jnp.concatenate([said, ids.astype(jnp.float32), top], axis=1)  # ids are below 2^24

    away, scale = (None, 0.0) if ask.guide is None else ask.guide
    rows = hidden, jnp.maximum(tokens, 0), each, ask.penalty, away
    return in_chunks(one, rows, FEW_ROWS)  # of two laws at once


def read_probs(
    reader: Reader, hidden: Float[Array, "R D"], ids: Int[Array, "R N"], stats: TokenStats
) -> Float[Array, "R N"]:
    """Probabilities of given ids, from a few rows of the head and the confidence of the token.

    Args:
        stats: Of the same rows, with "raw" confidences: `p(id) = p(token) exp(l_id - l_token)`.
    """
    unembed, shard = reader.unembed, reader.shard

    def one(rows: tuple[Array, Array]) -> Array:
        hidden, ids = rows
        head = unembed if isinstance(unembed, Head) else None
        logits = unembed(hidden) if head is None else hidden
        size = logits.shape[-1] if head is None else len(head.weights)
        own = ids if shard is None else ids - size * jax.lax.axis_index(shard.axis)
        near = jnp.clip(own, 0, size - 1)
        if head is None:
            found = jnp.take_along_axis(logits, near, axis=-1)
        else:
            few = jax.tree.map(lambda leaf: leaf[near], head.weights)
            of_row = jax.vmap(lambda few, row: dataclasses.replace(head, weights=few)(row))
            found = of_row(few, hidden)
        return found if shard is None else shard.total(jnp.where(near == own, found, 0.0))

    asked = jnp.concatenate([stats.token[:, None], ids], axis=1)
    logits = in_chunks(one, (hidden, asked), whole=FEW_ROWS)
    share = jnp.exp(logits[:, 1:] - logits[:, :1]) * stats.confidence[:, None]
    return jnp.where(reader.forbidden(ids), 0.0, share)


def read_stats(reader: Reader, hidden: Float[Array, "R D"], ask: Readout) -> TokenStats:
    """Statistics of each row, leading axis R.

    Args:
        ask: Of rows; its sampling has a value a row or a slot, whose rows are consecutive. Its
            guide holds rows to move away from.
    """
    sampling, shard, unembed = ask.sampling, reader.shard, reader.unembed
    assert sampling is not None
    away, scale = (None, 0.0) if ask.guide is None else ask.guide
    of_slot = len(hidden) // len(sampling.temperature)

    def one(rows: tuple[Any, ...]) -> TokenStats:
        hidden, ask, away = rows
        logits = reader.logits(hidden, away, scale)
        return in_chunks(drawn, (logits, ask), ROWS_DRAWN, ROWS_DRAWN)

    def drawn(rows: tuple[Any, ...]) -> TokenStats:
        logits, ask = rows
        return token_stats(logits, ask, lambda x: reader.restricted(x, ask.penalty), shard)

    def in_rows() -> TokenStats:
        # Build operands inside the branch: the inputs of a `cond` cost launches.
        each = ask.replace(sampling=sampling.of_rows(of_slot), guide=None)
        # Every chunk reads the head again, and a device's part of it has fewer logits a row.
        whole = FEW_ROWS * (1 if shard is None else jax.lax.axis_size(shard.axis))
        rows = hidden, each, away
        if reader.one_rounding:
            return _slot_by_slot(one, rows, of_slot)
        return in_chunks(one, rows, whole=whole)

    # The kernels read the whole vocabulary out: no allowed ids, no vocabulary over several devices.
    head = unembed if isinstance(unembed, Head) and away is None and shard is None else None
    if head is None:
        return in_rows()
    at_once = most_rows(head.weights)
    implementation = choose(hidden[:at_once], head.weights, ask.num_top)
    if reader.one_rounding:
        implementation = "mosaic"
    if implementation == "xla":
        return in_rows()
    # From NumPy ids the mask is a constant of the program.
    never = reader.forbidden(np.arange(len(head.weights), dtype=np.int32))

    def in_kernel(rows: tuple[Array, tuple[Array, Array] | None]) -> TokenStats:
        hidden, penalty = rows
        read = token_readout(
            hidden,
            head.weights,
            never,
            scale=head.scale,
            cap=head.cap,
            penalty=penalty,
            num_top=ask.num_top,
            implementation=implementation,
        )
        return settled(TokenStats(**read._asdict()))

    # Top-k and the nucleus need all logits, and noise is cheaper outside the kernel. A row's path
    # must not depend on its neighbours: rows that are drawn must not change its rounding.
    plain = sampling.is_plain

    def all_plain() -> TokenStats:
        return in_chunks(in_kernel, (hidden, ask.penalty), at_once, at_once)

    def some_drawn() -> TokenStats:
        drawn = in_rows()
        plain_rows = jnp.repeat(plain, of_slot)
        return jax.lax.cond(
            jnp.any(plain),
            lambda: by_row(plain_rows, all_plain(), drawn),
            lambda: drawn,
        )

    return jax.lax.cond(jnp.all(plain), all_plain, some_drawn)


def _slot_by_slot(fn: Callable[[Any], Any], rows: Any, of_slot: int) -> Any:
    """`fn` over the rows of one slot at a time; of fewer than 16 rows the last is repeated."""
    size = -(-of_slot // LEAST_ROWS) * LEAST_ROWS
    if size == of_slot:
        return in_chunks(fn, rows, size, size)
    slots = jax.tree.leaves(rows)[0].shape[0] // of_slot
    at = np.arange(slots)[:, None] * of_slot + np.minimum(np.arange(size), of_slot - 1)
    found = in_chunks(fn, jax.tree.map(lambda leaf: leaf[at.reshape(-1)], rows), size, size)

    def kept(leaf: Array) -> Array:
        own = leaf.reshape(slots, size, *leaf.shape[1:])[:, :of_slot]
        return own.reshape(slots * of_slot, *leaf.shape[1:])

    return jax.tree.map(kept, found)


def ids_of(logits: Array, shard: Shard | None) -> Int[Array, " V"]:
    """The ids that logits are of."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    return ids if shard is None else shard.first(logits) + ids


def read_expected(reader: Reader, hidden: Float[Array, "R D"], ask: Readout) -> TokenStats:
    """Statistics of each row with `soft`, the expected embedding; arguments as of `read_stats`.

    The head's rows are also the embedding's: one product with them gives the logits of some rows, a
    second one of the law the expectation. Rows are taken in chunks of one size in bytes, at which
    both products are bound by operations. A token is drawn by one uniform number a row: the share
    of the vocabulary in which the law's running sum passes it, then the id there, by probabilities
    in the type of the embedding.

    Raises:
        ValueError: The readout asks for more than the law drawn from and its likeliest token, or
            the head is not the embedding (at trace time).
    """
    shard, sampling, head = reader.shard, ask.sampling, reader.unembed
    assert sampling is not None
    asks_more = ask.penalty is not None or ask.guide is not None or ask.num_top > 1
    if asks_more or ask.confidence != "drawn":
        raise ValueError(
            "soft=True reads the law drawn from and its likeliest token alone; leave "
            "penalty, guide, confidence and num_top above 1 out"
        )
    if not isinstance(head, Head) or head.embed_scale is None:
        raise ValueError(
            "the model has a head that is not its embedding, of which predict reads no "
            "expectation; use out.soft()"
        )
    each = sampling.of_rows(len(hidden) // len(sampling.temperature))
    # From NumPy ids the mask is a constant of the program.
    ids = np.arange(len(head.embedding), dtype=np.int32)
    never = reader.forbidden(ids if shard is None else first_of(len(ids), shard.axis) + ids)
    rows = hidden, ask.replace(sampling=each)
    is_kernel = shard is None and choose_law(hidden[:LAW_ROWS], head.weights) != "xla"
    at_once = KERNEL_LAW_ROWS if is_kernel else LAW_ROWS

    def logits_of(hidden: Array) -> Array:
        rows = quantize_rows(hidden) if isinstance(head.weights, Fp8Head) else hidden
        return jnp.where(never, -jnp.inf, head(rows))

    def plain(rows: tuple[Any, ...], is_warm: bool = False) -> TokenStats:
        hidden, ask = rows
        heat = ask.sampling.heat
        if shard is None:
            how = {"scale": head.scale, "cap": head.cap, "is_warm": is_warm}
            read = law_readout(hidden, head.weights, never, heat, **how)
        else:
            law = logits_of(hidden) / heat[:, None]
            read = _of_part(law, head.embedding.dtype, shard)
        return _stats_of(reader, read, ask)

    def narrowed(rows: tuple[Any, ...]) -> TokenStats:
        hidden, ask = rows
        law = drawn_law(logits_of(hidden), ask.sampling, shard)
        dtype = head.embedding.dtype
        read = of_law(law, dtype) if shard is None else _of_part(law, dtype, shard)
        return _stats_of(reader, read, ask)

    # Top-k and the nucleus pass over the logits again and again, in few rows at a time.
    def some_cut() -> TokenStats:
        own = in_chunks(narrowed, rows, ROWS_DRAWN, ROWS_DRAWN)
        return by_row(each.cuts, own, none_cut())

    def none_cut(is_warm: bool = False) -> TokenStats:
        return in_chunks(functools.partial(plain, is_warm=is_warm), rows, at_once, at_once)

    any_cut = jnp.any(each.cuts)
    if not is_kernel:
        return jax.lax.cond(any_cut, some_cut, none_cut)
    any_cold = ~jnp.all(is_warm_row(each.heat, head.cap))
    which = jnp.where(any_cut, 2, any_cold.astype(jnp.int32))
    return jax.lax.switch(which, (lambda: none_cut(True), none_cut, some_cut))


def _of_part(law: Float[Array, "R V"], dtype: Any, shard: Shard) -> LawReadout:
    """As `of_law`, where weights and shares are those of a device's ids."""
    first = first_of(law.shape[1], shard.axis)
    # Ids are below 2^24, so float32 holds them.
    own = jnp.max(law, axis=1), (first + jnp.argmax(law, axis=1)).astype(jnp.float32)
    peaks, tokens = jnp.moveaxis(shard.of_all(jnp.stack(own, axis=1)), -1, 0)
    highest = jnp.argmax(peaks, axis=0)[None]  # of equals the first one, whose ids are lower
    peak, token = (jnp.take_along_axis(each, highest, axis=0)[0] for each in (peaks, tokens))
    token = token.astype(jnp.int32)
    read = of_law(law, dtype, (peak, token - first))
    rest, spread = shard.total(read.rest), shard.total(read.spread)
    return read._replace(token=token, rest=rest, spread=spread)


def _stats_of(reader: Reader, read: LawReadout, ask: Readout) -> TokenStats:
    """Statistics of each row's law, with a drawn token or else the likeliest."""
    head, shard = cast(Head, reader.unembed), reader.shard
    keys, num_top = ask.keys, ask.num_top
    is_drawn = cast(Sampling, ask.sampling).temperature > 0
    best, mass = read.token, 1.0 + read.rest
    soft = jnp.dot(read.weights, head.embedding, preferred_element_type=jnp.float32)
    soft = soft if shard is None else shard.total(soft)
    soft = soft * read.unit[:, None]
    token, own = best, jnp.ones_like(mass)
    if keys is not None:
        uniform = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys)
        # XLA would draw the number of a row again for each of its shares.
        wanted = jax.lax.optimization_barrier(uniform * mass)
        drawn, drawn_weight = _drawn(read, wanted, shard)
        token = jnp.where(is_drawn, drawn, best)
        own = jnp.where(is_drawn, drawn_weight, own)
    return settled(
        TokenStats(
            token=token,
            confidence=own / mass,
            # Rounding must not bring a sure law below 0, where a threshold of 0 would pass it.
            entropy=jnp.maximum(jnp.log1p(read.rest) - read.spread / mass, 0.0),
            top_ids=best[:, None][:, :num_top],
            top_probs=(1.0 / mass)[:, None][:, :num_top],
            soft=soft / mass[:, None] * jnp.float32(head.embed_scale),
        )
    )


def _drawn(
    read: LawReadout, wanted: Float[Array, " R"], shard: Shard | None
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """The id at which the running sum of weights passes what is wanted, and its weight."""
    (_, num_ids), (_, num_shares) = read.weights.shape, read.shares.shape
    shares = read.shares
    if shard is not None:
        shares = jnp.moveaxis(shard.of_all(shares), 0, 1).reshape(len(shares), -1)
    share, rest = _passed(shares, wanted)
    device, share = share // num_shares, share % num_shares
    ids = share[:, None] * SHARE + jnp.arange(SHARE, dtype=jnp.int32)[None]
    weight = jnp.take_along_axis(read.weights, ids, axis=1, mode="fill", fill_value=0)
    weight = weight.astype(jnp.float32) * read.unit[:, None]
    if shard is not None:
        mine = device == jax.lax.axis_index(shard.axis)
        weight = shard.total(jnp.where(mine[:, None], weight, 0.0))
    place, _ = _passed(weight, rest)
    return device * num_ids + share * SHARE + place, _at(weight, place)


def _passed(
    weight: Float[Array, "R N"], wanted: Float[Array, " R"]
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """The first place whose running sum is above what is wanted, and what is wanted of it.

    A place of weight 0 is none; where rounding leaves no other, the last one with a weight is it.
    """
    until = jnp.cumsum(weight, axis=1)
    some = weight > 0
    passed = some & (until > wanted[:, None])
    # In one reduction, the least of: places that pass, then those with a weight, from the last on.
    N = weight.shape[1]
    places = jnp.arange(N, dtype=jnp.int32)[None]
    least = jnp.min(
        jnp.where(passed, places, jnp.where(some, 2 * N - 1 - places, 2 * N - 1)), axis=1
    )
    place = jnp.where(least < N, least, 2 * N - 1 - least)
    return place, wanted - (_at(until, place) - _at(weight, place))


def _at(values: Float[Array, "R U"], place: Int[Array, " R"]) -> Float[Array, " R"]:
    return jnp.take_along_axis(values, place[:, None], axis=-1)[:, 0]


def read_soft(
    reader: Reader,
    embedding: Float[Array, "V D"],
    hidden: Float[Array, "R D"],
    temperature: Float[Array, " R"],
) -> Float[Array, "R D"]:
    """Expected embedding of each row under its tempered law.

    Args:
        embedding: Of the ids whose logits the reader gives.
    """

    def one(rows: tuple[Array, Array]) -> Array:
        hidden, temperature = rows
        logits = reader.restricted(reader.unembed(hidden))
        if (shard := reader.shard) is not None:
            law = logits / temperature[:, None]
            peak, mass = normaliser(law, shard)
            prob = jnp.exp(law - peak[:, None]) / mass[:, None]
            part = (prob.astype(embedding.dtype) @ embedding).astype(hidden.dtype)
            return shard.total(part)
        prob = jax.nn.softmax(logits / temperature[:, None], axis=-1)
        return (prob.astype(embedding.dtype) @ embedding).astype(hidden.dtype)

    return in_chunks(one, (hidden, temperature))
