"""Matrices and rows in 8 bits against NumPy: in plain XLA, and in Mosaic's interpreter."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.kernels.layer import (
    Fp8Groups,
    Fp8Matrix,
    Fp8Rows,
    LayerOps,
    add_rms_norm,
    api_products,
    fp8,
    gated_matmul,
    mosaic_few,
    mosaic_many,
    mosaic_norm,
    qkv_matmul,
    split_matmul,
    takes_groups,
)
from dllm_jax.kernels.layer.mosaic_few_tiling import Tiling
from dllm_jax.models.layers import gate_up_shape, swiglu
from tests.cross_lowering import H200, needs_mosaic, shared_arrays
from tests.kernels.test_layer_mosaic import (
    EPS,
    MODELS,
    SHARED_BYTES,
    close,
    dense_models,
    hopper,  # noqa: F401 (a fixture)
    interpreted,
    lowered,
    normal,
    operands_are_read,  # noqa: F401 (a fixture of every test)
    real,
    slow,
)
from tests.oracles import fp8 as oracle
from tests.oracles import layer as layer_oracle

pytestmark = pytest.mark.long


def float64(x):
    return np.asarray(x).astype(np.float64)


def integer_rows(seed, *shape):
    """Small whole numbers as they are stored, and scales that are powers of two: exact products."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-3, 4, shape).astype(np.float32)
    scales = 2.0 ** rng.integers(-3, 4, shape[:-1]).astype(np.float32)
    return jnp.asarray(values).astype(fp8.DTYPE), jnp.asarray(scales.astype(np.float32))


def test_every_number_of_the_format_is_kept_and_others_go_to_the_nearest():
    values = oracle.positive_values()
    between = (values[1:] + values[:-1]) / 2
    row = np.concatenate([values, between, between * 1.001, between * 0.999])
    row = np.concatenate([-row, row]).astype(np.float32)  # 448 is among them: a scale of one
    got, scale = fp8.quantize(jnp.asarray(row))
    assert float(scale) == 1
    assert np.array_equal(float64(got), oracle.rounded(row))


@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 1e3, 1e30, 1e-30])
def test_quantize_matches_numpy(magnitude):
    x = normal(0, (5, 64), dtype="float32")[0] * np.float32(magnitude)
    values, scales = fp8.quantize(jnp.asarray(x))
    want, want_scales = oracle.quantized(x)
    assert np.array_equal(scales, want_scales)
    assert np.array_equal(float64(values), want)
    restored = float64(values) * float64(scales)[:, None]
    assert (np.abs(restored - x) <= np.abs(x) / 16 + float64(scales)[:, None] / 512).all()
    assert np.abs(float64(values)).max() == 448
    rows = fp8.quantize_rows(jnp.asarray(x))
    want, want_scales = oracle.quantized_rows(x)
    assert np.array_equal(rows.scales, want_scales)
    assert np.array_equal(float64(rows.values), want)


def test_scales_of_rows_are_the_least_powers_of_two_that_hold_them():
    x = np.float32([448, np.nextafter(np.float32(448), np.float32(449)), 224, 1, 448 * 2.0**-60])
    factors, scales = fp8.factors_of(jnp.asarray(x))
    assert scales.tolist() == [1, 2, 0.5, 2.0**-8, 2.0**-60]
    assert (np.asarray(factors) * np.asarray(scales) == 1).all()
    for extreme in (0.0, 1e-38, 3e38):
        factors, scales = fp8.factors_of(jnp.float32(extreme))
        assert np.isfinite(factors)
        assert float(factors * scales) == 1
        assert extreme * factors <= 448


def test_groups_of_a_row_are_the_row():
    """But for numbers far below its largest one."""
    (x,) = normal(11, (2, 3, 256), dtype="float32")
    x[..., :64] *= 1000
    x[..., 64:128] = 0
    values, scales = fp8.quantize(jnp.asarray(x).reshape(6, 4, 64), is_rows=True)
    padded = jnp.pad(scales.T, ((0, 0), (0, 2)), constant_values=jnp.nan)
    groups = Fp8Groups(values.reshape(2, 3, 256), padded)
    got, want = groups.whole, fp8.quantize_rows(jnp.asarray(x))
    one, other = (float64(r.values) * float64(r.scales)[..., None] for r in (got, want))
    far = np.abs(x) < 2.0**-13 * np.abs(x).max(axis=-1, keepdims=True)
    assert np.array_equal(one[~far], other[~far])
    matrix = fp8.quantize_matrix(jnp.asarray(normal(12, (256, 32), dtype="float32")[0]))
    outs = (split_matmul(rows, matrix, dtype=jnp.float32) for rows in (groups, want))
    a, b = map(float64, outs)
    assert np.abs(a - b).max() < 1e-4 * np.abs(b).max()


def test_rows_of_zeros_and_the_smallest_numbers_stay_finite():
    tiny = np.finfo(np.float32).tiny
    x = np.array([[0, 0], [tiny, 0], [tiny / 8, -tiny], [1e-29, 0], [3e38, 1]], np.float32)
    values, scales = fp8.quantize(jnp.asarray(x))
    assert (np.asarray(scales) >= tiny).all()
    assert np.array_equal(float64(values), [[0, 0], [0, 0], [0, 0], [448, 0], [448, 0]])


def test_a_number_that_is_none_stays_in_its_row():
    x = np.ones((3, 32), np.float32)
    x[1, 5] = np.nan
    w = fp8.quantize_matrix(jnp.eye(32))
    out = np.asarray(fp8.matmul(jnp.asarray(x), w, jnp.float32))
    assert np.isnan(out[1]).any()
    np.testing.assert_allclose(out[[0, 2]], 1, rtol=1e-5)


@pytest.mark.slow("shape1", unless="pallas_kernels")
@pytest.mark.parametrize("shape", [(48, 16), (48, 2, 4, 8)])
def test_matmul_matches_numpy(shape):
    x, w = normal(1, (2, 3, 48), shape, dtype="float32")
    matrix = fp8.quantize_matrix(jnp.asarray(w))
    assert matrix.shape == shape
    got = fp8.matmul(jnp.asarray(x), matrix, jnp.float32)
    close(got, oracle.matmul(x, w), 1e-2)
    assert np.abs(float64(got) - np.tensordot(x, w, 1)).mean() < 0.04 * np.abs(got).mean()


def test_a_matrix_of_heads_has_its_inputs_joined():
    (w,) = normal(2, (3, 8, 5), dtype="float32")
    whole = fp8.quantize_matrix(jnp.asarray(w), num_inputs=2)
    flat = fp8.quantize_matrix(jnp.asarray(w.reshape(24, 5)))
    assert all(map(np.array_equal, jax.tree.leaves(whole), jax.tree.leaves(flat)))
    error = np.abs(float64(whole.restored(jnp.float32)) - w.reshape(24, 5))
    assert error.max() <= np.abs(w).max() / 16


def test_a_row_does_not_depend_on_its_neighbours():
    """Rows alone, among others, and among others a thousand times as large: bit for bit."""
    x, w = normal(3, (6, 64), (64, 32))
    matrix = fp8.quantize_matrix(jnp.asarray(w))
    held = fp8.quantize_rows(jnp.asarray(x))
    for i in range(6):
        alone = fp8.quantize_rows(jnp.asarray(x[i : i + 1]))
        assert np.array_equal(float64(alone.values)[0], float64(held.values)[i])
        assert alone.scales[0] == held.scales[i]
    run = jax.jit(functools.partial(fp8.matmul, w=matrix, dtype=jnp.float32))
    louder = np.where(np.arange(6)[:, None] == 2, x, x * 1000).astype(x.dtype)
    assert np.array_equal(run(jnp.asarray(louder))[2], run(jnp.asarray(x))[2])


def test_operations_of_a_layer_take_either_kind_of_rows():
    x, scale, qkv, gate, out = normal(
        4, (2, 3, 64), (64,), (64, 2, 4, 16), (64, 2, 2, 16), (32, 64)
    )
    rows = [jnp.asarray(a) for a in (x, scale)]
    kept, normed = add_rms_norm(rows[0], rows[0], rows[1], EPS, is_quantized=True)
    assert isinstance(normed, Fp8Rows)
    total, plain = add_rms_norm(rows[0], rows[0], rows[1], EPS)
    assert np.array_equal(kept, total)
    for call, w in ((qkv_matmul, qkv), (gated_matmul, gate), (split_matmul, out)):
        matrix = fp8.quantize_matrix(jnp.asarray(w))
        given, before = (plain[..., :32], None) if call is split_matmul else (plain, normed)
        got = call(given, matrix)
        assert got.dtype == x.dtype
        if before is not None:
            assert np.array_equal(got, call(before, matrix, dtype=x.dtype))
            with pytest.raises(ValueError, match="give dtype"):
                call(before, matrix)
        product = oracle.matmul(float64(given), np.float32(w))
        if call is gated_matmul:
            gates, others = product[..., 0, :], product[..., 1, :]
            product = (gates / (1 + np.exp(-gates)) * others).reshape(2, 3, -1)
        close(got, product)


@pytest.mark.slow("96", unless="pallas_kernels")
@needs_mosaic
@pytest.mark.parametrize(
    ("rows", "depth", "width", "tiling", "group"),
    [
        # Two warpgroups, the second with 8 rows; buffers are used again; parts.
        ((2, 36), 512, 64, Tiling(depth=128, stages=2, splits=2), None),
        # Fewer rows than a warpgroup, four tiles.
        ((32,), 768, 128, Tiling(columns=32, depth=384, stages=2), 96),
        slow((64,), 1024, 64, Tiling(depth=256, stages=2, splits=2), None),
        slow((128,), 256, 64, Tiling(depth=128, stages=2), None),
        slow((2, 36), 512, 64, Tiling(depth=128, stages=2, splits=2), 64),
    ],
)
def test_split_matmul_of_8_bits_is_exact(rows, depth, width, tiling, group):
    w = Fp8Matrix(*integer_rows(1, width, depth))
    x = Fp8Rows(*integer_rows(0, *rows, depth))
    left, right = (float64(a.values) * float64(a.scales)[..., None] for a in (x, w))
    if group is not None:
        values, scales = integer_rows(0, *rows, depth // group, group)
        left = (float64(values) * float64(scales)[..., None]).reshape(*rows, depth)
        scales = np.asarray(scales).reshape(-1, depth // group).T
        scales = np.pad(scales, ((0, 0), (0, -scales.shape[1] % 64)), constant_values=np.nan)
        x = Fp8Groups(values.reshape(*rows, depth), jnp.asarray(scales))
    got = interpreted(
        lambda *flat, **how: mosaic_few.split_matmul(
            type(x)(*flat[:2]), Fp8Matrix(*flat[2:]), tiling=tiling, dtype="bfloat16", **how
        ),
        *(x.values, x.scales, w.values, w.scales),
    )
    if tiling.splits == 1:
        assert got.dtype == jnp.bfloat16
        assert np.array_equal(got, np.float32(left @ right.T).astype(got.dtype))
        return
    shares = np.split(np.arange(depth), tiling.splits)
    assert got.dtype == np.float32
    assert np.array_equal(got, [left[..., i] @ right[:, i].T for i in shares])


@pytest.mark.slow(unless="pallas_kernels")
@needs_mosaic
@pytest.mark.parametrize(
    ("rows", "depth", "turns", "how"),
    [
        ((3, 24), 256, (4, 2, 32), {"tiling": Tiling(columns=128, depth=128, stages=2)}),
        slow((8,), 512, (3, 2, 32), {"tiling": Tiling(columns=192, depth=256, stages=2)}),
        # Many rows: two tiles for some blocks, of six, and three for the other.
        ((3, 128), 1024, (8, 2, 32), {"columns": 256, "blocks": 4}),
        slow((384,), 768, (6, 2, 32), {"columns": 192, "blocks": 1}),
    ],
)
def test_gated_matmul_of_8_bits_matches_numpy(rows, depth, turns, how):
    x, w = normal(5, (*rows, depth), (depth, *turns))
    w = (np.float32(w) / np.sqrt(depth)).astype(w.dtype)
    held, matrix = fp8.quantize_rows(jnp.asarray(x)), fp8.quantize_matrix(jnp.asarray(w))
    got = interpreted(
        lambda *flat, **more: (mosaic_few if "tiling" in how else mosaic_many).gated_matmul(
            Fp8Rows(*flat[:2]), Fp8Matrix(*flat[2:]), dtype="bfloat16", **how, **more
        ),
        *(held.values, held.scales, matrix.values, matrix.scales),
    )
    product = oracle.matmul(x, w)
    gates, others = (np.float64(product[..., i, :].astype(x.dtype)) for i in range(2))
    close(got, (gates / (1 + np.exp(-gates)) * others).reshape(*rows, -1))
    plain = gated_matmul(held, matrix, dtype=jnp.bfloat16, implementation="xla")
    close(got, float64(plain))  # which rounds in the middle of SiLU
    if rows != (3, 24):
        return
    values, scales = interpreted(
        lambda *flat, **more: (lambda out: (out.values, out.scales))(
            mosaic_few.gated_matmul(
                *(Fp8Rows(*flat[:2]), Fp8Matrix(*flat[2:])),
                **(how | more | {"dtype": "bfloat16", "is_quantized": True}),
            )
        ),
        *(held.values, held.scales, matrix.values, matrix.scales),
    )
    groups = np.float32(got).reshape(72, -1, how["tiling"].columns // 2)
    want, want_scales = oracle.quantized_rows(groups)
    assert np.array_equal(np.asarray(scales)[:, :72].T, want_scales)
    assert np.array_equal(float64(values).reshape(groups.shape), want)


@pytest.mark.slow(unless="pallas_kernels")
@needs_mosaic
@pytest.mark.parametrize(
    ("rows", "width", "how"),
    [((3, 128), 768, {"columns": 256, "blocks": 4}), slow((256,), 384, {"columns": 192})],
)
def test_products_of_many_rows_in_8_bits_are_exact(rows, width, how):
    x = Fp8Rows(*integer_rows(0, *rows, 1024))
    w = Fp8Matrix(*integer_rows(1, width, 1024))
    got = interpreted(
        lambda *flat, **more: mosaic_many.matmul(
            Fp8Rows(*flat[:2]), Fp8Matrix(*flat[2:]), dtype="bfloat16", **how, **more
        ),
        *(x.values, x.scales, w.values, w.scales),
    )
    left, right = (float64(a.values) * float64(a.scales)[..., None] for a in (x, w))
    assert np.array_equal(got, np.float32(left @ right.T).astype(got.dtype))


@needs_mosaic
@pytest.mark.parametrize("parts", [0, slow(4)])
def test_a_norm_in_8_bits_is_the_norm_and_then_the_rounding(parts):
    x, scale = normal(6, (2, 3, 512), (512,))
    x[0, 1] = 0
    (y,) = normal(7, (*([parts] if parts else []), 2, 3, 512), dtype="float32")
    y[..., 0, 1, :] = 0  # the sum of a row is zero
    run = functools.partial(mosaic_norm.add_rms_norm, eps=EPS)
    total, normed = interpreted(run, x, y, scale)
    same, (values, scales) = interpreted(
        lambda *arrays, **how: (lambda total, rows: (total, (rows.values, rows.scales)))(
            *run(*arrays, is_quantized=True, **how)
        ),
        *(x, y, scale),
    )
    assert np.array_equal(total, same)
    want = fp8.quantize_rows(jnp.asarray(normed))
    assert np.array_equal(scales, want.scales)
    assert (float64(values) == float64(want.values)).mean() > 0.999
    assert not float64(values)[0, 1].any()
    close(
        float64(values) * float64(scales)[..., None],
        layer_oracle.add_rms_norm(x, y, scale, EPS)[1],
        0.07,
    )


@needs_mosaic
@pytest.mark.parametrize("shape", [(2, 3, 512), slow((5, 3072)), slow((8, 12288))])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_are_rounded_by_mosaic_as_by_xla(shape, dtype):
    x = normal(10, shape, dtype=dtype)[0]
    x[..., 0, :] = 0
    x[..., 1, :] *= np.asarray(100, x.dtype)
    values, scales = interpreted(
        lambda x, **how: (lambda rows: (rows.values, rows.scales))(
            mosaic_norm.quantize_rows(x, **how)
        ),
        x,
    )
    want, want_scales = oracle.quantized_rows(np.float32(x))
    assert np.array_equal(scales, want_scales)
    assert np.array_equal(float64(values), want)


@pytest.mark.slow(unless="pallas_kernels")
@needs_mosaic
def test_rows_in_8_bits_do_not_depend_on_each_other_in_mosaic():
    """All others are NaN, and come out as NaN."""
    x, w, y = normal(8, (16, 128), (128, 64), (6, 512))
    matrix = fp8.quantize_matrix(jnp.asarray(w))
    held = fp8.quantize_rows(jnp.asarray(x))

    def product(values, scales, **how):
        tiling = Tiling(depth=128, stages=2)
        return mosaic_few.split_matmul(
            Fp8Rows(values, scales), matrix, tiling=tiling, dtype="float32", **how
        )

    scales = np.where(np.arange(16) == 3, np.asarray(held.scales), np.nan).astype(np.float32)
    alone, whole = (interpreted(product, held.values, s) for s in (scales, held.scales))
    assert np.array_equal(alone[3], whole[3])
    assert np.isnan(np.delete(alone, 3, axis=0)).all()

    def norm(y, **how):
        _, rows = mosaic_norm.add_rms_norm(y, y, y[0] * 0 + 1, EPS, is_quantized=True, **how)
        return rows.values, rows.scales

    lonely = np.where(np.arange(6)[:, None] == 0, y, np.nan).astype(y.dtype)

    def rounded(y, **how):
        rows = mosaic_norm.quantize_rows(y, **how)
        return rows.values, rows.scales

    for call in (norm, rounded):
        for a, b in zip(interpreted(call, lonely), interpreted(call, y), strict=True):
            assert np.array_equal(float64(a[0]), float64(b[0]))


def of_model(rows, D, F, G, n, H):
    """Operation, rows and matrix, as shapes, of each product of a layer in 8 bits."""

    def matrix(K, *N):
        return Fp8Matrix(real(*N, K, dtype=fp8.DTYPE), real(*N, dtype=jnp.float32))

    def held(K):
        return Fp8Rows(real(1, rows, K, dtype=fp8.DTYPE), real(1, rows, dtype=jnp.float32))

    return {
        "qkv": (qkv_matmul, held(D), matrix(D, G, n + 2, H)),
        "o": (split_matmul, held(G * n * H), matrix(G * n * H, D)),
        "gate": (gated_matmul, held(D), matrix(*gate_up_shape(D, F))),
        "down": (split_matmul, held(F), matrix(F, D)),
    }


def operations(call, *arguments):
    """What XLA is given to run; views, and barriers, are no launches."""
    with jax.sharding.use_abstract_mesh(H200):
        text = jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return set(re.findall(r"stablehlo\.(\w+)", text)) - {"reshape", "optimization_barrier"}


@needs_mosaic
@pytest.mark.parametrize(
    ("model", "rows"),
    [
        ("SDAR-1.7B", 128),
        *(slow("SDAR-1.7B", rows) for rows in (8, 32, 72)),
        *(slow("SDAR-8B", rows) for rows in (8, 32, 72, 128)),
    ],
)
def test_a_layer_in_8_bits_lowers_to_one_kernel_an_operation(on_hopper, model, rows):
    """Shared memory is counted meanwhile."""
    sizes = MODELS[model]
    for call, x, w in of_model(rows, *sizes).values():
        call = functools.partial(call, dtype=jnp.bfloat16)
        assert operations(call, x, w) == {"custom_call"}
        assert lowered(call, x, w) == (1, 0)
        rows_of_16 = real(*x.values.shape)  # rounded in one launch more
        assert operations(call, rows_of_16, w) == {"custom_call"}
        assert lowered(call, rows_of_16, w) == (2, 0)
    products = of_model(rows, *sizes)
    (_, x, gate), (_, _, down) = products["gate"], products["down"]
    run = functools.partial(swiglu, ops=LayerOps(), dtype=jnp.bfloat16)
    # SDAR-8B's groups of 96 are no part of a step of many rows.
    assert lowered(run, x, gate, down) == (3 if model == "SDAR-8B" and rows > 64 else 2, 0)
    x, scale = real(1, rows, sizes[0]), real(sizes[0])
    assert lowered(lambda x, s: add_rms_norm(x, x, s, EPS, is_quantized=True), x, scale) == (1, 0)


@needs_mosaic
def test_tilings_of_8_bits_fit_into_shared_memory(monkeypatch, on_hopper):
    """Counted from what the kernel allocates, with groups where they are chosen."""
    found = {"Fp8Rows": [], "Fp8Groups": []}

    def launch(body, *, out_type, scratch_types, **_):
        found[kind].append(shared_arrays(scratch_types)[1])
        return lambda *_: [jnp.zeros(each.shape, each.dtype) for each in out_type]

    def run(back_end, x, w):
        nonlocal kind
        kind = type(x).__name__
        if back_end.unsupported:
            return None
        return back_end.run.func.__wrapped__(x, w, **back_end.run.keywords)

    def products(x, gate, inner, down, heads, out):
        for reader in (None, down):
            y = run(api_products._few_gated(x, gate, jnp.bfloat16, reader), x, gate)
            held = y if isinstance(y, Fp8Groups) else inner
            run(api_products._few_split(held, down, jnp.bfloat16), held, down)
        run(api_products._few_split(heads, out, jnp.bfloat16), heads, out)

    kind = ""
    monkeypatch.setattr(mosaic_few.plgpu, "kernel", launch)
    for rows in (8, 32, 72, 128):
        for sizes in sorted(dense_models()):
            shapes = of_model(rows, *sizes)
            attended, out = shapes["o"][1:]
            scales = real(sizes[2] * sizes[3], -(-rows // 64) * 64, dtype=jnp.float32)
            heads = Fp8Groups(attended.values, scales)
            jax.eval_shape(products, *shapes["gate"][1:], *shapes["down"][1:], heads, out)
    assert min(map(len, found.values())) > 20
    assert max(itertools.chain(*found.values())) <= SHARED_BYTES - 1024  # for barriers


@needs_mosaic
def test_rows_come_in_groups_where_the_product_takes_whole_ones(on_hopper):
    matrix = of_model(32, *MODELS["SDAR-8B"])["o"][2]
    down = real(4096, 3840, dtype=fp8.DTYPE), real(4096, dtype=jnp.float32)
    bf16 = jnp.bfloat16
    assert takes_groups((1, 32, 4096), matrix, 128, bf16)
    assert takes_groups((4, 32, 4096), matrix, 64, bf16)
    assert not takes_groups((1, 32, 4096), matrix, 96, bf16)  # 42 and a half
    assert takes_groups((1, 64, 3840), Fp8Matrix(*down), 96, bf16)
    assert not takes_groups((1, 72, 3840), Fp8Matrix(*down), 96, bf16)  # steps of 128
    assert not takes_groups((1, 32, 3840), Fp8Matrix(*down), 80, bf16)  # part of an instruction
    assert not takes_groups((1, 32, 4096), matrix, 32, bf16)
    assert not takes_groups((5, 32, 4096), matrix, 128, bf16)  # many rows
    assert not takes_groups((1, 33, 4096), matrix, 128, bf16)
    assert not takes_groups((1, 32, 4096), matrix, 128, jnp.float32)


@needs_mosaic
def test_many_rows_in_8_bits_are_left_to_xla(on_hopper):
    for call, x, w in of_model(136, *MODELS["SDAR-1.7B"]).values():
        assert lowered(functools.partial(call, dtype=jnp.bfloat16), x, w) == (0, 0)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@needs_mosaic
@pytest.mark.parametrize("model", ["SDAR-1.7B", "SDAR-8B"])
def test_products_of_8_bits_match_numpy_on_a_gpu(model):
    for i, (call, held, matrix) in enumerate(of_model(128, *MODELS[model]).values()):
        keys = jax.random.split(jax.random.key(i))
        x = jax.random.normal(keys[0], held.values.shape, jnp.bfloat16)
        w = jax.random.normal(keys[1], matrix.shape, jnp.bfloat16) * matrix.shape[0] ** -0.5
        small = jax.jit(fp8.quantize_matrix)(w.astype(jnp.bfloat16))
        rows = fp8.quantize_rows(x)
        left = np.float32(rows.values) * np.asarray(rows.scales)[..., None]
        right = np.float32(small.flat.values) * np.asarray(small.flat.scales)[:, None]
        want = (left @ right.T).reshape(*x.shape[:-1], *matrix.shape[1:])
        if call is gated_matmul:
            gate, up = (float64(want[..., i, :].astype(x.dtype)) for i in range(2))
            want = (gate / (1 + np.exp(-gate)) * up).reshape(*x.shape[:-1], -1)
        for count in (8, 32, 72, 128):
            got = jax.jit(functools.partial(call, implementation="mosaic"))(x[:, :count], small)
            got = float64(got).reshape(-1, *want[:, :count].shape).sum(axis=0)
            close(got, want[:, :count], 0.05)  # the tensor cores keep 14 bits of such sums


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@needs_mosaic
@pytest.mark.parametrize("width", [2048, 4096])
def test_a_norm_in_8_bits_is_rounded_as_by_xla_on_a_gpu(width):
    x, y, scale = map(jnp.asarray, normal(9, (72, width), (72, width), (width,)))
    pairs = [
        add_rms_norm(x, y, scale, EPS, is_quantized=True, implementation=how)[1]
        for how in ("mosaic", "xla")
    ]
    same = [float64(a) == float64(b) for a, b in zip(*map(jax.tree.leaves, pairs), strict=True)]
    assert same[0].mean() > 0.98
