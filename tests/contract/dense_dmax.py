"""The rule of soft parallel decoding, for `dense_blocks.decode_blocks`.

Written from the paper with lists and NumPy, without `strategies`.
"""

from collections import Counter

import numpy as np

from tests.contract.dense import Law, Net, step_key
from tests.contract.dense_blocks import Block, Rule
from tests.contract.harness import Request


def dmax_rule(
    net: Net,
    accept: float,
    commit: float = 0.9,
    paper: bool = True,
    smooth: tuple[int, float] | None = None,
    seen: Counter | None = None,
) -> Rule:
    """Fill from the left, draw anew what is filled, show it soft, leave when it rests.

    A request may bring thresholds of its own. Confidences are of the law before temperature.

    Args:
        paper: Mix and judge the likeliest token with its probability, and leave after as many
            steps as cells; else the drawn one, certain where the cell was filled before.
        smooth: Tokens and weight of the second kind of mixture.
        seen: Counts what happened, for tests of the tests.
    """
    seen = Counter() if seen is None else seen

    def rule(block: Block, before: float, laws: dict[int, Law], request: Request, nfe: int) -> bool:
        wanted = dict(request.knobs)
        least = np.float32(wanted.get("accept_threshold", accept))
        sure = np.float32(wanted.get("commit_confidence", commit))
        size, old = len(block.cells), list(block.cells)
        mine = [i for i in range(size) if block.start + i >= len(request.prompt)]
        inside = [i for i in mine if block.start + i < request.limit]
        drawn: dict[int, tuple[int, float]] = {}
        judged: dict[int, tuple[int, float]] = {}
        for i in mine:
            key = step_key(request, nfe, block.start + i)
            token, _ = laws[i].draw(request.temperature, key)
            probs = laws[i].probs()
            drawn[i] = token, float(probs[token])
            if paper:
                judged[i] = laws[i].draw()
                seen["drew another"] += judged[i][0] != token
            else:
                judged[i] = token, float(probs[token]) if old[i] is None else 1.0

        run: list[int] = []
        for i in block.holes():
            if drawn[i][1] < least:
                seen["forced"] += not run
                break
            run.append(i)
        run = run or block.holes()[:1]
        for i in mine:
            if i in run or old[i] is not None:
                block.cells[i] = drawn[i][0]
                seen["changed"] += old[i] not in (None, drawn[i][0])
                if smooth is None:
                    block.soft[i] = beside_mask(net, *judged[i])
                else:
                    top = np.argsort(-laws[i].probs(), kind="stable")[: smooth[0]]
                    parts = sum(laws[i].probs()[t] * net.table[t] for t in top)
                    block.soft[i] = net.table[drawn[i][0]] + smooth[1] * parts
        block.steps += 1

        if any(block.cells[i] is None for i in inside):
            return False
        still = all(block.cells[i] == old[i] for i in inside)
        certain = all(judged[i][1] >= sure for i in inside)
        tired = paper and block.steps >= size
        seen[f"{still=} {certain=} {tired=}"] += 1
        return still or certain or tired

    return rule


def beside_mask(net: Net, token: int, p: float) -> np.ndarray:
    """`p E[token] + (1 - p) E[mask]` at the mean of the two norms."""
    a, b = net.table[token], net.table[net.mask]
    mixed = p * a + (1 - p) * b
    length = p * np.linalg.norm(a) + (1 - p) * np.linalg.norm(b)
    return mixed * length / max(np.linalg.norm(mixed), 1e-12)
