"""Every family's config.json is read by the family's own rules, and its traps are told.

Facts of the network in each dialect (Llama's names, Qwen3-MoE's, LLaDA's, LLaDA2's), dispatch,
defaults that a name changes, and each refusal or note by its words. Round trips of a config
through its family's config.json and through meta.json, and any JSON at all in any entry.
"""

import contextlib
import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_jax.convert.config.special_tokens import TokenizerFacts
from dllm_jax.models.families import (
    ConfigError,
    config_json,
    defaults_from_json,
    find_family,
    parse_config,
)
from dllm_jax.models.family_table import FAMILIES
from dllm_jax.models.layers import Llama3Scaling
from dllm_jax.models.moe import MoEConfig
from tests.oracles.tiny_configs import CONFIGS


def parse(family, *, generation=None, tokenizer=None, name="", **changes):
    """Parse a tiny config with changes; `...` removes an entry."""
    config = {"mask_token_id": 47, **CONFIGS[family], **changes}
    kept = {key: value for key, value in config.items() if value is not ...}
    return parse_config(kept, generation, tokenizer, name=name)


def refused(family, words, **changes):
    """Assert that the config has one problem, with these words."""
    with pytest.raises(ConfigError) as caught:
        parse(family, **changes)
    assert len(caught.value.problems) == 1, caught.value.problems
    assert words in caught.value.problems[0]


def noted(family, words, **changes):
    """The outcome of a config that is read with one note, with these words."""
    parsed = parse(family, **changes)
    assert len(parsed.notes) == 1, parsed.notes
    assert words in parsed.notes[0]
    return parsed


# Dispatch.


@pytest.mark.parametrize("family", CONFIGS)
def test_every_tiny_config_is_read_as_its_family_and_without_a_note(family):
    usual = {"stable_diffcoder": 5, "illada": 5}
    parsed = parse(family, mask_token_id=usual.get(family, 47))
    row = {"diffucoder": "dream", "llada2_2": "llada2", "llama31": "llama"}.get(family, family)
    assert parsed.family == parsed.defaults.family == row
    assert parsed.notes == ()
    assert isinstance(parsed.config, MoEConfig) == ("moe" in family or "llada2" in family)
    hash((parsed.config, parsed.defaults))


@pytest.mark.parametrize(
    ("model_type", "family"),
    [(kind, row.name) for row in FAMILIES for kind in row.model_types],
)
def test_model_type_speaks_where_no_class_is_named(model_type, family):
    assert find_family({"model_type": model_type}).name == family


def test_stable_diffcoder_calls_itself_a_llama():
    named = {
        "model_type": "llama",
        "auto_map": {"AutoModelForCausalLM": "x.StableDiffcoderForCausalLM"},
    }
    assert find_family(named).name == "stable_diffcoder"
    assert find_family({**named, "architectures": ["StableDiffcoderForCausalLM"]}).name != "llama"
    assert find_family({"model_type": "llama"}).name == "llama"


@pytest.mark.parametrize(
    ("config", "name", "words"),
    [
        (
            {"model_type": "Dream"},
            "",
            'add "architectures": ["DreamModel"] or ["DreamForCausalLM"]',
        ),
        (CONFIGS["llada2"], "LLaDA2.0-Uni", "LLaDA2.0-Uni, which also reads images: not supported"),
        ({"model_type": "llada2-uni"}, "", "LLaDA2.0-Uni, which also reads images: not supported"),
        (
            {"architectures": ["MysteryLM"]},
            "",
            "architecture 'MysteryLM' (model_type None) is unknown",
        ),
        ({"model_type": ["x"]}, "", "architecture None (model_type ['x']) is unknown; known are "),
    ],
)
def test_near_relatives_and_strangers_are_refused_by_name(config, name, words):
    with pytest.raises(ConfigError) as caught:
        find_family(config, name)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("config", "name", "reason"),
    [
        ("NemotronLabsDiffusionModel", "", "three modes in one network; planned"),
        ("MinistralDiffEncoderModel", "", "three modes in one network; planned"),
        ({"model_type": "nemotron_labs_diffusion"}, "", "three modes in one network; planned"),
        ("WeDLMForCausalLM", "", "the order in which cells were filled"),
        ({"model_type": "wedlm"}, "", "the order in which cells were filled"),
        ("TwoTowerForCausalLM", "", "a frozen Mamba-2 tower"),
        ("SomethingNew", "Nemotron-TwoTower-30B", "a frozen Mamba-2 tower"),
        ({"architectures": ["New"], "model_type": "two_tower"}, "", "a frozen Mamba-2 tower"),
        ("Lfm2ForMaskedDiffusion", "", "short convolutions keep a state"),
        ("SomethingNew", "LFM2.5-Diffusion-1.2B", "short convolutions keep a state"),
        ({"model_type": "lfm2_diffusion"}, "", "short convolutions keep a state"),
        ("Qwen3DSparkModel", "", "corrects each draft by the one before it; planned"),
        ("DSparkDraftModel", "", "speculators' form has a vocabulary and layer numbers of its own"),
        ("DSparkSpeculator", "", "speculators' form"),
        ("Eagle3Speculator", "", "speculators' form"),
        (
            {"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash"},
            "",
            "speculators' form",
        ),
        ("Unseen", "", "; docs/models.md lists what is planned"),
    ],
)
def test_48_3_relatives_have_the_true_reason(config, name, reason):
    config = {"architectures": [config]} if isinstance(config, str) else config
    with pytest.raises(ConfigError) as caught:
        parse_config(config, name=name)
    assert len(caught.value.problems) == 1
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


DREAMON = "DreamOn: its expand and delete ids change the length of the text while it is written"


@pytest.mark.parametrize(
    ("family", "config", "generation", "vocabulary", "name"),
    [
        ("dream", {"expand_token_id": 48}, {}, {}, ""),
        ("dream", {"delete_token_id": 48}, {}, {}, ""),
        ("dream", {}, {"expand_token_id": 48}, {}, ""),
        ("dream", {}, {}, {"<|expand|>": 48}, ""),
        ("dream", {}, {}, {}, "DreamOn-v0-7B"),
        ("dream", {"expand_token_id": 48}, {}, {"<|expand|>": 48}, "DreamOn-v0-7B"),
        ("sdar", {"insert_token_ids": [48, 49]}, {}, {}, ""),
        ("llada", {"split_token_id": 0}, {}, {}, ""),
        ("llada2", {"expand_token_id": 48}, {}, {}, ""),
    ],
)
def test_45_12_ids_that_expand_or_delete_are_refused(family, config, generation, vocabulary, name):
    files = {**CONFIGS[family], **config, "mask_token_id": 47}
    facts = TokenizerFacts(vocabulary=vocabulary)
    with pytest.raises(ConfigError, match=DREAMON) as caught:
        parse_config(files, generation, facts, name=name)
    assert len(caught.value.problems) == 1


def test_45_12_what_changes_no_length_still_loads():
    assert parse("dream", expand_token_id=None, delete_token_id=-1).notes == ()
    assert parse("llada2_2").defaults.delete_token_id == 48
    assert parse("qwen3", expand_token_id=48).family == "qwen3", "it denoises nothing"
    assert parse("sdar", name="juno-unosdar").family == "sdar"
    refused("sdar", "Uno, whose adapter is on while it drafts", name="uno-qwen3-8B")


def test_48_1_illada_has_its_mask_though_no_file_says_so():
    parsed = parse("illada", mask_token_id=...)
    assert (parsed.config.mask_token_id, parsed.config.tie_embeddings) == (5, True)
    refused("illada", "layer_norm_eps=1e-05 means LayerNorm", layer_norm_eps=1e-5, mask_token_id=5)
    refused("illada", "mlp_bias=true is not supported", mlp_bias=True, mask_token_id=5)
    refused("illada", "rope_theta=None", rope_theta=..., mask_token_id=5)


@pytest.mark.parametrize(
    ("name", "own", "wanted"),
    [
        ("Qwen3-0.6B", None, "full_sequence full 32 low_confidence 32 block_diffusion"),
        ("Qwen3-diffusion-mdlm-v0.1", None, "full_sequence full 32 low_confidence 32 "),
        ("Qwen3-diffusion-bd3lm-v0.1", None, "block_diffusion block_causal 32 static None "),
        ("Qwen3-8B-OPDLM", None, "block_diffusion block_causal 4 dynamic None "),
        ("Qwen3-0.6B", "block_diffusion", "block_diffusion block_causal 32 static None "),
        ("a-bd3lm", "full_sequence", "full_sequence full 32 low_confidence 32 block_diffusion"),
    ],
)
@pytest.mark.parametrize("family", ["a2d_qwen3", "a2d_qwen2", "a2d_llama"])
def test_48_2_a_name_or_our_entry_says_how_a2d_was_trained(family, name, own, wanted):
    changes = {"dllm_jax": {"strategy": own}} if own else {}
    d = parse(family, name=name, **changes).defaults
    found = (d.strategy, d.attention, d.block_size, d.remasking, d.block_length)
    assert " ".join(map(str, (*found, ",".join(d.alternatives)))) == wanted


def test_48_2_an_a2d_config_may_state_its_block():
    assert parse("a2d_qwen3", name="x-opdlm", block_size=8).defaults.block_size == 8


def test_48_2_qwen2_is_open_dcoder_only_with_a_mask_token():
    files = CONFIGS["open_dcoder"]
    words = "it is Qwen2.5 unless its config or its tokenizer has a mask token, as Open-dCoder's"
    for plain in (files, {"model_type": "qwen2"}):
        with pytest.raises(ConfigError, match=words):
            parse_config(plain, tokenizer=TokenizerFacts(vocabulary={"<|im_end|>": 45}))
    marked = parse_config(files, tokenizer=TokenizerFacts(vocabulary={"[MASK]": 47}))
    assert (marked.family, marked.config.mask_token_id) == ("open_dcoder", 47)
    assert parse_config({**files, "mask_token_id": 47}).config.shift


def test_48_2_llada_moe_never_norms_what_its_experts_weigh():
    parsed = parse("llada_moe")
    config = parsed.config
    assert (config.norm_topk, config.qk_norm, config.score) == (False, True, "softmax")
    assert (config.moe_layers, config.ffn_size, config.expert_size) == ((False, True, True), 56, 24)
    assert (config.num_experts, config.experts_per_token, config.shared_size) == (12, 3, 0)
    words = "norm_topk_prob: the family's own code does not read it"
    assert not noted("llada_moe", words, norm_topk_prob=True).config.norm_topk
    noted("llada_moe", "routed_scaling_factor, router_num_group: ", **_SCALED)
    sparse = parse("llada_moe", moe_layer_freq=..., dense_intermediate_size=...).config
    assert (sparse.moe_layers, sparse.ffn_size) == ((True,) * 3, 24)
    assert parse("llada_moe", shared_expert_intermediate_size=16).config.shared_size == 16
    assert not parse("llada_moe", qk_layernorm=False).config.qk_norm
    assert find_family({"architectures": ["LLaDAMoEModelLM"], "model_type": "llada"}).name == (
        "llada_moe"
    )


_SCALED = {"routed_scaling_factor": 2.5, "router_num_group": 4}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported; only null is"),
        ({"moe_router_enable_expert_bias": True}, "the bias would enter the weights"),
        ({"moe_router_score_function": "sigmoid"}, "scores are one law over all experts"),
        ({"moe_layer_freq": [1, 1]}, "moe_layer_freq=[1, 1] must hold 0 or 1 for each of 3"),
        ({"moe_layer_freq": [[], 1, {}]}, "must hold 0 or 1 for each of 3"),
        ({"dense_intermediate_size": None}, "dense_intermediate_size=None must be a positive"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    ],
)
def test_48_2_what_llada_moe_may_not_have_is_refused(changes, words):
    refused("llada_moe", words, **changes)


# Llama's names.


@pytest.mark.parametrize("family", ["dream", "diffucoder", "fast_dllm_v2"])
@pytest.mark.parametrize("stated", [..., None, False, True])
def test_qwen2_layers_have_their_bias_whatever_the_config_says(family, stated):
    config = parse(family, attention_bias=stated).config
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (True, False, False)


@pytest.mark.parametrize("family", ["sdar", "qwen3", "dream_reasoner", "llama31", "sdar_moe"])
def test_elsewhere_the_config_says_whether_attention_has_biases(family):
    plain, biased = parse(family).config, parse(family, attention_bias=True).config
    assert (plain.qkv_bias, plain.o_bias) == (False, False)
    assert (biased.qkv_bias, biased.o_bias) == (True, True)
    assert plain.qk_norm == biased.qk_norm == (family != "llama31")


def test_shift_is_the_familys():
    shifted = {row.name for row in FAMILIES if row.shift}
    assert shifted == {"dream", "open_dcoder", "fast_dllm_v2", "qwen3", "qwen3_moe", "llama"}
    assert parse("dream").config.shift
    assert not parse("dream_reasoner").config.shift


LLAMA3 = CONFIGS["llama31"]["rope_scaling"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": {**LLAMA3, "type": "ignored beside rope_type"}},
        {"rope_scaling": None, "rope_theta": ..., "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_scaling": {"type": "llama3", **{k: LLAMA3[k] for k in LLAMA3 if k != "rope_type"}}},
    ],
)
def test_llama3_scaling_in_every_spelling(changes):
    config = parse("llama31", **changes).config
    assert config.rope_theta == 5e5
    assert config.rope_scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    )


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"factor": None}, "factor=None must be a positive number"),
        ({"low_freq_factor": 4.0}, "high_freq_factor=4.0 must be above low_freq_factor=4.0"),
        ({"original_max_position_embeddings": 64.5}, "original_max_position_embeddings=64.5 whole"),
        (
            {"rope_type": "dynamic"},
            "rope_scaling type 'dynamic' is not supported; only null, \"default\"",
        ),
        ({"rope_type": "longrope"}, "rope_scaling type 'longrope' is not supported"),
    ],
)
def test_scalings_that_cannot_be_are_refused(entry, words):
    refused("llama31", words, rope_scaling={**LLAMA3, **entry})


def test_two_thetas_that_differ_are_told():
    parsed = noted(
        "sdar",
        "rope_theta is stated as 500000.0 and as 1000000.0; using 500000.0",
        rope_parameters={"rope_theta": 500000.0},
    )
    assert parsed.config.rope_theta == 5e5


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("dream", {"use_mrope": True}, "use_mrope=true is not supported; only false is"),
        ("llama31", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (
            "qwen3",
            {"tie_word_embeddings": "yes"},
            "tie_word_embeddings='yes' must be true or false",
        ),
        (
            "qwen3",
            {"num_hidden_layers": 10**9},
            "num_hidden_layers=1000000000 must be at most 1000",
        ),
        ("qwen3", {"rope_theta": 10**400}, "must be a positive number"),
    ],
)
def test_what_a_dense_family_lacks_is_refused(family, changes, words):
    refused(family, words, **changes)


def test_a_length_that_was_never_trained_is_noted():
    noted("dream", "=131072 is inherited: dream was trained on", max_position_embeddings=131072)
    changes = {"max_position_embeddings": 131072, "name": "DiffuCoder-7B-Base"}
    assert parse("diffucoder", **changes).notes == ()


# LLaDA's own names.


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"n_kv_heads": None}, "num_kv_heads", 6),
        ({"n_kv_heads": ..., "multi_query_attention": True}, "num_kv_heads", 1),
        ({"n_kv_heads": None, "multi_query_attention": False}, "num_kv_heads", 6),
        ({"mlp_hidden_size": None}, "ffn_size", 192),
        ({"mlp_hidden_size": ..., "mlp_ratio": 2.5}, "ffn_size", 120),
        ({"embedding_size": 64}, "vocab_size", 64),
        ({"embedding_size": None}, "vocab_size", 50),
        ({"weight_tying": True}, "tie_embeddings", True),
        ({"scale_logits": True}, "logit_scale", 1 / math.sqrt(48)),
        ({"include_qkv_bias": True}, "qkv_bias", True),
        ({"rope_theta": 1e4}, "rope_theta", 1e4),
        ({"max_sequence_length": ...}, "max_position", 4096),
    ],
)
def test_facts_that_llada_states_in_a_way_of_its_own(changes, field, value):
    assert getattr(parse("llada", **changes).config, field) == value


def test_rows_of_the_embedding_past_the_vocabulary_hold_no_token():
    assert parse("llada", embedding_size=64).defaults.vocab_limit == 50


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"activation_type": "swiglu"},
            "activation_type='swiglu' is not supported; only \"silu\" is",
        ),
        ({"block_type": "sequential"}, "block_type='sequential' is not supported; only \"llama\""),
        (
            {"layer_norm_type": "default"},
            "layer_norm_type='default' is not supported; only \"rms\"",
        ),
        ({"layer_norm_with_affine": False}, "layer_norm_with_affine=false is not supported"),
        ({"rope": False}, "rope=false is not supported; only true is"),
        ({"alibi": True}, "alibi=true is not supported; only false is"),
        ({"attention_layer_norm": True}, "attention_layer_norm=true is not supported"),
        ({"input_emb_norm": True}, "input_emb_norm=true is not supported"),
        ({"bias_for_layer_norm": True}, "bias_for_layer_norm=true is not supported"),
        ({"include_bias": True}, "include_bias=true is not supported"),
        ({"block_group_size": 2}, "block_group_size=2 is not supported; only 1 is"),
        ({"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported; only null is"),
        (
            {"multi_query_attention": True},
            "n_kv_heads=2 beside multi_query_attention=true must be 1",
        ),
        ({"d_model": 50}, "n_heads=6 does not divide d_model=50; correct config.json"),
        ({"mlp_hidden_size": None, "mlp_ratio": 1.26}, "state mlp_hidden_size"),
    ],
)
def test_what_llada_may_not_have_is_refused(changes, words):
    refused("llada", words, **changes)


# Experts in Qwen3-MoE's names.


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"mlp_only_layers": [0, 2]}, (False, True, False)),
        ({"decoder_sparse_step": 2}, (False, True, False)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (False, False, False)),
        ({"decoder_sparse_step": None, "mlp_only_layers": None}, (True, True, True)),
    ],
)
def test_which_layers_have_experts(changes, layers):
    assert parse("qwen3_moe", **changes).config.moe_layers == layers


def test_norm_topk_is_the_configs_in_qwen3_moe_and_always_on_in_sdar_moe():
    assert not parse("qwen3_moe", norm_topk_prob=False).config.norm_topk
    assert not parse("qwen3_moe", norm_topk_prob=...).config.norm_topk
    assert parse("sdar_moe", norm_topk_prob=...).config.norm_topk
    words = "norm_topk_prob=false is ignored: the family's own code always divides"
    assert noted("sdar_moe", words, norm_topk_prob=False).config.norm_topk


def test_the_number_of_experts_has_two_names():
    assert parse("qwen3_moe", num_experts=..., num_local_experts=9).config.num_experts == 9
    assert parse("qwen3_moe", num_local_experts=12).config.num_experts == 12
    refused(
        "qwen3_moe", "num_experts=12 and num_local_experts=9 must be equal", num_local_experts=9
    )
    refused("qwen3_moe", "num_experts=None must be a positive whole number", num_experts=...)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"num_experts_per_tok": 13},
            "num_experts_per_tok=13 must be at least 1 and at most the 12",
        ),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers=['0'] must be a list of layer numbers"),
        ({"mlp_only_layers": {"0": 1}}, "must be a list or null"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size=None must be a positive"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be a positive whole number"),
    ],
)
def test_experts_that_cannot_be_are_refused(changes, words):
    refused("sdar_moe", words, **changes)


# LLaDA2's names.


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"use_qkv_bias": True}, "qkv_bias", True),
        ({"use_bias": True}, "o_bias", True),
        ({"num_shared_experts": 2}, "shared_size", 48),
        ({"num_shared_experts": None}, "shared_size", 0),
        ({"first_k_dense_replace": 0}, "moe_layers", (True, True, True)),
        ({"first_k_dense_replace": 3}, "moe_layers", (False, False, False)),
        ({"n_group": 0}, "num_groups", 1),
        ({"n_group": None, "topk_group": None}, "num_groups", 1),
        ({"n_group": 1}, "groups_per_token", 1),
        ({"norm_topk_prob": False}, "norm_topk", False),
        ({"moe_router_enable_expert_bias": False}, "expert_bias", False),
        ({"routed_scaling_factor": None}, "routed_scale", 1.0),
        ({"router_dtype": None, "score_function": None}, "score", "sigmoid"),
        ({"rotary_dim": ...}, "rotary_dim", 8),
        ({"partial_rotary_factor": ...}, "rotary_dim", 8),
        ({"rotary_dim": ..., "partial_rotary_factor": ...}, "rotary_dim", None),
        ({"rotary_dim": 16, "partial_rotary_factor": 1.0}, "rotary_dim", None),
        (
            {
                "rotary_dim": ...,
                "partial_rotary_factor": ...,
                "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 600000},
            },
            "rotary_dim",
            4,
        ),
    ],
)
def test_facts_that_llada2_states_in_a_way_of_its_own(changes, field, value):
    parsed = parse("llada2", **changes)
    assert getattr(parsed.config, field) == value
    assert parsed.notes == ()


def test_rotary_dim_is_believed_before_the_share():
    words = "rotary_dim=8 but partial_rotary_factor=0.25 of head_dim=16 is 4; using rotary_dim"
    assert noted("llada2", words, partial_rotary_factor=0.25).config.rotary_dim == 8


def test_groups_that_do_not_divide_the_experts_are_none():
    parsed = noted("llada2", "n_group=5 does not divide num_experts=12: a row chooses", n_group=5)
    assert parsed.config.num_groups == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_qk_norm": False}, "use_qk_norm=false is not supported; only true is"),
        (
            {"score_function": "softmax"},
            "score_function='softmax' is not supported; only \"sigmoid\"",
        ),
        ({"router_dtype": "bf16"}, "router_dtype='bf16' is not supported; only \"fp32\" is"),
        ({"norm_head": True}, "norm_head=true is not supported; only false is"),
        ({"use_sliding_window": True}, "use_sliding_window=true is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling type 'linear' is not supported"),
        ({"topk_group": 5}, "topk_group=5 must be at most n_group=4"),
        ({"topk_group": None}, "topk_group=None must be a positive whole number"),
        ({"rotary_dim": 7, "partial_rotary_factor": ...}, "rotary_dim=7 must be even and at most"),
        (
            {"rotary_dim": 32, "partial_rotary_factor": ...},
            "rotary_dim=32 must be even and at most",
        ),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 must be at least 1 and at most the 6"),
        (
            {"first_k_dense_replace": -1},
            "first_k_dense_replace=-1 must be a whole number, 0 or more",
        ),
        ({"use_bias": 1}, "use_bias=1 must be true or false"),
    ],
)
def test_what_llada2_may_not_have_is_refused(changes, words):
    refused("llada2", words, **changes)


def test_a_block_of_llada2_2_is_a_block_of_routing():
    parsed = parse("llada2_2")
    assert (parsed.config.expert_capacity, parsed.config.routing_block) == (5, 4)
    assert (parsed.defaults.strategy, parsed.defaults.block_size) == ("edit_indel", 32)
    assert parsed.defaults.forbidden_token_ids == (48, 49)
    assert (parsed.defaults.delete_token_id, parsed.defaults.split_token_id) == (48, 49)
    swapped = parse("llada2_2", delete_token_id=49, split_token_id=48).defaults
    assert (swapped.delete_token_id, swapped.split_token_id) == (49, 48)
    for other in (..., 48, 10**6):  # without two ids, what is left of it is not drawn
        lacking = parse("llada2_2", split_token_id=other).defaults
        assert (lacking.strategy, lacking.delete_token_id) == ("edit", None)
        assert lacking.forbidden_token_ids == (48,)
    assert parse("llada2_2", block_size=...).config.routing_block == 32
    assert parse("llada2_2", block_size=12).defaults.block_size == 36  # whole blocks, 32 or more
    # Without a capacity it is what it is elsewhere.
    plain = parse("llada2", block_size=16)
    assert (plain.config.routing_block, plain.defaults.block_size) == (1, 16)
    own = {"block_size": 6}
    refused("llada2_2", "block_size=6 must be a multiple of the routing block of 4", dllm_jax=own)


# Tokens.


def test_a_mask_the_tokenizer_gives_no_role_is_found_by_its_text():
    facts = TokenizerFacts(num_tokens=50, vocabulary={"<|mask|>": 46})
    assert parse("llada2", mask_token_id=..., tokenizer=facts).config.mask_token_id == 46


def test_the_mask_of_a_config_that_is_its_pad_is_passed_over():
    facts = TokenizerFacts(num_tokens=151670, mask_token_id=45)  # which is the end of text
    changes = {"mask_token_id": 151643, "pad_token_id": 151643, "eos_token_id": [45, 151645]}
    parsed = noted(
        "sdar_moe",
        "using 151669 of the sdar_moe family",
        vocab_size=151936,
        tokenizer=facts,
        **changes,
    )
    assert parsed.config.mask_token_id == 151669


def test_pads_come_from_the_files_then_the_table():
    assert parse("llada2", pad_token_id=3).defaults.pad_token_id == 3
    rows = {"vocab_size": 157184, "mask_token_id": 156895, "eos_token_id": 156892}
    wide = parse("llada2", pad_token_id=..., **rows)
    assert wide.defaults.pad_token_id == 156892
    assert wide.defaults.stop_token_ids == (156892, 156900)
    assert parse("stable_diffcoder", pad_token_id=...).defaults.pad_token_id == 1  # its stop is 2


# Names change defaults only.


@pytest.mark.parametrize(
    ("family", "name", "changed"),
    [
        ("sdar", "SDAR-8B-Chat-b64", {"block_size": 64}),
        ("sdar_moe", "SDAR-30B-A3B-Sci-b32", {"block_size": 32}),
        ("sdar", "JetLM/SDAR-8B-Chat-b16-preview", {"block_size": 16}),
        ("sdar", "SDAR-8B-Chat-b32k", {}),
        ("llada2", "LLaDA2.0-mini-preview", {}),
        ("llada2", "LLaDA2.0-mini-CAP", {"accept_threshold": 0.9}),
        ("llada2", "LLaDA2.0-captain", {}),
        ("dream", "Dream-v0-Instruct-7B", {}),
        ("diffucoder", "DiffuCoder-7B-Instruct", {"temperature": 0.3}),
        ("diffucoder", "diffucoder-7b-cpGRPO", {"temperature": 0.4}),
    ],
)
def test_names_change_defaults_only(family, name, changed):
    block = {"block_size": ...}  # of the folder, which would come before the name
    plain, named = parse(family, **block), parse(family, name=name, **block)
    assert plain.config == named.config
    assert named.defaults == dataclasses.replace(plain.defaults, **changed)
    assert named.notes == ()


@pytest.mark.parametrize(
    ("name", "strategy"), [("LLaDA2.1-mini", "edit"), ("DMax-Math-16B", "dmax"), ("x-dmax", "dmax")]
)
def test_a_strategy_in_a_name_is_told_and_not_taken(name, strategy):
    words = f"made for the strategy '{strategy}', which its files do not tell; 'multi_bd' is used"
    assert noted("llada2", words, name=name).defaults == parse("llada2").defaults


# Our own entry.


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"strategy": "evil.py:STRATEGY"},
            "strategy='evil.py:STRATEGY' must be a name, for a chec",
        ),
        ({"temperature": -1}, "temperature=-1 must be a number of at least 0"),
        ({"top_p": 1.5}, "top_p=1.5 must be in [0, 1]"),
        ({"accept_threshold": float("nan")}, "accept_threshold=nan must be a number of at least 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, words):
    refused("sdar", words, dllm_jax=settings)


def test_our_own_entry_comes_last():
    own = {"strategy": "multi_bd", "temperature": 0.5, "top_p": 0.8, "accept_threshold": 1}
    defaults = parse("llada2_2", dllm_jax=own).defaults
    assert {key: getattr(defaults, key) for key in own} == own


# Round trips.


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in CONFIGS),
        ("llada2", {"first_k_dense_replace": 2, "num_shared_experts": 0, "use_qkv_bias": True}),
        ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": False}),
        ("llada", {"scale_logits": True, "weight_tying": True, "include_qkv_bias": True}),
        ("sdar", {"attention_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_a_config_comes_back_from_its_familys_config_json(family, changes):
    parsed = parse(family, **changes)
    written = json.loads(json.dumps(config_json(parsed.family, parsed.config, "float32")))
    again = parse_config(written)
    assert (again.family, again.config) == (parsed.family, parsed.config)


def test_defaults_that_an_older_version_wrote_are_filled_from_the_table():
    stored = dataclasses.asdict(parse("qwen3").defaults)
    for key in ("attention", "alternatives", "temperature", "top_p", "forbidden_token_ids"):
        del stored[key]
    assert defaults_from_json(stored) == parse("qwen3").defaults


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"family": "gpt"}, ValueError, "family 'gpt' is unknown; known are llada, dream, "),
        ({"attention": "sideways"}, ValueError, "attention='sideways' is unknown; use one of full"),
        ({"new": 1}, TypeError, "new"),
    ],
)
def test_stored_defaults_that_cannot_be_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        defaults_from_json({**dataclasses.asdict(parse("sdar").defaults), **change})


# Whatever JSON a config holds, it is read or refused, and never brings the program down.

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from([10**400, -(10**30), math.nan, math.inf])
    | st.floats(-2, 2)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
MORE_KEYS = {"rope_parameters", "dllm_jax", "auto_map", "num_local_experts", "clip_qkv", "bd_size"}
MORE_KEYS |= {"expert_capacity", "quantization_config", "partial_rotary_factor", "layer_types"}


@settings(max_examples=60)
@given(st.data(), st.sampled_from(sorted(CONFIGS)))
def test_any_config_is_read_or_refused(data, family):
    keys = st.sampled_from(sorted({*CONFIGS[family], *MORE_KEYS}))
    changes = data.draw(st.dictionaries(keys, JSON, min_size=1, max_size=3))
    with contextlib.suppress(ConfigError):
        parsed = parse_config({**CONFIGS[family], **changes}, {"eos_token_id": data.draw(JSON)})
        hash((parsed.config, parsed.defaults))
        assert all(0 <= i < parsed.config.vocab_size for i in parsed.defaults.stop_token_ids)
        assert parsed.defaults.block_size % getattr(parsed.config, "routing_block", 1) == 0


def test_a6_a_million_stop_ids_are_one_problem():
    words = "eos_token_id names 1000000 ids; at most 32 end a text"
    refused("llada2", words, eos_token_id=list(range(1_000_000)))
