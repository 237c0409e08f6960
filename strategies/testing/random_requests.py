"""Random requests: fresh ones, and ones in the middle of their text, for `testing.invariants`.

A request in the middle has any window that the contract calls valid, whether or not some run leads
there: statuses in order, prompt cells and what leaves filled, all else drawn.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..core import driver
from ..core.protocol import PrefillChunk, knob_rules, split_knobs
from ..core.state import (
    ACTIVE,
    DUMMY,
    EMPTY,
    NO_LIMIT,
    TO_CACHE,
    DecodeState,
    Limits,
    Sampling,
)
from .random_model import HOLE, NOTHING, ROWS, VOCAB, Forward, World, slot_spec

# Even shares of the 7 tokens, halves, certainty: ties, and thresholds met exactly.
_PROBS = np.array([1 / 7, 0.25, 0.5, 0.75, 0.9, 1.0], np.float32)
_KNOBS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.5, 4.0)
# The programs run a few dozen times each: compiling them fast matters more than running them fast.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def check(strategy: Any, knobs: Mapping[str, Sequence[float]], num_slots: int, seed: int) -> None:
    """Refuse what would be ignored, or draw less than it says.

    Raises:
        ValueError: The strategy has no such knob, a value is out of its range, or there is none.
    """
    if num_slots < 2 or seed < 0:
        raise ValueError(f"{num_slots=} must be at least 2 and {seed=} at least 0; raise it")
    rules = knob_rules(strategy)
    for name, values in knobs.items():
        if name not in rules:
            known = ", ".join(sorted(rules)) or "none"
            raise ValueError(f"knobs: the strategy has no knob {name!r}; it has {known}")
        low, high = rules[name][:2]
        if not len(values) or not all(low <= value <= high for value in values):
            raise ValueError(
                f"knobs: {name}={list(values)} must be values in [{low}, {high}]; give at least one"
            )


def draw(
    rng: np.random.Generator,
    strategy: Any,
    count: int,
    midway: bool,
    knobs: Mapping[str, Sequence[float]],
) -> DecodeState:
    """Requests with windows of their own, each in a slot; numpy leaves, but for the keys.

    Args:
        strategy: With its knobs still in place; each request gets values of its own.
        midway: Draw three of four in the middle of their text, at a window that need not occur
            reached; else all are fresh.
        knobs: Values to draw for some of the knobs.
    """
    K, S = strategy.buffer_size or 1, strategy.block_size
    B, W, in_window = count, K * S, strategy.needs.prompt.in_window
    X = (9 + 3 * K) * S
    if in_window:
        prompt_len = rng.integers(1, W, B)
        limit = rng.integers(prompt_len + 1, W + 1)
        # Cells that the request brings after its prompt, between its holes and after them.
        end, cell = limit + rng.integers(0, W - limit + 1), np.arange(W)[None]
        brings = (cell >= prompt_len[:, None]) & (cell < end[:, None])
        brings &= (cell >= limit[:, None]) | (rng.random((B, W)) < 0.2)
    else:
        brings = None
        prompt_len = rng.integers(1, 2 * S + 4, B)
        limit = prompt_len + rng.integers(1, (K + 2) * S, B)
        if strategy.needs.pins:
            brings = (rng.random((B, W)) < rng.choice([0.0, 0.3], (B, 1))) & (np.arange(W) < S)
        elif strategy.needs.starts_filled:
            rest = prompt_len % S if strategy.needs.prompt.is_grid else np.zeros(B, int)
            brings = (rng.random((B, W)) < rng.choice([0.0, 0.0, 0.3], (B, 1))) & (
                np.arange(W) >= rest[:, None]
            )
    given = None
    if brings is not None:
        given = _int32(np.where(brings, rng.integers(1, VOCAB, (B, W)), -1))
    # Mostly the same token at a position, now and then another one.
    token = rng.integers(0, VOCAB - 1, (B, 1, X)) + (rng.random((B, ROWS, X)) < 0.2)
    world = World(
        token=_int32(token % (VOCAB - 1) + 1),
        prob=_float32(rng.choice(_PROBS, token.shape)),
        cached=_int32(np.full((B, X), NOTHING)),
        fault=_int32(np.zeros(B)),
    )
    stops = np.where(rng.random((B, 2)) < 0.3, rng.integers(1, VOCAB, (B, 2)), -1)
    never = _int32(np.full(B, NO_LIMIT))
    temperature = _float32(rng.choice([0.0, 0.0, 0.7], B))
    state = _admit(
        split_knobs(strategy)[0],
        _int32(rng.integers(0, VOCAB, (B, X))),  # mask ids among them
        _int32(prompt_len),
        _int32(limit),
        given,
        {
            "sampling": Sampling(temperature, _int32(np.zeros(B)), _float32(np.ones(B))),
            "limits": Limits(
                _int32(stops),
                never,
                never,
                None if given is None or strategy.needs.starts_filled else given >= 0,
                strategy.needs.pins,
            ),
            "knobs": _draw_knobs(rng, strategy, B, knobs),
            "keys": jax.random.split(jax.random.key(int(rng.integers(1 << 30))), B),
        },
        world,
    )
    state = jax.device_get(state.replace(keys=None)).replace(keys=state.keys)
    if midway and not strategy.needs.prompt.is_token_causal:  # such windows are their strategy's
        state = _midway(rng, state, in_window, strategy.needs.provisional_cache == "across_steps")
    # A slot in eight is free, whatever is left in it.
    gone = rng.random(B) < 0.125
    return state.replace(finish=_int32(np.where(gone, EMPTY, state.finish)))


def _int32(x: Any) -> Any:
    return np.asarray(x, np.int32)


def _float32(x: Any) -> Any:
    return np.asarray(x, np.float32)


@functools.partial(jax.jit, compiler_options=QUICK)
def _admit(
    strategy: Any,
    prompt: Int[Array, "B X"],
    prompt_len: Int[Array, " B"],
    limit: Int[Array, " B"],
    given: Int[Array, "B W"] | None,
    settings: dict[str, Any],
    world: World,
) -> DecodeState:
    """Fresh requests, their prompts taken in."""
    needs, (B, X) = strategy.needs, prompt.shape
    spec = slot_spec(strategy, B)
    tail = driver.prompt_tail(needs, spec, prompt, prompt_len)
    buffer = driver.admit_window(needs, spec, tail, prompt_len, limit, given)
    before = jnp.arange(X)[None] < buffer.start[:, None]
    state = driver.new_slots(strategy, spec, settings, buffer, X).replace(
        rows=jnp.zeros((*tail.shape, 0)),
        page_table=jnp.full((B, 1), -1, jnp.int32),
        pools=world.replace(cached=jnp.where(before, 1, world.cached)),
        output=jnp.ones((B, X), jnp.int32),
    )
    forward: Any = Forward(state, needs.boundary)
    whole = jnp.ones((B, 1, 1), bool)
    chunk = PrefillChunk(forward, state, None, whole, whole[:, 0, 0])
    return strategy.absorb(chunk, state)


def _draw_knobs(
    rng: np.random.Generator, strategy: Any, count: int, given: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Values of each knob's range a request: its default, its ends, and what lies between."""
    drawn, rules = {}, knob_rules(strategy)
    for name, (low, high, whole, _) in rules.items():
        values = {getattr(strategy, name), low, *_KNOBS, min(high, 2 * max(_KNOBS))}
        legal = sorted(value for value in values if low <= value <= high)
        if whole:
            legal = [value for value in legal if value % 1 == 0]
        drawn[name] = _float32(rng.choice(given.get(name, legal), count))
    for name, rule in rules.items():
        if rule.up_to is not None:
            drawn[name] = np.minimum(drawn[name], drawn[rule.up_to])
    return drawn


def _midway(
    rng: np.random.Generator, state: DecodeState, in_window: bool, provisional: bool
) -> DecodeState:
    """Three rows of four in any valid window: statuses in order, cells filled at random."""
    fresh = state.buffer
    B, K, S = fresh.tokens.shape
    cell = np.arange(K * S).reshape(1, K, S)
    share = rng.choice([0.0, 0.3, 0.8, 1.0], (B, 1, 1))
    chosen = rng.random((B, K, S)) < share
    if in_window:
        start, limit, status = fresh.start, fresh.limit, fresh.status
        filled = fresh.filled | (chosen & (cell < limit[:, None, None]))
    else:
        start = fresh.start + S * rng.integers(0, 4, B)
        limit = np.maximum(fresh.limit, start + rng.integers(1, (K + 2) * S, B))
        most = np.minimum(K, -(-(limit - start) // S))
        num_open = np.maximum(rng.integers(0, most + 1), start < fresh.prompt_len)
        # One whose text is settled to its limit has ended: the block that the limit cuts is open.
        num_done = np.minimum(rng.integers(0, num_open + 1), (limit - start - 1) // S)
        num_done = np.where(rng.random(B) < 0.5, 0, num_done)
        block = np.arange(K)[None]
        status = np.where(block < num_open[:, None], ACTIVE, DUMMY)
        status = np.where(block < num_done[:, None], TO_CACHE, status)
        position = start[:, None, None] + cell
        done = (status == TO_CACHE)[:, :, None] & (position < limit[:, None, None])
        in_prompt = position < fresh.prompt_len[:, None, None]
        filled = in_prompt | done | (chosen & (status == ACTIVE)[:, :, None])
    given = fresh.filled & (start == fresh.start)[:, None, None]  # what the request brought
    drawn = fresh.replace(
        tokens=np.where(given, fresh.tokens, rng.integers(1, VOCAB, (B, K, S))),
        filled=filled,
        status=status,
        start=start,
        limit=limit,
        block_steps=np.where(status == DUMMY, 0, rng.integers(0, 2 * S, (B, K))),
        nfe=rng.integers(0, 100, B),
    )
    take = rng.random(B) < 0.75

    def pick(a: Any, b: Any) -> Any:
        return np.where(take.reshape(-1, *(1,) * (a.ndim - 1)), a, b).astype(b.dtype)

    buffer = jax.tree.map(pick, drawn, fresh)
    # What came before the window is in the cache, and its text was emitted.
    position = np.arange(state.pools.cached.shape[1])[None]
    cached = np.where(position < buffer.start[:, None], 1, NOTHING)
    if provisional:  # an open block that has had forwards was stored by them
        had = (buffer.block_steps[:, :1] > 0) & (position >= buffer.start[:, None])
        cached = np.where(had, HOLE, cached)
    return state.replace(
        buffer=buffer,
        pools=state.pools.replace(cached=_int32(cached)),
        output_len=np.maximum(0, buffer.start - buffer.prompt_len),
    )
