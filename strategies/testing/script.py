"""Run a strategy without a model: scripted predictions, for tests, papers and debugging.

The script says what the model predicts at each absolute position in each forward; the strategy
and the engine's half of the step (`core.driver`) are the real ones. There is no cache:
`store` does nothing, `hidden` is empty.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from ..core import driver
from ..core.protocol import (
    ForwardOutput,
    PrefillChunk,
    Readout,
    SlotSpec,
    TokenStats,
    split_knobs,
)
from ..core.resolve import load_strategy
from ..core.state import FINISH_REASONS, NO_LIMIT, STUCK, DecodeState, Limits, Sampling


@dataclasses.dataclass(frozen=True)
class TraceStep:
    """The window after one step and its slide.

    Attributes:
        start: Absolute position of the first cell.
        tokens: K lists of S ids, holes shown as the mask.
        status: K block states (`core.state`: 0 DUMMY, 1 ACTIVE, 2 TO_CACHE).
        new_tokens: Cells filled in this step.
    """

    start: int
    tokens: list[list[int]]
    status: list[int]
    new_tokens: int


@dataclasses.dataclass(frozen=True)
class Trace:
    """A whole scripted run.

    Attributes:
        steps: The window after each step.
        output: The emitted tokens.
        finish_reason: Why the run ended; None if the script ended first.
        nfe: Forwards after prefill.
        error: Why it ended with "error", else None.
    """

    steps: list[TraceStep]
    output: list[int]
    finish_reason: str | None
    nfe: int
    error: str | None = None


class _Script(struct.PyTreeNode):
    """Forward number -> position -> (token, probability)."""

    token: Int[Array, "F X"]
    prob: Float[Array, "F X"]


class _ScriptedOutput(struct.PyTreeNode, ForwardOutput):
    """The predictions of the script for the window of one forward; a branch may return it."""

    row: Array
    positions: Int[Array, "B K S"]
    hidden: Float[Array, "B K S 0"]
    taps: tuple[Array, ...]
    forward: Any = struct.field(pytree_node=False)

    def read(self, ask: Readout) -> TokenStats:
        """The scripted law, greedily: confidence is exactly the scripted probability."""
        if ask.penalty is not None:
            raise ValueError("a script has no logits to penalise; leave penalty out")
        law, entropy = self.forward.law(self.row, self.positions)
        if ask.guide is not None:
            other, scale = ask.guide
            law = _guided(law, self.forward.law(other.row, other.positions)[0], scale)
            entropy = -jnp.sum(_plogp(law), axis=-1)
        stats = _read_out(law, entropy, ask.num_top)
        probs = None if ask.ids is None else jnp.take_along_axis(law, ask.ids, axis=-1)
        stats = stats.replace(soft=self.hidden if ask.soft else None, id_probs=probs)
        return stats if ask.where is None else stats.only(ask.where)

    def soft(self, temperature: Any = 1.0) -> Float[Array, "B K S 0"]:
        """Embeddings of no width."""
        del temperature
        return self.hidden

    def logits(self) -> Float[Array, "B K S V"]:
        """The logarithm of the law."""
        return jnp.log(self.forward.law(self.row, self.positions)[0])

    def store(self, state: DecodeState, where: Array) -> DecodeState:
        """Nothing to store: a script has no cache."""
        del where
        return state


class _ScriptedForward:
    """Reads row `first + i` of the script in its i-th call; row `first` before any call.

    So a token that `absorb` draws at the end of prefill comes from row 0, as does the first
    forward's. A call with a `width` does not count: it is a branch next to a full one, and reads
    the row that one does.
    """

    def __init__(self, script: _Script, first: Array, start: Array, mask_id: int, vocab_size: int):
        self.mask_id, self.vocab_size, self.aux, self.shift = mask_id, vocab_size, {}, False
        self._script, self._first, self._start, self.calls = script, first, start, 0

    @property
    def row(self) -> Array:
        return self._first + jnp.maximum(self.calls - 1, 0)

    def __call__(
        self, state: DecodeState, *, width: int | None = None, **_: Any
    ) -> _ScriptedOutput:
        self.calls += width is None
        positions = state.buffer.positions
        return _ScriptedOutput(
            self.row, positions, jnp.zeros((*positions.shape, 0)), taps=(), forward=self
        )

    def embed(self, ids: Int[Array, "..."]) -> Float[Array, "... 0"]:
        """Rows of no width, as the hidden rows of a script are."""
        return jnp.zeros((*ids.shape, 0))

    def predict(
        self, hidden: Array, sampling: Sampling | None = None, keys: Any = None, **_: Any
    ) -> TokenStats:
        """Prediction outside the window: that of the position the window starts at."""
        del hidden, sampling, keys
        return _read_out(*self.law(self.row, self._start), 0)

    def law(
        self, row: Array, positions: Array
    ) -> tuple[Float[Array, "... V"], Float[Array, "..."]]:
        """Law and entropy at `positions`, built as probabilities so that nothing is rounded."""
        column = jnp.minimum(positions, self._script.token.shape[1] - 1)
        row = jnp.minimum(row, self._script.token.shape[0] - 1)
        token, prob = self._script.token[row, column], self._script.prob[row, column]
        ids = jnp.arange(self.vocab_size).reshape(*(1,) * token.ndim, -1)
        masked = ids == self.mask_id
        masks = 1 if 0 <= self.mask_id < self.vocab_size else 0
        others = self.vocab_size - 1 - masks
        rest = (1.0 - prob[..., None]) / others
        law = jnp.where(ids == token[..., None], prob[..., None], jnp.where(masked, 0.0, rest))
        # In closed form: laws that differ only in which token they favour tie exactly.
        return law, -_plogp(prob) - others * _plogp(rest[..., 0])


def _read_out(law: Array, entropy: Array, num_top: int) -> TokenStats:
    top_probs, top_ids = jax.lax.top_k(law, num_top)
    return TokenStats(
        token=jnp.argmax(law, axis=-1).astype(jnp.int32),
        confidence=jnp.max(law, axis=-1),
        entropy=entropy,
        top_ids=top_ids,
        top_probs=top_probs,
    )


def _guided(law: Array, other: Array, scale: float) -> Array:
    """The law of logits moved away from another's; what one of both rules out stays out."""
    least = jnp.finfo(jnp.float32).tiny
    own, away = (jnp.log(jnp.maximum(one, least)) for one in (law, other))
    moved = away + (1.0 + scale) * (own - away)
    return jax.nn.softmax(jnp.where((law > 0) & (other > 0), moved, -jnp.inf), axis=-1)


def _plogp(p: Array) -> Array:
    return jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0)


def run_script(
    strategy: Any,
    prompt: Sequence[int],
    token: Int[np.ndarray, "F X"],
    prob: Float[np.ndarray, "F X"],
    *,
    max_tokens: int,
    mask_id: int,
    vocab_size: int,
    eos_ids: Sequence[int] = (),
    max_model_len: int | None = None,
    max_nfe: int | None = None,
) -> Trace:
    """Decode one prompt greedily against scripted predictions.

    Args:
        strategy: Anything `load_strategy` takes; it must not need auxiliary models.
        token: What the model predicts at absolute position x in forward f after prefill.
        prob: With what probability; the rest is spread evenly over the other ids but the mask.
        max_tokens: Most tokens to emit.
        max_model_len: Most positions, prompt included; None for no such limit.

    Returns:
        The trace of every step. Forward f reads row f; prefill reads none.

    Raises:
        ValueError: Shapes that do not fit, a scripted mask token, or a prompt without room.
    """
    strategy = load_strategy(strategy)
    if strategy.block_size is None:
        raise ValueError(
            f"{type(strategy).__name__} has no block_size, and a script has no model to take it "
            "from; wrap the function: as_strategy(step, block_size=4, buffer_size=1)"
        )
    token, prob = np.asarray(token, np.int32), np.asarray(prob, np.float32)
    if token.shape != prob.shape or token.ndim != 2:
        raise ValueError(f"{token.shape=} and {prob.shape=} must be equal, [forwards, positions]")
    if (token == mask_id).any():
        raise ValueError(f"the script predicts {mask_id=}, which no model may; use another token")
    limit = len(prompt) + max_tokens
    limit = limit if max_model_len is None else min(limit, max_model_len)
    if not 0 < len(prompt) < limit:
        raise ValueError(f"{len(prompt)=} must be at least 1 and below the limit of {limit}")
    if max_nfe is not None and max_nfe < 1:
        raise ValueError(f"{max_nfe=} must be at least 1; None sets no limit")
    bare, knobs = split_knobs(strategy)
    padded = np.zeros((1, max(token.shape[1], len(prompt))), np.int32)
    padded[0, : len(prompt)] = prompt
    stops = np.full((1, max(8, len(eos_ids))), -1, np.int32)
    stops[0, : len(eos_ids)] = eos_ids
    result, history = _run(
        bare,
        {name: jnp.full((1,), value, jnp.float32) for name, value in knobs.items()},
        _Script(jnp.asarray(token), jnp.asarray(prob)),
        jnp.asarray(padded),
        jnp.asarray([len(prompt)], jnp.int32),
        jnp.asarray([limit], jnp.int32),
        Limits(
            stop_ids=jnp.asarray(stops),
            max_nfe=jnp.asarray([NO_LIMIT if max_nfe is None else max_nfe], jnp.int32),
            max_run=jnp.asarray([NO_LIMIT], jnp.int32),
        ),
        mask_id,
        vocab_size,
    )
    trace, is_stuck = _read(*jax.device_get((result, history)))
    if not is_stuck:
        return trace
    error = driver.stuck_text(strategy, trace.steps[-1].start)
    return dataclasses.replace(trace, error=error)


@functools.partial(jax.jit, static_argnames=("mask_id", "vocab_size"))
def _run(strategy, knobs, script, prompt, prompt_len, limit, limits, mask_id, vocab_size):
    K, S = strategy.buffer_size or 1, strategy.block_size
    num_forwards, num_positions = script.token.shape
    spec = SlotSpec(1, K, S, vocab_size, 0, mask_id, jnp.float32)
    tail = driver.prompt_tail(strategy.needs, spec, prompt, prompt_len)
    buffer = driver.admit_window(strategy.needs, spec, tail, prompt_len, limit)
    keys = jax.random.split(jax.random.key(0), 1)
    settings = {"sampling": Sampling.greedy(1), "limits": limits, "knobs": knobs, "keys": keys}
    state = driver.new_slots(strategy, spec, settings, buffer, num_positions + K * S).replace(
        rows=jnp.zeros((1, K * S, 0)), page_table=jnp.full((1, 1), -1, jnp.int32), pools={}
    )
    zeros = jnp.zeros((1,), jnp.int32)
    prefill: Any = _ScriptedForward(script, zeros[0], state.buffer.start, mask_id, vocab_size)
    whole = jnp.ones((1, 1, 1), bool)
    state = strategy.absorb(PrefillChunk(prefill, state, None, whole, whole[:, 0, 0]), state)

    def one(carry):
        state, row, step, history = carry
        forward: Any = _ScriptedForward(script, row, state.buffer.start, mask_id, vocab_size)
        state, info = driver.decode_step(strategy, forward, state, spec)
        buffer = state.buffer
        shown = jnp.where(buffer.filled, buffer.tokens, mask_id)[0]
        entry = (buffer.start[0], shown, buffer.status[0], info.accepted[0])
        history = jax.tree.map(lambda all_, x: all_.at[step].set(x), history, entry)
        return state, row + max(forward.calls, 1), step + 1, history

    empty = (
        jnp.zeros((num_forwards,), jnp.int32),
        jnp.zeros((num_forwards, K, S), jnp.int32),
        jnp.zeros((num_forwards, K), jnp.int32),
        jnp.zeros((num_forwards,), jnp.int32),
    )
    state, _, steps, history = jax.lax.while_loop(
        lambda carry: driver.any_running(carry[0]) & (carry[1] < num_forwards),
        one,
        (state, zeros[0], zeros[0], empty),
    )
    result = (state.output[0], state.output_len[0], state.finish[0], state.buffer.nfe[0], steps)
    return result, history


def _read(result: Any, history: Any) -> tuple[Trace, bool]:
    output, output_len, finish, nfe, steps = result
    rows = [
        TraceStep(int(start), tokens.tolist(), status.tolist(), int(new))
        for start, tokens, status, new in zip(*(h[:steps] for h in history), strict=True)
    ]
    reason = FINISH_REASONS[int(finish)]
    trace = Trace(rows, output[:output_len].tolist(), reason, int(nfe))
    return trace, int(finish) == STUCK
