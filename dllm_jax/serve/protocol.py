"""HTTP/1.1 on a connection: uvicorn's httptools protocol with our limits and our errors."""

from collections.abc import Callable
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

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


class _Together:
    """A transport that sends the head of an answer of known length with its body: one call less."""

    def __init__(self, transport: Any):
        self._transport, self._head = transport, b""

    def write(self, data: bytes) -> None:
        """Send, or keep a head until its body comes."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and b"\r\ncontent-length: " in data:
            self._head = data
            return
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Protocol(HttpToolsProtocol):
    """Bounds the head of a request, and answers malformed HTTP with an error object.

    A request's scope holds it as "dllm.connection", and whether all of its body has arrived.

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
        self.scope |= {"dllm.connection": self, "dllm.body_is_there": False}
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
        if self.scope["method"] != "HEAD":  # whose answer has no body
            self.cycle.transport = cast(Any, _Together(self.transport))

    def on_message_complete(self) -> None:
        """The body has ended; a large one has paused the reading, which tells of a client's end."""
        super().on_message_complete()
        self.scope["dllm.body_is_there"] = True
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
