"""What a user asks of the engine and what comes back: plain values, checked where they are made.

Nothing here imports JAX, runs a model or knows about slots and pages.
"""

import contextlib
import dataclasses
import functools
import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_SEED = 2**32 - 1  # a random key is made from 32 bits
MOST = 2**31 - 1  # what counts on the device holds
MOST_TEXTS = 4096  # of one prompt
_MOST_FLOAT = 3.0e38  # what float32 holds

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
        stop_ids = () if self.stop_token_ids is None else self.stop_token_ids
        plain: dict[str, Any] = {
            "max_tokens": whole_number("max_tokens", self.max_tokens, 1, MOST),
            "temperature": _number("temperature", self.temperature, 0.0, _MOST_FLOAT),
            "ignore_eos": _truth("ignore_eos", self.ignore_eos),
            "n": whole_number("n", self.n, 1, MOST_TEXTS),
            "stop": _stops(() if self.stop is None else self.stop),
            "stop_token_ids": tuple(token_ids("stop_token_ids", stop_ids, MOST)),
            "strategy_overrides": _overrides(self.strategy_overrides),
        }
        if self.top_p is not None:
            plain["top_p"] = _number("top_p", self.top_p, 0.0, 1.0)
        for name, low, high in (
            ("top_k", 1, MOST),
            ("seed", 0, MAX_SEED),
            ("max_nfe", 1, MOST),
            ("max_repetition_run", 2, MOST),
        ):
            if getattr(self, name) is not None:
                plain[name] = whole_number(name, getattr(self, name), low, high)
        _set(self, plain)


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
        suffix_token_ids: Ids behind the `max_tokens` tokens to be written, -1 for one more of
            them: the text then ends with the last of these, and what is given before it is part of
            it (strategies with the prompt in the window).
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

    def __post_init__(self):
        if not isinstance(self.params, SamplingParams):
            raise ValueError(f"params is a {_kind(self.params)}; give SamplingParams")
        for name in ("prompt", "request_id"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, str)):
                raise ValueError(f"{name}={value!r} must be a string; leave it out or give one")
        plain: dict[str, Any] = {
            name: token_ids(name, getattr(self, name))
            for name in ("prompt_token_ids", "suffix_token_ids")
        }
        plain["priority"] = whole_number("priority", self.priority, -MOST, MOST)
        plain |= {name: _truth(name, getattr(self, name)) for name in ("stream", "denoise")}
        if self.deadline_s is not None:
            plain["deadline_s"] = _number("deadline_s", self.deadline_s, 0.0, math.inf)
        _set(self, plain)


@dataclasses.dataclass(frozen=True)
class DraftMetrics:
    """How drafts fared, of a strategy that has a model judge those of another.

    Only what could be emitted counts: drafts for places past the limit, or behind a stop id that
    was emitted, do not, nor do rounds in which nothing was drafted. Metrics of several texts add.

    Attributes:
        counts: Rounds by what they emitted: `counts[i]` emitted i + 1 tokens, the one that the
            target adds to the drafts it accepts among them.
        proposed: Drafts that were judged, by place: the first follows the last known token.
        accepted: Those of them that were emitted.
    """

    counts: tuple[int, ...]
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def rounds(self) -> int:
        """Rounds in which drafts were judged."""
        return sum(self.counts)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted in a round, the target's own one among them; NaN before the first."""
        emitted = sum(size * rounds for size, rounds in enumerate(self.counts, 1))
        return emitted / self.rounds if self.rounds else math.nan

    @property
    def accepted_per_position(self) -> tuple[float, ...]:
        """Share of the drafts of each place that was accepted; NaN where none was judged."""
        pairs = zip(self.accepted, self.proposed, strict=True)
        return tuple(taken / told if told else math.nan for taken, told in pairs)

    def figures(self) -> dict[str, Any]:
        """What is reported of it as JSON, where what was never judged is None."""
        length, shares = self.mean_accepted_length, self.accepted_per_position
        return {
            "rounds": self.rounds,
            "mean_accepted_length": None if math.isnan(length) else length,
            "accepted_per_position": [None if math.isnan(share) else share for share in shares],
            "rounds_by_length": list(self.counts),
        }

    def __add__(self, other: "DraftMetrics") -> "DraftMetrics":
        pairs = ((self.counts, other.counts), (self.proposed, other.proposed))
        more = (*pairs, (self.accepted, other.accepted))
        return DraftMetrics(*(tuple(map(operator.add, *pair)) for pair in more))

    @staticmethod
    def together(told: Iterable["DraftMetrics | None"]) -> "DraftMetrics | None":
        """Of several texts as one; None where none of them drafted."""
        some = [one for one in told if one is not None]
        return functools.reduce(operator.add, some) if some else None


@dataclasses.dataclass(frozen=True)
class Metrics:
    """What a text cost.

    Attributes:
        nfe: Forwards after prefill in which it took part, over all its sequences.
        prefill_nfe: Prefill passes, recomputation after preemption included.
        cached_tokens: Prompt tokens found in the prefix cache when first admitted.
        num_preemptions: How often it lost its slot.
        tokens_per_forward: Visible tokens / nfe; what was given between holes is none.
        ttfb_s: Seconds from `add` to the first committed block, or to the end if none committed.
        e2e_s: Seconds from `add`.
        draft: How drafts fared, all its sequences together; None without a drafting strategy, and
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
    draft: DraftMetrics | None = None
    trajectory: "tuple[StreamEvent, ...] | None" = None


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One text of a request.

    Attributes:
        text: What is settled so far; never part of a stop string, never half a character.
        token_ids: Settled ids; ends before the first stop id that was written, never longer than
            `max_tokens` and what a suffix puts between holes.
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
        outputs: Its texts, by sequence index.
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
        text: Settled text that is new; the pieces of a sequence join to its whole text.
        token_ids: Settled ids that are new.
        window: The provisional window (`events="denoise"`), None for a hole.
        finish_reason: Set on the last event of the sequence.
        error: Why it ended with "error", else None.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    window: tuple[int | None, ...]
    metrics: Metrics
    error: str | None = None


# --- checks: each returns the value as plain Python; NumPy's numbers are as good -----------------


def whole_number(name: str, value: Any, low: int, high: int) -> int:
    """The value as an int; truth values are none.

    Raises:
        ValueError: It is not whole, or not in [low, high].
    """
    number = low - 1
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)
    if not low <= number <= high:
        raise ValueError(
            f"{name}={value!r} must be a whole number in [{low}, {high}]; choose a value there"
        )
    return number


def token_ids(name: str, ids: Any, most: int | None = None) -> list[int]:
    """The ids as a list of ints.

    Args:
        most: Where given, they are in [0, most]; the engine knows its vocabulary better.

    Raises:
        ValueError: They are something else.
    """
    try:
        plain = list(map(operator.index, ids.tolist() if hasattr(ids, "tolist") else ids))
    except TypeError:
        raise ValueError(
            f"{name} is {_short(ids)}; give one list of whole numbers, token ids"
        ) from None
    if most is not None:
        for token in plain:
            whole_number(name, token, 0, most)
    return plain


def _number(name: str, value: Any, low: float, high: float) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not low <= float(value) <= high:
        raise ValueError(f"{name}={value!r} must be a number in [{low}, {high}]; choose one there")
    return float(value)


def _truth(name: str, value: Any) -> bool:
    if type(value).__name__ not in ("bool", "bool_"):  # Python's and NumPy's
        raise ValueError(f"{name}={value!r} must be True or False; choose one")
    return bool(value)


def _stops(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Iterable):
        raise ValueError(f"{stop=} must be a string or several; give those that end the text")
    stops = tuple(stops)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop holds {text!r}; give strings of at least one character")
    return stops


def _overrides(overrides: Any) -> dict[str, float]:
    if not isinstance(overrides, Mapping):
        raise ValueError(
            f"strategy_overrides={overrides!r} must be a mapping; "
            'give thresholds by name, as {"accept_threshold": 0.8}'
        )
    return {
        name: _number(f"strategy_overrides[{name!r}]", value, -math.inf, math.inf)
        for name, value in overrides.items()
    }


def _set(frozen: Any, plain: Mapping[str, Any]) -> None:
    """Fields of a frozen value while it is being made: given in any form that means the same."""
    for name, value in plain.items():
        object.__setattr__(frozen, name, value)


def _kind(value: Any) -> str:
    return type(value).__name__


def _short(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 60 and "\n" not in said else f"a {_kind(value)}"
