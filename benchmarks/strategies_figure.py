"""The figure and the tables of docs/strategies.md, from the results of the other two scripts.

    python benchmarks/strategies_figure.py strategies_accuracy_h200.json --svg docs/accuracy.svg

Writes the SVG (no fonts, no scripts; mid tones that read on light and on dark pages) and prints the
tables as markdown. Lines are strategies, points are accept thresholds, bars 95 % intervals.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import numpy as np

GREY, FAINT = "#768390", "#8b949e55"
WIDTH, HEIGHT = 880, 492
PANEL_WIDTH, PANEL_HEIGHT, TOP, LEFT, GAP = 372, 300, 34, 52, 54
HALVES = ("plain", "hard")


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """A line of the figure: a section of the report, and which of its settings.

    Attributes:
        knobs: Values that a setting must have to be on the line.
        dashed: The model was not trained for it.
    """

    label: str
    section: str
    colour: str
    knobs: dict = dataclasses.field(default_factory=dict)
    dashed: bool = False


LINES = (
    Line("block_diffusion", "block_diffusion", "#bf8700"),
    Line("block_diffusion, entropy", "block_diffusion, entropy", "#8b6b4a"),
    Line("multi_bd, 2 blocks", "multi_bd, 2 blocks", "#2da44e", {"add_block_threshold": 0.1}),
    Line("multi_bd, 4 blocks", "multi_bd, 4 blocks", "#2f81f7", {"add_block_threshold": 0.1}),
    Line(
        "multi_bd, 4, add_block 0.9", "multi_bd, 4 blocks", "#54718f", {"add_block_threshold": 0.9}
    ),
    Line("credit decoding, 1 block", "credit_decoding, 1 block", "#e5534b"),
    Line("credit decoding, 4 blocks", "credit_decoding, 4 blocks", "#a371f7"),
    Line("edit without edits, 1 block", "edit, 1 block", "#1b9aaa", {"edit_threshold": 1.0}),
    Line("d2f, 4 blocks", "d2f, 4 blocks", "#db61a2", dashed=True),
)


def settings_of(report, line):
    """The settings of a line, in the order of the sweep."""
    found = report["sections"].get(line.section, {"settings": []})["settings"]
    return [row for row in found if line.knobs.items() <= row["knobs"].items()]


# --- the figure ----------------------------------------------------------------------------------


def draw(report, low=90.0):
    """The whole figure as SVG; what lies below `low` percent is left to the tables."""
    lines = [line for line in LINES if settings_of(report, line)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12" '
        f'fill="{GREY}" role="img">',
        "<title>Right answers against tokens per forward, a line a strategy</title>",
    ]
    for i, half in enumerate(HALVES):
        parts += _panel(report, half, LEFT + i * (PANEL_WIDTH + GAP), lines, low)
    for i, line in enumerate(lines):
        x, y = LEFT + (i % 4) * 205, TOP + PANEL_HEIGHT + 62 + (i // 4) * 22
        parts.append(_stroke(line, f"M{x} {y - 4}h24"))
        parts.append(f'<circle cx="{x + 12}" cy="{y - 4}" r="3" fill="{line.colour}"/>')
        note = " *" if line.dashed else ""
        parts.append(f'<text x="{x + 30}" y="{y}">{line.label}{note}</text>')
    parts.append(
        f'<text x="{LEFT}" y="{HEIGHT - 12}" font-size="11">Points: accept thresholds '
        "(entropy: bounds); large: 0.9. Bars: 95 %. "
        "* not trained for it.</text>"
    )
    return "\n".join([*parts, "</svg>\n"])


def _panel(report, half, left, lines, low):
    shown = {
        line: [r for r in settings_of(report, line) if 100 * _exact(r, half)["value"] >= low]
        for line in lines
    }
    most = max(_speed(row, half)["ci95"][1] for rows in shown.values() for row in rows)
    right = 5 * int(most // 5 + 1)

    def x(value):
        return left + PANEL_WIDTH * value / right

    def y(percent):
        return TOP + PANEL_HEIGHT * (100 - percent) / (100 - low)

    bottom = TOP + PANEL_HEIGHT
    yield f'<text x="{left}" y="{TOP - 12}" font-weight="bold">{half} problems</text>'
    step = 2 if 100 - low > 5 else 1
    for percent in range(int(low), 101, step):
        at = f"{y(percent):.1f}"
        yield f'<path d="M{left} {at}h{PANEL_WIDTH}" stroke="{FAINT}"/>'
        yield f'<text x="{left - 6}" y="{y(percent) + 4:.1f}" text-anchor="end">{percent} %</text>'
    for value in range(0, right + 1, 5):
        yield f'<path d="M{x(value):.1f} {TOP}v{PANEL_HEIGHT}" stroke="{FAINT}"/>'
        yield f'<text x="{x(value):.1f}" y="{bottom + 16}" text-anchor="middle">{value}</text>'
    middle = left + PANEL_WIDTH / 2
    yield f'<text x="{middle}" y="{bottom + 34}" text-anchor="middle">tokens per forward</text>'
    for line, rows in shown.items():
        points = []
        for row in rows:
            exact = _exact(row, half)
            at, up = x(_speed(row, half)["value"]), y(100 * exact["value"])
            points.append(f"{at:.1f} {up:.1f}")
            high, deep = (y(min(100, max(low, 100 * end))) for end in reversed(exact["ci95"]))
            yield _stroke(line, f"M{at:.1f} {high:.1f}V{deep:.1f}", thin=True)
            size = 5 if row["knobs"].get("accept_threshold") == 0.9 else 2.6
            yield f'<circle cx="{at:.1f}" cy="{up:.1f}" r="{size}" fill="{line.colour}"/>'
        if points:
            yield _stroke(line, "M" + "L".join(points))


def _exact(row, half):
    return row["halves"][half]["exact"]


def _speed(row, half):
    return row["halves"][half]["tokens_per_forward"]


def _stroke(line, path, thin=False):
    dash = ' stroke-dasharray="5 4"' if line.dashed and not thin else ""
    more = ' stroke-width="1" opacity="0.45"' if thin else ' stroke-width="1.8"'
    return f'<path d="{path}" fill="none" stroke="{line.colour}"{more}{dash}/>'


# --- the tables ----------------------------------------------------------------------------------

DEFAULT = {"accept_threshold": 0.9}

# What the table of docs/strategies.md shows: words, section, knobs.
ROWS = (
    ("`block_diffusion`, one token a forward", "one token a forward", {}),
    ("`block_diffusion`", "block_diffusion", DEFAULT),
    ("the same, accept 0.8", "block_diffusion", {"accept_threshold": 0.8}),
    ("the same, entropy bound 0.1", "block_diffusion, entropy", {"entropy_bound": 0.1}),
    ("credit decoding, 1 block", "credit_decoding, 1 block", DEFAULT),
    ("`multi_bd`, 2 blocks", "multi_bd, 2 blocks", DEFAULT | {"add_block_threshold": 0.1}),
    ("`multi_bd`, 4 blocks", "multi_bd, 4 blocks", DEFAULT | {"add_block_threshold": 0.1}),
    ("the same, add_block 0.9", "multi_bd, 4 blocks", DEFAULT | {"add_block_threshold": 0.9}),
    ("credit decoding, 4 blocks", "credit_decoding, 4 blocks", DEFAULT),
    ("`edit` without edits, 1 block", "edit, 1 block", DEFAULT | {"edit_threshold": 1.0}),
    ("`edit` without edits, 4 blocks", "edit, 4 blocks", DEFAULT | {"edit_threshold": 1.0}),
    ("`edit`, edits above 0.9, 1 block *", "edit, 1 block", DEFAULT | {"edit_threshold": 0.9}),
    ("`d2f`, 4 blocks *", "d2f, 4 blocks", DEFAULT),
    ("`dmax`, 1 block *", "dmax, 1 block", DEFAULT | {"token_merge_weight": 1.0}),
    ("`full_sequence`, blocks of 32 *", "full_sequence, blocks of 32", DEFAULT),
)


def table(report, rows=ROWS):
    """Markdown: accuracy, paired difference to the base and speed of chosen settings."""
    heads = ["strategy"]
    for half in HALVES:
        heads += [f"{half}: exact %", "points", "tokens per forward"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for words, section, knobs in rows:
        found = report["sections"].get(section, {"settings": []})["settings"]
        for row in [row for row in found if knobs.items() <= row["knobs"].items()][:1]:
            cells = [words]
            for measured in (row["halves"][half] for half in HALVES):
                speed, bare = (
                    measured[f"tokens_per_forward{more}"]["value"]
                    for more in ("", "_without_commits")
                )
                exact = {k: np.multiply(100, v) for k, v in measured["exact"].items()}
                cells += [_span(exact, ".1f"), _span(measured["exact_points"], "+.2f")]
                cells.append(f"{speed:.1f} ({bare:.1f})")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def step_table(report):
    """Markdown: what `strategies_gpu.py` measured."""
    heads = "step", "window", "ms", "times `multi_bd`'s", "bar"
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in report["rows"]:
        bar = f"{row['bar']:.2f}" if row["bar"] else ""
        spread = f"[{row['min_ratio']:.3f}, {row['max_ratio']:.3f}]"
        lines.append(
            f"| {row['name']} | {row['window']} | {row['step_ms']:.2f} | "
            f"{row['ratio']:.3f} {spread} | {bar} |"
        )
    return "\n".join(lines) + "\n"


def _span(entry, form):
    low, high = (f"{end:{form}}" for end in entry["ci95"])
    return f"{entry['value']:{form}} [{low}, {high}]"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--steps", type=Path, help="what strategies_gpu.py wrote")
    args = parser.parse_args()
    report = json.loads(args.report.read_text(encoding="utf-8"))
    if args.svg:
        args.svg.write_text(draw(report), encoding="utf-8")
    print(table(report))
    if args.steps:
        print(step_table(json.loads(args.steps.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    sys.exit(main())
