"""`dllm-jax eval`: strategies on the same held-out word problems, as a table and as JSON."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from dllm_jax.cli import flags
from dllm_jax.cli import strategy as strategies
from dllm_jax.cli.errors import UsageError
from dllm_jax.cli.interrupt import ALL, Interrupt

DEFAULT_STRATEGIES = ("block_diffusion", "multi_bd")
WITH_A_DRAFT = ("ar", "dflash")
ONE_TOKEN = "one token a forward"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.epilog = (
        "Greedy. Forwards count after prefill, commit passes included; a forward is a commit pass "
        "where no block is open. Intervals are 95 %; the first strategy is what the others are "
        "compared with, problem by problem. A field set by a flag applies to every strategy that "
        "has it (buffer_size: not to block_diffusion) and must fit one of them; fields of one "
        "strategy go behind its name."
    )
    flags.add_model_flags(parser)
    flags.add_strategy_flags(
        parser,
        repeat="repeat it to compare on the same problems "
        "(default: block_diffusion and multi_bd; with --draft: ar and dflash)",
    )
    flags.add_draft_flag(parser)
    group = parser.add_argument_group("problems")
    group.add_argument("--half", choices=("plain", "hard", "both"), default="both")
    group.add_argument("--problems", type=flags.whole(1), default=200, metavar="N")
    group.add_argument("--seed", type=flags.whole(0, 2**32 - 1), default=0)
    group.add_argument("--batch-size", type=flags.whole(1), default=32, metavar="B")
    group.add_argument("--max-tokens", type=flags.whole(1), default=224, metavar="N")
    group.add_argument(
        "--one-token",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also the accuracy at one token a forward, where masks are filled (slow, default: on)",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    group.add_argument("--output", metavar="FILE", help="write the JSON object to FILE as well")


def run(args: argparse.Namespace, stop: Interrupt) -> int:
    """Evaluate, print the table or the object."""
    stop.forced = ALL
    usual = DEFAULT_STRATEGIES if args.draft is None else WITH_A_DRAFT
    if args.output is not None:
        check_output(args.output)
    choices = strategies.load_several(args.strategy or usual, strategies.given_fields(args))

    from dllm_jax.cli.sources import load_model

    model = load_model(args)
    if model.tokenizer is None:
        raise ValueError(f"model {args.model!r} has no tokenizer; give a trained model")
    settings = _settings(args, model, choices)
    halves = ("plain", "hard") if args.half == "both" else (args.half,)
    facts = _facts(args, model) | {
        "strategies": {label: repr(strategy) for label, (strategy, _) in settings.items()},
        "halves": {half: _evaluate(args, model, settings, half) for half in halves},
    }
    print(json.dumps(facts) if args.json else table(facts), flush=True)
    if args.output is not None:
        Path(args.output).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0


def check_output(name: str) -> None:
    """Refuse, before the work, a file that could not be written after it."""
    path = Path(name)
    reason = None
    if path.is_dir():
        reason = "it is a folder"
    elif not path.parent.is_dir():
        reason = f"there is no folder {str(path.parent)!r}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "permission is denied"
    if reason:
        raise UsageError(f"--output {name!r} cannot be written: {reason}; give another path")


def _settings(args: argparse.Namespace, model: Any, choices: list[Any]) -> dict[str, Any]:
    """By label a strategy value, and the draft of one that drafts.

    Raises:
        ValueError: Some strategy needs a draft and none is given, or none needs the one given.
    """
    from dllm_jax.api.strategy import bind_draft
    from dllm_jax.tasks.evaluate import one_token

    settings: dict[str, Any] = {}
    draft = args.draft
    for label, spec, value, fields in choices:
        strategy, bound = strategies.resolve(model, spec, value, fields), None
        if strategy.needs.aux:
            strategy, aux = bind_draft(strategy, draft, model)
            (bound,) = aux.values()
            draft = bound  # loaded once
        settings[label] = strategy, bound
    if args.draft is not None and draft is args.draft:
        raise UsageError(
            f"--draft {args.draft!r}: none of {', '.join(settings)} drafts; add --strategy dflash"
        )
    if args.one_token and model.config.mask_token_id >= 0:
        block_size = next(iter(settings.values()))[0].block_size
        settings[ONE_TOKEN] = one_token(block_size), None
    return settings


def _evaluate(
    args: argparse.Namespace, model: Any, settings: dict[str, Any], half: str
) -> dict[str, Any]:
    from tqdm import tqdm

    from dllm_jax.tasks import evaluate

    problems = evaluate.held_out(half, args.problems, args.seed)
    outcomes = {}
    for label, (strategy, draft) in settings.items():
        with tqdm(total=len(problems), desc=f"{half}, {label}", leave=False, disable=None) as bar:
            outcomes[label] = evaluate.solve(
                model,
                strategy,
                problems,
                draft=draft,
                batch_size=args.batch_size,
                max_tokens=args.max_tokens,
                progress=lambda done, bar=bar: bar.update(done - bar.n),
            )
    base = next(iter(outcomes))
    return {
        "results": {label: evaluate.summarise(outcome) for label, outcome in outcomes.items()},
        "against": base,
        "comparisons": {
            label: evaluate.compare(outcomes[base], outcome)
            for label, outcome in outcomes.items()
            if label != base
        },
    }


def _facts(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    import jax

    from dllm_jax import __version__

    return {
        "model": args.model,
        "dtype": str(model.params["embed"].dtype),
        "device": jax.devices()[0].device_kind,
        "versions": {"dllm-jax": __version__, "jax": jax.__version__},
        "seed": args.seed,
        "batch_size": args.batch_size,
        "greedy": True,
    }


def table(facts: dict[str, Any]) -> str:
    """The figures as text, one block a half."""
    lines = [f"{facts['model']}, {facts['dtype']}, {facts['device']}, greedy, seed {facts['seed']}"]
    for half, content in facts["halves"].items():
        results = content["results"]
        count = next(iter(results.values()))["problems"]
        lines += ["", f"{half}: {count} held-out problems"]
        lines.append(
            f"{'':<32}{'exact %':>21}{'tokens/forward':>22}{'without commits':>17}"
            f"{'denoise/block':>15}{'tok/s':>9}"
        )
        for label, row in results.items():
            of_block = row["denoise_forwards_per_block"]  # None: text comes by tokens
            lines.append(
                f"{label[:31]:<32}"
                f"{_figure(row['exact'], 1, 100):>21}"
                f"{_figure(row['tokens_per_forward'], 2):>22}"
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
                f"{label} against {content['against']}: {_figure(row['exact_points'], 1)} points, "
                f"{_figure(row['speedup'], 2)} times the tokens per forward"
            )
    return "\n".join(lines)


def _figure(entry: dict[str, Any], digits: int, scale: float = 1.0) -> str:
    """`98.5 [97.4, 99.2]`."""
    value, low, high = (round(scale * v, digits) for v in (entry["value"], *entry["ci95"]))
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
