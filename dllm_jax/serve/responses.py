"""`/v1/responses` without a store: OpenAI's items, of a conversation and of its answer.

Data flow: a body -> `wire.Chat` -> the request of the chat route -> pieces of turns -> items.
"""

import base64
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from dllm_jax.serve import generating, wire
from dllm_jax.serve.answers import ending, notes_of
from dllm_jax.serve.exchange import Call
from dllm_jax.serve.logs import random_id
from dllm_jax.serve.pipe import Delta, Usage, total
from dllm_jax.serve.refusals import Refusal, not_valid, shown
from dllm_jax.serve.service import Service
from dllm_jax.serve.stream import named_event
from dllm_jax.serve.turns import NO_TEXT, Texts, placed
from dllm_jax.structured import Piece

_READ = (
    *("model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls"),
    *("max_output_tokens", "temperature", "top_p", "stream", "reasoning", "text"),
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
    fields = wire.read_object(await call.body())
    body, tools, origins = chat_of(fields)

    def form(given: Any, texts: Texts) -> ResponsesForm:
        _, model, _, num_prompt_tokens, *_ = given
        return ResponsesForm(model, num_prompt_tokens, texts, fields, tools)

    try:
        return await generating.answer_chat(service, call, body, form)
    except Refusal as error:
        raise placed(error, origins, "instructions", "input") from None


class Offered(NamedTuple):
    """The tools of a request.

    Attributes:
        functions: In the chat route's form.
        spaces: Namespaces by the names of their functions: clients look calls up in them.
        customs: Names of tools whose input is a text, shown as functions with a field `input`.
        left_out: Hosted tools and those with a grammar that is no regular expression, by name.
    """

    functions: list[Any]
    spaces: dict[str, str]
    customs: set[str]
    left_out: list[str]


def chat_of(fields: dict[str, Any]) -> tuple[wire.Chat, Offered, list[int]]:
    """The conversation, the tools, and the item of each message.

    Raises:
        Refusal: It is none, or asks for what is not supported.
    """
    for name, value in fields.items():
        if name in _READ or name in _IGNORED or value in (None, [], {}):
            continue
        if name not in _NEUTRAL or value != _NEUTRAL[name]:
            raise Refusal(
                f"{name}={shown(value)} is not supported: nothing is stored here; leave it out",
                param=name,
                code="unsupported_parameter",
            )
    said, origins = _turns(fields.get("input"))
    if fields.get("instructions"):
        said.insert(0, {"role": "system", "content": fields["instructions"]})
        origins.insert(0, -1)
    offered = _tools(fields.get("tools"))
    tools = offered.functions
    reasoning, text = fields.get("reasoning") or {}, fields.get("text") or {}
    for name, value in (("reasoning", reasoning), ("text", text)):
        if not isinstance(value, dict):
            raise Refusal(f"{name}={shown(value)} is no object; give one", param=name)
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "custom":
        choice = {"type": "function", "name": choice.get("name")}
    made = {
        "messages": said,
        "model": fields.get("model"),
        "max_tokens": fields.get("max_output_tokens"),
        "temperature": fields.get("temperature"),
        "top_p": fields.get("top_p"),
        "stream": fields.get("stream"),
        "tools": tools or None,
        "tool_choice": choice if tools or choice not in ("auto", "none") else None,
        "parallel_tool_calls": fields.get("parallel_tool_calls"),
        "reasoning_effort": reasoning.get("effort"),
        "response_format": _format(text.get("format")),
        **_logprobs(fields),
    }
    kept = {name: value for name, value in made.items() if value is not None}
    try:
        return msgspec.convert(kept, wire.Chat, strict=True), offered, origins
    except msgspec.ValidationError as error:
        raise placed(not_valid(error), origins, "instructions", "input") from None


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
            text = text or _unpacked(item.get("encrypted_content"))
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
            raise Refusal(
                f"{where}.type={shown(kind)} is not supported; {remedy}",
                param=f"{where}.type",
                code="unsupported_parameter",
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
            raise Refusal(
                f"{where}[{i}].type={shown(kind)}: only text is read; leave it out",
                param=f"{where}[{i}].type",
                code="unsupported_parameter",
            )
        found.append(str(part.get("text") or part.get("refusal") or ""))
    return "\n".join(found)


# Thoughts in `encrypted_content`, by which clients that store nothing send them back.
_OURS = "dllm."


def _packed(text: str) -> str:
    return _OURS + base64.b64encode(text.encode()).decode()


def _unpacked(content: Any) -> str:
    """The thoughts of an item; empty for another server's."""
    if not isinstance(content, str) or not content.startswith(_OURS):
        return ""
    with contextlib.suppress(ValueError):
        return base64.b64decode(content[len(_OURS) :], validate=True).decode()
    return ""


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


class ResponsesForm:
    """The answer of one request, as items."""

    is_chat = False

    def __init__(
        self,
        model: str,
        num_prompt_tokens: int,
        texts: Texts,
        fields: dict[str, Any],
        tools: Offered,
    ):
        self.texts, self._num_prompt_tokens = texts, num_prompt_tokens
        self._spaces, self._customs = tools.spaces, tools.customs
        include = fields.get("include")
        self._packs = isinstance(include, list) and "reasoning.encrypted_content" in include
        self._input = ""  # the arguments of an open custom call
        self._num_events = 0
        self._items: list[dict[str, Any]] = []  # that are whole
        self._open: dict[str, Any] | None = None
        self._ends: dict[str, Any] = {}
        self._response: dict[str, Any] = {
            "id": f"resp_{random_id()[:24]}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": fields.get("instructions"),
            "max_output_tokens": fields.get("max_output_tokens"),
            "model": model,
            "output": [],
            "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (fields.get("reasoning") or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": fields.get("temperature"),
            "text": fields.get("text") or {"format": {"type": "text"}},
            "tool_choice": fields.get("tool_choice") or "auto",
            "tools": fields.get("tools") or [],
            "top_p": fields.get("top_p"),
            "truncation": "disabled",
            "usage": None,
            "metadata": fields.get("metadata") or {},
        }
        if tools.left_out:
            self._response["dllm"] = {"left_out": tools.left_out}

    # --- a stream --------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        said = {"type": f"response.{kind}", "sequence_number": number}
        return named_event(said | fields)

    def opened(self, choice: int) -> Iterator[bytes]:
        """The response begins."""
        yield self._event("created", response=self._response)
        yield self._event("in_progress", response=self._response)

    def said(self, choice: int, piece: Piece) -> Iterator[bytes]:
        """A piece of the response."""
        if piece.kind == "end":
            yield from self._close()
        elif piece.kind == "call":
            yield from self._close()
            space, self._input = self._spaces.get(piece.text), ""
            item = _call(piece.text, piece.text in self._customs)
            yield self._added(item | ({"namespace": space} if space else {}))
        elif piece.kind == "arguments" and self._open is not None and "input" in self._open:
            self._input += piece.text
        elif piece.kind == "arguments" and self._open is not None:
            self._open["arguments"] += piece.text
            yield self._more("function_call_arguments.delta", delta=piece.text)
        else:
            is_text = piece.kind == "text"
            item = _message() if is_text else _reasoning()
            if self._open is None or self._open["type"] != item["type"]:
                yield from self._close()
                yield self._added(item)
                yield self._more("content_part.added", content_index=0, part=_part(item, ""))
            assert self._open is not None
            part = self._open["content"][0]
            part["text"] += piece.text
            more = {"content_index": 0, "delta": piece.text}
            if is_text:
                part["logprobs"] += piece.logprobs
                yield self._more("output_text.delta", **more, logprobs=list(piece.logprobs))
            else:
                yield self._more("reasoning_text.delta", **more)

    def _added(self, item: dict[str, Any]) -> bytes:
        shown = item | ({"content": []} if "content" in item else {})
        self._open = item
        if "content" in item:
            item["content"] = [_part(item, "")]
        place = len(self._items)
        return self._event("output_item.added", output_index=place, item=shown)

    def _more(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._items)}
        return self._event(kind, **place, **fields)

    def _close(self) -> Iterator[bytes]:
        """The open item is whole."""
        item = self._open
        if item is None:
            return
        item["status"] = "completed"
        if item["type"] == "custom_tool_call":
            item["input"] = str(json.loads(self._input).get("input", ""))  # loosest: any object
            yield self._more("custom_tool_call_input.delta", delta=item["input"])
            yield self._more("custom_tool_call_input.done", input=item["input"])
        elif item["type"] == "function_call":
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield self._more("function_call_arguments.done", **said)
        else:
            (part,) = item["content"]
            is_text = item["type"] == "message"
            said = {"content_index": 0, "text": part["text"]}
            if not is_text and self._packs:
                item["encrypted_content"] = _packed(part["text"])
            if is_text:
                yield self._more("output_text.done", **said, logprobs=part["logprobs"])
            else:
                yield self._more("reasoning_text.done", **said)
            yield self._more("content_part.done", content_index=0, part=part)
        yield self._event("output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open = None

    def ended(self, delta: Delta) -> Iterator[bytes]:
        """The text ends; a call that is not whole is left out, because clients run calls."""
        if self._open is not None and "content" in self._open:
            yield from self._close()
        self._ends = _ends(delta, self.texts.num_calls(delta.choice))

    def closed(self, num_tokens: int, usages: Sequence[Usage], has_usage: bool) -> bytes:
        """The end of the stream."""
        final = self._final(num_tokens, usages)
        return self._event(str(final["status"]), response=final)

    def failed(self, error: Refusal, request_id: str) -> bytes:
        """The end of a stream that fails."""
        code = "server_error" if error.status >= 500 else error.code
        said = {"code": code, "message": error.message}
        final = self._response | {"status": "failed", "error": said, "output": self._items}
        return self._event("failed", response=final)

    # --- an answer -------------------------------------------------------------------------------

    def whole(self, texts: Sequence[Delta], usages: Sequence[Usage]) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        (delta,) = texts
        for piece in self.texts.feed(delta):
            for _ in self.said(delta.choice, piece):
                pass
        for _ in self.ended(delta):
            pass
        return self._final(delta.num_tokens, usages)

    def _final(self, num_tokens: int, usages: Sequence[Usage]) -> dict[str, Any]:
        cached = total(usages).cached_tokens if usages else 0
        usage = {
            "input_tokens": self._num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": self.texts.thought_tokens},
            "total_tokens": self._num_prompt_tokens + num_tokens,
        }
        ends = notes_of(usages, self._response) | self._ends
        return self._response | ends | {"output": self._items, "usage": usage}


def _message() -> dict[str, Any]:
    return {
        "type": "message",
        "id": f"msg_{random_id()[:24]}",
        "role": "assistant",
        "content": [],
        "status": "in_progress",
    }


def _reasoning() -> dict[str, Any]:
    own = {"type": "reasoning", "id": f"rs_{random_id()[:24]}", "summary": [], "content": []}
    return own | {"status": "in_progress"}


def _call(name: str, is_custom: bool) -> dict[str, Any]:
    kind, field, prefix = ("function_call", "arguments", "fc")
    if is_custom:
        kind, field, prefix = ("custom_tool_call", "input", "ctc")
    ids = {"id": f"{prefix}_{random_id()[:24]}", "call_id": f"call_{random_id()[:24]}"}
    return {"type": kind, **ids, "name": name, field: "", "status": "in_progress"}


def _part(item: dict[str, Any], text: str) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _ends(delta: Delta, num_calls: int) -> dict[str, Any]:
    if ending(delta)[0] == "length" and not num_calls:
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return {"status": "completed"}
