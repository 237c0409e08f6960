"""Prompts that the engine's process works on: what waits, what runs, and what it has cost."""

from typing import Any, NamedTuple

from dllm_jax import structured
from dllm_jax.engine.inbox import News
from dllm_jax.engine.requests import Request, RequestOutput, SamplingParams
from dllm_jax.serve import pipe
from dllm_jax.serve.pipe import Usage

_MOST_NOTES = 32  # of a constraint, in an answer


class Parked(NamedTuple):
    """Requests that cannot be queued before some work is done."""

    add: pipe.Add
    requests: list[Request]
    since_s: float


class Prompt:
    """A prompt of a request, and the stages of its texts that run or wait."""

    def __init__(self, add: pipe.Add):
        self.add, self.num_open = add, 0
        self.usages: list[Usage] = []
        self.until_s: float | None = None


class Live:
    """A prompt in the engine: where its texts go and what was said of them."""

    def __init__(self, prompt: Prompt, request: Request, first: int, told: int, walks: list[Any]):
        add = prompt.add
        self.id, self.first, self.stream, self.has_ids = add.id, first, add.stream, add.ids
        self.prompt, self.request, self.walks = prompt, request, walks
        self.news = News(every=add.denoise)
        self.num_tokens = [told] * request.params.n
        prompt.num_open += 1


class Stage(NamedTuple):
    """A further stage of a text, which waits for its grammar."""

    prompt: Prompt
    request: Request
    choice: int
    told: int
    walk: Any


def params_of(given: dict[str, Any]) -> SamplingParams:
    """Sampling parameters as the front sends them."""
    fields = given.get("constraint")
    constraint = None if fields is None else structured.from_fields(fields)
    return SamplingParams(**{**given, "constraint": constraint})


def usage_of(output: RequestOutput) -> Usage:
    """The counts of a prompt that has ended."""
    metrics = output.metrics
    num_prompt = len(output.prompt_token_ids)
    return Usage(
        prompt_tokens=num_prompt,
        cached_tokens=metrics.prompt_cached_tokens,
        nfe=metrics.nfe,
        prefill_nfe=metrics.prefill_nfe,
        num_preemptions=metrics.num_preemptions,
        written=round(metrics.tokens_per_forward * max(metrics.nfe, 1)),
        queue_s=metrics.queue_s,
        ttfb_s=metrics.ttfb_s,
        e2e_s=metrics.e2e_s,
        notes=list(output.constraint_notes[:_MOST_NOTES]),
    )


def together(stages: list[Usage]) -> Usage:
    """Of a prompt whose texts came in stages, the first one first."""
    first, *others = stages
    for name in ("nfe", "prefill_nfe", "num_preemptions", "written", "e2e_s"):
        setattr(first, name, getattr(first, name) + sum(getattr(one, name) for one in others))
    return first
