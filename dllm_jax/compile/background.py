"""Programs that a thread compiles while requests run.

One program after another, so that requests keep a core and the GIL is not held by several threads.
"""

import atexit
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
_is_ending = threading.Event()
_turns = [threading.Lock()]


def _begin_anew() -> None:
    """In a forked child no thread runs, and none holds the lock."""
    _threads.clear()
    _turns[0] = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


def compile_in_background(runner: Any, work: Sequence[Any]) -> "Future[None]":
    """Compile programs in a thread that ends with the runner.

    Args:
        runner: A `ModelRunner`; the thread holds it weakly between two programs.
        work: `warmup.Work`.

    Returns:
        A future that ends with the last program, or with the error of the first that fails.
    """
    done: Future[None] = Future()
    args = weakref.ref(runner), list(work), done
    thread = threading.Thread(target=_compile_each, args=args, name="dllm-compile", daemon=True)
    _threads.add(thread)
    thread.start()
    return done


def _compile_each(to_runner: "weakref.ref[Any]", work: Sequence[Any], done: "Future[None]") -> None:
    try:
        for item in work:
            with _turns[0]:
                runner = to_runner()
                if runner is None or not runner.is_open or _is_ending.is_set():
                    break
                runner.device.compile_program(item.call(runner))
                del runner
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)


@atexit.register
def _end_all() -> None:
    """Let the threads end: exiting while one is within XLA aborts the process."""
    _is_ending.set()
    for thread in list(_threads):
        thread.join()
