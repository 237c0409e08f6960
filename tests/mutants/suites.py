"""The suites of mutants: for each table, the package to copy and the check to run on a mutant."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dllm_jax.engine
import dllm_jax.structured
from dllm_jax import strategies
from dllm_jax.strategies.core import constraint as constraint_module
from dllm_jax.strategies.core import driver, grammar_paths, grammar_plan, grammar_walk, random
from dllm_jax.strategies.dflash import dflash as dflash_module
from dllm_jax.strategies.dflash import drafting, rejection
from dllm_jax.strategies.diffusion_gemma import canvas
from dllm_jax.strategies.diffusion_gemma import diffusion_gemma as diffusion_gemma_module
from dllm_jax.structured import automaton
from tests.mutants import (
    constraint,
    d2f,
    decoding,
    dflash,
    diffusion_gemma,
    dmax,
    edit,
    edit_indel,
    engine,
    fast_dllm_v2,
    full_sequence,
    rules,
)
from tests.mutation import Mutant, Suite, copy_module


def load_dflash(mutant: Mutant, folder: Path) -> tuple[Any, Any, Any]:
    """`dflash`, `drafting` and `rejection`, mutated; the rest of the package is unbroken."""
    dflash, *shared = (copy_module(one, mutant) for one in (dflash_module, drafting, rejection))
    dflash.__dict__.update(zip(("drafting", "rejection"), shared, strict=True))
    return dflash, *shared


def load_canvas(mutant: Mutant, folder: Path) -> Any:
    """`diffusion_gemma`, `canvas` and `random`, mutated; the rest of the package is unbroken."""
    strategy = copy_module(diffusion_gemma_module, mutant)
    strategy.__dict__.update(canvas=copy_module(canvas, mutant), random=copy_module(random, mutant))
    return strategy


def load_constraint(mutant: Mutant, folder: Path) -> tuple[Any, Any]:
    """`grammar_plan` and `driver` with the modules between them, mutated; the rest is unbroken."""
    modules = constraint_module, grammar_paths, grammar_plan, grammar_walk, driver
    copies = {one: copy_module(one, mutant) for one in modules}
    for copy in copies.values():
        used = {name: one for name, one in vars(copy).items() if isinstance(one, ModuleType)}
        copy.__dict__.update({name: copies[one] for name, one in used.items() if one in copies})
    return copies[grammar_plan], copies[driver]


def load_automaton(mutant: Mutant, folder: Path) -> Any:
    """`automaton`, mutated."""
    return copy_module(automaton, mutant)


SUITES = {
    "constraint": Suite(
        strategies,
        constraint.MUTANTS,
        "tests.mutants.constraint_checks.check_constraint",
        load=load_constraint,
    ),
    "automata": Suite(
        dllm_jax.structured,
        constraint.AUTOMATA,
        "tests.mutants.constraint_checks.check_automata",
        errors=(AssertionError, KeyError),
        load=load_automaton,
    ),
    "engine": Suite(
        dllm_jax.engine,
        engine.MUTANTS,
        "tests.mutants.engine_checks.check_engine",
        errors=(Exception, pytest.fail.Exception),
    ),
    "decoding": Suite(strategies, decoding.MUTANTS, "tests.mutants.strategy_checks.check_decoding"),
    "rules": Suite(strategies, rules.MUTANTS, "tests.mutants.strategy_checks.check_rules"),
    "openings": Suite(strategies, rules.OPENING, "tests.mutants.strategy_checks.check_opening"),
    "dmax": Suite(strategies, dmax.MUTANTS, "tests.mutants.strategy_checks.check_dmax"),
    "edit": Suite(strategies, edit.MUTANTS, "tests.mutants.strategy_checks.check_edit"),
    "edit_indel": Suite(
        strategies, edit_indel.MUTANTS, "tests.mutants.strategy_checks.check_edit_indel"
    ),
    "d2f": Suite(strategies, d2f.MUTANTS, "tests.mutants.strategy_checks.check_d2f"),
    "full_sequence": Suite(
        strategies,
        full_sequence.MUTANTS,
        "tests.strategies.test_full_sequence.check_corpus",
    ),
    "fast_dllm_v2": Suite(
        strategies,
        fast_dllm_v2.MUTANTS,
        "tests.strategies.test_fast_dllm_v2.check_corpus",
    ),
    "diffusion_gemma": Suite(
        strategies,
        diffusion_gemma.MUTANTS,
        "tests.strategies.test_diffusion_gemma.check_case",
        load=load_canvas,
    ),
    "dflash": Suite(
        strategies, dflash.MUTANTS, "tests.mutants.dflash_checks.check_dflash", load=load_dflash
    ),
}
