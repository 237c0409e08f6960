"""Proves that a model decoded with nothing said gets the strategy its family needs.

A Qwen3-shaped model with random weights must give the argmax chain of its cache-free logits: a
loop written here, which knows neither windows nor pages.
"""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from checkpoints_convert import export_hf
from dllm_jax.models.dense import DenseConfig, init_params


@pytest.fixture(scope="module")
def causal_model(random_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "random-qwen3"
    cfg = DenseConfig(
        vocab_size=512,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=128,
        max_position=256,
        shift=True,
    )
    params = init_params(jax.random.key(1), cfg, "float32")
    extra = {"eos_token_id": 2, "pad_token_id": 0}
    export_hf(params, cfg, folder, "float32", family="qwen3", extra_config=extra)
    for path in random_folder.glob("*token*"):
        shutil.copy(path, folder)
    return dj.load(folder)


def test_a_causal_model_is_decoded_token_by_token(causal_model):
    ids = causal_model.tokenizer("Ann has 3 pens.")["input_ids"]
    out = dj.generate(causal_model, [ids], max_tokens=9, ignore_eos=True)
    text, limit = list(ids), causal_model.defaults.vocab_limit
    for _ in range(9):
        padded = jnp.array([text + [0] * (32 - len(text))])
        logits = causal_model.logits(padded, attention="causal")[0, len(text) - 1]
        text.append(int(np.argmax(logits[:limit])))
    assert out.tokens[0].tolist() == text[len(ids) :]
    assert out.nfe[0] == 8  # the first token comes from the prefill


def test_ar_refuses_another_window(causal_model):
    strategy = dj.strategies.AR(block_size=1)
    with pytest.raises(ValueError, match="leave both at their defaults, 2 and 1"):
        dj.generate(causal_model, [[5, 6]], strategy, max_tokens=4)
