"""HTTP/1.1 on a connection: uvicorn's httptools protocol with our limits and our errors.

A connection waits for a head, idles, or has a request under way. `close_overdue` ends those that
wait too long; over the bound on connections the one that has waited longest makes room.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from dllm_jax.serve import limits as usual
from dllm_jax.serve.limits import MAX_HEADER_BYTES, PROBES, Limits
from dllm_jax.serve.refusals import error_object

_SWEEP_S = 1.0
_INVALID = 400, "invalid_http", "the request is not valid HTTP/1.1; send it with an HTTP client"
_LARGE = 431, "headers_too_large", f"the headers are over {MAX_HEADER_BYTES} bytes; send less"
_FULL = 503, "too_many_connections", "all connections are in use; try again later"


def limited(limits: Limits) -> type[HttpToolsProtocol]:
    """The protocol of a server with these limits."""
    return type("Limited", (_Protocol,), {"limits": limits})


async def close_overdue(connections: Iterable[Any]) -> None:
    """End connections whose client keeps them waiting, until cancelled."""
    while True:
        await asyncio.sleep(_SWEEP_S)
        now = time.monotonic()
        for one in list(connections):
            one.end_if_overdue(now)


class _Sending:
    """uvicorn's `send`, but an answer of known length is one write: its head waits for its body.

    Clients before HTTP/1.1 know no chunked coding: the end of the connection ends their streams.
    """

    def __init__(self, cycle: RequestResponseCycle, connection: "_Protocol"):
        self._cycle, self._connection = cycle, connection
        self._head: Any = None
        self._is_plain = cycle.scope["http_version"] != "1.1"

    async def __call__(self, message: Any) -> None:
        # uvicorn marks the last request alone, and others may wait before it.
        self._cycle.disconnected |= self._cycle.transport.is_closing()
        head, self._head = self._head, None
        if head is not None:
            if self._write_whole(head, message):
                return
            await self._send(head)
        elif message["type"] == "http.response.start":
            # Its body may come or not after an answer that is no 100: what comes next is unclear.
            self._cycle.keep_alive &= not (self._is_plain or self._cycle.waiting_for_100_continue)
            names = [name for name, _ in message.get("headers", ())]
            if b"content-length" in names and b"connection" not in names:
                self._head = message
                return
        await self._send(message)

    async def _send(self, message: Any) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            is_sized = any(name == b"content-length" for name, _ in message.get("headers", ()))
            self._is_plain &= not is_sized
            self._connection.is_chunked = not self._is_plain
            if self._is_plain:
                cycle.chunked_encoding = False
        elif self._is_plain:
            cycle.expected_content_length = len(message.get("body", b""))
        await cycle.send(message)

    def _write_whole(self, head: Any, message: Any) -> bool:
        """Write an answer that is complete; False leaves it to uvicorn."""
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
    """Bounds heads, waiting and connections; answers malformed HTTP with an error object.

    A request's scope holds it as "dllm.connection", and a body of some KiB that has arrived as
    "dllm.body".

    Attributes:
        on_lost: Called when the client leaves.
        is_chunked: The answer under way has chunks.
        waits_since: When it began to wait for a request, None while one is under way.
    """

    limits = Limits()
    is_chunked = True
    waits_since: float | None = None
    _patience = 0.0
    _stuck_since: float | None = None
    _head_bytes = _unread_bytes = 0
    _in_head, _is_read = True, False
    _is_extra = False
    _refusal = _INVALID
    _before: Any = None  # the request before that under way

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.on_lost: set[Callable[[], None]] = set()

    # --- the connection ---------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Over the bound another one that waits makes room; without such there are probes' places.

        A client that opens connections and says nothing thus shuts out nobody.
        """
        super().connection_made(transport)
        self._wait(self.limits.head_timeout)
        over = len(self.connections) - self.limits.max_connections
        if over <= 0:
            return
        others: set[Any] = set(self.connections) - {self}
        waiting = [(one.waits_since, one.transport) for one in others if one.waits_since]
        waiting = [pair for pair in waiting if not pair[1].is_closing()]
        self._is_extra = not waiting
        if waiting:
            min(waiting, key=lambda pair: pair[0])[1].abort()
        elif over > usual.PROBE_PLACES:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left, or we closed."""
        super().connection_lost(exc)
        for call in list(self.on_lost):
            call()

    def _wait(self, seconds: float) -> None:
        self.waits_since, self._patience = time.monotonic(), seconds

    def end_if_overdue(self, now: float) -> None:
        """Close it if its client is silent or takes nothing for too long."""
        if self._stuck_since is not None and now - self._stuck_since > usual.CLIENT_SECONDS:
            self.transport.abort()
        if self.waits_since is None or now - self.waits_since <= self._patience:
            return
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self._in_head and (self._head_bytes or self._unread_bytes):
            said = f"the request did not arrive within {self._patience:g} s; send it again"
            self._refuse(408, "request_timeout", said)
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """The client takes nothing."""
        super().pause_writing()
        self._stuck_since = time.monotonic()

    def resume_writing(self) -> None:
        """It takes something."""
        super().resume_writing()
        self._stuck_since = None

    # --- requests -------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse; an offer to upgrade is passed over, and its request is parsed without it."""
        self._unset_keepalive_if_required()
        self._is_read, rest = False, memoryview(data)
        try:
            while True:
                try:
                    self.parser.feed_data(rest)
                    break
                except httptools.HttpParserUpgrade as offer:
                    rest, head = rest[offer.args[0] :], self._without_offer()
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                    self.parser.feed_data(head)
        except httptools.HttpParserError:
            self.send_400_response("")
        # Parts of a line, of a chunk's extension or of a trailer, which the parser holds back.
        self._unread_bytes = 0 if self._is_read else self._unread_bytes + len(data)
        if self._unread_bytes > MAX_HEADER_BYTES:
            self._refusal = _LARGE
            self.send_400_response("")

    def _without_offer(self) -> bytes:
        """The head under way, after which the parser believes that HTTP ends."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)
        return b"".join([line, *lines, b"\r\n"])

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self.scope: Any
        self.scope["dllm.connection"] = self
        self._head_bytes, self._in_head, self._is_read = 0, True, True
        if self.cycle is None or self.cycle.response_complete:
            self._wait(self.limits.head_timeout)

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A whole header; trailers are not read."""
        self._count(len(name) + len(value))
        if not self._in_head:
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def _count(self, num_bytes: int) -> None:
        self._is_read = True
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEADER_BYTES:
            self._fail(_LARGE)

    def _fail(self, refusal: tuple[int, str, str]) -> None:
        """Stop the parser, which has `send_400_response` called."""
        self._refusal = refusal
        raise ValueError(refusal[1])

    def on_headers_complete(self) -> None:
        """The head has ended."""
        self._check_head()
        if self.parser.should_upgrade():
            return
        self._in_head, self.waits_since = False, None
        self._before = self.cycle
        super().on_headers_complete()

    def _check_head(self) -> None:
        """Refuse what a proxy may read otherwise, and more than there is room for."""
        fields = dict(self.headers)
        coding = fields.get(b"transfer-encoding")
        if (
            self.parser.get_method() == b"CONNECT"
            or [name for name, _ in self.headers].count(b"host") > 1
            or (coding is not None and coding.lower().strip() != b"chunked")
            or (coding is not None and self.parser.get_http_version() != "1.1")
        ):
            self._fail(_INVALID)
        is_full = len(self.connections) > self.limits.max_connections
        if self._is_extra and is_full and self.url.partition(b"?")[0] not in PROBES:
            self._fail(_FULL)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._is_read = True
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        def answered(scope: Any, receive: Any, send: Any) -> Any:
            return app(scope, receive, _Sending(cycle, self))

        super()._start_asgi_task(cycle, answered)

    def on_message_complete(self) -> None:
        """The body has ended; a large one has paused the reading, which tells of a client's end."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        if len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.scope["dllm.body"] = bytes(self.cycle.body)
        if not self.pipeline:
            self.flow.resume_reading()

    # --- answers --------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """An answer has ended; its request may still arrive, and is passed over."""
        super().on_response_complete()
        if self.cycle.response_complete:
            is_arriving = self.cycle.more_body and not self._in_head
            seconds = usual.BODY_SECONDS if is_arriving else usual.IDLE_SECONDS
            self._wait(self.limits.head_timeout if self._in_head else seconds)

    @property
    def is_writable(self) -> bool:
        """Whether `write_chunk` may be called: the client is connected and reads."""
        return not (self.flow.write_paused or self.transport.is_closing())

    def write_chunk(self, data: bytes) -> None:
        """Send a part of the body of the answer under way, which has begun and has no length."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self.is_chunked else data)

    def send_400_response(self, msg: str) -> None:
        """Say what was wrong, and close; requests that were whole before are answered first."""
        if self.pipeline and self.cycle.more_body:
            self.pipeline.popleft()
            self.cycle = self._before
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                cycle.keep_alive = False
                return
            cycle.disconnected = True
        elif cycle is not None and not self._in_head:  # answered before its body broke
            self.transport.close()
            return
        self._refuse(*self._refusal)

    def _refuse(self, status: int, code: str, said: str) -> None:
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(error_object(said, status, None, code))
        head = (
            STATUS_LINE[status],
            b"content-type: application/json\r\nconnection: close\r\n",
            f"content-length: {len(body)}\r\n\r\n".encode(),
        )
        self.transport.write(b"".join((*head, body)))
        self.transport.close()
