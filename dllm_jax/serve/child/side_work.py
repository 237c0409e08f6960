"""Work outside the engine's loop: a request waits for it, and no other request does.

One thread works at a time, and clients take turns. Nothing here knows what the work is.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from dllm_jax.engine.checks import Refused

MOST_EACH = 16  # pieces of work that wait for one client
MOST = 64  # and for all


class Work(NamedTuple):
    """A piece of work; several requests may wait for the same one."""

    key: Hashable
    do: Callable[[], Any]


class Busy(Refused):
    """Too much waits already."""

    status = 429


class Done(NamedTuple):
    """A piece of work that has ended, who asked for it first, and the requests that waited."""

    client: str
    seconds: float
    request_ids: list[int]
    found: Any
    error: Exception | None


class _Piece:
    def __init__(self, client: str, work: Work):
        self.client, self.work = client, work
        self.request_ids: list[int] = []


class SideWork:
    """Pieces of work in order, one of them under way in a thread.

    Args:
        what: The work, for the refusal: "constraints wait to be compiled".
        code: The refusal's.
        wake: Called in the thread when a piece is done.
    """

    def __init__(self, what: str, code: str, wake: Callable[[], None]):
        self._what, self._code, self._wake = what, code, wake
        self._pieces: dict[Hashable, _Piece] = {}
        self._waiting: OrderedDict[str, deque[Hashable]] = OrderedDict()  # by client
        self._current: Hashable = None
        self._done: deque[tuple[Any, Exception | None]] = deque()
        self._since_s = 0.0

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(len(piece.request_ids) for piece in self._pieces.values())

    @property
    def is_busy(self) -> bool:
        """Whether a thread works, or has something to do."""
        return self._current is not None or bool(self._waiting)

    def put(self, client: str, request_id: int, work: Work, bounded: bool = True) -> None:
        """Let a request wait for work.

        Args:
            bounded: Refuse it where too much waits; else it is of a text that has begun.

        Raises:
            Busy: Too much waits already.
        """
        piece = self._pieces.get(work.key)
        if piece is None:
            mine = len(self._waiting.get(client, ()))
            is_full = mine >= MOST_EACH or sum(map(len, self._waiting.values())) >= MOST
            if bounded and is_full:
                raise Busy(
                    f"too many {self._what}: at most {MOST_EACH} of a client and {MOST} in all "
                    "may; try again in a moment",
                    code=self._code,
                )
            piece = self._pieces[work.key] = _Piece(client, work)
            self._waiting.setdefault(client, deque()).append(work.key)
        piece.request_ids.append(request_id)
        self._begin()

    def drop(self, request_id: int) -> None:
        """Forget a request. What only it waited for is not begun any more."""
        for key, piece in list(self._pieces.items()):
            if request_id in piece.request_ids:
                piece.request_ids.remove(request_id)
                if not piece.request_ids and key != self._current:
                    del self._pieces[key]
                    self._forget(piece.client, key)

    def take(self) -> list[Done]:
        """The work finished since the last call."""
        found = []
        while self._done:
            piece = self._pieces.pop(self._current)
            seconds = time.monotonic() - self._since_s
            found.append(Done(piece.client, seconds, piece.request_ids, *self._done.popleft()))
            self._current = None
            self._begin()
        return found

    def _forget(self, client: str, key: Hashable) -> None:
        keys = self._waiting[client]
        keys.remove(key)
        if not keys:
            del self._waiting[client]

    def _begin(self) -> None:
        """Begin the next client's next piece, unless one is under way."""
        if self._current is not None or not self._waiting:
            return
        client = next(iter(self._waiting))
        self._current = self._waiting[client][0]
        self._waiting.move_to_end(client)
        self._forget(client, self._current)
        do, self._since_s = self._pieces[self._current].work.do, time.monotonic()
        threading.Thread(target=self._run, args=(do,), daemon=True).start()

    def _run(self, do: Callable[[], Any]) -> None:
        try:
            self._done.append((do(), None))
        except Exception as error:
            self._done.append((None, error))
        self._wake()
