"""Proves that what `benchmarks/start_gpu.py` says of a start adds up, that it knows every program,
and that no more programs than these are made before a first token.
"""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import start_gpu


@pytest.mark.slow
def test_the_stages_of_a_start_add_up_and_every_program_is_named():
    began = time.time() - 1.0
    told = start_gpu.first_token("builtin:tiny-sdar", began)
    stages = dict(told["stages"])
    assert 0 < stages.pop("engine_programs_s") < stages["engine_s"]
    assert sum(stages.values()) == pytest.approx(told["came"] - began)
    assert min(stages.values()) >= 0
    assert stages["interpreter_s"] > 1.0
    rows = {row.pop("program"): row for row in told["programs"]}
    engine = {"_decode", "prefill", "admit", "restore", "begin", "new_state"}
    assert {name: row["count"] for name, row in rows.items()} == dict.fromkeys(engine, 1)
    assert told["num_programs"] == sum(row["count"] for row in rows.values())
    assert 0 <= told["num_from_folder"] <= told["num_programs"]
    assert min(rows["_decode"].values()) > 0
    # The table, of the same start twice.
    first = dict.fromkeys(("cold", "warm"), told) | {"cold_s": 12.0, "warm_s": 3.0}
    for row, name in zip(told["programs"], rows, strict=True):
        row["program"] = name
    shown = start_gpu.table(first)
    assert "first token                    12.00    3.00" in shown
    assert "warm: 6 programs" in shown
