"""The cache-free truth of full-sequence decoding: every forward one dense run over all cells.

Written from its authors' loops (LLaDA's `generate.py`, Dream's `_sample`, Fast-dLLM's caches) with
lists and NumPy; nothing here imports `strategies`.
"""

from collections.abc import Sequence

import jax
import numpy as np

from tests.contract.dense import Key, Law, Net, Truth, _folded, step_key
from tests.contract.harness import Request

OF_LLADA = ("low_confidence", "random")


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
    truth, length = Truth(), len(request.prompt)
    least = dict(request.knobs).get("accept_threshold", accept)
    x: list[int | None] = [*request.prompt, *(None if t < 0 else t for t in request.given)]
    wanted = {length + i for i, t in enumerate(request.given) if t < 0}
    size = block_length or request.limit - length
    starts = range(length, request.limit, size)
    for begin in starts:
        end = min(begin + size, request.limit)
        at_begin = x[begin:end].count(None)
        share = at_begin if steps is None else max(steps // len(starts), 1)
        frozen, step = None, 0
        while None in x[begin:end]:
            inputs = [net.mask if cell is None else cell for cell in x]
            if append:  # later cells do not exist
                inputs = inputs[: max(end, *(p + 1 for p in range(len(x)) if x[p] is not None))]
            if cache is None or frozen is None:
                logits, frozen = whole(net, inputs), inputs
                truth.log.append("full")
            else:
                first = begin - 1 if net.shift else begin
                logits = part(net, frozen, inputs, first, end if cache == "dual" else len(inputs))
                truth.log.append("part")
            if cfg_scale:
                hidden = [c if p in wanted else net.mask for p, c in enumerate(inputs)]
                others = whole(net, hidden)
                logits = {p: others[p] + (1 + cfg_scale) * (logits[p] - others[p]) for p in logits}
            holes = [p for p in range(begin, end) if x[p] is None]
            if end_think_boost:
                token, done = toward_end(x, holes[0], length, request.limit, end_think)
                logits[holes[0]] = np.array(logits[holes[0]])
                logits[holes[0]][token] += end_think_boost * done**end_think_power
            laws = {p: net.law(logits[p]) for p in holes}
            drawn = {p: drawn_of(laws[p], p, request, truth.nfe, remasking) for p in holes}
            if remasking == "origin":
                chance = 0.999 / (share - 0.999 * step) if step < share - 1 else 1.0
                taken = [p for p in holes if uniform(order_key(request, truth, p)) < chance]
            else:
                count = quota(remasking, at_begin, len(holes), share, step)
                count = max(count, int(least < 1))
                score = {p: score_of(remasking, laws[p], drawn[p][1], request) for p in holes}
                if remasking == "random":
                    score = {p: uniform(order_key(request, truth, p)) for p in holes}
                taken = sorted(holes, key=lambda p: (-score[p], p))[:count]
            for p, (token, sure) in drawn.items():
                if p in taken or sure > least:
                    x[p] = token
            step += 1
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


def quota(remasking: str, at_begin: int, left: int, steps: int, step: int) -> int:
    if remasking in OF_LLADA:
        return at_begin // steps + (step < at_begin % steps)
    return left if step >= steps - 1 else int(left * 0.999 / (steps - 0.999 * step) + 1e-9)


def drawn_of(law: Law, p: int, request: Request, nfe: int, remasking: str) -> tuple[int, float]:
    """A token and how sure it is: LLaDA asks the law before temperature, Dream the one after."""
    token, sure = law.draw(request.temperature, step_key(request, nfe, p))
    return token, float(law.probs()[token]) if remasking in OF_LLADA else sure


def score_of(remasking: str, law: Law, sure: float, request: Request) -> float:
    if remasking == "margin":
        low, high = np.sort(law.probs(request.temperature))[-2:]
        return float(high - low)
    return -law.entropy(request.temperature) if remasking == "entropy" else sure


def order_key(request: Request, truth: Truth, position: int) -> Key:
    return step_key(request, truth.nfe, position, 1)


def uniform(key: Key) -> float:
    return float(_uniform(*key))


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
