"""Each rule of `DMax`, broken once, is noticed by the list decoder: the tests of the tests.

Proves that every mutant of tests/oracles/dmax_mutants.py differs from the list decoder, in what it
decodes or in what its cells show, on one of a small fixed set of scripts, and the unbroken
package, copied and loaded the same way, on none.
"""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from tests.oracles.dmax_decoder import Rules, dmax_decode
from tests.oracles.dmax_mutants import DMAX_MUTANTS
from tests.oracles.mutants import Mutant, load_mutant
from tests.strategies.test_dmax import draw_dmax, draw_rules
from tests.strategies.test_strategy_fuzz import check_agreement

pytestmark = pytest.mark.slow  # it tests tests, which change seldom, and compiles each mutant

SCRIPTS = 300
BLOCK_SIZE, BUFFER_SIZE = 4, 3
EDGES = np.array([0.25, 0.5, 0.75, 0.9], np.float32)


@pytest.fixture(autouse=True)
def _compile_quickly() -> Iterator[None]:
    """A mutant is compiled for a few dozen scripts of a few steps."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def watch(package: ModuleType) -> list[dict[int, Any]]:
    """Let the scripted forward of `package` note what it is given, forward by forward."""
    shown: list[dict[int, Any]] = []
    forward = package.testing._ScriptedForward
    plain = forward.__call__

    def note(positions: Any, mix: Any) -> None:
        where = np.nonzero(np.asarray(mix.on))
        parts = (positions, mix.ids[..., 0], mix.probs[..., 0], mix.base_weight)
        rows = zip(*(np.asarray(part)[where].tolist() for part in parts), strict=True)
        shown.append({p: (t, sure, rest) for p, t, sure, rest in rows})

    def call(self: Any, state: Any, **words: Any) -> Any:
        jax.debug.callback(note, state.buffer.positions, words["inputs"], ordered=True)
        return plain(self, state, **words)

    forward.__call__ = call
    return shown


def agrees(package: ModuleType, shown: list[dict[int, Any]], mode: str, number: int) -> bool:
    rng, case = draw_dmax((sum(mode.encode()), number), BLOCK_SIZE)
    rules = draw_rules(rng, mode == "paper")
    if number % 2:  # thresholds and probabilities that meet exactly, so that strictness shows
        case.prob[:] = rng.choice(EDGES, size=case.prob.shape)
        accept, commit = (float(x) for x in rng.choice(EDGES, size=2))
        rules = Rules(accept, 0.25, float(rng.choice([0.0, 0.5])), commit, rules.paper)
    weight = 0.0 if number % 7 == 0 else 1.0
    strategy = package.DMax(
        accept_threshold=rules.accept,
        add_block_threshold=rules.add,
        token_stability_threshold=rules.stability,
        commit_confidence=rules.commit,
        token_merge_weight=weight,
        compat=None if rules.paper else "diffulex",
        block_size=BLOCK_SIZE,
        buffer_size=BUFFER_SIZE,
    )
    parts = (case.prompt, case.token, case.prob)
    sizes = {"block_size": BLOCK_SIZE, "buffer_size": BUFFER_SIZE}
    truth = dmax_decode(rules, *parts, **sizes, **case.limits)
    shown.clear()
    trace = package.testing.run_script(strategy, *parts, **case.limits)
    jax.effects_barrier()
    wanted = [
        {p: (t, float(sure), float(np.float32(1) - sure)) for p, (t, sure) in one.items()}
        if weight
        else {}
        for one in truth.shown
    ]
    try:
        check_agreement(trace, truth, number)
    except AssertionError:
        return False
    return shown == wanted


@pytest.mark.parametrize("mode", ["paper", "diffulex"])
def test_the_unbroken_copy_passes(mode: str, tmp_path: Path) -> None:
    package = load_mutant(f"none_dmax_{mode}", (), tmp_path)
    shown = watch(package)
    wrong = [number for number in range(SCRIPTS) if not agrees(package, shown, mode, number)]
    assert wrong == []


@pytest.mark.parametrize("mutant", DMAX_MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    package = load_mutant(f"dmax_{mutant.name}", mutant.changes, tmp_path)
    shown = watch(package)
    assert not all(agrees(package, shown, mutant.corpus, number) for number in range(SCRIPTS))
