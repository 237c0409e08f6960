"""Errors as every route answers them: one object, one line, at most 1 KB.

`wire` and `limits` raise `Refusal`, `app` sends it.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_MESSAGE = 300  # characters; longer ones are cut
MAX_VALUE = 60  # characters of a caller's value in a message
MAX_PARAM = 120

# status -> the type that OpenAI's clients read
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
}
INVALID = "invalid_request_error"


class Refusal(Exception):
    """An answer that is an error object.

    Attributes:
        message: Value, rule, remedy; one line.
        param: Path of the field (`messages[0].content`), None where no field is at fault.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.code = status, code
        self.message = one_line(message)
        self.param = None if param is None else _cut(param, MAX_PARAM)
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        return error_object(self.message, self.status, self.param, self.code)


def unsupported(param: str, message: str) -> Refusal:
    """A field, or a value of it, that is not supported here."""
    return Refusal(message, param=param, code="unsupported_parameter")


def error_object(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = TYPES.get(status, INVALID)
    return {"error": {"message": one_line(message), "type": kind, "param": param, "code": code}}


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def anthropic_error(message: str, status: int, request_id: str) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = _ANTHROPIC.get(status, "invalid_request_error")
    error = {"type": kind, "message": one_line(message)}
    return {"type": "error", "error": error, "request_id": request_id}


def shown(value: Any) -> str:
    """A caller's value as JSON, cut short."""
    try:
        text = msgspec.json.encode(value).decode("utf-8", "replace")
    except (TypeError, ValueError, RecursionError, OverflowError):
        text = type(value).__name__
    return _cut(text, MAX_VALUE)


def one_line(text: str) -> str:
    """The text without line breaks and control characters, cut to `MAX_MESSAGE`."""
    plain = "".join(char if char.isprintable() else " " for char in text)
    return _cut(" ".join(plain.split()), MAX_MESSAGE)


def not_json(error: BaseException) -> Refusal:
    """A body that is no JSON."""
    if isinstance(error, RecursionError):
        why = "it is nested too deeply"
    elif isinstance(error, UnicodeDecodeError):
        why = "it is not UTF-8"
    else:
        why = str(error)
    return Refusal(f"the body is not valid JSON: {why}; send one JSON object", code="invalid_json")


_PATH = re.compile(r" - at `([^`]*)`$")
_FIELD = re.compile(r"(missing required|unknown) field `([^`]*)`")


def not_valid(error: msgspec.ValidationError) -> Refusal:
    """A field of the wrong type or out of range, by its path."""
    text = str(error)
    path = _PATH.search(text)
    message = text[: path.start()] if path else text
    param = "" if path is None else path.group(1).removeprefix("$").lstrip(".")
    code = "invalid_value"
    if found := _FIELD.search(message):
        param = f"{param}.{found.group(2)}".lstrip(".")
        is_unknown = found.group(1) == "unknown"
        code = "unknown_parameter" if is_unknown else "invalid_value"
        rule = "leave it out" if is_unknown else "the field is required; give it"
    else:
        rule = f"{message[:1].lower()}{message[1:]}"
    param = re.sub(r"\[\.\.\.\]", "[*]", param) or None
    return Refusal(f"{param or 'the body'}: {rule}", param=param, code=code)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
