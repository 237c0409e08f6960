"""Proves that the shipped model solves its task as a stranger meets it: `generate --seed N`.

The problems are held out by construction. The bar is 18 of 20; the model is expected near 99 %.
"""

import re

import pytest

import dllm_jax as dj
from dllm_jax import evaluate
from dllm_jax.cli import main
from dllm_jax.training.data import problem

SEEDS = range(20)


@pytest.fixture(scope="module")
def model():
    return dj.load("builtin:tiny-sdar")


def test_twenty_seeds_of_the_plain_half(model):
    problems = [problem("plain", seed, 0, heldout=True) for seed in SEEDS]
    outcome = evaluate.solve(model, dj.strategies.MultiBD(), problems, batch_size=20)
    wrong = [seed for seed, right in zip(SEEDS, outcome.right, strict=True) if not right]
    assert len(wrong) <= 2, f"wrong seeds: {wrong}"
    assert outcome.tokens.sum() / outcome.forwards.sum() > 10
    assert set(outcome.finish) == {"stop"}


def test_defaults_are_those_of_multi_bd(model):
    chosen = dj.generation.resolve_strategy(model, None)
    assert chosen == dj.strategies.MultiBD()
    assert (chosen.block_size, chosen.buffer_size) == (32, 4)


def test_command_solves_a_problem_and_counts(model, capsys, monkeypatch):
    monkeypatch.setattr("dllm_jax.cli.compile_cache.enable_compile_cache", lambda: None)
    assert main(["generate", "--seed", "0"]) == 0
    shown = capsys.readouterr().out
    expected = problem("plain", 0, 0, heldout=True)
    assert shown.startswith(expected.question)
    assert f"The answer is {expected.answer}." in shown
    verdict, figures = shown.splitlines()[-2:]
    assert verdict == f"right: the answer is {expected.answer}"
    assert re.match(r"\d+ tokens, \d+ forwards, [\d.]+ tokens per forward, \d+ tok/s", figures)


def test_model_is_small_enough_to_ship():
    from dllm_jax.cli.folders import BUILTIN

    files = [path for path in (BUILTIN / "tiny-sdar").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 12e6
