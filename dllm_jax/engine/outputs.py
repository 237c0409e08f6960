"""What the engine says of a request: texts, finish reasons, metrics.

Nothing here changes a request, but for an error of its tokenizer.
"""

import math
from collections.abc import Sequence
from typing import Any

from dllm_jax.engine.admission import Live
from dllm_jax.engine.detokenize import TextStream
from dllm_jax.engine.requests import CompletionOutput, DraftMetrics, Metrics, RequestOutput
from dllm_jax.engine.scheduler import DONE, Sample

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


def output(live: Live, tokenizer: Any, now: float) -> RequestOutput:
    """The request as it stands at `now` on the engine's clock."""
    completions = [_completion(live, sample, tokenizer) for sample in live.samples]
    return RequestOutput(
        request_id=live.id,
        prompt=live.request.prompt,
        prompt_token_ids=live.samples[0].prompt,
        outputs=completions,
        finished=all(sample.stage == DONE for sample in live.samples),
        metrics=_metrics(live, completions, now),
        error=live.error,
    )


def _completion(live: Live, sample: Sample, tokenizer: Any) -> CompletionOutput:
    text = _text(live, sample, tokenizer)
    tokens = list(sample.tokens)
    if live.params.stop and sample.stage != DONE and sample.stream is not None:
        del tokens[sample.stream.num_shown :]  # what is shown is never taken back
    window: tuple[int | None, ...] = ()
    if live.request.denoise and sample.saved is not None:
        harvest, row = sample.saved
        window = harvest.window(row, len(tokens))
    return CompletionOutput(
        index=sample.index,
        text=text,
        token_ids=tokens,
        finish_reason=sample.finish_reason,
        window=window,
    )


def _text(live: Live, sample: Sample, tokenizer: Any) -> str:
    if sample.stream is None:
        if tokenizer is None or sample.stage != DONE:
            return ""
        sample.stream = TextStream(tokenizer, live.params.stop)
    try:
        if sample.stage == DONE:
            sample.stream.feed(sample.tokens, last=True)
    except Exception as error:  # as in the engine's `_feed`
        live.error = f"the tokenizer failed: {type(error).__name__}: {error}"
        sample.finish_reason = "error"
    if sample.stream.stopped is not None:  # also in what an abort has brought to light
        del sample.tokens[sample.stream.stopped :]
        if sample.finish_reason == "abort":
            sample.finish_reason = "stop"
    return sample.stream.text


def _metrics(live: Live, completions: Sequence[CompletionOutput], now: float) -> Metrics:
    samples = live.samples
    nfe = sum(sample.nfe for sample in samples)
    tokens = sum(
        sample.placement.num_written(len(one.token_ids))
        for sample, one in zip(samples, completions, strict=True)
    )
    firsts = [sample.first_s for sample in samples if sample.first_s is not None]
    ends = [sample.end_s for sample in samples if sample.end_s is not None]
    if len(ends) == len(samples):
        now = max(ends)
    return Metrics(
        nfe=nfe,
        prefill_nfe=sum(sample.prefill_nfe for sample in samples),
        cached_tokens=sum(sample.cached_tokens or 0 for sample in samples),
        num_preemptions=sum(sample.num_preemptions for sample in samples),
        tokens_per_forward=tokens / max(nfe, 1),
        ttfb_s=min(firsts) - live.added_s if firsts else None,
        e2e_s=now - live.added_s,
        draft=DraftMetrics.together(map(_drafted, samples)),
    )


def _drafted(sample: Sample) -> DraftMetrics | None:
    """How its drafts fared, by its last harvest."""
    if sample.saved is None:
        return sample.drafted
    harvest, row = sample.saved
    return harvest.drafted(row)
