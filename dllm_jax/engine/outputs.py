"""Outputs of requests: texts, finish reasons, metrics, and a warning about poor drafts."""

import itertools
import math
from collections import abc

from dllm_jax.engine.admission import ActiveRequest
from dllm_jax.engine.record import Record, Write, record_of
from dllm_jax.engine.requests import CompletionOutput, DraftMetrics, Metrics, RequestOutput
from dllm_jax.engine.sequence import DONE, Sequence

WARN_ROUNDS = 64  # rounds with a draft before the warning
WARN_LENGTH = 1.15  # tokens a round; the target's own token is 1


def draft_warning(drafted: DraftMetrics) -> str | None:
    """A warning about drafts that are hardly ever accepted, after `WARN_ROUNDS` rounds.

    Limits and stop ids that cut rounds short do not count against the draft.
    """
    rounds = drafted.proposed[0]  # with room for a draft
    if rounds < WARN_ROUNDS:
        return None
    shares = [share for share in drafted.accepted_per_position if not math.isnan(share)]
    length = 1.0 + sum(shares)
    if length >= WARN_LENGTH:
        return None
    # The causes by how often they are met: docs/dflash.md, "When few drafts are right".
    return (
        f"the draft is hardly ever right: {length:.2f} tokens a round over {rounds} rounds, where "
        "1 is no draft accepted. The text is not changed, only slower. Likely causes: the draft "
        "was trained for another target, or another version or quantization of it; its "
        "target_layer_ids are off by one; the prompts are not as in its training (chat template, "
        "thinking mode, language); the temperature is high. Without the draft, use the strategy "
        "'ar'"
    )


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
    position, ids, writes = sequence.tail or (0, [], [])
    first = placement.prompt_len
    every = [
        *zip(itertools.count(first), sequence.tokens, sequence.written, strict=False),
        *zip(itertools.count(position), ids, writes, strict=False),
    ]
    every = [(at, token, one) for at, token, one in every if token is not None and one.step > -2]
    columns = {
        "position": [at for at, _, _ in every],
        "step": [one.step for _, _, one in every],
        "token": [token for _, token, _ in every],
        "log_prob": [one.law for _, _, one in every],
        "is_edit": [False] * len(every),
    }
    return record_of(
        sequence.prompt,
        len(sequence.tokens),
        sequence.finish_reason,
        placement.limit,
        layout.block_size,
        layout.align,
        columns,
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
