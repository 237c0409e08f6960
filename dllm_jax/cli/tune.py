"""`dllm-jax tune`: the fastest thresholds whose accuracy is within a budget, found by a race."""

import argparse
import dataclasses
import functools
import itertools
import sys
import time
from pathlib import Path
from typing import Any

from dllm_jax.cli import flags, grid
from dllm_jax.cli import strategy as strategies
from dllm_jax.cli.errors import UsageError
from dllm_jax.cli.eval import AS_JSON, ONE_TOKEN, OUTPUT, PLOT, facts_of
from dllm_jax.cli.files import check_output, check_plot, report, write_json
from dllm_jax.cli.flags import Group, flag, number, whole
from dllm_jax.cli.interrupt import ALL, Interrupt
from dllm_jax.cli.problems import load_with_problems, problem_flags
from dllm_jax.cli.stored import Stored
from dllm_jax.cli.text import figure

PROBLEMS = 1024  # of a built-in half
HALVES = ("hard", "plain")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.epilog = (
        "Greedy. The race finds what all settings on all problems would show: the fastest one "
        "whose accuracy is at most the margin below the reference's, which takes one token a "
        "forward where masks are filled (else it is the first setting). A setting leaves when it "
        "is hardly possible that it is the one, and the race ends when another winner is. A fifth "
        "of the problems are kept apart, to check the winner."
    )
    flags.add(
        parser,
        flags.MODEL,
        flags.strategy("repeat it to race several (default: multi_bd)"),
        flags.DRAFT,
        problem_flags(PROBLEMS, HALVES[::-1]),
        Group(
            "race",
            grid.grid_flag(required=True),
            flag(
                "--margin POINTS",
                "accuracy that may be lost, in percentage points (default: %(default)s)",
                number(0, 100),
                1.0,
            ),
            flag(
                "--budget FORWARDS",
                "forwards of all texts at most (default: 40 %% of what all settings on all "
                "problems would take)",
                whole(1),
            ),
            flag(
                "--y-max PERCENT",
                "best known accuracy of any method on the task, by which AUP weighs (default: the "
                "best of this race)",
                number(0, 100, open_low=True),
            ),
        ),
        Group(
            "output",
            AS_JSON,
            OUTPUT,
            flag(
                "--write-config FILE",
                "write the winner to FILE, for --strategy-config of any verb (default: no file)",
            ),
            PLOT,
        ),
    )


def run(args: argparse.Namespace, stop: Interrupt) -> int:
    """Race, check the winner, print the table or the object."""
    stop.forced = ALL
    check_output(args.output)
    check_output(args.write_config, "--write-config")
    check_plot(args)
    choices = strategies.load_several(args.strategy or ("multi_bd",), strategies.given_fields(args))
    model, sets = load_with_problems(args, PROBLEMS, HALVES[:1])
    if len(sets) > 1:
        raise UsageError(f"one race is of one set of problems, not of {', '.join(sets)}; name one")
    ((name, of),) = sets.items()
    racers = _racers(args, model, choices)
    about = facts_of(args, model) | {"set": name, "settings": [*racers], "margin": args.margin}
    about |= {"budget": args.budget, "questions": [one.question for one in of.problems]}
    stored = Stored(args.output, about)
    stop.tell = stored.tell
    facts = _race(args, model, racers, name, of, stored)
    report(args, facts, table(facts))
    stored.finish()
    if args.write_config is not None:
        write_json(args.write_config, _tuned(facts))
    if args.plot is not None:
        from dllm_jax.tasks.plot import draw_race

        draw_race(facts, Path(args.plot))
    return 0


def _racers(args: argparse.Namespace, model: Any, choices: list[Any]) -> dict[str, Any]:
    """By label a strategy, its draft, its spec and fields, and the knobs that are set.

    The reference is the first.
    """
    from dllm_jax.tasks.evaluate import one_token

    bound = strategies.bind_drafts(args, model, choices)
    settings = grid.settings_of({label: one for label, (one, _) in bound.items()}, args.grid)
    found: dict[str, Any] = {
        name: (*bound[label], spec, fields, setting)
        for label, spec, _, fields in choices
        for name, setting in settings[label].items()
    }
    if model.config.mask_token_id >= 0:
        size = next(iter(found.values()))[0].block_size
        slow = one_token(size)
        fields = {"remasking": "static", "denoising_steps": size, "block_size": size}
        found = {ONE_TOKEN: (slow, None, "block_diffusion", fields, {}), **found}
    return found


def _apart(count: int) -> int:
    """Problems that the race does not see, to check its winner on."""
    if count < 5:
        raise UsageError(
            f"{count} problems are too few to race on and check the winner; give 5 or more, "
            "better hundreds"
        )
    return count // 5


def _race(
    args: argparse.Namespace,
    model: Any,
    racers: dict[str, Any],
    name: str,
    of: Any,
    stored: Stored,
) -> dict[str, Any]:
    import numpy as np
    from tqdm import tqdm

    from dllm_jax.tasks import evaluate
    from dllm_jax.tasks.outcomes import Played
    from dllm_jax.tasks.race import FIRST, race

    labels, rows = list(racers), list(racers.values())
    prompts = of.prompts or evaluate.encode(model, of.problems)
    apart = _apart(len(of.problems))
    count = len(of.problems) - apart
    bar, began = tqdm(desc=f"{name}, texts", leave=False, disable=None), time.perf_counter()

    def play(chosen: Any, where: Any) -> Any:
        """One program a strategy: settings share its batches."""
        outcomes: dict[int, Any] = {}
        key = [int(one) for one in chosen], [int(one) for one in where]
        if (part := stored.get(*key)) is not None:
            return Played(*map(np.array, part))
        for _, group in itertools.groupby(chosen, key=lambda one: id(rows[one][0])):
            members = list(group)
            strategy, draft, *_ = rows[members[0]]
            before = bar.n
            found = evaluate.sweep(
                model,
                strategy,
                [rows[one][-1] for one in members],
                dataclasses.replace(
                    of,
                    problems=[of.problems[i] for i in where],
                    prompts=[prompts[i] for i in where],
                    longest=max(map(len, prompts)),
                ),
                draft=draft,
                batch_size=args.batch_size,
                progress=lambda done, _, before=before: bar.update(before + done - bar.n),
            )
            outcomes |= zip(members, found, strict=True)
        leaf = functools.partial(_stacked, [outcomes[one] for one in chosen])
        played = Played(leaf("right"), leaf("tokens"), leaf("forwards"))
        stored.add(*key, part=[each.tolist() for each in played])
        for one, right, tokens, forwards in zip(chosen, *played, strict=True):
            tqdm.write(
                f"{name}, {labels[one]}: {len(where)} more problems, {100 * right.mean():.1f} % "
                f"exact, {tokens.sum() / max(forwards.sum(), 1):.2f} tokens per forward "
                f"({time.perf_counter() - began:.0f} s)",
                file=sys.stderr,
            )
        return played

    with bar:
        result = race(
            play,
            len(rows),
            count,
            margin=args.margin / 100,
            budget=args.budget,
            first=min(FIRST, count),
        )
        again = play(sorted({0, result.winner}), range(count, len(of.problems)))
    return {
        **facts_of(args, model),
        "set": name,
        "margin_points": args.margin,
        **_found(labels, rows, result, args.y_max),
        "check": _check(apart, again),
    }


def _check(problems: int, played: Any) -> dict[str, Any]:
    """The reference, first, and the winner on problems that the race has not seen."""
    return {
        "problems": problems,
        "accuracy": float(played.right[-1].mean()),
        "reference_accuracy": float(played.right[0].mean()),
        "tokens_per_forward": float(played.tokens[-1].sum() / played.forwards[-1].sum()),
    }


def _found(labels: list[str], rows: list[Any], result: Any, y_max: float | None) -> dict[str, Any]:
    """The outcome of a race for each setting and for the winner."""
    import numpy as np

    from dllm_jax.tasks.summary import aup, wilson

    settings = {}
    for label, entry in zip(labels, result.entries, strict=True):
        right = np.arange(entry.problems) < round(entry.accuracy * entry.problems)
        settings[label] = {
            "problems": entry.problems,
            "exact": {"value": entry.accuracy, "ci95": wilson(right)},
            "tokens_per_forward": {"value": entry.speed, "ci95": list(entry.speed_ci95)},
            "exact_points": {
                "value": 100 * entry.difference[0],
                "ci95": [100 * one for one in entry.difference[1:]],
            },
            "left": entry.left,
        }
    points = [(entry.speed, 100 * entry.accuracy) for entry in result.entries]
    best = max(y for _, y in points)
    _, _, spec, fields, setting = rows[result.winner]
    return {
        "reference": labels[0],
        "settings": settings,
        "winner": labels[result.winner],
        "doubt": result.doubt,
        "is_shown": result.is_shown,
        "strategy": spec,
        "fields": fields | setting,
        "rounds": result.rounds,
        "problems_seen": result.problems,
        "forwards": result.forwards,
        "full_grid_forwards": result.grid_forwards,
        "aup": aup(points, y_max or best) if best > 0 else None,
    }


def _stacked(outcomes: list[Any], name: str) -> Any:
    import numpy as np

    return np.stack([getattr(one, name) for one in outcomes])


def _tuned(facts: dict[str, Any]) -> dict[str, Any]:
    """The content of a file for `--strategy-config`, and its origin."""
    about = (
        "model",
        "set",
        "seed",
        "margin_points",
        "winner",
        "doubt",
        "is_shown",
        "versions",
        "device",
    )
    fields = {"strategy": facts["strategy"], "fields": facts["fields"]}
    return fields | {"tuned": {name: facts[name] for name in about}}


def table(facts: dict[str, Any]) -> str:
    """The race as text."""
    share = facts["forwards"] / facts["full_grid_forwards"]
    width = max(map(len, facts["settings"])) + 2
    lines = [
        f"{facts['model']}, {facts['dtype']}, {facts['device']}, greedy, {facts['set']}",
        f"margin {facts['margin_points']:g} points below {facts['reference']!r}",
        "",
        f"{'':<{width + 2}}{'problems':>9}{'exact %':>9}{'against it, points':>24}"
        f"{'tokens/forward':>22}  left as",
    ]
    for label, row in facts["settings"].items():
        mark = "*" if label == facts["winner"] else " "
        lines.append(
            f"{mark} {label:<{width}}{row['problems']:>9}{100 * row['exact']['value']:>9.1f}"
            f"{figure(row['exact_points'], 1):>24}{figure(row['tokens_per_forward'], 2):>22}"
            f"  {row['left'] or ''}"
        )
    shown = "is" if facts["is_shown"] else "is not shown to be"
    check, aup = facts["check"], facts["aup"]
    lines += [
        "",
        f"winner: {facts['winner']}; that all problems show another, {100 * facts['doubt']:.1f} %; "
        f"on problems unlike these it {shown} within the margin",
        f"on {check['problems']} other problems: {100 * check['accuracy']:.1f} %, the reference "
        f"{100 * check['reference_accuracy']:.1f} %; {check['tokens_per_forward']:.2f} tokens per "
        "forward",
        f"{facts['forwards']:,} forwards, {100 * share:.0f} % of the full grid's",
    ]
    if aup is not None:
        lines.append(
            f"AUP {aup['value']:.1f} at y_max {aup['y_max']:.1f} % ({aup['points']} points, "
            f"{aup['left_out']} more than 5 points below the slowest)"
        )
    return "\n".join(lines)
