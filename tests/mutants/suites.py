"""What notices each mutant: for every table, how to load a mutant and the checks to run on it."""

from types import ModuleType

import pytest

import dllm_jax.engine
from tests.engine import test_engine_machine, test_pages, test_scheduler
from tests.mutants import engine
from tests.mutation import Suite, copy_package

ENGINE_RUNS = 200  # seeded runs of the state machine; most mutants fail one of the first ten
ENGINE_TESTS = {
    module.__name__.rpartition(".")[2]: module
    for module in (test_engine_machine, test_pages, test_scheduler)
}


def check_engine(host: ModuleType, killer: str) -> None:
    if killer == "machine":
        test_engine_machine.run_many(0, ENGINE_RUNS, host)
    else:
        file, test = killer.split(".")
        getattr(ENGINE_TESTS[file], test)(host)


SUITES = {
    "engine": Suite(
        engine.MUTANTS,
        lambda mutant, folder: copy_package(dllm_jax.engine, mutant, folder),
        check_engine,
        (Exception, pytest.fail.Exception),
    ),
}
