"""Proves that requests hold plain checked values, whatever they were made from.

Numbers of NumPy and JAX are as good as Python's; booleans are no numbers. Each wrong field is one
line that names it, its value and the rule.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import Request, SamplingParams

FIELDS = {
    "max_tokens": 256,
    "temperature": 0.0,
    "top_k": None,
    "top_p": None,
    "seed": None,
    "stop": (),
    "stop_token_ids": (),
    "ignore_eos": False,
    "max_nfe": None,
    "max_repetition_run": None,
    "n": 1,
    "strategy_overrides": {},
    "constraint": None,
    "constraint_confidence": "raw",
    "logprobs": None,
    "record": False,
}


def test_sampling_params_have_the_promised_fields_and_defaults():
    assert dataclasses.asdict(SamplingParams()) == FIELDS
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8, jnp.int32, np.array])
def test_numbers_of_numpy_become_plain(kind):
    names = ("max_tokens", "top_k", "seed", "max_nfe", "max_repetition_run", "n")
    params = SamplingParams(
        **{name: kind(7) for name in names},
        temperature=np.float32(0.5),
        top_p=np.float64(0.25),
        stop_token_ids=np.array([3, 4]),
        ignore_eos=np.True_,
        strategy_overrides={"accept_threshold": np.float32(0.5)},
    )
    for name in names:
        assert (getattr(params, name), type(getattr(params, name))) == (7, int)
    assert (params.temperature, type(params.temperature)) == (0.5, float)
    assert (params.top_p, type(params.top_p)) == (0.25, float)
    assert params.stop_token_ids == (3, 4)
    assert all(type(token) is int for token in params.stop_token_ids)
    assert params.ignore_eos is True
    assert type(params.strategy_overrides["accept_threshold"]) is float


def test_several_forms_mean_the_same():
    assert SamplingParams(stop="x") == SamplingParams(stop=["x"]) == SamplingParams(stop=("x",))
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    given = {"accept_threshold": 0.5}
    params = SamplingParams(strategy_overrides=given)
    given["accept_threshold"] = 0.9
    assert params.strategy_overrides == {"accept_threshold": 0.5}


@pytest.mark.parametrize("ids", [(1, 2), np.array([1, 2]), [np.int64(1), 2], range(1, 3)])
def test_prompt_ids_become_a_list_of_ints(ids):
    request = Request(prompt_token_ids=ids, suffix_token_ids=ids)
    assert request.prompt_token_ids == request.suffix_token_ids == [1, 2]
    assert {type(token) for token in request.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("max_tokens", True),
        ("max_tokens", 2.0),
        ("max_tokens", "9"),
        ("max_tokens", np.array([1, 2])),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", False),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_p", 1.5),
        ("top_p", True),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", True),
        ("seed", np.True_),
        ("stop", 3),
        ("stop", ["", "a"]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", "ab"),
        ("stop_token_ids", 3),
        ("ignore_eos", "no"),
        ("ignore_eos", 1),
        ("max_nfe", 0),
        ("max_repetition_run", 1),
        ("n", 0),
        ("n", 4097),
        ("strategy_overrides", ["accept_threshold"]),
        ("strategy_overrides", {"accept_threshold": None}),
        ("strategy_overrides", {"accept_threshold": True}),
    ],
)
def test_wrong_parameter_is_one_line_that_names_it(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    assert_says_what_to_do(caught)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_token_ids", "text"),
        ("prompt_token_ids", 3),
        ("prompt_token_ids", [1.5]),
        ("prompt_token_ids", np.zeros((2, 2), int)),
        ("prompt_token_ids", list("a long list of what are no token ids at all")),
        ("suffix_token_ids", None),
        ("params", {"max_tokens": 3}),
        ("prompt", 3),
        ("request_id", 3),
        ("priority", 0.5),
        ("deadline_s", -1),
        ("deadline_s", "soon"),
        ("stream", "yes"),
        ("denoise", None),
    ],
)
def test_wrong_field_of_a_request_is_one_line_that_names_it(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        Request(**{"prompt_token_ids": [1], name: value})
    assert_says_what_to_do(caught)


def assert_says_what_to_do(caught):
    said = str(caught.value)
    assert "\n" not in said
    assert "give" in said or "choose" in said
    assert len(said) < 200
