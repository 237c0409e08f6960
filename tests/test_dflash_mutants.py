"""That wrong versions of `DFlash` are noticed, and by which of its proofs."""

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strategies
from tests.contract.cases import case, paged
from tests.oracles.dflash_mutants import MUTANTS
from tests.oracles.mutants import Mutant
from tests.test_dflash import LAYERS, check_batches, check_guesses

pytestmark = pytest.mark.slow  # it tests tests, which change seldom, and compiles each mutant


def check_cache(kind: Any) -> None:
    """Both pools hold of every text what dense passes make of it."""
    c = case("dflash")
    decoded = paged("dflash", strategy=kind(4, LAYERS))
    for row, request in zip(decoded.rows, c.requests, strict=True):
        assert c.cache is not None
        text = [*request.prompt, *row.tokens][: row.cached]
        for pool, layers in c.cache(request, text).items():
            for got, want in zip(decoded.cache(row, pool), layers, strict=True):
                for a, b in zip(got, want, strict=True):
                    np.testing.assert_allclose(a[: len(text)], b[: len(text)], 1e-4, 1e-4)


CORPORA: dict[str, Callable[[Any], Any]] = {
    "rounds": lambda kind: check_batches(kind(5, LAYERS), 0, 8),
    "width": lambda kind: check_batches(kind(5, LAYERS, 3), 0, 8),
    "guesses": lambda kind: check_guesses(kind(5, LAYERS)),
    "cache": check_cache,
}


def load(name: str, changes: tuple[tuple[str, str, str], ...]) -> Any:
    """The class of a changed copy of the file; the rest of the package is the real one."""
    source = (Path(strategies.__file__).parent / "dflash.py").read_text()
    for _, old, new in changes:
        assert source.count(old) == 1, f"{old!r} is not once in dflash.py; rewrite mutant {name!r}"
        source = source.replace(old, new)
    module = types.ModuleType(name)
    exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    return module.__dict__["DFlash"]


@functools.cache
def passes(corpus: str) -> bool:
    CORPORA[corpus](load("none", ()))
    return True


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_version_is_noticed(mutant: Mutant) -> None:
    assert passes(mutant.corpus)
    with pytest.raises(AssertionError):
        CORPORA[mutant.corpus](load(mutant.name, mutant.changes))
