"""DiffusionGemma's released layout is read, written back bit for bit, and nothing else is taken.

The folders are those of `oracles/canvas_files.py`. Every entry of a config is read, known to change
nothing, or refused by name; so is every tensor.
"""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dllm_jax as dj
from dllm_jax.convert import ConversionError, convert, export_hf, inspect
from dllm_jax.models.families import ConfigError, parse_config
from tests.convert.test_convert import assert_same
from tests.oracles.canvas_files import GENERATION, config_of, random_tensors, write_canvas

VISION = {
    "model.encoder.vision_tower.encoder.layers.0.mlp.gate_proj.weight": (3, 2),
    "model.encoder.embed_vision.embedding_projection.weight": (4, 3),
    "model.encoder.embed_vision.embedding.weight": (2, 2),
    "embed_vision.embedding.weight": (2, 2),
}


@pytest.fixture
def folder(tmp_path):
    return write_canvas(tmp_path / "released", seed=3)


def rewrite(folder, change):
    """The folder with other tensors."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("shape", ["base", "pattern"])
def test_written_back_bit_for_bit(tmp_path, shape):
    model = dj.load(write_canvas(tmp_path / "a", shape, 3), dtype="float32")
    out = export_hf(model.params, model.config, tmp_path / "b", "float32", family="diffusion_gemma")
    before, after = random_tensors(shape, 3), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)
    assert dj.load(out, dtype="float32").config == model.config


def test_each_mode_has_its_own_factors(folder):
    params, stored = dj.load(folder, dtype="float32").params, random_tensors(seed=3)
    for i, layer in enumerate(params["layers"]):
        encoder = stored[f"model.encoder.language_model.layers.{i}.layer_scalar"]
        decoder = stored[f"model.decoder.layers.{i}.layer_scalar"]
        np.testing.assert_array_equal(layer["mode_scale"], np.concatenate([encoder, decoder]))
        assert encoder != decoder


def test_converted_folders_keep_the_numbers(folder, tmp_path):
    model = dj.load(folder, dtype="float32")
    again = dj.load(convert(folder, tmp_path / "converted", dtype="auto"), dtype="float32")
    assert (again.config, again.defaults) == (model.config, model.defaults)
    assert_same(again.params, model.params)


def test_experts_one_by_one_are_the_same(folder):
    packed = dj.load(folder, dtype="float32").params

    def split(tensors):
        kept = {name: value for name, value in tensors.items() if ".experts." not in name}
        for name in tensors.keys() - kept.keys():
            at = name.rpartition(".")[0]
            for e, matrix in enumerate(tensors[name]):
                if name.endswith("down_proj"):
                    kept[f"{at}.{e}.down_proj.weight"] = matrix.copy()
                    continue
                gate, up = np.split(matrix, 2)
                kept[f"{at}.{e}.gate_proj.weight"] = gate.copy()
                kept[f"{at}.{e}.up_proj.weight"] = up.copy()
        return kept

    assert_same(dj.load(rewrite(folder, split), dtype="float32").params, packed)


def test_vision_is_left_out_by_rule_and_noted(folder):
    images = {name: np.ones(shape, np.float32) for name, shape in VISION.items()}
    report = inspect(rewrite(folder, lambda tensors: {**tensors, **images}))
    assert report.is_ok
    (note,) = report.notes
    assert note.startswith(f"{len(VISION)} tensor(s) not needed")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.encoder.language_model.layers.0.input_layernorm.weight", (32,)),
        ("model.encoder.audio_tower.weight", (2,)),
        ("model.decoder.layers.1.self_attn.v_proj.weight", (32, 32)),  # of a global layer
        ("model.decoder.layers.0.per_layer_projection.weight", (2,)),
    ],
)
def test_other_strangers_are_refused(folder, name, shape):
    stranger = {name: np.ones(shape, np.float32)}
    with pytest.raises(ConversionError, match=name.replace(".", r"\.")):
        dj.load(rewrite(folder, lambda tensors: {**tensors, **stranger}))


@pytest.mark.parametrize(
    "name",
    [
        "model.decoder.layers.2.layer_scalar",
        "model.encoder.language_model.layers.2.layer_scalar",
        "model.decoder.self_conditioning.pre_norm.weight",
        "model.decoder.layers.0.self_attn.v_proj.weight",
    ],
)
def test_missing_tensors_are_named(folder, name):
    def without(tensors):
        return {key: value for key, value in tensors.items() if key != name}

    with pytest.raises(ConversionError, match=name.replace(".", r"\.")):
        dj.load(rewrite(folder, without))


# --- config.json and generation_config.json ----------------------------------------------------


def test_generation_config_wins_over_the_defaults():
    defaults = parse_config(config_of(), GENERATION).defaults
    assert dict(defaults.numbers) == {
        "max_denoising_steps": 6.0,
        "t_min": 0.3,
        "t_max": 0.9,
        "entropy_bound": 0.2,
        "stability_threshold": 2.0,
        "confidence_threshold": 0.01,
    }
    assert {1, 90} <= set(defaults.stop_token_ids)
    assert parse_config(config_of()).defaults.numbers == ()
    assert (defaults.block_size, defaults.strategy) == (12, "diffusion_gemma")


REFUSED = {
    "use_bidirectional_attention": "all",
    "attention_bias": True,
    "hidden_activation": "silu",
    "enable_moe_block": False,
    "attention_k_eq_v": False,
    "tie_word_embeddings": False,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "attn_logit_softcapping": 50.0,
    "layer_types": ["full_attention"],
    "rope_parameters": {"full_attention": {"rope_theta": 1e6}},
    "num_experts": None,
    "global_head_dim": None,
    "per_layer_config": {"1": {"head_dim": 8}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_this_network_lacks_is_refused_by_name(name):
    with pytest.raises(ConfigError) as error:
        parse_config(config_of(**{name: REFUSED[name]}))
    assert name in str(error.value)


@pytest.mark.parametrize("length", [0, "x", None])
def test_a_canvas_of_no_length_is_one_problem(length):
    with pytest.raises(ConfigError) as error:
        parse_config({**config_of(), "canvas_length": length})
    assert str(error.value).count("must be") == 1
    assert "canvas_length" in str(error.value)


@pytest.mark.parametrize("name", ["hidden_size_per_layer_input", "num_kv_shared_layers"])
def test_what_is_switched_off_is_no_reason(name):
    assert parse_config(config_of(**{name: 0})).config == parse_config(config_of()).config


@pytest.mark.parametrize("rope", [{"rope_type": "yarn"}, {"factor": 8.0}, {"short_factor": [1.0]}])
def test_other_rotations_are_refused(rope):
    parameters = config_of()["text_config"]["rope_parameters"]
    full = {**parameters["full_attention"], **rope}
    with pytest.raises(ConfigError, match=r"rope_parameters\['full_attention'\]"):
        parse_config(config_of(rope_parameters={**parameters, "full_attention": full}))


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"sampler_config": {"entropy_bound": 0}}, "entropy_bound=0 must be above 0"),
        ({"sampler_config": "Own"}, "sampler_config='Own' must be an object"),
        ({"stability_threshold": "1"}, "stability_threshold='1' must be a number"),
        ({"sampler_config": {"_cls_name": "Other"}}, "sampler_config is a 'Other'"),
    ],
)
def test_numbers_that_cannot_be_are_refused(entries, why):
    with pytest.raises(ConfigError) as error:
        parse_config(config_of(), {**GENERATION, **entries})
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"t_max": 0.2}, "t_min=0.3 is above t_max=0.2; lower t_min or raise t_max"),
        ({"t_max": 0.3, "t_min": None}, "t_min=0.4 is above t_max=0.3; lower t_min"),
        ({"t_min": 0, "t_max": 0}, "t_max=0.0 is outside [0.001, inf]; choose a value inside it"),
        ({"max_denoising_steps": 0}, "max_denoising_steps=0.0 is outside [1.0, 1000000]"),
        ({"max_denoising_steps": 2.5}, "max_denoising_steps=2.5 is not a whole number; round it"),
    ],
)
def test_numbers_are_those_that_the_strategy_takes(folder, tmp_path, entries, why):
    to = shutil.copytree(folder, tmp_path / "to")
    (to / "generation_config.json").write_text(json.dumps({**GENERATION, **entries}))
    (problem,) = inspect(to).problems
    assert problem.startswith(f"generation_config.json: {why}")


def test_a_last_layer_that_slides_is_global_all_the_same():
    kinds = ["full_attention", "sliding_attention"] * 2
    parsed = parse_config(config_of(layer_types=kinds))
    assert vars(parsed.config)["sliding"] == (False, True, False, False)
    assert "the last layer is global all the same" in parsed.notes[0]


def test_prompts_with_images_are_refused(folder):
    model = dj.load(folder, dtype="float32")
    with pytest.raises(ValueError, match="id 96, which stands for an image"):
        dj.generate(model, [[5, 96]], max_tokens=3)
