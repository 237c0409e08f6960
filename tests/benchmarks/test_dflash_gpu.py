"""Proves what `benchmarks/dflash_gpu.py` makes of its times: floors as dflash.md has them, ratios
and speed-ups of one turn, accepted lengths counted with the bonus; and, slow, that its plain loop
writes what `ar` writes and that the script runs whole, small, on a CPU.
"""

import argparse
import dataclasses
import json
import threading
import time

import compare
import dflash_gpu
import dflash_pair
import jax
import jax.numpy as jnp
import pytest

from dllm_jax.bench.roofline import RATES
from dllm_jax.strategies.dflash import drafting
from tests.bench.test_bench_step import published

pytestmark = pytest.mark.long


(H200,) = RATES


@pytest.fixture(scope="module")
def full():
    return published(dflash_gpu.QWEN), published(dflash_gpu.QWEN_DRAFT)


def test_floors_of_the_full_size_are_those_of_the_notes(full):
    floors = dflash_gpu.floors_ms(*full, 1, 1024, H200)
    assert floors["draft pass"] == pytest.approx(0.74, abs=0.01)
    assert floors["round"] / floors["ar step"] == pytest.approx(1.23, abs=0.01)
    # 32 requests: 512 rows are more operations than bytes, a token each is not.
    wide = dflash_gpu.floors_ms(*full, 32, 1024, H200)
    assert wide["ar step"] < 2.5 * floors["ar step"]
    assert wide["verify pass"] > 1.6 * wide["ar step"]
    assert dflash_gpu.floors_ms(*full, 1, 1024, "another device") == {}


def test_the_drafts_cache_takes_20_kib_a_token(full):
    reported = dflash_gpu.draft_cache(full[1])
    assert reported == {"bytes_a_token": 20 * 1024, "computed": 20 * 1024}


def test_ratios_are_medians_of_one_turns():
    samples = {"ar step": [4.0, 2.0, 4.0], "round": [5.0, 4.0, 4.8], "bare step": [4.0, 1.6, 3.2]}
    samples |= {"draft pass": [0.8, 0.8, 1.0]}
    reported = dflash_gpu.derive(samples, {"draft pass": 0.8, "round": 4.5, "ar step": 3.6})
    assert reported["round_over_ar"] == 1.25
    assert reported["ar_over_bare"] == 1.25
    assert reported["draft_over_floor"] == 1.0
    assert reported["round_over_ar_floor"] == 1.25
    assert {tau: reported["speedup_at"][tau] for tau in ("2", "5", "8")} == {
        "2": 1.6,
        "5": 4,
        "8": 6.4,
    }
    assert "round_over_ar" not in dflash_gpu.derive({"ar step": [1.0], "bare step": [1.0]}, {})


def test_accepted_lengths_count_the_bonus_and_no_token_behind_the_end():
    # A first token each was there before any round. The first text ends in its second round, with
    # a stop id after one token; what that round accepted past it is in no text.
    reported = dflash_pair.accepted([[4, 3], [1, 1]], [[1] * 6, [1] * 3], [True, False], 4)
    assert reported["rounds"] == 4
    assert reported["mean_accepted_length"] == (4 + 3 + 1 + 1) / 4
    assert reported["emitted_per_round"] == ((6 + 1 - 1) + (3 - 1)) / 4
    assert reported["accepted_per_position"] == [0.5, 0.5, 0.25]
    assert reported["rounds_of_length"] == [2, 0, 1, 1]


def test_what_tells_of_one_request_is_compiled_and_timed_first():
    names = ["ar", "dflash, width 16", "dflash, adaptive"]
    first, second = dflash_pair.stages((1, 8, 32), names)
    assert first == {1: names[:2]}
    assert list(second.items()) == [(1, names[2:]), (32, names), (8, names)]


def test_what_is_not_compiled_in_time_is_named_and_the_rest_returned(capsys):
    def fails():
        raise RuntimeError("no memory")

    report, gate = dflash_gpu.Report(None), threading.Event()
    jobs = {"a": lambda: 3, "b": fails, "c": lambda: gate.wait(120)}
    args = argparse.Namespace(threads=3)
    started = dflash_pair.begun(jobs, args)
    while sum(job.done() for job in started[2].values()) < 2:
        time.sleep(0.01)
    done = dflash_pair.gathered(started, "loop", report, time.perf_counter())
    gate.set()
    assert done == {"a": 3}
    late = ["b: RuntimeError: no memory", "c: TimeoutError: "]
    assert report.content["late"] == [f"pair, loop, {one}" for one in late]
    assert report.content["ready"][0]["programs"] == 3
    assert "pair, loop, a: ready" in capsys.readouterr().out


def test_launches_of_a_program_are_those_of_its_loop():
    def loop(x, count):
        def one(_, x):
            return jnp.sort(jnp.sin(x) @ x, axis=0)

        return jax.lax.fori_loop(0, count, one, x)

    text = jax.jit(loop).lower(jnp.ones((8, 8)), 3).compile().as_text() or ""
    found = dflash_gpu.launches(text)
    assert found["sort"] == 1
    assert 2 <= sum(found.values()) <= 8
    assert not {"parameter", "get-tuple-element"} & found.keys()
    assert dflash_gpu.launches("HloModule m") == {}


def test_launches_of_each_branch_are_told_by_themselves():
    def loop(x, count):
        def one(i, x):
            ways = (lambda x: jnp.sort(x, axis=0), lambda x: jnp.sort(jnp.sort(x, 0) @ x, axis=1))
            return jax.lax.switch(i % 2, ways, x)

        return jax.lax.fori_loop(0, count, one, x)

    text = jax.jit(loop).lower(jnp.ones((8, 8)), 3).compile().as_text() or ""
    narrow, wide = dflash_gpu.branch_launches(text)
    assert 1 <= narrow < wide
    assert dflash_gpu.branch_launches("HloModule m") == []


def test_a_weight_that_is_cut_out_is_seen():
    def cut(x, w):
        return x @ w[:, 3:8]

    args = (jnp.ones((4, 16)), jnp.ones((16, 40)))
    text = jax.jit(cut).lower(*args).compile({"xla_backend_optimization_level": 0}).as_text() or ""
    found = dflash_gpu.written_slices(text, 16 * 5)
    assert found["count"] == len(found["first"]) >= 1
    assert dflash_gpu.written_slices(text, 17)["count"] == 0


def test_a_row_takes_the_place_of_the_same_works_row_and_is_compared(tmp_path):
    path = tmp_path / "out.json"
    report = dflash_gpu.Report(path, command="c")
    report.row(section="steps", model="m", name="round", slots=1, step_ms=2.0)
    report.row(section="steps", model="m", name="round", slots=1, step_ms=1.0)
    report.row(section="steps", model="m", name="round", slots=8, step_ms=3.0)
    reported = json.loads(path.read_text())
    assert [row["step_ms"] for row in reported["rows"]] == [1.0, 3.0]
    assert sorted(compare.figures(reported).values()) == [1.0, 3.0]


def test_what_the_bars_need_is_one_request_and_its_context_fits(full):
    args = argparse.Namespace(
        slots=(1, 8), some_slots=(1,), context=1024, few=6, many=30, max_tokens=512
    )
    bars = dflash_gpu.groups_of({"bars"}, *full, args)
    assert bars == {(dflash_gpu.QWEN, 1): (*full, list(dflash_gpu.BARS))}
    every = dflash_gpu.groups_of({"bars", "ar", "qwen3_8b"}, *full, args)
    assert [(slots, len(names)) for (_, slots), (*_, names) in every.items()] == [(1, 8), (8, 4)]
    assert dflash_gpu.context_of(*full, args) == 1024
    small = full[0].replace(config=dataclasses.replace(full[0].config, max_position=512))
    assert dflash_gpu.context_of(small, None, args) == 512 - 8 * 30 - 2


def test_a_batch_of_which_nothing_was_compiled_is_named(full, monkeypatch):
    args = argparse.Namespace(
        slots=(1,), some_slots=(1,), context=64, few=1, many=2, threads=1, smoke=True
    )
    monkeypatch.setattr(dflash_gpu, "load_pair", lambda smoke: full)
    monkeypatch.setattr(dflash_gpu, "draft_cache", lambda draft: {})
    monkeypatch.setattr(
        dflash_gpu, "compile_groups", lambda groups, *how: {key: {} for key in groups}
    )
    report, waited = dflash_gpu.Report(None), []
    late = time.perf_counter() + 60
    dflash_gpu.steps({"bars"}, args, report, late, lambda: waited.append(1))
    assert report.content["late"] == [f"{dflash_gpu.QWEN}, 1 slots: not timed"]
    assert waited == [1]


@pytest.mark.slow
def test_a_loop_without_strategy_code_writes_the_tokens_of_ar():
    model, _ = dflash_gpu.load_pair(smoke=True)
    names = ("ar step", "bare step")
    loops = dflash_gpu.loops_of(model, None, 2, 64, 64, names)
    loops = {name: make() for name, make in loops.items()}
    assert list(loops) == list(names)
    assert dflash_gpu.same_tokens(loops, 40) == {"steps": 40, "equal_for": [40, 40]}
    program = dflash_gpu.read_program(
        argparse.Namespace(
            program=loops["bare step"].program,
            model=model,
            state=argparse.Namespace(pools={"target": loops["bare step"].state.pool}),
        )
    )
    assert program["pool_copies_in_hlo"] == 0


@pytest.mark.slow
def test_drafts_of_random_weights_are_off_where_their_steps_are_timed():
    target, draft = dflash_gpu.load_pair(smoke=True)
    name = "round, adaptive"
    loop = dflash_gpu.loops_of(target, draft, 1, 64, 512, [name])[name]()
    (found, last), drafted = dflash_gpu.SWITCHED_OFF, []
    for steps in (found, last):
        counts = loop.run(steps)[1].carry.slot
        drafted.append(int(counts[drafting.ROUNDS].sum()))
    assert 4 < drafted[0] < found  # all of them in the first steps
    assert drafted[1] == drafted[0] + 1


@pytest.mark.slow
def test_the_script_runs_whole_and_small(tmp_path):
    out = tmp_path / "dflash.json"
    words = ["--smoke", "--target", dflash_pair.SMOKE, "--threads", "2", "--out", str(out)]
    assert dflash_gpu.main([*words, "--within", "900", "--pair-within", "900"]) == 0
    reported = json.loads(out.read_text())
    steps = {row["name"] for row in reported["rows"] if row.get("section") in ("ar", "steps")}
    assert steps == {
        *("ar step", "bare step", "bare step of 2 rows", "round", "draft pass", "verify pass"),
        *("round of width 1", "round, adaptive"),
    }
    rounds = [row for row in reported["rows"] if row.get("through") == "rounds"]
    assert {row["temperature"] for row in rounds} == {0.0, 1.0}
    unlike = reported["pair"]["rows_unlike_ar_float32"]
    assert unlike.keys() == {"T=0", "T=1"}
    assert all(set(found.values()) == {0} and len(found) == 2 for found in unlike.values())
    assert jax.tree.leaves([row["samples_s"] for row in reported["rows"] if "samples_s" in row])
