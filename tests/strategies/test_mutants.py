"""Each rule of the decoding contract, broken once, is noticed: the tests of the tests.

Proves that the scripts which `strategies/` passes tell a right rule from a wrong one: every
mutant of tests/oracles/mutants.py (opening, acceptance, forcing, committing, finishing,
remasking) differs from the list decoder on at least one script of a small fixed corpus, and the
unbroken package, copied and loaded the same way, on none.
"""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from tests.oracles.list_decoder import (
    Result,
    block_diffusion_rule,
    list_ar,
    list_decode,
    multi_bd_rule,
)
from tests.oracles.mutants import MUTANTS, Mutant, load_mutant
from tests.strategies.test_strategy_fuzz import Case, check_agreement, draw_case

pytestmark = pytest.mark.slow  # it tests tests, which change seldom, and compiles each mutant

SCRIPTS = 200
BLOCK_SIZE, BUFFER_SIZE = 4, 3
# Thresholds and probabilities that meet exactly, so that strictness shows.
EDGES = np.array([0.25, 0.5, 0.75, 0.9], np.float32)

# Two scripts of three and more notice these: the fuzz would as well. They run in `make test-all`.
CRUDE = frozenset(
    {
        "ar_forgets_the_first_token",
        "ar_moves_by_two",
        "ar_settles_the_anchor_only",
        "ar_window_is_a_dummy",
        "commits_at_once",
        "emits_the_stop",
        "entropy_of_the_highest_first",
        "entropy_prefix_is_inclusive",
        "first_block_needs_a_gate",
        "forces_beside_accepted",
        "never_forces",
        "opens_last",
        "prefill_is_a_forward",
        "quota_remainder_last",
        "quota_remainder_lasts_longer",
        "sequential_from_the_right",
        "sequential_skips_holes",
        "static_takes_the_least_sure",
    }
)


@pytest.fixture(autouse=True)
def _compile_quickly() -> Iterator[None]:
    """A mutant is compiled for a few dozen scripts of a few steps."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def corpus_case(corpus: str, number: int) -> tuple[np.random.Generator, Case]:
    rng = np.random.default_rng((sum(corpus.encode()), number))
    case = draw_case(rng, BLOCK_SIZE)
    if number % 2:
        case.prob[:] = rng.choice(EDGES, size=case.prob.shape)
    return rng, case


def run_multi_bd(package: ModuleType, number: int) -> tuple[Any, Result]:
    rng, case = corpus_case("multi_bd", number)
    accept, semi = (float(x) for x in rng.choice([*EDGES, 1.5], size=2))
    add = float(rng.choice([0.0, 0.25, 0.5, 1.0]))
    if number % 3 == 0:  # several blocks at once, half filled, the gate of the later ones in play
        accept, add, semi = 0.75, 0.0, float(rng.choice([0.5, 0.75, 1.0]))
        case.prob[:] = rng.choice(EDGES, size=case.prob.shape, p=[0.4, 0.3, 0.1, 0.2])
        case.limits.update(max_tokens=20, max_model_len=None, max_nfe=None)
    strategy = package.MultiBD(
        accept_threshold=accept,
        add_block_threshold=add,
        semi_complete_threshold=semi,
        block_size=BLOCK_SIZE,
        buffer_size=BUFFER_SIZE,
    )
    script = (case.prompt, case.token, case.prob)
    truth = list_decode(
        multi_bd_rule(accept, semi),
        *script,
        block_size=BLOCK_SIZE,
        buffer_size=BUFFER_SIZE,
        add_block_threshold=add,
        **case.limits,
    )
    return package.testing.run_script(strategy, *script, **case.limits), truth


def run_block_diffusion(package: ModuleType, remasking: str, number: int) -> tuple[Any, Result]:
    rng, case = corpus_case(remasking, number)
    if remasking == "entropy":  # of one token, entropies tie exactly (test_strategy_fuzz.py)
        case.token[:] = case.token[:, :1]
        case.prob[rng.random(case.prob.shape) < 0.2] = 1.0
    fields: dict[str, Any] = {
        "accept_threshold": float(rng.choice(EDGES)),
        "entropy_bound": float(rng.choice([0.0, 1.0, 2.0, 4.0])),
        "denoising_steps": 3,
    }
    strategy = package.BlockDiffusion(remasking=remasking, block_size=BLOCK_SIZE, **fields)
    script = (case.prompt, case.token, case.prob)
    truth = Result()
    rule = block_diffusion_rule(remasking, **fields, result=truth)
    list_decode(rule, *script, block_size=BLOCK_SIZE, buffer_size=1, result=truth, **case.limits)
    return package.testing.run_script(strategy, *script, **case.limits), truth


def run_repetition(package: ModuleType, number: int) -> tuple[Any, Result]:
    """`run_script` has no `max_run`: what it holds for "no limit" stands in for one."""
    rng, case = corpus_case("repetition", number)
    case.token[:] = rng.choice([1, 2], size=case.token.shape, p=[0.8, 0.2])
    limits = {**case.limits, "max_nfe": 99, "eos_ids": ()}
    max_run = int(rng.integers(2, 5))
    package.testing.NO_LIMIT = max_run
    strategy = package.MultiBD(accept_threshold=0.5, block_size=BLOCK_SIZE, buffer_size=BUFFER_SIZE)
    script = (case.prompt, case.token, case.prob)
    truth = list_decode(
        multi_bd_rule(0.5, 0.9),
        *script,
        block_size=BLOCK_SIZE,
        buffer_size=BUFFER_SIZE,
        add_block_threshold=0.1,
        max_run=max_run,
        **limits,
    )
    return package.testing.run_script(strategy, *script, **limits), truth


def run_ar(package: ModuleType, number: int) -> tuple[Any, Result]:
    _, case = corpus_case("ar", number)
    script = (case.prompt, case.token, case.prob)
    truth = list_ar(*script, **case.limits)
    return package.testing.run_script(package.AR(), *script, **case.limits), truth


def agrees(package: ModuleType, corpus: str, number: int) -> bool:
    if corpus == "multi_bd":
        trace, truth = run_multi_bd(package, number)
    elif corpus == "ar":
        trace, truth = run_ar(package, number)
    elif corpus == "repetition":
        trace, truth = run_repetition(package, number)
    else:
        trace, truth = run_block_diffusion(package, corpus, number)
    if truth.undecided:
        return True
    try:
        check_agreement(trace, truth, number)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("corpus", sorted({mutant.corpus for mutant in MUTANTS}))
def test_the_unbroken_copy_passes_its_corpus(corpus: str, tmp_path: Path) -> None:
    package = load_mutant(f"none_{corpus}", (), tmp_path)
    wrong = [number for number in range(SCRIPTS) if not agrees(package, corpus, number)]
    assert wrong == []


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(
            mutant, id=mutant.name, marks=[pytest.mark.slow] if mutant.name in CRUDE else []
        )
        for mutant in MUTANTS
    ],
)
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    package = load_mutant(mutant.name, mutant.changes, tmp_path)
    assert not all(agrees(package, mutant.corpus, number) for number in range(SCRIPTS))


def test_only_mutants_are_called_crude() -> None:
    assert {mutant.name for mutant in MUTANTS} > CRUDE


def test_a_mutant_that_no_longer_applies_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"occurs 0 times in strategies/blocks\.py"):
        load_mutant("gone", (("blocks.py", "no such expression", ""),), tmp_path)
