"""Proves what the model of lm-evaluation-harness asks of `dj.LLM`, against a double of the harness.

The double has the two names that `dllm_jax.lm_eval` imports; the harness itself is no dependency. A
real run of it is described in docs/lm_eval.md.
"""

import dataclasses
import importlib
import sys
import types

import pytest

from dllm_jax.engine.requests import SamplingParams
from tests.contract import models


class Double:
    """Stands for the harness's `TemplateLM`."""

    def __init__(self):
        self.kept = []
        hook = types.SimpleNamespace(add_partial=lambda *given: self.kept.append(given))
        self.cache_hook = hook

    @property
    def prefix_token_id(self):
        return self.eot_token_id


class Tokenizer:
    """One id a character; a text alone gets BOS, which is 0."""

    bos_token_id = 0

    def __call__(self, text, add_special_tokens=True, **_):
        return types.SimpleNamespace(input_ids=[0] * add_special_tokens + [ord(c) for c in text])

    encode = None


class FakeLLM:
    """Answers every prompt with its last characters and notes what it was asked."""

    def __init__(self, model, **sizes):
        self.sizes, self.asked = sizes, []
        defaults = types.SimpleNamespace(stop_token_ids=(2,))
        self.model = types.SimpleNamespace(source=model, defaults=defaults)
        self.tokenizer = Tokenizer()
        self.engine = types.SimpleNamespace(layout=types.SimpleNamespace(max_model_len=20))

    def apply_template(self, conversation, **fields):
        self.fields = fields
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation)

    def generate(self, prompts, params, use_tqdm):
        self.asked += zip(prompts, params, strict=True)
        outputs = []
        for i, prompt in enumerate(prompts):
            said = "".join(map(chr, prompt["prompt_token_ids"][-2:]))
            error = "no pages" if said == "!!" else None
            text = types.SimpleNamespace(text=said)
            outputs.append(types.SimpleNamespace(outputs=[text], error=error, request_id=str(i)))
        return outputs


@pytest.fixture
def harness(monkeypatch):
    """`dllm_jax.lm_eval`, imported with the double."""
    registered = {}

    def register_model(name):
        return lambda cls: registered.setdefault(name, cls)

    for name, members in {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": Double},
        "lm_eval.api.registry": {"register_model": register_model},
        "lm_eval.__main__": {"cli_evaluate": lambda: None},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "dllm_jax.lm_eval", raising=False)
    made = importlib.import_module("dllm_jax.lm_eval")
    monkeypatch.setattr(made, "LLM", FakeLLM)
    encode = lambda tokenizer, text, special: tokenizer(text, special).input_ids  # noqa: E731
    monkeypatch.setattr(made, "encode", encode)
    monkeypatch.setattr(sys, "argv", ["python"])
    assert registered == {"dllm-jax": made.DllmLM}
    yield made
    sys.modules.pop("dllm_jax.lm_eval", None)


def asks(*pairs):
    return [types.SimpleNamespace(args=pair) for pair in pairs]


def test_texts_come_in_order_and_are_kept_for_the_harness(harness):
    lm = harness.DllmLM(pretrained="folder", batch_size="1", device="cuda:0", max_num_seqs=3)
    requests = asks(("ab", {"until": ["\n"], "max_gen_toks": 4}), ("cd", {"max_gen_toks": 4}))
    assert lm.generate_until(requests) == ["ab", "cd"]
    assert lm.llm.sizes == {"max_num_seqs": 3}
    assert lm.llm.model.source == "folder"
    assert [text for *_, text in lm.kept] == ["ab", "cd"]
    (prompt, params), _ = lm.llm.asked
    assert prompt == {"prompt_token_ids": [0, ord("a"), ord("b")]}
    assert params == SamplingParams(max_tokens=4, stop=("\n",))


def test_a_prompt_from_the_chat_template_gets_no_second_begin_token(harness):
    lm = harness.DllmLM()
    text = lm.apply_chat_template([{"role": "user", "content": "x"}])
    lm.generate_until(asks((text, {"max_gen_toks": 4})))
    assert lm.llm.asked[0][0]["prompt_token_ids"][0] == ord("<")
    assert lm.llm.fields == {}


def test_14_a_task_may_begin_the_answer_and_switch_thinking(harness):
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So"}]
    for given in ({"enable_thinking": False}, {"chat_template_args": {"enable_thinking": False}}):
        lm = harness.DllmLM(**given)
        assert lm.apply_chat_template(talk, add_generation_prompt=False) == "<user>x<assistant>So"
        assert lm.llm.fields == {"continue_final_message": True, "enable_thinking": False}
        lm.apply_chat_template(talk[:1])
        assert lm.llm.fields == {"enable_thinking": False}
        assert lm.llm.sizes == {}


def test_a_long_prompt_loses_its_beginning(harness):
    lm = harness.DllmLM()
    lm.generate_until(asks(("x" * 30 + "yz", {"max_gen_toks": 12})))
    ids = lm.llm.asked[0][0]["prompt_token_ids"]
    assert len(ids) == 20 - 12
    assert ids[-2:] == [ord("y"), ord("z")]
    with pytest.raises(ValueError, match=r"max_gen_toks=20 leaves no room .* max_model_len=20"):
        lm.generate_until(asks(("x", {"max_gen_toks": 20})))


def test_a_failed_request_is_an_error_and_no_empty_answer(harness):
    with pytest.raises(RuntimeError, match="request 1 failed: no pages"):
        harness.DllmLM().generate_until(
            asks(("a", {"max_gen_toks": 4}), ("!!", {"max_gen_toks": 4}))
        )


@pytest.fixture(scope="module")
def toy():
    """A model of 39 ids in blocks of 4 that takes 20 tokens."""
    config = dataclasses.replace(models.CONFIG, max_position=20)
    return models.plain(1).replace(config=config)


def answers(lm, toy, *pairs):
    lm.llm.model = toy
    return lm._loglikelihood_tokens([((None, None), *pair) for pair in pairs], disable_tqdm=True)


def test_likelihoods_are_the_models_in_the_order_of_the_requests(harness, toy):
    lm = harness.DllmLM()
    pairs = [([1, 2, 3], [4, 5]), ([6, 7], [8]), ([1, 2, 3], [9]), (list(range(30)), [4])]
    found = answers(lm, toy, *pairs)
    pairs[-1] = (list(range(11, 30)), [4])  # a long context loses its beginning
    for (before, after), (value, is_greedy) in zip(pairs, found, strict=True):
        one = toy.log_likelihood(before, tuple(after))
        assert value == pytest.approx(one.value, abs=1e-4)
        assert is_greedy is one.is_greedy
    assert [kind for kind, *_ in lm.kept] == ["loglikelihood"] * 4
    estimated = harness.DllmLM(likelihood="elbo", budget=2)
    assert answers(estimated, toy, ([1, 2, 3, 0], [4, 5, 1]))[0][1] is False


@pytest.mark.long
def test_a_perplexity_is_the_sum_of_pieces(harness, toy):
    lm = harness.DllmLM()
    lm.llm.model = toy.replace(defaults=dataclasses.replace(toy.defaults, stop_token_ids=(2,)))
    ids = [(7 * i) % 30 + 3 for i in range(25)]
    (value,) = lm.loglikelihood_rolling(asks(("".join(map(chr, ids)),)), disable_tqdm=True)
    first = toy.log_likelihood([2], tuple(ids[:19])).value
    rest = toy.log_likelihood([ids[18]], tuple(ids[19:])).value
    assert value == pytest.approx(first + rest, abs=1e-3)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {}),
        ({"until": "a", "do_sample": False, "temperature": 0.7}, {"stop": ("a",)}),
        ({"until": ["", "b"]}, {"stop": ("b",)}),
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 4, "seed": 3}, {"temperature": 1.0, "top_k": 4, "seed": 3}),
        ({"max_new_tokens": 7, "num_beams": None}, {"max_tokens": 7}),
        ({"num_beams": 1, "repetition_penalty": 1.0, "min_p": 0, "use_cache": True}, {}),
    ],
)
def test_what_a_task_asks_of_a_generation(harness, given, wanted):
    assert harness.sampling_params(given) == SamplingParams(**{"max_tokens": 256} | wanted)


def test_what_does_not_exist_is_refused_by_name(harness):
    for name, value in (("num_beams", 4), ("repetition_penalty", 1.1), ("no_such", 1)):
        with pytest.raises(ValueError, match=f"{name!r} is not supported; use until"):
            harness.sampling_params({name: value})


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--tasks", "t"], ["run", "--model", "dllm-jax", "--tasks", "t"]),
        (["run", "--tasks", "t"], ["run", "--model", "dllm-jax", "--tasks", "t"]),
        (["--model=hf", "--tasks", "t"], ["run", "--model=hf", "--tasks", "t"]),
        (["ls", "tasks"], ["ls", "tasks"]),
        (["--help"], ["--help"]),
        ([], []),
    ],
)
def test_the_command_line_names_our_model_where_none_is_named(harness, words, wanted):
    harness.main(words)
    assert sys.argv[1:] == wanted


def test_an_error_of_the_run_is_one_line(harness, monkeypatch):
    def fails():
        raise ValueError("two\nlines")

    monkeypatch.setattr(sys.modules["lm_eval.__main__"], "cli_evaluate", fails)
    with pytest.raises(SystemExit, match=r"^error: two; lines \(.*test_lm_eval.py:\d+\)$"):
        harness.main(["--tasks", "t"])


def test_without_the_harness_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "dllm_jax.lm_eval", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'lm-eval>=0.4.9'"):
        importlib.import_module("dllm_jax.lm_eval")
