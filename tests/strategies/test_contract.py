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
from tests.contract.cases import NAMES, PAGE_SIZE, case, once, truth
from tests.contract.harness import SLOTS

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}  # float32, sums in another order


def ends(rows) -> list[tuple[list[int], str | None, int]]:
    return [(row.tokens, row.reason, row.nfe) for row in rows]


@pytest.mark.long("d2f_grid_full")
@pytest.mark.slow("^(?!.*(d2f_.*_full|multi_bd_shifted))")
@pytest.mark.versions("multi_bd_shifted")
@pytest.mark.parametrize("name", NAMES)
def test_decoding_equals_the_dense_run(name):
    assert ends(once(name).rows) == ends(truth(name))
    assert all(row.reason == "length" for row in once(name).rows)


def prefilled(name, requests, chunk_size):
    """The bare strategy and the state after prefill."""
    c = case(name)
    requests = list(requests) + [None] * (SLOTS - len(requests))
    aux = dict(c.aux)
    bare, state, prompt = harness.fresh_state(
        c.strategy, c.model, aux, requests, PAGE_SIZE[name], seed=1
    )
    return bare, harness.prefill(bare, c.model, aux, state, prompt, chunk_size)


# --- that the cases have teeth --------------------------------------------------------------------


def test_two_blocks_commit_at_once_on_a_shifted_model():
    assert any(count == 2 for t in truth("multi_bd_shifted") for count in t.log)
    lengths = [int(i.commit_len) for r in once("multi_bd_shifted").rows for _, i in r.steps]
    assert 8 in lengths


@pytest.mark.long
def test_a_canvas_is_encoded_while_another_is_denoised():
    steps = zip(*(row.steps for row in once("diffusion_gemma_alone").rows), strict=False)
    status = [[int(old.buffer.status[0]) for old, _ in step] for step in steps]
    assert any(TO_CACHE in step and set(step) != {TO_CACHE} for step in status)


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
