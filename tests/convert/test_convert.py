"""Weights arrive bit for bit where the network reads them, by every way in and out.

Casts rounded once, Orbax and back, export and back, and what threads and a keyboard may do
meanwhile. Which leaf a tensor becomes is in test_family_logits.py.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_jax.cli import main as command
from dllm_jax.convert import convert, converted, export_hf, inspect, load_params, placing
from dllm_jax.convert.__main__ import main
from dllm_jax.convert.copying import Copy, copy_all
from dllm_jax.convert.weights import read_weights
from dllm_jax.models.dense import param_shapes
from tests.golden.folders import GOLDEN, copy_golden, edit_config, read_tensors


def assert_same(tree, expected):
    """Same structure, types and bits."""
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), other in zip(leaves, jax.tree.leaves(expected), strict=True):
        assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape), path
        assert np.ascontiguousarray(leaf).tobytes() == np.ascontiguousarray(other).tobytes(), path


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_casts_round_each_weight_once(dtype):
    params, _ = load_params(GOLDEN / "qwen3", dtype)
    exact, _ = load_params(GOLDEN / "qwen3", "float32")
    assert_same(params, jax.tree.map(lambda leaf: leaf.astype(dtype), exact))


def test_a_slice_boundary_inside_a_tensor_changes_nothing(monkeypatch):
    whole, _ = load_params(GOLDEN / "sdar")
    monkeypatch.setattr("dllm_jax.convert.copying._PIECE_BYTES", 300)
    assert_same(load_params(GOLDEN / "sdar")[0], whole)


def test_plain_orbax_reads_a_converted_folder(tmp_path):
    import orbax.checkpoint as ocp

    folder = convert(GOLDEN / "sdar", tmp_path / "converted")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        assert_same(checkpointer.restore(folder / "params"), load_params(GOLDEN / "sdar")[0])


def test_converted_folder_says_where_it_comes_from(tmp_path):
    source = copy_golden("sdar", tmp_path / "source")
    (source / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    folder = convert(source, tmp_path / "converted")
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["family"] == "sdar"
    assert meta["dtype"] == "bfloat16"
    assert meta["tokenizer_files"] == ["tokenizer.json", "generation_config.json"]
    assert sorted(meta["digests"]) == sorted(p.name for p in source.glob("*.safetensors"))
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    defaults = inspect(folder).defaults
    assert defaults.stop_token_ids == (3, 4, 91)
    assert defaults.vocab_limit == 2


def test_export_takes_device_arrays_and_rounds_to_bfloat16(tmp_path):
    _, report = load_params(GOLDEN / "sdar")
    params = jax.tree.map(
        lambda leaf: jnp.linspace(0.1, 0.9, leaf.size).reshape(leaf.shape),
        param_shapes(report.config, "float32"),
    )
    folder = export_hf(params, report.config, tmp_path)
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf).astype(ml_dtypes.bfloat16), params)
    assert_same(load_params(folder)[0], rounded)


def test_progress_reaches_the_total(tmp_path):
    size = sum(t.nbytes for t in read_tensors(GOLDEN / "sdar").values())
    for source in (GOLDEN / "sdar", convert(GOLDEN / "sdar", tmp_path / "converted")):
        seen = []
        load_params(source, progress=lambda *counts, seen=seen: seen.append(counts))
        assert len(seen) > 20
        assert seen[-1] == (size, size)
        assert [done for done, _ in seen] == sorted({done for done, _ in seen})
        assert {total for _, total in seen} == {size}


def test_convert_refuses_to_overwrite(tmp_path):
    folder = convert(GOLDEN / "sdar", tmp_path / "converted")
    with pytest.raises(FileExistsError, match=r"exists already; choose .* force=True \(--force\)"):
        convert(GOLDEN / "qwen3", folder)
    assert inspect(folder).family == "sdar"
    convert(GOLDEN / "qwen3", folder, force=True)
    assert inspect(folder).family == "qwen3"
    assert [p.name for p in tmp_path.iterdir()] == ["converted"]


KILLED = """
import os, signal, sys
from dllm_jax.convert import convert, placing
placing._sync = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
convert(sys.argv[1], sys.argv[2], force=True)
"""


@pytest.mark.long
def test_a_killed_conversion_leaves_the_old_folder(tmp_path):
    folder = convert(GOLDEN / "qwen3", tmp_path / "converted")
    before = load_params(folder)[0]
    command = [sys.executable, "-c", KILLED, str(GOLDEN / "sdar"), str(folder)]
    killed = subprocess.run(command, check=False, cwd=os.getcwd())
    assert killed.returncode == -signal.SIGKILL
    assert inspect(folder).family == "qwen3"
    assert_same(load_params(folder)[0], before)


def test_a_failed_conversion_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("dllm_jax.convert.placing._sync", full)
    with pytest.raises(OSError, match="no space is left"):
        convert(GOLDEN / "sdar", tmp_path / "deep" / "converted")
    assert list(tmp_path.iterdir()) == []


def test_force_replaces_converted_and_empty_folders_only(tmp_path):
    source = copy_golden("sdar", tmp_path / "source")
    mine = tmp_path / "mine"
    mine.mkdir()
    assert_same(load_params(convert(source, mine, force=True))[0], load_params(source)[0])
    (mine / "meta.json").write_text('{"format": "another"}')
    file = tmp_path / "file"
    file.write_text("text")
    for target in (mine, file):
        with pytest.raises(FileExistsError, match=r"no converted folder .* force=True \(--force\)"):
            convert(source, target, force=True)
    assert file.read_text() == "text"
    (tmp_path / "link").symlink_to(source)
    for target in (source, tmp_path / "link", tmp_path):
        with pytest.raises(ValueError, match=r"holds the source .* choose another destination"):
            convert(source, target, force=True)
    assert inspect(source).is_ok
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link", "mine", "source"]


@pytest.mark.parametrize("when", ["while reading", "while reading, forced", "before the rename"])
def test_a_folder_that_appears_meanwhile_is_kept(when, tmp_path, monkeypatch):
    target = tmp_path / "converted"

    def appear(*_):
        target.mkdir(exist_ok=True)
        (target / "notes").write_text("mine")

    rename = Path.rename
    if when == "before the rename":
        monkeypatch.setattr(Path, "rename", lambda self, to: appear() or rename(self, to))
    progress = None if when == "before the rename" else appear
    with pytest.raises(FileExistsError, match="force=True"):
        convert(GOLDEN / "sdar", target, force="forced" in when, progress=progress)
    assert [p.name for p in tmp_path.rglob("*")] == ["converted", "notes"]


def test_an_interrupt_between_the_renames_brings_the_old_folder_back(tmp_path, monkeypatch):
    folder = convert(GOLDEN / "qwen3", tmp_path / "converted")
    rename = Path.rename

    def interrupted(self, target):
        if ".partial-" in self.name:
            assert not folder.exists()
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(GOLDEN / "sdar", folder, force=True)
    assert inspect(folder).family == "qwen3"
    assert list(tmp_path.iterdir()) == [folder]


def left_over(folder, age=3600):
    """What a killed conversion to `folder` leaves."""
    left = folder.with_name(f".{folder.name}.partial-abc")
    (left / "params").mkdir(parents=True)
    (left / "params" / "x").write_bytes(bytes(99))
    then = time.time() - age
    os.utime(left, (then, then))
    return left


@pytest.mark.long
def test_what_a_killed_conversion_left_is_named_and_removed(tmp_path):
    """Item 20."""
    folder = tmp_path / "converted"
    left, others = left_over(folder), left_over(tmp_path / "other")
    with pytest.warns(UserWarning, match=r"removed '.+\.converted\.partial-abc', which a conv"):
        convert(GOLDEN / "sdar", folder)
    assert not left.exists()
    assert others.exists()


@pytest.mark.parametrize("why", ["locked", "just made"])
def test_what_may_be_another_process_s_stays(tmp_path, why):
    """Item 20: a lock says that its process lives; a new folder may not have one yet."""
    folder = tmp_path / "converted"
    left = left_over(folder, age=3600 if why == "locked" else 1)
    held = placing._locked(left) if why == "locked" else None
    convert(GOLDEN / "sdar", folder)
    assert left.exists()
    if held is not None:
        os.close(held)


def test_a_conversion_holds_a_lock_on_what_it_writes(tmp_path):
    """Item 20."""
    seen = []

    def progress(done, total):
        seen.extend(path for path in tmp_path.iterdir() if placing._locked(path) is None)

    convert(GOLDEN / "sdar", tmp_path / "converted", progress=progress)
    assert all(".partial-" in path.name for path in seen)
    assert seen


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        ValueError("RESOURCE_EXHAUSTED: 14: No space left on device [os_error_code='28']"),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, error, capsys):
    """Item 20: the last is what Orbax raises, of native code; each other write prints a page."""

    def fail(params, path):
        path.mkdir()
        with converted.quiet():
            print("Traceback ...", file=sys.stderr)
            raise RuntimeError("save failed") from error

    monkeypatch.setattr(converted, "_SETTLE_S", 0.0)
    monkeypatch.setattr(converted, "_write_params", fail)
    argv = ["convert", str(GOLDEN / "sdar"), str(tmp_path / "converted")]
    assert command(argv) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("no space is left on its disk; free some, or choose another folder")
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_found_before_reading(tmp_path, monkeypatch):
    monkeypatch.setattr("dllm_jax.loading.checkpoints.read_weights", pytest.fail)
    (tmp_path / "file").write_text("text")
    words = r"cannot be made \(.+file.*\); choose a destination in a folder that can be written"
    for target in (tmp_path / "file" / "below", tmp_path / "file" / "far" / "below"):
        with pytest.raises(OSError, match=words):
            convert(GOLDEN / "sdar", target)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_threads_change_no_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("dllm_jax.convert.copying._PIECE_BYTES", 500)
    trees = []
    for count in (1, 7):
        monkeypatch.setattr("dllm_jax.convert.copying._num_threads", lambda count=count: count)
        seen = []
        trees.append(load_params(GOLDEN / "sdar", progress=lambda done, _, s=seen: s.append(done)))
        assert seen == sorted(set(seen))
        assert len(seen) > 250
    assert_same(trees[0][0], trees[1][0])


@pytest.mark.parametrize("kind", ["hf", "converted"])
def test_ctrl_c_ends_reading_at_once(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("dllm_jax.convert.copying._PIECE_BYTES", 500)
    folder = GOLDEN / "sdar" if kind == "hf" else convert(GOLDEN / "sdar", tmp_path / "converted")
    reads, preadv, reported = [], os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda *a: reads.append(0) or preadv(*a))

    def press(done, total):
        reported.append(done)
        if len(reported) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_params(folder, progress=press)
    assert len(reported) == 3
    assert len(reads) < 100  # of more than 250 pieces
    assert not [t for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor")]


def test_a_file_that_shrinks_after_its_header_was_read_is_named(tmp_path):
    folder = copy_golden("sdar", tmp_path / "model", single=True)
    report = inspect(folder)
    os.truncate(folder / "model.safetensors", 20000)
    with pytest.raises(OSError, match=r"model.safetensors ends within .*; download it again"):
        read_weights(report)


def test_short_reads_are_continued(monkeypatch):
    whole, _ = load_params(GOLDEN / "sdar")
    preadv = os.preadv

    def short(file, buffers, offset):
        return preadv(file, [buffers[0][: max(len(buffers[0]) // 2, 1)]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert_same(load_params(GOLDEN / "sdar")[0], whole)


@given(
    order=st.permutations(range(4)),
    shape=st.tuples(*(st.integers(1, 5) for _ in range(4))),
    cut=st.integers(0, 3),
    stored=st.sampled_from(["float32", "bfloat16", "float16"]),
    kept=st.sampled_from(["float32", "bfloat16", "float16"]),
    piece=st.integers(1, 200),
)
def test_any_view_is_filled_in_the_order_of_the_file(
    order, shape, cut, stored, kept, piece, tmp_path_factory
):
    stored, kept = np.dtype(stored), np.dtype(kept)
    values = np.random.default_rng(piece).standard_normal(shape).astype(stored)
    path = tmp_path_factory.mktemp("any") / "file"
    path.write_bytes(b"head" + values.tobytes())
    inverse = np.argsort(order)
    room = np.zeros([shape[axis] + (axis == cut) for axis in inverse], kept)
    target = room[tuple(slice(shape[axis]) for axis in inverse)].transpose(order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dllm_jax.convert.copying._PIECE_BYTES", piece)
        assert copy_all([Copy("x", path, 4, stored, target)]) == []
    assert target.tobytes() == values.astype(kept).tobytes()
    assert np.count_nonzero(room) == np.count_nonzero(target)


def test_a_place_without_room_is_found_before_reading(tmp_path, monkeypatch):
    monkeypatch.setattr("dllm_jax.loading.checkpoints.read_weights", pytest.fail)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(OSError, match=r"needs 0\.00 GB but .* has 0\.00 GB free; choose another"):
        convert(GOLDEN / "sdar", tmp_path / "far" / "converted")
    assert list(tmp_path.iterdir()) == []


def test_command_converts_and_reports(tmp_path, capsys):
    target = tmp_path / "converted"
    for places in ([], [str(target)]):
        assert main([str(GOLDEN / "sdar"), *places, "--dry-run", "--dtype", "float32"]) == 0
        out = capsys.readouterr().out
        assert "no problems\nwould read 36 tensors (0.1 MB) and write 27 arrays (0.2 MB, " in out
    assert not target.exists()
    assert main([str(GOLDEN / "sdar"), str(target)]) == 0
    assert f"wrote {target}" in capsys.readouterr().out
    assert inspect(target).is_ok
    for more in ([], ["--dry-run"]):
        assert main([str(GOLDEN / "sdar"), str(target), *more]) == 1
        assert "exists already" in capsys.readouterr().err


def test_command_fails_on_a_broken_checkpoint(tmp_path, capsys):
    folder = copy_golden("sdar", tmp_path / "broken")
    edit_config(folder, hidden_act="gelu")
    assert main([str(folder), "--dry-run"]) == 1
    assert "problem: config.json: hidden_act='gelu'" in capsys.readouterr().out
    assert main([str(folder), str(tmp_path / "out")]) == 1
    assert "error: " in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([str(folder)])
