"""Many requests in one state: slots do not depend on each other, finished ones do not change.

Also the properties of the "random" remasking rule, which no list can predict: how many cells, only
holes, a fair choice, the request's key.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import strategies
from dllm_jax.strategies.core import driver
from dllm_jax.strategies.core.protocol import SlotSpec, TokenStats, split_knobs
from dllm_jax.strategies.core.state import (
    FINISH_REASONS,
    NO_LIMIT,
    RUNNING,
    DecodeState,
    Limits,
    Sampling,
)
from tests.oracles.list_decoder import Result, list_decode, multi_bd_rule
from tests.strategies.test_strategy_fuzz import FORWARDS, POSITIONS, VOCAB, Case, draw_case

pytestmark = pytest.mark.long

BLOCK_SIZE, BUFFER_SIZE, SLOTS = 4, 3, 12
MASK = 0


class ScriptedOutput:
    """The most likely token everywhere, as a table says; a script has no cache."""

    def __init__(self, stats: TokenStats):
        self._stats = stats

    def predict(self, where: Any, **_: Any) -> TokenStats:
        s = self._stats
        return s.replace(
            token=jnp.where(where, s.token, 0),
            confidence=jnp.where(where, s.confidence, -jnp.inf),
            entropy=jnp.where(where, s.entropy, jnp.inf),
        )

    def store(self, state: DecodeState, where: Any) -> DecodeState:
        del where
        return state


class BatchScript:
    """A forward that reads, for each slot, row `nfe` of that slot's own script."""

    mask_id, vocab_size = MASK, VOCAB

    def __init__(self, token: Any, prob: Any):
        self.token, self.prob = token, prob

    def __call__(self, state: DecodeState, **_: Any) -> ScriptedOutput:
        buffer = state.buffer
        slot = jnp.arange(buffer.nfe.shape[0])[:, None, None]
        row = jnp.minimum(buffer.nfe, self.token.shape[1] - 1)[:, None, None]
        column = jnp.minimum(buffer.positions, self.token.shape[2] - 1)
        token, confidence = self.token[slot, row, column], self.prob[slot, row, column]
        none = jnp.zeros((*token.shape, 0))
        stats = TokenStats(token, confidence, jnp.zeros_like(confidence), none.astype(int), none)
        return ScriptedOutput(stats)


def batch_state(strategy: Any, cases: list[Case], keys: Any, knobs: dict[str, Any]) -> DecodeState:
    slots, K, S = len(cases), strategy.buffer_size, strategy.block_size
    prompt = np.zeros((slots, POSITIONS), np.int32)
    stops = np.full((slots, 2), -1, np.int32)
    for slot, case in enumerate(cases):
        prompt[slot, : len(case.prompt)] = case.prompt
        stops[slot, : len(case.limits["eos_ids"])] = case.limits["eos_ids"]
    prompt_len = jnp.asarray([len(case.prompt) for case in cases], jnp.int32)
    limit = jnp.asarray([case.limit for case in cases], jnp.int32)
    max_nfe = [case.limits.get("max_nfe") or NO_LIMIT for case in cases]
    spec = SlotSpec(slots, K, S, 0, 0, -1, jnp.float32)
    tail = driver.prompt_tail(strategy.needs, spec, jnp.asarray(prompt), prompt_len)
    buffer = driver.admit_window(strategy.needs, spec, tail, prompt_len, limit)
    limits = Limits(
        stop_ids=jnp.asarray(stops),
        max_nfe=jnp.asarray(max_nfe, jnp.int32),
        max_run=jnp.full((slots,), NO_LIMIT, jnp.int32),
    )
    knobs = {name: jnp.asarray(value, jnp.float32) for name, value in knobs.items()}
    settings = {"sampling": Sampling.greedy(slots), "limits": limits, "knobs": knobs, "keys": keys}
    state = driver.new_slots(strategy, spec, settings, buffer, POSITIONS)
    return state.replace(rows=jnp.zeros((slots, K * S, 0)), pools={})


@jax.jit
def step_batch(strategy: Any, token: Any, prob: Any, state: DecodeState) -> tuple[Any, Any]:
    slots, K, S = state.buffer.tokens.shape
    spec = SlotSpec(slots, K, S, VOCAB, 0, MASK, jnp.float32)
    return driver.decode_step(strategy, BatchScript(token, prob), state, spec)


def comparable(tree: Any) -> list[np.ndarray]:
    """Leaves as numpy, random keys as their data."""
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(tree)
    ]


def draw_batch(seed: int) -> tuple[list[Case], np.ndarray, np.ndarray]:
    """Requests whose script stays above p = .3, so that the scripted token is the likeliest."""
    rng = np.random.default_rng(seed)
    cases = [draw_case(rng, BLOCK_SIZE) for _ in range(SLOTS)]
    for case in cases:
        case.prob[:] = rng.choice(np.array([0.375, 0.5, 0.75, 0.9], np.float32), case.prob.shape)
    knobs = rng.choice(np.array([0.0, 0.25, 0.5, 0.75, 1.0]), size=(SLOTS, 3))
    return cases, knobs, rng.permutation(SLOTS)


def decode_batch(cases: list[Case], knobs: np.ndarray) -> DecodeState:
    strategy, defaults = split_knobs(
        strategies.MultiBD(block_size=BLOCK_SIZE, buffer_size=BUFFER_SIZE)
    )
    names = ("accept_threshold", "add_block_threshold", "semi_complete_threshold")
    assert set(defaults) == set(names)
    values = dict(zip(names, knobs.T, strict=True))
    state = batch_state(strategy, cases, jax.random.split(jax.random.key(0), len(cases)), values)
    token = jnp.asarray(np.stack([case.token for case in cases]))
    prob = jnp.asarray(np.stack([case.prob for case in cases]))
    for _ in range(FORWARDS):
        done = np.flatnonzero(np.asarray(state.finish) != RUNNING)
        advanced, info = step_batch(strategy, token, prob, state)
        for before, after in zip(comparable(state), comparable(advanced), strict=True):
            np.testing.assert_array_equal(before[done], after[done])
        assert not any(np.asarray(leaf)[done].any() for leaf in jax.tree.leaves(info))
        state = advanced
    return state


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_slot_decodes_as_if_alone(seed: int) -> None:
    cases, knobs, _ = draw_batch(seed)
    state = decode_batch(cases, knobs)
    reasons = [FINISH_REASONS[int(code)] for code in state.finish]
    for slot, case in enumerate(cases):
        accept, add, semi = knobs[slot]
        truth: Result = list_decode(
            multi_bd_rule(accept, semi),
            case.prompt,
            case.token,
            case.prob,
            block_size=BLOCK_SIZE,
            buffer_size=BUFFER_SIZE,
            add_block_threshold=add,
            **case.limits,
        )
        emitted = np.asarray(state.output[slot, : int(state.output_len[slot])]).tolist()
        assert (emitted, reasons[slot], int(state.buffer.nfe[slot])) == (
            truth.output,
            truth.finish_reason,
            truth.nfe,
        ), f"{seed=} {slot=}"
    # The neighbours do end at different times and for different reasons.
    assert len(np.unique(np.asarray(state.buffer.nfe))) >= 4
    assert len(set(reasons)) >= 2


# ---- "random" remasking ----

ROWS = 240


def random_step(seeds: list[int], prompt_len: int) -> tuple[np.ndarray, DecodeState]:
    """One step of one block of four, two cells a forward, one row a seed."""
    strategy, defaults = split_knobs(
        strategies.BlockDiffusion(remasking="random", denoising_steps=2, block_size=BLOCK_SIZE)
    )
    shape = (FORWARDS, POSITIONS)
    limits: dict[str, Any] = {"max_tokens": 16, "eos_ids": ()}
    case = Case([5] * prompt_len, np.ones(shape, np.int32), np.full(shape, 0.5, np.float32), limits)
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
    knobs = {name: np.full(len(seeds), value) for name, value in defaults.items()}
    state = batch_state(strategy, [case] * len(seeds), keys, knobs)
    token = jnp.broadcast_to(jnp.asarray(case.token), (len(seeds), *shape))
    prob = jnp.broadcast_to(jnp.asarray(case.prob), (len(seeds), *shape))
    state, _ = step_batch(strategy, token, prob, state)
    return np.asarray(state.buffer.filled[:, 0]), state


def test_random_remasking_is_a_fair_choice_of_the_quota() -> None:
    filled, _ = random_step(list(range(ROWS)), prompt_len=4)
    assert (filled.sum(axis=1) == 2).all()
    _, counts = np.unique(filled, axis=0, return_counts=True)
    # Six pairs, 40 rows each; a fair draw leaves [15, 65] once in some 10^5 seeds, and these are
    # fixed.
    assert len(counts) == 6
    assert counts.min() > 15
    assert counts.max() < 65


def test_random_remasking_takes_holes_only() -> None:
    filled, state = random_step(list(range(ROWS)), prompt_len=5)
    assert filled[:, 0].all()
    assert (filled.sum(axis=1) == 3).all()
    assert (np.asarray(state.buffer.tokens[:, 0, 0]) == 5).all(), "the prompt's cell was rewritten"
    assert len(np.unique(filled, axis=0)) == 3


def test_random_remasking_follows_the_request_key() -> None:
    seeds = list(range(ROWS))
    once, _ = random_step(seeds, prompt_len=4)
    again, _ = random_step(seeds[::-1], prompt_len=4)
    np.testing.assert_array_equal(once, again[::-1])  # the key decides, not the slot
    other, _ = random_step([seed + 1000 for seed in seeds], prompt_len=4)
    assert (once != other).any(axis=1).mean() > 0.6  # 5 of 6 expected
