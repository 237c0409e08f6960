"""Proves that the engine's loop outlives every request: whatever one raises ends it alone.

The loop runs in a thread over a socket pair, with the scripted engine or the host loop over a fake
device; the test is the front.
"""

import contextlib
import dataclasses
import functools
import gc
import random
import socket
import struct
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from dllm_jax.engine.checks import Refused
from dllm_jax.engine.faults import Faults
from dllm_jax.serve import framing, pipe
from dllm_jax.serve.child import loop, process, prompts
from dllm_jax.serve.child.outbox import Outbox
from dllm_jax.serve.child.side_work import MOST_EACH, Busy, SideWork, Work
from dllm_jax.structured.worker import WorkerFault
from tests.oracles.engine_world import HOST, World
from tests.serve import scripted
from tests.serve.driving import PATIENCE_S

ERRORS = [TypeError("a client's secret"), OverflowError("x"), RecursionError(), MemoryError()]


class Front:
    """The other end of a loop."""

    def __init__(self, served):
        self.sock, self._theirs = socket.socketpair()
        self.sock.settimeout(PATIENCE_S)
        self.lines = []
        faults = Faults(self.lines.append)
        self.loop = loop.Loop(served, self._theirs, Outbox(self._theirs, faults), faults)
        self._reader, self._ids = framing.Reader(pipe.FromEngine), iter(range(1, 1000))
        self.messages, self.ended = [], None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        try:
            self.loop.run()
        except BaseException as error:
            self.ended = error

    def send(self, message):
        self.sock.sendall(framing.frame(message))
        return message.id

    def add(self, client="", ids=(1, 2), **params):
        params = {"max_tokens": 8, **params}
        prompt = pipe.Prompt(list(ids))
        add = pipe.Add(next(self._ids), [prompt], params, False, False, None, 0, client)
        return self.send(add)

    def ask(self, prompt_len=3, client=""):
        reads = [([1, 2, 3], prompt_len, [2], [[4, 5]])]
        return self.send(pipe.Ask(next(self._ids), reads, client))

    def until(self, request_id):
        """What is said of a request in the end: `Refused`, an answer or its last `Delta`."""
        while True:
            for message in self.messages:
                if isinstance(message, pipe.Moved):
                    for delta in message.deltas:
                        if delta.id == request_id and delta.usage is not None:
                            return delta
                elif getattr(message, "id", None) == request_id:
                    return message
            self.messages += self._reader.feed(self.sock.recv(1 << 20))

    def num_faults(self):
        self.until(self.add())  # counts come with what moves
        return [one for one in self.messages if isinstance(one, pipe.Moved)][-1].counts.num_faults

    def close(self):
        self.sock.close()
        self.thread.join(PATIENCE_S)
        self._theirs.close()
        assert not self.thread.is_alive()


@functools.cache
def _made():
    return scripted.make({}, lambda *_: None)


def served():
    """A new script; the tokenizer is read once."""
    return _made()._replace(engine=scripted.Script(4096, 0.002))


@contextlib.contextmanager
def running(of=None):
    front = Front(of or served())
    try:
        yield front
    finally:
        front.close()
    assert front.ended is None


def once(monkeypatch, thing, name, error):
    """Let the next call raise; its arguments are those of the request at fault."""
    real, left = getattr(thing, name), [error]

    def call(*args, **kwargs):
        if left:
            raise left.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(thing, name, call)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", ["_params", "engine.add", "outputs", "usage", "read"])
def test_a1_whatever_one_request_raises_ends_it_alone(monkeypatch, place, error):
    with running() as front:
        engine = front.loop._engine
        goes_on = threading.Event()
        engine.may_end = goes_on.is_set
        other = front.add(max_tokens=100, seed=scripted.WAITS)
        while not front.loop._live:
            time.sleep(0.001)
        if place == "_params":
            once(monkeypatch, loop, "params_of", error)
        elif place == "engine.add":
            once(monkeypatch, engine, "add", error)
        elif place == "outputs":
            once(monkeypatch, prompts.News, "of", error)
        elif place == "usage":
            once(monkeypatch, loop, "usage_of", error)
        else:
            front.loop._served = front.loop._served._replace(read=raising(error))
        found = front.until(front.ask() if place == "read" else front.add())
        assert (found.status, found.message.split()[0]) == (500, type(error).__name__)
        goes_on.set()
        assert front.until(other).finish == "length"
        assert front.num_faults() == 1
        (line,) = front.lines
        assert type(error).__name__ in line
        assert "secret" not in line
        assert not front.loop._live
        assert not front.loop._prompts


def raising(error):
    def call(*args):
        raise error

    return call


def test_a1_a_refusal_is_a_400_and_no_fault(monkeypatch):
    with running() as front:
        refusal = Refused("no", "seed", "its_code")
        once(monkeypatch, front.loop._engine, "add", refusal)
        found = front.until(front.add())
        assert (found.status, found.param, found.code) == (400, "seed", "its_code")
        once(monkeypatch, loop, "params_of", UnicodeEncodeError("utf-8", "\ud800", 0, 1, "half"))
        assert front.until(front.add()).status == 400
        assert front.num_faults() == 0
        assert front.lines == []


def test_a1_the_same_exception_is_reported_once(monkeypatch):
    with running() as front:
        front.loop._served = front.loop._served._replace(read=raising(TypeError()))
        for _ in range(5):
            assert front.until(front.ask()).status == 500
        assert len(front.lines) == 1
        assert front.num_faults() == 5


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        b"\xc1" * 40,
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode(["Add", 5, "no list", {}, True, False, None, 0]),
        msgspec.msgpack.encode(["Nothing", 5]),
        b"\x91" * 100_000,
        b"\xa5Abort\xff\xff\xff",
    ],
    ids=range(8),
)
def test_a1_frames_that_cannot_be_read_end_nothing_else(data):
    with running() as front:
        other = front.add(max_tokens=200)
        whole = struct.pack(">q", 77) + data if len(data) > 3 else data
        front.sock.sendall(struct.pack(">I", len(whole)) + whole)
        if len(data) > 3:
            assert front.until(77).status == 500
        assert front.until(front.add()).finish == "length"
        assert front.until(other).finish == "length"
        assert front.num_faults() == 1


def test_a1_a_text_that_cannot_be_sent_ends_its_request_alone(monkeypatch):
    with running() as front:
        real = loop.Loop._deltas_of

        def halved(loop, live, output):
            deltas = real(loop, live, output)
            for delta in deltas:
                if live.id == 2:
                    delta.text = "\ud800"
            return deltas

        monkeypatch.setattr(loop.Loop, "_deltas_of", halved)
        other, bad = front.add(max_tokens=100), front.add(max_tokens=100)
        assert front.until(bad).status == 500
        assert front.until(other).finish == "length"


def test_a1_a_step_that_raises_is_tried_again_and_then_ends_what_runs(monkeypatch):
    with running() as front:
        once(monkeypatch, front.loop._engine, "step", TypeError())
        assert front.until(front.add()).finish == "length"
        bad = front.add(seed=scripted.RAISES)
        assert front.until(bad).status == 500
        assert front.until(front.add()).finish == "length"


def test_a1_an_engine_whose_every_step_raises_ends():
    broken = served()
    broken.engine.step = raising(RuntimeError("broken"))
    front = Front(broken)
    front.until(front.add())
    front.add()
    front.thread.join(PATIENCE_S)
    front.close()
    assert str(front.ended) == "broken"


@pytest.mark.parametrize("place", ["admit", "prefill"])
def test_a1_what_the_runner_raises_for_one_sequence_ends_it_alone(monkeypatch, place):
    """`LLM`'s own loop and the server's share the engine."""
    for seed in range(12):
        world = World(HOST, random.Random(seed))
        engine, rng = world.engine, random.Random(seed)
        while len(world.expected) < 3:
            world.add(rng)
        once(monkeypatch, world.device, place, TypeError("x"))
        ended = []
        while engine.has_work:
            ended += [one for one in engine.step() if one.finished]
        failed = [one for one in ended if one.error and "TypeError at" in one.error]
        assert len(ended) == 3
        assert len(failed) == engine.stats().num_faults <= 1
        if failed:
            break
    assert failed
    assert engine.stats().num_pages_held == 0


class Gate:
    """Work that ends when the test says so."""

    def __init__(self):
        self.open, self.begun, self.kept = threading.Event(), [], set()

    def missing(self, request):
        key = request.params.seed
        if key is None or key in self.kept:
            return None
        return Work(key, lambda: self.do(key))

    def do(self, key):
        self.begun.append(key)
        assert self.open.wait(PATIENCE_S)
        if key < 0:
            raise Refused("it cannot be made", "constraint")
        self.kept.add(key)


def test_collections_leave_out_what_the_start_made(monkeypatch):
    """Those that a traced program causes would hold a step back for a second."""
    ours, theirs = socket.socketpair()
    frozen = []

    def made(_, sock, *others):
        return SimpleNamespace(run=lambda: (frozen.append(gc.get_freeze_count()), sock.close()))

    monkeypatch.setattr(process, "Loop", made)
    monkeypatch.setattr(process, "_die_with", lambda parent: None)
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(process.sys, "setswitchinterval", lambda _: None)
    with contextlib.closing(ours):
        ours.sendall(framing.frame(pipe.Launch("tests.serve.scripted:make", {})))
        try:
            assert process.main(theirs.detach(), 0) == 0
            assert gc.isenabled()
        finally:
            gc.enable()
            gc.unfreeze()
    assert frozen[0] > 10_000


@pytest.fixture
def gate():
    one = Gate()
    yield one
    one.open.set()


def test_a2_a_request_waits_for_its_constraint_and_no_other_does(gate):
    with running(served()._replace(missing=gate.missing)) as front:
        waits = [front.add(seed=3), front.add(seed=3)]
        for _ in range(3):
            assert front.until(front.add()).finish == "length"
        assert set(front.loop._parked) == set(waits)
        counts = [one for one in front.messages if isinstance(one, pipe.Moved)][-1].counts
        assert counts.num_waiting == 2
        assert counts.compiled == []
        gate.open.set()
        assert [front.until(one).finish for one in waits] == ["length"] * 2
        assert gate.begun == [3]  # once for both


def test_a2_a_refused_constraint_is_a_400_and_a_fault_a_500(gate):
    gate.open.set()
    with running(served()._replace(missing=gate.missing)) as front:
        front.loop._served = front.loop._served._replace(
            missing=lambda request: Work(0, raising(Refused("it cannot be made", "constraint")))
        )
        found = front.until(front.add(seed=1, client="one"))
        assert (found.status, found.param) == (400, "constraint")
        front.loop._served = front.loop._served._replace(
            missing=lambda request: Work(0, raising(WorkerFault("TypeError at x.py:3")))
        )
        found = front.until(front.add(seed=1))
        assert (found.status, found.message) == (500, "TypeError at x.py:3")
        counts = [one.counts for one in front.messages if isinstance(one, pipe.Moved)]
        client, seconds, states = next(one for each in counts for one in each.compiled)
        assert (client, states) == ("one", 0)
        assert 0 <= seconds < PATIENCE_S


def test_a2_clients_take_turns_and_each_may_wait_with_so_many(gate):
    with running(served()._replace(missing=gate.missing)) as front:
        hog = [front.add(seed=number, client="hog") for number in range(40)]
        refused = [front.until(one) for one in hog[MOST_EACH + 1 :]]
        assert {(one.status, one.code) for one in refused} == {(429, "constraints_busy")}
        other = front.add(seed=1000, client="other")
        gone = front.add(seed=2000, client="gone")
        front.send(pipe.Abort(gone))
        while gone in front.loop._parked or other not in front.loop._parked:
            time.sleep(0.001)
        gate.open.set()
        for one in [other, *hog[: MOST_EACH + 1]]:
            assert front.until(one).finish == "length"
        assert gate.begun[:3] == [0, 1, 1000]
        assert 2000 not in gate.begun


def test_a2_a_text_that_has_begun_is_not_refused_for_what_waits(gate):
    work = SideWork("things wait", "busy", lambda: None)
    for number in range(MOST_EACH + 1):
        work.put("hog", number, Work(number, gate.open.wait))
    with pytest.raises(Busy):
        work.put("hog", -1, Work("stage", gate.open.wait))
    work.put("hog", -1, Work("stage", gate.open.wait), bounded=False)
    assert len(work) == MOST_EACH + 2


class Walk:
    """Of a text that ends where a grammar is missing."""

    turn = SimpleNamespace(feed=lambda ids: [])
    forced = ()

    def take(self, ids):
        return ids

    def reason(self, finish):
        return finish


def test_a2_a_grammar_that_two_texts_wait_for_ends_both_once(monkeypatch, gate):
    """Both texts of a request go on in a stage whose grammar cannot be made."""

    def missing(request):
        return Work(-1, lambda: gate.do(-1)) if request.params.n == 1 else None

    def next_stage(request, one, walk):
        if one.finish_reason is None or request.params.n == 1:
            return None
        return dataclasses.replace(request, params=dataclasses.replace(request.params, n=1))

    monkeypatch.setattr(loop, "next_stage", next_stage)
    with running(served()._replace(missing=missing, walk=lambda *_: Walk())) as front:
        number = front.add(n=2)
        while len(front.loop._parked) < 2:
            time.sleep(0.001)
        gate.open.set()
        found = front.until(number)
        assert (found.status, found.message) == (400, "it cannot be made")
        assert not front.loop._parked
        monkeypatch.setattr(loop, "next_stage", lambda *_: None)
        assert front.until(front.add(n=2)).finish == "length"


def test_a2_while_the_model_sleeps_nothing_runs_and_commands_wait_for_what_is_parked(gate):
    commands = SimpleNamespace(version=0, is_asleep=False, aside=lambda *_: None)

    def between(name, fields):
        assert not front.loop._parked
        commands.is_asleep = name == "sleep"
        return {}

    commands.between = between
    with running(served()._replace(missing=gate.missing, commands=commands)) as front:
        waits = front.add(seed=3)
        asleep = front.send(pipe.Command(900, "sleep", {}))
        assert front.until(front.add()).finish == "length"
        gate.open.set()
        assert front.until(waits).finish == "length"
        assert isinstance(front.until(asleep), pipe.Carried)
        for number in (front.add(), front.ask()):
            found = front.until(number)
            assert (found.status, found.code) == (503, "asleep")
        front.until(front.send(pipe.Command(901, "wake", {})))
        assert front.until(front.add()).finish == "length"


def test_a2_a_deadline_counts_from_the_requests_arrival(gate):
    with running(served()._replace(missing=gate.missing)) as front:
        seen = []
        real = front.loop._engine.add
        front.loop._engine.add = lambda request: seen.append(request) or real(request)
        params = {"max_tokens": 8, "seed": 5}
        add = pipe.Add(900, [pipe.Prompt([1])], params, False, False, 500.0, 0)
        front.send(add)
        while not gate.begun:
            time.sleep(0.001)
        time.sleep(0.2)
        gate.open.set()
        front.until(900)
        assert 0 < seen[0].deadline_s <= 499.8


def test_a2_questions_are_read_beside_the_steps_and_in_turns(gate):
    begun = []

    def read(texts):
        begun.append(texts[0].prompt_len)
        assert gate.open.wait(PATIENCE_S)
        return [[[-1.0]]], 1

    with running(served()._replace(read=read)) as front:
        hog = [front.ask(number, "hog") for number in range(30)]
        other = front.ask(1000, "other")
        assert front.until(front.add(max_tokens=100)).finish == "length"
        gate.open.set()
        refused = [one for one in map(front.until, hog) if isinstance(one, pipe.Refused)]
        assert {(one.status, one.code) for one in refused} == {(429, "decisions_busy")}
        assert isinstance(front.until(other), pipe.Told)
        assert begun.index(1000) <= 2
