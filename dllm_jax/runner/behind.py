"""Programs that are compiled while the runner serves by larger ones (docs/adr/0019).

Data flow: programs, the most wanted first -> threads, each lowers one program at a time in turn and
compiles it -> the runner dispatches to it from then on. A failure is reported; larger programs go
on in its place.
"""

import atexit
import contextlib
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from dllm_jax.runner import warmup
from dllm_jax.strategies.core.errors import described

# Seconds that a thread which lowers a program may hold the GIL while the host loop waits for it. By
# Python's default of 5 ms, each of the dozens of turns of a step takes as long.
SWITCH_S = 5e-4
_in_python = threading.Lock()  # one thread lowers at a time: the host loop needs the GIL too


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(min(SWITCH_S, usual_s))
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)


class Behind:
    """Programs to compile behind the first requests.

    Args:
        runner: Compiles and runs them; held weakly, and one that is dropped ends the threads.
        work: Programs, the most wanted first.
        progress: As of `ModelRunner.warm_up`; called by the threads.

    Attributes:
        missing: Keys of the programs that are not there, or failed.
    """

    def __init__(
        self, runner: Any, work: Sequence[warmup.Work], progress: warmup.Progress | None = None
    ):
        self.missing = {item.call(runner).key for item in work}
        self._runner, self._progress = weakref.ref(runner), progress
        self._left, self._ends = deque(work), False
        self._telling = threading.Lock()
        # Half of the cores are for those who are served.
        count = min(len(work), max(1, warmup.num_cores() // 2))
        self._threads = [
            threading.Thread(target=self._run, name="dllm-compile", daemon=True)
            for _ in range(count)
        ]

    def start(self) -> None:
        """Begin to compile."""
        _running.add(self)
        if self._progress and (runner := self._runner()) is not None:
            self._progress("what serves every request", runner.num_compiled, runner.num_programs)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Begin no further program; one that is being compiled is compiled to its end."""
        self._ends = True

    def join(self) -> None:
        """Wait for the threads."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._ends:
            try:
                item = self._left.popleft()
            except IndexError:
                return
            try:
                self._compile(item)
            except Exception as error:
                if not self._ends:
                    warnings.warn(
                        f"{item.name}: compiling failed, larger programs do its work "
                        f"({described(error)})",
                        stacklevel=1,
                    )

    def _compile(self, item: warmup.Work) -> None:
        runner = self._runner()
        if runner is None:
            self._ends = True
            return
        with _in_python, _short_turns():
            call = item.call(runner)
            lowered = runner.lower(call)
        key = call.key
        del runner, call  # while it compiles, nothing here holds the weights
        lowered.compile()
        runner = self._runner()
        if runner is None:
            return
        with self._telling:
            runner.compiled.add(key)
            self.missing.discard(key)
            if self._progress:
                self._progress(item.name, runner.num_compiled, runner.num_programs)


_running: weakref.WeakSet[Behind] = weakref.WeakSet()
os.register_at_fork(after_in_child=_running.clear)


@atexit.register
def _end_all() -> None:
    """Let the threads end: exiting while one is within XLA aborts the process."""
    every = list(_running)
    for one in every:
        one.close()
    for one in every:
        one.join()
