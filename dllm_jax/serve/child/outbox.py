"""The engine process's way out: messages, and deltas merged while a slow reader holds them up."""

import select
import socket
import time
from collections import deque
from collections.abc import Iterator

import msgspec

from dllm_jax.engine.faults import Faults
from dllm_jax.serve import framing, pipe
from dllm_jax.serve.pipe import Counts, Delta, Message


class Outbox:
    """Messages to send: written at once as far as the socket takes them.

    What does not fit waits for `push`, and deltas that wait are merged: a slow reader delays
    nothing. There is no thread: the loop would hold the interpreter while it waits for its turn.
    """

    def __init__(self, sock: socket.socket, faults: Faults | None = None):
        self._sock, self._faults = sock, faults or Faults()
        self._rest = memoryview(b"")
        self._messages: deque[Message] = deque()
        self._deltas: dict[tuple[int, int], Delta] = {}
        self._counts: Counts | None = None
        self._steps: list[tuple[int, float]] = []
        self._compiled: list[tuple[str, float, int]] = []

    @property
    def is_full(self) -> bool:
        """Whether something waits until the other end has read."""
        return bool(self._rest)

    def send(self, message: Message) -> None:
        """Send a message, before deltas that are put later."""
        self._messages.append(message)
        self.push()

    def queue(self, message: Message) -> None:
        """Send a message with the next ones."""
        self._messages.append(message)

    def put(self, deltas: list[Delta], counts: Counts) -> None:
        """Send deltas; each is merged with what waits for the same text."""
        for delta in deltas:
            key = delta.id, delta.choice
            waiting = self._deltas.get(key)
            if waiting is None:
                self._deltas[key] = delta
            else:
                waiting.merge(delta)
        self._steps += counts.steps
        self._compiled += counts.compiled
        self._counts = counts
        self.push()

    def drop(self, request_id: int) -> None:
        """Forget the deltas of a request."""
        for key in [key for key in self._deltas if key[0] == request_id]:
            del self._deltas[key]

    def push(self) -> None:
        """Send what waits, as far as there is room."""
        try:
            while self._rest or self._messages or self._counts is not None:
                if not self._rest:
                    self._rest = memoryview(b"".join(self._frames(self._take())))
                self._rest = self._rest[self._sock.send(self._rest, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            pass
        except OSError:  # the front is gone: the loop sees it where it reads
            self._rest = self._rest[:0]

    def _frames(self, messages: list[Message]) -> Iterator[bytes]:
        """The messages as bytes; what cannot be written ends its request and no other."""
        for message in messages:
            try:
                yield framing.frame(message)
            except Exception as error:
                if isinstance(message, pipe.Moved):
                    yield from self._apart(message)
                else:
                    request_id = getattr(message, "id", framing.NO_ID)
                    yield framing.frame(
                        pipe.Refused(request_id, self._faults.note(error), status=500)
                    )

    def _apart(self, moved: pipe.Moved) -> Iterator[bytes]:
        """Each delta in a message of its own."""
        yield framing.frame(pipe.Moved([], moved.counts))
        counts = msgspec.structs.replace(moved.counts, steps=[], compiled=[])
        for delta in moved.deltas:
            try:
                yield framing.frame(pipe.Moved([delta], counts))
            except Exception as error:
                yield framing.frame(pipe.Refused(delta.id, self._faults.note(error), status=500))

    def flush(self, seconds: float) -> None:
        """Wait until everything is sent."""
        until = time.monotonic() + seconds
        while self.is_full and (left := until - time.monotonic()) > 0:
            select.select([], [self._sock], [], left)
            self.push()

    def _take(self) -> list[Message]:
        messages = list(self._messages)
        if self._counts is not None:
            self._counts.steps, self._counts.compiled = self._steps, self._compiled
            messages.append(pipe.Moved(list(self._deltas.values()), self._counts))
        self._messages.clear()
        self._deltas, self._steps, self._compiled, self._counts = {}, [], [], None
        return messages
