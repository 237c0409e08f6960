"""Request bodies: what is read, what changes nothing and is taken, what is refused by name.

Data flow: bytes -> JSON -> fields that change nothing dropped (`neutral`), others that are not read
refused -> a Struct, whose types and ranges are checked by msgspec. The OpenAPI
document is made of the same Structs.
"""

import difflib
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from dllm_jax.engine.rules import TYPED
from dllm_jax.serve.neutral import (
    IGNORED,
    NEUTRAL,
    PART_NEUTRAL,
    PART_ONLY,
    REMEDIES,
    SPECIAL_TOKENS,
    TURN_NEUTRAL,
    Neutral,
    changes_nothing,
)
from dllm_jax.serve.refusals import Refusal, not_json, not_valid, shown, unsupported
from dllm_jax.serve.strict_json import read_object

MAX_STOPS, MAX_STOP_CHARS = 16, 256
MAX_TURNS = 4096
MAX_IDS = 1 << 20


def _in(field: str) -> Meta:
    """The numbers that a field may hold."""
    low, high, _, above_low = TYPED[field]
    return Meta(gt=low, le=high) if above_low else Meta(ge=low, le=high)


Count = Annotated[int, _in("max_tokens")]
TokenId = Annotated[int, _in("stop_token_ids")]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_IDS)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SchemaOf(Struct, forbid_unknown_fields=True, kw_only=True):
    """`response_format.json_schema`; `strict` and what it is called change nothing."""

    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaOf | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True, kw_only=True):
    """`structured_outputs`, as vLLM reads it: one of its fields."""

    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None


class Sampling(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both generating routes."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, _in("temperature")] | None = None
    top_p: Annotated[float, _in("top_p")] | None = None
    top_k: Annotated[int, _in("top_k")] | None = None
    n: Annotated[int, _in("n")] | None = None
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=32)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    strategy_overrides: dict[str, float] | None = None
    max_nfe: Count | None = None
    max_repetition_run: Annotated[int, _in("max_repetition_run")] | None = None
    stream_mode: Literal["commit", "denoise"] | None = None
    priority: Annotated[int, _in("priority")] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_IDS)] | None = (
        None
    )
    logit_bias: dict[str, float] | None = None


class Completion(Sampling, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_IDS)]
    suffix: str | None = None
    logprobs: bool | Annotated[int, _in("logprobs")] | None = None


class Part(Struct, forbid_unknown_fields=True):
    """A part of a message's content; text only."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class Turn(Struct, forbid_unknown_fields=True):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part]
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Chat(Sampling, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Turn], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=MAX_IDS)] | None = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, _in("logprobs")] | None = None

    def __post_init__(self):
        if not self.tools:
            self.tools = self.parallel_tool_calls = None
            if self.tool_choice in ("auto", "none"):
                self.tool_choice = None
        if self.include_reasoning is True:
            self.include_reasoning = None
        self.logprobs, self.top_logprobs = self.logprobs or None, self.top_logprobs or None


class Tokenize(Struct, forbid_unknown_fields=True):
    """`POST /tokenize`: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Turn], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Detokenize(Struct, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_IDS)]
    model: str | None = None


class Option(Struct, forbid_unknown_fields=True):
    """A value of a choice."""

    value: str | bool
    description: str | None = None


class Level(Struct, forbid_unknown_fields=True):
    """A level of a score."""

    label: str
    description: str | None = None


class Predicate(Struct, forbid_unknown_fields=True, kw_only=True, tag="predicate"):
    """Whether something is so."""

    instructions: str | list[Part]
    name: str | None = None


class ChoiceOf(Struct, forbid_unknown_fields=True, kw_only=True, tag="choice"):
    """Which one of several."""

    instructions: str | list[Part]
    choices: Annotated[list[Option], Meta(min_length=2, max_length=26)]
    name: str | None = None


class Score(Struct, forbid_unknown_fields=True, kw_only=True, tag="score"):
    """How much, by levels in ascending order."""

    instructions: str | list[Part]
    levels: Annotated[list[Level], Meta(min_length=2, max_length=26)]
    name: str | None = None


class Decisions(Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/decisions`."""

    input: str | Annotated[list[Turn], Meta(min_length=1)]
    questions: Annotated[list[Predicate | ChoiceOf | Score], Meta(min_length=1, max_length=64)]
    model: str | None = None
    joint: bool | None = None


Body = TypeVar("Body", bound=Struct)


def read(data: bytes, kind: type[Body]) -> Body:
    """A body as the route reads it.

    Raises:
        Refusal: It is no JSON, asks for what is not supported, or has a wrong type.
    """
    fields = read_object(data)
    kept = _kept(fields, kind, NEUTRAL, "", special=issubclass(kind, Chat))
    for name in ("messages", "input"):
        if issubclass(kind, Chat | Tokenize | Decisions) and isinstance(kept.get(name), list):
            if len(kept[name]) > MAX_TURNS:
                raise Refusal(
                    f"{name} has {len(kept[name])} messages; at most {MAX_TURNS} are taken: join "
                    "or leave out older ones",
                    param=name,
                )
            kept[name] = [_turn(turn, f"{name}[{i}]") for i, turn in enumerate(kept[name])]
    try:
        return msgspec.convert(kept, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _as_number(kept, not_valid(error)) from None
    except RecursionError as error:
        raise not_json(error) from None


_ROWS = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}


def _as_number(fields: dict[str, Any], refusal: Refusal) -> Refusal:
    """The refusal in the words of `engine.rules`, if a field with a range is at fault."""
    name = refusal.param or ""  # of `seed` any integer is taken
    try:
        row = _ROWS.get(name, name)
        if row in TYPED and row != "seed" and not isinstance(fields.get(name), list | None):
            TYPED[row].check(name, fields[name])
    except ValueError as error:
        return Refusal(str(error), param=name)
    return refusal


def _kept(
    fields: dict[str, Any],
    kind: type[Struct],
    neutral: dict[str, Neutral],
    prefix: str,
    special: bool | None = None,
) -> dict[str, Any]:
    """The fields that the Struct reads; the others change nothing, or are refused.

    Args:
        special: Whether this is a conversation, whose text holds its special tokens already.
    """
    known = kind.__struct_fields__
    kept = {}
    for name, value in fields.items():
        if name in known:
            if value is not None:
                kept[name] = value
        elif value is None or (name in IGNORED and not prefix):
            continue
        elif name in neutral:
            if not changes_nothing(value, neutral[name]):
                raise _unsupported(prefix + name, name, value)
        elif name == SPECIAL_TOKENS and special is not None:
            if value is not (not special):
                raise unsupported(
                    name,
                    f"{name}={shown(value)} is not supported here; use {str(not special).lower()} "
                    "or token ids",
                )
        else:
            raise _unknown(name, prefix, (*known, *neutral))
    return kept


def _unsupported(param: str, name: str, value: Any) -> Refusal:
    remedy = REMEDIES.get(name, "it is not supported; leave it out")
    if param != name:
        remedy = "it is not supported in a message; leave it out"
    return unsupported(param, f"{param}={shown(value)}: {remedy}")


def _unknown(name: str, prefix: str, known: tuple[str, ...]) -> Refusal:
    close = difflib.get_close_matches(name[:64], known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "leave it out"
    what = shown(name)
    return Refusal(
        f"the field {what} is unknown; {hint}", param=prefix + name, code="unknown_parameter"
    )


def _turn(turn: Any, path: str) -> Any:
    """A message without the fields that change nothing."""
    if not isinstance(turn, dict):
        return turn
    if turn.get("role") == "function" or (turn.get("role") == "tool" and path.startswith("input")):
        raise unsupported(
            f"{path}.role", f"{path}.role={shown(turn['role'])}: use the role tool, in messages"
        )
    kept = _kept(turn, Turn, TURN_NEUTRAL, f"{path}.")
    content = kept.get("content")
    if isinstance(content, list):
        kept["content"] = [_part(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
    elif content is None and ("content" in turn or turn.get("role") in ("assistant", "tool")):
        kept["content"] = ""  # an empty turn
    return kept


def _part(part: Any, path: str) -> Any:
    """A part without the fields that change nothing."""
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if isinstance(kind, str) and kind not in ("text", "input_text", "output_text"):
        raise unsupported(f"{path}.type", f"{path}.type={shown(kind)}: {PART_ONLY}")
    return _kept(part, Part, PART_NEUTRAL, f"{path}.")


def text_of(content: str | list[Part]) -> str:
    """A message's content as one text."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content)
