"""Proves that hostile files and names are refused in one short line, and soon."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from dllm_jax.cli import main
from dllm_jax.convert import convert, inspect
from dllm_jax.convert.inspection import _too_many
from dllm_jax.convert.lora import _of_module
from dllm_jax.convert.small_files import MOST_BYTES
from dllm_jax.convert.tokenizer_files import read_facts
from dllm_jax.loading.sources import LoadError, find_folder
from dllm_jax.loading.tokenizer import encode, read_tokenizer
from tests.golden.folders import INDEX, copy_golden
from tests.oracles.checkpoints import write_tiny
from tests.oracles.draft_files import write_draft

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", INDEX])
@pytest.mark.parametrize("text", [DEEP, '{"a": ' + "[" * 500 + "]" * 500 + "}"])
def test_json_that_is_nested_deep_is_one_problem(name, text, tmp_path):
    """Item 17."""
    folder = copy_golden("sdar", tmp_path / "sdar")
    (folder / name).write_text(text)
    assert any(f"{name} is not valid JSON (nested too deep)" in p for p in inspect(folder).problems)


def test_an_index_that_is_no_file_is_refused(tmp_path):
    """Item 17."""
    folder = copy_golden("sdar", tmp_path / "sdar", single=True)
    (folder / INDEX).mkdir()
    assert any(f"{INDEX} is a folder" in problem for problem in inspect(folder).problems)


def test_a_name_of_5000_characters_is_a_short_line(capsys):
    """Item 17."""
    with pytest.raises(LoadError, match="does not exist"):
        find_folder("x" * 5000)
    assert "does not exist" in inspect("x" * 5000).problems[0]
    for argv in (["generate", "hi", "--model", "é" * 5000], ["generate", "hi", "--" + "x" * 5000]):
        assert main(argv) in (1, 2)
        (line,) = capsys.readouterr().err.splitlines()
        assert len(line.encode()) < 1000
        assert line.startswith("error: ")


def test_an_error_that_cannot_be_shown_is_named_by_its_type(monkeypatch, capsys):
    """Item 17."""

    class Dumb(Exception):
        def __str__(self):
            raise RuntimeError

    def fail(args, stop):
        raise Dumb

    monkeypatch.setattr("dllm_jax.cli.info.run", fail)
    assert main(["info"]) == 1
    assert capsys.readouterr().err.startswith("error: Dumb: ")


def test_a_sparse_tokenizer_is_refused_by_its_size(tmp_path):
    """Item 16."""
    folder = copy_golden("sdar", tmp_path / "sdar")
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(4 << 30)
    assert any(f"at most {MOST_BYTES} are read" in p for p in inspect(folder).problems)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused(name, tmp_path):
    """Item 16: reading it would wait for ever."""
    folder = copy_golden("sdar", tmp_path / "sdar")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert any(f"{name} is a pipe or a device" in problem for problem in inspect(folder).problems)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["deep", "pipe", "folder", "sparse"])
def test_hostile_files_of_an_adapter_are_one_line(name, kind, tmp_path, capsys):
    """Items 16 and 17: also a config that nests deep, and 4 GiB of nothing."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    save_file(
        {"x.lora_A.weight": np.zeros((4, 8), np.float32)}, folder / "adapter_model.safetensors"
    )
    path = folder / name
    path.unlink()
    if kind == "deep":
        path.write_text(DEEP)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(4 << 30)
    assert (
        main(["inspect", str(copy_golden("sdar", tmp_path / "sdar")), "--lora", str(folder)]) == 1
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert len(line.encode()) < 1000


def test_numbers_and_names_that_no_config_holds_are_problems(tmp_path):
    """Item 9: each of them was an exception of another kind, or a line without end."""
    yarn = {"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 1e308}
    for family, entries, reported in (
        ("llada2", {"partial_rotary_factor": 1e308}, "partial_rotary_factor=1e+308 must be"),
        ("llada", {"mlp_hidden_size": ..., "mlp_ratio": 1e308}, "mlp_ratio=1e+308 must be"),
        ("qwen3", {"rope_scaling": yarn}, "factor=1e+308 must be"),
        ("qwen3", {"rope_scaling": "x" * 5000}, "must be an object or null"),
    ):
        folder = write_tiny(family, tmp_path / family)
        config = {**json.loads((folder / "config.json").read_text()), **entries}
        config = {key: value for key, value in config.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(config))
        problems = inspect(folder).problems
        assert any(reported in problem for problem in problems), problems
        assert max(map(len, problems)) <= 1000
    folder = write_draft(tmp_path / "draft", architectures=[{"a": 1}])
    assert all("\n" not in problem for problem in inspect(folder).problems)


def test_an_id_of_a_token_may_be_a_text_of_digits(tmp_path):
    folder = copy_golden("sdar", tmp_path / "sdar")
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": "0", "b": 1}}}')
    assert read_facts(folder).num_tokens == 2


def test_every_field_of_a_converted_folder_has_its_kind(random_folder, tmp_path):
    folder = convert(random_folder, tmp_path / "converted")
    meta = json.loads((folder / "meta.json").read_text())
    for part in ("config", "defaults"):
        for name, value in meta[part].items():
            numeric = isinstance(value, int | float)
            for wrong in ({"a": [1]}, [None], *(["x\n" * 3000] if numeric else [])):
                changed = {**meta, part: {**meta[part], name: wrong}}
                (folder / "meta.json").write_text(json.dumps(changed))
                problems = inspect(folder).problems
                assert problems, (name, wrong)
                assert max(map(len, problems)) <= 1000
                assert all("\n" not in problem for problem in problems)
    changed = {**meta, "config": {**meta["config"], "num_layers": 10**12}}
    (folder / "meta.json").write_text(json.dumps(changed))
    assert "num_layers=1000000000000 must be in [1, 10000]" in inspect(folder).problems[0]


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BACKTRACKS = {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "b"}


def with_steps(folder, **steps):
    """The folder with these steps in its `tokenizer.json`."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | steps))
    return folder


@pytest.mark.parametrize(
    "steps",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 60}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, BACKTRACKS] * 9}},
        {"normalizer": {**DOUBLE, "content": "a" * 10**6}},
        {"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 60}},
        {"decoder": {"type": "Sequence", "decoders": [DOUBLE] * 60}},
    ],
)
def test_a_tokenizer_that_blows_texts_up_is_refused(steps, random_folder, tmp_path):
    """Item 16: a text of one character would need more memory than there is."""
    folder = with_steps(shutil.copytree(random_folder, tmp_path / "m"), **steps)
    with pytest.raises(ValueError, match="can make a text more than 1000 times as long"):
        read_tokenizer(folder)


def test_a_pattern_of_a_tokenizer_that_backtracks_is_one_error(random_folder, tmp_path, capfd):
    """Item 16: the library's panic is no `Exception`; its own lines go to stderr."""
    folder = with_steps(shutil.copytree(random_folder, tmp_path / "m"), normalizer=BACKTRACKS)
    with pytest.raises(ValueError, match="the tokenizer cannot encode the text") as refused:
        encode(read_tokenizer(folder), "a" * 60 + "b")
    assert len(str(refused.value)) < 1000
    capfd.readouterr()


def test_two_million_experts_are_one_problem():
    """Item 16."""
    layer = {"experts_down": np.broadcast_to(np.uint8(0), (2_000_000, 8, 8))}
    assert "num_experts=2000000 asks for" in (_too_many({"layers": [layer]}, {}) or "")


def test_a_pattern_with_catastrophic_backtracking_ends():
    """Item 16."""
    import time

    config = json.loads('{"rank_pattern": {"(a|aa)+$": 4}}')
    module = "a" * 60 + "b"
    with pytest.raises(TimeoutError, match="name the modules"):
        _of_module(config, "rank_pattern", module, 8, time.thread_time() + 0.1)


def test_a_prompt_file_is_a_regular_file(tmp_path, capsys):
    """Item 16."""
    os.mkfifo(tmp_path / "pipe")
    for name in ("/dev/zero", str(tmp_path / "pipe")):
        assert main(["generate", "--prompt-file", name]) == 1
        reported = capsys.readouterr().err
        assert f"prompt file {name!r} is a pipe or a device" in reported
        assert "give a regular file, or pipe the text in and give -" in reported
