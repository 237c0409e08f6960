"""From a request to the sequences that the engine runs; unfit requests are refused here."""

import dataclasses
from typing import Any

from dllm_jax.engine.checks import Refused
from dllm_jax.engine.detokenize import TextStream, special_stops
from dllm_jax.engine.layout import HOLE, NO_LIMIT, EngineLayout, Placement
from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.engine.rules import check, inner
from dllm_jax.engine.sequence import Sequence


@dataclasses.dataclass(eq=False, slots=True)
class ActiveRequest:
    """A request in the engine; `error` says why it ended with "error"."""

    id: str
    request: Request
    params: SamplingParams
    added_s: float
    deadline_s: float | None
    sequences: list[Sequence]
    layout: EngineLayout
    error: str | None = None
    is_late: bool = False


def accept(
    request: Request,
    request_id: str,
    number: int,
    now: float,
    layout: EngineLayout,
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
    params = request.params
    prompt, suffix = list(request.prompt_token_ids), tuple(request.suffix_token_ids)
    stops = params.stop_token_ids + (() if params.ignore_eos else layout.stop_token_ids)
    if params.stop and tokenizer is not None:
        try:
            stops += (*special_stops(tokenizer, params.stop, stops),)
        except ValueError as error:
            raise Refused(str(error), "stop") from None
    stop_ids = tuple(dict.fromkeys(stops))
    check(request, layout, stop_ids, tokenizer is not None)
    max_tokens = params.max_tokens
    if max_tokens is None:
        room = layout.window if layout.in_window else layout.max_model_len
        max_tokens = max(1, room - len(prompt))
    limit, capacity = limits(layout, len(prompt), max_tokens, suffix)
    if request.grammar is not None:
        _check_grammar(request, limit - len(prompt))
    first = layout.prefill_len(len(prompt))
    deadline = None if request.deadline_s is None else now + request.deadline_s
    active = ActiveRequest(request_id, request, params, now, deadline, [], layout)
    placement = Placement(
        tail=tuple(prompt[first : first + layout.window]),
        prompt_len=len(prompt),
        limit=limit,
        sampling=params.sampling,
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


def limits(
    layout: EngineLayout, prompt_len: int, max_tokens: int, suffix: tuple[int, ...]
) -> tuple[int, int]:
    """The first position that may not be emitted, and the positions ever written.

    The pool bounds both: a text alone in it ends with "length" at its last page. A text with a
    suffix must fit as a whole.
    """
    text_len = max_tokens + len(inner(suffix))
    total = prompt_len + max_tokens + len(suffix)
    beyond = layout.block_size + total - prompt_len - text_len
    if prompt_len >= layout.max_model_len:
        raise _too_long(
            f"the prompt has {prompt_len} tokens; the engine takes {layout.max_model_len}, "
            "prompt and text together: shorten it or raise max_model_len",
            "prompt",
        )
    if layout.in_window and total > layout.window:
        raise _too_long(
            f"prompt, text and suffix are {prompt_len} + {text_len} + "
            f"{total - prompt_len - text_len} tokens, the window has {layout.window}; use "
            f"buffer_size={-(-total // layout.block_size)} or lower max_tokens",
            "max_tokens",
        )
    room = layout.num_pages * layout.page_size - beyond
    limit = min(prompt_len + text_len, layout.max_model_len, room)
    if limit <= prompt_len:
        raise _too_long(
            f"the prompt has {prompt_len} tokens and needs "
            f"{layout.pages_for(prompt_len + 1 + beyond)} pages of {layout.page_size}; "
            f"the pool has {layout.num_pages}: raise num_pages or shorten the prompt",
            "prompt",
        )
    if suffix and (limit < prompt_len + text_len or total > layout.max_model_len):
        raise _too_long(
            f"prompt, max_tokens and suffix are {total} tokens; the engine takes "
            f"{layout.max_model_len} and its pool {layout.num_pages * layout.page_size}, including "
            "one more block: lower max_tokens, or raise max_model_len or num_pages",
            "max_tokens",
        )
    # The device drops writes past the page table.
    return limit, min(limit + beyond, layout.page_buckets[-1] * layout.page_size)


def _too_long(message: str, field: str) -> Refused:
    return Refused(message, field, "context_length_exceeded")


def _check_grammar(request: Request, room: int) -> None:
    """Refuse a text that cannot end by its grammar within the tokens that it may have."""
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
    cells = [*[HOLE] * (request.params.max_tokens or 0), *inner(suffix)]
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
