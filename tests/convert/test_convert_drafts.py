"""Folders of DFlash drafts load, whatever project wrote them, or are refused by name."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dllm_jax as dj
from dllm_jax.api.drafts import bind_draft, check_draft, with_target
from dllm_jax.cli import main
from dllm_jax.convert import ConversionError, convert, export_hf, inspect, load_params
from dllm_jax.models.families import ConfigError, config_json, parse_config
from dllm_jax.strategies.core.needs import Needs
from tests.contract import models as toys
from tests.oracles.checkpoints import write_tiny
from tests.oracles.draft_files import (
    CONFIG,
    SLIDING,
    VARIANTS,
    YARN,
    config_of,
    draft_shapes,
    write_draft,
)

OWN = CONFIG["dflash_config"]


def parse(variant="full", own=None, **changes):
    """The parsed config of a variant with entries changed, at the top and in dflash_config."""
    config = config_of(variant, **changes)
    inner = {**config["dflash_config"], **(own or {})}
    kept = {key: value for key, value in inner.items() if value is not ...}
    return parse_config({**config, "dflash_config": kept})


def refused(words, variant="full", own=None, **changes):
    with pytest.raises(ConfigError) as caught:
        parse(variant, own, **changes)
    assert words in str(caught.value)
    assert len(caught.value.problems) == 1


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return dj.load(write_tiny("qwen3", tmp_path_factory.mktemp("target") / "qwen3"), "float32")


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return dj.load(write_draft(tmp_path_factory.mktemp("draft") / "draft"), "float32")


# Tensors.


@pytest.mark.parametrize("spelling", ["automodel", "muse", "muse, prefixed"])
def test_every_spelling_gives_the_same_weights(tmp_path, spelling):
    plain, _ = load_params(write_draft(tmp_path / "a", attention_bias=True))
    other, report = load_params(write_draft(tmp_path / "b", attention_bias=True, spelling=spelling))
    assert report.family == "dflash"
    jax.tree.map(np.testing.assert_array_equal, plain, other)


def test_weights_are_the_tensors(tmp_path):
    """Input axis first, and no embedding, no head."""
    folder = write_draft(tmp_path / "draft")
    params, report = load_params(folder)
    tensors = load_file(folder / "model.safetensors")
    assert report.num_tensors == 3 + 11 * CONFIG["num_hidden_layers"]
    assert sorted(params) == ["context_norm", "fc", "final_norm", "layers"]
    assert np.array_equal(params["fc"], tensors["fc.weight"].T)
    assert np.array_equal(params["context_norm"], tensors["hidden_norm.weight"])
    assert np.array_equal(params["final_norm"], tensors["norm.weight"])
    k = tensors["layers.1.self_attn.k_proj.weight"].reshape(2, 16, 40)
    assert np.array_equal(params["layers"][1]["wqkv"][:, :, -2], k.transpose(2, 0, 1))


@pytest.mark.parametrize("name", sorted(draft_shapes(CONFIG)))
def test_a_missing_tensor_is_a_problem(tmp_path, name):
    folder = write_draft(tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    assert f"1 tensor(s) missing: {name}" in "; ".join(inspect(folder).problems)


@pytest.mark.parametrize(
    "name",
    ["lm_head.weight", "embed_tokens.weight", "layers.0.self_attn.attention_sink_bias", "d2t"],
)
def test_an_unknown_tensor_is_a_problem(tmp_path, name):
    """Also a copy of the head next to `tie_word_embeddings`, which a model may have."""
    folder = write_draft(tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: np.zeros((50, 40), np.float32)}, folder / "model.safetensors")
    with pytest.raises(ConversionError, match=r"1 tensor\(s\) of unknown name: " + name):
        dj.load(folder)


def test_a_mask_embedding_beside_the_shards_is_a_problem(tmp_path):
    folder = write_draft(tmp_path / "draft")
    (folder / "mask_embedding.pt").write_bytes(b"")
    (problem,) = inspect(folder).problems
    assert "mask_embedding.pt replaces a row of the target's embedding" in problem


def test_48_3_an_adapter_beside_sdar_is_unos(tmp_path):
    folder = write_tiny("sdar", tmp_path / "u")
    assert inspect(folder).problems == ()
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    (problem,) = inspect(folder).problems
    assert "makes this Uno, whose adapter is on while it drafts and off while it judges" in problem


def test_fewer_states_than_the_projection_takes_are_a_problem(tmp_path):
    folder = write_draft(tmp_path / "draft")
    config = {**CONFIG, "dflash_config": {**OWN, "target_layer_ids": [1]}}
    (folder / "config.json").write_text(json.dumps(config))
    assert inspect(folder).problems == ("fc.weight has shape [40, 80], expected [40, 40]",)


@pytest.mark.parametrize("variant", VARIANTS)
def test_conversion_and_export_give_the_draft_back(tmp_path, variant):
    folder = write_draft(tmp_path / "draft", variant)
    model = dj.load(folder, dtype="float32")
    again = dj.load(convert(folder, tmp_path / "converted", dtype="auto"), dtype="float32")
    exported = export_hf(model.params, model.config, tmp_path / "out", "float32", family="dflash")
    for other in (again, dj.load(exported, dtype="float32")):
        assert other.config == model.config
        jax.tree.map(np.testing.assert_array_equal, other.params, model.params)
    assert again.defaults == model.defaults


# Configs.


VIEWS = [  # variant, entries of dflash_config, at the top -> windows, causal
    ("full", {}, {}, (None, None), (False, False)),
    ("full", {"causal": True}, {}, (None, None), (True, True)),
    ("full", {}, {"layer_types": ["full_attention"] * 2}, (None, None), (False, False)),
    ("sliding", {}, {}, (4, 4), (False, False)),
    ("inclusive", {}, {}, (5, 5), (False, False)),
    ("sliding_causal", {}, {}, (4, 4), (True, True)),
    ("sliding_causal", {"causal": True}, {"is_causal": False}, (4, 4), (False, False)),
    ("mixed", {}, {}, (4, None), (True, False)),
    ("mixed", {"swa_window_size": 3}, {}, (3, None), (True, False)),
    # A serving window over a draft without marked layers (MiMo) does not put it in order.
    ("full", {"use_swa": True, "swa_window_size": 8}, {}, (8, 8), (False, False)),
    ("mixed", {"use_swa": True}, {}, (4, None), (True, False)),
]


@pytest.mark.parametrize(("variant", "own", "top", "windows", "causal"), VIEWS)
def test_what_each_layer_sees(variant, own, top, windows, causal):
    config = parse(variant, own, **top).config
    assert (config.windows, config.causal) == (windows, causal)


MUSE = {
    key: value
    for key, value in {**CONFIG, **SLIDING, **OWN}.items()
    if key not in ("dflash_config", "auto_map", "vocab_size", "tie_word_embeddings", "rope_theta")
} | {
    "architectures": ["MuseGlimmerAssistantModel"],
    "model_type": "muse_glimmer_assistant",
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}


def test_transformers_own_class_is_read_as_it_computes():
    """No order within a window, one key more on each side, no vocabulary, no inner object."""
    for config in (MUSE, {k: v for k, v in MUSE.items() if k not in ("architectures",)}):
        cfg = parse_config(config).config
        assert cfg.target_layer_ids == (2, 0)
        assert (cfg.block_size, cfg.mask_token_id, cfg.vocab_size) == (5, 47, 0)
        assert cfg.rope_theta == 5e5
        assert (cfg.windows, cfg.causal) == ((5, 5), (False, False))
    cfg = parse_config({**MUSE, "layer_types": None}).config
    assert cfg.windows == (5, 5)


@pytest.mark.parametrize(
    ("own", "top", "size"),
    [
        ({}, {"block_size": 8}, 5),
        ({"block_size": ...}, {"block_size": 8}, 8),
        ({"block_size": ...}, {}, 16),
    ],
)
def test_block_size_is_the_inner_one_then_the_outer_one(own, top, size):
    parsed = parse(own=own, **top)
    assert parsed.config.block_size == parsed.defaults.block_size == size


@pytest.mark.parametrize(
    ("own", "top", "words"),
    [
        ({"target_layer_ids": ...}, {}, "target_layer_ids=None must list different layers"),
        ({"target_layer_ids": [1, 1]}, {}, "target_layer_ids=[1, 1] must list different layers"),
        ({"target_layer_ids": [-1]}, {}, "target_layer_ids=[-1] must list"),
        ({"target_layer_ids": [True]}, {}, "target_layer_ids=[True] must list"),
        ({"target_layer_ids": []}, {}, "target_layer_ids=[] must list"),
        ({"mask_token_id": ...}, {}, "mask_token_id=None must be a whole number"),
        ({"mask_token_id": 50}, {}, "mask_token_id=50 must be below vocab_size=50"),
        ({"block_size": 1}, {}, "block_size=1 drafts nothing"),
        ({"conv_kernel_size": 2}, {}, "conv_kernel_size=2 is of DFlash 2"),
        ({"selector_rank": 256}, {}, "selector_rank=256 is of DFlash 2"),
        ({"sample_from_anchor": True}, {}, "sample_from_anchor=true is not supported"),
        ({"attention_sink_bias": True}, {}, "attention_sink_bias=true is not supported"),
        ({}, {"draft_vocab_size": 32}, "draft_vocab_size=32 is not supported"),
        ({}, {"target_hidden_size": 64}, "target_hidden_size=64 must be hidden_size=40"),
        ({}, {"layer_types": ["sliding_attention"] * 2}, "sliding_window=None must be"),
        ({"use_swa": True}, {}, "sliding_window=None must be a positive whole number"),
        ({}, {"layer_types": ["linear_attention"] * 2}, "layer_types=['linear_attention'"),
        ({}, {"layer_types": ["full_attention"]}, "for each of the num_hidden_layers=2 layers"),
        ({}, {"rope_scaling": {"rope_type": "linear", "factor": 4}}, "'linear' is not supported"),
        ({}, {"rope_scaling": {**YARN, "factor": 0.5}}, "factor=0.5 must be at least 1"),
        ({}, {"rope_theta": None}, "rope_theta=None must be a positive number"),
        ({}, {"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25 is not supported"),
        ({}, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({}, {"dflash_config": [1]}, "dflash_config=[1] must be an object"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(own, top, words):
    if "dflash_config" in top:
        with pytest.raises(ConfigError) as caught:
            parse_config(config_of(**top))
        assert words in str(caught.value)
    else:
        refused(words, own=own, **top)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("DFlash2DraftModel", "DFlash 2 has convolutions and a selector"),
        ("DFlashLagunaForCausalLM", "its attention has gates"),
        ("DFlashSpeculator", "a drafter in speculators' form has a vocabulary"),
    ],
)
def test_relatives_are_refused_by_name(name, words):
    refused(words, architectures=[name], auto_map=...)


def test_entries_that_are_not_read_are_told():
    assert parse().notes == ()
    notes = parse(own={"num_anchors": 512, "gamma": 7.0}).notes
    assert notes == ("dflash_config holds entries that are not read: gamma, num_anchors",)


def test_layers_that_no_config_can_state_are_not_exported():
    cfg = dataclasses.replace(parse().config, windows=(4, None), causal=(False, True))
    with pytest.raises(ValueError, match="have no form in a config"):
        config_json("dflash", cfg)


# Next to a target.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 48}, "its hidden_size=48 must be the target's 40"),
        ({"target_layer_ids": (3, 0)}, r"hold \[3\], past the target's 3 layers"),
        ({"vocab_size": 51}, "its vocab_size=51 must be the target's 50"),
        ({"vocab_size": 0, "mask_token_id": 50}, "its mask_token_id=50 must be a row"),
        ({"target_layer_ids": (0,)}, "fc takes 80 features, but its 40 are 1 states of 40"),
    ],
)
def test_a_draft_of_another_target_is_refused(target, draft, changes, words):
    check_draft(target, draft)
    other = draft.replace(config=dataclasses.replace(draft.config, **changes))
    with pytest.raises(ValueError, match=words):
        with_target(target, other)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (("float32", "bfloat16"), 'is bfloat16 and its target float32; .* dtype="float32"'),
        (("float16", "float16"), "in float16 overflows"),
    ],
)
def test_types_that_do_not_go_together_are_refused(target, draft, kinds, words):
    models = [
        model.replace(params=jax.tree.map(lambda leaf, kind=kind: leaf.astype(kind), model.params))
        for model, kind in zip((target, draft), kinds, strict=True)
    ]
    with pytest.raises(ValueError, match=words):
        check_draft(*models)


def test_what_is_no_draft_is_refused(target, draft):
    with pytest.raises(ValueError, match="is a qwen3 model, which reads no states of a target"):
        check_draft(target, target)
    with pytest.raises(ValueError, match="is a drafter, no model by itself"):
        check_draft(draft, draft)


def test_a_draft_is_no_model_by_itself(draft):
    """Wherever a model is decoded, with any strategy, before anything is compiled."""
    for strategy in (None, "ar", "multi_bd"):
        with pytest.raises(ValueError, match="is a drafter, no model by itself: it has no"):
            dj.generate(draft, [[1, 2]], strategy, max_tokens=2)
    with pytest.raises(ValueError, match="is a drafter, no model by itself"):
        dj.LLM(draft, block_size=4)
    with pytest.raises(ValueError, match="a drafter has no embedding of its own"):
        draft.logits(jnp.zeros((1, 4), jnp.int32))


@pytest.mark.parametrize("more", [(), ("--strategy", "ar"), ("--block-size", "4")])
def test_the_command_says_that_a_draft_is_no_model(tmp_path, capsys, monkeypatch, more):
    monkeypatch.setattr("dllm_jax.loading.jax_settings.enable_compile_cache", lambda: None)
    folder = write_draft(tmp_path / "draft")
    assert main(["generate", "--model", str(folder), *more, "Hello"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: model ")
    assert "is a drafter, no model by itself" in line


class _Drafts:
    needs = Needs("whole_causal", aux=("draft",))

    def bind(self, config):
        return self


def test_a_draft_by_name_is_loaded_in_its_targets_type(target, tmp_path):
    folder = write_draft(tmp_path / "draft", dtype="bfloat16")
    half = target.replace(params=jax.tree.map(lambda x: x.astype("bfloat16"), target.params))
    for of in (target, half):
        bound = bind_draft(_Drafts(), str(folder), of).aux["draft"]
        assert {leaf.dtype for leaf in jax.tree.leaves(bound.params)} == {of.params["embed"].dtype}
        assert bound.config.vocab_size == 50
        assert bound.defaults.vocab_limit == of.defaults.vocab_limit
    with pytest.raises(ValueError, match="draft=None: _Drafts drafts with"):
        bind_draft(_Drafts(), None, target)


def test_a_drafter_with_an_embedding_of_its_own_keeps_it():
    target = toys.causal()
    own = toys.drafter(target)
    assert with_target(target, own) is own


def test_inspect_tells_what_a_draft_is(tmp_path):
    report = inspect(write_draft(tmp_path / "draft", "mixed"))
    assert report.is_ok
    assert (report.family, report.defaults.strategy) == ("dflash", "dflash")
    assert "target_layer_ids=(2, 0)" in str(report)
    assert "windows=(4, None)" in str(report)


def test_the_command_says_whose_draft_it_may_be(tmp_path, capsys):
    folder = write_draft(tmp_path / "draft")
    assert main(["inspect", str(folder)]) == 0
    assert capsys.readouterr().out.endswith(
        "note: a drafter of blocks of 5, no model by itself: give it as --draft beside the "
        "model that it was trained for, which has a hidden_size of 40, 3 layers or more, a "
        "vocabulary of 50\nno problems\n"
    )
    assert main(["info", "--json"]) == 0
    families = json.loads(capsys.readouterr().out)["families"]
    assert families["dflash"].startswith("drafters (--draft), class DFlashDraftModel or Muse")
