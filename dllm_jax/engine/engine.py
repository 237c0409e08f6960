"""The host loop: requests in, tokens out, two chunks of decode steps always on their way.

One `step` admits, dispatches prefill passes and decode chunks, and then reads the chunk before:
the device never waits for the host, and the host blocks only in the fetch. Nothing here imports
JAX: the runner is an argument (`runner.ModelRunner`, or a test's own).

Where a chunk says something of a stay that has ended (`Sequence.epoch`), it is not listened to. So
preemption, abort and recovery need no synchronisation: a sequence goes on from its last fetch, and
what the device still writes for it is overwritten by what is dispatched later.
"""

import dataclasses
import time
from collections import abc, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from dllm_jax.engine.admission import ActiveRequest, accept
from dllm_jax.engine.layout import DeviceFailure, EngineLayout
from dllm_jax.engine.outputs import output
from dllm_jax.engine.requests import DraftMetrics, Request, RequestOutput
from dllm_jax.engine.rounds import Budget, all_end, groups, num_steps
from dllm_jax.engine.scheduler import DECODE, DONE, PREFILL, Pass, Scheduler, Sequence

RUNNING_CODE = 1
ERROR_CODE = 7
REASONS = {2: "stop", 3: "length", 4: "nfe", 5: "repetition", 6: "abort", 7: "error"}


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts since the engine was made; the first five are of this moment.

    Those of drafts are of texts that ended, and count as `requests.DraftMetrics` does.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_held: int
    num_chunks_in_flight: int
    num_requests: int
    num_finished: int
    num_steps: int
    num_preemptions: int
    num_failures: int
    num_late_compiles: int
    prompt_tokens: int
    generated_tokens: int
    nfe: int
    prefix_queries: int
    prefix_hits: int
    prefix_evictions: int
    draft_rounds: int
    draft_tokens_proposed: int
    draft_tokens_accepted: int


@dataclasses.dataclass(slots=True)
class _Chunk:
    handle: Any
    sequences: list[Sequence]
    epochs: list[int]
    steps: int


@dataclasses.dataclass(slots=True)
class _Round:
    """What a step dispatched: decode chunks, or prefill passes alone and the last one's handle."""

    chunks: list[_Chunk]
    last_pass: Any


class Engine:
    """Continuous batching over a device.

    Args:
        runner: Runs the programs (`runner.ModelRunner`); `runner.layout` holds sizes and rules.
        tokenizer: For texts and stop strings; None: texts are empty.
        seed: Of requests without one.
        clock: Seconds; for deadlines and metrics.
        save_snapshot: Saves sequences that ended by a device failure; returns where.
    """

    def __init__(
        self,
        runner: Any,
        tokenizer: Any = None,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        save_snapshot: Callable[[abc.Sequence[Sequence]], str] | None = None,
    ):
        self.runner = runner
        self.layout: EngineLayout = runner.layout
        self.scheduler = Scheduler(self.layout)
        self._tokenizer, self._seed, self._clock = tokenizer, seed, clock
        self._save_snapshot = save_snapshot
        self._requests: dict[str, ActiveRequest] = {}
        self._deadlines = 0
        self._moved: list[ActiveRequest] = []
        self._rounds: deque[_Round] = deque()
        self._num_sequences = self._num_requests = 0
        self._step_s = 0.0
        self._last_fetch_s: float | None = None
        self._counts = dict.fromkeys(
            ("finished", "steps", "failures", "prompt_tokens", "generated_tokens", "nfe"), 0
        )
        self._drafted: DraftMetrics | None = None  # of the texts that ended

    # --- what users call ------------------------------------------------------------------------

    def add(self, request: Request) -> str:
        """Queue a request.

        Returns:
            Its id.

        Raises:
            ValueError: It can never run, or asks for what does not exist; the engine is as before.
        """
        request_id = str(self._num_requests) if request.request_id is None else request.request_id
        if request_id in self._requests:
            raise ValueError(f"{request_id=} is already in the engine; give another, or none")
        live = accept(
            request,
            request_id,
            self._num_sequences,
            self._clock(),
            self.scheduler,
            self._tokenizer,
            self._seed,
        )
        self._requests[live.id] = live
        self._num_requests += 1
        self._num_sequences += len(live.sequences)
        self._deadlines += live.deadline_s is not None
        self._counts["prompt_tokens"] += len(live.sequences[0].prompt)
        for sequence in live.sequences:
            self.scheduler.add(sequence)
        return live.id

    def step(self) -> list[RequestOutput]:
        """Admit, dispatch, and read the chunk before.

        Returns:
            Requests that ended, and those with `stream` that moved. Empty where nothing is left
            (`has_work` is False) or nothing was to be read yet.
        """
        if self._deadlines:
            self._end_late_ones()
        if not self.scheduler.live:  # what is in flight is nobody's, and idle time no step's
            self._rounds.clear()
            self._last_fetch_s = None
        try:
            dispatched = self._dispatch()
            if self._rounds and (len(self._rounds) > 1 or not dispatched):
                self._fetch(self._rounds.popleft())
        except DeviceFailure as failure:
            self._recover(failure)
        return self._report()

    def abort(self, request_id: str) -> bool:
        """End a request with "abort" and what it has; its last output comes with the next step.

        Returns:
            False where no such request is in the engine.
        """
        live = self._requests.get(request_id)
        if live is None:
            return False
        for sequence in live.sequences:
            self._end(sequence, "abort")
        return True

    def outputs(self) -> list[RequestOutput]:
        """Every request in the engine as it stands; without `stream` its text comes at the end."""
        now = self._clock()
        return [output(live, self._tokenizer, now) for live in list(self._requests.values())]

    def sequences(self, request_id: str) -> list[Sequence]:
        """What the engine keeps of a request's texts: to look at, and for `snapshot.restore`."""
        live = self._requests.get(request_id)
        return [] if live is None else live.sequences

    @property
    def has_work(self) -> bool:
        """Whether a further step can bring anything."""
        return bool(self._requests or self._moved)

    @property
    def drafted(self) -> DraftMetrics | None:
        """How drafts fared in all texts that ended; None without a drafting strategy."""
        return self._drafted

    def stats(self) -> Stats:
        """Counts of this moment and since the start."""
        pool, counts, drafted = self.scheduler.pool, self._counts, self._drafted
        return Stats(
            num_running=len(self.scheduler.live),
            num_waiting=self.scheduler.num_waiting,
            num_pages=pool.num_pages,
            num_pages_held=pool.num_held,
            num_chunks_in_flight=sum(len(one.chunks) for one in self._rounds),
            num_requests=self._num_requests,
            num_finished=counts["finished"],
            num_steps=counts["steps"],
            num_preemptions=self.scheduler.num_preemptions,
            num_failures=counts["failures"],
            num_late_compiles=self.runner.num_late_compiles,
            prompt_tokens=counts["prompt_tokens"],
            generated_tokens=counts["generated_tokens"],
            nfe=counts["nfe"],
            prefix_queries=pool.queries,
            prefix_hits=pool.hits,
            prefix_evictions=pool.evictions,
            draft_rounds=drafted.rounds if drafted else 0,
            draft_tokens_proposed=sum(drafted.proposed) if drafted else 0,
            draft_tokens_accepted=sum(drafted.accepted) if drafted else 0,
        )

    # --- dispatch --------------------------------------------------------------------------------

    def _dispatch(self) -> bool:
        scheduler = self.scheduler
        if scheduler.has_waiting:
            for sequence in scheduler.admit():
                self._place(sequence)
        decoding = [sequence for sequence in scheduler.live if sequence.stage == DECODE]
        steps = num_steps(self._step_s, scheduler, decoding, self.runner.cost)
        last_pass = None
        if len(decoding) < len(scheduler.live):
            last_pass = self._prefill(decoding, steps)
            decoding = [sequence for sequence in scheduler.live if sequence.stage == DECODE]
            steps = num_steps(self._step_s, scheduler, decoding, self.runner.cost)
        in_flight = [chunk for one in self._rounds for chunk in one.chunks]
        if not decoding or all_end(self.layout, in_flight, decoding):
            if last_pass is not None:
                self._rounds.append(_Round([], last_pass))
            return last_pass is not None
        steps = scheduler.grow(decoding, steps)
        decoding = [sequence for sequence in decoding if sequence.stage == DECODE]
        sized = groups(scheduler, decoding, steps, self.runner.cost)
        self._rounds.append(_Round([self._decode(*group) for group in sized], None))
        return True

    def _place(self, sequence: Sequence) -> None:
        self.runner.admit(sequence.slot, sequence.placement)
        for source, target in sequence.copies:
            self.runner.copy_page(source, target)
        if sequence.done >= sequence.goal:
            self._begin(sequence)

    def _begin(self, sequence: Sequence, prefilled: bool = False) -> None:
        """The prefix is in the cache (or dispatched): let the slot decode."""
        if sequence.saved is not None:
            fetch, row = sequence.saved
            self.runner.restore(
                sequence.slot, sequence.placement, fetch.saved(row), sequence.tokens
            )
        elif not prefilled:
            self.runner.begin(sequence.slot, sequence.boundary)
        sequence.stage = DECODE

    def _prefill(self, decoding: list[Sequence], steps: int) -> Any:
        """Dispatch passes within the round's budget, best-ranked sequences first.

        Returns:
            The last one's handle; None where there was none.
        """
        waiting = [sequence for sequence in self.scheduler.live if sequence.stage == PREFILL]
        budget = Budget(self.scheduler, decoding, steps, self.runner.cost)
        last = None
        for sequence in waiting:
            while sequence.done < sequence.goal:
                piece = budget.take(sequence, forced=last is None)
                if piece is None:
                    return last
                last = self._run_pass(sequence, piece)
        return last

    def _run_pass(self, sequence: Sequence, piece: Pass) -> Any:
        columns = self.scheduler.page_bucket(piece.end)
        last = piece.end >= sequence.goal and sequence.saved is None
        boundary = self.runner.prefill(
            sequence.slot,
            sequence.text_ids(piece.first, piece.live_end),
            piece.first,
            piece.end,
            piece.live_end,
            last,
            self.scheduler.table[sequence.slot, :columns],
            piece.size,
            piece.kind,
        )
        sequence.prefill_nfe += 1
        sequence.done = piece.end
        if piece.kind == "full":
            sequence.boundary = boundary
        if sequence.done >= sequence.goal:
            self._begin(sequence, prefilled=True)
        return boundary

    def _decode(self, group: list[Sequence], columns: int, steps: int) -> _Chunk:
        scheduler = self.scheduler
        rows = np.array(scheduler.rows(group, scheduler.slot_bucket(len(group))), np.int32)
        pages = scheduler.table[rows, :columns]
        handle = self.runner.decode(rows, len(group), pages, steps, True)
        for sequence in group:
            sequence.in_flight += steps
        return _Chunk(handle, group, [sequence.epoch for sequence in group], steps)

    # --- fetch ---------------------------------------------------------------------------------

    def _fetch(self, one: _Round) -> None:
        if one.last_pass is not None:
            self.runner.join(one.last_pass)
        ran = 0
        for chunk in one.chunks:
            got = self.runner.fetch(chunk.handle)
            ran = max(ran, got.steps)
            self._read(chunk, got)
        self._counts["steps"] += ran
        now = self._clock()
        if ran and self._last_fetch_s is not None:
            step_s = (now - self._last_fetch_s) / ran
            self._step_s = 0.8 * self._step_s + 0.2 * step_s if self._step_s else step_s
        self._last_fetch_s = now

    def _read(self, chunk: _Chunk, got: Any) -> None:
        rows = zip(
            range(len(chunk.sequences)),  # the bucket may be wider than the group
            chunk.sequences,
            chunk.epochs,
            got.start,
            got.finish,
            got.nfe,
            got.length,
            got.before,
            got.emitted,
            strict=False,
        )
        for i, sequence, epoch, start, finish, nfe, length, before, emitted in rows:
            if sequence.epoch != epoch:
                continue
            sequence.in_flight -= chunk.steps
            sequence.saved = (got, i)
            sequence.nfe = nfe
            moved = length > before
            if moved:
                # One that started over still has what it had said: these are the same tokens.
                sequence.tokens[before:length] = emitted[: length - before]
            if start > sequence.start:
                sequence.start = start
                if sequence.first_s is None:
                    sequence.first_s = self._clock()
            if finish == ERROR_CODE:
                sequence.is_sound = False
            elif not sequence.is_sound:
                sequence.is_sound = True
                self.scheduler.publish(sequence)
            if finish != RUNNING_CODE or (
                sequence.watched and (moved or sequence.owner.request.denoise)
            ):
                self._settle(sequence, finish)

    def _settle(self, sequence: Sequence, finish: int) -> None:
        """Text of what moved, and the end of what ended."""
        live = sequence.owner
        ended = finish != RUNNING_CODE
        if sequence.stream is not None and not self._feed(sequence, ended):
            return
        if finish == ERROR_CODE:
            live.error = (
                "the model produced values that are not finite; "
                "check the weights and the prompt, or use float32"
            )
        if ended:
            self._end(sequence, REASONS[finish])
        elif live.request.stream:
            self._moved.append(live)

    def _feed(self, sequence: Sequence, last: bool) -> bool:
        """Give the new tokens to the sequence's text; False where that ended it."""
        try:
            sequence.stream.feed(sequence.tokens, last)
        except Exception as error:  # whatever a tokenizer raises is this request's own business
            sequence.owner.error = f"the tokenizer failed: {type(error).__name__}: {error}"
            self._end(sequence, "error")
            return False
        if sequence.stream.stopped is None:
            return True
        del sequence.tokens[sequence.stream.stopped :]
        self._end(sequence, "stop")
        return False

    def _end(self, sequence: Sequence, reason: str) -> None:
        if sequence.stage == DONE:
            return
        self.scheduler.leave(sequence)
        sequence.finish_reason = reason
        sequence.end_s = self._clock()
        if sequence.first_s is None:
            sequence.first_s = sequence.end_s
        if sequence.saved is not None:
            fetch, row = sequence.saved
            sequence.drafted = fetch.drafted(row)
        sequence.saved = None
        if sequence.drafted is not None:
            told = self._drafted
            self._drafted = sequence.drafted if told is None else told + sequence.drafted
        self._counts["generated_tokens"] += sequence.placement.num_written(len(sequence.tokens))
        self._counts["nfe"] += sequence.nfe
        self._moved.append(sequence.owner)

    def _end_late_ones(self) -> None:
        now = self._clock()
        for live in list(self._requests.values()):
            if live.deadline_s is not None and now >= live.deadline_s:
                self.abort(live.id)

    # --- failure ---------------------------------------------------------------------------------

    def _recover(self, failure: DeviceFailure) -> None:
        """The donated state is gone: start over from the last fetches.

        A sequence that got no further since the failure before is given up: it would fail again.
        """
        self._counts["failures"] += 1
        self._rounds.clear()
        self._last_fetch_s = None
        lost = list(self.scheduler.live)
        self._give_up([s for s in lost if s.nfe <= s.failed_at], str(failure))
        for sequence in lost:
            sequence.failed_at = sequence.nfe
        self.scheduler.lose_everything()
        try:
            self.runner.reset()
        except DeviceFailure as second:
            everyone = [s for live in self._requests.values() for s in live.sequences]
            self._give_up([s for s in everyone if s.stage != DONE], str(second))

    def _give_up(self, sequences: list[Sequence], why: str) -> None:
        where = self._save(sequences)
        first_line = why.strip().splitlines()[0] if why.strip() else "no message"
        for sequence in sequences:
            sequence.owner.error = f"the device failed twice ({first_line}){where}"
            self._end(sequence, "error")

    def _save(self, sequences: list[Sequence]) -> str:
        if self._save_snapshot is None or not sequences:
            return ""
        try:
            path = self._save_snapshot(sequences)
        except Exception as error:  # a full disk must not take the other requests along
            return f"; it could not be saved ({type(error).__name__}: {error})"
        return f"; saved: `dllm-jax replay {path}` runs it again"

    # --- outputs ---------------------------------------------------------------------------------

    def _report(self) -> list[RequestOutput]:
        if not self._moved:
            return []
        moved, self._moved = list(dict.fromkeys(self._moved)), []
        outputs = []
        for live in moved:
            done = all(sequence.stage == DONE for sequence in live.sequences)
            if not done and not live.request.stream:
                continue
            if live.id not in self._requests:
                continue
            if done:
                del self._requests[live.id]
                self._deadlines -= live.deadline_s is not None
                self._counts["finished"] += 1
            outputs.append(output(live, self._tokenizer, self._clock()))
        return outputs
