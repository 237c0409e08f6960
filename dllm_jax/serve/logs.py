"""One line for each finished request: JSON, or the same fields as text. No prompt, no answer."""

import asyncio
import functools
import random
import re
import sys
import time
import traceback
from typing import Any, TextIO

import msgspec

_ENCODER = msgspec.json.Encoder()
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TOGETHER_S = 0.02
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def request_id(headers: dict[str, str]) -> str:
    """The caller's `X-Request-Id` if it is harmless, else a new one."""
    said = headers.get("x-request-id", "")
    return said if said and _REQUEST_ID.fullmatch(said) else random_id()


def random_id() -> str:
    """32 hexadecimal digits; not secret. `os.urandom` costs more than a log line."""
    return f"{random.getrandbits(128):032x}"


def traceparent(headers: dict[str, str]) -> str | None:
    """The caller's `traceparent` if it is one."""
    said = headers.get("traceparent", "")
    return said if said and _TRACEPARENT.fullmatch(said) else None


@functools.lru_cache(maxsize=2)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


class Log:
    """Lines on stderr.

    Args:
        form: "json", "text" or "none".
    """

    def __init__(self, form: str = "text", to: TextIO | None = None):
        self._form, self._to = form, to
        self._lines: list[str] = []

    def line(self, event: str, level: str = "info", **fields: Any) -> None:
        """Write a line; fields that are None are left out.

        Those about requests wait a moment, to be written with others.
        """
        if self._form == "none" and level == "info":
            return
        seconds, milliseconds = divmod(time.time_ns() // 1_000_000, 1000)
        now = f"{_second(seconds)}.{milliseconds:03}Z"
        said = {key: value for key, value in fields.items() if value is not None}
        if self._form == "json":
            text = _ENCODER.encode({"ts": now, "level": level, "event": event, **said}).decode()
        else:
            pairs = " ".join(f"{key}={value}" for key, value in said.items())
            text = f"{now[11:23]} {event} {pairs}"
        self._lines.append(f"{text}\n")
        if event != "request":
            self.flush()
        elif len(self._lines) == 1:
            asyncio.get_running_loop().call_later(_TOGETHER_S, self.flush)

    def flush(self) -> None:
        """Write the lines that wait."""
        to, lines = self._to or sys.stderr, self._lines
        self._lines = []
        to.write("".join(lines))
        to.flush()

    def error(self, error: BaseException, request_id: str) -> None:
        """Say where an error was raised; its message may hold a prompt, so only its type."""
        where = [
            f"{frame.filename}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)[-6:]
        ]
        self.line("error", "error", request_id=request_id, type=type(error).__name__, where=where)
