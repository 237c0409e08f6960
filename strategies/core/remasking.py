"""Remasking of a whole text: which of its holes a forward fills, by a schedule and a score.

A *schedule* is how many holes of the current block are filled, a *score* is which ones. LLaDA
spreads a block evenly over its forwards. Dream's timesteps go evenly from 1 down to `eps`, and a
forward fills the share of the remaining holes by which its timestep falls.

A block here is a stretch of the text counted from the prompt's end (semi-autoregressive decoding),
not a block of the window. A hole is any cell before the request's limit that is not filled.

Source: LLaDA (arXiv 2502.09992), `generate.py`; Dream (arXiv 2508.15487), `diffusion_generate`.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from . import random, sampling
from .forward import TokenStats
from .knobs import Threshold, at_slot
from .state import DecodeState

Rule = Literal["low_confidence", "random", "maskgit_plus", "margin", "entropy", "origin"]

OF_LLADA = ("low_confidence", "random")  # the others are Dream's
DRAW_STREAM, _ORDER_STREAM = 0, 1  # salts: the token of a cell, and the order of the cells

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


def no_block() -> dict[str, Array]:
    """Leaves for `Carry(slot=...)` of a request that has no forward yet.

    Returns:
        `block` [1]: the block of the last forward. `holes` [1]: the holes that it began with.
        `step` [1]: its forwards before that one.
    """
    none = jnp.zeros((1,), jnp.int32)
    return {"block": none - 1, "holes": none, "step": none}


def count(
    state: DecodeState, block: TextBlock, holes: Bool[Array, "B K S"]
) -> tuple[DecodeState, Bool[Array, " B"]]:
    """Count a forward of `block` into the carry; also returns the rows whose block is new."""
    slot = state.carry.slot
    is_new = slot["block"] != block.number
    now = {
        "block": block.number,
        "holes": jnp.where(is_new, jnp.sum(holes, axis=(1, 2), dtype=jnp.int32), slot["holes"]),
        "step": jnp.where(is_new, 0, slot["step"] + 1),
    }
    return state.replace(carry=state.carry.replace(slot=now)), is_new


def next_of(
    phrase: tuple[int, ...], state: DecodeState, holes: Bool[Array, "B K S"]
) -> tuple[Int[Array, "B K S"], Float[Array, "B K S"]]:
    """The id that goes on with `phrase` at each cell, and how far the text is.

    Returns:
        The id after the part of the phrase that ends before a cell, else its first id. At the
        leftmost of `holes` the share of the limit up to and with it, 0 elsewhere and where the text
        holds the phrase.

    Source: iLLaDA, the boost that ends its thoughts.
    """
    buffer, count = state.buffer, len(phrase)
    number = buffer.positions - buffer.prompt_len[:, None, None] + 1  # index in the text, from 1
    text = jnp.where(buffer.filled & (number > 0), buffer.tokens, -1).reshape(len(holes), -1)
    padded = jnp.pad(text, ((0, 0), (count, 0)), constant_values=-1)
    before = jnp.stack([padded[:, i : i + text.shape[1]] for i in range(count)], axis=-1)
    # [B, W, count]: whether the first 1, 2, ... ids of the phrase stand right before a cell
    ends = (
        before[..., count - n :] == jnp.asarray(phrase[:n])[None, None] for n in range(1, count + 1)
    )
    stands = jnp.stack([jnp.all(end, axis=-1) for end in ends], axis=-1)
    longest = jnp.max(
        jnp.where(stands[..., :-1], jnp.arange(1, count)[None, None], 0), axis=-1, initial=0
    )
    leftmost = holes & (jnp.cumsum(holes.reshape(text.shape), 1).reshape(holes.shape) == 1)
    goes_on = leftmost & ~jnp.any(stands[..., -1], axis=1)[:, None, None]
    share = number / jnp.maximum(buffer.limit - buffer.prompt_len, 1)[:, None, None]
    ids = jnp.asarray(phrase)[longest].reshape(holes.shape)
    return ids, jnp.where(goes_on, jnp.clip(share, 0, 1), 0)


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
    computed in whole numbers. Where that quotient is whole, the authors' float32 may round down
    (only if `steps` shares a factor with 999); else it errs once in 10,000 forwards. A token then
    comes a forward earlier or later.

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

    Source: Dream, `_sample`, `origin`: the plain reverse process of masked diffusion.
    """
    left = _THOUSAND * steps - _SPAN * jnp.minimum(step, steps - 1)
    chance = jnp.float32(_SPAN) / left.astype(jnp.float32)
    return jnp.where(step >= steps - 1, 1.0, chance)


def forwards_of_block(
    state: DecodeState, holes: Int[Array, " B"], steps: int | None, block_length: int | None
) -> Int[Array, " B"]:
    """How many forwards a block takes, at least 1.

    Args:
        holes: Of the block when it began.
        steps: Forwards of the whole text, shared evenly by its blocks; None: one for each hole.
        block_length: Cells of a block; None: the whole text is one.
    """
    if steps is None:
        count = holes
    elif block_length is None:
        count = jnp.full_like(holes, steps)
    else:
        length = state.buffer.limit - state.buffer.prompt_len
        count = steps // jnp.maximum(-(-length // block_length), 1)
    return jnp.maximum(count, 1)


# --- which ones -----------------------------------------------------------------------------------


def scores(
    score: Rule, stats: TokenStats, noise: Float[Array, "B K S"] | None = None
) -> Float[Array, "B K S"]:
    """The scores that holes are ranked by, the highest first.

    Args:
        score: "low_confidence" and "maskgit_plus": the token's probability, before and after
            temperature, top-k and top-p (the caller asks `predict` for it). "margin": that of the
            likeliest less that of the next. "entropy": the lowest first. "random".
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
        case "origin":
            raise ValueError("score='origin' takes holes by chance and ranks none; use fill")


def best_cells(
    score: Float[Array, "B K S"],
    count: Int[Array, " B"],
    among: Bool[Array, "B K S"],
    width: int | None = None,
) -> Bool[Array, "B K S"]:
    """The `count` best-scored cells of the whole window, ties to the lowest position.

    Args:
        width: All of `among` lie within this many cells; then only these are compared in pairs.
    """
    B, size = len(among), among[0].size
    flat, among = score.reshape(B, size), among.reshape(B, size)
    if width is None or width >= size:
        return sampling.top_n(flat[:, None], count[:, None], among[:, None]).reshape(score.shape)
    first = jnp.minimum(jnp.argmax(among, axis=1), size - width)[:, None]
    cell = first + jnp.arange(width)[None]
    near = (jnp.take_along_axis(x, cell, axis=1)[:, None] for x in (flat, among))
    best = sampling.top_n(next(near), count[:, None], next(near))[:, 0]
    place = jnp.arange(size)[None] - first
    held = jnp.take_along_axis(best, jnp.clip(place, 0, width - 1), axis=1)
    return (held & (place >= 0) & (place < width)).reshape(score.shape)


# --- both -----------------------------------------------------------------------------------------


def fill(
    rule: Rule,
    stats: TokenStats,
    state: DecodeState,
    holes: Bool[Array, "B K S"],
    steps: int | None,
    block_length: int | None,
    accept_threshold: Threshold,
) -> Bool[Array, "B K S"]:
    """The holes of the current block that a forward fills, once `count` has counted it.

    Args:
        rule: LLaDA's spread a block evenly over its forwards and take the most probable tokens or
            "random" ones. Dream's go by timesteps: "maskgit_plus", "margin" and "entropy" take the
            best by that score, "origin" takes each hole by chance.
        holes: Of the block now.
        steps, block_length: As of `forwards_of_block`.
        accept_threshold: Below 1 a score of Dream's takes a hole at least.
    """
    at_begin, step = state.carry.slot["holes"], state.carry.slot["step"]
    forwards = forwards_of_block(state, at_begin, steps, block_length)
    if rule == "origin":
        chance = timestep_chance(forwards, step)[:, None, None]
        return holes & (random.uniforms(state, _ORDER_STREAM) < chance)
    if rule in OF_LLADA:
        number = even_quota(at_begin, forwards, step)
    else:
        left = jnp.sum(holes, axis=(1, 2), dtype=jnp.int32)
        least = jnp.asarray(at_slot(accept_threshold) < 1).astype(jnp.int32)
        number = jnp.maximum(timestep_quota(left, forwards, step), least)
    noise = random.uniforms(state, _ORDER_STREAM) if rule == "random" else None
    return best_cells(scores(rule, stats, noise), number, holes, block_length)
