"""A model that is saved is read back: weights bit for bit, config, decoding, tokenizer."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoConfig

import dllm_jax as dj
from dllm_jax.convert import convert
from tests.oracles.checkpoints import write_tiny

FAMILIES = ["sdar", "llada", "llada2", "a2d_qwen3", "open_dcoder", "qwen3", "illada"]


def same(a, b, but=()):
    leaves = jax.tree.leaves(a.params), jax.tree.leaves(b.params)
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, other)
    assert a.config == b.config
    kept = [dataclasses.asdict(one.defaults) for one in (a, b)]
    assert all(kept[0][key] == kept[1][key] for key in kept[0].keys() - {*but})


@pytest.mark.parametrize("family", FAMILIES)
def test_50_4_a_saved_model_is_read_back(tmp_path, family):
    model = dj.load(write_tiny(family, tmp_path / "given"))
    made = dj.save(model, tmp_path / "made")
    same(model, dj.load(made))
    given, written = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "given", made)
    )
    assert written["architectures"] == given["architectures"]


@pytest.mark.parametrize("family", ["qwen3", "llama31", "open_dcoder"])
def test_50_4_transformers_reads_a_saved_model(tmp_path, family):
    """Its own config class takes the file, and its own model has these tensors and no other.

    The given ones are those that golden/make_family_golden.py loaded into its model. Families whose
    class is in files of their authors, and packed experts, are not compared.
    """
    model = dj.load(write_tiny(family, tmp_path / "given"))
    folder = dj.save(model, tmp_path / "made")
    config, cfg = AutoConfig.from_pretrained(folder), model.config
    sizes = (config.num_hidden_layers, config.hidden_size, config.vocab_size)
    assert sizes == (cfg.num_layers, cfg.hidden_size, cfg.vocab_size)
    assert config.rope_parameters["rope_theta"] == cfg.rope_theta
    given, found = (
        {name: one.shape for name, one in load_file(path / "model.safetensors").items()}
        for path in (tmp_path / "given", folder)
    )
    assert found == given


@pytest.mark.parametrize("family", ["sdar", "llada", "llada_moe"])
def test_50_4_a_config_is_written_where_there_is_none(tmp_path, family):
    converted = convert(write_tiny(family, tmp_path / "given"), tmp_path / "there", "float32")
    model = dj.load(converted)
    same(model, dj.load(dj.save(model, tmp_path / "made")), but=("vocab_limit",))


def test_50_4_other_weights_types_and_decoding_are_kept(tmp_path):
    model = dj.load("builtin:tiny-sdar")
    half = jax.tree.map(lambda leaf: leaf / 2, model.params)
    defaults = dataclasses.replace(model.defaults, strategy="block_diffusion", buffer_size=1)
    changed = model.replace(params=half, defaults=defaults)
    again = dj.load(dj.save(changed, tmp_path / "made"))
    same(changed, again)
    assert again.tokenizer("a")["input_ids"] == model.tokenizer("a")["input_ids"]
    small = dj.load(dj.save(changed, tmp_path / "small", dtype="bfloat16"), dtype="auto")
    np.testing.assert_allclose(small.params["embed"], half["embed"], rtol=1e-2)
    with pytest.raises(FileExistsError, match="exists already"):
        dj.save(model, tmp_path / "made")
    large = model.replace(params=model.params | {"final_norm": model.params["final_norm"] * 1e6})
    with pytest.raises(ValueError, match=r"model.norm.weight holds NaN or Inf as F16"):
        dj.save(large, tmp_path / "large", dtype="float16")
    assert not (tmp_path / "large").exists()
    with pytest.raises(ValueError, match="is in 8 bits or on several devices"):
        dj.save(dj.load("builtin:tiny-sdar", quantization="fp8"), tmp_path / "x")
