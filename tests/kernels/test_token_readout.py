"""Token readout against NumPy float64, every back end that runs here, and as decoding uses it.

Odd sizes, ties across tiles, forbidden ids and penalties; a row of NaN affects no other row; the
kernel lowers for published heads, and a decode step of 128 rows holds no float32 logits of all of
them, computes the head on every branch and runs the kernels of its layers and of its cache.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.api import generate
from dllm_jax.bench.head import has_head
from dllm_jax.kernels.token_readout import api, law_readout, mosaic, token_readout
from dllm_jax.kernels.token_readout.head import quantize_head
from dllm_jax.models.head import Head
from dllm_jax.runner import readout
from dllm_jax.runner.reader import Reader
from dllm_jax.strategies import MultiBD
from dllm_jax.strategies.core.protocol import Readout
from dllm_jax.strategies.core.state import NO_TOKEN, Sampling
from tests.contract.models import plain
from tests.cross_lowering import H200
from tests.oracles import token_readout as oracle

PLAIN = {"scale": 1.0, "cap": None, "penalty": None, "num_top": 0}
LENGTHS = 35, 301, 48  # rows, ids, width
NEEDS_JAX = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="the Mosaic form needs jax 0.11.2"
)


READ = mosaic.read  # of which a test puts the interpreted one in its place


def by_mosaic(*arguments, **options):
    """Two blocks of threads, each of which computes by one warpgroup."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tiling = mosaic.Tiling(ids=64, consumers=1, stages=2, shared="rows", blocks=2)
    return READ(*arguments, **options, tiling=tiling, interpret=plgpu.InterpretGPUParams())


FORM = {"xla": functools.partial(token_readout, implementation="xla"), "mosaic": by_mosaic}
FORMS = ["xla", pytest.param("mosaic", marks=NEEDS_JAX)]


def fitted(name, lengths):
    """The sizes of a back end: Mosaic takes whole swizzled tiles."""
    R, V, D = lengths
    return lengths if name != "mosaic" else (R, max(64, -(-V // 8) * 8), -(-D // 64) * 64)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def draw(lengths, seed=0):
    """Rows, head and forbidden ids; logits have a spread of 3."""
    R, V, D = lengths
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.standard_normal((R, D)), jnp.bfloat16)
    head = jnp.asarray(rng.standard_normal((V, D)) * 3 * D**-0.5, jnp.bfloat16)
    return hidden, head, jnp.asarray(rng.random(V) < 0.1)


def everything(lengths, seed=0):
    """Options that all matter."""
    R, V, _ = lengths
    rng = np.random.default_rng(seed + 1)
    return {
        "scale": 0.9,
        "cap": 8.0,
        "penalty": (jnp.asarray(rng.integers(0, V, R), jnp.int32), jnp.full((R,), 2.5)),
        "num_top": 3,
    }


def check(got, want, atol=2e-5):
    """Tokens and tops where the reference has no near tie; statistics everywhere."""
    logits, token, sure, entropy, top_ids, top_probs = want
    at = np.take_along_axis(logits, np.asarray(got.token)[:, None], axis=1)[:, 0]
    assert (at >= logits.max(axis=1) - 1e-4).all()
    same = np.asarray(got.token) == token
    assert same.mean() > 0.9
    np.testing.assert_allclose(np.asarray(got.confidence)[same], sure[same], rtol=1e-4, atol=atol)
    np.testing.assert_allclose(got.entropy, entropy, rtol=1e-4, atol=atol)
    np.testing.assert_allclose(got.top_probs, top_probs, rtol=1e-4, atol=atol)
    if top_ids.shape[1]:
        assert (np.asarray(got.top_ids) == top_ids).mean() > 0.9


@pytest.mark.versions
@pytest.mark.parametrize("name", FORMS)
def test_readout_matches_numpy(name):
    lengths, options = fitted(name, LENGTHS), everything(LENGTHS)
    arguments = draw(lengths)
    got = FORM[name](*arguments, **PLAIN | options)
    check(got, oracle.token_readout(*arguments, **options))


@pytest.mark.slow("mosaic", unless="pallas_kernels")
@pytest.mark.versions
@pytest.mark.parametrize("name", FORMS)
def test_a_head_in_8_bits_is_read_as_what_it_stands_for(name):
    hidden, head, forbidden = draw((20, 136, 128))
    small = quantize_head(head)
    stands_for = small.values.astype(jnp.float32) * small.scales[:, None]
    error = np.abs(np.asarray(stands_for) - np.asarray(head, np.float32))
    assert error.max() <= np.abs(np.asarray(head, np.float32)).max() / 16
    options = everything((20, 136, 128))
    want = token_readout(
        hidden.astype(jnp.float32), stands_for, forbidden, **options, implementation="xla"
    )
    got = FORM[name](hidden, small, forbidden, **options)
    assert np.array_equal(got.token, want.token)
    np.testing.assert_allclose(got.confidence, want.confidence, rtol=1e-4)
    np.testing.assert_allclose(got.entropy, want.entropy, rtol=1e-4)


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(1, 17, 16), (16, 64, 64), (130, 500, 80), (5, 333, 4096)])
@pytest.mark.parametrize("options", [{}, {"num_top": 4}, {"cap": 3.0}])
@pytest.mark.parametrize("name", FORMS)
def test_readout_of_odd_sizes_matches_numpy(name, lengths, options):
    lengths = fitted(name, lengths)
    arguments = draw(lengths, seed=lengths[0])
    got = FORM[name](*arguments, **PLAIN | options)
    check(got, oracle.token_readout(*arguments, **options))


@pytest.mark.slow("mosaic", unless="pallas_kernels")
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # the interpreter's
@pytest.mark.parametrize("name", FORMS)
def test_ties_go_to_the_lowest_id_and_rows_without_a_number_stay_alone(name):
    """Products of small whole numbers are exact, and full of ties within and across tiles."""
    (R, V, D), options = fitted(name, LENGTHS), {"num_top": 4}
    rng = np.random.default_rng(3)
    hidden = rng.integers(-1, 2, (R, D)).astype(np.float32)
    head = rng.integers(-1, 2, (V, D)).astype(np.float32)
    head[200:300] = head[100:200]
    forbidden = jnp.asarray(np.isin(np.arange(V), [4, 100, 101, 102]))
    rows = [jnp.asarray(x, jnp.bfloat16) for x in (hidden, head)]
    run = jax.jit(functools.partial(FORM[name], **PLAIN | options))
    got = run(*rows, forbidden)
    want = oracle.token_readout(*rows, forbidden, **options)
    logits, token, _, _, top_ids, _ = want
    assert (np.sum(logits == logits.max(1, keepdims=True), axis=1) > 1).sum() > 5
    assert got.token.tolist() == token.tolist()
    assert got.top_ids.tolist() == top_ids.tolist()
    check(got, want)
    spoilt = rows[0].at[7].set(jnp.nan).at[20, 3].set(jnp.inf)
    after, sound = run(spoilt, rows[1], forbidden), ~np.isin(np.arange(R), [7, 20])
    for a, b in zip(got, after, strict=True):
        assert (np.asarray(a)[sound] == np.asarray(b)[sound]).all()
    assert not np.isfinite(np.asarray(after.confidence)[~sound]).any()
    assert not np.isfinite(run(*rows, jnp.ones((V,), bool)).confidence).any()


def test_readout_refuses_what_it_cannot_do():
    hidden, head, forbidden = draw(LENGTHS)
    with pytest.raises(ValueError, match="implementation='cudnn' is not one of"):
        token_readout(hidden, head, forbidden, implementation="cudnn")  # pyright: ignore[reportArgumentType]
    for wrong in (jnp.ones(1), jnp.ones((len(hidden), 1))):
        with pytest.raises(ValueError, match=r"must be \[R\] and \[R D\]"):
            law_readout(hidden, head, forbidden, wrong)
    with pytest.raises(ValueError, match=r"must be \[R D\], \[V D\] and \[V\]"):
        token_readout(hidden, head[:, :32], forbidden)
    assert token_readout(hidden[:0], head, forbidden).token.shape == (0,)


HEADS = {  # ids, width
    "SDAR-1.7B": (151936, 2048),
    "SDAR-8B": (151936, 4096),
    "LLaDA-8B": (126464, 4096),
    "Dream-7B": (152064, 3584),
    "LLaDA2-mini": (157184, 2048),
    "Llama-3.1-8B": (128256, 4096),
}


# --- as decoding uses it ------------------------------------------------------------------------


@pytest.fixture
def on_a_gpu(on_hopper, monkeypatch):
    """The kernel is chosen here, and is interpreted."""
    monkeypatch.setattr(mosaic, "read", by_mosaic)


# Temperature, top-k and top-p of plain rows and of drawn ones.
HOW = [(np.float32(t), np.int32(0), np.float32(1)) for t in (0.0, 1.3)]


@NEEDS_JAX
@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.parametrize("rows_at_once", [1024, slow(16)])
def test_decoding_reads_the_same_by_kernel_and_by_chunks(request, monkeypatch, rows_at_once):
    R, *_ = lengths = fitted("mosaic", LENGTHS)
    hidden, weights, _ = draw(lengths)
    hidden = hidden.at[5].set(jnp.nan)
    keys = jax.random.split(jax.random.key(2), R)
    penalty = jnp.arange(R, dtype=jnp.int32), jnp.full((R,), 2.0)

    def read(hidden, sampling):
        head = Head(weights, scale=0.9, cap=8.0)
        reader = Reader(head, lambda ids: (ids == 2) | (ids > 290))
        ask = Readout(sampling=sampling, keys=keys, penalty=penalty, num_top=3)
        return readout.read_stats(reader, hidden, ask)

    def all_cases(num_slots):
        run = jax.jit(lambda *given: read(*given))
        for values in (*HOW, (np.float32(1.3), np.int32(4), np.float32(1))):
            yield run(hidden, Sampling(*(jnp.full((num_slots,), value) for value in values)))

    want = list(all_cases(R))
    request.getfixturevalue("on_a_gpu")
    monkeypatch.setattr(readout, "most_rows", lambda _: rows_at_once)
    for got, reported in zip(all_cases(1), want, strict=True):  # all rows are one slot's
        assert (reported.token[5], got.token[5], got.confidence[5]) == (NO_TOKEN, NO_TOKEN, 1.0)
        assert got.token.tolist() == reported.token.tolist()
        assert np.delete(got.top_ids, 5, 0).tolist() == np.delete(reported.top_ids, 5, 0).tolist()
        for name in ("confidence", "entropy"):
            np.testing.assert_allclose(getattr(got, name), getattr(reported, name), atol=2e-6)
    assert "mpmd_map" in str(jax.make_jaxpr(read)(hidden, Sampling.greedy(R)))
    # Neighbours that are drawn change nothing of a row, bit for bit.
    mixed = Sampling(*(jnp.where(jnp.arange(R) % 2, b, a) for a, b in zip(*HOW, strict=True)))
    got, (plain_read, drawn_read, _) = jax.jit(read)(hidden, mixed), list(all_cases(R))
    for leaf, plain_leaf, drawn_leaf in zip(
        *map(jax.tree.leaves, (got, plain_read, drawn_read)), strict=True
    ):
        np.testing.assert_array_equal(leaf[::2], plain_leaf[::2])
        np.testing.assert_array_equal(leaf[1::2], drawn_leaf[1::2])


@pytest.fixture(scope="module")
def step():
    """Arguments of a step of 1 x 4 x 32 in bfloat16 with 304 ids."""
    model = plain(
        dtype=jnp.bfloat16,
        vocab_size=304,
        hidden_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
    )
    strategy = MultiBD(block_size=32, buffer_size=4)
    session = generate.start(model, [[1, 2]], strategy, max_tokens=99)
    return model, session.strategy, session.aux, session.state, jnp.int32(3), "xla"


@pytest.mark.slow(unless="pallas_kernels")
@NEEDS_JAX
def test_a_step_holds_no_logits_of_its_window_and_its_head_on_every_branch(
    step, on_hopper, monkeypatch
):
    def lowered():
        generate._advance.clear_cache()
        with jax.sharding.use_abstract_mesh(H200):
            return generate._advance.trace(*step).lower(lowering_platforms=("cuda",))

    text, program = lowered().as_text(), lowered().compiler_ir("hlo").as_hlo_text()
    assert "tensor<64x304xf32>" in text  # of a draw
    assert not {shape for shape in ("128x304", "1x128x304", "4x32x304") if f"<{shape}xf32>" in text}
    assert has_head(program, 304)
    assert not has_head(program, 303)
    assert "gpu$xla.gpu.triton" not in text
    # Without the kernel a greedy step has no head, though a drawn one still does.
    monkeypatch.setattr(readout, "token_readout", lambda hidden, *_, **__: made_up(len(hidden)))
    program = lowered().compiler_ir("hlo").as_hlo_text()
    generate._advance.clear_cache()
    assert "f32[64,304]" in program
    assert not has_head(program, 304)


def made_up(R):
    row, none = jnp.zeros((R,)), jnp.zeros((R, 0))
    return api.TokenReadout(row.astype(jnp.int32), row + 0.5, row, none.astype(jnp.int32), none)


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.gpu
def test_a_compiled_step_holds_no_logits_of_its_window_on_a_gpu(step):
    program = generate._advance.lower(*step).compile().as_text() or ""
    assert has_head(program, 304)
    assert "f32[128,304]" not in program


def read_drawn(hidden, weights, temperature, top_k, top_p, keys):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    reader = Reader(Head(weights), lambda ids: ids == 2)
    return readout.read_stats(reader, hidden, Readout(sampling=sampling, keys=keys))


@pytest.mark.versions
def test_drawn_rows_are_those_of_one_row_alone():
    """65 rows: chunks of 33, each in four of 9, both padded; each row as by itself."""
    R, V, D = 65, 50, 16
    rng = np.random.default_rng(5)
    hidden, weights = (jnp.asarray(rng.normal(size=(n, D)), jnp.float32) for n in (R, V))
    temperature = jnp.asarray(rng.choice([0.0, 0.7, 1.3], R), jnp.float32)
    top_k = jnp.asarray(rng.choice([0, 5], R), jnp.int32)
    top_p = jnp.asarray(rng.choice([1.0, 0.6], R), jnp.float32)
    rows = temperature, top_k, top_p, jax.random.split(jax.random.key(1), R)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readout, "ROWS_DRAWN", 10)
        got = jax.jit(read_drawn)(hidden, weights, *rows)
    alone = jax.jit(read_drawn)
    for i in range(R):
        row = slice(i, i + 1)
        want = alone(hidden[row], weights, *(leaf[row] for leaf in rows))
        assert got.token[i] == want.token[0]
        assert got.confidence[i] == pytest.approx(float(want.confidence[0]), rel=1e-5)


def test_drawn_rows_of_many_slots_take_less_than_a_gibibyte():
    R, V, D, slots = 4096, 151_936, 64, 32
    shape = jax.ShapeDtypeStruct
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), R))
    of_slot = [shape((slots,), dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32)]
    lowered = jax.jit(read_drawn).lower(
        shape((R, D), jnp.bfloat16), shape((V, D), jnp.bfloat16), *of_slot, keys
    )
    reported = lowered.compile().memory_analysis().temp_size_in_bytes
    assert 4 * 512 * V < reported < 2**30  # the logits of a chunk and what drawing them takes
