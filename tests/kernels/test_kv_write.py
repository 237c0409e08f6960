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

from dllm_jax.kernels.kv_write import mosaic, reference, write_rows
from tests.cross_lowering import H200, needs_mosaic
from tests.kernels.test_layer_mosaic import interpreted, lowered
from tests.oracles import layer as oracle

RUN = {
    "xla": jax.jit(reference.write_rows, static_argnums=4),
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


@pytest.mark.versions
def test_write_rows_refuses_what_it_cannot_do(monkeypatch):
    pages, rows, _ = case(2, "float32", "float32")
    arguments = (pairs(pages), pairs(rows), jnp.asarray(PAGE), jnp.asarray(OFFSET))
    with pytest.raises(NotImplementedError, match='"mosaic": needs '):
        write_rows(*arguments, implementation="mosaic")
    with pytest.raises(ValueError, match="implementation='cudnn' is not one of"):
        write_rows(*arguments, implementation="cudnn")  # pyright: ignore[reportArgumentType]
    none = jnp.zeros((0,), jnp.int32)
    given = (arguments[0], pairs([mine[:0, 0] for mine in rows]), none, none)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert all(map(np.array_equal, jax.tree.leaves(write_rows(*given)), pages))
    if jax.__version_info__ >= (0, 11, 2):
        alike = (False, False)
        why = functools.partial(mosaic.unsupported_arguments, page=PAGE)
        assert "multiple of 128, got 16" in str(why(pages, token_last=alike))
        wide = (jnp.ones((2, 1, 8, 256)),) * 2
        assert why(wide, token_last=alike) is None
        assert "pages of one shape" in str(why((wide[0], wide[0][:1]), token_last=alike))


@pytest.mark.versions
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", E4M3])
@pytest.mark.parametrize("arrays", [2, 56])
def test_rows_go_where_they_belong_on_a_gpu(arrays, dtype):
    pages, rows, token_last = case(arrays, dtype, dtype, heads=8, size=128)
    run = jax.jit(functools.partial(write_rows, implementation="mosaic"), donate_argnames="pages")
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
