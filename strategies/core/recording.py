"""What a step wrote, and how likely the model said that was.

A `Recorder` stands around the model, so no strategy knows of it. Only what a strategy reads outside
of `lax.cond` and other inner traces is seen: a value made inside may not leave it.

Data flow: `Recorder` around a Forward -> `driver.propose` -> `written` -> a record of the step, or
the rows of `DecodeState.written`. A state without these rows is decoded by programs that hold
nothing of this.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Bool, Float, Int

from . import blocks
from .forward import ForwardOutput, Readout, TokenStats
from .state import DecodeState

NUM_TOP = 5  # likeliest ids of a row of `DecodeState.written`
# The columns of such a row, in float32, which holds ids and counts below 2^24.
LAW, RAW, TOP_IDS, TOP, STEP = 0, 1, slice(2, 2 + NUM_TOP), slice(2 + NUM_TOP, -1), -1
NUM_COLUMNS = 3 + 2 * NUM_TOP
BEFORE_FIRST = -1  # step of a token that the end of the prompt predicts


class Answer(NamedTuple):
    """What a strategy read of the window's cells: an output, its question, what it said."""

    out: Any
    ask: Readout
    stats: TokenStats


class Recorder:
    """A `core.protocol.Forward` that keeps the answers it gives. It lives for one step.

    Attributes:
        forward: The model.
        answers: What the strategy read of the window's cells, in order.
    """

    def __init__(self, forward: Any):
        self.forward = forward
        self._trace = get_opaque_trace_state(convention="dllm_jax")
        self.answers: list[Answer] = []

    def __call__(self, state: DecodeState, **how: Any) -> "_RecordedOutput":
        """One pass over the window; see the protocol."""
        return _RecordedOutput(self.forward(state, **how), self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.forward, name)

    def keep(self, answer: Answer) -> TokenStats:
        """Take note of an answer, where it may leave the trace it was made in."""
        if get_opaque_trace_state(convention="dllm_jax") == self._trace:
            self.answers.append(answer)
        return answer.stats


class _RecordedOutput(struct.PyTreeNode):
    """A forward's output whose answers are kept; a branch may return it."""

    out: Any
    recorder: Recorder = struct.field(pytree_node=False)

    predict = ForwardOutput.predict

    def __getattr__(self, name: str) -> Any:
        if name in ("out", "recorder"):  # not set yet: a copy in the making
            raise AttributeError(name)
        return getattr(self.out, name)

    def read(self, ask: Readout) -> TokenStats:
        """Statistics aligned with the cells; see the protocol."""
        ask = _bare(ask)
        return self.recorder.keep(Answer(self.out, ask, self.out.read(ask)))

    def chose(self, tokens: Int[Array, "B K S"], ask: Readout) -> None:
        """Tokens that no `predict` named; nothing else is known of them."""
        unknown = jnp.full(tokens.shape, jnp.nan)
        none = jnp.zeros((*tokens.shape, 0))
        stats = TokenStats(tokens, unknown, unknown, none.astype(jnp.int32), none)
        self.recorder.keep(Answer(self.out, _bare(ask), stats))


def _bare(tree: Any) -> Any:
    """Arguments as the model knows them: an output that guides another comes without its wrap."""

    def is_wrapped(leaf: Any) -> bool:
        return isinstance(leaf, _RecordedOutput)

    return jax.tree.map(
        lambda leaf: leaf.out if is_wrapped(leaf) else leaf, tree, is_leaf=is_wrapped
    )


def written(
    strategy: Any,
    recorder: Recorder,
    state: DecodeState,
    stepped: DecodeState,
    num_top: int = NUM_TOP,
) -> tuple[Bool[Array, "B K S"], Float[Array, "B K S F"]]:
    """The cells that a step wrote, and rows as of `DecodeState.written` with `num_top` ids.

    A row is of the last forward that the strategy asked about the cell, and of its token, or in a
    hole of the one that was proposed; NaN where it did not ask. A first cell without an answer
    comes from the row before the window. A canvas is written anew by each forward.

    Args:
        stepped: What the strategy made of `state`, before the window slides.
    """
    before, after = state.buffer, stepped.buffer
    rows = jnp.full((*after.tokens.shape, 2 + 2 * num_top), jnp.nan)
    for answer in recorder.answers:
        tokens = jnp.where(after.filled, after.tokens, answer.stats.token)
        said = answer.out.log_probs(tokens, answer.ask, num_top)
        rows = jnp.where(jnp.isnan(said[..., RAW, None]), rows, said)
    is_read = ~jnp.isnan(rows[..., RAW])
    changed = after.filled & (~before.filled | (after.tokens != before.tokens))
    if strategy.needs.conditions:
        changed = after.filled & is_read & ~blocks.is_given(state)
    step = jnp.broadcast_to(before.nfe[:, None, None], after.tokens.shape)
    if state.boundary.shape[-1]:
        is_new = (before.nfe == 0) & before.filled[:, 0, 0] & ~blocks.is_given(state)[:, 0, 0]
        lacks = (is_new | changed[:, 0, 0]) & ~is_read[:, 0, 0]
        changed = changed.at[:, 0, 0].set(changed[:, 0, 0] | lacks)
        step = step.at[:, 0, 0].set(jnp.where(is_new, BEFORE_FIRST, before.nfe))
        first = jax.lax.cond(
            jnp.any(lacks),
            lambda: recorder.forward.log_probs(
                state.boundary, after.tokens[:, 0, 0], Readout(sampling=state.sampling), num_top
            ),
            lambda: rows[:, 0, 0],
        )
        rows = rows.at[:, 0, 0].set(jnp.where(lacks[:, None], first, rows[:, 0, 0]))
    return changed, jnp.concatenate([rows, step[..., None].astype(jnp.float32)], axis=-1)


def nothing_written(num_slots: int, num_positions: int) -> Float[Array, "B N F"] | None:
    """`DecodeState.written` of fresh requests; None where no position is kept."""
    return jnp.full((num_slots, num_positions, NUM_COLUMNS), jnp.nan) if num_positions else None


def noted(
    strategy: Any, recorder: Recorder, state: DecodeState, stepped: DecodeState
) -> DecodeState:
    """`stepped` with the rows of what it wrote.

    Raises:
        ValueError: The strategy asks about no cell where that can be seen (at trace time).
    """
    held = state.written
    assert held is not None
    if not recorder.answers:
        raise ValueError(
            f"logprobs: {strategy.name} takes its tokens from no predict(...) outside of lax.cond, "
            "so nothing says how likely they were; leave it out, or fix what is chosen (width=)"
        )
    changed, rows = written(strategy, recorder, state, stepped)
    B, N = held.shape[:2]
    place = jnp.where(changed, state.buffer.positions % N, N).reshape(B, -1)  # N: dropped
    rows = rows.reshape(B, -1, NUM_COLUMNS)
    return stepped.replace(written=held.at[jnp.arange(B)[:, None], place].set(rows, mode="drop"))
