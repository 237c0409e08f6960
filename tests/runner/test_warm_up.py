"""Before the first request: everything compiled ahead, and every program timed.

Proves that programs are compiled in several threads without any state, that running them afterwards
and serving requests compiles nothing, that the memory they need is what XLA says of the hungriest,
that progress counts every program, and that a failure or Ctrl-C ends the compiling. Timing is
proven on a made-up device whose costs are known (each is found exactly, slow ones are timed once,
the budget ends it), and on the real one (positive, and neither slots, pool nor tokens change).
"""

import dataclasses
import gc
import io
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.engine.engine import Engine
from dllm_jax.engine.layout import DeviceFailure, EngineConfig
from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.loading import jax_settings
from dllm_jax.models import dense
from dllm_jax.runner import behind, buckets, start, timing, warmup
from dllm_jax.runner.runner import ModelRunner
from dllm_jax.runner.timing import MeasuredCost, calibrate
from dllm_jax.strategies import AR, MultiBD, Needs
from dllm_jax.strategies.core.protocol import split_knobs
from tests.contract import models, toys

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]

STRATEGY = MultiBD(0.35, 0.25, 0.5, block_size=4, buffer_size=2)
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
def compiled():
    """Names of what XLA was asked for since the list was last cleared."""
    events: list[str] = []

    def listen(event, duration, **more):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(str(more.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def warm() -> ModelRunner:
    """A device after warm-up and timing."""
    made = device(allocate=True)
    made.warm_up(calibrate=True)
    return made


# --- compiling --------------------------------------------------------------------------------


@pytest.mark.slow
def test_programs_are_compiled_without_a_state_and_not_again(compiled):
    made = device(max_model_len=52, slot_buckets=(3,))  # sizes no other test has
    work = warmup.every_program(made.layout, made.num_words)
    compiled.clear()
    reported = []
    made.compile_ahead(work, lambda *progress: reported.append(progress))
    assert made.state is None, "memory is taken once everything is compiled"
    assert len(compiled) == len(work) == len({one.name for one in work})
    assert [(done, total) for _, done, total in reported] == [
        (i + 1, len(work)) for i in range(len(work))
    ]
    assert {name for name, _, _ in reported} == {one.name for one in work}
    made.reset()
    compiled.clear()
    made.warm_up()
    assert not compiled
    tokens(made)
    assert not compiled
    jax.jit(lambda x: x * jnp.float32(3.5))(jnp.zeros((11,)))
    assert compiled, "the listener hears"


def _exported_embed(params, cfg, ids):
    """As kernels are on a GPU: what comes out of a program with such a call is committed."""
    rows = dense.embed(params, cfg, ids)
    given = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    return jax.export.export(jax.jit(lambda rows: rows))(given).call(rows)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["weights", "kernels"])
def test_what_is_committed_to_a_device_compiles_nothing_twice(compiled, what):
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
    compiled.clear()
    made.warm_up()
    assert "jit(begin)" in compiled
    assert len(set(compiled)) == len(compiled), compiled
    compiled.clear()
    tokens(made)
    made.begin(
        0, made.prefill(0, (1,) * 8, 0, 8, 8, True, np.full((8,), -1, np.int32), 8, "blocks")
    )
    made.wait()
    assert not compiled


@pytest.mark.slow
def test_the_states_program_is_there_before_its_memory_is_taken(compiled, monkeypatch):
    made = device(max_model_len=44, slot_buckets=(3,))  # sizes no other test has
    seen, take = [], made._reset
    monkeypatch.setattr(made, "_reset", lambda: (seen.extend(compiled), take()))
    compiled.clear()
    made.warm_up()
    assert sum("new_state" in name for name in seen) == 1
    assert compiled[len(seen) :] == [], "compiled beside the others, not behind them"


class Python:
    """A device whose programs are lowered and compiled in no time, and who is at it."""

    def __init__(self):
        self.lowering, self.compiling, self.log = 0, 0, []

    def lower(self, call):
        self.lowering += 1
        self.log.append((self.lowering, self.compiling))
        time.sleep(0.01)
        self.lowering -= 1
        return self

    def compile(self):
        self.compiling += 1
        time.sleep(0.1)
        self.compiling -= 1
        return self

    def memory_analysis(self):
        return None


def test_programs_are_lowered_one_by_one_while_those_before_are_compiled(monkeypatch):
    monkeypatch.setattr(warmup, "num_cores", lambda: 4)
    python = Python()
    work = [warmup.Work(str(i), lambda device: None) for i in range(4)]
    warmup.compile_ahead(python, work)
    assert [lowering for lowering, _ in python.log] == [1] * 4
    assert max(compiling for _, compiling in python.log) >= 2


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_collector_leaves_what_was_there_alone_while_programs_are_lowered(is_frozen):
    gc.unfreeze()
    if is_frozen:
        gc.freeze()
    counts = [gc.get_freeze_count()]
    nothing = types.SimpleNamespace(memory_analysis=lambda: None)
    lowered = types.SimpleNamespace(compile=lambda: nothing)
    made = types.SimpleNamespace(lower=lambda call: counts.append(gc.get_freeze_count()) or lowered)
    warmup.compile_ahead(made, [warmup.Work("one", lambda device: None)])
    before, within = counts
    assert within > 10_000
    # What somebody else froze stays so (objects that went are not counted any more).
    assert (before > 0) == is_frozen == (gc.get_freeze_count() > 0)


SEARCHES = """
import sys, types
import jax, jax.numpy as jnp
from dllm_jax.runner import warmup
from dllm_jax.kernels.layer import triton
from tests.cross_lowering import H200

searched, texts = [], []
finder = types.SimpleNamespace(find_spec=lambda name, *_: searched.append(name))
sys.meta_path.insert(0, finder)
row, scale = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 64), (64,)))
for prepare in (lambda: None, warmup._name_triton):  # what MLIR has found it keeps
    prepare()
    searched.clear()
    with jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(lambda *given: triton.add_rms_norm(*given, 1e-6)).trace(row, row, scale)
        texts.append(traced.lower(lowering_platforms=("cuda",)).as_text())
    print(searched.count("jaxlib.mlir.dialects.tt") > 10)
print(texts[0] == texts[1], "__gpu$xla.gpu.triton" in texts[0])
"""


def test_what_kernels_are_made_of_is_not_searched_for_in_vain():
    found = subprocess.check_output([sys.executable, "-c", SEARCHES], cwd=ROOT, text=True)
    assert found.split() == ["True", "False", "True", "True"]


def test_every_size_of_every_program_is_listed_once_largest_first():
    work = warmup.every_program(layout(), 5)
    names = [one.name for one in work]
    assert len(names) == len(set(names)) == 2 * 2 + 2 + 3
    assert names[0] == "decode 3 slots, 8 pages"
    assert "prefill 8 tokens, 3 pages, blocks" in names
    assert names[-3:] == ["admit", "restore", "begin"]
    largest = [one.name for one in warmup.largest_programs(layout())]
    assert largest == ["decode 3 slots, 8 pages", "prefill 8 tokens, 8 pages, blocks"]


def test_the_built_in_model_needs_few_programs_on_a_cpu():
    """A count, because seconds depend on the machine: the state and seven more, 23 CPU seconds."""
    model = dj.load("builtin:tiny-sdar")
    made = buckets.make_layout(model, MultiBD(), {}, EngineConfig())
    names = [one.name for one in warmup.every_program(made, 5)]
    assert len(names) <= 7, names


@pytest.mark.parametrize(
    ("strategy", "model", "kinds"),
    [
        (STRATEGY, None, ("blocks",)),
        (AR(), models.causal(), ("causal",)),
        (toys.FullSequence(), None, ()),
        (STRATEGY.replace(needs=Needs("grid_full")), None, ("blocks", "full")),
        (STRATEGY.replace(needs=Needs("whole_full", soft_commits=True)), None, ("full",)),
    ],
)
def test_the_passes_of_each_prompt_mode(strategy, model, kinds):
    """Text behind a prompt of a full mode is computed as blocks, unless a request starts over."""
    assert warmup.pass_kinds(layout(strategy, model)) == kinds


def test_the_memory_of_programs_is_that_of_the_hungriest():
    made = device()
    work = warmup.every_program(made.layout, made.num_words)
    needs = {}
    for one in work:
        reported = made.lower(one.call(made)).compile().memory_analysis()
        fresh = reported.output_size_in_bytes - reported.alias_size_in_bytes
        needs[one.name] = reported.temp_size_in_bytes + fresh
    assert made.compile_ahead(work) == max(needs.values()) > 0
    largest = {one.name for one in warmup.largest_programs(made.layout)}
    assert max(needs, key=needs.__getitem__) in largest, "which sizes the pool of an accelerator"


@pytest.mark.slow
def test_temporaries_do_not_depend_on_the_pool():
    """So they may be measured before the pool's size is known."""
    took = [
        made.compile_ahead(warmup.largest_programs(made.layout))
        for made in (device(num_pages=8), device(num_pages=800))
    ]
    assert took[0] == took[1]


def test_a_progress_that_is_interrupted_ends_the_compiling(monkeypatch):
    began = []

    def compiled_bytes(device, one, in_python):
        began.append(one)
        time.sleep(0.02)
        return 1

    def press(name, done, total):
        raise KeyboardInterrupt

    monkeypatch.setattr(warmup, "_compiled_bytes", compiled_bytes)
    monkeypatch.setattr(warmup, "num_cores", lambda: 2)
    work = [warmup.Work(str(i), lambda device: None) for i in range(100)]
    with pytest.raises(KeyboardInterrupt):
        warmup.compile_ahead(None, work, press)
    at_once = len(began)
    time.sleep(0.1)
    assert len(began) <= at_once + 2 < 100, "what had begun ends, the rest never begins"


def test_the_progress_line_counts_each_list_of_work(monkeypatch):
    """An accelerator has two: what sizes its pool, and everything."""
    monkeypatch.setattr("sys.stderr", stderr := io.StringIO())
    stderr.isatty = lambda: True
    show = buckets.progress_line()
    for total in (2, 3):
        for done in range(1, total + 1):
            show(f"work {done}", done, total)
    reported = stderr.getvalue()
    assert "compiling" in reported
    assert "0/2" in reported
    assert "0/3" in reported
    assert reported.endswith("\r"), "nothing of it is left on the screen"


def test_an_accelerator_that_is_out_of_memory_says_what_to_lower(monkeypatch):
    def fails(*_):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Failed to allocate request for 9.0MiB (9437184B) on device "
            "ordinal 0\nand a table"
        )

    monkeypatch.setattr(warmup, "compile_ahead", fails)
    with pytest.raises(
        ValueError, match=r"ran out of memory, asked for 9.0 MiB more; .*"
    ) as caught:
        start.start(models.plain(), STRATEGY, {}, SMALL)
    assert isinstance(caught.value.__cause__, DeviceFailure)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_what_programs_need_counts_before_memory_is_taken(monkeypatch):
    monkeypatch.setattr(warmup, "compile_ahead", lambda *_: 2**60)
    made = []
    monkeypatch.setattr(ModelRunner, "_reset", lambda self: made.append(self))
    with pytest.raises(ValueError, match=r"num_pages=\d+ needs .* temporaries 1073741824.0 GiB"):
        start.start(models.plain(), STRATEGY, {}, SMALL)
    assert not made


def test_llm_tells_its_memory_with_what_programs_need():
    llm = dj.LLM(models.plain(), STRATEGY, config=SMALL, progress=False)
    plan = llm.memory
    assert plan.temp_bytes > 0
    assert plan.num_pages == llm.engine.layout.num_pages == 2 * 3 * 8
    assert plan.peak_bytes < plan.limit_bytes
    assert llm.engine.runner.compile_s > 0


def test_the_compile_cache_is_the_users_own_or_ours(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        jax.config.update(names[0], str(tmp_path / "mine"))
        jax_settings.enable_compile_cache()
        assert getattr(jax.config, names[0]) == str(tmp_path / "mine")
        assert getattr(jax.config, names[1]) == before[names[1]]
        jax.config.update(names[0], None)
        with pytest.raises(ValueError, match="is no built-in model"):
            dj.LLM("builtin:nobody")  # the cache is set up before anything is loaded
        assert getattr(jax.config, names[0]) == str(tmp_path / "dllm-jax" / "jax")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


# --- an accelerator ---------------------------------------------------------------------------


@pytest.mark.parametrize("hungry", [False, True], ids=["as guessed", "more than guessed"])
def test_an_accelerators_pool_leaves_what_the_programs_need(monkeypatch, hungry):
    """The CPU stands in for it, with counts of its own."""
    limit = 2**26
    on = type(jax.devices()[0])
    stats = {"bytes_limit": limit, "bytes_in_use": 2**20}
    monkeypatch.setattr(on, "memory_stats", lambda self: stats, raising=False)
    asked = []

    def compile_ahead(device, work, progress=None):
        asked.append((device.layout.num_pages, len(work)))
        return limit // 4 if hungry else 4096

    monkeypatch.setattr(warmup, "compile_ahead", compile_ahead)
    monkeypatch.setattr(warmup, "run_each", lambda *_: None)
    monkeypatch.setattr(behind.Behind, "start", lambda self: None)
    made = start.start(models.plain(), STRATEGY, {}, CONFIG, calibrate=False)
    plan = made.memory
    assert plan.num_pages == made.layout.num_pages == made.state.pools["target"][0][0].shape[0]
    assert plan.temp_bytes == (limit // 4 if hungry else 4096)
    assert 0.95 * 0.9 * limit <= plan.peak_bytes <= 0.9 * limit
    # The largest were compiled first; where the guess held, for the pool that then came.
    assert [count for _, count in asked] == [2, 5], "four are compiled behind the requests"
    assert (asked[0][0] == asked[1][0]) is not hungry


# --- timing -----------------------------------------------------------------------------------


class TimedDevice:
    """Programs that take what they are said to, on a clock of its own."""

    def __init__(self, layout, step_s, pass_s, last_step=10**9):
        self.layout, self.now, self.last_step = layout, 0.0, last_step
        self.step_s, self.pass_s = step_s, pass_s
        self.log, self.is_new = [], False

    def clock(self):
        return self.now

    def decode_sizes(self, *sizes):
        return sizes

    def prefill_sizes(self, size, columns, kind):
        return size, columns

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
        return dataclasses.make_dataclass("Fetched", ["steps"])(steps)

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


@pytest.mark.parametrize("prompt", ["grid_causal", "grid_full", "whole_full", "whole_causal"])
def test_each_cost_is_found_free_of_what_a_dispatch_costs(prompt):
    made = TimedDevice(layout(STRATEGY.replace(needs=Needs(prompt))), step_s, pass_s)
    found = calibrate(made, made.clock)
    for columns in made.layout.page_buckets:
        for rows in made.layout.slot_buckets:
            assert found.decode_s(rows, columns) == pytest.approx(step_s(rows, columns))
        for kind in warmup.pass_kinds(made.layout):
            for size in made.layout.prefill_buckets:
                reported = found.prefill_s(size, columns, kind)
                assert reported == pytest.approx(pass_s(size, columns, kind))
    assert made.is_new, "the made-up requests are gone"


def test_a_model_whose_prompts_stay_in_the_window_has_decode_costs_alone():
    made = TimedDevice(layout(toys.FullSequence()), step_s, pass_s)
    found = calibrate(made, made.clock)
    assert set(found.decode) == {(rows, columns) for rows in (1, 3) for columns in (3, 8, 9)}
    assert found.prefill == {}
    assert found.prefill_s(64, 3, "blocks") == 0.0


def test_texts_that_end_early_are_timed_by_the_steps_they_ran():
    made = TimedDevice(layout(), step_s, pass_s, last_step=1)
    found = calibrate(made, made.clock)
    assert found.decode_s(3, 8) == pytest.approx(step_s(3, 8) + 0.005)


def test_a_clock_too_coarse_for_one_step_gives_the_share_of_the_whole_run():
    """Never zero: a round's prefill may cost what its decode steps do."""
    made = TimedDevice(layout(), lambda *_: 0.0, lambda *_: 0.0)
    found = calibrate(made, made.clock)
    assert found.decode_s(3, 8) == pytest.approx(0.005 / timing.LONG)
    assert found.prefill_s(8, 8, "blocks") == pytest.approx(0.0005 / timing.LONG)


def test_slow_programs_are_timed_once_and_fast_ones_three_times():
    made = TimedDevice(layout(), lambda rows, columns: 0.2 if columns == 8 else 0.002, pass_s)
    calibrate(made, made.clock)
    assert made.log.count(("decode", 3, 8)) == 2, "a short and a long run"
    assert made.log.count(("decode", 3, 3)) == 2 * 3


def test_the_budget_ends_the_timing_and_larger_sizes_stand_in():
    made = TimedDevice(layout(), lambda rows, columns: 3.0 * rows, pass_s)
    found = calibrate(made, made.clock, budget_s=1.0)
    assert list(found.decode) == [(3, 8)], "the largest is timed whatever the budget"
    assert found.decode_s(1, 3) == found.decode_s(3, 8) == pytest.approx(9.0)
    assert found.prefill_s(8, 3, "blocks") == found.prefill_s(8, 8, "blocks") > 0
    assert made.now < 60


def test_the_largest_of_each_width_are_timed_first_then_short_texts():
    order = timing._in_order(layout(prefill_buckets=(8, 16)))
    assert order[:4] == [(3, 8, None), (16, 8, "blocks"), (3, 3, None), (16, 3, "blocks")]
    assert order[4:] == [(1, 3, None), (8, 3, "blocks"), (1, 8, None), (8, 8, "blocks")]


def test_sizes_that_were_not_timed_cost_what_the_nearest_larger_do():
    one = MeasuredCost({(2, 4): 1.0, (4, 4): 1.5, (4, 16): 3.0}, {"blocks": {(64, 4): 2.0}})
    assert one.decode_s(1, 4) == 1.0
    assert one.decode_s(3, 4) == 1.5
    assert one.decode_s(2, 5) == 3.0
    assert one.decode_s(8, 16) == 6.0, "twice the slots of the largest that was timed"
    assert one.prefill_s(128, 8, "blocks") == 8.0
    assert one.prefill_s(64, 4, "full") == 2.0, "the pass that was timed stands in"
    assert MeasuredCost({}, {}).decode_s(1, 1) == 0.0


def test_every_real_program_is_timed(warm):
    found = warm.cost
    assert set(found.decode) == {
        (rows, columns) for rows in warm.layout.slot_buckets for columns in warm.layout.page_buckets
    }
    assert set(found.prefill["blocks"]) == {(8, c) for c in warm.layout.page_buckets}
    every = [*found.decode.values(), *found.prefill["blocks"].values()]
    assert all(0 < seconds < 1.0 for seconds in every)


def test_timing_leaves_slots_pool_and_tokens_as_they_were(warm):
    fresh = device(allocate=True)
    for left, new in zip(jax.tree.leaves(warm.state), jax.tree.leaves(fresh.state), strict=True):
        if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, new = jax.random.key_data(left), jax.random.key_data(new)
        assert np.array_equal(left, new)
    before = tokens(warm)
    assert [len(text) for text in before] == [12, 12, 12]
    warm.reset()
    calibrate(warm)
    assert tokens(warm) == before
    assert warm.num_late_compiles == 0


@pytest.mark.slow
def test_costs_are_measured_on_an_accelerator_unless_told(monkeypatch):
    done = []
    monkeypatch.setattr(
        ModelRunner, "warm_up", lambda self, progress, timed, **_: done.append(timed)
    )
    for on_cpu, asked in ((True, None), (False, None), (True, True), (False, False)):
        monkeypatch.setattr(buckets, "is_on_cpu", lambda model, on_cpu=on_cpu: on_cpu)
        start.start(models.plain(), STRATEGY, {}, CONFIG, calibrate=asked)
    assert done == [False, True, True, False]
