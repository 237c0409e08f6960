"""That wrong versions of `DFlash` are noticed, and by which of its proofs."""

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dllm_jax import strategies
from tests.contract.cases import case, paged
from tests.oracles.dflash_mutants import MUTANTS
from tests.oracles.mutants import Mutant
from tests.strategies.test_dflash import LAYERS, check_batches, check_guesses
from tests.strategies.test_dflash_rejection import FAR, check_drawn, check_enumeration, check_texts
from tests.strategies.test_dflash_widths import (
    check_choice,
    check_learning,
    check_runs,
    check_single,
    check_wandering,
)

pytestmark = pytest.mark.slow  # it tests tests, which change seldom, and compiles each mutant


def check_cache(strategy: Any) -> None:
    """Both pools hold of every text what dense passes make of it."""
    c = case("dflash")
    decoded = paged("dflash", strategy=strategy)
    for row, request in zip(decoded.rows, c.requests, strict=True):
        assert c.cache is not None
        text = [*request.prompt, *row.tokens][: row.cached]
        for pool, layers in c.cache(request, text).items():
            for got, want in zip(decoded.cache(row, pool), layers, strict=True):
                for a, b in zip(got, want, strict=True):
                    np.testing.assert_allclose(a[: len(text)], b[: len(text)], 1e-4, 1e-4)


def check_chance(deviations: float) -> None:
    assert deviations < FAR


# Each takes the modules `dflash` and `drafting`.
CORPORA: dict[str, Callable[[Any, Any], Any]] = {
    "rounds": lambda dflash, _: check_batches(dflash.DFlash(5, LAYERS, 5), 0, 8),
    "width": lambda dflash, _: check_batches(dflash.DFlash(5, LAYERS, 3), 0, 8),
    "wandering": lambda dflash, _: check_wandering(0, 6, dflash.DFlash),
    "guesses": lambda dflash, _: check_guesses(dflash.DFlash(5, LAYERS, 5)),
    "cache": lambda dflash, _: check_cache(dflash.DFlash(4, LAYERS, 4)),
    "cache_off": lambda dflash, _: check_cache(dflash.DFlash(4, LAYERS, 1)),
    "enumerated": lambda _, drafting: check_enumeration(drafting),
    "drawn": lambda _, drafting: check_chance(check_drawn(drafting)),
    "network": lambda dflash, _: check_chance(check_texts(dflash.DFlash)),
    "learning": lambda _, drafting: check_learning(drafting),
    "runs": lambda _, drafting: check_runs(drafting),
    "single": lambda _, drafting: check_single(drafting),
    "choice": lambda _, drafting: check_choice(drafting),
}


def load(name: str, changes: tuple[tuple[str, str, str], ...]) -> tuple[Any, Any]:
    """Both modules, one a changed copy; the rest of the package is the real one."""
    drafting, dflash = (_changed(name, file, changes) for file in ("drafting.py", "dflash.py"))
    dflash.__dict__["drafting"] = drafting
    return dflash, drafting


def _changed(name: str, file: str, changes: tuple[tuple[str, str, str], ...]) -> Any:
    source = (Path(strategies.__file__).parent / file).read_text()
    for place, old, new in changes:
        if place == file:
            assert source.count(old) == 1, f"{old!r} is not once in {file}; rewrite mutant {name!r}"
            source = source.replace(old, new)
    module = types.ModuleType(f"{name}_{file[:-3]}")
    exec(compile(source, f"{name}_{file}", "exec"), module.__dict__)
    return module


@functools.cache
def passes(corpus: str) -> bool:
    CORPORA[corpus](*load("none", ()))
    return True


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_version_is_noticed(mutant: Mutant) -> None:
    assert passes(mutant.corpus)
    with pytest.raises(AssertionError):
        CORPORA[mutant.corpus](*load(mutant.name, mutant.changes))
