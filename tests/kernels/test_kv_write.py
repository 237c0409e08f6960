"""The write of new keys and values into pages: every back end puts each row where it belongs.

Rows without a page are dropped, nothing else is touched, in any number of arrays and launches, of
either layout: values of 8 bits are token-last. The kernel takes every array of pages as its own
result.
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
    "xla": jax.jit(reference.write_rows, static_argnums=4),
    "triton": jax.jit(functools.partial(triton.write_rows, interpret=True), static_argnums=4),
}
PAGE = np.asarray([0, 3, 11, 12, 5, 5, 6, 1, 10, 14], np.int32)  # of 11: four rows go nowhere
OFFSET = np.asarray([0, 3, 1, 2, 5, 6, 3, 7, 1, 1], np.int32)


E4M3 = "float8_e4m3fn"


def case(arrays, dtype, rows_dtype, heads=3, size=16):
    """Pages and rows of keys and values in turns, and which are token-last."""
    rng = np.random.default_rng(arrays)
    token_last = (False, dtype == E4M3) * (arrays // 2)
    shapes = [(11, heads, *((size, 8) if last else (8, size))) for last in token_last]
    pages = [rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]
    rows = [rng.standard_normal((2, 5, heads, size)).astype(jnp.dtype(rows_dtype)) for _ in pages]
    return pages, rows, token_last


def pairs(leaves):
    """Keys and values of each layer, as `write_rows` takes them."""
    return tuple(zip(*[map(jnp.asarray, leaves)] * 2, strict=True))


@pytest.mark.slow("10-float32", unless="pallas_kernels")
@pytest.mark.versions
@pytest.mark.parametrize(
    ("arrays", "dtype", "rows_dtype", "size"),
    [
        (2, "bfloat16", "float32", 16),
        (10, "float32", "float32", 16),
        (10, E4M3, E4M3, 16),
        (2, E4M3, "float32", 8),  # as wide as a page is long
    ],
)
@pytest.mark.parametrize("name", RUN)
def test_rows_go_where_they_belong(name, arrays, dtype, rows_dtype, size):
    pages, rows, token_last = case(arrays, dtype, rows_dtype, size=size)
    given = tuple(map(jnp.asarray, pages)), tuple(map(jnp.asarray, rows))
    got = RUN[name](*given, PAGE, OFFSET, token_last)
    want = oracle.write_rows(pages, rows, PAGE, OFFSET, token_last)
    assert len(got) == arrays
    for a, b, before in zip(got, want, pages, strict=True):
        assert np.array_equal(a, b)
        changed = (np.asarray(a) != before).mean()
        assert changed == 7 / 88 or (dtype == E4M3 and 0.9 < changed * 88 / 7 < 1)
    chosen = write_rows(pairs(pages), pairs(rows), jnp.asarray(PAGE), jnp.asarray(OFFSET))
    for a, b in zip(jax.tree.leaves(chosen), want, strict=True):
        assert np.array_equal(a, b)


needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="the Mosaic form needs jax 0.11.2"
)


@pytest.mark.versions
@needs_mosaic
@pytest.mark.parametrize("dtype", ["bfloat16", E4M3])
def test_the_mosaic_form_writes_the_same_without_a_race(monkeypatch, dtype):
    """Four arrays of two programs each, in two launches."""
    monkeypatch.setattr(mosaic, "_OPERANDS", 6)
    monkeypatch.setattr(mosaic, "_LOADS", 6)
    pages, rows, token_last = case(4, dtype, "float32" if dtype == "bfloat16" else dtype, size=128)

    def run(*given, interpret):
        write = functools.partial(mosaic.write_rows, interpret=interpret)
        return write(given[:4], given[4:8], *given[8:], token_last)

    got = interpreted(run, *pages, *rows, PAGE, OFFSET)
    for a, b in zip(got, oracle.write_rows(pages, rows, PAGE, OFFSET, token_last), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.versions
@needs_mosaic
@pytest.mark.parametrize("size", [128, pytest.param(256, marks=pytest.mark.slow)])
def test_rows_side_by_side_are_written_together_by_mosaic(size):
    """Of 34 rows 16 go to tokens in order, 16 have one among them that goes nowhere, 2 are few."""
    rng = np.random.default_rng(size)
    token_last = (False, True)
    shapes = [(6, 1, 32, size), (6, 1, size, 32)]
    pages = [rng.standard_normal(shape).astype(jnp.dtype(E4M3)) for shape in shapes]
    rows = [rng.standard_normal((34, 1, size)).astype(jnp.dtype(E4M3)) for _ in pages]
    page = np.repeat(np.asarray([3, 5, 1], np.int32), (16, 16, 2))
    offset = np.concatenate([np.arange(16) + 5, np.arange(16) + 16, np.arange(2)]).astype(np.int32)
    page[20] = 6

    def run(*given, interpret):
        write = functools.partial(mosaic.write_rows, interpret=interpret)
        return write(given[:2], given[2:4], *given[4:], token_last)

    got = interpreted(run, *pages, *rows, page, offset)
    for a, b in zip(got, oracle.write_rows(pages, rows, page, offset, token_last), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.versions
@needs_mosaic
def test_in_a_loop_pages_are_their_own_results_of_one_mosaic_kernel(on_hopper):
    shape, layers = jax.ShapeDtypeStruct, 4
    pages = ((shape((37, 4, 64, 128), jnp.bfloat16),) * 2,) * layers
    rows = ((shape((1, 32, 4, 128), jnp.bfloat16),) * 2,) * layers
    slots = (shape((32,), jnp.int32),) * 2

    def loop(pages, *more):
        write = functools.partial(write_rows, implementation="mosaic")
        return jax.lax.fori_loop(0, 3, lambda _, pages: write(pages, *more), pages)

    assert lowered(loop, pages, rows, *slots) == (1, 0)
    with jax.sharding.use_abstract_mesh(H200):
        text = jax.jit(loop).trace(pages, rows, *slots).lower(lowering_platforms=("cuda",))
    assert text.as_text().count("output_operand_alias<") == 2 * layers


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.versions
def test_many_arrays_take_more_than_one_launch(monkeypatch):
    monkeypatch.setattr(triton, "_OPERANDS", 9)
    pages, rows, token_last = case(8, E4M3, E4M3)
    write = functools.partial(triton.write_rows.__wrapped__, interpret=True)
    run = jax.jit(write, static_argnums=4)
    arguments = tuple(pages), tuple(rows), PAGE, OFFSET, token_last
    assert str(run.trace(*arguments).jaxpr).count("pallas_call[") == 3
    want = oracle.write_rows(pages, rows, PAGE, OFFSET, token_last)
    for a, b in zip(run(*arguments), want, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.versions
@pytest.mark.parametrize(
    ("layers", "dtype"),
    [
        (28, "bfloat16"),
        (28, E4M3),
        pytest.param(80, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_pages_are_their_own_results_on_a_gpu(monkeypatch, layers, dtype):
    """One launch writes keys and values, token-last or not."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    shape, values = jax.ShapeDtypeStruct, (128, 64) if dtype == E4M3 else (64, 128)
    pages = (tuple(shape((37, 8, *sizes), dtype) for sizes in ((64, 128), values)),) * layers
    rows = ((shape((4, 32, 8, 128), dtype),) * 2,) * layers
    slots = (shape((128,), jnp.int32),) * 2
    with jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(functools.partial(write_rows)).trace(pages, rows, *slots)
        lowered = traced.lower(lowering_platforms=("cuda",))
    grids = triton_grids(lowered.compiler_ir("stablehlo").operation)
    programs = 128 // (triton._BYTE_ROWS if dtype == E4M3 else triton._ROWS)
    assert grids == [(programs, 8, -(-2 * layers // 8))] if layers < 67 else len(grids) == 2
    assert lowered.as_text().count("output_operand_alias<") == 2 * layers


@pytest.mark.versions
def test_write_rows_refuses_what_it_cannot_do(monkeypatch):
    pages, rows, _ = case(2, "float32", "float32")
    arguments = (pairs(pages), pairs(rows), jnp.asarray(PAGE), jnp.asarray(OFFSET))
    with pytest.raises(NotImplementedError, match='"triton": needs an NVIDIA GPU; use "xla"'):
        write_rows(*arguments, implementation="triton")
    with pytest.raises(ValueError, match="implementation='cudnn' is not one of"):
        write_rows(*arguments, implementation="cudnn")  # pyright: ignore[reportArgumentType]
    alike, turned = (False, False), (False, True)
    why = functools.partial(triton.unsupported_arguments, page=PAGE, token_last=alike)
    assert why(pages) is None
    assert "pages of one shape" in str(why((pages[0], pages[1][:4])))
    assert "pages of one shape" in str(why(pages, token_last=turned))
    assert why((pages[0], pages[1].swapaxes(2, 3)), token_last=turned) is None
    none = jnp.zeros((0,), jnp.int32)
    given = (arguments[0], pairs([mine[:0, 0] for mine in rows]), none, none)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert all(map(np.array_equal, jax.tree.leaves(write_rows(*given)), pages))
    with pytest.raises(NotImplementedError, match='"triton": needs at least one row'):
        write_rows(*given, implementation="triton")
    assert "got 24" in str(why((jnp.ones((2, 1, 8, 24)),), token_last=(False,)))
    large = functools.partial(jax.ShapeDtypeStruct, (2**22 + 1, 4, 1, 128))  # more than 2**31
    assert "2 to 4 GiB" in str(why((large(jnp.float8_e4m3fn),), token_last=(False,)))
    assert why((large(jnp.bfloat16),), token_last=(False,)) is None
    if jax.__version_info__ >= (0, 11, 2):
        why = functools.partial(mosaic.unsupported_arguments, page=PAGE)
        assert "multiple of 128, got 16" in str(why(pages, token_last=alike))
        wide = (jnp.ones((2, 1, 8, 256)),) * 2
        assert why(wide, token_last=alike) is None
        assert "pages of one shape" in str(why((wide[0], wide[0][:1]), token_last=alike))


@pytest.mark.versions
def test_the_kernel_is_chosen_for_16_bits_on_a_gpu(monkeypatch):
    def kernels(dtype, size=16):
        pages, rows, _ = case(2, dtype, dtype, size=size)
        fresh = functools.partial(write_rows)  # JAX caches what it traced of a function
        made = jax.make_jaxpr(fresh)(pairs(pages), pairs(rows), PAGE, OFFSET)
        return str(made).count("pallas_call[")

    assert kernels("bfloat16") == 0
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [kernels("bfloat16"), kernels("float32"), kernels("bfloat16", size=24)] == [1, 0, 0]


@pytest.mark.versions
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", E4M3])
@pytest.mark.parametrize("arrays", [2, 56])
@pytest.mark.parametrize("form", ["triton", "mosaic"])
def test_rows_go_where_they_belong_on_a_gpu(arrays, dtype, form):
    pages, rows, token_last = case(arrays, dtype, dtype, heads=8, size=128)
    run = jax.jit(functools.partial(write_rows, implementation=form), donate_argnames="pages")
    given = pairs(pages)
    got = jax.tree.leaves(run(pages=given, rows=pairs(rows), page=PAGE, offset=OFFSET))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    for a, b in zip(got, oracle.write_rows(pages, rows, PAGE, OFFSET, token_last), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.versions
def test_layers_of_several_shapes_are_written_each_to_its_own():
    """Two kinds of layers in turns, as sliding and global ones have: places are the same."""
    (wide, wide_rows, _), (narrow, narrow_rows, _) = (
        case(4, "float32", "float32", heads, size) for heads, size in ((3, 16), (1, 32))
    )
    pages = [*wide[:2], *narrow[:2], *wide[2:], *narrow[2:]]
    rows = [*wide_rows[:2], *narrow_rows[:2], *wide_rows[2:], *narrow_rows[2:]]
    got = write_rows(pairs(pages), pairs(rows), jnp.asarray(PAGE), jnp.asarray(OFFSET))
    want = oracle.write_rows(pages, rows, PAGE, OFFSET, (False,) * 8)
    for a, b in zip(jax.tree.leaves(got), want, strict=True):
        np.testing.assert_array_equal(a, b)
