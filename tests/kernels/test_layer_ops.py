"""The operations of a layer beside its attention, against NumPy float64.

Every back end on random data of odd sizes; roundings and untouched values bit for bit; rows do not
depend on each other; a trunk of kernels is the trunk of XLA; the kernels lower for published models
and reduce the launches of a step as expected.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.kernels.layer import (
    LayerOps,
    add_rms_norm,
    api,
    mosaic,
    rotate_qkv,
    split_matmul,
    triton,
)
from dllm_jax.kernels.layer.triton import Tiling
from dllm_jax.models import dense, moe
from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.moe import MoEConfig
from tests.cross_lowering import H200, triton_grids
from tests.oracles import layer as oracle

pytestmark = pytest.mark.long

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}  # of a value plus one
EPS = 1e-5
SMALL = Tiling(rows=16, columns=16, depth=32, splits=2, num_stages=2)
KERNELS = LayerOps(add_rms_norm="triton", split_matmul="triton", rotate_qkv="triton")
ALL_MOSAIC = LayerOps(
    add_rms_norm="mosaic",
    qkv_matmul="mosaic",
    rotate_qkv="triton",
    split_matmul="mosaic",
    gated_matmul="mosaic",
)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels run as plain XLA, on this machine."""
    for name in ("add_rms_norm", "split_matmul", "rotate_qkv"):
        run = functools.partial(getattr(triton, name), interpret=True)
        monkeypatch.setattr(triton, name, run)
    monkeypatch.setattr(triton, "unsupported_type", lambda x: None)
    monkeypatch.setattr(api, "choose_tiling", lambda x, w: SMALL)


@pytest.fixture(params=["xla", "triton"])
def name(request):
    """Each back end in turn."""
    if request.param == "triton":
        request.getfixturevalue("interpreted")
    return request.param


def draw(seed, *shapes, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape), jnp.dtype(dtype)) for shape in shapes]


def close(got, want, dtype):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.dtype(dtype)
        assert a.shape == b.shape
        apart = np.abs(np.float64(a) - b) / (np.abs(b) + 1)
        assert apart.max() < TOLERANCE[dtype]
        assert np.abs(b).max() > 1  # large enough for a relative error to show


@pytest.mark.parametrize(("dtype", "parts"), [("bfloat16", 0), ("bfloat16", 3), ("float32", 1)])
def test_add_rms_norm_matches_numpy(name, dtype, parts):
    x, y, scale = draw(0, (2, 5, 52), (2, 5, 52), (52,), dtype=dtype)
    if parts:
        (y,) = draw(1, (parts, 2, 5, 52))
    got = add_rms_norm(*map(jnp.asarray, (x, y, scale)), EPS, implementation=name)
    close(got, oracle.add_rms_norm(x, y, scale, EPS), dtype)


@pytest.mark.parametrize("types", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_add_rms_norm_gives_the_type_of_x(name, types):
    """Of a sum that was rounded once, whatever the type of the rows that are added."""
    (x, scale), (y,) = draw(0, (5, 52), (52,), dtype=types[0]), draw(1, (5, 52), dtype=types[1])
    got = add_rms_norm(*map(jnp.asarray, (x, y, scale)), EPS, implementation=name)
    close(got, oracle.add_rms_norm(x, y, scale, EPS), types[0])
    assert np.array_equal(got[0], (np.float32(x) + np.float32(y)).astype(x.dtype))


def test_no_rows_give_no_rows(monkeypatch):
    """On a GPU too, where the kernels have nothing to launch and say so."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    none = lambda *shape: jnp.zeros((2, 0, *shape), jnp.bfloat16)  # noqa: E731
    angle, scale = jnp.zeros((2, 0, 8)), jnp.ones(64, jnp.bfloat16)
    norm = functools.partial(add_rms_norm, none(64), none(64), scale, EPS)
    turn = functools.partial(
        rotate_qkv, none(3, 4, 16), None, None, None, cos=angle, sin=angle, eps=EPS
    )
    product = functools.partial(split_matmul, none(64), jnp.ones((64, 64), jnp.bfloat16))
    assert [leaf.shape for leaf in (*norm(), product())] == [(2, 0, 64)] * 3
    assert [leaf.shape for leaf in turn()] == [(2, 0, 6, 16), (2, 0, 3, 16), (2, 0, 3, 16)]
    for call in (norm, turn, product):
        with pytest.raises(NotImplementedError, match='"triton": needs at least one row; use'):
            call(implementation="triton")


@pytest.mark.parametrize(
    ("dtype", "rotary", "normed", "biased"),
    [
        ("bfloat16", 16, True, False),
        ("float32", 8, False, True),
        slow("bfloat16", 8, True, True),
        slow("float32", 16, False, False),
    ],
)
def test_rotate_qkv_matches_numpy(name, dtype, rotary, normed, biased):
    qkv, bias, *norms = draw(2, (2, 5, 3, 5, 16), (3, 5, 16), (16,), (16,), dtype=dtype)
    (angle,) = draw(3, (2, 5, rotary // 2))
    more = [bias if biased else None, *(norms if normed else (None, None))]
    arguments = (qkv, *more, np.cos(3 * angle), np.sin(3 * angle))
    run = jax.jit(functools.partial(rotate_qkv, eps=EPS, implementation=name))
    got = run(*jax.tree.map(jnp.asarray, arguments))
    close(got, oracle.rotate_qkv(*arguments, EPS), dtype)
    assert [leaf.shape for leaf in got] == [(2, 5, 9, 16), (2, 5, 3, 16), (2, 5, 3, 16)]
    if not biased:
        assert np.array_equal(got[2], qkv[..., -1, :])  # values are only moved
    if rotary < 16 and not normed:  # and so is what no angle turns
        kept = (qkv + bias)[..., :3, rotary:].reshape(2, 5, 9, -1)
        assert np.array_equal(got[0][..., rotary:], kept)


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.parametrize(
    ("dtype", "biased"),
    [("bfloat16", True), slow("bfloat16", False), slow(None, False), slow(None, True)],
)
def test_rotate_qkv_rounds_the_sum_of_parts_first(name, dtype, biased):
    """To the type that is asked for, or to that of the parts."""
    (parts,) = draw(2, (2, 2, 5, 3, 5, 16))
    bias, *norms = draw(3, (3, 5, 16), (16,), (16,), dtype="bfloat16")
    (angle,) = draw(4, (2, 5, 8))
    cos, sin = np.cos(3 * angle), np.sin(3 * angle)
    arguments = (bias if biased else None, *norms, cos, sin)
    given = jax.tree.map(jnp.asarray, (parts, *arguments))
    got = rotate_qkv(*given, EPS, dtype=dtype, implementation=name)
    summed = parts.sum(axis=0).astype(jnp.dtype(dtype or "float32"))
    close(got, oracle.rotate_qkv(summed, *arguments, EPS), dtype or "float32")
    values = summed[..., -1, :]
    if biased:  # of values nothing but the roundings is left to see
        values = (np.float32(values) + np.float32(bias[:, -1])).astype(values.dtype)
        unrounded = (parts.sum(axis=0)[..., -1, :] + np.float32(bias[:, -1])).astype(values.dtype)
        assert dtype is None or not np.array_equal(values, unrounded)
    assert np.array_equal(got[2], values)


def test_rotate_qkv_gives_the_type_that_is_asked_for(name):
    """Of rows in another one too."""
    (qkv,), (angle,) = draw(2, (5, 2, 4, 16)), draw(3, (5, 8))
    cos, sin = np.cos(angle), np.sin(angle)
    arguments = (None, None, None, cos, sin)
    given = jax.tree.map(jnp.asarray, (qkv, *arguments))
    got = rotate_qkv(*given, EPS, dtype="bfloat16", implementation=name)
    close(got, oracle.rotate_qkv(qkv.astype(jnp.bfloat16), *arguments, EPS), "bfloat16")


def test_split_matmul_parts_add_up(name):
    x, w = draw(4, (3, 7, 128), (128, 32), dtype="bfloat16")
    got = split_matmul(jnp.asarray(x), jnp.asarray(w), implementation=name)
    want = np.float64(x) @ np.float64(w)
    if name == "xla":
        close([got], [want], "bfloat16")
        return
    assert got.shape == (2, 3, 7, 32)
    close([got.sum(axis=0)], [want], "float32")
    halves = [
        np.float64(x[..., half]) @ np.float64(w[half]) for half in (slice(64), slice(64, None))
    ]
    close(list(got), halves, "float32")


@pytest.mark.usefixtures("interpreted")
def test_rows_do_not_depend_on_each_other():
    x, y, scale, w = draw(5, (19, 64), (19, 64), (64,), (64, 32), dtype="bfloat16")
    (angle,), (qkv,) = draw(6, (19, 8)), draw(7, (19, 2, 3, 16), dtype="bfloat16")

    @jax.jit
    def run(x, y, qkv, angle):
        both = add_rms_norm(x, y, scale, EPS, implementation="triton")
        parts = split_matmul(x, w, implementation="triton")
        turned = rotate_qkv(qkv, None, None, None, angle, angle, EPS, implementation="triton")
        return (*both, *turned, *parts)

    want = run(x, y, qkv, angle)
    others = [
        np.where(np.arange(19).reshape(-1, *[1] * (a.ndim - 1)) == 11, a, np.nan).astype(a.dtype)
        for a in (x, y, qkv, angle)
    ]
    for got, before in zip(run(*others), want, strict=True):
        assert np.array_equal(got[11], before[11])
        assert np.isfinite(np.float32(before)).all()
        assert np.isnan(np.float32(got[10])).any()


CFG = DenseConfig(
    vocab_size=50,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=128,
    mask_token_id=0,
)
FAMILIES = {
    "qwen3": (dense, CFG),
    "biased": (
        dense,
        dataclasses.replace(CFG, qk_norm=False, qkv_bias=True, o_bias=True, rotary_dim=8),
    ),
    "experts": (
        moe,
        MoEConfig(
            **{**dataclasses.asdict(CFG), "rope_scaling": None},
            num_experts=4,
            experts_per_token=2,
            expert_size=16,
            shared_size=16,
            moe_layers=(False, True),
        ),
    ),
}


@functools.cache
def weights(module, cfg):
    drawn = dense.random_params(jax.random.key(1), module.param_shapes(cfg, "bfloat16"))
    return jax.tree.map(lambda leaf: leaf * (1 if leaf.ndim < 2 else 5), drawn)


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("family", ["qwen3", *(slow(f) for f in FAMILIES if f != "qwen3")])
def test_trunk_of_kernels_is_the_trunk(family):
    same_trunk(*FAMILIES[family], 5, KERNELS)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the Mosaic form needs jax 0.11.2")
def test_trunk_of_mosaic_kernels_is_the_trunk(monkeypatch):
    """Queries, keys and values in parts too, and those of the last product."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    ran = []
    for name in ("add_rms_norm", "split_matmul", "gated_matmul"):

        def run(call, *args, **how):
            ran.append((call.__name__, how["tiling"].splits if "tiling" in how else None))
            return call(*args, **how, interpret=plgpu.InterpretGPUParams())

        monkeypatch.setattr(mosaic, name, functools.partial(run, getattr(mosaic, name)))
    monkeypatch.setattr(mosaic, "unsupported", lambda x: None)
    cfg = dataclasses.replace(CFG, hidden_size=512, ffn_size=256)
    same_trunk(dense, cfg, 4, ALL_MOSAIC)
    of_a_layer = {
        ("split_matmul", 4),
        ("split_matmul", 1),
        ("gated_matmul", 1),
        ("split_matmul", 2),
    }
    assert set(ran) == {*of_a_layer, ("add_rms_norm", None)}


def same_trunk(module, cfg, rows, ops):
    """A trunk of such operations gives what one in plain XLA does, on twice so many rows."""
    (x,) = draw(8, (2, rows, cfg.hidden_size), dtype="bfloat16")
    positions = jnp.arange(2 * rows, dtype=jnp.int32).reshape(2, rows)

    def attend(layer, q, k, v):
        return q * (1 + layer) + jnp.repeat(k - v, cfg.num_heads // cfg.num_kv_heads, axis=2)

    @functools.partial(jax.jit, static_argnames="ops")
    def run(params, ops):
        return module.trunk(params, cfg, jnp.asarray(x), positions, attend, (2, 0), ops=ops)

    got, want = (jax.tree.leaves(run(weights(module, cfg), ops)) for ops in (ops, dense.PLAIN))
    assert np.array_equal(got[2], x)
    for a, b in zip(got, want, strict=True):
        a, b = np.float64(a), np.float64(b)
        assert np.abs(a - b).max() < 0.04 * np.abs(b).max()
        assert np.abs(a - b).mean() < 0.01 * np.abs(b).mean()
    assert np.abs(np.float64(got[1]) - np.float64(x)).mean() > 1  # the layers did something


PUBLISHED = {  # D G n H rotary F, bias
    "SDAR-1.7B": (2048, 8, 2, 128, 128, 6144, False),
    "SDAR-8B": (4096, 8, 4, 128, 128, 12288, False),
    "Dream-7B": (3584, 4, 7, 128, 128, 18944, True),
    "LLaDA2-mini": (2048, 4, 4, 128, 64, 5120, False),
}


@pytest.mark.parametrize(
    "model", ["LLaDA2-mini", *(slow(m) for m in PUBLISHED if m != "LLaDA2-mini")]
)
def test_a_layer_of_kernels_lowers_for_published_models(monkeypatch, model):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    D, G, n, H, rotary, F, bias = PUBLISHED[model]
    cfg = DenseConfig(
        vocab_size=64,
        hidden_size=D,
        num_layers=1,
        num_heads=G * n,
        num_kv_heads=G,
        head_dim=H,
        ffn_size=F,
        rotary_dim=rotary,
        qk_norm=not bias,
        qkv_bias=bias,
    )
    rows = jax.ShapeDtypeStruct((1, 100, D), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((1, 100), jnp.int32)

    def run(params, x, positions):
        return dense.trunk(params, cfg, x, positions, lambda _, q, k, v: q, ops=KERNELS)

    with jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(run).trace(dense.param_shapes(cfg), rows, positions)
        lowered = traced.lower(lowering_platforms=("cuda",))
    grids = triton_grids(lowered.compiler_ir("stablehlo").operation)
    norm, splits = (100, 1, 1), (D // 64, 1, 4)
    assert sorted(grids) == sorted([(25, G, 1), norm, norm, splits, splits])


def test_operations_refuse_what_they_cannot_do(monkeypatch):
    x, w = jnp.ones((3, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
    qkv, angle = jnp.ones((3, 2, 3, 16)), jnp.ones((3, 8))
    calls = {
        "add_rms_norm": lambda **how: add_rms_norm(x, x, x[0], EPS, **how),
        "split_matmul": lambda **how: split_matmul(x, w, **how),
        "rotate_qkv": lambda **how: rotate_qkv(qkv, None, None, None, angle, angle, EPS, **how),
    }
    for call in calls.values():
        call()  # the faster one, which here can be one only
        with pytest.raises(NotImplementedError, match='"triton": needs an NVIDIA GPU; use "xla"'):
            call(implementation="triton")
        with pytest.raises(ValueError, match="implementation='cudnn' is not one of"):
            call(implementation="cudnn")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(NotImplementedError, match="whole tiles, 4 to its depth, got 64 x 32"):
        split_matmul(x, w, implementation="triton")
    assert triton.unsupported_product(x.astype("float32"), w, SMALL) == (
        "needs operands of one 16-bit type, got float32 and bfloat16"
    )
    assert triton.unsupported_product(x, w, SMALL) is None
    for given in ("q_norm", "k_norm"):
        norms = {"q_norm": None, "k_norm": None} | {given: jnp.ones(16)}
        with pytest.raises(ValueError, match=f"{given} without ._norm; give both or neither"):
            rotate_qkv(qkv, None, **norms, cos=angle, sin=angle, eps=EPS)
    assert "got 3 rotated pairs and 10" in str(triton.unsupported_heads(qkv, angle[:, :3]))
    assert triton.unsupported_heads(qkv, angle) is None
    assert "up to 16384, got 16385" in str(triton.unsupported_row(jnp.ones((1, 16385))))
    assert "got float8_e4m3fn" in str(triton.unsupported_type(x.astype(jnp.float8_e4m3fn)))


@pytest.mark.parametrize(
    ("rows", "depth", "width", "dtype", "splits"),
    [
        (32, 2048, 2048, "bfloat16", True),
        (32, 6144, 2048, "bfloat16", False),
        (33, 6144, 2048, "bfloat16", True),
        (128, 4096, 4096, "bfloat16", True),
        (128, 12288, 4096, "bfloat16", False),
        (128, 2048, 2048, "float32", False),
        (129, 2048, 2048, "bfloat16", False),
        (4096, 2048, 2048, "bfloat16", False),
    ],
)
def test_kernels_are_chosen_where_they_were_faster(monkeypatch, rows, depth, width, dtype, splits):
    def calls(run, *shapes):
        arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        fresh = functools.partial(run)  # JAX caches what it traced of a function
        return str(jax.make_jaxpr(fresh)(*arrays)).count("pallas_call[")

    def count():
        angle = jnp.ones((rows, 64))
        turn = functools.partial(rotate_qkv, cos=angle, sin=angle, eps=EPS)
        none = {"bias": None, "q_norm": None, "k_norm": None}
        return (
            calls(functools.partial(add_rms_norm, eps=EPS), *[(rows, width)] * 2, (width,)),
            calls(functools.partial(turn, **none), (rows, 2, 4, 128)),
            calls(split_matmul, (rows, depth), (depth, width)),
        )

    assert count() == (0, 0, 0)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert count() == (dtype == "bfloat16", dtype == "bfloat16", splits)


@pytest.mark.parametrize(
    ("rows", "width", "sides"),  # us of half a layer in benchmarks/results/layer_h200.json
    [
        (32, 2048, (32, 64, 128, 4, 4, 3)),  # 21.7
        (128, 2048, (128, 64, 64, 4, 8, 4)),  # 28.0 and 37.6
        (128, 4096, (128, 64, 64, 4, 4, 4)),  # 47.2
        (64, 2048, (64, 64, 64, 4, 4, 4)),  # not timed
    ],
)
def test_tilings_are_those_that_were_measured(rows, width, sides):
    names = ("rows", "columns", "depth", "splits", "num_warps", "num_stages")
    got = api.choose_tiling(jnp.ones((1, rows, 16)), jnp.ones((16, width)))
    assert got == Tiling(**dict(zip(names, sides, strict=True)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [32, 77, 128])
def test_kernels_match_numpy_on_a_gpu(rows):
    x, y, scale = draw(0, (rows, 2048), (rows, 2048), (2048,), dtype="bfloat16")
    (parts,) = draw(1, (4, rows, 2048))
    for other in (y, parts):
        got = add_rms_norm(*map(jnp.asarray, (x, other, scale)), EPS, implementation="triton")
        close(got, oracle.add_rms_norm(x, other, scale, EPS), "bfloat16")
    qkv, q_norm, k_norm = draw(2, (rows, 8, 4, 128), (128,), (128,), dtype="bfloat16")
    (angle,) = draw(3, (rows, 64))
    arguments = (qkv, None, q_norm, k_norm, np.cos(angle), np.sin(angle))
    run = functools.partial(rotate_qkv, eps=EPS, implementation="triton")
    got = run(*jax.tree.map(jnp.asarray, arguments))
    close(got, oracle.rotate_qkv(*arguments, EPS), "bfloat16")
    x, w = draw(4, (rows, 6144), (6144, 2048), dtype="bfloat16")
    got = split_matmul(jnp.asarray(x), jnp.asarray(w), implementation="triton")
    want = np.float32(x) @ np.float32(w)
    assert np.abs(np.asarray(got.sum(axis=0)) - want).max() < 1e-2  # of values up to 400


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.gpu
@pytest.mark.parametrize("ops", [KERNELS, LayerOps()], ids=["Triton's", "chosen"])
@pytest.mark.parametrize("rows", [32, 128])
def test_a_trunk_of_kernels_is_the_trunk_on_a_gpu(rows, ops):
    cfg = dataclasses.replace(
        CFG,
        hidden_size=2048,
        num_layers=4,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=6144,
        vocab_size=4096,
    )
    params = dense.init_params(jax.random.key(0), cfg)
    ids = jax.random.randint(jax.random.key(1), (1, rows), 0, cfg.vocab_size)
    positions = jnp.arange(rows, dtype=jnp.int32)[None]
    visible = jnp.ones((1, rows, rows), bool)

    @functools.partial(jax.jit, static_argnames=("ops", "dtype"))
    def logits(params, ops, dtype):
        from dllm_jax.models.reference import attention

        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        x = dense.embed(params, cfg, ids)
        hidden, _ = dense.trunk(
            params, cfg, x, positions, lambda _, q, k, v: attention(q, k, v, visible), ops=ops
        )
        return dense.unembed(params, cfg, hidden)

    with jax.default_matmul_precision("highest"):
        truth = np.asarray(logits(params, dense.PLAIN, "float32"))
    kernels, plain = (
        np.abs(np.asarray(logits(params, ops, "bfloat16")) - truth) for ops in (ops, dense.PLAIN)
    )
    assert np.abs(truth).max() > 1
    assert kernels.max() < 1.5 * plain.max() < 0.1 * np.abs(truth).max()
    assert kernels.mean() < 1.2 * plain.mean()
