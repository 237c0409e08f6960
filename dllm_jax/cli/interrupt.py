"""SIGINT and SIGTERM end a verb within seconds, with what it has, whatever it is doing.

`entry` runs each verb under one `Interrupt`. A signal raises `Interrupted` in the main thread, with
three exceptions:

- While work is `held`, the handler only sets a mark, which the loop reads between two steps.
- An exception raised in a garbage collector's callback (JAX has one) is dropped, and one raised
  during an import is reported as a failure of that module. There the signal is sent again.
- Python runs signal handlers between bytecodes of the main thread, so not while that thread
  compiles or waits for a device. A watching thread, woken from C (`signal.set_wakeup_fd`), ends the
  process if the main thread does not react in time.
"""

import contextlib
import gc
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

NOTHING_FINISHED = "interrupted; nothing was finished"
GRACE_S = 1.5  # for the main thread to finish its step
LAST_S = 4.0  # from a signal to the end of the process, whatever it is doing
_SLICE_S = 0.1  # the longest sleep between two looks at the mark
_AGAIN_S = 0.01  # until a signal is sent again
ALL = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal arrived; the exit status is 128 + `number`."""

    def __init__(self, number: int = signal.SIGINT):
        super().__init__(NOTHING_FINISHED)
        self.number = number


class Interrupt:
    """Catches signals inside its `with` block; does nothing off the main thread.

    A second signal before `reset` ends the process at once.

    Attributes:
        tell: Prints the results so far and returns the error line; called once, by the thread that
            ends the work.
        forced: The signals that end the process if the main thread does not react in time.
    """

    def __init__(self, forced: tuple[int, ...] = (signal.SIGTERM,)):
        self.tell: Callable[[], str] = lambda: NOTHING_FINISHED
        self.forced = forced
        self._number: int | None = None  # the signal that the main thread has seen
        self._pending: int | None = None  # the signal that the watching thread waits for
        self._noted = threading.Event()
        self._again_sent: deque[int] = deque()  # signals that are the first one, sent again
        self._is_deferring = False
        self._claim = threading.Lock()
        self._restore: list[Callable[[], Any]] = []

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in ALL:
            old = signal.signal(number, self._mark)
            self._restore.append(lambda number=number, old=old: signal.signal(number, old))
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        old_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._restore.append(lambda: signal.set_wakeup_fd(old_fd))
        self._restore.append(lambda: os.close(writing))  # ends the thread
        watching = threading.Thread(target=self._watch, args=(reading,), daemon=True)
        watching.start()
        # The thread must not be the last to hold what `tell` holds: arrays freed while the
        # interpreter ends abort the process.
        self._restore.append(watching.join)
        return self

    def __exit__(self, *_: Any) -> None:
        restore, self._restore = self._restore, []
        for undo in restore:
            undo()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, signals set a mark and raise nothing; call `check`."""
        before, self._is_deferring = self._is_deferring, True
        try:
            yield
        finally:
            self._is_deferring = before

    def check(self) -> None:
        """Raise `Interrupted` if a signal arrived."""
        if self._number is not None:
            raise Interrupted(self._number)

    def sleep(self, seconds: float) -> None:
        """Sleep until the time is over or a signal arrives."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, _SLICE_S))

    def reset(self) -> None:
        """Forget the signal: it was dealt with, and the work goes on."""
        self._noted.wait(GRACE_S)  # or the watching thread counts it as a second one later
        self._noted.clear()
        self._number = self._pending = None

    def finish(self) -> str:
        """Print the work so far, and return the error line.

        If the watching thread was first, it ends the process meanwhile.
        """
        if not self._claim.acquire(blocking=False):
            time.sleep(LAST_S)
        return self.tell()

    def _mark(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        if self._is_deferring:
            return
        if not _is_lost(frame):
            raise Interrupted(number)
        later = threading.Timer(_AGAIN_S, self._again, [number])
        later.daemon = True
        later.start()

    def _again(self, number: int) -> None:
        """Send a signal again that the main thread could not raise, unless it was dealt with."""
        if self._restore and self._number is not None:
            self._again_sent.append(number)
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _watch(self, reading: int) -> None:
        until: float | None = None
        with open(reading, "rb", buffering=0) as pipe:
            while True:
                wait = None if until is None else max(0.0, until - time.monotonic())
                if not select.select([pipe], [], [], wait)[0]:
                    until = None
                    if self._pending in self.forced:
                        self._end(self._pending)
                    continue
                data = pipe.read(64)
                if not data:
                    return
                for number in data:
                    if number not in ALL:
                        continue
                    if self._pending is None:
                        self._pending, until = number, time.monotonic() + GRACE_S
                        self._noted.set()
                    elif self._again_sent:
                        self._again_sent.popleft()
                    else:
                        os._exit(128 + number)

    def _end(self, number: int) -> NoReturn:
        """End the process instead of a main thread that is stuck."""
        if self._claim.acquire(blocking=False):
            report = threading.Thread(target=self._report, daemon=True)
            report.start()
            report.join(LAST_S - GRACE_S)
        else:
            time.sleep(LAST_S - GRACE_S)  # the main thread is printing
        os._exit(128 + number)

    def _report(self) -> None:
        message = NOTHING_FINISHED
        with contextlib.suppress(Exception):  # `tell` reads what another thread may be changing
            message = self.tell()
        sys.stdout.flush()
        print(f"error: {message}", file=sys.stderr, flush=True)


def _is_lost(frame: FrameType | None) -> bool:
    """Whether an exception raised in `frame` would not arrive: in an import or a collection."""
    dropping = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        code = frame.f_code
        if code in dropping or code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
