"""`EntropyBlocks` against d3LLM's loop over lists, each forward one dense run over all cells.

Proves that engine and lists write the same tokens in the same forwards: thresholds that fill many
cells or one, blocks that limits cut, stop ids, temperature, tokens after a hole, a shifted model.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest

from dllm_jax.strategies import EntropyBlocks
from tests.contract.cases import case as contract_case
from tests.contract.dense import Net, Truth, step_key
from tests.contract.dense_full_sequence import whole
from tests.contract.harness import Request, decode_paged
from tests.contract.models import plain


def decode(net: Net, request: Request, threshold: float, add: float, size: int) -> Truth:
    truth, length = Truth(), len(request.prompt)
    x: list[int | None] = [*request.prompt, *(None if t < 0 else t for t in request.given)]
    given = {length + i for i, t in enumerate(request.given) if t >= 0}
    opened, count = 1, -(-(request.limit - length) // size)
    spans = [range(length + b * size, length + (b + 1) * size) for b in range(count)]
    spans[-1] = range(spans[-1].start, request.limit)
    while True:
        written = [p for p in range(length, len(x)) if p not in given]
        stop = next((p for p in written if x[p] in request.stops), len(x))
        last = [x[p] is not None for p in spans[opened - 1]]
        if opened < count and stop == len(x) and np.float32(sum(last) / len(last)) >= add:
            opened += 1
        inputs = [net.mask if t is None else t for t in x]
        stops = range(stop + 1, len(x))
        inputs = [request.stops[0] if p in stops else t for p, t in enumerate(inputs)]
        logits = whole(net, inputs)
        holes = [p for b in spans[:opened] for p in b if x[p] is None and p < stop]
        laws = {p: net.law(logits[p]) for p in holes}
        taken = {p for p in holes if laws[p].entropy() < threshold}
        first = next([p for p in b if p in holes] for b in spans if {*b} & {*holes})
        taken |= set() if taken & {*first} else {min(first, key=lambda p: laws[p].entropy())}
        for p in taken:
            x[p] = laws[p].draw(request.temperature, step_key(request, truth.nfe, p))[0]
        truth.nfe += 1
        text = x[length : request.limit]
        if truth.see(text[: text.index(None) if None in text else None], request):
            return truth


@pytest.mark.parametrize(
    ("shift", "threshold", "add", "size"),
    [
        (False, 2.5, 0.1, 4),
        pytest.param(True, 1.5, 0.5, 3, marks=pytest.mark.slow),
        pytest.param(False, 3.5, 1.0, 6, marks=pytest.mark.slow),
    ],
)
def test_48_4_texts_are_those_of_d3llms_loop(
    shift: bool, threshold: float, add: float, size: int
) -> None:
    model: Any = plain(5, shift=True) if shift else plain()
    asked = contract_case("full_sequence").requests
    free = decode(Net(model), asked[1], threshold, add, size)
    requests = [*asked, dataclasses.replace(asked[1], stops=(free.tokens[6], free.tokens[8]))]
    strategy = EntropyBlocks(threshold, add, size, block_size=8, buffer_size=4)
    rows = decode_paged(strategy, model, requests, move_at=2).rows
    wanted = [decode(Net(model), one, threshold, add, size) for one in requests]
    assert [(r.tokens, r.reason, r.nfe) for r in rows] == [
        (t.tokens, t.reason, t.nfe) for t in wanted
    ]
    assert len({t.nfe for t in wanted}) > 1
