"""What a handler gets and gives: the call, its record, JSON answers."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from dllm_jax.serve.limits import JSON, Limits, read_body
from dllm_jax.serve.pipe import Delta, Usage


@dataclasses.dataclass
class Record:
    """What the log line and the metrics say of a request."""

    id: str
    started_s: float
    status: int = 0
    is_started: bool = False
    is_gone: bool = False
    prompt_tokens: int | None = None
    usages: Sequence[Usage] = ()
    texts: Sequence[Delta] = ()
    error: str | None = None


class Json:
    """A JSON answer, as an ASGI response.

    Attributes:
        headers: Its header fields.
    """

    def __init__(
        self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None
    ):
        self._body, self._status = msgspec.json.encode(content), status_code
        self.headers = [
            (b"content-type", JSON.encode()),
            (b"content-length", b"%d" % len(self._body)),
        ]
        for name, value in (headers or {}).items():
            self.headers.append((name.encode("latin-1"), value.encode("latin-1")))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it."""
        start = {"type": "http.response.start", "status": self._status, "headers": self.headers}
        await send(start)
        await send({"type": "http.response.body", "body": self._body})


class Elsewhere:
    """The connection of a request that another ASGI server took, such as Ray Serve's.

    It has what is used of `protocol`'s, and is its own transport and set of callbacks.
    """

    is_writable = False  # but by `send`

    def __init__(self, receive: Callable[[], Awaitable[Any]]):
        self._receive, self._request = receive, asyncio.current_task()
        self._listening: asyncio.Task[None] | None = None
        self._is_gone = False
        self.transport = self.on_lost = self

    def add(self, call: Callable[[], None]) -> None:
        """Call it when the client leaves. The body has been read."""
        self._listening = asyncio.create_task(self._listen(call))

    def discard(self, call: Callable[[], None]) -> None:
        """Do not call it any more."""
        if self._listening is not None:
            self._listening.cancel()

    async def _listen(self, call: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        call()

    def is_closing(self) -> bool:
        """Whether the client is known to have left."""
        return self._is_gone

    def abort(self) -> None:
        """End the request; the server closes a connection whose answer is not whole."""
        if self._request is not None and self._request is not asyncio.current_task():
            self._request.cancel()


Handler = Callable[["Call"], Awaitable[Any]]


@dataclasses.dataclass
class Call:
    """What a handler gets."""

    scope: Any
    receive: Any
    headers: dict[str, str]
    record: Record
    limits: Limits

    async def body(self) -> bytes:
        """The request's body."""
        is_there, most = self.scope["dllm.body_is_there"], self.limits.max_body_bytes
        return await read_body(self.receive, self.headers, most, is_there)


class Endpoint:
    """A route's ASGI application."""

    def __init__(self, path: str, handler: Handler, limits: Limits):
        self.path, self._handler, self._limits = path, handler, limits

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer."""
        record: Record = scope["dllm.record"]
        call = Call(scope, receive, scope["dllm.headers"], record, self._limits)
        response = await self._handler(call)
        await response(scope, receive, send)
