"""`dj.load` takes every kind of source, and says in one line what is wrong with a bad one.

Folders, converted folders, random weights, dtypes, static equality of models (two loads, one
trace), tokenizers without a line of the folder's code run, and each error by its words. Hub ids and
adapters from there: test_hub.py.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.convert import ConversionError, convert, export_hf
from dllm_jax.loading import checkpoints, leaves
from dllm_jax.loading.leaves import _draw
from dllm_jax.loading.load import LoadError, load
from dllm_jax.models.architecture import DENSE, MOE
from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.moe import MoEConfig
from dllm_jax.models.published import PUBLISHED
from tests.golden.folders import GOLDEN, copy_golden, edit_config

TINY = DenseConfig(
    vocab_size=300,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=24,
    max_position=64,
    mask_token_id=257,
)
SETTINGS = {"strategy": "multi_bd", "block_size": 32, "buffer_size": 4, "accept_threshold": 0.9}
BAIT = 'open({path!r}, "w").write("run")\nclass SDARForCausalLM: pass\nclass Tok: pass\n'


def write_tokenizer(folder):
    """A byte-level tokenizer of 259 tokens, with files that ask for code of the folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<MASK>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "SDARTokenizer",
        "auto_map": {"AutoTokenizer": ["bait.Tok", None]},
        "mask_token": "<MASK>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "extra_special_tokens": ["<|im_end|>"],
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture
def folder(tmp_path):
    """An exported model with a tokenizer, our own settings, and code that must never run."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype), DENSE.param_shapes(TINY)
    )
    extra = {"auto_map": {"AutoModelForCausalLM": "bait.SDARForCausalLM"}, "dllm_jax": SETTINGS}
    to = export_hf(params, TINY, tmp_path / "tiny", extra_config=extra)
    write_tokenizer(to)
    (to / "bait.py").write_text(BAIT.format(path=str(to / "ran")))
    return to


@pytest.mark.versions
def test_a_folder_loads_whole(folder):
    model = dj.load(folder)
    assert model.config == TINY
    assert model.arch is DENSE
    assert model.source == str(folder)
    defaults = model.defaults
    assert (defaults.strategy, defaults.block_size, defaults.buffer_size) == ("multi_bd", 32, 4)
    assert (defaults.stop_token_ids, defaults.pad_token_id) == ((258,), 256)
    assert defaults.vocab_limit == 259


def test_the_tokenizer_is_the_folders_and_no_code_runs(folder):
    model = dj.load(folder)
    tokenizer = model.tokenizer
    ids = tokenizer.encode("hé <MASK>")
    assert ids[-1] == TINY.mask_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hé "
    assert tokenizer.eos_token_id == 258
    chat = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hello"
    assert model.tokenizer is tokenizer
    assert not (folder / "ran").exists()


def test_another_tokenizer_spells_the_ids(folder, small_published, tmp_path, monkeypatch):
    usual = dj.load(folder)
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "tokenizer.json").unlink()
    assert dj.load(bare).tokenizer is None
    model = dj.load(bare, tokenizer=folder)
    assert model.tokenizer.encode("hé <MASK>") == usual.tokenizer.encode("hé <MASK>")
    assert model.defaults.vocab_limit == usual.defaults.vocab_limit
    # Before weights are read or drawn, which may take minutes.
    monkeypatch.setattr(checkpoints, "read_params", lambda *_, **__: pytest.fail("read"))
    monkeypatch.setattr("dllm_jax.loading.load.random_leaf", lambda *_: pytest.fail("drawn"))
    for source in (folder, small_published):
        with pytest.raises(ValueError, match=r"has id \d+, .* has ids below \d+"):
            dj.load(source, tokenizer="builtin:tiny-sdar")


def test_a_broken_tokenizer_is_named(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["type"] = "Nonsense"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    model = dj.load(folder)
    with pytest.raises(ValueError, match=r"tokenizer cannot be read .*download its files again"):
        _ = model.tokenizer


def test_a_converted_folder_is_the_same_model(folder, tmp_path):
    direct = dj.load(folder)
    converted = dj.load(convert(folder, tmp_path / "converted"))
    assert converted.config == direct.config
    assert converted.defaults == direct.defaults
    assert converted.tokenizer_source == direct.tokenizer_source
    assert converted.tokenizer.encode("a<MASK>") == direct.tokenizer.encode("a<MASK>")
    jax.tree.map(np.testing.assert_array_equal, converted.params, direct.params)


# Types of the weights.


def dtypes(model):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(model.params)}


def test_auto_is_float32_on_the_cpu():
    assert jax.default_backend() == "cpu"
    assert dtypes(load(GOLDEN / "sdar")) == {"float32"}


def test_auto_is_the_checkpoints_type_on_an_accelerator(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert dtypes(load(GOLDEN / "sdar")) == {"bfloat16"}
    assert dtypes(load(GOLDEN / "qwen3")) == {"float32"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_stated_type_is_taken(dtype):
    assert dtypes(load(GOLDEN / "qwen3", dtype=dtype)) == {dtype}


# A model is one argument of a jit.


@pytest.mark.versions
def test_two_loads_trace_once(folder):
    traces = []

    @jax.jit
    def mean(model, ids):
        traces.append(model.source)
        return model.logits(ids, "full").mean()

    ids = jnp.arange(6)[None]
    first, second = dj.load(folder), dj.load(folder)
    assert float(mean(first, ids)) == float(mean(second, ids))
    assert len(traces) == 1


@pytest.mark.versions
def test_another_config_traces_again(folder, tmp_path):
    traces = []

    @jax.jit
    def count(model):
        traces.append(model.config.rope_theta)
        return model.params["final_norm"].sum()

    count(dj.load(folder))
    edit_config(folder, rope_theta=5.0)
    count(dj.load(folder))
    assert traces == [1e6, 5.0]


def test_logits_check_their_arguments():
    model = load(GOLDEN / "sdar")
    with pytest.raises(ValueError, match=r'attention=\'sparse\' is not one of "full", "block_ca'):
        model.logits(np.zeros((1, 3), np.int32), "sparse")
    with pytest.raises(ValueError, match=r"block_size=0 must be at least 1"):
        model.logits(np.zeros((1, 3), np.int32), block_size=0)


# Random weights of published configs.


@pytest.fixture
def small_published(monkeypatch):
    """A published config in place of gigabytes."""
    from dllm_jax.models.families import config_json

    config = {**config_json("sdar", TINY), "eos_token_id": 258}
    monkeypatch.setitem(PUBLISHED, "JetLM/SDAR-Tiny-b8", config)
    return "random:JetLM/SDAR-Tiny-b8"


@pytest.mark.versions
@pytest.mark.parametrize(("dtype", "found"), [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_random_weights_have_the_published_form(small_published, dtype, found):
    model = load(small_published, dtype=dtype)
    assert (model.config, model.tokenizer) == (TINY, None)
    assert model.defaults.block_size == 8
    shapes = DENSE.param_shapes(TINY, found)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), model.params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), shapes
    )


@pytest.mark.versions
def test_random_weights_are_random(small_published):
    params = load(small_published).params
    for name in ("embed", "lm_head"):
        assert 0.019 < float(params[name].std()) < 0.021
        assert abs(float(params[name].mean())) < 0.002
    assert float(params["final_norm"].min()) == float(params["final_norm"].max()) == 1
    leaves = [np.ravel(leaf)[:8] for leaf in jax.tree.leaves(params) if leaf.ndim > 1]
    assert len({leaf.tobytes() for leaf in leaves}) == len(leaves)
    again = load(small_published).params
    jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.versions
def test_random_weights_take_a_program_a_drawn_shape_and_no_other(compilations, small_published):
    _draw.clear_cache()
    params = load(small_published).params
    shapes = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim > 1}
    assert len(compilations) == len(shapes)
    assert all("_draw" in name for name in compilations)


@pytest.mark.versions
def test_read_weights_take_no_program_and_a_cpu_none_of_the_memory_they_were_read_into(
    compilations, monkeypatch, folder
):
    given, read = [], checkpoints.read_params

    def aligned(leaf):
        """As a CPU of JAX takes it without a copy."""
        memory = np.zeros(leaf.nbytes + 64, np.uint8)
        first = -memory.ctypes.data % 64
        given.append(memory[first : first + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape))
        given[-1][...] = leaf
        return given[-1]

    def read_params(*args, keep, **kwargs):
        return read(*args, keep=lambda path, leaf: keep(path, aligned(leaf)), **kwargs)

    monkeypatch.setattr(checkpoints, "read_params", read_params)
    leaves = jax.tree.leaves(load(folder).params)
    assert compilations == []
    for leaf, was_given in zip(leaves, given, strict=True):
        kept = was_given.copy()
        was_given[...] = 7
        np.testing.assert_array_equal(leaf, kept)


def test_a_leaf_read_as_it_is_stored_has_its_axes_in_order_on_the_device(folder, monkeypatch):
    plain, read, orders = load(folder), checkpoints.read_params, []

    def read_params(*args, keep, as_stored, **kwargs):
        def seen(path, leaf):
            orders.append(leaf.flags.c_contiguous)
            return keep(path, leaf)

        return read(*args, keep=seen, as_stored=True, **kwargs)

    monkeypatch.setattr(checkpoints, "read_params", read_params)
    again = load(folder)
    assert not all(orders)
    jax.tree.map(np.testing.assert_array_equal, again.params, plain.params)


def test_a_leaf_is_on_the_device_before_the_next_is_put_there(folder, monkeypatch):
    events, put, wait = [], leaves._put, jax.block_until_ready

    def waited(given):
        events.extend(("there", id(leaf)) for leaf in given)
        return wait(given)

    def putting(leaf):
        there = put(leaf)
        events.append(("put", id(there)))
        return there

    monkeypatch.setattr(leaves, "_put", putting)
    monkeypatch.setattr(jax, "block_until_ready", waited)
    model = load(folder)
    names, ids = zip(*events, strict=True)
    count = len(jax.tree.leaves(model.params))
    assert names == ("put", "there") * (count - 1) + ("put",)
    assert ids[:-1:2] == ids[1::2]


@pytest.mark.long
def test_only_norms_are_ones_and_float32_stays(monkeypatch, small_published):
    config = MoEConfig(
        **dataclasses.asdict(TINY) | {"num_layers": 1, "qkv_bias": True, "o_bias": True},
        num_experts=40,
        experts_per_token=2,
        expert_size=8,
        moe_layers=(True,),
        expert_bias=True,
    )
    parsed = types.SimpleNamespace(config=config, defaults=None)
    monkeypatch.setattr("dllm_jax.loading.load.parse_config", lambda *args, **kwargs: parsed)
    model = load(small_published, dtype="bfloat16")
    assert model.arch is MOE
    leaves = {path[-1].key: leaf for path, leaf in jax.tree.leaves_with_path(model.params)}
    for name, leaf in leaves.items():
        is_norm = name.endswith("norm")
        assert bool((leaf == 1).all()) == is_norm, name
        assert is_norm or 0.01 < float(jnp.std(leaf.astype(jnp.float32))) < 0.03, name
    assert {name for name, leaf in leaves.items() if leaf.dtype != jnp.bfloat16} == {"router_bias"}
    assert {"bqkv", "bo", "router_bias", "experts_down", "q_norm"} <= {*leaves}


@pytest.mark.versions
def test_a_large_leaf_is_drawn_in_parts(monkeypatch):
    monkeypatch.setattr("dllm_jax.loading.leaves._DRAW", 1000)
    for shape in ((30, 20, 10), (7, 3000), (1, 5000)):  # 6 parts, a row each, no way to cut
        leaf = _draw(np.int32(3), shape, jnp.dtype("bfloat16"))
        assert (leaf.shape, leaf.dtype) == (shape, jnp.bfloat16)
        assert len(np.unique(np.asarray(leaf, np.float32), axis=0)) == shape[0]
        assert 0.019 < float(jnp.std(leaf.astype(jnp.float32))) < 0.021
    lowered = _draw.lower(np.int32(3), (30, 20, 10), jnp.dtype("bfloat16")).as_text()
    assert "tensor<5x20x10xf32>" in lowered
    assert "tensor<30x20x10xf32>" not in lowered


# Errors: one line each.


@pytest.mark.versions("4B|kwargs3")
@pytest.mark.parametrize(
    ("source", "kwargs", "words"),
    [
        ("no-such-model", {}, "model 'no-such-model' does not exist; give a folder with config"),
        ("/no/such/folder", {}, "model '/no/such/folder' does not exist; give a folder"),
        (
            "builtin:nothing",
            {},
            "no built-in model; known are tiny-qwen3, tiny-qwen3-dflash, tiny-sd",
        ),
        ("random:nothing", {}, "'random:nothing' is no published config; known are ByteDance"),
        ("x", {"dtype": "int4"}, "dtype='int4' is not supported; use one of auto, bfloat16"),
        ("x", {"lora": "adapter"}, "lora='adapter' is no folder; give the folder"),
        ("x", {"revision": "v1"}, "revision='v1' applies to hub ids only, not to 'x'"),
        ("random:JetLM/SDAR-4B-Chat", {"revision": "v1"}, "revision='v1': the weights of 'random:"),
        ("random:JetLM/SDAR-4B-Chat", {"lora": "org/x"}, "lora='org/x': the weights of 'random:Je"),
    ],
)
def test_bad_sources_are_named(source, kwargs, words):
    with pytest.raises(LoadError) as caught:
        load(source, **kwargs)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(LoadError, match=r"weights\.bin' is a file; give a folder"):
        load(tmp_path / "weights.bin")


def test_a_folder_without_config_is_named(tmp_path):
    with pytest.raises(ConversionError, match=r"no config\.json in the folder; give the folder of"):
        load(tmp_path)


def test_a_corrupt_shard_is_named(tmp_path):
    folder = copy_golden("sdar", tmp_path / "model")
    shard = folder / "others.safetensors"
    shard.write_bytes(shard.read_bytes()[:4000])
    with pytest.raises(ConversionError, match=r"others\.safetensors is truncated or corrupt .*; d"):
        load(folder)


def test_notes_reach_the_user_as_warnings(tmp_path):
    folder = copy_golden("sdar", tmp_path / "model")
    edit_config(folder, eos_token_id=[91, 4000])
    with pytest.warns(UserWarning, match=r"model: eos_token_id=4000 lies outside the vocabulary"):
        load(folder)


@pytest.mark.long
def test_a_model_is_loaded_and_an_engine_imported_without_what_takes_long_to_import(folder):
    program = (
        "import sys, dllm_jax as dj; m = dj.load(sys.argv[1]); dj.LLM; "
        "slow = {'transformers', 'orbax', 'huggingface_hub', 'torch', 'jinja2', 'optax', "
        "'matplotlib', 'PIL', 'pandas', 'scipy', 'safetensors.torch', 'IPython'}; "
        "print(sorted(slow & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, str(folder)]
    assert subprocess.check_output(command, text=True).strip() == "[]"
