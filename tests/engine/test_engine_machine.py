"""The host loop loses nothing, leaks nothing and never changes a token under any sequence of calls.

A hypothesis state machine and longer seeded runs drive an engine over a fake device with tiny pools
(tests/oracles/engine_world.py). After every action the books are right; every request ends exactly
once, with the tokens, reason and forwards it has alone on a device of its own.
"""

import random
import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from tests.oracles.engine_world import HOST, World, run

ROOT = Path(__file__).resolve().parents[2]
SEEDS = st.integers(0, 2**16)
ACTIONS = 60  # of a seeded run; sizes and rules are drawn anew for each
NUM_LONG, LONG_SEED = 4000, 1_000_000  # 240,000 actions, and the steps that drain them


class EngineMachine(stateful.RuleBasedStateMachine):
    """`World` under hypothesis: what fails is shrunk to a few actions."""

    def __init__(self):
        super().__init__()
        self.world: World | None = None

    @stateful.initialize(seed=SEEDS)
    def start(self, seed: int) -> None:
        self.world = World(HOST, random.Random(seed))

    @stateful.rule(seed=SEEDS)
    def add(self, seed: int) -> None:
        self.world.add(random.Random(seed))

    @stateful.rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.world.step()

    @stateful.rule(seed=SEEDS)
    def abort(self, seed: int) -> None:
        self.world.abort(random.Random(seed))

    @stateful.rule(seed=SEEDS)
    def preempt(self, seed: int) -> None:
        self.world.preempt(random.Random(seed))

    @stateful.rule(seed=SEEDS)
    def fail(self, seed: int) -> None:
        self.world.fail(random.Random(seed))

    @stateful.rule(seed=SEEDS)
    def mistrace(self, seed: int) -> None:
        self.world.mistrace(random.Random(seed))

    @stateful.rule(seed=SEEDS)
    def interrupt(self, seed: int) -> None:
        self.world.interrupt(random.Random(seed))

    @stateful.rule(seed=SEEDS)
    def wait(self, seed: int) -> None:
        self.world.wait(random.Random(seed))

    def teardown(self) -> None:
        if self.world is not None:
            self.world.drain()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = hypothesis.settings(max_examples=60, stateful_step_count=40)


def run_many(first_seed: int, count: int, host: ModuleType = HOST) -> Counter[str]:
    """Seeded runs; the seed of one that fails is in the message."""
    total: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + count):
        try:
            total += run(host, seed, ACTIONS)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return total


def assert_everything_happened(counts: Counter[str]) -> None:
    """A run that met no shortage, hit, failure, ... would prove little."""
    wanted = "length stop nfe repetition abort error cut refused hits cached evictions preempted"
    wanted += " interrupts untraceable panics"
    assert [name for name in (*wanted.split(), "preempt", "failures") if not counts[name]] == []
    assert counts["cut"] < counts["ended"] / 2


@pytest.fixture
def host() -> ModuleType:
    return HOST


def make_world(host: ModuleType, number: int = 0) -> World:
    """A world with at least two slots, without a tokenizer."""
    seeds = (seed for seed in range(10_000))
    worlds = (World(host, random.Random(seed)) for seed in seeds)
    fitting = (
        world
        for world in worlds
        if world.layout.num_slots > 1 and not world.tokenizer and world.layout.max_model_len > 30
    )
    for _ in range(number):
        next(fitting)
    return next(fitting)


def ask(world: World, max_tokens: int = 12) -> str:
    requests = world.host.requests
    params = requests.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return world.engine.add(requests.Request(prompt_token_ids=[5, 4], params=params))


def test_a_device_that_keeps_failing_ends_its_requests(host: ModuleType) -> None:
    for program in ("decode", "fetch", "admit"):
        world = make_world(host)
        names = {ask(world), ask(world)}
        ended = {}
        for _ in range(20):
            world.device.planned = [program]
            ended |= {output.request_id: output for output in world.engine.step()}
        assert set(ended) == names
        for output in ended.values():
            assert output.outputs[0].finish_reason == "error"
            assert output.error.startswith(f"the device failed twice ({program} failed)")
        assert not world.engine.has_work
        world.device.planned = []
        ask(world)
        while world.engine.has_work:
            outputs = world.engine.step()
        assert outputs[0].error is None


def test_a_device_that_cannot_be_reset_ends_every_request() -> None:
    world = make_world(HOST)
    names = {ask(world) for _ in range(world.layout.num_slots + 2)}
    world.device.planned = ["admit", "reset"]
    outputs = world.engine.step()
    assert {output.request_id for output in outputs} == names
    assert all("reset failed" in output.error for output in outputs)


def test_a_snapshot_is_saved_of_what_is_given_up() -> None:
    for saver, said in (
        (lambda sequences: f"{len(sequences)} texts", "`dllm-jax replay 2 texts` runs it again"),
        (lambda sequences: 1 / 0, r"it could not be saved (ZeroDivisionError"),
    ):
        world = make_world(HOST)
        world.engine.save_snapshot = saver
        ask(world), ask(world)
        world.device.planned = ["admit", "admit"]
        outputs = world.engine.step() + world.engine.step()
        assert len(outputs) == 2
        assert all(said in output.error for output in outputs)


def test_one_chunk_runs_while_another_is_read(host: ModuleType) -> None:
    world = make_world(host)
    ask(world, max_tokens=26)
    world.engine.step()
    calls = world.device.calls
    while not calls["fetch"]:
        world.engine.step()
    assert calls["decode"] == 2
    assert world.engine.stats().num_chunks_in_flight == 1


def test_nothing_is_dispatched_behind_a_chunk_that_ends_all(host: ModuleType) -> None:
    counted_out = 0
    for number in range(12):
        world = make_world(host, number)
        if world.layout.in_window:  # whose window may be too short for the text
            continue
        requests, ran = world.host.requests, []
        params = requests.SamplingParams(max_tokens=26, max_nfe=5, ignore_eos=True)
        with mock.patch.object(world.device, "fetch", noted(world.device.fetch, ran)):
            world.engine.add(requests.Request(prompt_token_ids=[5, 4], params=params))
            while world.engine.has_work:
                outputs = world.engine.step()
        if outputs[0].outputs[0].finish_reason == "nfe":
            counted_out += 1
            assert world.device.calls["decode"] == len(ran)
            assert all(chunk.steps for chunk in ran)
    assert counted_out > 4


def noted(function: Callable[..., Any], returned: list) -> Callable[..., Any]:
    """The function, whose results are kept."""

    def call(*args: Any) -> Any:
        returned.append(function(*args))
        return returned[-1]

    return call


def test_idle_time_belongs_to_no_step(host: ModuleType) -> None:
    world = make_world(host)
    for _ in range(3):
        name = ask(world, max_tokens=26)
        while world.engine._last_fetch_s is None:
            world.engine.step()
        world.engine.step()
        world.engine.abort(name)  # with a chunk in flight
        world.clock.now += 1000.0
        world.engine.step()
    assert 0.0 < world.engine._step_s < 0.1


def test_a_request_is_looked_at_while_it_runs() -> None:
    world = make_world(HOST)
    name = ask(world)
    world.engine.step()
    (output,) = world.engine.outputs()
    assert (output.request_id, output.finished) == (name, False)
    assert [sequence.index for sequence in world.engine.sequences(name)] == [0]
    assert world.engine.sequences("nobody") == []


def test_a_name_is_used_once_at_a_time() -> None:
    world = make_world(HOST)
    name = ask(world)
    request = HOST.requests.Request(prompt_token_ids=[5], request_id=name)
    with pytest.raises(ValueError, match="is already in the engine"):
        world.engine.add(request)


def test_seeded_runs_end_as_each_request_alone() -> None:
    assert_everything_happened(run_many(0, 100))


def test_the_bookkeeping_benchmark_runs() -> None:
    """Its bars are for a quiet machine (benchmarks/results/bookkeeping.json), not for a test."""
    times = runpy.run_path(str(ROOT / "benchmarks" / "bookkeeping.py"))
    assert len(times["time_lives"](3)) == len(times["time_adds"](3)) == 3
    assert len(times["time_passes"](4)) == times["NUM_PASSES"]


@pytest.mark.slow
def test_long_runs_end_as_each_request_alone() -> None:
    counts = run_many(LONG_SEED, NUM_LONG)
    print(f"{counts['actions']} actions from seed {LONG_SEED}: {dict(counts)}")
    assert counts["actions"] >= 200_000
    assert_everything_happened(counts)
