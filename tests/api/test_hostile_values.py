"""Proves that an error names any value in one short line, also one that has no `repr`."""

import dataclasses
import itertools
from typing import Any, cast

import jax.numpy as jnp
import pytest

import dllm_jax as dj
from dllm_jax.convert.json_fields import check_fields
from dllm_jax.engine import checks
from dllm_jax.engine.layout import EngineConfig
from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.loading import chat
from dllm_jax.loading.sources import LoadError
from dllm_jax.loading.templates import tool_schema
from dllm_jax.strategies import load_strategy
from dllm_jax.strategies.core import checks as field_checks
from tests.api.test_llm import CONFIG, STRATEGY


class Dumb:
    def __repr__(self):
        raise RuntimeError


class Long:
    def __repr__(self):
        return "x\n" * 50_000


HOSTILE = [Dumb(), Long(), "y" * 50_000, [[1.5] * 99] * 9999, 10**5000, {"z" * 9999: Dumb()}]
IDS = ["dumb", "long", "text", "list", "number", "mapping"]


def refusal(call):
    """What a call is refused with, None where it is not."""
    try:
        call()
    except (AttributeError, TypeError, ValueError) as error:
        return str(error)
    return None


def is_short(text):
    return len(text) < 900 and "\n" not in text


@pytest.mark.parametrize("reported", [checks.short_repr, field_checks.short_repr])
def test_a_value_is_told_in_a_few_words(reported):
    assert (reported(3), reported("a"), reported([1, "b"]), reported(None)) == (
        "3",
        "'a'",
        "[1, 'b']",
        "None",
    )
    assert reported(Dumb()).startswith("<Dumb instance at ")
    assert reported(10**5000) == "of type int"
    assert all(len(reported(value)) < 500 and "\n" not in reported(value) for value in HOSTILE)


@pytest.mark.parametrize("value", HOSTILE, ids=IDS)
@pytest.mark.parametrize("kind", [SamplingParams, EngineConfig, Request])
def test_every_field_refuses_a_hostile_value_in_one_line(kind, value):
    """Or takes it, as a text may be a prompt."""
    needed = {"prompt_token_ids": [1]} if kind is Request else {}
    reported = [
        refusal(lambda name=field.name: kind(**{**needed, name: value}))
        for field in dataclasses.fields(kind)
    ]
    refused = [text for text in reported if text is not None]
    assert len(refused) >= 5
    assert [text for text in refused if not is_short(text)] == []


@pytest.mark.parametrize("value", HOSTILE, ids=IDS)
def test_models_strategies_and_chats_refuse_it_in_one_line(value):
    calls = (
        lambda: dj.load(value),
        lambda: dj.load("random:none", dtype=value),
        lambda: dj.load("random:none", lora=value),
        lambda: dj.load("builtin:tiny-sdar", revision=value),
        lambda: load_strategy(value),
        lambda: load_strategy("multi_bd", accept_threshold=value),
        lambda: chat.render(cast("Any", object()), [{"role": "user", "content": "x"}], tools=value),
    )
    assert [text for text in map(refusal, calls) if text is not None and not is_short(text)] == []


class Broken:
    def __iter__(self):
        raise RuntimeError("one\ntwo")


ODD = [*HOSTILE, Broken(), itertools.repeat(1), jnp.zeros(3), [None], [10**40], 1j, b"a", True]


@pytest.mark.parametrize(
    "value", ODD, ids=[*IDS, *["broken", "endless", "array", "null", "huge", "1j", "bytes", "true"]]
)
def test_every_argument_of_a_call_refuses_it_in_one_line(value, monkeypatch):
    monkeypatch.setattr(checks, "MOST_LISTED", 1 << 10)
    model = dj.load("builtin:tiny-sdar")
    given: dict[str, Any] = {"model": model, "prompts": [[1, 2]], "max_tokens": 4}
    numbers = ("max_tokens", "temperature", "top_k", "top_p", "max_nfe", "prompt_len", "key")
    names = ("model", "prompts", "stop_token_ids", "draft", "attention_implementation", *numbers)
    calls = [lambda name=name: dj.generate(**{**given, name: value}) for name in names]
    given_one = {"model": model, "prompt": [1, 2], "max_tokens": 4}
    names = ("prompt", "keep", "num_top", "logits_at")
    calls += [lambda name=name: dj.record(**{**given_one, name: value}) for name in names]
    names = ("draft", "dtype", "lora", "max_num_seqs", "logprobs", "quantization", "strategy")
    names += ("config", "seed", "tensor_parallel_size", "block_size", "num_pages", "none")
    calls += [lambda name=name: dj.LLM(model, **{name: value}, warm_up=False) for name in names]
    calls += [lambda: dj.LLM(value), lambda: dj.load("builtin:tiny-sdar", quantization=value)]
    reported = [text for text in map(refusal, calls) if text is not None]
    assert len(reported) >= 10
    assert [text for text in reported if not is_short(text)] == []


@pytest.mark.long
def test_an_engine_goes_on_after_hostile_calls():
    llm = dj.LLM("builtin:tiny-sdar", STRATEGY, config=CONFIG, warm_up=False)
    params, turn = SamplingParams(max_tokens=8), {"role": "user", "content": "x"}

    def text():
        return llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids

    before = text()
    for value in HOSTILE:
        calls = (
            lambda value=value: llm.generate([[5]], value, use_tqdm=False),
            lambda value=value: llm.chat(value, params, use_tqdm=False),
            lambda value=value: llm.chat([value], params, use_tqdm=False),
            lambda value=value: llm.chat([turn], params, tools=value),
            lambda value=value: llm.stream([5], params, events=value),
        )
        reported = [text for text in map(refusal, calls) if text is not None]
        assert len(reported) >= 3
        assert [text for text in reported if not is_short(text)] == []
    assert not llm.engine.has_work
    assert text() == before


def test_a_function_without_types_or_a_docstring_is_no_tool():
    for tool in (lambda city: city, int, jnp.zeros((2, 2))):
        text = refusal(lambda tool=tool: tool_schema(tool))
        assert text is not None
        assert text.startswith("tool ")
        assert is_short(text)


def test_a_source_of_any_length_is_a_short_line():
    with pytest.raises(LoadError) as refused:
        dj.load("org/" + "x" * 5000 + "/y")
    assert is_short(str(refused.value))


def test_a6_ids_and_sizes_without_end_are_refused_in_one_line():
    said = refusal(lambda: EngineConfig(prefill_buckets=(10**9,)))
    assert said is not None
    assert said.startswith("prefill_buckets=(1000000000,) holds more than 1048576")
    assert is_short(said)
    EngineConfig(prefill_buckets=(1 << 20,))


def test_a6_a_field_of_json_is_named_with_its_value():
    hints = {"a": int, "b": list[int], "c": dict[str, float], "d": str | None, "e": Any}
    good = {"a": 1, "b": [2], "c": {"x": 1}, "d": None, "e": None}
    check_fields("top", good, hints)
    bad = {"a": True, "b": [1, "x"], "c": {"x": "y"}, "d": 3, "e": 0}
    bad_ints = {"a": 10**30, "b": [1.5], "c": [1], "d": [], "e": {}}
    for given in (bad, bad_ints):
        for name, value in given.items():
            said = refusal(
                lambda name=name, value=value: check_fields("top", {**good, name: value}, hints)
            )
            assert said is not None
            assert said.startswith(f"top.{name}=")
            assert is_short(said)
    assert refusal(lambda: check_fields("top", {}, {"a": int})) == "top.a is missing"
    assert refusal(lambda: check_fields("top", [1], {})) == "top=[1] is no object"
