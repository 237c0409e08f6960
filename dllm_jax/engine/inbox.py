"""One engine for several callers: what a step brings goes to whoever asked for it.

`LLM.generate`, streams and a caller's own `engine.step()` may take turns over one engine. Any of
them gets all requests on; an `Inbox` holds the outputs of its own ones until they are asked for.
Nothing here schedules or makes texts.
"""

import inspect
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

from dllm_jax.engine.engine import Engine
from dllm_jax.engine.outputs import draft_warning
from dllm_jax.engine.requests import Request, RequestOutput, StreamEvent

_PACKAGE = os.path.join(os.path.dirname(__file__), "")


class SharedEngine(Engine):
    """An engine that keeps each output for the caller it belongs to. One thread at a time."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._boxes: dict[str, deque[RequestOutput]] = {}
        self._unclaimed: list[RequestOutput] = []
        self._dropped: deque[str] = deque()
        self._is_stepping = self._has_warned = False

    def step(self) -> list[RequestOutput]:
        """As `Engine.step`; the outputs are those of requests added by `add`.

        Ctrl-C waits until the step is over.
        """
        with InterruptsHeld():
            self.advance()
        outputs, self._unclaimed = self._unclaimed, []
        return outputs

    @property
    def has_work(self) -> bool:
        """Whether a further step can bring anything."""
        return super().has_work or bool(self._unclaimed)

    def inbox(self) -> "Inbox":
        """A place for the outputs of one caller's requests."""
        return Inbox(self)

    def advance(self) -> None:
        """One step; its outputs wait where they belong. Call it with interrupts held."""
        self._is_stepping = True
        try:
            for output in super().step():
                self._boxes.get(output.request_id, self._unclaimed).append(output)
                if output.finished:
                    self._boxes.pop(output.request_id, None)
        finally:
            self._is_stepping = False
            while self._dropped:
                self.abort(self._dropped.popleft())
        if not self._has_warned and (told := draft_warning(self.drafted)):
            self._has_warned = True  # once: the draft stays as it is
            warnings.warn(told, stacklevel=1 + _depth())

    def claim(self, request_id: str, box: deque[RequestOutput]) -> None:
        """From now on the request's outputs go to `box`."""
        self._boxes[request_id] = box

    def drop(self, request_id: str) -> None:
        """Abort a request, at once or, where a collector asks for it within a step, after it."""
        if self._is_stepping:
            self._dropped.append(request_id)
        else:
            self.abort(request_id)


class Inbox:
    """Outputs of some requests, as they come; what has not ended by `close` is aborted.

    Closed by `with`, and when nobody holds it any more.
    """

    def __init__(self, engine: SharedEngine):
        self._engine = engine
        self._box: deque[RequestOutput] = deque()
        self._left: set[str] = set()

    def add(self, request: Request) -> str:
        """Queue a request, as `Engine.add`."""
        request_id = self._engine.add(request)
        self._engine.claim(request_id, self._box)
        self._left.add(request_id)
        return request_id

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        while self._left and not self._box:  # again where a handler only took note
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
        """Abort what has not ended."""
        while self._left:
            self._engine.drop(self._left.pop())

    def __enter__(self) -> "Inbox":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self):
        self.close()


class News:
    """What is new in one request's outputs, given in order.

    Args:
        every: Also tell of outputs in which no text is new (their window is).
    """

    def __init__(self, every: bool):
        self._every = every
        self._told: dict[int, tuple[int, int]] = {}  # characters and ids of each sequence
        self._ended: set[int] = set()

    def of(self, output: RequestOutput) -> list[StreamEvent]:
        """An event for each sequence that moved."""
        events = []
        for one in output.outputs:
            if one.index in self._ended:
                continue
            num_chars, num_ids = self._told.get(one.index, (0, 0))
            text, ids = one.text[num_chars:], one.token_ids[num_ids:]
            if not (text or ids or one.finish_reason or self._every):
                continue
            self._told[one.index] = num_chars + len(text), num_ids + len(ids)
            if one.finish_reason:
                self._ended.add(one.index)
            event = StreamEvent(
                request_id=output.request_id,
                index=one.index,
                text=text,
                token_ids=ids,
                finish_reason=one.finish_reason,
                window=one.window,
                metrics=output.metrics,
                error=output.error,
            )
            events.append(event)
        return events


class TextEvents(Iterator[StreamEvent]):
    """The news of an inbox that holds one request, piece by piece.

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
        except BaseException:  # an interrupt too: nobody may come back to end the request
            self.close()
            raise
        return self._events.popleft()

    def close(self) -> None:
        """End the request, if it has not ended."""
        self._inbox.close()
        self._events.clear()

    def __enter__(self) -> "TextEvents":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class InterruptsHeld:
    """Within it a first Ctrl-C waits: half a step would leave the books torn. A second does not.

    Off the main thread, where none comes, it does nothing.

    Attributes:
        waits: There was one; it comes at the end.
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
        if self.waits is not None:
            self._before(*self.waits)

    def _hold(self, number: int, frame: Any) -> None:
        if self.waits is not None:
            self._before(number, frame)
        self.waits = number, frame


def _depth() -> int:
    """Frames of this package between the caller's line and here: a warning is about that line."""
    frame, depth = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, depth = frame.f_back, depth + 1
    return depth - 1
