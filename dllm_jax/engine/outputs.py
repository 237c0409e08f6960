"""Outputs of requests: texts, finish reasons, metrics, and a warning about poor drafts."""

import math
from collections import abc

from dllm_jax.engine.admission import ActiveRequest
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
    if active.request.denoise and sequence.saved is not None:
        fetch, row = sequence.saved
        window = fetch.window(row, len(tokens))
    return CompletionOutput(
        index=sequence.index,
        text="" if stream is None else stream.text,
        token_ids=tokens,
        finish_reason=sequence.finish_reason,
        window=window,
        stop_reason=_stop_reason(active, sequence),
        constraint_met=None if sequence.finish_reason is None else is_whole(sequence),
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
