"""Chat templates: conversations rendered as the text a model reads.

Data flow: model -> template (the folder's own, else the one shipped here for its family) -> text.
The text holds its special tokens by name, so it is encoded without further ones.
"""

import contextlib
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dllm_jax.loading import contents, turns

Messages = Sequence[Mapping[str, Any]]

_FOLDER = Path(__file__).parent / "chat_templates"
_ROLES = ("system", "user", "assistant")  # that the shipped templates know
# Arguments of transformers' `apply_chat_template` that templates do not read ...
_RENDERING = ("add_generation_prompt", "continue_final_message")
# ... and those that this module sets.
_OURS = (
    *("conversation", "messages", "tokenize", "tokenizer_kwargs", "sanitize_control_tokens"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
    "return_assistant_tokens_mask",
)


class TextModel(Protocol):
    """The fields of a model that this module reads: of a `Model`, or of one without weights."""

    @property
    def source(self) -> str:
        """The source that it was loaded from."""
        ...

    @property
    def defaults(self) -> Any:
        """Names the `family`."""
        ...

    @property
    def tokenizer(self) -> Any:
        """A transformers tokenizer, None for a model without one."""
        ...


class Template(NamedTuple):
    """A chat template.

    Attributes:
        text: Jinja.
        whose: For messages about it.
        shipped: Name of ours, None for the folder's own and the user's.
    """

    text: str
    whose: str
    shipped: str | None = None


class _Shipped(NamedTuple):
    """A template of ours, and the special tokens that it needs in the vocabulary."""

    name: str
    tokens: tuple[str, ...]


_CHATML = ("<|im_start|>", "<|im_end|>")
_LLADA = ("<|startoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_SEED = ("<[begin▁of▁sentence]>", "<[end▁of▁sentence]>")
# By family. Llama has none here: a chat model brings its template, one without is a base model.
_SHIPPED = {
    "llada": _Shipped("llada", _LLADA),
    "dream": _Shipped("dream", _CHATML),
    "dream_reasoner": _Shipped("qwen3", _CHATML),
    "stable_diffcoder": _Shipped("seed_coder", _SEED),
    "fast_dllm_v2": _Shipped("qwen2_5", _CHATML),
    "sdar": _Shipped("qwen3", _CHATML),
    "sdar_moe": _Shipped("qwen3", _CHATML),
    "llada2": _Shipped("llada2", ("<|role_end|>",)),
    "diffusion_gemma": _Shipped("gemma4", ("<|turn>", "<turn|>", "<|tool_call>")),
    "qwen3": _Shipped("qwen3", _CHATML),
    "qwen3_moe": _Shipped("qwen3", _CHATML),
}


def template_of(
    model: TextModel, chosen: str | None = None, tools: Sequence[Any] | None = None
) -> Template | None:
    """The chat template of a model; None for one without a chat format, or without a tokenizer.

    The folder's own comes first. Ours for the family stands in for one that was lost on the way,
    unless the model's name says "base" or its vocabulary lacks the template's tokens.

    Args:
        chosen: Jinja to use in its place, or the name of one of the folder's templates.
        tools: Folders with several templates may have one for these.

    Raises:
        ValueError: `chosen` is neither, or the folder has several templates and none is meant.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        return None
    if chosen is not None or tokenizer.chat_template:
        try:
            text = tokenizer.get_chat_template(chosen, list(tools) if tools else None)
        except ValueError as error:
            raise ValueError(f"model {model.source!r}: {_one_line(error)}") from error
        if text == chosen and not re.search(r"\{[{%]", text):
            raise ValueError(
                f"chat_template={_short(text)} is neither Jinja nor "
                f"{_names(tokenizer.chat_template)}"
            )
        return Template(text, "chat_template" if chosen == text else f"model {model.source!r}")
    shipped = _SHIPPED.get(model.defaults.family)
    if shipped is None or _is_base(model.source):
        return None
    if not set(shipped.tokens) <= tokenizer.get_added_vocab().keys():
        return None
    file = f"{shipped.name}.jinja"
    text = (_FOLDER / file).read_text(encoding="utf-8")
    return Template(text, f"dllm_jax ({file})", shipped.name)


def note(model: TextModel) -> str | None:
    """A one-line note on a template of ours; None for the folder's own."""
    template = template_of(model)
    if template is None or template.shipped is None:
        return None
    return (
        f"{model.source} has no chat template in its files; using dllm_jax's "
        f"{template.shipped}.jinja, the {model.defaults.family} family's"
    )


def prompt(
    model: TextModel,
    conversation: Messages,
    encode: Callable[[str], list[int]],
    **template_kwargs: Any,
) -> tuple[str, list[int]]:
    """A conversation as text and as ids, of which no control token comes from a caller's string.

    Args:
        encode: Ids of a text that holds its control tokens by name.
        template_kwargs: As of `render`.

    Raises:
        ValueError: As of `render`.
    """
    tools = template_kwargs.get("tools")
    tools = tools if isinstance(tools, Sequence) and not isinstance(tools, str) else None
    template = template_of(model, template_kwargs.get("chat_template"), tools)
    tokens = {} if template is None else turns.control_tokens(model.tokenizer, template.text)
    if not tokens or not isinstance(conversation, Iterable):
        text = render(model, conversation, **template_kwargs)
        return text, encode(text)
    said = list(conversation)
    if template is not None and "reasoning_content" in template.text:
        said = [turns.thoughts_apart(one) if isinstance(one, Mapping) else one for one in said]

    held = turns.guarded([said, tools], tokens)
    if held == [said, tools]:
        text = render(model, said, **template_kwargs)
        return text, encode(text)

    def rendered(said: Messages, tools: Any) -> str:
        return render(model, said, **template_kwargs, **({"tools": tools} if tools else {}))

    template_kwargs.pop("tools", None)
    text, bare = rendered(*held), rendered(*turns.guarded([said, tools], tokens, "x"))
    ids, control = turns.encoded(text, encode, tokens), set(tokens.values())
    if [i for i in ids if i in control] != [i for i in encode(bare) if i in control]:
        raise turns.Unusable(
            "a message holds a control token that the chat template makes one of its own; leave it "
            "out",
            "messages",
        )
    return turns.unguarded(text), ids


def render(
    model: TextModel,
    conversation: Messages,
    chat_template: str | None = None,
    **template_kwargs: Any,
) -> str:
    """A conversation as the text the model reads, up to where it answers.

    Args:
        chat_template: In the place of the model's: Jinja, or the name of one of the folder's.
        template_kwargs: What the template reads beside the messages (`enable_thinking`, `tools`).
            A keyword that the template does not read is refused: it would silently do nothing.
            `add_generation_prompt` and `continue_final_message` are as in transformers.

    Raises:
        ValueError: The model has no tokenizer or no template, this is no conversation, or not one
            that the template takes.
    """
    tools = template_kwargs.get("tools")
    if not isinstance(tools, Sequence | None) or isinstance(tools, str):
        raise ValueError(f"tools={_short(tools)} must be a list of tools; give one")
    template = template_of(model, chat_template, tools)
    if template is None:
        raise ValueError(_no_template(model))
    said = list(conversation) if isinstance(conversation, Iterable) else []
    if not said or not all(isinstance(turn, Mapping) for turn in said):
        raise ValueError(
            f"{_short(conversation)} is no conversation; give a list of "
            '{"role": "user", "content": "..."}'
        )
    goes_on = bool(template_kwargs.get("continue_final_message"))
    fields = {"add_generation_prompt": not goes_on, **template_kwargs}
    said = turns.plain(said, is_answered=bool(fields["add_generation_prompt"]))
    if template.shipped is not None:
        said = [_plain_turn(turn) for turn in said]
        _check_plain(said, template)
    _check_read(template_kwargs, template)
    from dllm_jax.loading import templates  # Jinja takes long to import

    def fill(messages: Messages) -> str:
        return templates.fill(
            template.text, messages, **{**model.tokenizer.special_tokens_map, **fields}
        )

    try:
        try:
            return contents.rendered(fill, said)
        except Exception:  # many templates take one system turn, the first
            if (joined := turns.systems_first(said)) is None:
                raise
            with contextlib.suppress(Exception):
                return contents.rendered(fill, joined)
            raise
    except contents.Lost as error:
        role = _short(said[error.place].get("role"))
        raise ValueError(
            f"the chat template of {template.whose} leaves out the text of message {error.place} "
            f"(role {role}); leave the message out or give another chat_template"
        ) from None
    except Exception as error:  # a template may raise anything
        raise ValueError(
            f"the chat template of {template.whose} does not take this conversation: "
            f"{_one_line(error)}; change the messages or give another chat_template"
        ) from error


def _no_template(model: TextModel) -> str:
    if model.tokenizer is None:
        return (
            f"model {model.source!r} has no tokenizer and no chat template; give generate token ids"
        )
    what = (
        "is a base model: it has no chat format"
        if _is_base(model.source)
        else "has no chat template"
    )
    return (
        f"model {model.source!r} {what}; use generate with a prompt, or give a chat_template "
        "(--chat-template)"
    )


def _is_base(source: str) -> bool:
    """Whether a model's name marks it as a base model."""
    path = Path(source)
    if path.parent.name == "snapshots":  # the hub's cache names a model two levels up
        path = path.parent.parent
    return re.search(r"(^|[-_. ])base($|[-_. ])", path.name, re.IGNORECASE) is not None


def _plain_turn(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose content is text, where it is text alone."""
    text = contents.as_text(turn.get("content"))
    return turn if text is None else {**turn, "content": text}


def _check_plain(said: Messages, template: Template) -> None:
    """Refuse messages that our templates do not take; they take text alone."""
    reads_calls = "tool_calls" in template.text
    roles = (*_ROLES, "tool") if reads_calls else _ROLES
    for i, turn in enumerate(said):
        if turn.get("role") not in roles:
            raise ValueError(
                f"message {i} has role {_short(turn.get('role'))}; the chat template of "
                f"{template.whose} takes {', '.join(roles)}; give a chat_template that knows it"
            )
        if turn.get("tool_calls") and not reads_calls:
            raise ValueError(
                f"message {i} has tool_calls, which the chat template of {template.whose} does not "
                "read; give a chat_template that does"
            )
        if not isinstance(turn.get("content"), str):
            raise ValueError(
                f"message {i} has content={_short(turn.get('content'))}; the chat template of "
                f"{template.whose} takes text"
            )


def _check_read(fields: Mapping[str, Any], template: Template) -> None:
    """Refuse keywords that the template does not read."""
    for name, value in fields.items():
        if name in _RENDERING:
            continue
        if name == "chat_template_kwargs":
            raise ValueError(
                f"{name}={_short(value)} is not taken as one; give its entries as keywords"
            )
        if name in _OURS:
            raise ValueError(
                f"{name}={_short(value)} is not for a chat template to read; leave it out"
            )
        if not re.search(rf"\b{re.escape(name)}\b", template.text):
            raise ValueError(
                f"the chat template of {template.whose} does not read {name}, so "
                f"{name}={_short(value)} would change nothing; leave it out"
            )


def _short(value: Any) -> str:
    """A value for a message, cut short; the server's front, which has no JAX, imports this file."""
    return reprlib.repr(value).replace("\n", " ")


def _names(templates: Any) -> str:
    if not isinstance(templates, Mapping):
        return "a name: the model has one template"
    return f"one of the model's templates, {', '.join(sorted(templates))}"


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.rstrip(".!") if text else type(error).__name__
