"""The operations of a layer besides its attention, against NumPy float64.

XLA's forms on random data of odd sizes; roundings and untouched values bit for bit; a trunk of
kernels is the trunk of XLA. Kernels have tests of their own.
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
    mosaic,
    mosaic_few,
    mosaic_norm,
    rotate_qkv,
    split_matmul,
)
from dllm_jax.models import dense
from dllm_jax.models.dense import DenseConfig
from tests.cross_lowering import needs_mosaic
from tests.oracles import layer as oracle

pytestmark = pytest.mark.long

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}  # of a value plus one
EPS = 1e-5
ALL_MOSAIC = LayerOps(
    add_rms_norm="mosaic",
    qkv_matmul="mosaic",
    rotate_qkv="xla",
    split_matmul="mosaic",
    gated_matmul="mosaic",
)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


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
def test_add_rms_norm_matches_numpy(dtype, parts):
    x, y, scale = draw(0, (2, 5, 52), (2, 5, 52), (52,), dtype=dtype)
    if parts:
        (y,) = draw(1, (parts, 2, 5, 52))
    got = add_rms_norm(*map(jnp.asarray, (x, y, scale)), EPS, implementation="xla")
    close(got, oracle.add_rms_norm(x, y, scale, EPS), dtype)


@pytest.mark.parametrize("types", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_add_rms_norm_gives_the_type_of_x(types):
    """Of a sum that was rounded once, whatever the type of the rows that are added."""
    (x, scale), (y,) = draw(0, (5, 52), (52,), dtype=types[0]), draw(1, (5, 52), dtype=types[1])
    got = add_rms_norm(*map(jnp.asarray, (x, y, scale)), EPS, implementation="xla")
    close(got, oracle.add_rms_norm(x, y, scale, EPS), types[0])
    assert np.array_equal(got[0], (np.float32(x) + np.float32(y)).astype(x.dtype))


def test_no_rows_give_no_rows(monkeypatch):
    """On a GPU too, where kernels have nothing to launch."""
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


@pytest.mark.parametrize(
    ("dtype", "rotary", "normed", "biased"),
    [
        ("bfloat16", 16, True, False),
        ("float32", 8, False, True),
        slow("bfloat16", 8, True, True),
        slow("float32", 16, False, False),
    ],
)
def test_rotate_qkv_matches_numpy(dtype, rotary, normed, biased):
    qkv, bias, *norms = draw(2, (2, 5, 3, 5, 16), (3, 5, 16), (16,), (16,), dtype=dtype)
    (angle,) = draw(3, (2, 5, rotary // 2))
    more = [bias if biased else None, *(norms if normed else (None, None))]
    arguments = (qkv, *more, np.cos(3 * angle), np.sin(3 * angle))
    run = jax.jit(functools.partial(rotate_qkv, eps=EPS, implementation="xla"))
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
def test_rotate_qkv_rounds_the_sum_of_parts_first(dtype, biased):
    """To the type that is asked for, or to that of the parts."""
    (parts,) = draw(2, (2, 2, 5, 3, 5, 16))
    bias, *norms = draw(3, (3, 5, 16), (16,), (16,), dtype="bfloat16")
    (angle,) = draw(4, (2, 5, 8))
    cos, sin = np.cos(3 * angle), np.sin(3 * angle)
    arguments = (bias if biased else None, *norms, cos, sin)
    given = jax.tree.map(jnp.asarray, (parts, *arguments))
    got = rotate_qkv(*given, EPS, dtype=dtype, implementation="xla")
    summed = parts.sum(axis=0).astype(jnp.dtype(dtype or "float32"))
    close(got, oracle.rotate_qkv(summed, *arguments, EPS), dtype or "float32")
    values = summed[..., -1, :]
    if biased:  # of values nothing but the roundings is left to see
        values = (np.float32(values) + np.float32(bias[:, -1])).astype(values.dtype)
        unrounded = (parts.sum(axis=0)[..., -1, :] + np.float32(bias[:, -1])).astype(values.dtype)
        assert dtype is None or not np.array_equal(values, unrounded)
    assert np.array_equal(got[2], values)


def test_rotate_qkv_gives_the_type_that_is_asked_for():
    """Of rows in another one too."""
    (qkv,), (angle,) = draw(2, (5, 2, 4, 16)), draw(3, (5, 8))
    cos, sin = np.cos(angle), np.sin(angle)
    arguments = (None, None, None, cos, sin)
    given = jax.tree.map(jnp.asarray, (qkv, *arguments))
    got = rotate_qkv(*given, EPS, dtype="bfloat16", implementation="xla")
    close(got, oracle.rotate_qkv(qkv.astype(jnp.bfloat16), *arguments, EPS), "bfloat16")


def test_split_matmul_matches_numpy():
    x, w = draw(4, (3, 7, 128), (128, 32), dtype="bfloat16")
    got = split_matmul(jnp.asarray(x), jnp.asarray(w), implementation="xla")
    want = np.float64(x) @ np.float64(w)
    close([got], [want], "bfloat16")


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


@functools.cache
def weights(cfg):
    drawn = dense.random_params(jax.random.key(1), dense.param_shapes(cfg, "bfloat16"))
    return jax.tree.map(lambda leaf: leaf * (1 if leaf.ndim < 2 else 5), drawn)


@pytest.mark.slow
@needs_mosaic
def test_trunk_of_mosaic_kernels_is_the_trunk(monkeypatch):
    """Queries, keys and values in parts too, and those of the last product."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    ran = []
    for module, name in (
        (mosaic_norm, "add_rms_norm"),
        (mosaic_few, "split_matmul"),
        (mosaic_few, "gated_matmul"),
    ):

        def run(call, *args, **how):
            ran.append((call.__name__, how["tiling"].splits if "tiling" in how else None))
            return call(*args, **how, interpret=plgpu.InterpretGPUParams())

        monkeypatch.setattr(module, name, functools.partial(run, getattr(module, name)))
    monkeypatch.setattr(mosaic, "unsupported", lambda x: None)
    cfg = dataclasses.replace(CFG, hidden_size=512, ffn_size=256)
    same_trunk(cfg, 4, ALL_MOSAIC)
    of_a_layer = {
        ("split_matmul", 4),
        ("split_matmul", 1),
        ("gated_matmul", 1),
        ("split_matmul", 2),
    }
    assert set(ran) == {*of_a_layer, ("add_rms_norm", None)}


def same_trunk(cfg, rows, ops):
    """A trunk of such operations gives what one in plain XLA does, on twice this many rows."""
    (x,) = draw(8, (2, rows, cfg.hidden_size), dtype="bfloat16")
    positions = jnp.arange(2 * rows, dtype=jnp.int32).reshape(2, rows)

    def attend(layer, q, k, v):
        return q * (1 + layer) + jnp.repeat(k - v, cfg.num_heads // cfg.num_kv_heads, axis=2)

    @functools.partial(jax.jit, static_argnames="ops")
    def run(params, ops):
        return dense.trunk(params, cfg, jnp.asarray(x), positions, attend, (2, 0), ops=ops)

    got, want = (jax.tree.leaves(run(weights(cfg), ops)) for ops in (ops, dense.PLAIN))
    assert np.array_equal(got[2], x)
    for a, b in zip(got, want, strict=True):
        a, b = np.float64(a), np.float64(b)
        assert np.abs(a - b).max() < 0.04 * np.abs(b).max()
        assert np.abs(a - b).mean() < 0.01 * np.abs(b).mean()
    assert np.abs(np.float64(got[1]) - np.float64(x)).mean() > 1  # the layers did something


def test_operations_refuse_what_they_cannot_do():
    x, w = jnp.ones((3, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
    qkv, angle = jnp.ones((3, 2, 3, 16)), jnp.ones((3, 8))
    calls = {
        "add_rms_norm": lambda **how: add_rms_norm(x, x, x[0], EPS, **how),
        "split_matmul": lambda **how: split_matmul(x, w, **how),
        "rotate_qkv": lambda **how: rotate_qkv(qkv, None, None, None, angle, angle, EPS, **how),
    }
    for call in calls.values():
        call()  # the faster one, which here can be one only
        with pytest.raises(NotImplementedError, match='"mosaic": needs an NVIDIA GPU'):
            call(implementation="mosaic")
        with pytest.raises(ValueError, match="implementation='cudnn' is not one of"):
            call(implementation="cudnn")
    for given in ("q_norm", "k_norm"):
        norms = {"q_norm": None, "k_norm": None} | {given: jnp.ones(16)}
        with pytest.raises(ValueError, match=f"{given} without ._norm; give both or neither"):
            rotate_qkv(qkv, None, **norms, cos=angle, sin=angle, eps=EPS)


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [32, 128])
def test_a_trunk_of_kernels_is_the_trunk_on_a_gpu(rows):
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
        np.abs(np.asarray(logits(params, ops, "bfloat16")) - truth)
        for ops in (LayerOps(), dense.PLAIN)
    )
    assert np.abs(truth).max() > 1
    assert kernels.max() < 1.5 * plain.max() < 0.1 * np.abs(truth).max()
    assert kernels.mean() < 1.2 * plain.mean()
