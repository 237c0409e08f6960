"""Configs are read by the rules of their families, and refused by name where we lack something.

Dispatch, both spellings of rope, null and missing fields, special tokens from four sources,
strategy settings, tokenizer files, and each refusal by its words.
"""

import contextlib
import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dllm_jax.convert.config.fields import Fields
from dllm_jax.convert.config.special_tokens import TokenizerFacts
from dllm_jax.convert.tokenizer_files import read_facts
from dllm_jax.models import families
from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.families import ConfigError, parse_config
from dllm_jax.models.family_table import FAMILIES
from dllm_jax.models.published import PUBLISHED
from tests.oracles.tiny_configs import CONFIGS

BASE = CONFIGS["sdar"] | {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "mask_token_id": 157,
    "eos_token_id": 150,
}
for name in ("bos_token_id", "pad_token_id", "block_size"):  # nothing states them here
    del BASE[name]


def parse(*args, tokenizer=None, generation=None, name="", **changes):
    """Parse the base config with changes; `...` removes an entry."""
    base = {**BASE, **(args[0] if args else {}), **changes}
    kept = {key: value for key, value in base.items() if value is not ...}
    return parse_config(kept, generation, tokenizer, name=name)


def refused(*words, **changes):
    """The problems of a config that must be refused, each word in one of them."""
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    for word in words:
        assert any(word in problem for problem in caught.value.problems), caught.value.problems
    return caught.value.problems


def test_fields_arrive():
    family, config, defaults, notes = parse()
    assert family == "sdar"
    assert config == DenseConfig(
        vocab_size=160,
        hidden_size=48,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=80,
        rope_theta=1e6,
        norm_eps=1e-6,
        tie_embeddings=False,
        max_position=256,
        shift=False,
        mask_token_id=157,
    )
    assert dataclasses.asdict(defaults) == {
        "family": "sdar",
        "append": None,
        "strategy": "multi_bd",
        "block_size": 4,
        "buffer_size": 1,
        "accept_threshold": 0.95,
        "add_block_threshold": 0.1,
        "semi_complete_threshold": 0.9,
        "edit_threshold": None,
        "remasking": None,
        "block_length": None,
        "temperature": 0.0,
        "top_p": None,
        "attention": "block_causal",
        "alternatives": (),
        "stop_token_ids": (150,),
        "forbidden_token_ids": (),
        "delete_token_id": None,
        "split_token_id": None,
        "pad_token_id": 150,
        "vocab_limit": 160,
        "numbers": (),
        "unread_token_ids": (),
    }
    assert notes == ()


def test_qwen3_is_shifted_and_autoregressive():
    parsed = parse(architectures=["Qwen3ForCausalLM"], model_type="qwen3", mask_token_id=...)
    assert parsed.family == "qwen3"
    assert parsed.config.shift
    assert parsed.config.mask_token_id == -1
    assert (parsed.defaults.strategy, parsed.defaults.block_size) == ("ar", 1)


# Dispatch: the class, then auto_map, and model_type only where no class is named.


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "qwen3"),
        ({"architectures": "Qwen3ForCausalLM"}, "qwen3"),
        ({"architectures": ..., "model_type": "qwen3"}, "qwen3"),
        ({"architectures": None, "model_type": "sdar"}, "sdar"),
        (
            {
                "architectures": ["Renamed"],
                "auto_map": {"AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"},
            },
            "sdar",
        ),
        (
            {
                "architectures": ...,
                "model_type": "qwen3",
                "auto_map": {"AutoConfig": "configuration_x.XConfig"},
            },
            "qwen3",
        ),
    ],
)
def test_family_is_found(changes, family):
    assert parse(changes).family == family


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3"},
        {"architectures": ..., "model_type": "gpt2"},
        {"architectures": ..., "model_type": ...},
        {
            "architectures": ...,
            "model_type": "qwen3",
            "auto_map": {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"},
        },
    ],
)
def test_unknown_families_are_refused_and_known_ones_listed(changes):
    refused("is unknown; known are LLaDAModelLM (llada), DreamModel (dream), ", **changes)


# Fields.


THETA = {"rope_theta": 5e5}


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"head_dim": 32}, "head_dim", 32),  # though the width differs
        ({"head_dim": None}, "head_dim", 8),
        ({"head_dim": ...}, "head_dim", 8),
        ({"num_key_value_heads": None}, "num_kv_heads", 6),
        ({"mask_token_id": 0, "eos_token_id": None}, "mask_token_id", 0),  # no pad is stated
        (THETA, "rope_theta", 5e5),
        (THETA | {"rope_scaling": {"type": "default"}}, "rope_theta", 5e5),
        (THETA | {"rope_scaling": {"rope_type": "default"}}, "rope_theta", 5e5),
        (
            {"rope_theta": ..., "rope_parameters": THETA | {"rope_type": "default"}},
            "rope_theta",
            5e5,
        ),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 500000}}, "rope_theta", 5e5),
    ],
)
def test_facts_in_every_spelling(changes, field, value):
    assert getattr(parse(changes).config, field) == value


def test_harmless_entries_are_accepted():
    parse(
        use_sliding_window=False,
        sliding_window=4096,
        max_window_layers=28,
        layer_types=["full_attention"] * 3,
        attention_bias=False,
        torch_dtype="bfloat16",
        attention_dropout=0.0,
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; only \"silu\" is"),
        ({"use_sliding_window": True}, "use_sliding_window=true is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "['sliding_attention']"),
        ({"mlp_bias": True}, "mlp_bias=true is not supported"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_scaling type 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling type 'linear'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters type 'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "differs from layer to layer"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn' must be an object or null"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"num_key_value_heads": 4}, "num_kv_heads=4 must divide num_heads=6"),
        ({"head_dim": None, "hidden_size": 50}, "num_attention_heads=6 does not divide"),
        ({"hidden_size": "48"}, "hidden_size='48' must be a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be a positive whole number"),
        ({"vocab_size": ...}, "vocab_size=None must be a positive whole number"),
        ({"intermediate_size": True}, "intermediate_size=True must be"),
        ({"rope_theta": ...}, "rope_theta=None must be a positive number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1 must be a positive number"),
    ],
)
def test_what_the_network_lacks_is_refused(changes, words):
    assert len(refused(words, **changes)) == 1


def test_every_problem_of_a_config_is_told():
    words = ("hidden_act", "use_sliding_window", "dynamic", "hidden_size", "mask_token_id=999")
    assert len(
        refused(
            *words,
            hidden_act="relu",
            use_sliding_window=True,
            rope_scaling={"type": "dynamic"},
            hidden_size=None,
            mask_token_id=999,
        )
    ) == len(words)


# Special tokens.


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "stops"),
    [
        (150, None, None, (150,)),
        ([150, 151], None, None, (150, 151)),
        (None, None, None, ()),
        (150, [152, 149], 151, (149, 150, 151, 152)),
        (None, None, 3, (3,)),
    ],
)
def test_stop_ids_are_the_union(config, generation, tokenizer, stops):
    parsed = parse(
        eos_token_id=config,
        generation={"eos_token_id": generation},
        tokenizer=TokenizerFacts(num_tokens=158, eos_token_id=tokenizer),
    )
    assert parsed.defaults.stop_token_ids == stops


def test_stop_ids_outside_the_vocabulary_are_noted():
    parsed = parse(eos_token_id=[150, 151645])
    assert parsed.defaults.stop_token_ids == (150,)
    assert parsed.notes == ("eos_token_id=151645 lies outside the vocabulary of 160; ignored",)


@pytest.mark.parametrize("wrong", ["<|im_end|>", True, 1.5])
def test_stop_ids_that_are_none_are_noted(wrong):
    parsed = parse(eos_token_id=[150, wrong])
    assert parsed.defaults.stop_token_ids == (150,)
    assert parsed.notes == (f"eos_token_id={wrong!r} is no id; ignored",)


def test_the_familys_own_stop_ids_join_where_the_vocabulary_has_them():
    parsed = parse_config(PUBLISHED["JetLM/SDAR-8B-Chat"])
    assert parsed.defaults.stop_token_ids == (151643, 151645)
    assert parsed.defaults.pad_token_id == 151643


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.stop_tokens], ids=lambda f: f.name)
def test_b7_ids_of_a_family_count_in_its_own_vocabulary_alone(family):
    """By the texts of the tokenizer; without one, by an end that the files state."""

    def tokens(vocabulary=None, eos=7):
        config = {"vocab_size": 200_000, "eos_token_id": eos}
        notes, problems = [], []
        facts = TokenizerFacts(vocabulary=vocabulary or {}, num_tokens=200_000)
        found = families._tokens(Fields(config, problems, notes), family, 200_000, {}, facts)
        assert bool(problems) == (found["mask_token_id"] < 0 and family.mask_token_id is not None)
        return found, notes

    usual, mask = dict(family.stop_tokens), family.mask_token_id
    own = {text: i for i, text in usual.items()} | dict.fromkeys(family.mask_tokens, mask)
    last = max(usual)
    assert tokens(own)[0]["stop_token_ids"] == tuple(sorted({7, *usual}))
    assert tokens(own)[0]["mask_token_id"] == (-1 if mask is None else mask)
    assert tokens(eos=last)[0]["stop_token_ids"] == tuple(usual)
    others = {f"word {i}": i for i in (*usual, mask) if i is not None}
    for vocabulary in (others, None):
        found, (note,) = tokens(vocabulary)
        assert (found["stop_token_ids"], found["mask_token_id"]) == ((7,), -1)
        assert f"stop ids {', '.join(map(str, usual))} are not used" in note
    moved = dict.fromkeys(own, 9)  # the same texts elsewhere
    assert tokens(moved)[0]["stop_token_ids"] == (7,)


@pytest.mark.parametrize(
    ("config", "tokenizer", "vocab", "chosen", "note"),
    [
        (157, None, 160, 157, None),
        (157, 157, 160, 157, None),
        (..., 156, 160, 156, None),
        (None, None, 151936, 151669, None),
        (157, 156, 160, 157, "config.json says 157, the tokenizer says 156; using 157 of config"),
        (150, 156, 160, 156, "config.json says 150, the tokenizer says 156; using 156 of the tok"),
        (149, 156, 160, 156, "config.json says 149, the tokenizer says 156; using 156 of the tok"),
        (149, None, 151936, 151669, "using 151669 of the sdar family"),
        (157, None, 151936, 157, "the sdar family says 151669; using 157 of config.json"),
        (150, None, 160, 150, "mask token 150 of config.json is also a pad or end of text"),
    ],
)
def test_mask_id_is_resolved(config, tokenizer, vocab, chosen, note):
    parsed = parse(
        mask_token_id=config,
        vocab_size=vocab,
        eos_token_id=151643 if vocab == 151936 else 150,
        pad_token_id=149,
        tokenizer=TokenizerFacts(mask_token_id=tokenizer),
    )
    assert parsed.config.mask_token_id == chosen
    assert len(parsed.notes) == (note is not None)
    assert note is None or note in parsed.notes[0]


def test_a_model_without_a_mask_token_is_refused():
    refused("no mask token is known; set mask_token_id in config.json", mask_token_id=None)


@pytest.mark.parametrize("value", [-1, 160, "157", 1.5, True])
def test_mask_ids_that_are_no_ids_are_refused(value):
    refused(f"mask_token_id={value!r} of config.json must be an id", mask_token_id=value)


def test_vocabulary_limit_is_the_tokenizers():
    assert parse(tokenizer=TokenizerFacts(num_tokens=158)).defaults.vocab_limit == 158
    with pytest.raises(ConfigError, match=r"tokenizer has 161 tokens but vocab_size=160; use the"):
        parse(tokenizer=TokenizerFacts(num_tokens=161))


# Strategy settings.


@pytest.mark.parametrize(
    ("changes", "name", "size"),
    [
        ({}, "SDAR-8B-Chat", 4),
        ({}, "SDAR-8B-Chat-b32", 32),
        ({"block_size": 8}, "SDAR-8B-Chat", 8),
        ({"block_size": 8, "bd_size": 16}, "", 16),
        ({"block_size": None}, "", 4),
    ],
)
def test_block_size_is_the_stated_one(changes, name, size):
    parsed = parse(changes, name=name)
    assert parsed.defaults.block_size == size
    assert parsed.notes == ()


@pytest.mark.parametrize(("key", "size"), [("block_size", 0), ("bd_size", 0), ("block_size", -4)])
def test_a_stated_block_of_nothing_is_refused(key, size):
    refused(f"block_size={size} must be a positive whole number", **{key: size})


def test_a_name_that_contradicts_the_config_is_noted():
    parsed = parse(block_size=4, name="SDAR-8B-Chat-b32")
    assert parsed.defaults.block_size == 4
    assert parsed.notes == (
        "SDAR-8B-Chat-b32 names blocks of 32 but config.json says 4; using that",
    )


def test_our_own_entry_states_the_strategy():
    settings = {
        "strategy": "multi_bd",
        "block_size": 32,
        "buffer_size": 4,
        "accept_threshold": 0.9,
        "add_block_threshold": 0.1,
        "semi_complete_threshold": 0.9,
    }
    defaults = dataclasses.asdict(parse(dllm_jax=settings, block_size=4).defaults)
    assert {key: defaults[key] for key in settings} == settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"accept": 0.9}, "unknown key 'accept'; known are strategy, block_size"),
        ({"block_size": "32"}, "block_size='32' must be of type int"),
        ({"accept_threshold": "high"}, "accept_threshold='high' must be of type float"),
        ({"buffer_size": 0}, "buffer_size=0 must be a positive whole number"),
        ([1], "dllm_jax=[1] must be an object or null"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    refused(words, dllm_jax=settings)


# Tokenizer files, read as JSON.


def write(folder, **files):
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def test_tokenizer_facts_of_a_fast_tokenizer(tmp_path):
    write(
        tmp_path,
        tokenizer={
            "model": {"vocab": {"a": 0, "b": 1, "c": 2}},
            "added_tokens": [{"id": 5, "content": "<MASK>"}, {"id": 4, "content": "<end>"}],
        },
        tokenizer_config={"mask_token": "<MASK>", "eos_token": {"content": "<end>"}},
        special_tokens_map={"pad_token": "a", "eos_token": "b"},
    )
    assert read_facts(tmp_path) == TokenizerFacts(
        num_tokens=6,
        mask_token_id=5,
        mask_token="<MASK>",
        eos_token_id=4,
        pad_token_id=0,
        special_token_ids=(0, 4, 5),
    )


def test_tokenizer_facts_of_a_vocabulary_with_added_tokens(tmp_path):
    write(
        tmp_path,
        vocab={"a": 0, "b": 1},
        added_tokens={"<x>": 2},
        tokenizer_config={
            "added_tokens_decoder": {"3": {"content": "<MASK>"}},
            "mask_token": "<MASK>",
            "eos_token": None,
        },
    )
    assert read_facts(tmp_path) == TokenizerFacts(
        num_tokens=4, mask_token_id=3, mask_token="<MASK>", special_token_ids=(3,)
    )


def test_a_mask_token_that_is_not_in_the_vocabulary_counts_as_not_given(tmp_path):
    write(
        tmp_path,
        tokenizer={"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "<MASK>"}]},
        tokenizer_config={"mask_token": "<|MASK|>"},
    )
    assert read_facts(tmp_path) == TokenizerFacts(num_tokens=2, mask_token="<|MASK|>")


def test_tokenizer_facts_of_a_unigram_model(tmp_path):
    write(tmp_path, tokenizer={"model": {"vocab": [["a", -1.0], ["b", -2.0]]}})
    assert read_facts(tmp_path).num_tokens == 2


def test_no_tokenizer_no_facts(tmp_path):
    write(tmp_path, tokenizer_config={"mask_token": "<MASK>"})
    assert read_facts(tmp_path) == TokenizerFacts()


# Whatever JSON a tokenizer's files hold; test_family_configs.py has that of configs.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(-2, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(["model", "added_tokens"]), JSON),
    st.dictionaries(st.sampled_from(["mask_token", "eos_token", "added_tokens_decoder"]), JSON),
)
def test_any_tokenizer_file_is_read_or_refused(tmp_path, tokenizer, settings):
    write(tmp_path, tokenizer=tokenizer, tokenizer_config=settings)
    with contextlib.suppress(ValueError):
        read_facts(tmp_path)
