"""Joint threshold decoding with edits as lists: an unbounded decoder without window or vectors.

The oracle of `Edit`, written apart from `strategies/`. A request is one growing Python list of
blocks from position 0, a hole is `None`, and nothing is ever shifted. `list_decoder` explains
scripts and drawn traces, and shares its records and law.

Thresholds are compared in float32, as the scripted probabilities are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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

    def progress(self) -> np.float32:
        written = sum(cell is not None for cell in self.cells)
        return np.float32(written / len(self.cells))


@dataclass
class Edited(Result):
    """How a request went; the counts say what a test has really seen."""

    edits: int = 0
    forced: int = 0
    timed_out: int = 0
    spent: int = 0  # blocks that left because their edits were used up, something still to change
    unsaid: int = 0  # stops that an edit wrote over


def edit_decode(
    prompt: Sequence[int],
    token: Any,
    prob: Any,
    *,
    accept_threshold: float,
    edit_threshold: float,
    add_block_threshold: float,
    max_post_edit_steps: int,
    block_size: int,
    buffer_size: int,
    max_tokens: int,
    mask_id: int,
    vocab_size: int,
    eos_ids: Sequence[int] = (),
    max_model_len: int | None = None,
    max_nfe: int | None = None,
) -> Edited:
    """Decodes one request greedily from a script."""
    size, prompt_len = block_size, len(prompt)
    limit = prompt_len + max_tokens
    if max_model_len is not None:
        limit = min(limit, max_model_len)
    accept, edit = np.float32(accept_threshold), np.float32(edit_threshold)
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
        plans = []
        for block in live:
            if block.status == ACTIVE:
                laws = [
                    law_of(int(said[p]), sure[p], mask_id, vocab_size)
                    for p in range(block.start, block.start + size)
                ]
                plans.append(
                    _plan(block, laws, prompt_len, limit, accept, edit, max_post_edit_steps)
                )
        new = 0
        ready: list[int] = []
        for block, writes, may_leave, notes in plans:
            for offset, written in writes.items():
                old = block.cells[offset]
                new += old is None
                result.edits += old is not None
                result.unsaid += old is not None and old in eos_ids
                block.cells[offset] = written
            block.total_steps += 1
            result.forced += notes == "forced"
            result.timed_out += notes == "timed out"
            result.spent += notes == "spent"
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
    prompt_len: int,
    limit: int,
    accept: np.float32,
    edit: np.float32,
    max_post_edit_steps: int,
) -> tuple[EditBlock, dict[int, int], bool, str]:
    """What one forward writes in a block, whether the block may leave, and why.

    Both sets, the budgets, and what is written when they are spent. Cells at or past the
    limit are denoised like all others, and nobody waits for them.
    """
    offsets = [i for i in range(len(block.cells)) if block.start + i >= prompt_len]
    holes = [i for i in offsets if block.cells[i] is None]
    waited_for = [i for i in holes if block.start + i < limit]
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
        return block, {i: laws[i].token for i in holes + edits}, True, "timed out"
    if not waited_for:
        if not any(block.start + i < limit for i in edits):
            return block, {}, True, "still"
        if block.post_edit_steps > max_post_edit_steps:
            return block, {}, True, "spent"
    return block, {i: laws[i].token for i in fills + edits}, False, note


def _draw(blocks: list[EditBlock], buffer_size: int, size: int, mask_id: int, new: int) -> Step:
    live = [block for block in blocks if block.status != IN_CACHE]
    tokens = [[mask_id if cell is None else cell for cell in block.cells] for block in live]
    status = [block.status for block in live]
    missing = buffer_size - len(live)
    cached = (len(blocks) - len(live)) * size
    return Step(cached, tokens + [[mask_id] * size] * missing, status + [DUMMY] * missing, new)
