"""The plan is the best of all texts, and what was written off it is put right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.runner import grammars
from dllm_jax.strategies.core import grammar_plan
from dllm_jax.strategies.core.constraint import FLOOR, HOLE, KNOWN, NEVER, SKIP, View
from tests.structured.toys import best_text, random_toy, relative, stacked

pytestmark = pytest.mark.long

SIZES = grammars.Sizes(8, 6, 40, 8, 60, 4, 16)
IDS, CASES = 7, 64


def _class_maxima(toy, logp):
    """By cell and class: the best log probability, and its lowest id."""
    W, C = len(logp), SIZES.classes
    best, ids = np.full((W, C), -np.inf, np.float32), np.full((W, C), -1, np.int32)
    for w in range(W):
        for token in range(IDS):
            c = toy.class_of[token]
            if ids[w, c] < 0 or logp[w, token] > best[w, c]:
                best[w, c], ids[w, c] = logp[w, token], token
    return best, ids


def _case(rng, W=4):
    toy = random_toy(rng)
    logp = np.log(rng.dirichlet(np.full(IDS, 0.5), W)).astype(np.float32)
    logp = np.where(rng.random((W, 1)) < 0.5, 4 * np.round(logp / 4), logp)  # ties
    logp[rng.random(logp.shape) < 0.1] = -np.inf  # as a strategy forbids
    is_read = rng.random(W) < 0.8
    room, at = int(rng.integers(0, 3)), toy.start
    kinds = rng.choice([SKIP, HOLE, HOLE, HOLE, KNOWN], W)
    cells = []
    for kind in kinds:
        token = int(rng.integers(1, IDS))
        cells.append("skip" if kind == SKIP else "hole" if kind == HOLE else token)
    return toy, logp, room, at, kinds, cells, is_read


def _planned(module, cases):
    """Plans of many cases at once."""
    rows, best, ids, known = [], [], [], []
    whole = []
    for i, (toy, logp, _, _, _, cells, _) in enumerate(cases):
        row = grammars.padded(grammars.ready(toy, IDS), SIZES)
        rows.append(row.replace(by_mass=np.asarray(i % 2 == 1)))
        prob = np.zeros((len(logp), SIZES.classes), np.float32)
        np.add.at(prob, (slice(None), toy.class_of[:IDS]), np.exp(logp))
        whole.append(prob)
        b, i = _class_maxima(toy, logp)
        best.append(b), ids.append(i)
        known.append([toy.class_of[c] if isinstance(c, int) else 0 for c in cells])
    view = View(
        stacked(rows),
        jnp.asarray([case[3] for case in cases], jnp.int32),
        jnp.ones(len(cases), bool),
        jnp.asarray(np.stack([case[4] for case in cases]), jnp.int32),
        jnp.asarray(known, jnp.int32),
        jnp.asarray([case[2] for case in cases], jnp.int32),
    )
    read = jnp.asarray([case[6] for case in cases])
    best = jnp.asarray(best)
    stats = module.ClassStats(jnp.asarray(ids), best, best, best, jnp.log(jnp.asarray(whole)))
    return jax.tree.map(np.asarray, jax.jit(module.plan)(view, stats, read))


def check_plans(module, seed):
    """Plans of a module `grammar_plan` are those that NumPy finds by trying all."""
    rng = np.random.default_rng(seed)
    cases = [_case(rng) for _ in range(CASES)]
    plan = _planned(module, cases)
    feasible = 0
    for i, (toy, logp, room, at, _, cells, is_read) in enumerate(cases):
        score = relative(toy, np.where(is_read[:, None], np.maximum(logp, FLOOR), 0.0))
        want = best_text(toy, at, room, cells, score)
        if want is None:
            assert plan.value[i] <= NEVER / 2
            continue
        feasible += 1
        assert plan.value[i] == pytest.approx(want, abs=1e-3)
        # Its tokens are that text: they lead along the path and keep what is known.
        state, value = at, 0.0
        for w, cell in enumerate(cells):
            if cell == "skip":
                assert plan.path[i, w + 1] == plan.path[i, w]
                continue
            token = cell if isinstance(cell, int) else int(plan.token[i, w])
            if state == toy.end:
                continue
            if cell == "hole":
                value += score[w, token]
                fitting = [t for t in range(IDS) if toy.after(state, [t]) == plan.path[i, w + 1]]
                assert token == min(fitting, key=lambda t: (-logp[w, t], t))
                wanted = logp[w, token]
                goes_on = [t for t in range(IDS) if toy.after(state, [t]) != 0]
                total = np.exp(logp[w, goes_on]).sum()
                if i % 2 == 1 and total > 0:
                    wanted -= np.log(total)
                assert plan.confidence[i, w] == pytest.approx(wanted, abs=1e-4)
            state = toy.after(state, [token])
            assert state == plan.path[i, w + 1] != 0
        assert value == pytest.approx(want, abs=1e-3)
    assert feasible > CASES // 4


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_is_worth_as_much_as_the_best_of_all_texts(seed):
    check_plans(grammar_plan, seed)
