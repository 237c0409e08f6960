"""Joint threshold decoding with edits as lists: an unbounded decoder without window or vectors.

The oracle of `Edit`, written apart from `strategies/`; `list_decoder` explains scripts and drawn
traces. `rewrite_decode` is the loop of any rule that rewrites blocks; `indel_decoder` has another.
Thresholds are compared in float32, as the scripted probabilities are.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.oracles.list_decoder import ACTIVE, Asked, Block, Result, law_of


@dataclass
class EditBlock(Block):
    """A block of the request, and what is remembered of it between forwards."""

    memory: dict[str, Any] = field(default_factory=dict)


@dataclass
class Edited(Result):
    """How a request went; the counts say what a test has really seen.

    Of `notes`: "spent" are blocks that left because their edits were used up, something still to
    change.
    """

    edits: int = 0
    unsaid: int = 0  # stops that an edit wrote over
    notes: Counter[str] = field(default_factory=Counter)


# What one forward makes of a block: its cells, whether it may leave, and what happened. Of the
# script it is given (token, probability) of each cell; then come the cells that are the prompt's
# and those before the limit.
Rewrite = Callable[
    [EditBlock, Sequence[tuple[int, np.float32]], int, int],
    tuple[list[int | None], bool, Sequence[str]],
]


def edit_decode(
    prompt: Sequence[int],
    token: Any,
    prob: Any,
    *,
    accept_threshold: float,
    edit_threshold: float,
    max_post_edit_steps: int,
    mask_id: int,
    vocab_size: int,
    **how: Any,
) -> Edited:
    """Decodes one request greedily from a script."""
    limits = (np.float32(accept_threshold), np.float32(edit_threshold), max_post_edit_steps)

    def rewrite(
        block: EditBlock, said: Sequence[tuple[int, np.float32]], given: int, inside: int
    ) -> tuple[list[int | None], bool, Sequence[str]]:
        laws = [law_of(token, sure, mask_id, vocab_size) for token, sure in said]
        memory = block.memory.setdefault("of", Memory())
        guesses = {i: (law.token, law.confidence) for i, law in enumerate(laws)}
        return edited(block.cells, memory, guesses, given, inside, limits)

    how |= {"mask_id": mask_id, "vocab_size": vocab_size}
    return rewrite_decode(rewrite, prompt, token, prob, **how)


def rewrite_decode(
    rewrite: Rewrite,
    prompt: Sequence[int],
    token: Any,
    prob: Any,
    *,
    add_block_threshold: float,
    **limits: Any,
) -> Edited:
    """Decodes one request greedily from a script, block by block as `rewrite` says."""
    asked, result = Asked(prompt=prompt, **limits), Edited()

    def forward(row: tuple[Any, Any], live: list[EditBlock]) -> tuple[int, set[int]]:
        said, sure = row
        new, ready = 0, set()
        for block in live:
            if block.status != ACTIVE:
                continue
            heard = [(int(said[p]), sure[p]) for p in range(block.start, block.end)]
            ends = len(prompt), asked.limit
            given, inside = (min(max(p - block.start, 0), len(block.cells)) for p in ends)
            cells, may_leave, notes = rewrite(block, heard, given, inside)
            for old, written in zip(block.cells, cells, strict=True):
                new += old is None and written is not None
                result.edits += old not in (None, written)
                result.unsaid += old in asked.eos_ids and old != written
            block.cells = cells
            result.notes.update(notes)
            ready |= {block.start} if may_leave else set()
        return new, ready

    return asked.decode(
        result,
        zip(token, prob, strict=True),
        EditBlock,
        lambda last: last.progress() >= np.float32(add_block_threshold),
        forward,
        rewrites=True,
    )


@dataclass
class Memory:
    """The forwards that a block has had, and those of them that found no hole to wait for."""

    steps: int = 0
    full: int = 0


def edited(
    cells: list[int | None],
    memory: Memory,
    guesses: Mapping[int, tuple[int, Any]],
    given: int,
    inside: int,
    limits: tuple[np.float32, np.float32, int],
) -> tuple[list[int | None], bool, list[str]]:
    """The cells after one forward, whether the block may leave, and what happened.

    Of scripts here, of a network in `tests.contract.dense_edit`. Cells at or past the limit are
    denoised like all others, and nobody waits for them.

    Args:
        guesses: The token of each cell, and its probability.
        given: Cells at the front that are the prompt's.
        inside: Cells before the request's limit.
        limits: The two thresholds, and how many forwards may edit a full block.
    """
    accept, edit, budget = limits
    mine = range(given, len(cells))
    holes = [i for i in mine if cells[i] is None]
    waits = any(i < inside for i in holes)
    memory.full += not waits
    fills, notes = [i for i in holes if guesses[i][1] > accept], []
    if holes and not fills:
        fills, notes = [min(holes, key=lambda i: (-guesses[i][1], i))], ["forced"]
    edits = [
        i for i in mine if i not in holes and guesses[i][0] != cells[i] and guesses[i][1] > edit
    ]
    is_last = memory.steps >= len(cells) + budget
    memory.steps += 1
    if is_last:
        fills, notes = holes, ["timed out"]
    elif not waits:
        if not any(i < inside for i in edits):
            return cells, True, ["still"]
        if memory.full > budget:
            return cells, True, ["spent"]
    written = {i: guesses[i][0] for i in (*fills, *edits)}
    return [written.get(i, cell) for i, cell in enumerate(cells)], is_last, notes
