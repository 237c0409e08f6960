"""The rule of joint threshold decoding with edits, for `dense_blocks.decode_blocks`.

Written from the paper with lists and NumPy, without `strategies`.
"""

import weakref
from collections import Counter

import numpy as np

from tests.contract.dense import Law, step_key
from tests.contract.dense_blocks import Block, Rule
from tests.contract.harness import Request


def edit_rule(
    accept: float, edit: float, budget: int, penalty: float = 0.0, seen: Counter | None = None
) -> Rule:
    """Fill above `accept` or the surest hole, edit above `edit`, leave when nothing changes.

    A request may bring thresholds of its own. Confidences are of the law before temperature.

    Args:
        budget: Forwards that may edit a full block.
        penalty: What the logit of the left neighbour in the block loses.
        seen: Counts what happened, for tests of the tests.
    """
    seen = Counter() if seen is None else seen
    full_before: dict[int, int] = {}

    def rule(block: Block, before: float, laws: dict[int, Law], request: Request, nfe: int) -> bool:
        wanted = dict(request.knobs)
        least = {
            True: np.float32(wanted.get("accept_threshold", accept)),
            False: np.float32(wanted.get("edit_threshold", edit)),
        }
        mine = [i for i in range(len(block.cells)) if block.start + i >= len(request.prompt)]
        guess: dict[int, tuple[int, float]] = {}
        for i in mine:
            law = _penalised(laws[i], block.cells[i - 1] if i else None, penalty)
            token, _ = law.draw(request.temperature, step_key(request, nfe, block.start + i))
            guess[i] = token, float(law.probs()[token])
        holes = [i for i in mine if block.cells[i] is None]
        inside = [i for i in mine if block.start + i < request.limit]
        full = not set(holes) & set(inside)
        if id(block) not in full_before:
            full_before[id(block)] = 0
            weakref.finalize(block, full_before.pop, id(block), None)
        full_before[id(block)] += full

        change = [i for i in holes if guess[i][1] > least[True]]
        if holes and not change:
            change = [min(holes, key=lambda i: (-guess[i][1], i))]
            seen["forced"] += 1
        edits = [
            i
            for i in mine
            if i not in holes and guess[i][0] != block.cells[i] and guess[i][1] > least[False]
        ]
        tired = block.steps >= len(block.cells) + budget
        block.steps += 1
        still = full and not set(edits) & set(inside)
        spent = full and full_before[id(block)] > budget
        if tired:
            change, seen["tired"] = holes, seen["tired"] + 1
        elif still or spent:
            seen["spent"] += spent and not still
            return True
        seen["edits"] += len(edits)
        for i in {*change, *edits}:
            block.cells[i] = guess[i][0]
        return tired

    return rule


def _penalised(law: Law, left: int | None, penalty: float) -> Law:
    """The law behind the token `left`; a hole or a block's edge costs nothing."""
    if not penalty or left is None:
        return law
    changed = Law(law.logits, -1)
    changed.logits[left] -= penalty
    return changed
