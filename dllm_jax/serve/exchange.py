"""Input and output of a handler: the call, and JSON answers."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from dllm_jax.serve.limits import JSON, Limits, check_body, read_body
from dllm_jax.serve.logs import request_id
from dllm_jax.serve.pipe import Delta, Usage

_ENCODER = msgspec.json.Encoder()
_TYPE = (b"content-type", JSON.encode())


class Json:
    """A JSON answer, as an ASGI response.

    Attributes:
        headers: Its header fields.
        body, status: What it says.
    """

    def __init__(
        self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None
    ):
        self.body, self.status = _ENCODER.encode(content), status_code
        self.headers = [_TYPE, (b"content-length", b"%d" % len(self.body))]
        for name, value in (headers or {}).items():
            self.headers.append((name.encode("latin-1"), value.encode("latin-1")))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it."""
        start = {"type": "http.response.start", "status": self.status, "headers": self.headers}
        await send(start)
        await send({"type": "http.response.body", "body": self.body})


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


class Call:
    """A request: what its handler gets, and what the log line and the metrics say of it.

    Attributes:
        headers: The last of each name, which is in lower case.
        size: Bytes of the body, once it has been read.
        client: Who asks, see `auth.Guard.check`.
    """

    def __init__(self, scope: Any, receive: Any, limits: Limits):
        self.scope, self._receive, self._limits = scope, receive, limits
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.id = request_id(self.header(b"x-request-id"))
        self.started_s = time.monotonic()
        self.client = ""
        self.status = self.size = 0
        self.is_started = self.is_gone = False
        self.prompt_tokens: int | None = None
        self.usages: Sequence[Usage] = ()
        self.texts: Sequence[Delta] = ()
        self.turns: Any = None  # `turns.Texts` of an answer that may have calls
        self.error: str | None = None

    def header(self, name: bytes) -> str:
        """A header; empty where there is none."""
        return self.headers.get(name, b"").decode("latin-1")

    async def body(self) -> bytes:
        """The request's body.

        Raises:
            Refusal: It is of another type, too large, or does not arrive in time.
            ConnectionError: The client left.
        """
        most = self._limits.max_body_bytes
        kind, length = self.header(b"content-type"), self.header(b"content-length")
        check_body(kind, self.header(b"content-encoding"), length, most)
        body = self.scope.get("dllm.body")
        if not body or len(body) > most:
            body = await read_body(self._receive, most)
        self.size = len(body)
        return body


class Endpoint:
    """A route's ASGI application."""

    def __init__(self, path: str, handler: Handler):
        self.path, self._handler = path, handler

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer."""
        response = await self._handler(scope.pop("dllm.call"))  # no cycle: the call has the scope
        await response(scope, receive, send)
