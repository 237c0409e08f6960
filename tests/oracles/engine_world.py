"""The host loop over a fake device, driven at random and compared with each request run alone.

`World` holds an engine with tiny pools, does one thing to it at a time and checks after each what
must always hold. A request ends with the tokens and the reason it has alone (`fake_device.alone`)
or, where it was cut short, with a beginning of them.
"""

import contextlib
import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import dllm_jax.engine.inbox
from dllm_jax.engine.layout import Placement, SamplingNumbers
from tests.oracles.fake_device import (
    END_ID,
    HOLE,
    POISON_ID,
    VOCAB,
    Clock,
    Cost,
    FakeDevice,
    alone,
    draw_facts,
)

HOST: ModuleType = dllm_jax.engine  # with all its modules: `inbox` imports the others
NO_LIMIT = 2**31 - 1
ENGINE_SEED = 77
MOST_LIVE = 12  # requests in the engine at a time
# What is done to the engine, and how often: steps are what brings tokens.
ACTIONS = {
    "step": 24,
    "add": 7,
    "abort": 1,
    "preempt": 2,
    "fail": 0.4,
    "mistrace": 0.2,
    "interrupt": 0.6,
    "wait": 1,
}


class Truth(NamedTuple):
    """A sequence's result alone; `raw` ignores stop strings, and `nfe` is None with them."""

    tokens: list[int]
    reason: str
    nfe: int | None
    raw: list[int]


@dataclasses.dataclass
class Expected:
    """A request as the model of the engine sees it."""

    request: Any
    truths: list["Truth"]
    failures_before: int
    deadline: float | None
    aborted: bool = False
    shown: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    spoken: dict[int, str] = dataclasses.field(default_factory=dict)


class Panic(BaseException):
    """What a tokenizer's native code raises: no `Exception`."""


@dataclasses.dataclass(frozen=True)
class Letters:
    """A tokenizer: a letter an id; it fails at one of them."""

    breaks_at: int = -1
    failure: type[BaseException] = OverflowError

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        if self.breaks_at in ids:
            raise self.failure("no such letter")
        return "".join(chr(ord("a") + token) for token in ids)


class World:
    """An engine, its device, and what must come out of it.

    Args:
        host: The package `dllm_jax.engine`, or a mutated copy.
        rng: Draws the sizes.

    Attributes:
        counts: What happened, to see that a run meant something.
    """

    def __init__(self, host: ModuleType, rng: random.Random):
        self.host = host
        self.layout = draw_facts(rng, host.layout.EngineLayout)
        cost = Cost(0.0001, rng.choice((0.00001, 0.001))) if rng.random() < 0.5 else None
        self.clock = Clock()
        self.device = FakeDevice(self.layout, host.layout.DeviceFailure, self.clock, cost)
        failure = rng.choice((OverflowError, Panic))
        self.tokenizer = rng.choice((None, None, Letters(), Letters(9, failure)))
        self.device.compile_failure = host.layout.CompileFailure
        self.engine = host.engine.Engine(
            self.device, self.tokenizer, seed=ENGINE_SEED, clock=self.clock
        )
        self.scheduler = self.engine.scheduler
        self.expected: dict[str, Expected] = {}
        self.foreign: set[str] = set()
        self.was_interrupted = False
        self.texts: list[list[int]] = [
            [rng.randrange(VOCAB - 1) for _ in range(self.layout.max_model_len)] for _ in range(3)
        ]
        self.num_added = self.num_sequences = self.num_tokens = self.num_forwards = 0
        self.counts: Counter[str] = Counter()

    # --- what can be done -------------------------------------------------------------------------

    def act(self, rng: random.Random) -> None:
        """One random thing."""
        self.counts["actions"] += 1
        (name,) = rng.choices(list(ACTIONS), list(ACTIONS.values()))
        getattr(self, name)(rng)

    def add(self, rng: random.Random) -> None:
        """Queue a request, or see it refused."""
        if len(self.expected) >= MOST_LIVE:
            return
        request = self._draw_request(rng)
        limit = self._limit(request)
        stats = self.engine.stats()
        try:
            name = self.engine.add(request)
        except ValueError:
            assert limit is None, "a request that could run was refused"
            assert self.engine.stats() == stats, "a refused request left a trace"
            self.counts["refused"] += 1
            return
        assert limit is not None, "a request that can never run was taken"
        truths = [self._truth(request, limit, index) for index in range(request.params.n)]
        deadline = None if request.deadline_s is None else self.clock.now + request.deadline_s
        self.expected[name] = Expected(request, truths, self.device.num_failures, deadline)
        self.counts["holes"] += HOLE in request.suffix_token_ids
        self.num_added += 1
        self.num_sequences += request.params.n
        self.check()

    def step(self, rng: random.Random | None = None) -> None:
        """One step of the engine; what it reports is compared."""
        scheduler = self.scheduler
        before = {id(sequence) for sequence in scheduler.live}
        preempted = {id(s): s.num_preemptions for s in scheduler.live}
        blocked = {id(s) for s in self._waiting() if waits_for_leader(s, self.host)}
        failures, now = self.device.num_failures, self.clock.now
        was_torn = self.engine._is_torn
        outputs = self.engine.step()
        assert len({output.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            self._read(output)
        for one in self.expected.values():
            assert one.deadline is None or one.deadline > now, "a deadline was let pass"
        if self.device.num_failures == failures and not was_torn:
            self._check_order(before, preempted, blocked)
        self.check()

    def abort(self, rng: random.Random) -> None:
        """End a request, or one that is not there."""
        assert not self.engine.abort("nobody")
        if self.expected:
            name = rng.choice(list(self.expected))
            self.expected[name].aborted = True
            assert self.engine.abort(name)
            self.counts["abort"] += 1
        self.check()

    def preempt(self, rng: random.Random) -> None:
        """Take the slot of a random sequence."""
        if self.scheduler.live:
            self.scheduler.preempt(rng.choice(self.scheduler.live))
            self.counts["preempt"] += 1
        self.check()

    def fail(self, rng: random.Random) -> None:
        """Lose the device soon: in a program, in a fetch, once or twice, or for good a while."""
        programs = ("decode", "decode", "fetch", "prefill", "admit", "restore", "begin", "join")
        again = rng.random() < 0.4
        self.device.planned = [rng.choice(programs) for _ in range(1 + again)]
        if rng.random() < 0.1:
            self.device.planned.append("reset")
        self.counts["planned"] += 1

    def mistrace(self, rng: random.Random) -> None:
        """Let a program soon be one that cannot be traced."""
        self.device.untraceable = [rng.choice(("decode", "decode", "prefill", "admit"))]

    def interrupt(self, rng: random.Random) -> None:
        """Raise KeyboardInterrupt at any line of the engine, in `add`, `step` or `abort`."""
        name = rng.choice(("step", "step", "step", "add", "abort"))
        with interrupted_at(self.host.engine.__file__, rng.randrange(120)):
            try:
                if name == "step":
                    for output in self.engine.step():
                        self._read(output)
                elif name == "add":
                    self.engine.add(self._draw_request(rng))
                elif self.expected:
                    chosen = rng.choice(list(self.expected))
                    self.expected[chosen].aborted = True
                    self.engine.abort(chosen)
            except (KeyboardInterrupt, ValueError) as error:
                self.counts["interrupts"] += isinstance(error, KeyboardInterrupt)
        self.was_interrupted = True
        # What `add` took, but did not return the id of.
        self.foreign |= self.engine._requests.keys() - self.expected.keys()
        for request_id in self.foreign:
            self.engine.abort(request_id)
        # What ended in a `step` that did not return.
        ready = {output.request_id for output in self.engine._ready}
        for request_id in self.expected.keys() - self.engine._requests.keys() - ready:
            del self.expected[request_id]
        self.num_sequences = self.engine._num_sequences
        self.num_added = self.engine.stats().num_requests
        self.step()

    def wait(self, rng: random.Random) -> None:
        """Let time pass."""
        self.clock.now += rng.choice((0.001, 0.01, 0.1))

    def drain(self) -> None:
        """Run to the end: bounded, and nothing is left."""
        self.device.planned, self.device.untraceable = [], []
        work = sum(
            len(one.request.prompt_token_ids) + sum(9 * len(t.raw) + 9 for t in one.truths)
            for one in self.expected.values()
        )
        left = 20 + 2 * work
        while self.engine.has_work:
            self.step()
            left -= 1
            assert left > 0, "the engine does not get on"
        assert not self.expected, "requests that never ended"
        stats = self.engine.stats()
        assert stats.num_running == stats.num_waiting == stats.num_pages_held == 0
        assert stats.num_requests == self.num_added == stats.num_finished
        assert self.engine.step() == []
        if self.was_interrupted:
            self.counts["drained"] += 1
        elif self.tokenizer is None:  # stop strings take tokens back
            assert stats.generated_tokens == self.num_tokens
        assert self.was_interrupted or stats.nfe == self.num_forwards
        self.counts["late"] += stats.num_late_compiles
        self.counts["preempted"] += stats.num_preemptions
        self.counts["hits"] += stats.prefix_hits
        self.counts["evictions"] += stats.prefix_evictions
        self.counts["failures"] += stats.num_failures

    # --- what must come out -----------------------------------------------------------------------

    def _draw_request(self, rng: random.Random) -> Any:
        layout, requests = self.layout, self.host.requests
        base = rng.choice(self.texts)
        prompt = base[: rng.randint(1, max(1, layout.max_model_len - 1))]
        if rng.random() < 0.5:
            prompt = prompt[: rng.randint(1, 12)]
        if rng.random() < 0.2:
            prompt[-1] = rng.randrange(VOCAB)
        params = requests.SamplingParams(
            max_tokens=rng.choice((1, 2, 5, 12, 30)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.choice((None, 5, 6)),
            stop_token_ids=rng.choice(((), (3,), (3, 4))),
            ignore_eos=rng.random() < 0.7,
            max_nfe=rng.choice((None, None, None, 1, 6)),
            max_repetition_run=rng.choice((None, None, 2, 3)),
            stop=rng.choice(((), (), ("h",), ("hh", "fh", "e"))) if self.tokenizer else (),
            n=rng.choice((1, 1, 1, 2, 3)),
            strategy_overrides=rng.choice(({}, {"threshold": 0.25})),
        )
        suffix: tuple[int, ...] = ()
        if layout.in_window and rng.random() < 0.5:
            suffix = tuple(rng.randrange(VOCAB - 1) for _ in range(rng.randint(1, 3)))
            if rng.random() < 0.5:
                suffix = (*suffix, *rng.choice(((HOLE,), (HOLE, HOLE, 3), (3, HOLE, 1, HOLE))))
            prompt = prompt[: rng.randint(0, len(prompt))] if rng.random() < 0.2 else prompt
        return requests.Request(
            prompt_token_ids=prompt,
            params=params,
            priority=rng.choice((0, 0, 0, -1, 1)),
            deadline_s=rng.choice((None, None, None, 0.02, 0.2)),
            stream=rng.random() < 0.5,
            denoise=rng.random() < 0.1,
            suffix_token_ids=suffix,
        )

    def _limit(self, request: Any) -> int | None:
        """First position that may not be emitted; None: it can never run."""
        layout = self.layout
        prompt, cells = len(request.prompt_token_ids), cells_of(request)
        if prompt == 0 and (not request.suffix_token_ids or layout.compute_at_least):
            return None
        last = prompt + 1 + max(i for i, token in enumerate(cells) if token == HOLE)
        if layout.in_window and prompt + len(cells) > layout.window:
            return None
        if request.suffix_token_ids:
            if request.params.stop and set(cells[: last - prompt]) != {HOLE}:
                return None
            total = prompt + len(cells)
            in_pool = layout.num_pages * layout.page_size - layout.block_size
            return last if total <= min(layout.max_model_len, in_pool) else None
        in_pool = layout.num_pages * layout.page_size - layout.block_size
        limit = min(last, layout.max_model_len, in_pool)
        return limit if limit > prompt else None

    def _truth(self, request: Any, limit: int, index: int) -> Truth:
        prompt = request.prompt_token_ids
        tokens, reason, nfe = alone(self.layout, prompt, self._placement(request, limit, index))
        text = Letters().decode(tokens, True)
        found = [(at + len(s), at) for s in request.params.stop if (at := text.find(s)) >= 0]
        if found:
            return Truth(tokens[: min(found)[1]], "stop", None, tokens)
        return Truth(tokens, reason, nfe, tokens)

    def _placement(self, request: Any, limit: int, index: int) -> Placement:
        layout, params = self.layout, request.params
        prompt = list(request.prompt_token_ids)
        first = layout.prefill_len(len(prompt))
        return Placement(
            tail=tuple(prompt[first : first + layout.window]),
            prompt_len=len(prompt),
            limit=limit,
            sampling=SamplingNumbers(params.temperature),
            stop_ids=params.stop_token_ids + (() if params.ignore_eos else (END_ID,)),
            max_nfe=params.max_nfe or NO_LIMIT,
            max_run=params.max_repetition_run or NO_LIMIT,
            knobs={"threshold": params.strategy_overrides.get("threshold", 0.5)},
            seed=ENGINE_SEED if params.seed is None else params.seed,
            fold=index + (self.num_sequences if params.seed is None else 0),
            given=tuple(cells_of(request)) if request.suffix_token_ids else (),
        )

    def _read(self, output: Any) -> None:
        """What a step reports of a request."""
        if output.request_id in self.foreign:
            self.foreign -= {output.request_id} if output.finished else set()
            return
        one = self.expected[output.request_id]  # a KeyError: it ended twice
        assert output.prompt_token_ids == list(one.request.prompt_token_ids)
        assert [sequence.index for sequence in output.outputs] == list(range(one.request.params.n))
        assert output.finished == all(sequence.finish_reason for sequence in output.outputs)
        assert output.finished or one.request.stream
        reasons = {sequence.finish_reason for sequence in output.outputs}
        assert (output.error is not None) == ("error" in reasons)
        for sequence, truth in zip(output.outputs, one.truths, strict=True):
            shown = one.shown.get(sequence.index, [])
            assert sequence.token_ids[: len(shown)] == shown, "a stream took tokens back"
            one.shown[sequence.index] = list(sequence.token_ids)
            spoken = one.spoken.get(sequence.index, "")
            assert sequence.text.startswith(spoken), "a stream took text back"
            one.spoken[sequence.index] = sequence.text
            assert sequence.token_ids == truth.raw[: len(sequence.token_ids)]
            if sequence.finish_reason is not None:
                self._check_end(one, sequence, truth, output.error)
        if output.finished:
            self._check_metrics(one, output)
            del self.expected[output.request_id]
            self.counts["ended"] += 1
            self._remember(one, output)

    def _check_end(self, one: Expected, sequence: Any, truth: Truth, error: str | None) -> None:
        self.counts[sequence.finish_reason] += 1
        cut = sequence.finish_reason == "abort" and (
            one.aborted or (one.deadline is not None and self.clock.now >= one.deadline)
        )
        said = error or ""  # of a request: of one of its sequences
        is_error, is_alone = sequence.finish_reason == "error", one.request.params.n == 1
        gave_up = (
            is_error
            and self.device.num_failures >= one.failures_before + 2
            and (said.startswith("the device failed twice") or not is_alone)
        )
        unreadable = (
            is_error
            and getattr(self.tokenizer, "breaks_at", -1) in sequence.token_ids
            and (said.startswith("the tokenizer failed: ") or not is_alone)
        )
        untraceable = is_error and ("no such rows" in said or not is_alone)
        if cut or gave_up or unreadable or untraceable:
            self.counts["untraceable"] += "no such rows" in said
            self.counts["panics"] += "Panic" in said
            self.counts["cut"] += 1
            return
        assert (sequence.token_ids, sequence.finish_reason) == (truth.tokens, truth.reason)
        if self.tokenizer:
            assert sequence.text == self.tokenizer.decode(truth.tokens, True)

    def _check_metrics(self, one: Expected, output: Any) -> None:
        metrics = output.metrics
        is_whole = all(s.finish_reason not in ("abort", "error") for s in output.outputs)
        forwards = [truth.nfe for truth in one.truths]
        if is_whole and None not in forwards:
            assert metrics.nfe == sum(forwards)
        assert metrics.e2e_s >= (metrics.ttfb_s or 0.0) >= 0.0
        self.counts["cached"] += metrics.cached_tokens
        self.num_forwards += metrics.nfe
        cells = cells_of(one.request)
        written = [
            sum(token == HOLE for token, _ in zip(cells, sequence.token_ids, strict=False))
            for sequence in output.outputs
        ]
        assert metrics.tokens_per_forward == sum(written) / max(metrics.nfe, 1)
        self.num_tokens += sum(written)
        if not self.layout.prefix_caching and one.request.params.n == 1:
            assert metrics.cached_tokens == 0 or metrics.num_preemptions

    def _remember(self, one: Expected, output: Any) -> None:
        """Turn two of a chat starts with turn one."""
        text = output.prompt_token_ids + output.outputs[0].token_ids
        self.texts = [*self.texts[-5:], text + [len(text) % DRAWN] * 4]

    # --- what must always hold --------------------------------------------------------------------

    def check(self) -> None:
        """The books after any action."""
        scheduler, stages = self.scheduler, self.host.scheduler
        live = scheduler.live
        scheduler.pool.check([sequence.pages for sequence in live])
        assert len({sequence.slot for sequence in live}) == len(live)
        assert [s.rank for s in live] == sorted(s.rank for s in live)
        for sequence in live:
            assert sequence.stage in (stages.PREFILL, stages.DECODE)
            held = scheduler.table[sequence.slot].tolist()
            assert held[: len(sequence.pages)] == sequence.pages
            assert set(held[len(sequence.pages) :]) <= {-1}
            assert sequence.in_flight == self._steps_in_flight(sequence)
        waiting = self._waiting()
        assert len({id(sequence) for sequence in waiting}) == len(waiting), "queued twice"
        assert scheduler.num_waiting == len(waiting)
        alive = {
            id(sequence)
            for one in self.engine._requests.values()
            for sequence in one.sequences
            if sequence.stage != stages.DONE
        }
        assert alive == {id(s) for s in live} | {id(s) for s in waiting}, "a sequence is lost"

    def _steps_in_flight(self, sequence: Any) -> int:
        """Steps that were dispatched in this stay of the sequence and not read."""
        return sum(
            chunk.steps
            for round_ in self.engine._rounds
            for chunk in round_.chunks
            for one, epoch in zip(chunk.sequences, chunk.epochs, strict=True)
            if one is sequence and epoch == sequence.epoch
        )

    def _waiting(self) -> list[Any]:
        waiting = self.host.scheduler.WAITING
        return [s for _, s in self.scheduler._waiting if s.stage == waiting]

    def _check_order(self, before: set[int], preempted: dict[int, int], blocked: set[int]) -> None:
        """Nobody was passed by a worse-ranked one, and only the worst-ranked gave way."""
        live = self.scheduler.live
        waiting = [s for s in self._waiting() if id(s) not in blocked]
        for sequence in live:
            if id(sequence) not in before:
                assert all(other.rank > sequence.rank for other in waiting), "passed in the queue"
        for sequence in waiting:
            if sequence.num_preemptions > preempted.get(id(sequence), NO_LIMIT):
                assert all(other.rank < sequence.rank for other in live), "the wrong one gave way"


@contextlib.contextmanager
def interrupted_at(path: str, line: int) -> Iterator[None]:
    """KeyboardInterrupt at this many lines run in the folder of `path`; beyond, none."""
    folder, left = path.rpartition("/")[0], [line]

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


DRAWN = POISON_ID


def cells_of(request: Any) -> list[int]:
    """What stands after the prompt: ids, HOLE for a cell to be written."""
    return [HOLE] * request.params.max_tokens + list(request.suffix_token_ids)


def waits_for_leader(sequence: Any, host: ModuleType) -> bool:
    leader = sequence.leader
    return leader is not None and leader.stage != host.scheduler.DONE


def run(host: ModuleType, seed: int, actions: int) -> Counter[str]:
    """A seeded run: random actions, then to the end; raises where something is wrong."""
    rng = random.Random(seed)
    world = World(host, rng)
    for _ in range(actions):
        world.act(rng)
    world.drain()
    return world.counts
