"""Tools as clients offer them, in OpenAI's form, to what a turn is held to."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .tools import Tool

MOST_TOOLS = 128
MOST_SCHEMA_BYTES, MOST_DEPTH = 256 << 10, 32
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_NOTES = ("title", "description", "$comment")  # texts of a schema that hold to nothing
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples")


class BadTool(ValueError):
    """A tool or a choice that is refused.

    Attributes:
        param: The field at fault, as "tools[0].function.name".
    """

    def __init__(self, message: str, param: str, code: str = "invalid_tool"):
        super().__init__(f"{param}{message}")
        self.param, self.code = param, code


class Offer(NamedTuple):
    """The tools that a request offers.

    Attributes:
        shown: The tools as templates read them.
        tools: Those that may be called.
        choice: As of `Tools.choice`.
        several: Calls may follow one another.
    """

    shown: list[dict[str, Any]]
    tools: tuple[Tool, ...]
    choice: str | int
    several: bool


NO_OFFER = Offer([], (), "none", False)


def offered(tools: Any, choice: Any = None, several: bool | None = None) -> Offer | None:
    """The offer of a request; None without tools.

    Args:
        tools: {"type": "function", "function": {"name", "description", "parameters", "strict"}}.
        choice: "auto", "required", "none", {"type": "function", "function": {"name"}}, or
            {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}; None: "auto".
        several: `parallel_tool_calls`; None: True.

    Raises:
        BadTool: One of them is none, or they do not belong together.
    """
    if not isinstance(tools, Sequence | None) or isinstance(tools, str):
        raise BadTool(f"={tools!a:.60} is no list of tools; give one", "tools")
    if not tools:
        if choice not in (None, "auto", "none"):
            raise BadTool(
                f"={_said(choice)}: there are no tools to choose from; give tools",
                "tool_choice",
                "invalid_value",
            )
        return None
    if len(tools) > MOST_TOOLS:
        raise BadTool(f" has {len(tools)} tools; at most {MOST_TOOLS} are taken", "tools")
    shown = [_function(one, f"tools[{i}]") for i, one in enumerate(tools)]
    made = [_tool(one, f"tools[{i}].function") for i, one in enumerate(shown)]
    numbers: dict[str, int] = {}
    for i, one in enumerate(made):
        if numbers.setdefault(one.name, i) != i:
            raise BadTool(
                f"={one.name!a:.60} is the name of tools[{numbers[one.name]}], too; give each tool "
                "its own",
                f"tools[{i}].function.name",
            )
    size = sum(len(one.schema) for one in made)
    if size > MOST_SCHEMA_BYTES:
        raise BadTool(
            f" have schemas of {size} bytes; at most {MOST_SCHEMA_BYTES} are compiled: offer fewer",
            "tools",
        )
    mode, names = _chosen(choice)
    for name in names or ():
        if name not in numbers:
            said = f"={name!a:.60} names no tool; name one of them"
            raise BadTool(said, "tool_choice", "invalid_value")
    if mode == "named":
        return Offer(shown, tuple(made), numbers[(names or [""])[0]], several is not False)
    kept = made if names is None else [made[numbers[name]] for name in dict.fromkeys(names)]
    return Offer(shown, tuple(kept), mode, several is not False)


def _said(value: Any) -> str:
    return f"{value!a:.60}"


def _function(tool: Any, where: str) -> dict[str, Any]:
    """A tool as templates read it."""
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise BadTool(f"={_said(kind)}: only functions are called; leave it out", f"{where}.type")
    given = tool.get("function")
    if not isinstance(given, Mapping):
        raise BadTool(
            f'={_said(given)} is no function; give {{"name", "description", "parameters"}}',
            f"{where}.function",
        )
    names = ("name", "description", "parameters")
    said = {name: given[name] for name in names if given.get(name) is not None}
    said = {**said, **({"strict": True} if given.get("strict") else {})}
    return {"type": "function", "function": said}


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    said = tool["function"]
    name, schema = said.get("name"), said.get("parameters", {})
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadTool(
            f"={_said(name)} is no name of up to 128 letters, digits and _ . : -; rename it",
            f"{where}.name",
        )
    if not isinstance(said.get("description", ""), str):
        raise BadTool(f"={_said(said['description'])} is no text", f"{where}.description")
    kinds = schema.get("type", "object") if isinstance(schema, Mapping) else None
    if not isinstance(schema, Mapping) or not (
        kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    ):
        raise BadTool(
            f"={_said(schema)} is no schema of an object; give one", f"{where}.parameters"
        )
    bare = {**_bare(schema, f"{where}.parameters", MOST_DEPTH), "type": "object"}
    others = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"} & bare.keys()
    if not (bare.get("properties") or bare.get("additionalProperties") or others):
        bare = {"type": "object", "maxProperties": 0}
    try:
        text = json.dumps(bare, ensure_ascii=False, allow_nan=False)
        text.encode()  # refuses halves of characters
    except (TypeError, ValueError, RecursionError) as error:
        why = ascii(str(error))[1:-1]
        raise BadTool(f": {why:.200}; give JSON", f"{where}.parameters") from None
    return Tool(name, text, bool(said.get("strict")))


def _bare(schema: Any, where: str, deep: int) -> Any:
    """A schema without its texts for readers."""
    if not deep:
        raise BadTool(f" is nested more than {MOST_DEPTH} deep; flatten it", where)
    if isinstance(schema, list):
        return [_bare(one, where, deep - 1) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {}
    for name, value in schema.items():
        if name in _NOTES and isinstance(value, str):
            continue
        if name in _MAPS and isinstance(value, Mapping):
            found[name] = {key: _bare(one, where, deep - 1) for key, one in value.items()}
        else:
            found[name] = value if name in _VALUES else _bare(value, where, deep - 1)
    return found


def _chosen(choice: Any) -> tuple[str, list[str] | None]:
    """The mode, and the names that it is about; None: of all."""
    if choice is None:
        return "auto", None
    if choice in ("auto", "none", "required"):
        return choice, None
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        if kind == "function" and isinstance(name := _named(choice), str):
            return "named", [name]
        allowed = choice.get("allowed_tools", choice)
        if kind == "allowed_tools" and isinstance(allowed, Mapping):
            listed = allowed.get("tools")
            names = [_named(one) for one in listed] if isinstance(listed, list | tuple) else []
            mode = allowed.get("mode", "auto")
            if (
                names
                and all(isinstance(one, str) for one in names)
                and mode in ("auto", "required")
            ):
                return mode, [str(one) for one in names]
    raise BadTool(
        f'={_said(choice)} is not known; use "auto", "required", "none" or '
        '{"type": "function", "function": {"name": ...}}',
        "tool_choice",
        "invalid_value",
    )


def _named(one: Any) -> Any:
    """The name in a choice, in the form of either route."""
    if not isinstance(one, Mapping):
        return None
    function = one.get("function")
    return function.get("name") if isinstance(function, Mapping) else one.get("name")
