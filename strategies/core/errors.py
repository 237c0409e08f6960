"""Errors raised by a user's code, as one line that names where."""

import os
import sysconfig
import traceback
from pathlib import Path

_INSTALLED = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OURS = {"dllm_jax", "strategies", "pallas_kernels", "checkpoints_convert"}


def described(error: BaseException) -> str:
    """`Type: message`, with Python's "Did you mean" and the user's line: `(my_strategy.py:12)`."""
    try:
        message = str(error)
    except Exception:  # of a class of the user
        message = ""
    hint = "" if isinstance(error, SyntaxError) else _hint(error, message)
    lines = [line.strip() for line in f"{message}{hint}".splitlines()]
    said = "; ".join(filter(None, lines)) or "no message"
    return f"{type(error).__name__}: {said}{place(error)}"


def place(error: BaseException) -> str:
    """The innermost line of the user's code in a traceback, as ` (file:line)`; "" without one.

    The code of the package, of the standard library and of installed packages is not the user's,
    nor is a caller of the package meant.
    """
    found, is_inside = "", False
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in _OURS:
            is_inside = True
        elif is_inside and not file.startswith(("<", *_INSTALLED)):
            path, here = Path(file), Path.cwd()
            found = f" ({path.relative_to(here) if path.is_relative_to(here) else path}:{line})"
    return found


def _hint(error: BaseException, message: str) -> str:
    """The hint that Python appends to the message in a traceback."""
    printed = traceback.TracebackException.from_exception(error)
    first = next(iter(printed.format_exception_only()), "").rstrip("\n")
    return first.rpartition(message)[2] if message else ""
