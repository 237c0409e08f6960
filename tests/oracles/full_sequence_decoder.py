"""Full-sequence decoding as its authors' loops: lists, NumPy, no window, no vectors, no jax.

Written from the algorithms of LLaDA's `generate.py` (`get_num_transfer_tokens`, blocks from the
prompt's end, low-confidence and random remasking), Dream's `_sample` (timesteps from 1 to eps;
maskgit_plus, topk_margin, entropy, origin) and Fast-dLLM's loops with a prefix or dual cache.
Besides theirs: a block without holes costs nothing, the last block may be short, `steps` need not
divide, a threshold takes tokens besides the quota, and a text ends at a stop id after which nothing
is waited for.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.oracles.list_decoder import ACTIVE, DUMMY, Asked, Block, Law, Result

EPS = 1e-3
OF_LLADA = ("low_confidence", "random")


@dataclass(frozen=True)
class Pass:
    """One forward: the positions run, how many others it saw in the cache, how many it stored."""

    first: int
    end: int
    cached: int
    stored: int


@dataclass
class Decoded(Result):
    """A run with its passes."""

    passes: list[Pass] = field(default_factory=list)


def get_num_transfer_tokens(mask_num: int, steps: int) -> list[int]:
    base, remainder = divmod(mask_num, steps)
    return [base + (1 if i < remainder else 0) for i in range(steps)]


def number_transfer_tokens(mask_num: int, steps: int, i: int) -> int:
    """Dream's, in float64."""
    timesteps = np.linspace(1, EPS, steps + 1)
    return int(mask_num * (1 - timesteps[i + 1] / timesteps[i])) if i < steps - 1 else mask_num


def p_transfer(steps: int, i: int) -> float:
    timesteps = np.linspace(1, EPS, steps + 1)
    return float(1 - timesteps[i + 1] / timesteps[i]) if i < steps - 1 else 1.0


def margin_of(law: Law, prob: Any, vocab_size: int) -> np.float32:
    """The likeliest less the next one; the mask and the token aside, the rest is even."""
    p = np.float32(prob)
    other = np.float32((np.float32(1) - p) / np.float32(vocab_size - 2))
    return np.float32(max(p - other, 0))


def guided(
    own: tuple[int, float], other: tuple[int, float], scale: float, mask_id: int, vocab_size: int
) -> Law:
    """LLaDA's `un_logits + (cfg_scale + 1) * (logits - un_logits)`, of scripted laws in float64."""
    logits, un_logits = (
        np.log([p if i == token else (1 - p) / (vocab_size - 2) for i in range(vocab_size)])
        for token, p in (own, other)
    )
    moved = un_logits + (scale + 1) * (logits - un_logits)
    moved[mask_id] = -np.inf
    law = np.exp(moved - moved.max())
    law /= law.sum()
    return Law(int(law.argmax()), np.float32(law.max()), 0.0)


# Of each hole: its token, how sure the model is of it, and what it is ranked by.
Told = dict[int, tuple[int, Any, Any]]
# What a forward says of the holes, given the block's ends and whether it is the block's first; None
# where a script is at its end.
Read = Callable[[int, int, bool, list[int]], Told | None]


def denoise(
    x: list[int | None],
    prompt_len: int,
    limit: int,
    read: Read,
    *,
    remasking: str,
    accept_threshold: Any,
    steps: int | None,
    block_length: int | None,
) -> Iterator[int]:
    """Fill a text, of a script or of a network; how many tokens each forward writes.

    What is given after `limit` is seen alone.
    """
    size = block_length or limit - prompt_len
    starts = range(prompt_len, limit, size)
    for begin in starts:
        end = min(begin + size, limit)
        mask_num = x[begin:end].count(None)
        share = mask_num if steps is None else max(steps // len(starts), 1)
        for i in itertools.count():
            holes = [p for p in range(begin, end) if x[p] is None]
            if not holes:
                break
            told = read(begin, end, i == 0, holes)
            if told is None:
                return
            if remasking == "origin":
                chance = np.float32(p_transfer(share, i))
                transfer = [p for p in holes if told[p][2] < chance]
            else:
                if remasking in OF_LLADA:
                    count = get_num_transfer_tokens(mask_num, share)[i]
                else:
                    count = number_transfer_tokens(len(holes), share, i)
                    count = max(count, 1 if accept_threshold < 1 else 0)  # Fast-dLLM's
                transfer = sorted(holes, key=lambda p: (-told[p][2], p))[:count]
            above = [p for p in holes if told[p][1] > accept_threshold]
            written = {*transfer, *above}
            for p in written:
                x[p] = told[p][0]
            yield len(written)


def full_sequence_decode(
    prompt: Sequence[int],
    token: Any,
    prob: Any,
    *,
    remasking: str,
    steps: int | None,
    block_length: int | None,
    accept_threshold: float,
    cache: str | None = None,
    cfg_scale: float = 0.0,
    uniform: Callable[[int, int], float] | None = None,
    **limits: Any,
) -> Decoded:
    """Decodes one request greedily from a script; with guidance a step reads two rows of it.

    Args:
        uniform: The number in [0, 1) drawn for (forward, position).
    """
    asked, result = Asked(prompt=prompt, **limits), Decoded()
    limit, mask_id, vocab_size = asked.limit, asked.mask_id, asked.vocab_size
    x: list[int | None] = [*prompt, *[None] * (limit - len(prompt))]
    forwards = iter(zip(token, prob, strict=True))

    def score(p: int, forward: Any, law: Law) -> Any:
        if remasking in ("random", "origin"):
            assert uniform is not None
            return uniform(result.nfe, p)
        if remasking == "margin":
            return margin_of(law, forward[1][p], vocab_size)
        return -law.entropy if remasking == "entropy" else law.confidence

    def read(begin: int, end: int, is_first: bool, holes: list[int]) -> Told | None:
        forward = next(forwards, None)
        if forward is None:
            return None
        result.passes.append(_pass(cache, begin, end, is_first, limit))
        laws = {p: asked.law(forward, p) for p in holes}
        if cfg_scale:
            other = next(forwards)
            for p in holes:
                both = ((int(row[0][p]), float(row[1][p])) for row in (forward, other))
                laws[p] = guided(*both, cfg_scale, mask_id, vocab_size)
        return {p: (law.token, law.confidence, score(p, forward, law)) for p, law in laws.items()}

    least = np.float32(accept_threshold)
    how: Any = {"remasking": remasking, "steps": steps, "block_length": block_length}
    for new in denoise(x, len(prompt), limit, read, accept_threshold=least, **how):
        result.nfe += 2 if cfg_scale else 1
        if asked.ends(result, x[len(prompt) :], new):
            return result
        size = asked.block_size
        cells = x + [None] * (size * asked.buffer_size - len(x))
        starts = range(0, len(cells), size)
        blocks = [Block(s, cells[s : s + size], ACTIVE if s < limit else DUMMY) for s in starts]
        result.steps.append(asked.draw(blocks, new))
    assert None in x, "the text is full and the request goes on"
    return result


def _pass(cache: str | None, begin: int, end: int, is_first: bool, limit: int) -> Pass:
    if cache is None:
        return Pass(0, limit, 0, 0)
    if is_first:
        return Pass(0, limit, 0, limit)
    if cache == "prefix":
        return Pass(begin, limit, begin, 0)
    return Pass(begin, end, limit - (end - begin), 0)
