"""Plain schemas and what they say of a value and of its parts."""

import itertools
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from .drafts import OF_TYPE, is_number, refused
from .limits import Budget
from .patterns import searched
from .regex import NoText, accepts, byte_automaton
from .strings import bounds_of

_KINDS = ("string", "number", "integer", "boolean", "null", "array", "object")


class Said(NamedTuple):
    """A schema, where it stands, and the references that led there."""

    schema: Any
    path: str
    refs: tuple[str, ...] = ()

    def under(self, name: str, schema: Any) -> "Said":
        """A schema within."""
        return Said(schema, f"{self.path}.{name}", self.refs)


Way = list[Said]  # plain schemas that hold together: of types, values and their parts


def kinds_of(way: Way) -> list[str]:
    """The JSON types that an instance of these schemas may have."""
    found = [
        kind
        for kind in _KINDS
        if all(
            kind in types or (kind == "integer" and "number" in types)
            for types in (said.schema.get("type", _KINDS) for said in way)
        )
    ]
    return [kind for kind in found if kind != "integer" or "number" not in found]


def written_kinds(way: Way) -> list[str]:
    """The types that are written: if no type is named, those that the keywords apply to."""
    kinds, keys = kinds_of(way), {key for said in way for key in said.schema}
    about = [kind for kind in kinds if OF_TYPE[kind] & keys]
    return about if "type" not in keys and about else kinds


def of_member(way: Way, name: str) -> list[Said]:
    """The schemas that apply to the value of a name in an object."""
    found = []
    for said in way:
        schema, own = said.schema, []
        if name in schema.get("properties", {}):
            own.append(said.under(f"properties.{name}", schema["properties"][name]))
        for pattern, one in schema.get("patternProperties", {}).items():
            if _matches(pattern, name, f"{said.path}.patternProperties"):
                own.append(said.under(f"patternProperties.{pattern}", one))
        if not own and "additionalProperties" in schema:
            own.append(said.under("additionalProperties", schema["additionalProperties"]))
        found += own
    return found


def of_item(way: Way, place: int) -> list[Said]:
    """The schemas that apply to an item of an array."""
    found = []
    for said in way:
        first = said.schema.get("prefixItems", [])
        if place < len(first):
            found.append(said.under(f"prefixItems[{place}]", first[place]))
        elif "items" in said.schema:
            found.append(said.under("items", said.schema["items"]))
    return found


def names_of(way: Way, keyword: str) -> dict[str, None]:
    """The names under a keyword, in their order."""
    return {name: None for said in way for name in said.schema.get(keyword, [])}


def listed_of(way: Way) -> list[Any] | None:
    """The values that a way lists; None where it lists none."""
    return next((said.schema["enum"] for said in way if "enum" in said.schema), None)


def is_kind(value: Any, kind: str) -> bool:
    """Whether a value is of a type of JSON."""
    if kind in ("number", "integer"):
        return is_number(value) and (kind == "number" or value == int(value))
    of = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return isinstance(value, of[kind])


def same(a: Any, b: Any) -> bool:
    """Whether two values of JSON are equal."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def _matches(pattern: str, text: str, path: str, budget: Budget | None = None) -> bool:
    try:
        return accepts(byte_automaton(searched(pattern), budget or Budget()), text.encode())
    except NoText:
        return False
    except ValueError as error:
        raise refused(path, str(error)) from None


def fits_plainly(value: Any, schema: Mapping[str, Any], path: str, budget: Budget) -> bool:
    """By what is said of the value alone, not of its parts."""
    if "type" in schema and not any(is_kind(value, kind) for kind in schema["type"]):
        return False
    if "enum" in schema and not any(same(value, one) for one in schema["enum"]):
        return False
    if isinstance(value, str):
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        is_long = least <= len(value) and (most is None or len(value) <= most)
        return is_long and (
            "pattern" not in schema or _matches(schema["pattern"], value, f"{path}.pattern", budget)
        )
    if is_number(value):
        low, is_low_out, high, is_high_out, steps = bounds_of([Said(schema, path)])
        number = Decimal(str(value))
        return (
            (low is None or low < number or (low == number and not is_low_out))
            and (high is None or number < high or (number == high and not is_high_out))
            and all(number % step == 0 for step in steps)
        )
    if isinstance(value, list):
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        is_unique = not schema.get("uniqueItems") or not any(
            same(a, b) for a, b in itertools.combinations(value, 2)
        )
        return is_unique and least <= len(value) and (most is None or len(value) <= most)
    if isinstance(value, dict):
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        needed = [*schema.get("required", [])]
        for name, more in schema.get("dependentRequired", {}).items():
            needed += more if name in value else []
        is_many = least <= len(value) and (most is None or len(value) <= most)
        return is_many and all(name in value for name in needed)
    return True


def parts_of(value: Any, said: Said) -> Iterator[tuple[Any, Said]]:
    """The parts of a value, and the schemas of each."""
    if isinstance(value, list):
        for i, one in enumerate(value):
            yield from ((one, part) for part in of_item([said], i))
    if isinstance(value, dict):
        for name, one in value.items():
            yield from ((one, part) for part in of_member([said], name))
            if "propertyNames" in said.schema:
                yield name, said.under("propertyNames", said.schema["propertyNames"])
        for name, then in said.schema.get("dependentSchemas", {}).items():
            if name in value:
                yield value, said.under(f"dependentSchemas.{name}", then)
