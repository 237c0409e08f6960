"""Sets of free values: each item is of another group, so that no two items are equal.

An automaton does not remember values. Groups that share no value need no memory: texts by a letter,
numbers by their size, objects and arrays by one of their parts.
"""

import contextlib
from typing import Any

from .logic import Logic, NoInstance
from .parts import Said, Way, names_of, of_item, of_member, written_kinds

_LETTERS, _DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789"
_SIZES = (10, 100, 1000)
_MORE_SIZES = (*range(11), *(10**power for power in range(2, 16)))
_SHARES = (0.25, 0.5, 0.75)


def groups(logic: Logic, saids: list[Said], count: int, is_other: bool = False) -> list[Said]:
    """Schemas of which no value is an instance of two.

    Args:
        count: Of groups, about: kinds share them.
        is_other: They differ by other letters and sizes, where the first ones do not tell much.
    """
    kinds: dict[str, Way] = {}
    for way in logic.ways(saids):
        for kind in written_kinds(way):
            kinds.setdefault("number" if kind == "integer" else kind, way)
    share = -(-count // max(len(kinds), 1))
    return [
        Said({"type": kind} | group, saids[0].path)
        for kind, way in kinds.items()
        for group in _of_kind(logic, kind, way, share, is_other)
    ]


def _of_kind(logic: Logic, kind: str, way: Way, count: int, is_other: bool) -> list[dict[str, Any]]:
    if kind == "boolean":
        return [{"enum": [False]}, {"enum": [True]}]
    if count < 2 or kind == "null":
        return [{}]
    if kind == "string":
        # Dates, addresses and what has a pattern often begin alike.
        is_alike = any({"format", "pattern"} & said.schema.keys() for said in way)
        return _texts(min(count, len(_LETTERS)), is_other is not is_alike)
    if kind == "number":
        sizes = _SHARES if is_other else _SIZES if count <= len(_SIZES) + 1 else _MORE_SIZES
        return _numbers(sizes[: count - 1])
    if kind == "array":
        saids = [] if any(said.schema.get("uniqueItems") for said in way) else of_item(way, 0)
        inner = groups(logic, saids, count, is_other) if saids else []
        return [{"prefixItems": [one.schema], "minItems": 1} for one in inner] or [{}]
    for name in names_of(way, "required") | names_of(way, "properties"):
        saids, inner = of_member(way, name), []
        with contextlib.suppress(NoInstance):
            inner = groups(logic, saids, count, is_other) if saids else []
        if len(inner) > 1:
            return [{"properties": {name: one.schema}, "required": [name]} for one in inner]
    return [{}]


def _texts(count: int, is_last: bool) -> list[dict[str, Any]]:
    parts = [_part(_LETTERS, i, count) + _part(_DIGITS, i, count) for i in range(count - 1)]
    classes = [f"[{one}{one.upper()}]" for one in parts]
    known = "".join(parts)
    classes.append(f"[^{known}{known.upper()}]")
    return [{"pattern": f"{one}$" if is_last else f"^{one}"} for one in classes]


def _part(of: str, place: int, count: int) -> str:
    return of[len(of) * place // count : len(of) * (place + 1) // count]


def _numbers(cuts: tuple[float, ...]) -> list[dict[str, Any]]:
    lows = [{}, *({"minimum": cut} for cut in cuts)]
    highs = [*({"exclusiveMaximum": cut} for cut in cuts), {}]
    return [low | high for low, high in zip(lows, highs, strict=True)]
