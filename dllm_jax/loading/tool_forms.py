"""In which form a model's template shows calls of tools, and calls as text for those without.

A form is not taken from a family: models of one family write calls differently. A turn with a call
is rendered, and what stands there is compared with each form that is known.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dllm_jax.loading import chat
from dllm_jax.loading.turns import has_calls, plain
from dllm_jax.structured.forms import FORMS, written
from dllm_jax.structured.offers import Offer

_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "probe", "arguments": {"q": "x"}}}
_TALK = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "!"},
]
_SYSTEM = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

{calls}"""
_CALLS = """For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
_LIKE = "Write each function call as this one is written:\n"


class ToolForm(NamedTuple):
    """How a model's template has calls and thoughts.

    Attributes:
        name: Of `FORMS`; None for a template without tools, or in a form that is not known.
        thinks: It knows thoughts, between the marks of `reads`.
        is_text: The template reads no tools: they and their calls are given as text.
    """

    name: str | None
    thinks: bool
    is_text: bool = False
    reads: str = "hermes"


NO_FORM = ToolForm(None, False)


def tool_form(model: chat.TextModel, tool_format: str | None = None) -> ToolForm:
    """The form of a model.

    Args:
        tool_format: A name of `FORMS`, for a template that reads no tools.

    Raises:
        ValueError: There is no such form.
    """
    if tool_format is not None and tool_format not in FORMS:
        raise ValueError(f"tool_format={tool_format!a:.60} is not known; use {', '.join(FORMS)}")
    template = chat.template_of(model, tools=[_TOOL])
    if template is None:
        return NO_FORM
    marks = (name for name, form in FORMS.items() if form.think[1] in template.text)
    reads = next(marks, None)
    try:
        text = chat.render(model, _TALK, tools=[_TOOL])
    except ValueError:
        text = ""
    for name, form in FORMS.items():
        if written(form, "probe", {"q": "x"}) in text:
            return ToolForm(name, form.think[1] in template.text, reads=name)
    name, is_text = tool_format, tool_format is not None
    return ToolForm(name, reads is not None, is_text, name or reads or "hermes")


def laid_out(
    turns: Sequence[Mapping[str, Any]], offer: Offer | None, form: ToolForm
) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """A conversation with its tools in its texts, or as fields of the template.

    Raises:
        Unusable: As of `turns.plain`.
        ValueError: A schema is too deep.
    """
    said = plain(turns)
    tools = [] if offer is None else offer.shown
    if offer is not None and offer.choice == "none" and not has_calls(said):
        tools = []
    if form.is_text:
        return as_text(said, tools, form.name or ""), {}
    return said, {"tools": shown(tools, form)} if tools else {}


def is_inside(prompt: str, form: ToolForm) -> bool:
    """Whether a prompt ends within thoughts."""
    return form.thinks and prompt.rstrip().endswith(FORMS[form.reads].think[0].rstrip())


def check_answer(choice: str | int, form: ToolForm) -> None:
    """Refuse a form of the answer with tools that leave no place for one.

    Raises:
        ValueError: Why.
    """
    if choice not in ("auto", "none"):
        raise ValueError(
            "it says what prose must be, and this tool_choice allows none; leave one of the two out"
        )
    if not FORMS[form.reads].has_prose:
        raise ValueError(
            f"calls of this model ({form.reads}) are JSON as well, so that nothing tells the two "
            "apart; leave one of the two out"
        )


def end_ids(form: str, tokenizer: Any) -> list[int]:
    """Ids of the tokens with which turns of a form end, as they do with the model's stop ids."""
    known = tokenizer.get_added_vocab()
    return [known[name] for name in FORMS[form].ends if name in known]


def shown(tools: Sequence[Any], form: ToolForm) -> list[Any]:
    """The tools as the template reads them: Gemma's knows one type a value, and no reference.

    Raises:
        ValueError: A schema is too deep.
    """
    if form.name != "gemma4":
        return [*tools]
    found = []
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters", {})
        try:
            plain = {**function, "parameters": _plain(schema, schema, [MOST_REFERENCES])}
        except RecursionError:
            raise ValueError("tools: a schema is nested too deep; flatten it") from None
        found.append({**tool, "function": plain})
    return found


MOST_REFERENCES = 100  # of a tool that are written out; the others have no description


def _plain(schema: Any, root: Any, left: list[int]) -> dict[str, Any]:
    """A schema with the keywords that Gemma's template reads, and one type.

    Args:
        left: References that may still be written out.
    """
    found = dict(schema) if isinstance(schema, Mapping) else {}
    each = [one for name in ("allOf", "anyOf", "oneOf") for one in found.pop(name, [])]
    if isinstance(ref := found.pop("$ref", None), str) and left[0]:
        left[0] -= 1
        node = root
        for part in ref.removeprefix("#/").split("/"):
            node = node.get(part) if isinstance(node, Mapping) else None
        each.append(node)
    kinds = [_plain(one, root, left) for one in each]
    for one in kinds:
        if one.get("type") != "null":
            found = {**one, **found}
    types = found.get("type")
    types = types if isinstance(types, list) else [types] if types else []
    if "null" in types or any(one.get("type") == "null" for one in kinds):
        found["nullable"] = True
    usual = "object" if "properties" in found else "array" if "items" in found else "string"
    is_null = types == ["null"] and not kinds
    found["type"] = "null" if is_null else next((one for one in types if one != "null"), usual)
    if isinstance(found.get("properties"), Mapping):
        named = found["properties"].items()
        found["properties"] = {name: _plain(one, root, left) for name, one in named}
    if "items" in found:
        found["items"] = _plain(found["items"], root, left)
    read = ("description", "type", "enum", "items", "properties", "required", "nullable")
    return {name: found[name] for name in read if name in found}


def as_text(
    turns: Sequence[Mapping[str, Any]], tools: Sequence[Any], form: str
) -> list[Mapping[str, Any]]:
    """A conversation without tools, calls and results, which are in its texts.

    Args:
        turns: As of `turns.plain`.
    """
    found: list[Mapping[str, Any]] = []
    if tools:
        calls = (
            _CALLS if form == "hermes" else _LIKE + written(FORMS[form], "NAME", {"FIELD": "..."})
        )
        said = "\n".join(json.dumps(one, ensure_ascii=False) for one in tools)
        said = _SYSTEM.format(tools=said, calls=calls)
        if turns and turns[0].get("role") == "system":
            said, turns = f"{turns[0].get('content') or ''}\n\n{said}", turns[1:]
        found.append({"role": "system", "content": said})
    was_result = False
    for turn in turns:
        content = turn.get("content") or ""
        if calls := turn.get("tool_calls"):
            texts = [
                written(FORMS[form], one["function"]["name"], one["function"]["arguments"])
                for one in calls
            ]
            kept = [content, *texts] if content else texts
            turn = {"role": "assistant", "content": "\n".join(kept)}
        is_result = turn.get("role") == "tool"
        if is_result:
            fields = {"name": turn.get("name"), "content": content, "json": json.dumps(content)}
            said = FORMS[form].result.format(**fields)
            if was_result:
                said = f"{found.pop()['content']}\n{said}"
            turn = {"role": "user", "content": said}
        was_result = is_result
        found.append(turn)
    return found
