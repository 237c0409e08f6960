"""The Mosaic kernels of a layer against NumPy, and the rules that choose them.

Interpreted on a CPU with races looked for, lowered for published models, and on a Hopper GPU.
Products of small integers are exact in whatever order they are added, so most results are compared
bit for bit.
"""

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.kernels.layer import (
    RoutedRows,
    add_rms_norm,
    gated_matmul,
    mosaic_few,
    mosaic_many,
    mosaic_norm,
    qkv_matmul,
    reference,
    split_matmul,
)
from dllm_jax.kernels.layer.mosaic_few_tiling import Tiling
from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.families import parse_config
from dllm_jax.models.layers import gate_up_shape
from dllm_jax.models.published import PUBLISHED
from tests.cross_lowering import H200, needs_mosaic, shared_arrays
from tests.oracles import layer as oracle

pytestmark = [pytest.mark.long, needs_mosaic]
TOLERANCE = 2e-2  # of a value plus one, in a type of 16 bits
EPS = 1e-5
PATIENCE_S = 60  # what takes a second where nothing hangs
SHARED_BYTES = 227 * 1024  # of a block of threads on Hopper


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def integers(seed, *shapes, dtype="bfloat16") -> Any:
    rng = np.random.default_rng(seed)
    return [rng.integers(-3, 4, shape).astype(jnp.dtype(dtype)) for shape in shapes]


def normal(seed, *shapes, dtype="bfloat16") -> Any:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]


def close(got, want, tolerance=TOLERANCE):
    apart = np.abs(np.float64(got) - want) / (np.abs(want) + 1)
    assert apart.max() < tolerance
    assert np.abs(want).max() > 1  # large enough for a relative error to show


@pytest.fixture(autouse=True)
def operands_are_read(monkeypatch):
    """Count a product as a read of its operands, so that the interpreter sees such races."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    wgmma = gpu_callbacks.wgmma

    def run(*, thread, **how):
        memory = gpu_callbacks._get_shared_memory()
        clock = memory.incr_clock(thread).async_smem_clock
        for side in "ab":
            key = gpu_callbacks.HostAllocationKey.from_array(how[f"{side}_allocation_key_as_array"])
            where = gpu_callbacks._remove_noop_transforms(how[f"{side}_transforms"])
            read = memory.access(key, jax.tree.map(int, where))
            gpu_callbacks.get_races().check_read(thread, clock, key, read, how["source_info"])
        return wgmma(thread=thread, **how)

    monkeypatch.setattr(gpu_callbacks, "wgmma", run)


def interpreted(call, *arrays, **how):
    """The result of a kernel in the interpreter, without a race and without a deadlock."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def give_up():
        late = TimeoutError(f"the kernel did not end in {PATIENCE_S} s")
        gpu_callbacks._get_shared_memory().set_failed(late, top_level=False)

    alarm = threading.Timer(PATIENCE_S, give_up)
    alarm.start()
    try:
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        out = call(*map(jnp.asarray, arrays), **how, interpret=interpret)
        out = jax.tree.map(np.asarray, out)
    finally:
        alarm.cancel()
    assert not gpu_callbacks.get_races().races_found
    return out


@pytest.mark.slow("128|384", unless="pallas_kernels")
@pytest.mark.parametrize(
    ("rows", "depth", "width", "dtype", "tiling"),
    [
        # Two warpgroups, the second with 8 rows; buffers are used again.
        ((2, 36), 384, 64, "bfloat16", Tiling(stages=2, splits=2)),
        ((128,), 192, 64, "bfloat16", Tiling(stages=2)),
        # One: fewer rows than it has, two tiles of columns.
        ((32,), 256, 128, "bfloat16", Tiling(stages=3)),
        ((8,), 128, 64, "float16", Tiling(stages=4, splits=2)),  # buffers that are not used
        slow((64,), 512, 64, "bfloat16", Tiling(depth=128, stages=2, splits=2)),
        slow((72,), 256, 128, "float16", Tiling(stages=3)),
        slow((128,), 512, 128, "bfloat16", Tiling(stages=8, splits=4)),
        slow((128,), 64, 64, "bfloat16", Tiling(stages=2)),
    ],
)
def test_split_matmul_is_exact(rows, depth, width, dtype, tiling):
    x, w = integers(0, (*rows, depth), (depth, width), dtype=dtype)
    got = interpreted(mosaic_few.split_matmul, x, w, tiling=tiling)
    if tiling.splits == 1:
        assert got.dtype == x.dtype
        assert np.array_equal(got, (np.float32(x) @ np.float32(w)).astype(x.dtype))
        return
    shares = np.split(np.arange(depth), tiling.splits)
    assert got.dtype == np.float32
    assert np.array_equal(got, [np.float32(x[..., i]) @ np.float32(w[i]) for i in shares])


@pytest.mark.slow("96", unless="pallas_kernels")
@pytest.mark.parametrize(
    ("rows", "depth", "width", "tiling"),
    [
        # A tile of two turns and of three, in two and one of them.
        ((3, 24), 192, 128, Tiling(columns=128, stages=2)),
        ((8,), 192, 96, Tiling(columns=192, stages=4)),
        slow((64,), 256, 128, Tiling(stages=3)),
        slow((128,), 256, 192, Tiling(columns=192, stages=2)),
        slow((40,), 64, 256, Tiling(columns=256, stages=5)),
    ],
)
def test_gated_matmul_rounds_both_products_and_no_more(rows, depth, width, tiling):
    assert_gated(mosaic_few.gated_matmul, rows, depth, (width // 32, 2, 32), tiling=tiling)


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.parametrize(
    ("rows", "depth", "turns", "how"),
    [
        # Two tiles for some blocks, of six; buffers come round.
        ((3, 128), 320, (8, 2, 32), {"columns": 256, "blocks": 4}),
        slow((256,), 384, (6, 2, 32), {"columns": 192, "blocks": 2}),
        slow((256,), 256, (4, 2, 32), {"columns": 256}),  # one for each
        slow((128,), 512, (24, 2, 16), {"columns": 256, "blocks": 1}),  # three for one
        # Steps as many as turns, fewer than buffers; one tile, and two.
        slow((128,), 192, (3, 2, 32), {"columns": 192}),
        slow((256,), 128, (2, 2, 64), {"columns": 256, "blocks": 1}),
    ],
)
def test_gated_matmul_of_many_rows_rounds_both_products_and_no_more(rows, depth, turns, how):
    """A buffer that is loaded again too early the interpreter does not see: the GPU's test does."""
    assert_gated(mosaic_many.gated_matmul, rows, depth, turns, **how)


SATURATED = (-np.inf, -100.0, -88.0, -20.0, -1.0, 0.0, 1.0, 20.0, 100.0, np.inf, np.nan)


def saturated(depth, turns):
    """Rows and weights whose gates are all of `SATURATED`, and whose other halves are 2."""
    x, w = np.zeros((128, depth), jnp.bfloat16), np.zeros((depth, *turns), jnp.bfloat16)
    x[:, 0] = np.resize(SATURATED, 128)
    x[:, 1] = 1
    w[0, :, 0], w[1, :, 1] = 1, 2
    return x, w


def assert_saturated(out):
    gate = np.resize(np.float64(SATURATED), 128)
    with np.errstate(over="ignore", invalid="ignore"):
        want = np.float64(gate / (1 + np.exp(-gate)) * 2)
    # Infinite gates times the zeros of what is not theirs.
    want[np.isinf(gate)] = np.nan
    assert np.array_equal(np.isnan(out), np.broadcast_to(np.isnan(want)[:, None], out.shape))
    seen = ~np.isnan(want)
    np.testing.assert_allclose(out[seen], np.repeat(want[seen, None], out.shape[1], 1), 1e-2, 1e-30)


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_gates_of_any_size_are_those_of_silu():
    x, w = saturated(256, (4, 2, 32))
    got = interpreted(mosaic_many.gated_matmul, x, w, columns=256)
    assert_saturated(np.float64(got))


def assert_gated(call, rows, depth, turns, **how):
    """The interpreted kernel's result is NumPy's with sums that are rounded first."""
    x, w = integers(1, (*rows, depth), (depth, *turns))
    w[..., ::2] *= 21  # sums that 16 bits do not hold
    got = interpreted(call, x, w, **how)
    want = oracle.gated_matmul(x, w, x.dtype)
    assert got.shape == want.shape
    assert got.dtype == x.dtype
    close(got, want)

    def same(want):
        seen = np.abs(want) > 1e-20  # of the others the exponential is no float32
        assert seen.mean() > 0.4
        return (got == want.astype(x.dtype))[seen].mean()

    # All but those between two numbers, to which an exponential in float32 may decide.
    assert same(want) > 0.99
    assert same(oracle.gated_matmul(x, w)) < 0.9


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.parametrize(("down", "across"), [(1, 5), (8, 48), (32, 3), (33, 7), (100, 2)])
def test_every_tile_comes_once_and_a_band_of_rows_before_the_next(down, across):
    order = jax.vmap(lambda tile: mosaic_many.origin(tile, down, across))(jnp.arange(down * across))
    rows, columns = map(np.asarray, order)
    assert sorted(zip(rows, columns, strict=True)) == [
        (row, column) for row in range(down) for column in range(across)
    ]
    keys = list(zip(rows // mosaic_many._BAND, columns, rows, strict=True))
    assert keys == sorted(keys)


@pytest.mark.parametrize(
    ("parts", "dtype", "width"),
    [(0, "bfloat16", 512), (2, "float32", 1024), slow(4, "float32", 2048)],
)
def test_add_rms_norm_matches_numpy(parts, dtype, width):
    x, scale = normal(2, (2, 3, width), (width,))
    (y,) = normal(3, (*([parts] if parts else []), 2, 3, width), dtype=dtype)
    total, normed = interpreted(mosaic_norm.add_rms_norm, x, y, scale, eps=EPS)
    want = oracle.add_rms_norm(x, y, scale, EPS)
    close(total, want[0])
    close(normed, want[1])
    assert total.dtype == normed.dtype == x.dtype
    added = functools.reduce(np.add, y) if parts else y
    added = np.float32(added.astype(x.dtype))  # as a product of many rows comes
    assert np.array_equal(total, (np.float32(x) + added).astype(x.dtype))


def test_add_rms_norm_adds_up_the_results_of_experts():
    """Next to the parts of a product; results that no row names are not finite."""
    x, scale, results, parts = integers(10, (1, 4, 512), (512,), (16, 512), (2, 1, 4, 512))
    place = np.asarray([[[3, 8], [0, 2**31 - 1], [2**31 - 1, 16], [15, 2]]], np.int32)
    weights = np.asarray([[[0.5, 2], [1.5, np.nan], [np.nan, np.nan], [1, 0.25]]], np.float32)
    results[np.setdiff1d(np.arange(16), place)] = np.nan

    def run(x, *given, interpret):
        routed, parts = RoutedRows(*given[:3]), given[3].astype(jnp.float32)
        return mosaic_norm.add_rms_norm(x, (routed, parts), given[4], EPS, interpret=interpret)

    got = interpreted(run, x, results, place, weights, parts, scale)
    there = place < 16
    found = np.float32(results)[np.where(there, place, 0)] * np.where(there, weights, 0)[..., None]
    added = found.sum(axis=2) + np.float32(parts).sum(axis=0)
    want = oracle.add_rms_norm(x, added, scale, EPS)
    assert np.array_equal(np.float32(got[0]), np.float32(want[0].astype(x.dtype)))
    close(got[1], want[1])
    given = [RoutedRows(*map(jnp.asarray, (results, place, weights))), jnp.asarray(parts)]
    plain = add_rms_norm(*map(jnp.asarray, (x,)), tuple(given), jnp.asarray(scale), EPS)
    for a, b in zip(got, plain, strict=True):
        close(a, np.float64(b))


def test_add_rms_norm_rounds_its_scale():
    """A scale in float32 counts as what it is in the type of the rows, as in the other forms."""
    x, y = normal(4, (4, 512), (4, 512))
    (scale,) = normal(5, (512,), dtype="float32")
    got = interpreted(mosaic_norm.add_rms_norm, x, y, scale, eps=EPS)
    for a, b in zip(
        got, reference.add_rms_norm(*map(jnp.asarray, (x, y, scale)), EPS), strict=True
    ):
        assert np.array_equal(a, b)


@pytest.mark.slow(unless="pallas_kernels")
def test_rows_do_not_depend_on_each_other():
    """All others are NaN, and come out as NaN."""
    x, w, y = integers(6, (72, 128), (128, 2, 2, 32), (6, 512))
    flat = w.reshape(128, -1)
    split = functools.partial(mosaic_few.split_matmul, w=jnp.asarray(flat), tiling=Tiling(stages=2))
    gated = functools.partial(mosaic_few.gated_matmul, w=jnp.asarray(w), tiling=Tiling(stages=2))
    normed = functools.partial(mosaic_norm.add_rms_norm, y=y, scale=jnp.asarray(y[0]), eps=EPS)
    for call, rows, want in (
        (split, x, [np.float64(x) @ np.float64(flat)]),
        (gated, x, [oracle.gated_matmul(x, w, x.dtype)]),
        (normed, y, oracle.add_rms_norm(y, y, y[0], EPS)),
    ):
        last = len(rows) - 2
        alone = np.where(np.arange(len(rows))[:, None] == last, rows, np.nan).astype(rows.dtype)
        for a, b in zip(jax.tree.leaves(interpreted(call, alone)), want, strict=True):
            close(a[last], b[last])
            assert np.isnan(np.float32(np.delete(a, last, axis=0))).all()


@pytest.mark.slow
def test_rows_of_a_tile_do_not_depend_on_each_other():
    x, w = integers(6, (256, 256), (256, 4, 2, 32))
    alone = np.where(np.arange(len(x))[:, None] == 200, x, np.nan).astype(x.dtype)
    got = interpreted(mosaic_many.gated_matmul, alone, w, columns=256, blocks=1)
    close(got[200], oracle.gated_matmul(x, w, x.dtype)[200])
    assert np.isnan(np.float32(np.delete(got, 200, axis=0))).all()


def real(*shape, dtype=jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


MODELS = {  # D F G n H
    "SDAR-1.7B": (2048, 6144, 8, 2, 128),
    "SDAR-8B": (4096, 12288, 8, 4, 128),
    "LLaDA-8B": (4096, 12288, 32, 1, 128),
    "Dream-7B": (3584, 18944, 4, 7, 128),
}


def products(rows, D, F, G, n, H, dtype=jnp.bfloat16) -> Any:
    """Operation and operands, as shapes, of each product of a layer."""
    one = functools.partial(real, dtype=dtype)
    return {
        "qkv": (qkv_matmul, one(1, rows, D), one(D, G, n + 2, H)),
        "o": (split_matmul, one(1, rows, G * n * H), one(G * n * H, D)),
        "gate": (gated_matmul, one(1, rows, D), one(*gate_up_shape(D, F))),
        "down": (split_matmul, one(1, rows, F), one(F, D)),
    }


def chosen(monkeypatch, call, x, w):
    """The tiling with which an operation runs its kernel; None if it runs another back end."""
    found = []

    def spy(x, w, *, tiling, **_):
        found.append(tiling)
        return jnp.zeros((*x.shape[:-1], w.shape[-1]), x.dtype)

    with monkeypatch.context() as patch:
        patch.setattr(mosaic_few, "split_matmul", spy)
        patch.setattr(mosaic_few, "gated_matmul", spy)
        jax.eval_shape(lambda x, w: call(x, w), x, w)
    return found[0] if found else None


def whole(stages, splits, columns=64, depth=64):
    return Tiling(columns=columns, depth=depth, stages=stages, splits=splits)


MEASURED = {  # on an H200; None: XLA or Triton was faster, or no tiling is whole
    ("SDAR-1.7B", 32): {
        "qkv": whole(5, 2, depth=128),
        "o": whole(5, 4, depth=128),
        "gate": whole(8, 1, columns=128),
        "down": whole(5, 4, depth=128),
    },
    ("SDAR-1.7B", 128): {
        "qkv": whole(7, 2),
        "o": whole(7, 4),
        "gate": whole(6, 1, columns=128),
        "down": whole(7, 4),
    },
    ("SDAR-8B", 32): {
        "qkv": whole(6, 1, depth=128),
        "o": whole(5, 2, depth=128),
        "gate": whole(5, 1, columns=192),
        "down": whole(5, 2, depth=128),
    },
    ("SDAR-8B", 128): {
        "qkv": whole(8, 1),
        "o": whole(7, 2),
        "gate": whole(4, 1, columns=192),
        "down": whole(7, 2),
    },
    ("LLaDA-8B", 32): {
        "qkv": None,
        "o": whole(5, 2, depth=128),
        "gate": whole(5, 1, columns=192),
        "down": whole(5, 2, depth=128),
    },
    ("Dream-7B", 32): {
        "qkv": whole(6, 1, depth=128),
        "o": whole(6, 2, depth=128),
        "gate": None,
        "down": None,
    },
}


@pytest.mark.parametrize("case", MEASURED)
def test_kernels_and_tilings_are_those_that_were_measured(monkeypatch, on_hopper, case):
    model, rows = case
    of_model = products(rows, *MODELS[model])
    got = {name: chosen(monkeypatch, *product) for name, product in of_model.items()}
    assert got == MEASURED[case]


def test_kernels_are_for_few_whole_rows_of_short_types_on_hopper(monkeypatch, on_hopper):
    def names(rows, model="SDAR-1.7B", **how):
        of_model = products(rows, *MODELS[model], **how)
        return {name for name, product in of_model.items() if chosen(monkeypatch, *product)}

    every = {"qkv", "o", "gate", "down"}
    assert names(8) == names(72) == names(120) == names(128) == every
    assert names(36) == names(129) == names(136) == set()
    assert names(32, dtype=jnp.float32) == set()
    small = products(32, 512, 1024, 4, 2, 64)  # no matrix of 2**21 numbers
    assert not any(chosen(monkeypatch, *product) for product in small.values())
    monkeypatch.setattr(jax, "devices", lambda *_: [object()])  # a GPU of another kind
    assert names(32) == set()


@pytest.mark.slow(unless="pallas_kernels")
def test_gate_and_up_of_many_rows_are_joined_where_tiles_fill_the_chip(monkeypatch, on_hopper):
    """What an H200 took is in benchmarks/results/layer_many_h200.json."""

    def columns(model, rows, **how):
        found = []

        def spy(x, w, *, columns, **_):
            found.append(columns)
            return jnp.zeros((*x.shape[:-1], w.shape[1] * w.shape[3]), x.dtype)

        monkeypatch.setattr(mosaic_many, "gated_matmul", spy)
        call, x, w = products(rows, *MODELS[model], **how)["gate"]
        jax.eval_shape(lambda x, w: call(x, w), x, w)
        return found[0] if found else None

    for model in ("SDAR-1.7B", "SDAR-8B"):
        assert [columns(model, n) for n in (256, 1024, 2048, 4096)] == [192, 256, 256, 256]
    assert columns("SDAR-1.7B", 512) == columns("SDAR-1.7B", 768) == columns("SDAR-8B", 384) == 192
    assert columns("SDAR-8B", 512) == columns("Dream-7B", 512) == 256
    assert columns("Dream-7B", 256) is columns("Dream-7B", 384) is None
    assert columns("SDAR-1.7B", 1000) is None
    assert columns("SDAR-1.7B", 1024, dtype=jnp.float32) is None
    monkeypatch.setitem(MODELS, "small", (512, 1536, 4, 2, 64))
    assert columns("small", 4096) is None  # no matrix of 2**21 numbers


def dense_models():
    """Layers of the published dense models, by sizes."""
    parsed = [parse_config(config, name=name).config for name, config in PUBLISHED.items()]
    return {
        (c.hidden_size, c.ffn_size, c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim)
        for c in parsed
        if type(c) is DenseConfig
    }


def test_chosen_tilings_fit_into_shared_memory(monkeypatch, on_hopper):
    """Counted from what the kernel allocates, for every published dense model."""
    bytes_of = []

    def launch(body, *, out_type, scratch_types, **_):
        arrays, size = shared_arrays(scratch_types)
        assert len(scratch_types) - len(arrays) == 2  # barriers
        bytes_of.append(size)
        return lambda *_: [jnp.zeros(each.shape, each.dtype) for each in out_type]

    monkeypatch.setattr(mosaic_few.plgpu, "kernel", launch)
    count = 0
    for rows in (8, 64, 72, 128):
        for sizes in sorted(dense_models()):
            for call, x, w in products(rows, *sizes).values():
                tiling = chosen(monkeypatch, call, x, w)
                if tiling is None:
                    continue
                count += 1
                assert tiling.stages >= 2
                # Not what a jit has traced, nor for it to keep.
                run = mosaic_few.gated_matmul if call is gated_matmul else mosaic_few.split_matmul
                flat = real(len(w), w.size // len(w))
                operands = x, w if call is gated_matmul else flat
                jax.eval_shape(functools.partial(run.__wrapped__, tiling=tiling), *operands)
                assert len(bytes_of) == count
                assert tiling.splits * flat.shape[-1] // tiling.columns <= 132  # at once
                assert len(w) % (tiling.splits * tiling.depth) == 0
    assert count > 100
    assert 128 * 1024 <= min(bytes_of) <= max(bytes_of) <= SHARED_BYTES - 1024  # for barriers


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.parametrize("columns", [192, 256])
@pytest.mark.parametrize("W", [16, 32, 64])
def test_tiles_of_many_rows_fit_into_shared_memory(monkeypatch, columns, W):
    bytes_of = []

    def launch(body, *, out_type, scratch_types, **_):
        bytes_of.append(shared_arrays(scratch_types)[1])
        return lambda *_: jnp.zeros(out_type.shape, out_type.dtype)

    monkeypatch.setattr(mosaic_many.plgpu, "kernel", launch)
    run = functools.partial(mosaic_many.gated_matmul.__wrapped__, columns=columns)
    jax.eval_shape(run, real(256, 2048), real(2048, 768 // W, 2, W))
    assert 200 * 1024 <= bytes_of[0] <= SHARED_BYTES - 1024  # for barriers


def lowered(call, *arguments):
    """How many kernels of the Mosaic kind and of the Triton kind a function is lowered to."""
    with jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(lambda *arrays: call(*arrays)).trace(*arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return text.count("@mosaic_gpu"), text.count("gpu$xla.gpu.triton")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["SDAR-1.7B", "SDAR-8B", "Dream-7B"])
def test_gate_and_up_of_many_rows_lower_to_one_kernel(on_hopper, model):
    call, x, w = products(2048, *MODELS[model])["gate"]
    assert lowered(call, x, w) == (1, 0)
    assert lowered(jax.vmap(call, in_axes=(0, None)), real(2, *x.shape), w) == (1, 0)


def norm(x, y, scale):
    return add_rms_norm(x, y, scale, EPS)


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        ("SDAR-1.7B", 72),
        *(slow("SDAR-1.7B", rows) for rows in (32, 128)),
        *(slow("SDAR-8B", rows) for rows in (32, 72, 128)),
    ],
)
def test_a_layer_lowers_to_one_kernel_an_operation(on_hopper, model, rows):
    D = MODELS[model][0]
    x = real(1, rows, D)
    cases = [*products(rows, *MODELS[model]).values(), (norm, x, x, real(D))]
    cases += [(norm, x, real(4, 1, rows, D, dtype=jnp.float32), real(D))]
    assert [lowered(*case) for case in cases] == [(1, 0)] * 6


@pytest.mark.parametrize("name", ["gate", slow("qkv"), slow("o"), slow("norm")])
def test_many_at_once_are_one_kernel_many_times(on_hopper, name):
    """`jax.vmap` over rows, of one matrix; `test_many_at_once_are_exact` has one each too."""
    of_model = products(8, *MODELS["SDAR-1.7B"])
    of_model["norm"] = (lambda x, scale: norm(x, x, scale), real(8, 2048), real(2048))
    call, x, w = of_model[name]
    assert lowered(jax.vmap(call, in_axes=(0, None)), real(3, *x.shape), w) == (1, 0)


@pytest.mark.slow
def test_many_at_once_are_exact():
    x, w, other = integers(7, (2, 8, 64), (2, 64, 64), (64, 64))
    call = functools.partial(mosaic_few.split_matmul, tiling=Tiling(stages=2))
    for axis, matrix in ((0, w), (None, other)):

        def many(x, w, interpret, axis=axis):
            return jax.vmap(functools.partial(call, interpret=interpret), (0, axis))(x, w)

        want = np.matmul(np.float32(x), np.float32(matrix))
        assert np.array_equal(interpreted(many, x, matrix), want.astype(x.dtype))


def test_operations_refuse_what_mosaic_cannot_do(monkeypatch):
    calls = products(32, *MODELS["SDAR-1.7B"])

    def refused(product, x=None, w=None):
        call, own_x, own_w = calls[product]
        run = functools.partial(call, implementation="mosaic")
        with pytest.raises(NotImplementedError) as error:
            jax.eval_shape(run, x or own_x, w or own_w)
        text = str(error.value)
        assert text.startswith('implementation="mosaic": ')
        assert text.endswith('; use "xla"')
        return text[25:-11]

    if jax.default_backend() == "cpu":
        for product in calls:
            assert refused(product) == "needs an NVIDIA GPU of the Hopper kind"
    for call, x, w in calls.values():
        with pytest.raises(ValueError, match="implementation='cudnn' is not one of \"xla\""):
            jax.eval_shape(functools.partial(call, implementation="cudnn"), x, w)

    class Device:
        compute_capability = "9.0"

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [Device()])
    for product, (_, x, w) in calls.items():
        K = x.shape[-1]
        few, many, none = real(1, 20, K), real(1, 136, K), real(1, 0, K)
        assert refused(product, few) == "needs a multiple of 8 rows, at most 128, got 20"
        some = "needs a multiple of 128 rows where there are more, got 136"
        assert refused(product, many) == some
        assert refused(product, none) == "needs at least one row"
        long = real(*x.shape, dtype=jnp.float32)
        assert refused(product, long) == "needs a 16-bit type, got float32"
        half = real(*w.shape, dtype=jnp.float16)
        assert refused(product, w=half) == "needs operands of one type, got bfloat16 and float16"
    wide = products(32, *MODELS["LLaDA-8B"])["qkv"]
    assert "at most 132 side by side, got (4096, 12288)" in refused("qkv", *wide[1:])
    narrow = real(2048, 768, 2, 8)
    assert refused("gate", w=narrow) == "needs turns of a multiple of 16 columns, got 8"
    many = real(8, 128, 2048)
    turns = "needs turns of 16, 32 or 64 columns, 96 or 128 of gate in each tile, got"
    assert refused("gate", many, narrow) == f"{turns} 768 of 8"
    assert refused("gate", many, real(2048, 5, 2, 32)) == f"{turns} 5 of 32"
    assert "multiple of 64 as depth, a step of it for each turn, got 192" in refused(
        "gate", real(256, 192), real(192, 8, 2, 32)
    )
    wide = products(32, *MODELS["Dream-7B"])["gate"]
    assert "at most 132 side by side, got (3584, 37888)" in refused("gate", *wide[1:])
    rows = real(1, 8, 52)
    with pytest.raises(
        NotImplementedError, match="needs rows of a multiple of 512 up to 4096, got 52; use"
    ):
        jax.eval_shape(lambda x: add_rms_norm(x, x, x[0, 0], EPS, implementation="mosaic"), rows)
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    assert refused("o") == "needs jax 0.11.2, got 0.10.2"


@pytest.fixture
def hopper():
    """The GPU that the tests below need."""
    if getattr(jax.devices()[0], "compute_capability", None) != "9.0":
        pytest.skip("needs a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["SDAR-1.7B", "SDAR-8B"])
def test_products_match_float32_on_a_gpu(hopper, model):
    for i, (call, x, w) in enumerate(products(128, *MODELS[model]).values()):
        keys = jax.random.split(jax.random.key(i))
        x, w = (
            jax.random.normal(key, a.shape, a.dtype) for key, a in zip(keys, (x, w), strict=True)
        )
        w = w * jnp.asarray(x.shape[-1] ** -0.5, w.dtype)

        @jax.jit
        def truth(x, w, call=call):
            if call is gated_matmul:
                return gated_truth(x, w)
            return dot(x, w.reshape(len(w), -1))

        want = np.asarray(truth(x, w))
        for rows in (8, 32, 72, 128):
            got = jax.jit(functools.partial(call, implementation="mosaic"))(x[:, :rows], w)
            assert got.shape[-len(w.shape[1:]) :] == w.shape[1:] or call is gated_matmul
            got = got.reshape(-1, *want[:, :rows].shape)
            if len(got) > 1:
                assert got.dtype == jnp.float32
                assert np.abs(got.sum(axis=0) - want[:, :rows]).max() < 1e-3  # of a normal product
            else:
                assert got.dtype == x.dtype
                close(got[0], want[:, :rows])


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "rows", "columns"),
    [
        ("SDAR-1.7B", 128, 256),
        ("SDAR-1.7B", 1024, 256),
        ("SDAR-1.7B", 384, 192),
        ("SDAR-8B", 640, 192),
        ("Dream-7B", 512, 256),
    ],
)
def test_gated_matmul_of_many_rows_matches_float32_on_a_gpu(hopper, model, rows, columns):
    _, x, w = products(rows, *MODELS[model])["gate"]
    keys = jax.random.split(jax.random.key(rows))
    x, w = (jax.random.normal(key, a.shape, a.dtype) for key, a in zip(keys, (x, w), strict=True))
    w = w * jnp.asarray(x.shape[-1] ** -0.5, w.dtype)
    run = jax.jit(functools.partial(mosaic_many.gated_matmul, columns=columns))
    got = run(x, w)
    assert got.dtype == x.dtype
    close(got, np.asarray(jax.jit(gated_truth)(x, w)))
    again = run(x[:, -128:], w)  # other tiles, other blocks
    assert np.array_equal(got[:, -128:], again)


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("W", "columns", "dtype"),
    [(16, 256, "bfloat16"), (16, 192, "float16"), (64, 256, "float16"), (32, 192, "float16")],
)
def test_gated_matmul_of_many_rows_takes_other_turns_and_types_on_a_gpu(hopper, W, columns, dtype):
    x, w = normal(3, (640, 1024), (1024, 768 // W, 2, W), dtype=dtype)
    w = (w / 32).astype(w.dtype)
    run = jax.jit(functools.partial(mosaic_many.gated_matmul, columns=columns, blocks=7))
    close(np.asarray(run(x, w)), np.asarray(jax.jit(gated_truth)(x, w)))


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.gpu
def test_gates_of_any_size_are_those_of_silu_on_a_gpu(hopper):
    x, w = map(jnp.asarray, saturated(256, (4, 2, 32)))
    got = jax.jit(functools.partial(mosaic_many.gated_matmul, columns=256))(x, w)
    assert_saturated(np.asarray(got).astype(np.float64))


def gated_truth(x, w):
    """In float32, of products that are rounded first."""
    both = (dot(x, w[:, :, i].reshape(len(w), -1)) for i in range(2))
    gate, up = (product.astype(x.dtype).astype(jnp.float32) for product in both)
    return jax.nn.silu(gate) * up


def dot(x, w):
    return jnp.dot(x.astype(jnp.float32), w.astype(jnp.float32), precision="highest")


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2048, 4096])
@pytest.mark.parametrize("rows", [8, 72, 128])
def test_add_rms_norm_matches_numpy_on_a_gpu(hopper, rows, width):
    x, y, scale = normal(2, (rows, width), (rows, width), (width,))
    (parts,) = normal(3, (4, rows, width), dtype="float32")
    for other in (y, parts):
        got = add_rms_norm(*map(jnp.asarray, (x, other, scale)), EPS, implementation="mosaic")
        for a, b in zip(got, oracle.add_rms_norm(x, other, scale, EPS), strict=True):
            close(a, b)
