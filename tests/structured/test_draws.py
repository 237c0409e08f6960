"""Drawn texts: each as often as its share of all texts that the automaton allows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.runner import grammars
from dllm_jax.runner.grammar_readout import read_classes
from dllm_jax.runner.reader import Reader
from dllm_jax.strategies.core import grammar_plan
from dllm_jax.strategies.core.constraint import HOLE, View
from dllm_jax.strategies.core.grammar_paths import Draw
from dllm_jax.strategies.core.protocol import Readout
from dllm_jax.strategies.core.state import Sampling
from tests.structured.toys import random_toy, stacked

pytestmark = pytest.mark.long

SIZES = grammars.Sizes(8, 6, 40, 8, 60, 4, 16)
IDS, W, DRAWS, TEMPERATURE = 7, 3, 4000, 1.3
TOYS = 6


def _draw(module, view, logits, keys):
    """Tokens [DRAWS W] of one slot."""
    sampling = Sampling(jnp.full((1,), TEMPERATURE), jnp.zeros((1,), jnp.int32), jnp.ones((1,)))

    def one(keys):
        reader = Reader(lambda rows: rows, lambda ids: ids == 0)
        read = read_classes(reader, logits, Readout(sampling=sampling, keys=keys), view)
        whole = jnp.ones((1, W), bool)
        draw = Draw(sampling.temperature > 0, keys[None])
        return module.plan(view, read, whole, draw).token[0]

    return jax.vmap(one)(keys)


def _shares(toy, logits, room):
    """The probability of each text that may be drawn, by its tokens before the end."""
    law = np.exp(logits.astype(np.float64) / TEMPERATURE)
    law[:, 0] = 0.0
    law /= law.sum(axis=1, keepdims=True)
    found = {}
    for text in itertools.product(range(1, IDS), repeat=W):
        state, weight, said = toy.start, 1.0, []
        for w, token in enumerate(text):
            if state == toy.end:
                break
            weight *= law[w, token]
            state = toy.after(state, [token])
            said.append(token)
        if toy.distance[state] <= room:
            found[tuple(said)] = weight
    total = sum(found.values())
    return {text: weight / total for text, weight in found.items()}


_drawn = jax.jit(_draw, static_argnums=0)


def check_shares(module, seed):
    """Texts that a module `grammar_plan` draws, by chi-squared."""
    from scipy import stats  # two seconds, which no other worker need spend

    rng = np.random.default_rng(seed)
    toy = random_toy(rng, states=3)
    room = max(0, int(toy.distance[toy.start]) - W) + 1
    logits = rng.normal(0.0, 1.0, (W, IDS)).astype(np.float32)
    view = View(
        stacked([grammars.padded(grammars.ready(toy, IDS), SIZES)]),
        jnp.full((1,), toy.start, jnp.int32),
        jnp.ones((1,), bool),
        jnp.full((1, W), HOLE, jnp.int32),
        jnp.zeros((1, W), jnp.int32),
        jnp.full((1,), room, jnp.int32),
    )
    keys = jax.random.split(jax.random.key(seed), (DRAWS, W))
    drawn = np.asarray(_drawn(module, view, jnp.asarray(logits), keys))
    shares = _shares(toy, logits, room)
    counts = dict.fromkeys(shares, 0)
    for row in drawn:
        text = tuple(row[: np.argmax(row < 0)] if (row < 0).any() else row)
        counts[text] += 1  # a text that may not be drawn is no key
    likely = [text for text, share in shares.items() if share * DRAWS >= 5]
    got = [counts[text] for text in likely]
    want = [shares[text] * DRAWS for text in likely]
    got.append(DRAWS - sum(got)), want.append(DRAWS - sum(want))
    if want[-1] < 1e-6:
        got, want = got[:-1], want[:-1]
    want = np.array(want) * (sum(got) / sum(want))
    p = stats.chisquare(got, want).pvalue if len(got) > 1 else 1.0
    assert p > 0.01 / TOYS


@pytest.mark.slow("3|4|5")
@pytest.mark.parametrize("seed", range(TOYS))
def test_texts_are_drawn_by_their_shares(seed):
    check_shares(grammar_plan, seed)
