"""SIGINT and SIGTERM end a verb within seconds, with what there is, whatever it is in the midst of.

Python runs signal handlers between bytecodes of the main thread: not while that thread compiles or
waits for a device. And an exception raised in a collector's callback (JAX has one) is dropped, one
in a module that is being imported told as a failure of that module. So there, and while work is
`held`, the handler only leaves a mark, which the loop reads between two steps; and a watching
thread, told of the signal from C (`signal.set_wakeup_fd`), ends the process where the main thread
takes no notice in time. Nothing here knows what is being done.
"""

import contextlib
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from dllm_jax.cli.errors import NOTHING_FINISHED, Interrupted

GRACE_S = 1.5  # for the main thread to end the step it is in
LAST_S = 4.0  # after a signal the process is gone, whatever it is doing
_SLICE_S = 0.1  # how late a mark may be noticed while sleeping


class Interrupt:
    """Catches signals from `with` to its end; off the main thread it does nothing.

    Args:
        forced: Signals that end the process where the main thread takes no notice; the others wait
            until it does. The second signal before `reset` ends it at once.

    Attributes:
        tell: Called by whoever ends the work, once: prints what there is, returns the error line.
    """

    def __init__(self, forced: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)):
        self.tell: Callable[[], str] = lambda: NOTHING_FINISHED
        self._forced = forced
        self._number: int | None = None  # what the main thread knows of
        self._pending: int | None = None  # what the watching thread waits for
        self._noted = threading.Event()
        self._is_held = False
        self._claim = threading.Lock()
        self._restore: list[Callable[[], Any]] = []

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            old = signal.signal(number, self._mark)
            self._restore.append(lambda number=number, old=old: signal.signal(number, old))
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        old_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._restore.append(lambda: signal.set_wakeup_fd(old_fd))
        self._restore.append(lambda: os.close(writing))  # which ends the thread
        watching = threading.Thread(target=self._watch, args=(reading,), daemon=True)
        watching.start()
        # Were it the last to hold what `tell` holds, arrays would go in it while the interpreter
        # ends, which aborts the process.
        self._restore.append(watching.join)
        return self

    def __exit__(self, *_: Any) -> None:
        for undo in self._restore:
            undo()
        self._restore = []

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, signals leave a mark and raise nothing: call `check`."""
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before

    def check(self) -> None:
        """Raise `Interrupted` if there was a signal."""
        if self._number is not None:
            raise Interrupted(NOTHING_FINISHED, self._number)

    def sleep(self, seconds: float) -> None:
        """Sleep, awake to signals."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, _SLICE_S))

    def reset(self) -> None:
        """The signal was dealt with; the work goes on."""
        self._noted.wait(GRACE_S)  # the watching thread must not count it as a second one later
        self._noted.clear()
        self._number = self._pending = None

    def told(self, stop: Interrupted) -> Interrupted:
        """Print what there is; the interruption with its words.

        Where the watching thread was first, it ends the process meanwhile.
        """
        if not self._claim.acquire(blocking=False):
            time.sleep(LAST_S)
        return stop.saying(self.tell())

    def _mark(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        if not (self._is_held or _is_lost(frame)):
            raise Interrupted(NOTHING_FINISHED, number)

    def _watch(self, reading: int) -> None:
        until: float | None = None
        with open(reading, "rb", buffering=0) as pipe:
            while True:
                wait = None if until is None else max(0.0, until - time.monotonic())
                if not select.select([pipe], [], [], wait)[0]:
                    until = None
                    if self._pending in self._forced:
                        self._end(self._pending)
                    continue
                data = pipe.read(64)
                if not data:
                    return
                for number in set(data) & {signal.SIGINT, signal.SIGTERM}:
                    if self._pending is not None:
                        os._exit(128 + number)
                    self._pending, until = number, time.monotonic() + GRACE_S
                    self._noted.set()

    def _end(self, number: int) -> NoReturn:
        """End the process in the place of a main thread that is stuck."""
        if self._claim.acquire(blocking=False):
            report = threading.Thread(target=self._report, daemon=True)
            report.start()
            report.join(LAST_S - GRACE_S)
        else:
            time.sleep(LAST_S - GRACE_S)  # the main thread is at it
        os._exit(128 + number)

    def _report(self) -> None:
        message = NOTHING_FINISHED
        with contextlib.suppress(Exception):  # what is read belongs to a thread that is at work
            message = self.tell()
        sys.stdout.flush()
        print(f"error: {message}", file=sys.stderr, flush=True)


def _is_lost(frame: FrameType | None) -> bool:
    """Whether what is raised in `frame` would not arrive: within an import or a collection."""
    dropping = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        code = frame.f_code
        if code in dropping or code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
