"""Proves that a lease is not wasted: rows of a section that hangs are kept and all that it started
is ended, a section that is done is not run again, all is in one file at every moment; and that a
figure more than a tenth slower than a stored one is found, by what it was measured of.
"""

import json
import sys
from pathlib import Path

import compare
import pytest
import run_gpu
import step_time
from run_gpu import Section

import dllm_jax as dj
from tests.serve.driving import gone, within

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
ROW = {"command": "a.py", "rows": [{"shape": "1x1", "step_ms": 2.0}]}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(run_gpu, "POLL_S", 0.02)
    monkeypatch.setattr(run_gpu, "GRACE_S", 0.2)
    monkeypatch.setattr(run_gpu, "gpu", lambda: None)


def section(code, limit_s=20.0):
    words = (sys.executable, "-S", "-c", code, "{out}")
    return Section(words, words, limit_s)


def writes(result, then=""):
    return f"import json, sys; json.dump({result!r}, open(sys.argv[1], 'w')); {then}"


def run(tmp_path, sections, *argv):
    out = tmp_path / "run.json"
    status = run_gpu.main(["--out", str(out), "--commit", "abc", *argv], sections)
    return status, json.loads(out.read_text()), (tmp_path / "run.log").read_text()


def test_a_section_that_hangs_is_ended_with_all_it_started_and_its_rows_are_kept(tmp_path):
    pids = tmp_path / "pids"
    # It and its child do not heed the request to end.
    hang = (
        "import os, signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "child = subprocess.Popen(['sleep', '600']); "
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(600)"
    )
    sections = {"hangs": section(writes(ROW, hang), 8.0), "next": section(writes(ROW))}
    status, report, log = run(tmp_path, sections)
    assert status == 1
    assert report["sections"]["hangs"]["status"] == "failed: killed after 8 s"
    assert report["sections"]["hangs"]["result"] == ROW
    assert report["sections"]["next"]["status"] == "done"
    assert "not done: hangs" in log
    for pid in map(int, pids.read_text().split()):
        assert within(lambda pid=pid: gone(pid))


def test_sections_that_are_done_are_skipped_and_those_that_failed_are_not(tmp_path):
    count = tmp_path / "count"
    counted = f"open({str(count)!r}, 'a').write('.')"
    sections = {
        "good": section(writes(ROW, counted)),
        "bad": section(f"{counted}; raise SystemExit(3)"),
    }
    for _ in range(2):
        status, report, log = run(tmp_path, sections)
        assert status == 1
    assert len(count.read_text()) == 3  # good once, bad twice
    assert report["sections"]["bad"]["status"] == "failed: status 3"
    assert report["sections"]["good"]["commit"] == "abc"
    assert "[good] there already, of commit abc" in log
    run(tmp_path, sections, "--again", "--sections", "good")
    assert len(count.read_text()) == 4
    # One file and one log: a lease brings back no more than a few.
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "run.log", "count"}


def test_rows_are_in_the_file_while_the_section_runs(tmp_path):
    out = tmp_path / "run.json"
    # The section itself looks for its row in the one file, and fails without it.
    look = (
        "import time; end = time.monotonic() + 120\n"
        f"while time.monotonic() < end and 'step_ms' not in open({str(out)!r}).read():\n"
        "    time.sleep(0.02)\n"
        "raise SystemExit(time.monotonic() >= end)"
    )
    out.write_text(json.dumps({"sections": {}}))
    status, report, _ = run(tmp_path, {"looks": section(writes(ROW, look))})
    assert (status, report["sections"]["looks"]["status"]) == (0, "done")


def test_no_section_begins_when_the_time_is_over(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"sections": {}}))
    status, report, log = run(tmp_path, {"late": section(writes(ROW))}, "--within", "1e-9")
    assert (status, report["sections"]) == (1, {})
    assert "[late] not begun" in log


def test_unknown_sections_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_gpu.main(["--out", str(tmp_path / "x"), "--sections", "nothing"])
    assert "no section nothing; there are step_1.7b" in capsys.readouterr().err


def test_every_section_ends_within_eight_minutes_and_its_script_exists():
    for one in run_gpu.SECTIONS.values():
        assert one.limit_s < 480
        for words in (one.words, one.smoke):
            assert words.count("{out}") == 1
            assert all(Path(word).exists() for word in words if word.endswith(".py"))


def stored(tmp_path, result, name="stored"):
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(result))
    return str(path)


@pytest.mark.parametrize(("now", "status"), [(2.19, 0), (2.21, 1), (1.0, 0)])
def test_a_tenth_slower_than_the_stored_figure_fails_with_a_table(tmp_path, now, status, capsys):
    result = {**ROW, "rows": [{"shape": "1x1", "step_ms": now}, {"shape": "9x9", "step_ms": 9.0}]}
    sections = {"one": section(writes(result))}
    old = stored(tmp_path, ROW)
    assert run(tmp_path, sections, "--compare", old)[0] == status
    reported = capsys.readouterr().out
    assert ("SLOWER" in reported) == bool(status)
    assert f"{2.0:>10.3f} {now:>10.3f} {now / 2:>6.2f}" in reported
    assert "9x9" not in reported.split("stored")[1]  # nobody stored it


def test_figures_are_told_apart_by_what_they_were_measured_of():
    results = {
        "command": "c",
        "models": [
            {"model": "m", "rows": [{"slots": 1, "step_ms": 1.0}, {"slots": 8, "step_ms": 2.0}]},
            {"model": "n", "prefill_s": 3.0, "rows": [{"slots": 1, "step_ms": 4.0}]},
        ],
        "profile": {"kernels": [{"name": "k", "step_ms": 7.0}]},
    }
    found = compare.figures(results)
    assert sorted(found.values()) == [1.0, 2.0, 3.0, 4.0]
    assert found == compare.figures({"command": "outer", "sections": {"s": {"result": results}}})


def test_results_without_a_figure_in_common_are_no_success(tmp_path, capsys):
    new = stored(tmp_path, {**ROW, "command": "another"})
    old = tmp_path / "old.json"
    old.write_text(json.dumps(ROW))
    assert compare.main([new, str(old)]) == 1
    assert "nothing to compare" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["temperature", "through"])
def test_a_slower_figure_is_found_at_each_temperature_and_through_each_loop(name, tmp_path):
    def rows(slow=1.0):
        times = {0.0: slow, 1.0: 1.0}
        return {"command": "c", "rows": [{name: at, "step_ms": ms} for at, ms in times.items()]}

    assert len(compare.figures(rows())) == 2
    assert compare.main([stored(tmp_path, rows(3.0), "new"), stored(tmp_path, rows())]) == 1


def test_two_figures_of_the_same_work_are_refused():
    row = {"shape": "1x1", "step_ms": 1.0}
    with pytest.raises(ValueError, match=r"two figures of the same work: .*shape 1x1.*; name"):
        compare.figures({"rows": [row, {**row, "step_ms": 2.0}]})


@pytest.mark.parametrize("path", RESULTS, ids=[path.stem for path in RESULTS])
def test_every_figure_of_the_stored_results_is_read(path):
    def count(node):
        if isinstance(node, list):
            return sum(map(count, node))
        if not isinstance(node, dict):
            return 0
        own = sum(isinstance(node.get(name), int | float) for name in compare.TIMES)
        return own + sum(count(value) for name, value in node.items() if name != "profile")

    results = json.loads(path.read_text())
    found = compare.figures(results)
    assert len(found) == count(results)
    if found:
        assert compare.compared(found, found)[0][3] == 1


def test_results_with_times_are_stored():
    found = {path.stem: len(compare.figures(json.loads(path.read_text()))) for path in RESULTS}
    assert found["paged_attention_h200"] > 300
    assert sum(count > 0 for count in found.values()) >= 10


@pytest.mark.slow
def test_make_bench_reads_what_its_loop_was_compiled_to():
    read = step_time.read_program(dj.load("builtin:tiny-sdar"))
    assert read == {"head_in_hlo": True, "pool_copies_in_hlo": 0, "pools_aliased": True}
