"""One line for each finished request: JSON, or the same fields as text. No prompt, no answer."""

import datetime
import re
import sys
import traceback
import uuid
from typing import Any, TextIO

import msgspec

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def request_id(headers: dict[str, str]) -> str:
    """The caller's `X-Request-Id` if it is harmless, else a new one."""
    said = headers.get("x-request-id", "")
    return said if _REQUEST_ID.fullmatch(said) else uuid.uuid4().hex


def traceparent(headers: dict[str, str]) -> str | None:
    """The caller's `traceparent` if it is one."""
    said = headers.get("traceparent", "")
    return said if _TRACEPARENT.fullmatch(said) else None


class Log:
    """Lines on stderr.

    Args:
        form: "json", "text" or "none".
    """

    def __init__(self, form: str = "text", to: TextIO | None = None):
        self._form, self._to = form, to

    def line(self, event: str, level: str = "info", **fields: Any) -> None:
        """Write a line; fields that are None are left out."""
        if self._form == "none" and level == "info":
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        said = {key: value for key, value in fields.items() if value is not None}
        record = {"ts": now, "level": level, "event": event, **said}
        if self._form == "json":
            text = msgspec.json.encode(record).decode()
        else:
            pairs = " ".join(f"{key}={value}" for key, value in said.items())
            text = f"{now[11:23]} {event} {pairs}"
        print(text, file=self._to or sys.stderr, flush=True)

    def error(self, error: BaseException, request_id: str) -> None:
        """Say where an error was raised; its message may hold a prompt, so only its type."""
        where = [
            f"{frame.filename}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)[-6:]
        ]
        self.line("error", "error", request_id=request_id, type=type(error).__name__, where=where)
