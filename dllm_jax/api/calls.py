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
from dllm_jax.api.prompts import request_of, run
from dllm_jax.engine import checks
from dllm_jax.engine.requests import Request, RequestOutput, SamplingParams
from dllm_jax.loading import tool_forms
from dllm_jax.loading.tool_forms import NO_FORM, ToolForm, tool_form
from dllm_jax.structured.offers import NO_OFFER, Offer, offered
from dllm_jax.structured.tools import Tools
from dllm_jax.structured.turn_reading import Piece, Turn, contents_of

MOST_STAGES = 64  # of a text


class Turns:
    """Answers to conversations with tools.

    Args:
        llm: The `LLM` that writes them.
        form: Of its model.
        template_fields: What else the template reads.
        budget: Tokens by which thoughts have ended.

    Raises:
        ValueError: The model's template has no tools, or no thoughts that could be bounded.
    """

    def __init__(
        self,
        llm: Any,
        offer: Offer,
        form: ToolForm,
        template_fields: Mapping[str, Any],
        budget: int | None = None,
    ):
        if budget is not None and not form.thinks:
            raise ValueError(
                f"thinking_token_budget={budget}: the chat template of {llm.model.source!r} has no "
                "thoughts; leave it out"
            )
        if offer.tools and form.name is None:
            raise ValueError(
                f"tools: the chat template of {llm.model.source!r} has none, or writes calls in a "
                'form that is not known; use tool_format="hermes", or leave tools out'
            )
        self._llm, self._offer, self._form, self._fields = llm, offer, form, template_fields
        self._budget = budget
        self._marks = structured.mark_ids(llm.model.tokenizer.get_added_vocab())

    def run(self, conversations: Sequence[Any], params: Any, use_tqdm: bool) -> list[RequestOutput]:
        """The answers in order, each text with its `message`."""
        llm, made = self._llm, {}
        if params is None:  # drawn from all that fits
            params = dataclasses.replace(llm.default_params, top_p=None, top_k=None)

        def make(pair: tuple[int, Any], one: SamplingParams) -> Request:
            made[pair[0]] = request = self._request(pair[1], one)
            return request

        outputs = run(llm, make, [*enumerate(conversations)], params, use_tqdm)
        return [
            output if i not in made else self._whole(made[i], output)
            for i, output in enumerate(outputs)
        ]

    def _request(self, conversation: Any, params: SamplingParams) -> Request:
        offer, form, fields = self._offer, self._form, dict(self._fields)
        answer = None
        if (given := params.constraint) is not None:
            tool_forms.check_answer(offer.choice, form)
            if not isinstance(given, structured.JsonSchema):
                raise ValueError("constraint: with tools it is a JsonSchema; give one, or none")
            answer = given.said, given.whitespace
        said, more = tool_forms.laid_out(list(conversation), offer, form)
        fields |= more
        request = request_of(self._llm.model, said, params, fields)
        inside = tool_forms.is_inside(request.prompt or "", form)
        held = Tools(
            *(offer.tools, offer.choice, offer.several, form.reads, form.thinks, inside),
            answer=answer,
            budget=self._budget,
        )
        ends = tool_forms.end_ids(held.form, self._llm.model.tokenizer)
        params = dataclasses.replace(
            params, constraint=held, stop_token_ids=(*params.stop_token_ids, *ends)
        )
        return dataclasses.replace(request, params=params)

    def _whole(self, request: Request, output: RequestOutput) -> RequestOutput:
        """An answer with the stages of its texts joined, and their messages."""
        texts, metrics = [], output.metrics
        for one in output.outputs:
            tokens, pieces, said, now, asked = [], [], [], one, request
            turn = Turn(request.params.constraint, self._llm.constraints.spelt, self._marks)
            walk = walk_of(self._llm, asked, turn)
            for _ in range(MOST_STAGES):
                pieces += turn.feed(walk.take(now.token_ids))
                tokens += now.token_ids
                said += now.logprobs or []
                following = next_stage(asked, now, walk)
                if following is None:
                    break
                try:
                    (more,) = run(self._llm, lambda one, _: one, [following], None, False)
                except ValueError:  # no room is left for the arguments
                    now = dataclasses.replace(now, finish_reason="length")
                    break
                if more.error is not None:
                    output = dataclasses.replace(output, error=more.error)
                    break
                (now,), asked = more.outputs, following
                walk = walk_of(self._llm, asked, turn)
                metrics = dataclasses.replace(metrics, nfe=metrics.nfe + more.metrics.nfe)
            pieces += turn.feed([], last=True)
            text = self._llm.model.tokenizer.decode(tokens, skip_special_tokens=True)
            texts.append(
                dataclasses.replace(
                    one,
                    text=one.text if asked is request else text,
                    token_ids=tokens,
                    logprobs=None if one.logprobs is None else said,
                    finish_reason=walk.reason(now.finish_reason),
                    stop_reason=now.stop_reason,
                    constraint_met=now.constraint_met and not walk.is_cut,
                    message=message_of(pieces, call_id),
                )
            )
        return dataclasses.replace(output, outputs=texts, metrics=metrics)


def turns_of(
    llm: Any,
    tools: Sequence[Any] | None,
    choice: Any,
    several: bool | None,
    form_name: str | None,
    template_fields: dict[str, Any],
    budget: int | None = None,
) -> Turns | None:
    """What answers conversations with tools; None without them, or where the template sees to them.

    A template that has tools in a form of its own takes them with its other fields.
    """
    from dllm_jax.loading.templates import tool_schema  # with it comes the template engine

    tools = None if tools is None else list(map(tool_schema, tools))
    if budget is not None:
        budget = checks.whole_number("thinking_token_budget", budget, 0)
    form = NO_FORM if not tools and budget is None else tool_form(llm.model, form_name)
    if tools and form.name is None and choice is None:
        template_fields["tools"] = tools
        return None
    offer = offered(tools, choice, several) or (None if budget is None else NO_OFFER)
    return None if offer is None else Turns(llm, offer, form, template_fields, budget)


class Walk:
    """Follows a text along its grammar, to where its limit left only the shortest end.

    Args:
        grammar: With `start`, `delta`, `class_of` and `distance`; None: it is held to nothing.
        limit: Tokens that the text may have.
        part: Tokens of its first part, after which it goes on in the state that it is in.
        spelt: Bytes by id; None: `forced` stays empty.
        before: The walk of an earlier stage of the text.

    Attributes:
        left: Tokens that it may still have.
        state: Of the grammar.
        is_cut: A call was begun too late for its limit; what follows is not the model's.
        forced: Places of the tokens in the text where no other text was possible.
        num_taken: Tokens of the text.
    """

    def __init__(
        self,
        grammar: Any,
        turn: Turn,
        limit: int,
        part: int | None = None,
        spelt: Sequence[bytes | None] | None = None,
        before: "Walk | None" = None,
    ):
        self._grammar, self.turn, self.left, self._spelt = grammar, turn, limit, spelt
        self.forced: list[int] = [] if before is None else before.forced
        self.num_taken = 0 if before is None else before.num_taken
        self._part_left = limit if part is None else part
        self.state = 0 if grammar is None else int(grammar.start)
        self.is_cut = False
        self._look()

    def take(self, tokens: Sequence[int]) -> list[int]:
        """The leading tokens that the model wrote; the others were the grammar's only choice."""
        kept = []
        for token in tokens:
            if self.is_cut:
                break
            kept.append(token)
            if self._spelt is not None and self._is_forced(self._spelt[token]):
                self.forced.append(self.num_taken)
            self.num_taken += 1
            self.left -= 1
            self._part_left -= 1
            if self._grammar is not None:
                of = self._grammar.class_of[token]
                self.state = int(self._grammar.delta[self.state, of])
                self._look()
        return kept

    def _is_forced(self, data: bytes | None) -> bool:
        """Whether each byte of a token is the only one that may stand there; None: it is a mark."""
        only, state = getattr(self._grammar, "only", None), self.state
        if only is None:
            return False
        if data is None:
            return bool(only[state, 0] > 255)
        for byte in data:
            letter, behind = only[state].tolist()
            if letter != byte:
                return False
            state = behind
        return True

    def _look(self) -> None:
        needed = 0 if self._grammar is None else int(self._grammar.distance[self.state])
        self.is_cut = needed > 0 and self.left <= needed

    @property
    def is_part_over(self) -> bool:
        """Whether the first part has ended, and the text goes on."""
        return self.left > 0 and self._part_left == 0

    def reason(self, finish: str | None) -> str | None:
        """Why the text ended."""
        is_open = False  # at the limit
        if self._grammar is not None and not self.left:
            onto = self._grammar.delta[self.state]
            is_open = bool(((onto != 0) & (onto != self._grammar.end)).any())
        return "length" if finish == "stop" and (self.is_cut or is_open) else finish


def walk_of(llm: Any, request: Request, turn: Turn, before: Walk | None = None) -> Walk:
    """The walk of a request's text, whose automaton is kept or compiled; `before` as of `Walk`."""
    room = llm.engine.layout.max_model_len - len(request.prompt_token_ids)
    grammar = llm.constraints.whole(request)
    limit = min(request.params.max_tokens or room, room)
    spelt = llm.constraints.spelt if request.denoise else None
    return Walk(grammar, turn, limit, llm.constraints.first_part(request), spelt, before)


def call_id() -> str:
    """A new id of a call."""
    return "call_" + "".join(secrets.choice(string.ascii_letters) for _ in range(24))


def next_stage(request: Request, text: Any, walk: Walk) -> Request | None:
    """The request with which a text goes on; None: there is none.

    A text ends before the arguments of a call that is held by an automaton of its own, and after
    the tokens by which its thoughts have ended.

    Args:
        text: What `request` came to (`CompletionOutput`).
    """
    tools, is_stop = request.params.constraint, not isinstance(text.stop_reason, str)
    if walk.left < 1 or walk.is_cut:
        return None
    if text.finish_reason == "stop" and is_stop and walk.turn.waits is not None:
        held = dataclasses.replace(
            tools, stage=walk.turn.waits, inside=False, answer=None, budget=None, at=None
        )
    elif text.finish_reason in ("stop", "length") and is_stop and walk.is_part_over:
        held = dataclasses.replace(tools, at=walk.state)
    else:
        return None
    params = dataclasses.replace(request.params, constraint=held, max_tokens=walk.left, n=1)
    ids = [*request.prompt_token_ids, *text.token_ids]
    return dataclasses.replace(
        request, prompt_token_ids=ids, params=params, grammar=None, request_id=None
    )


def message_of(pieces: Iterable[Piece], make_id: Any) -> dict[str, Any]:
    """A turn's message, in OpenAI's form; a call that is not whole is left out.

    Args:
        make_id: Makes the id of a call.
    """
    text, thoughts, calls = contents_of([*pieces])
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [
            {"id": make_id(), "type": "function", "function": {"name": name, "arguments": said}}
            for name, said in calls
        ]
    return message
