"""Each broken rule is noticed: the tests of the tests.

Proves that every mutant of the tables in this folder fails the check named as its killer, and that
an unbroken copy, loaded the same way, passes it. Mutants of `strategies` compile: they are slow.
"""

from pathlib import Path

import pytest

from tests.mutants.suites import SUITES
from tests.mutation import Mutant, Suite, mutate, sources

pytestmark = pytest.mark.long


def _unbroken(suite: Suite) -> list[Mutant]:
    """A copy without changes for each killer."""
    killers = sorted({mutant.killer for mutant in suite.mutants})
    return [Mutant(f"unbroken_{i}", killer, ()) for i, killer in enumerate(killers)]


def _cases(mutants: dict[str, list[Mutant]]) -> list:
    return [
        pytest.param(
            SUITES[suite],
            mutant,
            id=f"{suite}-{mutant.name if mutant.changes else mutant.killer}",
            marks=[] if suite in ("engine", "automata") else pytest.mark.slow,
        )
        for suite in mutants
        for mutant in mutants[suite]
    ]


@pytest.mark.parametrize(
    ("suite", "mutant"), _cases({name: suite.mutants for name, suite in SUITES.items()})
)
def test_a_mutant_is_noticed(suite: Suite, mutant: Mutant, tmp_path: Path) -> None:
    check = suite.prepare(mutant, tmp_path)
    with pytest.raises(suite.errors):
        check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "copy"), _cases({name: _unbroken(suite) for name, suite in SUITES.items()})
)
def test_an_unbroken_copy_passes(suite: Suite, copy: Mutant, tmp_path: Path) -> None:
    suite.prepare(copy, tmp_path)()


@pytest.mark.parametrize("name", SUITES)
def test_every_mutant_fits_the_source(name: str) -> None:
    suite = SUITES[name]
    texts, misfits = sources(suite.package), []
    for mutant in suite.mutants:
        try:
            mutate(texts, mutant)
        except ValueError as error:
            misfits.append(str(error))
    assert misfits == []
    assert len({mutant.name for mutant in suite.mutants}) == len(suite.mutants)


def test_a_mutant_that_no_longer_applies_is_an_error() -> None:
    gone = Mutant("gone", "machine", (("pages.py", "no such expression", ""),))
    with pytest.raises(ValueError, match=r"occurs 0 times in pages\.py"):
        mutate(sources(SUITES["engine"].package), gone)
