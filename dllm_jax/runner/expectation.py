"""A draw, its statistics and the expected embedding, all of one law and streamed over the ids.

The head's rows are also the embedding's, so one pass over them in tiles gives everything: running
peak, mass and spread of the law, the largest noisy logit, and the sum of embeddings by weight.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dllm_jax.models.head import Head
from dllm_jax.models.sharding import first_of
from dllm_jax.runner.readout import ROWS_DRAWN, ids_of, in_chunks
from dllm_jax.strategies.core.protocol import TokenStats
from dllm_jax.strategies.core.sampling import (
    Shard,
    drawn_law,
    log_law,
    relative_to_peak,
    settled,
    token_stats,
)
from dllm_jax.strategies.core.state import Sampling

TILE = 8192  # ids at once, a multiple of NOISE
NOISE = 1024  # ids of one stream of noise: draws do not depend on the tile
ROWS = 2048  # rows at once: their logits of a tile take 67 MB


class _Running(struct.PyTreeNode):
    """What was read so far of each row; `spread` is the sum of weight times logit below `peak`."""

    peak: Float[Array, " R"]
    mass: Float[Array, " R"]
    spread: Float[Array, " R"]
    soft: Float[Array, "R D"]
    best: Int[Array, " R"]
    noisy: Float[Array, " R"]
    token: Int[Array, " R"]
    token_law: Float[Array, " R"]


def read_expected(
    head: Head,
    hidden: Float[Array, "R D"],
    sampling: Sampling,
    keys: PRNGKeyArray | None,
    *,
    forbidden: Callable[[Any], Any],
    num_top: int = 0,
    tile: int = TILE,
    shard: Shard | None = None,
) -> TokenStats:
    """Statistics of each row under its sampling with `soft`, leading axis R.

    Args:
        head: Its weights are the embedding's.
        sampling: One value a row, or a slot; a slot's rows are then consecutive.
        keys: One a row, None where every row is greedy.
        forbidden: Ids to a mask of those never drawn.
        num_top: 0, or 1 for the most probable id.
        tile: Ids at once, a multiple of `NOISE`.
        shard: The head is a device's part, among several devices.
    """
    of_slot = len(hidden) // len(sampling.temperature)
    each = jax.tree.map(lambda leaf: jnp.repeat(leaf, of_slot), sampling)

    def whole(rows: tuple[Any, ...]) -> TokenStats:
        hidden, sampling, keys = rows
        return _with_all_logits(head, hidden, sampling, keys, forbidden, num_top, shard)

    def tiled(rows: tuple[Any, ...]) -> TokenStats:
        hidden, sampling, keys = rows
        return _in_tiles(head, hidden, sampling.temperature, keys, forbidden, num_top, tile, shard)

    rows = (hidden, each, keys)
    # Top-k and the nucleus need all logits of a row, in few rows at a time.
    cut = (each.top_k > 0) | (each.top_p < 1.0)

    def some_cut() -> TokenStats:
        own = in_chunks(whole, rows, ROWS_DRAWN, ROWS_DRAWN)
        other = in_chunks(tiled, rows, ROWS, ROWS)
        return jax.tree.map(lambda a, b: _by_row(cut, a, b), own, other)

    return jax.lax.cond(jnp.any(cut), some_cut, lambda: in_chunks(tiled, rows, ROWS, ROWS))


def _in_tiles(
    head: Head,
    hidden: Float[Array, "R D"],
    temperature: Float[Array, " R"],
    keys: PRNGKeyArray | None,
    forbidden: Callable[[Any], Any],
    num_top: int,
    tile: int,
    shard: Shard | None,
) -> TokenStats:
    (num_ids, _), num_rows = head.embedding.shape, len(hidden)
    divisor = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    tempered = temperature > 0

    def read(
        carry: _Running, weights: Float[Array, "U D"], first: Int[Array, ""] | int
    ) -> _Running:
        if shard is not None:
            first = first + first_of(num_ids, shard.axis)  # ids of earlier devices
        ids = first + jnp.arange(len(weights), dtype=jnp.int32)
        part = Head(weights, head.scale, head.cap)
        law = jnp.where(forbidden(ids), -jnp.inf, part(hidden) / divisor)
        carry = _joined(carry, law, weights, first)
        noisy = law
        if keys is not None:
            noisy = law + _noise(keys, tempered, first, len(weights), shard is not None)
        place = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
        value, own = (_at(leaf, place) for leaf in (noisy, law))
        higher = value > carry.noisy
        return carry.replace(
            noisy=jnp.where(higher, value, carry.noisy),
            token=jnp.where(higher, first + place, carry.token),
            token_law=jnp.where(higher, own, carry.token_law),
        )

    never = jnp.full((num_rows,), -jnp.inf, jnp.float32)
    zero, none = jnp.zeros_like(never), jnp.zeros((num_rows,), jnp.int32)
    carry = _Running(
        peak=never,
        mass=zero,
        spread=zero,
        soft=jnp.zeros(hidden.shape, jnp.float32),
        best=none,
        noisy=never,
        token=none,
        token_law=never,
    )
    if shard is not None:
        carry = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, (shard.axis,), to="varying"), carry)

    def one(index: Array, carry: _Running) -> _Running:
        first = index * tile
        return read(carry, jax.lax.dynamic_slice_in_dim(head.embedding, first, tile), first)

    tiles, rest = divmod(num_ids, tile)
    carry = jax.lax.fori_loop(0, tiles, one, carry) if tiles else carry
    carry = read(carry, head.embedding[tiles * tile :], tiles * tile) if rest else carry
    carry = carry if shard is None else _of_devices(carry, shard)
    soft = carry.soft / carry.mass[:, None] * jnp.float32(head.embed_scale)
    return settled(
        TokenStats(
            token=carry.token,
            confidence=jnp.exp(carry.token_law - carry.peak) / carry.mass,
            # Rounding must not bring a sure law below 0, where a threshold of 0 would pass it.
            entropy=jnp.maximum(jnp.log(carry.mass) - carry.spread / carry.mass, 0.0),
            top_ids=carry.best[:, None][:, :num_top],
            top_probs=(1.0 / carry.mass)[:, None][:, :num_top],
            soft=soft,
        )
    )


def _of_devices(carry: _Running, shard: Shard) -> _Running:
    """What all devices have read of their ids; of equals the first one's, whose ids are lower."""
    names = ("peak", "mass", "spread", "best", "noisy", "token", "token_law")
    # Ids are below 2^24, so float32 holds them.
    own = [getattr(carry, name).astype(jnp.float32) for name in names]
    every = shard.of_all(jnp.stack(own, axis=1))
    peaks, masses, spreads, bests, noisy, tokens, laws = jnp.moveaxis(every, -1, 0)
    peak, sunk, kept = relative_to_peak(peaks)
    highest, chosen = (jnp.argmax(values, axis=0)[None] for values in (peaks, noisy))

    def of(values: Array, which: Array) -> Array:
        return jnp.take_along_axis(values, which, axis=0)[0]

    mine = kept[jax.lax.axis_index(shard.axis)]
    return _Running(
        peak=peak,
        mass=jnp.sum(kept * masses, axis=0),
        spread=jnp.sum(kept * (spreads + sunk * masses), axis=0),
        soft=shard.total(mine[:, None] * carry.soft),
        best=of(bests, highest).astype(jnp.int32),
        noisy=of(noisy, chosen),
        token=of(tokens, chosen).astype(jnp.int32),
        token_law=of(laws, chosen),
    )


def _joined(
    carry: _Running, law: Float[Array, "R U"], weights: Float[Array, "U D"], first: Any
) -> _Running:
    """What was read so far and one more tile, relative to the higher peak of both."""
    place = jnp.argmax(law, axis=-1).astype(jnp.int32)
    own = _at(law, place)
    peak = jnp.maximum(carry.peak, own)
    base = jnp.where(peak == -jnp.inf, 0.0, peak)  # nothing allowed so far
    sunk = jnp.where(carry.peak == -jnp.inf, 0.0, carry.peak - base)
    kept = jnp.where(carry.peak == -jnp.inf, 0.0, jnp.exp(sunk))
    above = law - base[:, None]
    weight = jnp.exp(above)
    spread = jnp.sum(jnp.where(weight > 0, weight * above, 0.0), axis=-1)
    soft = jnp.dot(weight.astype(weights.dtype), weights, preferred_element_type=jnp.float32)
    return carry.replace(
        peak=peak,
        mass=kept * carry.mass + jnp.sum(weight, axis=-1),
        spread=kept * (carry.spread + sunk * carry.mass) + spread,
        soft=kept[:, None] * carry.soft + soft,
        best=jnp.where(own > carry.peak, first + place, carry.best),
    )


def _with_all_logits(
    head: Head,
    hidden: Float[Array, "R D"],
    sampling: Sampling,
    keys: PRNGKeyArray | None,
    forbidden: Callable[[Any], Any],
    num_top: int,
    shard: Shard | None,
) -> TokenStats:
    logits = head(hidden)
    logits = jnp.where(forbidden(ids_of(logits, shard)), -jnp.inf, logits)
    how = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    stats = token_stats(logits, **how, keys=keys, num_top=num_top, shard=shard)
    law = drawn_law(logits, **how, shard=shard)
    prob = jax.nn.softmax(law, axis=-1) if shard is None else jnp.exp(log_law(law, shard))
    embedding = head.embedding
    soft = jnp.dot(prob.astype(embedding.dtype), embedding, preferred_element_type=jnp.float32)
    soft = soft if shard is None else shard.total(soft)
    return stats.replace(
        entropy=jnp.maximum(stats.entropy, 0.0), soft=soft * jnp.float32(head.embed_scale)
    )


def _noise(
    keys: PRNGKeyArray, tempered: Array, first: Any, size: int, is_anywhere: bool
) -> Float[Array, "R U"]:
    """Gumbel noise of the ids from `first` on, by a row's key and the id; 0 of greedy rows.

    Args:
        is_anywhere: The first id need not be a multiple of `NOISE`.
    """
    count = -(-size // NOISE) + is_anywhere
    units = first // NOISE + jnp.arange(count, dtype=jnp.int32)

    def of_row(key: PRNGKeyArray) -> Array:
        own = jax.vmap(lambda unit: jax.random.fold_in(key, unit))(units)
        draw = jax.vmap(lambda key: jax.random.gumbel(key, (NOISE,), jnp.float32))
        drawn = draw(own).reshape(-1)
        if is_anywhere:
            return jax.lax.dynamic_slice_in_dim(drawn, first % NOISE, size)
        return drawn[:size]

    return jnp.where(tempered[:, None], jax.vmap(of_row)(keys), 0.0)


def _at(values: Float[Array, "R U"], place: Int[Array, " R"]) -> Float[Array, " R"]:
    return jnp.take_along_axis(values, place[:, None], axis=-1)[:, 0]


def _by_row(which: Array, a: Array, b: Array) -> Array:
    return jnp.where(which.reshape(-1, *(1,) * (a.ndim - 1)), a, b)
