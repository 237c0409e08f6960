"""Ctrl-C that is not lost.

Python drops an exception raised inside a garbage collection callback, and JAX has one: a
KeyboardInterrupt that falls there is swallowed. The handler here also leaves a mark that the
loop reads.
"""

import contextlib
import signal
import time
from typing import Any

_SLICE_S = 0.1  # how late a swallowed Ctrl-C may be noticed while sleeping


class Interrupt:
    """Whether Ctrl-C was pressed since `catch_interrupt`."""

    def __init__(self):
        self.pressed = False

    def __call__(self, number: int, frame: Any) -> None:
        """The signal handler."""
        self.pressed = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if one was swallowed."""
        if self.pressed:
            raise KeyboardInterrupt

    def sleep(self, seconds: float) -> None:
        """Sleep, awake to Ctrl-C."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, _SLICE_S))


def catch_interrupt() -> Interrupt:
    """Handle SIGINT by a fresh `Interrupt`; off the main thread the handler stays as it is."""
    stop = Interrupt()
    with contextlib.suppress(ValueError):  # raised off the main thread
        signal.signal(signal.SIGINT, stop)
    return stop
