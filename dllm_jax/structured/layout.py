"""How values stand in a text: as JSON, or as the arguments of a call in a form's notation.

Nothing here knows schemas; `schema` says which values there are.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .drafts import refused
from .forms import Notation, is_json, kind_of
from .limits import Budget
from .logic import MOST_NESTED, no_instance
from .patterns import ANYTHING
from .strings import CHAR
from .trees import (
    FIRST_ALONE,
    Tree,
    both,
    either,
    free,
    lengths,
    letters,
    members,
    parsed,
    repeated,
    text,
)

Spell = Callable[[str], list[int]]  # the letters of a text that may hold marks
_INTEGER = r"-?(?:0|[1-9][0-9]*)"
_STRING = parsed(f'"{CHAR}*"')
_SCALARS = {
    "boolean": parsed("true|false"),
    "null": text("null"),
    "integer": parsed(_INTEGER),
    "number": parsed(_INTEGER + r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"),
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


class Layout:
    """The text around and between the parts of one value.

    Args:
        compact: No white space between its parts; else any.
        of_call: It is the arguments of a call: a space may follow a comma and a colon, and numbers
            without bounds are short.
        notation: Of the call; None: JSON.
        properties: The schemas of the arguments.

    Attributes:
        depth: Objects and arrays around the part that is being written.
    """

    def __init__(
        self,
        budget: Budget,
        compact: bool,
        of_call: bool = False,
        notation: Notation | None = None,
        spell: Spell = lambda said: [*said.encode()],
        properties: Mapping[str, Any] | None = None,
    ):
        self._budget, self._notation, self._spell = budget, notation, spell
        self._properties, self._is_mixed = properties or {}, False
        self._space = [] if compact else parsed(r"[ \n\r\t]*")
        behind = parsed(" ?") if of_call else self._space
        self._scalars = _SHORT if of_call else _SCALARS
        is_deep = notation is not None and notation.is_deep
        self.comma = text(",") if is_deep else [*self._space, *text(","), *behind]
        self._colon = [*self._space, *text(":"), *behind]
        self.depth = 0

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Write the parts of an object or of an array."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    @property
    def is_bare(self) -> bool:
        """Whether strings stand here as they are, between marks."""
        notation = self._notation
        return notation is not None and (notation.is_deep or self.depth == 1)

    def string(self, tree: Tree) -> Tree:
        """A string, of what stands within it."""
        notation = self._notation
        if notation is None or not self.is_bare:
            return [*text('"'), *tree, *text('"')]
        begins, ends = map(self._spell, notation.string)
        if self._is_mixed:
            tree = [(FIRST_ALONE, (tree, _JSON_TEXT))]
        if len(ends) == 1 and ends[0] > 255:  # no text has it
            return [*letters(begins), *tree, *letters(ends)]
        if lengths(tree)[1] is not None:  # the beginnings of a mark would take many states
            tree = both([tree, parsed(f"[^{chr(ends[0])}]*")])
        return [*letters(begins), *both([[*tree, *letters(ends)], free([], ends)])]

    def scalar(self, kind: str) -> Tree:
        """Any value of a kind without parts that is no string."""
        return self.ended(self._scalars[kind])

    def ended(self, tree: Tree) -> Tree:
        """A value that is no string, up to where the next one or its name may begin."""
        notation = self._notation
        if notation is None or notation.is_deep or self.depth != 1:
            return tree
        return [*tree, *text(notation.string[1])]

    @property
    def between(self) -> Tree:
        """The separator of two members."""
        notation = self._notation
        return self.comma if notation is None or not self.is_bare else text(notation.comma)

    def begin_member(self, name: str) -> None:
        """Note whether the text alone says what a member's value is (`kind_of`)."""
        if self.depth == 1:
            is_deep = self._notation is None or self._notation.is_deep
            self._is_mixed = not is_deep and kind_of(self._properties.get(name)) == "either"

    def name(self, name: str, path: str) -> Tree:
        """A given name, with what stands around it.

        Raises:
            NoInstance: Bare text cannot hold it.
        """
        if not self.is_bare:
            return self.named(text(json.dumps(name, ensure_ascii=False)))
        if not re.fullmatch(_BARE_NAME, name):
            raise no_instance(
                path, f"has the name {name!a:.60}, which calls of this model cannot hold"
            )
        return self.named(text(name))

    @property
    def any_name(self) -> Tree:
        """A name that a schema leaves free."""
        return _FREE_NAME if self.is_bare else _STRING

    def named(self, name: Tree) -> Tree:
        """The letters of a name, with what stands around them."""
        if self._notation is None or not self.is_bare:
            return [*name, *self._colon]
        before, after = map(text, self._notation.name)
        return [*before, *name, *after]

    def several(
        self, one: Tree, least: int = 0, most: int | None = None, comma: Tree | None = None
    ) -> Tree:
        """Several of one kind, with commas between them."""
        if most == 0:
            return []
        comma = self.comma if comma is None else comma
        more = repeated([*comma, *one], max(least - 1, 0), None if most is None else most - 1)
        return [*one, *more] if least else repeated([*one, *more], 0, 1)

    def braced(self, braces: str, inner: Tree) -> Tree:
        """An object or an array, of what stands within it."""
        if self._notation is not None and braces == "{}" and self.depth == 1:
            return [*inner, *text(self._notation.ends)]
        behind = self._space if inner else []
        return [*text(braces[0]), *self._space, *inner, *behind, *text(braces[1])]

    def anything(self, depth: int) -> Tree:
        """Any value, nested at most to a depth."""
        string = self.string(ANYTHING) if self.is_bare else _STRING
        kinds = ("number", "boolean", "null")
        scalars = [string, *(self.ended(_SCALARS[kind]) for kind in kinds)]
        if depth <= 0:
            return either(scalars)
        with self.within():
            inner = self.anything(depth - 1)
            items = self.braced("[]", self.several(inner))
            fields = self.braced("{}", self.several([*self.named(self.any_name), *inner]))
        return either([*scalars, self.ended(items), self.ended(fields)])

    def instance(self, value: Any, path: str, depth: int = 0) -> Tree:
        """A given value, with white space between its parts.

        Raises:
            NoInstance: Bare text cannot hold it.
        """
        self._budget.check()
        if depth > MOST_NESTED:
            raise refused(path, f"is nested more than {MOST_NESTED} deep; flatten it")
        if isinstance(value, str) and self.is_bare:
            return self._bare_text(value, path)
        if not isinstance(value, Mapping | list):
            return self.ended(text(json.dumps(value, ensure_ascii=False)))
        with self.within():
            if isinstance(value, Mapping):
                each = []
                for key in sorted(value, key=str.lower) if self.is_bare else value:
                    self.begin_member(key)
                    one = self.instance(value[key], path, depth + 1)
                    each.append(([*self.name(key, path), *one], True))
                tree = self.braced("{}", members(each, self.between) if each else [])
            else:
                each = [(self.instance(one, path, depth + 1), True) for one in value]
                tree = self.braced("[]", members(each, self.comma) if each else [])
        return self.ended(tree)

    def _bare_text(self, value: str, path: str) -> Tree:
        """A given string without quotes."""
        assert self._notation is not None
        begins, ends = map(self._spell, self._notation.string)
        said = [*value.encode()]
        place = next(i for i in range(len(said) + 1) if (said + ends)[i : i + len(ends)] == ends)
        if place < len(said) or (self._is_mixed and is_json(value)):
            raise no_instance(path, f"has {value!a:.60}, which a call of this model cannot hold")
        return letters([*begins, *said, *ends])
