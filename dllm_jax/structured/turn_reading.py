"""What an assistant's turn was: prose, thoughts and calls, read from its tokens as they come.

Marks that are tokens of their own count as marks; the same text spelt by plain tokens is prose.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from .forms import FORMS, MARKS, beginning, reading
from .tools import Tools

MOST_CALLS = 16
_NO_MARK = b"\xff;"  # nothing is called
_A_NAME = re.compile(rb"\xff[0-9]+;")

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
        self._form, self._num_calls = form, 0
        self._reader: Any = None  # of the arguments of a call: a `Reader`
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
        name, found, rest = self._data.removeprefix(self._head).partition(self._mid)
        if not self._data.startswith(self._head) or not found:
            return False
        self._data, self._mode, named = rest, "arguments", name.decode(errors="replace")
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
