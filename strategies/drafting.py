"""What the strategies that draft share: counts of how drafts fared, kept in the carry.

Leaves of `Carry.slot`, by the names below. They stay on the device and go where the slot goes: to
the host with each harvest, through a preemption, and back to their first values with the next
request. Whoever finds them there may tell them (`dllm_jax.requests.DraftMetrics`). Places are
counted behind the anchor: the first draft has place 1.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from strategies import blocks
from strategies.state import DecodeState

ROUNDS, PROPOSED, ACCEPTED = "draft_rounds", "drafts_proposed", "drafts_accepted"


def no_counts(size: int) -> dict[str, Array]:
    """Counts of a fresh request, for the `slot` leaves of a carry.

    Args:
        size: Cells of a draft, the anchor among them.

    Returns:
        `draft_rounds` [1 size]: rounds in which drafts were judged, by the tokens they emitted less
        one. `drafts_proposed`, `drafts_accepted` [1 size-1]: drafts that were judged, and those
        that were right as were all before them, by place less one.
    """
    nothing = jnp.zeros((1, size - 1), jnp.int32)
    return {ROUNDS: jnp.zeros((1, size), jnp.int32), PROPOSED: nothing, ACCEPTED: nothing}


def count(state: DecodeState, right: Int[Array, " B"], drafted: Array | int) -> DecodeState:
    """The counts with a round more, whose tokens are written and whose window has not moved.

    Args:
        right: Drafts that were right, up to the first that was not.
        drafted: Drafts that were judged; 0: this was no round of drafts.
    """
    slot = state.carry.slot
    room = _room(state)
    places = jnp.arange(1, slot[PROPOSED].shape[1] + 1, dtype=jnp.int32)[None]
    wanted = (places <= drafted) & (places <= room[:, None])
    taken = wanted & (places <= right[:, None])
    sizes = jnp.arange(1, slot[ROUNDS].shape[1] + 1, dtype=jnp.int32)[None]
    is_round = (sizes == jnp.minimum(right + 1, room)[:, None]) & (jnp.asarray(drafted) > 0)
    counts = {
        ROUNDS: slot[ROUNDS] + is_round.astype(jnp.int32),
        PROPOSED: slot[PROPOSED] + wanted.astype(jnp.int32),
        ACCEPTED: slot[ACCEPTED] + taken.astype(jnp.int32),
    }
    return state.replace(carry=state.carry.replace(slot=slot | counts))


def _room(state: DecodeState) -> Int[Array, " B"]:
    """Tokens behind the anchor that the request may still emit: to its limit and first stop id."""
    buffer = state.buffer
    stops = (blocks.is_stop(state, buffer.tokens) & buffer.filled)[:, 0]
    first = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1), stops.shape[1])
    return jnp.clip(buffer.limit - buffer.start - 1, 0, first.astype(jnp.int32))
