"""Proves that docs/strategies.md shows what was measured: its figure and its table are those of the
results in benchmarks/results, which are of 2,000 problems and more of each half.
"""

import json
from pathlib import Path

import pytest

from benchmarks import strategies_figure

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def accuracy():
    return json.loads((ROOT / "benchmarks/results/strategies_accuracy_h200.json").read_text())


def test_the_figure_is_drawn_from_the_results(accuracy):
    drawn = (ROOT / "docs/strategies_accuracy.svg").read_text()
    assert drawn == strategies_figure.draw(accuracy)


def test_the_table_is_that_of_the_results(accuracy):
    assert strategies_figure.table(accuracy) in (ROOT / "docs/strategies.md").read_text()


def test_enough_problems_were_solved(accuracy):
    halves = [
        half
        for section in accuracy["sections"].values()
        for row in section["settings"]
        for half in row["halves"].values()
    ]
    assert halves
    assert min(half["problems"] for half in halves) >= 2000
