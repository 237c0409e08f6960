"""The work of a load on a server: prompts, lengths and times of arrival, all from a seed."""

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dllm_jax.bench.workload import Lengths
from dllm_jax.tasks.problems import Problem, problem


@dataclasses.dataclass(frozen=True)
class Work:
    """One request to come.

    Attributes:
        prompt: A text, or token ids.
        arrival_s: Seconds after the start.
        problem: The word problem it states, if any.
    """

    prompt: str | list[int]
    max_tokens: int
    arrival_s: float = 0.0
    problem: Problem | None = None


def random_work(
    tokenizer: Any, count: int, inputs: Lengths, outputs: Lengths, seed: int, as_text: bool
) -> list[Work]:
    """Prompts of random ids, without special ones.

    Args:
        inputs, outputs: Tokens of the prompts and of the texts.
        as_text: Send text instead of ids; the server may then count a few tokens more or less.
    """
    rng = random.Random(f"bench/serve/{seed}")
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ids = [token for token in range(len(tokenizer)) if token not in special]
    found = []
    for _ in range(count):
        prompt: Any = rng.choices(ids, k=inputs.draw(rng))
        if as_text:
            prompt = tokenizer.decode(prompt, skip_special_tokens=True)
        found.append(Work(prompt, outputs.draw(rng)))
    return found


def file_work(path: str, text: str, count: int | None, outputs: Lengths, seed: int) -> list[Work]:
    """Prompts of a file, repeated from the first when they run out.

    Args:
        path: A `.jsonl` file has objects with `prompt` and optionally `output_tokens`, as vLLM's
            custom data sets; any other file has a prompt a line.
        count: Number of prompts; None: each once.

    Raises:
        ValueError: A line has another form, or the file has no prompt.
    """
    rng = random.Random(f"bench/serve/{seed}")
    rows: list[tuple[str, int | None]] = []
    is_json = Path(path).suffix == ".jsonl"  # whose strings may hold U+2028
    lines = text.split("\n") if is_json else text.splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append(_row(path, number, line) if is_json else (line, None))
    if not rows:
        raise ValueError(f"prompt file {path!r} holds no prompt; write one on each line")
    taken = [rows[i % len(rows)] for i in range(len(rows) if count is None else count)]
    return [Work(prompt, most or outputs.draw(rng)) for prompt, most in taken]


def _row(path: str, number: int, line: str) -> tuple[str, int | None]:
    try:
        row = json.loads(line)
        prompt, most = row["prompt"], row.get("output_tokens")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        prompt = most = None
    if not isinstance(prompt, str) or not (most is None or (type(most) is int and most > 0)):
        raise ValueError(
            f"prompt file {path!r}, line {number}: write an object with a text under 'prompt', and "
            "if need be a count above 0 under 'output_tokens'"
        )
    return prompt, most


def problem_work(count: int, max_tokens: int, seed: int) -> list[Work]:
    """Held-out word problems, plain and hard alternating, formatted as for built-in models."""
    halves = ("plain", "hard")
    problems = [problem(halves[i % 2], seed, i // 2, heldout=True) for i in range(count)]
    return [Work(one.question, max_tokens, problem=one) for one in problems]


def arriving(work: Sequence[Work], rate: float, burstiness: float, seed: int) -> list[Work]:
    """The same work at `rate` requests a second; the last one arrives after work / rate seconds.

    Args:
        burstiness: Shape of the gamma distribution of intervals: 1 is a Poisson process, below it
            requests come in bursts, above it more evenly, at infinity evenly.
    """
    rng = random.Random(f"arrivals/{seed}")
    now, times = 0.0, []
    for _ in work:
        steady = math.isinf(burstiness)
        now += 1.0 if steady else rng.gammavariate(burstiness, 1.0 / burstiness)
        times.append(now)
    scale = len(work) / rate / now if now > 0 else 0.0
    return [
        dataclasses.replace(one, arrival_s=at * scale) for one, at in zip(work, times, strict=True)
    ]
