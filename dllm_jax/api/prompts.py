"""Prompts as users write them: texts, token ids and conversations.

Data flow: prompts -> `request_of` each -> an inbox of the engine -> outputs in their order (`run`).
"""

import dataclasses
import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from dllm_jax.engine import checks
from dllm_jax.engine.inbox import News
from dllm_jax.engine.requests import (
    CompletionOutput,
    Metrics,
    Request,
    RequestOutput,
    SamplingParams,
    StreamEvent,
)
from dllm_jax.loading import chat
from dllm_jax.loading.chat import Messages
from dllm_jax.loading.model import Model
from dllm_jax.loading.tokenizer import encode

# A text, token ids, a conversation, or {"prompt": text} and {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | Messages | Mapping[str, Any]


def is_conversation(given: Any) -> TypeGuard[Messages]:
    """Whether it is a list of messages."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return False
    return bool(given) and all(isinstance(one, Mapping) and "role" in one for one in given)


def each_prompt(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list.

    Raises:
        ValueError: It is neither, or a flat list of token ids.
    """
    if isinstance(prompts, str | Mapping) or is_conversation(prompts):
        return [prompts]
    if not hasattr(prompts, "__iter__") or isinstance(prompts, bytes):
        raise ValueError(
            f"prompts has type {type(prompts).__name__}; give a text, or a list of texts and of "
            "lists of token ids"
        )
    prompts = checks.listed("prompts", prompts)
    if prompts and all(
        hasattr(one, "__index__") and not getattr(one, "ndim", 0) for one in prompts
    ):
        raise ValueError("prompts is a flat list of token ids; wrap a single prompt in a list")
    return prompts


def each_conversation(messages: Any) -> list[Messages]:
    """One conversation or several, as a list.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(messages, str | Mapping) or not hasattr(messages, "__iter__"):
        raise ValueError(
            f"messages has type {type(messages).__name__}; give a list of "
            '{"role": "user", "content": "..."}, or a list of such lists'
        )
    messages = list(messages)
    if not messages:
        raise ValueError("messages is empty; give at least one message")
    return [messages] if isinstance(messages[0], Mapping) else messages


def _each_params(params: Any, count: int) -> list[SamplingParams]:
    """Sampling parameters of `count` prompts, from one for all or a list.

    Raises:
        ValueError: They are of another type, or of another number.
    """
    if isinstance(params, SamplingParams):
        return [params] * count
    every = list(params) if isinstance(params, Sequence) else [params]
    for one in every:
        if not isinstance(one, SamplingParams):
            raise ValueError(
                f"params holds a value of type {type(one).__name__}; give SamplingParams"
            )
    if len(every) != count:
        raise ValueError(f"{len(every)} params for {count} prompts; give one, or one a prompt")
    return every


def rendered(model: Model, conversation: Messages, **template_kwargs: Any) -> str:
    """A conversation through the model's chat template, see `LLM.apply_template`."""
    text = chat.render(model, conversation, **template_kwargs)
    _note_template(model, template_kwargs)
    return text


def _note_template(model: Model, template_kwargs: Mapping[str, Any]) -> None:
    if "chat_template" not in template_kwargs and (note := chat.note(model)):
        warnings.warn(note, stacklevel=4)


def ids_of(model: Model, prompt: Prompt, special: bool) -> list[int]:
    """Token ids of a text, or those that were given.

    Args:
        special: Add the tokenizer's special tokens; a rendered conversation holds them by name.

    Raises:
        ValueError: The model has no tokenizer, or these are no token ids.
    """
    if not isinstance(prompt, str):
        return checks.token_ids("the prompt", prompt)
    if model.tokenizer is None:
        raise ValueError(
            f"model {model.source!r} has no tokenizer to read text with; give lists of token ids"
        )
    return encode(model.tokenizer, prompt, special)


def request_of(
    model: Model,
    prompt: Any,
    params: SamplingParams,
    template_kwargs: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Request:
    """The request of a prompt.

    Args:
        template_kwargs: Variables of the chat template; the prompt is then a conversation.
        fields: Further fields of the request.

    Raises:
        ValueError: It cannot be read.
    """
    if template_kwargs is not None or is_conversation(prompt):
        encode = functools.partial(ids_of, model, special=False)  # the text holds them by name
        text, ids = chat.prompt(model, prompt, encode, **template_kwargs or {})
        _note_template(model, template_kwargs or {})
    else:
        given, text = _given(prompt)
        ids = ids_of(model, given, special=True)
    return Request(prompt_token_ids=ids, params=params, prompt=text, **fields)


def _given(prompt: Any) -> tuple[Any, str | None]:
    """The content of a prompt, and its text if it has one."""
    if not isinstance(prompt, Mapping):
        return prompt, prompt if isinstance(prompt, str) else None
    for name in prompt.keys() - {"prompt", "prompt_token_ids"}:
        raise ValueError(
            f"a prompt has no field {checks.short_repr(name)}; give prompt or prompt_token_ids"
        )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and ids is None:
        raise ValueError(
            f"the prompt is {checks.short_repr(dict(prompt))}; give it prompt or prompt_token_ids"
        )
    return text if ids is None else ids, text


def advised(model: Model, prompts: Sequence[Any]) -> bool:
    """Warn of texts that go to a chat model without its chat template; whether there is one."""
    tokenizer = model.tokenizer
    texts = [one.get("prompt") if isinstance(one, Mapping) else one for one in prompts]
    texts = [text for text in texts if isinstance(text, str)]
    if tokenizer is None or not texts or not (tokenizer.chat_template or chat.template_of(model)):
        return False
    special = [token for token in tokenizer.get_added_vocab() if token.strip()]
    if all(any(token in text for token in special) for text in texts):
        return False
    warnings.warn(
        f"{model.source} is a chat model, and a text goes to it as it is, without the chat "
        "template; use llm.chat, give messages, or llm.apply_template(messages)",
        stacklevel=3,
    )
    return True


# --- a call ------------------------------------------------------------------------------------


def either(params: Any, sampling_params: Any) -> Any:
    """The one of two names of an argument that is given.

    Raises:
        TypeError: Both are.
    """
    if params is not None and sampling_params is not None:
        raise TypeError("params and sampling_params are the same; give one of them")
    return params if sampling_params is None else sampling_params


def run(
    llm: Any,
    make: Callable[[Any, SamplingParams], Request],
    prompts: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams] | None,
    use_tqdm: bool,
    trajectory: bool = False,
) -> list[RequestOutput]:
    """The last output of each prompt of an `LLM`; one that is refused ends with "error".

    Args:
        make: The request of a prompt.
        params: None: `LLM.default_params`.
        trajectory: Keep the outputs of every forward.

    Raises:
        ValueError: Every prompt is refused.
    """
    from tqdm import tqdm

    every = _each_params(llm.default_params if params is None else params, len(prompts))
    outputs: list[RequestOutput | None] = [None] * len(prompts)
    where: dict[str, int] = {}
    refusals: list[BaseException] = []
    with llm.engine.inbox() as inbox:
        for i, (prompt, one) in enumerate(zip(prompts, every, strict=True)):
            try:
                where[inbox.add(make(prompt, one))] = i
            except BaseException as error:  # a tokenizer may raise anything
                checks.raise_exit(error)
                refusals.append(error)
                outputs[i] = _refused(prompt, one, error)
        if refusals and not where:
            raise refusals[0]
        is_hidden = None if use_tqdm else True  # None: where there is no terminal
        with tqdm(total=len(prompts), unit="prompt", leave=False, disable=is_hidden) as bar:
            bar.update(len(refusals))
            for output in _with_trajectories(inbox) if trajectory else inbox:
                outputs[where[output.request_id]] = output
                bar.update()
    return outputs  # type: ignore[return-value]


def _with_trajectories(inbox: Iterable[RequestOutput]) -> Iterator[RequestOutput]:
    """The last output of each request, with the earlier ones as its trajectory."""
    news: dict[str, News] = defaultdict(lambda: News(every=True))
    events: dict[str, list[StreamEvent]] = defaultdict(list)
    for output in inbox:
        request_id = output.request_id
        events[request_id] += news[request_id].of(output)
        if output.finished:
            metrics = dataclasses.replace(output.metrics, trajectory=tuple(events[request_id]))
            yield dataclasses.replace(output, metrics=metrics)


def _refused(prompt: Any, params: SamplingParams, error: BaseException) -> RequestOutput:
    """The output of a prompt that was refused."""
    empty = [CompletionOutput(i, "", [], "error") for i in range(params.n)]
    zero = Metrics(0, 0, 0, 0, 0.0, None, 0.0)
    reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    prompt = getattr(prompt, "prefix", prompt)  # of `LLM.infill`
    prompt = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput("", text, [], empty, True, zero, reason)
