"""A roofline as PNG: operations a second over operations a byte."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dllm_jax.bench.roofline import RATES


def draw_roofline(rows: Sequence[dict[str, Any]], device: str, png: str | Path) -> None:
    """Each row's bare step and `LLM.generate` step as points, under the device's roof.

    Args:
        rows: `step.measure_step`'s, with `bytes` and `operations`.
        device: Its kind; one whose rates are not known has no roof, and the title says so.
    """
    import matplotlib  # heavy, and needed here only

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.6), dpi=100)
    at = [row["operations"] / row["bytes"] for row in rows]
    for name, marker, label in (
        ("bare_step_ms", "o", "bare device loop"),
        ("step_ms", "x", "LLM.generate"),
    ):
        reached = [row["operations"] / row[name] / 1e9 for row in rows]  # ms -> TFLOP/s
        axes.plot(at, reached, marker, label=label)
    for x, row in zip(at, rows, strict=True):
        y = row["operations"] / row["bare_step_ms"] / 1e9
        ratio = row["bare_over_floor_in_turn"]
        text = row["shape"] + ("" if ratio is None else f"\nx{ratio:.2f} of its floor")
        axes.annotate(text, (x, y), xytext=(6, -14), textcoords="offset points", fontsize=8)
    title = f"decode step on {device}"
    if device in RATES:
        bandwidth, rate = RATES[device]
        ridge = rate / bandwidth
        ends = [min(*at, ridge) / 4, ridge, max(*at, ridge) * 4]
        roof = [min(rate, bandwidth * x) / 1e12 for x in ends]
        label = f"roof: {bandwidth / 1e12:.1f} TB/s, {rate / 1e12:.0f} TFLOP/s"
        axes.plot(ends, roof, "k-", linewidth=1, label=label)
    else:
        title += " (its rates are not known: no roof)"
    axes.set(xscale="log", yscale="log", title=title)
    axes.set(xlabel="operations a byte", ylabel="TFLOP/s")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(png)
    pyplot.close(figure)
