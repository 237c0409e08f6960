"""From a body to the fields of `SamplingParams`, as the engine's process reads them."""

from typing import Any

import msgspec

from dllm_jax.engine.checks import Refused
from dllm_jax.engine.rules import check_thresholds
from dllm_jax.serve import wire
from dllm_jax.serve.pipe import Facts
from dllm_jax.serve.refusals import Refusal, shown, unsupported
from dllm_jax.serve.strict_json import read_json
from dllm_jax.structured import Tools

SEED_MODULUS = 2**32  # a random key is made from 32 bits
MAX_CONSTRAINT_BYTES = 128 << 10
_ANY_OBJECT = {"type": "object"}
MAX_ID = 2**31 - 1
_BAN = -100.0  # OpenAI's bias that bans an id


def params_of(
    body: wire.Sampling, facts: Facts, max_tokens: int, tools: Tools | None = None
) -> dict[str, Any]:
    """Fields of `SamplingParams`; the constraint as the engine process reads it."""
    held, overrides = _bounded_constraint(body), body.strategy_overrides or {}
    if tools is not None and (tools.tools or tools.budget is not None):
        held = {"tools": tools.fields}
    try:
        values = {name: value for name, (value, _) in facts.thresholds.items()}
        rules = {name: rule for name, (_, rule) in facts.thresholds.items()}
        check_thresholds(overrides, rules, values)
    except Refused as error:
        raise Refusal(str(error), param=error.param) from None
    top_p = body.top_p
    if top_p is None and held is None:  # constrained texts are drawn from all that fits
        top_p = facts.sampling.get("top_p")
    return {
        "max_tokens": max_tokens,
        "temperature": facts.sampling.get("temperature", 0.0)
        if body.temperature is None
        else body.temperature,
        "top_p": top_p,
        "top_k": body.top_k if body.top_k is not None and body.top_k > 0 else None,
        "seed": None if body.seed is None else body.seed % SEED_MODULUS,
        "stop": stop_strings(body),
        "stop_token_ids": body.stop_token_ids or (),
        "ignore_eos": bool(body.ignore_eos),
        "max_nfe": body.max_nfe,
        "max_repetition_run": body.max_repetition_run,
        "n": body.n or 1,
        "strategy_overrides": overrides,
        "constraint": held,
        "logprobs": num_logprobs(body),
    }


def _bounded_constraint(body: wire.Sampling) -> dict[str, Any] | None:
    """The constraint of a text, if its size may be compiled."""
    held = constraint(body)
    size = 0 if held is None else len(msgspec.json.encode(held))
    if size > MAX_CONSTRAINT_BYTES:
        param = "response_format" if body.structured_outputs is None else "structured_outputs"
        raise Refusal(
            f"{param} has {size} bytes; at most {MAX_CONSTRAINT_BYTES} are compiled: make it "
            "shorter",
            param=param,
        )
    return held


def num_logprobs(body: wire.Sampling) -> int | None:
    """How many likeliest tokens stand with the log-probability of each; None: it has none.

    Raises:
        Refusal: Their number is given, and log-probabilities are not asked for.
    """
    if isinstance(body, wire.Chat):
        if body.logprobs:
            return body.top_logprobs or 0
        if body.top_logprobs:
            raise Refusal(
                f"top_logprobs={body.top_logprobs} needs logprobs: true; set it or leave this out",
                param="top_logprobs",
            )
        return None
    asked = body.logprobs if isinstance(body, wire.Completion) else None
    return None if asked is None or asked is False else int(asked) * (asked is not True)


def stop_strings(body: wire.Sampling) -> tuple[str, ...]:
    """Stop strings of a request."""
    stop = body.stop
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def constraint(body: wire.Sampling) -> dict[str, Any] | None:
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


def _tokens(body: wire.Sampling) -> dict[str, Any] | None:
    """The ids that a text may be written with, as fields of `structured.Tokens`; None: all."""
    banned = []
    for key, bias in (body.logit_bias or {}).items():
        if bias != _BAN or not key.isdecimal() or int(key) > MAX_ID:
            raise unsupported(
                "logit_bias",
                f"logit_bias {shown(key)}: {bias:g} is no ban of an id; a bias would shift the law "
                "that thresholds are compared with: give -100, or allowed_token_ids",
            )
        banned.append(int(key))
    if body.allowed_token_ids is None and not banned:
        return None
    return {"allowed": body.allowed_token_ids, "banned": banned}


def _schema_of(form: wire.ResponseFormat) -> Any:
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
