"""A LoRA adapter changes the weights by `scale * B @ A`, or is refused by name.

The expected weights are a checkpoint that NumPy changed in float64 and wrote, read without the
adapter. Then PEFT's spellings, scales and patterns, the strategy of D2F adapters, what a converted
folder remembers, and each adapter that must not be merged.
"""

import json
import math
import re
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dllm_jax.convert import ConversionError, convert, inspect, load_params
from tests.convert.test_convert import assert_same
from tests.golden.folders import read_tensors, write_tensors
from tests.oracles.checkpoints import write_adapter, write_tiny

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
Q0 = "model.layers.0.self_attn.q_proj"
V1 = "model.layers.1.self_attn.v_proj"


@pytest.fixture(scope="module")
def dream(tmp_path_factory):
    """A base that no test changes."""
    return write_tiny("dream", tmp_path_factory.mktemp("lora") / "base")


def edit(adapter, tensors=None, **config):
    """Change an adapter's tensors by a function, and entries of its config; `...` removes one."""
    if tensors is not None:
        values = load_file(adapter / WEIGHTS)
        tensors(values)
        save_file({n: np.array(t, order="C") for n, t in values.items()}, adapter / WEIGHTS)
    said = {**json.loads((adapter / CONFIG).read_text()), **config}
    (adapter / CONFIG).write_text(json.dumps({k: v for k, v in said.items() if v is not ...}))


def merged_by_numpy(base, adapter, to, scale_of):
    """The base with each matrix W replaced by W + scale * B A, in float64, stored in float32."""
    tensors, factors = read_tensors(base), load_file(adapter / WEIGHTS)
    changed = set()
    for name, down in factors.items():
        if "lora_A" in name:
            module = name.split(".lora_A")[0].removeprefix(PREFIX)
            up = factors[name.replace("lora_A", "lora_B")].astype(np.float64)
            whole = tensors[f"{module}.weight"].astype(np.float64) + scale_of(module) * up @ down
            tensors[f"{module}.weight"] = whole.astype(np.float32)
            changed.add(module)
    shutil.copytree(base, to)
    write_tensors(to, tensors)
    return to, changed


def assert_close(tree, expected, bits):
    """Equal but for the last place of values with `bits` bits of fraction."""
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape)
        a, b = leaf.astype(np.float64), other.astype(np.float64)
        assert (np.abs(a - b) <= 2.0**-bits * np.abs(b) + 1e-6).all()


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 20), ("bfloat16", 7)])
@pytest.mark.parametrize("family", ["dream", "llada", "sdar", "fast_dllm_v2"])
def test_merged_weights_are_the_base_and_the_product(family, dtype, bits, tmp_path):
    base = write_tiny(family, tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter", r=4, alpha=12)
    whole, changed = merged_by_numpy(base, adapter, tmp_path / "whole", lambda _: 12 / 4)
    assert len(changed) == 12  # four matrices of each of three layers
    merged, _ = load_params(base, dtype, lora=adapter)
    expected, _ = load_params(whole, dtype)
    assert_close(merged, expected, bits)
    plain, _ = load_params(base, dtype)
    for layer, before in zip(merged["layers"], plain["layers"], strict=True):
        differ = {name for name in layer if (layer[name] != before[name]).any()}
        assert differ == {"wqkv", "wo"}


def test_a_bfloat16_base_is_rounded_once(tmp_path):
    base = write_tiny("dream", tmp_path / "base", dtype="bfloat16")
    adapter = write_adapter(base, tmp_path / "adapter")
    exact, _ = load_params(base, "float32", lora=adapter)
    rounded, _ = load_params(base, lora=adapter)
    assert_same(rounded, jax.tree.map(lambda leaf: leaf.astype("bfloat16"), exact))


def test_a_fused_projection_and_a_head_take_an_adapter(tmp_path):
    base = write_tiny("llada2", tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter")
    rng = np.random.default_rng(0)
    modules = ("model.layers.1.attention.query_key_value", "lm_head", "model.layers.2.mlp.gate")
    factors = {}
    for module in modules:
        rows, columns = read_tensors(base)[f"{module}.weight"].shape
        factors[f"{PREFIX}{module}.lora_A.weight"] = rng.standard_normal((4, columns), np.float32)
        factors[f"{PREFIX}{module}.lora_B.weight"] = rng.standard_normal((rows, 4), np.float32)
    save_file(factors, adapter / WEIGHTS)
    whole, changed = merged_by_numpy(base, adapter, tmp_path / "whole", lambda _: 8 / 4)
    assert changed == set(modules)
    assert_close(load_params(base, lora=adapter)[0], load_params(whole)[0], 18)


def test_a_piece_boundary_inside_a_matrix_changes_nothing(dream, tmp_path, monkeypatch):
    adapter = write_adapter(dream, tmp_path / "adapter")
    whole, _ = load_params(dream, lora=adapter)
    monkeypatch.setattr("dllm_jax.convert.copying._PIECE_BYTES", 300)
    assert_close(load_params(dream, lora=adapter)[0], whole, 20)


@pytest.mark.parametrize(
    ("leaf", "prefix", "config"),
    [
        (".default.weight", PREFIX, {}),
        ("", PREFIX, {}),
        (".weight", "", {}),
        (".default.weight", "", {"target_modules": "all-linear"}),
        (".weight", PREFIX, {"target_modules": ".*_proj"}),
        (".weight", PREFIX, {"rank_pattern": ..., "alpha_pattern": ..., "modules_to_save": []}),
    ],
)
def test_spellings_mean_the_same(leaf, prefix, config, dream, tmp_path):
    adapter = write_adapter(dream, tmp_path / "adapter")
    plain, _ = load_params(dream, lora=adapter)

    def spell(values):
        for name in list(values):
            module = name.removeprefix(PREFIX).removesuffix(".weight")
            values[f"{prefix}{module}{leaf}"] = values.pop(name)

    edit(adapter, spell, **config)
    assert_same(load_params(dream, lora=adapter)[0], plain)


def test_rslora_divides_by_the_root_of_the_rank(dream, tmp_path):
    adapter = write_adapter(dream, tmp_path / "adapter", r=4, alpha=12, use_rslora=True)
    whole, _ = merged_by_numpy(dream, adapter, tmp_path / "whole", lambda _: 12 / math.sqrt(4))
    assert_close(load_params(dream, lora=adapter)[0], load_params(whole)[0], 20)


def test_patterns_give_modules_their_own_rank_and_alpha(dream, tmp_path):
    adapter = write_adapter(dream, tmp_path / "adapter", r=4, alpha=8)

    def widen(values):
        for name in list(values):
            if "layers.1.self_attn.q_proj" in name:
                values[name] = np.repeat(values[name], 2, axis=0 if "lora_A" in name else 1)

    edit(
        adapter,
        widen,
        rank_pattern={r"layers\.1\.self_attn\.q_proj": 8},
        alpha_pattern={"v_proj": 2, r"layers\.2\.self_attn\.(q|k)_proj": 32, "q_proj": 16},
    )

    def scale_of(module):
        which, layer = module[-6:], int(re.search(r"\d+", module)[0])
        if which == "v_proj":
            return 2 / 4
        if layer == 2 and which in ("q_proj", "k_proj"):
            return 32 / 4
        return 16 / (8 if layer == 1 else 4) if which == "q_proj" else 8 / 4

    whole, _ = merged_by_numpy(dream, adapter, tmp_path / "whole", scale_of)
    assert_close(load_params(dream, lora=adapter)[0], load_params(whole)[0], 20)


def test_fan_in_fan_out_adds_the_transposed_product(dream, tmp_path):
    base = write_tiny("sdar", tmp_path / "base")  # 96 x 40: a transposed product does not fit
    adapter = write_adapter(base, tmp_path / "adapter")
    plain, _ = load_params(base, lora=adapter)

    def swap(values):
        for name in [name for name in values if "lora_A" in name]:
            other = name.replace("lora_A", "lora_B")
            values[name], values[other] = values[other].T, values[name].T

    edit(adapter, swap, fan_in_fan_out=True)
    assert_close(load_params(base, lora=adapter)[0], plain, 20)


def test_a_d2f_adapter_changes_how_the_base_is_decoded(dream, tmp_path):
    before = inspect(dream).defaults
    report = inspect(dream, lora=write_adapter(dream, tmp_path / "D2F_Dream"))
    assert before.strategy != "d2f"
    after = report.defaults
    assert (after.strategy, after.attention, after.block_size) == ("d2f", "d2f", 32)
    assert after.stop_token_ids == before.stop_token_ids
    assert not any("taken for" in note for note in report.notes)
    other = inspect(dream, lora=write_adapter(dream, tmp_path / "mine"))
    assert any("taken for one of D2F" in note for note in other.notes) == (
        "d2f" not in str(tmp_path).lower()
    )


def test_an_adapter_on_a_block_causal_model_changes_no_default(tmp_path):
    base = write_tiny("sdar", tmp_path / "base")
    report = inspect(base, lora=write_adapter(base, tmp_path / "adapter"))
    assert report.defaults == inspect(base).defaults


@pytest.mark.parametrize(
    ("trained_on", "noted"),
    [("Org/Base-7B", True), ("org/base", False), ("/models/BASE/", False), ("", False)],
)
def test_another_base_is_noted(trained_on, noted, dream, tmp_path):
    adapter = write_adapter(dream, tmp_path / "adapter", base_model_name_or_path=trained_on)
    notes = [n for n in inspect(dream, lora=adapter).notes if "was trained on" in n]
    expected = [f"the adapter was trained on {trained_on} and goes into base"]
    assert notes == (expected if noted else [])


def test_a_converted_folder_remembers_its_adapter(dream, tmp_path):
    adapter = write_adapter(dream, tmp_path / "adapter", r=4, alpha=12)
    direct, report = load_params(dream, lora=adapter)
    folder = convert(dream, tmp_path / "converted", "float32", lora=adapter)
    back, again = load_params(folder)
    assert_same(back, direct)
    assert again.defaults == report.defaults
    assert (again.adapter.rank, again.adapter.alpha) == (4, 12)
    assert f"adapter     {adapter} (r=4, alpha=12)" in str(again)
    digest = json.loads((folder / "meta.json").read_text())["adapter"]["digest"]
    assert re.fullmatch("[0-9a-f]{64}", digest)
    with pytest.raises(ConversionError, match=f"converted folder, and {adapter} is merged into"):
        load_params(folder, lora=adapter)
    with pytest.raises(ConversionError, match="give the Hugging Face folder of the base"):
        convert(folder, tmp_path / "twice", lora=adapter)


def test_b9_entries_of_an_adapter_that_change_nothing_are_listed(dream, tmp_path):
    adapter = write_adapter(dream, tmp_path / "adapter")
    starts = (True, False, None, "gaussian", "eva", "orthogonal")
    for start in starts:
        edit(adapter, init_lora_weights=start, trained_by="us", use_kasa=False, eva_config={"r": 1})
        report = inspect(dream, lora=adapter)
        assert report.problems == ()
        assert f"entries of {CONFIG} that are not read: trained_by" in report.notes


def drop(pattern):
    return lambda values: [values.pop(n) for n in list(values) if re.search(pattern, n)]


def put(name, change):
    return lambda values: values.update({name: change(values[name])})


A0, B0 = f"{PREFIX}{Q0}.lora_A.weight", f"{PREFIX}{Q0}.lora_B.weight"
A1 = f"{PREFIX}{V1}.lora_A.weight"
ONE = np.ones((4, 4), np.float32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "use_dora=True is not supported: DoRA also scales"),
        ({"bias": "lora_only"}, "bias='lora_only' is not supported; only \"none\" is"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head'] is not supported"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not supported; only \"LORA\" is"),
        ({"peft_type": ...}, "peft_type=None is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "the base was changed as well"),
        *(
            ({"init_lora_weights": one}, f"init_lora_weights={one!r} is not supported: the base")
            for one in ("lora_ga", "olora", "corda", "loftq", "a later one")
        ),
        ({"peft_type": "LORAGA"}, "peft_type='LORAGA' is not supported"),
        ({"use_qalora": True}, "use_qalora=True is not supported: its inputs are pooled"),
        ({"use_kasa": True}, "use_kasa=True is not known and may change the product"),
        ({"monteclora_config": {"n": 2}}, "monteclora_config={'n': 2} is not known and may change"),
        ({"layer_replication": [[0, 2]]}, "layer_replication=[[0, 2]] is not supported"),
        ({"r": 0}, "r=0 must be a positive number"),
        ({"lora_alpha": "8"}, "lora_alpha='8' must be a positive number"),
        ({"lora_alpha": ...}, "lora_alpha=None must be a positive number"),
        ({"r": 8}, f"{Q0}.lora_A has rank 4 but {CONFIG} says 8"),
        ({"rank_pattern": {"q_proj": 2}}, f"{Q0}.lora_A has rank 4 but {CONFIG} says 2"),
        ({"alpha_pattern": {"(": 2}}, "alpha_pattern: '(' is no regular expression"),
        ({"alpha_pattern": {"q_proj": None}}, f"alpha of {Q0} is None; it must be a number"),
        ({"tensors": drop(r"q_proj\.lora_A")}, f"missing: {Q0}.lora_A, model.layers.1"),
        ({"tensors": drop(r"layers\.1\.self_attn\.v_proj\.lora_B")}, f"missing: {V1}.lora_B"),
        ({"tensors": drop("")}, f"{WEIGHTS} holds no tensor"),
        (
            {"tensors": lambda v: v.update({B0: v[B0][:8]})},
            f"{Q0}: the product is [8, 48] but the matrix [48, 48]; give the base model",
        ),
        (
            {"tensors": lambda v: v.update({A0: v[A0].T})},
            f"{Q0}: lora_A [48, 4] and lora_B [48, 4] must share a rank",
        ),
        ({"tensors": put(A0, np.ravel)}, f"{Q0}: lora_A [192] and lora_B [48, 4] must share"),
        ({"fan_in_fan_out": True}, "the product is [48, 16] but the matrix [16, 48]"),
        (
            {"tensors": lambda v: v.update({f"{PREFIX}model.layers.9.x.lora_A.weight": ONE})},
            "missing: model.layers.9.x.lora_B",
        ),
        (
            {
                "tensors": lambda v: v.update(
                    {f"{PREFIX}model.layers.9.x.lora_{s}.weight": ONE for s in "AB"}
                )
            },
            "it changes matrices that the checkpoint has not: model.layers.9.x; give the base",
        ),
        (
            {"tensors": lambda v: v.update({f"{PREFIX}model.embed_tokens.lora_embedding_A": ONE})},
            "it changes the embedding, which is not supported: base_model.model.model.embed",
        ),
        (
            {"tensors": lambda v: v.update({f"{PREFIX}{Q0}.lora_magnitude_vector": ONE})},
            "tensors that are neither lora_A nor lora_B: ",
        ),
        (
            {"tensors": lambda v: v.update({f"{Q0}.lora_A.default.weight": v[A0]})},
            f"{Q0}.lora_A is stored twice",
        ),
        ({"tensors": put(A0, lambda x: x.astype(np.int32))}, f"{A0} has type I32; use BF16, F16"),
    ],
)
def test_adapters_that_cannot_be_merged_are_named(change, words, dream, tmp_path):
    adapter = write_adapter(dream, tmp_path / "adapter")
    edit(adapter, **change)
    report = inspect(dream, lora=adapter)
    assert any(words in problem for problem in report.problems), report.problems
    assert all(problem.startswith(f"adapter {adapter}: ") for problem in report.problems)
    for load in (
        lambda: load_params(dream, lora=adapter),
        lambda: convert(dream, tmp_path / "converted", lora=adapter),
    ):
        with pytest.raises(ConversionError):
            load()
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_adapter_that_holds_no_numbers_is_refused(value, dream, tmp_path):
    adapter = write_adapter(dream, tmp_path / "adapter")
    edit(adapter, lambda values: values[A1].__setitem__((0, 0), value))
    with pytest.raises(ConversionError, match=rf"{WEIGHTS}: lora_A or lora_B holds NaN or Inf"):
        load_params(dream, lora=adapter)


def test_a_sum_too_large_for_float16_is_refused(dream, tmp_path):
    adapter = write_adapter(dream, tmp_path / "adapter", alpha=1e6)
    with pytest.raises(ConversionError, match=f"{Q0}.weight does not fit float16; use bfloat16"):
        load_params(dream, "float16", lora=adapter)


def test_an_adapter_of_another_family_finds_nothing(dream, tmp_path):
    llada = write_tiny("llada", tmp_path / "llada")
    adapter = write_adapter(llada, tmp_path / "adapter")
    report = inspect(dream, lora=adapter)
    assert len(report.problems) == 1
    assert "model.transformer.blocks.0.q_proj" in report.problems[0]
    assert " and 2 more; give the base model" in report.problems[0]


def test_an_adapter_beside_the_weights_is_not_read(tmp_path):
    base = write_tiny("dream", tmp_path / "base")
    plain, _ = load_params(base)
    write_adapter(base, base)
    params, report = load_params(base)
    assert_same(params, plain)
    assert report.notes[-1] == f"{WEIGHTS} is not read; give its folder as lora (--lora)"
    merged, _ = load_params(base, lora=base)
    assert (merged["layers"][0]["wo"] != plain["layers"][0]["wo"]).any()


def test_a_tied_head_takes_no_adapter(tmp_path):
    base = write_tiny("fast_dllm_v2", tmp_path / "base", tie_word_embeddings=True)
    tensors = read_tensors(base)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_tensors(base, tensors)
    adapter = write_adapter(base, tmp_path / "adapter")
    edit(adapter, lambda v: v.update({f"{PREFIX}lm_head.lora_{s}.weight": ONE for s in "AB"}))
    [problem] = inspect(base, lora=adapter).problems
    assert "it changes matrices that the checkpoint has not: lm_head" in problem


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda a: (a / CONFIG).unlink(), f"no {CONFIG} there; give the folder of a PEFT adapter"),
        (lambda a: (a / WEIGHTS).unlink(), f"no {WEIGHTS} there; other formats are not read"),
        (lambda a: (a / CONFIG).write_text("{"), f"{CONFIG} is not valid JSON"),
        (lambda a: (a / WEIGHTS).write_bytes(b""), f"{WEIGHTS} is empty (0 bytes)"),
        (lambda a: (a / WEIGHTS).write_bytes(b"x" * 100), "truncated or no safetensors file"),
    ],
)
def test_damaged_adapters_are_named(spoil, words, dream, tmp_path):
    adapter = write_adapter(dream, tmp_path / "adapter")
    spoil(adapter)
    [problem] = inspect(dream, lora=adapter).problems
    assert words in problem
    with pytest.raises(ConversionError, match="adapter "):
        load_params(dream, lora=adapter)
