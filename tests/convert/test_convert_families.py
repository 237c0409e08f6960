"""Every family's tensors arrive bit for bit, however they are stored.

That each leaf is where the network reads it is what test_family_logits.py proves.
"""

import dataclasses
import json
import math
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dllm_jax.convert import ConversionError, convert, export_hf, inspect, load_params, plan
from dllm_jax.convert.rules import Part, Placement, placements
from dllm_jax.convert.tensor_names import table_of
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.families import parse_config
from dllm_jax.models.published import PUBLISHED
from tests.convert.accounting import unaccounted
from tests.convert.test_convert import assert_same
from tests.golden.folders import edit_config, read_tensors, write_tensors
from tests.oracles.checkpoints import tensor_shapes, write_tiny
from tests.oracles.tiny_configs import CONFIGS

FAMILIES = sorted(CONFIGS)
ROWS = CONFIGS["llada"]["embedding_size"]
ROUTED = ["sdar_moe", "qwen3_moe", "llada2", "llada2_2"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Tiny folders by what they were written with, each written once; not to be changed."""
    made = {}

    def write(family, **options):
        key = json.dumps([family, options], sort_keys=True)
        if key not in made:
            made[key] = write_tiny(family, tmp_path_factory.mktemp(family) / "model", **options)
        return made[key]

    return write


@pytest.mark.parametrize("family", FAMILIES)
def test_leaves_as_they_are_stored_are_the_same(family, tiny):
    """Their parts lie in memory as in the file. Which they are, logits say (test_family_logits)."""
    params, report = load_params(tiny(family))
    assert report.is_ok

    def keep(path, leaf):
        stored = [one.part.view(leaf) for one in report.placements if one.path == path]
        assert all(one.strides[-1] == one.itemsize for one in stored), path
        return leaf

    assert_same(load_params(tiny(family), keep=keep, as_stored=True)[0], params)


@pytest.mark.parametrize("shards", ["round_robin", "layers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shards_change_nothing(family, shards, tiny):
    folder = tiny(family, shards=shards)
    assert len(list(folder.glob("*.safetensors"))) >= 3
    assert_same(load_params(folder)[0], load_params(tiny(family))[0])


@pytest.mark.parametrize("experts", ["merged", "packed"])
@pytest.mark.parametrize("shards", [None, "round_robin"])
@pytest.mark.parametrize("family", ROUTED)
def test_layouts_of_experts_give_the_same(family, shards, experts, tiny):
    folder = tiny(family, experts=experts, shards=shards)
    assert not any(re.search(r"experts\.\d", name) for name in read_tensors(folder))
    assert_same(load_params(folder)[0], load_params(tiny(family))[0])


def test_the_other_name_of_the_experts_bias_is_read(tmp_path, tiny):
    folder = write_tiny("llada2", tmp_path / "model")
    tensors = read_tensors(folder)
    renamed = {n.replace("expert_bias", "e_score_correction_bias"): t for n, t in tensors.items()}
    assert renamed.keys() != tensors.keys()
    write_tensors(folder, renamed)
    assert_same(load_params(folder)[0], load_params(tiny("llada2"))[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_experts_bias_is_float32_whatever_the_type(dtype, tiny, tmp_path):
    exact = load_params(tiny("llada2"), "float32")[0]
    for source in (tiny("llada2"), convert(tiny("llada2"), tmp_path / "converted", "float32")):
        params, _ = load_params(source, dtype)
        for layer, wanted in zip(params["layers"][1:], exact["layers"][1:], strict=True):
            assert layer["router_bias"].dtype == np.float32
            assert layer["router"].dtype == np.dtype(dtype)
            assert layer["router_bias"].tobytes() == wanted["router_bias"].tobytes()
    rounded = tiny("llada2", bias_dtype="bfloat16")
    stored = read_tensors(rounded)["model.layers.1.mlp.gate.expert_bias"]
    assert stored.dtype == ml_dtypes.bfloat16
    bias = load_params(rounded, dtype)[0]["layers"][1]["router_bias"]
    assert bias.tobytes() == stored.astype(np.float32).tobytes()


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((f, "bfloat16") for f in FAMILIES), ("llada2", "auto"), ("sdar", "float16")],
)
def test_converted_folder_restores_bit_for_bit(family, dtype, tiny, tmp_path):
    direct, report = load_params(tiny(family), dtype)
    folder = convert(tiny(family), tmp_path / "converted", dtype)
    back, again = load_params(folder)
    assert_same(back, direct)
    assert again.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(direct))
    assert (again.kind, again.family, again.config, again.defaults) == (
        "converted",
        report.family,
        report.config,
        report.defaults,
    )
    cast = jax.tree.map(lambda leaf: leaf.astype("float32"), direct)
    assert_same(load_params(folder, "float32")[0], cast)


@pytest.mark.parametrize("family", FAMILIES)
def test_export_writes_back_what_was_read(family, tiny, tmp_path):
    source = tiny(family, dtype="bfloat16")
    params, report = load_params(source)
    folder = export_hf(params, report.config, tmp_path, family=report.family)
    ours, theirs = read_tensors(folder), read_tensors(source)
    assert sorted(ours) == sorted(theirs)
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert ours[name].tobytes() == tensor.tobytes(), name
    back, again = load_params(folder)
    assert again.config == report.config
    assert_same(back, params)


# Full size, by shapes alone.


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("value", [False, True])
def test_every_element_is_filled_once_with_and_without_optional_tensors(family, value):
    """Loading does not repeat this check: a table that fills one such config fills every size."""
    flags = {"tie_word_embeddings", "weight_tying", "attention_bias", "use_bias", "use_qkv_bias"}
    flags |= {"include_qkv_bias", "moe_router_enable_expert_bias"}
    flags -= {"moe_router_enable_expert_bias"} if family == "llada_moe" else set()
    config = {**CONFIGS[family], "mask_token_id": 7, **dict.fromkeys(flags, value)}
    parsed = parse_config(config)
    shapes = arch_of(parsed.config).param_shapes(parsed.config)
    rules = table_of(parsed.family).rules_for()
    assert unaccounted(placements(rules, shapes), shapes) == []


SHAPES = {"a": np.zeros((4, 2, 3)), "layers": [{"b": np.zeros(6)}]}
FULL = (
    Placement("x", ("a",), (3, 4), Part((1, 0), index=np.s_[:, 0])),
    Placement("x", ("a",), (3, 4), Part((1, 0), index=np.s_[:, -1]), 3),
    Placement("y", ("layers", 0, "b"), (6,), Part((0,))),
)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (FULL, None),
        (FULL[1:], "fill once: a; rows: x"),
        (FULL[:2], "fill once: layers.0.b"),
        ((*FULL, FULL[0]), "fill once: a; rows: x"),
        (
            (*FULL[:2], Placement("y", ("layers", 0, "b"), (5,), Part((0,), index=(np.s_[:5],)))),
            "0.b",
        ),
        ((FULL[0], dataclasses.replace(FULL[1], part=FULL[0].part), FULL[2]), "fill once: a"),
        ((FULL[0], dataclasses.replace(FULL[1], start=4), FULL[2]), "rows: x"),
        ((FULL[0], dataclasses.replace(FULL[1], start=2), FULL[2]), "rows: x"),
    ],
)
def test_the_proof_sees_gaps_and_overlaps(places, words):
    found = "; ".join(unaccounted(places, SHAPES))
    found = found.replace("leaves that tensors do not fill once", "fill once")
    found = found.replace("tensors whose rows are not used once", "rows")
    assert (found == "") if words is None else (words in found)


def test_the_proof_refuses_an_axis_named_twice():
    wrong = Placement("x", ("a",), (4, 4), Part((0, 0), index=np.s_[:, 0]))
    with pytest.raises(ValueError, match="must name each of the 2 axes of its slice once"):
        unaccounted([wrong], SHAPES)


def write_sparse(folder, config):
    """A checkpoint of full size whose files take no room: headers, and data that is not there."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "mask_token_id": 7}))
    entries, offset = {}, 0
    for name, shape in tensor_shapes(config).items():
        end = offset + math.prod(shape) * 2
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + offset)
    return folder


# Source: total_size of the published indices; leaves by hand. LLaDA2.0 stores the experts' biases
# in 16 bits, which become 32: 19 * 256 * 2 bytes more.
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "tensors", "leaves", "stored", "result"),
    [
        ("GSAI-ML/LLaDA-8B-Instruct", 291, 195, 16031162368, 16031162368),
        ("inclusionAI/LLaDA2.0-mini", 14813, 239, 32511286784, 32511296512),
    ],
)
def test_a_full_size_folder_passes_a_dry_run(
    name, tensors, leaves, stored, result, tmp_path, monkeypatch
):
    folder = write_sparse(tmp_path / "model", PUBLISHED[name])
    assert (folder / "model.safetensors").stat().st_blocks * 512 < 50e6
    report = inspect(folder)
    assert report.problems == ()
    found = plan(report)
    assert (found.num_tensors, found.num_leaves) == (tensors, leaves)
    assert (found.read_bytes, found.result_bytes) == (stored, result)
    largest = max(math.prod(shape) for shape in report.shapes.values())
    assert found.peak_bytes == result + 4 * largest
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=result))
    assert convert(folder, tmp_path / "out", dry_run=True) == tmp_path / "out"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# What is wrong with a family's files: a name, what to write, how to spoil it, the words.


def tensors_changed(change):
    def spoil(folder):
        tensors = read_tensors(folder)
        change(tensors)
        write_tensors(folder, tensors)

    return spoil


def drop(pattern):
    def change(tensors):
        names = [name for name in tensors if re.fullmatch(pattern, name)]
        assert names
        for name in names:
            tensors.pop(name)

    return tensors_changed(change)


def add(**shapes):
    return tensors_changed(
        lambda t: t.update({n: np.ones(shape, np.float32) for n, shape in shapes.items()})
    )


def put(name, change):
    return tensors_changed(lambda t: t.update({name: np.array(change(t[name]), order="C")}))


def config(**changes):
    return lambda folder: edit_config(folder, **changes)


BLOCK = "model.transformer.blocks.0."
HEAD = "model.transformer.ff_out.weight"
LAYER = "model.layers.1."
EXPERTS = LAYER + "mlp.experts."
FAULTS = [
    ("llada", {}, drop(re.escape(HEAD)), f"{HEAD} is missing although weight_tying is false"),
    (
        "llada",
        {},
        put("model.transformer.wte.weight", lambda x: x[:-1]),
        f"wte.weight has {ROWS - 1} rows but embedding_size={ROWS}; correct config.json",
    ),
    (
        "llada",
        {},
        config(n_layers=2),
        "n_layers=2 but the files go on; correct config.json: model.transformer.blocks.2.",
    ),
    ("llada", {"include_qkv_bias": True}, config(include_qkv_bias=False), "unknown name: "),
    (
        "dream",
        {},
        drop(r".*\.bias"),
        "9 tensor(s) missing: model.layers.0.self_attn.q_proj.bias, ",
    ),
    ("stable_diffcoder", {}, add(**{LAYER + "self_attn.q_proj.bias": 48}), "unknown name: "),
    ("qwen3", {}, config(vocab_size=199), " rows but vocab_size=199; correct config.json"),
    (
        "llada2",
        {},
        drop(r".*expert_bias"),
        "2 tensor(s) missing although moe_router_enable_expert_bias is true: "
        "model.layers.1.mlp.gate.expert_bias, model.layers.2.mlp.gate.expert_bias",
    ),
    (
        "llada2",
        {},
        drop(r".*\.experts\..*"),
        "72 tensor(s) missing: model.layers.1.mlp.experts.*.gate_proj.weight (12), ",
    ),
    ("llada2", {}, drop(EXPERTS + r"7\..*"), "3 tensor(s) missing: model.layers.1.mlp.experts.*."),
    (
        "llada2",
        {},
        config(num_experts=8, n_group=2),
        "num_experts=8 but the files hold more; correct config.json: model.layers.1.mlp.experts.*.",
    ),
    ("llada2", {}, config(num_experts=16), "has shape [12, 40], expected [16, 40]"),
    (
        "llada2",
        {},
        config(first_k_dense_replace=2),
        "layer 1 has no experts by config.json but the files hold some: model.layers.1.mlp.",
    ),
    (
        "llada2",
        {},
        config(first_k_dense_replace=0),
        "layer 0 has experts by config.json but the files hold one network: model.layers.0.mlp.",
    ),
    (
        "llada2",
        {},
        config(num_shared_experts=2),
        "shared_experts.gate_proj.weight has shape [24, 40], expected [48, 40]",
    ),
    ("llada2", {}, config(num_shared_experts=0), "6 tensor(s) of unknown name: model.layers.1.mlp"),
    (
        "llada2",
        {},
        config(moe_router_enable_expert_bias=False),
        "2 tensor(s) of unknown name: model.layers.1.mlp.gate.expert_bias",
    ),
    (
        "llada2",
        {"experts": "merged"},
        drop(EXPERTS + "up_proj"),
        f"1 tensor(s) missing: {EXPERTS}up_proj",
    ),
    (
        "llada2",
        {"experts": "packed"},
        put(EXPERTS + "gate_up_proj", lambda x: x[:, :-1]),
        f"{EXPERTS}gate_up_proj has shape [12, 47, 40], expected [12, 48, 40]",
    ),
    (
        "llada2",
        {"experts": "merged"},
        put(EXPERTS + "down_proj", lambda x: x[:11]),
        f"{EXPERTS}down_proj has shape [11, 40, 24], expected [12, 40, 24]",
    ),
    (
        "sdar_moe",
        {},
        add(**{EXPERTS + "gate_up_proj": (12, 48, 40)}),
        f"the experts are stored in two forms; keep one of them: {EXPERTS}gate_up_proj",
    ),
    (
        "sdar_moe",
        {},
        config(mlp_only_layers=[1]),
        "layer 1 has no experts by config.json but the files hold some: model.layers.1.mlp.",
    ),
    (
        "qwen3_moe",
        {},
        add(**{LAYER + "mlp.gate_proj.weight": (56, 40)}),
        "layer 1 has experts by config.json but the files hold one network: ",
    ),
    (
        "sdar_moe",
        {},
        add(**{EXPERTS + "3.gate_proj.weight_scale_inv": (1, 1)}),
        "the weights are quantised (fp8, blockwise), and config.json has no quantization_config",
    ),
    (
        "llada2",
        {},
        add(**{EXPERTS + "3.up_proj.weight_packed": (1, 1)}),
        "the weights are quantised (compressed-tensors), and config.json has no",
    ),
    (
        "llada",
        {},
        add(**{BLOCK + "q_proj.g_idx": 4}),
        "quantised (GPTQ), and config.json has no quantization_config",
    ),
    (
        "dream",
        {},
        config(quantization_config={"quant_method": "bitsandbytes"}),
        "the weights are quantised (quant_method='bitsandbytes'), which is not supported",
    ),
]


@pytest.mark.parametrize(("family", "options", "spoil", "words"), FAULTS)
def test_wrong_files_of_a_family_are_named(family, options, spoil, words, tmp_path):
    folder = write_tiny(family, tmp_path / "model", **options)
    assert inspect(folder).is_ok
    spoil(folder)
    report = inspect(folder)
    assert words in "\n".join(report.problems)
    for load in (lambda: load_params(folder), lambda: convert(folder, tmp_path / "out")):
        with pytest.raises(ConversionError) as caught:
            load()
        assert caught.value.problems == report.problems
    assert not (tmp_path / "out").exists()


# One family of each naming, and one name of each tensor that it has: experts and layers alike.
NAMINGS = ("llada", "dream", "sdar", "sdar_moe", "llada2")
KINDS = [
    (family, name)
    for family in NAMINGS
    for name in {re.sub(r"\d+", "#", n): n for n in tensor_shapes(CONFIGS[family])}.values()
]


@pytest.mark.long
@pytest.mark.parametrize(("family", "name"), KINDS)
def test_any_tensor_dropped_renamed_reshaped_or_stored_twice_is_named(family, name, tmp_path):
    folder = write_tiny(family, tmp_path / "model")
    whole = read_tensors(folder)
    changes = {"": "missing", "model.other": "unknown name: model.other"}
    for renamed, words in changes.items():
        tensors = dict(whole)
        tensor = tensors.pop(name)
        write_tensors(folder, tensors | ({renamed: tensor} if renamed else {}))
        text = "; ".join(inspect(folder).problems)
        assert words in text
        assert re.sub(r"experts\.\d+\.", "experts.*.", name) in text
    write_tensors(folder, whole | {name: np.stack([tensor, tensor])})
    shape = [2, *tensor.shape]
    assert inspect(folder).problems == (f"{name} has shape {shape}, expected {shape[1:]}",)
    write_tensors(folder, whole)
    save_file({name: tensor}, folder / "more.safetensors")
    twice = f"{name} is in both model.safetensors and more.safetensors; keep one of them"
    assert inspect(folder).problems == (twice,)


def test_a_tied_llada_may_hold_a_copy_of_its_head_and_no_other(tmp_path):
    folder = write_tiny("llada", tmp_path / "model", weight_tying=True)
    embed = read_tensors(folder)["model.transformer.wte.weight"]
    plain, _ = load_params(folder)
    tensors_changed(lambda t: t.update({HEAD: embed}))(folder)
    assert_same(load_params(folder)[0], plain)
    put(HEAD, lambda x: x + 1)(folder)
    with pytest.raises(ConversionError, match=f"weight_tying is true but {HEAD} differs"):
        load_params(folder)


@pytest.mark.parametrize(
    ("names", "entries"),
    [
        (["model.layers.3.self_attn.q_proj.weight", "model.layers.3.eh_proj.weight"], {}),
        (["model.layers.3.input_layernorm.weight"], {"num_nextn_predict_layers": 1}),
        (["mtp.layers.0.q.weight", "model.mtp_block.norm.weight", "nextn.x"], {}),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(names, entries, tmp_path, tiny):
    folder = write_tiny("qwen3", tmp_path / "model", **entries)
    add(**dict.fromkeys(names, 4))(folder)
    params, report = load_params(folder)
    assert_same(params, load_params(tiny("qwen3"))[0])
    assert report.notes[-1].startswith(f"{len(names)} tensor(s) not needed: ")


def test_a_layer_past_those_that_the_config_names_is_refused(tmp_path):
    folder = write_tiny("qwen3", tmp_path / "model", num_nextn_predict_layers=1)
    add(**{f"model.layers.{i}.input_layernorm.weight": 40 for i in (3, 4)})(folder)
    [problem] = inspect(folder).problems
    assert problem.endswith("go on; correct config.json: model.layers.4.input_layernorm.weight")


@pytest.mark.parametrize("name", ["ema.model.norm.weight", "model_ema.x", "model.layers.0.ema_q"])
def test_averaged_copies_are_passed_over(name, tmp_path, tiny):
    folder = write_tiny("dream", tmp_path / "model")
    add(**{name: 4})(folder)
    assert_same(load_params(folder)[0], load_params(tiny("dream"))[0])
    add(**{"model.schema.weight": 4})(folder)
    assert "unknown name: model.schema.weight" in inspect(folder).problems[0]
