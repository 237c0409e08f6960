"""Mosaic kernels are lowered once a process, and programs hold the text that they held before."""

import jax
import jax.numpy as jnp
import pytest

from dllm_jax.kernels.layer import mosaic
from tests.cross_lowering import H200

ROWS = jax.ShapeDtypeStruct((32, 512), jnp.bfloat16)
SCALE = jax.ShapeDtypeStruct((512,), jnp.bfloat16)


@pytest.fixture
def bodies(monkeypatch):
    """Arguments of each kernel that is traced, on what passes for a GPU."""
    if jax.__version_info__ < (0, 11, 2):
        pytest.skip("Mosaic kernels need jax 0.11.2")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    seen, body = [], mosaic._add_rms_norm

    def noted(*refs, eps):
        seen.append(eps)
        return body(*refs, eps=eps)

    monkeypatch.setattr(mosaic, "_add_rms_norm", noted)
    return seen


def text_of(norm, *more):
    def program(x, y, scale):
        for _ in range(3):
            x, y = norm(x, y, scale)
        return x, y

    with jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(program).trace(ROWS, ROWS, SCALE)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_programs_share_the_text_of_a_kernel(bodies):
    eps = 3e-6  # of no other test

    def norm(x, y, scale):
        return mosaic.add_rms_norm(x, y, scale, eps)

    texts = [text_of(lambda *rows: norm(*rows)) for _ in range(2)]
    assert bodies == [eps]
    assert texts[0] == texts[1]
    assert texts[0].count("@mosaic_gpu_v2") == 1  # layers share it too
    other = text_of(lambda x, y, scale: mosaic.add_rms_norm(x, y, scale, 2 * eps))
    assert bodies == [eps, 2 * eps] and other != texts[0]


def test_one_after_another_under_vmap(bodies):
    def norm(x, y, scale):
        return mosaic.add_rms_norm(x, y, scale, 5e-6)

    many = jax.ShapeDtypeStruct((4, *ROWS.shape), ROWS.dtype)
    with jax.sharding.use_abstract_mesh(H200):
        out = jax.eval_shape(jax.vmap(norm, (0, 0, None)), many, many, SCALE)
    assert [x.shape for x in out] == [many.shape] * 2
