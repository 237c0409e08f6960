"""Schemas of any draft in one form: keywords of 2020-12, without what says nothing of instances."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OF_TYPE = {
    "object": {
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties"),
    },
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {*BOUNDS},
    "integer": {*BOUNDS},
    "boolean": set(),
    "null": set(),
}
_APPLIED = {  # keywords whose subschemas apply to the same instance
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentRequired"),
    *("dependentSchemas", "unevaluatedProperties", "unevaluatedItems"),
}
READ = {"type", "enum", *_APPLIED}.union(*OF_TYPE.values())
# Keywords of some draft that restrict instances and are not supported.
_NOT_READ = {
    *("contains", "minContains", "maxContains", "$dynamicRef", "$recursiveRef", "disallow"),
}
_SAID = {  # annotations and locations of the standards, which need no note
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$comment"),
    *("$defs", "definitions", "$vocabulary", "contentEncoding", "contentMediaType"),
    *("contentSchema", "discriminator", "example"),
}
_WHOLE = {  # bounds of the integers that are called so
    f"{sign}int{bits}": (0, 2**bits - 1) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}
MOST_DEEP = 128
_SCHEMA = (Mapping, bool)


def refused(path: str, what: str) -> ValueError:
    """The error of a schema, at a place of it."""
    said = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in path[:200])
    return ValueError(f"JSON schema: {said} {what}")


def is_number(value: Any) -> bool:
    """Whether a value is a number of JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


_MEANT = {  # what the value of a keyword must be
    "a text": (lambda value: isinstance(value, str), ("$ref", "pattern", "format")),
    "a whole number from 0 on": (
        _is_count,
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    ),
    "a number": (is_number, BOUNDS),
    "true or false": (lambda value: isinstance(value, bool), ("uniqueItems",)),
    "a list of values": (lambda value: bool(value) and isinstance(value, list), ("enum",)),
    "a list of names": (_is_names, ("required",)),
    "an object": (
        _is_object,
        ("properties", "patternProperties", "dependentSchemas", "dependencies"),
    ),
    "an object of lists of names": (
        lambda value: _is_object(value) and all(map(_is_names, value.values())),
        ("dependentRequired",),
    ),
    "a list of schemas": (
        lambda value: bool(value) and isinstance(value, list),
        ("anyOf", "oneOf", "allOf"),
    ),
    "schemas in a list": (lambda value: isinstance(value, list), ("prefixItems",)),
    "a schema": (
        lambda value: isinstance(value, _SCHEMA),
        (
            *("items", "additionalProperties", "propertyNames", "not", "if", "then", "else"),
            *("unevaluatedProperties", "unevaluatedItems"),
        ),
    ),
}


_OLD = re.compile(r"http://json-schema\.org/draft-0?\d/")


class Document:
    """A schema as a whole: what its references lead to, and which draft it says it is of."""

    def __init__(self, root: Any):
        self.root = root
        self._places: dict[str, Any] = {"": root}
        self._bases: dict[int, str] = {}
        said = root.get("$schema") if isinstance(root, Mapping) else None
        # Siblings of a `$ref` say nothing then. By other names judges take the newest draft.
        self.is_old = isinstance(said, str) and _OLD.match(said) is not None
        _check_depth(root)
        self._find(root, "", False)
        self.name = self._bases.get(id(root), "")

    def _find(self, node: Any, base: str, is_map: bool) -> None:
        """Where the schemas of a value are that others may name."""
        if isinstance(node, list):
            for one in node:
                self._find(one, base, False)
        if not isinstance(node, Mapping):
            return
        if not is_map:
            for name in ("$id", "id"):
                if isinstance(own := node.get(name), str):
                    base = _joined(base, own)
                    self._places.setdefault(base.removesuffix("#"), node)
                    base = urldefrag(base)[0]
            for name in ("$anchor", "$dynamicAnchor"):
                if isinstance(own := node.get(name), str):
                    self._places.setdefault(f"{base}#{own}", node)
            self._bases[id(node)] = base
        for name, one in node.items():
            if is_map or name not in ("enum", "const", "default", "examples", "example"):
                self._find(one, base, not is_map and name in _MAPS)

    def found(self, schema: Mapping[str, Any], path: str) -> tuple[Any, str]:
        """The schema that a `$ref` names, and its name.

        Raises:
            ValueError: It leads to nothing within the document.
        """
        ref = schema["$ref"]
        whole = _joined(self._bases.get(id(schema), ""), ref).removesuffix("#")
        where, _, fragment = whole.partition("#")
        if whole in self._places:
            return self._places[whole], whole
        node = self._places.get(where)
        if node is None or (fragment and not fragment.startswith("/")):
            raise refused(path, f"{ref!r:.60} is no place within the schema; write it out")
        for part in unquote(fragment).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            elif isinstance(node, Mapping) and part in node:
                node = node[part]
            else:
                raise refused(path, f"{ref!r:.60} is not in the schema")
        return node, whole


_MAPS = {
    *("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"),
    "dependencies",
}


def _check_depth(root: Any) -> None:
    level, depth = [root], 0
    while level:
        if depth > MOST_DEEP:
            raise refused("$", f"holds lists and objects more than {MOST_DEEP} deep; flatten it")
        lists = [[*one.values()] if isinstance(one, Mapping) else one for one in level]
        level = [one for each in lists if isinstance(each, list) for one in each]
        depth += 1


def _joined(base: str, ref: str) -> str:
    try:
        return urljoin(base, ref)
    except ValueError:  # no address
        return ref


def normal(schema: Any, path: str, is_old: bool, notes: dict[str, None]) -> dict[str, Any]:
    """A schema in a normal form.

    Args:
        is_old: The draft ignores keywords next to a reference.
        notes: Collects the paths of keywords without effect.

    Raises:
        ValueError: A keyword has an invalid value, or cannot be enforced.
    """
    found = dict(schema)
    if is_old and "$ref" in found:
        found = {"$ref": found["$ref"]}
    for name in ("exclusiveMinimum", "exclusiveMaximum"):  # draft 4
        if isinstance(found.get(name), bool):
            bound = "minimum" if name == "exclusiveMinimum" else "maximum"
            if found.pop(name) and bound in found:
                found[name] = found.pop(bound)
    if isinstance(found.get("required"), bool):  # draft 3: the parent reads it
        found.pop("required")
    if "divisibleBy" in found:
        found["multipleOf"] = found.pop("divisibleBy")
    every = []
    if "extends" in found:
        own = found.pop("extends")
        every += own if isinstance(own, list) else [own]
    if isinstance(found.get("items"), list):
        found["prefixItems"] = found.pop("items")
        if "additionalItems" in found:
            found["items"] = found["additionalItems"]
    found.pop("additionalItems", None)
    if "const" in found:
        every += [{"enum": found.pop("enum")}] if "enum" in found else []
        found["enum"] = [found.pop("const")]
    for what, (is_meant, names) in _MEANT.items():
        for name in names:
            if name in found and not is_meant(found[name]):
                raise refused(f"{path}.{name}", f"must be {what}")
    for name, then in found.pop("dependencies", {}).items():
        then = [then] if isinstance(then, str) else then
        kind = "dependentRequired" if _is_names(then) else "dependentSchemas"
        found[kind] = {**found.get(kind, {}), name: then}
    needed = [
        name
        for name, one in found.get("properties", {}).items()
        if isinstance(one, Mapping) and one.get("required") is True
    ]
    if needed:
        found["required"] = [*found.get("required", []), *needed]
    if found.get("format") in _WHOLE:
        low, high = _WHOLE[found.pop("format")]
        every.append({"minimum": low, "maximum": high})
    types = found.get("type")
    if isinstance(types, list) and any(isinstance(one, Mapping) for one in types):  # draft 3
        every.append({"anyOf": [one if _is_object(one) else {"type": one} for one in types]})
        del found["type"]
    elif types == "any" or (isinstance(types, list) and "any" in types):
        del found["type"]
    if every:
        found["allOf"] = [*found.get("allOf", []), *every]
    return _read(found, path, notes)


def _read(schema: dict[str, Any], path: str, notes: dict[str, None]) -> dict[str, Any]:
    for name in schema:
        if name in _NOT_READ:
            raise refused(f"{path}.{name}", "is not supported; leave it out")
        if name not in READ and name not in _SAID:
            notes[f"{path}.{name}"] = None
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or ("type" in schema and not types):
        raise refused(f"{path}.type", "must be a name or a list of names")
    for kind in types:
        if not isinstance(kind, str) or kind not in OF_TYPE:
            raise refused(f"{path}.type", f"{kind!r:.60} is no type of JSON")
    found = {name: one for name, one in schema.items() if name in READ}
    return found | {"type": types} if types else found
