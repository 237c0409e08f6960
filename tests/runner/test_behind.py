"""The start (issue 23, item 12; issue 25, item 7): ready with the largest programs alone.

Proves that they serve any request with the tokens that all programs give, that no program is
compiled for a request while the others are missing, that each replaces a larger one as soon as it
is there, that a request never waits for a compilation, and that a failed compilation, `close`, a
dropped runner and the end of the process end as they should.
"""

import dataclasses
import gc
import subprocess
import sys
import threading
import time
import types
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.engine.engine import Engine
from dllm_jax.engine.layout import EngineConfig
from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.kernels.helpers import Helper
from dllm_jax.runner import behind, buckets, elsewhere, timing, warmup
from dllm_jax.runner.behind import Behind
from dllm_jax.runner.runner import ModelRunner
from dllm_jax.strategies import MultiBD
from dllm_jax.strategies.core.protocol import split_knobs
from tests.contract import models

ROOT = Path(__file__).resolve().parents[2]
STRATEGY = MultiBD(0.35, 0.25, 0.5, block_size=4, buffer_size=2)
SIZES = EngineConfig(
    max_num_seqs=3,
    max_model_len=60,
    page_size=8,
    slot_buckets=(1, 3),
    page_buckets=(3, 8),
    prefill_buckets=(8, 16),
)


# Of what is really compiled: two decodes, one prefill pass, and the small ones.
FEW = dataclasses.replace(SIZES, page_buckets=(8,), prefill_buckets=(8,))


def make_runner(config: EngineConfig = SIZES, allocate: bool = False, several: int = 1):
    made = buckets.make_layout(models.plain(), STRATEGY, {}, config)
    made = dataclasses.replace(made, prompts_a_pass=several)
    return ModelRunner(models.plain(), split_knobs(STRATEGY)[0], {}, made, allocate=allocate)


def turns() -> tuple[Any, ...]:
    """How long a thread may keep the GIL, and after what all objects are looked at for garbage."""
    return sys.getswitchinterval(), gc.get_threshold()[2]


class Compiler:
    """A runner that compiles nothing, and takes as long for it as it is told."""

    def __init__(self, fails: str = ""):
        self.compiled, self.began, self.go = {}, [], threading.Event()
        self.fails, self.behind = fails, None
        self.num_lowering = self.most_lowering = 0
        self.turns = set()

    num_compiled = property(lambda self: len(self.compiled))
    num_programs = property(lambda self: len(self.compiled) + len(self.behind.missing))

    def lower(self, call):
        self.num_lowering += 1
        self.most_lowering = max(self.most_lowering, self.num_lowering)
        self.began.append(call.key)
        self.turns.add(turns())
        time.sleep(0.005)
        self.num_lowering -= 1
        go, fails = self.go, self.fails == call.key

        def compile(options):
            assert options == elsewhere.untuned()
            assert go.wait(10)
            if fails:
                raise RuntimeError("no such instruction")
            return "compiled"

        return types.SimpleNamespace(compile=compile)


def programs(*names: str) -> list[warmup.Work]:
    return [warmup.Work(n, lambda runner, n=n: types.SimpleNamespace(key=n)) for n in names]


# --- which programs ---------------------------------------------------------------------------


def test_what_any_request_can_do_with_comes_first_and_few_short_texts_next():
    layout = make_runner().layout
    first, rest = warmup.in_two(layout, 5)
    every = [item.name for item in warmup.every_program(layout, 5)]
    names = [item.name for item in rest]
    assert sorted(names + [item.name for item in first]) == sorted(every)
    assert {item.name for item in first} == {
        "decode 3 slots, 8 pages",
        "prefill 16 tokens, 8 pages, blocks",
        "admit",
        "restore",
        "begin",
    }
    assert names[:2] == ["decode 1 slots, 3 pages", "decode 3 slots, 3 pages"]
    assert names[2:4] == ["prefill 8 tokens, 3 pages, blocks", "prefill 16 tokens, 3 pages, blocks"]


@pytest.mark.parametrize(
    ("missing", "asked", "given"),
    [
        (set(), (1, 3), (1, 3)),
        ({(1, 3)}, (1, 3), (1, 8)),
        ({(1, 3), (1, 8)}, (1, 3), (3, 3)),
        ({(1, 3), (1, 8), (3, 3)}, (1, 3), (3, 8)),
        ({(1, 3)}, (3, 3), (3, 3)),
    ],
)
def test_a_missing_program_is_replaced_by_the_next_larger(missing, asked, given):
    made = make_runner()
    made._behind = types.SimpleNamespace(missing={("decode", *sizes) for sizes in missing})
    assert made.decode_sizes(*asked) == given
    rows, pages = np.array([2], np.int32), np.array([[4, 5, -1]], np.int32)
    if asked[0] == 1:
        rows, wide = made._widened(rows, pages)
        assert wide.shape == (len(rows), wide.shape[1]) == given
        assert len(set(rows.tolist())) == len(rows), "slots of a program are distinct"
        assert rows[0] == 2
        assert wide[0, :3].tolist() == [4, 5, -1]
        assert (wide[1:] == -1).all(), "rows that fill up write nothing"
        assert (wide[:, 3:] == -1).all()


def test_passes_of_short_prompts_wait_for_their_program():
    made, ran = make_runner(several=3), []
    made._run_prefill = lambda pieces: ran.append(
        [(one.size, one.words.shape[1]) for one in pieces]
    )
    made._behind = types.SimpleNamespace(
        missing={item.call(made).key for item in warmup.in_two(made.layout, 5)[1]}
    )
    pages = np.array([0, 1, -1], np.int32)

    def prefill(slot):
        made.prefill(slot, [1] * 5, 0, 5, 5, True, pages, 8, "blocks")

    for slot in range(3):
        prefill(slot)
    assert ran == [[(16, 5 + 16 + 8)]] * 3, "one by one, by the largest"
    ran.clear()
    made._behind.missing.clear()
    for slot in range(3):
        prefill(slot)
    assert ran == [[(8, 5 + 8 + 3)] * 3]


# --- the threads ------------------------------------------------------------------------------


def run(compiler: Compiler, work: list[warmup.Work], progress=None) -> Behind:
    compiler.behind = Behind(compiler, work, progress)
    compiler.behind.start()
    return compiler.behind


def test_programs_come_one_by_one_in_order_and_are_told(monkeypatch):
    monkeypatch.setattr(warmup, "num_cores", lambda: 4)
    compiler, reported, usual = Compiler(), [], turns()
    made = run(compiler, programs("a", "b", "c", "d"), lambda *one: reported.append(one))
    time.sleep(0.1)
    assert made.missing == {"a", "b", "c", "d"}, "not there before it is compiled"
    assert compiler.began == ["a", "b"], "half of the cores are left alone"
    compiler.go.set()
    made.join()
    assert made.missing == set()
    assert compiler.began == ["a", "b", "c", "d"]
    assert compiler.most_lowering == 1
    assert compiler.turns == {(behind.SWITCH_S, behind.NEVER)}, "requests wait for none"
    assert turns() == usual
    assert {name for name, _, _ in reported[1:]} == {"a", "b", "c", "d"}
    assert [(done, of) for _, done, of in reported] == [(i, 4) for i in range(5)]


def test_a_helper_goes_on_with_the_kernels_that_it_has(monkeypatch):
    """And with any program once there is none of its own."""
    made = Behind(Compiler(), programs(*"abcd"))
    made._left = deque(warmup.Work(f"{i}", lambda runner: None, shares=i // 2) for i in range(6))
    one, other = Helper(), Helper()
    order = [one, other, other, one, other, other, one]
    names = [item and item.name for item in map(made._next, order)]
    assert names == ["0", "2", "3", "1", "4", "5", None]


def test_a_program_that_fails_is_told_and_the_others_come():
    compiler = Compiler(fails="b")
    compiler.go.set()
    with pytest.warns(UserWarning, match=r"b: compiling failed.*no such instruction") as said:
        run(compiler, programs("a", "b", "c")).join()
    assert len(said) == 1
    assert set(compiler.compiled) == {"a", "c"}
    assert compiler.behind.missing == {"b"}, "larger ones go on in its place"


def test_what_no_other_process_compiles_is_compiled_here(monkeypatch):
    monkeypatch.setattr(behind, "_is_for_helpers", lambda runner: True)
    compiler, asked = Compiler(), []
    compiler.go.set()

    def export(call):
        asked.append(call.key)
        return types.SimpleNamespace(compile=lambda helper: None)

    compiler.export = export
    made = run(compiler, programs(*"abcdefgh"))
    made.join()
    assert sorted(compiler.compiled) == [*"abcdefgh"]
    assert len(asked) <= len(made._threads), "each process is asked once"


def test_close_begins_no_further_program():
    compiler = Compiler()
    made = run(compiler, programs(*"abcdefgh"))
    while not compiler.began:
        time.sleep(0.01)
    made.close()
    compiler.go.set()
    made.join()
    assert len(compiler.began) <= len(made._threads) < 8


def test_a_dropped_runner_is_not_kept_by_what_compiles_for_it():
    compiler = Compiler()
    made, go, seen = run(compiler, programs(*"abcdefgh")), compiler.go, weakref.ref(compiler)
    while not compiler.began:
        time.sleep(0.01)
    time.sleep(0.05)
    began, compiler.behind = compiler.began, None
    del compiler
    gc.collect()
    assert seen() is None, "its memory is free while a program is being compiled"
    go.set()
    made.join()
    assert len(began) <= len(made._threads) < 8


ENDS = """
import threading, time, types
from dllm_jax.runner import behind, warmup

class Slow:
    compiled = set()
    def lower(self, call):
        def compile(options):
            time.sleep(1.0)
            print("compiled", flush=True)
        return types.SimpleNamespace(compile=compile)

slow = Slow()
work = [warmup.Work(str(i), lambda runner, i=i: types.SimpleNamespace(key=i)) for i in range(99)]
one = behind.Behind(slow, work)
one.start()
time.sleep(0.3)
print(len(one._threads))
"""


@pytest.mark.long
def test_the_process_ends_with_the_program_that_is_being_compiled():
    """Within XLA a thread may not be torn down; 99 programs would take minutes."""
    began = time.monotonic()
    said = subprocess.check_output([sys.executable, "-c", ENDS], cwd=ROOT, text=True, timeout=60)
    threads, *compiled = said.split()
    assert len(compiled) == int(threads)
    assert time.monotonic() - began < 30


# --- times ------------------------------------------------------------------------------------


def test_sizes_that_are_not_there_cost_less_than_the_next_larger_as_estimated():
    """And are not timed: their place is taken by the program that was."""
    layout = make_runner().layout
    timed = timing.MeasuredCost({(3, 8): 0.6}, {"blocks": {(16, 8): 0.3, (16, 3): 0.2}})
    found = timing.filled(timed, layout, models.plain(), "gpu")
    assert set(found.decode) == {
        (rows, columns) for rows in layout.slot_buckets for columns in layout.page_buckets
    }
    assert found.decode[3, 8] == 0.6
    assert 0 < found.decode[1, 3] <= found.decode[1, 8] < 0.6
    assert found.prefill["blocks"][16, 3] == 0.2
    assert 0 < found.prefill["blocks"][8, 3] < 0.2
    assert len(found.prefill["blocks"]) == 4


# --- an engine --------------------------------------------------------------------------------


def answers(runner: ModelRunner, before_step=lambda: None) -> list[list[int]]:
    """Texts of five requests for three slots, of several lengths, one of them sampled."""
    engine = Engine(runner)
    lengths = (3, 9, 5, 21, 2)
    for i, length in enumerate(lengths):
        params = SamplingParams(max_tokens=12, seed=i, temperature=0.5 * (i == 1))
        prompt = [1 + (7 * i + j) % 20 for j in range(length)]
        engine.add(Request(prompt_token_ids=prompt, params=params))
    done = {}
    while engine.has_work:
        before_step()
        done.update({o.request_id: o.outputs[0].token_ids for o in engine.step()})
    assert engine.stats().num_late_compiles == 0
    return [done[str(i)] for i in range(len(lengths))]


def keys_run(runner: ModelRunner, monkeypatch) -> list:
    ran, call = [], runner._call
    monkeypatch.setattr(runner, "_call", lambda one: (ran.append(one.key), call(one))[1])
    return ran


@pytest.mark.long
def test_the_largest_programs_serve_every_request_and_smaller_ones_replace_them(monkeypatch):
    """Items 23.12 and 25.7: the same tokens before and after, and no request waits."""
    monkeypatch.setattr(Behind, "start", lambda self: None)
    made = make_runner(FEW)
    made.warm_up(behind=True)
    assert (made.num_compiled, made.num_programs) == (5, 6)
    ran = keys_run(made, monkeypatch)
    before = answers(made)
    assert {key for key in ran if key[0] == "decode"} == {("decode", 3, 8)}
    assert made.num_compiled == 5, "nothing is compiled for a request"
    # Here as on a GPU: another process compiles it.
    monkeypatch.setattr(behind, "_is_for_helpers", lambda runner: True)
    monkeypatch.setattr(elsewhere, "_place", lambda asked: None)  # and not an earlier test
    monkeypatch.setattr(made, "lower", None)
    made._behind._run(made._behind._helpers[0])
    assert made.num_compiled == made.num_programs == 6
    ran.clear()
    made.reset()
    assert answers(made) == before
    assert {key for key in ran if key[0] == "decode"} == {("decode", 1, 8), ("decode", 3, 8)}
    assert made.num_compiled == 6
    # Whenever a program comes, in the middle of texts: some steps by either.
    one, sizes = {("decode", 1, 8)}, []

    def comes_or_goes():
        made._behind.missing ^= one
        sizes.append(made.decode_sizes(1, 8))

    made.reset()
    assert answers(made, comes_or_goes) == before
    assert set(sizes) == {(1, 8), (3, 8)}
    made.close()


@pytest.mark.long
def test_requests_run_while_a_program_is_being_compiled(monkeypatch):
    going, go = threading.Event(), threading.Event()

    def compile(self, item, helper):
        going.set()
        assert go.wait(60)

    monkeypatch.setattr(Behind, "_compile", compile)
    with dj.LLM(models.plain(), STRATEGY, config=FEW, progress=False) as llm:
        assert going.wait(10)
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8
        stats = llm.engine.stats()
        assert (stats.num_compiled, stats.num_programs, stats.num_late_compiles) == (5, 6, 0)
        assert not go.is_set()
    go.set()


@pytest.mark.long
def test_all_of_them_first_where_one_asks_for_it():
    with dj.LLM(models.plain(), STRATEGY, config=FEW, warm_up="all", progress=False) as llm:
        stats = llm.engine.stats()
        assert stats.num_compiled == stats.num_programs == 6
        assert llm.engine.runner._behind is None
    with pytest.raises(ValueError, match=r"warm_up='most' must be True, False or \"all\""):
        dj.LLM(models.plain(), STRATEGY, config=FEW, warm_up="most")
