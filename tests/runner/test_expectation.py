"""The readout with an expectation: one law for token, likeliest id, entropy and embedding."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dllm_jax.kernels.layer import fp8
from dllm_jax.kernels.token_readout.head import quantize_head
from dllm_jax.models.head import Head
from dllm_jax.runner import expectation, readout
from dllm_jax.runner.chunks import in_chunks
from dllm_jax.runner.expectation import SHARE, read_expected
from dllm_jax.runner.reader import Reader
from dllm_jax.strategies.core.draw import Shard
from dllm_jax.strategies.core.protocol import Readout
from dllm_jax.strategies.core.state import NO_TOKEN, Sampling

VOCAB, WIDTH, ROWS = 4 * SHARE + 300, 8, 6
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


def read(head, hidden=HIDDEN, how=None) -> Any:
    ask = Readout(sampling=sampling() if how is None else how, keys=KEYS, num_top=1)
    return read_expected(Reader(head, forbidden), hidden, ask)


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


@pytest.mark.long
def test_a_token_is_where_the_running_sum_passes_a_uniform_number(head):
    stats, law = read(head), laws(head)
    assert_of(stats, head, law)
    until = np.cumsum(law, axis=-1)
    wanted = np.asarray(jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(KEYS))
    np.testing.assert_array_equal(stats.token, np.argmax(until > wanted[:, None], axis=-1))


@pytest.mark.long
def test_draws_have_the_frequencies_of_the_law():
    """Trap T18: over a vocabulary of shares that are full, partly forbidden and cut short."""
    rows, vocab = 4096, 2 * SHARE + 5
    table = (
        jnp.zeros((vocab, 1))
        .at[jnp.array([3, SHARE + 1, vocab - 1]), 0]
        .set(jnp.log(jnp.array([1.0, 2.0, 5.0])) + 30.0)
    )
    how = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], (rows,)), sampling(1.0))
    keys = jax.random.split(jax.random.key(7), rows)
    hidden = jnp.ones((rows, 1))
    one = Head(table, embed_scale=1.0)
    ask = Readout(sampling=how, keys=keys)
    stats = read_expected(Reader(one, lambda ids: ids == 3), hidden, ask)
    ids, counts = np.unique(np.asarray(stats.token), return_counts=True)
    np.testing.assert_array_equal(ids, [SHARE + 1, vocab - 1])
    assert abs(counts[0] / rows - 2 / 7) < 4 * (2 / 7 * 5 / 7 / rows) ** 0.5


@pytest.mark.long
def test_each_row_has_its_own_temperature_and_zero_draws_nothing(head):
    heats = np.array([0.0, 0.4, 0.8, 1.0, 2.0, 0.0])
    stats = read(head, how=sampling(heats))
    assert_of(stats, head, laws(head, np.where(heats > 0, heats, 1.0)))
    greedy = heats == 0
    np.testing.assert_array_equal(stats.token[greedy], stats.top_ids[greedy, 0])
    assert (np.asarray(stats.token) != np.asarray(stats.top_ids)[:, 0])[~greedy].any()


@pytest.mark.long
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_head_in_8_bits_says_the_law_and_the_embedding_what_it_expects(head, top_k):
    how = sampling(top_k=top_k)
    rows, small = fp8.quantize_rows(HIDDEN), quantize_head(head.weights)
    stands_for = small.values.astype(jnp.float32) * small.scales[:, None]
    got = read(dataclasses.replace(head, weights=small, table=head.weights), how=how)
    plain = dataclasses.replace(head, weights=stands_for, table=head.weights)
    want = read(plain, rows.values.astype(jnp.float32) * rows.scales[:, None], how)
    np.testing.assert_array_equal(got.token, want.token)
    for name in ("entropy", "confidence", "soft"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-4, atol=1e-5)
    assert np.abs(got.soft - read(head, how=how).soft).max() > 1e-3


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
        reader = Reader(head, lambda ids: ids < 0)
        return read_expected(reader, hidden, Readout(sampling=how)).entropy

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


def test_enough_rows_share_a_read_of_the_head(head, monkeypatch):
    """Trap T32: a chunk of rows is a read of the head, which hides behind 512 rows of products."""
    seen, read_law = set(), expectation.law_readout

    def recorded(hidden, *rest, **how):
        seen.add(len(hidden))
        return read_law(hidden, *rest, **how)

    monkeypatch.setattr(expectation, "law_readout", recorded)
    rows = 3 * expectation.LAW_ROWS
    how = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], (6,)), sampling())
    ask = Readout(sampling=how, keys=jax.random.split(jax.random.key(0), rows))
    jax.eval_shape(
        lambda hidden: read_expected(Reader(head, forbidden), hidden, ask),
        jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32),
    )
    assert seen == {expectation.LAW_ROWS}
    assert expectation.LAW_ROWS >= 512


def test_rows_read_in_chunks_are_those_read_at_once_on_one_device_and_on_two():
    """Also where the last chunk has fewer, with keys, and where devices tell different things.

    Nothing is sliced: XLA for a GPU records no loop of steps around a loop with slices.
    """
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    rows, keys = jnp.arange(75 * 8.0).reshape(75, 8), jax.random.split(jax.random.key(3), 75)
    matrix = jnp.arange(48.0).reshape(8, 6) - 20

    def read(matrix, given):
        rows, keys, nothing = given
        product = rows @ matrix
        drawn = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys)
        return product, jnp.argmax(product, axis=-1), drawn, nothing

    def shared(matrix, *given):
        def of_all(given):
            product, best, *rest = read(matrix, given)
            return jax.lax.psum(product, "tp"), best, *rest

        product, best, *rest = in_chunks(of_all, (*given, None), 32, 16)
        return product, jax.lax.psum(best, "tp"), *rest

    want = read(matrix, (rows, keys, None))
    chunked = jax.jit(lambda *given: in_chunks(functools.partial(read, matrix), given, 32, 16))
    got = chunked(rows, keys, None)
    of_chunks = in_chunks(lambda x: x + 1, rows, 32, 16)
    text = jax.jit(lambda x: in_chunks(lambda x: x + 1, x, 32, 16)).lower(rows).as_text()
    assert "stablehlo.while" in text
    assert "stablehlo.dynamic" not in text
    np.testing.assert_array_equal(of_chunks, rows + 1)
    of_two = jax.shard_map(
        shared,
        mesh=mesh,
        in_specs=(PartitionSpec(None, "tp"), *[PartitionSpec()] * 2),
        out_specs=PartitionSpec(),
        check_vma=True,
    )
    product, best, drawn, _ = jax.jit(of_two)(matrix, rows, keys)
    for a, b in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    halves = rows @ matrix[:, :3], rows @ matrix[:, 3:]
    np.testing.assert_allclose(product, halves[0] + halves[1], rtol=1e-6)
    assert np.array_equal(best, sum(jnp.argmax(half, axis=-1) for half in halves))
    assert np.array_equal(drawn, want[2])


@pytest.mark.parametrize("kind", ["head", "8 bits", "function", "two devices"])
def test_50_5_probabilities_of_given_ids_are_those_of_the_law(head, kind):
    head = dataclasses.replace(head, weights=head.weights[: VOCAB - VOCAB % 2] / 4)
    if kind == "8 bits":
        head = dataclasses.replace(head, weights=quantize_head(head.weights))
    ids = jnp.asarray([[0, 7, FORBIDDEN[0], 4 * SHARE]] * ROWS, jnp.int32)
    logits = head(HIDDEN)
    law = jax.nn.softmax(jnp.where(forbidden(jnp.arange(logits.shape[-1])), -jnp.inf, logits))

    def read(unembed, shard=None):
        ask = Readout(sampling=sampling(0.0), confidence="raw", ids=ids)
        return readout.read_rows(Reader(unembed, forbidden, shard), HIDDEN, ask).id_probs

    if kind == "two devices":
        mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
        shard = Shard("tp", len(head.weights))
        found = jax.jit(
            jax.shard_map(
                lambda part: read(dataclasses.replace(head, weights=part), shard),
                mesh=mesh,
                in_specs=PartitionSpec("tp"),
                out_specs=PartitionSpec(),
                check_vma=False,
            )
        )(head.weights)
    else:
        found = read((lambda rows: head(rows)) if kind == "function" else head)
    wanted = jnp.take_along_axis(law, ids, axis=-1)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-9)
    assert (np.asarray(found) > 0).sum() == 3 * ROWS
