"""Proves that constraints are compiled in a process that can be ended, as they are in this one."""

import os
import signal

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import structured
from dllm_jax.api.constraints import MOST_REFUSALS, Constraints
from dllm_jax.engine.checks import Refused
from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.strategies.core.resolve import load_strategy
from dllm_jax.structured.worker import Worker, WorkerFault

NEVER = np.array([0])
WORDS = structured.spellings([None, None, *[bytes([one]) for one in range(256)], b"ab", b'{"'])
SLOW = structured.Regex("(a?b?c?d?){300}")


@pytest.fixture
def worker():
    one = Worker(WORDS, NEVER, 1024, most_s=2.5)
    yield one
    one.close()


def test_a2_an_automaton_of_the_worker_is_that_of_this_process(worker):
    for constraint in (structured.Regex("[ab]+"), structured.JsonSchema({"type": "boolean"})):
        found = worker.compile(constraint, (1,))
        wanted = structured.compile(constraint, WORDS, (1,), NEVER, 1024)
        for name in ("class_of", "delta", "distance", "start", "end"):
            np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    with pytest.raises(ValueError, match="states"):
        worker.compile(structured.JsonSchema({"type": "string", "minLength": 99999}), (1,))
    assert worker.compile(structured.Choice(["a"]), (1,)).end > 0


def test_a2_a_worker_that_takes_too_long_is_ended_and_replaced(worker):
    worker.compile(structured.Choice(["a"]), (1,))
    first = worker._process
    os.kill(first.pid, signal.SIGPROF)  # as its timer does
    first.wait(120)
    with pytest.raises(ValueError, match=r"more than 2.5 s or too much memory"):
        worker.compile(structured.Choice(["b"]), (1,))
    assert worker.compile(structured.Choice(["b"]), (1,)).end > 0
    assert worker._process.pid != first.pid


def test_a2_the_workers_own_timer_ends_it():
    hasty = Worker(WORDS, NEVER, 1024, most_s=0.05)
    try:
        with pytest.raises(ValueError, match=r"more than 0.05 s"):
            hasty.compile(SLOW, (1,))
    finally:
        hasty.close()


def test_a1_an_exception_in_the_worker_is_a_fault_with_its_place(worker):
    with pytest.raises(WorkerFault, match=r"AttributeError at .*__init__.py:\d+"):
        worker.compile(structured.After("x", structured.Choice(["a"])), (1,))
    assert worker.compile(structured.Choice(["b"]), (1,)).end > 0


def test_a2_refusals_are_kept_and_drop_no_automaton(monkeypatch):
    constraints = Constraints(dj.load("builtin:tiny-sdar"), load_strategy("multi_bd"))
    real, seen = structured.compile, []

    def counted(constraint, *args):
        seen.append(constraint)
        return real(constraint, *args)

    monkeypatch.setattr(structured, "compile", counted)

    def ask(constraint):
        params = SamplingParams(constraint=constraint)
        return Request(prompt_token_ids=[1], params=params)

    good = ask(structured.Choice(["a", "b"]))
    (_, work) = constraints.missing(good)
    work()
    assert constraints.missing(good) is None
    for number in range(MOST_REFUSALS + 5):
        bad = ask(structured.Regex(f"(?=a){number}"))
        for _ in range(2):
            with pytest.raises(Refused, match="assert is not supported"):
                constraints(bad)
        assert constraints.missing(bad) is None
    assert len(seen) == 1 + MOST_REFUSALS + 5
    assert constraints(good).grammar is not None
    assert len(seen) == 1 + MOST_REFUSALS + 5
