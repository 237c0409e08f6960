"""Conversations with tools: turns that the grammar holds, and the messages that they are.

Data flow: messages and tools -> a prompt and a `Tools` constraint -> tokens -> `Turn` -> a message.
Where the tools are too many for one automaton, the text ends before the arguments of each call, and
goes on with the grammar of that tool.
"""

import dataclasses
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dllm_jax import structured
from dllm_jax.api.prompts import request_of
from dllm_jax.engine.requests import Request, RequestOutput, SamplingParams
from dllm_jax.loading import tool_forms, turns
from dllm_jax.loading.tool_forms import ToolForm
from dllm_jax.structured.offers import Offer
from dllm_jax.structured.tools import Piece, Tools, Turn

MOST_STAGES = 64  # of a text


class Turns:
    """Answers to conversations with tools.

    Args:
        llm: The `LLM` that writes them.
        form: Of its model.
        template_fields: What else the template reads.

    Raises:
        ValueError: The model's template has no tools.
    """

    def __init__(self, llm: Any, offer: Offer, form: ToolForm, template_fields: Mapping[str, Any]):
        if form.name is None:
            raise ValueError(
                f"tools: the chat template of {llm.model.source!r} has none, or writes calls in a "
                'form that is not known; use tool_format="hermes", or leave tools out'
            )
        self._llm, self._offer, self._form, self._fields = llm, offer, form, template_fields
        tokenizer = llm.model.tokenizer
        self._marks = structured.mark_ids(tokenizer.get_added_vocab())
        self._spelt = structured.token_bytes(tokenizer)

    def run(self, conversations: Sequence[Any], params: Any, use_tqdm: bool) -> list[RequestOutput]:
        """The answers in order, each text with its `message`."""
        llm, made = self._llm, {}
        if params is None:  # drawn from all that fits
            params = dataclasses.replace(llm.default_params, top_p=None, top_k=None)

        def make(pair: tuple[int, Any], one: SamplingParams) -> Request:
            made[pair[0]] = request = self._request(pair[1], one)
            return request

        outputs = llm._run(make, [*enumerate(conversations)], params, use_tqdm)
        return [
            output if i not in made else self._whole(made[i], output)
            for i, output in enumerate(outputs)
        ]

    def _request(self, conversation: Any, params: SamplingParams) -> Request:
        if params.constraint is not None:
            raise ValueError("a constraint with tools; leave one of the two out")
        offer, form, fields = self._offer, self._form, dict(self._fields)
        said = turns.plain(list(conversation))
        shown = offer.shown if offer.choice != "none" or turns.has_calls(said) else []
        if form.is_text:
            said = tool_forms.as_text(said, shown, form.name or "")
        elif shown:
            fields["tools"] = shown
        request = request_of(self._llm.model, said, params, fields)
        inside = form.thinks and tool_forms.is_inside(request.prompt or "")
        held = Tools(offer.tools, offer.choice, offer.several, form.name or "", form.thinks, inside)
        return dataclasses.replace(request, params=dataclasses.replace(params, constraint=held))

    def _whole(self, request: Request, output: RequestOutput) -> RequestOutput:
        """An answer with the stages of its texts joined, and their messages."""
        texts, metrics = [], output.metrics
        for one in output.outputs:
            tools, tokens, now, asked = request.params.constraint, [], one, request
            turn, pieces, is_cut = Turn(tools, self._spelt, self._marks), [], False
            for _ in range(MOST_STAGES):
                limit = self._limit(asked)
                whole = now.token_ids[: self._cut(asked, now, limit)]
                pieces += turn.feed(whole)
                tokens += now.token_ids
                is_cut = len(whole) < len(now.token_ids)
                following = None
                if now.finish_reason == "stop" and now.stop_reason is None and not is_cut:
                    following = next_stage(asked, turn, now.token_ids, limit - len(whole))
                if following is None:
                    break
                (more,) = self._llm._run(lambda one, _: one, [following], None, False)
                if more.error is not None:
                    output = dataclasses.replace(output, error=more.error)
                (now,), asked = more.outputs, following
                metrics = dataclasses.replace(metrics, nfe=metrics.nfe + more.metrics.nfe)
            pieces += turn.feed([], last=True)
            reason = "length" if is_cut and now.finish_reason == "stop" else now.finish_reason
            text = self._llm.model.tokenizer.decode(tokens, skip_special_tokens=True)
            texts.append(
                dataclasses.replace(
                    one,
                    text=one.text if asked is request else text,
                    token_ids=tokens,
                    finish_reason=reason,
                    stop_reason=now.stop_reason,
                    constraint_met=now.constraint_met and not is_cut,
                    message=message_of(pieces, call_id),
                )
            )
        return dataclasses.replace(output, outputs=texts, metrics=metrics)

    def _limit(self, request: Request) -> int:
        room = self._llm.engine.layout.max_model_len - len(request.prompt_token_ids)
        return min(request.params.max_tokens or room, room)

    def _cut(self, request: Request, text: Any, limit: int) -> int | None:
        if text.finish_reason == "error":
            return None
        return cut_at(self._llm.constraints(request).grammar, text.token_ids, limit)


def call_id() -> str:
    """A new id of a call."""
    return "call_" + "".join(secrets.choice(string.ascii_letters) for _ in range(24))


def cut_at(grammar: Any, tokens: Sequence[int], limit: int) -> int | None:
    """From which token on the limit left a text no choice but its shortest end; None: nowhere.

    Args:
        grammar: With `start`, `delta`, `class_of` and `distance`.
        limit: Tokens that the text may have.
    """
    state = int(grammar.start)
    for count, token in enumerate([None, *tokens]):
        if token is not None:
            state = int(grammar.delta[state, grammar.class_of[token]])
        left = int(grammar.distance[state])
        if left and limit - count <= left:
            return count
    return None


def next_stage(request: Request, turn: Turn, tokens: list[int], room: int) -> Request | None:
    """The request that goes on with the arguments which a text ended before; None: there is none.

    Args:
        tokens: All that the request's text has.
        room: Tokens that are left.
    """
    tools = request.params.constraint
    if turn.waits is None or room < 1:
        return None
    params = dataclasses.replace(
        request.params,
        constraint=dataclasses.replace(tools, stage=turn.waits, inside=False),
        max_tokens=room,
        n=1,
    )
    ids = [*request.prompt_token_ids, *tokens]
    return dataclasses.replace(
        request, prompt_token_ids=ids, params=params, grammar=None, request_id=None
    )


def message_of(pieces: Iterable[Piece], make_id: Any) -> dict[str, Any]:
    """A turn's message, in OpenAI's form; a call that is not whole is left out.

    Args:
        make_id: Makes the id of a call.
    """
    said = {"text": "", "thought": ""}
    calls: list[dict[str, Any]] = []
    begun: dict[str, Any] | None = None
    for piece in pieces:
        if piece.kind in said:
            said[piece.kind] += piece.text
        elif piece.kind == "call":
            begun = {"name": piece.text, "arguments": ""}
        elif piece.kind == "arguments" and begun is not None:
            begun["arguments"] += piece.text
        elif piece.kind == "end" and begun is not None:
            calls.append({"id": make_id(), "type": "function", "function": begun})
    message: dict[str, Any] = {"role": "assistant", "content": said["text"]}
    if calls and not said["text"]:
        message["content"] = None
    if said["thought"]:
        message["reasoning_content"] = said["thought"]
    return message | ({"tool_calls": calls} if calls else {})
