"""Programs of structured output, which a thread compiles while the engine serves (issue 46).

Proves that a request with a grammar waits for them and no other one does, that a failure ends its
requests alone, and that `close`, a dropped runner and the end of the process end the thread.
"""

import gc
import subprocess
import sys
import threading
import time
import weakref

import jax
import numpy as np
import pytest

from dllm_jax.compile import warmup
from dllm_jax.engine.engine import PROGRAMS_WAIT_S, Engine
from dllm_jax.runner import grammars, xla_options
from tests.compile.test_warm_up import ROOT
from tests.contract.engine import case, ends, make_device, wanted, wish
from tests.structured.test_constrained_engine import MASK, STOP, TOYS, VOCAB, _bound, random_toy

NAME, LONG_S = "multi_bd", 120
TOY, FREE = TOYS[0], case(NAME).requests[0]
LARGE = random_toy(np.random.default_rng(0), VOCAB, STOP, (MASK,), states=100, classes=5)
BOUND, PLAIN, LARGE = _bound(NAME, TOY, 2), wish(FREE), _bound(NAME, LARGE, 30)


def run(engine, *names):
    """Step until these requests have ended."""
    done, until = {}, time.monotonic() + LONG_S
    while not done.keys() >= {*names}:
        assert time.monotonic() < until
        done |= {output.request_id: output for output in engine.step()}
    return [done[name] for name in names]


def assert_keeps(output):
    (text,) = output.outputs
    assert (output.error, text.constraint_met) == (None, True)
    assert TOY.may_end(TOY.after(TOY.start, text.token_ids))


@pytest.fixture(scope="module")
def warm():
    made = make_device(NAME, allocate=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars, "USUAL", grammars.BUCKETS[0])  # so that a larger one is left
        quick = {"xla_backend_optimization_level": 0}  # compiled in half the time
        patch.setattr(xla_options, "of_decode", lambda *_: quick)
        warmup.warm_up(made, with_constraints=True)
    return made


@pytest.fixture
def go(warm, monkeypatch):
    """The thread has compiled no program of grammars, and compiles none until this is set."""
    device, known, go = warm.device, warm.device.compiled, threading.Event()

    def waits(call):
        assert go.wait(LONG_S)
        device.compiled[call.name] = known.get(call.name)  # of larger grammars None, and none runs

    plain = {name: one for name, one in known.items() if "grammars" not in name[0]}
    monkeypatch.setattr(device, "compile_program", waits)
    monkeypatch.setattr(device, "compiled", plain)
    monkeypatch.setattr(warm, "_preparing", {})
    monkeypatch.setattr(warm, "_bucket", None)
    yield go
    go.set()
    assert [future.exception(LONG_S) for future in warm._preparing.values()]
    warm._bucket = None
    warm.reset()


def test_with_constraints_compiled_no_request_waits(warm, monkeypatch):
    monkeypatch.setattr(warm, "_preparing", dict(warm._preparing))
    monkeypatch.setattr(warm, "compile_in_background", lambda *_: pytest.fail("compiled again"))
    engine, known = Engine(warm), set(warm.device.compiled)
    text, plain = run(engine, engine.add(BOUND), engine.add(PLAIN))
    assert_keeps(text)
    assert ends([plain]) == [wanted(NAME, FREE)]
    assert (set(warm.device.compiled), engine.stats().num_late_compiles) == (known, 0)


def test_no_other_request_waits_for_programs_of_structured_output(warm, go):
    """Not even a later one. A request that waits is aborted as any other."""
    engine = Engine(warm)
    first, other, plain = map(engine.add, (BOUND, BOUND, PLAIN))
    assert ends(run(engine, plain)) == [wanted(NAME, FREE)]
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_compiled, stats.num_programs) == (2, 5, 6)
    began = time.monotonic()
    assert [engine.step() for _ in range(5)] == [[]] * 5
    assert time.monotonic() - began > 4 * PROGRAMS_WAIT_S, "no busy loop"
    engine.abort(other)
    assert run(engine, other)[0].outputs[0].finish_reason == "abort"
    go.set()
    text, again = run(engine, first, engine.add(PLAIN))
    assert_keeps(text)
    assert ends([again]) == [wanted(NAME, FREE)]
    # A larger bucket has programs of its own, and texts of the smaller go on.
    go.clear()
    large, small = engine.add(LARGE), engine.add(BOUND)
    assert_keeps(*run(engine, small))
    assert engine.stats().num_waiting == 1
    assert list(warm._preparing) == list(grammars.BUCKETS[:2])
    assert engine.stats().num_late_compiles == 0
    engine.abort(large)


def test_a_failed_compilation_ends_its_requests_alone(warm, go, monkeypatch):
    def fails(call):
        raise RuntimeError("no such\ninstruction")

    compiles = warm.device.compile_program
    monkeypatch.setattr(warm.device, "compile_program", fails)
    engine = Engine(warm)
    names = [engine.add(one) for one in (BOUND, PLAIN, BOUND)]
    one, plain, other = run(engine, *names)
    assert "output cannot be compiled: RuntimeError: no such; instruction" in one.error
    assert (other.error, ends([plain])) == (one.error, [wanted(NAME, FREE)])
    # It is not kept: the next request tries again.
    assert not warm._preparing
    monkeypatch.setattr(warm.device, "compile_program", compiles)
    go.set()
    (text,) = run(engine, engine.add(BOUND))
    assert_keeps(text)


def test_programs_of_two_sizes_are_compiled_in_turn(warm, go, monkeypatch):
    at_once, most = [], []

    def counts(call):
        at_once.append(call)
        most.append(len(at_once))
        time.sleep(0.01)
        at_once.pop()

    monkeypatch.setattr(warm.device, "compile_program", counts)
    for sizes in grammars.BUCKETS:
        warm._preparing[sizes] = warmup.compile_grammars(warm, sizes)
    futures = warm._preparing.values()
    assert [future.exception(LONG_S) for future in futures] == [None] * len(futures)
    assert max(most) == 1


def test_larger_grammars_compile_nothing_while_requests_wait(warm, compilations):
    """Their place is made on the host, and the thread compiled what puts them there."""
    device, row = warm.device, []
    for sizes in grammars.BUCKETS[1:]:
        device.compile_bind(sizes)
        row.append(jax.tree.leaves(grammars.blank(sizes, VOCAB)))
    compilations.clear()
    try:
        for sizes, leaves in zip(grammars.BUCKETS[1:], row, strict=True):
            warm.submit(device.bind, 0, sizes, leaves, 0).result(LONG_S)
        warm.reset()
        warm.submit(device.bind, 1, sizes, leaves, 2).result(LONG_S)
        assert not compilations
        assert [*np.asarray(device._grammars.at)][:2] == [0, 2]
    finally:
        warm.reset()


@pytest.mark.parametrize("end", ["closed", "dropped"])
def test_the_thread_ends_with_its_runner(end):
    made, began = make_device(NAME, allocate=False, slot_buckets=(1, 2, 4)), []
    going, go = threading.Event(), threading.Event()
    device, sizes = made.device, grammars.BUCKETS[0]
    device.compile_program = lambda call: (began.append(call.name), going.set(), go.wait(LONG_S))
    seen, done = weakref.ref(made), warmup.compile_grammars(made, sizes)
    made._preparing[sizes] = done
    assert going.wait(LONG_S)
    device.compiled[began[0]] = None
    assert (made.num_compiled, made.num_programs) == (1, 3)
    if end == "closed":
        made.close()
    else:
        del made
    go.set()
    assert done.result(LONG_S) is None
    gc.collect()
    assert (len(began), seen() is None) == (1, end == "dropped")


ENDS = """
import functools, threading, types, jax, jax.numpy as jnp
from dllm_jax.compile import warmup

class Runner:
    is_open, began, layout, memory = True, threading.Event(), None, None
    device = property(lambda self: self)
    def compile_program(self, size):
        self.began.set()
        chain = lambda x: functools.reduce(lambda y, _: jnp.sort(jnp.sin(y) @ y), range(200), x)
        jax.jit(chain).lower(jnp.zeros((size, size))).compile()
        print("compiled", flush=True)

runner = Runner()
work = [types.SimpleNamespace(call=lambda runner, i=i: 64 + i) for i in range(99)]
warmup.programs_with_grammars = lambda *_: work
warmup.compile_grammars(runner, None)
assert runner.began.wait(60)
"""


def test_the_process_ends_with_the_program_that_is_being_compiled():
    """A thread must not be torn down within XLA; 99 programs would take minutes."""
    command, how = [sys.executable, "-c", ENDS], {"text": True, "capture_output": True}
    said = subprocess.run(command, timeout=LONG_S, cwd=ROOT, **how)
    assert (said.returncode, said.stdout, said.stderr) == (0, "compiled\n", "")
