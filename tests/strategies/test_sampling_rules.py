"""The acceptance rules that strategies share, where the loops of oracles/rule_checks.py end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.strategies import as_strategy
from dllm_jax.strategies.core import blocks, sampling
from dllm_jax.strategies.core.draw import token_stats
from dllm_jax.strategies.core.protocol import PerSlot, Readout, TokenStats
from dllm_jax.strategies.core.state import Sampling
from dllm_jax.strategies.testing.script import run_script


def stats_of(confidence):
    """Statistics of which only the confidences count."""
    confidence = jnp.asarray(confidence, jnp.float32)
    none = jnp.zeros((*confidence.shape, 0))
    token = jnp.zeros(confidence.shape, jnp.int32)
    return TokenStats(token, confidence, -confidence, none.astype(jnp.int32), none)


# ---- the rank ----


def plogp(p):
    return jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0)


SCORES = {
    "confidence": lambda p: p,
    "entropy": lambda p: -(-plogp(p) - 14 * plogp((1 - p) / 14)),
    "log_odds": lambda p: jnp.log(p) - jnp.log1p(-p),
}


# As users compile: the tests' own flags turn the optimisations off.
OPTIMISED = {"xla_backend_optimization_level": 3}


@pytest.mark.slow("shape0|shape1|shape3")
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 7), (1, 1, 16), (2, 3, 16), (3, 1, 21), (1, 1, 128)])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jaxlib 0.10 drops barriers on a CPU before it fuses"
)
def test_a_rank_is_a_permutation_whatever_the_score_is_fused_with(score, shape, batched):
    size = int(np.prod(shape))

    def places(table, index, among):
        return sampling.rank(SCORES[score](table[index].reshape(shape)), among)

    compiled = jax.jit(jax.vmap(places), compiler_options=OPTIMISED)
    alone = jax.jit(places, compiler_options=OPTIMISED)
    for seed in range(8):
        rng = np.random.default_rng(seed)
        table = rng.random((2, 50)).astype(np.float32)
        index = rng.integers(0, 50 if seed % 2 else 6, (2, size))  # few values: ties
        among = rng.random((2, *shape)) < 0.8
        rows = (table, index, among)
        one_by_one = (alone(*row) for row in zip(*rows, strict=True))
        got = np.asarray(compiled(*rows)) if batched else np.stack([*one_by_one])
        each = np.broadcast_to(np.arange(shape[-1]), got.shape)
        np.testing.assert_array_equal(np.sort(got, axis=-1), each)
        for place, values, where, held in zip(got, *rows, strict=True):
            # Equal values tie, so that the order is that of position.
            alike = values[where].reshape(shape)
            same = (alike[..., :-1] == alike[..., 1:]) & held[..., :-1] & held[..., 1:]
            assert (place[..., :-1] < place[..., 1:])[same].all()


# ---- the factor rule ----


@pytest.mark.parametrize(
    ("confidence", "factor", "expected"),
    [
        # 2 x .05 = .1, 3 x .1 = .3, 4 x .4 = 1.6: two of them below 1.
        ([0.6, 0.95, 0.5, 0.9], 1.0, [0, 1, 0, 1]),
        ([0.6, 0.95, 0.5, 0.9], 2.0, [1, 1, 0, 1]),  # 5 x .5 = 2.5
        ([0.6, 0.95, 0.5, 0.9], 3.0, [1, 1, 1, 1]),
        ([0.6, 0.95, 0.5, 0.9], 0.0, [0, 1, 0, 0]),  # the surest, whatever the factor
        ([0.1, 0.2, 0.1, 0.1], 1.0, [0, 1, 0, 0]),
        ([1.0, 1.0, 1.0, 1.0], 1.0, [1, 1, 1, 1]),
        ([0.75, 0.75, 0.75, 0.75], 1.0, [1, 1, 0, 0]),  # .5, .75, then 4 x .25 = 1 is not below
        ([0.5, 0.5, 0.5, 0.5], 1.5, [1, 0, 0, 0]),  # 3 x .5 = 1.5 is not below
    ],
)
def test_the_factor_rule_takes_what_its_formula_names(confidence, factor, expected):
    slot, every = PerSlot(jnp.full(1, factor)), jnp.ones((1, 1, len(confidence)), bool)
    got = sampling.factor_bounded(stats_of([[confidence]]), slot, every)
    assert got[0, 0].astype(int).tolist() == expected


# ---- the margin ----


def law_stats(probs, num_top=2):
    """Statistics of laws given as rows of probabilities, one block of one slot."""
    rows = jnp.log(jnp.asarray(probs, jnp.float32))
    R = len(probs)
    stats = token_stats(rows, Readout(sampling=Sampling.greedy(R), num_top=num_top))
    return TokenStats(
        stats.token[None, None],
        stats.confidence[None, None],
        stats.entropy[None, None],
        stats.top_ids[None, None],
        stats.top_probs[None, None],
    )


LAWS = [
    [0.5, 0.45, 0.03, 0.02],  # surest token, but torn: .05
    [0.4, 0.2, 0.2, 0.2],  # less sure, nothing near it: .2
    [0.25, 0.25, 0.25, 0.25],
    [0.1, 0.8, 0.05, 0.05],
]


def test_the_margin_ranks_otherwise_than_confidence():
    stats, among = law_stats(LAWS), jnp.ones((1, 1, 4), bool)
    two = jnp.full((1, 1), 2)
    assert np.flatnonzero(sampling.top_n(stats.confidence, two, among)).tolist() == [0, 3]
    assert np.flatnonzero(sampling.top_n(sampling.margin(stats), two, among)).tolist() == [1, 3]


@pytest.mark.parametrize("num_top", [0, 1])
def test_a_margin_without_two_tokens_is_refused(num_top):
    with pytest.raises(ValueError, match=f"has {num_top}; predict with num_top=2"):
        sampling.margin(law_stats(LAWS, num_top))


# ---- in a strategy ----


def _by_factor(forward, state):
    state = blocks.open_next(state)
    out = forward(state)
    state = out.store(state, blocks.to_cache(state))
    holes = blocks.holes(state)
    stats = out.predict(where=holes)
    one = PerSlot(jnp.ones_like(state.sampling.temperature))
    accept = sampling.factor_bounded(stats, one, holes)
    return blocks.finish_step(blocks.write(state, stats.token, accept), accept)


def _by_margin(forward, state):
    state = blocks.open_next(state)
    out = forward(state)
    state = out.store(state, blocks.to_cache(state))
    holes = blocks.holes(state)
    stats = out.predict(where=holes, num_top=2)
    one = jnp.ones_like(state.buffer.status)
    accept = sampling.top_n(sampling.margin(stats), one, holes)
    return blocks.finish_step(blocks.write(state, stats.token, accept), accept)


@pytest.mark.parametrize(
    ("step", "new"),
    [
        # [.95, .9 | .6, .5]; then .6 alone, as 3 x .5 is above 1; then the last; then the commit.
        (_by_factor, [2, 1, 1, 0]),
        (_by_margin, [1, 1, 1, 1, 0]),
    ],
)
def test_a_strategy_of_a_few_lines_decodes_by_them(step, new):
    token = np.full((12, 16), 5, np.int32)
    prob = np.tile(np.float32([0.6, 0.95, 0.5, 0.9] * 4), (12, 1))
    strategy = as_strategy(step, block_size=4, buffer_size=1)
    trace = run_script(strategy, [1, 2, 3, 4], token, prob, max_tokens=8, mask_id=31, vocab_size=32)
    assert [one.new_tokens for one in trace.steps] == [*new, *new[:-1]]
    assert trace.output == [5] * 8
    shown = [[cell != 31 for cell in one.tokens[0]] for one in trace.steps[:2]]
    order = [[False, True, False, True], [True, True, False, True]]
    assert shown == (order if step is _by_factor else [[False, True, False, False], order[0]])
