"""The engine on the real device programs, over the toys of the gate: small pools, few buckets.

One `ModelRunner` a case serves every test, its pools full of garbage and of what earlier tests left
there, as a server's are. What a test varies (pages the host may use, prefix caching, chunkings,
buckets) it varies in the host's `EngineLayout`, so that programs are compiled once.
"""

import contextlib
import dataclasses
import functools
from collections import abc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.engine.engine import Engine
from dllm_jax.engine.layout import EngineConfig, EngineLayout
from dllm_jax.engine.requests import Request, RequestOutput, SamplingParams
from dllm_jax.engine.sequence import Sequence
from dllm_jax.runner import buckets, decode
from dllm_jax.runner.forward import ModelForward
from dllm_jax.runner.runner import ModelRunner
from dllm_jax.runner.window_output import WindowOutput
from dllm_jax.strategies.core.protocol import split_knobs
from dllm_jax.strategies.core.state import RUNNING
from tests.contract import dense, harness
from tests.contract.cases import PAGE_SIZE, case
from tests.contract.harness import GARBAGE, SLOTS

MAX_LEN = 64
NUM_PAGES = 48
MOST_STEPS = 4


def config_of(name: str, **more: Any) -> EngineConfig:
    """Few buckets: one of slots, one of pages, one of prompts."""
    strategy = case(name).strategy
    full = strategy.needs.prompt.is_full
    sizes = {
        "max_num_seqs": SLOTS,
        "max_model_len": MAX_LEN,
        "page_size": PAGE_SIZE[name],
        "num_pages": NUM_PAGES,
        "max_steps_per_chunk": MOST_STEPS,
        "slot_buckets": (SLOTS,),
        "page_buckets": (1,),
        "prefill_buckets": (32 if full else 8,),
    }
    return EngineConfig(**(sizes | more))


def make_device(name: str, model: Any = None, allocate: bool = True, **config: Any) -> ModelRunner:
    """A device of the case; `model` instead of the case's, `config` over `config_of`."""
    c = case(name)
    strategy, aux = c.strategy, dict(c.aux)
    model = model or c.model
    layout = buckets.make_layout(model, strategy, aux, config_of(name, **config))
    # The page buckets end with what a request needs.
    layout = dataclasses.replace(layout, page_buckets=layout.page_buckets[-1:])
    made = ModelRunner(model, split_knobs(strategy)[0], aux, layout, allocate=allocate)
    if not allocate:
        return made
    state = made.device.state
    made.device.state = state.replace(
        pools=jax.tree.map(lambda pool: jnp.full_like(pool, GARBAGE), state.pools)
    )
    return made


device = functools.cache(make_device)


class Sized:
    """A device under other layout than it was made with: fewer pages, other buckets."""

    def __init__(self, inner: ModelRunner, **layout: Any):
        self._inner = inner
        self.layout: EngineLayout = dataclasses.replace(inner.layout, **layout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def make_engine(name: str, on: Any = None, engine: dict[str, Any] | None = None, **layout: Any):
    """An engine of the case; its device is `on`, or the shared one under other layout."""
    return Engine(Sized(on or device(name), **layout), **(engine or {}))


@contextlib.contextmanager
def steps_a_chunk(count: int) -> Iterator[None]:
    """Every decode dispatch has this many steps."""
    with mock.patch("dllm_jax.engine.engine.num_steps", return_value=count):
        yield


def wish(request: harness.Request, request_id: str | None = None, **params: Any) -> Request:
    """The gate's request as the engine takes it."""
    values: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": request.seed,
        "stop_token_ids": request.stops,
        "strategy_overrides": dict(request.knobs),
    }
    return Request(
        prompt_token_ids=request.prompt,
        params=SamplingParams(**(values | params)),
        request_id=request_id,
        suffix_token_ids=request.suffix,
    )


End = tuple[list[int], str | None, int]


def wanted(name: str, request: harness.Request, index: int = 0) -> End:
    """How sequence `index` of a request of the case ends: its dense, cache-free truth."""
    key = (name, request, index)
    if key not in _TRUTHS:
        folded = dataclasses.replace(request, fold=(index,))
        truth: dense.Truth = case(name).truth(request=folded)
        _TRUTHS[key] = (truth.tokens, truth.reason, truth.nfe)
    return _TRUTHS[key]


_TRUTHS: dict[Any, End] = {}


def run(
    engine: Engine,
    requests: abc.Sequence[Request],
    between: Callable[[Engine], None] | None = None,
    most: int = 2000,
) -> list[RequestOutput]:
    """Run requests to their ends, in their order; the page books are checked after every step.

    Args:
        between: Called after each step.
    """
    order = [engine.add(request) for request in requests]
    done = finish(engine, between, most)
    return [done[request_id] for request_id in order]


def finish(
    engine: Engine, between: Callable[[Engine], None] | None = None, most: int = 2000
) -> dict[str, RequestOutput]:
    """Step until nothing is left; what ended, by id."""
    done: dict[str, RequestOutput] = {}
    for _ in range(most):
        if not engine.has_work:
            break
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done, "a request ended twice"
                done[output.request_id] = output
        if between:
            between(engine)
        check_books(engine)
    else:
        raise AssertionError(f"{most} steps and still work: {engine.stats()}")
    assert engine.scheduler.pool.num_held == 0, "pages are held by nobody"
    return done


def check_books(engine: Engine) -> None:
    """Pages are conserved, and no live one is under two writers."""
    engine.scheduler.pool.check(sequence.pages for sequence in engine.scheduler.live)


def ends(outputs: abc.Sequence[RequestOutput]) -> list[End]:
    """Tokens, reason and forwards of requests of one sequence each."""
    return [
        (one.outputs[0].token_ids, one.outputs[0].finish_reason, one.metrics.nfe) for one in outputs
    ]


def preempting(statuses: set[tuple[int, ...]] | None = None) -> Callable[[Engine], None]:
    """Between steps: every sequence loses its slot after each of its fetches.

    One that starts over loses its first stay after one fetch, its second after two, and so on.

    Args:
        statuses: Takes the block statuses of each window that was given up.
    """
    last: dict[Sequence, Any] = {}
    stayed: dict[Sequence, int] = {}

    def between(engine: Engine) -> None:
        for sequence in list(engine.scheduler.live):
            if sequence.saved is None or last.get(sequence) is sequence.saved:
                continue
            last[sequence] = sequence.saved
            stayed[sequence] = stayed.get(sequence, 0) + 1
            if engine.layout.starts_over and stayed[sequence] <= sequence.num_preemptions:
                continue
            stayed[sequence] = 0
            if statuses is not None:
                statuses.add(window_status(engine, sequence))
            engine.scheduler.preempt(sequence)

    return between


def window_status(engine: Engine, sequence: Sequence) -> tuple[int, ...]:
    """Statuses of the blocks of a sequence's last fetch."""
    got, row = sequence.saved
    slot = engine.runner.unpack(got.saved(row))
    return tuple(np.asarray(slot["buffer"].status).reshape(-1).tolist())


def watch_cache(engine: Engine) -> dict[int, tuple[list[int], int, dict[str, Any]]]:
    """Fills with (text, cached positions, pools as layers of K and V) of each sequence that ends.

    Keyed by the sequence's place in the order of arrival.
    """
    seen: dict[int, tuple[list[int], int, dict[str, Any]]] = {}
    leave = engine.scheduler.leave

    def watched(sequence: Sequence) -> None:
        if sequence.slot >= 0:
            pages = np.array(sequence.pages, np.int32)
            text = [*sequence.prompt, *sequence.tokens]
            engine.runner.wait()
            pools = engine.runner.state.pools
            layers = {
                name: harness.read_cache(pool, pages, sequence.start)
                for name, pool in pools.items()
            }
            seen[sequence.rank[1]] = (text, sequence.start, layers)
        leave(sequence)

    engine.scheduler.leave = watched
    return seen


# --- near-ties ------------------------------------------------------------------------------------

NEAR = 1e-4  # of docs/same_tokens.md


def near_ties(name: str, request: harness.Request, model: Any = None) -> int:
    """Decisions of a request, run alone, within `NEAR` of a threshold or a tie.

    A drawn token counts where taking `NEAR` from its logit would draw another; a confidence where
    it is so close to one of the request's thresholds, or to the next best of the readout.
    """
    c = case(name)
    strategy, aux = case(name).strategy, dict(c.aux)
    alone = [dataclasses.replace(request, fold=(*request.fold, 0))]
    bare, state, prompt = harness.fresh_state(
        strategy, model or c.model, aux, alone + [None] * (SLOTS - 1), PAGE_SIZE[name], seed=0
    )
    knobs = [float(value[0]) for value in state.knobs.values()]
    found: list[int] = []

    def record(flipped: Any, confidence: Any) -> None:
        sure = np.sort(np.asarray(confidence)[np.isfinite(confidence)])
        close = sum(int((np.abs(sure - knob) < NEAR).sum()) for knob in knobs)
        tied = int((sure[-1:] - sure[-2:-1] < NEAR).sum())
        found.append(int(np.asarray(flipped).sum()) + close + tied)

    with _recorded(record):
        state = jax.jit(_prefill, static_argnames="size")(
            bare, model or c.model, aux, state, prompt, size=harness.BUCKET
        )
        step = jax.jit(lambda *args: harness.step.__wrapped__(*args)[0])
        while (np.asarray(state.finish) == RUNNING).any():
            state = step(bare, model or c.model, aux, state)
    jax.effects_barrier()
    assert found, "nothing was read out"
    return sum(found)


def _prefill(strategy: Any, model: Any, aux: Any, state: Any, prompt: Any, size: int) -> Any:
    return decode.prefill(strategy, ModelForward(model, aux=aux), state, prompt, size)


@contextlib.contextmanager
def _recorded(record: Callable[[Any, Any], None]) -> Iterator[None]:
    """Every readout of the first slot tells what it was close to; for programs traced inside."""
    of_window, of_rows = WindowOutput.predict, ModelForward.predict

    def window(self: Any, where: Any = None, *args: Any, penalty: Any = None, **more: Any) -> Any:
        stats = of_window(self, where, *args, penalty=penalty, **more)
        if penalty is None:
            nudge = (stats.token, jnp.full(stats.token.shape, NEAR, jnp.float32))
            other = of_window(self, where, *args, penalty=nudge, **more)
            flipped = (other.token != stats.token)[0] & jnp.isfinite(stats.confidence[0])
            jax.debug.callback(record, flipped, stats.confidence[0])
        return stats

    def rows(self: Any, hidden: Any, *args: Any, **more: Any) -> Any:
        stats = of_rows(self, hidden, *args, **more)
        jax.debug.callback(record, jnp.zeros((1,), bool), stats.confidence[:1])
        return stats

    with (
        mock.patch.object(WindowOutput, "predict", window),
        mock.patch.object(ModelForward, "predict", rows),
    ):
        yield
