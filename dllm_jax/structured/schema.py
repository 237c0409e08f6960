"""JSON schemas to trees of the texts of their instances.

Data flow: a schema -> keywords of one draft (`drafts`) -> the ways to be an instance (`logic`) -> a
tree for each way. What is not read is refused by its path. A tree may hold to less than its schema
allows, never to more: properties come in the order of the schema, no others are written besides
them, and free values nest to a fixed depth.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .drafts import refused
from .forms import Notation, is_json, kind_of
from .limits import Budget
from .logic import MOST_NESTED, Logic, NoInstance
from .parts import Said, Way, kinds_of, listed_of, names_of, of_item, of_member, same, written_kinds
from .patterns import ANYTHING, searched
from .regex import NoText, byte_automaton
from .sets import groups
from .strings import CHAR, bounds_of, held, lengths_of, number_tree, string_tree
from .trees import (
    BOTH,
    FIRST_ALONE,
    Tree,
    any_order,
    both,
    either,
    free,
    in_json,
    lengths,
    letters,
    members,
    parsed,
    repeated,
    text,
)

MOST_PATTERNS = 4  # of the names of one object
MOST_ORDERS = 4  # values that may stand in any order, each once
MOST_LISTED = 16  # integers between bounds
_INTEGER = r"-?(?:0|[1-9][0-9]*)"
_STRING = parsed(f'"{CHAR}*"')
_NUMBER = parsed(_INTEGER + r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SCALARS = {
    "boolean": parsed("true|false"),
    "null": text("null"),
    "integer": parsed(_INTEGER),
    "number": _NUMBER,
}
# Of at most 15 digits: other programs read these exactly, and no run of digits takes all the room.
_SHORT_INTEGER = r"-?(?:0|[1-9][0-9]{0,14})"
_SHORT = _SCALARS | {
    "integer": parsed(_SHORT_INTEGER),
    "number": parsed(_SHORT_INTEGER + r"(?:\.[0-9]{1,15})?(?:[eE][+-]?[0-9]{1,2})?"),
}


_JSON_TEXT = parsed(  # texts of no string where the text alone says what it is
    r"[ \n\r\t]*(?:[\[{](?:.|\n)*|true|false|null|-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"
    r"[ \n\r\t]*"
)
_BARE_NAME = r"[^\x00-\x20:,{}\[\]<>\"|]+"
_FREE_NAME = parsed("[A-Za-z0-9_.-]+")  # where a schema leaves names free
Spell = Callable[[str], list[int]]


def arguments_tree(schema: Any, budget: Budget, notation: Notation | None, spell: Spell) -> Tree:
    """The tree of a call's arguments, as `schema_tree`.

    Args:
        notation: None: JSON.
        spell: The letters of a text that may hold marks.
    """
    logic = Logic(schema, budget)
    return _Writer(logic, budget, True, True, notation, spell).value([logic.root()])


def schema_tree(schema: Any, budget: Budget, compact: bool = False) -> Tree:
    """The tree of a schema's instances.

    Args:
        compact: No white space between their parts; else any.

    Raises:
        ValueError: The schema is invalid or has an unsupported keyword; the path is named.
    """
    logic = Logic(schema, budget)
    return _Writer(logic, budget, compact).value([logic.root()])


class _Writer:
    """Trees of the values of one document.

    Args:
        of_call: They are the arguments of a call: a space may follow a comma and a colon, and
            numbers without bounds are short.
        notation, spell: As of `arguments_tree`.
    """

    def __init__(
        self,
        logic: Logic,
        budget: Budget,
        compact: bool,
        of_call: bool = False,
        notation: Notation | None = None,
        spell: Spell = lambda said: [*said.encode()],
    ):
        self._logic, self._budget, self._depth = logic, budget, 0
        self._notation, self._spell, self._is_mixed = notation, spell, False
        self._space = [] if compact else parsed(r"[ \n\r\t]*")
        behind = parsed(" ?") if of_call else self._space
        self._scalars = _SHORT if of_call else _SCALARS
        is_deep = notation is not None and notation.is_deep
        self._comma = text(",") if is_deep else [*self._space, *text(","), *behind]
        self._colon = [*self._space, *text(":"), *behind]

    def value(self, saids: list[Said]) -> Tree:
        """A tree of the values that fit all schemas.

        Raises:
            NoInstance: Nothing does.
        """
        trees, error = [], None
        for way in self._logic.ways(saids):
            if not way:
                return self._any(self._budget.extent.nesting)
            for kind in ["enum"] if listed_of(way) is not None else written_kinds(way):
                try:
                    trees.append(self._of_kind(kind, way))
                except NoInstance as one:
                    error = error or one
        if not trees:
            path = saids[0].path if saids else "$"
            raise error or NoInstance(str(refused(path, "has no instance; correct it")))
        return either(trees)

    def _of_kind(self, kind: str, way: Way) -> Tree:
        path = way[0].path
        if kind == "enum":
            values = listed_of(way) or []
            fitting = [one for one in values if all(self._logic.fits(one, said) for said in way)]
            if not fitting:
                raise _none(path, "lists no value (enum, const) that fits what else is said")
            trees = []
            for one in fitting:
                with contextlib.suppress(NoInstance):
                    trees.append(self._instance(one, f"{path}.enum", 0))
            if not trees:
                raise _none(path, "lists no value (enum, const) that a call of this model can hold")
            return either(trees)
        if kind in ("object", "array"):
            self._depth += 1
            try:
                tree = (self._object if kind == "object" else self._array)(way, path)
            finally:
                self._depth -= 1
            return self._ended(tree)
        if kind == "string":
            least, most = lengths_of(way, "minLength", "maxLength")
            if most is not None and most < least:
                raise _none(f"{path}.maxLength", "is below minLength")
            try:
                tree = self._string(string_tree(way, self._budget, not self._is_bare))
                self._check_texts(tree)
            except NoText:
                raise _none(path, "has a pattern, format or length that no other fits") from None
            return tree
        if kind in ("integer", "number") and any(_is_bound(said) for said in way):
            try:
                tree = number_tree(way, kind == "integer")
                self._check_texts(tree)
            except NoText:
                raise _none(path, "has bounds with no number between them") from None
            return self._ended(tree)
        return self._ended(self._scalars[kind])

    def _check_texts(self, tree: Tree) -> None:
        """Whether two trees have a text together is seen by their automaton alone."""
        for node in tree:
            if node[0] in (BOTH, FIRST_ALONE) and id(node) not in self._budget.kept:
                byte_automaton([node], self._budget)
                self._budget.kept[id(node)] = node

    # --- strings ---------------------------------------------------------------------------------

    @property
    def _is_bare(self) -> bool:
        """Whether strings stand here as they are, between marks."""
        notation = self._notation
        return notation is not None and (notation.is_deep or self._depth == 1)

    def _string(self, tree: Tree) -> Tree:
        """A string, of what stands within it."""
        notation = self._notation
        if notation is None or not self._is_bare:
            return [*text('"'), *tree, *text('"')]
        begins, ends = map(self._spell, notation.string)
        if self._is_mixed:
            tree = [(FIRST_ALONE, (tree, _JSON_TEXT))]
        if len(ends) == 1 and ends[0] > 255:  # no text has it
            return [*letters(begins), *tree, *letters(ends)]
        if lengths(tree)[1] is not None:  # the beginnings of a mark would take many states
            tree = both([tree, parsed(f"[^{chr(ends[0])}]*")])
        return [*letters(begins), *both([[*tree, *letters(ends)], free([], ends)])]

    def _ended(self, tree: Tree) -> Tree:
        """A value that is no string, up to where the next one or its name may begin."""
        notation = self._notation
        if notation is None or notation.is_deep or self._depth != 1:
            return tree
        return [*tree, *text(notation.string[1])]

    # --- objects ---------------------------------------------------------------------------------

    def _object(self, way: Way, path: str) -> Tree:
        least, most = lengths_of(way, "minProperties", "maxProperties")
        if most is not None and most < least:
            raise _none(f"{path}.maxProperties", "is below minProperties")
        needed, listed = names_of(way, "required"), names_of(way, "properties")
        every, written = [], [*(listed | needed)]
        if self._depth > self._budget.extent.deepest and len(written) > max(len(needed), least):
            kept = [*(needed | listed)][: max(len(needed), least)]
            written = [name for name in written if name in kept]
            self._budget.notes[f"{path}: what may be left out is not written"] = None
        if self._is_bare:
            written.sort(key=str.lower)
        for name in written:
            saids = of_member(way, name)
            self._begin_member(name)
            try:
                if not all(
                    self._logic.fits(name, said.under("propertyNames", names))
                    for said in way
                    if (names := said.schema.get("propertyNames")) is not None
                ):
                    raise _none(f"{path}.propertyNames", f"forbids {name!a:.60}")
                head, value = self._name(name, path), self.value(saids)
            except NoInstance as error:
                if name in needed:
                    raise NoInstance(
                        f"{error} (and {path[:100]}.required names {name!a:.60})"[:400]
                    ) from None
                continue
            every.append(([*head, *value], name in needed))
        if not listed | needed:
            return self._map(way, path, least, most)
        if len(every) < least or (most is not None and len(needed) > most):
            name = "minProperties" if len(every) < least else "maxProperties"
            raise _none(f"{path}.{name}", "allows no object of the properties that are named")
        most = None if most is None or most >= len(every) else most
        inner = members(every, self._between, least, most) if every else []
        return self._braced("{}", inner)

    @property
    def _between(self) -> Tree:
        """The separator of two members."""
        notation = self._notation
        return self._comma if notation is None or not self._is_bare else text(notation.comma)

    def _begin_member(self, name: str) -> None:
        """Note whether the text alone says what a member's value is (`kind_of`)."""
        if self._depth == 1:
            root = self._logic.root().schema
            properties = root.get("properties", {}) if isinstance(root, Mapping) else {}
            is_deep = self._notation is None or self._notation.is_deep
            self._is_mixed = not is_deep and kind_of(properties.get(name)) == "either"

    def _name(self, name: str, path: str) -> Tree:
        """A name, with what stands around it."""
        if not self._is_bare:
            return self._named(text(_said(name)))
        if not re.fullmatch(_BARE_NAME, name):
            raise _none(path, f"has the name {name!a:.60}, which calls of this model cannot hold")
        return self._named(text(name))

    def _named(self, name: Tree) -> Tree:
        if self._notation is None or not self._is_bare:
            return [*name, *self._colon]
        before, after = map(text, self._notation.name)
        return [*before, *name, *after]

    def _map(self, way: Way, path: str, least: int, most: int | None) -> Tree:
        """An object of any names."""
        if least > 1:  # a name may be written twice
            raise refused(f"{path}.minProperties", "above 1 is not supported for names of any kind")
        names = [
            said.under("propertyNames", said.schema["propertyNames"])
            for said in way
            if "propertyNames" in said.schema
        ]
        if names and self._is_bare:
            raise refused(f"{path}.propertyNames", "is not supported in this form of calls")
        keys = [self.value([*names, Said({"type": "string"}, path)])] if names else []
        trees = []
        self._begin_member("")
        for key, saids in self._kinds(way, path) if most != 0 else []:
            key = both([key, *keys]) if keys else key
            try:
                byte_automaton(key, self._budget)
                is_free = not saids and key in (_STRING, _FREE_NAME)
                value = self._any(self._budget.extent.nesting - 1) if is_free else self.value(saids)
                trees.append([*self._named(key), *value])
            except (NoInstance, NoText):
                continue
        if trees:
            return self._braced("{}", self._several(either(trees), least, most, self._between))
        if least:
            raise _none(f"{path}.minProperties", "is above what is allowed")
        return self._braced("{}", [])

    def _kinds(self, way: Way, path: str) -> Iterator[tuple[Tree, list[Said]]]:
        """Names by the patterns that they match and by those that they do not; their values."""
        patterns = _patterns(way)
        if len(patterns) > MOST_PATTERNS:
            raise refused(f"{path}.patternProperties", f"has more than {MOST_PATTERNS} patterns")
        for matched in itertools.product((True, False), repeat=len(patterns)):
            is_of = dict(zip(patterns, matched, strict=True))
            saids = []
            for said in way:
                own = said.schema.get("patternProperties", {})
                saids += [
                    said.under(f"patternProperties.{pattern}", one)
                    for pattern, one in own.items()
                    if is_of[pattern]
                ]
                if "additionalProperties" in said.schema and not any(is_of[one] for one in own):
                    more = said.schema["additionalProperties"]
                    saids.append(said.under("additionalProperties", more))
            if patterns and not any(matched) and all(one.schema is True for one in saids):
                continue  # any other name with any value would be most of the automaton
            if self._is_bare:
                key = _FREE_NAME
                for pattern, (tree, wide) in patterns.items():
                    key = [(BOTH, (key, tree)) if is_of[pattern] else (FIRST_ALONE, (key, wide))]
                yield key, saids
                continue
            key = _STRING if not patterns else in_json(ANYTHING)
            for pattern, (tree, wide) in patterns.items():
                one = (BOTH, (key, in_json(tree)))
                key = [one if is_of[pattern] else (FIRST_ALONE, (key, in_json(wide)))]
            yield key if not patterns else [*text('"'), *key, *text('"')], saids

    # --- arrays ----------------------------------------------------------------------------------

    def _array(self, way: Way, path: str) -> Tree:
        least, most = lengths_of(way, "minItems", "maxItems")
        if most is not None and most < least:
            raise _none(f"{path}.maxItems", "is below minItems")
        written = max(self._budget.extent.longest // 8, least)
        most = held(way, "maxItems", most, written, self._budget)
        longest = max((len(said.schema.get("prefixItems", [])) for said in way), default=0)
        is_set = most != 1 and any(said.schema.get("uniqueItems") for said in way)
        if is_set and longest:
            raise refused(f"{path}.uniqueItems", "beside prefixItems is not supported")
        first = []
        for place in range(longest if most is None else min(longest, most)):
            try:
                first.append((self.value(of_item(way, place)), place < least))
            except NoInstance:
                most = place
                break
        rest: Tree = []
        if most is None or most > longest:
            saids = of_item(way, longest)
            try:
                if is_set:
                    return self._unique(saids, path, least, most)
                few, left = max(least - longest, 0), None if most is None else most - longest
                rest = self._several(self.value(saids), max(few, 1) if first else few, left)
            except NoInstance:
                most = longest
        if most is not None and most < least:
            raise _none(f"{path}.minItems", f"is above the {most} items that are allowed")
        if not first:
            return self._braced("[]", rest)
        if rest:
            first.append((rest, least > longest))
        # An item stands only where all before it do.
        tree: Tree = []
        for place, (item, is_required) in reversed([*enumerate(first)]):
            tree = [*(self._comma if place else []), *item, *tree]
            tree = tree if is_required else repeated(tree, 0, 1)
        return self._braced("[]", tree)

    def _unique(self, saids: list[Said], path: str, least: int, most: int | None) -> Tree:
        """Items none of which equals another."""
        saids = saids or [Said({}, path)]
        values = self._values(saids)
        if values is None:
            trees = self._of_groups(saids, path, least)
        else:
            trees = [self._instance(one, path, 0) for one in values]
        if len(trees) < least:
            raise _none(f"{path}.minItems", f"is above the {len(trees)} items that are told apart")
        if not trees:
            return self._braced("[]", [])
        most = None if most is None or most >= len(trees) else most
        if len(trees) <= MOST_ORDERS:
            return self._braced("[]", any_order(trees, self._comma, least, most))
        return self._braced(
            "[]", members([(one, False) for one in trees], self._comma, least, most)
        )

    def _values(self, saids: list[Said]) -> list[Any] | None:
        """All values that fit, each once; None where they are too many to list."""
        values: list[Any] = []
        for way in self._logic.ways(saids):
            listed, kinds = listed_of(way), kinds_of(way)
            if listed is None and kinds == ["integer"]:
                low, _, high, _, _ = bounds_of(way)
                if low is not None and high is not None and high - low <= MOST_LISTED:
                    listed = [*range(int(low), int(high) + 1)]
            if listed is None:
                small = {"boolean": [False, True], "null": [None]}
                if not set(kinds) <= set(small):
                    return None
                listed = [one for kind in kinds for one in small[kind]]
            values += [
                one
                for one in listed
                if all(self._logic.fits(one, said) for said in way)
                and not any(same(one, other) for other in values)
            ]
        return values

    def _of_groups(self, saids: list[Said], path: str, least: int) -> list[Tree]:
        """Trees that share no value, one for each item."""
        count = max(self._budget.extent.items, least)
        trees: list[Tree] = []
        for is_other in (False, True):
            found = []
            for group in groups(self._logic, saids, count, is_other):
                with contextlib.suppress(NoInstance):
                    found.append(self.value([*saids, group]))
            trees = max(trees, found[:count], key=len)
            if len(trees) >= max(least, min(count, 2)):
                break
        self._budget.notes[f"{path}.uniqueItems: at most {len(trees)} items are written"] = None
        return trees

    # --- parts -----------------------------------------------------------------------------------

    def _several(
        self, one: Tree, least: int = 0, most: int | None = None, comma: Tree | None = None
    ) -> Tree:
        """Several of one kind, with commas between them."""
        if most == 0:
            return []
        comma = self._comma if comma is None else comma
        more = repeated([*comma, *one], max(least - 1, 0), None if most is None else most - 1)
        return [*one, *more] if least else repeated([*one, *more], 0, 1)

    def _braced(self, braces: str, inner: Tree) -> Tree:
        if self._notation is not None and braces == "{}" and self._depth == 1:
            return [*inner, *text(self._notation.ends)]
        behind = self._space if inner else []
        return [*text(braces[0]), *self._space, *inner, *behind, *text(braces[1])]

    def _any(self, depth: int) -> Tree:
        string = self._string(ANYTHING) if self._is_bare else _STRING
        kinds = ("number", "boolean", "null")
        scalars = [string, *(self._ended(_SCALARS[kind]) for kind in kinds)]
        if depth <= 0:
            return either(scalars)
        self._depth += 1
        inner = self._any(depth - 1)
        items = self._braced("[]", self._several(inner))
        member = [*self._named(_FREE_NAME if self._is_bare else _STRING), *inner]
        fields = self._braced("{}", self._several(member))
        self._depth -= 1
        return either([*scalars, self._ended(items), self._ended(fields)])

    def _instance(self, value: Any, path: str, depth: int) -> Tree:
        """A value as it stands, with white space between its parts."""
        self._budget.check()
        if depth > MOST_NESTED:
            raise refused(path, f"is nested more than {MOST_NESTED} deep; flatten it")
        if isinstance(value, str) and self._is_bare:
            return self._bare_text(value, path)
        if not isinstance(value, Mapping | list):
            return self._ended(text(_said(value)))
        self._depth += 1
        try:
            if isinstance(value, Mapping):
                each = []
                for key in sorted(value, key=str.lower) if self._is_bare else value:
                    self._begin_member(key)
                    one = self._instance(value[key], path, depth + 1)
                    each.append(([*self._name(key, path), *one], True))
                tree = self._braced("{}", members(each, self._between) if each else [])
            else:
                each = [(self._instance(one, path, depth + 1), True) for one in value]
                tree = self._braced("[]", members(each, self._comma) if each else [])
        finally:
            self._depth -= 1
        return self._ended(tree)

    def _bare_text(self, value: str, path: str) -> Tree:
        """A given string without quotes."""
        assert self._notation is not None
        begins, ends = map(self._spell, self._notation.string)
        said = [*value.encode()]
        place = next(i for i in range(len(said) + 1) if (said + ends)[i : i + len(ends)] == ends)
        if place < len(said) or (self._is_mixed and is_json(value)):
            raise _none(path, f"has {value!a:.60}, which a call of this model cannot hold")
        return letters([*begins, *said, *ends])


def _none(path: str, what: str) -> NoInstance:
    return NoInstance(str(refused(path, what)))


def _said(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_bound(said: Said) -> bool:
    return any(name.endswith("imum") or name == "multipleOf" for name in said.schema)


def _patterns(way: Sequence[Said]) -> dict[str, tuple[Tree, Tree]]:
    """The trees of the patterns of names, and those of the names that none of them has."""
    found = {}
    for said in way:
        for pattern in said.schema.get("patternProperties", {}):
            try:
                found[pattern] = searched(pattern), searched(pattern, is_wide=True)
            except ValueError as error:
                raise refused(f"{said.path}.patternProperties", str(error)) from None
    return found
