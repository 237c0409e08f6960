"""Before the first request: everything compiled ahead, and every program timed."""

import dataclasses
import io
import itertools
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.compile import start, warmup
from dllm_jax.engine.engine import Engine
from dllm_jax.engine.layout import DeviceFailure, EngineConfig
from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.models import dense
from dllm_jax.runner import buckets, timing
from dllm_jax.runner.runner import ModelRunner
from dllm_jax.runner.timing import calibrate
from dllm_jax.strategies import AR, FullSequence, MultiBD, Needs
from dllm_jax.strategies.core.protocol import split_knobs
from tests.contract import models

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]

STRATEGY = MultiBD(0.35, 0.25, 0.5, block_size=4, buffer_size=2)
WHOLE = FullSequence(block_size=8, buffer_size=4)
CONFIG = EngineConfig(
    max_num_seqs=3,
    max_model_len=60,
    page_size=8,
    slot_buckets=(1, 3),
    page_buckets=(3, 8),
    prefill_buckets=(8,),
)
# Of what is really compiled: two decodes, one prefill pass, and the small ones.
SMALL = dataclasses.replace(CONFIG, page_buckets=None)


def layout(strategy=STRATEGY, model=None, **config):
    config = dataclasses.replace(CONFIG, **config)
    return buckets.make_layout(model or models.plain(), strategy, {}, config)


def device(allocate=False, **config) -> ModelRunner:
    bare, sizes = split_knobs(STRATEGY)[0], dataclasses.replace(SMALL, **config)
    made = buckets.make_layout(models.plain(), STRATEGY, {}, sizes)
    return ModelRunner(models.plain(), bare, {}, made, allocate=allocate)


def tokens(on: ModelRunner) -> list[list[int]]:
    """Texts of three requests, one of them sampled."""
    engine = Engine(on)
    for i, ids in enumerate(([1, 2, 3], [5] * 9, [7, 8, 9, 10, 11])):
        params = SamplingParams(max_tokens=12, seed=i, temperature=0.5 * (i == 1))
        engine.add(Request(prompt_token_ids=ids, params=params))
    done = {}
    while engine.has_work:
        done.update({o.request_id: o.outputs[0].token_ids for o in engine.step()})
    assert engine.stats().num_late_compiles == 0
    return [done[key] for key in sorted(done)]


@pytest.fixture(scope="module")
def warm() -> ModelRunner:
    """A device after warm-up and timing."""
    made = device(allocate=True)
    warmup.warm_up(made, calibrate=True)
    return made


# --- compiling --------------------------------------------------------------------------------


@pytest.mark.slow
def test_programs_are_compiled_without_a_state_and_not_again(compilations, monkeypatch):
    made = device(max_model_len=52, slot_buckets=(3,))  # sizes no other test has
    work = warmup.every_program(made.layout, made.num_words)
    compilations.clear()
    reported = []
    warmup.compile_ahead(made, work, lambda *progress: reported.append(progress))
    assert made.state is None, "memory is taken once everything is compiled"
    assert len(compilations) == len(work) == len({one.name for one in work})
    names, done, total = zip(*reported, strict=True)
    assert {*names} == {one.name for one in work}
    assert (*done, total[0]) == (*range(1, len(work) + 1), len(work))
    seen, take = [], made.device.reset
    monkeypatch.setattr(made.device, "reset", lambda: (seen.extend(compilations), take()))
    compilations.clear()
    warmup.warm_up(made)
    (name,) = compilations
    assert "new_state" in name
    assert seen == [name], "and it is compiled before its memory is taken"
    compilations.clear()
    tokens(made)
    assert not compilations
    jax.jit(lambda x: x * jnp.float32(3.5))(jnp.zeros((11,)))
    assert compilations, "the listener hears"


def _exported_embed(params, cfg, ids):
    """As kernels are on a GPU: what comes out of a program with such a call is committed."""
    rows = dense.embed(params, cfg, ids)
    given = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    return jax.export.export(jax.jit(lambda rows: rows))(given).call(rows)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["weights", "kernels"])
def test_what_is_committed_to_a_device_compiles_nothing_twice(compilations, what):
    """Weights that went through `jax.device_put`, or results of exported kernels."""
    model = models.plain(shift=True)  # its prefill leaves a row, which `begin` takes
    if what == "weights":
        model = model.replace(params=jax.device_put(model.params, jax.devices()[0]))
    else:
        arch = dataclasses.replace(model.arch, embed=_exported_embed)
        model = model.replace(arch=arch, params=jax.device_put(model.params))
    longest = {"weights": 56, "kernels": 57}[what]  # sizes no other test has
    sizes = dataclasses.replace(SMALL, max_model_len=longest, slot_buckets=(3,))
    made = buckets.make_layout(model, STRATEGY, {}, sizes)
    made = ModelRunner(model, split_knobs(STRATEGY)[0], {}, made, allocate=False)
    compilations.clear()
    warmup.warm_up(made)
    assert "jit(begin)" in compilations
    assert len(set(compilations)) == len(compilations), compilations
    compilations.clear()
    tokens(made)
    made.begin(
        0, made.prefill(0, (1,) * 8, 0, 8, 8, True, np.full((8,), -1, np.int32), 8, "blocks")
    )
    made.wait()
    assert not compilations


def programs(count):
    """Work of a runner that is none."""
    every = (types.SimpleNamespace(name=(str(i),), options={"number": i}) for i in range(count))
    return [
        types.SimpleNamespace(name=call.name[0], call=lambda _, call=call: call) for call in every
    ]


class Python:
    """A device that compiles its programs together, and says how many are lowered at once."""

    device = property(lambda self: self)

    def __init__(self, count):
        self.compiled, self.log, self.lowering = {}, [], 0
        self.all = threading.Barrier(count, timeout=120)

    def lower(self, call):
        self.lowering += 1
        time.sleep(0.01)
        self.log.append(self.lowering)
        self.lowering -= 1
        return types.SimpleNamespace(compile=self.compile)

    def note_compiling(self, seconds):
        assert seconds >= 0.04

    def compile(self, options):
        self.all.wait()  # in vain, if a program is lowered only once another is compiled
        return types.SimpleNamespace(options=options, memory_analysis=lambda: None)


def test_programs_are_lowered_one_by_one_while_those_before_are_compiled(monkeypatch):
    monkeypatch.setattr(warmup, "num_cores", lambda: 4)
    python = Python(4)
    warmup.compile_ahead(python, programs(4))
    assert python.log == [1] * 4
    kept = {name: one.options for name, one in python.compiled.items()}
    assert kept == {(str(i),): {"number": i} for i in range(4)}, "each by its own options"


def test_every_size_of_every_program_is_listed_once_largest_first():
    work = warmup.every_program(layout(), 5)
    names = [one.name for one in work]
    assert len(names) == len(set(names)) == 2 * 2 + 2 + 3
    assert "prefill 8 tokens, 3 pages, blocks" in names
    assert names[-3:] == ["admit", "restore", "begin"]
    largest = ["decode 3 slots, 8 pages", "prefill 8 tokens, 8 pages, blocks"]
    assert names[:2] == largest, "what takes longest begins first"
    anew = warmup.every_program(layout(STRATEGY.replace(needs=Needs(soft_commits=True))), 5)
    assert [one.name for one in anew[-2:]] == ["admit", "begin"], "nothing is restored"


@pytest.mark.parametrize(
    ("strategy", "model", "kinds"),
    [
        (STRATEGY, None, ("blocks",)),
        (AR(), models.causal(), ("causal",)),
        (WHOLE, None, ()),
        (STRATEGY.replace(needs=Needs("grid_full")), None, ("blocks", "full")),
        (STRATEGY.replace(needs=Needs("whole_full", soft_commits=True)), None, ("full",)),
    ],
)
def test_the_passes_of_each_prompt_mode(strategy, model, kinds):
    """Text after a prompt of a full mode is computed as blocks, unless a request starts over."""
    assert layout(strategy, model).pass_kinds == kinds


def test_the_memory_of_programs_is_that_of_the_hungriest():
    made = device()
    work = warmup.every_program(made.layout, made.num_words)
    most = warmup.compile_ahead(made, work)
    needs = {one.name: warmup._compiled_bytes(made, one, None) for one in work}
    assert most == max(needs.values()) > 0
    hungriest = max(needs, key=needs.__getitem__)
    largest = {one.name: one for one in work[:2]}
    assert hungriest in largest, "which sizes the pool of an accelerator"
    reported = made.device.lower(largest[hungriest].call(made)).compile().memory_analysis()
    fresh = reported.output_size_in_bytes - reported.alias_size_in_bytes
    assert most == reported.temp_size_in_bytes + fresh
    # The pool's size is not known yet when they are measured, and changes nothing.
    assert warmup.compile_ahead(device(num_pages=800), [largest[hungriest]]) == most


def test_a_progress_that_is_interrupted_ends_the_compiling(monkeypatch):
    began, may_end = [], threading.Event()

    def compiled_bytes(*one):
        began.append(one)
        return 1 if len(began) == 1 or may_end.wait(120) else 0

    def press(name, done, total):
        raise KeyboardInterrupt

    monkeypatch.setattr(warmup, "_compiled_bytes", compiled_bytes)
    monkeypatch.setattr(warmup, "num_cores", lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        warmup.compile_ahead(None, programs(100), press)
    may_end.set()
    for thread in threading.enumerate():
        if thread.name.startswith("dllm-compile_"):
            thread.join()
    assert len(began) <= 3, "what had begun ends, the rest never begins"


def test_the_progress_line_counts_each_list_of_work(monkeypatch):
    """An accelerator has two: before its pool is sized, and after."""
    monkeypatch.setattr("sys.stderr", stderr := io.StringIO())
    stderr.isatty = lambda: True
    show = buckets.progress_line()
    for done, total in ((1, 2), (2, 2), (1, 3), (2, 3), (3, 3)):
        show(f"work {done}", done, total)
    reported = stderr.getvalue()
    assert all(words in reported for words in ("compiling", "0/2", "0/3"))
    assert reported.endswith("\r"), "nothing of it is left on the screen"


def test_an_accelerator_that_is_out_of_memory_says_what_to_lower(monkeypatch):
    def fails(*_):
        said = "Failed to allocate request for 9.0MiB (9437184B) on device ordinal 0\nand a table"
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {said}")

    monkeypatch.setattr(warmup, "_compiled_bytes", fails)
    with pytest.raises(ValueError, match=r"ran out of memory, asked for 9\.0 MiB") as caught:
        start.start(models.plain(), STRATEGY, {}, SMALL)
    assert isinstance(caught.value.__cause__, DeviceFailure)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_what_programs_need_counts_before_memory_is_taken(monkeypatch):
    monkeypatch.setattr(warmup, "compile_ahead", lambda *_: 2**60)
    made = []
    monkeypatch.setattr(ModelRunner, "reset", lambda self: made.append(self))
    with pytest.raises(ValueError, match=r"num_pages=\d+ needs .* temporaries 1073741824.0 GiB"):
        start.start(models.plain(), STRATEGY, {}, SMALL)
    assert not made


# --- an accelerator ---------------------------------------------------------------------------


@pytest.mark.parametrize("hungry", [False, True], ids=["as guessed", "more than guessed"])
def test_an_accelerators_pool_leaves_what_the_programs_need(monkeypatch, hungry):
    """The CPU stands in for it, with counts of its own."""
    limit, needs = 2**26, 2**24 if hungry else 4096
    on = type(jax.devices()[0])
    stats = {"bytes_limit": limit, "bytes_in_use": 2**20}
    monkeypatch.setattr(on, "memory_stats", lambda self: stats, raising=False)
    began = []  # by the pages of the pool

    def compiled_bytes(device, one, in_python):
        began.append(device.layout.num_pages)
        device.device.compiled.setdefault(one.name, began[-1])
        time.sleep(0.03)
        return needs

    monkeypatch.setattr(warmup, "num_cores", lambda: 1)
    monkeypatch.setattr(warmup, "_compiled_bytes", compiled_bytes)
    monkeypatch.setattr(ModelRunner, "run", lambda *_: None)
    made = start.start(models.plain(), STRATEGY, {}, CONFIG, calibrate=False)
    plan = made.memory
    assert made.device.compile_s >= 0.03 * len(began), "of both times"
    assert plan.num_pages == made.layout.num_pages == made.state.pools["target"][0][0].shape[0]
    assert plan.temp_bytes == needs
    assert 0.95 * 0.9 * limit <= plan.peak_bytes <= 0.9 * limit
    # Where the guess was wrong, the rest is not compiled for it, and all for the new pool.
    assert list(made.device.compiled.values()) == [plan.num_pages] * 9
    assert began[-9:] == [plan.num_pages] * 9
    assert (len(began) < 18) == (began[0] != plan.num_pages) == hungry


# --- timing -----------------------------------------------------------------------------------


class TimedDevice:
    """Programs that take what they are said to, on a clock of its own."""

    def __init__(self, layout, step_s, pass_s, last_step=10**9):
        self.layout, self.now, self.last_step = layout, 0.0, last_step
        self.step_s, self.pass_s = step_s, pass_s
        self.log, self.is_new = [], False

    def clock(self):
        return self.now

    def admit(self, slot, placement):
        assert 0 < placement.prompt_len < placement.limit <= self.layout.max_model_len
        self.now += 0.001

    def begin(self, slot):
        self.now += 0.001

    def decode(self, rows, num_active, pages, num_steps, early):
        assert num_active == len(rows) == len(pages)
        assert (pages == -1).all(), "nothing is written"
        steps = min(num_steps, self.last_step)
        self.log.append(("decode", *pages.shape))
        self.now += 0.005 + steps * self.step_s(*pages.shape)
        return steps

    def fetch(self, steps):
        return types.SimpleNamespace(steps=steps)

    def prefill(self, slot, ids, first, end, live_end, last, pages, size, kind):
        assert first + len(ids) == end == live_end
        assert (pages == -1).all(), "nothing is written"
        assert len(ids) == (1 if last else size)
        self.log.append(("prefill", size, len(pages), kind))
        self.now += self.pass_s(size, len(pages), kind)

    def wait(self):
        self.now += 0.0005

    def reset(self):
        self.is_new = True


def step_s(rows, columns):
    return 1e-4 * (7 + rows) * columns


def pass_s(size, columns, kind):
    return 2e-5 * size * columns * (2 if kind == "full" else 1)


@pytest.mark.parametrize("prompt", ["grid_causal", "grid_full", "whole_full", "in_window"])
def test_each_cost_is_found_free_of_what_a_dispatch_costs(prompt):
    strategy = STRATEGY.replace(needs=Needs(prompt)) if prompt != "in_window" else WHOLE
    made = TimedDevice(layout(strategy), step_s, pass_s)
    found = calibrate(made, made.clock)
    pages, kinds = made.layout.page_buckets, made.layout.pass_kinds
    assert found.decode.keys() == {*itertools.product(made.layout.slot_buckets, pages)}
    assert found.prefill.keys() == {*kinds}
    for (rows, columns), seconds in found.decode.items():
        assert found.decode_s(rows, columns) == seconds == pytest.approx(step_s(rows, columns))
    for size, columns, kind in itertools.product(made.layout.prefill_buckets, pages, kinds):
        reported = found.prefill_s(size, columns, kind)
        assert reported == pytest.approx(pass_s(size, columns, kind))
    assert made.is_new, "the made-up requests are gone"


def test_texts_that_end_early_are_timed_by_the_steps_they_ran():
    made = TimedDevice(layout(), step_s, pass_s, last_step=1)
    found = calibrate(made, made.clock)
    assert found.decode_s(3, 8) == pytest.approx(step_s(3, 8) + 0.005)
    # A clock too coarse for one step gives the share of the whole run. It is never zero: a round's
    # prefill may cost what its decode steps do.
    made = TimedDevice(layout(), lambda *_: 0.0, lambda *_: 0.0)
    found = calibrate(made, made.clock)
    assert found.decode_s(3, 8) == pytest.approx(0.005 / timing.LONG)
    assert found.prefill_s(8, 8, "blocks") == pytest.approx(0.0005 / timing.LONG)


def test_slow_programs_are_timed_once_and_fast_ones_three_times():
    made = TimedDevice(layout(), lambda rows, columns: 0.2 if columns == 8 else 0.002, pass_s)
    calibrate(made, made.clock)
    assert made.log.count(("decode", 3, 8)) == 2, "a short and a long run"
    assert made.log.count(("decode", 3, 3)) == 2 * 3


def test_timing_leaves_slots_pool_and_tokens_as_they_were(warm):
    found, pages = warm.cost, warm.layout.page_buckets
    assert found.decode.keys() == {*itertools.product(warm.layout.slot_buckets, pages)}
    assert found.prefill["blocks"].keys() == {*itertools.product((8,), pages)}
    every = [*found.decode.values(), *found.prefill["blocks"].values()]
    assert all(0 < seconds < 1.0 for seconds in every)
    fresh = device(allocate=True)
    jax.tree.map(np.testing.assert_array_equal, warm.state, fresh.state)
    before = tokens(warm)
    assert [len(text) for text in before] == [12, 12, 12]
    warm.reset()
    calibrate(warm)
    assert tokens(warm) == before
    assert warm.num_late_compiles == 0


@pytest.mark.slow
def test_costs_and_constraints_are_for_an_accelerator_unless_asked(monkeypatch):
    done = []
    monkeypatch.setattr(warmup, "warm_up", lambda runner, progress, *asked: done.append(asked))
    for on_cpu, asked in ((True, None), (False, None), (True, True), (False, False)):
        monkeypatch.setattr(buckets, "is_on_cpu", lambda model, on_cpu=on_cpu: on_cpu)
        start.start(models.plain(), STRATEGY, {}, CONFIG, calibrate=asked, with_constraints=asked)
    assert done == [(asked, asked) for asked in (False, True, True, False)]
