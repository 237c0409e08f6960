"""What the engine says of a request: texts, finish reasons, metrics.

Nothing here changes a request, but for an error of its tokenizer.
"""

import math
from collections import abc
from typing import Any

from dllm_jax.engine.admission import ActiveRequest
from dllm_jax.engine.detokenize import TextStream
from dllm_jax.engine.requests import CompletionOutput, DraftMetrics, Metrics, RequestOutput
from dllm_jax.engine.scheduler import DONE, Sequence

WARN_ROUNDS = 64  # after which drafts are judged
WARN_LENGTH = 1.15  # tokens a round; 1 is the target's own alone


def draft_warning(drafted: DraftMetrics | None) -> str | None:
    """What to say of drafts that are hardly ever right; None where they are, or it is too early.

    Limits and stop ids that cut rounds short do not count against them.
    """
    judged = 0 if drafted is None else drafted.proposed[0]  # rounds with room for a draft
    if drafted is None or judged < WARN_ROUNDS:
        return None
    shares = [share for share in drafted.accepted_per_position if not math.isnan(share)]
    length = 1.0 + sum(shares)
    if length >= WARN_LENGTH:
        return None
    # The causes by how often they are met: docs/dflash.md, "When few drafts are right".
    return (
        f"the draft is hardly ever right: {length:.2f} tokens a round over {judged} rounds, where "
        "1 is no draft accepted. The text is not changed, only slower. Likely causes: the draft "
        "was trained for another target, or another version or quantization of it; its "
        "target_layer_ids are off by one; the prompts are not as in its training (chat template, "
        "thinking mode, language); the temperature is high. Without the draft, use the strategy "
        "'ar'"
    )


def output(live: ActiveRequest, tokenizer: Any, now: float) -> RequestOutput:
    """The request as it stands at `now` on the engine's clock."""
    completions = [_completion(live, sequence, tokenizer) for sequence in live.sequences]
    return RequestOutput(
        request_id=live.id,
        prompt=live.request.prompt,
        prompt_token_ids=live.sequences[0].prompt,
        outputs=completions,
        finished=all(sequence.stage == DONE for sequence in live.sequences),
        metrics=_metrics(live, completions, now),
        error=live.error,
    )


def _completion(live: ActiveRequest, sequence: Sequence, tokenizer: Any) -> CompletionOutput:
    text = _text(live, sequence, tokenizer)
    tokens = list(sequence.tokens)
    if live.params.stop and sequence.stage != DONE and sequence.stream is not None:
        del tokens[sequence.stream.num_shown :]  # what is shown is never taken back
    window: tuple[int | None, ...] = ()
    if live.request.denoise and sequence.saved is not None:
        fetch, row = sequence.saved
        window = fetch.window(row, len(tokens))
    return CompletionOutput(
        index=sequence.index,
        text=text,
        token_ids=tokens,
        finish_reason=sequence.finish_reason,
        window=window,
    )


def _text(live: ActiveRequest, sequence: Sequence, tokenizer: Any) -> str:
    if sequence.stream is None:
        if tokenizer is None or sequence.stage != DONE:
            return ""
        sequence.stream = TextStream(tokenizer, live.params.stop)
    try:
        if sequence.stage == DONE:
            sequence.stream.feed(sequence.tokens, last=True)
    except Exception as error:  # as in the engine's `_feed`
        live.error = f"the tokenizer failed: {type(error).__name__}: {error}"
        sequence.finish_reason = "error"
    if sequence.stream.stopped is not None:  # also in what an abort has brought to light
        del sequence.tokens[sequence.stream.stopped :]
        if sequence.finish_reason == "abort":
            sequence.finish_reason = "stop"
    return sequence.stream.text


def _metrics(
    live: ActiveRequest, completions: abc.Sequence[CompletionOutput], now: float
) -> Metrics:
    sequences = live.sequences
    nfe = sum(sequence.nfe for sequence in sequences)
    tokens = sum(
        sequence.placement.num_written(len(one.token_ids))
        for sequence, one in zip(sequences, completions, strict=True)
    )
    firsts = [sequence.first_s for sequence in sequences if sequence.first_s is not None]
    ends = [sequence.end_s for sequence in sequences if sequence.end_s is not None]
    if len(ends) == len(sequences):
        now = max(ends)
    return Metrics(
        nfe=nfe,
        prefill_nfe=sum(sequence.prefill_nfe for sequence in sequences),
        cached_tokens=sum(sequence.cached_tokens or 0 for sequence in sequences),
        num_preemptions=sum(sequence.num_preemptions for sequence in sequences),
        tokens_per_forward=tokens / max(nfe, 1),
        ttfb_s=min(firsts) - live.added_s if firsts else None,
        e2e_s=now - live.added_s,
        draft=DraftMetrics.together(map(_drafted, sequences)),
    )


def _drafted(sequence: Sequence) -> DraftMetrics | None:
    """How its drafts fared, by its last fetch."""
    if sequence.saved is None:
        return sequence.drafted
    fetch, row = sequence.saved
    return fetch.drafted(row)
