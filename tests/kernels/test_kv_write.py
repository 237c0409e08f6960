"""The write of new keys and values into pages: every back end puts each row where it belongs.

Rows without a page are dropped, nothing else is touched, in any number of arrays and launches; the
kernel takes every array of pages as its own result.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.kernels.kv_write import mosaic, reference, triton, write_rows
from tests.cross_lowering import H200, triton_grids
from tests.kernels.test_layer_mosaic import interpreted, lowered
from tests.oracles import layer as oracle

RUN = {
    "xla": jax.jit(reference.write_rows),
    "triton": jax.jit(functools.partial(triton.write_rows, interpret=True)),
}
PAGE = np.asarray([0, 3, 11, 12, 5, 5, 6, 1, 10, 14], np.int32)  # of 11: four rows go nowhere
OFFSET = np.asarray([0, 3, 1, 2, 5, 6, 3, 7, 1, 1], np.int32)


def case(arrays, dtype, rows_dtype, heads=3, size=16):
    rng = np.random.default_rng(arrays)
    pages = [
        rng.standard_normal((11, heads, 8, size)).astype(jnp.dtype(dtype)) for _ in range(arrays)
    ]
    rows = [rng.standard_normal((2, 5, heads, size)).astype(jnp.dtype(rows_dtype)) for _ in pages]
    return pages, rows


@pytest.mark.parametrize(
    ("arrays", "dtype", "rows_dtype"),
    [
        (2, "bfloat16", "float32"),
        (10, "float32", "float32"),
        (2, "float8_e4m3fn", "float8_e4m3fn"),
    ],
)
@pytest.mark.parametrize("name", RUN)
def test_rows_go_where_they_belong(name, arrays, dtype, rows_dtype):
    pages, rows = case(arrays, dtype, rows_dtype)
    got = RUN[name](tuple(map(jnp.asarray, pages)), tuple(map(jnp.asarray, rows)), PAGE, OFFSET)
    want = oracle.write_rows(pages, rows, PAGE, OFFSET)
    assert len(got) == arrays
    for a, b, before in zip(got, want, pages, strict=True):
        assert np.array_equal(a, b)
        changed = (np.asarray(a) != before).mean()
        assert changed == 7 / 88 or (dtype == "float8_e4m3fn" and 0.9 < changed * 88 / 7 < 1)


needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="the Mosaic form needs jax 0.11.2"
)


@needs_mosaic
def test_the_mosaic_form_writes_the_same_without_a_race(monkeypatch):
    """Four arrays of two programs each, in two launches."""
    monkeypatch.setattr(mosaic, "_OPERANDS", 6)
    monkeypatch.setattr(mosaic, "_LOADS", 6)
    pages, rows = case(4, "bfloat16", "float32", size=128)

    def run(*given, interpret):
        write = functools.partial(mosaic.write_rows.__wrapped__, interpret=interpret)
        return write(given[:4], given[4:8], *given[8:])

    got = interpreted(run, *pages, *rows, PAGE, OFFSET)
    for a, b in zip(got, oracle.write_rows(pages, rows, PAGE, OFFSET), strict=True):
        assert np.array_equal(a, b)


@needs_mosaic
def test_in_a_loop_pages_are_their_own_results_of_one_mosaic_kernel(on_hopper):
    shape, layers = jax.ShapeDtypeStruct, 4
    pages = (shape((37, 4, 64, 128), jnp.bfloat16),) * (2 * layers)
    rows = (shape((1, 32, 4, 128), jnp.bfloat16),) * (2 * layers)
    slots = (shape((32,), jnp.int32),) * 2

    def loop(pages, *more):
        write = functools.partial(write_rows, implementation="mosaic")
        return jax.lax.fori_loop(0, 3, lambda _, pages: write(pages, *more), pages)

    assert lowered(loop, pages, rows, *slots) == (1, 0)
    with jax.sharding.use_abstract_mesh(H200):
        text = jax.jit(loop).trace(pages, rows, *slots).lower(lowering_platforms=("cuda",))
    assert text.as_text().count("output_operand_alias<") == 2 * layers


def test_many_arrays_take_more_than_one_launch(monkeypatch):
    monkeypatch.setattr(triton, "_OPERANDS", 9)
    pages, rows = case(8, "float32", "float32")
    run = jax.jit(functools.partial(triton.write_rows.__wrapped__, interpret=True))
    program = run.trace(tuple(pages), tuple(rows), PAGE, OFFSET)
    assert str(program.jaxpr).count("pallas_call[") == 3
    want = oracle.write_rows(pages, rows, PAGE, OFFSET)
    for a, b in zip(run(tuple(pages), tuple(rows), PAGE, OFFSET), want, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("layers", [28, pytest.param(80, marks=pytest.mark.slow)])
def test_pages_are_their_own_results_on_a_gpu(layers):
    shape = jax.ShapeDtypeStruct
    pages = (shape((37, 8, 64, 128), jnp.bfloat16),) * (2 * layers)
    rows = (shape((4, 32, 8, 128), jnp.bfloat16),) * (2 * layers)
    slots = (shape((128,), jnp.int32),) * 2
    with jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(triton.write_rows).trace(pages, rows, *slots)
        lowered = traced.lower(lowering_platforms=("cuda",))
    grids = triton_grids(lowered.compiler_ir("stablehlo").operation)
    assert grids == [(16, 8, -(-2 * layers // 8))] if layers < 67 else len(grids) == 2
    assert lowered.as_text().count("output_operand_alias<") == 2 * layers


def test_write_rows_refuses_what_it_cannot_do(monkeypatch):
    pages, rows = (tuple(map(jnp.asarray, x)) for x in case(2, "float32", "float32"))
    arguments = (pages, rows, jnp.asarray(PAGE), jnp.asarray(OFFSET))
    with pytest.raises(NotImplementedError, match='"triton": needs an NVIDIA GPU; use "xla"'):
        write_rows(*arguments, implementation="triton")
    with pytest.raises(ValueError, match="implementation='cudnn' is not one of"):
        write_rows(*arguments, implementation="cudnn")  # pyright: ignore[reportArgumentType]
    why = triton.unsupported_arguments
    assert why(pages, PAGE) is None
    assert "pages of one shape" in str(why((pages[0], pages[1][:4]), PAGE))
    none = jnp.zeros((0,), jnp.int32)
    given = (pages, tuple(mine[:0, 0] for mine in rows), none, none)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert all(map(np.array_equal, write_rows(*given), pages))
    with pytest.raises(NotImplementedError, match='"triton": needs at least one row'):
        write_rows(*given, implementation="triton")
    assert "got 24" in str(why((jnp.ones((2, 1, 8, 24)),), PAGE))
    large = functools.partial(jax.ShapeDtypeStruct, (2**22 + 1, 4, 1, 128))  # more than 2**31
    assert "2 to 4 GiB" in str(why((large(jnp.float8_e4m3fn),), PAGE))
    assert why((large(jnp.bfloat16),), PAGE) is None
    if jax.__version_info__ >= (0, 11, 2):
        why = mosaic.unsupported_arguments
        assert "multiple of 128, got 16" in str(why(pages, PAGE))
        assert why((jnp.ones((2, 1, 8, 256)),) * 2, PAGE) is None


def test_the_kernel_is_chosen_for_16_bits_on_a_gpu(monkeypatch):
    def kernels(dtype, size=16):
        pages, rows = case(2, dtype, dtype, size=size)
        fresh = functools.partial(write_rows)  # JAX caches what it traced of a function
        return str(jax.make_jaxpr(fresh)(pages, rows, PAGE, OFFSET)).count("pallas_call[")

    assert kernels("bfloat16") == 0
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [kernels("bfloat16"), kernels("float32"), kernels("bfloat16", size=24)] == [1, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("arrays", [2, 56])
def test_rows_go_where_they_belong_on_a_gpu(arrays):
    pages, rows = case(arrays, "bfloat16", "bfloat16", heads=8, size=128)
    run = jax.jit(functools.partial(write_rows, implementation="triton"), donate_argnames="pages")
    given = tuple(map(jnp.asarray, pages))
    got = run(pages=given, rows=tuple(map(jnp.asarray, rows)), page=PAGE, offset=OFFSET)
    assert all(leaf.is_deleted() for leaf in given)
    for a, b in zip(got, oracle.write_rows(pages, rows, PAGE, OFFSET), strict=True):
        assert np.array_equal(a, b)


def test_layers_of_several_shapes_are_written_each_to_its_own():
    """Two kinds of layers in turns, as sliding and global ones have: places are the same."""
    (wide, wide_rows), (narrow, narrow_rows) = (
        case(4, "float32", "float32", heads, size) for heads, size in ((3, 16), (1, 32))
    )
    pages = [leaf for pair in zip(wide, narrow, strict=True) for leaf in pair]
    rows = [leaf for pair in zip(wide_rows, narrow_rows, strict=True) for leaf in pair]
    got = write_rows(tuple(map(jnp.asarray, pages)), tuple(map(jnp.asarray, rows)), PAGE, OFFSET)
    for a, b in zip(got, oracle.write_rows(pages, rows, PAGE, OFFSET), strict=True):
        np.testing.assert_array_equal(a, b)
