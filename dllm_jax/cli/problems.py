"""The problems that `eval` and `tune` decode: their flags, and the sets that these name."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from dllm_jax.cli.errors import UsageError
from dllm_jax.cli.flags import Flag, Group, flag, seed, whole


def problem_flags(count: int, halves: tuple[str, ...], *others: Flag) -> Group:
    """Flags that choose problems and how their texts are judged.

    Args:
        count: Problems of a built-in half that are taken by default.
        halves: Choices of `--half`; the last one is the default.
        others: More flags of the same group.
    """
    return Group(
        "problems",
        flag(
            "--data FILE",
            'your own problems: .jsonl with "question" and "answer" (default: the built-in ones)',
        ),
        flag(
            "--scorer NAME",
            "judge of --data: exact (the whole text), numeric (its last number) or regex:PATTERN "
            "(the last match, or its first group) against the answer (default: numeric)",
            _scorer,
        ),
        flag(
            "--tasks NAME,...",
            "tasks of lm-evaluation-harness that generate, as chats; needs lm-eval",
        ),
        flag(
            "--include-path FOLDER",
            "where the .yaml files of --tasks are (default: the harness's own tasks)",
        ),
        flag(
            "--num-fewshot N",
            "worked examples before each question of --tasks (default: the task's)",
            whole(0),
        ),
        flag("--half", f"which built-in problems (default: {halves[-1]})", halves),
        flag(
            "--problems N",
            f"the first N of a half (default: {count}), of --data or of a task (default: all)",
            whole(1),
        ),
        flag("--seed", "of the built-in problems", seed, 0),
        flag("--batch-size B", "problems decoded at once", whole(1), 32),
        flag("--max-tokens N", "tokens of a text at most", whole(1), 224),
        *others,
    )


def _scorer(name: str) -> tuple[str, Any]:
    """An argparse type: the name of a scorer, and the scorer."""
    from dllm_jax.tasks.own_problems import scorer

    try:
        return name, scorer(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def load_with_problems(
    args: argparse.Namespace, count: int, halves: tuple[str, ...]
) -> tuple[Any, dict[str, Any]]:
    """The model, and the sets of problems by the name that the report gives them."""
    check_problem_flags(args)
    sets = {} if args.tasks else _problems(args, count, halves)

    from dllm_jax.cli.sources import load_model

    model = load_model(args)
    if model.tokenizer is None:
        raise ValueError(f"model {args.model!r} has no tokenizer; give a trained model")
    if args.tasks:
        from dllm_jax.tasks.harness import read_tasks

        sets = read_tasks(
            model,
            args.tasks.split(","),
            folder=args.include_path,
            limit=args.problems,
            num_fewshot=args.num_fewshot,
        )
    length = args.max_tokens
    return model, {name: dataclasses.replace(of, max_tokens=length) for name, of in sets.items()}


def check_problem_flags(args: argparse.Namespace) -> None:
    """Refuse flags that do not go together."""
    if args.tasks is not None and not all(args.tasks.split(",")):
        raise UsageError(f"--tasks {args.tasks!r} names no task; write e.g. gsm8k,minerva_math")
    for name, value in (("--data", args.data), ("--half", args.half), ("--scorer", args.scorer)):
        if args.tasks is not None and value is not None:
            raise UsageError(f"{name} and --tasks do not go together; leave one out")
    for name, value in (("--include-path", args.include_path), ("--num-fewshot", args.num_fewshot)):
        if args.tasks is None and value is not None:
            raise UsageError(f"{name} is of --tasks; give both")
    if args.include_path is not None and not Path(args.include_path).is_dir():
        raise UsageError(f"--include-path {args.include_path!r} is no folder; give one")
    if args.data is None and args.scorer is not None:
        raise UsageError("--scorer judges the answers of --data; give both")
    if args.data is not None and args.half is not None:
        raise UsageError("--half chooses among the built-in problems; leave it out with --data")
    if args.data is not None and not Path(args.data).is_file():
        raise UsageError(f"--data {args.data!r} is not a file; give a .jsonl file")


def _problems(args: argparse.Namespace, count: int, halves: tuple[str, ...]) -> dict[str, Any]:
    """The built-in sets, or that of --data."""
    from dllm_jax.tasks.evaluate import ProblemSet, held_out

    if args.data is None:
        chosen = halves if args.half in (None, "both") else (args.half,)
        found = {half: held_out(half, args.problems or count, args.seed) for half in chosen}
        return {half: ProblemSet(problems) for half, problems in found.items()}
    from dllm_jax.tasks.own_problems import read_problems

    args.scorer = args.scorer or _scorer("numeric")
    try:
        found = read_problems(args.data)[: args.problems]
    except ValueError as error:
        raise UsageError(f"--data {error}") from None
    return {Path(args.data).name: ProblemSet(found, args.scorer[1])}
