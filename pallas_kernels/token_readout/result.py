"""The result of a readout, and the merge of results for parts of the vocabulary."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


class TokenReadout(NamedTuple):
    """One row of each a hidden row; what no number is left of has a confidence that is none.

    Attributes:
        token: The likeliest id.
        confidence: Its probability.
        entropy: Of the law, in nats.
        top_ids, top_probs: The likeliest ids and their probabilities, the likeliest first.
    """

    token: Int[Array, " R"]
    confidence: Float[Array, " R"]
    entropy: Float[Array, " R"]
    top_ids: Int[Array, "R n"]
    top_probs: Float[Array, "R n"]


class LawReadout(NamedTuple):
    """What the law of each row says, and the law itself.

    Attributes:
        token: The likeliest id, the lowest of equals.
        rest: Sum of `w = exp(logit - peak)` over all other ids, whose own is 1: a sure law's
            entropy is smaller than the rounding of their sum. NaN where there is no number.
        spread: Sum of `w * (logit - peak)` over the same ids.
        weights: `w / unit`, rounded to the head's type; 0 of forbidden ids.
        shares: Sums of unrounded `w` of `SHARE` neighbouring ids.
        unit: What weights of a row are multiples of.
    """

    token: Int[Array, " R"]
    rest: Float[Array, " R"]
    spread: Float[Array, " R"]
    weights: Float[Array, "R V"]
    shares: Float[Array, "R N"]
    unit: Float[Array, " R"]


SHARE = 256  # ids


class IdClasses(NamedTuple):
    """Classes of ids that rows are read by as well, B slots of consecutive rows.

    Attributes:
        codes: Of each id: its place among the narrow ones, plus 1; or that of its class among the
            wide ones, plus 1 and negative; or 0.
        num_wide: Wide classes of a slot.
        wide_codes, wide_among: The wide classes of ids, and which there are; see `packed_codes`.
        narrow: Ids that are read one by one: of some steps of `ID_STEP` neighbours all, whether
            they have a code or not, then others, rising.
        narrow_from: Where the others of each step begin, and where the last one's end.
        whole_step: A step's number, from 1, among those of which all ids are read; or 0.
        wide: Numbers of the wide classes, of which only their count matters here.
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
CODE_STEP = 8  # ids of which a byte of as many words tells


def packed_codes(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The wide classes of ids, by `IdClasses.codes`, four in a word, and which of 32 ids have.

    Of 32 ids, byte `b` of word `j` is that of id `8 b + j`: its class's place, plus 1, or 0; and
    bit `i` of the other word tells whether there is one of the class in place `i`.
    """
    wide = np.maximum(-codes, 0)
    wide = np.pad(wide, (0, -len(wide) % (4 * CODE_STEP))).reshape(-1, 4, CODE_STEP)
    words = wide.astype(np.uint8).transpose(0, 2, 1)
    bits = np.where(wide > 0, np.uint32(1) << (np.maximum(wide, 1) - 1).astype(np.uint32), 0)
    among = np.bitwise_or.reduce(bits.astype(np.uint32), axis=(1, 2))
    return np.ascontiguousarray(words).view("<i4").ravel(), among.view(np.int32)


class IdReadout(NamedTuple):
    """What rows say of such ids; what a slot has no id or class for is any number.

    Attributes:
        narrow: Logits.
        wide: The largest logit of each wide class.
        wide_token: Lowest id of the class that has it.
        log_mass: Logarithm of the sum of `exp(logit)` over all ids.
    """

    narrow: Float[Array, "R N"]
    wide: Float[Array, "R M"]
    wide_token: Int[Array, "R M"]
    log_mass: Float[Array, " R"]


class Part(NamedTuple):
    """The contribution of a part of the vocabulary, one value per row, or per row and tile.

    Attributes:
        token: Lowest id that has the largest logit of this part.
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

    Source: Milakov and Gimelshein (arXiv 1805.02867), algorithm 3, with the entropy's sum beside.
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
    """The largest of an axis, and the lowest id that has it."""

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
        # The token's own logit is the peak. Where there is no number, the mass is none or 0.
        confidence=1.0 / mass,
        entropy=jnp.log(mass) - whole.spread / mass,
        top_ids=top_ids,
        top_probs=jnp.exp(top_logits - peak[:, None]) / mass[:, None],
    )
