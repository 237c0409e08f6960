"""Edits that delete and insert as lists: the rule of docs/llada2_2_edits.md over one block.

The oracle of `EditIndel`, written apart from `strategies/` and without vectors. `rewritten` is what
a forward makes of a block: of scripts here, of a network in `tests.contract.dense_indel`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.oracles.edit_decoder import EditBlock, Edited, rewrite_decode

ESCAPES = 5


@dataclasses.dataclass(frozen=True)
class Rules:
    """The fields of `EditIndel` that are the rule's."""

    accept_threshold: float
    edit_threshold: float
    max_post_edit_steps: int
    denoising_steps: int
    max_block_steps: int
    delete_token_id: int
    split_token_id: int

    @property
    def edits(self) -> tuple[int, int]:
        return self.delete_token_id, self.split_token_id


@dataclasses.dataclass
class Memory:
    """What is remembered of a block between forwards."""

    original: list[bool]
    step: int = 0
    post: int = 0
    final: bool = False
    written: list[list[int | None]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Guess:
    """What the model says of a cell: the token taken, its probability, the three likeliest ids."""

    token: int
    sure: float
    likeliest: Sequence[int]


def rewritten(
    cells: list[int | None],
    memory: Memory,
    guesses: Sequence[Guess],
    given: int,
    inside: int,
    rules: Rules,
) -> tuple[list[int | None], bool, list[str]]:
    """The cells after one forward, whether the block may leave, and what happened.

    Args:
        given: Cells at the front that are the prompt's.
        inside: Cells before the request's limit; no block waits for the others.
    """
    mine, notes = range(given, len(cells)), []
    if memory.final:
        return cells, True, notes
    holes = [i for i in mine if cells[i] is None]
    first_ones = [i for i in holes if memory.original[i]]
    waiting = [i for i in first_ones if i < inside]
    memory.post = 0 if waiting else memory.post + 1

    # Holes.
    share, rest = divmod(len(mine), rules.denoising_steps)
    need = share + (memory.step < rest) + len(holes) - len(first_ones)
    fill = [i for i in holes if guesses[i].sure > np.float32(rules.accept_threshold)]
    if len(fill) < need:
        fill = sorted(holes, key=lambda i: (-guesses[i].sure, i))[:need]
        notes.append("forced")
    if memory.step >= rules.denoising_steps:
        fill = holes
        notes += ["late"] * bool(holes)
    # Filled cells.
    edit = [
        i
        for i in mine
        if i not in holes
        and guesses[i].token != cells[i]
        and guesses[i].sure > np.float32(rules.edit_threshold)
    ]

    if rules.max_post_edit_steps:
        final = memory.post >= rules.max_post_edit_steps
    else:
        final = bool(waiting) and set(waiting) <= set(fill)
    notes += ["spent"] * final
    if memory.step >= rules.max_block_steps - 1:
        final = True
        notes.append("capped")
    memory.final = final

    text = list(cells)
    for i in [*(holes if final else fill), *edit]:
        text[i] = guesses[i].token
        if final and text[i] in rules.edits:
            text[i] = next(one for one in guesses[i].likeliest if one not in rules.edits)
            notes.append("plain")
    for _ in range(0 if final else ESCAPES):
        changed = [i for i in mine if text[i] != cells[i]]
        if not changed or text not in memory.written:
            break
        least = min(changed, key=lambda i: (guesses[i].sure, i))
        best, second = guesses[least].likeliest[:2]
        text[least] = second if text[least] == best else best
        notes.append("escaped")
    memory.written.append(text)
    memory.step += 1

    after, original = list(text[:given]), memory.original[:given]
    for i in mine:
        if text[i] == rules.delete_token_id:
            notes.append("deleted")
        elif text[i] == rules.split_token_id:
            after += [None, cells[i]]
            original += [False, memory.original[i]]
            notes.append("split")
        else:
            after.append(text[i])
            original.append(memory.original[i])
    notes += ["lost"] * (len(after) > len(cells))
    after = (after + [None] * len(cells))[: len(cells)]
    memory.original = (original + [False] * len(cells))[: len(cells)]

    still = after[:inside] == cells[:inside] and not any(i < inside for i in holes)
    return after, still or final, notes


def indel_decode(
    rules: Rules,
    prompt: Sequence[int],
    token: Any,
    prob: Any,
    *,
    mask_id: int,
    vocab_size: int,
    **how: Any,
) -> Edited:
    """Decodes one request greedily from a script."""

    def guess(token: int, sure: np.float32) -> Guess:
        rest = np.float32((np.float32(1) - sure) / np.float32(vocab_size - 2))
        law = {i: sure if i == token else rest for i in range(vocab_size) if i != mask_id}
        ranked = sorted(law, key=lambda i: (-law[i], i))
        return Guess(ranked[0], law[ranked[0]], ranked[:3])

    def rewrite(block: EditBlock, said: Any, given: int, inside: int) -> Any:
        if not block.memory:
            block.memory["of"] = Memory([cell is None for cell in block.cells])
        guesses = [guess(*one) for one in said]
        return rewritten(block.cells, block.memory["of"], guesses, given, inside, rules)

    how |= {"mask_id": mask_id, "vocab_size": vocab_size}
    return rewrite_decode(rewrite, prompt, token, prob, **how)
