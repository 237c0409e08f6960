"""Several processes that share one model: process 0 decides, the others replay its calls.

A host loop reads clocks, so that loops on several processes would part ways, and a dispatch that
one of them lacks is a hang. So the engine runs on process 0 alone. Data flow: `ModelRunner` of
process 0 -> a message a call (a JSON head and raw arrays) -> sockets -> `follow` on the others ->
the same program over their part of the weights. Nothing comes back: results are whole everywhere.

Source: docs/adr/0020-several-hosts.md; `jax.distributed` joins the processes.
"""

import atexit
import contextlib
import hashlib
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import jax
import numpy as np

from dllm_jax.engine.layout import DeviceFailure

BEAT_S, SILENT_S = 5.0, 20.0  # a follower says that it lives; without a word for so long it is gone
JOIN_S = 120.0  # for all followers to connect
REACH_S = 10.0  # for one of the names of process 0
COORDINATOR = "JAX_COORDINATOR_ADDRESS"  # HOST:PORT of process 0, as `jax.distributed` reads it
GRACE_S = 5.0  # a collective may fail before the socket of the process that died is closed
_SHARED_BYTES = 2048
_HEAD = struct.Struct("<IQ")  # bytes of the JSON head, and of the arrays after it


def agree(num_pages: int, settings: Any) -> int:
    """The least number of pages of all processes, which must have the same settings.

    Raises:
        ValueError: They do not, on every process.
    """
    from jax.experimental import multihost_utils

    digest = hashlib.sha256(repr(settings).encode()).digest()
    words = np.frombuffer(digest, np.int32)
    every = np.asarray(multihost_utils.process_allgather(np.append(words, np.int32(num_pages))))
    differs = np.flatnonzero((every[:, :-1] != every[0, :-1]).any(axis=1))
    if len(differs):
        raise ValueError(
            f"process {differs[0]} of {len(every)} has another version, model or setting than "
            "process 0; start all with the same installation and arguments"
        )
    return int(every[:, -1].min())


class Leader:
    """The other processes as process 0 sees them: calls go to all, and a dead one is noticed.

    Raises:
        DeviceFailure: Some did not connect in time.
    """

    def __init__(self):
        self.gone: Future[str] = Future()  # what to say of the first one that is gone
        self._is_over, self._lock = False, threading.Lock()
        named = _named_host()
        try:
            server = socket.create_server((named, 0))
        except OSError:  # a name of another interface; the token keeps others out
            server = socket.create_server(("", 0))
        token = secrets.token_bytes(32)
        hosts = [named] if named else _own_hosts()
        _shared({"hosts": hosts, "port": server.getsockname()[1], "token": token.hex()})
        self._followers = _accepted(server, token)
        for rank, connection in self._followers.items():
            threading.Thread(target=self._watch, args=(rank, connection), daemon=True).start()
        atexit.register(self.close)

    def send(self, head: dict[str, Any], arrays: tuple[Any, ...] = ()) -> None:
        """Tell all followers; `head` is JSON.

        Raises:
            DeviceFailure: A process has ended.
        """
        self.check()
        given = [np.asarray(array) for array in arrays]
        head = head | {"arrays": [(array.dtype.name, array.shape) for array in given]}
        data = _framed(head, given)
        for rank, connection in self._followers.items():
            try:
                connection.sendall(data)
            except OSError as error:
                self._lose(rank, str(error))
        self.check()

    def check(self) -> None:
        """Raise DeviceFailure where a follower is gone."""
        if self.gone.done():
            raise DeviceFailure(self.gone.result())

    def wait(self, future: Future) -> Any:
        """The result of a future, however long it takes, as long as all followers live.

        Raises:
            DeviceFailure: One is gone; what it computed with the others may never end.
        """
        wait([future, self.gone], return_when=FIRST_COMPLETED)
        if future.done() and future.exception() is not None:
            wait([self.gone], GRACE_S)
        self.check()
        return future.result()

    def call(self, function: Callable[[], Any]) -> Any:
        """`function()`, which may block for ever where a follower is gone; as `wait`."""
        future: Future = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return self.wait(future)

    def close(self) -> None:
        """Let the followers end."""
        if not self.gone.done() and not self._is_over:
            self.send({"what": "stop"})
        self._is_over = True

    def _watch(self, rank: int, connection: socket.socket) -> None:
        """Until a follower is silent, or its connection ends."""
        connection.settimeout(SILENT_S)
        why = "its connection ended"
        try:
            while connection.recv(64):
                pass
        except TimeoutError:
            why = f"not a word for {SILENT_S:g} s"
        except OSError as error:
            why = str(error)
        if not self._is_over:
            self._lose(rank, why)

    def _lose(self, rank: int, why: str) -> None:
        count = len(self._followers) + 1
        with self._lock:
            if self.gone.done():
                return
            self.gone.set_result(
                f"process {rank} of {count} is gone ({why}), and with it its part of the model; "
                f"start all {count} again"
            )
        # A thread may be inside a collective that never ends, and JAX would wait for it at exit.
        atexit.register(_leave)


class Follower:
    """Process 0 as another process sees it.

    Raises:
        DeviceFailure: It is not reached.
    """

    def __init__(self):
        found = _shared({})
        self._connection = _reached(found["hosts"], found["port"])
        self._connection.settimeout(None)
        token = bytes.fromhex(found["token"])
        self._connection.sendall(token + struct.pack("<I", jax.process_index()))
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._connection.sendall(b"\0")
                time.sleep(BEAT_S)

    def receive(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """The next message.

        Raises:
            DeviceFailure: Process 0 is gone.
        """
        try:
            size, rest = _HEAD.unpack(_exactly(self._connection, _HEAD.size))
            head = json.loads(_exactly(self._connection, size))
            data = memoryview(_exactly(self._connection, rest))
        except (EOFError, OSError) as error:
            raise DeviceFailure(
                f"process 0 is gone ({error or 'its connection ended'}); start all again"
            ) from error
        arrays = []
        for name, shape in head.pop("arrays", ()):
            kind = jax.numpy.dtype(name)
            count = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            arrays.append(np.frombuffer(data[:count], kind).reshape(shape))
            data = data[count:]
        return head, arrays


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _named_host() -> str:
    """The host of process 0 by the environment; "" where it does not say."""
    return os.environ.get(COORDINATOR, "").rpartition(":")[0].strip("[]")


def _own_hosts() -> list[str]:
    """Names by which others may reach this machine: the way out, its name, and from itself."""
    found = [socket.gethostname(), "127.0.0.1"]
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; no machine has this address
        found.insert(0, probe.getsockname()[0])
    return found


def _reached(hosts: list[str], port: int) -> socket.socket:
    """A connection to the first of the hosts that takes one."""
    why = None
    for host in hosts:
        try:
            return socket.create_connection((host, port), REACH_S)
        except OSError as error:
            why = error
    raise DeviceFailure(
        f"process 0 is not reached at {', '.join(hosts)}, port {port} ({why}); set {COORDINATOR} "
        "of process 0 to a HOST:PORT by which all reach it, and start all again"
    )


def _shared(found: dict[str, Any]) -> dict[str, Any]:
    """Send the value of process 0 to all processes; the values of the others are ignored."""
    from jax.experimental import multihost_utils

    words = np.frombuffer(json.dumps(found).encode().ljust(_SHARED_BYTES), np.int32)
    received = np.asarray(multihost_utils.broadcast_one_to_all(words))
    return json.loads(received.astype(np.int32).tobytes())


def _accepted(server: socket.socket, token: bytes) -> dict[int, socket.socket]:
    """A connection for each follower, by its process; one without the token is turned away."""
    found: dict[int, socket.socket] = {}
    server.settimeout(JOIN_S)
    with server:
        while len(found) + 1 < jax.process_count():
            try:
                connection, _ = server.accept()
                connection.settimeout(JOIN_S)
                said = _exactly(connection, len(token) + 4)
            except TimeoutError as error:
                missing = sorted({*range(1, jax.process_count())} - found.keys())
                raise DeviceFailure(
                    f"processes {missing} did not connect within {JOIN_S:g} s; start them again"
                ) from error
            except EOFError:
                continue
            if not secrets.compare_digest(said[:-4], token):
                connection.close()
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found[struct.unpack("<I", said[-4:])[0]] = connection
    return found


def _framed(head: dict[str, Any], arrays: list[np.ndarray]) -> bytes:
    text = json.dumps(head).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    return _HEAD.pack(len(text), len(data)) + text + data


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes.

    Raises:
        EOFError: The connection ended before.
    """
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
