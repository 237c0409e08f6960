"""Kernels of grammars against `constraint` in XLA, bit for bit, and the readout by classes.

Random automata of several slots, one of them without a grammar; what fills the tables up is junk
that nothing may read. The kernels run as plain XLA here, and are lowered for a GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.kernels import grammar_path
from dllm_jax.kernels.grammar_path import triton_paths
from dllm_jax.kernels.token_readout import IdClasses, class_readout, mosaic, token_readout
from dllm_jax.runner import grammars
from dllm_jax.strategies.core import constraint, grammar_plan
from dllm_jax.strategies.core.constraint import View
from dllm_jax.strategies.core.grammar_paths import best_paths
from dllm_jax.strategies.core.grammar_plan import IdStats
from dllm_jax.strategies.core.state import by_row
from tests.cross_lowering import H200, needs_mosaic, triton_grids
from tests.kernels.test_layer_mosaic import interpreted
from tests.structured.toys import random_toy, stacked

pytestmark = pytest.mark.long

SIZES = grammars.Sizes(24, 9, 60, 8, 90, 8, 48)
IDS, CELLS, SLOTS = 40, 11, 4
INTERPRETED = grammar_path.PathKernels(
    *(functools.partial(fn, interpret=True) for fn in grammar_path.api.TRITON)
)


def case(seed):
    """Windows of some slots, the last one unbound, with what was read of their ids."""
    rng = np.random.default_rng(seed)
    rows, starts = [], []
    for _ in range(SLOTS):
        toy = random_toy(rng, IDS, IDS - 1, states=int(rng.integers(3, 22)), classes=5)
        rows.append(grammars.padded(grammars.ready(toy, IDS), SIZES))
        starts.append(toy.start)
    grammar = stacked(rows)
    bound = np.arange(SLOTS) < SLOTS - 1
    nothing = grammars.empty(SLOTS, SIZES, IDS).grammar
    grammar = by_row(jnp.asarray(bound), grammar, nothing)
    kind = rng.choice([constraint.SKIP, constraint.KNOWN, 2, 2, 2, 2], (SLOTS, CELLS))
    view = View(
        grammar=grammar,
        at=jnp.asarray(starts),
        bound=jnp.asarray(bound),
        kind=jnp.asarray(kind),
        known=jnp.asarray(rng.integers(1, 7, (SLOTS, CELLS)), jnp.int32),
        room=jnp.asarray(rng.integers(0, 9, SLOTS), jnp.int32),
    )
    logits = rng.normal(0, 3, (SLOTS * CELLS, IDS)).astype(np.float32)
    logits = np.where(rng.random(logits.shape) < 0.5, np.round(logits), logits)  # ties
    forbidden = jnp.asarray(rng.random(IDS) < 0.1)
    given = jnp.asarray(logits), jnp.eye(IDS), forbidden, classes_of(grammar)
    _, found = class_readout(*given, implementation="xla")
    ids = IdStats(*(leaf.reshape(SLOTS, CELLS, *leaf.shape[1:]) for leaf in found))
    return view, ids, jnp.asarray(rng.random((SLOTS, CELLS)) < 0.8)


def spoilt(rng, ids):
    """Some logits are no number, or minus infinity, and so are all of a cell."""

    def some(leaf):
        what = rng.choice([0, jnp.nan, -jnp.inf], leaf.shape, p=[0.9, 0.05, 0.05])
        what[0, 2], what[1, 3] = np.nan, -np.inf
        return jnp.where(what == 0, leaf, jnp.asarray(what, jnp.float32))

    log_mass = ids.log_mass.at[0, 2].set(jnp.nan).at[1, 3].set(-jnp.inf)
    return ids._replace(narrow=some(ids.narrow), wide=some(ids.wide), log_mass=log_mass)


def classes_of(grammar):
    return IdClasses(**{name: getattr(grammar, name) for name in IdClasses._fields})


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.parametrize(("seed", "wide"), [(0, 5), (1, 0), (2, IDS)])
def test_the_same_plans_to_the_bit(seed, wide, monkeypatch):
    """Some classes are wide; all are; none is."""
    monkeypatch.setattr(grammars, "WIDE", wide)
    view, ids, read = case(seed)
    counts = (np.asarray(getattr(view.grammar, name)) for name in ("num_wide", "num_narrow"))
    assert [bool(count.max()) for count in counts] == [wide < IDS, wide > 0]
    ids = spoilt(np.random.default_rng(seed), ids)
    truth = jax.jit(grammar_plan.plan_of_ids)(view, ids, read)
    kernel = view.replace(grammar=view.grammar.replace(kernels=INTERPRETED))
    plan = jax.jit(grammar_plan.plan_of_ids)(kernel, ids, read)
    for name in ("path", "value", "token", "confidence"):
        mine, theirs = (np.asarray(getattr(p, name))[:-1] for p in (plan, truth))
        # Of a cell without a number, whose token nobody takes, the kernel says -inf.
        theirs = np.where(np.isnan(theirs), -np.inf, theirs)
        np.testing.assert_array_equal(mine, theirs, err_msg=name)
    assert (np.asarray(truth.value)[:-1] > constraint.NEVER).any()


@pytest.mark.slow(unless="pallas_kernels")
@pytest.mark.parametrize("seed", range(2))
def test_the_engines_half_is_the_same_too(seed):
    view, _, _ = case(seed)
    rng = np.random.default_rng(seed)
    kind = jnp.asarray(rng.integers(0, 4, (SLOTS, CELLS)))
    cost = jnp.where(kind == constraint.WRITTEN, -1.0, 0.0)[..., None]
    labels = jnp.arange(SIZES.labels)
    score = jnp.where(labels == constraint.NO_LABEL, constraint.NEVER, cost)
    kernel = view.replace(grammar=view.grammar.replace(kernels=INTERPRETED))
    truth, mine = (best_paths(one, kind, score) for one in (view, kernel))
    for a, b in zip(mine, truth, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[:-1], np.asarray(b)[:-1])
    kind = view.kind.at[0].set(constraint.KNOWN)  # the others have holes
    given = view.grammar, view.at, kind, view.known
    walked = triton_paths.walk(*given, skip=constraint.SKIP, hole=constraint.HOLE, interpret=True)
    for slot in range(SLOTS - 1):
        at = int(view.at[slot])
        for cell in range(CELLS + 1):
            assert walked[slot, cell] == at
            if cell == CELLS or kind[slot, cell] == constraint.HOLE:
                break
            if kind[slot, cell] != constraint.SKIP:
                at = int(view.grammar.delta[slot, at, view.known[slot, cell]])


@pytest.mark.slow("1", unless="pallas_kernels")
@pytest.mark.parametrize("slots", [1, 4])
def test_a_readout_by_classes_is_that_without_and_what_they_say(slots, monkeypatch):
    monkeypatch.setattr(grammars, "WIDE", 5)
    view, _, _ = case(1)
    classes = classes_of(jax.tree.map(lambda leaf: leaf[:slots], view.grammar))
    rng = np.random.default_rng(2)
    D, R = 32, slots * 9
    hidden = jnp.asarray(rng.standard_normal((R, D)), jnp.bfloat16)
    head = jnp.asarray(rng.standard_normal((IDS, D)), jnp.bfloat16)
    forbidden = jnp.asarray(rng.random(IDS) < 0.1)
    penalty = jnp.asarray(rng.integers(0, IDS, R), jnp.int32), jnp.ones((R,))
    options = {"scale": 0.5, "cap": 20.0, "penalty": penalty, "num_top": 2}
    given = hidden, head, forbidden
    plain, ids = class_readout(*given, classes, **options, implementation="xla")
    alone = token_readout(*given, **options, implementation="xla")
    for mine, theirs in zip(plain, alone, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    every = np.arange(IDS)
    logits = 20 * np.tanh(0.5 * np.float32(hidden) @ np.float32(head).T / 20)
    logits -= (every[None] == np.asarray(penalty[0])[:, None]) * np.float32(penalty[1])[:, None]
    logits = np.where(np.asarray(forbidden), -np.inf, logits)
    mass = np.log(np.exp(logits).sum(axis=1))
    np.testing.assert_allclose(ids.log_mass, mass, rtol=1e-5)
    for slot in range(slots):
        rows, mine = slice(slot * 9, slot * 9 + 9), np.asarray(classes.codes[slot])
        narrow, wide = int(view.grammar.num_narrow[slot]), int(view.grammar.num_wide[slot])
        own = logits[rows][:, np.asarray(classes.narrow[slot, :narrow])]
        np.testing.assert_allclose(ids.narrow[rows, :narrow], own, rtol=1e-5)
        for place in range(wide):
            among = np.where(mine == -(place + 1), logits[rows], -np.inf)
            np.testing.assert_allclose(ids.wide[rows, place], among.max(axis=1), rtol=1e-5)
            assert ids.wide_token[rows, place].tolist() == among.argmax(axis=1).tolist()


@pytest.mark.slow(unless="pallas_kernels")
@needs_mosaic
@pytest.mark.parametrize(("slots", "T"), [(2, 40), (1, 24)])
def test_the_kernel_says_the_same(slots, T, monkeypatch):
    """Steps of which all ids are read, and few; a tile of ids that is all its neighbour's.

    A slot's rows are padded to the 64 of a warpgroup; one slot's few rows are one warpgroup's.
    """
    monkeypatch.setattr(grammars, "WIDE", 20)
    monkeypatch.setattr(grammars, "_MANY", 11)
    rng, num_ids, D = np.random.default_rng(3), 320, 64
    grammar = stacked(
        [
            grammars.padded(
                grammars.ready(random_toy(rng, num_ids, num_ids - 1, classes=classes), num_ids),
                SIZES._replace(narrow=320, classes=18, wide=16),
            )
            for classes in (14, 16)[:slots]
        ]
    )
    hidden = jnp.asarray(rng.standard_normal((slots * T, D)), jnp.bfloat16)
    head = jnp.asarray(rng.standard_normal((num_ids, D)) * 3 * D**-0.5, jnp.bfloat16)
    given = hidden, head, jnp.asarray(rng.random(num_ids) < 0.2), classes_of(grammar)
    options = {"scale": 1.0, "cap": None, "penalty": None, "num_top": 0}
    how = options | {
        "tiling": mosaic.Tiling(ids=64, consumers=slots, stages=1, shared="rows", blocks=2)
    }
    by_classes = functools.partial(mosaic.read_classes, classes=given[-1])
    read, ids = interpreted(by_classes, *given[:-1], **how)
    alone = interpreted(mosaic.read, *given[:-1], **how)
    for mine, theirs in zip(read, alone, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)  # joined by XLA: 80 rows, not 128
    truth = class_readout(*given, **options, implementation="xla")[1]
    np.testing.assert_allclose(ids.log_mass, truth.log_mass, rtol=1e-5)
    assert int(grammar.whole_step[0].max()) * 64 < int(grammar.num_narrow[0])
    for slot in range(slots):
        rows, whole = slice(slot * T, slot * T + T), grammar.whole_step[slot]
        narrow, wide = int(grammar.num_narrow[slot]), int(grammar.num_wide[slot])
        assert int(whole.max()) > 0 < wide
        mine, theirs = (one.narrow[rows, :narrow] for one in (ids, truth))
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            ids.wide[rows, :wide], truth.wide[rows, :wide], rtol=1e-5, atol=1e-5
        )
        np.testing.assert_array_equal(ids.wide_token[rows, :wide], truth.wide_token[rows, :wide])


def test_lowers_for_a_gpu():
    of = grammars.BUCKETS[1]
    grammar = jax.eval_shape(lambda: grammars.empty(8, of, 151_936)).grammar
    ids = [((8, 16, of.narrow), "float32"), ((8, 16, of.wide), "float32")]
    ids += [((8, 16, of.wide), "int32"), ((8, 16), "float32")]
    ids = IdStats(*(jax.ShapeDtypeStruct(*one) for one in ids))
    cells, slots = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8, 16), (8,)))
    read, bound = (jax.ShapeDtypeStruct(shape, bool) for shape in ((8, 16), (8,)))
    kernels = grammar_path.api.TRITON

    def both(grammar, at, bound, kind, known, room, ids, read):
        view = View(grammar.replace(kernels=kernels), at, bound, kind, known, room)
        plan = grammar_plan.plan_of_ids(view, ids, read)
        walk = functools.partial(kernels.walk, skip=constraint.SKIP, hole=constraint.HOLE)
        return plan, walk(view.grammar, at, kind, known)

    with jax.sharding.use_abstract_mesh(H200):
        given = grammar, slots, bound, cells, cells, slots, ids, read
        lowered = jax.jit(both).trace(*given).lower(lowering_platforms=("cuda",))
    grids = triton_grids(lowered.compiler_ir("stablehlo").operation)
    assert sorted(grids) == sorted([(8, 16, 1), (8, 16, 1), (8, 1, 1), (8, 1, 1)])
