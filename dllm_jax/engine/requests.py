"""Requests and their outputs: plain values, checked where they are made."""

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dllm_jax.engine import checks
from dllm_jax.engine.layout import SamplingNumbers
from dllm_jax.engine.record import Record
from dllm_jax.engine.rules import NUMBERS

_NUMBERS = ("temperature", "top_p", "top_k", "max_tokens", "n", "seed", "max_nfe")
_NUMBERS += ("max_repetition_run", "logprobs")

FinishReason = str  # "stop" | "length" | "nfe" | "repetition" | "abort" | "error"


@checks.known_fields(
    repetition_penalty="max_repetition_run",
    presence_penalty="max_repetition_run",
    frequency_penalty="max_repetition_run",
    min_tokens="ignore_eos",
    prompt_logprobs="Model.logits",
    best_of="n",
    min_p="top_p",
    do_sample="temperature",
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded and when it ends.

    Attributes:
        max_tokens: Most tokens to emit; None: the most that fit after the prompt.
        temperature: 0 is greedy.
        top_k, top_p: Keep the k most probable ids (None, 0 and -1: all); the fewest ids that hold
            probability p.
        seed: Seed of sampling; None: made of the engine's seed and the submission number.
        stop: Strings that end the text; they are not part of it.
        stop_token_ids: Ids that end the text besides the model's own.
        ignore_eos: Leave the model's own stop ids out.
        max_nfe: Most forwards after prefill.
        max_repetition_run: End when the text ends in that many equal tokens.
        n: Texts for the prompt; they share its cached pages.
        strategy_overrides: Thresholds of the strategy for this request alone.
        constraint: What the text must be: a `Regex`, `Choice` or `JsonSchema` of
            `dllm_jax.structured`, or `After` (docs/structured_output.md); None: anything.
        constraint_confidence: What thresholds see of a constrained token: its probability ("raw"),
            or its share of all tokens that the constraint allows there ("plan").
        logprobs: Return the log-probability of each token and of so many of the likeliest, 0 to 5
            (docs/logprobs.md); None: none. Of an engine with `logprobs=True`.
        record: Return a `Record` of each text. Of an engine with `logprobs=True`.

    Raises:
        ValueError: A value outside its range.
    """

    max_tokens: int | None = 256
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
    constraint: Any = None
    constraint_confidence: str = "raw"
    logprobs: int | None = None
    record: bool = False

    def __post_init__(self):
        stop = () if self.stop is None else self.stop
        stop_ids = () if self.stop_token_ids is None else self.stop_token_ids
        plain: dict[str, Any] = {
            "ignore_eos": checks.boolean("ignore_eos", self.ignore_eos),
            "record": checks.boolean("record", self.record),
            "stop": checks.stop_strings(stop),
            "stop_token_ids": tuple(checks.token_ids("stop_token_ids", stop_ids, checks.MOST)),
            "strategy_overrides": checks.overrides(self.strategy_overrides),
        }
        confidence = self.constraint_confidence
        if not isinstance(confidence, str) or confidence not in ("raw", "plan"):
            raise ValueError(
                f"constraint_confidence={checks.short_repr(confidence)} is not "
                'known; use "raw" or "plan"'
            )
        for name in _NUMBERS:
            if (value := getattr(self, name)) is not None or name in ("n", "temperature"):
                plain[name] = NUMBERS[name].check(name, value)
        if plain.get("top_k", 0) <= 0:
            plain["top_k"] = None
        checks.set_fields(self, plain)

    @property
    def reads_written(self) -> bool:
        """Whether it asks for what an engine with `logprobs=True` keeps."""
        return self.logprobs is not None or self.record

    @property
    def sampling(self) -> SamplingNumbers:
        """How tokens are drawn, with a number for each field."""
        wished = {name: getattr(self, name) for name in SamplingNumbers._fields}
        return SamplingNumbers(**{name: one for name, one in wished.items() if one is not None})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to decode.

    Attributes:
        prompt: The text the ids were made of, if any; only handed back.
        request_id: A name of the caller's choice; None: the engine numbers it.
        priority: Lower goes first; of equal ones each client's in turn, in order of arrival.
        client: Whose it is; a server's clients share the engine fairly.
        cache_salt: Prefixes are shared among requests of one salt.
        deadline_s: Seconds from `add` after which it ends with "abort" and what it has.
        stream: Report it whenever it moved, not only when it ended.
        denoise: Report the provisional window as well (one step a dispatch while it runs).
        suffix_token_ids: Ids after the `max_tokens` tokens to be written, -1 for one more of
            them: the text then ends with the last of these, and ids given before it are part of it
            (strategies that take text after holes, `Needs.takes_given`).
        grammar: The automaton of `params.constraint`; `LLM` puts it there.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    prompt: str | None = None
    request_id: str | None = None
    priority: int = 0
    client: str = ""
    cache_salt: str = ""
    deadline_s: float | None = None
    stream: bool = False
    denoise: bool = False
    suffix_token_ids: Sequence[int] = ()
    grammar: Any = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self):
        if not isinstance(self.params, SamplingParams):
            raise ValueError(f"params has type {type(self.params).__name__}; give SamplingParams")
        for name in ("prompt", "request_id"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, str)):
                raise ValueError(
                    f"{name}={checks.short_repr(value)} must be a string; leave it out or give one"
                )
        plain: dict[str, Any] = {
            "prompt_token_ids": checks.token_ids("prompt_token_ids", self.prompt_token_ids),
            "suffix_token_ids": checks.token_ids("suffix_token_ids", self.suffix_token_ids),
            "priority": NUMBERS["priority"].check("priority", self.priority),
            "stream": checks.boolean("stream", self.stream),
            "denoise": checks.boolean("denoise", self.denoise),
        }
        if self.deadline_s is not None:
            plain["deadline_s"] = NUMBERS["deadline_s"].check("deadline_s", self.deadline_s)
        checks.set_fields(self, plain)


@dataclasses.dataclass(frozen=True)
class DraftMetrics:
    """Acceptance of drafts, where one model verifies those of another.

    Only drafts that could be emitted count: not those past the limit or after an emitted stop id,
    and not rounds without a draft. Metrics of several texts add.

    Attributes:
        counts: Rounds by tokens emitted: `counts[i]` rounds emitted i + 1 tokens, including the
            one that the target adds to the accepted drafts.
        proposed: Verified drafts, by place; the first place follows the last known token.
        accepted: Emitted drafts, by place.
    """

    counts: tuple[int, ...]
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def rounds(self) -> int:
        """Rounds in which drafts were verified."""
        return sum(self.counts)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted a round, including the target's own; NaN before the first round."""
        emitted = sum(size * rounds for size, rounds in enumerate(self.counts, 1))
        return emitted / self.rounds if self.rounds else math.nan

    @property
    def accepted_per_position(self) -> tuple[float, ...]:
        """Share of the drafts of each place that was accepted; NaN where none was verified."""
        pairs = zip(self.accepted, self.proposed, strict=True)
        return tuple(taken / count if count else math.nan for taken, count in pairs)

    def figures(self) -> dict[str, Any]:
        """The metrics as JSON values, None in place of NaN."""
        length, shares = self.mean_accepted_length, self.accepted_per_position
        return {
            "rounds": self.rounds,
            "mean_accepted_length": None if math.isnan(length) else length,
            "accepted_per_position": [None if math.isnan(share) else share for share in shares],
            "rounds_by_length": list(self.counts),
        }

    def __add__(self, other: "DraftMetrics") -> "DraftMetrics":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return DraftMetrics(*(tuple(map(operator.add, *pair)) for pair in pairs))

    @staticmethod
    def together(metrics: Iterable["DraftMetrics | None"]) -> "DraftMetrics | None":
        """The sum over several texts; None where none of them drafted."""
        drafted = [each for each in metrics if each is not None]
        return functools.reduce(operator.add, drafted) if drafted else None


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Counts and times of a request.

    Attributes:
        nfe: Forwards after prefill in which it took part, over all its sequences.
        prefill_nfe: Prefill passes, recomputation after preemption included.
        cached_tokens: Prompt tokens found in the prefix cache when first admitted.
        num_preemptions: How often it lost its slot.
        tokens_per_forward: Visible tokens / nfe; tokens given between holes do not count.
        ttfb_s: Seconds from `add` to the first committed block, or to the end if none committed.
        e2e_s: Seconds from `add`.
        prompt_cached_tokens: `cached_tokens` of the first sequence alone: never more than the
            prompt has, however large `n` is.
        queue_s: Seconds from `add` to the first slot; None if it never had one.
        draft: Acceptance of drafts over all its sequences; None without a drafting strategy, and
            before the first of its steps was read.
        trajectory: Where `LLM.generate` was asked for it, an event for each forward and text, as
            `stream(events="denoise")` gives them; they join to the texts.
    """

    nfe: int
    prefill_nfe: int
    cached_tokens: int
    num_preemptions: int
    tokens_per_forward: float
    ttfb_s: float | None
    e2e_s: float
    prompt_cached_tokens: int = 0
    queue_s: float | None = None
    draft: DraftMetrics | None = None
    trajectory: "tuple[StreamEvent, ...] | None" = None


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One text of a request.

    Attributes:
        text: What is settled so far; never part of a stop string, never half a character.
        token_ids: Settled ids, up to the first stop id that was written; at most `max_tokens` and
            the ids given between holes.
        finish_reason: None while it runs.
        window: The provisional window after the settled tokens, None for a hole (denoise only).
        stop_reason: The stop string, or the one of `stop_token_ids`, that ended it; None for the
            model's own end; "nfe", "repetition" or "deadline" for a limit.
        constraint_met: Whether the text is complete and matches the request's constraint; None
            without one, and while it runs.
        message: Of `LLM.chat` with tools: role, content, reasoning_content and tool_calls, as
            OpenAI has them.
        logprobs: Of each of `token_ids`, log-probabilities in nats by id: of the token, and of the
            likeliest that were asked for. NaN for a token that was given. None: not asked for.
        window_logprobs: Of the cells of `window`, with `logprobs`; None for a hole.
        record: With `record=True`, once the text has ended.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    window: tuple[int | None, ...] = ()
    stop_reason: str | int | None = None
    constraint_met: bool | None = None
    message: Mapping[str, Any] | None = None
    logprobs: list[dict[int, float]] | None = None
    window_logprobs: tuple[float | None, ...] = ()
    record: Record | None = None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request as it stands.

    Attributes:
        outputs: Its texts, by sequence index.
        error: Why it ended with "error", else None.
        constraint_notes: What its constraint says that nothing is held to, and what less is
            written of a schema that is large.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: Metrics
    error: str | None = None
    constraint_notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        texts = ", ".join(f"{_short(one.text)} ({one.finish_reason})" for one in self.outputs[:3])
        more = ", ..." if len(self.outputs) > 3 else ""
        error = f", error={_short(self.error)}" if self.error else ""
        return (
            f"RequestOutput({_short(self.request_id)}, {len(self.prompt_token_ids)} prompt tokens, "
            f"texts=[{texts}{more}], nfe={self.metrics.nfe}{error})"
        )


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """A piece of a streamed request.

    Attributes:
        text: Settled text that is new; the pieces of a sequence join to its whole text.
        token_ids: Settled ids that are new.
        window: The provisional window (`events="denoise"`), None for a hole.
        finish_reason: Set on the last event of the sequence.
        error: Why it ended with "error", else None.
        logprobs, window_logprobs, record: As of `CompletionOutput`, of what is new.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    window: tuple[int | None, ...]
    metrics: Metrics
    error: str | None = None
    logprobs: list[dict[int, float]] | None = None
    window_logprobs: tuple[float | None, ...] = ()
    record: Record | None = None
