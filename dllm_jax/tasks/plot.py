"""Accuracy against tokens per forward as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Place = tuple[float, float]

_AXES = {
    "xlabel": "tokens per forward (95 % interval)",
    "ylabel": "accuracy (%, 95 % interval)",
}
# Where a label may stand: at one of six sides of its point, 4 to 40 points of type away.
_SPOTS = [
    {
        "xytext": (right * distance, up * distance),
        "horizontalalignment": ("center", "left", "right")[right],
        "verticalalignment": "bottom" if up > 0 else "top",
    }
    for distance in (4, 14, 26, 40)
    for right, up in ((1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1))
]

_GAP = 2  # pixels around a label, so that two numbers are not read as one


def draw(facts: Mapping[str, Any], path: Path) -> None:
    """One panel a set of problems, one line a strategy, one labelled point a setting.

    Args:
        facts: What `dllm-jax eval` reports.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    curves, halves = facts["curves"], facts["halves"]
    names = {label: label.rpartition("/")[2] for label in curves}  # a file without its folders
    if len(set(names.values())) < len(names):
        names = {label: label for label in curves}
    # Text stays text in an SVG: it can be searched and copied.
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(6.4 * len(halves), 4.8), layout="tight")
        panels = figure.subplots(1, len(halves), squeeze=False)[0]
        figure.suptitle("Up and right is better", fontsize=10)
        texts: list[list[tuple[Place, str]]] = []
        for panel, (half, content) in zip(panels, halves.items(), strict=True):
            of_points: list[tuple[Place, str]] = []
            for label, points in curves.items():
                rows = [content["results"][point] for point in points]
                knobs = ", ".join(next(iter(points.values())))
                legend = f"{names[label]} (points: {knobs})" if knobs else names[label]
                _plot(panel, rows, fmt="o-" if knobs else "s", label=legend)
                of_points += [
                    (_place(row), ", ".join(f"{value:.6g}" for value in point.values()))
                    for row, point in zip(rows, points.values(), strict=True)
                ]
            texts.append([one for one in of_points if one[1]])
            number = next(iter(content["results"].values()))["problems"]
            panel.set(title=f"{facts['model']}, {half}, {number} problems", **_AXES)
            panel.margins(0.12)
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)
        _label(figure, dict(zip(panels, texts, strict=True)))
        figure.savefig(path)


def _plot(panel: Any, rows: Sequence[Mapping[str, Any]], **looks: Any) -> None:
    """Settings with their 95 % intervals."""
    x, y = zip(*map(_place, rows), strict=True)
    bars = _bars(rows, "tokens_per_forward", 1), _bars(rows, "exact", 100)
    panel.errorbar(x, y, xerr=bars[0], yerr=bars[1], elinewidth=0.8, markersize=5, **looks)


def _place(row: Mapping[str, Any]) -> Place:
    return row["tokens_per_forward"]["value"], 100 * row["exact"]["value"]


def _label(figure: Any, texts: Mapping[Any, Sequence[tuple[Place, str]]]) -> None:
    """Put texts next to points of panels, none over another; one without room is left out.

    The figure must be complete: its layout is fixed here.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for panel, of_points in texts.items():
        frame, taken = panel.get_window_extent(renderer), list[Any]()
        for place, text in dict.fromkeys(of_points):
            for how in _SPOTS:
                note = panel.annotate(text, place, textcoords="offset points", fontsize=8, **how)
                box = note.get_window_extent(renderer).padded(_GAP)
                is_inside = frame.contains(box.x0, box.y0) and frame.contains(box.x1, box.y1)
                if is_inside and not box.count_overlaps(taken):
                    taken.append(box)
                    break
                note.remove()


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
            _plot(panel, rows, fmt=marker, color=color, label=names[why])
        reference = 100 * facts["settings"][facts["reference"]]["exact"]["value"]
        margin = facts["margin_points"]
        panel.axhspan(
            reference - margin,
            reference,
            color="C2",
            alpha=0.15,
            label=f"margin, {margin:g} points",
        )
        best = _place(facts["settings"][facts["winner"]])
        panel.plot(*best, marker="*", markersize=15, color="C1", linestyle="", label="winner")
        start = _place(facts["settings"][facts["reference"]])
        most = max(row["problems"] for row in facts["settings"].values())
        title = f"{facts['model']}, {facts['set']}, {most} problems: up and right is better"
        panel.set(title=title, **_AXES)
        panel.margins(0.1)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, loc="lower left")
        winner = facts["winner"].replace(",", "\n")
        _label(figure, {panel: [(best, winner), (start, "reference")]})
        figure.savefig(path)


def _bars(rows: Sequence[Mapping[str, Any]], name: str, scale: float) -> list[list[float]]:
    """Lengths of error bars below and above."""
    found: list[list[float]] = [[], []]
    for row in rows:
        low, high = row[name]["ci95"]
        found[0].append(max(scale * (row[name]["value"] - low), 0))
        found[1].append(max(scale * (high - row[name]["value"]), 0))
    return found
