"""The cache-free truth of Fast-dLLM v2: every pass of a block recomputed as one dense run.

Written from the paper with lists and NumPy, without `strategies`.
"""

import numpy as np

from tests.contract.dense import Law, Net, Truth, position_key, step_key
from tests.contract.harness import Request


def decode_sub_blocks(
    net: Net,
    request: Request,
    size: int,
    sub: int,
    accept: float,
    block_cache: bool = True,
) -> Truth:
    """Sub-blocks of `sub` cells in blocks of `size`; `log` says how each forward ran.

    A pass is what one forward ran: offset -> input, cut at the limit. A row sees of each offset the
    version of its own pass, or else the latest one before. Without the block cache only the newest
    pass counts.
    """
    truth, length = Truth(), len(request.prompt)
    least = dict(request.knobs).get("accept_threshold", accept)
    cached = length // size * size
    done = list(request.prompt[:cached])
    block: list[int | None] = list(request.prompt[cached:])
    block += [None] * (size - len(block)) if block else []
    passes: list[dict[int, int]] = []
    while True:
        if not block:
            key = position_key(request, len(done))
            seed = seed_law(net, done, size).draw(request.temperature, key)[0]
            block = [seed] + [None] * (size - 1)
        room = min(size, request.limit - len(done))
        commit = None not in block
        holes = [i for i in range(room) if block[i] is None]
        first = holes[0] // sub * sub if holes else 0
        refine = block_cache and bool(passes) and bool(holes) and block[first] is not None
        span = range(first, min(first + sub, room)) if refine else range(room)
        shown = {i: net.mask if block[i] is None else block[i] for i in span}
        passes = [*passes, shown] if refine else [shown]  # type: ignore[list-item]
        laws = pass_laws(net, done, passes, size)
        drawn = {
            i: laws[i].draw(request.temperature, step_key(request, truth.nfe, len(done) + i))
            for i in holes
            if i < first + sub
        }
        for i, (token, sure) in drawn.items():
            if sure > least or i == min(drawn, key=lambda j: (-drawn[j][1], j)):
                block[i] = token
        truth.nfe += 1
        truth.log.append("commit" if commit else "refine" if refine else "init")
        text = (done + block)[length : request.limit]
        if truth.see(text[: text.index(None) if None in text else None], request):
            return truth
        if commit:
            done, block, passes = done + block, [], []  # type: ignore[operator]


def seed_law(net: Net, done: list[int], size: int) -> Law:
    """What the last row of the committed text says of the cell after it."""
    assert net.shift, "a row speaks of the cell behind it"
    grid = np.arange(len(done)) // size
    return net.law(net(done, range(len(done)), grid[None] <= grid[:, None]).logits[-1])


def pass_laws(net: Net, done: list[int], passes: list[dict[int, int]], size: int) -> dict[int, Law]:
    """The law of each offset that a row of the newest pass speaks about."""
    inputs, position = list(done), list(range(len(done)))
    rows: list[dict[int, int]] = []  # offset -> row of that pass
    for shown in passes:
        rows.append({i: len(inputs) + k for k, i in enumerate(shown)})
        inputs += shown.values()
        position += [len(done) + i for i in shown]
    sees = np.zeros((len(inputs), len(inputs)), bool)
    grid = np.asarray(position) // size
    sees[: len(done), : len(done)] = grid[None, : len(done)] <= grid[: len(done), None]
    newest: dict[int, int] = {}
    for mine in rows:
        newest |= mine
        for row in mine.values():
            sees[row, : len(done)] = True
            sees[row, list(newest.values())] = True
    logits = net(inputs, position, sees).logits
    return {i + 1: net.law(logits[row]) for i, row in rows[-1].items()}
