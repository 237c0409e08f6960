"""JSON schemas to trees of the texts of their instances.

What is not read is refused by its path, never ignored. A tree may hold to less than its schema
allows, never to more: properties come in the order of the schema, no others are written beside
them, and free values nest to a fixed depth.
"""

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from .formats import FORMATS
from .limits import Budget
from .numerals import numeral_pattern
from .regex import accepts, byte_automaton, share_a_text
from .trees import (
    Tree,
    either,
    in_json,
    lengths,
    members,
    parsed,
    repeated,
    repeats_one,
    searched,
    text,
)

DEPTH = 2  # of values that the schema leaves free
MOST_NESTED = 32
MOST_READ = 4096  # subschemas, each as often as it is referred to
MOST_DIGITS = 40
_ESCAPE = r'\\["\\/bfnrt]'
# Halves of surrogate pairs are no characters. Bounded strings do without these escapes: they would
# double the states of each character.
_UNICODE = r"\\u(?:[0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"
_PLAIN = r'[^"\\\x00-\x1f]'
_CHAR, _COUNTED_CHAR = f"(?:{_PLAIN}|{_ESCAPE}|{_UNICODE})", f"(?:{_PLAIN}|{_ESCAPE})"
_INTEGER = r"-?(?:0|[1-9][0-9]*)"
_STRING = parsed(f'"{_CHAR}*"')
_SCALARS = {
    "boolean": parsed("true|false"),
    "null": text("null"),
    "integer": parsed(_INTEGER),
    "number": parsed(_INTEGER + r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"),
}
_SAID = {  # of a schema, without a bearing on its instances
    *("title", "description", "default", "examples", "$schema", "$id", "$comment", "$anchor"),
    *("$defs", "definitions", "deprecated", "readOnly", "writeOnly", "discriminator"),
}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_TYPE = {
    "object": {
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties"),
    },
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {*_BOUNDS},
    "integer": {*_BOUNDS},
    "boolean": set(),
    "null": set(),
}
_KINDS = {
    "object": Mapping,
    "array": list,
    "string": str,
    "number": int | float,
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def schema_tree(schema: Any, budget: Budget, compact: bool = False) -> Tree:
    """The tree of a schema's instances.

    Args:
        compact: No white space between their parts; else any.

    Raises:
        ValueError: It is no schema, or says what is not supported; the path is named.
    """
    return _Schema(schema, budget, compact).value(schema, "$", ())


class _Schema:
    """One schema, whose references are looked up in it."""

    def __init__(self, root: Any, budget: Budget, compact: bool):
        self._root, self._budget, self._num_read = root, budget, 0
        self._space = [] if compact else parsed(r"[ \n\r\t]*")
        self._comma = [*self._space, *text(","), *self._space]
        self._colon = [*self._space, *text(":"), *self._space]

    def value(self, schema: Any, path: str, refs: tuple[str, ...]) -> Tree:
        self._budget.check()
        self._num_read += 1
        if path.count(".") + path.count("[") > MOST_NESTED:
            raise _refused(path, f"is nested more than {MOST_NESTED} deep; flatten it")
        if self._num_read > MOST_READ:
            raise _refused(path, f"is past the first {MOST_READ} subschemas; refer to fewer")
        if schema is True:
            return self._any(DEPTH)
        if not isinstance(schema, Mapping):
            raise _refused(path, "is no schema that has instances; give an object or true")
        _check_kinds(schema, path)
        keys = set(schema) - _SAID
        for name in ("const", "enum"):
            if name in keys:
                return self._listed(name, schema, path, refs)
        for name, read in (
            ("$ref", self._ref),
            ("anyOf", self._any_of),
            ("oneOf", self._one_of),
            ("allOf", self._all_of),
        ):
            if name in keys:
                beside = sorted(map(str, keys - {name}))
                if beside:
                    raise _refused(f"{path}.{beside[0]}", f"beside {name} is not supported")
                return read(schema[name], f"{path}.{name}", refs)
        return either([self._of_type(kind, schema, path, refs) for kind in _types(schema, path)])

    def _of_type(self, kind: str, schema: Any, path: str, refs: tuple[str, ...]) -> Tree:
        if kind == "object":
            return self._object(schema, path, refs)
        if kind == "array":
            return self._array(schema, path, refs)
        if kind == "string":
            return [*text('"'), *_string(schema, path), *text('"')]
        if kind in ("number", "integer") and any(name in schema for name in _BOUNDS):
            return parsed(_bounded(kind == "integer", schema, path))
        return _SCALARS[kind]

    # --- objects and arrays ---------------------------------------------------------------------

    def _object(self, schema: Any, path: str, refs: tuple[str, ...]) -> Tree:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        more = schema.get("additionalProperties", True)
        names = [*properties, *(name for name in required if name not in properties)]
        for name in ("patternProperties", "propertyNames", "minProperties", "maxProperties"):
            if names and name in schema:
                raise _refused(f"{path}.{name}", "beside properties is not supported")
        if not names:
            return self._map(schema, more, path, refs)
        if more is False and len(names) > len(properties):
            missing = names[len(properties)]
            raise _refused(f"{path}.required", f"names {missing!r:.60}, which is no property")
        every = []
        for name in names:
            own, inner = properties.get(name, more), f"{path}.properties.{name}"
            if own is False:
                if name in required:
                    raise _refused(f"{path}.required", f"names {name!r:.60}, which has no value")
                continue
            every.append((self._member(_instance(name), own, inner, refs), name in required))
        return self._braced("{}", members(every, self._comma))

    def _map(self, schema: Any, more: Any, path: str, refs: tuple[str, ...]) -> Tree:
        """An object of any names, whose values are of one schema."""
        least, most = _counts(schema, "minProperties", "maxProperties", path)
        if least > 1:  # a name may be written twice
            raise _refused(f"{path}.minProperties", "above 1 is not supported")
        key, under = _STRING, "additionalProperties"
        patterns = schema.get("patternProperties", {})
        if patterns:
            if len(patterns) > 1 or more is not False:
                raise _refused(
                    f"{path}.patternProperties",
                    "is supported with one pattern and additionalProperties false",
                )
            if "propertyNames" in schema:
                raise _refused(f"{path}.propertyNames", "beside patternProperties is not supported")
            ((pattern, more),) = patterns.items()
            under = "patternProperties"
            key = [*text('"'), *_found(pattern, f"{path}.{under}"), *text('"')]
        elif "propertyNames" in schema:
            names = schema["propertyNames"]
            if isinstance(names, Mapping) and not {"type", "enum", "const", "$ref"} & set(names):
                names = {**names, "type": "string"}
            key = self.value(names, f"{path}.propertyNames", refs)
            if not _is_string(key):
                raise _refused(f"{path}.propertyNames", "must be of strings alone")
        if more is False or most == 0:
            if least:
                raise _refused(f"{path}.minProperties", "is above what is allowed")
            return self._braced("{}", [])
        if more is True and key is _STRING and most is None and not least:
            return self._any_object(DEPTH)
        member = self._member(key, more, f"{path}.{under}", refs)
        return self._braced("{}", self._several(member, least, most))

    def _member(self, key: Tree, schema: Any, path: str, refs: tuple[str, ...]) -> Tree:
        return [*key, *self._colon, *self.value(schema, path, refs)]

    def _array(self, schema: Any, path: str, refs: tuple[str, ...]) -> Tree:
        least, most = _counts(schema, "minItems", "maxItems", path)
        if schema.get("uniqueItems", False) is not False:
            raise _refused(f"{path}.uniqueItems", "is not supported; leave it out")
        first, items = schema.get("prefixItems", []), schema.get("items", True)
        if items is False:
            most = len(first) if most is None else min(most, len(first))
        if most is not None and most < least:
            raise _refused(f"{path}.minItems", f"is above the {most} items that are allowed")
        first = first[:most]
        every = [
            (self.value(one, f"{path}.prefixItems[{i}]", refs), i < least)
            for i, one in enumerate(first)
        ]
        if not first:
            return self._braced("[]", self._several_of(items, least, most, path, refs))
        if most is None or most > len(first):
            left = None if most is None else most - len(first)
            few = max(least - len(first), 0)
            rest = self._several_of(items, max(few, 1), left, path, refs)
            every.append((rest, few > 0))
        # An item stands only where all before it do.
        tree: Tree = []
        for place, (item, is_required) in reversed([*enumerate(every)]):
            tree = [*(self._comma if place else []), *item, *tree]
            tree = tree if is_required else repeated(tree, 0, 1)
        return self._braced("[]", tree)

    def _several_of(
        self, items: Any, least: int, most: int | None, path: str, refs: tuple[str, ...]
    ) -> Tree:
        if items is False or most == 0:
            return []
        return self._several(self.value(items, f"{path}.items", refs), least, most)

    def _several(self, one: Tree, least: int = 0, most: int | None = None) -> Tree:
        """Several of one kind, with commas between them."""
        if most == 0:
            return []
        more = repeated([*self._comma, *one], max(least - 1, 0), None if most is None else most - 1)
        return [*one, *more] if least else repeated([*one, *more], 0, 1)

    def _braced(self, braces: str, inner: Tree) -> Tree:
        behind = self._space if inner else []
        return [*text(braces[0]), *self._space, *inner, *behind, *text(braces[1])]

    def _any(self, depth: int) -> Tree:
        scalars = [_STRING, *(_SCALARS[kind] for kind in ("number", "boolean", "null"))]
        if not depth:
            return either(scalars)
        items = self._braced("[]", self._several(self._any(depth - 1)))
        return either([*scalars, items, self._any_object(depth)])

    def _any_object(self, depth: int) -> Tree:
        member = [*_STRING, *self._colon, *self._any(depth - 1)]
        return self._braced("{}", self._several(member))

    # --- one of several -------------------------------------------------------------------------

    def _listed(self, name: str, schema: Any, path: str, refs: tuple[str, ...]) -> Tree:
        """Values that are listed and that fit what is said beside them."""
        values = [schema["const"]] if name == "const" else schema["enum"]
        rest = {key: one for key, one in schema.items() if key != name}
        if set(rest) - _SAID == {"type"}:
            kinds = _types(rest, path)
            values = [one for one in values if any(_is_kind(one, kind) for kind in kinds)]
        elif set(rest) - _SAID:
            fitting = byte_automaton(self.value(rest, path, refs), self._budget)
            said = [json.dumps(one, ensure_ascii=False) for one in values]
            pairs = zip(values, said, strict=True)
            values = [one for one, text in pairs if accepts(fitting, text.encode())]
        if not values:
            raise _refused(f"{path}.{name}", "has no value that fits what stands beside it")
        return either([self._value(one, f"{path}.{name}", 0) for one in values])

    def _value(self, value: Any, path: str, depth: int) -> Tree:
        """A value as it stands, with white space between its parts."""
        self._budget.check()
        if depth > MOST_NESTED:
            raise _refused(path, f"is nested more than {MOST_NESTED} deep; flatten it")
        if isinstance(value, Mapping):
            every = [
                ([*_instance(key), *self._colon, *self._value(one, path, depth + 1)], True)
                for key, one in value.items()
            ]
            return self._braced("{}", members(every, self._comma) if every else [])
        if isinstance(value, list):
            each = [(self._value(one, path, depth + 1), True) for one in value]
            return self._braced("[]", members(each, self._comma) if each else [])
        if isinstance(value, float) and not math.isfinite(value):
            raise _refused(path, f"{value} is no value of JSON")
        return _instance(value)

    def _any_of(self, schemas: Any, path: str, refs: tuple[str, ...]) -> Tree:
        return either(self._every(schemas, path, refs))

    def _one_of(self, schemas: Any, path: str, refs: tuple[str, ...]) -> Tree:
        """Several of which no two share an instance: of others, instances of two are none."""
        trees = self._every(schemas, path, refs)
        automata = [byte_automaton(tree, self._budget) for tree in trees] if len(trees) > 1 else []
        for i, one in enumerate(automata):
            for j in range(i):
                if share_a_text(one, automata[j], self._budget):
                    raise _refused(
                        f"{path}[{i}]",
                        f"shares instances with [{j}]; use anyOf, or tell them apart",
                    )
        return either(trees)

    def _all_of(self, schemas: Any, path: str, refs: tuple[str, ...]) -> Tree:
        if isinstance(schemas, list) and len(schemas) > 1:
            raise _refused(path, "of several schemas is not supported; write them as one")
        return self._every(schemas, path, refs)[0]

    def _every(self, schemas: Any, path: str, refs: tuple[str, ...]) -> list[Tree]:
        return [self.value(one, f"{path}[{i}]", refs) for i, one in enumerate(schemas)]

    def _ref(self, ref: Any, path: str, refs: tuple[str, ...]) -> Tree:
        if not (ref == "#" or ref.startswith("#/")):
            raise _refused(path, f"{ref!r:.60} is no path within the schema; write it out")
        if ref in refs:
            raise _refused(
                path, f"{ref!r:.60} refers to itself; write out as many levels as needed"
            )
        found = self._root
        for part in ref.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, Mapping) and part in found:
                found = found[part]
            else:
                raise _refused(path, f"{ref!r:.60} is not in the schema")
        return self.value(found, path, (*refs, ref))


# --- strings and numbers -----------------------------------------------------------------------


def _string(schema: Any, path: str) -> Tree:
    """What stands between the quotes."""
    least, most = _counts(schema, "minLength", "maxLength", path)
    kinds = [name for name in ("pattern", "format") if name in schema]
    if len(kinds) > 1:
        raise _refused(f"{path}.format", "beside pattern is not supported")
    if not kinds:
        char = _CHAR if most is None and least < 2 else _COUNTED_CHAR
        return repeated(parsed(char), least, most)
    said = schema[kinds[0]]
    if kinds == ["format"]:
        if said not in FORMATS:
            raise _refused(
                f"{path}.format", f"{said!r:.60} is not one of {', '.join(FORMATS)}; leave it out"
            )
        tree = parsed(FORMATS[said])
    else:
        tree = _searched(said, f"{path}.pattern")
    if repeats := repeats_one(tree):
        one, few, many = repeats
        most = many if most is None else most if many is None else min(most, many)
        return in_json(repeated(one, max(least, few), most))
    few, many = lengths(tree)
    if few < least or (most is not None and (many is None or many > most)):
        bound = "minLength" if few < least else "maxLength"
        raise _refused(
            f"{path}.{bound}", f"beside this {kinds[0]} is not supported; bound it in the pattern"
        )
    return in_json(tree)


def _searched(pattern: Any, path: str) -> Tree:
    try:
        return searched(pattern)
    except ValueError as error:
        raise _refused(path, str(error)) from None


def _found(pattern: Any, path: str) -> Tree:
    return in_json(_searched(pattern, path))


def _bounded(is_whole: bool, schema: Any, path: str) -> str:
    """The expression of numbers between bounds."""
    bounds: dict[str, Decimal] = {}
    for name in _BOUNDS:
        if name not in schema:
            continue
        bounds[name] = Decimal(str(schema[name]))
        if len(format(bounds[name], "f")) > MOST_DIGITS:
            raise _refused(f"{path}.{name}", f"has more than {MOST_DIGITS} digits")
    step = bounds.pop("multipleOf", None)
    if step is not None and step != 1:
        raise _refused(f"{path}.multipleOf", "is supported for 1 alone; leave it out")
    low = max(
        ((bounds[name], is_out) for name, is_out in _LOW if name in bounds), default=(None, False)
    )
    high = min(
        ((bounds[name], not is_out) for name, is_out in _HIGH if name in bounds),
        default=(None, True),
    )
    is_whole = is_whole or step is not None
    found = numeral_pattern(low[0], high[0], low[1], not high[1], is_whole)
    if found is None:
        raise _refused(path, "has bounds with no number between them")
    return found


_LOW = (("minimum", False), ("exclusiveMinimum", True))
_HIGH = (("maximum", False), ("exclusiveMaximum", True))


# --- small things ------------------------------------------------------------------------------


def _refused(path: str, what: str) -> ValueError:
    said = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in path[:200])
    return ValueError(f"JSON schema: {said} {what}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_MEANT = {  # what the value of a keyword must be
    "a text": (lambda value: isinstance(value, str), ("$ref", "pattern", "format")),
    "a whole number from 0 on": (
        _is_count,
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    ),
    "a number": (_is_number, _BOUNDS),
    "true or false": (lambda value: isinstance(value, bool), ("uniqueItems",)),
    "a list of values": (lambda value: bool(value) and isinstance(value, list), ("enum",)),
    "a list of names": (_is_list_of_names, ("required",)),
    "an object of schemas": (
        lambda value: isinstance(value, Mapping),
        ("properties", "patternProperties"),
    ),
    "a list of schemas": (
        lambda value: bool(value) and isinstance(value, list),
        ("anyOf", "oneOf", "allOf"),
    ),
    "schemas in a list": (lambda value: isinstance(value, list), ("prefixItems",)),
    "a schema": (
        lambda value: isinstance(value, Mapping | bool),
        ("items", "additionalProperties", "propertyNames"),
    ),
}


def _check_kinds(schema: Mapping[str, Any], path: str) -> None:
    for what, (is_meant, names) in _MEANT.items():
        for name in names:
            if name in schema and not is_meant(schema[name]):
                raise _refused(f"{path}.{name}", f"must be {what}")


def _types(schema: Any, path: str) -> list[str]:
    """The types that a schema names, or that its keywords are about."""
    keys, types = set(schema) - _SAID, schema.get("type")
    if types is None:
        types = [kind for kind, names in _OF_TYPE.items() if keys & names]
        if "number" in types:
            types.remove("integer")
        if not types and keys:
            raise _refused(f"{path}.{min(map(str, keys))}", "is not supported; leave it out")
        types = types or ["string", "number", "boolean", "null", "array", "object"]
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not types:
        raise _refused(f"{path}.type", "must be a name or a list of names")
    for kind in types:
        if not isinstance(kind, str) or kind not in _OF_TYPE:
            raise _refused(f"{path}.type", f"{kind!r:.60} is no type of JSON")
    known = {"type"}.union(*(_OF_TYPE[kind] for kind in types))
    unknown = sorted(map(str, keys - known))
    if unknown:
        raise _refused(f"{path}.{unknown[0]}", "is not supported; leave it out")
    return types


def _is_kind(value: Any, kind: str) -> bool:
    """Whether a value is of a type of JSON."""
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS[kind])


def _counts(schema: Any, low: str, high: str, path: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    least, most = int(least), None if most is None else int(most)
    if most is not None and most < least:
        raise _refused(f"{path}.{high}", f"is below {low}")
    return least, most


def _instance(value: Any) -> Tree:
    return text(json.dumps(value, ensure_ascii=False))


def _is_string(tree: Tree) -> bool:
    """Whether all texts of a tree begin as strings do."""
    if not tree:
        return False
    value = tree[0][1]
    if isinstance(value, tuple) and len(value) == 2 and value[0] is None:  # one of several
        return all(_is_string(list(one)) for one in value[1])
    return tree[:1] == text('"')
