"""Standard error that holds nobody up: a thread writes it, and what finds no room is dropped.

A full disk raises, and a pipe that nobody reads blocks; the event loop must see neither.
"""

import asyncio
import io
import os
import sys
import threading
import time
from collections.abc import Callable

MOST_WAITING = 1 << 20  # characters


class Stderr(io.TextIOBase):
    """A text stream in the place of `sys.stderr`.

    Args:
        fd: Where lines go.
        notice: The line that says how many were dropped, once there is room again.

    Attributes:
        num_dropped: Lines dropped in all.
    """

    def __init__(self, fd: int, notice: Callable[[int], str]):
        self._fd, self._notice = fd, notice
        self._texts: list[str] = []
        self._num_waiting = self._num_told = self.num_dropped = 0
        self._news = threading.Condition()
        threading.Thread(target=self._run, name="stderr", daemon=True).start()

    def write(self, text: str) -> int:
        """Hand a text over, or drop it where too much waits."""
        with self._news:
            if self._num_waiting + len(text) > MOST_WAITING:
                self.num_dropped += text.count("\n")
            else:
                self._num_waiting += len(text)
                self._texts.append(text)
                self._news.notify_all()
        return len(text)

    def drain(self, seconds: float) -> None:
        """Wait until everything is written, or so long."""
        until = time.monotonic() + seconds
        with self._news:
            while self._num_waiting and (left := until - time.monotonic()) > 0:
                self._news.wait(left)

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._texts)
                text = "".join(self._texts)
                self._texts = []
            self._put(text)
            with self._news:
                self._num_waiting -= len(text)
                self._news.notify_all()

    def _put(self, text: str) -> None:
        told, dropped = self._num_told, self.num_dropped
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            if dropped > told:
                os.write(self._fd, self._notice(dropped - told).encode())
                self._num_told = dropped
        except OSError:
            with self._news:
                self.num_dropped += bytes(data).count(b"\n")


class Copied(asyncio.Protocol):
    """The engine's standard error, copied to ours without blocking.

    Attributes:
        ended: Nothing more will come.
    """

    def __init__(self):
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        """Lines, or parts of them."""
        print(data.decode("utf-8", "replace"), end="", file=sys.stderr, flush=True)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self.ended.set()
