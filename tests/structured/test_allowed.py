"""Proves that texts hold allowed ids alone, and no banned ones (issue 50, item 8)."""

import pytest

import dllm_jax as dj
from dllm_jax.serve import params, wire
from dllm_jax.serve.refusals import Refusal
from dllm_jax.structured import Tokens, from_fields
from tests.api.test_llm import CONFIG, STRATEGY

CHAT = [
    {
        "role": "user",
        "content": "A shop has 365 plates. People bring 132 back. How many plates are there?",
    }
]


@pytest.fixture(scope="module")
def llm():
    return dj.LLM("builtin:tiny-sdar", STRATEGY, config=CONFIG, warm_up=False)


def written(llm, constraint):
    params = dj.SamplingParams(max_tokens=48, constraint=constraint)
    (one,) = llm.chat(CHAT, params, use_tqdm=False)[0].outputs
    return one


@pytest.mark.long
def test_ids_are_kept_to_and_kept_out(llm):
    free = written(llm, None)
    assert free.text.endswith("The answer is 497.")
    used = sorted(set(free.token_ids))
    held = written(llm, Tokens(allowed=used))
    assert (held.token_ids, held.constraint_met) == (free.token_ids, True)
    plates = llm.tokenizer(" plates", add_special_tokens=False)["input_ids"]
    without = written(llm, Tokens(banned=plates))
    assert not set(plates) & set(without.token_ids)
    digits = llm.tokenizer("0123456789", add_special_tokens=False)["input_ids"]
    only = written(llm, Tokens(allowed=digits))
    assert set(only.text) <= set("0123456789")
    assert only.constraint_met


@pytest.mark.long
def test_ids_that_leave_nothing_are_refused(llm):
    for constraint, said in (
        (Tokens(allowed=[10**6]), "not in the vocabulary"),
        (Tokens(allowed=[70], banned=[70]), "no id is left"),
    ):
        with pytest.raises(ValueError, match=said):
            written(llm, constraint)


@pytest.mark.parametrize("given", [{}, {"allowed": 5}, {"allowed": [-1]}, {"banned": ["a"]}])
def test_what_is_no_list_of_ids_is_refused(given):
    with pytest.raises(ValueError, match=r"give allowed=\[5, 7\]"):
        Tokens(**given)


def read(**fields):
    return params.constraint(wire.Completion(prompt="a", **fields))


def test_bodies_name_ids_in_two_ways():
    assert from_fields(read(allowed_token_ids=[7, 5])) == Tokens(allowed=[5, 7])
    assert from_fields(read(logit_bias={"9": -100})) == Tokens(banned=[9])
    assert read(logit_bias={}) is None
    for bias in ({"9": 1.5}, {"a": -100}, {"-1": -100}, {str(2**31): -100}):
        with pytest.raises(Refusal, match="is no ban of an id"):
            read(logit_bias=bias)
    outputs = wire.StructuredOutputs(regex="a")
    with pytest.raises(Refusal, match="hold texts of their own"):
        read(logit_bias={"9": -100}, structured_outputs=outputs)
