"""The Mosaic form of norm and rotation against NumPy, and the rule that chooses it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.kernels.layer import mosaic_rotate, reference, rotate_qkv
from tests.cross_lowering import needs_mosaic
from tests.kernels.test_layer_mosaic import (
    EPS,
    MODELS,
    close,
    interpreted,
    lowered,
    normal,
    real,
    slow,
)
from tests.oracles import layer as oracle

pytestmark = [pytest.mark.long, needs_mosaic]


kernel: Any = mosaic_rotate.rotate_qkv
operation: Any = rotate_qkv


def operands(
    rows, groups, queries, size, *, parts=0, biased=False, normed=True, dtype="bfloat16", pairs=None
) -> Any:
    """Arguments of `rotate_qkv` but the last ones; parts are float32."""
    heads = (groups, queries + 2, size)
    (qkv,) = normal(0, (*([parts] if parts else []), *rows, *heads), dtype="float32")
    bias, *norms = normal(1, heads, (size,), (size,), dtype=dtype)
    (angle,) = normal(2, (*rows, pairs or size // 2), dtype="float32")
    return (
        qkv if parts else qkv.astype(jnp.dtype(dtype)),
        bias if biased else None,
        *(norms if normed else (None, None)),
        np.cos(9 * angle),
        np.sin(9 * angle),
    )


CASES = [
    ((2, 2), 8, 2, 128, {"parts": 2}),
    ((3,), 8, 1, 64, {"biased": True, "normed": False, "dtype": "float16"}),
    ((2,), 4, 1, 128, {"pairs": 32, "parts": 2}),  # half of a head is rotated
    slow((5,), 16, 4, 128, {}),  # two tiles of groups
    slow((3,), 4, 8, 128, {}),
    slow((1,), 8, 7, 128, {"parts": 3, "biased": True}),
    slow((2,), 32, 1, 128, {"normed": False}),
]


@pytest.mark.parametrize(("rows", "groups", "queries", "size", "how"), CASES)
def test_rotate_qkv_matches_numpy(rows, groups, queries, size, how):
    arguments = operands(rows, groups, queries, size, **how)
    dtype = jnp.dtype(how.get("dtype", "bfloat16"))
    run = functools.partial(kernel, eps=EPS, dtype=dtype)
    names = ("qkv", "bias", "q_norm", "k_norm", "cos", "sin")
    given: Any = {
        k: a if a is None else jnp.asarray(a) for k, a in zip(names, arguments, strict=True)
    }
    qkv = given.pop("qkv")
    got = interpreted(lambda x, **how: run(x, **given, **how), qkv)
    summed = arguments[0].sum(axis=0) if how.get("parts") else arguments[0]
    want = oracle.rotate_qkv(summed.astype(dtype), *arguments[1:], eps=EPS)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert a.shape == b.shape
        close(a, b)
    # Each rounding where the reference has it: but for the norm's sum, of another order, the same.
    like = reference.rotate_qkv(qkv, **given, eps=EPS, dtype=dtype)
    assert np.array_equal(got[2], like[2])
    assert min((a == np.asarray(b)).mean() for a, b in zip(got, like, strict=True)) > 0.99


def test_rows_do_not_depend_on_each_other():
    """All others are NaN, and come out as NaN."""
    qkv, *more = operands((4,), 8, 1, 64)
    want = oracle.rotate_qkv(qkv, *more, eps=EPS)
    alone = np.where(np.arange(4)[:, None, None, None] == 2, qkv, np.nan).astype(qkv.dtype)
    more = [a if a is None else jnp.asarray(a) for a in more]
    got = interpreted(lambda x, **how: kernel(x, *more, eps=EPS, **how), alone)
    for a, b in zip(got, want, strict=True):
        close(a[2], b[2])
        assert np.isnan(np.float32(np.delete(a, 2, axis=0))).all()


def shapes(model, rows, parts=0) -> Any:
    """Operands of a published model's layer: a product's rows or its parts."""
    _, _, G, n, H = MODELS[model]
    qkv = real(parts, 1, rows, G, n + 2, H, dtype=jnp.float32) if parts else None
    scale, angle = real(H), real(1, rows, H // 2, dtype=jnp.float32)
    return (qkv or real(1, rows, G, n + 2, H), scale, scale, angle, angle)


def turn(qkv, q_norm, k_norm, cos, sin, **how):
    return operation(qkv, None, q_norm, k_norm, cos, sin, EPS, dtype="bfloat16", **how)


@pytest.mark.parametrize(
    ("model", "rows", "parts"),
    [("SDAR-8B", 128, 0), slow("SDAR-1.7B", 32, 2), slow("LLaDA-8B", 72, 0)],
)
def test_few_rows_lower_to_one_kernel(on_hopper, model, rows, parts):
    assert lowered(turn, *shapes(model, rows, parts)) == (1, 0)


def test_heads_of_other_gpus_are_left_to_xla(monkeypatch, on_hopper):
    found = []
    for module, name in ((mosaic_rotate, "mosaic"), (reference, "xla")):
        run = lambda *_, name=name, **__: found.append(name)  # noqa: E731
        monkeypatch.setattr(module, "rotate_qkv", run)

    def chosen(*how):
        found.clear()
        jax.eval_shape(lambda *arrays: turn(*arrays), *shapes(*how))
        return found[0]

    assert chosen("SDAR-8B", 128) == chosen("SDAR-1.7B", 5, 2) == "mosaic"
    assert chosen("SDAR-8B", 8192) == chosen("Dream-7B", 32) == "mosaic"
    half = real(1, 32, 32, dtype=jnp.float32)  # LLaDA2: a part of each head
    jax.eval_shape(
        lambda *given: turn(*given), real(1, 32, 4, 6, 128), *[real(128)] * 2, half, half
    )
    assert found[1:] == ["mosaic"]
    monkeypatch.setattr(jax, "devices", lambda *_: [object()])  # a GPU of another kind
    assert chosen("SDAR-8B", 128) == "xla"


def test_what_mosaic_cannot_do_is_refused(on_hopper):
    def refused(G, H, R2, dtype=jnp.bfloat16):
        qkv, angle = real(3, G, 4, H, dtype=dtype), real(3, R2, dtype=jnp.float32)

        def run(qkv, angle):
            return operation(qkv, None, None, None, angle, angle, EPS, implementation="mosaic")

        with pytest.raises(NotImplementedError) as error:
            jax.eval_shape(run, qkv, angle)
        return str(error.value)

    assert refused(2, 128, 64).endswith('got 2 of 128, 128 of them rotated; use "xla"')
    assert refused(8, 256, 128).endswith('got 8 of 256, 256 of them rotated; use "xla"')
    assert refused(8, 128, 16).endswith('got 8 of 128, 32 of them rotated; use "xla"')
    assert "needs a 16-bit type, got float32" in refused(8, 128, 64, jnp.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("rows", [1, 32, 77, 128, 1024])
def test_rotate_qkv_matches_numpy_on_a_gpu(rows, parts):
    if getattr(jax.devices()[0], "compute_capability", None) != "9.0":
        pytest.skip("needs a Hopper GPU")
    for queries, biased in ((2, True), (4, False)):
        arguments = operands((rows,), 8, queries, 128, parts=parts, biased=biased)
        summed = arguments[0].sum(axis=0) if parts else arguments[0]
        want = oracle.rotate_qkv(summed.astype(jnp.bfloat16), *arguments[1:], eps=EPS)
        given = jax.tree.map(jnp.asarray, arguments)
        run = functools.partial(operation, eps=EPS, dtype="bfloat16")
        got, like = (run(*given, implementation=name) for name in ("mosaic", "xla"))
        close(got[2], want[2])
        for a, b, same in zip(got, want, like, strict=True):
            close(a, b, tolerance=3e-2)  # 0.024 of "xla": what rotated is left of what was rounded
            close(a, np.float64(same))
            assert (a == same).mean() > 0.99
