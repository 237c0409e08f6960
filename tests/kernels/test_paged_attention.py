"""Paged attention against NumPy float64, for every back end this machine runs.

The mask is the interface: ragged contexts (none, partial pages, past the window's start), live
ranges, block visibility, token order a row, narrowed rows. Physical page order and the content of
pages that no row sees change nothing; a live row is never NaN. The kernel runs interpreted here,
for several tilings, and is lowered for the published models' shapes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.kernels.kv_write import fp8
from dllm_jax.kernels.paged_attention import WindowMask, paged_attention, triton
from dllm_jax.kernels.paged_attention.mask import facts
from tests.cross_lowering import H200, triton_grids
from tests.oracles import paged_attention as oracle

B, K, S, N, G, H, Z, C = 5, 3, 4, 4, 2, 16, 16, 5
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}  # absolute, unit-normal data
TILINGS = {
    "triton, one tile": triton.Tiling(rows=32, keys=16),
    "triton, tiles": triton.Tiling(rows=16, keys=16),
    "triton, split": triton.Tiling(rows=16, keys=16, splits=3),
}
BACK_ENDS = [
    ("xla", "float32"),
    ("xla", "bfloat16"),
    *((name, "bfloat16") for name in TILINGS),
    pytest.param("cudnn", "bfloat16", marks=pytest.mark.gpu),
    pytest.param("triton", "bfloat16", marks=pytest.mark.gpu),
]


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


def run(data, table, mask, implementation, **more):
    """The back end's answer, as float64."""
    if implementation in TILINGS:
        call = functools.partial(triton.attention, tiling=TILINGS[implementation], interpret=True)
    else:
        call = functools.partial(paged_attention, implementation=implementation)
    mask = jax.tree.map(jnp.asarray, mask)
    out = call(*map(jnp.asarray, data), jnp.asarray(table), mask, **more)
    assert out.shape == data[0].shape
    return np.asarray(out.astype(jnp.float32), np.float64)


@pytest.mark.slow(
    "^(?!.*(cudnn|triton, tiles-bfloat16-None|triton-bfloat16-None|xla))",
    unless="pallas_kernels",
)
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


@pytest.mark.slow("triton, one tile|triton, split", unless="pallas_kernels")
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


@pytest.mark.slow(unless="pallas_kernels")
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


@pytest.mark.parametrize(("implementation", "dtype"), BACK_ENDS)
def test_paged_attention_ignores_page_order_and_unseen_rows(implementation, dtype):
    data, table, mask = case(7, dtype)
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


@pytest.mark.parametrize("implementation", ["xla", *TILINGS])
def test_paged_attention_is_the_same_in_any_order_of_sequences(implementation):
    data, table, mask = case(4, "bfloat16")
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


@pytest.mark.slow("^(?!.*triton, tiles)", unless="pallas_kernels")
@pytest.mark.versions
@pytest.mark.parametrize("implementation", TILINGS)
def test_paged_attention_is_the_same_under_vmap(implementation):
    cases = [case(seed, "bfloat16", block_causal=True) for seed in range(2)]
    call = functools.partial(triton.attention, tiling=TILINGS[implementation], interpret=True)
    each = [
        (*map(jnp.asarray, data), jnp.asarray(table), jax.tree.map(jnp.asarray, mask))
        for data, table, mask in cases
    ]
    together = jax.vmap(call)(*jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))
    for one, got in zip(each, together, strict=True):
        assert np.array_equal(call(*one), got)


MODELS = {  # N G H
    "SDAR-1.7B": (16, 8, 128),
    "SDAR-8B": (32, 8, 128),
    "LLaDA-8B": (32, 32, 128),
    "Dream-7B": (28, 4, 128),
    "LLaDA2-mini": (16, 4, 128),
    "wide heads": (16, 8, 256),
    "Muse-Glimmer's drafter": (32, 8, 128),
}
WINDOWS = {"Muse-Glimmer's drafter": 2048}


# Shapes whose tiling was timed, and what it took net of a loop that varies by 5 us
# (benchmarks/results/paged_attention_h200.json).
MEASURED = {  # sequences, rows, pages of each: rows and keys of a tile, splits; us
    ("SDAR-1.7B", 1, 32, 8): (64, 64, 9),  # less than the loop around it
    ("SDAR-1.7B", 1, 128, 8): (64, 64, 8),  # 5.9
    ("SDAR-1.7B", 1, 32, 128): (64, 64, 16),  # 18.1
    ("SDAR-1.7B", 8, 128, 8): (64, 64, 1),  # 22.0
    ("SDAR-8B", 1, 128, 8): (64, 64, 4),  # 0.1
    ("SDAR-8B", 8, 32, 16): (64, 64, 2),  # 16.6
    ("SDAR-8B", 32, 32, 127): (64, 64, 4),  # 165.7, ragged
    ("SDAR-8B", 128, 4, 16): (16, 64, 1),  # 131.7
    ("LLaDA-8B", 32, 32, 16): (32, 64, 1),  # 161.4
    ("SDAR-8B", 8, 4, 84): (16, 64, 12),  # 23.5, ragged
    ("SDAR-8B", 32, 4, 127): (16, 64, 4),  # 73.2, ragged
    ("LLaDA-8B", 8, 4, 84): (16, 64, 4),  # 60.6, ragged
    ("Dream-7B", 128, 4, 16): (32, 64, 1),  # 85.0
    ("LLaDA2-mini", 8, 4, 84): (16, 64, 12),  # 7.8, ragged
    ("wide heads", 1, 32, 128): (64, 64, 16),  # 23.6
}


@pytest.mark.parametrize("shapes", MEASURED)
def test_tilings_are_those_that_were_measured(shapes):
    model, B, T, C = shapes
    N, G, H = MODELS[model]
    q = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((100, G, 64, H), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((B, C), jnp.int32)
    rows, keys, splits = MEASURED[shapes]
    got = triton.choose_tiling(q, pool, table)
    assert got == triton.Tiling(rows=rows, keys=keys, splits=splits)
    small = jax.ShapeDtypeStruct((100, G, 16, H), jnp.bfloat16)
    assert triton.choose_tiling(q, small, table).keys == 16  # a tile lies in one page


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.parametrize("block_causal", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_triton_is_chosen_and_lowers_for_published_models(monkeypatch, model, block_causal):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    N, G, H = MODELS[model]
    Z, C = 64, 16
    for B, T in ((1, 4), (1, 32), (8, 128)):
        rows = [jax.ShapeDtypeStruct((B, T, heads, H), jnp.bfloat16) for heads in (N, G, G)]
        pool = jax.ShapeDtypeStruct((100, G, Z, H), jnp.bfloat16)
        number = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
        flag = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bool_)  # noqa: E731
        mask = WindowMask(
            cell=number(B, T),
            start=number(B),
            live=number(B, 2),
            context_len=number(B),
            visible=None if block_causal else flag(1, 4, 4),
            causal=flag(B),
            block_size=32,
            window=WINDOWS.get(model),
        )
        arguments = (*rows, pool, pool, number(B, C))
        with jax.sharding.use_abstract_mesh(H200):
            lowered = jax.jit(paged_attention).trace(*arguments, mask)
            lowered = lowered.lower(lowering_platforms=("cuda",))
        grids = triton_grids(lowered.compiler_ir("stablehlo").operation)
        tiling = triton.choose_tiling(rows[0], pool, arguments[-1])
        assert grids == [(-(-T * (N // G) // tiling.rows), tiling.splits, B * G)]


def test_paged_attention_refuses_what_it_cannot_do():
    data, table, mask = case(0, "float32")
    with pytest.raises(NotImplementedError, match='implementation="cudnn": needs'):
        run(data, table, mask, "cudnn")
    with pytest.raises(NotImplementedError, match='implementation="triton": needs'):
        run(data, table, mask, "triton")
    with pytest.raises(ValueError, match="implementation='pallas' is not one of"):
        run(data, table, mask, "pallas")
    q, pages = data[0], data[3]
    refused = functools.partial(triton.unsupported_arguments, mask=mask)
    assert refused(q, pages) == "needs bfloat16 or float16, got float32"
    q, pages = q.astype(jnp.bfloat16), pages.astype(jnp.bfloat16)
    assert refused(q, pages) is None
    assert "head size that is a power of two from 16 to 256, got 12" in refused(q[..., :12], pages)
    assert "page size that is a power of two from 16 up, got 8" in refused(q, pages[:, :, :8])
    large = jax.ShapeDtypeStruct((2**21, 1, 16, 128), jnp.float8_e4m3fn)  # 4 GiB
    assert "2 to 4 GiB" in refused(q, large)
    larger = jax.ShapeDtypeStruct((2**22, 1, 16, 128), jnp.float8_e4m3fn)  # offsets of 64 bits
    assert refused(q, larger) is None


@pytest.mark.parametrize("implementation", ["xla", "triton, one tile"])
def test_scores_have_the_scale_that_is_asked_for(implementation):
    """Twice the usual scale is the usual one with queries twice as large, bit for bit."""
    data, table, mask = case(3, "float32" if implementation == "xla" else "bfloat16")
    q, *others = map(jnp.asarray, data)
    how: dict = {"implementation": implementation}
    call = paged_attention
    if implementation in TILINGS:
        call, how = triton.attention, {"tiling": TILINGS[implementation], "interpret": True}
    rest = (*others, jnp.asarray(table), jax.tree.map(jnp.asarray, mask))
    scaled = call(q, *rest, scale=2 * q.shape[-1] ** -0.5, **how)
    assert np.array_equal(scaled, call(2 * q, *rest, **how))
    assert not np.array_equal(scaled, call(q, *rest, **how))
