"""DMax as lists: an unbounded decoder without window, vectors or jax.

The oracle of `DMax`, token for token and mixture for mixture, written apart from `strategies/`;
`list_decoder` explains scripts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.oracles.list_decoder import ACTIVE, Asked, Block, Law, Result

Mixture = tuple[int, np.float32]  # a token, and its probability; the rest is the mask's


@dataclass
class SoftBlock(Block):
    """One block of the request, with what its cells show in the next forward."""

    same_ratio: np.floating = field(default_factory=lambda: np.float32(0))
    soft: dict[int, Mixture] = field(default_factory=dict)


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
    rules: Rules, prompt: Sequence[int], token: Any, prob: Any, **limits: Any
) -> SoftResult:
    """Decodes one request greedily from a script; see the module's words."""
    asked, result = Asked(prompt=prompt, **limits), SoftResult()

    def is_ready(last: SoftBlock) -> bool:
        is_filled = last.progress() >= np.float32(rules.add)
        return bool(is_filled and last.same_ratio >= np.float32(rules.stability))

    def forward(row: tuple[Any, Any], live: list[SoftBlock]) -> tuple[int, set[int]]:
        result.shown.append(
            {
                block.start + i: mixture
                for block in live
                if block.status == ACTIVE or not rules.paper
                for i, mixture in block.soft.items()
            }
        )
        filled, leaving = 0, set()
        for block in live:
            if block.status != ACTIVE:
                continue
            laws = [asked.law(row, block.start + i) for i in range(len(block.cells))]
            ready, count = denoise(block, laws, rules, len(prompt), asked.limit)
            filled += count
            leaving |= {block.start} if ready else set()
        return filled, leaving

    script = zip(token, prob, strict=True)
    return asked.decode(result, script, SoftBlock, is_ready, forward, rewrites=True)
