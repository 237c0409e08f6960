"""An HTTP/1.1 client that stamps each event of a stream with its time of arrival.

asyncio moves the bytes and h11 frames them. Events are not decoded here, since that would delay the
measurement.
"""

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import h11

READ_BYTES = 1 << 16
MOST_WHOLE_BYTES = 64 << 20  # of a plain answer
_DONE = b"[DONE]"


class Exchange(NamedTuple):
    """One request and its answer.

    Attributes:
        sent_s, ended_s: Times of `time.perf_counter`.
        body: Body of a plain answer.
        events: Data of each event of a stream without `[DONE]`, with its time of arrival.
        is_done: The stream ended with `[DONE]`.
    """

    status: int
    sent_s: float
    ended_s: float
    body: bytes
    events: list[tuple[float, bytes]]
    is_done: bool


class Disconnected(OSError):
    """The server closed the connection before the answer was whole."""


class Client:
    """Connections to one server, kept open between requests.

    Args:
        base_url: Scheme, host and port of the server, and a prefix of all paths.
        headers: Sent with every request.

    Raises:
        ValueError: `base_url` is not of this form.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None):
        parts = urlsplit(base_url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ValueError(
                f"{base_url!r} is no URL of a server; write e.g. http://localhost:8000"
            )
        self._host, self._path = parts.hostname, parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (80 if self._tls is None else 443)
        self._headers = [("Host", parts.netloc.rpartition("@")[2]), *(headers or {}).items()]
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        answer = await self.exchange("GET", path, None)
        return answer.status, answer.body

    async def post(self, path: str, fields: Mapping[str, Any]) -> Exchange:
        """The answer to a JSON body."""
        return await self.exchange("POST", path, json.dumps(fields).encode())

    async def exchange(self, method: str, path: str, body: bytes | None) -> Exchange:
        """One request and its whole answer.

        Raises:
            OSError: The server cannot be reached, or closed the connection.
        """
        headers = list(self._headers)
        if body is not None:
            headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        request = h11.Request(method=method, target=self._path + path, headers=headers)
        sent_s = time.perf_counter()
        while True:
            is_used = bool(self._idle)
            connection = self._idle.pop() if is_used else await self._open()
            try:
                answer = await connection.exchange(request, body or b"", sent_s)
            except (OSError, h11.RemoteProtocolError) as error:
                connection.close()
                if is_used and not connection.is_answered:
                    continue  # the server closed an idle connection
                raise Disconnected(f"the connection was closed early ({error})") from error
            except BaseException:
                connection.close()
                raise
            if connection.is_reusable():
                self._idle.append(connection)
            else:
                connection.close()
            return answer

    async def _open(self) -> "_Connection":
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise ConnectionError(
                f"{self._host}:{self._port} does not answer ({error.strerror or error})"
            ) from error
        return _Connection(reader, writer)

    def close(self) -> None:
        """Close the connections that are open."""
        while self._idle:
            self._idle.pop().close()


class _Connection:
    """One connection; `is_answered` is set once a part of an answer has arrived."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)
        self.is_answered = False

    async def exchange(self, request: h11.Request, body: bytes, sent_s: float) -> Exchange:
        self.is_answered = False
        http = self._http
        data = (http.send(request), http.send(h11.Data(data=body)), http.send(h11.EndOfMessage()))
        self._writer.write(b"".join(part for part in data if part))
        await self._writer.drain()
        status, is_stream, whole, lines = 0, False, bytearray(), _Lines()
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await self._reader.read(READ_BYTES))
                continue
            self.is_answered = True
            if isinstance(event, h11.Response):
                status = event.status_code
                kinds = [value for name, value in event.headers if name == b"content-type"]
                is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
            elif isinstance(event, h11.Data):
                if is_stream:
                    lines.feed(bytes(event.data), time.perf_counter())
                elif len(whole) < MOST_WHOLE_BYTES:
                    whole += event.data
            elif isinstance(event, h11.EndOfMessage):
                ended_s = time.perf_counter()
                return Exchange(status, sent_s, ended_s, bytes(whole), lines.events, lines.is_done)
            elif isinstance(event, h11.ConnectionClosed):
                raise ConnectionError("no answer")

    def is_reusable(self) -> bool:
        """Whether the connection is kept open and ready for another request."""
        with contextlib.suppress(h11.LocalProtocolError):
            self._http.start_next_cycle()
            return True
        return False

    def close(self) -> None:
        self._writer.close()


class _Lines:
    """Extracts the data lines of a stream; comments and other fields are skipped."""

    def __init__(self):
        self.events: list[tuple[float, bytes]] = []
        self.is_done = False
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                content = line[5:].strip()
                if content == _DONE:
                    self.is_done = True
                else:
                    self.events.append((now, content))
