"""The readout with an expectation: one law for token, likeliest id, entropy and embedding.

Proves that no tile size changes what is read, also where it does not divide the vocabulary; that a
temperature a row, top-k and top-p act on all of it as NumPy says; and that sure laws have entropy
0, rows that are no numbers have no token, and ids that are forbidden are never drawn or expected.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.models.head import Head
from dllm_jax.runner import expectation
from dllm_jax.runner.expectation import NOISE, read_expected
from dllm_jax.strategies.core.state import NO_TOKEN, Sampling

VOCAB, WIDTH, ROWS = 2 * NOISE + 300, 8, 6
FORBIDDEN = (5, VOCAB - 1)


def forbidden(ids):
    return functools.reduce(jnp.logical_or, (ids == one for one in FORBIDDEN))


@pytest.fixture(scope="module")
def head():
    table = jax.random.normal(jax.random.key(0), (VOCAB, WIDTH))
    return Head(table, cap=30.0, embed_scale=3.0)


HIDDEN = 2 * jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
KEYS = jax.random.split(jax.random.key(2), ROWS)


def sampling(temperature: Any = 0.7, top_k: Any = 0, top_p: Any = 1.0) -> Sampling:
    def each(value, dtype):
        return jnp.broadcast_to(jnp.asarray(value, dtype), (ROWS,))

    return Sampling(
        temperature=each(temperature, jnp.float32),
        top_k=each(top_k, jnp.int32),
        top_p=each(top_p, jnp.float32),
    )


def read(head, hidden=HIDDEN, how=None, **more) -> Any:
    how = sampling() if how is None else how
    return read_expected(head, hidden, how, KEYS, forbidden=forbidden, num_top=1, **more)


def laws(head, temperature: Any = 0.7, top_k=None, top_p=None):
    """Each row's law in float64."""
    logits = np.asarray(HIDDEN, np.float64) @ np.asarray(head.weights, np.float64).T
    logits = 30 * np.tanh(logits / 30)
    logits[:, FORBIDDEN] = -np.inf
    found = np.exp((logits - logits.max(-1, keepdims=True)) / np.reshape(temperature, (-1, 1)))
    found /= found.sum(-1, keepdims=True)
    for row in found:
        order = np.argsort(-row, kind="stable")
        if top_k:
            row[order[top_k:]] = 0
        if top_p:
            before = np.cumsum(row[order]) - row[order]
            row[order[before >= top_p * row.sum()]] = 0
        row /= row.sum()
    return found


def assert_of(stats, head, law):
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(law * np.log(law), axis=-1)
    np.testing.assert_array_equal(stats.top_ids[:, 0], law.argmax(-1))
    np.testing.assert_allclose(stats.top_probs[:, 0], law.max(-1), rtol=1e-4)
    np.testing.assert_allclose(stats.entropy, entropy, atol=1e-4)
    soft = 3.0 * law @ np.asarray(head.weights, np.float64)
    np.testing.assert_allclose(stats.soft, soft, atol=1e-4)
    drawn = law[np.arange(ROWS), stats.token]
    np.testing.assert_allclose(stats.confidence, drawn, rtol=1e-3)
    assert (drawn > 0).all()


def test_tiles_of_any_size_read_the_same(head):
    whole = read(head, tile=4 * NOISE)
    assert_of(whole, head, laws(head))
    for tile in (NOISE, 2 * NOISE):
        tiled = read(head, tile=tile)
        np.testing.assert_array_equal(tiled.token, whole.token)
        np.testing.assert_array_equal(tiled.top_ids, whole.top_ids)
        for name in ("entropy", "confidence", "top_probs", "soft"):
            np.testing.assert_allclose(getattr(tiled, name), getattr(whole, name), atol=1e-5)


def test_each_row_has_its_own_temperature_and_zero_draws_nothing(head):
    heats = np.array([0.0, 0.4, 0.8, 1.0, 2.0, 0.0])
    stats = read(head, how=sampling(heats))
    assert_of(stats, head, laws(head, np.where(heats > 0, heats, 1.0)))
    greedy = heats == 0
    np.testing.assert_array_equal(stats.token[greedy], stats.top_ids[greedy, 0])
    assert (np.asarray(stats.token) != np.asarray(stats.top_ids)[:, 0])[~greedy].any()


@pytest.mark.parametrize(("top_k", "top_p"), [(3, None), (None, 0.6), (40, 0.3)])
def test_top_k_and_the_nucleus_cut_the_law_of_everything(head, top_k, top_p):
    how = sampling(top_k=top_k or 0, top_p=1.0 if top_p is None else top_p)
    assert_of(read(head, how=how), head, laws(head, top_k=top_k, top_p=top_p))


def test_rows_that_are_not_cut_read_the_same_beside_one_that_is(head):
    alone = read(head)
    beside = read(head, how=sampling(top_k=[4, 0, 0, 0, 0, 0]))
    for name in ("token", "top_ids", "entropy", "soft"):
        np.testing.assert_array_equal(getattr(beside, name)[1:], getattr(alone, name)[1:])


@pytest.mark.parametrize("top_k", [0, 2])
def test_a_sure_law_has_entropy_zero_and_never_less(top_k):
    """Below 0 it would pass a threshold of 0, at which the work of a canvas is fixed."""
    rows, width = 512, 64
    table = jax.random.normal(jax.random.key(3), (768, width))
    how = Sampling(
        temperature=jnp.full((rows,), 0.4),
        top_k=jnp.full((rows,), top_k),
        top_p=jnp.ones((rows,)),
    )

    @jax.jit  # fused: a law's highest value and its peak may be rounded apart
    def entropy(table, hidden):
        head = Head(table, embed_scale=1.0)
        return read_expected(head, hidden, how, None, forbidden=lambda ids: ids < 0).entropy

    got = np.asarray(entropy(table, 3 * jax.random.normal(jax.random.key(4), (rows, width))))
    assert (got >= 0).all()
    assert (got < 1e-4).any()


@pytest.mark.parametrize("top_k", [0, 2])
def test_a_row_that_is_no_number_has_no_token_and_leaves_its_neighbours(head, top_k):
    how = sampling(top_k=top_k)
    stats = read(head, HIDDEN.at[2].set(jnp.nan), how)
    want = read(head, how=how)
    assert int(stats.token[2]) == NO_TOKEN
    others = np.arange(ROWS) != 2
    np.testing.assert_array_equal(stats.token[others], want.token[others])
    np.testing.assert_array_equal(stats.soft[others], want.soft[others])


def test_rows_of_all_slots_read_each_tile_of_the_head_together(head, monkeypatch):
    """Trap T32: a chunk of rows is a read of the head."""
    seen = set()

    class Recorded(Head):
        def __call__(self, hidden):
            seen.add((len(hidden), len(self.weights)))
            return super().__call__(hidden)

    monkeypatch.setattr(expectation, "Head", Recorded)
    rows = expectation.ROWS
    how = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], (8,)), sampling())
    keys = jax.random.split(jax.random.key(0), rows)
    jax.eval_shape(
        lambda hidden: read_expected(head, hidden, how, keys, forbidden=forbidden, tile=2 * NOISE),
        jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32),
    )
    assert rows >= 8 * 256
    assert seen == {(rows, 2 * NOISE), (rows, VOCAB - 2 * NOISE)}
