"""The curves of a run as a PNG, from its log. Nothing here knows how the run was made."""

import json
import pathlib
from typing import Any


def read_log(path: str | pathlib.Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training lines and evaluation lines of a `metrics.jsonl`."""
    lines = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    return [x for x in lines if "eval" not in x], [x for x in lines if "eval" in x]


def draw_curves(log: str | pathlib.Path, png: str | pathlib.Path) -> None:
    """Loss, masked-digit accuracy and held-out exact match over steps."""
    import matplotlib  # heavy, and needed here only

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, evals = read_log(log)
    x = [line["step"] for line in steps]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.6), dpi=90)
    left.semilogy(x, [line["loss"] for line in steps], linewidth=0.8)
    left.set(title="loss", xlabel="step")
    middle.semilogy(x, [1 - line["digit_accuracy"] for line in steps], linewidth=0.8)
    middle.set(title="masked digits wrong (share)", xlabel="step")
    for half in ("plain", "hard"):
        for buffer, style in ((1, "o-"), (4, "s--")):
            points = [
                (line["step"], 100 * line["eval"]["exact"])
                for line in evals
                if line["eval"]["half"] == half and line["eval"]["buffer"] == buffer
            ]
            if points:
                right.plot(*zip(*points, strict=True), style, label=f"{half}, buffer {buffer}")
    right.set(title="held-out problems right, %", xlabel="step")
    if evals:
        right.legend()
    figure.tight_layout()
    figure.savefig(png)
    pyplot.close(figure)
