"""Expected embeddings of rows, and the token that is drawn from the same law."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dllm_jax.kernels.layer import quantize_rows
from dllm_jax.kernels.token_readout import (
    SHARE,
    LawReadout,
    choose_law,
    is_warm_row,
    law_readout,
    of_law,
)
from dllm_jax.kernels.token_readout.head import Fp8Head
from dllm_jax.models.head import Head
from dllm_jax.models.sharding import first_of
from dllm_jax.runner.chunks import ROWS_DRAWN, in_chunks
from dllm_jax.runner.reader import Reader
from dllm_jax.strategies.core.draw import Shard, drawn_law, normaliser, settled
from dllm_jax.strategies.core.protocol import Readout, TokenStats
from dllm_jax.strategies.core.state import Sampling, by_row

LAW_ROWS = 512  # at once: 537 MB of logits at 262k ids, which an H200 makes in the time of 3 reads
KERNEL_LAW_ROWS = 1024  # of which a kernel leaves no logits: 537 MB of weights


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
