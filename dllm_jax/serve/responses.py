"""`/v1/responses` without a store: OpenAI's items, of a conversation and of its answer.

Data flow: a body -> `wire.Chat` -> the request of the chat route -> pieces of turns -> items.
"""

from typing import Any

from dllm_jax.serve import generating, wire
from dllm_jax.serve.conversations import (
    NO_TEXT,
    SAME,
    chat_from,
    check_known,
    objects_of,
    own_names,
)
from dllm_jax.serve.exchange import Call
from dllm_jax.serve.refusals import Refusal, shown, unsupported
from dllm_jax.serve.response_items import Offered, ResponsesForm, unpacked
from dllm_jax.serve.service import Service
from dllm_jax.serve.strict_json import read_object
from dllm_jax.serve.turns import Texts

_READ = (
    *("input", "instructions", "tools", "tool_choice", "parallel_tool_calls"),
    *("max_output_tokens", "reasoning", "text"),
)
_IGNORED = (
    *("store", "include", "metadata", "client_metadata", "prompt_cache_key", "user"),
    *("safety_identifier", "service_tier", "prompt_cache_retention", "stream_options"),
    *("prompt_cache_options", "max_tool_calls", "top_logprobs"),
)
_LOGPROBS = "message.output_text.logprobs"
_NEUTRAL = {"background": False, "truncation": "disabled", "previous_response_id": None}


async def responses(service: Service, call: Call) -> Any:
    """`/v1/responses`."""
    service.check_state()
    fields = read_object(await call.body())
    body, tools, origins = chat_of(fields)

    def form(given: Any, texts: Texts) -> ResponsesForm:
        _, model, _, num_prompt_tokens, *_ = given
        return ResponsesForm(model, num_prompt_tokens, texts, fields, tools)

    with own_names(origins, "instructions", "input"):
        return await generating.answer_chat(service, call, body, form)


def chat_of(fields: dict[str, Any]) -> tuple[wire.Chat, Offered, list[int]]:
    """The conversation, the tools, and the item of each message.

    Raises:
        Refusal: It is none, or asks for what is not supported.
    """
    check_known(fields, (*SAME, *_READ, *_IGNORED), _NEUTRAL, ": nothing is stored here")
    said, origins = _turns(fields.get("input"))
    if fields.get("instructions"):
        said.insert(0, {"role": "system", "content": fields["instructions"]})
        origins.insert(0, -1)
    offered = _tools(fields.get("tools"))
    tools = offered.functions
    reasoning, text = objects_of(fields, "reasoning", "text")
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "custom":
        choice = {"type": "function", "name": choice.get("name")}
    with own_names(origins, "instructions", "input"):
        body = chat_from(
            fields,
            messages=said,
            max_tokens=fields.get("max_output_tokens"),
            tools=tools or None,
            tool_choice=choice if tools or choice not in ("auto", "none") else None,
            parallel_tool_calls=fields.get("parallel_tool_calls"),
            reasoning_effort=reasoning.get("effort"),
            response_format=_format(text.get("format")),
            **_logprobs(fields),
        )
    return body, offered, origins


def _logprobs(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of the chat route; what else a client wants included is not there."""
    include = fields.get("include")
    if not isinstance(include, list) or _LOGPROBS not in include:
        return {}
    return {"logprobs": True, "top_logprobs": fields.get("top_logprobs")}


def _format(form: Any) -> dict[str, Any] | None:
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else form
    if kind == "json_schema":
        return {"type": kind, "json_schema": {"schema": form.get("schema")}}
    if kind not in ("text", "json_object"):
        raise Refusal(
            f"text.format={shown(form)} is not known; use text, json_object or json_schema",
            param="text.format",
        )
    return {"type": kind}


def _turns(given: Any) -> tuple[list[dict[str, Any]], list[int]]:
    """The turns of an input, and the item that each begins with."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}], [0]
    if not isinstance(given, list) or not given or len(given) > wire.MAX_TURNS:
        raise Refusal(
            f"input={shown(given)} is no text and no list of 1 to {wire.MAX_TURNS} items; give one",
            param="input",
        )
    said: list[dict[str, Any]] = []
    origins: list[int] = []
    is_open = False  # the last turn is the assistant's, and takes further items
    for i, item in enumerate(given):
        where = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind in ("function_call", "custom_tool_call"):
            arguments = item.get("arguments")
            if kind == "custom_tool_call":
                arguments = {"input": item.get("input")}
            own = {"name": item.get("name"), "arguments": arguments}
            call = {"id": item.get("call_id"), "type": "function", "function": own}
            if not is_open:
                said.append({"role": "assistant", "content": ""})
                origins.append(i)
            said[-1].setdefault("tool_calls", []).append(call)
            is_open = True
            continue
        if kind == "reasoning":
            if not (is_open and "tool_calls" not in said[-1]):
                said.append({"role": "assistant", "content": ""})
                origins.append(i)
            text = _text(item.get("content") or [], f"{where}.content")
            text = text or unpacked(item.get("encrypted_content"))
            said[-1]["reasoning_content"] = text
            is_open = True
            continue
        if kind in ("function_call_output", "custom_tool_call_output"):
            text, call_id = _text(item.get("output"), f"{where}.output", True), item.get("call_id")
            if call_id is None and item.get("name"):  # what a host says of its own accord
                said.append({"role": "user", "content": text})
            else:
                said.append({"role": "tool", "tool_call_id": call_id, "content": text})
            is_open = False
        elif kind == "message":
            role = item.get("role")
            text = _text(item.get("content"), f"{where}.content")
            has_room = is_open and not said[-1]["content"] and "tool_calls" not in said[-1]
            if role == "assistant" and has_room:
                said[-1]["content"] = text
                continue
            said.append({"role": role, "content": text})
            is_open = role == "assistant"
        else:
            remedy = "leave it out"
            if kind == "item_reference":
                remedy = "set store: false, so that your client sends whole items"
            raise unsupported(
                f"{where}.type", f"{where}.type={shown(kind)} is not supported; {remedy}"
            )
        origins.append(i)
    empty = {"role": "assistant", "content": ""}  # of thoughts that cannot be read
    kept = [
        n for n, one in enumerate(said) if one not in (empty, empty | {"reasoning_content": ""})
    ]
    return [said[n] for n in kept], [origins[n] for n in kept]


_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


def _text(content: Any, where: str, is_result: bool = False) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(f"{where}={shown(content)} is no text and no list of parts", param=where)
    found = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if is_result and kind in ("input_image", "input_file"):
            found.append(NO_TEXT)
            continue
        if kind not in _PARTS:
            raise unsupported(
                f"{where}[{i}].type",
                f"{where}[{i}].type={shown(kind)}: only text is read; leave it out",
            )
        found.append(str(part.get("text") or part.get("refusal") or ""))
    return "\n".join(found)


def _tools(tools: Any, space: str | None = None) -> Offered:
    if tools is not None and not isinstance(tools, list):
        raise Refusal(f"tools={shown(tools)} is no list of tools; give one", param="tools")
    found = Offered([], {}, set(), [])
    for i, tool in enumerate(tools or ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise Refusal(
                f'tools[{i}]={shown(tool)} has no type; give "function"',
                param=f"tools[{i}].type",
                code="invalid_tool",
            )
        if kind == "function":
            found.functions.append({"type": "function", "function": tool})
            if space is not None:
                found.spaces[str(tool.get("name"))] = space
        elif kind == "custom" and (text := _custom_text(tool)) is not None:
            own = {"type": "object", "properties": {"input": text}, "required": ["input"]}
            function = {"name": tool.get("name"), "description": tool.get("description")}
            found.functions.append({"type": "function", "function": function | {"parameters": own}})
            found.customs.add(str(tool.get("name")))
        elif kind == "namespace":
            inner = _tools(tool.get("tools"), str(tool.get("name")))
            found.functions.extend(inner.functions)
            found.spaces.update(inner.spaces)
            found.customs.update(inner.customs)
            found.left_out.extend(inner.left_out)
        else:
            found.left_out.append(str(tool.get("name") or kind)[:64])
    return found


def _custom_text(tool: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of a custom tool's text; None: its grammar is not held."""
    form = tool.get("format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") not in ("text", "grammar"):
        return None
    if form["type"] == "text":
        return {"type": "string"}
    if form.get("syntax") != "regex":
        return None
    return {"type": "string", "pattern": f"^(?:{form.get('definition')})$"}
