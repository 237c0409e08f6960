"""A process that lowers kernels and compiles programs for this one, and runs none.

Data flow: a function of a module and its arguments, pickled -> the process -> what it returns. The
thread that asks waits without the GIL. `lowered.elsewhere` is where a thread says that it has its
kernels lowered here.
"""

import contextlib
import functools
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from . import lowered

NICE = 10  # whoever is served goes first
_ANSWER_ERRORS = (OSError, EOFError, pickle.UnpicklingError)  # of a process that has died
_PICKLE_ERRORS = (pickle.PicklingError, TypeError, AttributeError)  # of what cannot be sent
_SETTINGS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_ENABLE_COMPILATION_CACHE": "false"}
_MAIN = "from dllm_jax.kernels.helpers import serve; serve()"


class Helper:
    """One process, begun when it is first needed. It is one thread's, but for `stop`.

    Attributes:
        compiles: Whoever asks says here whether the process can compile programs.
    """

    def __init__(self):
        self.compiles = True
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def begin(self) -> None:
        """Begin the process, which takes seconds; this does not wait."""
        if not self._is_stopped and self._process is None:
            with contextlib.suppress(OSError):  # no memory for another process, say
                self._process = _begin()

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function of a module returns there; None where it fails, or cannot be asked."""
        if jax.config.jax_enable_x64:
            return None
        try:
            asked = pickle.dumps((function, args))
        except _PICKLE_ERRORS:
            return None
        self.begin()
        if (one := self._process) is None or self._is_stopped:
            return None
        try:
            assert one.stdin is not None
            assert one.stdout is not None
            one.stdin.write(asked)
            one.stdin.flush()
            return pickle.load(one.stdout)
        except _ANSWER_ERRORS:
            self._end()
            return None

    def lower(self, function: lowered.Bound, given: Any) -> lowered.Text:
        """As `lowered.lower`, which does it here where the process cannot."""
        inner = function.func
        text = self.ask(_lower, inner.__module__, inner.__qualname__, function.keywords, given)
        return lowered.lower(function, given) if text is None else text

    def stop(self) -> None:
        """End the process at once, in whatever it does; no other is begun. From any thread."""
        self._is_stopped = True
        if (one := self._process) is not None:
            one.kill()

    def close(self) -> None:
        """End the process."""
        self._is_stopped = True
        self._end()

    def _end(self) -> None:
        one, self._process = self._process, None
        if one is not None:
            one.kill()
            one.communicate()


def _begin() -> subprocess.Popen[bytes]:
    # Its own session: Ctrl-C is this process's; the end of its input ends it. What it compiles is
    # kept by whoever asks: a program that XLA has read cannot always be written again.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    paths = {
        "CUDA_VISIBLE_DEVICES": first,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, jax.devices()[0].device_kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | paths | _SETTINGS,
        start_new_session=True,
    )


def _lower(module: str, name: str, settings: dict[str, Any], given: Any) -> lowered.Text:
    """A kernel's text. The function of that name is the one that `lowered_once` made of it."""
    function = getattr(importlib.import_module(module), name).__wrapped__
    kind = AbstractDevice(device_kind=sys.argv[1], num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
        return lowered.lower(functools.partial(function, **settings), given)


def serve() -> None:
    """What such a process does, until its input ends."""
    os.nice(NICE)
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything else prints is no answer
    _answer_all(asked, answers)


def _answer_all(asked: BinaryIO, answers: BinaryIO) -> None:
    while True:
        try:
            function, args = pickle.load(asked)
        except EOFError:
            return
        answer = None
        with contextlib.suppress(Exception):  # whoever asks will see for itself
            answer = function(*args)
        try:
            pickle.dump(answer, answers)
            answers.flush()
        except BrokenPipeError:
            os._exit(0)  # whoever asked is gone: no traceback, and nothing left to write
