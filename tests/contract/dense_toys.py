"""Cache-free truths of the stranger loops, and the rules of `dense_blocks.decode_blocks`.

Written from the toys' descriptions with lists and NumPy; nothing here imports `strategies`.
"""

import numpy as np

from tests.contract.dense import Law, Net, Truth, random_id, step_key
from tests.contract.dense_blocks import Block, Rule
from tests.contract.harness import Request


def _complete(block: Block, request: Request) -> bool:
    return all(block.start + i >= request.limit for i in block.holes())


def threshold_rule(accept: float, semi: float) -> Rule:
    """All holes above `accept`, or the surest one after a block with progress `semi`.

    A request may bring an `accept_threshold` of its own.
    """

    def rule(block: Block, before: float, laws: dict[int, Law], request: Request, nfe: int) -> bool:
        drawn = {
            i: laws[i].draw(request.temperature, step_key(request, nfe, block.start + i))
            for i in block.holes()
        }
        least = dict(request.knobs).get("accept_threshold", accept)
        above = [i for i, (_, sure) in drawn.items() if sure > least]
        if not above and drawn and before >= np.float32(semi):
            above = [min(drawn, key=lambda i: (-drawn[i][1], i))]
        for i in above:
            block.cells[i] = drawn[i][0]
        return _complete(block, request)

    return rule


def soft_rule(net: Net, accept: float) -> Rule:
    """Left to right up to the first unsure hole; filled cells drawn anew and shown soft."""

    def rule(block: Block, before: float, laws: dict[int, Law], request: Request, nfe: int) -> bool:
        size, holes = len(block.cells), block.holes()
        mine = [i for i in range(size) if block.start + i >= len(request.prompt)]
        best = {i: laws[i].draw() for i in mine}
        run: list[int] = []
        for i in holes:
            if best[i][1] < accept:
                break
            run.append(i)
        run = run or holes[:1]
        changed = bool(run)
        for i in mine:
            if i in run or i not in holes:
                changed |= block.cells[i] != best[i][0]
                block.cells[i] = best[i][0]
                block.soft[i] = _mixture(net, *best[i])
        block.steps += 1
        sure = all(p >= 0.9 for _, p in best.values())
        may = not changed or sure or block.steps >= 2 * size
        return may and _complete(block, request)

    return rule


def _mixture(net: Net, token: int, p: float) -> np.ndarray:
    """`p E[token] + (1 - p) E[mask]` at the mean of the two norms."""
    a, b = net.table[token], net.table[net.mask]
    mixed = p * a + (1 - p) * b
    length = p * np.linalg.norm(a) + (1 - p) * np.linalg.norm(b)
    return mixed * length / max(np.linalg.norm(mixed), 1e-12)


def decode_pieces(net: Net, request: Request, size: int, piece: int, accept: float) -> Truth:
    """A block refined over stale versions of itself; `log` says which steps were narrow.

    A pass is what one forward ran: offset -> input. Every pass of the block is recomputed; a row
    sees of each offset the version of its own pass or else the latest one before.
    """
    truth, length = Truth(), len(request.prompt)
    cached = length // size * size
    done, tail = list(request.prompt[:cached]), list(request.prompt[cached:])
    block = Block(cached, tail + [None] * (size - len(tail))) if tail else None
    passes: list[dict[int, int]] = []
    while True:
        block = block or Block(len(done), [None] * size)
        leaving = block.ready
        if not leaving:
            holes = block.holes()
            first = holes[0] // piece * piece
            narrow = bool(passes) and block.cells[first] is not None
            span = range(first, first + piece) if narrow else range(size)
            shown = {i: block.cells[i] for i in span}
            passes.append({i: net.mask if c is None else c for i, c in shown.items()})
            laws = _piece_laws(net, done, passes, size)
            drawn = {
                i: laws[i].draw(request.temperature, step_key(request, truth.nfe, block.start + i))
                for i in holes
                if first <= i < first + piece
            }
            best = min(drawn, key=lambda i: (-drawn[i][1], i))
            for i, (token, sure) in drawn.items():
                if sure > accept or i == best:
                    block.cells[i] = token
            block.ready = _complete(block, request)
            truth.log.append(narrow)
        truth.nfe += 1
        text = (done + block.cells)[length : request.limit]
        if truth.see(text[: text.index(None) if None in text else None], request):
            return truth
        if leaving:
            done, block, passes = done + block.cells, None, []


def _piece_laws(
    net: Net, done: list[int], passes: list[dict[int, int]], size: int
) -> dict[int, Law]:
    inputs, position = list(done), list(range(len(done)))
    rows: list[dict[int, int]] = []  # offset -> row of that pass
    for shown in passes:
        rows.append({i: len(inputs) + k for k, i in enumerate(shown)})
        inputs += shown.values()
        position += [len(done) + i for i in shown]
    n = len(inputs)
    sees = np.zeros((n, n), bool)
    grid = np.asarray(position) // size
    sees[: len(done), : len(done)] = grid[None, : len(done)] <= grid[: len(done), None]
    newest: dict[int, int] = {}
    for mine in rows:
        newest |= mine
        for row in mine.values():
            sees[row, : len(done)] = True
            sees[row, list(newest.values())] = True
    logits = net(inputs, position, sees).logits
    assert net.shift, "a row speaks of the cell behind it"
    laws = {i + 1: net.law(logits[row]) for i, row in rows[-1].items()}
    if done and 0 in rows[-1]:
        laws[0] = net.law(logits[len(done) - 1])
    return laws


def decode_whole(net: Net, request: Request, accept: float) -> Truth:
    """Prompt, holes and suffix as one sequence, all seeing all; two cells or the sure ones."""
    truth, length = Truth(), len(request.prompt)
    cells: list[int | None] = [*request.prompt, *(None if t < 0 else t for t in request.given)]
    while True:
        inputs = [net.mask if c is None else c for c in cells]
        n = len(cells)
        logits = net(inputs, range(n), np.ones((n, n), bool)).logits
        drawn = {
            p: net.law(logits[p]).draw(request.temperature, step_key(request, truth.nfe, p))
            for p, c in enumerate(cells)
            if c is None
        }
        two = sorted(drawn, key=lambda p: (-drawn[p][1], p))[:2]
        for p, (token, sure) in drawn.items():
            if p in two or sure > accept:
                cells[p] = token
        truth.nfe += 1
        text = cells[length : request.limit]
        if truth.see(text[: text.index(None) if None in text else None], request):
            return truth


def decode_canvases(net: Net, request: Request, size: int, bound: float) -> Truth:
    """Random canvases redrawn until two drafts agree; prompt and done canvases encoded causally."""
    truth, length = Truth(), len(request.prompt)
    done, most = list(request.prompt), dict(request.knobs).get("most_steps", 4)

    def noise(position: int, salt: int) -> int:
        return random_id(step_key(request, truth.nfe, position, salt), net.mask)

    while True:
        where = range(len(done), len(done) + size)
        canvas = [noise(p, 0) for p in where]
        soft, best, steps = np.zeros((size, net.table.shape[1])), None, 0
        while True:
            n = len(done)
            sees = np.tril(np.ones((n + size, n + size), bool))
            sees[n:] = True
            x = [*done, *(net.table[c] + s for c, s in zip(canvas, soft, strict=True))]
            seen = net(x, range(n + size), sees, modes=[1] * n + [0] * size)
            laws = [net.law(row) for row in seen.logits[n:]]
            entropy = [law.entropy(request.temperature) for law in laws]
            accepted, spent = set(), 0.0
            for i in sorted(range(size), key=lambda i: (entropy[i], i)):
                if spent <= bound:
                    accepted.add(i)
                spent += entropy[i]
            drawn = [
                law.draw(request.temperature, step_key(request, truth.nfe, p, 1))[0]
                for law, p in zip(laws, where, strict=True)
            ]
            canvas = [drawn[i] if i in accepted else noise(p, 2) for i, p in enumerate(where)]
            before, best = best, [law.draw()[0] for law in laws]
            soft = np.stack([law.probs(0.8) @ net.table for law in laws])
            steps += 1
            truth.nfe += 1
            if best == before or steps == most:
                break
        done += best
        if truth.see(done[length:], request):
            return truth
        truth.nfe += 1  # the canvas is encoded
