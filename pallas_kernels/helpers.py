"""Processes that lower kernels for this one, whose threads wait for them without the GIL.

Data flow: a kernel, its settings and the shapes of its arguments, pickled -> a process without a
GPU -> the kernel's text and the shapes of its results. `lowered.elsewhere` is where a thread says
that it has its kernels lowered here.
"""

import functools
import importlib
import os
import pickle
import queue
import subprocess
import sys
from typing import Any, BinaryIO

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from . import lowered

_ANSWER_ERRORS = (OSError, EOFError, pickle.UnpicklingError)  # of a process that has died
_PICKLE_ERRORS = (pickle.PicklingError, TypeError, AttributeError)  # of what cannot be sent
_MAIN = "from dllm_jax.kernels.helpers import serve; serve()"


class Helpers:
    """So many processes, each begun when it is first needed."""

    def __init__(self, count: int):
        self._free: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        self._count, self._is_closed = count, False
        for _ in range(count):
            self._free.put(None)

    def lower(self, function: lowered.Bound, given: Any) -> lowered.Text:
        """As `lowered.lower`, which does it here where no process can."""
        inner = function.func
        try:
            asked = pickle.dumps((inner.__module__, inner.__qualname__, function.keywords, given))
        except _PICKLE_ERRORS:
            return lowered.lower(function, given)
        one, text = self._free.get(), None
        try:
            if not self._is_closed and not jax.config.jax_enable_x64:
                one = one or _begin()
                assert one.stdin is not None
                assert one.stdout is not None
                one.stdin.write(asked)
                one.stdin.flush()
                text = pickle.load(one.stdout)
        except _ANSWER_ERRORS:
            _end(one)
            one = None
        finally:
            self._free.put(one)
        return lowered.lower(function, given) if text is None else text

    def close(self) -> None:
        """End the processes, once what they are asked for is done."""
        self._is_closed = True
        for _ in range(self._count):
            _end(self._free.get())
        for _ in range(self._count):
            self._free.put(None)


def _begin() -> subprocess.Popen[bytes]:
    # Its own session: Ctrl-C is this process's; the end of its input ends it.
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, jax.devices()[0].device_kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | paths | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
    )


def _end(one: subprocess.Popen[bytes] | None) -> None:
    if one is not None:
        one.kill()
        one.communicate()


def serve() -> None:
    """What such a process does, until its input ends."""
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything else prints is no answer
    kind = AbstractDevice(device_kind=sys.argv[1], num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
        _answer_all(asked, answers)


def _answer_all(asked: BinaryIO, answers: BinaryIO) -> None:
    while True:
        try:
            module, name, settings, given = pickle.load(asked)
        except EOFError:
            return
        function = getattr(importlib.import_module(module), name).__wrapped__
        try:
            text = lowered.lower(functools.partial(function, **settings), given)
        except Exception:
            text = None  # whoever asks will see for itself
        try:
            pickle.dump(text, answers)
            answers.flush()
        except BrokenPipeError:
            os._exit(0)  # whoever asked is gone: no traceback, and nothing left to write
