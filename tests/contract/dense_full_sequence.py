"""The cache-free truth of full-sequence decoding: every forward one dense run over all cells.

The rules are `oracles.full_sequence_decoder`'s; what a forward runs, and what it says of a hole, is
written here from its authors' loops. Nothing here imports `strategies`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tests.contract.dense import Law, Net, Truth, _folded, step_key
from tests.contract.harness import Request
from tests.oracles.full_sequence_decoder import OF_LLADA, Told, denoise


def decode_full_sequence(
    net: Net,
    request: Request,
    remasking: str,
    accept: float = 1.0,
    steps: int | None = None,
    block_length: int | None = None,
    cfg_scale: float = 0.0,
    cache: str | None = None,
    append: bool = False,
    end_think: tuple[int, ...] = (),
    end_think_boost: float = 0.0,
    end_think_power: float = 3.0,
) -> Truth:
    """`log` says how each forward ran: "full", or "part" of the cells over frozen keys."""
    truth, length, frozen = Truth(), len(request.prompt), []
    least = dict(request.knobs).get("accept_threshold", accept)
    x: list[int | None] = [*request.prompt, *(None if t < 0 else t for t in request.given)]
    wanted = {length + i for i, t in enumerate(request.given) if t < 0}

    def read(begin: int, end: int, is_first: bool, holes: list[int]) -> Told:
        inputs = [net.mask if cell is None else cell for cell in x]
        if append:  # later cells do not exist
            inputs = inputs[: max(end, *(p + 1 for p in range(len(x)) if x[p] is not None))]
        if cache is None or is_first:
            logits, frozen[:] = whole(net, inputs), inputs
            truth.log.append("full")
        else:
            first = begin - 1 if net.shift else begin
            logits = part(net, frozen, inputs, first, end if cache == "dual" else len(inputs))
            truth.log.append("part")
        if cfg_scale:
            hidden = [c if p in wanted else net.mask for p, c in enumerate(inputs)]
            others = whole(net, hidden)
            logits = {p: others[p] + (1 + cfg_scale) * (logits[p] - others[p]) for p in logits}
        if end_think_boost:
            token, done = toward_end(x, holes[0], length, request.limit, end_think)
            logits[holes[0]] = np.array(logits[holes[0]])
            logits[holes[0]][token] += end_think_boost * done**end_think_power
        return {p: told(net.law(logits[p]), p, request, truth.nfe, remasking) for p in holes}

    how: Any = {"remasking": remasking, "steps": steps, "block_length": block_length}
    for _ in denoise(x, length, request.limit, read, accept_threshold=least, **how):
        truth.nfe += 2 if cfg_scale else 1
        text = x[length : request.limit]
        if truth.see(text[: text.index(None) if None in text else None], request):
            return truth
    raise AssertionError("the text is full and the request goes on")


def toward_end(
    x: Sequence[int | None], at: int, length: int, limit: int, phrase: tuple[int, ...]
) -> tuple[int, float]:
    """The id of the phrase that a hole would go on with, and the share of the text up to it."""
    text, size = list(x[length:]), len(phrase)
    if any(text[i : i + size] == list(phrase) for i in range(len(text))):
        return phrase[0], 0.0
    before = text[: at - length]
    known = max(n for n in range(size) if before[len(before) - n :] == list(phrase[:n]))
    return phrase[known], (at - length + 1) / (limit - length)


def told(law: Law, p: int, request: Request, nfe: int, remasking: str) -> tuple[int, float, float]:
    """Of a hole; LLaDA asks the law before temperature how sure it is, Dream the one after."""
    heat = request.temperature
    token, sure = law.draw(heat, step_key(request, nfe, p))
    sure = float(law.probs()[token]) if remasking in OF_LLADA else sure
    if remasking in ("random", "origin"):
        return token, sure, float(_uniform(*step_key(request, nfe, p, 1)))
    if remasking == "margin":
        low, high = np.sort(law.probs(heat))[-2:]
        return token, sure, float(high - low)
    return token, sure, -law.entropy(heat) if remasking == "entropy" else sure


@jax.jit
def _uniform(seed, data):
    return jax.random.uniform(_folded(seed, data))


def whole(net: Net, inputs: Sequence[int]) -> dict[int, np.ndarray]:
    """Logits by the position they speak of, all cells seeing all."""
    n = len(inputs)
    logits = net(inputs, range(n), np.ones((n, n), bool)).logits
    return {p + net.shift: logits[p] for p in range(n)}


def part(
    net: Net, frozen: Sequence[int], inputs: Sequence[int], first: int, end: int
) -> dict[int, np.ndarray]:
    """Logits of the cells [first, end) run anew, all else as it was when `frozen` was shown.

    One run of both: the frozen rows see each other, the new ones see new rows before frozen ones.
    """
    n, new = len(frozen), range(first, end)
    sees = np.zeros((n + len(new), n + len(new)), bool)
    sees[:n, :n] = sees[n:, n:] = True
    sees[n:, :n] = [p not in new for p in range(n)]
    logits = net([*frozen, *inputs[first:end]], [*range(n), *new], sees).logits
    return {p + net.shift: logits[n + i] for i, p in enumerate(new)}
