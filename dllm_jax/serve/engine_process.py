"""The engine's process as the system knows it: how it begins, and how it has ended."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dllm_jax.serve.child.process import main; "
    "sys.exit(main(int(sys.argv[2]), int(sys.argv[3])))"
)


def spawn() -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """The process, our end of its socket, and of a pipe from its standard error."""
    told, tells = os.pipe()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    paths = json.dumps([path or os.getcwd() for path in sys.path])
    command = [sys.executable, "-c", _CHILD, paths, str(theirs.fileno()), str(os.getpid())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=tells)
    theirs.close()
    os.close(tells)
    return process, ours, told


async def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The status of a process, once it has ended; None: it has not within so long."""
    until = time.monotonic() + seconds
    while (status := process.poll()) is None and time.monotonic() < until:
        await asyncio.sleep(0.01)
    return status


def how_it_ended(status: int | None) -> str:
    """A status in words; None: the process runs."""
    if status is None:
        return "closed its connection"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
