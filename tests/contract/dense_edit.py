"""The rule of joint threshold decoding with edits, for `dense_blocks.decode_blocks`."""

import weakref

import numpy as np

from tests.contract.dense import Law, step_key
from tests.contract.dense_blocks import Block, Rule
from tests.contract.harness import Request
from tests.oracles.edit_decoder import Memory, edited


def edit_rule(accept: float, edit: float, budget: int, penalty: float = 0.0) -> Rule:
    """Fill above `accept` or the surest hole, edit above `edit`, leave when nothing changes.

    A request may bring thresholds of its own. Confidences are of the law before temperature.

    Args:
        budget: Forwards that may edit a full block.
        penalty: What the logit of the left neighbour in the block loses.
    """
    known: dict[int, Memory] = {}

    def rule(block: Block, before: float, laws: dict[int, Law], request: Request, nfe: int) -> bool:
        if id(block) not in known:
            known[id(block)] = Memory()
            weakref.finalize(block, known.pop, id(block), None)
        wanted = dict(request.knobs)
        limits = (
            np.float32(wanted.get("accept_threshold", accept)),
            np.float32(wanted.get("edit_threshold", edit)),
            budget,
        )
        size = len(block.cells)
        ends = (len(request.prompt), request.limit)
        given, inside = (min(max(p - block.start, 0), size) for p in ends)
        guesses: dict[int, tuple[int, float]] = {}
        for i in range(given, size):
            law = _penalised(laws[i], block.cells[i - 1] if i else None, penalty)
            token, _ = law.draw(request.temperature, step_key(request, nfe, block.start + i))
            guesses[i] = token, float(law.probs()[token])
        block.cells, may_leave, _ = edited(
            block.cells, known[id(block)], guesses, given, inside, limits
        )
        return may_leave

    return rule


def _penalised(law: Law, left: int | None, penalty: float) -> Law:
    """The law after the token `left`; a hole or a block's edge costs nothing."""
    if not penalty or left is None:
        return law
    changed = Law(law.logits, -1)
    changed.logits[left] -= penalty
    return changed
