"""Accuracy against tokens per forward as a picture."""

from collections.abc import Mapping, Sequence
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


def draw_race(facts: Mapping[str, Any], path: Path) -> None:
    """The settings of a race with their 95 % intervals, the margin and the winner.

    Args:
        facts: What `dllm-jax tune` reports.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    looks = {None: ("C0", "o"), "slower": ("0.55", "s"), "inaccurate": ("C3", "x")}
    names = {None: "to the end", "slower": "left: slower", "inaccurate": "left: inaccurate"}
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(7.2, 5.0), layout="constrained")
        panel = figure.subplots()
        for why, (color, marker) in looks.items():
            rows = [row for row in facts["settings"].values() if row["left"] == why]
            if not rows:
                continue
            x = [row["tokens_per_forward"]["value"] for row in rows]
            y = [100 * row["exact"]["value"] for row in rows]
            panel.errorbar(
                x,
                y,
                xerr=_bars(rows, "tokens_per_forward", 1),
                yerr=_bars(rows, "exact", 100),
                fmt=marker,
                color=color,
                elinewidth=0.8,
                markersize=5,
                label=names[why],
            )
        reference = 100 * facts["settings"][facts["reference"]]["exact"]["value"]
        margin = facts["margin_points"]
        panel.axhspan(
            reference - margin,
            reference,
            color="C2",
            alpha=0.15,
            label=f"margin, {margin:g} points",
        )
        best = facts["settings"][facts["winner"]]
        place = best["tokens_per_forward"]["value"], 100 * best["exact"]["value"]
        panel.plot(*place, marker="*", markersize=15, color="C1", linestyle="", label="winner")
        slowest = facts["settings"][facts["reference"]]
        start = slowest["tokens_per_forward"]["value"], reference
        left, right = panel.get_xlim()
        for text, (x, y) in ((facts["winner"], place), ("reference", start)):
            is_left = x < (left + right) / 2  # the text stays within the frame
            panel.annotate(
                text.replace(",", "\n"),
                (x, y),
                xytext=(8 if is_left else -8, -8),
                textcoords="offset points",
                fontsize=8,
                verticalalignment="top",
                horizontalalignment="left" if is_left else "right",
            )
        panel.set(
            title=f"{facts['model']}, {facts['set']}: up and right is better",
            xlabel="tokens per forward (95 % interval)",
            ylabel="accuracy (%, 95 % interval)",
        )
        panel.margins(0.1)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, loc="lower left")
        figure.savefig(path)


def _bars(rows: Sequence[Mapping[str, Any]], name: str, scale: float) -> list[list[float]]:
    """Lengths of error bars below and above."""
    found: list[list[float]] = [[], []]
    for row in rows:
        low, high = row[name]["ci95"]
        found[0].append(max(scale * (row[name]["value"] - low), 0))
        found[1].append(max(scale * (high - row[name]["value"]), 0))
    return found
