"""Checks that notice mutants of the engine."""

from types import ModuleType

from tests.engine import test_engine_machine, test_pages, test_scheduler

RUNS = 200  # seeded runs of the state machine; most mutants fail one of the first ten
MODULES = {
    "test_engine_machine": test_engine_machine,
    "test_pages": test_pages,
    "test_scheduler": test_scheduler,
}


def check_engine(host: ModuleType, killer: str) -> None:
    if killer == "machine":
        test_engine_machine.run_many(0, RUNS, host)
        return
    file, test = killer.split(".")
    getattr(MODULES[file], test)(host)
