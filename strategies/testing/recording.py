"""A decode step that also tells what it did: the cells it filled, and what the model said of them.

The model is wrapped, so no strategy knows; the step is a program of its own, so one that is not
recorded holds nothing of this. Only what a strategy reads outside of `lax.cond` and other inner
traces is seen: a value made inside may not leave it.

Data flow: `Recorder` around a Forward -> `driver.propose` -> `StepRecord` -> `driver.advance`.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import struct
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Bool, Float, Int

from ..core import driver
from ..core.protocol import Forward, SlotSpec, TokenStats
from ..core.state import ERROR, RUNNING, BlockBuffer, DecodeState

NOT_READ = -1  # predicted token of a cell that was not asked for


class StepRecord(struct.PyTreeNode):
    """The events of one step, per slot. Rows that did not run hold none.

    Attributes:
        before: The window that the last step left, with nothing opened yet.
        after: The window with what this step wrote, before it slides by `commit_len`.
        predicted: What the model said of a cell, NOT_READ where it was not asked. Of several
            answers in one step the last that names the token now in the cell, else the last.
        confidence: Its probability, as the strategy asked for it; NaN where there is none.
        entropy: Of the law it is from, in nats; NaN where there is none.
        accepted: Holes that were filled.
        edited: Filled cells that hold another token now.
        commit_len, settled_len, nfe: As in `core.state.StepInfo`.
    """

    before: BlockBuffer
    after: BlockBuffer
    predicted: Int[Array, "B K S"]
    confidence: Float[Array, "B K S"]
    entropy: Float[Array, "B K S"]
    accepted: Bool[Array, "B K S"]
    edited: Bool[Array, "B K S"]
    commit_len: Int[Array, " B"]
    settled_len: Int[Array, " B"]
    nfe: Int[Array, " B"]


def recorded_step(
    strategy: Any, forward: Forward, state: DecodeState, spec: SlotSpec
) -> tuple[DecodeState, StepRecord]:
    """`driver.decode_step`, and the record of it.

    Args:
        strategy: Any; knobs as in `driver.decode_step`.
        forward: The model; its auxiliary models are not recorded.
    """
    recorder = Recorder(forward)
    stepped, info = driver.propose(strategy, cast(Forward, recorder), state)
    advanced, info = driver.advance(strategy, state, stepped, info, spec)
    # A row that ended with an error keeps what it had.
    wrote = (state.finish == RUNNING) & (advanced.finish != ERROR)
    before = state.buffer
    after: BlockBuffer = jax.tree.map(
        lambda new, old: jnp.where(wrote.reshape(-1, *(1,) * (new.ndim - 1)), new, old),
        stepped.buffer,
        before,
    )
    said = _one_answer(recorder.answers, after)
    record = StepRecord(
        before=before,
        after=after,
        predicted=jnp.where(jnp.isnan(said.confidence), NOT_READ, said.token),
        confidence=said.confidence,
        entropy=said.entropy,
        accepted=after.filled & ~before.filled,
        edited=after.filled & before.filled & (after.tokens != before.tokens),
        commit_len=info.commit_len,
        settled_len=info.settled_len,
        nfe=info.nfe,
    )
    return advanced, record


class Recorder:
    """A `core.protocol.Forward` that keeps the answers it gives. It lives for one step.

    Attributes:
        answers: What the strategy read of the window's cells, in order.
    """

    def __init__(self, forward: Forward):
        self._forward = forward
        self._trace = get_opaque_trace_state(convention="dllm_jax")
        self.answers: list[TokenStats] = []

    def __call__(self, state: DecodeState, **how: Any) -> "_RecordedOutput":
        """One pass over the window; see the protocol."""
        return _RecordedOutput(self._forward(state, **how), self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def keep(self, stats: TokenStats) -> TokenStats:
        """Take note of an answer, where it may leave the trace it was made in."""
        if get_opaque_trace_state(convention="dllm_jax") == self._trace:
            self.answers.append(stats)
        return stats


class _RecordedOutput(struct.PyTreeNode):
    """A forward's output whose answers are kept; a branch may return it."""

    out: Any
    recorder: Recorder = struct.field(pytree_node=False)

    def __getattr__(self, name: str) -> Any:
        if name in ("out", "recorder"):  # not set yet: a copy in the making
            raise AttributeError(name)
        return getattr(self.out, name)

    def predict(self, *args: Any, **how: Any) -> TokenStats:
        """Statistics aligned with the cells; see the protocol."""
        return self.recorder.keep(self.out.predict(*_bare(args), **_bare(how)))


def _bare(tree: Any) -> Any:
    """Arguments as the model knows them: an output that guides another comes without its wrap."""

    def is_wrapped(leaf: Any) -> bool:
        return isinstance(leaf, _RecordedOutput)

    return jax.tree.map(
        lambda leaf: leaf.out if is_wrapped(leaf) else leaf, tree, is_leaf=is_wrapped
    )


def _one_answer(answers: list[TokenStats], after: BlockBuffer) -> TokenStats:
    """One answer a cell: the last that names its token, else the last; NaN where there is none."""
    shape = after.tokens.shape
    nothing = jnp.full(shape, jnp.nan, jnp.float32)
    none = jnp.zeros((*shape, 0))
    chosen = TokenStats(jnp.zeros(shape, jnp.int32), nothing, nothing, none.astype(jnp.int32), none)
    named = jnp.zeros(shape, bool)
    for stats in answers:
        asked = stats.confidence > -jnp.inf
        names = asked & after.filled & (stats.token == after.tokens)
        take = names | (asked & ~named)
        named |= names
        chosen = chosen.replace(
            token=jnp.where(take, stats.token, chosen.token),
            confidence=jnp.where(take, stats.confidence, chosen.confidence),
            entropy=jnp.where(take, stats.entropy, chosen.entropy),
        )
    return chosen
