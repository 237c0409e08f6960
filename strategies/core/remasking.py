"""Remasking of a whole text: which of its holes a forward fills, by a schedule and a score.

A *schedule* says how many holes of the current block are filled now, a *score* which ones. LLaDA
spreads a block evenly over its forwards. Dream's timesteps go evenly from 1 down to `eps`, and of
the holes that are left a forward fills the share by which its timestep falls.

A block here is a stretch of the text counted from the prompt's end (semi-autoregressive decoding),
which has nothing to do with the blocks of the window. A hole is any cell before the request's limit
that is not filled.

Source: LLaDA (arXiv 2502.09992), `generate.py`; Dream (arXiv 2508.15487), `diffusion_generate`.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from . import sampling
from .forward import TokenStats
from .state import DecodeState

Score = Literal["low_confidence", "maskgit_plus", "margin", "entropy", "random"]

# Dream's eps is 1 / 1000: its timesteps are whole numbers of thousandths of a step.
_THOUSAND, _SPAN = 1000, 999


class TextBlock(NamedTuple):
    """The block of the text that is filled now.

    Attributes:
        number: Which one, from 0.
        begin, end: Its absolute positions; the request's limit may cut it.
        cells: Its cells.
    """

    number: Int[Array, " B"]
    begin: Int[Array, " B"]
    end: Int[Array, " B"]
    cells: Bool[Array, "B K S"]


def text_cells(state: DecodeState) -> Bool[Array, "B K S"]:
    """Prompt, text and what follows it: all cells that are filled or will be."""
    buffer = state.buffer
    return buffer.filled | (buffer.positions < buffer.limit[:, None, None])


def current_block(state: DecodeState, block_length: int | None) -> TextBlock:
    """The leftmost block of `block_length` cells that has a hole; None: the whole text is one."""
    buffer = state.buffer
    holes = text_cells(state) & ~buffer.filled
    first = jnp.min(jnp.where(holes, buffer.positions, buffer.limit[:, None, None]), axis=(1, 2))
    if block_length is None:
        number, begin, end = jnp.zeros_like(first), buffer.prompt_len, buffer.limit
    else:
        number = (first - buffer.prompt_len) // block_length
        begin = buffer.prompt_len + number * block_length
        end = jnp.minimum(begin + block_length, buffer.limit)
    after = buffer.positions >= begin[:, None, None]
    return TextBlock(number, begin, end, after & (buffer.positions < end[:, None, None]))


# --- how many -------------------------------------------------------------------------------------


def even_quota(
    holes: Int[Array, " B"], steps: Int[Array, " B"], step: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Holes to fill in forward `step` so that `holes` take `steps` of them, remainder first.

    Args:
        holes: Of the block when it began.
        steps: At least 1.
        step: From 0.

    Source: LLaDA, `get_num_transfer_tokens`.
    """
    return holes // steps + (step < holes % steps).astype(jnp.int32)


def timestep_quota(
    holes: Int[Array, " B"], steps: Int[Array, " B"], step: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Holes to fill between timesteps t and s: `int(holes * (1 - s / t))`, all in the last forward.

    May be 0. With t = 1 - i (1 - eps) / steps the product is 999 holes / (1000 steps - 999 i),
    computed in whole numbers. The authors' float32 falls to either side where that is a whole
    number, which takes steps that share a factor with 999, and else errs once in 10,000 forwards;
    a token then comes a forward earlier or later.

    Args:
        holes: Of the block now.
        steps: At least 1, at most a million.
        step: From 0.

    Source: Dream, `_sample`.
    """
    share = _SPAN * holes // (_THOUSAND * steps - _SPAN * jnp.minimum(step, steps - 1))
    return jnp.where(step >= steps - 1, holes, share)


def timestep_chance(steps: Int[Array, " B"], step: Int[Array, " B"]) -> Float[Array, " B"]:
    """The chance 1 - s / t at which each hole is filled between two timesteps; 1 in the last.

    Source: Dream, `_sample`, `origin`: the reverse process of masked diffusion as it is.
    """
    left = _THOUSAND * steps - _SPAN * jnp.minimum(step, steps - 1)
    chance = jnp.float32(_SPAN) / left.astype(jnp.float32)
    return jnp.where(step >= steps - 1, 1.0, chance)


# --- which ones -----------------------------------------------------------------------------------


def scores(
    score: Score, stats: TokenStats, noise: Float[Array, "B K S"] | None = None
) -> Float[Array, "B K S"]:
    """What the holes are ranked by, the highest first.

    Args:
        score: "low_confidence" and "maskgit_plus": the token's probability (the one before, the
            other after temperature, top-k and top-p: the caller asks `predict` for it); "margin":
            that of the likeliest less that of the next; "entropy": the lowest first; "random".
        noise: Uniform numbers, for "random".

    Source: LLaDA, `generate`; Dream, `sample_tokens` (entropy with no epsilon in the logarithm).
    """
    match score:
        case "low_confidence" | "maskgit_plus":
            return stats.confidence
        case "margin":
            return sampling.margin(stats)
        case "entropy":
            return -stats.entropy
        case "random":
            if noise is None:
                raise ValueError("score='random' ranks by noise; give uniform numbers a cell")
            return noise


def best_cells(
    score: Float[Array, "B K S"], count: Int[Array, " B"], among: Bool[Array, "B K S"]
) -> Bool[Array, "B K S"]:
    """The `count` best-scored cells of the whole window, ties to the lowest position."""
    B = among.shape[0]
    best = sampling.top_n(score.reshape(B, 1, -1), count[:, None], among.reshape(B, 1, -1))
    return best.reshape(among.shape)
