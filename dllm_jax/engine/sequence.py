"""One text of a request as the host loop knows it, and a piece of its prefill."""

import dataclasses
from typing import Any

from dllm_jax.engine.layout import PassKind, Placement
from dllm_jax.engine.record import Tail, Write

WAITING, PREFILL, DECODE, DONE = range(4)


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """One text of a request, as the host knows it.

    Attributes:
        owner: Its request (`active.ActiveRequest`).
        rank: (priority, arrival): lower goes first, no two are equal.
        client: Whose it is.
        turn: Its round in the queue of its priority, in each of which a client has one.
        placement: Its slot when fresh.
        leader: The first sequence of its request, whose prompt pages it waits for and shares.
        capacity: Positions it can ever write.
        epoch: Counts its slot tenancies: results of an earlier one are discarded.
        done: Positions before `start` that are computed or found; the others wait for prefill.
        prefix_len: Tokens of the prompt that prefill stores.
        start: Tokens in the cache at its last fetch; before the first, those prefill stores.
        tokens: Settled output as fetched.
        written: How these tokens were written, where the request reads that.
        tail: At its end, what stands after the output.
        saved: The last fetch and its row there; None: it starts over.
        in_flight: Decode steps dispatched and not fetched.
        chain: Keys of its pages (`pages.Chain`).
        publishes: Others may share its pages.
        is_sound: A fetch of this tenancy found its values finite.
        num_published: Pages found or published in this tenancy.
        copies: Pages to copy on admission, as (source, target).
        failed_at: Forwards it had made when the device last failed, -1 if it never did.
        watched: Each move matters: for a stream, a stop string or a provisional window.
        stop_id: The one of the request's `stop_token_ids`, or the special token, that ended it.
        drafted: How its drafts fared, once it has ended (`requests.DraftMetrics`).
    """

    owner: Any
    index: int
    rank: tuple[int, int]
    prompt: list[int]
    prefix_len: int
    placement: Placement
    capacity: int
    leader: "Sequence | None" = None
    client: str = ""
    turn: int = 0
    stage: int = WAITING
    slot: int = -1
    epoch: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    done: int = 0
    start: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    written: list[Write] = dataclasses.field(default_factory=list)
    tail: Tail | None = None
    saved: tuple[Any, int] | None = None
    in_flight: int = 0
    chain: Any = None
    publishes: bool = True
    is_sound: bool = False
    num_published: int = 0
    prompt_published: bool = False
    boundary: Any = None
    copies: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    nfe: int = 0
    prefill_nfe: int = 0
    cached_tokens: int | None = None
    num_preemptions: int = 0
    failed_at: int = -1
    admitted_s: float | None = None
    first_s: float | None = None
    end_s: float | None = None
    watched: bool = False
    stream: Any = None
    finish_reason: str | None = None
    stop_id: int | str | None = None
    drafted: Any = None

    def text_ids(self, first: int, end: int) -> list[int]:
        """Ids of positions [first, end) of prompt and settled output."""
        split = len(self.prompt)
        if end <= split:
            return self.prompt[first:end]
        return self.prompt[first:end] + self.tokens[max(first - split, 0) : max(end - split, 0)]

    def draft_metrics(self) -> Any:
        """How its drafts fared by its last fetch (`requests.DraftMetrics`), or None."""
        if self.saved is None:
            return self.drafted
        fetch, row = self.saved
        return fetch.drafted(row)


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """One prefill dispatch: positions [first, end) are stored, [first, live_end) computed."""

    kind: PassKind
    first: int
    end: int
    live_end: int
    size: int
