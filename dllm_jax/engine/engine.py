"""The host loop: requests in, tokens out, two chunks of decode steps in flight.

A `step` admits, dispatches prefill passes and decode chunks, then fetches the chunk before: the
device never waits for the host, and the host blocks only in the fetch.

Results from an earlier slot tenancy (`Sequence.epoch`) are discarded. So preemption, abort and
recovery need no synchronisation: a sequence resumes from its last fetch, and later dispatches
overwrite what the device still writes for it.
"""

import contextlib
import dataclasses
import time
from collections import abc, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from dllm_jax.engine import checks
from dllm_jax.engine.active import accept
from dllm_jax.engine.layout import CompileFailure, DeviceFailure, EngineLayout
from dllm_jax.engine.requests import DraftMetrics, Request, RequestOutput
from dllm_jax.engine.rounds import Budget, Chunk, all_end, groups, num_steps
from dllm_jax.engine.scheduler import Scheduler
from dllm_jax.engine.sequence import DECODE, DONE, PREFILL, Pass, Sequence
from dllm_jax.engine.stats import Stats
from dllm_jax.engine.texts import Texts

PROGRAMS_WAIT_S = 0.02  # of a step whose requests all wait for programs that a thread compiles
NEWEST_SHARE = 0.2  # of the last chunk in the running mean of a step's seconds


@dataclasses.dataclass(slots=True)
class _Round:
    """The work of a step: decode chunks, or only prefill, with the handle of its last pass."""

    chunks: list[Chunk]
    last_pass: Any = None


class Engine(Texts):
    """Continuous batching over a device.

    Args:
        runner: Runs the programs (`runner.ModelRunner`); `runner.layout` holds sizes and rules.
        tokenizer, clock: See `Texts`.
        seed: Of requests without one.
        save_snapshot: Saves sequences that ended by a device failure; returns where.

    Attributes:
        drafted, faults: See `Texts`.
        is_open: Requests come at any time, as to a server; see `rounds.num_steps`.
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
        super().__init__(Scheduler(self.layout), tokenizer, clock)
        self.save_snapshot = save_snapshot
        self.is_open = False
        self._seed, self._num_sequences = seed, 0
        self._is_torn = False  # a call is changing the state of the engine, or was interrupted
        self._rounds: deque[_Round] = deque()
        self._step_s = 0.0
        self._last_fetch_s: float | None = None

    # --- what users call ------------------------------------------------------------------------

    def add(self, request: Request) -> str:
        """Queue a request.

        Returns:
            Its id.

        Raises:
            ValueError: It can never run, or asks for what does not exist; the engine is unchanged.
        """
        self._mend()
        request_id = self.id_of(request)
        if request_id in self._requests:
            raise ValueError(
                f"request_id={checks.short_repr(request_id)} is already in the engine; give "
                f"another, or none"
            )
        number, now = self._num_sequences, self._clock()
        active = accept(request, request_id, number, now, self.layout, self._tokenizer, self._seed)
        self._is_torn = True
        self._counts.num_requests += 1
        self._num_sequences += len(active.sequences)
        self._requests[active.id] = active
        self._num_deadlines += active.deadline_s is not None
        self._counts.prompt_tokens += len(active.sequences[0].prompt)
        for sequence in active.sequences:
            self.scheduler.add(sequence)
        self._is_torn = False
        return active.id

    def step(self) -> list[RequestOutput]:
        """Admit, dispatch, and fetch the chunk before.

        Returns:
            Requests that ended, and those with `stream` that moved. Empty if there is no work
            (`has_work` is False) or nothing to read yet.
        """
        self._take_step()
        outputs, self._ready = self._ready, []
        return outputs

    def _take_step(self) -> None:
        """A step; its outputs are `_ready`."""
        self._mend()
        self._is_torn = True
        if self._num_deadlines:
            self._abort_late()
        if not self.scheduler.live:  # in-flight work has no owner; exclude idle time
            self._drop_rounds()
        try:
            dispatched = self._dispatch()
            if self._rounds and (len(self._rounds) > 1 or not dispatched):
                self._fetch(self._rounds.popleft())
        except DeviceFailure as failure:
            self._recover(failure)
        self._report()
        self._is_torn = False

    def abort(self, request_id: str) -> bool:
        """End a request with "abort" and the tokens it has; the next step returns its last output.

        Returns:
            False if the engine has no such request.
        """
        self._mend()
        self._is_torn = True
        for sequence in self.sequences(request_id):
            self._end(sequence, "abort")
        self._is_torn = False
        return request_id in self._requests

    def forget_prefixes(self) -> int:
        """Empty the page pool, whose contents are of weights that go; the pages that were cached.

        Raises:
            RuntimeError: Requests run.
        """
        if self.has_work:
            raise RuntimeError("requests run; let them end, or abort them")
        self._drop_rounds()
        return self.scheduler.pool.reset()

    def stats(self) -> Stats:
        """Current values, and counts since the engine was made."""
        pool, counts = self.scheduler.pool, self._counts
        drafted = self.drafted or DraftMetrics((), (), ())
        running = [s for r in self._requests.values() for s in r.sequences if s.stage != DONE]
        return dataclasses.replace(
            counts,
            num_running=len(self.scheduler.live),
            num_waiting=self.scheduler.num_waiting,
            num_pages=pool.num_pages,
            num_pages_held=pool.num_held,
            num_chunks_in_flight=sum(len(round_.chunks) for round_ in list(self._rounds)),
            num_preemptions=self.scheduler.num_preemptions,
            num_faults=self.faults.count,
            num_late_compiles=self.runner.num_late_compiles,
            num_programs=self.runner.num_programs,
            num_compiled=self.runner.num_compiled,
            generated_tokens=counts.generated_tokens
            + sum(s.placement.num_written(len(s.tokens)) for s in running),
            nfe=counts.nfe + sum(s.nfe for s in running),
            prefix_queries=pool.queries,
            prefix_hits=pool.hits,
            prefix_evictions=pool.evictions,
            draft_rounds=drafted.rounds,
            draft_tokens_proposed=sum(drafted.proposed),
            draft_tokens_accepted=sum(drafted.accepted),
        )

    # --- dispatch --------------------------------------------------------------------------------

    def _dispatch(self) -> bool:
        """Admit, then dispatch prefill passes and decode chunks; False: there was none."""
        if self.scheduler.has_room and self.scheduler.has_waiting:
            self._admit()
        last_pass = self._prefill()
        chunks = self._decode()
        if is_any := bool(chunks) or last_pass is not None:
            self._rounds.append(_Round(chunks, None if chunks else last_pass))
        return is_any

    def _admit(self) -> None:
        """Give waiting sequences slots; if all wait for programs, wait a little for these."""
        for sequence in self.scheduler.admit(self._has_programs):
            with self._alone(sequence):
                self._place(sequence)
        self.runner.forget_failed_programs()  # all that waited have their error
        if not self.scheduler.live and not self._rounds:
            self.runner.await_programs(PROGRAMS_WAIT_S)

    @contextlib.contextmanager
    def _alone(self, sequence: Sequence) -> abc.Iterator[None]:
        """Whatever is raised here ends the sequence alone; a failure of the device concerns all."""
        try:
            yield
        except DeviceFailure:
            raise
        except Exception as error:
            self._end(sequence, "error", f"the request failed: {self.faults.note(error)}")

    def _has_programs(self, sequence: Sequence) -> bool:
        """Whether the programs that a sequence needs are compiled; it ends if they cannot be."""
        if sequence.placement.grammar is None:
            return True
        try:
            return self.runner.has_programs(sequence.placement.grammar)
        except CompileFailure as failure:
            self._end(sequence, "error", str(failure))
            return False

    def _place(self, sequence: Sequence) -> None:
        if sequence.admitted_s is None:
            sequence.admitted_s = self._clock()
        self.runner.admit(sequence.slot, sequence.placement)
        for source, target in sequence.copies:
            self.runner.copy_page(source, target)
        if sequence.done >= sequence.start:
            self._begin(sequence)

    def _begin(self, sequence: Sequence, prefilled: bool = False) -> None:
        """Let the slot decode: its prefix is in the cache, or dispatched."""
        if sequence.saved is not None:
            fetch, row = sequence.saved
            saved = fetch.saved(row)
            self.runner.restore(sequence.slot, sequence.placement, saved, sequence.tokens)
        elif not prefilled:
            self.runner.begin(sequence.slot, sequence.boundary)
        sequence.stage = DECODE

    def _prefill(self) -> Any:
        """Dispatch passes within the round's budget, best-ranked sequences first.

        Returns:
            The last pass's handle; None without a pass.
        """
        scheduler, cost, last = self.scheduler, self.runner.cost, None
        waiting = [sequence for sequence in scheduler.live if sequence.stage == PREFILL]
        if not waiting:
            return None
        decoding = scheduler.decoding()
        steps = num_steps(self._step_s, scheduler, decoding, cost, self.is_open)
        budget = Budget(scheduler, decoding, steps, cost)
        for sequence in waiting:
            while sequence.stage == PREFILL:
                piece = budget.take(sequence, forced=last is None)
                if piece is None:
                    return last
                with self._alone(sequence):
                    last = self._run_pass(sequence, piece)
        return last

    def _run_pass(self, sequence: Sequence, piece: Pass) -> Any:
        columns = self.scheduler.page_bucket(piece.end)
        boundary = self.runner.prefill(
            sequence.slot,
            sequence.text_ids(piece.first, piece.live_end),
            piece.first,
            piece.end,
            piece.live_end,
            piece.end >= sequence.start and sequence.saved is None,
            self.scheduler.table[sequence.slot, :columns],
            piece.size,
            piece.kind,
        )
        sequence.prefill_nfe += 1
        sequence.done = piece.end
        if piece.kind == "full":
            sequence.boundary = boundary
        if sequence.done >= sequence.start:
            self._begin(sequence, prefilled=True)
        return boundary

    def _decode(self) -> list[Chunk]:
        """Dispatch steps of all sequences that decode, unless those in flight end all of them."""
        scheduler, cost = self.scheduler, self.runner.cost
        decoding = scheduler.decoding()
        in_flight = [chunk for round_ in self._rounds for chunk in round_.chunks]
        if not decoding or all_end(self.layout, in_flight, decoding):
            return []
        steps = num_steps(self._step_s, scheduler, decoding, cost, self.is_open)
        steps = scheduler.grow(decoding, steps)
        decoding = [sequence for sequence in decoding if sequence.stage == DECODE]
        chunks = []
        for group, columns, count in groups(scheduler, decoding, steps, cost):
            rows = np.array(scheduler.rows(group), np.int32)
            pages = scheduler.table[rows, :columns]
            handle = self.runner.decode(rows, len(group), pages, count, True)
            for sequence in group:
                sequence.in_flight += count
            chunks.append(Chunk(handle, group, [sequence.epoch for sequence in group], count))
        return chunks

    # --- fetch -----------------------------------------------------------------------------------

    def _fetch(self, round_: _Round) -> None:
        if round_.last_pass is not None:
            self.runner.join(round_.last_pass)
        steps = 0
        for chunk in round_.chunks:
            fetched = self.runner.fetch(chunk.handle)
            steps = max(steps, fetched.steps)
            self._read(chunk, fetched)
        self._counts.num_steps += steps
        now = self._clock()
        if steps and self._last_fetch_s is not None:
            newest = (now - self._last_fetch_s) / steps
            mean = self._step_s or newest
            self._step_s = (1 - NEWEST_SHARE) * mean + NEWEST_SHARE * newest
        self._last_fetch_s = now

    # --- failure ---------------------------------------------------------------------------------

    def _drop_rounds(self) -> None:
        self._rounds.clear()
        self._last_fetch_s = None

    def _recover(self, failure: DeviceFailure) -> None:
        """Resume from the last fetches: the donated state is gone.

        A sequence without a step since the failure before is given up: it would fail again. So is
        one that needs a program which cannot be compiled. Where what a fetch left on the device is
        lost too, the text starts over and comes to the same tokens.
        """
        self._counts.num_failures += 1
        self._drop_rounds()
        lost = list(self.scheduler.live)
        for sequence in lost:
            if sequence.saved is not None and not sequence.saved[0].hold():
                sequence.saved = None
        if isinstance(failure, CompileFailure):
            for sequence in [s for s in lost if s.slot in failure.slots]:
                self._end(sequence, "error", str(failure))
        else:
            self._give_up([s for s in lost if s.nfe <= s.failed_at], failure)
            for sequence in lost:
                sequence.failed_at = sequence.nfe
        self.scheduler.lose_everything()
        try:
            self.runner.reset()
        except DeviceFailure as second:
            everyone = [s for active in self._requests.values() for s in active.sequences]
            self._give_up([s for s in everyone if s.stage != DONE], second)

    def _give_up(self, sequences: list[Sequence], failure: DeviceFailure) -> None:
        saved = ""
        if self.save_snapshot is not None and sequences:
            try:
                path = self.save_snapshot(sequences)
                saved = f"; saved: `dllm-jax replay {path}` runs it again"
            except Exception as error:  # a full disk must not end the other requests
                saved = f"; it could not be saved ({type(error).__name__}: {error})"
        first_line = (str(failure).strip() or "no message").splitlines()[0]
        for sequence in sequences:
            self._end(sequence, "error", f"the device failed twice ({first_line}){saved}")

    def _mend(self) -> None:
        """Start over if a call was cut short, by a second Ctrl-C for example."""
        if not self._is_torn:
            return
        self._drop_rounds()
        self._start_over()
        self._is_torn = False
