"""Forms in which templates write calls of tools, as rows of a table.

A row says what stands around a call and its name, how arguments are written, how results are shown,
and between which marks thoughts stand. `written` is a call as text; `reading` turns the arguments
of any form into JSON, byte by byte, as they come.
"""

import json
import re
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

Reader = Generator[bytes, int, bytes]  # takes a byte, gives what is known of the JSON so far


class Notation(NamedTuple):
    """How arguments are written that are not JSON: strings stand as they are.

    Attributes:
        name: Before and after a name, which has no quotes.
        comma: Between members.
        ends: After the last member; what begins the arguments is the form's `behind_name`.
        string: Before and after a string.
        is_deep: Also of the values within, whose objects have their names in alphabetical order;
            else these are JSON, and `string` ends every value.
    """

    name: tuple[str, str]
    comma: str
    ends: str
    string: tuple[str, str]
    is_deep: bool


class Form(NamedTuple):
    """How a template writes calls, results and thoughts.

    Attributes:
        opens, closes: Marks of a call.
        before_name, behind_name: What stands around its name; the arguments follow.
        between: Between two calls; None: a turn has one call at most.
        notation: Of the arguments; None: JSON.
        think: Marks of thoughts.
        result: A result as text, of `name`, `content` and `json`, which is the content as JSON.
        has_prose: Prose may come before a call; else the first characters decide.
        ends: Tokens that end a turn as the model's stop ids do.
    """

    opens: str
    before_name: str
    behind_name: str
    closes: str
    between: str | None = "\n"
    notation: Notation | None = None
    think: tuple[str, str] = ("<think>", "</think>")
    result: str = "<tool_response>\n{content}\n</tool_response>"
    has_prose: bool = True
    ends: tuple[str, ...] = ()


_QUOTE = '<|"|>'
FORMS = {
    "hermes": Form("<tool_call>", '\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    "xml": Form(
        *("<tool_call>", "\n<function=", ">\n", "\n</tool_call>"),
        notation=Notation(
            ("<parameter=", ">\n"), "", "</function>", ("", "\n</parameter>\n"), False
        ),
    ),
    "gemma4": Form(
        *("<|tool_call>", "call:", "{", "<tool_call|>", ""),
        notation=Notation(("", ":"), ",", "}", (_QUOTE, _QUOTE), True),
        think=("<|channel>thought\n", "<channel|>"),
        result=f"<|tool_response>response:{{name}}{{{{value:{_QUOTE}{{content}}{_QUOTE}}}}}"
        "<tool_response|>",
        ends=("<|tool_response>",),
    ),
    "llama_json": Form(
        *('{"name": "', "", '", "parameters": ', "}", None),
        result='{{"output": {json}}}',
        has_prose=False,
    ),
}
# Tokens that may be letters of a grammar.
MARKS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>"),
    *("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", _QUOTE),
)


def written(form: Form, name: str, arguments: Mapping[str, Any]) -> str:
    """A call as text."""
    notation = form.notation
    if notation is None:
        said = json.dumps(arguments, ensure_ascii=False)
    elif notation.is_deep:
        said = _deep(notation, arguments)[1:]
    else:
        said = ""
        for key, value in arguments.items():
            value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            said += notation.name[0] + key + notation.name[1] + value + notation.string[1]
        said += notation.ends
    return form.opens + form.before_name + name + form.behind_name + said + form.closes


def _deep(notation: Notation, value: Any) -> str:
    if isinstance(value, str):
        return notation.string[0] + value + notation.string[1]
    if isinstance(value, Mapping):
        each = (f"{key}:{_deep(notation, value[key])}" for key in sorted(value, key=str.lower))
        return "{" + ",".join(each) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_deep(notation, one) for one in value) + "]"
    return json.dumps(value)


def kind_of(schema: Any) -> str:
    """How a value stands that is not quoted: "text", "json", or "either", which its text decides.

    Either is JSON if it can be read as JSON of another type than a string.
    """
    said = schema if isinstance(schema, Mapping) else {}
    listed = [said["const"]] if "const" in said else said.get("enum")
    if isinstance(listed, list):
        are_texts = {isinstance(one, str) for one in listed}
        return "either" if len(are_texts) != 1 else "text" if True in are_texts else "json"
    types = said.get("type")
    types = types if isinstance(types, list) else [types]
    if types == ["string"]:
        return "text"
    return "json" if types and all(one in _NO_TEXT for one in types) else "either"


_NO_TEXT = ("object", "array", "number", "integer", "boolean", "null")


def is_json(text: str) -> bool:
    """Whether a text is read as JSON of another type than a string, see `kind_of`."""
    try:
        return not isinstance(json.loads(text, parse_constant=_none), str)
    except (ValueError, RecursionError):
        return False


def _none(said: str) -> None:
    raise ValueError(f"{said} is no JSON")


# --- arguments to JSON, byte by byte -------------------------------------------------------------


def reading(form: Form, schema: Any, quote: bytes) -> Reader:
    """A reader of arguments, which returns when they are whole.

    Args:
        schema: Of the arguments.
        quote: The mark after a string, as it comes.
    """
    notation = form.notation
    if notation is None:
        return _json()
    if notation.is_deep:
        return _bare(quote)
    properties = schema.get("properties", {}) if isinstance(schema, Mapping) else {}
    return _parameters(notation, properties)


def _json() -> Reader:
    depth, in_string, is_escaped, out = 0, False, False, b""
    while True:
        byte = yield out
        out = bytes([byte])
        if in_string:
            in_string = byte != 0x22 or is_escaped
            is_escaped = byte == 0x5C and not is_escaped
            continue
        in_string = byte == 0x22
        depth += (byte in b"{[") - (byte in b"}]")
        if byte in b"}]" and not depth:
            return out


def _bare(quote: bytes) -> Reader:
    within, name, is_name, out = [0x7B], b"", True, b"{"
    while within:
        byte = yield out
        out = b""
        if is_name and byte not in b"}:":
            name += bytes([byte])
        elif is_name and byte == 0x3A:
            out, name, is_name = _said(name) + b": ", b"", False
        elif byte in b"{[":
            within.append(byte)
            out, is_name = bytes([byte]), byte == 0x7B
        elif byte in b"}]":
            within.pop()
            out, is_name = bytes([byte]), False
        elif byte == 0x2C:
            out, is_name = b", ", within[-1] == 0x7B
        elif byte == quote[0]:
            for _ in quote[1:]:
                yield b""
            out = yield from _until(quote, b'"', _escaped)
            out += b'"'
        else:
            out = bytes([byte])
    return out


def _parameters(notation: Notation, properties: Mapping[str, Any]) -> Reader:
    out, comma = b"{", b""
    begin, end = notation.name[0].encode(), notation.string[1].encode()
    while True:
        line = b""
        while not line.endswith(b">"):
            line += bytes([(yield out)])
            out = b""
        if line == notation.ends.encode():
            return b"}"
        yield b""  # the line's end
        name = line[len(begin) : -1]
        out, comma = comma + _said(name) + b": ", b", "
        kind = kind_of(properties.get(name.decode(errors="replace")))
        if kind == "text":
            out = yield from _until(end, out + b'"', _escaped)
            out += b'"'
        elif kind == "json":
            out = yield from _until(end, out, bytes)
        else:
            kept = bytearray()
            out = yield from _until(end, out, lambda data, kept=kept: kept.extend(data) or b"")
            text = kept.decode(errors="replace")
            out += bytes(kept) if is_json(text) else _said(bytes(kept))


def _until(end: bytes, out: bytes, write: Any) -> Reader:
    """Read the text before a mark through `write`; yields `out` first."""
    held = b""
    while True:
        held += bytes([(yield out)])
        if held == end:
            return b""
        kept = beginning(held, end)
        out, held = write(held[: len(held) - kept]), held[len(held) - kept :]


def beginning(data: bytes, mark: bytes) -> int:
    """How many of the last bytes may begin a mark."""
    return next(n for n in range(len(mark) - 1, -1, -1) if n == 0 or data.endswith(mark[:n]))


def _said(text: bytes) -> bytes:
    return json.dumps(text.decode(errors="replace"), ensure_ascii=False).encode()


def _escaped(data: bytes) -> bytes:
    return _SPECIAL.sub(lambda match: json.dumps(match[0].decode())[1:-1].encode(), data)


_SPECIAL = re.compile(rb'[\x00-\x1f"\\]')
