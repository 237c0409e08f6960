"""Limits of a request, as rows that every surface reads.

`NUMBERS` and `TYPED` are of single fields: `SamplingParams`, `generate`, bodies over HTTP and flags
check by them. `RULES` are of a request in an engine: `check` refuses the first that it breaks.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from dllm_jax.engine import checks
from dllm_jax.engine.checks import MOST, Refused
from dllm_jax.engine.layout import HOLE, EngineLayout

STOP_WIDTH = 32  # stop ids of a request, including the model's own


class Range(NamedTuple):
    """The numbers that a field may hold: from `low` to `high`."""

    low: float
    high: float
    is_whole: bool = True
    above_low: bool = False

    def check(self, name: str, value: Any) -> Any:
        """The number as plain Python.

        Raises:
            ValueError: The value is not such a number.
        """
        check: Any = checks.whole_number if self.is_whole else checks.real_number
        number = check(name, value, self.low, self.high)
        if self.above_low and number == self.low:
            raise ValueError(f"{name}={number} must be above {self.low:g}; choose a larger one")
        return number


NUMBERS = {
    "max_tokens": Range(1, MOST),
    "temperature": Range(0.0, 3.0e38, is_whole=False),  # what float32 holds
    "top_k": Range(-1, MOST),
    "top_p": Range(0.0, 1.0, is_whole=False),
    "seed": Range(0, 2**32 - 1),  # a random key is made from 32 bits
    "max_nfe": Range(1, MOST),
    "max_repetition_run": Range(2, MOST),
    "n": Range(1, 4096),
    "logprobs": Range(0, 5),  # what a slot keeps of each token
    "stop_token_ids": Range(0, MOST),
    "priority": Range(-MOST, MOST),
    "deadline_s": Range(0.0, math.inf, is_whole=False),
}
# As people write them, in JSON and on a command line.
TYPED = NUMBERS | {
    "temperature": Range(0, 1e6, is_whole=False),
    "top_p": Range(0, 1, is_whole=False, above_low=True),
    "n": Range(1, 128),
}


@dataclasses.dataclass(frozen=True)
class _Case:
    """A request as `RULES` see it."""

    request: Any
    layout: EngineLayout
    stop_ids: tuple[int, ...]
    has_tokenizer: bool

    @property
    def params(self) -> Any:
        return self.request.params

    @property
    def suffix(self) -> Sequence[int]:
        return self.request.suffix_token_ids

    @property
    def given(self) -> list[int]:
        return [token for token in self.suffix if token != HOLE]

    @property
    def end(self) -> int:  # the last given token's place after the prompt, from 1; 0: none
        last = max((end for end, token in enumerate(self.suffix, 1) if token != HOLE), default=0)
        return last and (self.params.max_tokens or 0) + last

    @property
    def room(self) -> int:  # cells of the first window after the prompt
        prompt_len = len(self.request.prompt_token_ids)
        return self.layout.window - (prompt_len - self.layout.prefill_len(prompt_len))

    @property
    def blocks(self) -> int:  # blocks of a window that holds all given tokens
        return -(-(self.layout.window - self.room + self.end) // self.layout.block_size)

    @property
    def is_cut(self) -> bool:  # whether `top_p` leaves out some of what is drawn
        params = self.params
        return params.temperature > 0 and params.top_p is not None and params.top_p < 1.0


class Rule(NamedTuple):
    """A row: `{c}` in the message is the case."""

    field: str
    is_broken: Callable[[_Case], Any]
    message: str
    code: str = "invalid_value"


RULES = (
    Rule(
        "logprobs",
        lambda c: (c.params.logprobs is not None or c.params.record) and not c.layout.logprobs,
        "log-probabilities are not kept by this engine; make it with LLM(logprobs=True), or start "
        "`dllm-jax serve --logprobs`",
        "unsupported_parameter",
    ),
    Rule(
        "record",
        lambda c: c.params.record and c.layout.no_record,
        "{c.layout.no_record}",
        "unsupported_parameter",
    ),
    Rule(
        "record",
        lambda c: c.params.record and c.params.constraint is not None,
        "record=True with a constraint, whose tokens are drawn together; leave one of the two out",
    ),
    Rule(
        "record",
        lambda c: c.params.record and c.params.stop,
        "record=True with stop strings, which cut a text between tokens; use stop_token_ids",
    ),
    Rule(
        "constraint",
        lambda c: c.params.constraint is not None and c.layout.batch_invariant,
        "a constraint is not covered by batch_invariant=True; leave one of the two out",
    ),
    Rule(
        "prompt",
        lambda c: not (c.request.prompt_token_ids or c.suffix),
        "the prompt is empty; give at least one token",
    ),
    Rule(
        "prompt",
        lambda c: not c.request.prompt_token_ids and c.layout.compute_at_least,
        "nothing stands before the text, and the model tells a token from the one before it; "
        "give at least one token as the prompt",
    ),
    Rule(
        "suffix",
        lambda c: c.suffix and not (c.layout.in_window or c.layout.pins or c.layout.starts_filled),
        "the strategy takes no text behind a hole; use one that does, such as multi_bd or "
        "full_sequence",
        "unsupported_parameter",
    ),
    Rule(
        "suffix",
        lambda c: c.layout.pins and c.end > c.layout.block_size,
        "the last token given behind the prompt is at {c.end}, behind the {c.layout.block_size} "
        "cells of the first block; give it before, or leave it out",
    ),
    Rule(
        "suffix",
        lambda c: c.layout.starts_filled and c.given and c.end > c.room,
        "the last token given behind a hole is token {c.end} behind the prompt, and the window "
        "has {c.room} cells there; use buffer_size={c.blocks}, or give less",
    ),
    Rule(
        "suffix",
        lambda c: c.layout.starts_filled and any(token in c.stop_ids for token in c.given),
        "a token given behind a hole is a stop id, which would end the text; leave it out, or "
        "use ignore_eos=True",
    ),
    Rule(
        "max_tokens",
        lambda c: c.suffix and c.params.max_tokens is None,
        "max_tokens=None beside a suffix; give the number of tokens to write",
    ),
    Rule(
        "stop_token_ids",
        lambda c: len(c.stop_ids) > STOP_WIDTH,
        f"{{num_stops}} stop ids, the model's own included; at most {STOP_WIDTH} fit: give fewer, "
        "or use stop strings",
    ),
    Rule(
        "stop",
        lambda c: c.params.stop and not c.has_tokenizer,
        "stop strings need a tokenizer; use stop_token_ids",
    ),
    Rule(
        "stop",
        lambda c: c.params.stop and any(token != HOLE for token in inner(c.suffix)),
        "stop={stop} may also be found in what is given between holes; use stop_token_ids, which "
        "end the text only where they are written",
    ),
    Rule(
        "deadline_s",
        lambda c: c.request.deadline_s is not None and not c.request.deadline_s > 0,
        "deadline_s={c.request.deadline_s} must be above 0 seconds",
    ),
    Rule(
        "ignore_eos",
        lambda c: c.request.grammar is not None and c.params.ignore_eos,
        "ignore_eos=True beside a constraint, whose text ends with the model's own stop id; "
        "leave one of them out",
    ),
    Rule(
        "constraint",
        lambda c: c.request.grammar is not None and not c.stop_ids,
        "the model has no stop id, with which a constrained text ends; give one in stop_token_ids",
    ),
    Rule(
        "top_p",
        lambda c: c.request.grammar is not None and c.is_cut,
        "top_p={c.params.top_p} beside a constraint, whose texts are drawn from all that it "
        "allows; leave it out",
        "unsupported_parameter",
    ),
    Rule(
        "top_k",
        lambda c: c.request.grammar is not None and c.params.temperature > 0 and c.params.top_k,
        "top_k={c.params.top_k} beside a constraint, whose texts are drawn from all that it "
        "allows; leave it out",
        "unsupported_parameter",
    ),
)


def check(
    request: Any, layout: EngineLayout, stop_ids: tuple[int, ...], has_tokenizer: bool
) -> None:
    """Refuse a request that breaks a rule.

    Args:
        stop_ids: Ids that end its text, the model's own included.
        has_tokenizer: The engine can read text.

    Raises:
        Refused: It does.
    """
    case = _Case(request, layout, stop_ids, has_tokenizer)
    ids = [*request.prompt_token_ids, *case.given]
    check_ids("the prompt", ids, layout.vocab_size, layout.unread_token_ids)
    check_thresholds(request.params.strategy_overrides, layout.knobs)
    _check_together(request.params.strategy_overrides, layout)
    for rule in RULES:
        if rule.is_broken(case):
            stop = checks.short_repr(case.params.stop)
            said = rule.message.format(c=case, stop=stop, num_stops=len(stop_ids))
            raise Refused(said, rule.field, rule.code)


def check_ids(name: str, ids: Sequence[int], vocab_size: int, unread: Collection[int] = ()) -> None:
    """Refuse ids that the model does not have, or of an image or a sound (`unread`).

    Raises:
        Refused: There is one.
    """
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            raise Refused(
                f"{name} holds id {token}, outside the vocabulary [0, {vocab_size}); "
                "was it tokenized for another model?",
                "prompt",
            )
    found = next((token for token in unread if token in ids), None)
    if found is not None:
        raise Refused(
            f"{name} holds id {found}, which stands for an image or a sound: this package reads "
            "text only; leave it out",
            "prompt",
        )


def check_thresholds(given: Mapping[str, float], ranges: Mapping[str, tuple[float, float]]) -> None:
    """Refuse thresholds that the strategy does not have, or not with these values.

    Args:
        ranges: Lowest and highest value of each threshold.

    Raises:
        Refused: There is one.
    """
    for name, value in given.items():
        field = f"strategy_overrides.{name}"
        if name not in ranges:
            known = ", ".join(sorted(ranges)) or "none"
            raise Refused(
                f"strategy_overrides: the strategy has no threshold {checks.short_repr(name)}; "
                f"it has {known}",
                field,
            )
        low, high = ranges[name]
        if not low <= value <= high:
            raise Refused(f"{name}={value} is outside [{low}, {high}]; choose one inside", field)


def _check_together(given: Mapping[str, float], layout: EngineLayout) -> None:
    """Refuse thresholds that are to be whole, or do not go with the others."""
    for name, value in given.items():
        if name in layout.whole_knobs and value % 1:
            raise Refused(
                f"{name}={value} is not a whole number; round it", f"strategy_overrides.{name}"
            )
    values = dict(layout.knob_values, **given)
    for low, high in layout.ordered_knobs.items():
        if values[low] > values[high]:
            raise Refused(
                f"{low}={values[low]} is above {high}={values[high]}; lower {low} or raise {high}",
                f"strategy_overrides.{low if low in given else high}",
            )


def inner(suffix: Sequence[int]) -> Sequence[int]:
    """The part of a suffix that belongs to the text: up to its last hole."""
    end = max((end for end, token in enumerate(suffix, 1) if token == HOLE), default=0)
    return suffix[:end]
