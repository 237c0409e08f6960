"""The contract: strategies on real paging against cache-free oracles.

Proves, on toy models in float32, that tokens, forwards and finish reasons are those of a dense
recomputation of every step, whatever pages and chunks a request has. test_engine_device.py says so
of slots and neighbours, and of the cache.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.runner.forward import ModelForward
from dllm_jax.strategies.core.random import position_keys
from dllm_jax.strategies.core.state import STOP, TO_CACHE
from tests.contract import harness
from tests.contract.cases import NAMES, PAGE_SIZE, case, once, paged, truth
from tests.contract.harness import SLOTS, Request

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}  # float32, sums in another order


def ends(rows) -> list[tuple[list[int], str | None, int]]:
    return [(row.tokens, row.reason, row.nfe) for row in rows]


@pytest.mark.slow("^(?!.*(d2f_whole_full|multi_bd_shifted))")
@pytest.mark.versions("multi_bd_shifted")
@pytest.mark.parametrize("name", NAMES)
def test_decoding_equals_the_dense_run(name):
    assert ends(once(name).rows) == ends(truth(name))
    assert all(row.reason == "length" for row in once(name).rows)


@pytest.mark.long
@pytest.mark.slow("^(?!.*(diffusion_gemma_alone|d2f_whole_full|dflash|multi_bd_shifted))")
@pytest.mark.parametrize("name", NAMES)
def test_moving_every_request_in_the_middle_changes_nothing(name):
    first_end = min(len(row.steps) for row in once(name).rows)
    traces = harness.step._cache_size()
    for at in (1, max(2, first_end - 1)):
        assert ends(paged(name, seed=5, move_at=at).rows) == ends(once(name).rows)
    assert harness.step._cache_size() == traces, "the state a step leaves is not what it takes"


@pytest.mark.long("ar|diffusion_gemma_alone")
@pytest.mark.slow("^(?!.*(^ar|diffusion_gemma_alone|d2f_whole_full|multi_bd_shifted))")
@pytest.mark.parametrize("name", NAMES)
def test_writes_past_the_pages_are_dropped(name):
    # A provisional cache is read past the limit as well, so its pages must cover the window.
    assert ends(paged(name, seed=7, tight=True).rows) == ends(once(name).rows)


@pytest.mark.long
@pytest.mark.parametrize("name", ["multi_bd", "ar", "dflash", "diffusion_gemma"])
def test_the_cache_of_a_text_is_its_prefill(name):
    decoded, c = once(name), case(name)
    texts = [
        [*request.prompt, *row.tokens][: row.cached // c.grid * c.grid]
        for row, request in zip(decoded.rows, c.requests, strict=True)
    ]
    _, state = prefilled(name, [Request(tuple(text), 2) for text in texts], chunk_size=8)
    for b, (row, text) in enumerate(zip(decoded.rows, texts, strict=True)):
        for pool, layers in state.pools.items():
            again = harness.read_cache(layers, np.asarray(state.page_table)[b], len(text))
            for got, want in zip(again, decoded.cache(row, pool), strict=True):
                for a, b_ in zip(got, want, strict=True):
                    np.testing.assert_allclose(a, b_[: len(text)], **TOLERANCE)


def prefilled(name, requests, chunk_size):
    """The bare strategy and the state after prefill."""
    c = case(name)
    requests = list(requests) + [None] * (SLOTS - len(requests))
    aux = dict(c.aux)
    bare, state, prompt = harness.fresh_state(
        c.strategy, c.model, aux, requests, PAGE_SIZE[name], seed=1
    )
    return bare, harness.prefill(bare, c.model, aux, state, prompt, chunk_size)


@pytest.mark.long("dflash")
@pytest.mark.versions("multi_bd_shifted")
@pytest.mark.parametrize("name", ["multi_bd_shifted", "dflash"])
def test_prefill_in_chunks_equals_one_shot(name):
    c = case(name)
    (_, one), (_, many) = (prefilled(name, c.requests, size) for size in (harness.BUCKET, 8))
    for pool in one.pools:
        for a, b in zip(
            jax.tree.leaves(one.pools[pool]), jax.tree.leaves(many.pools[pool]), strict=True
        ):
            np.testing.assert_allclose(a, b, **TOLERANCE)
    np.testing.assert_allclose(one.boundary, many.boundary, **TOLERANCE)
    np.testing.assert_array_equal(one.buffer.tokens, many.buffer.tokens)


# --- that the cases have teeth --------------------------------------------------------------------


def test_two_blocks_commit_at_once_on_a_shifted_model():
    assert any(count == 2 for t in truth("multi_bd_shifted") for count in t.log)
    lengths = [int(i.commit_len) for r in once("multi_bd_shifted").rows for _, i in r.steps]
    assert 8 in lengths


@pytest.mark.long
@pytest.mark.versions
def test_fast_dllm_v2_runs_narrow_and_wide_rows_together():
    kinds = [t.log for t in truth("fast_dllm_v2")]
    assert any({"refine", "init"} <= set(step) for step in zip(*kinds, strict=False))
    # Alone, a request whose pass is narrow runs the narrow program (test_engine_device.py).
    assert all("refine" in kind for kind in kinds)


@pytest.mark.long
def test_a_canvas_is_encoded_while_another_is_denoised():
    steps = zip(*(row.steps for row in once("diffusion_gemma_alone").rows), strict=False)
    status = [[int(old.buffer.status[0]) for old, _ in step] for step in steps]
    assert any(TO_CACHE in step and set(step) != {TO_CACHE} for step in status)


@pytest.mark.long
def test_soft_tokens_change_after_they_were_filled():
    changes = 0
    for row in once("dmax").rows:
        for (old, info), (new, _) in zip(row.steps, row.steps[1:], strict=False):
            if not info.commit_len:
                changes += int((old.buffer.filled & (old.buffer.tokens != new.buffer.tokens)).sum())
    assert changes > 0


# --- narrow passes and dropped writes -------------------------------------------------------------


@pytest.mark.slow("3|8")
@pytest.mark.versions("5")
@pytest.mark.parametrize("width", [3, 5, 8])
def test_a_narrow_pass_equals_the_wide_one_on_its_first_cells(width):
    """Live ranges that touch the window's end, are shorter or longer than the width, or empty."""
    _, state = prefilled("multi_bd_shifted", case("multi_bd_shifted").requests, 8)
    model = case("multi_bd_shifted").model
    edges = np.array([[9, 12], [10, 12], [1, 8], [0, 0]])
    cell = np.arange(12)[None]

    def cells(length):
        inside = (cell >= edges[:, :1]) & (cell < np.minimum(edges[:, 1:], edges[:, :1] + length))
        return jnp.asarray(inside).reshape(SLOTS, 3, 4)

    @jax.jit
    def run(state):
        forward = ModelForward(model)
        wide, narrow = (
            forward(state, live=cells(width)),
            forward(state, live=cells(12), width=width),
        )
        how = {"where": cells(12), "sampling": state.sampling, "keys": position_keys(state)}
        reported = [wide.predict(**how, num_top=2, width=w) for w in (None, 2)]
        return [
            (o.hidden, o.predict().confidence, o.store(state, cells(12))) for o in (wide, narrow)
        ], reported

    ((wide, wide_sure, wide_state), (narrow, sure, narrow_state)), (every, two) = run(state)
    asked = np.asarray(every.confidence > -np.inf).reshape(SLOTS, -1)
    asked = asked & (np.cumsum(asked, axis=1) <= 2)
    assert asked.sum() > SLOTS
    np.testing.assert_array_equal(np.asarray(two.confidence > -np.inf).reshape(SLOTS, -1), asked)
    for a, b in zip(*map(jax.tree.leaves, (two, every)), strict=True):
        a, b = (np.asarray(leaf).reshape(SLOTS, 12, -1)[asked] for leaf in (a, b))
        np.testing.assert_allclose(a, b, **TOLERANCE)
    mask = np.asarray(cells(width))
    np.testing.assert_allclose(narrow[mask], wide[mask], **TOLERANCE)
    np.testing.assert_allclose(sure, wide_sure, **TOLERANCE)
    for a, b in zip(*map(jax.tree.leaves, (narrow_state.pools, wide_state.pools)), strict=True):
        np.testing.assert_allclose(a, b, **TOLERANCE)


@pytest.mark.versions
def test_store_writes_where_it_may_and_drops_the_rest():
    """Past the table's last column, on a page of -1, of a finished row: nothing is written."""
    _, state = prefilled("multi_bd", case("multi_bd").requests, 8)
    size, columns = PAGE_SIZE["multi_bd"], state.page_table.shape[1]
    num_pages = state.pools["target"][0][0].shape[0]
    assert num_pages > 3 * columns + 2
    table = np.arange(SLOTS * columns).reshape(SLOTS, columns) % num_pages
    table[1, 3] = -1
    table[3] = -1
    # Slot 0 ends eight cells after the table's end, slot 1 runs into a hole, slot 2 is done.
    start = np.array([columns * size - 4, 3 * size - 4, 8, 0])
    state = state.replace(
        page_table=jnp.asarray(table, jnp.int32),
        buffer=state.buffer.replace(start=jnp.asarray(start, jnp.int32)),
        finish=state.finish.at[2].set(STOP),
    )
    everywhere = jnp.ones((SLOTS, 3, 4), bool)
    forward = ModelForward(case("multi_bd").model)
    new = jax.jit(lambda s: forward(s, live=everywhere).store(s, everywhere))(state)
    written = {(int(table[0, -1]), i) for i in range(size - 4, size)}
    written |= {(int(table[1, 2]), i) for i in range(size - 4, size)}
    for old, leaf in zip(*map(jax.tree.leaves, (state.pools, new.pools)), strict=True):
        differs = (np.asarray(old) != np.asarray(leaf)).any(axis=(1, 3))
        assert set(zip(*np.nonzero(differs), strict=True)) == written
