"""Each rule of the host loop, broken once, is noticed: the tests of the tests.

Proves that every mutant of tests/oracles/engine_mutants.py (pages, queue, prefix cache, growth and
giving way, rounds, failure, intake) fails the test named with it, and that the unbroken modules,
copied and loaded the same way, pass all of these. Nothing here needs a device or JAX.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.engine import test_engine_machine, test_pages, test_scheduler
from tests.oracles.engine_mutants import MUTANTS, Mutant, load_mutant

RUNS = 200  # seeded runs of the machine; most mutants fail one of the first ten
MODULES = {
    "test_pages": test_pages,
    "test_scheduler": test_scheduler,
    "test_engine_machine": test_engine_machine,
}


def find_killer(name: str) -> Callable[[SimpleNamespace], None]:
    if name == "machine":
        return lambda host: test_engine_machine.run_many(0, RUNS, host)
    module, function = name.split(".")
    return getattr(MODULES[module], function)


@pytest.mark.parametrize("killer", sorted({mutant.killer for mutant in MUTANTS}))
def test_the_unbroken_copy_passes(killer: str, tmp_path: Path) -> None:
    find_killer(killer)(load_mutant(None, tmp_path))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    host = load_mutant(mutant, tmp_path)
    with pytest.raises((Exception, pytest.fail.Exception)):
        find_killer(mutant.killer)(host)


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 25


def test_a_mutant_that_no_longer_applies_is_an_error(tmp_path: Path) -> None:
    gone = Mutant("gone", "machine", "pages.py", "no such expression", "")
    with pytest.raises(ValueError, match=r"occurs 0 times in pages\.py"):
        load_mutant(gone, tmp_path)
