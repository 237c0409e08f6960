"""Proves that `benchmarks/fp8_gpu.py` measures all its parts, and that failures are reported."""

import json
import subprocess
import sys

import fp8_gpu
import pytest

from dllm_jax.kernels import hopper


@pytest.mark.slow
def test_every_part_is_measured_small_on_a_cpu(tmp_path):
    out = tmp_path / "out.json"
    forms = "fp8_rows,fp8,bfloat16"
    words = [sys.executable, fp8_gpu.__file__, "--dry", "--out", str(out), "--forms", forms]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads(out.read_text())
    rows = report["rows"]
    assert report["failures"] == {}
    parts = {"check", "layers", "layer launches", "products", "steps", "profiles", "agreement"}
    assert {row["part"] for row in rows} == parts
    assert all(row["is_right"] for row in rows if row["part"] == "check")
    for part in ("layers", "steps"):
        assert {row["form"] for row in rows if row["part"] == part} == set(forms.split(","))
    assert all(row["us"] > 0 for row in rows if row["part"] in ("layers", "products"))
    assert all(row["finite"] for row in rows if row["part"] == "agreement")


def test_a_failure_is_told_and_the_rest_goes_on(tmp_path):
    run = fp8_gpu.Run(tmp_path / "out.json", within=60, dry=True)

    def bad():
        raise RuntimeError("no such kernel")

    assert run.attempt("one", bad) is None
    assert run.attempt("two", lambda: 3) == 3
    run.keep(part="two", us=1.0)
    run.within = 0
    assert run.attempt("three", lambda: 3) is None
    run.write()
    report = json.loads((tmp_path / "out.json").read_text())
    assert "no such kernel" in report["failures"]["one"]
    assert report["failures"]["three"] == "not begun: time is over"
    assert report["rows"] == [{"part": "two", "us": 1.0}]


def test_a_layer_is_what_lies_between_two_rotations():
    names = ["rotate_qkv", "attention", "rotate_qkv", "attention", "norm", "rotate_qkv"]
    names += ["attention", "norm", "rotate_qkv"]
    events = [fp8_gpu.profile.Event(name, None, 3000.0 * i, 1000.0) for i, name in enumerate(names)]
    found = fp8_gpu.a_layer(fp8_gpu.profile.Trace(events, True))
    assert found["in_order"] == [[name, 1.0, 2.0] for name in ("rotate_qkv", "attention", "norm")]
    assert (found["launches"], found["layers"]) == (3, 2)


@pytest.mark.parametrize("rows", [32, 128])
@pytest.mark.parametrize("shape", [(4096, 24576), (12288, 4096), (4096, 6144)])
def test_tiles_that_are_tried_are_whole_and_fit(rows, shape):
    is_gated = shape[1] > 2 * shape[0]
    tried = list(fp8_gpu.candidates(rows, shape, is_gated))
    assert len(tried) >= 3
    for tiling in tried:
        assert shape[1] % tiling.columns == shape[0] % (tiling.depth * tiling.splits) == 0
        assert shape[1] // tiling.columns * tiling.splits <= hopper.MULTIPROCESSORS
        buffers = (-(-rows // 64) * 64 + tiling.columns) * tiling.depth * tiling.stages
        assert buffers <= hopper.SHARED_BYTES
