"""Scores of a model under training on held-out problems: for the log, the results and the card.

`tasks.evaluate` decodes, so scores agree with those of `dllm-jax eval`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers

from dllm_jax.api.strategy import resolve_strategy
from dllm_jax.loading.model import Model
from dllm_jax.strategies import BlockDiffusion, MultiBD
from dllm_jax.strategies.dflash import DFlash
from dllm_jax.strategies.diffusion_gemma import DiffusionGemma
from dllm_jax.tasks import evaluate, problems
from dllm_jax.training import stream

SEED = 2026  # of the held-out problems
BATCH_SIZE = 1024


def halves_of(family: str | None) -> tuple[str, ...]:
    """The halves to score: both, or that of the only family."""
    return tuple(problems.HALVES) if family is None else (problems.half_of(family),)


def score_blocks(
    model: Model,
    tokenizer: tokenizers.Tokenizer,
    half: str,
    *,
    num_problems: int,
    buffer: int,
    threshold: float = 0.9,
    block_size: int = 32,
    family: str | None = None,
) -> dict[str, Any]:
    """Solve held-out problems of one half by block diffusion with a window of `buffer` blocks.

    Args:
        threshold: Accept threshold; 1.0 decodes one token a forward.
        family: The only family of problems; None: all families of the half.

    Returns:
        Means over problems, with the 95 % half-widths of the first two.
    """
    strategy = BlockDiffusion(block_size=block_size, accept_threshold=threshold)
    if buffer > 1:
        strategy = MultiBD(block_size=block_size, buffer_size=buffer, accept_threshold=threshold)
    outcome = _solve(model, tokenizer, half, strategy, num_problems, family)
    speed = outcome.tokens / np.maximum(outcome.forwards, 1)
    assert outcome.blocks is not None
    return {
        "half": half,
        "buffer": buffer,
        "threshold": threshold,
        "block_size": block_size,
        "num_problems": num_problems,
        "exact": float(np.mean(outcome.right)),
        "exact_ci": _half_width(outcome.right),
        "tokens_per_forward": float(np.mean(speed)),
        "tokens_per_forward_ci": _half_width(speed),
        "forwards": float(np.mean(outcome.forwards)),
        "commit_only": float(np.mean(outcome.forwards - outcome.denoise)),
        "denoise_per_block": float(outcome.denoise.sum() / outcome.blocks.sum()),
    }


def score_tokens(
    model: Model,
    tokenizer: tokenizers.Tokenizer,
    draft: Model | None = None,
    *,
    num_problems: int,
    temperature: float = 0.0,
    family: str | None = None,
) -> list[dict[str, Any]]:
    """Solve held-out problems of both halves by `ar` or, with a draft, by `dflash`.

    Returns:
        For each half the share solved (`exact`), the visible tokens a problem (`tokens`) and, with
        a draft, the mean accepted length (`accepted`): visible tokens over rounds of the strategy.
    """
    # dflash verifies whole blocks here
    width = None if draft is None else getattr(draft.config, "block_size", None)
    strategy = resolve_strategy(model, "ar" if draft is None else DFlash(width=width))
    results = []
    for half in halves_of(family):
        outcome = _solve(
            model, tokenizer, half, strategy, num_problems, family, draft=draft,
            temperature=temperature,
        )  # fmt: skip
        results.append(
            {
                "half": half,
                "temperature": temperature,
                "num_problems": num_problems,
                "exact": float(np.mean(outcome.right)),
                "tokens": float(np.mean(outcome.tokens)),
            }
        )
        if draft is not None:
            rounds = max(1, int(outcome.forwards.sum()))
            results[-1]["accepted"] = float(outcome.tokens.sum() / rounds)
    return results


def score_canvases(
    model: Model,
    tokenizer: tokenizers.Tokenizer,
    half: str,
    *,
    num_problems: int,
    steps: int,
    thresholds: Sequence[float],
    temperature: float = 0.0,
    family: str | None = None,
) -> list[dict[str, Any]]:
    """Solve held-out problems of one half by canvases, at several confidence thresholds.

    Args:
        steps: Steps of the schedule.
        thresholds: Mean entropies in nats; at 0 each canvas takes all `steps`.

    Returns:
        For each threshold the share solved, visible tokens a forward (the store of a canvas counts
        as a forward), and denoising steps a canvas.
    """
    some = evaluate.held_out(half, num_problems, SEED, family)
    size = model.defaults.block_size
    outcomes = evaluate.sweep(
        model,
        DiffusionGemma(max_denoising_steps=float(steps), block_size=size, buffer_size=1),
        [{"confidence_threshold": threshold} for threshold in thresholds],
        _problems(some, tokenizer),
        batch_size=min(BATCH_SIZE, num_problems),
        temperature=temperature,
    )
    results = []
    for threshold, outcome in zip(thresholds, outcomes, strict=True):
        ended = np.array([reason == "stop" for reason in outcome.finish])
        canvases = np.maximum(-(-(outcome.tokens + ended) // size), 1)
        stores = canvases - 1  # the last canvas is not stored
        results.append(
            {
                "half": half,
                "threshold": threshold,
                "temperature": temperature,
                "num_problems": num_problems,
                "exact": float(np.mean(outcome.right)),
                "exact_ci": _half_width(outcome.right),
                "tokens_per_forward": float(outcome.tokens.sum() / outcome.forwards.sum()),
                "steps_per_canvas": float((outcome.forwards - stores).sum() / canvases.sum()),
            }
        )
    return results


def _solve(
    model: Model,
    tokenizer: tokenizers.Tokenizer,
    half: str,
    strategy: Any,
    num_problems: int,
    family: str | None,
    **how: Any,
) -> evaluate.Outcome:
    some = evaluate.held_out(half, num_problems, SEED, family)
    return evaluate.solve(
        model,
        strategy,
        _problems(some, tokenizer),
        batch_size=min(BATCH_SIZE, num_problems),
        **how,
    )


def _problems(some: list[problems.Problem], tokenizer: tokenizers.Tokenizer) -> evaluate.ProblemSet:
    ids = [tokenizer.encode(stream.conversation(one.question)).ids for one in some]
    return evaluate.ProblemSet(some, prompts=ids, tokenizer=tokenizer)


def _half_width(values: Sequence[float] | np.ndarray) -> float:
    """Half the width of the 95 % interval of a mean."""
    return float(1.96 * np.std(values) / len(values) ** 0.5)
