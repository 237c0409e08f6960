"""Proves that docs/strategies.md shows what was measured: its figure and its tables are those of
the results in benchmarks/results, which are of 2,000 problems and more of each half, and the bars
it names are kept. Arrays of logits are counted, values inside a fusion are not.
"""

import json
from pathlib import Path

import pytest

from benchmarks import strategies_figure, strategies_gpu

ROOT = Path(__file__).parents[2]


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


def test_the_steps_are_those_of_the_results():
    report = json.loads((ROOT / "benchmarks/results/strategies_h200.json").read_text())
    assert strategies_figure.step_table(report) in (ROOT / "docs/strategies.md").read_text()
    assert all(row["within_bar"] and not row["faults"] for row in report["rows"])


def test_logits_inside_a_fusion_are_no_array():
    text = """HloModule m

%inner (p: bf16[99,8]) -> f32[99] {
  %wide = f32[4096,99]{1,0} broadcast(%p)
  ROOT %sum = f32[99]{0} reduce(%wide), dimensions={0}
}

%branch (q: f32[8]) -> f32[2,32,99] {
  ROOT %logits = f32[2,32,99]{2,1,0} custom-call(%q)
}

ENTRY %main (x: f32[8]) -> f32[99] {
  ROOT %out = f32[99]{0} fusion(%x), kind=kInput, calls=%inner
}
"""
    assert strategies_gpu.logit_rows(text, 99) == [1, 64]
    assert strategies_gpu.logit_rows(text.replace("calls=%inner", ""), 99) == [1, 64, 4096]
