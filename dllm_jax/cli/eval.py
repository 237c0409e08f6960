"""`dllm-jax eval`: strategies on the same problems, as a table, as JSON and as a plot."""

import argparse
import dataclasses
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

from dllm_jax.cli import flags, grid
from dllm_jax.cli import strategy as strategies
from dllm_jax.cli.errors import UsageError
from dllm_jax.cli.files import check_output, check_plot, report
from dllm_jax.cli.flags import Group, flag
from dllm_jax.cli.interrupt import ALL, Interrupt
from dllm_jax.cli.problems import load_with_problems, problem_flags
from dllm_jax.cli.stored import Stored
from dllm_jax.cli.text import count, figure
from dllm_jax.engine.record import save_records

DEFAULT_STRATEGIES = ("block_diffusion", "multi_bd")
WITH_A_DRAFT = ("ar", "dflash")
ONE_TOKEN = "one token a forward"
PROBLEMS = 200  # of a built-in half


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.epilog = (
        "Greedy. Forwards count after prefill, commit passes included; a forward is a commit pass "
        "where no block is open. Intervals are 95 %; the first strategy is what the others are "
        "compared with, problem by problem. A field set by a flag applies to every strategy that "
        "has it (buffer_size: not to block_diffusion) and must fit one of them; fields of one "
        "strategy go behind its name."
    )
    flags.add(
        parser,
        flags.MODEL,
        flags.strategy(
            "repeat it to compare on the same problems "
            "(default: block_diffusion and multi_bd; with --draft: ar and dflash)"
        ),
        flags.DRAFT,
        problem_flags(
            PROBLEMS,
            ("plain", "hard", "both"),
            grid.grid_flag(default=[]),
            flag(
                "--one-token",
                "also the accuracy at one token a forward, where masks are filled (slow, "
                "default: on)",
                default=True,
                action=argparse.BooleanOptionalAction,
            ),
        ),
        Group(
            "output",
            AS_JSON,
            OUTPUT,
            PLOT,
            flag("--plot-from FILE", "draw --plot of the JSON in FILE, and run nothing"),
            flag(
                "--record FILE",
                "what was written to each text, in which forward and how likely, as .npz "
                "(docs/logprobs.md; default: no file)",
            ),
        ),
    )


AS_JSON = flags.as_json("one JSON object instead of the table")
OUTPUT = flag(
    "--output --out FILE",
    "write the JSON object to FILE as well; each finished setting is in FILE.partial at once, "
    "from which the same command goes on (default: no file)",
)
PLOT = flag(
    "--plot FILE",
    "draw accuracy against tokens per forward to FILE (.svg, .png or .pdf; default: no plot)",
)


def run(args: argparse.Namespace, stop: Interrupt) -> int:
    """Evaluate, print the table or the object."""
    stop.forced = ALL
    usual = DEFAULT_STRATEGIES if args.draft is None else WITH_A_DRAFT
    check_output(args.output)
    check_plot(args)
    check_output(args.record, "--record")
    if args.plot_from is not None:
        return _draw_stored(args)
    choices = strategies.load_several(args.strategy or usual, strategies.given_fields(args))
    model, sets = load_with_problems(args, PROBLEMS, ("plain", "hard"))
    settings = _settings(args, model, choices)
    curves = grid.settings_of(
        {label: one for label, (one, *_) in settings.items()}, args.grid, but=(ONE_TOKEN,)
    )
    facts = facts_of(args, model) | {
        "strategies": {
            point: strategies.plain(settings[label][0].replace(**values), settings[label][2])
            for label, points in curves.items()
            for point, values in points.items()
        },
        "curves": curves,
    }
    questions = {half: [one.question for one in of.problems] for half, of in sets.items()}
    stored = Stored(args.output, facts | {"questions": questions})
    stop.tell = stored.tell
    records: list[Any] = []
    facts["halves"] = {
        half: _evaluate(args, model, settings, curves, half, problems, stored, records)
        for half, problems in sets.items()
    }
    report(args, facts, table(facts))
    stored.finish()
    if args.record is not None:
        save_records(records, args.record)
    if args.plot is not None:
        from dllm_jax.tasks.plot import draw

        draw(facts, Path(args.plot))
    return 0


def _draw_stored(args: argparse.Namespace) -> int:
    """The plot of what `eval` or `tune` wrote."""
    from dllm_jax.tasks.plot import draw, draw_race

    if args.plot is None:
        raise UsageError("--plot-from draws a plot; give --plot FILE too")
    try:
        facts = json.loads(Path(args.plot_from).read_text("utf-8"))
        drawn = draw if "curves" in facts else draw_race
        drawn(facts, Path(args.plot))
    except OSError as error:
        raise UsageError(f"--plot-from {args.plot_from!r}: {error.strerror}") from None
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError):
        raise UsageError(
            f"--plot-from {args.plot_from!r} holds no result; give what --output of eval or tune "
            "wrote"
        ) from None
    return 0


def _settings(args: argparse.Namespace, model: Any, choices: list[Any]) -> dict[str, Any]:
    """By label a strategy value, the draft of one that drafts, and the spec that was given."""
    from dllm_jax.tasks.evaluate import one_token

    bound = strategies.bind_drafts(args, model, choices)
    settings: dict[str, Any] = {label: (*bound[label], spec) for label, spec, *_ in choices}
    if args.one_token and model.config.mask_token_id >= 0:
        block_size = next(iter(settings.values()))[0].block_size
        settings[ONE_TOKEN] = one_token(block_size), None, "block_diffusion"
    return settings


def _evaluate(
    args: argparse.Namespace,
    model: Any,
    settings: dict[str, Any],
    curves: dict[str, dict[str, Any]],
    half: str,
    of: Any,
    stored: Stored,
    records: list[Any],
) -> dict[str, Any]:
    """The figures of a half; records of its texts are added to `records`."""
    from tqdm import tqdm

    from dllm_jax.tasks import evaluate, summary

    problems, outcomes = of.problems, {}
    number, began = sum(map(len, curves.values())), time.perf_counter()
    for label, (strategy, draft, _) in settings.items():
        for point in curves[label]:
            if (part := stored.get(half, point)) is not None:
                if args.record is not None:
                    raise UsageError(
                        f"--record {args.record!r}: {point} ran before, and its records are lost; "
                        f"remove {args.output}.partial"
                    )
                outcomes[point] = evaluate.outcome_from_json(part)
        points = {point: one for point, one in curves[label].items() if point not in outcomes}
        names = list(points)
        total = len(problems) * len(points)
        if not points:
            continue

        def progress(done: int, found: Any, names: list[str] = names, *, bar: Any) -> None:
            bar.update(done - bar.n)
            for name, outcome in zip(names, found, strict=False):
                if name in outcomes:
                    continue
                outcomes[name] = outcome
                stored.add(half, name, part=evaluate.outcome_json(outcome))
                row = summary.summarise(outcome)
                tqdm.write(
                    f"{half}, {name}: {figure(row['exact'], 1, 100)} % exact, "
                    f"{figure(row['tokens_per_forward'], 2)} tokens per forward "
                    f"({len(outcomes)} of {number}, {time.perf_counter() - began:.0f} s)",
                    file=sys.stderr,
                )

        def recorded(i: int, number: int, record: Any, names: list[str] = names) -> None:
            law = {**record.law, "half": half, "setting": names[i], "problem": number}
            records.append(dataclasses.replace(record, law=law))

        with tqdm(total=total, desc=f"{half}, {label}", leave=False, disable=None) as bar:
            evaluate.sweep(
                model,
                strategy,
                list(points.values()),
                of,
                draft=draft,
                batch_size=args.batch_size,
                progress=functools.partial(progress, bar=bar),
                recorded=None if args.record is None else recorded,
            )
    outcomes = {point: outcomes[point] for points in curves.values() for point in points}
    base = next(iter(outcomes))
    return {
        "results": {label: summary.summarise(outcome) for label, outcome in outcomes.items()},
        "against": base,
        "comparisons": {
            label: summary.compare(outcomes[base], outcome)
            for label, outcome in outcomes.items()
            if label != base
        },
        "problems": evaluate.each_problem(problems, outcomes),
    }


def facts_of(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """The part of a report on model, problems and machine."""
    import jax

    from dllm_jax import __version__

    return {
        "model": args.model,
        "dtype": str(model.params["embed"].dtype),
        "device": jax.devices()[0].device_kind,
        "versions": {"dllm-jax": __version__, "jax": jax.__version__},
        "seed": args.seed,
        "batch_size": args.batch_size,
        "max_tokens": args.max_tokens,
        "data": args.data,
        "tasks": args.tasks,
        "scorer": None if args.scorer is None else args.scorer[0],
        "greedy": True,
    }


def table(facts: dict[str, Any]) -> str:
    """The figures as text, one block a half."""
    lines = [f"{facts['model']}, {facts['dtype']}, {facts['device']}, greedy, seed {facts['seed']}"]
    for half, content in facts["halves"].items():
        results = content["results"]
        number = next(iter(results.values()))["problems"]
        is_own = facts.get("data") or facts.get("tasks")
        kind = "problem" if is_own else "held-out problem"
        lines += ["", f"{half}: {count(number, kind)}"]
        width = max(map(len, results)) + 1
        lines.append(
            f"{'':<{width}}{'exact %':>21}{'tokens/forward':>22}{'without commits':>17}"
            f"{'denoise/block':>15}{'tok/s':>9}"
        )
        for label, row in results.items():
            of_block = row["denoise_forwards_per_block"]  # None: text comes by tokens
            lines.append(
                f"{label:<{width}}"
                f"{figure(row['exact'], 1, 100):>21}"
                f"{figure(row['tokens_per_forward'], 2):>22}"
                f"{row['tokens_per_forward_without_commits']['value']:>17.2f}"
                f"{'-' if of_block is None else format(of_block['value'], '.2f'):>15}"
                f"{row['tok_s']:>9.0f}"
            )
        for label, row in results.items():
            if row["draft"] is not None and row["draft"]["rounds"]:
                length = row["draft"]["mean_accepted_length"]
                lines.append(
                    f"{label}: mean accepted length {length:.2f}, the target's own token counted"
                )
        for label, row in content["comparisons"].items():
            lines.append(
                f"{label} against {content['against']}: {figure(row['exact_points'], 1)} points, "
                f"{figure(row['speedup'], 2)} times the tokens per forward"
            )
    return "\n".join(lines)
