"""Proves that what `benchmarks/start_gpu.py` says of a start adds up, that it knows every program,
and that no more programs than these are made before a first token.
"""

import json
import time

import pytest
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
    for row, name in zip(reported["programs"], rows, strict=True):
        row["program"] = name
    starts = {name: reported | {"s": seconds} for name, seconds in (("cold", 12.0), ("warm", 3.0))}
    shown = start_gpu.table(starts, "first token")
    starts["warm"]["has_bytecode"] = {"jax": True, "dllm_jax": False}
    assert "warm: dllm_jax had no bytecode" in start_gpu.table(starts, "first token")
    assert "first token                    12.00    3.00" in shown
    assert "warm: 6 programs" in shown


@pytest.mark.slow
def test_an_engine_is_ready_with_all_its_programs(capsys, monkeypatch):
    monkeypatch.setattr(start_gpu, "FORWARDS", 6)
    start_gpu.ready("builtin:tiny-sdar", 2, True)
    *_, cold, warm = map(json.loads, capsys.readouterr().out.splitlines())
    assert warm["num_programs"] == 7  # six of the engine, and its state
    assert (warm["late_compiles"], warm["slots"]) == (0, 2)
    assert 0 < warm["stages"]["engine_programs_s"] < warm["ready_s"]
    assert warm["overhead"] == 1 - warm["forwards"] * warm["bare_step_ms"] / warm["call_ms"]
    starts = {"cold": cold | {"s": 9.0}, "warm": {"error": "E"}}
    *_, line, broken = start_gpu.ready_table(starts).split("\n")
    assert line.startswith(f"cold: ready after {cold['ready_s']:.1f} s (bar 40), ")
    assert broken == "warm: {'error': 'E'}"
