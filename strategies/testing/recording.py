"""A decode step that also returns what it did: the cells it filled, and what was said of them.

The step is a program of its own, so one that is not recorded holds nothing of this.

Data flow: `Recorder` around a Forward -> `driver.propose` -> `StepRecord` -> `driver.advance`.
"""

from typing import Any, cast

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from ..core import driver
from ..core.protocol import Forward, SlotSpec, TokenStats
from ..core.recording import Answer, Recorder, written
from ..core.state import ERROR, RUNNING, BlockBuffer, DecodeState, by_row

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
        rows: Log-probabilities of cells that were asked for, as of `core.recording.written`.
        logits: Raw logits at the positions that were named; NaN where nothing was asked.
        accepted: Holes that were filled.
        edited: Filled cells that hold another token now.
        commit_len, settled_len, nfe: As in `core.state.StepInfo`.
    """

    before: BlockBuffer
    after: BlockBuffer
    predicted: Int[Array, "B K S"]
    confidence: Float[Array, "B K S"]
    entropy: Float[Array, "B K S"]
    rows: Float[Array, "B K S F"]
    logits: Float[Array, "B P V"] | None
    accepted: Bool[Array, "B K S"]
    edited: Bool[Array, "B K S"]
    commit_len: Int[Array, " B"]
    settled_len: Int[Array, " B"]
    nfe: Int[Array, " B"]


def recorded_step(
    strategy: Any,
    forward: Forward,
    state: DecodeState,
    spec: SlotSpec,
    num_top: int = 0,
    logits_at: Int[Array, " P"] | None = None,
) -> tuple[DecodeState, StepRecord]:
    """`driver.decode_step`, and the record of it.

    Args:
        strategy: Any; knobs as in `driver.decode_step`.
        forward: The model; its auxiliary models are not recorded.
        num_top: Likeliest ids of a row.
        logits_at: Positions whose logits are kept.
    """
    recorder = Recorder(forward)
    stepped, info = driver.propose(strategy, cast(Forward, recorder), state)
    advanced, info = driver.advance(strategy, state, stepped, info, spec)
    # A row that ended with an error keeps what it had.
    wrote = (state.finish == RUNNING) & (advanced.finish != ERROR)
    before = state.buffer
    after: BlockBuffer = by_row(wrote, stepped.buffer, before)
    said = _one_answer([answer.stats for answer in recorder.answers], after)
    _, rows = written(strategy, recorder, state, stepped, num_top)
    record = StepRecord(
        before=before,
        after=after,
        predicted=jnp.where(jnp.isnan(said.confidence), NOT_READ, said.token),
        confidence=said.confidence,
        entropy=said.entropy,
        rows=rows,
        logits=None if logits_at is None else _logits(recorder.answers, before, logits_at),
        accepted=after.filled & ~before.filled,
        edited=after.filled & before.filled & (after.tokens != before.tokens),
        commit_len=info.commit_len,
        settled_len=info.settled_len,
        nfe=info.nfe,
    )
    return advanced, record


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


def _logits(
    answers: list[Answer], before: BlockBuffer, positions: Int[Array, " P"]
) -> Float[Array, "B P V"] | None:
    """Logits of the last forward that was asked, at some positions."""
    if not answers:
        return None
    logits = answers[-1].out.logits()
    B, K, S, V = logits.shape
    asked = (answers[-1].stats.confidence > -jnp.inf).reshape(B, -1)
    cell = positions[None] - before.start[:, None]
    near = jnp.clip(cell, 0, K * S - 1)
    known = jnp.take_along_axis(asked, near, axis=1) & (cell == near)
    found = jnp.take_along_axis(logits.reshape(B, -1, V), near[..., None], axis=1)
    return jnp.where(known[..., None], found, jnp.nan)
