"""HTTP/1.1 on a connection: uvicorn's httptools protocol with our limits and our errors."""

from typing import Any

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


class _Protocol(HttpToolsProtocol):
    """Bounds the head of a request, and answers malformed HTTP with an error object."""

    _head_bytes = 0
    _in_head = True
    _began_before = False

    def data_received(self, data: bytes) -> None:
        """Parse; a head that does not end is cut off where its limit is."""
        self._began_before = self._in_head
        super().data_received(data)
        if self._in_head and self._began_before:  # all of the data belongs to the head
            self._grow(len(data))
            if self._head_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._head_bytes, self._in_head = 0, True

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        self._grow(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A whole header."""
        self._grow(len(name) + len(value))
        if self._head_bytes > MAX_HEADER_BYTES:
            raise ValueError("the head is too large")  # the parser stops; `send_400_response`
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head has ended."""
        self._in_head = False
        super().on_headers_complete()

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

    def _grow(self, size: int) -> None:
        self._head_bytes += size
