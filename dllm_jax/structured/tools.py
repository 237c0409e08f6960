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

from .forms import FORMS, MARKS, Reader, beginning, reading
from .limits import Budget, TooLarge
from .schema import arguments_tree, schema_tree
from .trees import LETTERS, Tree, either, free, letters, parsed, repeated, text

MOST_TOOLS, MOST_CALLS = 128, 16
MOST_LENGTH, MOST_ITEMS = 64, 8  # beyond which a tool that is not strict is not held
MOST_WHOLE = 8192  # bytes of schemas that are tried as one automaton


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
        thinks: Thoughts may come first, between the form's marks.
        inside: The prompt ends within them.
        answer: Schema and white space of a `JsonSchema` that stands in the place of prose.
        budget: Tokens by which thoughts have ended; None: no number is held to.
        at: The text goes on in this state of the automaton, after its budget of thoughts.
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
    answer: tuple[str, str] | None = None
    budget: int | None = None
    at: int | None = None

    @staticmethod
    def of(fields: Mapping[str, Any]) -> "Tools":
        """From plain values, see `fields`."""
        tools = tuple(Tool(*one) for one in fields["tools"])
        answer = fields.get("answer") and tuple(fields["answer"])
        return Tools(**{**fields, "tools": tools, "answer": answer})

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

    def thoughts(self, marks: Sequence[str] = ()) -> Tree:
        """The texts that end within thoughts."""
        return _Writer(self, Budget(), marks).thoughts()


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
        has_calls = tools.choice != "none" and bool(tools.tools)
        calls = []
        if has_calls:
            calls = [*self._call(), *([] if tools.stage == "names" else self._more())]
        answer = self._prose()
        if tools.answer is not None:
            said, white = tools.answer
            tree = schema_tree(json.loads(said), self._budget, white == "compact")
            answer = [*repeated(text("\n"), 0, 2), *tree]
        space, has_prose = repeated(text("\n"), 0, 2), self._form.has_prose
        opened = [*space, *letters(self._opens), *calls]
        if not has_calls:
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
        thought = [*self._within(has_calls), *letters(self._end), *space, *body]
        if has_calls and has_prose:  # models open a call within their thoughts
            thought = either([thought, [*free([self._end], self._opens), *calls]])
        if tools.inside:
            return thought
        return either([body, [*space, *letters(self._think), *thought]])

    def _within(self, has_calls: bool) -> Tree:
        return free([self._end, *([self._opens] if has_calls else [])])

    def thoughts(self) -> Tree:
        """Texts that end within thoughts."""
        begin = [] if self._tools.inside else [*repeated(text("\n"), 0, 2), *letters(self._think)]
        return [*begin, *self._within(self._tools.choice != "none" and bool(self._tools.tools))]

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
        schema, budget = json.loads(tool.schema), self._budget
        how = self._form.notation, self._spelt
        try:
            given = schema if tool.strict else _cheaper(schema)
            return arguments_tree(given, budget, *how)
        except TooLarge:
            raise
        except ValueError as error:
            if tool.strict:
                raise ValueError(f"{where}: {error}") from None
        for plain in (_plain(schema), {"type": "object"}):
            try:
                tree = arguments_tree(plain, budget, *how)
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
            one
            for one in schema["required"]
            if isinstance(one, str) and one in found.get("properties", {})
        ]
    return found


# --- what was written ----------------------------------------------------------------------------

Kind = Literal["text", "thought", "call", "arguments", "end"]


class Piece(NamedTuple):
    """A piece of a turn.

    Attributes:
        kind: "text" and "thought": more of either; "call": one of the tool named `text` begins;
            "arguments": more of its JSON; "end": it is whole.
        logprobs: Of the tokens of a "text", where they were asked for.
    """

    kind: Kind
    text: str
    logprobs: Sequence[Any] = ()


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
        quote = "" if form.notation is None else form.notation.string[1]
        used = form.opens + form.closes + quote if tools.tools else ""
        used += "".join(form.think) if tools.thinks else ""
        self._names = {
            i: b"\xff%d;" % i if mark in used else mark.encode() for mark, i in marks.items()
        }

        def said(text: str) -> bytes:
            data = text.encode()
            for mark, i in marks.items():
                data = data.replace(mark.encode(), self._names[i])
            return data

        self._opens, self._closes, self._quote = map(said, (form.opens, form.closes, quote))
        if not tools.tools:
            self._opens = _NO_MARK
        self._head, self._mid = form.before_name.encode(), form.behind_name.encode()
        think, end = map(said, form.think)
        self._thoughts = (think, end) if tools.thinks else None
        self._numbers = {one.name: i for i, one in enumerate(tools.tools)}
        self._data = b""
        self._mode = "thought" if tools.inside and tools.thinks else "text"
        self._is_begun, self._held = False, b""
        # Whether a call may come, however the text begins.
        self._is_open = form.has_prose and tools.answer is None
        self._form, self._reader, self._num_calls = form, _nothing(), 0
        self.waits: int | None = None
        self.thought_tokens = 0

    @property
    def is_prose(self) -> bool:
        """Whether the last token was prose, or what may begin a mark."""
        return self._mode == "text"

    @property
    def holds_back(self) -> bool:
        """Whether some of what was fed is not shown yet."""
        return bool(self._data or self._held)

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
        return joined(pieces)

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
        if not self._is_open and self._data:
            bare = self._data.lstrip()
            if not last and self._opens.startswith(bare) and bare != self._opens:
                return False
            if not bare.startswith(self._opens):
                self._opens = _NO_MARK
            self._is_open = True
        return self._until((self._opens,), "text", pieces, last)

    def _thought(self, pieces: list[Piece], last: bool) -> bool:
        assert self._thoughts is not None
        return self._until((self._thoughts[1], self._opens), "thought", pieces, last)

    def _until(self, marks: tuple[bytes, ...], kind: Kind, pieces: list[Piece], last: bool) -> bool:
        """Show what comes before a mark, without the white space at either end of thoughts."""
        found = [(at, mark) for mark in marks if (at := self._data.find(mark)) >= 0]
        at, mark = min(found, default=(len(self._data), b""))
        if not found and not last:
            at -= max(beginning(self._data, one) for one in marks)
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
        self._data, named = rest, name.decode(errors="replace")
        self.waits = number = self._numbers.get(named)
        pieces.append(Piece("call", named))
        schema = None if number is None else json.loads(self._tools.tools[number].schema)
        self._reader = reading(self._form, schema, self._quote)
        self._begun = next(self._reader)
        return True

    def _arguments(self, pieces: list[Piece], last: bool) -> bool:
        found, data = self._begun, self._data
        self._begun = b"" if data else found
        if data:
            self.waits = None
        for i, byte in enumerate(data):
            try:
                found += self._reader.send(byte)
            except StopIteration as end:
                self._show(pieces, found + end.value)
                self._data, self._mode = data[i + 1 :], "close"
                return True
        if data:
            self._show(pieces, found)
            self._data = b""
        return False

    def _show(self, pieces: list[Piece], data: bytes) -> None:
        data = self._held + data
        size = _whole(data)
        self._held = data[size:]
        if size:
            pieces.append(Piece("arguments", data[:size].decode(errors="replace")))

    def _close(self, pieces: list[Piece], last: bool) -> bool:
        if not self._data.startswith(self._closes):
            return False
        self._data, self._mode = self._data[len(self._closes) :], "next"
        self._num_calls += 1
        pieces.append(Piece("end", ""))
        return True

    def _next(self, pieces: list[Piece], last: bool) -> bool:
        at = self._data.find(self._opens)
        if at < 0 or self._num_calls == MOST_CALLS:
            return False
        self._data, self._mode = self._data[at + len(self._opens) :], "name"
        return True


def _nothing() -> Reader:
    yield b""
    return b""


_NO_MARK = b"\xff;"  # nothing is called
_A_NAME = re.compile(rb"\xff[0-9]+;")


def mark_ids(added: Mapping[str, int]) -> dict[str, int]:
    """The ids of marks that are tokens, of a tokenizer's added ones."""
    return {mark: added[mark] for mark in MARKS if mark in added}


def _whole(data: bytes) -> int:
    """How many of the first bytes are whole characters."""
    for size in range(1, min(4, len(data)) + 1):
        byte = data[-size]
        if byte & 0xC0 != 0x80:
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return len(data) if size >= needed else len(data) - size
    return len(data)


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one."""
    found: list[Piece] = []
    for piece in pieces:
        is_more = found and found[-1].kind == piece.kind and piece.kind not in ("call", "end")
        if is_more:
            last = found[-1]
            logprobs = *last.logprobs, *piece.logprobs
            found[-1] = Piece(piece.kind, last.text + piece.text, logprobs)
        else:
            found.append(piece)
    return found


def contents_of(pieces: Sequence[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    """Prose, thoughts, and the name and arguments of each whole call."""
    said = {"text": "", "thought": "", "call": "", "arguments": ""}
    calls = []
    for piece in pieces:
        if piece.kind == "call":
            said |= {"call": piece.text, "arguments": ""}
        elif piece.kind == "end":
            calls.append((said["call"], said["arguments"]))
        else:
            said[piece.kind] += piece.text
    return said["text"], said["thought"], calls
