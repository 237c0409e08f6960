"""D2F as its authors' loop, written apart from `strategies/`.

Blocks from the prompt's end on, no window, a latched "complete" state, at most
`max_new_tokens // size` blocks, and no early end. On either grid `D2F` is also what `list_decoder`
does with `multi_bd_rule`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracles.list_decoder import ACTIVE, IN_CACHE, TO_CACHE, law_of

Cells = list[int | None]


@dataclass
class Span:
    """A block after the prefilled prompt: cells `[start, end)` of the text."""

    start: int
    end: int
    status: int = ACTIVE
    is_complete: bool = False  # the authors' latch: a token may be forced

    def share(self, text: Cells) -> np.float32:
        """How much of it is filled."""
        cells = text[self.start : self.end]
        return np.float32(sum(cell is not None for cell in cells) / len(cells))

    def holes(self, text: Cells) -> list[int]:
        return [p for p in range(self.start, self.end) if text[p] is None]


def choose(
    holes: list[int], forced: bool, accept: float, row: Any, mask_id: int, vocab_size: int
) -> dict[int, int]:
    """Position -> token: what is above the threshold, or, if nothing is, the surest if forced."""
    laws = {p: law_of(int(row[0][p]), row[1][p], mask_id, vocab_size) for p in holes}
    sure = [p for p in holes if laws[p].confidence > np.float32(accept)]
    if not sure and forced and holes:
        best = max(law.confidence for law in laws.values())
        sure = [next(p for p in holes if laws[p].confidence == best)]
    return {p: laws[p].token for p in sure}


def paper_decode(
    prompt: Sequence[int],
    token: Any,
    prob: Any,
    *,
    accept: float,
    add: float,
    semi: float,
    block_size: int,
    max_new_tokens: int,
    mask_id: int,
    vocab_size: int,
    eos_ids: Sequence[int] = (),
) -> tuple[list[int], int]:
    """The text of all blocks, end-of-text and what follows it included, and the forwards spent.

    The first forward takes prompt and first block together; it is counted as the others are.
    """
    text: Cells = list(prompt)
    spans = [Span(0, len(prompt), TO_CACHE, True)]
    eos_seen, forwards = False, 0
    while True:
        fewer = len(spans) - 1 < max_new_tokens // block_size
        if fewer and not eos_seen and spans[-1].share(text) >= np.float32(add):
            spans.append(Span(len(text), len(text) + block_size))
            text += [None] * block_size
        for before, span in itertools.pairwise(spans):
            if before.share(text) >= np.float32(semi):
                span.is_complete = True
        if not any(span.status == ACTIVE for span in spans):
            return [cell for cell in text[len(prompt) :] if cell is not None], forwards
        row = (token[forwards], prob[forwards])
        forwards += 1
        active = [span for span in spans if span.status == ACTIVE]
        for span in spans:
            if span.status == TO_CACHE:
                span.status = IN_CACHE
        for span in active:
            written = choose(span.holes(text), span.is_complete, accept, row, mask_id, vocab_size)
            for position, chosen in written.items():
                text[position] = chosen
                eos_seen = eos_seen or chosen in eos_ids
        for i, span in enumerate(spans):
            ahead = any(other.status == ACTIVE for other in spans[:i])
            if span.status == ACTIVE and not span.holes(text) and not ahead:
                span.status = TO_CACHE
