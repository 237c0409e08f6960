"""JSON schemas to trees of the texts of their instances.

Data flow: a schema -> keywords of one draft (`drafts`) -> the ways to be an instance (`logic`) -> a
tree for each way. What is not read is refused by its path. A tree may hold to less than its schema
allows, never to more: properties come in the order of the schema, no others are written besides
them, and free values nest to a fixed depth.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .drafts import refused
from .forms import Notation
from .layout import Layout, Spell
from .limits import Budget
from .logic import Logic, NoInstance, no_instance
from .parts import Said, Way, kinds_of, listed_of, names_of, of_item, of_member, same, written_kinds
from .patterns import ANYTHING, searched
from .regex import NoText, byte_automaton
from .sets import groups
from .strings import bounds_of, held, lengths_of, number_tree, string_tree
from .trees import (
    BOTH,
    FIRST_ALONE,
    Tree,
    any_order,
    both,
    either,
    in_json,
    members,
    repeated,
    text,
)

MOST_PATTERNS = 4  # of the names of one object
MOST_ORDERS = 4  # values that may stand in any order, each once
MOST_LISTED = 16  # integers between bounds


def arguments_tree(schema: Any, budget: Budget, notation: Notation | None, spell: Spell) -> Tree:
    """The tree of a call's arguments, as `schema_tree`.

    Args:
        notation: None: JSON.
    """
    logic = Logic(schema, budget)
    root = logic.root().schema
    properties = root.get("properties") if isinstance(root, Mapping) else None
    return _Writer(logic, budget, Layout(budget, True, True, notation, spell, properties)).root()


def schema_tree(schema: Any, budget: Budget, compact: bool = False) -> Tree:
    """The tree of a schema's instances.

    Args:
        compact: No white space between their parts; else any.

    Raises:
        ValueError: The schema is invalid or has an unsupported keyword; the path is named.
    """
    return _Writer(Logic(schema, budget), budget, Layout(budget, compact)).root()


class _Writer:
    """Trees of the values of one document."""

    def __init__(self, logic: Logic, budget: Budget, layout: Layout):
        self._logic, self._budget, self._layout = logic, budget, layout

    def root(self) -> Tree:
        """A tree of the document's instances."""
        return self.value([self._logic.root()])

    def value(self, saids: list[Said]) -> Tree:
        """A tree of the values that fit all schemas.

        Raises:
            NoInstance: Nothing does.
        """
        trees, error = [], None
        for way in self._logic.ways(saids):
            if not way:
                return self._layout.anything(self._budget.extent.nesting)
            for kind in ["enum"] if listed_of(way) is not None else written_kinds(way):
                try:
                    trees.append(self._of_kind(kind, way))
                except NoInstance as one:
                    error = error or one
        if not trees:
            raise error or no_instance(saids[0].path, "has no instance; correct it")
        return either(trees)

    def _of_kind(self, kind: str, way: Way) -> Tree:
        path = way[0].path
        if kind == "enum":
            values = listed_of(way) or []
            fitting = [one for one in values if all(self._logic.fits(one, said) for said in way)]
            if not fitting:
                raise no_instance(path, "lists no value (enum, const) that fits what else is said")
            trees = []
            for one in fitting:
                with contextlib.suppress(NoInstance):
                    trees.append(self._layout.instance(one, f"{path}.enum"))
            if not trees:
                raise no_instance(
                    path, "lists no value (enum, const) that a call of this model can hold"
                )
            return either(trees)
        if kind in ("object", "array"):
            with self._layout.within():
                tree = (self._object if kind == "object" else self._array)(way, path)
            return self._layout.ended(tree)
        if kind == "string":
            least, most = lengths_of(way, "minLength", "maxLength")
            if most is not None and most < least:
                raise no_instance(f"{path}.maxLength", "is below minLength")
            try:
                tree = self._layout.string(string_tree(way, self._budget, not self._layout.is_bare))
                self._check_texts(tree)
            except NoText:
                raise no_instance(
                    path, "has a pattern, format or length that no other fits"
                ) from None
            return tree
        if kind in ("integer", "number") and any(_is_bound(said) for said in way):
            try:
                tree = number_tree(way, kind == "integer")
                self._check_texts(tree)
            except NoText:
                raise no_instance(path, "has bounds with no number between them") from None
            return self._layout.ended(tree)
        return self._layout.scalar(kind)

    def _check_texts(self, tree: Tree) -> None:
        """Whether two trees have a text together is seen by their automaton alone."""
        for node in tree:
            if node[0] in (BOTH, FIRST_ALONE) and id(node) not in self._budget.kept:
                byte_automaton([node], self._budget)
                self._budget.kept[id(node)] = node

    # --- objects ---------------------------------------------------------------------------------

    def _object(self, way: Way, path: str) -> Tree:
        least, most = lengths_of(way, "minProperties", "maxProperties")
        if most is not None and most < least:
            raise no_instance(f"{path}.maxProperties", "is below minProperties")
        needed, listed = names_of(way, "required"), names_of(way, "properties")
        every, written = [], [*(listed | needed)]
        if self._layout.depth > self._budget.extent.deepest and len(written) > max(
            len(needed), least
        ):
            kept = [*(needed | listed)][: max(len(needed), least)]
            written = [name for name in written if name in kept]
            self._budget.notes[f"{path}: what may be left out is not written"] = None
        if self._layout.is_bare:
            written.sort(key=str.lower)
        for name in written:
            saids = of_member(way, name)
            self._layout.begin_member(name)
            try:
                if not all(
                    self._logic.fits(name, said.under("propertyNames", names))
                    for said in way
                    if (names := said.schema.get("propertyNames")) is not None
                ):
                    raise no_instance(f"{path}.propertyNames", f"forbids {name!a:.60}")
                head, value = self._layout.name(name, path), self.value(saids)
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
            raise no_instance(f"{path}.{name}", "allows no object of the properties that are named")
        most = None if most is None or most >= len(every) else most
        inner = members(every, self._layout.between, least, most) if every else []
        return self._layout.braced("{}", inner)

    def _map(self, way: Way, path: str, least: int, most: int | None) -> Tree:
        """An object of any names."""
        if least > 1:  # a name may be written twice
            raise refused(f"{path}.minProperties", "above 1 is not supported for names of any kind")
        names = [
            said.under("propertyNames", said.schema["propertyNames"])
            for said in way
            if "propertyNames" in said.schema
        ]
        if names and self._layout.is_bare:
            raise refused(f"{path}.propertyNames", "is not supported in this form of calls")
        keys = [self.value([*names, Said({"type": "string"}, path)])] if names else []
        trees = []
        self._layout.begin_member("")
        for key, saids in self._kinds(way, path) if most != 0 else []:
            key = both([key, *keys]) if keys else key
            try:
                byte_automaton(key, self._budget)
                is_free = not saids and key == self._layout.any_name
                value = (
                    self._layout.anything(self._budget.extent.nesting - 1)
                    if is_free
                    else self.value(saids)
                )
                trees.append([*self._layout.named(key), *value])
            except (NoInstance, NoText):
                continue
        if trees:
            return self._layout.braced(
                "{}", self._layout.several(either(trees), least, most, self._layout.between)
            )
        if least:
            raise no_instance(f"{path}.minProperties", "is above what is allowed")
        return self._layout.braced("{}", [])

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
            is_quoted = bool(patterns) and not self._layout.is_bare
            key = in_json(ANYTHING) if is_quoted else self._layout.any_name
            for pattern, trees in patterns.items():
                tree, wide = map(in_json, trees) if is_quoted else trees
                key = [(BOTH, (key, tree)) if is_of[pattern] else (FIRST_ALONE, (key, wide))]
            yield [*text('"'), *key, *text('"')] if is_quoted else key, saids

    # --- arrays ----------------------------------------------------------------------------------

    def _array(self, way: Way, path: str) -> Tree:
        least, most = lengths_of(way, "minItems", "maxItems")
        if most is not None and most < least:
            raise no_instance(f"{path}.maxItems", "is below minItems")
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
                rest = self._layout.several(self.value(saids), max(few, 1) if first else few, left)
            except NoInstance:
                most = longest
        if most is not None and most < least:
            raise no_instance(f"{path}.minItems", f"is above the {most} items that are allowed")
        if not first:
            return self._layout.braced("[]", rest)
        if rest:
            first.append((rest, least > longest))
        # An item stands only where all before it do.
        tree: Tree = []
        for place, (item, is_required) in reversed([*enumerate(first)]):
            tree = [*(self._layout.comma if place else []), *item, *tree]
            tree = tree if is_required else repeated(tree, 0, 1)
        return self._layout.braced("[]", tree)

    def _unique(self, saids: list[Said], path: str, least: int, most: int | None) -> Tree:
        """Items none of which equals another."""
        saids = saids or [Said({}, path)]
        values = self._values(saids)
        if values is None:
            trees = self._of_groups(saids, path, least)
        else:
            trees = [self._layout.instance(one, path) for one in values]
        if len(trees) < least:
            raise no_instance(
                f"{path}.minItems", f"is above the {len(trees)} items that are told apart"
            )
        if not trees:
            return self._layout.braced("[]", [])
        most = None if most is None or most >= len(trees) else most
        if len(trees) <= MOST_ORDERS:
            return self._layout.braced("[]", any_order(trees, self._layout.comma, least, most))
        return self._layout.braced(
            "[]", members([(one, False) for one in trees], self._layout.comma, least, most)
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
