"""The result of a readout, and the merge of results for parts of the vocabulary."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


class TokenReadout(NamedTuple):
    """Results by hidden row; confidence is not finite if a logit is NaN or all are forbidden.

    Attributes:
        token: The likeliest id.
        confidence: Its probability.
        entropy: Entropy of the law, in nats.
        top_ids, top_probs: The likeliest ids and their probabilities, the likeliest first.
    """

    token: Int[Array, " R"]
    confidence: Float[Array, " R"]
    entropy: Float[Array, " R"]
    top_ids: Int[Array, "R n"]
    top_probs: Float[Array, "R n"]


class LawReadout(NamedTuple):
    """Statistics of the law of each row, and the law.

    Attributes:
        token: The likeliest id, the lowest of equals.
        rest: Sum of `w = exp(logit - peak)` over all ids but the token, whose `w` is 1. It is kept
            apart since the entropy of a near-certain law is below the rounding of the full sum.
            NaN for a row without finite logits.
        spread: Sum of `w * (logit - peak)` over the same ids.
        weights: `w / unit`, rounded to the type of the head; 0 for forbidden ids.
        shares: Sums of unrounded `w` over `SHARE` adjacent ids.
        unit: Unit of the weights of each row.
    """

    token: Int[Array, " R"]
    rest: Float[Array, " R"]
    spread: Float[Array, " R"]
    weights: Float[Array, "R V"]
    shares: Float[Array, "R N"]
    unit: Float[Array, " R"]


SHARE = 256  # ids


class IdClasses(NamedTuple):
    """Classes of ids to read, for B slots of consecutive rows.

    Attributes:
        codes: For each id 1 + its index in `narrow`, or minus (1 + index of its wide class), or 0.
        num_wide: Number of wide classes of a slot.
        wide_codes, wide_among: Packed wide classes of ids; see `packed_codes`.
        narrow: Ids that are read individually: first all ids of some steps of `ID_STEP` adjacent
            ids, with or without a code, then single ids in rising order.
        narrow_from: Index in `narrow` of the first single id of each step, then the end.
        whole_step: For each step 1 + its index among the steps that are read whole, or 0.
        wide: Numbers of the wide classes; only their count matters here.
    """

    codes: Int[Array, "B V"]
    wide_codes: Int[Array, "B U"]
    wide_among: Int[Array, "B U8"]
    num_wide: Int[Array, " B"]
    narrow: Int[Array, "B N"]
    narrow_from: Int[Array, "B X"]
    whole_step: Int[Array, "B X"]
    wide: Int[Array, "B M"]


ID_STEP = 64
CODE_STEP = 8  # words of a group: byte `b` of word `j` belongs to id `8 b + j`


def packed_codes(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pack the wide classes in `IdClasses.codes`, four ids a word, and the classes of each 32 ids.

    Byte `b` of word `j` holds 1 + the wide class of id `8 b + j` of each 32 ids, or 0. Bit `i` of
    the second result is set if class `i` occurs among the 32 ids.
    """
    wide = np.maximum(-codes, 0)
    wide = np.pad(wide, (0, -len(wide) % (4 * CODE_STEP))).reshape(-1, 4, CODE_STEP)
    words = wide.astype(np.uint8).transpose(0, 2, 1)
    bits = np.where(wide > 0, np.uint32(1) << (np.maximum(wide, 1) - 1).astype(np.uint32), 0)
    among = np.bitwise_or.reduce(bits.astype(np.uint32), axis=(1, 2))
    return np.ascontiguousarray(words).view("<i4").ravel(), among.view(np.int32)


class IdReadout(NamedTuple):
    """The readout of `IdClasses`; entries without an id or class are arbitrary.

    Attributes:
        narrow: Logits of the narrow ids.
        wide: The largest logit of each wide class.
        wide_token: Lowest id of the class with this logit.
        log_mass: Logarithm of the sum of `exp(logit)` over all ids.
    """

    narrow: Float[Array, "R N"]
    wide: Float[Array, "R M"]
    wide_token: Int[Array, "R M"]
    log_mass: Float[Array, " R"]


class Part(NamedTuple):
    """Statistics of a part of the vocabulary, one value per row, or per row and tile.

    Attributes:
        token: Lowest id with the largest logit of this part.
        peak: That logit.
        mass: Sum of `w = exp(logit - peak)`; 0 where the peak is -inf.
        spread: Sum of `w * (logit - peak)`.
    """

    token: Array
    peak: Array
    mass: Array
    spread: Array


def join(a: Part, b: Part) -> Part:
    """Merge two parts; ties go to the lowest id.

    Source: Milakov and Gimelshein (arXiv 1805.02867), algorithm 3, plus the sum for the entropy.
    """
    first = (a.peak > b.peak) | ((a.peak == b.peak) & (a.token < b.token))
    peak = jnp.maximum(a.peak, b.peak)

    def brought(part: Part) -> tuple[Array, Array]:
        # A part whose logits are all -inf has no mass, and -inf - -inf is NaN.
        down = jnp.where(part.peak == -jnp.inf, 0.0, part.peak - peak)
        weight = jnp.exp(down)
        return weight * part.mass, weight * (part.spread + part.mass * down)

    (mass_a, spread_a), (mass_b, spread_b) = brought(a), brought(b)
    return Part(
        token=jnp.where(first, a.token, b.token),
        peak=peak,
        mass=mass_a + mass_b,
        spread=spread_a + spread_b,
    )


def joined(parts: Part) -> Part:
    """Merge the parts along the last axis in a single pass."""
    zero, no_id = jnp.float32(0), jnp.int32(jnp.iinfo(jnp.int32).max)
    none = Part(token=no_id, peak=jnp.float32(-jnp.inf), mass=zero, spread=zero)
    axis = parts.peak.ndim - 1

    def combine(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(join(Part(*a), Part(*b)))

    return Part(*jax.lax.reduce(tuple(parts), tuple(none), combine, (axis,)))


def joined_maxima(value: Array, token: Array, axis: int) -> tuple[Array, Array]:
    """The largest value along an axis, and the lowest id with it."""

    def combine(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jnp.maximum(a[0], b[0]), jnp.where(first, a[1], b[1])

    none = jnp.float32(-jnp.inf), jnp.int32(jnp.iinfo(jnp.int32).max)
    return jax.lax.reduce((value, token), none, combine, (axis,))


def finish(
    whole: Part, top_logits: Float[Array, "R n"], top_ids: Int[Array, "R n"]
) -> TokenReadout:
    """Probabilities and entropy of the whole vocabulary."""
    peak, mass = whole.peak, whole.mass
    return TokenReadout(
        token=whole.token,
        # The token's logit is the peak. Without a finite logit the mass is NaN or 0.
        confidence=1.0 / mass,
        entropy=jnp.log(mass) - whole.spread / mass,
        top_ids=top_ids,
        top_probs=jnp.exp(top_logits - peak[:, None]) / mass[:, None],
    )
