"""From logits to tokens: the draw of one token a row, and its statistics.

Several devices may share the ids; each then has the logits of its own (`Shard`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from .forward import Readout, TokenStats
from .state import NO_TOKEN, Sampling

_NEVER = -jnp.inf
_DIGIT = 4  # bits of a threshold found by one sum over several devices


class Shard(NamedTuple):
    """The ids of one device, where several share them: consecutive ones, padded at the end.

    Attributes:
        axis: The devices' axis of the mesh.
        num_ids: Of all devices, without padding.
    """

    axis: str
    num_ids: int

    def first(self, logits: Float[Array, "R V"]) -> Int[Array, ""]:
        """The first id of this device."""
        return jax.lax.axis_index(self.axis) * logits.shape[-1]

    def of_all(self, numbers: Float[Array, "R n"]) -> Float[Array, "devices R n"]:
        """The numbers of every device on each of them; for few, as they cross in float32."""
        # A sum of arrays that are zero elsewhere: a gather would not be known to be the same.
        mine = jnp.arange(jax.lax.axis_size(self.axis)) == jax.lax.axis_index(self.axis)
        placed = jnp.where(mine.reshape(-1, *(1,) * numbers.ndim), numbers[None], 0.0)
        return self.total(placed)

    def total(self, numbers: Float[Array, "..."]) -> Float[Array, "..."]:
        """The sum over the devices."""
        return jax.lax.psum(numbers, self.axis)


def token_stats(
    logits: Float[Array, "R V"],
    ask: Readout,
    restrict: Callable[[Array], Array] = lambda logits: logits,
    shard: Shard | None = None,
) -> TokenStats:
    """Draw one token a row, with its probability and the entropy of the distribution.

    Args:
        logits: Float32.
        ask: `sampling` and `keys` of each row (None: every row is greedy), `confidence`, `num_top`.
            At temperature 0 the most probable id is taken, ties to the lowest. Top-k keeps ties at
            its edge; the nucleus always keeps the most probable id.
        restrict: Applied to the logits first, such as forbidden ids to -inf. It is applied by each
            reader on the way, so that no second array is written.
        shard: The logits are those of a device's ids, among several devices.

    Returns:
        TokenStats with leading axis R, computed in float32. A row whose logits are not finite has
        NO_TOKEN with full confidence: it is accepted at once, and the engine ends the request
        (`driver.decode_step`).
    """
    sampling, keys, num_top = ask.sampling, ask.keys, ask.num_top
    assert sampling is not None

    def as_is(logits: Array) -> Any:
        logits = restrict(logits)
        peak, token = _peak(logits)
        if shard is not None:
            return _part(logits, token, peak, num_top, shard)
        return _judge(logits, token, peak, peak, num_top)

    def drawn(logits: Array) -> Any:
        logits = restrict(logits)
        law = drawn_law(logits, sampling, shard)
        noisy = law
        if keys is not None:  # Gumbel-max: an argmax of noisy logits is a draw
            tempered = (sampling.temperature > 0)[:, None]
            noisy = law + jnp.where(tempered, gumbel(keys, law, shard), 0.0)
        token = jnp.argmax(noisy, axis=-1)
        judged = law if ask.confidence == "drawn" else logits
        if shard is not None:
            return _part(judged, token, _at(noisy, token), num_top, shard)
        return _judge(judged, token, _at(judged, token), jnp.max(judged, axis=-1), num_top)

    # At 150k ids a draw costs several passes over the logits; greedy rows read them in place.
    plain = ~jnp.any((sampling.temperature > 0) | sampling.cuts)
    read = jax.lax.cond(plain, as_is, drawn, logits)
    return settled(read if shard is None else _joined(shard.of_all(read), num_top))


def settled(stats: TokenStats) -> TokenStats:
    """Rows whose confidence is not finite take NO_TOKEN with full confidence."""
    sound = jnp.isfinite(stats.confidence)
    return stats.replace(
        token=jnp.where(sound, stats.token, NO_TOKEN),
        confidence=jnp.where(sound, stats.confidence, 1.0),
        entropy=jnp.where(sound, stats.entropy, 0.0),
    )


def drawn_law(
    logits: Float[Array, "R V"], sampling: Sampling, shard: Shard | None = None
) -> Float[Array, "R V"]:
    """The distribution that a row's token is drawn from, as logits, -inf for ids never drawn.

    Args:
        sampling: Of each row; temperature 0 counts as 1.
    """
    law = logits / sampling.heat[:, None]
    # Huge temperatures have a reciprocal of zero, and -inf times zero is NaN.
    law = jnp.where(logits == _NEVER, _NEVER, law)
    narrowed = functools.partial(_cut, shard)
    any_cut = jnp.any(sampling.cuts)
    cuts = sampling.top_k, sampling.top_p
    return jax.lax.cond(any_cut, narrowed, lambda law, *_: law, law, *cuts)


def _at(law: Float[Array, "R V"], token: Int[Array, " R"]) -> Float[Array, " R"]:
    return jnp.take_along_axis(law, token[:, None], axis=-1)[:, 0]


def _peak(law: Float[Array, "R V"]) -> tuple[Float[Array, " R"], Int[Array, " R"]]:
    """The largest logit of each row and its id, ties to the lowest, from one pass.

    A gather of that logit would make XLA store logits that are otherwise computed on the way.
    """

    def higher(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

    ids = jax.lax.broadcasted_iota(jnp.int32, law.shape, 1)
    least = (jnp.float32(_NEVER), jnp.int32(law.shape[1]))
    return jax.lax.reduce((law, ids), least, higher, (1,))


def _judge(
    law: Float[Array, "R V"],
    token: Int[Array, " R"],
    own: Float[Array, " R"],
    peak: Float[Array, " R"],
    num_top: int,
) -> TokenStats:
    """Probability of `token`, entropy and top of a distribution given by its logits.

    The caller gives the token's logit and the largest, which saves passes over the logits.
    """
    above_peak = law - peak[:, None]
    weight = jnp.exp(above_peak)
    mass = jnp.sum(weight, axis=-1)
    # Sum of w * log w with the limit 0 at w = 0: a forbidden id's log is -inf or nearly.
    spread = jnp.sum(jnp.where(weight > 0, weight * above_peak, 0.0), axis=-1)
    top_law, top_ids = (
        jax.lax.top_k(law, num_top)
        if num_top
        else (law[:, :0], jnp.zeros((len(token), 0), jnp.int32))
    )
    return TokenStats(
        token=token.astype(jnp.int32),
        confidence=jnp.exp(own - peak) / mass,
        entropy=jnp.log(mass) - spread / mass,
        top_ids=top_ids,
        top_probs=jnp.exp(top_law - peak[:, None]) / mass[:, None],
    )


def gumbel(
    keys: PRNGKeyArray, law: Float[Array, "R V"], shard: Shard | None
) -> Float[Array, "R V"]:
    """Noise of each id by its row's key.

    Every device draws that of all ids and takes its own: a number depends on how many are drawn.
    """
    size = law.shape[-1] if shard is None else shard.num_ids
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32))(keys)
    if shard is None:
        return noise
    padding = law.shape[-1] * jax.lax.axis_size(shard.axis) - size
    noise = jnp.pad(noise, ((0, 0), (0, padding)))
    return jax.lax.dynamic_slice_in_dim(noise, shard.first(law), law.shape[-1], axis=1)


def log_law(logits: Float[Array, "R V"], shard: Shard | None) -> Float[Array, "R V"]:
    """Log-probabilities of a device's ids, or of all."""
    if shard is None:
        return jax.nn.log_softmax(logits, axis=-1)
    peak, mass = normaliser(logits, shard)
    return logits - (peak + jnp.log(mass))[:, None]


def _cut(shard: Shard | None, law: Array, top_k: Array, top_p: Array) -> Array:
    """Top-k, then the nucleus of what is left (Holtzman et al. 2020, §3.1), as vLLM orders them.

    Thresholds are found by sums, over the devices if several: sorting takes longer on a CPU, and a
    GPU's sort keeps XLA from recording the loop around it.
    """
    code, V = _ordered(law), law.shape[-1] if shard is None else shard.num_ids
    k = jnp.clip(jnp.where(top_k > 0, top_k, V), 1, V).astype(jnp.float32)
    kth = _threshold(shard, code, jnp.ones_like(law), k)
    kept = code >= kth[:, None]
    within = jnp.where(kept, law, _NEVER)
    peak, mass = _mass(within) if shard is None else normaliser(within, shard)
    weight = jnp.where(kept, jnp.exp(law - peak[:, None]), 0.0)
    edge = _threshold(shard, code, weight, top_p * mass)
    edge = jnp.minimum(edge, _ordered(peak))  # the most probable id stays
    kept = kept & ((code >= edge[:, None]) | (top_p >= 1.0)[:, None])
    # NaN stays, for the caller to see.
    return jnp.where(kept | jnp.isnan(law), law, _NEVER)


def _ordered(values: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Numbers in the order of float32 values; both zeros are one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    top = jnp.uint32(1 << 31)
    return jnp.where(bits < top, bits | top, ~bits)


def _threshold(
    shard: Shard | None, code: UInt32[Array, "R V"], weight: Float[Array, "R V"], wanted: Array
) -> UInt32[Array, " R"]:
    """The largest number of each row at or above which the weights of all ids reach `wanted`."""
    bits = 2 if shard is None else _DIGIT
    steps = [jnp.uint32(step) for step in range(1, 1 << bits)]

    def digit(i: Array, found: Array) -> Array:
        shift = (32 - bits * (i + 1)).astype(jnp.uint32)

        def reached(step: Array) -> Array:
            above = code >= (found | (step << shift))[:, None]
            return jnp.sum(jnp.where(above, weight, 0.0), axis=-1)

        # Stacked sums: XLA takes them in one pass over the ids.
        sums = jnp.stack([reached(step) for step in steps], axis=1)
        sums = sums if shard is None else shard.total(sums)
        passed = jnp.sum(sums >= wanted[:, None], axis=-1, dtype=jnp.uint32)
        return found | (passed << shift)

    return jax.lax.fori_loop(0, 32 // bits, digit, jnp.zeros(len(code), jnp.uint32))


# --- ids that several devices share -----------------------------------------------------------


def _part(
    law: Float[Array, "R V"],
    token: Int[Array, " R"],
    noisy: Float[Array, " R"],
    num_top: int,
    shard: Shard,
) -> Float[Array, "R n"]:
    """One device's summary of its ids: six numbers a row, then its likeliest ids and their logits.

    Ids are below 2^24, so float32 holds them.
    """
    first, (peak, mass) = shard.first(law), _mass(law)
    above = law - jnp.where(peak == _NEVER, 0.0, peak)[:, None]
    weight = jnp.exp(above)
    spread = jnp.sum(jnp.where(weight > 0, weight * above, 0.0), axis=-1)
    numbers = [noisy, (first + token).astype(jnp.float32), _at(law, token), peak, mass, spread]
    top_law, top_ids = jax.lax.top_k(law, min(num_top, law.shape[1]))
    top_ids = (first + top_ids).astype(jnp.float32)
    return jnp.concatenate([jnp.stack(numbers, axis=1), top_law, top_ids], axis=1)


def _mass(law: Float[Array, "R V"]) -> tuple[Float[Array, " R"], Float[Array, " R"]]:
    """The largest logit of each row and the sum of weights below it; 0 where all are -inf."""
    peak = jnp.max(law, axis=-1)
    base = jnp.where(peak == _NEVER, 0.0, peak)
    return peak, jnp.sum(jnp.exp(law - base[:, None]), axis=-1)


def relative_to_peak(peaks: Float[Array, "devices R"]) -> tuple[Array, Array, Array]:
    """The peak of all devices; each one's below it, and the factor of its weights."""
    peak = jnp.max(peaks, axis=0)
    base = jnp.where(peak == _NEVER, 0.0, peak)
    sunk = jnp.where(peaks == _NEVER, 0.0, peaks - base[None])
    return peak, sunk, jnp.where(peaks == _NEVER, 0.0, jnp.exp(sunk))


def _joined(parts: Float[Array, "devices R n"], num_top: int) -> TokenStats:
    """Statistics of all ids, from what every device says of its own; see `_part`."""
    noisy, token, own, peaks, masses, spreads = jnp.moveaxis(parts[..., :6], -1, 0)
    best = jnp.argmax(noisy, axis=0)[None]  # of equals the first device, whose ids are lower

    def chosen(values: Float[Array, "devices R"]) -> Float[Array, " R"]:
        return jnp.take_along_axis(values, best, axis=0)[0]

    peak, sunk, kept = relative_to_peak(peaks)
    mass = jnp.sum(kept * masses, axis=0)
    spread = jnp.sum(kept * (spreads + sunk * masses), axis=0)
    tops = jnp.moveaxis(parts[..., 6:], 0, 1)
    tops = tops.reshape(*tops.shape[:2], 2, -1).swapaxes(1, 2).reshape(len(tops), 2, -1)
    top_law, place = jax.lax.top_k(tops[:, 0], num_top)
    return TokenStats(
        token=chosen(token).astype(jnp.int32),
        confidence=jnp.exp(chosen(own) - peak) / mass,
        entropy=jnp.log(mass) - spread / mass,
        top_ids=jnp.take_along_axis(tops[:, 1], place, axis=1).astype(jnp.int32),
        top_probs=jnp.exp(top_law - peak[:, None]) / mass[:, None],
    )


def normaliser(
    law: Float[Array, "R V"], shard: Shard
) -> tuple[Float[Array, " R"], Float[Array, " R"]]:
    """The largest logit of each row over all devices, and the sum of all weights below it."""
    peaks, masses = jnp.moveaxis(shard.of_all(jnp.stack(_mass(law), axis=1)), -1, 0)
    peak, _, kept = relative_to_peak(peaks)
    return peak, jnp.sum(kept * masses, axis=0)
