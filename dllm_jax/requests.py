"""What a user asks of the engine and what comes back: plain values, checked where they are made.

Nothing here imports JAX, runs a model or knows about slots and pages.
"""

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

MAX_SEED = 2**32 - 1  # a random key is made from 32 bits
MOST = 2**31 - 1  # what counts on the device holds

FinishReason = str  # "stop" | "length" | "nfe" | "repetition" | "abort" | "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded and when it ends.

    Attributes:
        max_tokens: Most tokens to emit.
        temperature: 0 is greedy.
        top_k, top_p: Keep the k most probable ids; the fewest ids that hold probability p.
        seed: Of sampling; None draws from the engine's own seed and the submission number.
        stop: Strings that end the text; they are not part of it.
        stop_token_ids: Ids that end the text beside the model's own.
        ignore_eos: Leave the model's own stop ids out.
        max_nfe: Most forwards after prefill.
        max_repetition_run: End when the text ends in that many equal tokens.
        n: Texts for the prompt; they share its cached pages.
        strategy_overrides: Thresholds of the strategy for this request alone.

    Raises:
        ValueError: A value outside its range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_nfe: int | None = None
    max_repetition_run: int | None = None
    n: int = 1
    strategy_overrides: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        _check_whole("max_tokens", self.max_tokens, 1, MOST)
        _check_number("temperature", self.temperature, 0.0, 3.0e38)
        _check_whole("top_k", self.top_k, 1, MOST, none=True)
        if self.top_p is not None:
            _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_whole("seed", self.seed, 0, MAX_SEED, none=True)
        _check_whole("max_nfe", self.max_nfe, 1, MOST, none=True)
        _check_whole("max_repetition_run", self.max_repetition_run, 2, MOST, none=True)
        _check_whole("n", self.n, 1, 4096)
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stops:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop holds {text!r}; give strings of at least one character")
        ids = tuple(self.stop_token_ids)
        for one in ids:
            _check_whole("stop_token_ids", one, 0, MOST)
        overrides = dict(self.strategy_overrides)
        for name, value in overrides.items():
            _check_number(f"strategy_overrides[{name!r}]", value, -math.inf, math.inf)
        # Frozen from here on; these three were given in any form that means the same.
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "strategy_overrides", overrides)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to decode.

    Attributes:
        prompt: The text the ids were made of, if any; only handed back.
        request_id: A name of the caller's choice; None: the engine numbers it.
        priority: Lower goes first; equal ones in order of arrival.
        deadline_s: Seconds from `add` after which it ends with "abort" and what it has.
        stream: Report it whenever it moved, not only when it ended.
        denoise: Report the provisional window as well (one step a dispatch while it runs).
        suffix_token_ids: Ids behind the text to be written (strategies with the prompt in the
            window).
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    prompt: str | None = None
    request_id: str | None = None
    priority: int = 0
    deadline_s: float | None = None
    stream: bool = False
    denoise: bool = False
    suffix_token_ids: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Metrics:
    """What a text cost.

    Attributes:
        nfe: Forwards after prefill in which it took part, over all its samples.
        prefill_nfe: Prefill passes, recomputation after preemption included.
        cached_tokens: Prompt tokens found in the prefix cache when first admitted.
        num_preemptions: How often it lost its slot.
        tokens_per_forward: Visible tokens / nfe.
        ttfb_s: Seconds from `add` to the first committed block, or to the end if none committed.
        e2e_s: Seconds from `add`.
    """

    nfe: int
    prefill_nfe: int
    cached_tokens: int
    num_preemptions: int
    tokens_per_forward: float
    ttfb_s: float | None
    e2e_s: float


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One text of a request.

    Attributes:
        text: What is settled so far; never part of a stop string, never half a character.
        token_ids: Settled ids; ends before the first stop id, never longer than `max_tokens`.
        finish_reason: None while it runs.
        window: The provisional window behind the settled tokens, None for a hole (denoise only).
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    window: tuple[int | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request as it stands.

    Attributes:
        outputs: Its texts, by sample index.
        error: Why it ended with "error", else None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: Metrics
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """A piece of a streamed request.

    Attributes:
        text: Settled text that is new; the pieces of a sample join to its whole text.
        token_ids: Settled ids that are new.
        window: The provisional window (`events="denoise"`), None for a hole.
        finish_reason: Set on the last event of the sample.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    window: tuple[int | None, ...]
    metrics: Metrics


def _check_whole(name: str, value: Any, low: int, high: int, none: bool = False) -> None:
    if value is None and none:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not low <= value <= high:
        raise ValueError(
            f"{name}={value!r} must be a whole number in [{low}, {high}]; choose a value there"
        )


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if not isinstance(value, numbers.Real) or not low <= float(value) <= high:
        raise ValueError(f"{name}={value!r} must be a number in [{low}, {high}]; choose one there")
