"""The work of a measurement: prompts, lengths, times of arrival, all from a seed."""

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

from dllm_jax.engine.requests import SamplingParams
from dllm_jax.loading import chat
from dllm_jax.loading import tokenizer as tokenization
from dllm_jax.tasks.problems import Problem, problem


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Whole numbers from `low` to `high`, log-uniform: each doubling is as likely as the next."""

    low: int
    high: int

    def __post_init__(self):
        if not 1 <= self.low <= self.high:
            raise ValueError(
                f"lengths {self.low}:{self.high} must be 1 <= low <= high; write e.g. 16:4096"
            )

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"

    def draw(self, rng: random.Random) -> int:
        """Draw one of these numbers."""
        drawn = math.exp(rng.uniform(math.log(self.low), math.log(self.high + 1)))
        return min(int(drawn), self.high)


@dataclasses.dataclass(frozen=True)
class Work:
    """One request to come.

    Attributes:
        arrival_s: Seconds after the start.
        problem: The word problem it states, if any.
    """

    prompt: list[int]
    params: SamplingParams
    arrival_s: float = 0.0
    problem: Problem | None = None


def random_work(model: Any, count: int, inputs: Lengths, outputs: Lengths, seed: int) -> list[Work]:
    """Prompts of random ids, decoded to their full length: special ids are neither read nor end it.

    Args:
        inputs, outputs: Tokens of the prompts and of the texts.
    """
    rng = random.Random(f"bench/{seed}")
    defaults = model.defaults
    special = {model.config.mask_token_id, defaults.pad_token_id, *defaults.stop_token_ids}
    special |= set(defaults.unread_token_ids)
    ids = [token for token in range(defaults.vocab_limit) if token not in special]
    return [
        Work(
            rng.choices(ids, k=inputs.draw(rng)),
            SamplingParams(max_tokens=outputs.draw(rng), ignore_eos=True),
        )
        for _ in range(count)
    ]


def problem_work(model: Any, count: int, max_tokens: int, seed: int) -> list[Work]:
    """Held-out word problems, plain and hard alternating, formatted as for built-in models."""
    halves = ("plain", "hard")
    problems = [problem(halves[i % 2], seed, i // 2, heldout=True) for i in range(count)]
    ids = [encode(model, one.question) for one in problems]
    params = SamplingParams(max_tokens=max_tokens)
    return [Work(row, params, problem=one) for row, one in zip(ids, problems, strict=True)]


def text_work(model: Any, texts: Sequence[str], count: int, max_tokens: int) -> list[Work]:
    """Given texts, from the first again when they run out."""
    ids = [encode(model, text) for text in texts]
    params = SamplingParams(max_tokens=max_tokens)
    return [Work(ids[i % len(ids)], params) for i in range(count)]


def encode(model: Any, text: str) -> list[int]:
    """Ids of a text, as one user message if the model has a chat template.

    Raises:
        ValueError: The model has no tokenizer.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"model {model.source!r} has no tokenizer to read text with; measure it in mode fixed"
        )
    if chat.template_of(model) is None:
        return tokenization.encode(tokenizer, text)
    text = chat.render(model, [{"role": "user", "content": text}])
    return tokenization.encode(tokenizer, text, special=False)


def arriving(work: Sequence[Work], rate: float, seed: int) -> list[Work]:
    """The same work, `rate` requests a second on average (a Poisson process)."""
    rng = random.Random(f"arrivals/{seed}")
    now, placed = 0.0, []
    for one in work:
        now += rng.expovariate(rate)
        placed.append(dataclasses.replace(one, arrival_s=now))
    return placed
