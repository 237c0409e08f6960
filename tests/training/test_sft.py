"""Fine-tuning: the losses are those of one block, or of one text, at a time; a run learns its file.

The truth of a loss is `Model.logits` of each noisy text alone, one block after another.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import training
from dllm_jax.cli import main
from dllm_jax.training import denoising, sft
from tests.oracles.checkpoints import write_tiny

T, SIZE = 16, 4
pytestmark = pytest.mark.usefixtures("promotion")


def truth(model, tokens, learnt, hidden, weight, kind):
    """The loss as a sum over blocks, each seen with the clean text before it."""
    total, mask = 0.0, model.config.mask_token_id
    for row in range(len(tokens)):
        for first in range(0, T, SIZE if kind == "block_causal" else T):
            end = first + SIZE if kind == "block_causal" else T
            shown = np.where(hidden[row], mask, tokens[row])
            shown[:first] = tokens[row, :first]
            logits = np.array(model.logits(shown[None, :end], kind, block_size=SIZE)[0])
            if model.config.shift:
                logits = np.concatenate([logits[:1], logits[:-1]])
            never = np.asarray(model.forbidden(np.arange(logits.shape[-1])))
            logits[:, never] = -np.inf
            law = jax.nn.log_softmax(logits)
            for cell in range(first, end):
                if hidden[row, cell]:
                    total -= weight[row, cell] * law[cell, tokens[row, cell]]
    return total / learnt.sum()


@pytest.mark.parametrize("kind", ["block_causal", "full"])
@pytest.mark.parametrize("family", ["sdar", "a2d_qwen3", "open_dcoder", "llada_moe"])
def test_50_4_a_loss_is_that_of_texts_one_by_one(tmp_path, family, kind):
    model = dj.load(write_tiny(family, tmp_path))
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 40, (2, T)).astype(np.int32)
    learnt = np.arange(T)[None] >= np.array([[3], [6]])
    key = jax.random.key(7)
    with jax.default_matmul_precision("highest"):
        if kind == "full":
            found, facts = training.full_loss(model, tokens, learnt, key)
            where = jnp.zeros((2, T), jnp.int32), 1
        else:
            found, facts = training.block_loss(model, tokens, learnt, key, block_size=SIZE)
            where = jnp.broadcast_to(jnp.arange(T) // SIZE, (2, T)), T // SIZE
        hidden, weight = map(np.asarray, denoising._hide(key, learnt, *where))
        wanted = truth(model, tokens, learnt, hidden, weight, kind)
    assert hidden.any()
    assert not (hidden & ~learnt).any()
    np.testing.assert_allclose(found, wanted, rtol=2e-4)
    assert 0 <= float(facts["accuracy"]) <= 1


def test_50_4_a_causal_model_has_nothing_to_hide():
    with pytest.raises(ValueError, match="has no mask token"):
        training.full_loss(dj.load("builtin:tiny-qwen3"), *[jnp.ones((1, 4), int)] * 2, None)


QUESTION = "What is the word?"


@pytest.fixture
def data(tmp_path):
    lines = [
        {"messages": [{"role": "user", "content": QUESTION}, _said("plates 365")]},
        {"prompt": f"<|user|>{QUESTION}<|assistant|>", "completion": "plates 365"},
        {"prompt": "x" * 900, "completion": "too long"},
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(tmp_path / "d.jsonl")


def _said(text):
    return {"role": "assistant", "content": text}


def test_50_4_rows_end_with_their_block_or_the_row(data, capsys):
    model = dj.load("builtin:tiny-sdar")
    for objective, rest in (("block", 0), ("full", 32)):
        tokens, learnt = sft.read_texts(model, data, 64, objective)
        assert (tokens.shape, "1 of 3 texts" in capsys.readouterr().out) == ((2, 64), True)
        np.testing.assert_array_equal(tokens[0], tokens[1])
        prompt = model.tokenizer(f"<|user|>{QUESTION}<|assistant|>")["input_ids"]
        assert not learnt[0, : len(prompt)].any()
        stop = -(-(len(prompt) + 1) // 32) * 32
        assert learnt[0, len(prompt) : stop].all()
        assert learnt[0, stop:].sum() == (64 - stop if rest else 0)
        text = model.tokenizer.decode(tokens[0][learnt[0]], skip_special_tokens=True)
        assert text == "plates 365"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 1 is no text"),
        ("[1]", "line 1 is no text"),
        ("[" * 100_000, "line 1 is no text"),
        ('\n{"prompt": "x", "completion": null}', "line 2 is no text .*strings"),
        ('{"prompt": "\u2028", "completion": "%s"}' % ("x" * 900), "none of 1 texts"),
        ('{"prompt": "x"}', "'completion'"),
        (json.dumps({"prompt": "x" * 900, "completion": ""}), "none of 1 texts has at most 64"),
    ],
)
def test_50_4_other_files_are_refused_by_line(tmp_path, line, words):
    (tmp_path / "d.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=words):
        sft.read_texts(dj.load("builtin:tiny-sdar"), str(tmp_path / "d.jsonl"), 64, "block")
    with pytest.raises(ValueError, match="cannot be read"):
        sft.read_texts(dj.load("builtin:tiny-sdar"), "/no/such", 64, "block")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("rank", ["4", "0"])
def test_50_4_a_run_learns_its_file_and_is_read_back(data, tmp_path, rank, no_compile_cache):
    argv = ["train", "sft", "--data", data, "--out", str(tmp_path / "run"), "--lora-rank", rank]
    argv += ["--steps", "60", "--batch-size", "8", "--row-tokens", "32", "--dtype", "float32"]
    assert main([*argv, "--adam-lr", "0.003", "--log-every", "20"]) == 0
    model = dj.load(tmp_path / "run" / "model")
    ids = model.tokenizer(f"<|user|>{QUESTION}<|assistant|>")["input_ids"]
    out = dj.generate(model, [ids], max_tokens=16)
    assert model.tokenizer.decode(out.tokens[0, : int(out.length[0])]).strip() == "plates 365"
    before = dj.load("builtin:tiny-sdar")
    assert (model.config, model.defaults.strategy) == (before.config, before.defaults.strategy)


def test_50_4_fine_tuning_needs_data_and_whole_batches(fails, data, tmp_path):
    with pytest.raises(ValueError, match="batch_size=3 must be a multiple of the 8 devices"):
        sft.train(sft.TrainConfig(data=data, batch_size=3), tmp_path / "run")
    assert "train sft needs --data: give a .jsonl file" in fails(2, "train", "sft", "--out", "x")
