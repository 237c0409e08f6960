"""`dllm-jax train`: the built-in model from nothing, on the generated word problems."""

import argparse

from dllm_jax.cli import flags
from dllm_jax.cli.errors import Interrupted

# flag, type, help; what is not given is left to dllm_jax.training, which knows the recipe
OPTIONS = (
    ("--steps", flags.whole(1), "length of the run"),
    ("--budget-seconds", flags.number(0, 1e9, True), "length in seconds, instead of --steps"),
    ("--max-seconds", flags.number(0, 1e9, True), "stop this call, with a checkpoint, after that"),
    ("--batch-size", flags.whole(1), "sequences a step"),
    ("--seed", flags.whole(0, 2**31 - 1), "of data, noise and weights"),
    ("--muon-lr", flags.number(0, 10, True), "peak learning rate of the layers' matrices"),
    ("--adam-lr", flags.number(0, 10, True), "peak learning rate of everything else"),
    ("--layers", flags.whole(1), "layers of the model"),
    ("--hidden-size", flags.whole(1), "width of the model"),
    ("--ffn-size", flags.whole(1), "width of its feed-forward part"),
    ("--workers", flags.whole(0), "processes that make data"),
    ("--head-temperature", flags.number(0, 100, True), "what the head is divided by in the end"),
    ("--evals", flags.whole(0), "evaluations during the run"),
    ("--eval-problems", flags.whole(1), "held-out problems a half, each quarter"),
    ("--final-problems", flags.whole(1), "held-out problems a half, at the end"),
    ("--log-every", flags.whole(1), "steps between lines of the log"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.epilog = "A run found in the folder is continued. Curves are drawn to OUT/curves.png."
    parser.add_argument("--out", required=True, metavar="OUT", help="folder of the run")
    for flag, kind, told in OPTIONS:
        parser.add_argument(flag, type=kind, help=told, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Train, or continue, or say how to continue."""
    from dllm_jax.training.command import main

    argv = ["--out", args.out]
    for flag, _, _ in OPTIONS:
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if value is not None:
            argv += [flag, str(value)]
    try:
        return main(argv)
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; the same command continues from the last checkpoint in {args.out}"
        ) from None
