"""Lines of a server, as JSON or as text: one a request, and one an event. No prompt, no answer.

In the form "json" every line of standard error is an object: `Printed` takes what is printed.
"""

import asyncio
import functools
import io
import random
import re
import sys
import time
import traceback
from collections.abc import Sequence
from io import TextIOBase
from typing import Any, TextIO

import msgspec

_ENCODER = msgspec.json.Encoder()
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TOGETHER_S = 0.02
_LEVELS = {"error": "error", "warning": "warning", "note": "info", "engine": "info"}
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def request_id(said: str) -> str:
    """The caller's `X-Request-Id` if it is harmless, else a new one."""
    return said if said and _REQUEST_ID.fullmatch(said) else random_id()


def random_id() -> str:
    """32 hexadecimal digits; not secret. `os.urandom` costs more than a log line."""
    return f"{random.getrandbits(128):032x}"


def traceparent(said: str) -> str | None:
    """The caller's `traceparent` if it is one."""
    return said if said and _TRACEPARENT.fullmatch(said) else None


@functools.lru_cache(maxsize=2)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _now() -> str:
    seconds, milliseconds = divmod(time.time_ns() // 1_000_000, 1000)
    return f"{_second(seconds)}.{milliseconds:03}Z"


class RequestLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The line of a finished request; fields that are None are left out."""

    ts: str = msgspec.field(default_factory=_now)
    level: str = msgspec.field(default_factory=lambda: "info")
    event: str = msgspec.field(default_factory=lambda: "request")
    request_id: str
    traceparent: str | None = None
    route: str
    status: int
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    nfe: int | None = None
    tokens_per_forward: float | None = None
    queue_ms: float | None = None
    ttfb_ms: float | None = None
    e2e_ms: float
    finish: str | None = None
    stop_reason: list[str] | None = None
    disconnected: bool | None = None
    error: str | None = None
    peer: str | None = None
    key: str | None = None


class Log:
    """Lines on stderr.

    Args:
        form: "json", "text" or "none".
    """

    def __init__(self, form: str = "text", to: TextIO | TextIOBase | None = None):
        self._form, self._to = form, to
        self._requests: list[RequestLine] = []

    @property
    def num_dropped(self) -> int:
        """Lines that found no room."""
        return getattr(self._to, "num_dropped", 0)

    def line(self, event: str, level: str = "info", **fields: Any) -> None:
        """Write a line."""
        self.flush()
        if self._form != "none" or level != "info":
            self._write([{"ts": _now(), "level": level, "event": event, **fields}])

    def request(self, line: RequestLine) -> None:
        """Write a line in a moment, with others."""
        if self._form == "none":
            return
        self._requests.append(line)
        if len(self._requests) == 1:
            asyncio.get_running_loop().call_later(_TOGETHER_S, self.flush)

    def flush(self) -> None:
        """Write the lines that wait."""
        lines, self._requests = self._requests, []
        if lines:
            self._write(lines)

    def _write(self, lines: Sequence[Any]) -> None:
        to = self._to or sys.stderr
        to.write(self._text(lines))
        to.flush()

    def _text(self, lines: Sequence[Any]) -> str:
        if self._form == "json":
            return _ENCODER.encode_lines(lines).decode()
        return "".join(map(_plain, lines))

    def dropped(self, number: int) -> str:
        """The line that says how many lines found no room."""
        return self._text([{"ts": _now(), "level": "warning", "event": "dropped", "lines": number}])

    def error(self, error: BaseException, request_id: str) -> None:
        """Say where an error was raised; its message may hold a prompt, so only its type."""
        where = [
            f"{frame.filename}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)[-6:]
        ]
        self.line("error", "error", request_id=request_id, type=type(error).__name__, where=where)


class Printed(io.TextIOBase):
    """Standard error as lines of a log: "note: ..." is the event `note`, others are `stderr`."""

    def __init__(self, log: Log):
        self._log, self._rest = log, ""

    def write(self, text: str) -> int:
        """Lines, or parts of them."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(str.strip, lines):
            event, _, said = line.partition(": ")
            if event not in _LEVELS:
                event, said = "stderr", line
            self._log.line(event, _LEVELS.get(event, "info"), said=said)
        return len(text)


def _plain(line: Any) -> str:
    fields = msgspec.to_builtins(line)
    now, _, event = (fields.pop(name) for name in ("ts", "level", "event"))
    pairs = " ".join(f"{key}={value}" for key, value in fields.items())
    return f"{now[11:23]} {event} {pairs}\n"
