"""Folders in 4 and 8 bits: the numbers are those of the packages that write them, bit for bit.

The golden cases are those of golden/make_packed_golden.py. Everything that can be wrong with such a
folder is one line, before weights are read.
"""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.cli import main
from dllm_jax.convert import ConversionError, convert, inspect, load_params, plan
from dllm_jax.convert.packed import matrices
from dllm_jax.convert.schemes import read_scheme
from dllm_jax.convert.shards import read_shards
from dllm_jax.loading import load as loading
from dllm_jax.models.quantization import is_quantized, quantized
from tests.convert.test_convert import assert_same
from tests.oracles.canvas_files import write_canvas
from tests.oracles.checkpoints import write_adapter, write_tiny
from tests.oracles.packed_files import CASES, GOLDEN, config_of, tensors_of, write_safetensors
from tests.oracles.tiny_configs import CONFIGS

KINDS = {"BF16": ml_dtypes.bfloat16, "F16": np.float16}


def opened(folder, case, change=lambda tensors: None, **config):
    """The one matrix `m.weight` of a golden case, and the problems of its headers."""
    tensors = tensors_of(case, "m")
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)
    scheme = read_scheme(folder, {"quantization_config": {**config_of(case), **config}})
    assert scheme is not None
    return matrices(folder, scheme, read_shards(folder).tensors)


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_package(tmp_path, case):
    whole, packed, problems = opened(tmp_path, case)
    assert problems == []
    assert list(whole) == list(packed) == ["m.weight"]
    matrix, want = packed["m.weight"], GOLDEN[f"{case}/want"]
    assert matrix.shape == whole["m.weight"].shape == want.shape
    kind = KINDS[str(GOLDEN[f"{case}/want:dtype"])]
    assert list(matrix.problems()) == []
    got = matrix.read(0, want.size).astype(kind).view(np.uint16)
    assert np.array_equal(got, want.reshape(-1))
    for start, count in ((0, 1), (want.shape[1] * 3 + 5, 2 * want.shape[1]), (want.size - 3, 3)):
        part = matrix.read(start, count).astype(kind).view(np.uint16)
        assert np.array_equal(part, want.reshape(-1)[start : start + count])


def test_an_unaligned_file_is_read(tmp_path):
    def shift(tensors):
        tensors["x.bias"] = ("U8", (3,), b"abc")
        tensors.update({name: tensors.pop(name) for name in list(tensors)[:-1]})

    _, packed, _ = opened(tmp_path, "w4a16", shift)
    want = GOLDEN["w4a16/want"]
    got = packed["m.weight"].read(0, want.size).astype(ml_dtypes.bfloat16).view(np.uint16)
    assert np.array_equal(got, want.reshape(-1))


def shaped(end, kind=None, shape=None, data=None):
    """A change of one stored tensor."""

    def change(tensors):
        old = tensors[f"m.{end}"]
        tensors[f"m.{end}"] = (kind or old[0], old[1] if shape is None else shape, data or old[2])
        if shape is not None:
            size = len(old[2]) // max(1, int(np.prod(old[1])))
            tensors[f"m.{end}"] = (kind or old[0], shape, bytes(size * int(np.prod(shape))))

    return change


def without(end):
    return lambda tensors: tensors.pop(f"m.{end}")


@pytest.mark.parametrize(
    ("case", "change", "reported"),
    [
        (
            "fp8 channel",
            shaped("weight_scale", shape=(24, 2)),
            "m.weight_scale has shape [24, 2], expected [24, 1]",
        ),
        ("fp8 channel", without("weight_scale"), "m.weight_scale missing beside m.weight"),
        ("fp8 block", shaped("weight_scale_inv", shape=(3, 2)), "expected [2, 3]"),
        ("w4a16", shaped("weight_scale", shape=(24, 3)), "expected [24, 4]"),
        ("w4a16", without("weight_shape"), "m.weight_shape missing beside m.weight_packed"),
        ("w4a16", shaped("weight_packed", shape=(24,)), "a matrix has two axes"),
        ("w4a16 zeros", without("weight_zero_point"), "m.weight_zero_point missing"),
        ("gptq 4 bits", shaped("qzeros", shape=(4, 24)), "m.qzeros has shape [4, 24], expected"),
        ("gptq 4 bits", shaped("g_idx", shape=(5,)), "m.g_idx has shape [5], expected [128]"),
        ("gptq 4 bits", without("qzeros"), "m.qzeros missing beside m.qweight"),
        ("awq", shaped("scales", shape=(3, 24)), "m.scales has shape [3, 24], expected [2, 24]"),
        (
            "fp8 channel",
            shaped("weight", "BF16", data=bytes(6144)),
            "m.weight_scale (of BF16); leave",
        ),
        ("nvfp4", without("weight_global_scale"), "m.weight_global_scale missing"),
        ("nvfp4", shaped("weight_scale", kind="U8"), "m.weight_scale has type U8"),
    ],
)
def test_headers_that_lie_are_a_line_each(tmp_path, case, change, reported):
    whole, packed, problems = opened(tmp_path, case, change)
    assert len(problems) == 1
    assert reported in problems[0]
    assert "\n" not in problems[0]
    assert not packed
    assert list(whole) == ["m.weight"]


def values(end, kind, change):
    def rewrite(tensors):
        name, shape, data = tensors[f"m.{end}"]
        found = np.frombuffer(data, kind).copy()
        change(found)
        tensors[f"m.{end}"] = (name, shape, found.tobytes())

    return rewrite


def zero_points(tensors):
    """That are not zero, which no tool writes next to e4m3."""
    rows = tensors["m.weight"][1][0]
    tensors["m.weight_zero_point"] = ("I8", (rows, 1), bytes(rows - 1) + b"\x01")


def put(value):
    def change(array):
        array[-1] = value

    return change


@pytest.mark.parametrize(
    ("case", "change", "reported"),
    [
        ("fp8 channel f32", values("weight_scale", "f4", put(np.nan)), "holds NaN or Inf"),
        ("fp8 channel f32", values("weight_scale", "f4", put(0)), "m.weight_scale holds a zero"),
        ("fp8 channel f32", values("weight_scale", "f4", put(-1)), "holds -1; a scale is positive"),
        ("fp8 channel f32", values("weight_scale", "f4", put(1e37)), "its weights overflow"),
        ("fp8 channel", zero_points, "m.weight_zero_point is not zero"),
        ("fp8 tensor", values("weight_scale", "u2", put(0x7F80)), "m.weight_scale holds NaN or"),
        ("nvfp4", values("weight_global_scale", "f4", put(0)), "weight_global_scale holds a zero"),
        ("nvfp4", values("weight_scale", "u1", put(0x7F)), "m.weight_scale holds NaN or Inf"),
        ("w4a16", values("weight_shape", "i8", put(99)), "says [24, 99] but m.weight_packed holds"),
        ("gptq 8 bits", values("g_idx", "i4", put(4)), "m.g_idx names group 4 of 4"),
        ("gptq 8 bits", values("g_idx", "i4", put(-2)), "m.g_idx names group -2 of 4"),
        ("awq", values("scales", "f2", put(np.inf)), "m.scales holds NaN or Inf"),
    ],
)
def test_values_that_lie_are_a_line_each(tmp_path, case, change, reported):
    _, packed, problems = opened(tmp_path, case, change)
    assert problems == []
    (problem,) = packed["m.weight"].problems()
    assert reported in problem


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group"}}


@pytest.mark.parametrize(
    ("said", "reported"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes'"),
        ({"quant_method": ["fp8"]}, "quant_method=['fp8']"),
        ("fp8", "quantization_config='fp8'"),
        ({"config_groups": [1]}, "config_groups=[1]"),
        ({"format": "float-quantized", "config_groups": {"a": {"weights": None}}}, "of type=None"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "group_size='x'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size=0"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 8, "dynamic": {"+:.*down": {}}},
            "GPTQ with dynamic=+:.*down",
        ),
        ({"bits": 4, "group_size": 64}, "MLX, bits=4, group_size=64"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "'gemv'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "blocks of [128]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo='W4A8'"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "config_groups=None",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": GROUP},
            },
            "group_size=None",
        ),
        *(
            (
                {
                    "quant_method": "compressed-tensors",
                    "format": format,
                    "config_groups": {"a": GROUP},
                },
                f"format={format!r}",
            )
            for format in ("marlin-24", ["x"])
        ),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path, said, reported):
    with pytest.raises(ValueError, match="the weights are quantised") as error:
        read_scheme(tmp_path, {"quantization_config": said})
    assert reported in str(error.value)
    assert "which is not supported; " in str(error.value)


_TURN = {"R4": {"type": "hadamard", "apply": [{"location": "input", "targets": ["down_proj"]}]}}


@pytest.mark.parametrize(
    ("entry", "reported"),
    [
        ({"transform_config": {"config_groups": _TURN}}, "transform_config is not supported: its"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not supported"),
        ({"pre_quant_scale": True}, "pre_quant_scale is not supported: its inputs are scaled"),
        ({"adapter": {"path": "x", "rank": 8}}, "adapter is not supported: an adapter corrects"),
        ({"rotation": "hadamard"}, "rotation='hadamard' is not known and may change the numbers"),
        ({"pack_dtype": "int16"}, "pack_dtype='int16' is not supported"),
        (
            {"config_groups": {"g": {"weights": {"online_hadamard": 64}}}},
            "config_groups.g.weights.online_hadamard=64 is not known and may",
        ),
    ],
)
def test_b9_what_a_model_needs_at_run_time_is_refused_by_name(folder, tmp_path, entry, reported):
    to = tmp_path / "more"
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"].update(entry)
    (to / "config.json").write_text(json.dumps(config))
    assert any(reported in problem for problem in inspect(to).problems)
    nothing = {key: {} if isinstance(value, dict) else None for key, value in entry.items()}
    config["quantization_config"].update(nothing | FP8_DYNAMIC | {"made_by": "us"})
    (to / "config.json").write_text(json.dumps(config))
    report = inspect(to)
    assert report.problems == ()
    assert report.notes == ("entries of the quantisation section that are not read: made_by",)


def test_45_12_mlx_folders_and_matrices_left_out_of_gptq(tmp_path):
    folder = write_tiny("sdar", tmp_path / "mlx")
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"bits": 4, "group_size": 64, "model.norm": False}
    (folder / "config.json").write_text(json.dumps(config))
    (problem,) = inspect(folder).problems
    assert "quantised (MLX, bits=4, group_size=64)" in problem
    left_out = opened(tmp_path, "gptq 4 bits", dynamic={"-:.*down_proj": {}})
    assert left_out[2] == []


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path):
    said = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["a"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    scheme = read_scheme(tmp_path, {})
    assert scheme is not None
    assert (scheme.name, scheme.bits, scheme.ignored) == ("ModelOpt NVFP4", 4, ("a",))
    assert read_scheme(tmp_path / "none", {}) is None


# --- whole folders ------------------------------------------------------------------------------


def as_fp8(tensors, names, kind="BF16", is_whole=False):
    """Matrices in FP8-dynamic, the largest number of an output 224 to 448; or with one scale."""
    rng = np.random.default_rng(3)
    for name in names:
        found, shape, data = tensors.pop(name)
        assert found == "F32"
        w = np.frombuffer(data, np.float32).reshape(shape)
        scale = np.abs(w).max(axis=1, keepdims=True) / rng.uniform(224, 448, (len(w), 1))
        scale = (scale.max().reshape(()) if is_whole else scale).astype(TYPES[kind])
        small = np.clip(w / scale.astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn)
        tensors[name] = ("F8_E4M3", shape, small.tobytes())
        tensors[f"{name}_scale"] = (kind, scale.shape, scale.tobytes())


TYPES = {**KINDS, "F32": np.float32}
FP8_DYNAMIC = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        }
    },
    "ignore": ["lm_head"],
}


@pytest.fixture
def folder(random_folder, tmp_path):
    """The random folder with the matrices of its layers in FP8-dynamic."""
    to = tmp_path / "small"
    shutil.copytree(random_folder, to)
    rewrite(to, FP8_DYNAMIC, as_fp8)
    return to


def rewrite(folder, said, change, keep=lambda name: False):
    tensors = {}
    for name, stored in read_shards(folder).tensors.items():
        data = (folder / stored.file).read_bytes()[stored.offset :]
        size = int(np.prod(stored.shape)) * (4 if stored.dtype == "F32" else 2)
        tensors[name] = (stored.dtype, stored.shape, data[:size])
    names = [name for name in tensors if "proj.weight" in name and not keep(name)]
    change(tensors, names)
    write_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = said
    (folder / "config.json").write_text(json.dumps(config))


def test_inspect_says_format_bits_and_what_stays(folder, random_folder):
    report = inspect(folder)
    assert report.problems == ()
    line = (
        "quantised   compressed-tensors float-quantized, 14 matrices of 8 bits, taken as stored; "
        "in 16 bits: lm_head"
    )
    assert line in str(report)
    plain = inspect(random_folder)
    assert report.num_params == plain.num_params
    assert report.num_bytes < 0.7 * plain.num_bytes


def fused(folder, config):
    """Values and scales of each layer's matrices as they lie in memory, from the file alone."""
    shards = read_shards(folder)
    H, G = config.head_dim, config.num_kv_heads

    def read(name, kind, shape=None):
        stored = shards.tensors[name]
        data = (folder / stored.file).read_bytes()[stored.offset :]
        found = np.frombuffer(data, kind, int(np.prod(stored.shape))).reshape(stored.shape)
        return found if shape is None else np.broadcast_to(found.reshape(-1), shape)

    def both(layer, module):
        name = f"model.layers.{layer}.{module}.weight"
        values = read(name, np.uint8)
        kind = TYPES[shards.tensors[f"{name}_scale"].dtype]
        return values, read(f"{name}_scale", kind, len(values)).astype(np.float32)[:, None]

    for i in range(config.num_layers):
        q, k, v, o = (both(i, f"self_attn.{n}_proj") for n in "qkvo")
        gate, up, down = (both(i, f"mlp.{n}_proj") for n in ("gate", "up", "down"))
        found = {"wo": o, "w_down": down}
        by_group = [[x.reshape(G, -1, H, x.shape[-1]) for x in one] for one in (q, k, v)]
        found["wqkv"] = tuple(np.concatenate(x, axis=1) for x in zip(*by_group, strict=True))
        turns = [[x.reshape(-1, 32, x.shape[-1]) for x in one] for one in (gate, up)]
        found["w_gate_up"] = tuple(np.stack(x, axis=1) for x in zip(*turns, strict=True))
        yield {name: (values, scales[..., 0]) for name, (values, scales) in found.items()}


@pytest.mark.parametrize("form", ["channel", "float32", "whole"])
def test_numbers_stored_by_output_are_those_that_run(form, random_folder, tmp_path, monkeypatch):
    """Bit for bit, fused as the forward pass reads them; nothing is made in 16 bits on the way."""
    to, said = tmp_path / "small", FP8_DYNAMIC
    shutil.copytree(random_folder, to)
    how = {"kind": "BF16" if form == "channel" else "F32", "is_whole": form == "whole"}
    if form == "whole":
        said = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    rewrite(to, said, lambda tensors, names: as_fp8(tensors, names, **how))
    monkeypatch.setattr(loading, "quantized", lambda _, leaf, split: leaf)  # 16 bits would stay
    model = dj.load(to)
    assert model.quantization == "fp8"
    layers = zip(model.params["layers"], fused(to, model.config), strict=True)
    for layer, want in layers:
        for name, (values, scales) in want.items():
            assert np.array_equal(np.asarray(layer[name].values).view(np.uint8), values), name
            assert np.array_equal(layer[name].scales, scales), name
    again = dj.load(to, quantization="fp8")
    assert_same(again.params, model.params)


def test_what_an_adapter_changes_is_rounded_anew(folder, tmp_path):
    """And the others run as they are stored."""
    adapter = write_adapter(folder, tmp_path / "adapter", r=2, alpha=2)
    found, stored = dj.load(folder, lora=adapter), dj.load(folder)
    merged = dj.load(folder, lora=adapter, quantization="none")
    for a, b, whole in zip(*(m.params["layers"] for m in (found, stored, merged)), strict=True):
        for name in ("w_gate_up", "w_down"):
            assert_same(a[name], b[name])
        for name in ("wqkv", "wo"):
            assert_same(a[name], quantized((jax.tree_util.DictKey(name),), whole[name]))
            assert not np.array_equal(a[name].values, b[name].values)


def test_a_number_that_is_none_is_named(folder):
    stored = read_shards(folder).tensors["model.layers.1.self_attn.v_proj.weight"]
    with open(folder / stored.file, "r+b") as file:
        file.seek(stored.offset + 7)
        file.write(b"\x7f")
    with pytest.raises(ConversionError, match=r"v_proj.weight holds NaN or Inf") as error:
        dj.load(folder)
    assert len(error.value.problems) == 1


def test_it_can_be_loaded_in_16_bits(folder):
    model = dj.load(folder, "bfloat16", quantization="none")
    assert model.quantization is None
    small = dj.load(folder)
    w, held = model.params["layers"][1]["wo"], small.params["layers"][1]["wo"]
    flat = np.asarray(w.astype("float32")).reshape(-1, w.shape[-1])
    near = np.asarray(held.restored("float32"))
    assert np.abs(near - flat).max() < 0.01 * np.abs(flat).max()


def test_matrices_that_the_folder_keeps_are_kept(random_folder, tmp_path):
    to = tmp_path / "mixed"
    shutil.copytree(random_folder, to)
    rewrite(to, FP8_DYNAMIC, as_fp8, keep=lambda name: "self_attn" in name)
    model = dj.load(to)
    names = {name for name, leaf in model.params["layers"][0].items() if is_quantized(leaf)}
    assert names == {"w_gate_up", "w_down"}
    whole = dj.load(to, quantization="fp8")
    assert is_quantized(whole.params["layers"][0]["wqkv"])


def test_a_folder_in_4_bits_is_held_in_8_and_says_so(random_folder, tmp_path):
    to = tmp_path / "four"
    shutil.copytree(random_folder, to)

    def as_int4(tensors, names):
        for name in names:
            _, shape, data = tensors.pop(name)
            w = np.frombuffer(data, np.float32).reshape(shape[0], -1, 8)
            scale = np.abs(w).max(-1) / 7
            whole = np.uint32(np.round(w / scale[..., None]) + 8).reshape(shape[0], -1, 8)
            words = np.bitwise_or.reduce(whole << np.arange(0, 32, 4, dtype=np.uint32), -1)
            stem = name.removesuffix(".weight")
            tensors[f"{stem}.weight_packed"] = ("I32", words.shape, words.tobytes())
            tensors[f"{stem}.weight_scale"] = ("F32", scale.shape, scale.tobytes())
            tensors[f"{stem}.weight_shape"] = ("I64", (2,), np.array(shape, "i8").tobytes())

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}
    said = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    rewrite(to, said, as_int4)
    with pytest.warns(UserWarning, match=r"4 bits \(compressed-tensors pack-quantized\) .* fp8"):
        model = dj.load(to)
    assert model.quantization == "fp8"
    plain = dj.load(random_folder)
    w, held = plain.params["layers"][0]["w_down"], model.params["layers"][0]["w_down"]
    error = np.abs(np.asarray(held.restored("float32")) - np.asarray(w))
    assert error.max() < np.abs(np.asarray(w)).max() * 0.15
    params, _ = load_params(to, "float32")
    assert np.abs(params["layers"][0]["w_down"] - np.asarray(w)).max() <= np.abs(w).max() / 13


def test_wrong_scales_are_told_before_memory_is_taken(folder, monkeypatch):
    stored = read_shards(folder).tensors["model.layers.0.mlp.down_proj.weight_scale"]
    with open(folder / stored.file, "r+b") as file:
        file.seek(stored.offset)
        file.write(bytes(2 * stored.shape[0]))

    def empty(*_, **__):
        raise AssertionError("memory was taken")

    monkeypatch.setattr("dllm_jax.convert.weights.np.empty", empty)
    with pytest.raises(ConversionError, match=r"down_proj\.weight_scale holds a zero") as error:
        load_params(folder)
    assert len(error.value.problems) == 1


def test_a_folder_that_says_so_without_such_tensors_is_refused(random_folder, tmp_path):
    to = tmp_path / "none"
    shutil.copytree(random_folder, to)
    rewrite(to, FP8_DYNAMIC, lambda tensors, names: None)
    (problem,) = inspect(to).problems
    assert "the config says compressed-tensors float-quantized but no tensor" in problem


def test_one_cause_is_one_line(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {}}))
    (problem,) = inspect(folder).problems
    assert "quantised (fp8), and config.json has no quantization_config, which would" in problem
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "token"
    (folder / "config.json").write_text(json.dumps(config))
    (problem,) = inspect(folder).problems
    assert "strategy='token'" in problem
    (folder / "model.safetensors").write_bytes(b"")
    problems = inspect(folder).problems
    assert len(problems) == 2
    assert any("is empty (0 bytes)" in problem for problem in problems)


# --- written here -------------------------------------------------------------------------------


def as_written(folder):
    """Type and axes of every tensor; what is in 8 bits has a scale for each output."""
    tensors = read_shards(folder).tensors
    held = {name: (stored.dtype, len(stored.shape)) for name, stored in tensors.items()}
    small = {name for name, (kind, _) in held.items() if kind == "F8_E4M3"}
    for name in small:
        scale = tensors[f"{name}_scale"]
        assert (scale.dtype, scale.shape) == ("F32", (tensors[name].shape[0], 1))
    scales = {f"{name}_scale" for name in small}
    return small, {name: found for name, found in held.items() if name not in small | scales}


def weights_of(folder):
    """Bytes of the numbers in a folder's one file, and how many tensors there are."""
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8 : 8 + length])
    tensors.pop("__metadata__")
    return len(data) - 8 - length, len(tensors)


@pytest.mark.parametrize("family", ["sdar", "llada2", "diffusion_gemma"])
def test_a_folder_written_in_8_bits_is_what_quantization_makes(family, tmp_path):
    """Bit for bit, dense and experts, where zeros fill the last lines of memory too.

    Experts are written one by one, however the source holds them: DiffusionGemma's are packed.
    transformers reads it with compressed-tensors: golden/check_fp8_folder.py.
    """
    if family == "diffusion_gemma":
        source, kept = write_canvas(tmp_path / "source", seed=3), {}
    else:
        sizes = {"intermediate_size": 160, "moe_intermediate_size": 136}
        kept = {name: size for name, size in sizes.items() if name in CONFIGS[family]}
        source = write_tiny(family, tmp_path / "source", **kept)
    to = convert(source, tmp_path / "eight", "bfloat16", quantize="fp8")
    said = json.loads((to / "config.json").read_text())["quantization_config"]
    assert said["format"] == "float-quantized"
    assert "lm_head" in said["ignore"]
    routed = family != "sdar"
    assert any(name.endswith(("mlp.gate", "router.proj")) for name in said["ignore"]) == routed
    assert not any("embed" in name or "experts." in name for name in said["ignore"])
    small, others = as_written(to)
    matrices = {name for name, (_, axes) in others.items() if axes != 1}
    assert {name.rpartition(".")[0] for name in matrices if "embed" not in name} <= {
        *said["ignore"]
    }
    assert {kind for name, (kind, _) in others.items() if "expert_bias" not in name} == {"BF16"}
    assert any(".experts.3.up_proj." in name for name in small) == routed
    report = inspect(to)
    assert report.problems == ()
    numbers, count = weights_of(to)
    planned = plan(inspect(source), "bfloat16", quantize="fp8")
    assert (planned.result_bytes, planned.num_leaves) == (numbers, count)
    assert plan(report).read_bytes == numbers
    assert small == set(report.packed)
    assert f"{len(report.packed)} matrices of 8 bits, taken as stored; " in str(report)
    want, found = dj.load(source, "bfloat16", quantization="fp8"), dj.load(to, "bfloat16")
    assert_same(found.params, want.params)
    assert found.quantization == "fp8"
    assert found.params["layers"][0]["w_down"].depth == kept.get("intermediate_size")
    # Read and written again it stays what it is, and so it is from experts in another form.
    again = [convert(to, tmp_path / "again", quantize="fp8")]
    if family == "llada2":
        packed = write_tiny(family, tmp_path / "packed", experts="packed", **kept)
        again.append(convert(packed, tmp_path / "of_packed", quantize="fp8"))
    for folder in again:
        for name in (*report.files, "config.json"):
            assert (folder / name).read_bytes() == (to / name).read_bytes()


def test_a_head_is_written_in_8_bits_and_held_as_it_is_stored(tmp_path):
    """A router in 8 bits is held in 16, and `inspect` says so."""
    source = write_tiny("llada2", tmp_path / "source")
    to = convert(source, tmp_path / "eight", quantize="fp8", quantize_head=True)
    said = json.loads((to / "config.json").read_text())["quantization_config"]
    assert "lm_head" not in said["ignore"]
    assert "lm_head.weight" in as_written(to)[0]
    assert "matrices of 8 bits, taken as stored; " in str(inspect(to))
    planned = plan(inspect(source), "bfloat16", quantize="fp8", quantize_head=True)
    assert (planned.result_bytes, planned.num_leaves) == weights_of(to)
    want = dj.load(source, "bfloat16", quantization="fp8", quantize_head=True)
    for how in ({}, {"quantization": "fp8"}, {"quantize_head": True}):
        assert_same(dj.load(to, "bfloat16", **how).params, want.params)
    assert not dj.load(to, "bfloat16", quantization="none").has_quantized_head
    again = convert(to, tmp_path / "again", quantize="fp8")  # it is copied, asked for or not
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (to / name).read_bytes()
    routers = tmp_path / "routers"
    shutil.copytree(source, routers)

    def small_routers(tensors, _):
        as_fp8(tensors, [name for name in tensors if name.endswith("mlp.gate.weight")])

    rewrite(routers, FP8_DYNAMIC, small_routers)
    assert " matrices of 8 bits, held in 16 bits when loaded; " in str(inspect(routers))
    assert dj.load(routers).quantization is None


def test_what_cannot_be_written_in_8_bits_is_refused(random_folder, tmp_path):
    ours = convert(random_folder, tmp_path / "ours")
    with pytest.raises(ValueError, match="give the Hugging Face folder"):
        convert(ours, tmp_path / "eight", quantize="fp8")
    with pytest.raises(ValueError, match="quantize='int8' is not supported; use fp8"):
        convert(random_folder, tmp_path / "eight", quantize="int8")
    with pytest.raises(ValueError, match=r"give quantize='fp8' \(--quantize fp8\) too"):
        convert(random_folder, tmp_path / "eight", quantize_head=True)
    tied = write_canvas(tmp_path / "tied")
    with pytest.raises(ValueError, match=r"its head is its embedding.* when the folder is loaded"):
        convert(tied, tmp_path / "eight", quantize="fp8", quantize_head=True)
    with pytest.raises(ValueError, match=r"give quantize='fp8' \(--quantize fp8\) too"):
        plan(inspect(random_folder), quantize_head=True)
    assert not (tmp_path / "eight").exists()


def test_a_disk_needs_room_for_what_is_written_in_8_bits(random_folder, tmp_path, monkeypatch):
    report, usage = inspect(random_folder), shutil.disk_usage(tmp_path)
    needed = plan(report, "bfloat16", quantize="fp8").result_bytes
    assert needed < 0.8 * plan(report, "bfloat16").result_bytes
    for free in (needed, needed - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, n=free: usage._replace(free=n))
        how = {"quantize": "fp8", "dry_run": True}
        if free == needed:
            convert(random_folder, tmp_path / "eight", **how)
            continue
        with pytest.raises(OSError, match=r"needs 0\.00 GB but .* has 0\.00 GB free"):
            convert(random_folder, tmp_path / "eight", **how)
    assert not (tmp_path / "eight").exists()


def test_a_written_config_says_its_type_once(tmp_path):
    """transformers has two names for it, and repeats it under `text_config`."""
    source = write_canvas(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config |= {"dtype": "float32", "compression_config": None}
    config["text_config"]["dtype"] = "float32"
    (source / "config.json").write_text(json.dumps(config))
    to = convert(source, tmp_path / "eight", "bfloat16", quantize="fp8")
    written = json.loads((to / "config.json").read_text())
    assert written["torch_dtype"] == "bfloat16"
    assert not {"dtype", "compression_config"} & set(written)
    assert not {"dtype", "torch_dtype"} & set(written["text_config"])
    assert dj.load(to, "bfloat16").quantization == "fp8"


def test_the_command_line_writes_and_refuses(random_folder, tmp_path, capsys):
    to = str(tmp_path / "eight")
    argv = ["convert", str(random_folder), to, "--quantize", "fp8"]
    assert main([*argv, "--dry-run"]) == 0
    needed = plan(inspect(random_folder), "bfloat16", quantize="fp8").result_bytes
    assert f"({needed / 1e6:.1f} MB, fp8 and bfloat16)" in capsys.readouterr().out
    assert main(argv) == 0
    assert main(["inspect", to]) == 0
    assert "14 matrices of 8 bits" in capsys.readouterr().out
    for force in ([], ["--force"]):
        assert main([*argv, *force]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "exists already and is no converted folder" in error
