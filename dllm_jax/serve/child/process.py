"""The engine process: it makes an engine and runs a loop over it until the front has gone."""

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from dllm_jax.engine.faults import Faults
from dllm_jax.serve import framing, pipe
from dllm_jax.serve.child.loop import Loop
from dllm_jax.serve.child.outbox import Outbox
from dllm_jax.serve.child.served import Served

_PR_SET_PDEATHSIG = 1
CPU_NICENESS = 5  # XLA's threads would starve the front
SWITCH_S = 5e-4  # until the loop may run at the same time as a thread that compiles


class Start:
    """Takes how far the start is: called with the programs compiled, and their number."""

    def __init__(self, outbox: Outbox):
        self._send = outbox.send

    def __call__(self, done: int, of: int) -> None:
        """Report how many programs are compiled."""
        self._send(pipe.Progress(done, of))

    def phase(self, name: str, seconds: float, **fields: Any) -> None:
        """Report that a phase of the start has ended."""
        self._send(pipe.Phase(name, round(seconds, 2), fields))


Factory = Callable[[dict[str, Any], Start], Served]


class UnusableSettings(ValueError):
    """The command line asks for what does not exist."""


def yield_processor() -> None:
    """On a CPU, run after the front: every thread of this process is niced."""
    import jax

    if jax.default_backend() != "cpu" or not os.path.isdir("/proc/self/task"):
        return
    for thread in os.listdir("/proc/self/task"):
        try:
            os.setpriority(os.PRIO_PROCESS, int(thread), CPU_NICENESS)
        except OSError:  # it has ended
            continue


def main(fd: int, parent: int) -> int:
    """The process: launched by `client.EngineClient`.

    Args:
        fd: The socket.
        parent: The front's process id.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with(parent)
    sock = socket.socket(fileno=fd)
    reader, messages = framing.Reader(pipe.ToEngine), []
    while not messages:
        data = sock.recv(framing.READ_BYTES)
        if not data:
            return 0
        messages = reader.feed(data)
    launch = messages[0]
    faults = Faults(lambda line: print(f"engine: {line}", file=sys.stderr, flush=True))
    outbox = Outbox(sock, faults)
    # Else a thread that traces a program of structured output holds a step back for 5 ms.
    sys.setswitchinterval(SWITCH_S)
    gc.disable()  # an eighth of the time that tracing takes
    try:
        module, _, name = launch.factory.partition(":")
        factory: Factory = getattr(importlib.import_module(module), name)
        served = factory(launch.settings, Start(outbox))
        loop = Loop(served, sock, outbox, faults)
        # A thread that traces a program causes collections. With all objects of the start they
        # hold a step back for 0.2 to 0.5 s.
        gc.enable()
        gc.collect()
        gc.freeze()
        outbox.send(pipe.Ready(served.facts))
        loop.run()
    except BaseException as error:
        if not isinstance(error, ValueError):  # a refused setting is one line
            traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = "; ".join(lines[:3]) or "no message"
        message = said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"
        outbox.send(pipe.Failed(message, isinstance(error, UnusableSettings)))
        outbox.flush(1.0)
        return 1
    return 0


def _die_with(parent: int) -> None:
    """End this process when the front's does, even within a long compilation."""
    if sys.platform != "linux":
        return  # the closed socket ends the loop
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
