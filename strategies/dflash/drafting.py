"""Shared by strategies that draft: which drafts are right, and whether to draft next.

Counts and estimates are leaves of `Carry`, by the names below. The counts (`slot`) go where the
request goes: to the host with each fetch, as `DraftMetrics`, and through a preemption. The
estimate of a round's length (`lasting`), by which drafting is switched off, belongs to the slot and
outlives a request: most texts are too short to learn from themselves alone.

Places are counted after the anchor: the first draft has place 1. A width counts cells: the anchor
and the drafts after it that are judged; 1 is no draft.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..core import blocks, random
from ..core.forward import ForwardOutput
from ..core.state import RUNNING, DecodeState

ROUNDS, PROPOSED, ACCEPTED = "draft_rounds", "drafts_proposed", "drafts_accepted"
LENGTH, IDLE = "draft_length", "draft_idle"
RUN = "text_run"

GAIN = 0.1  # weight of the last round: with more, drafts of 2 tokens a round switch off by chance
# The more slots, the more of a pass is arithmetic: the length from which drafts pay grows by
# `1 + slots / RAISING_SLOTS`. Fitted to Qwen3-8B on an H200: 1.3 at 1 slot, 1.5 at 8, 3.0 at 32.
RAISING_SLOTS = 25
PROBE_SHARE = 1 / 256  # most that a round that probes costs, of the steps without drafts before it


def no_counts(size: int) -> dict[str, Array]:
    """Counts of a fresh request, for the `slot` leaves of a carry.

    Args:
        size: Cells of a draft, the anchor among them.

    Returns:
        `draft_rounds` [1 size]: rounds in which drafts were judged, by the tokens they emitted less
        one. `drafts_proposed`, `drafts_accepted` [1 size-1]: drafts that were judged, and those
        that were right as were all before them, by place less one. `text_run` [1]: equal tokens
        that the text ends in; the first token is drawn.
    """
    nothing = jnp.zeros((1, size - 1), jnp.int32)
    counts = {ROUNDS: jnp.zeros((1, size), jnp.int32), PROPOSED: nothing, ACCEPTED: nothing}
    return counts | {RUN: jnp.ones((1,), jnp.int32)}


def no_estimate(size: int) -> dict[str, Array]:
    """The estimate of `pays` in a fresh slot, for the `lasting` leaves of a carry.

    All drafts count as right at first, so that every batch drafts. Where none are, drafting ends
    after 38 rounds of 16 cells at 1 slot, after 20 at 32 slots.

    Returns:
        `draft_length` [1]: mean tokens of a round. `draft_idle` [1]: rounds since one with drafts.
    """
    return {LENGTH: jnp.full((1,), size, jnp.float32), IDLE: jnp.zeros((1,), jnp.int32)}


def match(
    out: ForwardOutput, state: DecodeState, block: Int[Array, "B 1 S"], width: int
) -> tuple[Int[Array, "B 1 S"], Int[Array, " B"]]:
    """The tokens that the target draws after the anchor, and the number of drafts that equal them.

    Args:
        out: The pass of the target.
        block: The anchor and the drafts after it.
        width: Cells that are judged.

    Returns:
        The tokens by cells, and the number of right drafts up to the first wrong one.
    """
    # Known while tracing, so that what is narrow is cut out and not gathered.
    cell = np.broadcast_to(np.arange(block.shape[2], dtype=np.int32), block.shape)
    keys = random.position_keys(state)
    truth = out.predict(
        where=cell > 0, sampling=state.sampling, keys=keys, width=width, behind=block
    ).token
    if width == 1:
        return truth, jnp.zeros_like(state.finish)
    is_wrong = ((block != truth) | (cell >= width))[:, 0, 1:]
    right = jnp.argmax(is_wrong, axis=1)  # the cell past the block always is
    return truth, right.astype(jnp.int32)


def emitted(
    state: DecodeState, text: Int[Array, "B S"], right: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Tokens that a round emits: the right drafts and one more, to the limit or a run's end.

    Args:
        text: The anchor and what follows it.
        right: Drafts that were right, up to the first that was not.
    """
    ends, buffer = run_end(state, text), state.buffer
    room = jnp.minimum(buffer.limit - buffer.start - 1, ends)
    return jnp.clip(room, 1, 1 + right)


def count(state: DecodeState, right: Int[Array, " B"], width: Array | int) -> DecodeState:
    """The carry after a round whose tokens are written and whose window has not moved.

    Drafts that could not be emitted are not counted: past the limit, after a stop id or the end of
    a run. A round that such an end cuts short does not change the estimate.

    Args:
        right: Drafts that were right, up to the first that was not.
        width: Cells that were judged.
    """
    slot, lasting = state.carry.slot, state.carry.lasting
    tokens, filled = state.buffer.tokens[:, 0], state.buffer.filled[:, 0]
    if isinstance(width, int) and width == 1:  # the rest of this function, for no drafts
        run = jnp.where(tokens[:, 1] == tokens[:, 0], slot[RUN] + 1, 1)
        if lasting:
            lasting = lasting | {IDLE: lasting[IDLE] + 1}
        slot = slot | {RUN: run}
        return state.replace(carry=state.carry.replace(slot=slot, lasting=lasting))
    last = jnp.sum(filled, axis=1, dtype=jnp.int32) - 1
    ends = run_end(state, tokens)
    room = jnp.where(ends <= last, jnp.minimum(_room(state), ends), _room(state))
    is_round = jnp.asarray(width) > 1
    places = jnp.arange(1, slot[PROPOSED].shape[1] + 1, dtype=jnp.int32)[None]
    wanted = (places < width) & (places <= room[:, None])
    taken = wanted & (places <= right[:, None])
    sizes = jnp.arange(1, slot[ROUNDS].shape[1] + 1, dtype=jnp.int32)[None]
    emitted = jnp.minimum(right + 1, room)[:, None]
    slot = slot | {
        ROUNDS: slot[ROUNDS] + ((sizes == emitted) & is_round).astype(jnp.int32),
        PROPOSED: slot[PROPOSED] + wanted.astype(jnp.int32),
        ACCEPTED: slot[ACCEPTED] + taken.astype(jnp.int32),
        RUN: jnp.take_along_axis(_runs(state, tokens), last[:, None], axis=1)[:, 0],
    }
    if lasting:
        moved = lasting[LENGTH] + GAIN * ((right + 1).astype(jnp.float32) - lasting[LENGTH])
        lasting = {
            LENGTH: jnp.where(is_round & (right < room), moved, lasting[LENGTH]),
            IDLE: jnp.where(is_round, 0, lasting[IDLE] + 1),
        }
    return state.replace(carry=state.carry.replace(slot=slot, lasting=lasting))


def run_end(state: DecodeState, tokens: Int[Array, "B S"]) -> Int[Array, " B"]:
    """The place at which a run of `max_run` equal tokens ends the text.

    As in token-by-token decoding; a run may span rounds, or end within one.

    Args:
        tokens: The anchor and what follows it.

    Returns:
        A place after the anchor, S where there is none.
    """
    ends = _runs(state, tokens)[:, 1:] >= state.limits.max_run[:, None]
    first = jnp.argmax(ends, axis=1).astype(jnp.int32) + 1
    return jnp.where(jnp.any(ends, axis=1), first, tokens.shape[1])


def _runs(state: DecodeState, tokens: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Length of the run of equal tokens that ends in each cell; earlier rounds count."""
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    anchors = 1 - state.carry.slot[RUN][:, None]  # where its run begins
    begins = jnp.where(tokens[:, 1:] != tokens[:, :-1], place[:, 1:], anchors)
    begins = jnp.concatenate([anchors, begins], axis=1)[:, None]
    before = place <= place.T  # no scan: so few places are one reduction
    return place - jnp.max(jnp.where(before[None], begins, anchors[:, None]), axis=2) + 1


def pays(state: DecodeState, width: int, break_even: Float[Array, " B"] | float) -> Bool[Array, ""]:
    """Whether the next round drafts: the running rows expect to emit what a round costs them.

    It depends on past rounds only, so it does not bias acceptance. Where drafts do not pay, one
    round drafts now and then, to probe whether they would be right by now.

    Args:
        width: Cells of a round with drafts.
        break_even: Mean tokens of a round from which drafts pay at one slot. It grows with the
            slots of the program, to half of the width at most times its value: drafts that are
            always right always pay at its default.
    """
    lasting, buffer = state.carry.lasting, state.buffer
    running = state.finish == RUNNING
    needed = break_even * min(1 + running.shape[0] / RAISING_SLOTS, width / 2)
    room = buffer.limit - buffer.start - 1
    expected = jnp.minimum(lasting[LENGTH], room.astype(jnp.float32))
    gain = jnp.sum(jnp.where(running, expected - needed, 0.0))
    is_due = jnp.any(running & (PROBE_SHARE * lasting[IDLE].astype(jnp.float32) >= needed - 1))
    return (gain >= 0) | is_due


def _room(state: DecodeState) -> Int[Array, " B"]:
    """Tokens after the anchor that the request may still emit: to its limit and first stop id."""
    buffer = state.buffer
    stops = (blocks.is_stop(state, buffer.tokens) & buffer.filled)[:, 0]
    first = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1), stops.shape[1])
    return jnp.clip(buffer.limit - buffer.start - 1, 0, first.astype(jnp.int32))
