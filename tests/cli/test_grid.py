"""Grids of `eval` and `tune`: one syntax, whole labels, parts that are stored and gone on from."""

import json
import signal

import numpy as np
import pytest

from dllm_jax.cli import grid, main
from dllm_jax.cli.errors import UsageError
from dllm_jax.cli.stored import Stored
from dllm_jax.engine.requests import DraftMetrics
from dllm_jax.strategies import BlockDiffusion, MultiBD
from dllm_jax.tasks import evaluate, plot, summary

pytestmark = pytest.mark.usefixtures("no_compile_cache")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("k=0.334", [0.334]),
        ("k=0.9,0.5", [0.9, 0.5]),
        ("k=0.5:0.9:3", [0.5, 0.7, 0.9]),
        ("k=0.001:0.1:3:log", [0.001, 0.01, 0.1]),
        ("k=0:0.1:4", [0, 0.0333333, 0.0666667, 0.1]),
    ],
)
def test_50_1_values_are_listed_or_spaced(text, values):
    assert grid.values(text) == ("k", values)


@pytest.mark.parametrize(
    "text", ["k", "k=", "k=a", "k=1,1", "k=1:2", "k=2:1:3", "k=0:1:3:log", "k=0:1:1", "k=0:1:2:x"]
)
def test_50_1_other_values_are_refused(text):
    with pytest.raises(grid.argparse.ArgumentTypeError, match="KNOB=LOW:HIGH:N:log"):
        grid.values(text)


STRATEGIES = {"multi_bd": MultiBD(), "mine.py:b": BlockDiffusion()}


def test_50_1_several_knobs_make_a_grid_with_whole_labels(capsys):
    asked = [("accept_threshold", [0.334, 0.5]), ("add_block_threshold", [0.1])]
    found = grid.settings_of(STRATEGIES, asked)
    assert found == {
        "multi_bd": {
            f"multi_bd,accept_threshold={value},add_block_threshold=0.1": {
                "accept_threshold": value,
                "add_block_threshold": 0.1,
            }
            for value in (0.334, 0.5)
        },
        "mine.py:b": {
            f"mine.py:b,accept_threshold={value}": {"accept_threshold": value}
            for value in (0.334, 0.5)
        },
    }
    said = capsys.readouterr().err
    assert said == "note: mine.py:b has no add_block_threshold, so it does not vary there\n"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([("accept_threshold", [1])] * 2, "names a threshold twice"),
        ([("kl_threshold", [1])], "none of multi_bd, mine.py:b has that threshold"),
        ([("accept_threshold", [-1])], "accept_threshold=-1"),
        ([("accept_threshold", [i / 60 for i in range(60)])], "makes 120 settings; at most 100"),
    ],
)
def test_50_1_grids_that_cannot_be_run_are_refused(asked, words):
    with pytest.raises(UsageError, match=words):
        grid.settings_of(STRATEGIES, asked)


@pytest.mark.parametrize("spoilt", ['["cut off', "3\n", '[["x"], 1]\n', "[" * 99_999, "\x00\udcff"])
def test_50_1_parts_are_taken_up_but_not_those_of_another_run(tmp_path, capsys, spoilt):
    output = str(tmp_path / "r.json")
    stored = Stored(output, {"seed": 0, "model": "a"})
    stored.add("hard", "x", part={"right": [True]})
    stored.add([1, 2], [3], part=[4])
    with (tmp_path / "r.json.partial").open("a", errors="surrogateescape") as file:
        file.write(spoilt)
    again = Stored(output, {"seed": 0, "model": "a"})
    assert (again.get("hard", "x"), again.get([1, 2], [3])) == ({"right": [True]}, [4])
    assert again.get("hard", "y") is None
    assert "going on from 2 parts" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"parts of another run \(seed\); remove it"):
        Stored(output, {"seed": 1, "model": "a"})
    assert (
        again.tell() == f"interrupted; the same command goes on from 2 parts in '{output}.partial'"
    )
    again.finish()
    assert not list(tmp_path.iterdir())
    lost = Stored(None, {})
    assert lost.tell() == "interrupted; nothing was finished"
    lost.add("x", part=1)
    assert lost.tell() == "interrupted; 1 part finished, kept only with --output FILE"
    assert not list(tmp_path.iterdir())


def outcome(right, drafted=None):
    right = np.array(right)
    counts = np.arange(1, len(right) + 1)
    texts = ("t",) * len(right)
    return evaluate.Outcome(right, counts * 9, counts, counts, None, texts, texts, 2.5, drafted)


def test_50_1_an_outcome_is_stored_whole():
    for one in (outcome([True, False]), outcome([True], DraftMetrics((1, 2), (3,), (2,)))):
        again = evaluate.outcome_from_json(json.loads(json.dumps(evaluate.outcome_json(one))))
        assert summary.summarise(again) == summary.summarise(one)


def test_50_1_a_run_that_was_cut_off_goes_on(random_folder, tmp_path, monkeypatch, capsys):
    ran = []

    def sweep(model, strategy, settings, of, *, progress, **how):
        for i, setting in enumerate(settings, 1):
            ran.append(setting)
            if len(ran) == 3:
                signal.raise_signal(signal.SIGINT)
            progress(2 * i, [outcome([True] * len(of.problems))] * i)

    monkeypatch.setattr(evaluate, "sweep", sweep)
    out, svg = tmp_path / "r.json", tmp_path / "r.svg"
    argv = ["eval", "--model", str(random_folder), "--problems", "2", "--no-one-token"]
    argv += ["--strategy", "multi_bd", "--grid", "accept_threshold=0.5,0.9", "--half", "both"]
    argv += ["--output", str(out)]
    assert main(argv) == 128 + signal.SIGINT
    said = capsys.readouterr().err
    assert f"error: interrupted; the same command goes on from 2 parts in '{out}.partial'" in said
    assert "plain, multi_bd,accept_threshold=0.9: 100.0 [34.2, 100.0] % exact, 9.00 " in said
    assert main(argv) == 0
    assert [one["accept_threshold"] for one in ran] == [0.5, 0.9, 0.5, 0.5, 0.9]
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert main(["eval", "--plot-from", str(out), "--plot", str(svg)]) == 0
    drawn = svg.read_text()
    for text in ("hard, 2 problems", "multi_bd (points: accept_threshold)", ">0.9<"):
        assert text in drawn
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "list.json").write_text('{"curves": [[]]}')
    for name in ("deep", "list"):
        spoilt = str(tmp_path / f"{name}.json")
        assert main(["eval", "--plot-from", spoilt, "--plot", str(svg)]) == 2
    for file, plotted in ((__file__, str(svg)), (str(out), None), ("none", str(svg))):
        more = [] if plotted is None else ["--plot", plotted]
        assert main(["eval", "--plot-from", file, *more]) == 2


def test_50_1_labels_of_a_plot_do_not_overlap():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    panel = figure.subplots()
    panel.set(xlim=(0, 10), ylim=(0, 10))
    plot._label(figure, {panel: [((5 + i / 10, 5.0), f"0.{i}34, 0.5") for i in range(8)]})
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in panel.texts]
    assert len(boxes) == 8
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
