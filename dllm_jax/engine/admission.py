"""From a request to the sequences that the engine runs; unfit requests are refused here."""

import dataclasses
from typing import Any

from dllm_jax.engine import checks
from dllm_jax.engine.checks import Refused
from dllm_jax.engine.detokenize import TextStream, special_stops
from dllm_jax.engine.layout import HOLE, NO_LIMIT, EngineLayout, Placement
from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.engine.scheduler import Scheduler, Sequence

STOP_WIDTH = 32  # stop ids of a request, including the model's own


@dataclasses.dataclass(eq=False, slots=True)
class ActiveRequest:
    """A request in the engine; `error` says why it ended with "error"."""

    id: str
    request: Request
    params: SamplingParams
    added_s: float
    deadline_s: float | None
    sequences: list[Sequence]
    error: str | None = None
    is_late: bool = False


def accept(
    request: Request,
    request_id: str,
    number: int,
    now: float,
    scheduler: Scheduler,
    tokenizer: Any,
    seed: int,
) -> ActiveRequest:
    """A request as sequences, not yet queued.

    Args:
        number: Sequences submitted before: their order, and their key in requests without a seed.
        seed: Of requests without one.

    Raises:
        Refused: It can never run, or asks for what does not exist.
    """
    layout, params = scheduler.layout, request.params
    prompt, suffix = list(request.prompt_token_ids), tuple(request.suffix_token_ids)
    stops = params.stop_token_ids + (() if params.ignore_eos else layout.stop_token_ids)
    if params.stop and tokenizer is not None:
        try:
            stops += (*special_stops(tokenizer, params.stop, stops),)
        except ValueError as error:
            raise Refused(str(error), "stop") from None
    stop_ids = tuple(dict.fromkeys(stops))
    _check(request, prompt, suffix, stop_ids, layout, tokenizer)
    max_tokens = params.max_tokens
    if max_tokens is None:
        if suffix:
            raise ValueError("max_tokens=None beside a suffix; give the number of tokens to write")
        room = layout.window if layout.in_window else layout.max_model_len
        max_tokens = max(1, room - len(prompt))
    limit, capacity = _limits(scheduler, len(prompt), max_tokens, suffix)
    if request.grammar is not None:
        _check_grammar(request, stop_ids, limit - len(prompt))
    first = layout.prefill_len(len(prompt))
    deadline = None if request.deadline_s is None else now + request.deadline_s
    active = ActiveRequest(request_id, request, params, now, deadline, [])
    placement = Placement(
        tail=tuple(prompt[first : first + layout.window]),
        prompt_len=len(prompt),
        limit=limit,
        temperature=float(params.temperature),
        top_k=params.top_k or 0,
        top_p=1.0 if params.top_p is None else float(params.top_p),
        stop_ids=stop_ids,
        max_nfe=params.max_nfe or NO_LIMIT,
        max_run=params.max_repetition_run or NO_LIMIT,
        knobs={**layout.knob_values, **params.strategy_overrides},
        seed=seed if params.seed is None else params.seed,
        fold=0,
        given=(HOLE,) * max_tokens + suffix if suffix else (),
        grammar=request.grammar,
    )
    watched = request.stream or request.denoise or bool(params.stop)
    has_stream = watched and tokenizer is not None
    for index in range(params.n):
        fold = number + index if params.seed is None else index
        sequence = Sequence(
            owner=active,
            index=index,
            rank=(request.priority, number + index),
            client=request.client,
            prompt=prompt,
            placement=dataclasses.replace(placement, fold=fold),
            capacity=capacity,
            leader=active.sequences[0] if index else None,
            publishes=layout.prefix_caching or params.n > 1,
            watched=watched,
            stream=TextStream(tokenizer, params.stop) if has_stream else None,
        )
        active.sequences.append(sequence)
    return active


def _limits(
    scheduler: Scheduler, prompt_len: int, max_tokens: int, suffix: tuple[int, ...]
) -> tuple[int, int]:
    """`Scheduler.limits` of a text; a text with a suffix must fit as a whole."""
    layout, inner_len = scheduler.layout, _inner_len(suffix)
    text_len, total = max_tokens + inner_len, prompt_len + max_tokens + len(suffix)
    limit, capacity = scheduler.limits(prompt_len, text_len, len(suffix) - inner_len)
    if suffix and (limit < prompt_len + text_len or total > layout.max_model_len):
        raise Refused(
            f"prompt, max_tokens and suffix are {total} tokens; the engine takes "
            f"{layout.max_model_len} and its pool {layout.num_pages * layout.page_size}, including "
            "one more block: lower max_tokens, or raise max_model_len or num_pages",
            "max_tokens",
            "context_length_exceeded",
        )
    return limit, capacity


def _check_grammar(request: Request, stop_ids: tuple[int, ...], room: int) -> None:
    """Refuse what cannot be held to a grammar, or cannot end within the tokens it may have."""
    params = request.params
    if params.ignore_eos:
        raise Refused(
            "ignore_eos=True beside a constraint, whose text ends with the model's own stop id; "
            "leave one of them out",
            "ignore_eos",
        )
    if not stop_ids:
        raise Refused(
            "the model has no stop id, with which a constrained text ends; give one in "
            "stop_token_ids",
            "constraint",
        )
    cuts = params.top_p is not None and params.top_p < 1.0
    if params.temperature > 0 and (params.top_k or cuts):
        name = "top_p" if cuts else "top_k"
        raise Refused(
            f"{name}={getattr(params, name)} beside a constraint, whose texts are drawn from all "
            "that it allows; leave it out",
            name,
            "unsupported_parameter",
        )
    if request.suffix_token_ids:
        _check_fits(request)
        return
    shortest = int(request.grammar.distance[request.grammar.start])
    if shortest > room:
        raise Refused(
            f"the shortest text of the constraint has {shortest} tokens, and there is room for "
            f"{room}; raise max_tokens or max_model_len",
            "max_tokens",
        )


def _check_fits(request: Request) -> None:
    """Refuse given tokens that no text of the grammar has where they stand."""
    grammar, suffix = request.grammar, request.suffix_token_ids
    cells = [*[HOLE] * (request.params.max_tokens or 0), *suffix[: _inner_len(tuple(suffix))]]
    reached = {int(grammar.start)}
    for cell in cells:
        states = list(reached)
        if cell == HOLE:
            found = grammar.delta[states, 1:]
        else:
            found = grammar.delta[states, grammar.class_of[cell]]
        reached = set(found.ravel().tolist()) - {0}
    if not any(grammar.distance[state] == 0 for state in reached):
        raise Refused(
            "no text of the constraint has the given tokens where they stand; change the holes or "
            "the constraint",
            "constraint",
        )


def _check_window(
    prompt_len: int,
    last: int,
    given: list[int],
    stop_ids: tuple[int, ...],
    layout: EngineLayout,
) -> None:
    """Refuse given tokens that a window of blocks cannot begin with."""
    room = layout.window - (prompt_len - layout.prefill_len(prompt_len))
    if last > room:
        blocks = -(-(layout.window - room + last) // layout.block_size)
        raise Refused(
            f"the last token given behind a hole is token {last} behind the prompt, and the window "
            f"has {room} cells there; use buffer_size={blocks}, or give less",
            "suffix",
        )
    if any(token in stop_ids for token in given):
        raise Refused(
            "a token given behind a hole is a stop id, which would end the text; leave it out, or "
            "use ignore_eos=True",
            "suffix",
        )


def _inner_len(suffix: tuple[int, ...]) -> int:
    """Tokens of the suffix that belong to the text: up to its last hole."""
    return max((end for end, token in enumerate(suffix, 1) if token == HOLE), default=0)


def _check(
    request: Request,
    prompt: list[int],
    suffix: tuple[int, ...],
    stop_ids: tuple[int, ...],
    layout: EngineLayout,
    tokenizer: Any,
) -> None:
    params = request.params
    if params.constraint is not None and layout.batch_invariant:
        raise Refused(
            "a constraint is not covered by batch_invariant=True; leave one of the two out",
            "constraint",
        )
    if not (prompt or suffix):
        raise Refused("the prompt is empty; give at least one token", "prompt")
    if not prompt and layout.compute_at_least:
        raise Refused(
            "nothing stands before the text, and the model tells a token from the one before it; "
            "give at least one token as the prompt",
            "prompt",
        )
    given = [token for token in suffix if token != HOLE]
    for token in (min(prompt, default=0), max(prompt, default=0), *given):
        if not 0 <= token < layout.vocab_size:
            raise Refused(
                f"the prompt holds id {token}, outside the vocabulary [0, {layout.vocab_size}); "
                "was it tokenized for another model?",
                "prompt",
            )
    unread = next((t for t in layout.unread_token_ids if t in prompt or t in given), None)
    if unread is not None:
        raise Refused(
            f"the prompt holds id {unread}, which stands for an image or a sound: this package "
            "reads text only; leave it out",
            "prompt",
        )
    if suffix and not (layout.in_window or layout.pins or layout.starts_filled):
        raise Refused(
            "the strategy takes no text behind a hole; use one that does, such as multi_bd or "
            "full_sequence",
            "suffix",
            "unsupported_parameter",
        )
    last = max((end for end, token in enumerate(suffix, 1) if token != HOLE), default=0)
    if layout.pins and last and (params.max_tokens or 0) + last > layout.block_size:
        raise Refused(
            f"the last token given behind the prompt is at {(params.max_tokens or 0) + last}, "
            f"behind the {layout.block_size} cells of the first block; give it before, or leave it "
            "out",
            "suffix",
        )
    if layout.starts_filled and given:
        _check_window(len(prompt), (params.max_tokens or 0) + last, given, stop_ids, layout)
    for name, value in params.strategy_overrides.items():
        if name not in layout.knobs:
            known = ", ".join(sorted(layout.knobs)) or "none"
            raise Refused(
                f"strategy_overrides: the strategy has no threshold "
                f"{checks.short_repr(name)}; it has {known}",
                f"strategy_overrides.{name}",
            )
        low, high = layout.knobs[name]
        if not low <= value <= high:
            raise Refused(
                f"{name}={value} is outside [{low}, {high}]; choose one inside",
                f"strategy_overrides.{name}",
            )
        if name in layout.whole_knobs and value % 1:
            raise Refused(
                f"{name}={value} is not a whole number; round it", f"strategy_overrides.{name}"
            )
    values = dict(layout.knob_values, **params.strategy_overrides)
    for low, high in layout.ordered_knobs.items():
        if values[low] > values[high]:
            name = low if low in params.strategy_overrides else high
            raise Refused(
                f"{low}={values[low]} is above {high}={values[high]}; lower {low} or raise {high}",
                f"strategy_overrides.{name}",
            )
    if len(stop_ids) > STOP_WIDTH:
        raise Refused(
            f"{len(stop_ids)} stop ids, the model's own included; at most {STOP_WIDTH} fit: "
            "give fewer, or use stop strings",
            "stop_token_ids",
        )
    if params.stop and tokenizer is None:
        raise Refused("stop strings need a tokenizer; use stop_token_ids", "stop")
    if params.stop and any(token != HOLE for token in suffix[: _inner_len(suffix)]):
        raise Refused(
            f"stop={checks.short_repr(params.stop)} may also be found in what is given between "
            "holes; "
            "use stop_token_ids, which end the text only where they are written",
            "stop",
        )
    if request.deadline_s is not None and not request.deadline_s > 0:
        raise Refused(
            f"deadline_s={checks.short_repr(request.deadline_s)} must be above 0 seconds",
            "deadline_s",
        )
