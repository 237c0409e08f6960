"""Checks that notice mutants of `strategies`: scripts on which a mutant differs from its oracle."""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import numpy as np

from tests.oracles.dmax_decoder import Rules
from tests.oracles.list_decoder import (
    Result,
    block_diffusion_rule,
    list_ar,
    list_decode,
    multi_bd_rule,
)
from tests.oracles.rule_checks import CHECKS
from tests.strategies import test_d2f, test_edit, test_edit_indel
from tests.strategies.test_dmax import check_dmax as check_script
from tests.strategies.test_dmax import draw_dmax, draw_rules, mixtures_of
from tests.strategies.test_strategy_fuzz import Case, check_agreement, draw_case

RULE_SEEDS = 20
SCRIPTS, DMAX_SCRIPTS, EDIT_SCRIPTS = 200, 300, 150
BLOCK_SIZE, BUFFER_SIZE = 4, 3
# Thresholds and probabilities that meet exactly, so that strictness shows.
EDGES = np.array([0.25, 0.5, 0.75, 0.9], np.float32)


@contextlib.contextmanager
def compiled_quickly() -> Iterator[None]:
    """A mutant is compiled for a few dozen scripts of a few steps."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def check_rules(package: ModuleType, name: str) -> None:
    for seed in range(RULE_SEEDS):
        CHECKS[name](package, np.random.default_rng(seed))


def check_decoding(package: ModuleType, corpus: str) -> None:
    with compiled_quickly():
        assert all(agrees(package, corpus, number) for number in range(SCRIPTS))


def check_dmax(package: ModuleType, mode: str) -> None:
    with compiled_quickly(), mixtures_of(package) as shown:
        for number in range(DMAX_SCRIPTS):
            run_dmax(package, shown, mode, number)


def check_edit(package: ModuleType, _: str) -> None:
    with compiled_quickly():
        assert all(test_edit.corpus(package, number) for number in range(EDIT_SCRIPTS))


def check_edit_indel(package: ModuleType, _: str) -> None:
    with compiled_quickly():
        assert all(test_edit_indel.corpus(package, number) for number in range(EDIT_SCRIPTS))


def check_d2f(package: ModuleType, _: str) -> None:
    with compiled_quickly():
        assert test_d2f.agrees(package)


def check_opening(package: ModuleType, strategy: str) -> None:
    """That a stop id is found anew each step, above all (trap 8)."""
    if strategy == "edit":
        check_edit(package, "")
    else:
        check_dmax(package, "paper")


# --- decoding -------------------------------------------------------------------------------------


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
    package.testing.script.NO_LIMIT = max_run
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


# --- dmax ---


def run_dmax(package: ModuleType, shown: list[dict[int, Any]], mode: str, number: int) -> None:
    rng, case = draw_dmax((sum(mode.encode()), number), BLOCK_SIZE)
    rules = draw_rules(rng, mode == "paper")
    if number % 2:  # thresholds and probabilities that meet exactly, so that strictness shows
        case.prob[:] = rng.choice(EDGES, size=case.prob.shape)
        accept, commit = (float(x) for x in rng.choice(EDGES, size=2))
        rules = Rules(accept, 0.25, float(rng.choice([0.0, 0.5])), commit, rules.paper)
    sizes = {"block_size": BLOCK_SIZE, "buffer_size": BUFFER_SIZE}
    check_script(package, shown, rules, case, sizes, weight=0.0 if number % 7 == 0 else 1.0)
