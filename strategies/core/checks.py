"""Checks of a strategy's static fields, made before anything is compiled."""

import math
import reprlib
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxdict = 20


def short_repr(value: Any) -> str:
    """A value as an error names it: its `repr` cut short, or its type where that fails."""
    try:
        text = _SHORT.repr(value).replace("\n", " ")
    except Exception:  # a number of too many digits
        return f"of type {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:98]} ... {text[-97:]}"


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_one_of(name: str, value: Any, names: Sequence[Any]) -> None:
    """Raise ValueError unless `value` is one of `names`."""
    if value not in names:
        raise ValueError(
            f"{name}={short_repr(value)} is not one of {', '.join(map(str, names))}; choose one"
        )


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise ValueError unless `value` is a whole number in [least, most]."""
    if not (is_whole(value) and value >= least and (most is None or value <= most)):
        rule = f"of at least {least}" if most is None else f"in [{least}, {most}]"
        raise ValueError(f"{name}={short_repr(value)} must be a whole number {rule}; choose one")


def check_number(name: str, value: Any, off: str) -> None:
    """Raise ValueError unless `value` is a finite number of at least 0.

    Args:
        off: What 0 means, for the message.
    """
    if not (isinstance(value, Real) and 0 <= float(value) < math.inf):
        raise ValueError(f"{name}={short_repr(value)} must be a number of at least 0; 0 is {off}")
