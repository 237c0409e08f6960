"""Shared by strategies that draft: which drafts are right, and how many to judge next.

Counts and estimates are leaves of `Carry`, by the names below. The counts (`slot`) go where the
request goes: to the host with each fetch, as `DraftMetrics`, and through a preemption. The
estimates (`lasting`), by which a width is chosen, belong to the slot and outlive a request: most
texts are too short to learn from themselves alone.

Places are counted after the anchor: the first draft has place 1. A width counts cells: the anchor
and the drafts after it that are judged; 1 is no draft.

Source: argmax_w E[n(w)] / time(w), summed over a batch (docs/adr/0011-costs-are-data.md).
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..core import blocks, random
from ..core.forward import ForwardOutput
from ..core.state import RUNNING, DecodeState

ROUNDS, PROPOSED, ACCEPTED = "draft_rounds", "drafts_proposed", "drafts_accepted"
CHANCE, IDLE = "draft_chance", "draft_idle"
RUN = "text_run"

# The estimate before the first round. Where all drafts before them were right, those of published
# pairs are right about nine times in ten (27B target, block 16: z-lab/dflash#52). A higher value
# keeps a draft that is never right for longer: this one ten rounds or so, at costs of an 8B pair.
FIRST_CHANCE = 0.85
GAIN = 0.25  # weight of the last round
# Rounds without drafts after which one round probes whether they would be right now, and the most
# that the probe may cost as a share of those rounds.
PROBE_EVERY, PROBE_SHARE = 128, 0.005


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


def no_estimates(size: int) -> dict[str, Array]:
    """The estimates of `choose_width` in a fresh slot, for the `lasting` leaves of a carry.

    Returns:
        `draft_chance` [1 size-1]: of a draft to be right where all before it were, by place less
        one. `draft_idle` [1]: rounds since one with drafts.
    """
    chance = jnp.full((1, size - 1), FIRST_CHANCE, jnp.float32)
    return {CHANCE: chance, IDLE: jnp.zeros((1,), jnp.int32)}


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
    a run. Drafts after a wrong one do not change the estimates.

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
        seen = wanted & (places <= right[:, None] + 1)
        moved = lasting[CHANCE] + GAIN * (taken.astype(jnp.float32) - lasting[CHANCE])
        lasting = {
            CHANCE: jnp.where(seen, moved, lasting[CHANCE]),
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


def choose_width(
    state: DecodeState, widths: Sequence[int], costs: Float[Array, " X"]
) -> Int[Array, ""]:
    """The width with the most expected tokens of the running rows for its cost.

    It depends on past rounds only, so it does not bias acceptance. Where drafts do not pay, width 1
    is chosen, and now and then the next one as a probe. There is no probe where drafts could not
    pay even if all of them were right.

    Args:
        widths: Ascending.
        costs: Of a round of each width for all rows, in any one unit.

    Returns:
        The index of the width.
    """
    lasting, buffer = state.carry.lasting, state.buffer
    running = state.finish == RUNNING
    room = buffer.limit - buffer.start - 1
    reached = running.astype(jnp.float32)
    tokens, sums = reached, {1: jnp.sum(reached)}  # of each row, of all rows by width
    # Place by place: on a GPU a product or sum along so short an axis is a launch, in every step.
    for place in range(1, widths[-1]):
        reached = jnp.where(place < room, reached * lasting[CHANCE][:, place - 1], 0.0)
        tokens = tokens + reached
        sums[place + 1] = jnp.sum(tokens)
    best, most = jnp.int32(0), sums[widths[0]] / costs[0]
    for i, width in enumerate(widths[1:], 1):
        is_better = sums[width] / costs[i] > most
        best = jnp.where(is_better, i, best)
        most = jnp.where(is_better, sums[width] / costs[i], most)
    if widths[0] > 1:
        return best
    sizes = jnp.asarray(widths[1:], jnp.float32)
    could_pay = jnp.any(sizes / costs[1:] > 1.0 / costs[0])
    rounds = jnp.maximum(PROBE_EVERY, (costs[1] / costs[0] - 1.0) / PROBE_SHARE)
    is_due = jnp.any(running & (lasting[IDLE].astype(jnp.float32) >= rounds))
    return jnp.where((best == 0) & is_due & could_pay, 1, best)


def _room(state: DecodeState) -> Int[Array, " B"]:
    """Tokens after the anchor that the request may still emit: to its limit and first stop id."""
    buffer = state.buffer
    stops = (blocks.is_stop(state, buffer.tokens) & buffer.filled)[:, 0]
    first = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1), stops.shape[1])
    return jnp.clip(buffer.limit - buffer.start - 1, 0, first.astype(jnp.int32))
