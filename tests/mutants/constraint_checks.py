"""Checks that notice mutants of grammars in `strategies.core` and of `structured.automaton`."""

from types import ModuleType
from unittest import mock

from tests.structured import test_compile, test_conform, test_draws, test_plan


def check_constraint(modules: tuple[ModuleType, ModuleType], killer: str) -> None:
    """`grammar_plan` and `driver` by what their texts are."""
    plan, driver = modules
    what, _, name = killer.partition(" ")
    if what == "plans":
        for seed in range(4):
            test_plan.check_plans(plan, seed)
    elif what == "draws":
        for seed in range(test_draws.TOYS):
            test_draws.check_shares(plan, seed)
    else:
        with mock.patch.object(test_conform, "driver", driver):
            test_conform.check_texts(name, 3)


def check_automata(automaton: ModuleType, _: str) -> None:
    """Tokens are walked as their bytes are."""
    test_compile.check_dead_ways(automaton)
    for pattern in test_compile.PATTERNS[:8]:
        test_compile.check_spellings(automaton, pattern)
