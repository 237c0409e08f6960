"""Whatever a strategy writes, texts keep to their automaton and end in time.

The random model knows no automaton, so every strategy here writes tokens that do not fit.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.runner import grammars
from dllm_jax.strategies import (
    D2F,
    BlockDiffusion,
    DMax,
    Edit,
    FastDLLMV2,
    FullSequence,
    MultiBD,
    Strategy,
    blocks,
    random,
)
from dllm_jax.strategies.core import block_rewrite, driver
from dllm_jax.strategies.core.constraint import Constraint
from dllm_jax.strategies.core.needs import Needs
from dllm_jax.strategies.core.protocol import split_knobs
from dllm_jax.strategies.core.state import LENGTH, RUNNING, STOP
from dllm_jax.strategies.testing import random_model, random_requests
from dllm_jax.strategies.testing.random_model import MASK, VOCAB
from tests.structured.toys import random_toy, stacked

SIZES = grammars.Sizes(8, 6, 40, 8, 60, 4, 16)
STOP_ID, COUNT, MOST_STEPS = 7, 96, 600


class Vandal(Strategy):
    """Fills, overwrites and empties cells at random, with random ids."""

    block_size = 4
    buffer_size = 3
    needs = Needs("grid_causal")

    def step(self, forward, state):
        state = blocks.open_next(state, jnp.float32(0.3))
        out = forward(state)
        state = out.store(state, blocks.to_cache(state))
        chance = [random.uniforms(state, salt=salt) for salt in range(4)]
        buffer = state.buffer
        ids = (chance[0] * VOCAB).astype(jnp.int32)
        mine = block_rewrite.editable(state)
        write = mine & (chance[1] < jnp.where(buffer.filled, 0.2, 0.5))
        emptied = mine & buffer.filled & (chance[2] < 0.1) & ~write
        ready = chance[3][:, :, 0] < 0.5
        state, filled = block_rewrite.rewrite(state, ids, write)
        kept = state.buffer.filled & ~emptied
        state = state.replace(buffer=state.buffer.replace(filled=kept))
        return blocks.finish_step(state, filled, ready=ready)


def _unruly(strategy):
    """A strategy that does not say that it writes what was predicted; here it does not."""
    kind = type(strategy)
    names = [field.name for field in dataclasses.fields(kind) if field.name != "needs"]
    needs = dataclasses.replace(strategy.needs, fills_holes=False)
    unruly = type(kind.__name__, (kind,), {"needs": property(lambda self: needs)})
    if "needs" in {field.name for field in dataclasses.fields(kind)}:
        return strategy.replace(needs=needs)
    return unruly(**{name: getattr(strategy, name) for name in names})


STRATEGIES = {
    "vandal": Vandal(),
    "multi_bd": MultiBD(block_size=4, buffer_size=3),
    "block_diffusion": BlockDiffusion(block_size=8),
    "d2f": D2F(block_size=4, buffer_size=2),
    "edit": Edit(block_size=4, buffer_size=2, max_post_edit_steps=2),
    "dmax": DMax(block_size=4, buffer_size=2),
    "fast_dllm_v2": FastDLLMV2(block_size=8, sub_block_size=4),
    "full_sequence": FullSequence(block_size=4, buffer_size=6, block_length=4),
}


def _requests(strategy, seed):
    """Requests with automata of their own, half of them with room for the shortest text alone."""
    rng = np.random.default_rng(seed)
    state = random_requests.draw(rng, strategy, COUNT, False, {})
    toys = [random_toy(rng, VOCAB, STOP_ID, (MASK,)) for _ in range(COUNT)]
    shortest = np.array([toy.distance[toy.start] for toy in toys])
    K, S = strategy.buffer_size, strategy.block_size
    prompt_len, most = state.buffer.prompt_len, state.output.shape[1]
    end = K * S if strategy.needs.prompt.in_window else most - K * S
    prompt_len = np.minimum(prompt_len, end - shortest).astype(np.int32)
    spare = np.where(rng.random(COUNT) < 0.5, 0, rng.integers(0, 3 * S, COUNT))
    limit = np.minimum(prompt_len + np.maximum(shortest, 1) + spare, end).astype(np.int32)
    tail = rng.integers(0, VOCAB, (COUNT, K * S)).astype(np.int32)
    spec = random_requests.slot_spec(strategy, COUNT)
    given = map(jnp.asarray, (tail, prompt_len, limit))
    buffer = driver.admit_window(strategy.needs, spec, *given)
    stops = jnp.asarray(np.tile(np.array([STOP_ID, -1], np.int32), (COUNT, 1)))
    rows = [grammars.padded(grammars.ready(toy, VOCAB), SIZES) for toy in toys]
    start = jnp.full((COUNT,), 1, jnp.int32)
    # The prompt of a fresh request is in the cache up to its window.
    cached = np.arange(state.pools.cached.shape[1])[None] < np.asarray(buffer.start)[:, None]
    return toys, state.replace(
        buffer=buffer,
        limits=state.limits.replace(stop_ids=stops, given=None, given_behind=False),
        finish=np.full(COUNT, RUNNING, np.int32),
        pools=state.pools.replace(cached=np.where(cached, 1, state.pools.cached)),
        constraint=Constraint(stacked(rows), start, jnp.ones((COUNT,), bool)),
    )


@functools.cache
def _stepper(driver):
    """A step by a module `driver`."""

    @jax.jit
    def step(strategy, state):
        spec = random_model.slot_spec(strategy, COUNT)
        forward = random_model.Forward(state, strategy.needs.boundary)
        return driver.decode_step(strategy, forward, state, spec)[0]

    return step


def _texts(strategy, seed):
    """The automata and the finished texts.

    Each step's state is that of a walk, and what was emitted stays.
    """
    toys, state = _requests(strategy, seed)
    step = _stepper(driver)
    bare = split_knobs(strategy)[0]
    emitted = np.zeros_like(state.output), state.output_len
    for _ in range(MOST_STEPS):
        seen = jax.device_get(state.replace(keys=None, constraint=None, pools=None, carry=None))
        said = np.arange(seen.output.shape[1])[None] < emitted[1][:, None]
        assert (np.where(said, seen.output, 0) == np.where(said, emitted[0], 0)).all()
        emitted = seen.output, seen.output_len
        at, running = np.asarray(state.constraint.at), seen.finish == RUNNING
        if not running.any():
            break
        for i in np.flatnonzero(running):
            committed = max(seen.buffer.start[i] - seen.buffer.prompt_len[i], 0)
            assert at[i] == toys[i].after(toys[i].start, seen.output[i, :committed])
        state = step(bare, state)
    return toys, seen


def check_texts(name, seed):
    """Texts of 96 requests are whole, whatever the strategy writes."""
    toys, seen = _texts(_unruly(STRATEGIES[name]), seed)
    assert set(seen.finish) <= {STOP, LENGTH}
    for toy, output, length in zip(toys, seen.output, seen.output_len, strict=True):
        assert toy.may_end(toy.after(toy.start, output[:length]))


@pytest.mark.long
@pytest.mark.slow("^(?!.*vandal)")
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_text_is_one_of_its_automaton_and_whole(name):
    check_texts(name, 3)
