"""Values of a JSON file checked against type hints: each error names the field in one line."""

import types
import typing
from collections.abc import Mapping
from typing import Any, cast

from .config.fields import shown

MOST_INT = 2**63


def check_fields(path: str, fields: Any, hints: Mapping[str, Any]) -> None:
    """Raise ValueError unless an object has these fields, of these types.

    Args:
        path: Of the object, for the error.
        hints: Of `Any` nothing but null is taken: what it would be is not in the file.
    """
    if not isinstance(fields, dict):
        raise ValueError(f"{path}={shown(fields)} is no object")
    for name, hint in hints.items():
        if name not in fields:
            raise ValueError(f"{path}.{name} is missing")
        if not _fits(fields[name], hint):
            kind = getattr(hint, "__name__", None) if isinstance(hint, type) else None
            raise ValueError(f"{path}.{name}={shown(fields[name])} is no {kind or hint}")


def _fits(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is None or hint is type(None):
        return value is None
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, one) for one in args)
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            return False
        values: list[Any] = [*value]
        kinds = args if origin is tuple and args[-1] is not ... else args[:1] * len(values)
        return len(kinds) == len(values) and all(map(_fits, values, kinds))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            return False
        held = cast("dict[str, Any]", value)
        return args[1] is Any or all(_fits(one, args[1]) for one in held.values())
    if hint is int:
        return type(value) is int and abs(value) < MOST_INT
    if hint is float:
        return type(value) is float or _fits(value, int)
    return isinstance(value, hint) if isinstance(hint, type) else True
