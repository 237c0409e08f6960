"""The Mosaic kernel of the token readout: in the interpreter with races looked for, and lowered.

`test_token_readout.py` holds it to the oracle as every back end; here are its tiles, what blocks
of a cluster share, which rows it is chosen for and what it refuses.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.kernels.layer import fp8
from dllm_jax.kernels.token_readout import (
    SHARE,
    api,
    choose,
    choose_with_classes,
    law_readout,
    mosaic,
    mosaic_launch,
    mosaic_logits,
    reference,
    token_readout,
)
from dllm_jax.kernels.token_readout.head import quantize_head
from dllm_jax.kernels.token_readout.mosaic import Tiling
from dllm_jax.models.head import Head
from dllm_jax.runner import readout
from dllm_jax.runner.reader import Reader
from dllm_jax.strategies.core.protocol import Readout
from dllm_jax.strategies.core.state import Sampling
from tests.kernels.test_layer_mosaic import (
    SHARED_BYTES,
    interpreted,
    lowered,
    real,
    slow,
)
from tests.kernels.test_token_readout import HEADS, PLAIN, check, draw, everything
from tests.oracles import token_readout as oracle

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        jax.__version_info__ < (0, 11, 2), reason="the Mosaic form needs jax 0.11.2"
    ),
]


# Of wider tiles XLA shares the work among threads that the interpreter holds up: it may hang.
@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.parametrize(
    ("rows", "ids", "width", "tiling"),
    [
        # Two tiles of rows, four of ids, the last begins early; a cluster takes all in turn.
        (129, 200, 192, Tiling(ids=64, stages=3, shared="head", blocks=2)),
        # An odd number of tiles of ids: the last of the pair's is all its neighbour's.
        slow(100, 136, 128, Tiling(ids=64, stages=2, shared="rows", blocks=2)),
        slow(300, 136, 192, Tiling(ids=64, stages=2, shared=None, blocks=2)),
        slow(257, 264, 256, Tiling(ids=64, stages=4, shared=None, blocks=1)),
        slow(64, 64, 64, Tiling(ids=64, shared=None)),  # a step in all
        slow(512, 72, 128, Tiling(ids=64, stages=2, shared="head", blocks=2)),
    ],
)
def test_tiles_in_turn_and_shared_are_exact(rows, ids, width, tiling):
    """Products of small whole numbers are exact; their rows differ, and are full of ties."""
    rng = np.random.default_rng(rows)
    x, head = (rng.integers(-1, 2, (n, width)).astype(jnp.bfloat16) for n in (rows, ids))
    odd = np.arange(ids) // mosaic_logits.CHUNK % 2 == 1
    head[odd] = head[
        np.flatnonzero(odd) - mosaic_logits.CHUNK
    ]  # ties of neighbours among a tile's parts
    forbidden = rng.random(ids) < 0.02
    loss = np.where(np.arange(rows) % 9, 3.0, np.inf).astype(np.float32)
    penalty = rng.integers(0, ids, rows).astype(np.int32), loss
    options = PLAIN | {"scale": 0.25, "penalty": penalty}
    got = interpreted(mosaic.read, x, head, forbidden, **options, tiling=tiling)
    want = oracle.token_readout(*map(jnp.asarray, (x, head, forbidden)), **options)
    assert got.token.tolist() == want[1].tolist()
    check(got, want)


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.parametrize(("rows", "is_small"), [(129, False), slow(200, True)])
def test_laws_are_the_references(rows, is_small):
    """Ties, forbidden shares, temperatures a row; products of small whole numbers are exact."""
    rng = np.random.default_rng(rows)
    ids, width = 3 * SHARE, 256 if is_small else 128
    x, head = (rng.integers(-1, 2, (n, width)).astype(jnp.bfloat16) for n in (rows, ids))
    forbidden = rng.random(ids) < 0.02
    forbidden[SHARE : 2 * SHARE] = True  # a share of which nothing is left
    heat = rng.uniform(0.4, 2, rows).astype(np.float32)
    heat[::7] = 0.3  # of which `exp(logit)` may be too large
    options = {"scale": 0.5, "cap": 30.0}
    if is_small:
        x, head = fp8.quantize_rows(jnp.asarray(x)), quantize_head(jnp.asarray(head))

    def law(forbidden, heat, **how):
        return mosaic.read_law(x, head, forbidden, heat, **how, **options, dtype=jnp.bfloat16)

    tiling = Tiling(ids=SHARE, stages=2, shared=None, blocks=1)
    got = interpreted(law, forbidden, heat, tiling=tiling)
    warm = interpreted(law, forbidden, heat, tiling=tiling, is_warm=True)
    is_warm = np.asarray(mosaic.is_warm_row(jnp.asarray(heat), 30.0))
    assert (is_warm == (np.arange(rows) % 7 > 0)).all()
    np.testing.assert_array_equal(*(np.float32(one.weights)[is_warm] for one in (got, warm)))
    given = map(jnp.asarray, (forbidden, heat))
    want = reference.read_law(x, head, *given, **options, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(got.token, want.token)
    for name in ("rest", "spread", "shares"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=2e-5, atol=1e-6)
    close = [np.float32(one.weights) * np.asarray(one.unit)[:, None] for one in (got, want)]
    np.testing.assert_allclose(*close, rtol=2**-7)
    assert (close[0][:, forbidden] == 0).all()


@pytest.mark.slow
def test_laws_of_a_published_head_lower(on_hopper):
    call = functools.partial(law_readout, scale=1.0, cap=30.0, implementation="mosaic")
    V, D = 262_144, 2816
    small = jax.tree.map(
        lambda leaf: real(*leaf.shape, dtype=leaf.dtype), jax.eval_shape(quantize_head, real(V, D))
    )
    for R, head in ((256, real(V, D)), (512, real(V, D)), (512, small)):
        given = real(R, D), head, real(V, dtype=bool), real(R, dtype=jnp.float32)
        assert lowered(call, *given) == (1, 0)


def test_a_tile_is_special_where_it_or_a_row_of_its_warpgroup_is():
    num_ids, ids = 200, 64
    penalised = np.full(256, -1, np.int32)
    for row, which in ((0, 63), (63, 64), (64, 127), (128, 136), (255, 199)):
        penalised[row] = which
    forbidden = np.arange(num_ids) == 70
    tiling = mosaic.Tiling(ids=ids, stages=4, shared="head")
    has_forbidden = mosaic_launch.has_forbidden(forbidden, tiling)
    assert isinstance(has_forbidden, np.ndarray)  # a constant of the program
    assert has_forbidden.tolist() == [0, 1, 0, 1]  # what is past the last id is
    assert mosaic_launch.has_forbidden(jnp.asarray(forbidden), tiling).tolist() == [0, 1, 0, 1]
    assert mosaic_launch._special(has_forbidden, None, num_ids, ids).tolist() == [[0, 1, 0, 1]]
    got = mosaic_launch._special(has_forbidden, jnp.asarray(penalised), num_ids, ids)
    want = np.zeros((4, 4), int)
    want[:, 1] = 1  # holds what is forbidden
    want[:, 3] = 1  # begins early: tokens of its neighbour's
    want[0, 0] = want[2, 2] = 1  # 63; 136 is in the third tile and, as its first, in the fourth
    assert got.tolist() == want.tolist()
    alone = mosaic_launch._special(np.zeros(4, np.int32), jnp.asarray(penalised), 256, ids)
    assert alone.tolist() == [[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.parametrize(
    "model", ["SDAR-1.7B", *(slow(model) for model in HEADS if model != "SDAR-1.7B")]
)
def test_mosaic_lowers_for_published_heads(on_hopper, model):
    V, D = HEADS[model]
    for R in (1, 128, 1024):
        call = functools.partial(token_readout, implementation="mosaic", scale=0.5, cap=30.0)
        given = real(R, D), real(V, D), real(V, dtype=bool)
        assert lowered(call, *given) == (1, 0)


@pytest.mark.parametrize(
    ("rows", "kernels"),
    [(1024, (1, 0)), (1, (1, 0)), slow(4096, (1, 0)), slow(8192, (1, 0)), slow(256, (1, 0))],
)
def test_a_window_is_read_by_the_kernel_for_its_rows(on_hopper, rows, kernels):
    V, D = HEADS["SDAR-1.7B"]

    def read(hidden, weights):
        reader = Reader(Head(weights), lambda ids: ids == 7)
        stats = readout.read_stats(reader, hidden, Readout(sampling=Sampling.greedy(rows)))
        return stats.token, stats.confidence

    assert lowered(read, real(rows, D), real(V, D)) == kernels


@pytest.mark.slow
def test_many_at_once_are_one_kernel_many_times(on_hopper):
    call = functools.partial(mosaic.read, **PLAIN)
    many = jax.vmap(call, in_axes=(0, None, None))
    given = real(3, 128, 2048), real(1024, 2048), real(1024, dtype=bool)
    assert lowered(many, *given) == (1, 0)


def test_mosaic_is_chosen_for_the_rows_it_was_measured_to_win(on_hopper):
    def chosen(rows, dtype="bfloat16", num_top=0, ids=151936, is_8_bit=False):
        head = real(ids, 2048, dtype=dtype)
        head = jax.eval_shape(quantize_head, head) if is_8_bit else head
        return choose(real(rows, 2048, dtype=dtype), head, num_top)

    assert [chosen(R) for R in (1, 100, api.MOSAIC_ROWS)] == ["mosaic"] * 3
    assert [chosen(R, is_8_bit=True) for R in (1, api.MOSAIC_ROWS_8_BIT)] == ["mosaic"] * 2
    assert chosen(api.MOSAIC_ROWS + 1) == chosen(api.MOSAIC_ROWS_8_BIT + 1, is_8_bit=True) == "xla"
    assert [chosen(1024, num_top=n) for n in (mosaic.MAX_TOP, mosaic.MAX_TOP + 1)] == [
        "mosaic",
        "xla",
    ]
    assert chosen(1024, ids=151665) == chosen(1024, dtype="float32") == "xla"

    def with_classes(rows, of_slot, ids=151936):
        return choose_with_classes(real(rows, 2048), real(ids, 2048), 0, of_slot)

    assert [with_classes(*one) for one in ((9, 9), (128, 32), (4096, 64))] == ["mosaic"] * 3
    assert with_classes(128, 8) == with_classes(256, 128, ids=151968) == "xla"


@pytest.mark.parametrize(
    ("model", "rows", "ids", "shared"),
    [  # us with 256 and with 192 ids in benchmarks/results/readout_mosaic_h200.json
        ("SDAR-1.7B", 128, 256, "rows"),  # 170, 165
        ("SDAR-1.7B", 256, 256, "head"),  # 246, 257
        ("SDAR-1.7B", 1024, 256, "head"),  # 904, 911
        ("SDAR-1.7B", 4096, 256, "head"),  # 3,558, 3,550
        ("SDAR-8B", 128, 256, "rows"),  # 326, 309
        ("SDAR-8B", 1024, 256, "head"),  # 1,775, 1,771
        ("LLaDA2-mini", 128, 256, "rows"),  # not timed, as the next: 5 turns, and 7
        ("SDAR-1.7B", 300, 256, "rows"),
        ("SDAR-1.7B", 1, 256, "rows"),
    ],
)
def test_tiles_have_one_width_whatever_the_rows(model, rows, ids, shared):
    tiling = mosaic.choose_tiling(rows, HEADS[model][0])
    assert (tiling.ids, tiling.shared) == (ids, shared)
    bytes_of_a_step = 2 * 64 * (64 * tiling.consumers + ids)
    room = SHARED_BYTES - tiling.stages * bytes_of_a_step
    assert 0 < room < bytes_of_a_step


def test_mosaic_refuses_what_it_cannot_do(monkeypatch):
    hidden, head, forbidden = draw((16, 304, 64))
    with pytest.raises(NotImplementedError, match='"mosaic": needs an NVIDIA GPU of the Hopper'):
        token_readout(hidden, head, forbidden, implementation="mosaic")
    law = real(8, 96, dtype=jnp.float16), real(2 * SHARE, 96)
    assert mosaic.unsupported_law(*law) == "needs rows in bfloat16, got float16"
    small = jax.eval_shape(quantize_head, law[1])
    why = mosaic.unsupported_arguments
    assert "multiple of 128 and" in str(why(law[1], small, 0))
    assert "bfloat16 for a head in 8 bits, got float16" in str(why(law[0], small, 0))
    assert "got float32 and bfloat16" in str(why(hidden.astype("float32"), head, 0))
    assert "got D=40, V=304" in str(why(hidden[:, :40], head[:, :40], 0))
    assert "got D=64, V=301" in str(why(hidden, head[:301], 0))
    assert "192 or more, got D=64, V=184" in str(why(hidden, head[:184], 0))
    assert why(hidden, head, 9) == "names at most 8 likeliest ids, got num_top=9"
    assert why(hidden[:0], head, 0) == "needs at least one row"
    assert why(hidden, head, 0) is None
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    assert str(why(hidden, head, 0)).startswith("needs jax 0.11.2, got ")


@pytest.mark.gpu
@pytest.mark.parametrize("R", [1, 40, 130, 512, 1000])
@pytest.mark.parametrize("options", [{}, {"scale": 0.9, "cap": 8.0, "num_top": 3}])
def test_readout_matches_numpy_on_a_gpu(R, options):
    arguments = draw((R, 5008, 256))
    got = jax.jit(functools.partial(mosaic.read, **PLAIN | options))(*arguments)
    check(got, oracle.token_readout(*arguments, **options), atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("R", [1, 40, 130])
def test_a_head_in_8_bits_is_read_as_what_it_stands_for_on_a_gpu(R):
    lengths = R, 5008, 1024
    hidden, head, forbidden = draw(lengths)
    small, options = quantize_head(head), everything(lengths)
    got = jax.jit(functools.partial(mosaic.read, **options))(hidden, small, forbidden)
    stands_for = small.values.astype(jnp.float32) * small.scales[:, None]
    want = oracle.token_readout(hidden, stands_for, forbidden, **options)
    assert (np.asarray(got.token) == want[1]).mean() > 0.9
    np.testing.assert_allclose(got.confidence, want[2], rtol=1e-2)
    np.testing.assert_allclose(got.entropy, want[3], atol=1e-2)
