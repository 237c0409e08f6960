"""Each broken rule is noticed: the tests of the tests.

Proves that every mutant of the tables in this folder fails the check named as its killer, and that
an unbroken copy, loaded the same way, passes it. Every replaced expression occurs exactly once.
"""

from pathlib import Path

import pytest

from tests.mutants.suites import SUITES
from tests.mutation import Mutant, Suite, unbroken


def _cases(suites: dict[str, Suite]) -> list:
    """A parameter for each mutant; those of JAX programs compile, and are slow."""
    return [
        pytest.param(
            suite,
            mutant,
            id=f"{name}-{mutant.name}",
            marks=[] if name == "engine" else pytest.mark.slow,
        )
        for name, suite in suites.items()
        for mutant in suite.mutants
    ]


COPIES = {
    name: suite._replace(mutants=[unbroken(k) for k in sorted({m.killer for m in suite.mutants})])
    for name, suite in SUITES.items()
}


@pytest.mark.parametrize(("suite", "mutant"), _cases(SUITES))
def test_a_mutant_is_noticed(suite: Suite, mutant: Mutant, tmp_path: Path) -> None:
    loaded = suite.load(mutant, tmp_path)
    with pytest.raises(suite.errors):
        suite.check(loaded, mutant.killer)


@pytest.mark.parametrize(("suite", "copy"), _cases(COPIES))
def test_an_unbroken_copy_passes(suite: Suite, copy: Mutant, tmp_path: Path) -> None:
    suite.check(suite.load(copy, tmp_path), copy.killer)
