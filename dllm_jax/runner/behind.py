"""Programs that are compiled while the runner serves by larger ones (docs/adr/0019).

Data flow: programs, the most wanted first -> threads, each lowers one program at a time in turn and
has it compiled by a process of its own (`elsewhere`), or compiles it -> the runner dispatches to it
from then on. A failure is reported; larger programs go on in its place.
"""

import atexit
import contextlib
import functools
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

from dllm_jax.kernels import lowered
from dllm_jax.kernels.helpers import Helper
from dllm_jax.runner import elsewhere, warmup
from dllm_jax.strategies.core.errors import described

# Seconds that a thread which makes a program may hold the GIL while the host loop waits for it. By
# Python's default of 5 ms, each of the dozens of turns of a step takes as long.
SWITCH_S = 5e-4
NEVER = 2**31 - 1  # collections of younger objects, until all objects are looked at
_in_python = threading.Lock()  # one thread lowers at a time: the host loop needs the GIL too
PROCESSES = 12  # at most; they give way to this one
BYTES_A_PROCESS = 8 * 2**30  # of the device's memory for each: one takes some 0.6 GB (H200)
# Programs that are lowered at once, most of the time waiting for their processes. Eight shared the
# GIL with the host loop, and one call waited 1.1 s for it (H200).
_lowering = threading.Semaphore(4)


class _ShortTurns:
    """A context of several threads, in which none of them keeps the GIL for long.

    That includes the garbage collector: to look at all objects takes some 0.1 s, and a program that
    is lowered makes so many new ones that it does.
    """

    def __init__(self):
        self._lock, self._count = threading.Lock(), 0
        self._usual_s, self._usual = 0.0, gc.get_threshold()

    def __enter__(self) -> None:
        with self._lock:
            if not self._count:
                self._usual_s, self._usual = sys.getswitchinterval(), gc.get_threshold()
                sys.setswitchinterval(min(SWITCH_S, self._usual_s))
                gc.set_threshold(*self._usual[:2], NEVER)
            self._count += 1

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                sys.setswitchinterval(self._usual_s)
                gc.set_threshold(*self._usual)


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
        self._helpers = [Helper() for _ in range(min(len(work), _num_threads(runner)))]
        self._owners: dict[Any, Helper] = {}  # by kernels that programs share
        self._threads = [
            threading.Thread(target=self._run, args=(one,), name="dllm-compile", daemon=True)
            for one in self._helpers
        ]

    def start(self) -> None:
        """Begin to compile."""
        _running.add(self)
        if self._progress and (runner := self._runner()) is not None:
            self._progress("what serves every request", runner.num_compiled, runner.num_programs)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Begin no further program; one that is compiled by this process is, to its end."""
        self._ends = True
        for helper in self._helpers:
            helper.stop()

    def join(self) -> None:
        """Wait for the threads."""
        for thread in self._threads:
            thread.join()

    def _run(self, helper: Helper) -> None:
        try:
            runner = self._runner()
            if runner is not None and _is_for_helpers(runner) and elsewhere.has_none():
                helper.begin()
            del runner
            with _short_turns:
                self._compile_all(helper)
        finally:
            helper.close()

    def _compile_all(self, helper: Helper) -> None:
        while not self._ends and (item := self._next(helper)) is not None:
            try:
                self._compile(item, helper)
            except Exception as error:
                if not self._ends:
                    warnings.warn(
                        f"{item.name}: compiling failed, larger programs do its work "
                        f"({described(error)})",
                        stacklevel=1,
                    )

    def _next(self, helper: Helper) -> warmup.Work | None:
        """The first program whose kernels this process has compiled, or no other; or the first."""
        with self._telling:
            for item in self._left:
                if self._owners.setdefault(item.shares, helper) is helper:
                    self._left.remove(item)
                    return item
            return self._left.popleft() if self._left else None

    def _compile(self, item: warmup.Work, helper: Helper) -> None:
        runner = self._runner()
        if runner is None:
            self._ends = True
            return
        exported = None
        with _lowering, contextlib.ExitStack() as turn, _lowered_by(helper, turn):
            turn.enter_context(_in_python)
            call = item.call(runner)
            if helper.compiles and _is_for_helpers(runner):
                exported = runner.export(call)
            if exported is None:
                compile = functools.partial(runner.lower(call).compile, elsewhere.untuned())
            else:
                compile = functools.partial(exported.compile, helper)
        key = call.key
        del runner, call  # while it compiles, nothing here holds the weights
        compiled = compile()
        if compiled is None:
            helper.compiles = False
            return None if self._ends else self._compile(item, helper)
        runner = self._runner()
        if runner is None:
            return
        with self._telling:
            runner.compiled[key] = compiled
            self.missing.discard(key)
            if self._progress:
                self._progress(item.name, runner.num_compiled, runner.num_programs)


def _num_threads(runner: Any) -> int:
    """How many programs are made at a time: those who are served come first."""
    cores = warmup.num_cores()
    if not _is_for_helpers(runner):
        return max(1, cores // 2)
    most = min(PROCESSES, 3 * cores // 4)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    return max(1, most if limit is None else min(most, limit // BYTES_A_PROCESS))


def _is_for_helpers(runner: Any) -> bool:
    """Whether other processes can compile for this one."""
    return jax.default_backend() == "gpu" and runner.is_on_first


@contextlib.contextmanager
def _lowered_by(helper: Helper, turn: contextlib.ExitStack) -> Iterator[None]:
    """Have this thread's kernels lowered by a helper.

    The first one ends the thread's turn, for good: another thread may hold the turn while it waits
    for what this one is tracing.
    """

    def lower(function: lowered.Bound, given: Any) -> lowered.Text:
        turn.close()
        return helper.lower(function, given)

    token = lowered.elsewhere.set(lower)
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
