"""The rules that strategies share, each against plain loops, and each broken once.

Proves, function by function, that `sampling`, `blocks`, `block_rewrite`, `token_merge` and `random`
do what the loops of oracles/rule_checks.py do on random windows; and that every wrong version in
oracles/rule_mutants.py (`>` for `>=`, no forced token, a rule that looks outside its cells, a
bound that admits equality, a key that forgets the step ...) is told from the right one. And that
every mutant of every strategy still fits the source: those run in `make test-all` only.
"""

from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

from dllm_jax import strategies
from tests.oracles import dmax_mutants, fast_dllm_v2_mutants, full_sequence_mutants, mutants
from tests.oracles.mutants import SOURCE, Mutant, load_mutant
from tests.oracles.rule_checks import CHECKS
from tests.oracles.rule_mutants import OPENING, RULE_MUTANTS
from tests.strategies import test_d2f, test_dmax_mutants, test_edit

SLOW = ("blocks", "merge", "random")  # what they check shows in every decoded text as well


def agrees(package: ModuleType, name: str, seeds: range) -> bool:
    try:
        for seed in seeds:
            CHECKS[name](package, np.random.default_rng(seed))
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CHECKS]
)
def test_the_rules_do_what_the_loops_do(name: str) -> None:
    for seed in range(3):
        CHECKS[name](strategies, np.random.default_rng(seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_the_rules_do_what_the_loops_do_over_a_long_sweep(name: str) -> None:
    for seed in range(100, 140):
        CHECKS[name](strategies, np.random.default_rng(seed))


@pytest.mark.slow
def test_the_unbroken_copy_agrees(tmp_path: Path) -> None:
    package = load_mutant("none_rules", (), tmp_path)
    assert [name for name in CHECKS if not agrees(package, name, range(4))] == []


@pytest.mark.slow
@pytest.mark.parametrize("mutant", RULE_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    package = load_mutant(f"rule_{mutant.name}", mutant.changes, tmp_path)
    assert not agrees(package, mutant.corpus, range(20))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", OPENING, ids=lambda mutant: mutant.name)
def test_an_opening_or_a_stop_gone_wrong_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    """By the scripts of the strategy's own mutants: that a stop id latches, above all (trap 8)."""
    package = load_mutant(mutant.name, mutant.changes, tmp_path)
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        if mutant.corpus == "edit":
            assert not all(test_edit.corpus(package, number) for number in range(150))
        else:
            shown = test_dmax_mutants.watch(package)
            told = (test_dmax_mutants.agrees(package, shown, "paper", n) for n in range(300))
            assert not all(told)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


OTHERS = [
    *OPENING,
    *mutants.MUTANTS,
    *dmax_mutants.DMAX_MUTANTS,
    *fast_dllm_v2_mutants.MUTANTS,
    *full_sequence_mutants.MUTANTS,
    *(Mutant(name, "edit", (change,)) for name, change in test_edit.MUTANTS.items()),
    *(
        Mutant(name, "d2f", tuple(("d2f.py", *change) for change in changes))
        for name, changes in test_d2f.MUTANTS.items()
    ),
]


def test_every_mutant_fits_the_source() -> None:
    source = {path.name: path.read_text(encoding="utf-8") for path in SOURCE.glob("*.py")}
    unfit = [
        f"{mutant.name}: {old!r} in {file}"
        for mutant in [*RULE_MUTANTS, *OTHERS]
        for file, old, _ in mutant.changes
        if source[file].count(old) != 1
    ]
    assert unfit == []
    assert len(OTHERS) > 150
