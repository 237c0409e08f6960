"""The "random" remasking rule, which no list can predict: a fair choice of holes by the key."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import strategies
from dllm_jax.strategies.core import driver
from dllm_jax.strategies.core.protocol import SlotSpec, TokenStats, split_knobs
from dllm_jax.strategies.core.state import (
    NO_LIMIT,
    DecodeState,
    Limits,
    Sampling,
)
from tests.strategies.test_strategy_fuzz import FORWARDS, POSITIONS, VOCAB, Case

pytestmark = pytest.mark.long

BLOCK_SIZE, ROWS = 4, 240
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
