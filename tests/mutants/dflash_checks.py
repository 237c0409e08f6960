"""Checks that a mutant of `dflash`, `drafting` or `rejection` must fail."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.contract.cases import case, paged
from tests.strategies.test_dflash import LAYERS, check_batches, check_guesses
from tests.strategies.test_dflash_rejection import FAR, check_drawn, check_enumeration, check_texts
from tests.strategies.test_dflash_widths import (
    check_choice,
    check_learning,
    check_runs,
    check_single,
    check_wandering,
)


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


# Each takes the modules `dflash`, `drafting` and `rejection`.
CORPORA: dict[str, Callable[[Any, Any, Any], Any]] = {
    "rounds": lambda dflash, *_: check_batches(dflash.DFlash(5, LAYERS, 5), 0, 8),
    "width": lambda dflash, *_: check_batches(dflash.DFlash(5, LAYERS, 3), 0, 8),
    "wandering": lambda dflash, *_: check_wandering(0, 6, dflash.DFlash),
    "guesses": lambda dflash, *_: check_guesses(dflash.DFlash(5, LAYERS, 5)),
    "cache": lambda dflash, *_: check_cache(dflash.DFlash(4, LAYERS, 4)),
    "cache_off": lambda dflash, *_: check_cache(dflash.DFlash(4, LAYERS, 1)),
    "enumerated": lambda _, __, rejection: check_enumeration(rejection),
    "drawn": lambda _, __, rejection: check_chance(check_drawn(rejection)),
    "network": lambda dflash, *_: check_chance(check_texts(dflash.DFlash)),
    "learning": lambda _, drafting, __: check_learning(drafting),
    "runs": lambda _, drafting, __: check_runs(drafting),
    "single": lambda _, drafting, __: check_single(drafting),
    "choice": lambda _, drafting, __: check_choice(drafting),
}


def check_dflash(modules: tuple[Any, Any, Any], corpus: str) -> None:
    CORPORA[corpus](*modules)
