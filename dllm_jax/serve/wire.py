"""Request bodies: what is read, what changes nothing and is taken, what is refused by name.

Data flow: bytes -> JSON -> fields that change nothing dropped (`NEUTRAL`, `IGNORED`), others that
are not read refused -> a Struct, whose types and ranges are checked by msgspec. The OpenAPI
document is made of the same Structs.
"""

import difflib
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from dllm_jax.engine.rules import TYPED
from dllm_jax.serve.refusals import Refusal, not_json, not_valid, shown

MAX_STOPS, MAX_STOP_CHARS = 16, 256
MAX_TURNS = 4096
MAX_IDS = 1 << 20
MAX_CONTAINERS = 1 << 16  # lists and objects of a body: the garbage collector visits each


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


class _Any:
    """A field that changes nothing, whatever its value."""


ANY = _Any()

# Fields that are not read, and the values at which they would change nothing; null always is one.
NEUTRAL: dict[str, tuple[Any, ...] | _Any] = {
    "best_of": (1,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": ANY,
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "include_reasoning": (True,),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "watermarking": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "documents": (),
    "reasoning_effort": (),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "truncate_prompt_tokens": (),
    "thinking": (),
    "prompt_embeds": (),
    "lora_path": (),
    "kv_transfer_params": (),
}
# What the tokenizer puts around a prompt: a text gets it, a rendered conversation holds it already.
SPECIAL_TOKENS = "add_special_tokens"
# Said by clients for their own sake; never read.
IGNORED = frozenset(
    {
        *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("prompt_cache_options", "session_id", "request_id", "verbosity"),
        *("cache_control", "cache_salt"),
    }
)
_GUIDED = "use structured_outputs: {{{}: ...}}"
_TOOLS = "tools are called in /v1/chat/completions alone; leave it out"
_FUNCTIONS = "use tools"
_PENALTY = (
    "a penalty is of the tokens before, and here the tokens of a window are drawn together; leave "
    "it out (max_repetition_run ends a run)"
)
# Remedies where "leave it out" is not all there is to say.
REMEDIES = {
    "guided_json": _GUIDED.format("json"),
    "guided_regex": _GUIDED.format("regex"),
    "guided_choice": _GUIDED.format("choice"),
    "guided_grammar": "grammars are not supported; use structured_outputs with a regex or a schema",
    "tools": _TOOLS,
    "functions": _FUNCTIONS,
    "tool_choice": _TOOLS,
    "function_call": _FUNCTIONS,
    "top_logprobs": "give logprobs as the number of likeliest tokens",
    "prompt_logprobs": "the prompt has no log-probabilities; leave it out",
    "echo": "the prompt is not repeated and has no log-probabilities here; leave it out",
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _PENALTY,
    "min_p": "thresholds are of the law without it; use top_p or top_k",
    "bad_words": "only ids are banned; give logit_bias with -100 for them",
    "best_of": "candidates are not ranked; use n",
    "chat_template": "a caller's template is not run; the model's own is used",
    "thinking": "give what the chat template reads as chat_template_kwargs",
    "truncate_prompt_tokens": "prompts are not cut; shorten the prompt",
    "continue_final_message": "answers start anew; leave it out",
}
# Of a message and of its parts. Clients echo an answer with all of its fields, and proxies add
# hints for caches.
_HINTS: dict[str, tuple[Any, ...] | _Any] = {"id": ANY, "annotations": ANY, "cache_control": ANY}
TURN_NEUTRAL: dict[str, tuple[Any, ...] | _Any] = {
    **_HINTS,
    "refusal": ("",),
    "function_call": (),
    "audio": (),
    "reasoning_details": ANY,
    "provider_specific_fields": ANY,
    "type": ("message",),  # of an input item of /v1/decisions
    "status": ("completed",),
}
PART_NEUTRAL: dict[str, tuple[Any, ...] | _Any] = {**_HINTS, "logprobs": ([],)}
_PART_ONLY = "only text parts are read; nothing is fetched or decoded"

Body = TypeVar("Body", bound=Struct)


def read_json(data: bytes) -> Any:
    """The JSON of a body: strict, no NaN, no half characters.

    Raises:
        Refusal: The body is not of that form.
    """
    try:
        content = msgspec.json.decode(data)
    except msgspec.ValidationError as error:  # a number that no float holds
        raise not_json(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None
    if _MANY_DIGITS in data.translate(_AS_ZEROS):
        _check_integers(content)
    return content


_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_MANY_DIGITS = b"0" * 19  # as an integer of more than 64 bits has


def _check_containers(data: bytes) -> None:
    """Refuse a body of very many lists and objects before they are made."""
    if data.count(b"[") + data.count(b"{") <= MAX_CONTAINERS:
        return
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside = b"".join(plain.split(b'"')[::2])
    found = outside.count(b"[") + outside.count(b"{")
    if found > MAX_CONTAINERS:
        raise Refusal(
            f"the body has {found} lists and objects; at most {MAX_CONTAINERS} are taken: send "
            "less at once",
            code="invalid_json",
        )


def _check_integers(content: Any) -> None:
    """Refuse integers that neither the pipe nor the device holds, wherever they are."""
    waiting: list[tuple[Any, Any]] = [(content, None)]
    while waiting:
        value, at = waiting.pop()
        if isinstance(value, dict):
            waiting += [(inner, (at, f".{key}")) for key, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(inner, (at, f"[{i}]")) for i, inner in enumerate(value)]
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:
            param = ""
            while at is not None:
                at, step = at
                param = step + param
            param = param.removeprefix(".") or None
            raise Refusal(
                f"{param or 'the body'} is an integer of more than 64 bits; send a smaller one",
                param=param,
            )


def read_object(data: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        Refusal: The body is not of that form.
    """
    _check_containers(data)
    fields = read_json(data)
    if not isinstance(fields, dict):
        raise Refusal("the body is no JSON object; send one object", code="invalid_json")
    return fields


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
    neutral: dict[str, tuple[Any, ...] | _Any],
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
            if not _changes_nothing(value, neutral[name]):
                raise _unsupported(prefix + name, name, value)
        elif name == SPECIAL_TOKENS and special is not None:
            if value is not (not special):
                raise Refusal(
                    f"{name}={shown(value)} is not supported here; use {str(not special).lower()} "
                    "or token ids",
                    param=name,
                    code="unsupported_parameter",
                )
        else:
            raise _unknown(name, prefix, (*known, *neutral))
    return kept


def _changes_nothing(value: Any, neutral: tuple[Any, ...] | _Any) -> bool:
    if isinstance(neutral, _Any):
        return True
    return any(isinstance(value, bool) is isinstance(one, bool) and value == one for one in neutral)


def _unsupported(param: str, name: str, value: Any) -> Refusal:
    remedy = REMEDIES.get(name, "it is not supported; leave it out")
    if param != name:
        remedy = "it is not supported in a message; leave it out"
    return Refusal(f"{param}={shown(value)}: {remedy}", param=param, code="unsupported_parameter")


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
        raise Refusal(
            f"{path}.role={shown(turn['role'])}: use the role tool, in messages",
            param=f"{path}.role",
            code="unsupported_parameter",
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
        raise Refusal(
            f"{path}.type={shown(kind)}: {_PART_ONLY}",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    return _kept(part, Part, PART_NEUTRAL, f"{path}.")


def text_of(content: str | list[Part]) -> str:
    """A message's content as one text."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content)


def num_logprobs(body: Sampling) -> int | None:
    """How many likeliest tokens stand with the log-probability of each; None: it has none.

    Raises:
        Refusal: Their number is given, and log-probabilities are not asked for.
    """
    if isinstance(body, Chat):
        if body.logprobs:
            return body.top_logprobs or 0
        if body.top_logprobs:
            raise Refusal(
                f"top_logprobs={body.top_logprobs} needs logprobs: true; set it or leave this out",
                param="top_logprobs",
            )
        return None
    asked = body.logprobs if isinstance(body, Completion) else None
    return None if asked is None or asked is False else int(asked) * (asked is not True)


def stop_strings(body: Sampling) -> tuple[str, ...]:
    """Stop strings of a request."""
    stop = body.stop
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def constraint(body: Sampling) -> dict[str, Any] | None:
    """The constraint as one pair for `structured.from_fields`; None: no constraint.

    Raises:
        Refusal: The body says it twice, or not at all.
    """
    form, outputs = body.response_format, body.structured_outputs
    tokens = _tokens(body)
    if tokens is not None and (form is not None or outputs is not None):
        raise Refusal(
            "allowed_token_ids and logit_bias hold texts of their own; leave them out, or "
            "response_format and structured_outputs",
            param="logit_bias" if body.allowed_token_ids is None else "allowed_token_ids",
        )
    if tokens is not None:
        return {"tokens": tokens}
    form = None if form is None or form.type == "text" else form
    if form is not None and outputs is not None:
        raise Refusal(
            "response_format and structured_outputs both say what the text must be; give one",
            param="structured_outputs",
        )
    if form is not None:
        return {"json": _schema_of(form)}
    if outputs is None:
        return None
    said = {name: getattr(outputs, name) for name in outputs.__struct_fields__}
    if said["json_object"] is False:
        del said["json_object"]
    given = {name: value for name, value in said.items() if value is not None}
    if len(given) != 1:
        raise Refusal(
            f"structured_outputs has {len(given)} of regex, choice, json and json_object; give one",
            param="structured_outputs",
        )
    if "json_object" in given:
        return {"json": _ANY_OBJECT}
    if isinstance(given.get("json"), str):
        given["json"] = _schema_text(given["json"])
    return given


_ANY_OBJECT = {"type": "object"}
MAX_ID = 2**31 - 1
_BAN = -100.0  # OpenAI's bias that bans an id


def _tokens(body: Sampling) -> dict[str, Any] | None:
    """The ids that a text may be written with, as fields of `structured.Tokens`; None: all."""
    banned = []
    for key, bias in (body.logit_bias or {}).items():
        if bias != _BAN or not key.isdecimal() or int(key) > MAX_ID:
            raise Refusal(
                f"logit_bias {shown(key)}: {bias:g} is no ban of an id; a bias would shift the law "
                "that thresholds are compared with: give -100, or allowed_token_ids",
                param="logit_bias",
                code="unsupported_parameter",
            )
        banned.append(int(key))
    if body.allowed_token_ids is None and not banned:
        return None
    return {"allowed": body.allowed_token_ids, "banned": banned}


def _schema_of(form: ResponseFormat) -> Any:
    if form.type == "json_object":
        return _ANY_OBJECT
    if form.json_schema is None or form.json_schema.schema is None:
        raise Refusal(
            'response_format of type "json_schema" has no json_schema.schema; give it there',
            param="response_format.json_schema.schema",
        )
    return form.json_schema.schema


def _schema_text(text: str) -> Any:
    """A schema that was sent as text."""
    try:
        return read_json(text.encode())
    except Refusal as error:
        raise Refusal(
            f"structured_outputs.json is a text and no JSON: {error.message}",
            param="structured_outputs.json",
        ) from None
