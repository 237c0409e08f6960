"""Draws the curves of a run as a PNG, from its log."""

import json
import pathlib
from collections.abc import Callable
from typing import Any


def read_log(path: str | pathlib.Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training lines and evaluation lines of a `metrics.jsonl`."""
    lines = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    return [x for x in lines if "eval" not in x], [x for x in lines if "eval" in x]


# The first metric that the log has is drawn: title, transform, whether on a log scale.
_PROGRESS: dict[str, tuple[str, Callable[[float], float], bool]] = {
    "digit_accuracy": ("masked digits wrong (share)", lambda x: 1 - x, True),
    "token_accuracy": ("tokens of the response wrong (share)", lambda x: 1 - x, True),
    "accepted": ("accepted length, teacher-forced on answers", lambda x: x, False),
}
_SCORES: dict[str, tuple[str, float]] = {
    "accepted": ("accepted length, held-out problems", 1.0),
    "exact": ("held-out problems right, %", 100.0),
}


def draw_curves(log: str | pathlib.Path, png: str | pathlib.Path) -> None:
    """Draw loss, metrics of the task and evaluations over steps."""
    import matplotlib  # heavy, and needed here only

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, evals = read_log(log)
    x = [line["step"] for line in steps]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.6), dpi=90)
    left.semilogy(x, [line["loss"] for line in steps], linewidth=0.8)
    left.set(title="loss", xlabel="step")
    for name, (title, of, is_log) in _PROGRESS.items():
        if steps and name in steps[0]:
            draw = middle.semilogy if is_log else middle.plot
            draw(x, [of(line[name]) for line in steps], linewidth=0.8)
            middle.set(title=title, xlabel="step")
            break
    for name, (title, factor) in _SCORES.items():
        found: dict[str, list[tuple[int, float]]] = {}
        for line in evals:
            if name in line["eval"]:
                points = found.setdefault(_label(line["eval"]), [])
                points.append((line["step"], factor * line["eval"][name]))
        for label, points in found.items():
            right.plot(*zip(*points, strict=True), "o-", label=label)
        if found:
            right.set(title=title, xlabel="step")
            right.legend()
            break
    figure.tight_layout()
    figure.savefig(png)
    pyplot.close(figure)


def _label(score: dict[str, Any]) -> str:
    return ", ".join([score["half"], *(f"buffer {score[k]}" for k in ("buffer",) if k in score)])
