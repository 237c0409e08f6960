"""A request in the engine: made into sequences, unless it is refused, and read as outputs."""

import dataclasses
import itertools
from collections import abc
from typing import Any

from dllm_jax.engine.checks import Refused
from dllm_jax.engine.detokenize import special_stops
from dllm_jax.engine.layout import HOLE, NO_LIMIT, EngineLayout, Placement
from dllm_jax.engine.record import Record, Write, record_of_last
from dllm_jax.engine.requests import (
    CompletionOutput,
    DraftMetrics,
    Metrics,
    Request,
    RequestOutput,
    SamplingParams,
)
from dllm_jax.engine.rules import check, inner
from dllm_jax.engine.sequence import DONE, Sequence


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
    for index in range(params.n):
        fold = number + index if params.seed is None else index
        sequence = Sequence(
            owner=active,
            index=index,
            rank=(request.priority, number + index),
            client=request.client,
            prompt=prompt,
            prefix_len=first,
            placement=dataclasses.replace(placement, fold=fold),
            capacity=capacity,
            leader=active.sequences[0] if index else None,
            publishes=layout.prefix_caching or params.n > 1,
            watched=request.stream or request.denoise or bool(params.stop),
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


# --- outputs ---------------------------------------------------------------------------------


def output(active: ActiveRequest, now: float) -> RequestOutput:
    """The request's state at `now` on the engine's clock."""
    completions = [_completion(active, sequence) for sequence in active.sequences]
    return RequestOutput(
        request_id=active.id,
        prompt=active.request.prompt,
        prompt_token_ids=active.sequences[0].prompt,
        outputs=completions,
        finished=all(sequence.stage == DONE for sequence in active.sequences),
        metrics=_metrics(active, completions, now),
        error=active.error,
        constraint_notes=() if active.request.grammar is None else active.request.grammar.notes,
    )


def _completion(active: ActiveRequest, sequence: Sequence) -> CompletionOutput:
    tokens, stream = list(sequence.tokens), sequence.stream
    if active.params.stop and sequence.stage != DONE and stream is not None:
        del tokens[stream.num_shown :]  # a shown token is never taken back
    window: tuple[int | None, ...] = ()
    window_logprobs: tuple[float | None, ...] = ()
    num_top = active.params.logprobs
    if active.request.denoise and sequence.saved is not None:
        fetch, row = sequence.saved
        window = fetch.window(row, len(tokens))
        if num_top is not None:
            _, _, writes = fetch.behind_text(row, len(tokens))
            pairs = zip(window, writes, strict=False)
            window_logprobs = tuple(None if one is None else write.raw for one, write in pairs)
    return CompletionOutput(
        index=sequence.index,
        text="" if stream is None else stream.text,
        token_ids=tokens,
        finish_reason=sequence.finish_reason,
        window=window,
        stop_reason=_stop_reason(active, sequence),
        constraint_met=None if sequence.finish_reason is None else is_whole(sequence),
        logprobs=None if num_top is None else _logprobs(tokens, sequence.written, num_top),
        window_logprobs=window_logprobs,
        record=_record(active, sequence) if active.params.record else None,
    )


def _logprobs(
    tokens: abc.Sequence[int], written: abc.Sequence[Write], num_top: int
) -> list[dict[int, float]]:
    """Of each token, and of the likeliest."""
    return [
        {token: write.raw, **dict(itertools.islice(write.top.items(), num_top))}
        for token, write in zip(tokens, written, strict=False)
    ]


def _record(active: ActiveRequest, sequence: Sequence) -> Record | None:
    """The record of a text that has ended."""
    if sequence.finish_reason is None:
        return None
    placement, layout = sequence.placement, active.layout
    return record_of_last(
        sequence.prompt,
        sequence.tokens,
        sequence.written,
        sequence.tail,
        sequence.finish_reason,
        placement.limit,
        {**layout.law, **placement.sampling._asdict(), "knobs": dict(placement.knobs)},
    )


def is_whole(sequence: Sequence) -> bool | None:
    """Whether a text is one of its grammar, with nothing cut off; None without a grammar."""
    grammar = sequence.placement.grammar
    if grammar is None:
        return None
    state = grammar.start
    for token in sequence.tokens:
        state = int(grammar.delta[state, grammar.class_of[token]])
    return bool(grammar.distance[state] == 0)


def _stop_reason(active: ActiveRequest, sequence: Sequence) -> str | int | None:
    reason, stream = sequence.finish_reason, sequence.stream
    if reason == "stop":
        text = None if stream is None else stream.stop
        return sequence.stop_id if text is None else text
    if reason == "abort" and active.is_late:
        return "deadline"
    return reason if reason in ("nfe", "repetition") else None


def _metrics(
    active: ActiveRequest, completions: abc.Sequence[CompletionOutput], now: float
) -> Metrics:
    sequences = active.sequences
    nfe = sum(sequence.nfe for sequence in sequences)
    num_written = sum(
        sequence.placement.num_written(len(completion.token_ids))
        for sequence, completion in zip(sequences, completions, strict=True)
    )
    firsts = [sequence.first_s for sequence in sequences if sequence.first_s is not None]
    slots = [sequence.admitted_s for sequence in sequences if sequence.admitted_s is not None]
    ends = [sequence.end_s for sequence in sequences if sequence.end_s is not None]
    if len(ends) == len(sequences):
        now = max(ends)
    return Metrics(
        nfe=nfe,
        prefill_nfe=sum(sequence.prefill_nfe for sequence in sequences),
        cached_tokens=sum(sequence.cached_tokens or 0 for sequence in sequences),
        num_preemptions=sum(sequence.num_preemptions for sequence in sequences),
        tokens_per_forward=num_written / max(nfe, 1),
        ttfb_s=min(firsts) - active.added_s if firsts else None,
        e2e_s=now - active.added_s,
        prompt_cached_tokens=sequences[0].cached_tokens or 0,  # the others find its pages
        queue_s=min(slots) - active.added_s if slots else None,
        draft=DraftMetrics.together(sequence.draft_metrics() for sequence in sequences),
    )
