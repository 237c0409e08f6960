"""Proves that the shipped models solve their task as a stranger meets them: `generate --seed N`.

The problems are held out by construction. The bar is 18 of 20; the model is expected near 99 %.
What the causal model writes with its drafter is in test_examples.py.
"""

import re

import pytest

import dllm_jax as dj
from dllm_jax.api.strategy import resolve_strategy
from dllm_jax.cli import main
from dllm_jax.cli.engine import sampling_params
from dllm_jax.cli.entry import parse
from dllm_jax.cli.generate import draw_problem
from dllm_jax.cli.prompts import encode
from dllm_jax.cli.strategy import given_fields, resolve
from dllm_jax.strategies.core.state import FINISH_REASONS
from dllm_jax.tasks.problems import is_correct, problem

pytestmark = pytest.mark.long

SEEDS = range(20)


@pytest.fixture(scope="module")
def model():
    return dj.load("builtin:tiny-sdar")


@pytest.mark.slow
def test_twenty_seeds_of_the_plain_half(model):
    # What the command makes of its flags, decoded as one batch instead of one by one.
    commands = [parse(["generate", "--seed", str(seed)]) for seed in SEEDS]
    problems = [draw_problem(args) for args in commands]
    args = commands[0]
    strategy = resolve(model, args.strategy, None, given_fields(args))
    ids = [encode(model, one.question, args.raw) for one in problems]
    asked = sampling_params(args, model, strategy)
    assert asked == dj.SamplingParams()
    out = dj.generate(model, ids, strategy, max_tokens=asked.max_tokens)
    texts = [
        model.tokenizer.decode(row[:n], skip_special_tokens=True)
        for row, n in zip(out.tokens, out.length, strict=True)
    ]
    wrong = [s for s in SEEDS if not is_correct(texts[s], problems[s])]
    assert len(wrong) <= 2, f"wrong seeds: {wrong}"
    assert out.length.sum() / out.nfe.sum() > 10
    assert {FINISH_REASONS[int(code)] for code in out.finish} == {"stop"}


def test_defaults_are_those_of_multi_bd(model):
    chosen = resolve_strategy(model, None)
    assert chosen == dj.strategies.MultiBD()
    assert (chosen.block_size, chosen.buffer_size) == (32, 4)


def test_command_solves_a_problem_and_counts(model, capsys, no_compile_cache):
    assert main(["generate", "--seed", "0"]) == 0
    shown = capsys.readouterr().out
    expected = problem("plain", 0, 0, heldout=True)
    assert shown.startswith(expected.question)
    assert f"The answer is {expected.answer}." in shown
    verdict, figures = shown.splitlines()[-2:]
    assert verdict == f"right: the answer is {expected.answer}"
    assert re.match(r"\d+ tokens, \d+ forwards, [\d.]+ tokens per forward, \d+ tok/s", figures)


def test_model_is_small_enough_to_ship():
    from dllm_jax.loading.sources import BUILTIN

    def size(name):
        return sum(path.stat().st_size for path in (BUILTIN / name).rglob("*") if path.is_file())

    assert size("tiny-sdar") <= 12e6
    assert size("tiny-qwen3") + size("tiny-qwen3-dflash") <= 20e6


@pytest.fixture(scope="module")
def pair():
    return dj.load("builtin:tiny-qwen3"), dj.load("builtin:tiny-qwen3-dflash")


def test_the_pair_is_what_its_names_say(model, pair):
    target, draft = pair
    assert (target.defaults.family, target.defaults.strategy) == ("qwen3", "ar")
    assert draft.config.block_size == 16
    assert isinstance(resolve_strategy(target, None), dj.strategies.AR)
    one = problem("hard", 0, 0)
    assert target.tokenizer.encode(one.response) == model.tokenizer.encode(one.response)
    assert encode(target, one.question, False) == encode(model, one.question, False)
