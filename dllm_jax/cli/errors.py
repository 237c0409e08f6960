"""Errors of the command line, each as one line."""

import sys
from collections.abc import Callable
from typing import Any

from dllm_jax.engine.layout import DeviceFailure

MOST_BYTES = 1000  # of an error line


class UsageError(ValueError):
    """A command line that is not valid: exit status 2."""


def one_line(error: BaseException) -> str:
    """The message of an exception as one line, with its type unless the message is our own."""
    if isinstance(error, UnicodeEncodeError) and error.encoding != "utf-8":  # a narrow terminal
        return (
            f"{error.object[error.start]!r} cannot be written as {error.encoding}; "
            "set PYTHONIOENCODING=utf-8, or a locale with UTF-8"
        )
    try:
        said = str(error)
    except Exception:  # of a class of the user, or a value of one
        said = "its message cannot be shown"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if isinstance(error, DeviceFailure):
        lines = lines[:1]  # a table of allocations follows
    text = "; ".join(lines)
    plain = isinstance(error, ValueError | OSError | NotImplementedError | DeviceFailure)
    said, place = _of_a_user(error)
    if plain and text:
        return text + place
    if place:
        return said
    return f"{type(error).__name__}: {text or 'no message'} (--debug shows where)"


def _of_a_user(error: BaseException) -> tuple[str, str]:
    """Message and place of an exception in a strategy's file; empty for one in our own code."""
    if "dllm_jax.strategies" not in sys.modules:  # it imports JAX
        return "", ""
    from dllm_jax.strategies.core import errors

    return errors.described(error), errors.place(error)


def from_user(what: str, spec: str, load: Callable[[str], Any]) -> Any:
    """`load(spec)`, which runs code of the user.

    Raises:
        UsageError: It raises, or ends the program.
    """
    from dllm_jax.strategies.core.errors import described

    try:
        return load(spec)
    except ValueError as error:
        raise UsageError(one_line(error)) from error
    except Exception as error:
        raise UsageError(
            f"{what}={spec!r} cannot be used ({described(error)}); mend its code"
        ) from error
    except SystemExit as stop:
        raise UsageError(
            f"{what}={spec!r} ends the program while it is loaded ({stop.code}); "
            "take the call of exit out of its file"
        ) from stop


def fitted(message: str) -> str:
    """A message of which `error: ...` fits `MOST_BYTES`: a longer one loses its middle."""
    data, room = message.encode(errors="replace"), MOST_BYTES - len("error: \n")
    if len(data) <= room:
        return message
    half = (room - len(" ... ")) // 2
    begin, end = (part.decode(errors="ignore") for part in (data[:half], data[-half:]))
    return f"{begin} ... {end}"
