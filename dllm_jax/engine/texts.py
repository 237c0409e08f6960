"""The texts of an engine: what a fetch changes in them, how they end, and what is reported."""

from collections.abc import Callable
from typing import Any

from dllm_jax.engine import checks
from dllm_jax.engine.active import ActiveRequest, is_whole, output
from dllm_jax.engine.detokenize import TextStream, special_stops
from dllm_jax.engine.faults import Faults
from dllm_jax.engine.requests import DraftMetrics, Request, RequestOutput
from dllm_jax.engine.rounds import Chunk
from dllm_jax.engine.scheduler import Scheduler
from dllm_jax.engine.sequence import DONE, Sequence
from dllm_jax.engine.stats import Stats

RUNNING_CODE = 1
ERROR_CODE, STUCK_CODE = 7, 8
REASONS = {2: "stop", 3: "length", 4: "nfe", 5: "repetition", 6: "abort"}


class Texts:
    """Requests from the queue to their outputs; `Engine` runs them on a device.

    Args:
        scheduler: Gives the sequences slots and pages.
        tokenizer: For texts and stop strings; None: texts are empty.
        clock: Seconds; for deadlines and metrics.

    Attributes:
        drafted: How drafts fared in all texts that ended; None without a drafting strategy.
        faults: Exceptions that ended one request each.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Any, clock: Callable[[], float]):
        self.scheduler = scheduler
        self.drafted: DraftMetrics | None = None
        self.faults = Faults()
        self._tokenizer, self._clock = tokenizer, clock
        self._requests: dict[str, ActiveRequest] = {}
        self._moved: list[ActiveRequest] = []
        self._ready: list[RequestOutput] = []  # reported, not yet handed over
        self._num_deadlines = 0
        self._counts = Stats()

    def id_of(self, request: Request) -> str:
        """The id that a request has, or gets if it is added next."""
        number = self._counts.num_requests
        return str(number) if request.request_id is None else request.request_id

    def outputs(self) -> list[RequestOutput]:
        """Current outputs of all requests; without `stream` a text comes only at its end."""
        now = self._clock()
        return [output(active, now) for active in list(self._requests.values())]

    def sequences(self, request_id: str) -> list[Sequence]:
        """The sequences of a request, to read, and for `snapshot.restore`."""
        active = self._requests.get(request_id)
        return [] if active is None else active.sequences

    @property
    def has_work(self) -> bool:
        """Whether a further step can return outputs."""
        return bool(self._requests or self._moved or self._ready)

    def _start_over(self) -> None:
        """Queue every text that has not ended again; it comes to the same tokens.

        Slots, pages and queue may disagree before.
        """
        reported = {one.request_id for one in self._ready if one.finished}
        for request_id in reported & self._requests.keys():
            del self._requests[request_id]
        every = list(self._requests.values())
        self._counts.num_finished = self._counts.num_requests - len(every)
        self._num_deadlines = sum(active.deadline_s is not None for active in every)
        left = [s for active in every for s in active.sequences if s.finish_reason is None]
        self.scheduler.start_over(left)
        for sequence in left:
            sequence.stream = None
            if sequence.watched and (reason := self._feed(sequence, last=False)):
                self._end(sequence, reason)
        self._moved = every

    # --- what a fetch changes -------------------------------------------------------------------

    def _read(self, chunk: Chunk, fetched: Any) -> None:
        for i, (sequence, epoch) in enumerate(zip(chunk.sequences, chunk.epochs, strict=True)):
            if sequence.epoch != epoch:
                continue
            sequence.in_flight -= chunk.steps
            sequence.saved = (fetched, i)
            sequence.nfe = fetched.nfe[i]
            start, finish = fetched.start[i], fetched.finish[i]
            length, before = fetched.length[i], fetched.before[i]
            moved = length > before
            if moved:
                # A sequence that started over keeps its tokens; the new ones are the same.
                sequence.tokens[before:length] = fetched.emitted[i][: length - before]
                if sequence.owner.params.reads_written:
                    first = sequence.placement.prompt_len + before
                    sequence.written[before:length] = fetched.written(i, first, length - before)
            if start > sequence.start:
                sequence.start = start
                if sequence.first_s is None:
                    sequence.first_s = self._clock()
            if finish != ERROR_CODE and not sequence.is_sound:
                sequence.is_sound = True
                self.scheduler.prefixes.publish(sequence)
            if finish == ERROR_CODE:
                sequence.is_sound = False
                self._end(
                    sequence,
                    "error",
                    "the model produced values that are not finite; "
                    "check the weights and the prompt, or use float32",
                )
            elif finish == STUCK_CODE:
                self._end(sequence, "error", self.scheduler.layout.stuck_text.format(int(start)))
            elif finish != RUNNING_CODE:
                if REASONS[finish] == "stop":
                    sequence.stop_id = self._callers_stop(sequence, fetched, i)
                self._end(sequence, REASONS[finish])
            elif sequence.watched and (moved or sequence.owner.request.denoise):
                self._show(sequence)

    def _callers_stop(self, sequence: Sequence, fetched: Any, row: int) -> int | str | None:
        """The one of the caller's stops that was written; None for the model's own."""
        params = sequence.owner.params
        own = () if params.ignore_eos else self.scheduler.layout.stop_token_ids
        callers: dict[int, int | str] = {i: i for i in params.stop_token_ids if i not in own}
        callers |= special_stops(self._tokenizer, params.stop, sequence.placement.stop_ids)
        return callers.get(fetched.behind(row)) if callers else None

    def _show(self, sequence: Sequence) -> None:
        """Update the text of a running sequence, and report it if its request streams."""
        if reason := self._feed(sequence, last=False):
            self._end(sequence, reason)
        elif sequence.owner.request.stream:
            self._moved.append(sequence.owner)

    def _feed(self, sequence: Sequence, last: bool) -> str | None:
        """Give the new tokens to the text; the finish reason if that ends the sequence."""
        if self._tokenizer is None:
            return None
        if sequence.stream is None:
            sequence.stream = TextStream(self._tokenizer, sequence.owner.params.stop)
        try:
            sequence.stream.feed(sequence.tokens, last)
        except BaseException as error:  # whatever a tokenizer raises ends this request alone
            checks.raise_exit(error)
            self.faults.note(error)
            sequence.owner.error = _tokenizer_failed(error)
            return "error"
        if sequence.stream.stopped is None:
            return None
        del sequence.tokens[sequence.stream.stopped :]
        return "stop"

    def _end(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        """End a sequence, unless its last text does so for another reason."""
        if sequence.stage == DONE:
            return
        self.scheduler.leave(sequence)
        sequence.end_s = self._clock()
        if sequence.first_s is None:
            sequence.first_s = sequence.end_s
        last = self._feed(sequence, last=True)
        if reason == "length" and is_whole(sequence):
            reason = "stop"
        if last is None:
            sequence.owner.error = error or sequence.owner.error
        sequence.finish_reason = last or reason
        if sequence.owner.params.record and sequence.saved is not None:
            fetch, row = sequence.saved
            sequence.tail = fetch.behind_text(row, len(sequence.tokens))
        sequence.drafted, sequence.saved = sequence.draft_metrics(), None
        self.drafted = DraftMetrics.together((self.drafted, sequence.drafted))
        self._counts.generated_tokens += sequence.placement.num_written(len(sequence.tokens))
        self._counts.nfe += sequence.nfe
        self._moved.append(sequence.owner)

    def _abort_late(self) -> None:
        now = self._clock()
        for active in list(self._requests.values()):
            if active.deadline_s is not None and now >= active.deadline_s:
                active.is_late = True
                for sequence in active.sequences:
                    self._end(sequence, "abort")

    # --- outputs --------------------------------------------------------------------------------

    def _report(self) -> None:
        moved, self._moved = dict.fromkeys(self._moved), []
        for active in moved:
            done = all(sequence.stage == DONE for sequence in active.sequences)
            if active.id not in self._requests or not (done or active.request.stream):
                continue
            self._ready.append(self._output(active))
            if self._ready[-1].finished:
                del self._requests[active.id]
                self._num_deadlines -= active.deadline_s is not None
                self._counts.num_finished += 1

    def _output(self, active: ActiveRequest) -> RequestOutput:
        try:
            return output(active, self._clock())
        except BaseException as error:  # of a tokenizer, asked what may be shown
            checks.raise_exit(error)
            self.faults.note(error)
            for sequence in active.sequences:
                self._end(sequence, "error", _tokenizer_failed(error))
            return output(active, self._clock())


def _tokenizer_failed(error: BaseException) -> str:
    return f"the tokenizer failed: {type(error).__name__}: {error}"
