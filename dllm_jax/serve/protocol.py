"""HTTP/1.1 on a connection: uvicorn's httptools protocol with our limits and our errors."""

from collections.abc import Callable
from typing import Any

import msgspec
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from dllm_jax.serve.limits import MAX_HEADER_BYTES
from dllm_jax.serve.refusals import error_object


def limited(max_connections: int) -> type[HttpToolsProtocol]:
    """The protocol of a server with so many connections at most."""

    class Limited(_Protocol):
        """A connection over the limit is closed at once."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.abort()

    return Limited


class _Sending:
    """uvicorn's `send`, but an answer of known length is one write: its head waits for its body."""

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle
        self._head: Any = None

    async def __call__(self, message: Any) -> None:
        head, self._head = self._head, None
        if head is None:
            names = [name for name, _ in message.get("headers", ())]
            if b"content-length" in names and b"connection" not in names:
                self._head = message
                return
        elif self._write_whole(head, message):
            return
        else:
            await self._cycle.send(head)
        await self._cycle.send(message)

    def _write_whole(self, head: Any, message: Any) -> bool:
        """Write an answer that is there as a whole; False leaves it to uvicorn."""
        cycle = self._cycle
        headers = [*cycle.default_headers, *head["headers"]]
        if (
            message.get("more_body")
            or not cycle.keep_alive
            or cycle.disconnected
            or cycle.flow.write_paused
            or cycle.scope["method"] == "HEAD"
            or HEADER_VALUE_RE.search(b"".join([value for _, value in headers]))
        ):
            return False
        lines = [b"%b: %b\r\n" % header for header in headers]
        parts = (STATUS_LINE[head["status"]], *lines, b"\r\n", message.get("body", b""))
        cycle.transport.write(b"".join(parts))
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        cycle.on_response()
        return True


class _Protocol(HttpToolsProtocol):
    """Bounds the head of a request, and answers malformed HTTP with an error object.

    A request's scope holds it as "dllm.connection", and a body of some KiB that has arrived as
    "dllm.body".

    Attributes:
        on_lost: Called when the client leaves.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.on_lost: set[Callable[[], None]] = set()

    _head_bytes = 0
    _in_head = True
    _began_before = False

    def data_received(self, data: bytes) -> None:
        """Parse; a head that does not end is cut off where its limit is."""
        self._began_before = self._in_head
        super().data_received(data)
        if self._in_head and self._began_before:  # all of the data belongs to the head
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response("")

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left, or we closed."""
        super().connection_lost(exc)
        for call in list(self.on_lost):
            call()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self.scope: Any
        self.scope["dllm.connection"] = self
        self._head_bytes, self._in_head = 0, True

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A whole header."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEADER_BYTES:
            raise ValueError("the head is too large")  # the parser stops; `send_400_response`
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head has ended."""
        self._in_head = False
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        def answered(scope: Any, receive: Any, send: Any) -> Any:
            return app(scope, receive, _Sending(cycle))

        super()._start_asgi_task(cycle, answered)

    def on_message_complete(self) -> None:
        """The body has ended; a large one has paused the reading, which tells of a client's end."""
        super().on_message_complete()
        if len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.scope["dllm.body"] = bytes(self.cycle.body)
        if not self.pipeline:
            self.flow.resume_reading()

    @property
    def is_writable(self) -> bool:
        """Whether `write_chunk` may be called: the client is there and takes what it is sent."""
        return not (self.flow.write_paused or self.transport.is_closing())

    def write_chunk(self, data: bytes) -> None:
        """Send a part of the body of the answer under way, which has begun and has no length."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def send_400_response(self, msg: str) -> None:
        """Say what was wrong, and close."""
        if self._head_bytes > MAX_HEADER_BYTES:
            status, code = 431, "headers_too_large"
            said = f"the headers are over {MAX_HEADER_BYTES} bytes; send less"
        else:
            status, code = 400, "invalid_http"
            said = "the request is not valid HTTP/1.1; send it again with an HTTP client"
        body = msgspec.json.encode(error_object(said, status, None, code))
        head = (
            STATUS_LINE[status],
            b"content-type: application/json\r\nconnection: close\r\n",
            f"content-length: {len(body)}\r\n\r\n".encode(),
        )
        self.transport.write(b"".join((*head, body)))
        self.transport.close()
