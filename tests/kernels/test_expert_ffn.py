"""Routed experts against NumPy float64, for every back end this machine runs.

Ragged and skewed routing, experts without rows, pairs and rows without expert, one expert twice in
a row; garbage in rows without an expert changes nothing, a row's bits do not depend on the others,
and nothing the size of all weights is ever copied.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_jax.kernels.expert_ffn import api, expert_ffn, grouped, reference
from dllm_jax.kernels.expert_ffn.fp8 import quantize_experts
from dllm_jax.kernels.expert_ffn.tiles import combine, max_tiles, tile_table
from tests.oracles import expert_ffn as oracle

TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-2}  # absolute; results reach 7
RUN = {
    "dense": jax.jit(functools.partial(expert_ffn, implementation="dense")),
    "grouped": jax.jit(functools.partial(expert_ffn, implementation="grouped")),
}
BATCH, ALONE, MANY_EXPERTS = (43, 3, 5, 32, 48), (1, 3, 5, 32, 48), (2, 6, 70, 16, 16)  # T k E D F


def case(shape, dtype="float32", seed=0):
    """Random data; about one id in five is of no expert, on either side."""
    T, k, E, D, F = shape
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, E, (T, k))
    ids = np.where(rng.random((T, k)) < 0.2, rng.choice([-1, E, -7, E + 1000]), ids)
    draw = lambda *shape: np.asarray(rng.standard_normal(shape), jnp.dtype(dtype))  # noqa: E731
    return [
        draw(T, D),
        ids.astype(np.int32),
        0.5 + rng.random((T, k), np.float32),
        draw(E, D, 2, F) / jnp.dtype(dtype).type(D**0.5),
        draw(E, F, D) / jnp.dtype(dtype).type(F**0.5),
    ]


def run(name, arguments):
    """The back end's answer, as float32; finite always."""
    out = RUN[name](*map(jnp.asarray, arguments))
    assert out.shape == arguments[0].shape
    assert out.dtype == arguments[0].dtype
    out = np.asarray(out.astype(jnp.float32))
    assert np.isfinite(out).all()
    return out


@pytest.mark.slow("shape1|shape2", unless="pallas_kernels")
@pytest.mark.versions
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("bfloat16", BATCH), ("float32", BATCH), ("float32", ALONE), ("float32", MANY_EXPERTS)],
)
@pytest.mark.parametrize("name", RUN)
def test_expert_ffn_matches_numpy(name, dtype, shape):
    arguments = case(shape, dtype)
    want = oracle.expert_ffn(*arguments)
    assert np.abs(want).max() > 0.3  # large enough for a relative error to show
    np.testing.assert_allclose(run(name, arguments), want, atol=TOLERANCE[dtype])


def test_grouped_reads_each_expert_once_and_only_those_with_rows(monkeypatch):
    read = []
    of_expert = grouped._of_expert

    def watched(weights, expert):
        jax.debug.callback(lambda e: read.append(int(e)), expert)
        return of_expert(weights, expert)

    monkeypatch.setattr(grouped, "_of_expert", watched)
    arguments = case(MANY_EXPERTS)
    jax.block_until_ready(jax.jit(grouped.expert_ffn)(*map(jnp.asarray, arguments)))
    jax.effects_barrier()
    touched = np.intersect1d(arguments[1], np.arange(70)).tolist()
    assert 0 < len(touched) < 12
    assert sorted(read) == sorted(2 * touched)  # both of its matrices


@st.composite
def routings(draw):
    """Ids of BATCH: all of one expert, none, skewed, ends of the range, twice the same."""
    T, k, E, _, _ = BATCH
    some = draw(st.lists(st.integers(-2, E + 1), min_size=1, max_size=3))
    seed = draw(st.integers(0, 2**16))
    skew = draw(st.sampled_from([0.0, 0.9, 1.0]))
    rng = np.random.default_rng(seed)
    ids = np.where(rng.random((T, k)) < skew, rng.choice(some, (T, k)), rng.integers(0, E, (T, k)))
    return ids.astype(np.int32)


@pytest.mark.long
@settings(max_examples=25)
@given(ids=routings())
def test_expert_ffn_takes_any_routing_and_ignores_what_goes_nowhere(ids):
    arguments = case(BATCH)
    arguments[1] = ids
    x, _, weights, w_gate_up, w_down = arguments
    want = oracle.expert_ffn(*arguments)
    E = len(w_down)
    routed = (ids >= 0) & (ids < E)
    unused = np.setdiff1d(np.arange(E), ids)
    x[~routed.any(axis=1)] = np.nan
    weights[~routed] = np.nan
    w_gate_up[unused], w_down[unused] = np.nan, np.inf
    for name in RUN:
        got = run(name, arguments)
        np.testing.assert_allclose(got, want, atol=TOLERANCE["float32"])
        assert not got[~routed.any(axis=1)].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", RUN)
def test_expert_ffn_row_has_the_same_bits_whatever_the_others_hold(name, dtype):
    arguments = case(BATCH, dtype)
    before = run(name, arguments)
    others = case(BATCH, dtype, seed=1)
    others[0][::2] = np.nan
    for mine in (0, 17, 42):
        # The row stands elsewhere, among rows of other values and other experts.
        there = (mine + 5) % 43
        for argument, other in zip(arguments[:3], others[:3], strict=True):
            other[there] = argument[mine]
        out = RUN[name](*map(jnp.asarray, others[:3] + arguments[3:]))
        assert np.array_equal(np.asarray(out[there], np.float32), before[mine])


def in_8_bits(arguments):
    return [*arguments[:3], *map(quantize_experts, map(jnp.asarray, arguments[3:]))]


@pytest.mark.slow("float32|grouped", unless="pallas_kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["dense", "grouped"])
def test_experts_in_8_bits_match_numpy_whatever_goes_nowhere(name, dtype):
    """A number on the other side of a rounding moves a result by some thousandths."""
    arguments = case(BATCH, dtype)
    x, ids, weights, w_gate_up, w_down = arguments
    want = oracle.expert_ffn_fp8(*arguments)
    assert np.abs(want - oracle.expert_ffn(*arguments)).max() > 0.03  # 8 bits can be told
    routed = (ids >= 0) & (ids < len(w_down))
    ids[routed & (ids == 2)] = -1  # an expert of no row
    x[~routed.any(axis=1)] = np.nan
    weights[~routed] = np.nan
    want = oracle.expert_ffn_fp8(*arguments)
    w_gate_up[2], w_down[2] = np.nan, np.inf
    got = np.asarray(jax.jit(RUN[name])(*in_8_bits(arguments)).astype(jnp.float32))
    np.testing.assert_allclose(got, want, atol=0.02 if dtype == "float32" else 0.05)
    assert np.mean(np.abs(got - want)) < 2e-3
    mine = [a[17:18] for a in arguments[:3]]
    alone = RUN[name](*in_8_bits([*mine, *arguments[3:]]))
    if name == "grouped":
        assert np.array_equal(np.asarray(alone[0], np.float32), got[17])
    calls = [a[:42].reshape(2, 21, -1) for a in arguments[:3]]
    small = in_8_bits(arguments)[3:]
    both = jax.vmap(RUN[name], in_axes=(0, 0, 0, None, None))(*calls, *small)
    assert np.array_equal(np.asarray(both, np.float32).reshape(42, -1), got[:42])


def test_expert_ffn_row_alone_has_the_bits_it_has_in_a_batch():
    arguments = case(BATCH)
    together = run("grouped", arguments)
    alone = run("grouped", [a[17:18] for a in arguments[:3]] + arguments[3:])
    assert np.array_equal(alone[0], together[17])


@pytest.mark.versions
def test_expert_ffn_under_vmap_is_more_rows():
    arguments = list(map(jnp.asarray, case(BATCH)))
    halves = [a[:42].reshape(2, 21, -1) for a in arguments[:3]]
    halves[2] = halves[2][0]  # the router's weights are the same in both calls
    over_rows = jax.jit(jax.vmap(RUN["grouped"], in_axes=(0, 0, None, None, None)))
    out = over_rows(*halves, *arguments[3:])
    arguments[2] = jnp.concatenate([halves[2], halves[2], arguments[2][42:]])
    assert np.array_equal(out.reshape(42, -1), RUN["grouped"](*arguments)[:42])


@pytest.mark.versions
def test_expert_ffn_under_vmap_takes_experts_of_each_call():
    calls = [case(BATCH, seed=seed) for seed in (0, 1)]
    stacked = [jnp.asarray(np.stack(pair)) for pair in zip(*calls, strict=True)]
    out = jax.jit(jax.vmap(RUN["grouped"]))(*stacked)
    for got, call in zip(out, calls, strict=True):
        assert np.array_equal(got, run("grouped", call))


@pytest.mark.versions
def test_expert_ffn_has_the_gradient_of_the_reference():
    arguments = case(BATCH)
    arguments[0][4], arguments[1][4] = np.nan, -1  # in a row of no expert
    arguments = list(map(jnp.asarray, arguments))

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(function, x, weights, w_gate_up, w_down):
        def total(*over):
            out = function(over[0], arguments[1], *over[1:])
            return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape).astype("f4"))).sum()

        return jax.grad(total, argnums=(0, 1, 2, 3))(x, weights, w_gate_up, w_down)

    over = [arguments[i] for i in (0, 2, 3, 4)]
    got, want = gradient(RUN["grouped"], *over), gradient(reference.expert_ffn, *over)
    for a, b in zip(got, want, strict=True):
        assert 0.1 < np.abs(b).max() < 1e3
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow("bfloat16|fp8", unless="pallas_kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_grouped_never_holds_more_than_one_expert(dtype):
    shape = jax.ShapeDtypeStruct
    T, k, E, D, F = 64, 2, 64, 256, 128
    kind = "bfloat16" if dtype == "fp8" else dtype
    experts = [shape((E, D, 2, F), kind), shape((E, F, D), kind)]
    if dtype == "fp8":
        experts = [jax.eval_shape(quantize_experts, w) for w in experts]
    pairs = shape((T, k), jnp.int32), shape((T, k), jnp.float32)
    program = RUN["grouped"].lower(shape((T, D), kind), *pairs, *experts)
    pairs_bytes = (T * k + 64) * D * 4
    expert_bytes = 3 * D * F * 4
    temporary = program.compile().memory_analysis().temp_size_in_bytes
    assert temporary < 2 * (pairs_bytes + expert_bytes) < E * expert_bytes / 8


@settings(max_examples=60)
@given(
    shape=st.sampled_from([(1, 1, 1, 1), (7, 3, 5, 4), (19, 2, 40, 16), (40, 2, 3, 16)]),
    data=st.data(),
)
def test_tile_table_holds_each_routed_pair_once(shape, data):
    T, k, E, tile_rows = shape
    id_ = st.integers(-1, E) if data.draw(st.booleans()) else st.sampled_from([0, E - 1])
    ids = data.draw(st.lists(id_, min_size=T * k, max_size=T * k))
    ids = np.asarray(ids, np.int32).reshape(T, k)
    table = jax.tree.map(np.asarray, _table(ids, E, tile_rows))
    assert len(table.length) == max_tiles(T * k, E, tile_rows)
    want = []  # (expert, pairs) of each tile, by definition
    for expert in range(E):
        pairs = [p for p, e in enumerate(ids.reshape(-1)) if e == expert]
        want += [(expert, pairs[i : i + tile_rows]) for i in range(0, len(pairs), tile_rows)]
    got = [
        (int(e), table.pair[first : first + n].tolist())
        for e, first, n in zip(table.expert, table.first, table.length, strict=True)
    ]
    assert got[: len(want)] == want
    assert not table.length[len(want) :].any()
    assert ((table.expert >= 0) & (table.expert < E)).all()
    assert (table.first <= T * k).all()
    ends = table.first + table.length
    followed = slice(0, max(len(want) - 1, 0))
    assert (table.first[1:][followed] == ends[followed]).all()
    routed = (ids >= 0) & (ids < E)
    assert (table.pair[table.place[routed]] == np.flatnonzero(routed)).all()
    assert (table.place[~routed] >= T * k + 10**6).all()


_table = jax.jit(tile_table, static_argnums=(1, 2))


@pytest.mark.parametrize(
    ("pairs", "experts", "rows"), [(40, 8, 4), (3, 8, 4), (41, 8, 4), (9, 1, 8)]
)
def test_max_tiles_is_what_the_worst_routing_needs(pairs, experts, rows):
    ids = np.minimum(np.arange(pairs), experts - 1)[:, None].astype(np.int32)
    table = _table(ids, experts, rows)
    assert (np.asarray(table.length) > 0).all()


def test_combine_sees_no_place_that_holds_nothing():
    results = np.full((20, 2), np.nan, np.float32)
    results[[3, 9]] = [[1, 2], [10, 20]]
    nowhere = np.iinfo(np.int32).max
    place = np.asarray([[3, 9], [nowhere, 9], [nowhere, nowhere]], np.int32)
    got = combine(jnp.asarray(results), jnp.asarray(place))
    assert got.tolist() == [[11, 22], [10, 20], [0, 0]]


@pytest.mark.versions
def test_expert_ffn_chooses_what_was_measured_to_be_fastest(monkeypatch):
    def chosen(T, k, E, D, F):
        shape = jax.ShapeDtypeStruct
        return api.choose(shape((T, D), "float32"), shape((T, k), "int32"), shape((E, F, D), "f4"))

    assert chosen(64, 2, 4, 32, 64) == "dense"  # the models of tests
    assert chosen(16, 4, 16, 1024, 512) == "dense"
    assert chosen(32, 4, 16, 1024, 512) == "grouped"
    assert chosen(8, 8, 64, 1024, 512) == "grouped"
    assert chosen(4, 8, 256, 2048, 512) == "grouped"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert chosen(64, 2, 4, 32, 64) == "grouped", "of little work, too"


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_expert_ffn_of_no_rows_gives_none(monkeypatch, platform):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    x, ids, weights, *experts = map(jnp.asarray, case(BATCH, "bfloat16"))
    arguments = (x[:0], ids[:0], weights[:0], *experts)
    for name in (None, "dense", "grouped"):
        out = expert_ffn(*arguments, implementation=name)
        assert (out.shape, out.dtype) == ((0, 32), jnp.bfloat16)


def test_expert_ffn_refuses_what_it_cannot_do():
    arguments = list(map(jnp.asarray, case(BATCH)))
    with pytest.raises(NotImplementedError, match='"mosaic": needs an NVIDIA GPU'):
        expert_ffn(*arguments, implementation="mosaic")
    with pytest.raises(ValueError, match="implementation='cudnn' is not one of"):
        expert_ffn(*arguments, implementation="cudnn")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"must both be \[T k\] with T=43"):
        expert_ffn(arguments[0], arguments[1][:5], *arguments[2:])
    with pytest.raises(ValueError, match=r"must be \[E D 2 F\] and \[E F D\]"):
        expert_ffn(*arguments[:3], arguments[3].swapaxes(2, 3), arguments[4])
    with pytest.raises(ValueError, match="must be an integer type"):
        expert_ffn(arguments[0], arguments[2], *arguments[2:])
    small = in_8_bits(arguments)
    with pytest.raises(ValueError, match="both or none must have 8 bits"):
        expert_ffn(*small[:4], arguments[4])


GELU = {
    "dense": functools.partial(expert_ffn, implementation="dense", activation="gelu"),
    "grouped": functools.partial(expert_ffn, implementation="grouped", activation="gelu"),
}


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.parametrize("name", GELU)
def test_gates_may_be_gelus(name):
    """GELU by tanh, also in the gradient; values against NumPy, gradients against differences."""
    x, ids, weights, w_gate_up, w_down = (np.asarray(a) for a in case(ALONE))
    got = jax.jit(GELU[name])(x, ids, weights, w_gate_up, w_down)
    want = oracle.expert_ffn(x, ids, weights, w_gate_up, w_down, oracle.gelu)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.abs(got - RUN["dense"](x, ids, weights, w_gate_up, w_down)).max() > 1e-2

    def total(x):
        return GELU[name](x, ids, weights, w_gate_up, w_down).sum()

    def reference(x):
        return GELU["dense"](x, ids, weights, w_gate_up, w_down).sum()

    np.testing.assert_allclose(jax.grad(total)(x), jax.grad(reference)(x), atol=1e-5)
