"""Checks of a strategy's static fields, which are made before anything is compiled."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_one_of(name: str, value: Any, names: Sequence[Any]) -> None:
    """Raise ValueError unless `value` is one of `names`."""
    if value not in names:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(str, names))}; choose one")


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise ValueError unless `value` is a whole number in [least, most]."""
    if not (is_whole(value) and value >= least and (most is None or value <= most)):
        rule = f"of at least {least}" if most is None else f"in [{least}, {most}]"
        raise ValueError(f"{name}={value!r} must be a whole number {rule}; choose one")


def check_number(name: str, value: Any, off: str) -> None:
    """Raise ValueError unless `value` is a finite number of at least 0.

    Args:
        off: What 0 means, for the message.
    """
    if not (isinstance(value, Real) and 0 <= float(value) < math.inf):
        raise ValueError(f"{name}={value!r} must be a number of at least 0; 0 is {off}")
