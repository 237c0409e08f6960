"""JSON schemas to regular expressions of their instances.

What is not read is refused by its path, never ignored. Properties come in the order of the schema,
no others are written, and free values nest to a fixed depth.
"""

import json
from collections.abc import Mapping
from typing import Any

from .regex import literal

DEPTH = 2  # of values that the schema leaves free
MOST_NESTED = 32
_WS = r"[ \n\r\t]*"
_CHAR = r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})'
_STRING = f'"{_CHAR}*"'
_INTEGER = r"-?(?:0|[1-9][0-9]*)"
_NUMBER = _INTEGER + r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_SCALARS = {
    "string": _STRING,
    "integer": _INTEGER,
    "number": _NUMBER,
    "boolean": "(?:true|false)",
    "null": "null",
}
_SAID = {  # of a schema, without a bearing on its instances
    *("title", "description", "default", "examples", "$schema", "$id", "$comment", "$anchor"),
    *("$defs", "definitions", "deprecated", "readOnly", "writeOnly"),
}
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
}


def schema_pattern(schema: Any) -> str:
    """The expression of a schema's instances, with any white space between their parts.

    Raises:
        ValueError: It is no schema, or says what is not supported; the path is named.
    """
    return _Schema(schema).value(schema, "$", ())


class _Schema:
    """One schema, whose references are looked up in it."""

    def __init__(self, root: Any):
        self._root = root

    def value(self, schema: Any, path: str, refs: tuple[str, ...]) -> str:
        if path.count(".") + path.count("[") > MOST_NESTED:
            raise _refused(path, f"is nested more than {MOST_NESTED} deep; flatten it")
        if schema is True:
            return _any(DEPTH)
        if not isinstance(schema, Mapping):
            raise _refused(path, "is no schema; give an object or true")
        keys = set(schema) - _SAID
        for name, read in (
            ("$ref", self._ref),
            ("const", lambda one, path, _: _instance(one)),
            ("enum", self._enum),
            ("anyOf", self._any_of),
        ):
            if name in keys:
                beside = sorted(
                    keys - {name, "type"} if name in ("const", "enum") else keys - {name}
                )
                if beside:
                    raise _refused(f"{path}.{beside[0]}", f"beside {name} is not supported")
                return read(schema[name], f"{path}.{name}", refs)
        types = schema.get("type")
        if types is None:
            types = [kind for kind, names in _OF_TYPE.items() if keys & names]
            if not types and keys:
                raise _refused(f"{path}.{min(keys)}", "is not supported; leave it out")
            if not types:
                return _any(DEPTH)
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or not types:
            raise _refused(f"{path}.type", "must be a name or a list of names")
        known = {"type"}.union(*(_OF_TYPE.get(str(kind), set()) for kind in types))
        if keys - known:
            raise _refused(f"{path}.{min(keys - known)}", "is not supported; leave it out")
        return _either([self._of_type(kind, schema, path, refs) for kind in types])

    def _of_type(self, kind: Any, schema: Any, path: str, refs: tuple[str, ...]) -> str:
        if kind == "object":
            return self._object(schema, path, refs)
        if kind == "array":
            return self._array(schema, path, refs)
        if kind == "string":
            least, most = _counts(schema, "minLength", "maxLength", path)
            return f'"{_CHAR}{_times(least, most)}"'
        if not isinstance(kind, str) or kind not in _SCALARS:
            raise _refused(f"{path}.type", f"{kind!r:.60} is no type of JSON")
        return _SCALARS[kind]

    def _object(self, schema: Any, path: str, refs: tuple[str, ...]) -> str:
        properties, more = schema.get("properties"), schema.get("additionalProperties", False)
        required = schema.get("required", [])
        if properties is None and not required and more in (True, False):
            closed = "additionalProperties" in schema and more is False
            return rf"\{{{_WS}\}}" if closed else _any_object(DEPTH)
        if more is not False and more is not True:
            raise _refused(f"{path}.additionalProperties", "is a schema, which is not supported")
        if not isinstance(properties, Mapping):
            raise _refused(f"{path}.properties", "must be an object")
        if not isinstance(required, list) or not all(name in properties for name in required):
            raise _refused(f"{path}.required", "must be names of properties")
        alone = later = ""  # what follows, before and behind a first member
        for name in reversed(properties):
            inner = self.value(properties[name], f"{path}.properties.{name}", refs)
            member = f"{literal(json.dumps(name, ensure_ascii=False))}{_WS}:{_WS}{inner}"
            first, next_ = f"{member}{later}", f"{_WS},{_WS}{member}"
            if name in required:
                alone, later = first, f"{next_}{later}"
            else:
                alone = f"(?:{first}|{alone})" if alone else f"(?:{first})?"
                later = f"(?:{next_})?{later}"
        return rf"\{{{_WS}{alone}{_WS}\}}"

    def _array(self, schema: Any, path: str, refs: tuple[str, ...]) -> str:
        least, most = _counts(schema, "minItems", "maxItems", path)
        items = schema.get("items", True)
        return _list(self.value(items, f"{path}.items", refs), least, most)

    def _enum(self, values: Any, path: str, _: Any) -> str:
        if not isinstance(values, list) or not values:
            raise _refused(path, "must be a list of values")
        return _either([_instance(value) for value in values])

    def _any_of(self, schemas: Any, path: str, refs: tuple[str, ...]) -> str:
        if not isinstance(schemas, list) or not schemas:
            raise _refused(path, "must be a list of schemas")
        return _either([self.value(one, f"{path}[{i}]", refs) for i, one in enumerate(schemas)])

    def _ref(self, ref: Any, path: str, refs: tuple[str, ...]) -> str:
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise _refused(path, f"{ref!r:.60} is not within the schema; write it out")
        if ref in refs:
            raise _refused(
                path, f"{ref!r:.60} refers to itself; write out as many levels as needed"
            )
        found = self._root
        for part in ref[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or part not in found:
                raise _refused(path, f"{ref!r:.60} is not in the schema")
            found = found[part]
        return self.value(found, path, (*refs, ref))


def _refused(path: str, what: str) -> ValueError:
    return ValueError(f"JSON schema: {path[:200]} {what}")


def _counts(schema: Any, low: str, high: str, path: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for name, count in ((low, least), (high, most)):
        if count is not None and (
            isinstance(count, bool) or not isinstance(count, int) or count < 0
        ):
            raise _refused(f"{path}.{name}", "must be a whole number from 0 on")
    if most is not None and most < least:
        raise _refused(f"{path}.{high}", f"is below {low}")
    return least, most


def _times(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _either(patterns: list[str]) -> str:
    return patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})"


def _instance(value: Any) -> str:
    return literal(json.dumps(value, ensure_ascii=False))


def _list(item: str, least: int = 0, most: int | None = None) -> str:
    if most == 0:
        return rf"\[{_WS}\]"
    more = _times(max(least - 1, 0), None if most is None else most - 1)
    items = f"{item}(?:{_WS},{_WS}{item}){more}"
    return rf"\[{_WS}{items}{_WS}\]" if least else rf"\[{_WS}(?:{items})?{_WS}\]"


def _any(depth: int) -> str:
    scalars = [_STRING, _NUMBER, "true", "false", "null"]
    if not depth:
        return _either(scalars)
    return _either([*scalars, _list(_any(depth - 1)), _any_object(depth)])


def _any_object(depth: int) -> str:
    member = f"{_STRING}{_WS}:{_WS}{_any(depth - 1)}"
    return rf"\{{{_WS}(?:{member}(?:{_WS},{_WS}{member})*)?{_WS}\}}"
