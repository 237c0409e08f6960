"""A thread that runs tasks in order: what is dispatched over a device, or compilation.

On a GPU a program with a data-dependent loop blocks its caller until the loop ends. So programs run
in a thread of their own. It knows neither programs nor state: a task is any function.
"""

import atexit
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax

from dllm_jax.engine.inbox import FORKED
from dllm_jax.engine.layout import DeviceFailure
from dllm_jax.runner import memory


class Worker:
    """The thread; it ends with this object, or with the process."""

    def __init__(self, name: str = "dllm-device"):
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        # It holds the queue alone, so that this object can go.
        self._thread = threading.Thread(target=_work, args=(self._tasks,), daemon=True, name=name)
        self._thread.start()
        _workers[self._thread] = self._tasks
        weakref.finalize(self, self._tasks.put, None)

    def submit(
        self, plan: memory.MemoryPlan | None, function: Callable[..., Any], *args: Any
    ) -> Future:
        """Run a function after what was submitted before.

        Args:
            plan: Of the memory, to explain a failure by.
        """
        future: Future = Future()
        self._tasks.put((future, function, args, plan))
        return future

    def end(self) -> None:
        """Let the thread end once what was submitted is over."""
        self._tasks.put(None)

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    def is_alive(self) -> bool:
        """Whether it still takes tasks."""
        return self._thread.is_alive()


_workers: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue] = (
    weakref.WeakKeyDictionary()
)
_is_forked_from_engine = False
_ending = threading.Event()


def _note_fork() -> None:
    global _is_forked_from_engine
    _is_forked_from_engine = _is_forked_from_engine or bool(_workers)
    _workers.clear()


os.register_at_fork(after_in_child=_note_fork)


def check_process() -> None:
    """Raise RuntimeError in a child forked from a process with an engine: it would hang."""
    if _is_forked_from_engine:
        raise RuntimeError(FORKED)


def is_ending() -> bool:
    """Whether the process waits for its workers to end."""
    return _ending.is_set()


@atexit.register
def _end_workers() -> None:
    """Stop the workers: exiting while one is within XLA aborts the process."""
    _ending.set()
    for worker, tasks in list(_workers.items()):
        tasks.put(None)
        worker.join()


def _is_ready(result: Any) -> bool:
    """Whether what a program returned has been computed."""
    # The stubs of JAX lack `is_ready`.
    arrays: list[Any] = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)]
    return all(array.is_deleted() or array.is_ready() for array in arrays)


def _work(tasks: queue.SimpleQueue) -> None:
    """Run tasks in order until None comes; errors go to their futures."""
    last = None  # the last result: once it is ready, no program runs
    while (task := tasks.get()) is not None:
        future, function, args, plan = task
        try:
            # The next result may then lie where this one did, and XLA need not update what it has
            # recorded of the program.
            last = None if _is_ready(last) else last
            result = function(*args)
            last = result if isinstance(result, (jax.Array, tuple)) else last
            future.set_result(result)
            del result
        except jax.errors.JaxRuntimeError as error:
            failure = DeviceFailure(memory.explain(str(error), plan))
            failure.__cause__ = error
            future.set_exception(failure)
        except BaseException as error:
            future.set_exception(error)
        del task, future, function, args, plan  # they hold the device
    with contextlib.suppress(RuntimeError):  # failed, or deleted after a failure
        jax.block_until_ready(last)
