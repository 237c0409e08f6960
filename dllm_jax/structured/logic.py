"""Schemas combined: the ways to be an instance, which values fit, and what has none."""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .drafts import OF_TYPE, Document, is_number, normal, refused
from .limits import Budget, TooLarge
from .parts import (
    Said,
    Way,
    fits_plainly,
    kinds_of,
    listed_of,
    names_of,
    of_item,
    of_member,
    parts_of,
    written_kinds,
)
from .patterns import ANYTHING
from .regex import NoText, byte_automaton
from .strings import bounds_of, lengths_of, patterns_of, string_patterns
from .trees import both, repeated

MOST_NESTED = 32
MOST_READ = 4096  # subschemas, each as often as it is referred to
MOST_WAYS = 512
MOST_HINTS = 16  # names that may be what keeps one way apart from another
_UNEVALUATED = {"unevaluatedProperties", "unevaluatedItems"}
_PLAIN = {"type", "enum"}.union(*OF_TYPE.values())


class NoInstance(ValueError):
    """A schema has no instance, or none that ends within the depth of its references."""


def no_instance(path: str, what: str) -> NoInstance:
    """The error that names the place and what rules out every instance."""
    return NoInstance(str(refused(path, what)))


class Logic:
    """The schemas of one document."""

    def __init__(self, root: Any, budget: Budget):
        self._document, self._budget = Document(root), budget
        self._num_read, self._depth = 0, 0

    def ways(self, saids: list[Said], is_loose: bool = False) -> list[Way]:
        """Ways to be an instance of all schemas.

        Args:
            is_loose: The ways cover all instances, and may cover other values: enough to prove
                that no instance exists. Else they cover instances only, perhaps not all.
        """
        found: list[Way] = [[]]
        for said in saids:
            found = self._ways_of(said, is_loose, found)
        return found

    def _together(self, ways: list[Way], others: list[Way]) -> list[Way]:
        self._budget.check()
        if len(ways) * len(others) > MOST_WAYS:
            raise ValueError(
                f"JSON schema: more than {MOST_WAYS} alternatives at a place; use fewer"
            )
        return [[*way, *other] for way in ways for other in others]

    def _normal(self, said: Said) -> dict[str, Any]:
        schema, path, _ = said
        self._budget.check()
        self._num_read += 1
        if path.count(".") + path.count("[") > MOST_NESTED:
            raise TooLarge(
                str(refused(path, f"is nested more than {MOST_NESTED} deep; flatten it"))
            )
        if self._num_read > MOST_READ:
            raise TooLarge(
                str(refused(path, f"is past the first {MOST_READ} subschemas; refer to fewer"))
            )
        if not isinstance(schema, Mapping):
            raise refused(path, "is no schema; give an object, true or false")
        return normal(schema, path, self._document.is_old, self._budget.notes)

    def _ways_of(self, said: Said, is_loose: bool, among: list[Way]) -> list[Way]:
        """The ways among some that are instances too; what they say makes more provable."""
        if isinstance(said.schema, bool):
            return among if said.schema else []
        schema = self._normal(said)
        if among != [[]] and _UNEVALUATED & schema.keys():  # they see what is within alone
            return self._together(among, self._ways_of(said, is_loose, [[]]))
        plain = {name: one for name, one in schema.items() if name in _PLAIN}
        ways = self._together(among, [[said._replace(schema=plain)] if plain else []])
        if "$ref" in schema:
            ways = self._ways_of(self.referred(said), is_loose, ways)
        for i, one in enumerate(schema.get("allOf", [])):
            ways = self._ways_of(said.under(f"allOf[{i}]", one), is_loose, ways)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                every = [said.under(f"{name}[{i}]", one) for i, one in enumerate(schema[name])]
                is_any = is_loose or name == "anyOf"
                ways = self._any(ways, every, is_loose) if is_any else self._one(ways, every)
        for name, needed in schema.get("dependentRequired", {}).items():
            ways = self._if(ways, said, _has(name), {"required": needed}, True, is_loose)
        for name, then in schema.get("dependentSchemas", {}).items():
            ways = self._if(ways, said, _has(name), then, True, is_loose)
        if "if" in schema and {"then", "else"} & schema.keys():
            then, other = schema.get("then", True), schema.get("else", True)
            ways = self._if(ways, said, schema["if"], then, other, is_loose)
        if is_loose:
            return ways
        if "not" in schema:
            ways = self._without(ways, said.under("not", schema["not"]))
        for name, known in (
            ("unevaluatedProperties", ("properties", "patternProperties", "additionalProperties")),
            ("unevaluatedItems", ("prefixItems", "items")),
        ):
            if name in schema:
                ways = [[*way, *_closed(way, said, name, known, schema[name])] for way in ways]
        return ways

    def root(self) -> Said:
        """The document's own schema."""
        return Said(self._document.root, "$", (self._document.name,))

    def referred(self, said: Said, most: int | None = None) -> Said:
        """The schema that a reference names, expanded `most` times within itself."""
        most = self._budget.extent.nesting if most is None else most
        path = f"{said.path}.$ref"
        found, name = self._document.found(said.schema, path)
        again = sum(said.refs.count(one) - 1 for one in {*said.refs, name}) + (name in said.refs)
        if again > most:
            raise NoInstance(f"JSON schema: {path[:200]} {name!r:.60} refers to itself without end")
        return Said(found, path, (*said.refs, name))

    # --- alternatives ----------------------------------------------------------------------------

    def _any(self, ways: list[Way], every: list[Said], is_loose: bool) -> list[Way]:
        found, error = [], None
        for said in every:
            try:
                found += self._ways_of(said, is_loose, ways)
            except NoInstance as one:
                error = one
            if len(found) > MOST_WAYS:
                self._together(found, [[]])
        if error and (is_loose or not found):
            raise error
        return found

    def _one(self, ways: list[Way], every: list[Said]) -> list[Way]:
        """Alternatives, each with what tells it from the others."""
        found, shared = [], None
        for i, said in enumerate(every):
            own = self._any(ways, [said], False)
            for j, other in enumerate(every):
                if i != j:
                    told = [self._apart(way, other) for way in own if not self.is_empty(way)]
                    if None in told:
                        shared = shared or (said.path, j)
                        self._budget.notes[f"{said.path}: where [{j}] may hold too"] = None
                    own = [way for way in told if way is not None]
            found += own
        if shared and not found:
            path, j = shared
            raise refused(path, f"shares instances with [{j}]; use anyOf, or tell them apart")
        return found

    def _without(self, ways: list[Way], other: Said) -> list[Way]:
        told = [self._apart(way, other) for way in ways if not self.is_empty(way)]
        found = [way for way in told if way is not None]
        if told and not found:
            raise refused(other.path, "cannot be told from what stands beside it; leave it out")
        return found

    def _if(
        self, ways: list[Way], said: Said, what: Any, then: Any, other: Any, is_loose: bool
    ) -> list[Way]:
        if is_loose:
            return ways
        given = said.under("if", what)
        found = self._any(ways, [said.under("if", {"allOf": [what, then]})], False)
        told = [self._apart(way, given) for way in ways if not self.is_empty(way)]
        left = [way for way in told if way is not None]
        if told and not left:
            if not any(not self.is_empty(way) for way in found):
                raise refused(given.path, "cannot be told from its contrary; leave it out")
            self._budget.notes[f"{given.path}: only what meets it is written"] = None
            return found
        return [*found, *self._any(left, [said.under("else", other)], False)]

    def _apart(self, way: Way, other: Said) -> Way | None:
        """A way with what makes sure that no instance of it is one of another schema."""
        way = [*way, Said({"type": written_kinds(way)}, other.path)]
        values = listed_of(way)
        if values is not None:
            fitting = [one for one in values if not self.fits(one, other)]
            return [*way, Said({"enum": fitting}, other.path)] if fitting else None
        for each in self.ways([other], is_loose=True):
            if not self.is_empty([*way, *each]):
                told = (h for h in self._hints(way, each) if self.is_empty([*way, h, *each]))
                hint = next(told, None)
                if hint is None:
                    return None
                way = [*way, hint]
        return way

    def _hints(self, way: Way, other: Way) -> Iterator[Said]:
        """Schemas that may hold of one way and not of another; the caller proves that they do."""
        path, kinds = way[-1].path, kinds_of(way)
        apart = [kind for kind in kinds if kind not in kinds_of(other)]
        if "number" in apart and "integer" in kinds_of(other):
            apart.remove("number")
        if apart:
            yield Said({"type": apart}, path)
        if len(kinds) > 1:
            for kind in kinds:
                for hint in self._hints([*way, Said({"type": [kind]}, path)], other):
                    yield hint._replace(schema={"type": [kind], **hint.schema})
        elif kinds == ["array"]:
            yield Said({"minItems": 1}, path)
        elif kinds == ["object"]:
            yield from self._hints_of_names(way, other, path)
        else:
            for one in _others(other):
                if one["type"][0] == kinds[0]:
                    yield Said(one, path)

    def _hints_of_names(self, way: Way, other: Way, path: str) -> Iterator[Said]:
        needed, others = names_of(way, "required"), names_of(other, "required")
        for name in others:
            if name not in needed:
                yield Said({"properties": {name: False}}, path)
        also = names_of(other, "properties")
        for name in itertools.islice(names_of(way, "properties") | also, MOST_HINTS):
            yield Said({"required": [name]}, path)
            if name not in also:
                continue
            theirs = of_member(other, name)
            values = self._listed(of_member(way, name))
            fits = [all(self.fits(one, said) for said in theirs) for one in values]
            left = [one for one, is_other in zip(values, fits, strict=True) if not is_other]
            inner = [{"enum": left}] if left else []
            if not values:
                inner = [one for each in self.ways(theirs, is_loose=True) for one in _others(each)]
            for one in inner:
                yield Said({"properties": {name: one}, "required": [name]}, path)

    def _listed(self, saids: list[Said]) -> list[Any]:
        """The values that a schema lists, if it lists them all."""
        found = []
        for way in self.ways(saids):
            values = listed_of(way)
            if values is None:
                return []
            found += [one for one in values if all(self.fits(one, said) for said in way)]
        return found

    # --- what has no instance --------------------------------------------------------------------

    def is_empty(self, way: Way) -> bool:
        """Whether it is certain that a way has no instance."""
        self._budget.check()
        values = listed_of(way)
        if values is not None:
            return not any(all(self.fits(one, said) for said in way) for one in values)
        return all(self._has_none(kind, way) for kind in kinds_of(way))

    def _has_none(self, kind: str, way: Way) -> bool:
        if kind == "object":
            needed = names_of(way, "required")
            return any(self._is_never(of_member(way, name)) for name in needed)
        if kind == "array":
            least, most = lengths_of(way, "minItems", "maxItems")
            if most is not None and most < least:
                return True
            longest = max((len(said.schema.get("prefixItems", [])) for said in way), default=0)
            return any(self._is_never(of_item(way, i)) for i in range(min(least, longest + 1)))
        if kind == "string":
            least, most = lengths_of(way, "minLength", "maxLength")
            if most is not None and most < least:
                return True
            kept, key = self._budget.kept, (patterns_of(way), least, most)
            if key[0] and key not in kept:
                one = repeated(ANYTHING[0][1][2], least, most)
                try:
                    byte_automaton(both([*string_patterns(way, is_wide=True), one]), self._budget)
                    kept[key] = False
                except NoText:
                    kept[key] = True
            return bool(key[0]) and kept[key]
        if kind in ("integer", "number"):
            low, is_low_out, high, is_high_out, _ = bounds_of(way)
            if low is None or high is None:
                return False
            return low > high or (low == high and (is_low_out or is_high_out))
        return False

    def _is_never(self, saids: list[Said]) -> bool:
        if self._depth > 4:
            return False
        self._depth += 1
        try:
            return all(
                self.is_empty(way) or self._fits_none(way, saids)
                for way in self.ways(saids, is_loose=True)
            )
        except NoInstance:  # a reference to itself
            return False
        finally:
            self._depth -= 1

    def _fits_none(self, way: Way, saids: list[Said]) -> bool:
        values = listed_of(way)
        if values is None:
            return False
        return not any(all(self.fits(one, said) for said in saids) for one in values)

    # --- which values fit ------------------------------------------------------------------------

    def fits(self, value: Any, said: Said) -> bool:
        """Whether a value is an instance, but for its format."""
        if isinstance(said.schema, bool):
            return said.schema
        schema = self._normal(said)
        refs = [self.referred(said, MOST_NESTED)] if "$ref" in schema else []
        every = {
            name: [said.under(f"{name}[{i}]", one) for i, one in enumerate(schema.get(name, []))]
            for name in ("allOf", "anyOf", "oneOf")
        }
        for name in ("unevaluatedProperties", "unevaluatedItems"):
            if name in schema and isinstance(value, dict | list):
                raise refused(f"{said.path}.{name}", "beside listed values is not supported")
        if "if" in schema:
            name = "then" if self.fits(value, said.under("if", schema["if"])) else "else"
            refs.append(said.under(name, schema.get(name, True)))
        return (
            fits_plainly(value, schema, said.path, self._budget)
            and all(self.fits(value, one) for one in (*refs, *every["allOf"]))
            and (not every["anyOf"] or any(self.fits(value, one) for one in every["anyOf"]))
            and (not every["oneOf"] or sum(self.fits(value, one) for one in every["oneOf"]) == 1)
            and not ("not" in schema and self.fits(value, said.under("not", schema["not"])))
            and all(self.fits(*part) for part in parts_of(value, said._replace(schema=schema)))
        )


def _others(way: Way) -> Iterator[dict[str, Any]]:
    """Schemas of texts and numbers that a way is not of, where it lists values or has a pattern."""
    values = listed_of(way) or []
    texts = [re.escape(one) for one in values if isinstance(one, str)]
    if texts:
        yield {"type": ["string"], "pattern": f"^(?!(?:{'|'.join(texts)})$)"}
    for pattern in patterns_of(way):
        inner = pattern[1:] if pattern.startswith("^") else rf"[\s\S]*{pattern}"
        yield {"type": ["string"], "pattern": f"^(?!{inner})"}
    if numbers := [one for one in values if is_number(one)]:
        yield {"type": ["number"], "exclusiveMinimum": max(numbers)}


def _has(name: str) -> dict[str, Any]:
    return {"type": "object", "required": [name]}


def _closed(way: Way, said: Said, name: str, known: tuple[str, ...], rest: Any) -> Way:
    """A way with `unevaluated...` written as plain keywords, since all other keywords are known."""
    if any(known[-1] in one.schema for one in way):
        return []
    schema: dict[str, Any] = {known[-1]: rest}
    if known[0] == "prefixItems":
        longest = max((len(one.schema.get(known[0], [])) for one in way), default=0)
        schema[known[0]] = [True] * longest
    else:
        for key in known[:-1]:
            schema[key] = {part: True for one in way for part in one.schema.get(key, {})}
    return [said._replace(schema=schema)]
