"""Compare one file of results with stored ones: a table, and status 1 where a time is 10 % slower.

    python benchmarks/compare.py run.json benchmarks/results/strategies_h200.json

Reads every JSON file that a script here writes. Figures are matched by what they measure (script,
model, shape, context, form, ...), so files of different scripts may be given together. Figures of
one side only are not compared. Differences below about 7 % are ties.
"""

import argparse
import json
import sys
from pathlib import Path

MOST = 1.10  # of the stored time
# What a row was measured of, and its times.
OF = ("command", "device", "dtype", "model", "shape", "slots", "blocks", "block_size", "context")
OF = (*OF, "sequences", "rows", "implementation", "form", "name", "buffer_size", "steps")
OF = (*OF, "temperature", "through", "devices", "routing", "quantization", "cell", "window")
TIMES = ("bare_step_ms", "long_run_step_ms", "step_ms", "net_us", "prefill_s")


def figures(results, of=()):
    """Times by what they were measured of, from any depth of a file of results.

    Raises:
        ValueError: Two are told apart by nothing that `OF` names.
    """
    found = {}
    for key, value in times(results, of):
        if key in found:
            work = ", ".join(f"{name} {what}" for name, what in key)
            raise ValueError(f"two figures of the same work: {work}; name in OF what differs")
        found[key] = value
    return found


def times(results, of=()):
    """Each (what it was measured of, time)."""
    if isinstance(results, list):
        for one in results:
            yield from times(one, of)
    elif isinstance(results, dict):
        mine = {name: value for name in OF if is_plain(value := results.get(name))}
        of = tuple(({**dict(of), **mine}).items())
        for name, value in results.items():
            if name in TIMES and isinstance(value, int | float):
                yield (*sorted((key, str(what)) for key, what in of), ("time", name)), value
            elif name != "profile":
                yield from times(value, of)


def is_plain(value):
    if isinstance(value, list):
        return all(map(is_plain, value))
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def compared(new, old):
    """Rows (of, stored, new, ratio) of what both have, the slowest first."""
    both = [(key, old[key], value, value / old[key]) for key, value in new.items() if old.get(key)]
    return sorted(both, key=lambda row: -row[3])


def table(rows):
    """Lines for people; what all rows share is said once."""
    shared = set.intersection(*(set(row[0]) for row in rows)) if rows else set()
    lines = [" ".join(value for _, value in sorted(shared))] if shared else []
    lines.append(f"{'stored':>10} {'now':>10} {'ratio':>6}")
    for key, before, now, ratio in rows:
        of = ", ".join(f"{name} {value}" for name, value in key if (name, value) not in shared)
        mark = "  SLOWER" if ratio > MOST else ""
        lines.append(f"{before:>10.3f} {now:>10.3f} {ratio:>6.2f}  {of}{mark}".rstrip())
    return lines


def report_slower(results, paths, say=print):
    """Say how results compare with stored ones; whether any is slower, or none can be compared."""
    old = {}
    for path in paths:
        old |= figures(json.loads(Path(path).read_text(encoding="utf-8")))
    rows = compared(figures(results), old)
    if not rows:
        say("nothing to compare: the files have no figure of the same work in common")
        return True
    for line in table(rows):
        say(line)
    slower = sum(row[3] > MOST for row in rows)
    say(f"{len(rows)} figures compared, {slower} more than {MOST - 1:.0%} slower")
    return slower > 0


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("new")
    parser.add_argument("stored", nargs="+")
    args = parser.parse_args(argv)
    return int(report_slower(json.loads(Path(args.new).read_text(encoding="utf-8")), args.stored))


if __name__ == "__main__":
    sys.exit(main())
