"""Several values of thresholds on a command line, as `eval` and `tune` take them."""

import argparse
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dllm_jax.cli.errors import UsageError
from dllm_jax.cli.flags import Flag, flag

Grid = Sequence[tuple[str, list[float]]]

MOST_SETTINGS = 100  # of a grid


def grid_flag(**options: Any) -> Flag:
    """--grid, which is also called --sweep."""
    return flag(
        "--grid --sweep KNOB=VALUES",
        "values of a threshold: A,B,C or LOW:HIGH:N, evenly spaced, or LOW:HIGH:N:log; repeat it "
        "for all combinations, e.g. accept_threshold=0.5:0.99:8 (default: one setting)",
        values,
        action="append",
        **options,
    )


def values(text: str) -> tuple[str, list[float]]:
    """An argparse type: a knob and its values."""
    name, _, said = text.partition("=")
    found: list[float] = []
    try:
        if ":" in said:
            low, high, count, *scale = said.split(":")
            first, last, number = float(low), float(high), int(count)
            parts = [i / (number - 1) for i in range(number)] if number <= MOST_SETTINGS else []
            if first < last and not scale:
                found = [first + (last - first) * part for part in parts]
            elif 0 < first < last and scale == ["log"]:
                found = [first * (last / first) ** part for part in parts]
        else:
            found = [float(value) for value in said.split(",")]
    except (ValueError, ArithmeticError):
        pass
    found = [float(shown(value)) for value in found]
    is_good = found and all(map(math.isfinite, found)) and len(set(found)) == len(found)
    if not name.isidentifier() or not is_good:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of KNOB=A,B,C, KNOB=LOW:HIGH:N and KNOB=LOW:HIGH:N:log with LOW "
            f"below HIGH (above 0 for log) and N from 2 to {MOST_SETTINGS}; write e.g. "
            "accept_threshold=0.5:0.99:8"
        )
    return name, found


def shown(value: float) -> str:
    """A value with all of its digits that were asked for."""
    return f"{value:.6g}"


def settings_of(
    strategies: Mapping[str, Any], grid: Grid, *, but: Sequence[str] = ()
) -> dict[str, dict[str, dict[str, float]]]:
    """By strategy the label of each setting and its knobs; says which strategy lacks which knob.

    Args:
        strategies: By label.
        but: Labels that have one setting whatever the grid says.

    Raises:
        UsageError: A knob that is named twice, that no strategy has or with a value out of range,
            or too many settings.
    """
    from dllm_jax.strategies.core.knobs import check_knobs, knob_rules

    names = [name for name, _ in grid]
    if len(set(names)) < len(names):
        raise UsageError("--grid names a threshold twice; list all its values once")
    has = {label: knob_rules(one) for label, one in strategies.items() if label not in but}
    for name in names:
        lacking = [label for label, knobs in has.items() if name not in knobs]
        if len(lacking) == len(has):
            raise UsageError(
                f"--grid {name}: none of {', '.join(has)} has that threshold; "
                "`dllm-jax info STRATEGY` lists them"
            )
        for label in lacking:
            print(f"note: {label} has no {name}, so it does not vary there", file=sys.stderr)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for label, strategy in strategies.items():
        own = [(name, each) for name, each in grid if name in has.get(label, ())]
        found[label] = {}
        for combination in itertools.product(*(each for _, each in own)):
            setting = dict(zip((name for name, _ in own), combination, strict=True))
            try:
                check_knobs(strategy, setting)
            except ValueError as error:
                raise UsageError(f"--grid: {error}") from None
            parts = [label, *(f"{name}={shown(one)}" for name, one in setting.items())]
            found[label][",".join(parts)] = setting
    if (count := sum(map(len, found.values()))) > MOST_SETTINGS + len(but):
        raise UsageError(f"--grid makes {count} settings; at most {MOST_SETTINGS} are run")
    return found
