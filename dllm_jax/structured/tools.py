"""An assistant's turn with calls of tools, as a grammar and as a parser of what it wrote.

A turn is prose, thoughts and calls in the form that the model's template shows (`FORMS`). The
grammar holds each call to the schema of its tool; `Turn` walks over the tokens that were written
and says what they are. Marks that are tokens of their own are letters, so that the same text spelt
by plain tokens is prose.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from .limits import Budget, TooLarge
from .schema import schema_tree
from .trees import Tree, either, free, letters, repeated, text

MOST_TOOLS, MOST_CALLS = 128, 16
MOST_LENGTH, MOST_ITEMS = 64, 8  # beyond which a tool that is not strict is not held
MOST_WHOLE = 8192  # bytes of schemas that are tried as one automaton


class Form(NamedTuple):
    """How a template writes calls: mark, name, arguments, mark."""

    opens: str
    before_name: str
    behind_name: str
    closes: str
    between: str


FORMS = {
    "hermes": Form("<tool_call>", '\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n"),
}
THINK, END_THINK = "<think>", "</think>"
MARKS = ("<tool_call>", "</tool_call>", THINK, END_THINK)


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool.

    Attributes:
        schema: JSON text of the schema of its arguments, an object.
        strict: A keyword that cannot be held is refused; else it is left out with a note.
    """

    name: str
    schema: str
    strict: bool = False


@dataclasses.dataclass(frozen=True)
class Tools:
    """A turn that may call tools, or must.

    Attributes:
        choice: "auto", "required", "none", or the number of the one to call.
        several: Several calls may follow one another.
        form: A name of `FORMS`.
        thinks: Thoughts may come first, between `<think>` and `</think>`.
        inside: The prompt ends within them.
        stage: "whole"; "names": up to a call's arguments, where the text ends; or the number of the
            tool whose arguments come first, after which it goes on as "names".
    """

    tools: tuple[Tool, ...]
    choice: str | int = "auto"
    several: bool = True
    form: str = "hermes"
    thinks: bool = False
    inside: bool = False
    stage: str | int = "whole"

    @staticmethod
    def of(fields: Mapping[str, Any]) -> "Tools":
        """From plain values, see `fields`."""
        tools = tuple(Tool(*one) for one in fields["tools"])
        return Tools(**{**fields, "tools": tools})

    @property
    def fields(self) -> dict[str, Any]:
        """Plain values."""
        found = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {**found, "tools": [dataclasses.astuple(one) for one in self.tools]}

    @property
    def is_large(self) -> bool:
        """Whether its calls are better held in stages from the beginning."""
        return sum(len(one.schema) for one in self.tools) > MOST_WHOLE

    @property
    def loosest(self) -> "Tools | None":
        """A stage whose arguments are any object; None where they have to be held."""
        if not isinstance(self.stage, int) or self.tools[self.stage].strict:
            return None
        tools = [*self.tools]
        tools[self.stage] = dataclasses.replace(tools[self.stage], schema='{"type": "object"}')
        return dataclasses.replace(self, tools=tuple(tools))

    def tree(self, budget: Budget, marks: Sequence[str] = ()) -> Tree:
        """The turn as an expression.

        Args:
            marks: Tokens that are the letters after the 256 bytes.

        Raises:
            ValueError: A strict tool's schema cannot be held; its place comes first.
        """
        return _Writer(self, budget, marks).turn()


class _Writer:
    def __init__(self, tools: Tools, budget: Budget, marks: Sequence[str]):
        self._tools, self._budget, self._form = tools, budget, FORMS[tools.form]
        self._letters = {mark: 256 + i for i, mark in enumerate(marks)}
        self._opens = self._spelt(self._form.opens)
        self._think, self._end = self._spelt(THINK), self._spelt(END_THINK)
        thoughts = (THINK, END_THINK) if tools.thinks else ()
        self._others = [self._letters[one] for one in thoughts if one in self._letters]

    def _spelt(self, mark: str) -> list[int]:
        return [self._letters[mark]] if mark in self._letters else [*mark.encode()]

    def _text(self, said: str) -> Tree:
        """A text that may hold one mark."""
        for mark in self._letters:
            before, found, behind = said.partition(mark)
            if found:
                return [*text(before), *letters([self._letters[mark]]), *text(behind)]
        return text(said)

    def turn(self) -> Tree:
        """The whole turn, or the rest of it from a stage on."""
        tools = self._tools
        if isinstance(tools.stage, int):
            return [*self._arguments(tools.stage), *self._text(self._form.closes), *self._more()]
        free_text = free([self._opens], None, self._others)
        if tools.choice == "none":
            return free_text
        if tools.stage == "names":
            for i in [i for i, tool in enumerate(tools.tools) if tool.strict]:
                self._arguments(i)  # or refuse
        calls = [*self._call(), *([] if tools.stage == "names" else self._more())]
        if tools.choice == "auto":
            return either([free_text, [*free([], self._opens, self._others), *calls]])
        space = repeated(text("\n"), 0, 2)
        opened = [*space, *letters(self._opens)]
        if not tools.thinks:
            return [*opened, *calls]
        thought = either(
            [
                [*free([self._opens], self._end), *opened],
                free([self._end], self._opens),  # models open a call within their thoughts
            ]
        )
        thought = thought if tools.inside else [*space, *letters(self._think), *thought]
        begins = thought if tools.inside else either([opened, thought])
        return [*begins, *calls]

    def _more(self) -> Tree:
        """Further calls."""
        if not self._tools.several or isinstance(self._tools.choice, int):
            return []
        between = [*text(self._form.between), *letters(self._opens)]
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
        closes = self._text(form.closes) if self._tools.stage == "whole" else []
        return [*either(trees), *closes]

    def _arguments(self, number: int) -> Tree:
        tool = self._tools.tools[number]
        where = f"tools[{number}].function.parameters"
        schema, budget = json.loads(tool.schema), self._budget
        try:
            given = schema if tool.strict else _cheaper(schema)
            return schema_tree(given, budget, compact=True, spaced=True)
        except TooLarge:
            raise
        except ValueError as error:
            if tool.strict:
                raise ValueError(f"{where}: {error}") from None
        for plain in (_plain(schema), {"type": "object"}):
            try:
                tree = schema_tree(plain, budget, compact=True, spaced=True)
            except TooLarge:
                raise
            except ValueError:
                continue
            budget.notes[f"{where}: held to a part of it"] = None
            return tree
        raise ValueError(f"{where}: no arguments can be written; correct it")


def _cheaper(schema: Any) -> Any:
    """A schema without bounds that take many states."""
    if isinstance(schema, list):
        return [_cheaper(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    large = {
        "minLength": MOST_LENGTH,
        "maxLength": MOST_LENGTH,
        "maxItems": MOST_ITEMS,
        "minItems": MOST_ITEMS,
    }
    return {
        name: value if name in ("enum", "const") else _cheaper(value)
        for name, value in schema.items()
        if not (isinstance(value, int) and name in large and value > large[name])
    }


_PLAIN = ("type", "enum", "const", "items", "anyOf", "$ref")
_NAMED = ("properties", "$defs", "definitions")


def _plain(schema: Any) -> Any:
    """A schema of the keywords that can always be held."""
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {name: schema[name] for name in _PLAIN[:3] if name in schema}
    if isinstance(schema.get("$ref"), str):
        found["$ref"] = schema["$ref"]
    if isinstance(schema.get("items"), Mapping):
        found["items"] = _plain(schema["items"])
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            found["anyOf"] = [_plain(one) for one in schema[name]]
    for name in _NAMED:
        if isinstance(schema.get(name), Mapping):
            found[name] = {key: _plain(one) for key, one in schema[name].items()}
    if isinstance(schema.get("required"), list):
        found["required"] = [
            one for one in schema["required"] if one in found.get("properties", {})
        ]
    return found


# --- what was written ----------------------------------------------------------------------------

Kind = Literal["text", "thought", "call", "arguments", "end"]


class Piece(NamedTuple):
    """A piece of a turn.

    Attributes:
        kind: "text" and "thought": more of either; "call": one of the tool named `text` begins;
            "arguments": more of its JSON; "end": it is whole.
    """

    kind: Kind
    text: str


class Turn:
    """The pieces of a turn, of tokens in any portions.

    Args:
        spelt: Bytes by id, None for others (`token_bytes`).
        marks: Ids of marks by name (`mark_ids`).

    Attributes:
        waits: The number of the tool whose arguments begin where the tokens end; None elsewhere.
        thought_tokens: Tokens within thoughts, their marks included.
    """

    def __init__(self, tools: Tools, spelt: Sequence[bytes | None], marks: Mapping[str, int]):
        form = FORMS[tools.form]
        self._spelt, self._tools = spelt, tools
        # No text of UTF-8 holds the byte 255. Marks that mean nothing in this turn are text.
        used = (form.opens + form.closes) if tools.tools else ""
        used += THINK + END_THINK if tools.thinks else ""
        self._names = {
            i: b"\xff%d;" % i if mark in used else mark.encode() for mark, i in marks.items()
        }

        def said(text: str) -> bytes:
            data = text.encode()
            for mark, i in marks.items():
                data = data.replace(mark.encode(), self._names[i])
            return data

        self._opens, self._closes = said(form.opens), said(form.closes)
        if not tools.tools:
            self._opens = b"\xff;"  # nothing is called
        self._head, self._mid = form.before_name.encode(), form.behind_name.encode()
        self._thoughts = (said(THINK), said(END_THINK)) if tools.thinks else None
        self._numbers = {one.name: i for i, one in enumerate(tools.tools)}
        self._data = b""
        self._mode = "thought" if tools.inside and tools.thinks else "text"
        self._is_begun, self._held = False, b""
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self.waits: int | None = None
        self.thought_tokens = 0

    def feed(self, token_ids: Iterable[int], last: bool = False) -> list[Piece]:
        """The pieces that are new.

        Args:
            last: These are the last tokens: a call that is not whole has no end.
        """
        pieces: list[Piece] = []
        for token in token_ids:
            was_thought = self._mode == "thought"
            self._data += self._names.get(token) or (self._of(token)).replace(b"\xff", b"\xfe")
            while self._step(pieces, False):
                pass
            self.thought_tokens += was_thought or self._mode == "thought"
        if last:
            while self._step(pieces, True):
                pass
        return _joined(pieces)

    def _of(self, token: int) -> bytes:
        return (self._spelt[token] if token < len(self._spelt) else None) or b""

    def _step(self, pieces: list[Piece], last: bool) -> bool:
        """Read on; False where more bytes are needed."""
        return getattr(self, f"_{self._mode}")(pieces, last)

    # --- prose and thoughts ----------------------------------------------------------------------

    def _text(self, pieces: list[Piece], last: bool) -> bool:
        if not self._is_begun:  # thoughts come first, or not at all
            bare = self._data.lstrip()
            if self._thoughts is not None and not last:
                think = self._thoughts[0]
                if bare.startswith(think):
                    self._data, self._mode = bare[len(think) :], "thought"
                    return True
                if think.startswith(bare):
                    return False
            self._is_begun = True
        return self._until((self._opens,), "text", pieces, last)

    def _thought(self, pieces: list[Piece], last: bool) -> bool:
        assert self._thoughts is not None
        return self._until((self._thoughts[1], self._opens), "thought", pieces, last)

    def _until(self, marks: tuple[bytes, ...], kind: Kind, pieces: list[Piece], last: bool) -> bool:
        """Show what comes before a mark, without the white space at either end of thoughts."""
        found = [(at, mark) for mark in marks if (at := self._data.find(mark)) >= 0]
        at, mark = min(found, default=(len(self._data), b""))
        if not found and not last:
            at -= max(_beginning(self._data, one) for one in marks)
        before = self._held + _A_NAME.sub(b"", self._data[:at])  # marks where none belongs
        if kind == "thought" and not self._is_begun:
            before = before.lstrip()
        whole = _whole(before) if not (found or last) else len(before)
        shown = before[:whole]
        if found or not last or kind == "thought":
            shown = shown.rstrip()  # what ends in white space may end before a mark
        self._held = before[len(shown) :]
        if shown:
            self._is_begun = True
            pieces.append(Piece(kind, shown.decode(errors="replace")))
        self._data = self._data[at + len(mark) :]
        if not found:
            return False
        self._held, self._is_begun = b"", True
        self._mode = "name" if mark == self._opens else "behind"
        return True

    def _behind(self, pieces: list[Piece], last: bool) -> bool:
        """White space after thoughts."""
        self._data = self._data.lstrip()
        if not self._data:
            return False
        self._mode = "text"
        return True

    # --- calls -----------------------------------------------------------------------------------

    def _name(self, pieces: list[Piece], last: bool) -> bool:
        if self._behind_name(pieces):
            self._mode = "arguments"
            return True
        return False

    def _behind_name(self, pieces: list[Piece]) -> bool:
        name, found, rest = self._data.removeprefix(self._head).partition(self._mid)
        if not self._data.startswith(self._head) or not found:
            return False
        self._data = rest
        self.waits = self._numbers.get(name.decode(errors="replace"))
        pieces.append(Piece("call", name.decode(errors="replace")))
        self._depth, self._in_string, self._is_escaped = 0, False, False
        return True

    def _arguments(self, pieces: list[Piece], last: bool) -> bool:
        for i, byte in enumerate(self._data):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                else:
                    self._is_escaped = byte == 0x5C
                    self._in_string = byte != 0x22
                continue
            self._in_string = byte == 0x22
            self._depth += (byte in b"{[") - (byte in b"}]")
            if byte in b"}]" and self._depth == 0:
                self._show(pieces, self._data[: i + 1])
                self._data, self._mode = self._data[i + 1 :], "close"
                return True
        if self._data:
            self._show(pieces, self._data)
            self._data = b""
        return False

    def _show(self, pieces: list[Piece], data: bytes) -> None:
        data = self._held + data
        size = _whole(data)
        self._held = data[size:]
        if data:
            self.waits = None
        if size:
            pieces.append(Piece("arguments", data[:size].decode(errors="replace")))

    def _close(self, pieces: list[Piece], last: bool) -> bool:
        if not self._data.startswith(self._closes):
            return False
        self._data, self._mode = self._data[len(self._closes) :], "next"
        pieces.append(Piece("end", ""))
        return True

    def _next(self, pieces: list[Piece], last: bool) -> bool:
        at = self._data.find(self._opens)
        if at < 0:
            return False
        self._data, self._mode = self._data[at + len(self._opens) :], "name"
        return True


_A_NAME = re.compile(rb"\xff[0-9]+;")


def mark_ids(added: Mapping[str, int]) -> dict[str, int]:
    """The ids of marks that are tokens, of a tokenizer's added ones."""
    return {mark: added[mark] for mark in MARKS if mark in added}


def _beginning(data: bytes, mark: bytes) -> int:
    """How many of the last bytes may begin a mark."""
    return next(n for n in range(len(mark) - 1, -1, -1) if n == 0 or data.endswith(mark[:n]))


def _whole(data: bytes) -> int:
    """How many of the first bytes are whole characters."""
    for size in range(1, min(4, len(data)) + 1):
        byte = data[-size]
        if byte & 0xC0 != 0x80:
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return len(data) if size >= needed else len(data) - size
    return len(data)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one."""
    found: list[Piece] = []
    for piece in pieces:
        is_more = found and found[-1].kind == piece.kind and piece.kind not in ("call", "end")
        if is_more:
            found[-1] = Piece(piece.kind, found[-1].text + piece.text)
        else:
            found.append(piece)
    return found
