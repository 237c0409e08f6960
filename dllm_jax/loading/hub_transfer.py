"""Transfers from the hub under one bar, which Ctrl-C ends at once.

`huggingface_hub` fetches several files in threads and waits for all it has begun, gigabytes each,
before it lets an interrupt through. So it runs in a thread of its own here, and a stop makes its
progress counters raise, which ends each transfer and removes its part file. Nothing here knows
which files.
"""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tqdm import tqdm

_STOP_S = 1.0  # how long an interrupt waits for the part files to go

T = TypeVar("T")


class Stopped(Exception):
    """Raised in the threads of a transfer that was interrupted."""


class Transfer:
    """One call of the library.

    Args:
        name: What the bar is named after.
        size: Bytes to come; None: too few for a bar.
    """

    def __init__(self, name: str, size: int | None = None):
        from huggingface_hub.utils import are_progress_bars_disabled

        hidden = size is None or are_progress_bars_disabled()
        self._bar = tqdm(
            total=size,
            unit="B",
            unit_scale=True,
            desc=f"fetching {name}",
            leave=False,
            disable=hidden or None,  # None: shown on a terminal
        )
        self._lock = threading.Lock()
        self._reached = 0
        self._is_stopped = False

    def run(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`work(counter, ...)`, where `counter` is the library's `tqdm_class`."""
        outcome = concurrent.futures.Future[T]()

        def run() -> None:
            try:
                outcome.set_result(work(self._counter(), *args, **kwargs))
            except BaseException as error:
                outcome.set_exception(error)

        thread = threading.Thread(target=run, daemon=True)
        with self._bar:
            thread.start()
            try:
                concurrent.futures.wait([outcome])  # raises nothing but what a signal raises
            except BaseException:
                self._stop()
                thread.join(_STOP_S)
                raise
        return outcome.result()

    def _stop(self) -> None:
        from huggingface_hub import close_session

        self._is_stopped = True
        close_session()  # or a slow connection is heard of only after the next ten megabytes
        with contextlib.suppress(ImportError):  # private, but these transfers hear of nothing else
            from huggingface_hub.utils._xet import abort_xet_session

            abort_xet_session()

    def _counted(self, counter: tqdm, num_bytes: float) -> None:
        """The library counts the same bytes twice, as they come and as they are written."""
        if self._is_stopped:
            raise Stopped
        with self._lock:
            counter.n += num_bytes
            if counter.n > self._reached:
                self._bar.update(counter.n - self._reached)
                self._reached = counter.n

    def _counter(self) -> type[tqdm]:
        """A class of bars that show nothing and report the bytes they are told of."""
        transfer = self

        class Counter(tqdm):
            def __init__(self, *args: Any, **kwargs: Any):
                self._counts_bytes = kwargs.get("unit") == "B"
                super().__init__(*args, **{**kwargs, "disable": True})

            def update(self, n: float | None = 1) -> None:
                if self._counts_bytes:
                    transfer._counted(self, n or 0)

        return Counter
