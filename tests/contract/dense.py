"""Cache-free truths: rows of a whole sequence through the network under an explicit mask.

Everything is recomputed for every step of one request, with plain Python around it: no window, no
pages, no strategy code, no shared sampling. `Net` runs the rows, `Law` reads a row of logits,
`decode_tokens` is one token at a time and `decode_drafted` the drafter's loop. Blocks are in
`dense_blocks.py`.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.contract.harness import Request
from tests.contract.models import PADDED, TAPS, VOCAB


@dataclasses.dataclass
class Truth:
    """What a request must become; `log` holds what a loop wants compared besides."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    reason: str | None = None
    nfe: int = 0
    log: list[Any] = dataclasses.field(default_factory=list)

    def see(self, text: Sequence[int], request: Request) -> bool:
        """Take the settled text generated so far; whether the request is done."""
        length = request.limit - len(request.prompt)
        text = list(text)[:length]
        stop = next(
            (i for i, t in enumerate(text) if t in request.stops and request.given[i] < 0), None
        )
        if stop is not None:
            self.tokens, self.reason = text[:stop], "stop"
        else:
            self.tokens = text
            self.reason = "length" if len(text) == length else None
        return self.reason is not None


class Seen:
    """Numbers of one dense run, row by row."""

    def __init__(self, logits: Any, hidden: Any, taps: Any, kv: Any, n: int):
        self.logits, self.hidden = np.asarray(logits)[:n], np.asarray(hidden)[:n]
        self.taps = [np.asarray(tap)[:n] for tap in taps]
        self.kv = [(np.asarray(k)[:n], np.asarray(v)[:n]) for k, v in kv]


class Net:
    """A model without a cache: any rows, any positions, any mask."""

    def __init__(self, model: Any):
        self.model, self.shift = model, model.config.shift
        self.mask = model.config.mask_token_id
        self.table = np.asarray(model.params["embed"])

    def __call__(
        self,
        inputs: Sequence[Any],
        positions: Sequence[int],
        sees: np.ndarray,
        modes: Sequence[int] | None = None,
        context: Sequence[Any] | None = None,
    ) -> Seen:
        """Run rows; an input is an id or a vector. `context`: (k, v) a layer, seen by every row."""
        n = len(inputs)
        size = -(-n // 64) * 64
        x = np.zeros((size, self.table.shape[1]), np.float32)
        for i, row in enumerate(inputs):
            x[i] = self.table[row] if isinstance(row, int | np.integer) else row
        where, mode = np.zeros(size, np.int32), np.zeros(size, np.int32)
        where[:n] = positions
        mode[:n] = 0 if modes is None else modes
        visible = np.zeros((size, size), bool)
        visible[:n, :n] = sees
        live = np.arange(size) < n
        return Seen(*_run(self.model, x, where, live, visible, mode, context), n)

    def law(self, logits: np.ndarray) -> "Law":
        return Law(logits, self.mask, self.model.defaults.vocab_limit)


@jax.jit
def _run(model, x, positions, live, visible, mode, context):
    cfg, fresh = model.config, []

    def attend(layer, q, k, v):
        fresh.append((k[0], v[0]))
        mask = visible
        if context is not None:
            old_k, old_v, known = context[layer]
            k, v = jnp.concatenate([old_k[None], k], 1), jnp.concatenate([old_v[None], v], 1)
            known = jnp.broadcast_to(known[None], (x.shape[0], known.shape[0]))
            mask = jnp.concatenate([known & mask.any(1, keepdims=True), mask], 1)
        heads = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, heads, axis=2), jnp.repeat(v, heads, axis=2)
        scores = jnp.einsum("btnh,bunh->bntu", q, k) / math.sqrt(cfg.head_dim)
        scores = jnp.where(mask[None, None], scores, -1e30)
        weight = jnp.where(mask[None, None], jnp.exp(scores - scores.max(-1, keepdims=True)), 0)
        weight = weight / jnp.maximum(weight.sum(-1, keepdims=True), 1e-30)
        return jnp.einsum("bntu,bunh->btnh", weight, v)

    extra = {"mode": mode[None]} if model.arch.takes_mode else {}
    extra |= {"live": live[None]} if model.arch.takes_live else {}
    rows, taps = model.arch.trunk(
        model.params, cfg, x[None], positions[None], attend, TAPS, **extra
    )
    logits = model.arch.unembed(model.params, cfg, rows)
    return logits[0], rows[0], [tap[0] for tap in taps], fresh


class Law:
    """A row of logits as a distribution over the ids that may be predicted."""

    def __init__(self, logits: np.ndarray, mask: int, limit: int = PADDED):
        self.logits = logits.astype(np.float64)
        self.logits[[i for i in (mask, *range(limit, len(logits))) if i >= 0]] = -np.inf

    def probs(self, temperature: float = 0.0) -> np.ndarray:
        z = self.logits / (temperature or 1.0)
        e = np.exp(z - z.max())
        return e / e.sum()

    def draw(self, temperature: float = 0.0, key: "Key | None" = None) -> tuple[int, float]:
        """A token and its probability under the law it was drawn from."""
        z = self.logits
        if temperature:
            assert key is not None
            z = z / temperature + np.asarray(_gumbel(*key))
        token = int(np.argmax(z))
        return token, float(self.probs(temperature)[token])

    def entropy(self, temperature: float = 0.0) -> float:
        p = self.probs(temperature)
        return float(-(p[p > 0] * np.log(p[p > 0])).sum())


Key = tuple[int, tuple[int, ...]]  # a request's seed, and what is folded into its key


def step_key(request: Request, nfe: int, position: int, salt: int = 0) -> Key:
    """The key of a cell in a step: stream 1, forward, salt, position."""
    return request.seed, (*request.fold, 1, nfe, salt, position)


def position_key(request: Request, position: int) -> Key:
    """The key of an absolute position: stream 0."""
    return request.seed, (*request.fold, 0, position)


def random_id(key: Key, below: int) -> int:
    """An id drawn evenly from [0, below)."""
    return int(_integer(*key, below))


def _folded(seed: int, data: tuple[int, ...]) -> Any:
    return functools.reduce(jax.random.fold_in, data, jax.random.key(seed))


@jax.jit
def _gumbel(seed, data):
    return jax.random.gumbel(_folded(seed, data), (VOCAB,), jnp.float32)


@jax.jit
def _integer(seed, data, below):
    return jax.random.randint(_folded(seed, data), (), 0, below)


# --- one token at a time, and with a drafter ------------------------------------------------------


def causal_rows(net: Net, text: Sequence[int], mode: int = 0) -> Seen:
    """The whole text in token order."""
    n = len(text)
    return net(list(text), range(n), np.tril(np.ones((n, n), bool)), modes=[mode] * n)


def next_token(net: Net, request: Request, text: Sequence[int]) -> int:
    """The token after `text`, drawn with the key of its position."""
    law = net.law(causal_rows(net, text).logits[-1])
    return law.draw(request.temperature, position_key(request, len(text)))[0]


def decode_tokens(net: Net, request: Request) -> Truth:
    """Autoregressive decoding; the first token comes with prefill, before any counted forward."""
    truth, text = Truth(), list(request.prompt)
    text.append(next_token(net, request, text))
    while True:
        text.append(next_token(net, request, text))
        truth.nfe += 1
        if truth.see(text[len(request.prompt) :], request):
            return truth


def decode_drafted(
    net: Net, draft: Net, request: Request, drafted: int, script: Sequence[int] | None = None
) -> Truth:
    """Speculative decoding; `log` holds (accepted, hidden rows of the drafter) of each round."""
    truth, text = Truth(), list(request.prompt)
    text.append(next_token(net, request, text))
    while True:
        known = len(text) - 1  # the last token is the anchor: no features of it yet
        taps = np.concatenate(causal_rows(net, text[:known]).taps, axis=-1)
        rows = draft_rows(draft, taps, text[-1], drafted)
        guesses = [draft.law(row).draw()[0] for row in rows.logits[1:]]
        if script is not None:
            guesses = [int(script[known + 1 + i]) for i in range(len(guesses))]
        count = 0
        while True:
            text.append(next_token(net, request, text))
            count += 1
            if count > len(guesses) or guesses[count - 1] != text[-1]:
                break
        truth.nfe += 1
        truth.log.append((count, rows.hidden))
        if truth.see(text[len(request.prompt) :], request):
            return truth


def context_kv(draft: Net, taps: np.ndarray) -> list[tuple[Any, Any]]:
    """Keys and values that the drafter caches of features at positions 0, 1, ..."""
    kv = _context(draft.model, np.pad(taps, ((0, -len(taps) % 64), (0, 0))))
    return [(k[0], v[0]) for k, v in kv]


@jax.jit
def _context(model, taps):
    positions = jnp.arange(len(taps))[None]
    return model.arch.context_kv(model.params, model.config, taps[None], positions)


def draft_rows(draft: Net, taps: np.ndarray, anchor: int, drafted: int) -> Seen:
    """The drafter on (anchor, masks), all seeing all and the context of the features `taps`."""
    known = len(taps)
    context = [(k, v, np.arange(len(k)) < known) for k, v in context_kv(draft, taps)]
    block = [anchor] + [draft.mask] * drafted
    everyone = np.ones((len(block), len(block)), bool)
    return draft(block, range(known, known + len(block)), everyone, context=context)
