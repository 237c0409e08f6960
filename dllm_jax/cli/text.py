"""Text for a terminal, where a control character would act instead of being read."""

import re
import sys
from typing import Any

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def count(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown(text: str, tty: bool | None = None) -> str:
    r"""The text with control characters as `\x1b`; as it is where stdout is no terminal."""
    if not (sys.stdout.isatty() if tty is None else tty):
        return text
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def seconds(value: float) -> str:
    """`1.234 s`, `12.34 ms`."""
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def figure(entry: dict[str, Any], digits: int, scale: float = 1.0) -> str:
    """`98.5 [97.4, 99.2]`, of a value and its 95 % interval."""
    value, low, high = (round(scale * v, digits) for v in (entry["value"], *entry["ci95"]))
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
