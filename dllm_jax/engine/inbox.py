"""One engine for several callers and threads: outputs go to the caller that added the request.

`LLM.generate`, streams and a caller's own `engine.step()` may share an engine. Any caller's step
advances every request; an `Inbox` keeps the outputs of its own requests until they are read.
"""

import contextlib
import inspect
import math
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dllm_jax.engine.engine import Engine
from dllm_jax.engine.requests import DraftMetrics, Request, RequestOutput, StreamEvent

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
WARN_ROUNDS = 64  # rounds with a draft before the warning
WARN_LENGTH = 1.15  # tokens a round; the target's own token is 1


FORKED = (
    "this process was forked from one that has an engine, whose threads a fork does not copy; "
    'start it by multiprocessing.get_context("spawn")'
)


class SharedEngine(Engine):
    """An engine that keeps each output for its caller; threads take turns.

    Args:
        prepare: Gives a request with a constraint its grammar, before the thread has its turn;
            raises ValueError where it cannot.

    Raises:
        RuntimeError: In any call of a forked child, in which the device's threads do not exist.
    """

    def __init__(
        self,
        *args: Any,
        prepare: Callable[[Request], Request] = lambda request: request,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._prepare = prepare
        self._process = os.getpid()
        self._lock, self._next = threading.RLock(), threading.RLock()
        self._boxes: dict[str, deque[RequestOutput]] = {}
        self._returning: dict[int, str] = {}  # by thread: the request of an `add` under way
        self._unclaimed: list[RequestOutput] = []
        self._dropped: deque[str] = deque()
        self._is_stepping = self._has_warned = self._is_closed = False

    def add(self, request: Request) -> str:
        """`Engine.add`; a Ctrl-C meanwhile ends the request, whose id the caller never sees."""
        return self.add_to(None, request)

    def add_to(self, inbox: "Inbox | None", request: Request) -> str:
        """Queue a request whose outputs go to an inbox."""
        self.check_process()
        if request.params.constraint is not None:
            request = self._prepare(request)
        me, added = threading.get_ident(), None
        try:
            with InterruptsHeld(), self._turn():
                self._abandon(me)
                request_id = self.id_of(request)
                if request_id not in self._requests:  # else it is refused, and another's
                    self._returning[me] = request_id
                self._returning[me] = added = super().add(request)
                if inbox is not None:
                    self._boxes[added] = inbox.expect(added)
            del self._returning[me]
            return added
        except BaseException:
            if added is not None:
                self.drop([added])
            self._abandon(me)
            raise

    def _abandon(self, thread: int) -> None:
        """End the request of an `add` of this thread that did not return.

        A second Ctrl-C may interrupt this too: the thread's next step or `add` makes up for it.
        """
        if (request_id := self._returning.get(thread)) is not None:
            self.drop([request_id])
            self._returning.pop(thread, None)

    def abort(self, request_id: str) -> bool:
        """See `Engine.abort`."""
        with self._turn():
            return super().abort(request_id)

    def step(self) -> list[RequestOutput]:
        """`Engine.step` for requests added by `add`; Ctrl-C waits until the step ends."""
        with InterruptsHeld():
            self.advance()
        outputs, self._unclaimed = self._unclaimed, []
        return outputs

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """This thread's turn; of two threads that loop over turns, neither waits for long."""
        self.check_process()
        try:
            with self._next:  # a thread that waits here goes before the one whose turn it is
                self._lock.acquire()
            yield
        finally:
            if self._lock._is_owned():  # type: ignore[attr-defined]
                self._lock.release()

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child, and once the engine is closed."""
        if os.getpid() != self._process:
            raise RuntimeError(FORKED)
        if self._is_closed:
            raise RuntimeError("the engine is closed; make a new LLM")

    @property
    def has_work(self) -> bool:
        """Whether a further step can bring anything."""
        return super().has_work or bool(self._unclaimed)

    def inbox(self) -> "Inbox":
        """A place for the outputs of one caller's requests."""
        self.check_process()
        return Inbox(self)

    def close(self) -> None:
        """End all requests with "abort", then the runner; a second call does nothing."""
        if self._is_closed:
            return
        with InterruptsHeld(), self._turn():
            try:
                for request_id in list(self._requests):
                    self.abort(request_id)
                self.advance()
            finally:
                self._is_closed = True
                self.runner.close()

    def advance(self) -> None:
        """Take a step and distribute its outputs. Call it with interrupts held."""
        with self._turn():
            self._abandon(threading.get_ident())
            self._is_stepping = True
            try:
                self._take_step()
                while self._ready:  # an output is given twice rather than lost
                    output = self._ready[0]
                    self._boxes.get(output.request_id, self._unclaimed).append(output)
                    if output.finished:
                        self._boxes.pop(output.request_id, None)
                    del self._ready[0]
            finally:
                self._is_stepping = False
                self._abort_dropped()
        if self._has_warned or self.drafted is None:
            return
        if message := draft_warning(self.drafted):
            self._has_warned = True
            warnings.warn(message, stacklevel=1 + _depth())

    def drop(self, request_ids: Iterable[str]) -> None:
        """Abort requests: at once, or after the step during which it is asked for."""
        if os.getpid() != self._process:
            return
        self._dropped.extend(request_ids)
        try:
            # A garbage collection may ask for it: never wait for another thread.
            if self._lock.acquire(blocking=False) and not self._is_stepping:
                self._abort_dropped()
        finally:
            if self._lock._is_owned():  # type: ignore[attr-defined]
                self._lock.release()

    def _abort_dropped(self) -> None:
        for request_id in list(self._dropped):
            super().abort(request_id)
            with contextlib.suppress(ValueError):  # removed last, in case of an interrupt
                self._dropped.remove(request_id)


class Inbox:
    """Outputs of one caller's requests, in order of arrival.

    `close`, the end of a `with` block and garbage collection abort requests that have not ended.
    """

    def __init__(self, engine: SharedEngine):
        self._engine = engine
        self._box: deque[RequestOutput] = deque()
        self._left: set[str] = set()

    def add(self, request: Request) -> str:
        """Queue a request, as `Engine.add`."""
        return self._engine.add_to(self, request)

    def expect(self, request_id: str) -> deque[RequestOutput]:
        """Where the outputs of a request go."""
        self._left.add(request_id)
        return self._box

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        while self._left and not self._box:  # retry if the handler did not raise
            with InterruptsHeld() as held:
                while self._left and not self._box and not held.waits:
                    self._engine.advance()
        if not self._left:
            raise StopIteration
        output = self._box.popleft()
        if output.finished:
            self._left.discard(output.request_id)
        return output

    def close(self) -> None:
        """Abort the requests that have not ended."""
        self._engine.drop(self._left)
        self._left.clear()

    def __enter__(self) -> "Inbox":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self):
        if hasattr(self, "_left"):  # else an interrupt ended `__init__`
            self.close()


class News:
    """New text in the successive outputs of one request.

    Args:
        every: Also return events without new text, for their window.
    """

    def __init__(self, every: bool):
        self._every = every
        self._seen: dict[int, tuple[int, int]] = {}  # characters and ids of each sequence
        self._ended: set[int] = set()

    def of(self, output: RequestOutput) -> list[StreamEvent]:
        """An event for each sequence that moved."""
        events = []
        for completion in output.outputs:
            index = completion.index
            if index in self._ended:
                continue
            num_chars, num_ids = self._seen.get(index, (0, 0))
            text, ids = completion.text[num_chars:], completion.token_ids[num_ids:]
            if not (text or ids or completion.finish_reason or self._every):
                continue
            self._seen[index] = num_chars + len(text), num_ids + len(ids)
            if completion.finish_reason:
                self._ended.add(index)
            event = StreamEvent(
                request_id=output.request_id,
                index=index,
                text=text,
                token_ids=ids,
                finish_reason=completion.finish_reason,
                window=completion.window,
                metrics=output.metrics,
                error=output.error,
                logprobs=completion.logprobs and completion.logprobs[num_ids:],
                window_logprobs=completion.window_logprobs,
                record=completion.record,
            )
            events.append(event)
        return events


class TextEvents(Iterator[StreamEvent]):
    """The events of an inbox that holds one request.

    Args:
        every: As for `News`.
    """

    def __init__(self, inbox: Inbox, every: bool):
        self._inbox, self._news = inbox, News(every)
        self._events: deque[StreamEvent] = deque()

    def __next__(self) -> StreamEvent:
        try:
            while not self._events:
                self._events.extend(self._news.of(next(self._inbox)))
        except BaseException:  # also an interrupt: the caller may not return to end the request
            self.close()
            raise
        return self._events.popleft()

    def close(self) -> None:
        """Abort the request, if it has not ended."""
        self._inbox.close()
        self._events.clear()

    def __enter__(self) -> "TextEvents":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class InterruptsHeld:
    """Defers the first Ctrl-C to keep bookkeeping consistent; the second acts at once.

    Off the main thread, which alone receives signals, it does nothing.

    Attributes:
        waits: The deferred signal's handler arguments, or None.
    """

    def __enter__(self) -> "InterruptsHeld":
        self.waits: tuple[int, Any] | None = None
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._before is None:
            return
        signal.signal(signal.SIGINT, self._before)
        waits, self.waits = self.waits, None  # its frame holds this object
        if waits is not None:
            self._before(*waits)

    def _hold(self, number: int, frame: Any) -> None:
        if self.waits is None:
            self.waits = number, frame
            return
        waits, self.waits = self.waits, None
        signal.signal(number, self._before)  # `__exit__` may not come to it
        self._before(*waits)
        self._before(number, frame)


def draft_warning(drafted: DraftMetrics) -> str | None:
    """A warning about drafts that are hardly ever accepted, after `WARN_ROUNDS` rounds.

    Limits and stop ids that cut rounds short do not count against the draft.
    """
    rounds = drafted.proposed[0]  # with room for a draft
    if rounds < WARN_ROUNDS:
        return None
    shares = [share for share in drafted.accepted_per_position if not math.isnan(share)]
    length = 1.0 + sum(shares)
    if length >= WARN_LENGTH:
        return None
    # The causes by how often they are met: docs/dflash.md, "When few drafts are right".
    return (
        f"the draft is hardly ever right: {length:.2f} tokens a round over {rounds} rounds, where "
        "1 is no draft accepted. The text is not changed, only slower. Likely causes: the draft "
        "was trained for another target, or another version or quantization of it; its "
        "target_layer_ids are off by one; the prompts are not as in its training (chat template, "
        "thinking mode, language); the temperature is high. Without the draft, use the strategy "
        "'ar'"
    )


def _depth() -> int:
    """Frames of this package below the caller's line, to which a warning points."""
    frame, depth = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, depth = frame.f_back, depth + 1
    return depth - 1
