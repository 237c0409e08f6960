"""Joint threshold decoding with edits as lists: an unbounded decoder without window or vectors.

The oracle of `Edit`, written apart from `strategies/`. A request is one growing Python list of
blocks from position 0, a hole is `None`, and nothing is ever shifted. `list_decoder` explains
scripts and drawn traces, and shares its records and law. `rewrite_decode` is the loop of any rule
that rewrites blocks; `indel_decoder` has another.

Thresholds are compared in float32, as the scripted probabilities are.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.oracles.list_decoder import ACTIVE, DUMMY, IN_CACHE, TO_CACHE, Law, Result, Step, law_of


@dataclass
class EditBlock:
    """A block of the request, and what is remembered of it between forwards."""

    start: int
    cells: list[int | None]
    status: int
    total_steps: int = 0
    post_edit_steps: int = 0
    memory: dict[str, Any] = field(default_factory=dict)

    def progress(self) -> np.float32:
        written = sum(cell is not None for cell in self.cells)
        return np.float32(written / len(self.cells))


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
    accept, edit = np.float32(accept_threshold), np.float32(edit_threshold)

    def rewrite(
        block: EditBlock, said: Sequence[tuple[int, np.float32]], given: int, inside: int
    ) -> tuple[list[int | None], bool, Sequence[str]]:
        laws = [law_of(token, sure, mask_id, vocab_size) for token, sure in said]
        writes, may_leave, note = _plan(
            block, laws, given, inside, accept, edit, max_post_edit_steps
        )
        block.total_steps += 1
        return [writes.get(i, cell) for i, cell in enumerate(block.cells)], may_leave, [note]

    return rewrite_decode(rewrite, prompt, token, prob, mask_id=mask_id, **how)


def rewrite_decode(
    rewrite: Rewrite,
    prompt: Sequence[int],
    token: Any,
    prob: Any,
    *,
    add_block_threshold: float,
    block_size: int,
    buffer_size: int,
    max_tokens: int,
    mask_id: int,
    eos_ids: Sequence[int] = (),
    max_model_len: int | None = None,
    max_nfe: int | None = None,
) -> Edited:
    """Decodes one request greedily from a script, block by block as `rewrite` says."""
    size, prompt_len = block_size, len(prompt)
    limit = prompt_len + max_tokens
    if max_model_len is not None:
        limit = min(limit, max_model_len)
    result = Edited()

    blocks: list[EditBlock] = []
    for start in range(0, prompt_len, size):
        given: list[int | None] = list(prompt[start : start + size])
        status = IN_CACHE if len(given) == size else ACTIVE
        blocks.append(EditBlock(start, given + [None] * (size - len(given)), status))

    for said, sure in zip(token, prob, strict=True):
        # At most one block opens, from what the last forward left: never behind a stop that stands
        # in the text now, never at or past the limit.
        live = [block for block in blocks if block.status != IN_CACHE]
        text = [cell for block in blocks for cell in block.cells][prompt_len:]
        standing = any(cell in eos_ids for cell in text if cell is not None)
        behind = not live or live[-1].progress() >= np.float32(add_block_threshold)
        start = len(blocks) * size
        if behind and len(live) < buffer_size and start < limit and not standing:
            blocks.append(EditBlock(start, [None] * size, ACTIVE))
            live.append(blocks[-1])

        # Every decision is taken on what the forward saw.
        stored = [block for block in live if block.status == TO_CACHE]
        new = 0
        ready: list[int] = []
        for block in live:
            if block.status != ACTIVE:
                continue
            heard = [(int(said[p]), sure[p]) for p in range(block.start, block.start + size)]
            given, inside = (min(max(p - block.start, 0), size) for p in (prompt_len, limit))
            cells, may_leave, notes = rewrite(block, heard, given, inside)
            for old, written in zip(block.cells, cells, strict=True):
                new += old is None and written is not None
                result.edits += old not in (None, written)
                result.unsaid += old in eos_ids and old != written
            block.cells = cells
            result.notes.update(notes)
            if may_leave:
                ready.append(block.start)

        # What may leave does so only behind what leaves.
        for block in live:
            if block.status == ACTIVE:
                if block.start not in ready:
                    break
                block.status = TO_CACHE

        result.nfe += 1
        # Only blocks that leave are settled: the others may still change.
        kept = [cell for block in blocks if block.status != ACTIVE for cell in block.cells]
        run = kept[prompt_len:limit]
        stop = next((i for i, cell in enumerate(run) if cell in eos_ids), None)
        if stop is not None:
            run, result.finish_reason = run[:stop], "stop"
        elif len(run) == limit - prompt_len:
            result.finish_reason = "length"
        elif max_nfe is not None and result.nfe >= max_nfe:
            result.finish_reason = "nfe"
        result.output = [cell for cell in run if cell is not None]
        assert len(result.output) == len(run), "a block left with a hole before the limit"
        if result.finish_reason is not None:
            result.steps.append(Step(None, None, None, new))
            return result
        for block in stored:
            block.status = IN_CACHE
        result.steps.append(_draw(blocks, buffer_size, size, mask_id, new))
    return result


def _plan(
    block: EditBlock,
    laws: list[Law],
    given: int,
    inside: int,
    accept: np.float32,
    edit: np.float32,
    max_post_edit_steps: int,
) -> tuple[dict[int, int], bool, str]:
    """What one forward writes in a block, whether the block may leave, and why.

    Both sets, the budgets, and what is written when they are spent. Cells at or past the
    limit are denoised like all others, and nobody waits for them.
    """
    offsets = range(given, len(block.cells))
    holes = [i for i in offsets if block.cells[i] is None]
    waited_for = [i for i in holes if i < inside]
    if not waited_for:
        block.post_edit_steps += 1

    fills = [i for i in holes if laws[i].confidence > accept]
    note = ""
    if holes and not fills:
        best = max(laws[i].confidence for i in holes)
        fills, note = [next(i for i in holes if laws[i].confidence == best)], "forced"
    edits = [
        i
        for i in offsets
        if i not in holes and laws[i].token != block.cells[i] and laws[i].confidence > edit
    ]
    if block.total_steps >= len(block.cells) + max_post_edit_steps:
        return {i: laws[i].token for i in holes + edits}, True, "timed out"
    if not waited_for:
        if not any(i < inside for i in edits):
            return {}, True, "still"
        if block.post_edit_steps > max_post_edit_steps:
            return {}, True, "spent"
    return {i: laws[i].token for i in fills + edits}, False, note


def _draw(blocks: list[EditBlock], buffer_size: int, size: int, mask_id: int, new: int) -> Step:
    live = [block for block in blocks if block.status != IN_CACHE]
    tokens = [[mask_id if cell is None else cell for cell in block.cells] for block in live]
    status = [block.status for block in live]
    missing = buffer_size - len(live)
    cached = (len(blocks) - len(live)) * size
    return Step(cached, tokens + [[mask_id] * size] * missing, status + [DUMMY] * missing, new)
