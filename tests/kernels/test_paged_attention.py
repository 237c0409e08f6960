"""Paged attention against NumPy float64, for every back end this machine runs.

The mask is the interface: ragged contexts (none, partial pages, past the window's start), live
ranges, block visibility, token order a row, narrowed rows. Physical page order and the content of
pages that no row sees change nothing; a live row is never NaN. Mosaic's kernel runs interpreted
here; `test_paged_attention_mosaic.py` has its tilings.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.kernels.kv_write import fp8
from dllm_jax.kernels.paged_attention import WindowMask, mosaic, paged_attention
from dllm_jax.kernels.paged_attention.mask import facts
from tests.oracles import paged_attention as oracle

B, K, S, N, G, H, Z, C = 5, 3, 4, 4, 2, 16, 16, 5
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}  # absolute, unit-normal data
BACK_ENDS = [
    ("xla", "float32"),
    ("xla", "bfloat16"),
    pytest.param("cudnn", "bfloat16", marks=pytest.mark.gpu),
]
MOSAIC = pytest.param(
    "mosaic",
    "bfloat16",
    marks=[
        pytest.mark.slow(unless="pallas_kernels"),
        pytest.mark.skipif(
            jax.__version_info__ < (0, 11, 2), reason="the Mosaic form needs jax 0.11.2"
        ),
    ],
)


def case(seed: int, dtype: str, width: int | None = None, block_causal: bool = False, H: int = H):
    """Random data for every kind of row: no context, partial page, dead slot, past start."""
    rng = np.random.default_rng(seed)
    W = K * S
    live = np.asarray([[0, W], [0, S], [2, 7], [0, 0], [1, W]], np.int32)
    cell = np.broadcast_to(np.arange(W, dtype=np.int32), (B, W))
    if width is not None:
        live[:, 1] = np.minimum(live[:, 1], live[:, 0] + width)
        cell = live[:, :1] + np.arange(width, dtype=np.int32)
    T = cell.shape[1]
    start = np.asarray([0, 32, 45, 60, 69], np.int32)
    mask = WindowMask(
        cell=cell,
        start=start,
        live=live,
        context_len=start + np.asarray([0, 0, 9, 0, 3], np.int32),
        visible=None if block_causal else (rng.random((B, K, K)) < 0.5) | np.eye(K, dtype=bool),
        causal=np.asarray([False, True, False, False, True]),
        block_size=S,
    )
    round_to = jnp.dtype(dtype)
    draw = lambda *shape: np.asarray(rng.standard_normal(shape), round_to)  # noqa: E731
    data = [draw(B, T, N, H), *(draw(B, T, G, H) for _ in range(2))]
    data += [draw(B * C + 2, G, Z, H) for _ in range(2)]
    table = rng.permutation(B * C + 2)[: B * C].reshape(B, C).astype(np.int32)
    table[0, 3:] = -1
    return data, table, mask


def in_8_bits(data, seed=0):
    """Queries as they are; keys and values, fresh and cached, in e4m3 with a scale a head.

    Cached values are token-last.
    """
    q, *others = data
    heads = others[0].shape[2]
    exponents = np.random.default_rng(seed).integers(-8, -3, (2, heads))
    scales = (2.0**exponents).astype(np.float32)
    rows = [fp8.quantize(x, scales[i % 2]) for i, x in enumerate(others[:2])]
    k_pages, v_pages = (
        fp8.quantize(x.swapaxes(1, 2), scales[i]).swapaxes(1, 2) for i, x in enumerate(others[2:])
    )
    return [q, *map(np.asarray, (*rows, k_pages, v_pages.swapaxes(2, 3)))], scales


def restored(data, scales):
    """The numbers that 8-bit data stands for, as float64."""
    q, k, v, k_pages, v_pages = (np.asarray(x, np.float64) for x in data)
    k_scale, v_scale = (own[:, None] for own in scales.astype(np.float64))
    pages = k_pages * k_scale[:, None], v_pages.swapaxes(2, 3) * v_scale[:, None]
    return q, k * k_scale, v * v_scale, *pages


def attention_of(implementation):
    if implementation != "mosaic" or jax.default_backend() == "gpu":
        return functools.partial(paged_attention, implementation=implementation)
    from jax.experimental.pallas import mosaic_gpu as plgpu

    how = {"tiling": mosaic.Tiling(stages=2), "interpret": plgpu.InterpretGPUParams()}
    return functools.partial(mosaic.attention, **how)


def run(data, table, mask, implementation, **more):
    """The back end's answer, as float64."""
    call = attention_of(implementation)
    mask = jax.tree.map(jnp.asarray, mask)
    out = call(*map(jnp.asarray, data), jnp.asarray(table), mask, **more)
    assert out.shape == data[0].shape
    return np.asarray(out.astype(jnp.float32), np.float64)


@pytest.mark.versions
@pytest.mark.parametrize("block_causal", [False, True])
@pytest.mark.parametrize("width", [None, 5])
@pytest.mark.parametrize(("implementation", "dtype"), BACK_ENDS)
def test_paged_attention_matches_numpy(implementation, dtype, width, block_causal):
    data, table, mask = case(0, dtype, width, block_causal)
    got = run(data, table, mask, implementation)
    want = oracle.attention(*(np.asarray(x, np.float64) for x in data), table, mask)
    live = ~np.isnan(want)
    assert live.any(axis=(1, 2, 3)).tolist() == [True, True, True, False, True]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[live], want[live], atol=TOLERANCE[dtype])


@pytest.mark.versions
@pytest.mark.parametrize("size", [H, 2 * H])  # as many numbers as a page has tokens, and more
@pytest.mark.parametrize(("implementation", "dtype"), BACK_ENDS)
def test_keys_and_values_of_8_bits_are_what_they_stand_for(implementation, dtype, size):
    data, table, mask = case(3, dtype, block_causal=implementation != "xla", H=size)
    data, scales = in_8_bits(data)
    got = run(data, table, mask, implementation, kv_scales=jnp.asarray(scales))
    want = oracle.attention(*restored(data, scales), table, mask)
    live = ~np.isnan(want)
    np.testing.assert_allclose(got[live], want[live], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [6, 20])  # less than the fresh keys; one to two pages more
@pytest.mark.parametrize(("implementation", "dtype"), BACK_ENDS)
def test_paged_attention_sees_no_further_than_its_window(implementation, dtype, window):
    data, table, mask = case(2, dtype, block_causal=True)
    mask = mask.replace(window=window)
    got = run(data, table, mask, implementation)
    want = oracle.attention(*(np.asarray(x, np.float64) for x in data), table, mask)
    live = ~np.isnan(want)
    np.testing.assert_allclose(got[live], want[live], atol=TOLERANCE[dtype])
    wider = oracle.attention(
        *(np.asarray(x, np.float64) for x in data), table, mask.replace(window=None)
    )
    assert np.abs(wider - want)[live].max() > 10 * TOLERANCE[dtype]


@pytest.mark.parametrize(("implementation", "dtype"), [*BACK_ENDS, MOSAIC])
def test_paged_attention_ignores_page_order_and_unseen_rows(implementation, dtype):
    data, table, mask = case(7, dtype, H=64 if implementation == "mosaic" else H)
    before = run(data, table, mask, implementation)
    rng = np.random.default_rng(1)
    pages = len(data[3])
    order = rng.permutation(pages)
    moved = [x[np.argsort(order)] for x in data[3:]]
    renamed = np.where(table >= 0, order[np.maximum(table, 0)], -1).astype(np.int32)
    # Garbage wherever no live row may look: unowned pages, rows past the context.
    owned = {}
    for b in range(B):
        for c in range(C):
            if renamed[b, c] >= 0:
                owned[int(renamed[b, c])] = int(mask.context_len[b]) - c * Z
    for page in range(pages):
        for pool in moved:
            pool[page, :, max(owned.get(page, 0), 0) :] = 1e4
    after = run([*data[:3], *moved], renamed, mask, implementation)
    live = (mask.cell >= mask.live[:, :1]) & (mask.cell < mask.live[:, 1:])
    assert np.array_equal(before[live], after[live])


@pytest.mark.parametrize(("implementation", "dtype"), [("xla", "bfloat16"), MOSAIC])
def test_paged_attention_is_the_same_in_any_order_of_sequences(implementation, dtype):
    data, table, mask = case(4, dtype, H=64)
    before = run(data, table, mask, implementation)
    order = np.asarray([3, 1, 4, 0, 2])
    moved = jax.tree.map(lambda x: x[order], mask)
    after = run([*(x[order] for x in data[:3]), *data[3:]], table[order], moved, implementation)
    assert np.array_equal(before[order], after)


def test_kernels_begin_with_the_longest_context_and_end_with_dead_slots():
    _, table, mask = case(0, "bfloat16")
    mask = mask.replace(context_len=np.asarray([7, 70, 9, 60, 70], np.int32))
    reported = np.asarray(facts(mask, jnp.asarray(table), Z))
    assert reported[:, 7].tolist() == [
        1,
        4,
        2,
        0,
        3,
    ]  # of equals the first; slot 3 has no live cell
    assert reported[:, 0].tolist() == np.asarray(mask.start)[reported[:, 7]].tolist()
    assert reported[:, 3].tolist() == [70, 70, 9, 7, 60]


@pytest.mark.parametrize(("implementation", "dtype"), [("xla", "bfloat16"), MOSAIC])
def test_paged_attention_is_the_same_under_vmap(implementation, dtype):
    cases = [case(seed, dtype, block_causal=True, H=64) for seed in range(2)]
    call = attention_of(implementation)
    each = [
        (*map(jnp.asarray, data), jnp.asarray(table), jax.tree.map(jnp.asarray, mask))
        for data, table, mask in cases
    ]
    together = jax.vmap(call)(*jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))
    for one, got in zip(each, together, strict=True):
        alone = np.asarray(call(*one), np.float32)
        np.testing.assert_allclose(np.asarray(got, np.float32), alone, atol=TOLERANCE[dtype])


def test_paged_attention_refuses_what_it_cannot_do():
    data, table, mask = case(0, "float32")
    with pytest.raises(NotImplementedError, match='implementation="cudnn": needs'):
        run(data, table, mask, "cudnn")
    with pytest.raises(ValueError, match="implementation='pallas' is not one of"):
        run(data, table, mask, "pallas")


@pytest.mark.parametrize(("implementation", "dtype"), [("xla", "float32"), MOSAIC])
def test_scores_have_the_scale_that_is_asked_for(implementation, dtype):
    """Twice the usual scale is the usual one with queries twice as large, bit for bit."""
    data, table, mask = case(3, dtype, H=64)
    q, *others = map(jnp.asarray, data)
    call = attention_of(implementation)
    rest = (*others, jnp.asarray(table), jax.tree.map(jnp.asarray, mask))
    scaled = call(q, *rest, scale=2 * q.shape[-1] ** -0.5)
    assert np.array_equal(scaled, call(2 * q, *rest))
    assert not np.array_equal(scaled, call(q, *rest))
