"""Proves that what `benchmarks/start_gpu.py` says of a start adds up, that it knows every program,
and that no more programs than these are made before a first token.
"""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import start_gpu

pytestmark = pytest.mark.long


def test_a_start_is_measured_as_users_have_it(monkeypatch, tmp_path):
    """With the folder of compiled programs that the library turns on, and bytecode."""
    code = "import json, os, sys; print('noise'); print(json.dumps([sys.argv[1:3], *os.environ]))"
    script = tmp_path / "script.py"
    script.write_text(code)
    monkeypatch.setattr(start_gpu, "__file__", str(script))
    for name in ("JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE", "DLLM_OTHER"):
        monkeypatch.setenv(name, "1")
    (words, *names), began = start_gpu.in_own_process(["a", "b"], str(tmp_path))
    assert words == ["a", "b"]
    assert {"XDG_CACHE_HOME", "DLLM_OTHER"} <= {*names}
    assert not {"JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE"} & {*names}
    assert time.time() - 60 < began < time.time()


@pytest.mark.slow
def test_the_stages_of_a_start_add_up_and_every_program_is_named():
    began = time.time() - 1.0
    reported = start_gpu.first_token("builtin:tiny-sdar", began)
    stages = dict(reported["stages"])
    assert 0 < stages.pop("engine_programs_s") < stages["engine_s"]
    assert sum(stages.values()) == pytest.approx(reported["came"] - began)
    assert min(stages.values()) >= 0
    assert stages["interpreter_s"] > 1.0
    rows = {row.pop("program"): row for row in reported["programs"]}
    engine = {"decode", "prefill", "admit", "restore", "begin", "new_state"}
    assert {name: row["count"] for name, row in rows.items()} == dict.fromkeys(engine, 1)
    assert reported["num_programs"] == sum(row["count"] for row in rows.values())
    assert 0 <= reported["num_from_folder"] <= reported["num_programs"]
    assert min(rows["decode"].values()) > 0
    # The table, of the same start twice.
    first = dict.fromkeys(("cold", "warm"), reported) | {"cold_s": 12.0, "warm_s": 3.0}
    for row, name in zip(reported["programs"], rows, strict=True):
        row["program"] = name
    shown = start_gpu.table(first)
    reported["has_bytecode"] = {"jax": True, "dllm_jax": False}
    assert "warm: dllm_jax had no bytecode" in start_gpu.table(first)
    assert "first token                    12.00    3.00" in shown
    assert "warm: 6 programs" in shown


def test_a_start_of_many_slots_is_told_beside_its_bars():
    one = {
        "ready_s": 21.26,
        "first_answer_s": 0.5,
        "programs": [[21.3, 7, 33], [60.0, 33, 33]],
        "all_s": 38.7,
        "behind": {"longest_step_s": 0.25, "longest_call_s": 0.6},
        "after": {"longest_step_s": 0.13, "longest_call_s": 0.14},
        "late_compiles": 0,
        "forwards": 64,
        "parts_ms": {"steps": 115.0},
        "call_ms": 120.0,
        "bare_step_ms": 1.8,
        "overhead": 0.04,
        "costs_ms": [["decode", 1, 16, 2.2, 1.8], ["blocks", 128, 16, 3.0, 3.0]],
    }
    cold, call, costs, warm = start_gpu.ready_table({"cold": one, "warm": {"error": "E"}}).split(
        "\n"
    )
    assert "ready 21.3 s, first answer +0.50 s, 33 of 33 programs +38.7 s" in cold
    assert "longest step meanwhile 0.250 s (then 0.130)" in cold
    assert "64 forwards 120.0 ms, bare step 1.800 ms, overhead 4.0%: {'steps': 115.0}" in call
    assert costs.endswith("over measured: 1.00 to 1.22 in 2 programs")
    assert warm == "warm  {'error': 'E'}"
