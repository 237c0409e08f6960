"""A draw, its statistics and the expected embedding, all of one law, from one array of logits.

The head's rows are also the embedding's: one product with them gives the logits of some rows, a
second one of the law the expectation. So few rows at a time have all their logits, or weights, in
memory that this is a fixed number of bytes, and so many that both products are bound by operations:
the head is then read behind them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

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
from dllm_jax.runner.readout import ROWS_DRAWN, in_chunks
from dllm_jax.strategies.core.protocol import TokenStats
from dllm_jax.strategies.core.sampling import Shard, drawn_law, settled
from dllm_jax.strategies.core.state import Sampling

ROWS = 512  # at once: 537 MB of logits at 262k ids, which an H200 makes in the time of 3 reads
KERNEL_ROWS = 1024  # of which a kernel leaves no logits: 537 MB of weights


def read_expected(
    head: Head,
    hidden: Float[Array, "R D"],
    sampling: Sampling,
    keys: PRNGKeyArray | None,
    *,
    forbidden: Callable[[Any], Any],
    num_top: int = 0,
    shard: Shard | None = None,
) -> TokenStats:
    """Statistics of each row under its sampling with `soft`, leading axis R.

    A token is drawn by one uniform number a row: the share of the vocabulary in which the law's
    running sum passes it, then the id there, by probabilities in the type of the embedding.

    Args:
        head: Its weights are the embedding's.
        sampling: One value a row, or a slot; a slot's rows are then consecutive.
        keys: One a row, None where every row is greedy.
        forbidden: Ids to a mask of those never drawn.
        num_top: 0, or 1 for the most probable id.
        shard: The head is a device's part, among several devices.
    """
    of_slot = len(hidden) // len(sampling.temperature)
    each = jax.tree.map(lambda leaf: jnp.repeat(leaf, of_slot), sampling)

    # From NumPy ids the mask is a constant of the program.
    ids = np.arange(len(head.embedding), dtype=np.int32)
    never = forbidden(ids if shard is None else first_of(len(ids), shard.axis) + ids)

    rows = (hidden, each, keys)
    is_kernel = shard is None and choose_law(hidden[:ROWS], head.weights) != "xla"
    at_once = KERNEL_ROWS if is_kernel else ROWS

    def logits_of(hidden: Array) -> Array:
        rows = quantize_rows(hidden) if isinstance(head.weights, Fp8Head) else hidden
        return jnp.where(never, -jnp.inf, head(rows))

    def heat_of(sampling: Sampling) -> Array:
        return jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)

    def plain(rows: tuple[Any, ...], is_warm: bool = False) -> TokenStats:
        hidden, sampling, keys = rows
        heat = heat_of(sampling)
        if shard is None:
            how = {"scale": head.scale, "cap": head.cap, "is_warm": is_warm}
            read = law_readout(hidden, head.weights, never, heat, **how)
        else:
            logits = logits_of(hidden)
            read = _of_part(logits / heat[:, None], head.embedding.dtype, shard)
        return _stats_of(head, read, sampling.temperature > 0, keys, num_top, shard)

    def narrowed(rows: tuple[Any, ...]) -> TokenStats:
        hidden, sampling, keys = rows
        logits = logits_of(hidden)
        how = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
        law = drawn_law(logits, **how, shard=shard)
        dtype = head.embedding.dtype
        read = of_law(law, dtype) if shard is None else _of_part(law, dtype, shard)
        return _stats_of(head, read, sampling.temperature > 0, keys, num_top, shard)

    # Top-k and the nucleus pass over the logits again and again, in few rows at a time.
    cut = (each.top_k > 0) | (each.top_p < 1.0)

    def some_cut() -> TokenStats:
        own = in_chunks(narrowed, rows, ROWS_DRAWN, ROWS_DRAWN)
        return jax.tree.map(lambda a, b: _by_row(cut, a, b), own, none_cut())

    def none_cut(is_warm: bool = False) -> TokenStats:
        return in_chunks(functools.partial(plain, is_warm=is_warm), rows, at_once, at_once)

    any_cut = jnp.any(cut)
    if not is_kernel:
        return jax.lax.cond(any_cut, some_cut, none_cut)
    any_cold = ~jnp.all(is_warm_row(heat_of(each), head.cap))
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


def _stats_of(
    head: Head,
    read: LawReadout,
    is_drawn: Array,
    keys: PRNGKeyArray | None,
    num_top: int,
    shard: Shard | None,
) -> TokenStats:
    """What laws say; rows that are drawn take a token of theirs, the others the likeliest one."""
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


def _by_row(which: Array, a: Array, b: Array) -> Array:
    return jnp.where(which.reshape(-1, *(1,) * (a.ndim - 1)), a, b)
