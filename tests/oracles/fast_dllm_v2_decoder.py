"""Fast-dLLM v2 as lists: an unbounded decoder without window, vectors or jax.

The oracle of `FastDLLMV2`, written apart from `strategies/`. A request is one growing list of cells
from position 0, `None` where nothing is written yet. Each forward is a `Pass`, which says what a
model would have run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.oracles.list_decoder import ACTIVE, DUMMY, TO_CACHE, Asked, Result, Step


@dataclass(frozen=True)
class Pass:
    """One forward: INIT, REFINE, COMMIT, or FULL where there is no block cache.

    `first` and `end` are the positions run, `context` how many before them the cache shows, and
    `stored` how many of those run were put into the cache.
    """

    mode: str
    first: int
    end: int
    context: int
    stored: int


@dataclass
class Decoded(Result):
    """A run with its passes."""

    passes: list[Pass] = field(default_factory=list)


def fast_dllm_v2_decode(
    prompt: Sequence[int],
    token: Any,
    prob: Any,
    *,
    sub_block_size: int,
    accept_threshold: float,
    use_block_cache: bool = True,
    **limits: Any,
) -> Decoded:
    """Decodes one request greedily from a script."""
    asked, result = Asked(prompt=prompt, **limits), Decoded()
    limit, block_size = asked.limit, asked.block_size
    text: list[int | None] = list(prompt)
    start = len(prompt) - len(prompt) % block_size  # what is before it is in the cache
    is_cached = False  # whether the block of `start` stands in the cache as it last was
    if len(text) > start:
        text += [None] * (start + block_size - len(text))

    for row in zip(token, prob, strict=True):
        end = min(start + block_size, limit)
        new = 0
        if len(text) == start:  # a new block; the row before it tells its first token
            text += [asked.law(row, start).token] + [None] * (block_size - 1)
            new = 1
        holes = [p for p in range(start, end) if text[p] is None]
        was_whole = not holes and not new and None not in text[start:]
        if was_whole:
            result.passes.append(Pass("COMMIT", start, end, start, end - start))
        else:
            # Leftmost sub-block with a hole. The seed may have filled all that the limit leaves.
            sub = (holes[0] if holes else start) // sub_block_size * sub_block_size
            sub_end = min(sub + sub_block_size, end)
            if not use_block_cache:
                result.passes.append(Pass("FULL", start, end, start, 0))
            elif not is_cached or not holes or text[sub] is None:
                result.passes.append(Pass("INIT", start, end, start, end - start))
            else:
                result.passes.append(Pass("REFINE", sub, sub_end, end, sub_end - sub))
            is_cached = True
            mine = [p for p in holes if p < sub_end]
            if mine:
                laws = {p: asked.law(row, p) for p in mine}
                best = max(mine, key=lambda p: (laws[p].confidence, -p))
                for p in mine:
                    if p == best or laws[p].confidence > np.float32(accept_threshold):
                        text[p] = laws[p].token
                        new += 1

        result.nfe += 1
        if asked.ends(result, text[len(prompt) :], new):
            break
        if was_whole:
            start, is_cached = start + block_size, False
        shown = [asked.mask_id if cell is None else cell for cell in text[start:]]
        status = DUMMY if not shown else ACTIVE if None in text[start:] else TO_CACHE
        shown = shown or [asked.mask_id] * block_size
        result.steps.append(Step(start, [shown], [status], new))
    return result
