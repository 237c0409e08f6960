"""`/v1/completions` and `/v1/chat/completions`: bodies to prompts, accepted requests to answers."""

import dataclasses
import functools
import json
import re
import time
from typing import Any

from dllm_jax.loading import tool_forms
from dllm_jax.serve import wire
from dllm_jax.serve.answers import Form, fingerprint
from dllm_jax.serve.exchange import Call, Json
from dllm_jax.serve.mailbox import Mailbox
from dllm_jax.serve.params import constraint, params_of
from dllm_jax.serve.pipe import Facts, Prompt
from dllm_jax.serve.refusals import Refusal, shown, unsupported
from dllm_jax.serve.service import Service
from dllm_jax.serve.stream import EventStream, whole
from dllm_jax.serve.text import SHORT_CHARS, TextSide
from dllm_jax.serve.turns import ChatForm, Texts, TurnStream
from dllm_jax.structured import Tools
from dllm_jax.structured.offers import BadTool, offered

COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions


async def completions(service: Service, call: Call) -> Any:
    """`/v1/completions`."""
    service.check_state()
    body = await service.read(call, wire.Completion)
    facts, text = service.ready()
    service.check_model(body.model)
    suffix = None
    if body.suffix is not None:
        if not facts.infill:
            raise unsupported(
                "suffix",
                f"suffix: the strategy {facts.strategy!r} does not see what follows a hole; start "
                "the server with one that does, such as multi_bd or full_sequence",
            )
        suffix = await text.run(len(body.suffix), text.ids, body.suffix, False, "suffix")
    given: list[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if set(map(type, given)) == {int}:
        given = [given]
    service.check_texts(len(given) * (body.n or 1))
    prompts = []
    for i, one in enumerate(given):
        param = f"prompt[{i}]" if len(given) > 1 else "prompt"
        if isinstance(one, str):
            ids = await text.run(len(one), text.ids, one, True, param)
        elif isinstance(one, list):
            ids = one
            if len(ids) < facts.max_model_len:  # else refused below
                text.check_ids(ids, param)
        else:
            raise Refusal(
                f"{param}={shown(one)} stands beside texts or lists; give all as lists of ids",
                param=param,
            )
        prompts.append(Prompt(ids, suffix))
    most = body.max_tokens or COMPLETION_TOKENS
    return await _generate(service, call, body, facts, prompts, most)


async def chat(service: Service, call: Call) -> Any:
    """`/v1/chat/completions`."""
    service.check_state()
    return await answer_chat(service, call, await service.read(call, wire.Chat))


async def answer_chat(service: Service, call: Call, body: wire.Chat, make_form: Any = None) -> Any:
    """The answer to a conversation.

    Args:
        make_form: The form of another route, of the arguments of `Form` and `Texts`.
    """
    facts, text = service.ready()
    service.check_model(body.model)
    ids, tools = await text.run(call.size, read_chat, text, body)
    if make_form is None and body.thinking_token_budget is not None and not text.form.thinks:
        raise unsupported(
            "thinking_token_budget",
            f"thinking_token_budget={body.thinking_token_budget}: this model's chat template has "
            "no thoughts; leave it out",
        )
    if (
        body.max_tokens is not None
        and body.max_completion_tokens is not None
        and body.max_tokens != body.max_completion_tokens
    ):
        raise Refusal(
            f"max_tokens={body.max_tokens} and max_completion_tokens="
            f"{body.max_completion_tokens} differ; give one",
            param="max_completion_tokens",
        )
    room = max(1, facts.max_model_len - len(ids))
    most = body.max_completion_tokens or body.max_tokens or room
    return await _generate(service, call, body, facts, [Prompt(ids)], most, tools, make_form)


def read_chat(text: TextSide, body: wire.Chat) -> tuple[list[int], Tools | None]:
    """The prompt of a conversation, and what its answer is held to or read by.

    Raises:
        Refusal: The tools are none, or the conversation is.
    """
    try:
        offer = offered(body.tools, body.tool_choice, body.parallel_tool_calls)
    except BadTool as error:
        raise Refusal(str(error), param=error.param, code=error.code) from None
    fields, template = dict(body.chat_template_kwargs or {}), text.chat_template or ""
    effort, budget = body.reasoning_effort, body.thinking_token_budget
    if effort is not None and "enable_thinking" in template:
        fields.setdefault("enable_thinking", effort not in ("none", "minimal"))
    if effort is not None and re.search(r"\breasoning_effort\b", template):
        fields.setdefault("reasoning_effort", effort)
    elif budget is None and offer is not None and offer.choice != "none":
        budget = _EFFORTS.get(effort or "")
    ids, tools = text.prompt(body.messages, fields, offer=offer)
    is_held = offer is not None or body.thinking_token_budget is not None
    if tools is None:
        return ids, None
    answer = _answer(text, tools, body) if is_held else None
    budget = budget if tools.thinks else None
    return ids, dataclasses.replace(tools, answer=answer, budget=budget)


_EFFORTS = {"low": 512, "medium": 2048, "high": 8192}  # tokens of thoughts


def _answer(text: TextSide, tools: Tools, body: wire.Chat) -> tuple[str, str] | None:
    """The form of an answer that may also be calls."""
    name = "response_format" if body.structured_outputs is None else "structured_outputs"
    asked = getattr(body, name)
    if asked is None or getattr(asked, "type", None) == "text":
        return None
    try:
        if name == "structured_outputs":
            raise ValueError("it says what the text must be, as tools do; use response_format")
        tool_forms.check_answer(tools.choice, text.form)
    except ValueError as error:
        raise unsupported(name, f"{name} with tools: {error}") from None
    return json.dumps((constraint(body) or {})["json"]), "flexible"


def chat_ids(
    text: TextSide,
    turns: list[wire.Turn],
    template_fields: dict[str, Any] | None,
    least: int = 0,
) -> list[int]:
    """Token ids of a conversation; `least` as in `TextSide.ids`."""
    return text.prompt(turns, template_fields, least)[0]


async def _generate(
    service: Service,
    call: Call,
    body: wire.Sampling,
    facts: Facts,
    prompts: list[Prompt],
    max_tokens: int,
    tools: Tools | None = None,
    make_form: Any = None,
) -> Any:
    """Queue the prompts; the answer once they are accepted."""
    is_chat = isinstance(body, wire.Chat)
    num_prompt_tokens = _num_tokens(prompts, facts, "messages" if is_chat else "prompt")
    denoise = body.stream_mode == "denoise"
    for name, is_given in (("stream_mode", denoise), ("stream_options", body.stream_options)):
        if is_given and not body.stream:
            raise Refusal(f"{name} needs stream: true; set it or leave this out", param=name)
    params = params_of(body, facts, max_tokens, tools)
    if tools is not None:
        text = service.ready()[1]
        params["stop_token_ids"] = (*params["stop_token_ids"], *text.end_ids(tools))
        await text.run(SHORT_CHARS, text.turn, tools)  # the first one reads the vocabulary
    if tools is not None and tools.tools:
        choice = tools.choice if isinstance(tools.choice, str) else "named"
        labels = {"route": call.scope["endpoint"].path, "choice": choice}
        service.metrics.count("dllm_tool_requests_total", **labels)
    _admit(service, call, facts, len(prompts) * params["n"], denoise)
    engine = service.engine
    call.prompt_tokens = num_prompt_tokens
    box = engine.submit(
        prompts,
        params,
        stream=bool(body.stream),
        denoise=denoise,
        deadline_s=service.config.limits.request_timeout,
        priority=service.admission.priority(body.priority),
        client=call.client,
        ids=tools is not None,
        cache_salt=call.client if service.config.isolate_prefix_cache else "",
    )
    system = fingerprint(service.config.version, facts)
    version = engine.counts.weight_version if service.config.weights_root else None
    given = is_chat, service.config.model, system, num_prompt_tokens, version
    form, kind = Form(*given), EventStream
    texts = Texts(None if tools is None else functools.partial(service.ready()[1].turn, tools))
    if tools is not None:
        call.turns = texts
    if make_form is not None:
        form, kind = make_form(given, texts), TurnStream
    elif tools is not None and isinstance(body, wire.Chat):
        form, kind = _turns(body, tools, texts, given), TurnStream
    form.has_logprobs = params["logprobs"] is not None
    if body.stream:
        try:
            await box.accepted()
        except BaseException:
            engine.release(box)
            raise
        options = body.stream_options or wire.StreamOptions()
        running = bool(options.continuous_usage_stats)
        stream = kind(
            box,
            form,
            service.metrics,
            call.id,
            usage=bool(options.include_usage),
            running_usage=running,
        )
        return _Tracked(service, stream, box, call, denoise)
    try:
        deltas = await whole(box, call.scope["dllm.connection"])
        call.texts, call.usages = deltas, box.usages
        answer = form.whole(deltas, box.usages)
    finally:
        _ended(service, box, call)
    return Json(answer)


def _admit(service: Service, call: Call, facts: Facts, num_texts: int, denoise: bool) -> None:
    """Refuse a request for which there is no room, or none of its client's."""
    service.check_texts(num_texts)
    num_open, mine = service.engine.num_open, service.engine.num_open_of(call.client)
    service.admission.check(num_open, facts.num_slots, num_texts, denoise, mine > 0)
    num_free = max(0, facts.num_slots - (num_open - mine))
    service.quotas.check(call.client, num_texts, mine, num_free)


def _num_tokens(prompts: list[Prompt], facts: Facts, name: str) -> int:
    """Tokens of prompts, each of which must leave room for a text."""
    for i, prompt in enumerate(prompts):
        if len(prompt.ids) >= facts.max_model_len:
            param = f"prompt[{i}]" if len(prompts) > 1 else name
            raise Refusal(
                f"{param} has {len(prompt.ids)} tokens; the context takes "
                f"{facts.max_model_len}, prompt and text together: shorten it",
                param=param,
                code="context_length_exceeded",
            )
    return sum(len(prompt.ids) for prompt in prompts)


def _turns(body: wire.Chat, tools: Tools, texts: Texts, given: Any) -> ChatForm:
    """The form of an answer that is read as turns."""
    is_certain = bool(tools.tools) and tools.choice not in ("auto", "none")
    shows_thoughts = body.include_reasoning is not False
    return ChatForm(*given, texts=texts, is_certain=is_certain, shows_thoughts=shows_thoughts)


def _ended(service: Service, box: Mailbox, call: Call) -> None:
    """A request has ended, however it did."""
    service.engine.release(box)
    if box.refusal is not None:  # it never ran
        return
    service.admission.ended(time.monotonic() - call.started_s)
    num_tokens = (call.prompt_tokens or 0) + sum(box.num_tokens)
    service.quotas.spend(call.client, "tokens_per_minute", num_tokens)
    for usage in box.usages:
        service.metrics.ended(usage)
    if call.turns is not None:
        service.metrics.turns(call.scope["endpoint"].path, *call.turns.counts)
        for usage in box.usages:
            service.metrics.relaxed(usage.notes)
    for text in call.texts:
        if text.finish is not None:
            service.metrics.count("dllm_request_success_total", finish_reason=text.finish)


class _Tracked:
    """A stream that is counted while it is open."""

    def __init__(
        self, service: Service, stream: EventStream, box: Mailbox, call: Call, denoise: bool
    ):
        self._service, self._stream, self._box = service, stream, box
        self._call, self._denoise = call, denoise

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        service, stream, call = self._service, self._stream, self._call
        service.metrics.streams_open += 1
        service.admission.num_denoise += self._denoise
        try:
            await stream(scope, receive, send)
        finally:
            service.metrics.streams_open -= 1
            service.admission.num_denoise -= self._denoise
            service.metrics.count(
                "dllm_denoise_frames_total", self._box.merged_frames, fate="merged"
            )
            call.texts, call.usages = stream.finishes, self._box.usages
            call.error = stream.error
            _ended(service, self._box, call)
