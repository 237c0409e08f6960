"""A process that compiles constraints: what it takes there, no thread of the caller's pays.

Data flow: `Worker.compile` -> pickles over the child's stdin -> `main` -> pickles over its stdout.
The child ends when its stdin does. It imports numpy and this package's compiler alone.
"""

import contextlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

from dllm_jax import structured
from dllm_jax.structured.limits import too_large

MOST_CPU_S = 5.0  # of one compilation, which is refused after `limits.MOST_S` where it can be
MOST_BYTES = 4 << 30  # of address space
_NICENESS = 5  # more than its parent's
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dllm_jax.structured.worker import main; main()"
)


class WorkerFault(Exception):
    """An exception in the child; the text is its type and place."""

    says_place = True


class Worker:
    """The process: started when it is needed, and again after it was ended. One caller at a time.

    Args:
        words, never, most_states: As of `structured.compile`.
        most_s: CPU seconds of one compilation.
    """

    def __init__(
        self,
        words: structured.Spellings,
        never: np.ndarray,
        most_states: int,
        most_s: float = MOST_CPU_S,
    ):
        self._given, self._most_s = (words, never, most_states, most_s), most_s
        self._process: Any = None

    def compile(
        self, constraint: structured.Constraint, stops: Sequence[int]
    ) -> structured.TokenAutomaton:
        """`structured.compile` there.

        Raises:
            ValueError: It cannot be compiled, or takes too much time or memory.
            WorkerFault: The compiler failed.
        """
        process: Any = self._process or self.start()
        try:
            _put(process.stdin, (constraint, stops))
            refusal, fault, found = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            status = self.close()
            if status is not None and status < 0:
                raise ValueError(
                    f"the constraint takes more than {self._most_s:g} s or too much memory to "
                    "compile; make it simpler"
                ) from None
            raise WorkerFault(f"the compiler's process ended with status {status}") from None
        if refusal is not None:
            raise ValueError(refusal)
        if fault is not None:
            raise WorkerFault(fault)
        return found

    def close(self) -> int | None:
        """End the process; its exit status, if it had ended before or ends now."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(OSError):
            process.stdin.close()
        with process.stdout:
            try:
                return process.wait(1.0)
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process; its first compilation waits until it has read the vocabulary."""
        paths = json.dumps([path or os.getcwd() for path in sys.path])
        process = self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        _put(process.stdin, self._given)
        return process


def _put(file: Any, value: Any) -> None:
    file.write(pickle.dumps(value))  # whole, or nothing
    file.flush()


def main() -> None:
    """The child: answers until its stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError):
        words, never, most_states, most_s = pickle.load(source)
        while True:
            constraint, stops = pickle.load(source)
            # The signal's default action ends the process, also within one long call.
            signal.setitimer(signal.ITIMER_PROF, most_s)
            answer = _compiled(constraint, words, stops, never, most_states)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _put(sink, answer)


def _compiled(*args: Any) -> tuple[str | None, str | None, structured.TokenAutomaton | None]:
    """A refusal's text, or a fault's type and place, or the automaton."""
    try:
        return None, None, structured.compile(*args)
    except ValueError as error:
        return str(error), None, None
    except (RecursionError, MemoryError, OverflowError) as error:
        return too_large(error), None, None
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return None, f"{type(error).__name__} at {frame.filename}:{frame.lineno}", None
