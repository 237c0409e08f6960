"""Programs that are compiled while the runner serves by larger ones (docs/adr/0019).

Data flow: programs, the most wanted first -> threads, each lowers one program at a time in turn and
compiles it -> the runner dispatches to it from then on. A failure is reported; larger programs go
on in its place.
"""

import atexit
import contextlib
import gc
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax._src import compilation_cache  # nothing public says when a program is written

from dllm_jax.kernels import lowered
from dllm_jax.kernels.helpers import Helpers
from dllm_jax.runner import warmup
from dllm_jax.strategies.core.errors import described

# Seconds that a thread which makes a program may hold the GIL while the host loop waits for it. By
# Python's default of 5 ms, each of the dozens of turns of a step takes as long.
SWITCH_S = 5e-4
NEVER = 2**31 - 1  # collections of younger objects, until all objects are looked at
_in_python = threading.Lock()  # one thread lowers at a time: the host loop needs the GIL too
HELPERS = 4  # processes at most that lower kernels
# Programs that are lowered at once, most of the time waiting for those. Eight at once shared the
# helpers, so that the first was there after 29 s, and one call waited 1.1 s for the GIL (H200).
_lowering = threading.Semaphore(2)


class _ShortTurns:
    """A context of several threads, in which none of them keeps the GIL for long.

    That includes the garbage collector: to look at all objects takes some 0.1 s, and a program that
    is lowered makes so many new ones that it does. JAX keeps the GIL while it makes bytes of a
    program for its folder, 0.3 s and more. Threads whose programs are compiled go on to that at
    once, so without a lock several in a row kept a step waiting for 3 s (H200).
    """

    def __init__(self):
        self._lock, self._count = threading.Lock(), 0
        self._usual_s, self._usual = 0.0, gc.get_threshold()
        self._writing, self._write = threading.Lock(), compilation_cache.put_executable_and_time

    def __enter__(self) -> None:
        with self._lock:
            if not self._count:
                self._usual_s, self._usual = sys.getswitchinterval(), gc.get_threshold()
                sys.setswitchinterval(min(SWITCH_S, self._usual_s))
                gc.set_threshold(*self._usual[:2], NEVER)
                self._write = compilation_cache.put_executable_and_time
                compilation_cache.put_executable_and_time = self._write_in_turn
            self._count += 1

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                sys.setswitchinterval(self._usual_s)
                gc.set_threshold(*self._usual)
                compilation_cache.put_executable_and_time = self._write

    def _write_in_turn(self, *args: Any, **options: Any) -> None:
        with self._writing:  # packing, the second half, leaves the GIL to others
            self._write(*args, **options)


_short_turns = _ShortTurns()


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
        self._working = count
        self._helpers = None
        if jax.default_backend() == "gpu":
            self._helpers = Helpers(min(HELPERS, max(1, warmup.num_cores() // 4)))
        self._threads = [
            threading.Thread(target=self._run, name="dllm-compile", daemon=True)
            for _ in range(count)
        ]

    @property
    def is_working(self) -> bool:
        """Whether a thread compiles, or will."""
        return self._working > 0

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
        try:
            with _short_turns:
                self._compile_all()
        finally:
            with self._telling:
                self._working -= 1
            if self._helpers is not None and not self._working:
                self._helpers.close()

    def _compile_all(self) -> None:
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
        with (
            _lowering,
            contextlib.ExitStack() as turn,
            _lowered_by(self._helpers, turn),
        ):
            turn.enter_context(_in_python)
            call = item.call(runner)
            text = runner.lower(call)
        key = call.key
        del runner, call  # while it compiles, nothing here holds the weights
        text.compile()
        runner = self._runner()
        if runner is None:
            return
        with self._telling:
            runner.compiled.add(key)
            self.missing.discard(key)
            if self._progress:
                self._progress(item.name, runner.num_compiled, runner.num_programs)


@contextlib.contextmanager
def _lowered_by(helpers: Helpers | None, turn: contextlib.ExitStack) -> Iterator[None]:
    """Have this thread's kernels lowered by helpers, if there are any.

    The first one ends the thread's turn, for good: another thread may hold the turn while it waits
    for what this one is tracing.
    """

    def lower(function: lowered.Bound, given: Any) -> lowered.Text:
        turn.close()
        assert helpers is not None
        return helpers.lower(function, given)

    token = lowered.elsewhere.set(lower if helpers else None)
    try:
        yield
    finally:
        lowered.elsewhere.reset(token)


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
