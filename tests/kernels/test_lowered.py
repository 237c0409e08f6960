"""Mosaic kernels are lowered once a process, and programs hold the text that they held before.

The next process reads the text. No operand is a slice read in place.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dllm_jax.kernels import lowered
from dllm_jax.kernels.layer import mosaic_norm
from tests.cross_lowering import H200

ROWS = jax.ShapeDtypeStruct((32, 512), jnp.bfloat16)
SCALE = jax.ShapeDtypeStruct((512,), jnp.bfloat16)


@pytest.fixture
def no_folder():
    """Nothing is kept from one run of the tests to the next."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def bodies(monkeypatch, no_folder):
    """Arguments of each kernel that is traced, on what passes for a GPU."""
    if jax.__version_info__ < (0, 11, 2):
        pytest.skip("Mosaic kernels need jax 0.11.2")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    seen, body = [], mosaic_norm._add_rms_norm

    def noted(*refs, eps, **how):
        seen.append(eps)
        return body(*refs, eps=eps, **how)

    monkeypatch.setattr(mosaic_norm, "_add_rms_norm", noted)
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
        return mosaic_norm.add_rms_norm(x, y, scale, eps)

    texts = [text_of(lambda *rows: norm(*rows)) for _ in range(2)]
    assert bodies == [eps]
    assert texts[0] == texts[1]
    assert texts[0].count("@mosaic_gpu_v2") == 1  # layers share it too
    other = text_of(lambda x, y, scale: mosaic_norm.add_rms_norm(x, y, scale, 2 * eps))
    assert bodies == [eps, 2 * eps]
    assert other != texts[0]


def test_no_operand_is_a_slice_that_xla_reads_in_place(bodies):
    """It may begin anywhere, and Mosaic then refuses the launch; see `hopper.kernel`."""
    text = text_of(lambda x, y, scale: mosaic_norm.add_rms_norm(x, y, scale, 4e-6))
    barriers = set(re.findall(r"(%\w+):\d+ = stablehlo.optimization_barrier", text))
    (operands,) = re.findall(r"@mosaic_gpu_v2\((.*?)\)", text)
    assert {name.split("#")[0] for name in operands.split(", ")} <= barriers
    folder = Path(lowered.__file__).parent
    bare = [path for path in folder.rglob("*.py") if "plgpu.kernel(" in path.read_text()]
    # References can have no barrier; `kv_write` has one for what it reads.
    assert {path.relative_to(folder).as_posix() for path in bare} == {
        "hopper/__init__.py",
        "kv_write/mosaic.py",
    }


def test_one_after_another_under_vmap(bodies):
    def norm(x, y, scale):
        return mosaic_norm.add_rms_norm(x, y, scale, 5e-6)

    many = jax.ShapeDtypeStruct((4, *ROWS.shape), ROWS.dtype)
    with jax.sharding.use_abstract_mesh(H200):
        out = jax.eval_shape(jax.vmap(norm, (0, 0, None)), many, many, SCALE)
    assert [x.shape for x in out] == [many.shape] * 2


@pytest.fixture
def folder(no_folder, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    return tmp_path / "kernels"


def test_the_next_process_reads_the_text(bodies, folder, monkeypatch):
    names = ("eps", "is_quantized", "interpret")

    def text():  # of a process that has kept nothing
        norm = lowered.lowered_once(static_argnames=names)(mosaic_norm.add_rms_norm.__wrapped__)
        return text_of(functools.partial(norm, eps=7e-6))

    def damage():
        (place,) = folder.iterdir()
        kept = place.read_bytes()
        place.write_bytes(kept[:-100] + kept[-99:])

    written, write = [], lowered._write
    monkeypatch.setattr(lowered, "_write", lambda *a: written.append(a) or write(*a))
    texts = []
    for before, so_far in (
        (lambda: None, 1),
        (lambda: None, 1),
        (damage, 2),
        (lambda: None, 2),
        (lambda: monkeypatch.setattr(lowered, "_version", lambda: "another"), 3),
    ):
        before()
        texts.append(text())
        assert len(written) == so_far
    # What is lowered again has other places of origin in it.
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert len([*folder.iterdir()]) == 2
