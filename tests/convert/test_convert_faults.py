"""Every way a checkpoint can be wrong is named, all ways at once, and nothing is loaded or run.

Each case spoils a private copy of a golden folder in one way and states the words that the one
report must hold: what is wrong and what to do. `inspect` finds it without weights, except for
values (NaN, a head that is no copy), which reading finds.
"""

import contextlib
import json
import pickle
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from dllm_jax.convert import ConversionError, convert, inspect, load_params
from tests.golden.folders import (
    GOLDEN,
    INDEX,
    copy_golden,
    edit_config,
    read_tensors,
    write_tensors,
)

Q0 = "model.layers.0.self_attn.q_proj.weight"
UP1 = "model.layers.1.mlp.up_proj.weight"
EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def fault(*cases):
    """Parametrise over (name, spoil, words that must be in the report)."""
    return pytest.mark.parametrize(
        ("spoil", "words"), [pytest.param(spoil, words, id=name) for name, spoil, words in cases]
    )


def edited(change):
    """A fault that changes the dict of tensors of a one-file checkpoint."""

    def spoil(folder):
        tensors = read_tensors(folder)
        change(tensors)
        write_tensors(folder, tensors)

    return spoil


def config(**changes):
    return lambda folder: edit_config(folder, **changes)


def rename(tensors, old, new):
    tensors[new] = tensors.pop(old)


def put(tensors, name, change):
    tensors[name] = change(tensors[name])


def check(folder, words):
    """The problem is reported by `inspect` and refused by both ways of loading."""
    report = inspect(folder)
    text = "\n".join(report.problems)
    for word in words if isinstance(words, tuple) else (words,):
        assert word in text
        assert f"problem: {word}" in str(report) or word in str(report)
    target = folder.parent / "target"
    for load in (lambda: load_params(folder), lambda: convert(folder, target)):
        with pytest.raises(ConversionError) as caught:
            load()
        assert caught.value.problems == report.problems
        assert str(folder) in str(caught.value)
    assert not target.exists()
    return report


@fault(
    ("missing", edited(lambda t: t.pop(Q0)), f"1 tensor(s) missing: {Q0}"),
    (
        "renamed",
        edited(lambda t: rename(t, Q0, Q0.replace("q_proj", "query"))),
        (f"missing: {Q0}", "unknown name: model.layers.0.self_attn.query.weight"),
    ),
    (
        "extra",
        edited(lambda t: t.update(value_head=np.zeros((2, 2), np.float32))),
        "1 tensor(s) of unknown name: value_head; --allow-extra leaves them out",
    ),
    (
        "bias",
        edited(lambda t: t.update({Q0.replace("weight", "bias"): np.zeros(96, np.float32)})),
        "unknown name: model.layers.0.self_attn.q_proj.bias",
    ),
    (
        "transposed",
        edited(lambda t: put(t, UP1, np.transpose)),
        f"{UP1} has shape [40, 56], expected [56, 40]",
    ),
    ("scalar", edited(lambda t: put(t, UP1, lambda x: x[0, 0])), f"{UP1} has shape []"),
    ("empty tensor", edited(lambda t: put(t, UP1, lambda x: x[:0])), f"{UP1} has shape [0, 40]"),
    (
        "integers",
        edited(lambda t: put(t, UP1, lambda x: x.astype(np.int32))),
        f"{UP1} has type I32; weights must be BF16, F16, F32",
    ),
    (
        "doubles",
        edited(lambda t: put(t, UP1, lambda x: x.astype(np.float64))),
        f"{UP1} has type F64; weights must be BF16, F16, F32",
    ),
    (
        "vocabulary rows",
        edited(lambda t: put(t, EMBED, lambda x: np.concatenate([x, x[:4]]))),
        f"{EMBED} has 100 rows but vocab_size=96; correct config.json",
    ),
    (
        "no head",
        edited(lambda t: t.pop(HEAD)),
        f"{HEAD} is missing although tie_word_embeddings is false",
    ),
    (
        "fewer layers in the config",
        config(num_hidden_layers=2),
        ("num_hidden_layers=2 but the files go on", "model.layers.2."),
    ),
    ("more layers in the config", config(num_hidden_layers=4), "11 tensor(s) missing"),
    (
        "GPTQ names",
        edited(lambda t: t.update({Q0.replace("weight", "qweight"): np.zeros(4, np.int32)})),
        "quantised (GPTQ or AWQ), and config.json has no quantization_config",
    ),
    (
        "fp8 scale",
        edited(lambda t: t.update({Q0 + "_scale_inv": np.ones(4, np.float32)})),
        ("quantised (fp8, blockwise), and config.json has no", f"bfloat16 checkpoint: {Q0}_"),
    ),
    (
        "fp8 types",
        edited(lambda t: put(t, UP1, lambda x: x.astype(ml_dtypes.float8_e4m3fn))),
        ("quantised (fp8), and config.json has no", f"bfloat16 checkpoint: {UP1} (F8_E4M3)"),
    ),
    (
        "bitsandbytes",
        edited(lambda t: t.update({Q0 + ".absmax": np.ones(4, np.float32)})),
        "quantised (bitsandbytes)",
    ),
)
def test_wrong_tensors_are_named(spoil, words, tmp_path):
    folder = copy_golden("sdar", tmp_path / "model", single=True)
    spoil(folder)
    check(folder, words)


def shard(folder, name="layer-b.safetensors"):
    return folder / name


def truncate(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def point(index, name, file):
    index["weight_map"][name] = file


def bad_header(path):
    path.write_bytes(struct.pack("<Q", 20) + b"{ this is not json  " + b"\0" * 64)


@fault(
    (
        "truncated",
        lambda f: truncate(shard(f), 5000),
        "layer-b.safetensors is truncated or corrupt",
    ),
    ("truncated header", lambda f: truncate(shard(f), 100), "no safetensors file: 100 bytes"),
    ("a few bytes", lambda f: truncate(shard(f), 5), "no safetensors file: 5 bytes"),
    ("no bytes", lambda f: truncate(shard(f), 0), "layer-b.safetensors is empty (0 bytes)"),
    (
        "garbage header",
        lambda f: bad_header(shard(f)),
        "layer-b.safetensors is truncated or corrupt",
    ),
    ("too long", lambda f: shard(f).write_bytes(shard(f).read_bytes() + b"x"), "corrupt"),
    (
        "LFS pointer",
        lambda f: shard(f).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "layer-b.safetensors is a Git LFS pointer, not the weights (run `git lfs pull`)",
    ),
    (
        "renamed pickle",
        lambda f: shard(f).write_bytes(pickle.dumps([1, 2, 3], protocol=4)),
        "is a pickle renamed to .safetensors, which is refused",
    ),
    (
        "shard gone",
        lambda f: shard(f).unlink(),
        f"layer-b.safetensors is named by {INDEX} but missing; download it again",
    ),
    (
        "index lists what is not there",
        lambda f: edit_index(f, lambda i: point(i, "model.ghost", "layer-a.safetensors")),
        f"{INDEX} lists tensors its files do not hold: model.ghost (layer-a.safetensors)",
    ),
    (
        "index names the wrong file",
        lambda f: edit_index(
            f,
            lambda i: i["weight_map"].update(
                {n: "layer-a.safetensors" for n, x in i["weight_map"].items() if x[6] == "b"}
            ),
        ),
        "lists tensors its files do not hold",
    ),
    (
        "index misses a tensor",
        lambda f: edit_index(f, lambda i: i["weight_map"].pop(Q0)),
        f"{INDEX} does not list {Q0}",
    ),
    (
        "path out of the folder",
        lambda f: edit_index(f, lambda i: point(i, Q0, "../other.safetensors")),
        f"{INDEX} names '../other.safetensors', which lies outside the folder; refused",
    ),
    (
        "absolute path",
        lambda f: edit_index(f, lambda i: point(i, Q0, "/etc/x.safetensors")),
        f"{INDEX} names '/etc/x.safetensors', which lies outside the folder; refused",
    ),
    (
        "index names a pickle",
        lambda f: edit_index(f, lambda i: point(i, Q0, "pytorch_model.bin")),
        f"{INDEX} names 'pytorch_model.bin'; only .safetensors files are read",
    ),
    ("index is no JSON", lambda f: (f / INDEX).write_text("{"), f"{INDEX} is not valid JSON"),
    ("index is a list", lambda f: (f / INDEX).write_text("[]"), f"{INDEX} must hold a JSON object"),
    ("index is empty", lambda f: (f / INDEX).write_text("{}"), f'{INDEX} has no "weight_map"'),
    (
        "duplicate between files",
        lambda f: (
            (f / INDEX).unlink(),
            save_file({Q0: np.zeros((96, 40), np.float32)}, f / "z.safetensors"),
        ),
        f"{Q0} is in both others.safetensors and z.safetensors; keep one of them",
    ),
    (
        "only pickles",
        lambda f: (
            [p.unlink() for p in f.glob("*.safetensors*")],
            (f / "pytorch_model.bin").write_bytes(b"\x80\x04N."),
        ),
        "only pytorch_model.bin and no .safetensors: such files can run code",
    ),
    (
        "no weights",
        lambda f: [p.unlink() for p in f.glob("*.safetensors*")],
        "no .safetensors file in the folder; download the weights",
    ),
    (
        "no config",
        lambda f: (f / "config.json").unlink(),
        "no config.json in the folder; give the folder of a Hugging Face checkpoint",
    ),
    (
        "config is no JSON",
        lambda f: (f / "config.json").write_text("{"),
        "config.json is not valid JSON",
    ),
    (
        "config is not UTF-8",
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}"),
        "config.json is not valid JSON",
    ),
    (
        "config is a list",
        lambda f: (f / "config.json").write_text("[1]"),
        "must hold a JSON object",
    ),
    (
        "tokenizer is no JSON",
        lambda f: (f / "tokenizer.json").write_text("oops"),
        "tokenizer.json is not valid JSON",
    ),
)
def test_wrong_files_are_named(spoil, words, tmp_path):
    folder = copy_golden("sdar", tmp_path / "model")
    spoil(folder)
    check(folder, words)


def test_every_problem_is_in_one_report(tmp_path):
    folder = copy_golden("sdar", tmp_path / "model", single=True)
    edited(lambda t: (t.pop(Q0), put(t, UP1, np.transpose), t.update(extra=t[EMBED][:1])))(folder)
    report = check(folder, (f"missing: {Q0}", f"{UP1} has shape", "unknown name: extra"))
    assert len(report.problems) == 3
    with pytest.raises(ConversionError, match=r"3 problems\n  1\. .*\n  2\. .*\n  3\. "):
        load_params(folder)


def test_many_problems_are_counted_and_inspect_lists_them(tmp_path):
    folder = copy_golden("sdar", tmp_path / "model", single=True)
    edit_config(folder, hidden_size=64)
    with pytest.raises(ConversionError, match="problems\n  1\\. ") as caught:
        load_params(folder)
    lines, problems = str(caught.value).splitlines(), caught.value.problems
    assert problems == inspect(folder).problems
    assert len(problems) > 10
    assert len(lines) == 12
    assert lines[-1] == f"  and {len(problems) - 10} more, which inspect lists"
    assert all(problem in str(inspect(folder)) for problem in problems)


def test_config_and_file_problems_come_together(tmp_path):
    folder = copy_golden("sdar", tmp_path / "model")
    edit_config(folder, hidden_act="gelu", use_sliding_window=True)
    shard(folder).write_bytes(b"")
    check(folder, ("hidden_act='gelu'", "use_sliding_window=true", "layer-b.safetensors is empty"))


def test_many_missing_tensors_are_counted(tmp_path):
    folder = copy_golden("sdar", tmp_path / "model", single=True)
    edited(lambda t: [t.pop(n) for n in list(t) if "layers.1." in n or "layers.2." in n])(folder)
    report = check(folder, ("22 tensor(s) missing: ", " and 12 more"))
    assert len(report.problems) == 1


def test_allow_extra_leaves_unknown_tensors_out(tmp_path):
    folder = copy_golden("sdar", tmp_path / "model", single=True)
    edited(lambda t: t.update(value_head=np.zeros((2, 2), np.float32)))(folder)
    _, report = load_params(folder, allow_extra=True)
    assert report.notes == ("1 tensor(s) of unknown name: value_head; not read",)


def test_files_beside_the_index_are_passed_over(tmp_path):
    folder = copy_golden("sdar", tmp_path / "model")
    save_file({Q0: np.zeros((96, 40), np.float32)}, folder / "consolidated.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    assert inspect(folder).is_ok


def test_a_total_size_that_differs_is_a_note(tmp_path):
    folder = copy_golden("sdar", tmp_path / "model")
    edit_index(folder, lambda index: index["metadata"].update(total_size=10**9))
    report = inspect(folder)
    assert report.is_ok
    assert f"note: {INDEX} states total_size=1000000000 bytes" in str(report)


# Values: only reading the weights can find these.


def with_value(name, index, value):
    def change(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name][index] = value

    return edited(change)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_refused(dtype, value, tmp_path):
    folder = copy_golden("sdar", tmp_path / "model", single=True)
    edited(lambda t: t.update({n: x.astype(dtype) for n, x in t.items()}))(folder)
    with_value(Q0, (-1, -1), value)(folder)
    with_value("model.norm.weight", 0, value)(folder)
    assert inspect(folder).is_ok
    with pytest.raises(ConversionError) as caught:
        load_params(folder, "float32")
    assert sorted(caught.value.problems) == [
        f"{Q0} holds NaN or Inf",
        "model.norm.weight holds NaN or Inf",
    ]


def test_a_value_too_large_for_float16_is_refused(tmp_path):
    folder = copy_golden("sdar", tmp_path / "model", single=True)
    with_value(Q0, (3, 3), 1e5)(folder)
    load_params(folder, "float32")
    with pytest.raises(ConversionError, match=f"{Q0} does not fit float16; use bfloat16"):
        load_params(folder, "float16")


def test_a_head_of_its_own_under_tied_embeddings_is_refused(tmp_path):
    folder = copy_golden("sdar", tmp_path / "model")
    edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(
        ConversionError, match=r"tie_word_embeddings is true but lm_head.weight diff"
    ):
        load_params(folder)


@pytest.mark.parametrize("begin", [b"\x80\x02", b"\x80\x04"])
def test_a_header_whose_length_begins_as_a_pickle_does_is_read(begin, tmp_path):
    """One shard in some thousands has such a length; spaces may pad a header."""
    folder = copy_golden("qwen3", tmp_path / "qwen3", single=True)
    wanted, _ = load_params(folder)
    raw = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    size = int.from_bytes(begin, "little") + (1 << 16)
    header = raw[8:end].ljust(size)
    (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + header + raw[end:])
    params, _ = load_params(folder)
    np.testing.assert_array_equal(params["embed"], wanted["embed"])


# Sources that are no checkpoint, and converted folders that were tampered with.


@pytest.mark.parametrize(
    ("source", "words"),
    [("nowhere", "does not exist; give the folder"), ("file.bin", "is a file; give the folder")],
)
def test_sources_that_are_no_folder(source, words, tmp_path):
    (tmp_path / "file.bin").write_bytes(pickle.dumps(1))
    check(tmp_path / source, words)


def read_meta(folder):
    return json.loads((folder / "meta.json").read_text())


def edit_meta(folder, **changes):
    meta = read_meta(folder) | changes
    kept = {key: value for key, value in meta.items() if value is not ...}
    (folder / "meta.json").write_text(json.dumps(kept))


@fault(
    ("newer", lambda f: edit_meta(f, version=99), "version 99, not 'dllm-jax' version 3"),
    ("older", lambda f: edit_meta(f, version=1), "convert the checkpoint again"),
    ("foreign", lambda f: edit_meta(f, format="other"), "meta.json is of format 'other'"),
    ("entry gone", lambda f: edit_meta(f, dtype=...), "meta.json lacks 'dtype'"),
    (
        "no JSON",
        lambda f: (f / "meta.json").write_text("{"),
        "meta.json is not valid JSON (Expecting property name enclosed in double quotes: line 1 "
        "column 2 (char 1)); convert the checkpoint again",
    ),
    (
        "no meta.json",
        lambda f: (f / "meta.json").unlink(),
        "no meta.json beside params, as converted folders have; convert the checkpoint again",
    ),
    (
        "no description of a leaf",
        lambda f: (f / "params/embed/.zarray").unlink(),
        ".zarray'; convert the checkpoint again",
    ),
    (
        "leaf gone",
        lambda f: (
            [p.unlink() for p in (f / "params/embed").iterdir()] and (f / "params/embed").rmdir()
        ),
        "params/embed holds 0 bytes instead of 7680; convert the checkpoint again",
    ),
    (
        "data gone",
        lambda f: (f / "params/layers.1.wqkv/0.0.0.0").unlink(),
        "params/layers.1.wqkv holds 0 bytes instead of 12800; convert the checkpoint again",
    ),
    (
        "data truncated",
        lambda f: truncate(f / "params/final_norm/0", 79),
        "params/final_norm holds 79 bytes instead of 80; convert the checkpoint again",
    ),
    (
        "shapes differ",
        lambda f: edit_meta(f, config={**read_meta(f)["config"], "ffn_size": 57}),
        "params/layers.0.w_down holds 4480 bytes instead of 4560",
    ),
)
def test_a_spoilt_converted_folder_is_named(spoil, words, tmp_path):
    folder = convert(copy_golden("sdar", tmp_path / "model"), tmp_path / "converted")
    spoil(folder)
    check(folder, words)


def test_a_damaged_leaf_is_refused(tmp_path):
    folder = convert(copy_golden("sdar", tmp_path / "model"), tmp_path / "converted")
    (folder / "params/embed/.zarray").write_text("{")
    with pytest.raises(ConversionError, match=r"params/embed: .zarray is not valid JSON"):
        load_params(folder)


def test_leaves_of_another_shape_are_refused(tmp_path):
    folder = convert(copy_golden("sdar", tmp_path / "model"), tmp_path / "converted")
    edit_meta(folder, dtype="float16")
    with pytest.raises(
        ConversionError, match=r"params/embed holds bfloat16.* where meta.json says float16"
    ):
        load_params(folder)


def test_arguments_are_checked_by_name(tmp_path):
    folder = copy_golden("sdar", tmp_path / "model")
    with pytest.raises(ValueError, match=r"dtype='int8' is not supported; use one of bfloat16"):
        load_params(folder, "int8")
    with pytest.raises(ConversionError, match=r"adapter x: no adapter_config.json there; give"):
        convert(folder, tmp_path / "converted", lora="x")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=4),
    keep=st.integers(0, 4000) | st.none(),
)
def test_no_damage_to_a_header_brings_the_program_down(edits, keep, tmp_path):
    folder = tmp_path / "model"
    if not folder.exists():
        copy_golden("qwen3", folder)
    data = bytearray((GOLDEN / "qwen3" / "model.safetensors").read_bytes())
    for position, value in edits:
        data[position] = value
    (folder / "model.safetensors").write_bytes(data[:keep])
    with contextlib.suppress(ConversionError):
        load_params(folder)
