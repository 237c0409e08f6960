"""Checks of any strategy without a model: the invariants of docs/contract.md.

`check_invariants` runs a strategy on random requests against a random model
(`testing.random_model`), from fresh windows and from windows drawn at random, and looks at each
step it makes. What the strategy should write takes an oracle to check.

    for each run:  state -> step -> what the step may do -> the engine's half -> state
    between runs:  the same requests elsewhere, among others, over other leftovers
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..core import driver
from ..core.protocol import Strategy, split_knobs
from ..core.resolve import load_strategy
from ..core.state import ACTIVE, DUMMY, LENGTH, RUNNING, STOP, TO_CACHE, DecodeState
from . import random_model, random_requests
from .random_model import MIXTURE

# What a step hands on as it found it: these are the engine's.
_ENGINES = (
    "sampling",
    "limits",
    "finish",
    "knobs",
    "keys",
    "boundary",
    "page_table",
    "output",
    "output_len",
)
_FAULTS = {
    random_model.SEES_A_DUMMY: "DUMMY cells are never attended",
    random_model.HAS_A_GAP: "the live cells of a row are one contiguous range",
    random_model.READS_NOTHING: "what a forward reads of the cache was stored before",
}
_LEFTOVERS = "a result depends on ids where no cell is filled"
_ALONE = "a slot's result depends on its place or on other slots"


def check_invariants(
    strategy: Any,
    *,
    max_block_steps: int | None = None,
    midway: bool = True,
    knobs: Mapping[str, Sequence[float]] | None = None,
    num_slots: int = 24,
    seed: int = 0,
) -> None:
    """Run a strategy on random requests and check every step against the contract.

    What the request brought and what is settled stay as they are; the settled end never moves
    back, and what is settled is filled; statuses are TO_CACHE* ACTIVE* DUMMY*; DUMMY cells are
    neither filled nor attended; what leaves the window is in the cache as it leaves; the engine's
    fields are left alone; a slot's result depends neither on other slots nor on ids under holes;
    no state stops a request from getting on. A strategy may pass and be wrong in what it writes.

    Args:
        strategy: Anything `load_strategy` takes, of known sizes; small ones try more. It must not
            need auxiliary models.
        max_block_steps: Forwards in which the first open block must become TO_CACHE (or the window
            move, or the request end). None: 4 a cell, at least 32.
        midway: Also start from windows that no run need have led to, with `init`'s carry. What the
            window of a "whole_causal" strategy may hold is its own, so those start fresh.
        knobs: Values to draw for a knob. None or left out: from all of its legal range.
        num_slots: Requests side by side, at least 2: one of them is to have other neighbours.
        seed: Of everything drawn, at least 0.

    Raises:
        AssertionError: A rule is broken; the message names rule, step and slot.
        ValueError: The strategy has no sizes or needs another model, or there are no such values.

    Example:
        >>> check_invariants("multi_bd")
    """
    strategy = load_strategy(strategy)
    name = strategy.name
    if strategy.block_size is None:
        raise ValueError(
            f"{name} has no block_size, and there is no model to take it from; wrap the function: "
            "as_strategy(step, block_size=4, buffer_size=1)"
        )
    if strategy.needs.aux:
        raise ValueError(f"{name} needs the models {strategy.needs.aux}; check it with those")
    random_requests.check(strategy, knobs or {}, num_slots, seed)
    most = max(4 * strategy.block_size, 32) if max_block_steps is None else max_block_steps
    if strategy.needs.prompt.in_window:  # all of the text is one window
        most *= strategy.buffer_size or 1
    rng = np.random.default_rng(seed)
    drawn = random_requests.draw(rng, strategy, 2 * num_slots, midway, knobs or {})
    bare = split_knobs(strategy)[0]
    half, slots = num_slots // 2, np.arange(num_slots)
    moved = rng.permutation(np.concatenate([slots[:half], slots[half:] + num_slots]))
    try:
        first = list(_run(bare, _rows(drawn, slots), rng, most))
        for order, rule in ((slots, _LEFTOVERS), (moved, _ALONE)):
            other = list(_run(bare, _rows(drawn, order), rng, most))
            _compare(first, other, slots, order, rule)
    except _Broken as broken:
        raise AssertionError(f"{name}: {broken} ({seed=})") from None


class _Broken(Exception):
    """A rule that is broken, with its step and slot."""


def _rows(state: DecodeState, slots: np.ndarray) -> DecodeState:
    rows = jax.tree.map(lambda leaf: leaf[slots], state.replace(keys=None))
    return rows.replace(keys=state.keys[slots])


def _run(
    strategy: Strategy, state: DecodeState, rng: np.random.Generator, most: int
) -> Iterator[Any]:
    """Step until every request has ended; yields what `_compare` compares."""
    buffer = state.buffer
    leftovers = rng.integers(0, random_model.VOCAB, buffer.tokens.shape, np.int32)
    tokens = np.where(buffer.filled, buffer.tokens, leftovers)
    state = state.replace(buffer=buffer.replace(tokens=tokens))
    watch = _Watch(jax.device_get(_plain(state)), strategy.needs, most)
    while (np.asarray(state.finish) == RUNNING).any():
        state, seen = _step(strategy, state)
        watch.see(*jax.device_get(seen))
        yield watch.visible()


@functools.partial(jax.jit, compiler_options=random_requests.QUICK)
def _step(strategy: Strategy, state: DecodeState) -> tuple[DecodeState, Any]:
    """Both halves of a step, and what was seen between them."""
    spec = random_model.slot_spec(strategy, state.finish.shape[0])
    forward: Any = random_model.Forward(state, strategy.needs.boundary)
    stepped, info = driver.propose(strategy, forward, state)
    new, info = driver.advance(strategy, state, stepped, info, spec)
    return new, (_plain(stepped), info, _plain(new))


def _plain(state: DecodeState) -> DecodeState:
    """The inspected leaves that can leave the device; keys as numbers."""
    return state.replace(keys=jax.random.key_data(state.keys), carry=None, rows=None)


class _Watch:
    """Checks the invariants at each step, for all slots."""

    def __init__(self, state: DecodeState, needs: Any, most: int):
        self.state, self.needs, self.most, self.count = state, needs, most, 0
        buffer = state.buffer
        B, X = state.pools.cached.shape
        self.known = np.full((B, X), -1)  # what is settled, by position
        brought = self._positions(buffer) < buffer.prompt_len[:, None]
        if state.limits.given is not None:
            brought |= state.limits.given
        self.brought = np.zeros((B, X), bool)
        np.put_along_axis(self.brought, self._positions(buffer), brought, axis=1)
        self._note(buffer, brought)
        self.end = buffer.start + 0
        self.front, self.waited = buffer.start - 1, np.zeros(B, int)

    def see(self, stepped: DecodeState, info: Any, new: DecodeState) -> None:
        """One step: the state after the strategy's half, its info, the state after the engine's."""
        old, self.count = self.state, self.count + 1
        self.running = old.finish == RUNNING
        self._fields(old, stepped)
        commit, settled = info.commit_len, info.settled_len
        W = old.buffer.tokens[0].size
        self._must(info.nfe >= 1, "a step costs at least one forward", info.nfe)
        self._must((commit >= 0) & (commit <= settled), "what leaves the window is settled", commit)
        self._must(settled <= W, "settled cells are cells of the window", settled)
        for buffer in (stepped.buffer, new.buffer):
            self._statuses(buffer)
        if self.needs.fills_holes:
            was, now = old.buffer, stepped.buffer
            stays = ~was.filled | (now.filled & (now.tokens == was.tokens))
            self._must(stays, "with Needs.fills_holes no filled cell is written to")
        self._faults(stepped, new)
        self._text(stepped.buffer, settled)
        self._committed(stepped, commit)
        self._gets_on(new)
        ended = np.isin(new.finish, (RUNNING, STOP, LENGTH))
        self._must(ended, "a request ends by its text", new.finish)
        self.state = new

    def visible(self) -> dict[str, Any]:
        """The state by which requests are compared, holes shown as -1."""
        buffer = self.state.buffer
        column = np.arange(self.state.output.shape[1])[None]
        return {
            "tokens": np.where(buffer.filled, buffer.tokens, -1),
            "statuses": buffer.status,
            "start": buffer.start,
            "forwards": buffer.nfe,
            "end": self.state.finish,
            "text": np.where(column < self.state.output_len[:, None], self.state.output, -1),
        }

    def _must(self, holds: Any, rule: str, value: Any = None) -> None:
        """`holds` [B, ...] for all running slots, or the rule is broken; `value` is printed."""
        wrong = self.running & ~holds.all(axis=tuple(range(1, holds.ndim)))
        if wrong.any():
            slot = int(np.argmax(wrong))
            found = "" if value is None else f": {np.asarray(value[slot]).tolist()}"
            raise _Broken(f"step {self.count}, slot {slot}: {rule}{found}")

    def _positions(self, buffer: Any) -> np.ndarray:
        return buffer.start[:, None] + np.arange(buffer.tokens[0].size)[None]

    def _note(self, buffer: Any, where: np.ndarray) -> None:
        slot, cell = np.nonzero(where)
        tokens = buffer.tokens.reshape(len(where), -1)
        self.known[slot, self._positions(buffer)[slot, cell]] = tokens[slot, cell]

    def _fields(self, old: DecodeState, new: DecodeState) -> None:
        pairs = {f: (getattr(old, f), getattr(new, f)) for f in _ENGINES}
        pairs |= {
            f"buffer.{f}": (getattr(old.buffer, f), getattr(new.buffer, f))
            for f in ("start", "prompt_len", "limit", "nfe", "idle")
        }
        for field, (a, b) in pairs.items():
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
                self._must(x == y, f"{field} is the engine's")

    def _statuses(self, buffer: Any) -> None:
        order = np.select([buffer.status == s for s in (TO_CACHE, ACTIVE, DUMMY)], [0, 1, 2], 3)
        sound = (np.diff(order, axis=1) >= 0).all(axis=1) & (order < 3).all(axis=1)
        self._must(sound, "statuses are TO_CACHE* ACTIVE* DUMMY*", buffer.status)
        empty = ~buffer.filled | (buffer.status != DUMMY)[:, :, None]
        self._must(empty, "DUMMY cells are not filled", buffer.status)

    def _faults(self, stepped: DecodeState, new: DecodeState) -> None:
        held = np.where(stepped.buffer.filled, stepped.buffer.tokens, 0)
        for code, rule in _FAULTS.items():
            self._must((held != code).all(axis=(1, 2)) & (new.pools.fault != code), rule)

    def _text(self, buffer: Any, settled: np.ndarray) -> None:
        """Prompt and settled cells, against what they were; then what is settled now."""
        position = self._positions(buffer)
        B = len(position)
        tokens, filled = buffer.tokens.reshape(B, -1), buffer.filled.reshape(B, -1)
        known = np.take_along_axis(self.known, position, axis=1)
        same = (known < 0) | (filled & (tokens == known))
        brought = np.take_along_axis(self.brought, position, axis=1)
        self._must(same | ~brought, "what the request brought never changes", tokens)
        self._must(same, "settled tokens never change", tokens)
        end = buffer.start + settled
        self._must(end >= self.end, "the settled end never moves back", end)
        is_settled = position < end[:, None]
        past = position >= buffer.limit[:, None]
        self._must(filled | ~is_settled | past, "what is settled is filled", settled)
        self._note(buffer, is_settled & filled & self.running[:, None])
        self.end = np.where(self.running, end, self.end)

    def _committed(self, stepped: DecodeState, commit: np.ndarray) -> None:
        """Check that committed tokens are those that the cache was shown at their positions."""
        position = self._positions(stepped.buffer)
        tokens = stepped.buffer.tokens.reshape(len(position), -1)
        shown = np.take_along_axis(stepped.pools.cached, position, axis=1)
        sound = shown == tokens
        if self.needs.soft_commits:
            sound |= shown == MIXTURE
        stays = position >= (stepped.buffer.start + commit)[:, None]
        rule = "what leaves the window is in the cache as it leaves"
        self._must(sound | stays, rule, np.where(stays, 0, shown))

    def _gets_on(self, new: DecodeState) -> None:
        done = np.cumprod(new.buffer.status == TO_CACHE, axis=1).sum(axis=1)
        front = new.buffer.start + done * new.buffer.tokens.shape[2]
        on = (front > self.front) | (new.finish != RUNNING)
        self.front = np.where(on, front, self.front)
        self.waited = np.where(on, 0, self.waited + 1)
        rule = f"the first open block leaves within {self.most} of its steps"
        self._must(self.waited < self.most, rule, new.buffer.status)


def _compare(
    one: list[Any], other: list[Any], of_one: np.ndarray, of_other: np.ndarray, rule: str
) -> None:
    """Requests that are in both runs must be seen alike, step by step."""
    here = {int(request): slot for slot, request in enumerate(of_other)}
    pairs = [(slot, here[int(r)]) for slot, r in enumerate(of_one) if int(r) in here]
    for count, (a, b) in enumerate(zip(one, other, strict=False), 1):
        for slot, twin in pairs:
            for field in a:
                if (a[field][slot] != b[field][twin]).any():
                    raise _Broken(
                        f"step {count}, slot {slot}: {rule}: {field} {a[field][slot].tolist()} "
                        f"and {b[field][twin].tolist()}"
                    )
