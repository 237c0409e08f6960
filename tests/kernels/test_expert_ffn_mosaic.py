"""The Mosaic form of the routed experts: interpreted against NumPy, and lowered for an H200.

The interpreter fills what nobody has written with NaN, and looks for races.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.kernels.expert_ffn import (
    api,
    expert_ffn,
    mosaic,
    mosaic_place,
    mosaic_product,
    mosaic_tiles,
)
from dllm_jax.kernels.expert_ffn.fp8 import Fp8Experts, quantize_experts
from dllm_jax.kernels.expert_ffn.mosaic import Tiling
from dllm_jax.kernels.layer import fp8, reference
from tests.cross_lowering import needs_mosaic, shared_arrays
from tests.kernels.test_layer_mosaic import SHARED_BYTES, interpreted, lowered, real
from tests.oracles import expert_ffn as oracle

pytestmark = needs_mosaic
TOLERANCE = 5e-2  # absolute; results reach 8
D, F = 256, 192  # rows of F are no whole number of threads' pairs
SPREAD = [37, 66, 0, 1, 9]  # rows of each expert: more than a warpgroup has, none, one
SHAPES = {  # E D F k
    "LLaDA2-mini": (256, 2048, 512, 8),
    "LLaDA2-flash": (256, 4096, 1024, 8),
    "SDAR-30B-A3B": (128, 2048, 768, 8),
    "DiffusionGemma": (128, 2816, 704, 8),
}


def case(ids, num_experts, seed=0, F=F):
    """Random rows; those of no expert, and the experts of no row, are not finite."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(jnp.bfloat16)  # noqa: E731
    x, weights = draw(len(ids), D), 0.5 + rng.random(ids.shape, np.float32)
    w_gate_up, w_down = draw(num_experts, D, 2, F) / 16, draw(num_experts, F, D) / 14
    routed = (ids >= 0) & (ids < num_experts)
    x[~routed.any(axis=1)] = np.nan
    weights[~routed] = np.nan
    unused = np.setdiff1d(np.arange(num_experts), ids)
    w_gate_up[unused], w_down[unused] = np.nan, np.inf
    return x, ids, weights, w_gate_up.astype(jnp.bfloat16), w_down.astype(jnp.bfloat16)


def ragged():
    """Ids [70 2] of five experts as in `SPREAD`, shuffled, the rest of none on either side."""
    rng = np.random.default_rng(1)
    ids = np.repeat(np.arange(5), SPREAD)
    ids = np.concatenate([ids, np.resize([-1, 5, -7, 1000], 140 - len(ids))])
    ids = rng.permutation(ids).reshape(70, 2).astype(np.int32)
    ids[3] = -1, 5
    return ids


RAGGED = ragged()


@pytest.fixture(autouse=True)
def no_race(capsys):
    """`interpreted` asks for the races of the last launch only."""
    yield
    assert "RACE" not in capsys.readouterr().out


@pytest.fixture(autouse=True)
def reshaped_operands(monkeypatch):
    """Reshapes the operand of a product, which the interpreter of jax 0.11.2 cannot."""
    from jax._src.pallas.mosaic.interpret import utils
    from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GPUSharedMemory
    from jax._src.state.types import ReshapeTransform

    to_access, content = utils.to_access, GPUSharedMemory.get_buffer_content

    @dataclasses.dataclass(frozen=True)
    class Reshaped(utils.Access):
        form: tuple[int, ...] = ()

    def access(transforms, shape):
        if not transforms or not isinstance(transforms[-1], ReshapeTransform):
            return to_access(transforms, shape)
        found = to_access(transforms[:-1], shape)
        return Reshaped(found.range, found.permutation, transforms[-1].shape)

    def read(self, key, access, *args, **how):
        found, *rest = content(self, key, access, *args, **how)
        return (found.reshape(access.form) if isinstance(access, Reshaped) else found, *rest)

    monkeypatch.setattr(utils, "to_access", access)
    monkeypatch.setattr(GPUSharedMemory, "get_buffer_content", read)


def in_8_bits(arguments):
    """The arguments of the kernel, its matrices in 8 bits."""
    return [*arguments[:3], *map(quantize_experts, map(jnp.asarray, arguments[3:]))]


def run(arguments, **how):
    """The kernel's result in the interpreter."""
    leaves, tree = jax.tree.flatten(arguments)
    call = lambda *leaves, **more: mosaic.expert_ffn(  # noqa: E731
        *jax.tree.unflatten(tree, leaves), **how, **more
    )
    return interpreted(call, *leaves)


def assert_right(arguments, tiling, activation="silu", is_small=False):
    got = run(in_8_bits(arguments) if is_small else arguments, tiling=tiling, activation=activation)
    x, ids, weights, *matrices = arguments
    given = x, ids, weights, *matrices, getattr(oracle, activation)
    want = (oracle.expert_ffn_fp8 if is_small else oracle.expert_ffn)(*given)
    assert got.dtype == x.dtype
    assert np.abs(np.float64(got) - want).max() < TOLERANCE
    assert np.abs(want).max() > 3
    routed = (ids >= 0) & (ids < len(matrices[1]))
    assert not got[~routed.any(axis=1)].any()
    return got


@pytest.mark.slow(unless="pallas_kernels")
def test_ragged_experts_match_numpy_and_a_row_alone_is_the_same():
    """Two warpgroups in the batch and one alone, so that no tile is the same."""
    arguments = case(RAGGED, 5)
    together = assert_right(arguments, Tiling(groups=2, blocks=3))
    mine = int(np.flatnonzero((RAGGED == 1).any(axis=1))[-1])
    row = [leaf[mine : mine + 1] for leaf in arguments[:3]]
    alone = interpreted(
        functools.partial(mosaic.expert_ffn, tiling=Tiling(down=64, blocks=1)), *row, *arguments[3:]
    )
    assert np.array_equal(alone[0], together[mine])


@pytest.mark.slow(unless="pallas_kernels")
def test_experts_in_8_bits_match_numpy_and_a_row_alone_is_the_same():
    arguments = case(RAGGED, 5)
    tiling = Tiling(groups=2, down=256, blocks=3)
    together = assert_right(arguments, tiling, "gelu", is_small=True)
    mine = int(np.flatnonzero((RAGGED == 1).any(axis=1))[-1])
    row = [leaf[mine : mine + 1] for leaf in arguments[:3]]
    alone = run(
        in_8_bits([*row, *arguments[3:]]),
        tiling=Tiling(down=64, blocks=1),
        activation="gelu",
    )
    assert np.array_equal(alone[0], together[mine])


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.parametrize("is_small", [False, True])
def test_one_expert_may_have_every_row(monkeypatch, is_small):
    """The first warpgroup takes 64 rows twice and the other once; rows are loaded by two copies."""
    monkeypatch.setattr(mosaic_tiles, "_MOST_LOADED", 128)
    ids = np.full((150, 1), 1, np.int32)
    assert_right(case(ids, 3), Tiling(groups=2, rows=160, blocks=2), "gelu", is_small)


@pytest.mark.slow(unless="pallas_kernels")
def test_rows_of_no_expert_are_zeros():
    arguments = case(np.full((9, 1), -1, np.int32), 3)
    assert not interpreted(mosaic.expert_ffn, *arguments, tiling=Tiling()).any()


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.parametrize("rows", [20, 40])
def test_rows_are_placed_alike_whoever_counts_the_pairs(monkeypatch, rows):
    """Each row by itself, from the counts of chunks, or by sums of XLA; a dense half in between."""
    monkeypatch.setattr(mosaic_place, "_BETWEEN", 2)
    rng = np.random.default_rng(rows)
    ids = rng.permutation(np.sort(rng.integers(-1, 9, (rows, 3)), axis=0)).astype(np.int32)
    x, other = (rng.standard_normal((rows, D)).astype(jnp.bfloat16) for _ in range(2))
    small, held = (jax.tree.map(np.asarray, fp8.quantize_rows(jnp.asarray(a))) for a in (x, other))
    beside = mosaic_place.Beside(experts=128, count=3, inner=3 * F, rows=rows, tile_rows=64)

    def placed():
        def run(x, ids, values, scales, interpret):
            rest = 128, 64, True, interpret, fp8.Fp8Rows(values, scales), beside
            found, place, tiles = mosaic_place.sorted_rows(x, ids, *rest)
            return found, place, tiles.table, tiles.numbers

        found, place, tiles, count = interpreted(run, x, ids, held.values, held.scales)
        routed = (ids >= 0) & (ids < 128)
        for got, want, first in zip(
            (found.values, found.scales),
            (small.values, small.scales),
            (held.values, held.scales),
            strict=True,
        ):
            assert np.array_equal(got[place[routed]], np.repeat(want[:, None], 3, axis=1)[routed])
            assert np.array_equal(got[:rows], first)
        tiles = tiles[: count[-1] + 3]
        of_dense = tiles[:, 0] >= 128
        assert np.array_equal(np.flatnonzero(of_dense), [0, 3, 6])
        assert np.array_equal(tiles[of_dense, 1], np.arange(3) * beside.apart)
        assert place[routed].min() == 3 * beside.apart
        return place, tiles

    by_themselves = placed()
    monkeypatch.setattr(mosaic_place, "_FEW_CHUNKS", 0)
    monkeypatch.setattr(mosaic_place, "_CHUNK", 8)
    for got, want in zip(by_themselves, placed(), strict=True):
        assert np.array_equal(got, want)


@pytest.mark.long
@pytest.mark.slow("20", unless="pallas_kernels")
@pytest.mark.parametrize(("rows", "groups", "between"), [(20, 1, 24), (70, 2, 1)])
def test_a_dense_half_goes_with_the_experts(monkeypatch, rows, groups, between):
    """The experts' results are the same bits as without it; it is XLA's, whatever rows there are.

    Three times F inner columns: 576, in 8 bits 640 with zeros, in regions of 256.
    """
    monkeypatch.setattr(mosaic_place, "_BETWEEN", between)
    rng = np.random.default_rng(rows)
    ids = rng.integers(-1, 5, (rows, 2)).astype(np.int32)
    given = in_8_bits(case(ids, 5, rows))
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    held = fp8.quantize_rows(draw(rows, D))
    w_gate_up = fp8.quantize_matrix(draw(D, 18, 2, 32) / 16)
    w_down = fp8.quantize_matrix(draw(3 * F, D) / 14, is_filled=True)
    assert w_down.shape == (3 * F, D)
    assert mosaic.unsupported_beside(given[4], (held, w_gate_up, w_down)) is None
    how = {"activation": "gelu", "tiling": Tiling(groups=groups, blocks=3)}
    leaves, tree = jax.tree.flatten([*given, (held, w_gate_up, w_down)])

    def call(*leaves, interpret):
        return mosaic.routed_rows(*jax.tree.unflatten(tree, leaves), **how, interpret=interpret)

    routed, plain = (jax.tree.map(jnp.asarray, one).sums for one in interpreted(call, *leaves))
    alone = run(given, **how)
    assert np.array_equal(np.asarray(routed.astype(jnp.bfloat16)), alone)
    both = fp8.product(held, w_gate_up).rounded(jnp.float32)
    inner = reference.gated(both, "gelu").astype(jnp.bfloat16)
    want = np.asarray(fp8.product(inner, w_down).rounded(jnp.float32))
    assert np.abs(np.asarray(plain) - want).max() < TOLERANCE
    assert np.abs(want).max() > 3


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.parametrize(("rows", "is_small"), [(70, False), (20, True)])
def test_an_expert_that_all_rows_take_goes_with_the_others(rows, is_small):
    """As one of them, whose gate and up lie in turns: the same as an expert of each row."""
    ids = np.random.default_rng(rows).integers(-1, 5, (rows, 2)).astype(np.int32)
    every = np.arange(2 * rows, dtype=np.int32).reshape(rows, 2) % 6
    x, _, weights, w_gate_up, w_down = map(jnp.asarray, case(every, 6, rows, F=256))
    how = {"tiling": Tiling(groups=2, gate_up=256, blocks=3)}
    in_turns = jnp.moveaxis(w_gate_up[5].reshape(D, 2, 8, 32), 1, 2)
    matrices, dense = (w_gate_up, w_down), (in_turns, w_down[5])
    if is_small:
        matrices = [quantize_experts(w) for w in matrices]
        dense = [fp8.quantize_matrix(w) for w in dense]
    leaves, tree = jax.tree.flatten([x, jnp.asarray(ids), weights, *matrices, (None, *dense)])
    assert mosaic.unsupported_beside(matrices[1], (None, *dense)) is None

    def call(*leaves, interpret):
        return mosaic.routed_rows(*jax.tree.unflatten(tree, leaves), **how, interpret=interpret)

    routed, plain = (jax.tree.map(jnp.asarray, one).sums for one in interpreted(call, *leaves))
    given = np.asarray(x), ids, np.asarray(weights), *map(np.asarray, (w_gate_up, w_down))
    theirs = (oracle.expert_ffn_fp8 if is_small else oracle.expert_ffn)(*given, oracle.silu)
    assert np.abs(np.float64(routed) - theirs).max() < TOLERANCE
    if is_small:  # experts have other scales than a matrix
        both = fp8.product(fp8.quantize_rows(x), dense[0]).rounded(jnp.float32)
        inner = reference.gated(both, "silu").astype(jnp.bfloat16)
        want = np.asarray(fp8.product(inner, dense[1]).rounded(jnp.float32))
    else:  # sums of columns in another order, so another rounding
        everyone = np.full((rows, 1), 5, np.int32), np.ones((rows, 1), np.float32)
        want = np.float32(run([np.asarray(x), *everyone, *matrices], **how))
    assert np.abs(np.asarray(plain) - want).max() < TOLERANCE / 2
    assert np.abs(want).max() > 3


def shapes(model, rows, dtype=jnp.bfloat16, is_small=False):
    E, D, F, k = SHAPES[model]
    kinds = functools.partial(real, dtype=dtype)
    matrices = kinds(E, D, 2, F), kinds(E, F, D)
    if is_small:
        matrices = [jax.eval_shape(quantize_experts, w) for w in matrices]
    pairs = real(rows, k, dtype=jnp.int32), real(rows, k, dtype=jnp.float32)
    return (kinds(rows, D), *pairs, *matrices)


@pytest.mark.long
@pytest.mark.slow("True", unless="pallas_kernels")
@pytest.mark.parametrize(("model", "rows"), [("DiffusionGemma", 256), ("LLaDA2-mini", 4)])
@pytest.mark.parametrize("is_small", [False, True])
def test_it_is_chosen_and_lowers_to_few_kernels_for_published_models(
    on_hopper, model, rows, is_small
):
    call = functools.partial(expert_ffn, activation="gelu")
    assert lowered(call, *shapes(model, rows, is_small=is_small)) == (4 + is_small, 0)


@pytest.mark.parametrize("is_small", [False, True])
def test_an_expert_that_all_rows_take_is_chosen_by_shapes(on_hopper, is_small):
    def taken(model, rows, held=None, turn=32):
        x, ids, _, _, w_down = shapes(model, rows, is_small=is_small)
        F, D = w_down.shape[1:]
        dense = real(D, F // turn, 2, turn), real(F, D)
        if is_small:
            dense = [jax.eval_shape(fp8.quantize_matrix, w) for w in dense]
        return api.takes_dense(x, ids, w_down, (held, *dense))

    assert taken("LLaDA2-mini", 32)
    assert taken("LLaDA2-flash", 1024)
    assert not taken("LLaDA2-mini", 1032)
    assert not taken("LLaDA2-mini", 32, turn=128)
    assert is_small or not taken("LLaDA2-mini", 32, real(32, 2048))


def test_it_is_chosen_on_hopper_in_16_bits(monkeypatch, on_hopper):
    def chosen(rows, dtype=jnp.bfloat16, is_small=False):
        x, ids, _, _, w_down = shapes("LLaDA2-mini", rows, dtype, is_small)
        return api.choose(x, ids, w_down)

    assert chosen(1) == chosen(4097) == chosen(5000, is_small=True) == "mosaic"
    assert chosen(32, jnp.float32) == "grouped"
    monkeypatch.setattr(jax, "devices", lambda *_: [object()])  # a GPU of another kind
    assert chosen(32) == "grouped"


def test_chosen_tilings_fit_into_shared_memory_and_divide(monkeypatch, on_hopper):
    launched = []

    def launch(body, *, out_type, scratch_types=(), **_):
        launched.append(shared_arrays(scratch_types)[::-1])
        made = lambda kind: jnp.zeros(kind.shape, kind.dtype)  # noqa: E731
        return lambda *_: jax.tree.map(made, out_type)

    monkeypatch.setattr(mosaic_product.plgpu, "kernel", launch)
    for model, is_small in itertools.product(SHAPES, (False, True)):
        for rows in (1, 32, 128, 256, 1024, 4096):
            launched.clear()
            given = shapes(model, rows, is_small=is_small)
            out = jax.eval_shape(mosaic.expert_ffn.__wrapped__, *given)
            assert (out.shape, out.dtype) == ((rows, SHAPES[model][1]), jnp.bfloat16)
            products = [(size, arrays) for size, arrays in launched if arrays]
            assert len(products) == 2
            for size, (ring, *_) in products:
                assert size <= SHARED_BYTES - 1024  # for barriers
                assert ring.shape[0] >= 3  # steps in flight


def test_no_warpgroup_waits_for_registers_that_do_not_exist():
    """A block begins with equal shares; 112 for each of four stopped an H200."""
    for groups, wanted in mosaic_product._REGISTERS.items():
        each = min(2**16 // (128 * (groups + 1)) // 8 * 8, 255)
        assert groups * wanted + mosaic_product._LOADING_REGISTERS <= (groups + 1) * each


def test_it_refuses_what_it_cannot_do(monkeypatch):
    x, _, _, _, w_down = shapes("LLaDA2-mini", 32)
    assert mosaic.unsupported_arguments(x, w_down) is None
    refused = mosaic.unsupported_arguments
    assert refused(real(0, 2048), w_down) == "needs at least one row"
    kinds = "needs rows and weights of one 16-bit type, or weights of 8 bits, got"
    assert refused(real(4, 2048, dtype="float32"), w_down) == f"{kinds} float32 and bfloat16"
    assert refused(real(4, 2048, dtype="float16"), w_down) == f"{kinds} float16 and bfloat16"
    assert refused(x, real(8, 96, 2048)) == (
        "needs a model width that is a multiple of 128 and an inner one of 64, got D=2048 and F=96"
    )
    small = Fp8Experts(
        real(8, 384, 128, dtype=jnp.float8_e4m3fn), real(8, 384, dtype="float32"), 128
    )
    assert refused(x, small) == (
        "needs a model width that is a multiple of 256 and an inner one of 64, got D=384 and F=128"
    )
    arguments = case(RAGGED, 5)
    with pytest.raises(ValueError, match=r"gate_up=512.* is wider than its matrices, F=192"):
        mosaic.expert_ffn(*arguments, tiling=Tiling(gate_up=512))
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU of the Hopper kind"):
            expert_ffn(*map(jnp.asarray, arguments), implementation="mosaic")
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    assert refused(x, w_down) == "needs jax 0.11.2, got 0.10.2"
