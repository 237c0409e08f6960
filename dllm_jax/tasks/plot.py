"""Accuracy against tokens per forward as a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def draw(halves: Mapping[str, Any], curves: Mapping[str, Mapping[str, str]], path: Path) -> None:
    """One panel a set of problems, one line a strategy, one labelled point a setting.

    Args:
        halves: By set of problems, what `summarise` says of each label.
        curves: By strategy, its labels in the order of the line, each with the text at its point.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Text stays text in an SVG: it can be searched and copied.
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(6.4 * len(halves), 4.8), layout="tight")
        panels = figure.subplots(1, len(halves), squeeze=False)[0]
        for panel, (half, results) in zip(panels, halves.items(), strict=True):
            for name, points in curves.items():
                found = [results[label] for label in points]
                x = [one["tokens_per_forward"]["value"] for one in found]
                y = [100 * one["exact"]["value"] for one in found]
                panel.plot(x, y, marker="o", label=name)
                for place, text in zip(zip(x, y, strict=True), points.values(), strict=True):
                    panel.annotate(
                        text, place, xytext=(4, 4), textcoords="offset points", fontsize=8
                    )
            panel.set(title=half, xlabel="tokens per forward", ylabel="accuracy (%)")
            panel.margins(0.12)
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)
        figure.suptitle("Up and right is better", fontsize=10)
        figure.savefig(path)
