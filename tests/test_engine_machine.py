"""The host loop loses nothing, leaks nothing and never changes a token, whatever is done to it.

A hypothesis state machine, and longer seeded runs, drive an engine over a fake device with tiny
pools (tests/oracles/engine_world.py): add, step, abort, preempt, deadline, device failures, in all
five prompt modes, with soft commits, shared prefixes, several texts a prompt, priorities, streams,
stop strings and a tokenizer that fails. After every action the books are right: pages conserved,
growth ahead of what is in flight, nobody passed in the queue. Every request ends exactly once, with
the tokens, reason and forwards it has alone on a device of its own, and the engine gets on.
"""

import random
from collections import Counter
from types import SimpleNamespace

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from tests.oracles.engine_world import World, host_of, run

HOST = host_of()
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
    def wait(self, seed: int) -> None:
        self.world.wait(random.Random(seed))

    def teardown(self) -> None:
        if self.world is not None:
            self.world.drain()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = hypothesis.settings(max_examples=60, stateful_step_count=40)


def run_many(first_seed: int, count: int, host: SimpleNamespace = HOST) -> Counter[str]:
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
    assert [name for name in (*wanted.split(), "preempt", "failures") if not counts[name]] == []
    assert counts["cut"] < counts["ended"] / 2


def test_seeded_runs_end_as_each_request_alone() -> None:
    assert_everything_happened(run_many(0, 100))


@pytest.mark.slow
def test_long_runs_end_as_each_request_alone() -> None:
    counts = run_many(LONG_SEED, NUM_LONG)
    print(f"{counts['actions']} actions from seed {LONG_SEED}: {dict(counts)}")
    assert counts["actions"] >= 200_000
    assert_everything_happened(counts)
