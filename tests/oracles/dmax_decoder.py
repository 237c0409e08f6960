"""DMax as lists: an unbounded decoder without window, vectors or jax.

The oracle of `DMax`, token for token and mixture for mixture, written apart from `strategies/`. A
request is one growing list of blocks from position 0; `None` is a hole.

A *script* stands for the model: `token[i][p]` and `prob[i][p]` say what forward `i` after prefill
predicts at absolute position `p`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.oracles.list_decoder import ACTIVE, DUMMY, IN_CACHE, TO_CACHE, Law, Result, Step, law_of

Mixture = tuple[int, np.float32]  # a token, and its probability; the rest is the mask's


@dataclass
class SoftBlock:
    """One block of the request, with what its cells show in the next forward."""

    start: int
    cells: list[int | None]
    status: int
    forwards: int = 0  # those it had while ACTIVE
    same_ratio: np.floating = field(default_factory=lambda: np.float32(0))
    soft: dict[int, Mixture] = field(default_factory=dict)

    def holes(self) -> list[int]:
        return [i for i, cell in enumerate(self.cells) if cell is None]


@dataclass
class SoftResult(Result):
    """`shown[i]`: by position, the mixtures that forward i was given; the others were plain."""

    shown: list[dict[int, Mixture]] = field(default_factory=list)


@dataclass(frozen=True)
class Rules:
    """The numbers of the algorithm; `paper` chooses the paper's rules or Diffulex's."""

    accept: float = 0.5
    add: float = 0.1
    stability: float = 0.0
    commit: float = 0.9
    paper: bool = True


def denoise(
    block: SoftBlock, laws: list[Law], rules: Rules, prompt_len: int, limit: int
) -> tuple[bool, int]:
    """Writes an ACTIVE block; says whether it may leave, and how many holes it lost."""
    before = list(block.cells)
    mine = [i for i in range(len(before)) if block.start + i >= prompt_len]
    counting = [i for i in mine if block.start + i < limit]
    confidence = [law.confidence for law in laws]
    if not rules.paper:  # the fast path: old tokens are certain
        confidence = [
            np.float32(1) if cell is not None else sure
            for cell, sure in zip(before, confidence, strict=True)
        ]

    # How many of the filled cells the model would leave, those of the prompt among them.
    filled = [i for i, cell in enumerate(before) if cell is not None]
    equal = sum(before[i] == laws[i].token for i in filled)
    block.same_ratio = np.float32(equal) / np.float32(len(filled)) if filled else np.float32(1)

    run: list[int] = []
    for i in block.holes():
        if laws[i].confidence < np.float32(rules.accept):
            break
        run.append(i)
    run = run or block.holes()[:1]
    for i in mine:
        if i in run or before[i] is not None:
            block.cells[i] = laws[i].token
    block.soft = {i: (laws[i].token, confidence[i]) for i in mine if block.cells[i] is not None}
    block.forwards += 1

    unchanged = all(block.cells[i] == before[i] for i in counting)
    confident = all(confidence[i] >= np.float32(rules.commit) for i in counting)
    tired = rules.paper and block.forwards >= len(before)
    complete = all(block.cells[i] is not None for i in counting)
    return complete and (unchanged or confident or tired), len(run)


def dmax_decode(
    rules: Rules,
    prompt: Sequence[int],
    token: Any,
    prob: Any,
    *,
    block_size: int,
    buffer_size: int,
    max_tokens: int,
    mask_id: int,
    vocab_size: int,
    eos_ids: Sequence[int] = (),
    max_model_len: int | None = None,
    max_nfe: int | None = None,
) -> SoftResult:
    """Decodes one request greedily from a script; see the module's words."""
    size, prompt_len, result = block_size, len(prompt), SoftResult()
    limit = prompt_len + max_tokens
    if max_model_len is not None:
        limit = min(limit, max_model_len)
    blocks: list[SoftBlock] = []
    for start in range(0, prompt_len, size):
        cells: list[int | None] = list(prompt[start : start + size])
        whole = len(cells) == size
        cells += [None] * (size - len(cells))
        blocks.append(SoftBlock(start, cells, IN_CACHE if whole else ACTIVE))

    for forward_token, forward_prob in zip(token, prob, strict=True):
        # Open at most one block, from what the last step left.
        live = [block for block in blocks if block.status != IN_CACHE]
        text = [cell for block in blocks for cell in block.cells]
        may = len(blocks) * size < limit and len(live) < buffer_size
        if any(cell in eos_ids for cell in text[prompt_len:] if cell is not None):
            may = False
        if live:
            done = np.float32((size - len(live[-1].holes())) / size)
            may &= bool(done >= np.float32(rules.add))
            may &= bool(live[-1].same_ratio >= np.float32(rules.stability))
        if may:
            blocks.append(SoftBlock(len(blocks) * size, [None] * size, ACTIVE))
            live.append(blocks[-1])

        result.shown.append(
            {
                block.start + i: mixture
                for block in live
                if block.status == ACTIVE or not rules.paper
                for i, mixture in block.soft.items()
            }
        )
        stored = [block for block in live if block.status == TO_CACHE]
        leading, filled = True, 0
        for block in live:
            if block.status != ACTIVE:
                continue
            where = range(block.start, block.start + size)
            laws = [
                law_of(int(forward_token[p]), forward_prob[p], mask_id, vocab_size) for p in where
            ]
            ready, count = denoise(block, laws, rules, prompt_len, limit)
            filled += count
            leading &= ready
            if leading:
                block.status = TO_CACHE

        # Only what leaves is settled: the rest may still be rewritten.
        result.nfe += 1
        left = [block for block in blocks if block.status in (TO_CACHE, IN_CACHE)]
        run = [cell for block in left for cell in block.cells][prompt_len:limit]
        assert None not in run
        stop = next((i for i, cell in enumerate(run) if cell in eos_ids), None)
        if stop is not None:
            run, result.finish_reason = run[:stop], "stop"
        elif len(run) == limit - prompt_len:
            result.finish_reason = "length"
        elif max_nfe is not None and result.nfe >= max_nfe:
            result.finish_reason = "nfe"
        result.output = [cell for cell in run if cell is not None]
        if result.finish_reason is not None:
            result.steps.append(Step(None, None, None, filled))
            return result
        for block in stored:
            block.status = IN_CACHE
        result.steps.append(_draw(blocks, buffer_size, size, mask_id, filled))
    return result


def _draw(blocks: list[SoftBlock], buffer_size: int, size: int, mask_id: int, new: int) -> Step:
    live = [block for block in blocks if block.status != IN_CACHE]
    spare = buffer_size - len(live)
    tokens = [[mask_id if cell is None else cell for cell in block.cells] for block in live]
    tokens += [[mask_id] * size for _ in range(spare)]
    status = [block.status for block in live] + [DUMMY] * spare
    return Step((len(blocks) - len(live)) * size, tokens, status, new)
