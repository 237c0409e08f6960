"""The answer of `/v1/responses`: OpenAI's items, whole and streamed."""

import base64
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dllm_jax.serve.answers import ending, notes_of
from dllm_jax.serve.conversations import DRAWN
from dllm_jax.serve.logs import random_id
from dllm_jax.serve.pipe import Delta, Usage, total
from dllm_jax.serve.refusals import Refusal
from dllm_jax.serve.stream import named_event
from dllm_jax.serve.turns import Texts
from dllm_jax.structured import Piece

# Thoughts in `encrypted_content`, by which clients that store nothing send them back.
_OURS = "dllm."


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
            "text": fields.get("text") or {"format": {"type": "text"}},
            "tool_choice": fields.get("tool_choice") or "auto",
            "tools": fields.get("tools") or [],
            "truncation": "disabled",
            "usage": None,
            "metadata": fields.get("metadata") or {},
            **{name: fields.get(name) for name in DRAWN},
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


def _packed(text: str) -> str:
    return _OURS + base64.b64encode(text.encode()).decode()


def unpacked(content: Any) -> str:
    """The thoughts of an item; empty for another server's."""
    if not isinstance(content, str) or not content.startswith(_OURS):
        return ""
    with contextlib.suppress(ValueError):
        return base64.b64decode(content[len(_OURS) :], validate=True).decode()
    return ""
