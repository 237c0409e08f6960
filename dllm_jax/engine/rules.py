"""Limits of a request, as rows that every surface reads.

`NUMBERS` and `TYPED` are of single fields: `SamplingParams`, `generate`, bodies over HTTP and flags
check by them. `check` refuses the first rule that a request breaks in an engine.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from dllm_jax.engine import checks
from dllm_jax.engine.checks import MOST, Refused
from dllm_jax.engine.layout import HOLE, EngineLayout, KnobRule

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


UNSUPPORTED = "unsupported_parameter"

# Whether a request breaks a rule, the field at fault, the message, and the code if it is no usual
# one.
_Row = tuple[Any, str, str] | tuple[Any, str, str, str]


def _rows(request: Any, layout: EngineLayout, stop_ids: Sequence[int], reads: bool) -> list[_Row]:
    """What a request may hold; the first rule that it breaks is reported."""
    params, suffix = request.params, request.suffix_token_ids
    deadline_s, stops = request.deadline_s, checks.short_repr(params.stop)
    return [
        (
            (params.logprobs is not None or params.record) and not layout.logprobs,
            "logprobs",
            "log-probabilities are not kept by this engine; make it with LLM(logprobs=True), or "
            "start `dllm-jax serve --logprobs`",
            UNSUPPORTED,
        ),
        (params.record and layout.no_record, "record", str(layout.no_record), UNSUPPORTED),
        (
            params.record and params.constraint is not None,
            "record",
            "record=True with a constraint, whose tokens are drawn together; leave one of the two "
            "out",
        ),
        (
            params.record and params.stop,
            "record",
            "record=True with stop strings, which cut a text between tokens; use stop_token_ids",
        ),
        (
            params.constraint is not None and layout.batch_invariant,
            "constraint",
            "a constraint is not covered by batch_invariant=True; leave one of the two out",
        ),
        (
            not (request.prompt_token_ids or suffix),
            "prompt",
            "the prompt is empty; give at least one token",
        ),
        (
            not request.prompt_token_ids and layout.compute_at_least,
            "prompt",
            "nothing stands before the text, and the model tells a token from the one before it; "
            "give at least one token as the prompt",
        ),
        *_rows_of_suffix(request, layout, stop_ids),
        (
            len(stop_ids) > STOP_WIDTH,
            "stop_token_ids",
            f"{len(stop_ids)} stop ids, the model's own included; at most {STOP_WIDTH} fit: give "
            "fewer, or use stop strings",
        ),
        (
            params.stop and not reads,
            "stop",
            "stop strings need a tokenizer; use stop_token_ids",
        ),
        (
            params.stop and any(token != HOLE for token in inner(suffix)),
            "stop",
            f"stop={stops} may also be found in what is given between holes; use stop_token_ids, "
            "which end the text only where they are written",
        ),
        (
            deadline_s is not None and not deadline_s > 0,
            "deadline_s",
            f"{deadline_s=} must be above 0 seconds",
        ),
        *(() if request.grammar is None else _rows_of_grammar(params, stop_ids)),
    ]


def _rows_of_suffix(request: Any, layout: EngineLayout, stop_ids: Sequence[int]) -> list[_Row]:
    max_tokens, suffix = request.params.max_tokens, request.suffix_token_ids
    prompt_len, S = len(request.prompt_token_ids), layout.block_size
    places = [place for place, token in enumerate(suffix, 1) if token != HOLE]
    end = (max_tokens or 0) + places[-1] if places else 0  # of what is given, after the prompt
    room = layout.window - (prompt_len - layout.prefill_len(prompt_len))  # of the first window
    return [
        (
            suffix and not (layout.in_window or layout.pins or layout.starts_filled),
            "suffix",
            "the strategy takes no text behind a hole; use one that does, such as multi_bd or "
            "full_sequence",
            UNSUPPORTED,
        ),
        (
            layout.pins and end > S,
            "suffix",
            f"the last token given behind the prompt is at {end}, behind the {S} cells of the "
            "first block; give it before, or leave it out",
        ),
        (
            layout.starts_filled and end > max(room, 0),
            "suffix",
            f"the last token given behind a hole is token {end} behind the prompt, and the window "
            f"has {room} cells there; use buffer_size={-(-(layout.window - room + end) // S)}, or "
            "give less",
        ),
        (
            layout.starts_filled and any(token in stop_ids for token in suffix),
            "suffix",
            "a token given behind a hole is a stop id, which would end the text; leave it out, or "
            "use ignore_eos=True",
        ),
        (
            suffix and max_tokens is None,
            "max_tokens",
            "max_tokens=None beside a suffix; give the number of tokens to write",
        ),
    ]


def _rows_of_grammar(params: Any, stop_ids: Sequence[int]) -> list[_Row]:
    is_drawn, top_p, top_k = params.temperature > 0, params.top_p, params.top_k
    return [
        (
            params.ignore_eos,
            "ignore_eos",
            "ignore_eos=True beside a constraint, whose text ends with the model's own stop id; "
            "leave one of them out",
        ),
        (
            not stop_ids,
            "constraint",
            "the model has no stop id, with which a constrained text ends; give one in "
            "stop_token_ids",
        ),
        (
            is_drawn and top_p is not None and top_p < 1.0,
            "top_p",
            f"{top_p=} beside a constraint, whose texts are drawn from all that it allows; leave "
            "it out",
            UNSUPPORTED,
        ),
        (
            is_drawn and top_k,
            "top_k",
            f"{top_k=} beside a constraint, whose texts are drawn from all that it allows; leave "
            "it out",
            UNSUPPORTED,
        ),
    ]


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
    ids = [*request.prompt_token_ids, *(i for i in request.suffix_token_ids if i != HOLE)]
    check_ids("the prompt", ids, layout.vocab_size, layout.unread_token_ids)
    check_thresholds(request.params.strategy_overrides, layout.knobs, layout.knob_values)
    for is_broken, field, message, *code in _rows(request, layout, stop_ids, has_tokenizer):
        if is_broken:
            raise Refused(message, field, *code)


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


def check_thresholds(
    given: Mapping[str, float], rules: Mapping[str, KnobRule], values: Mapping[str, float]
) -> None:
    """Refuse thresholds that the strategy does not have, or not with these values.

    Args:
        rules: Of each threshold, as `EngineLayout.knobs`; `values` are those of the others.

    Raises:
        Refused: There is one.
    """
    for name, value in given.items():
        field = f"strategy_overrides.{name}"
        if name not in rules:
            known = ", ".join(sorted(rules)) or "none"
            raise Refused(
                f"strategy_overrides: the strategy has no threshold {checks.short_repr(name)}; "
                f"it has {known}",
                field,
            )
        low, high, whole, _ = rules[name]
        if not low <= value <= high:
            raise Refused(f"{name}={value} is outside [{low}, {high}]; choose one inside", field)
        if whole and value % 1:
            raise Refused(f"{name}={value} is not a whole number; round it", field)
    values = dict(values, **given)
    for low, (*_, high) in rules.items():
        if high is not None and values[low] > values[high]:
            raise Refused(
                f"{low}={values[low]} is above {high}={values[high]}; lower {low} or raise {high}",
                f"strategy_overrides.{low if low in given else high}",
            )


def inner(suffix: Sequence[int]) -> Sequence[int]:
    """The part of a suffix that belongs to the text: up to its last hole."""
    end = max((end for end, token in enumerate(suffix, 1) if token == HOLE), default=0)
    return suffix[:end]
