"""Tasks of lm-evaluation-harness as problems: its prompts, its answers, its judge.

The texts are decoded here, so that tokens and forwards are counted and settings share batches. A
task's stop strings cut the text that is judged; tokens and forwards are those of the whole text.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dllm_jax.loading import chat
from dllm_jax.loading.model import Model
from dllm_jax.loading.tokenizer import encode
from dllm_jax.tasks.evaluate import ProblemSet
from dllm_jax.tasks.problems import Problem

_SEED = 1234  # of worked examples, as the harness's own


def read_tasks(
    model: Model,
    names: Sequence[str],
    *,
    folder: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> dict[str, ProblemSet]:
    """The problems of tasks, as chats of the model, by the name of the task.

    Args:
        folder: Where the .yaml files are; None: the harness's own.
        limit: The first `limit` problems of each.

    Raises:
        ImportError: The harness is not installed.
        ValueError: There is no such task, or it does not generate.
    """
    try:
        from lm_eval.tasks import (  # pyright: ignore[reportMissingImports]
            TaskManager,
            get_task_dict,
        )
    except ImportError as error:
        raise ImportError(
            f"--tasks needs lm-evaluation-harness ({error}); pip install 'lm-eval>=0.4.9'"
        ) from error
    manager = TaskManager(include_path=folder, include_defaults=folder is None)
    known = manager.all_tasks
    if unknown := [name for name in names if name not in known]:
        where = f"in {Path(folder)}" if folder else "in the harness"
        raise ValueError(f"there is no task {unknown[0]!r} {where}; check --tasks, --include-path")
    return {
        name: _problem_set(model, name, task, limit, num_fewshot)
        for name, task in _leaves(get_task_dict([*names], manager))
    }


def _leaves(tasks: dict[Any, Any]) -> list[tuple[str, Any]]:
    """The tasks of groups of tasks."""
    found = []
    for name, task in tasks.items():
        found += _leaves(task) if isinstance(task, dict) else [(str(name), task)]
    return found


def _problem_set(
    model: Model, name: str, task: Any, limit: int | None, num_fewshot: int | None
) -> ProblemSet:
    if task.OUTPUT_TYPE != "generate_until":
        raise ValueError(
            f"task {name!r} is of the type {task.OUTPUT_TYPE}, which no threshold changes; run it "
            "with python -m dllm_jax.lm_eval"
        )
    if num_fewshot is not None:
        task.set_config("num_fewshot", num_fewshot)
    task.set_fewshot_seed(_SEED)

    def render(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        del add_generation_prompt
        return chat.render(model, messages)

    task.build_all_requests(
        limit=limit, rank=0, world_size=1, apply_chat_template=True, chat_template=render
    )
    asked = list(task.instances)
    problems = [
        Problem(one.args[0], "", str(task.doc_to_target(one.doc)), name, str(number))
        for number, one in enumerate(asked)
    ]
    prompts = [encode(model.tokenizer, one.args[0], special=False) for one in asked]
    return ProblemSet(problems, functools.partial(_is_right, task, asked), prompts)


def _is_right(task: Any, asked: Sequence[Any], text: str, of: Problem) -> bool:
    """The verdict of the task's first filter and first metric."""
    one = asked[int(of.half)]
    until = one.args[1].get("until") or ()
    for stop in (until,) if isinstance(until, str) else until:
        if stop:
            text = text.partition(stop)[0]
    one.resps = [text]
    ensemble = task._filters[0]
    ensemble.apply([one])
    verdict = task.process_results(one.doc, [one.filtered_resps[ensemble.name]])
    return float(next(iter(verdict.values()))) >= 0.5
