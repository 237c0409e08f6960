"""Real paging for the contract tests: permuted pages, ragged rows, one compiled step.

Page tables are random permutations padded with -1, and the pools start full of garbage, so that
reading an unwritten cell shows. The invariants of docs/contract.md are checked after every step.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.runner import decode
from dllm_jax.runner.forward import ModelForward
from dllm_jax.strategies.core import driver
from dllm_jax.strategies.core.protocol import split_knobs
from dllm_jax.strategies.core.state import (
    EMPTY,
    FINISH_REASONS,
    NO_LIMIT,
    RUNNING,
    DecodeState,
    Limits,
    Sampling,
    StepInfo,
    put_slot,
    slot_part,
    take_slot,
)
from tests.contract.invariants import Watcher

SLOTS, BUCKET, ROOM, GARBAGE = 4, 32, 32, 1e3


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and its wishes; `seed` makes its key, into which `fold` is folded.

    The suffix follows `max_tokens` holes; an id of -1 in it is one more.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 14
    temperature: float = 0.0
    seed: int = 0
    stops: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    knobs: tuple[tuple[str, float], ...] = ()
    fold: tuple[int, ...] = ()

    @property
    def given(self) -> tuple[int, ...]:
        """What stands after the prompt, -1 for a hole."""
        return (-1,) * self.max_tokens + self.suffix

    @property
    def limit(self) -> int:
        return len(self.prompt) + 1 + max(i for i, id_ in enumerate(self.given) if id_ < 0)


@dataclasses.dataclass(frozen=True)
class Row:
    """How one request ended, with what every step said of it: slot state before, and info."""

    tokens: list[int]
    reason: str | None
    nfe: int
    steps: list[tuple[DecodeState, StepInfo]]
    cached: int
    pages: np.ndarray


@dataclasses.dataclass(frozen=True)
class Decoded:
    """All rows, in the order of the requests (EMPTY slots left out), and the last state."""

    rows: list[Row]
    state: DecodeState

    def cache(self, row: Row, pool: str = "target") -> list[tuple[Any, Any]]:
        """K and V [positions G H] of each layer that the row's cache holds."""
        return read_cache(self.state.pools[pool], row.pages, row.cached)


def read_cache(pool: Any, pages: np.ndarray, length: int) -> list[tuple[Any, Any]]:
    """The first `length` rows of K and V of each layer after a row of a page table."""

    def read(leaf: Any) -> Any:
        found = np.asarray(leaf)[pages[pages >= 0]].swapaxes(1, 2)
        return found.reshape(-1, *found.shape[2:])[:length]

    return [(read(k), read(v)) for k, v in pool]


def page_table(
    requests: list[Request | None], window: int, page_size: int, seed: int
) -> tuple[np.ndarray, int]:
    """Disjoint random pages for each slot, -1 after them; and how many pages the pool has."""
    columns = -(-(BUCKET + ROOM + window) // page_size) + 1
    num_pages = SLOTS * columns + 3
    free = list(np.random.default_rng(seed).permutation(num_pages))
    table = np.full((SLOTS, columns), -1, np.int32)
    for b, request in enumerate(requests):
        if request is not None:
            count = -(-(len(request.prompt + request.given) + window) // page_size)
            table[b, :count] = [free.pop() for _ in range(count)]
    return table, num_pages


def fresh_state(
    strategy: Any,
    model: Any,
    aux: dict[str, Any],
    requests: list[Request | None],
    page_size: int,
    seed: int,
    num_pages: int | None = None,
) -> tuple[Any, DecodeState, jax.Array]:
    """The bare strategy, the state of these requests (None: an EMPTY slot), and their prompts.

    The pool has as many pages as the tables can name, or `num_pages`.
    """
    bare, knobs = split_knobs(strategy)
    some = [Request((0,), 1) if r is None else r for r in requests]
    prompt = np.zeros((SLOTS, BUCKET), np.int32)
    stops = np.full((SLOTS, 4), -1, np.int32)
    for b, r in enumerate(some):
        prompt[b, : len(r.prompt)] = r.prompt
        stops[b, : len(r.stops)] = r.stops

    def column(values: Any, dtype: Any) -> jax.Array:
        return jnp.asarray(np.asarray(list(values)), dtype)

    batch = decode.Batch(
        prompt=jnp.asarray(prompt),
        prompt_len=column((len(r.prompt) for r in some), jnp.int32),
        limit=column((r.limit for r in some), jnp.int32),
        sampling=Sampling(
            column((r.temperature for r in some), jnp.float32),
            jnp.zeros((SLOTS,), jnp.int32),
            jnp.ones((SLOTS,), jnp.float32),
        ),
        limits=Limits(
            jnp.asarray(stops),
            jnp.full((SLOTS,), NO_LIMIT, jnp.int32),
            jnp.full((SLOTS,), NO_LIMIT, jnp.int32),
        ),
        knobs={
            name: column((dict(r.knobs).get(name, value) for r in some), jnp.float32)
            for name, value in knobs.items()
        },
        keys=jnp.stack([_key(r) for r in some]),
    )
    window = strategy.block_size * strategy.buffer_size
    table, needed = page_table(requests, window, page_size, seed)
    state = decode.new_state(
        bare, model, aux, batch, jnp.asarray(table), num_pages or needed, page_size, ROOM
    )
    pins = bare.needs.pins
    if bare.needs.prompt.in_window or pins:  # with or without a suffix: one program
        cells = np.full((SLOTS, window), -1, np.int32)
        for b, r in enumerate(some):
            first = 0 if pins else len(r.prompt)
            cells[b, first : first + len(r.given)] = r.given[: window - first]
        given, spec = jnp.asarray(cells), decode.slot_spec(bare, model, SLOTS)
        state = state.replace(
            limits=batch.limits.replace(given=given >= 0, given_behind=pins),
            buffer=driver.admit_window(
                bare.needs,
                spec,
                driver.prompt_tail(bare.needs, spec, batch.prompt, batch.prompt_len),
                batch.prompt_len,
                batch.limit,
                given=given,
            ),
        )
    empty = column((r is None for r in requests), bool)
    return (
        bare,
        state.replace(
            finish=jnp.where(empty, EMPTY, RUNNING).astype(jnp.int32),
            pools=jax.tree.map(lambda pool: jnp.full_like(pool, GARBAGE), state.pools),
        ),
        batch.prompt,
    )


def _key(request: Request) -> jax.Array:
    return functools.reduce(jax.random.fold_in, request.fold, jax.random.key(request.seed))


# The programs run a few dozen times each: compiling them fast matters more than running them fast.
_QUICK = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, static_argnames=("chunk_size",), compiler_options=_QUICK)
def prefill(strategy, model, aux, state, prompt, chunk_size):
    forward = ModelForward(model, aux=aux)
    return decode.prefill(strategy, forward, state, prompt, chunk_size)


@functools.partial(jax.jit, compiler_options=_QUICK)
def step(strategy, model, aux, state):
    spec = decode.slot_spec(strategy, model, SLOTS)
    return driver.decode_step(strategy, ModelForward(model, aux=aux), state, spec)


def decode_paged(
    strategy: Any,
    model: Any,
    requests: list[Request | None],
    *,
    aux: dict[str, Any] | None = None,
    page_size: int = 8,
    chunk_size: int = 8,
    seed: int = 0,
    move_at: int | None = None,
) -> Decoded:
    """Decode to the end, one step at a time, checking the invariants after each.

    Args:
        chunk_size: Prompt tokens of one prefill pass; prompts are longer than one.
        seed: Of the page permutation.
        move_at: Before this step every request moves to another slot, with its pages.
    """
    aux = aux or {}
    requests = requests + [None] * (SLOTS - len(requests))
    bare, state, prompt = fresh_state(strategy, model, aux, requests, page_size, seed)
    state = prefill(bare, model, aux, state, prompt, chunk_size)
    slots = list(range(SLOTS))  # slots[i]: where request i is
    checks = [Watcher(() if r is None else r.prompt) for r in requests]
    for count in range(200):
        if not (np.asarray(state.finish) == RUNNING).any():
            break
        if count == move_at:
            state, slots = rotate(state), [(b + 1) % SLOTS for b in slots]
        new, info = step(bare, model, aux, state)
        before, after, reported = jax.device_get((_plain(state), _plain(new), info))
        for watcher, b in zip(checks, slots, strict=True):
            watcher.see(*(jax.tree.map(lambda x, b=b: x[b], t) for t in (before, after, reported)))
        check_pools(state, new)
        state = new
    else:
        raise AssertionError("200 steps and still running")
    table = np.asarray(state.page_table)
    done = [
        _row(watcher, table[b])
        for watcher, b, r in zip(checks, slots, requests, strict=True)
        if r is not None
    ]
    return Decoded(done, state)


def _row(watcher: Watcher, pages: np.ndarray) -> Row:
    last = watcher.last
    return Row(
        tokens=last.output[: last.output_len].tolist(),
        reason=FINISH_REASONS[int(last.finish)],
        nfe=int(last.buffer.nfe),
        steps=watcher.steps,
        cached=int(last.buffer.start),
        pages=pages,
    )


def rotate(state: DecodeState) -> DecodeState:
    """Every request one slot further, its pages with it; the pools stay where they are."""
    taken = [take_slot(state, b) for b in range(SLOTS)]
    table = state.page_table
    for b, slot in enumerate(taken):
        state = put_slot(state, (b + 1) % SLOTS, slot)
    return state.replace(page_table=jnp.roll(table, 1, axis=0))


def check_pools(old: DecodeState, new: DecodeState) -> None:
    """A step writes at or past `start` of running rows, on their own pages, and nowhere else."""
    table, start = np.asarray(old.page_table), np.asarray(old.buffer.start)
    for pool in old.pools:
        num_pages, _, size, _ = old.pools[pool][0][0].shape
        may = np.zeros((num_pages, size), bool)
        for b in np.flatnonzero(np.asarray(old.finish) == RUNNING):
            position = np.arange(table.shape[1] * size).reshape(-1, size)
            may[table[b][table[b] >= 0]] = (position >= start[b])[table[b] >= 0]
        for a, z in zip(*map(jax.tree.leaves, (old.pools[pool], new.pools[pool])), strict=True):
            same = (np.asarray(a) == np.asarray(z)).all(axis=(1, 3))
            assert (same | may).all(), f"{pool}: a cell was written that is not the step's to write"


def _plain(state: DecodeState) -> DecodeState:
    """The slot leaves, keys as numbers, so that they can leave the device."""
    return slot_part(state).replace(keys=jax.random.key_data(state.keys))
