"""The rule of edits that delete and insert, for `dense_blocks.decode_blocks`."""

import dataclasses
import weakref

import numpy as np

from tests.contract.dense import Law, step_key
from tests.contract.dense_blocks import Block, Rule
from tests.contract.harness import Request
from tests.oracles.indel_decoder import Guess, Memory, Rules, rewritten


def indel_rule(rules: Rules) -> Rule:
    """`rewritten` on the laws of a network; a request may bring thresholds of its own.

    Probabilities and the three likeliest ids are of the law before temperature.
    """
    known: dict[int, Memory] = {}

    def rule(block: Block, before: float, laws: dict[int, Law], request: Request, nfe: int) -> bool:
        if id(block) not in known:
            known[id(block)] = Memory([cell is None for cell in block.cells])
            weakref.finalize(block, known.pop, id(block), None)
        own = {k: v for k, v in request.knobs if k != "add_block_threshold"}

        def guess(i: int) -> Guess:
            law = laws[i]
            token, _ = law.draw(request.temperature, step_key(request, nfe, block.start + i))
            probs = law.probs()
            ranked = np.argsort(-probs, kind="stable")[:3].tolist()
            return Guess(token, float(probs[token]), ranked)

        size = len(block.cells)
        given, inside = (
            min(max(p - block.start, 0), size) for p in (len(request.prompt), request.limit)
        )
        block.cells, may_leave, _ = rewritten(
            block.cells,
            known[id(block)],
            [guess(i) for i in range(size)],
            given,
            inside,
            dataclasses.replace(rules, **own),
        )
        return may_leave

    return rule
