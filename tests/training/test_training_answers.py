"""Proves what happens before a drafter learns: what cannot be is refused while the run's folder
is untouched, and answers stop, and go on, at the limits that are given.

The target is a tiny random one whose answers are scripted: only how they are kept is looked at.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.api import generate
from dllm_jax.strategies.core.state import LENGTH
from dllm_jax.training import dflash, loop, responses
from tests.oracles.checkpoints import write_tiny, write_words

pytestmark = pytest.mark.long

CONFIG = dflash.TrainConfig(
    num_layers=1, block_size=8, num_responses=6, response_batch=2, response_tokens=4, row_tokens=16,
    mask_token_id=47, target_layer_ids=(0,),
)  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = write_tiny("qwen3", tmp_path_factory.mktemp("target"), seed=40)
    write_words(folder, 50, "<mask>")
    return str(folder)


@pytest.fixture
def train(target, tmp_path, monkeypatch):
    """A run in `tmp_path / "run"` of the target's scripted answers, steps left out."""

    def decode(model, prompts, prompt_len, temperature, key, *, max_tokens):
        made = jax.random.randint(key, (len(prompts), max_tokens), 0, 40)
        count = jnp.full(len(prompts), max_tokens, jnp.int32)
        limit = jnp.full(len(prompts), LENGTH, jnp.int32)
        return generate.GenerateOutput(tokens=made, length=count, nfe=count, finish=limit)

    monkeypatch.setattr(responses, "decode", decode)
    monkeypatch.setattr(loop, "run", lambda config, task, folder, **how: {"done": True, **how})
    prompts = tmp_path / "p.txt"
    prompts.write_text("w1 w2\nw4 w5 w6\nw7\n")

    def run(how=None, **changes):
        config = dataclasses.replace(
            CONFIG, **{"target": target, "prompts": str(prompts), **changes}
        )
        quiet = {"num_workers": 0, "say": lambda _: None}
        return dflash.train(config, tmp_path / "run", **quiet, **(how or {}))

    return run


def test_what_cannot_be_is_refused_before_the_folder_is_taken(train, target, tmp_path) -> None:
    mute = write_tiny("qwen3", tmp_path / "mute", seed=40)
    masked = write_tiny("sdar", tmp_path / "masked")
    write_words(masked, 50, "<mask>")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "w1"}\nw2\n')
    (tmp_path / "other.jsonl").write_text('{"prompt": "w1"}\n{"text": "w2"}\n')
    (tmp_path / "latin.txt").write_bytes(b"w1 \xff")
    (tmp_path / "long.txt").write_text("w1 " * 15)
    for changes, words in (
        ({"target": str(tmp_path / "nothere")}, "nothere"),
        ({"target": str(masked)}, "masked' is no autoregressive model; DFlash drafts for those"),
        ({"target": str(mute)}, "mute' has no tokenizer to read prompts with; give a folder that"),
        ({"target": str(mute), "prompts": None, "mask_token_id": None}, "mute' has no tokenizer"),
        ({"target_layer_ids": (1, 1)}, r"target_layer_ids=\[1, 1\] must differ; name each layer"),
        ({"prompts": str(tmp_path / "none")}, "none' cannot be read: No such file .*; check the"),
        ({"prompts": str(tmp_path)}, "cannot be read: Is a directory; check the path"),
        ({"prompts": str(tmp_path / "bad.jsonl")}, "bad.jsonl' line 2 is no JSON .Expecting value"),
        ({"prompts": str(tmp_path / "other.jsonl")}, 'line 2 has no text "prompt"; add it'),
        ({"prompts": str(tmp_path / "latin.txt")}, "latin.txt' is not UTF-8 at byte 3; save it as"),
        ({"prompts": str(tmp_path / "long.txt")}, "holds no prompt of at most 14 tokens; write"),
    ):
        with pytest.raises(ValueError, match=words):
            train(**changes)
        assert not (tmp_path / "run").exists(), changes
    assert train()["done"]  # the same folder


def test_max_seconds_stop_answers_which_go_on(train, tmp_path) -> None:
    whole = train()
    kept = tmp_path / "whole"
    (tmp_path / "run").rename(kept)
    for parts in (1, 2):
        assert train(how={"max_seconds": 1e-9}) == {"done": False, "step": 0}
        assert len(list((tmp_path / "run").glob("responses-*.npz"))) == parts
    run = train(how={"max_seconds": 1e-9})
    assert run["done"]
    assert run["max_seconds"] < 1e-9  # what is left of it for the steps
    assert len(whole["answers"]["length"]) == 6
    for name, values in whole["answers"].items():
        assert np.array_equal(values, run["answers"][name]), name
    again = train(how={"max_seconds": 9000.0})
    assert 8000.0 < again["max_seconds"] < 9000.0  # answers that are there take none of it


def test_response_seconds_end_the_answers_with_what_there_is(train, tmp_path) -> None:
    run = train(response_seconds=1e-9, how={"max_seconds": 1e-9})
    assert run["done"]
    assert len(run["answers"]["length"]) == 2
    assert (tmp_path / "run" / responses.STORED).exists()


def test_prompts_with_any_mark_that_ends_lines_elsewhere_stay_whole(target, tmp_path) -> None:
    model = dflash.load(target)
    (tmp_path / "p.jsonl").write_text('{"prompt": "w1\u2028w2"}\r\n', encoding="utf-8-sig")
    assert responses.read_prompts(model, tmp_path / "p.jsonl", 9) == [[1, 2]]
