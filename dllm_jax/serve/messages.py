"""`/v1/messages`: Anthropic's form of a conversation and of its answer.

Data flow: a body -> `wire.Chat`, as the chat route reads it -> the same request -> pieces of turns
-> blocks. Nothing is converted twice: events are made from pieces, not from chunks.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from dllm_jax.serve import generating, wire
from dllm_jax.serve.answers import ending, notes_of
from dllm_jax.serve.conversations import (
    NO_TEXT,
    SAME,
    chat_from,
    check_known,
    objects_of,
    own_names,
)
from dllm_jax.serve.exchange import Call, Json
from dllm_jax.serve.logs import random_id
from dllm_jax.serve.pipe import Delta, Usage, total
from dllm_jax.serve.refusals import Refusal, anthropic_error, shown, unsupported
from dllm_jax.serve.service import Service
from dllm_jax.serve.stream import named_event
from dllm_jax.serve.strict_json import read_object
from dllm_jax.serve.turns import Texts
from dllm_jax.structured import Piece
from dllm_jax.structured.turn_reading import contents_of

SIGNATURE = "dllm"  # of thoughts; any is taken back
_BILLING = "x-anthropic-billing-header"  # a block whose hash would end every prefix hit
_READ = (
    *("messages", "max_tokens", "system", "tools", "tool_choice", "top_k", "stop_sequences"),
    *("thinking", "output_config"),
)
_IGNORED = (
    *("metadata", "context_management", "betas", "cache_control", "service_tier", "speed"),
    *("inference_geo", "anthropic_version", "anthropic_beta", "fallbacks", "user_profile_id"),
)
_PICTURES = ("image", "document", "search_result", "tool_reference")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def messages(service: Service, call: Call) -> Any:
    """`/v1/messages`."""
    body, left_out, origins = await _read(service, call)

    def form(given: Any, texts: Texts) -> MessagesForm:
        _, model, _, num_prompt_tokens, *_ = given
        return MessagesForm(model, num_prompt_tokens, texts, left_out)

    with own_names(origins, "system", "messages"):
        return await generating.answer_chat(service, call, body, form)


async def count_tokens(service: Service, call: Call) -> Any:
    """`/v1/messages/count_tokens`."""
    body, _, origins = await _read(service, call, counts=True)
    _, text = service.ready()
    service.check_model(body.model)
    with own_names(origins, "system", "messages"):
        ids, _ = await text.run(call.size, generating.read_chat, text, body)
    return Json({"input_tokens": len(ids)})


async def _read(
    service: Service, call: Call, counts: bool = False
) -> tuple[wire.Chat, list[str], list[int]]:
    service.check_state()
    fields = read_object(await call.body())
    if not counts and fields.get("max_tokens") is None:
        raise Refusal("max_tokens is required; give a number", param="max_tokens")
    return chat_of(fields)


def chat_of(fields: dict[str, Any]) -> tuple[wire.Chat, list[str], list[int]]:
    """The conversation, the provider's own tools, left out, and the message of each turn.

    Raises:
        Refusal: It is none, or asks for what is not supported.
    """
    check_known(fields, (*SAME, *_READ, *_IGNORED))
    said = _system(fields.get("system"))
    turns = fields.get("messages")
    if not isinstance(turns, list) or not turns:
        raise Refusal(f"messages={shown(turns)} is no list of messages; give one", param="messages")
    if len(turns) > wire.MAX_TURNS:
        raise Refusal(
            f"messages has {len(turns)} messages; at most {wire.MAX_TURNS} are taken",
            param="messages",
        )
    origins = [-1] * len(said)
    for i, turn in enumerate(turns):
        said += _turns(turn, f"messages[{i}]")
        origins += [i] * (len(said) - len(origins))
    if said[-1]["role"] == "assistant":
        raise unsupported(
            f"messages[{len(turns) - 1}]",
            f"messages[{len(turns) - 1}] begins the answer, which is not supported; leave it out",
        )
    tools, left_out = _tools(fields.get("tools"))
    choice, several = _choice(fields.get("tool_choice"))
    with own_names(origins, "system", "messages"):
        body = chat_from(
            fields,
            messages=said,
            max_tokens=fields.get("max_tokens"),
            top_k=fields.get("top_k"),
            stop=fields.get("stop_sequences") or None,
            tools=tools or None,
            tool_choice=choice if tools or choice not in ("auto", "none") else None,
            parallel_tool_calls=several,
            **_how(fields),
        )
    return body, left_out, origins


def _how(fields: dict[str, Any]) -> dict[str, Any]:
    """Thoughts and the form of the answer."""
    thinking, config = objects_of(fields, "thinking", "output_config")
    found: dict[str, Any] = {"reasoning_effort": config.get("effort")}
    if thinking.get("type") == "disabled":
        found["reasoning_effort"] = "none"
    elif thinking.get("type") in ("enabled", "adaptive"):
        found["reasoning_effort"] = config.get("effort") or "high"
        if fields.get("tools"):  # whose answers are held to a grammar anyway
            found["thinking_token_budget"] = thinking.get("budget_tokens")
    if (form := config.get("format")) is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise Refusal(
                f"output_config.format={shown(form)} is not known; use json_schema",
                param="output_config.format",
            )
        found["response_format"] = {
            "type": "json_schema",
            "json_schema": {"schema": form.get("schema")},
        }
    return found


def _system(system: Any) -> list[dict[str, Any]]:
    if system is None:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    texts = _texts(system, "system")
    text = "\n".join(one for one in texts if not one.startswith(_BILLING))
    return [{"role": "system", "content": text}] if text else []


def _texts(blocks: Any, where: str, is_result: bool = False) -> list[str]:
    """The texts of blocks of text."""
    if isinstance(blocks, str):
        return [blocks]
    if not isinstance(blocks, list):
        raise Refusal(f"{where}={shown(blocks)} is no text and no list of blocks", param=where)
    found = []
    for i, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if is_result and kind in _PICTURES:
            found.append(NO_TEXT)
            continue
        if kind != "text" or not isinstance(block.get("text"), str):
            raise unsupported(
                f"{where}[{i}].type",
                f"{where}[{i}].type={shown(kind)}: only text is read here; leave it out",
            )
        found.append(block["text"])
    return found


def _turns(turn: Any, where: str) -> list[dict[str, Any]]:
    """The turns of a message: results of tools come before text."""
    if not isinstance(turn, dict) or turn.get("role") not in ("user", "assistant", "system"):
        raise Refusal(
            f"{where} is no message of the user or the assistant; give role and content",
            param=f"{where}.role",
        )
    content = turn.get("content")
    if isinstance(content, str):
        return [{"role": turn["role"], "content": content}]
    if not isinstance(content, list):
        raise Refusal(
            f"{where}.content={shown(content)} is no text and no list of blocks; give one",
            param=f"{where}.content",
        )
    results, calls, texts, thoughts = [], [], [], []
    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and turn["role"] == "user":
            results.append(_result(block, at))
        elif kind == "tool_use" and turn["role"] == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts += _texts([block], at.rpartition("[")[0])
    found = results
    if calls or thoughts or texts or not results:
        own: dict[str, Any] = {"role": turn["role"], "content": "\n".join(texts)}
        more = {"tool_calls": calls, "reasoning_content": "\n".join(thoughts)}
        found.append(own | {name: value for name, value in more.items() if value})
    return found


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    text = "" if content is None else "\n".join(_texts(content, f"{where}.content", is_result=True))
    if not text and block.get("is_error"):
        text = "error"
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}


def _tools(tools: Any) -> tuple[list[Any], list[str]]:
    """The tools in OpenAI's form, and the names of those that are left out."""
    if tools is not None and not isinstance(tools, list):
        raise Refusal(f"tools={shown(tools)} is no list of tools; give one", param="tools")
    found, left_out = [], []
    for tool in tools or ():
        if isinstance(tool, dict) and tool.get("type") not in (None, "custom"):
            left_out.append(str(tool.get("name") or tool["type"])[:64])
            continue
        function = dict(tool) if isinstance(tool, dict) else {}
        function["parameters"] = function.pop("input_schema", None)
        found.append({"type": "function", "function": function})
    return found, left_out


def _choice(choice: Any) -> tuple[Any, bool | None]:
    if choice is None:
        return None, None
    kind = choice.get("type") if isinstance(choice, dict) else None
    several = None if kind is None else not choice.get("disable_parallel_tool_use")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, several
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise Refusal(
            f"tool_choice={shown(choice)} is not known; use auto, any, tool or none",
            param="tool_choice",
        )
    return _CHOICES[kind], several


class MessagesForm:
    """The answer of one request, as blocks."""

    keep_alive = named_event({"type": "ping"})
    is_chat = False

    def __init__(self, model: str, num_prompt_tokens: int, texts: Texts, left_out: list[str]):
        self.texts, self._num_prompt_tokens = texts, num_prompt_tokens
        self._message = {
            "id": f"msg_{random_id()[:24]}",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": model,
            "stop_reason": None,
            "stop_sequence": None,
        }
        if left_out:
            self._message["dllm"] = {"left_out": left_out}
        self._index, self._open = -1, ""
        self._ends: dict[str, Any] = {}

    # --- a stream --------------------------------------------------------------------------------

    def opened(self, choice: int) -> Iterator[bytes]:
        """The message begins."""
        usage = self._usage(0, ())
        yield named_event({"type": "message_start", "message": self._message | {"usage": usage}})

    def said(self, choice: int, piece: Piece) -> Iterator[bytes]:
        """A piece of the message."""
        if piece.kind == "end":
            yield from self._close()
        elif piece.kind == "arguments":
            yield self._more({"type": "input_json_delta", "partial_json": piece.text})
        elif piece.kind == "call":
            block = {"id": f"toolu_{random_id()[:24]}", "name": piece.text, "input": {}}
            yield from self._begin("tool_use", block)
        else:
            kind = {"text": "text", "thought": "thinking"}[piece.kind]
            if self._open != kind:
                more = {"signature": ""} if kind == "thinking" else {}
                yield from self._begin(kind, {kind: "", **more})
            yield self._more({"type": f"{kind}_delta", kind: piece.text})

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._open, self._index = kind, self._index + 1
        start = {"type": "content_block_start", "index": self._index}
        yield named_event(start | {"content_block": {"type": kind, **block}})

    def _more(self, delta: dict[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._more({"type": "signature_delta", "signature": SIGNATURE})
        if self._open:
            yield named_event({"type": "content_block_stop", "index": self._index})
        self._open = ""

    def ended(self, delta: Delta) -> Iterator[bytes]:
        """The text ends."""
        yield from self._close()
        self._ends = _ends(delta, self.texts.num_calls(delta.choice))

    def closed(self, num_tokens: int, usages: Sequence[Usage], has_usage: bool) -> bytes:
        """The end of the stream."""
        usage = self._usage(num_tokens, usages)
        end = {"type": "message_delta", "delta": self._ends, "usage": usage}
        return named_event(end) + named_event({"type": "message_stop"})

    def failed(self, error: Refusal, request_id: str) -> bytes:
        """The end of a stream that fails."""
        return named_event(anthropic_error(error.message, error.status, request_id))

    # --- an answer -------------------------------------------------------------------------------

    def whole(self, texts: Sequence[Delta], usages: Sequence[Usage]) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        (delta,) = texts
        text, thoughts, calls = contents_of(self.texts.feed(delta))
        blocks: list[dict[str, Any]] = []
        if thoughts:
            blocks.append({"type": "thinking", "thinking": thoughts, "signature": SIGNATURE})
        if text:
            blocks.append({"type": "text", "text": text})
        for name, said in calls:
            call = {"id": f"toolu_{random_id()[:24]}", "name": name, "input": json.loads(said)}
            blocks.append({"type": "tool_use", **call})
        usage = self._usage(delta.num_tokens, usages)
        ends = notes_of(usages, self._message) | _ends(delta, len(calls))
        return self._message | ends | {"content": blocks, "usage": usage}

    def _usage(self, num_tokens: int, usages: Sequence[Usage]) -> dict[str, int]:
        cached = total(usages).cached_tokens if usages else 0
        return {
            "input_tokens": self._num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": num_tokens,
        }


def _ends(delta: Delta, num_calls: int) -> dict[str, Any]:
    finish, stop = ending(delta)
    if num_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if finish == "stop":
        is_string = isinstance(stop, str)
        reason = "stop_sequence" if is_string else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop if is_string else None}
    return {"stop_reason": "max_tokens", "stop_sequence": None}
