"""Proves that a user's own step function in a file of at most 40 lines is a strategy, and that the
built-in drafter changes no token and saves most forwards. The command: test_three_users.py.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.strategies import as_strategy
from dllm_jax.strategies.testing.script import run_script

FILE = Path(__file__).resolve().parents[2] / "examples" / "my_strategy.py"


def example(name):
    spec = importlib.util.spec_from_file_location(name, FILE.with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_is_short():
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 40


def test_step_function_fills_the_surest_half_of_the_holes():
    rng = np.random.default_rng(3)
    token = np.tile(np.arange(100, 116), (20, 1))
    prob = np.tile(rng.permutation(16) / 20 + 0.1, (20, 1))
    strategy = as_strategy(example("my_strategy").my_step, block_size=8, buffer_size=1)
    trace = run_script(
        strategy, prompt=[5] * 8, token=np.pad(token, ((0, 0), (8, 0))),
        prob=np.pad(prob, ((0, 0), (8, 0)), constant_values=0.5),
        max_tokens=16, mask_id=1, vocab_size=200,
    )  # fmt: skip
    # 8 holes take 4, 2, 1, 1; then a forward commits the block; the second block ends the text.
    assert [step.new_tokens for step in trace.steps] == [4, 2, 1, 1, 0, 4, 2, 1, 1]
    surest = sorted(np.argsort(-prob[0, :8])[:4].tolist())
    shown = trace.steps[0].tokens[0]
    assert [i for i in range(8) if shown[i] != 1] == surest
    assert trace.output == list(range(100, 116))
    assert (trace.finish_reason, trace.nfe) == ("length", 9)


@pytest.mark.slow
def test_drafting_writes_the_text_of_ar_in_a_few_rounds(capsys, monkeypatch):
    monkeypatch.setattr("dllm_jax.api.llm.enable_compile_cache", lambda: None)
    pair = dj.load("builtin:tiny-qwen3"), dj.load("builtin:tiny-qwen3-dflash")
    example("drafting").main(*pair)  # which compares the tokens
    text, forwards, length = capsys.readouterr().out.splitlines()
    assert text.endswith("The answer is 310.")
    few, many = (int(word) for word in forwards.split() if word.isdecimal())
    assert 5 * few <= many
    assert float(length.split()[0]) >= 5
