"""The grammar of an assistant's turn: prose, thoughts and calls of tools.

Calls have the form that the model's template shows (`FORMS`), and each is held to the schema of its
tool. Marks that are tokens of their own are letters, so that the same text spelt by plain tokens is
prose.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .forms import FORMS
from .limits import Budget, TooLarge
from .schema import arguments_tree, schema_tree
from .tools import Tools
from .trees import LETTERS, Tree, either, free, letters, parsed, repeated, text

# Bounds beyond which a tool that is not strict is not held to them: they take many states.
_LARGEST = {"minLength": 64, "maxLength": 64, "minItems": 8, "maxItems": 8}


def turn_tree(tools: Tools, budget: Budget, marks: Sequence[str] = ()) -> Tree:
    """The turn as an expression.

    Args:
        marks: Tokens that are the letters after the 256 bytes.

    Raises:
        ValueError: A strict tool's schema cannot be held; its place comes first.
    """
    return _Writer(tools, budget, marks).turn()


def thoughts_tree(tools: Tools, marks: Sequence[str] = ()) -> Tree:
    """The texts that end within thoughts."""
    return _Writer(tools, Budget(), marks).thoughts()


class _Writer:
    def __init__(self, tools: Tools, budget: Budget, marks: Sequence[str]):
        self._tools, self._budget, self._form = tools, budget, FORMS[tools.form]
        self._letters = {mark: 256 + i for i, mark in enumerate(marks)}
        self._opens = self._spelt(self._form.opens)
        self._think, self._end = map(self._spelt, self._form.think)
        # Thoughts with a budget stand at the beginning alone, so that their states are distinct.
        self._is_apart = tools.thinks and tools.budget is not None
        marks_of_thoughts = [*([] if self._is_apart else self._think), *self._end]
        self._others = [one for one in marks_of_thoughts if one > 255] if tools.thinks else []
        self._banned = [self._think] if self._is_apart else []
        self._has_calls = tools.choice != "none" and bool(tools.tools)
        ends = [self._end, *([self._opens] if self._has_calls else [])]
        self._within = free(ends)  # thoughts, up to their end or a call

    def _spelt(self, said: str) -> list[int]:
        """The letters of a text that may hold marks."""
        found: list[int] = []
        while said:
            mark = next((one for one in self._letters if said.startswith(one)), None)
            found += [*said[0].encode()] if mark is None else [self._letters[mark]]
            said = said[1 if mark is None else len(mark) :]
        return found

    def turn(self) -> Tree:
        """The whole turn, or the rest of it from a stage on."""
        tools = self._tools
        if isinstance(tools.stage, int):
            return [*self._arguments(tools.stage), *self._closes, *self._more()]
        if tools.stage == "names":
            for i in [i for i, tool in enumerate(tools.tools) if tool.strict]:
                self._arguments(i)  # or refuse
        calls = []
        if self._has_calls:
            calls = [*self._call(), *([] if tools.stage == "names" else self._more())]
        answer = self._prose()
        if tools.answer is not None:
            said, white = tools.answer
            tree = schema_tree(json.loads(said), self._budget, white == "compact")
            answer = [*repeated(text("\n"), 0, 2), *tree]
        space, has_prose = repeated(text("\n"), 0, 2), self._form.has_prose
        opened = [*space, *letters(self._opens), *calls]
        if not self._has_calls:
            body = answer
        elif tools.choice != "auto":
            body = opened
        elif tools.answer is None and has_prose:
            body = [*free(self._banned, self._opens, self._others), *calls]
            body = either([answer, body])
        else:
            body = either([answer, opened])
        holds = tools.choice not in ("auto", "none") or tools.answer is not None or self._is_apart
        if not tools.thinks or not (holds or not has_prose):
            return body  # thoughts are prose
        thought = [*self._within, *letters(self._end), *space, *body]
        if self._has_calls and has_prose:  # models open a call within their thoughts
            thought = either([thought, [*free([self._end], self._opens), *calls]])
        if tools.inside:
            return thought
        return either([body, [*space, *letters(self._think), *thought]])

    def thoughts(self) -> Tree:
        """Texts that end within thoughts."""
        begin = [] if self._tools.inside else [*repeated(text("\n"), 0, 2), *letters(self._think)]
        return [*begin, *self._within]

    def _prose(self) -> Tree:
        opens = [self._opens] if self._tools.tools else []
        if self._form.has_prose or not opens:
            return free([*opens, *self._banned], None, self._others)
        # What begins as a call does is one, and nothing else is.
        first = set(range(256)) - {*b" \n\r\t", self._opens[0]}
        begun = [[(LETTERS, one)] for one in [*sorted(first), *self._others]]
        rest = [*either(begun), *free([], None, self._others)]
        return [*repeated(parsed(r"[ \n\r\t]")), *repeated(rest, 0, 1)]

    @property
    def _closes(self) -> Tree:
        return letters(self._spelt(self._form.closes))

    def _more(self) -> Tree:
        """Further calls."""
        between = self._form.between
        if not self._tools.several or isinstance(self._tools.choice, int) or between is None:
            return []
        between = [*text(between), *letters(self._opens)]
        call = [*between, *self._call()]
        return repeated(call, 0, 1 if self._tools.stage != "whole" else None)

    def _call(self) -> Tree:
        """A call after its mark; without its arguments where these are another stage's."""
        choice, form = self._tools.choice, self._form
        numbers = [choice] if isinstance(choice, int) else range(len(self._tools.tools))
        trees = []
        for i in numbers:
            head = text(form.before_name + self._tools.tools[i].name + form.behind_name)
            is_whole = self._tools.stage == "whole"
            trees.append([*head, *(self._arguments(i) if is_whole else [])])
        closes = self._closes if self._tools.stage == "whole" else []
        return [*either(trees), *closes]

    def _arguments(self, number: int) -> Tree:
        tool = self._tools.tools[number]
        where = f"tools[{number}].function.parameters"
        schema = json.loads(tool.schema)
        held = _cheaper(schema), _plain(schema), {"type": "object"}
        for place, given in enumerate([schema] if tool.strict else held):
            try:
                tree = arguments_tree(given, self._budget, self._form.notation, self._spelt)
            except TooLarge:
                raise
            except ValueError as error:
                if tool.strict:
                    raise ValueError(f"{where}: {error}") from None
                continue
            if place:
                self._budget.notes[f"{where}: held to a part of it"] = None
            return tree
        raise ValueError(f"{where}: no arguments can be written; correct it")


def _cheaper(schema: Any) -> Any:
    """A schema without bounds that take many states."""
    if isinstance(schema, list):
        return [_cheaper(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: value if name in ("enum", "const") else _cheaper(value)
        for name, value in schema.items()
        if not (isinstance(value, int) and name in _LARGEST and value > _LARGEST[name])
    }


def _plain(schema: Any) -> Any:
    """A schema of the keywords that can always be held."""
    if not isinstance(schema, Mapping):
        return schema
    kept = ("type", "enum", "const")
    found: dict[str, Any] = {name: schema[name] for name in kept if name in schema}
    if isinstance(schema.get("$ref"), str):
        found["$ref"] = schema["$ref"]
    if isinstance(schema.get("items"), Mapping):
        found["items"] = _plain(schema["items"])
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            found["anyOf"] = [_plain(one) for one in schema[name]]
    for name in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(name), Mapping):
            found[name] = {key: _plain(one) for key, one in schema[name].items()}
    if isinstance(schema.get("required"), list):
        found["required"] = [
            one
            for one in schema["required"]
            if isinstance(one, str) and one in found.get("properties", {})
        ]
    return found
