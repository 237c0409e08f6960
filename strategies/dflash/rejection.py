"""Speculative sampling: which drafts stay, by chance, and what is drawn in place of the others.

The text has the distribution of token-by-token decoding, but is another one.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core import random
from ..core.forward import Forward, ForwardOutput
from ..core.state import NO_TOKEN, DecodeState

DRAFTS, CHANCES = 1, 2  # further draws of a position; the text is drawn with 0


def judge(
    forward: Forward,
    draft: Forward,
    state: DecodeState,
    out: ForwardOutput,
    drafted: ForwardOutput | None,
    block: Int[Array, "B T"],
) -> tuple[Int[Array, "B 1 S"], Int[Array, " B"]]:
    """The tokens after the anchor by speculative sampling, and how many drafts stay.

    Rows at temperature 0 take the most probable token, as with matching.

    Args:
        out, drafted: The passes of the target and of the drafter; None: nothing was drafted.
        block: The anchor and the drafts after it.
    """
    B, width = block.shape
    sampling, row = state.sampling, jnp.arange(B)
    law = forward.drawn_law(out.hidden[:, 0, :width], sampling)
    guesses = jnp.zeros_like(law[:, :0])
    if drafted is not None:
        guesses = draft.drawn_law(drafted.hidden[:, 0, 1:width], sampling)
    chances = random.position_uniforms(state, CHANCES)[:, 0, 1:width]
    right, left = reject(jax.nn.softmax(law), jax.nn.softmax(guesses), block[:, 1:], chances)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, law.shape[2:], jnp.float32))(
        random.position_keys(state)[row, 0, right + 1]
    )
    own = jnp.argmax(jnp.log(left) + noise, axis=1)[:, None]
    place = jnp.arange(width)[None]
    kept = jnp.pad(block[:, 1:], ((0, 0), (0, 1)))
    drawn = jnp.where(place < right[:, None], kept, own)
    best = jnp.argmax(law, axis=2)
    tempered = sampling.temperature > 0
    is_wrong = (best != kept) | (place == width - 1)
    right = jnp.where(tempered, right, jnp.argmax(is_wrong, axis=1))
    truth = jnp.where(tempered[:, None], drawn, best).astype(jnp.int32)
    truth = jnp.where(jnp.isfinite(jnp.max(law, axis=2)), truth, NO_TOKEN)
    window = ((0, 0), (1, state.buffer.tokens.shape[2] - 1 - width))
    return jnp.pad(truth, window)[:, None], right.astype(jnp.int32)


def reject(
    target: Float[Array, "B T V"],
    draft: Float[Array, "B T-1 V"],
    tokens: Int[Array, "B T-1"],
    chances: Float[Array, "B T-1"],
) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
    """Speculative sampling: which drafts stay, and the distribution of the token after them.

    A draft d stays where u q(d) < p(d). After the first that does not, the token is drawn from
    what p has more than q; after all of them, from p. Each token then has the distribution p.

    Args:
        target: Probabilities p of the token after the anchor, and after each draft.
        draft: Probabilities q that the drafts were drawn from. NaN and infinity count as 0: such
            a draft never stays, and the token is drawn from p.
        tokens: The drafts.
        chances: u, uniform in [0, 1), independent of the drafts.

    Returns:
        The number of drafts that stay, and probabilities.

    Source: Leviathan et al. (arXiv 2211.17192), algorithm 1; Chen et al. (arXiv 2302.01318).
    """
    draft = jnp.where(jnp.isfinite(draft), draft, 0.0)
    ids = jnp.maximum(tokens, 0)[:, :, None]
    draft_chance = jnp.take_along_axis(draft, ids, axis=2)[:, :, 0]
    wanted = jnp.take_along_axis(target[:, :-1], ids, axis=2)[:, :, 0]
    stays = (chances * draft_chance < wanted) & (draft_chance > 0)
    is_last = jnp.pad(~stays, ((0, 0), (0, 1)), constant_values=True)
    right = jnp.argmax(is_last, axis=1).astype(jnp.int32)
    at = right[:, None, None]
    p = jnp.take_along_axis(target, at, axis=1)[:, 0]
    q = jnp.take_along_axis(jnp.pad(draft, ((0, 0), (0, 1), (0, 0))), at, axis=1)[:, 0]
    left = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(left, axis=1, keepdims=True)
    # With no mass left only rounding rejected the draft, and p is as good.
    return right, jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1.0), p)
