"""Outcomes in figures with 95 % intervals: of one strategy, of two compared, of many points."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dllm_jax.tasks.evaluate import Outcome

_RESAMPLES = 2000
_Z95 = 1.959964  # two-sided 95 % of the normal law


def summarise(outcome: Outcome) -> dict[str, Any]:
    """The figures of one strategy, with 95 % intervals; None where one does not apply.

    Tokens per forward are visible tokens over forwards of all problems; `per_request` is the mean
    of that quotient over the problems.
    """
    weights = _resamples(len(outcome.right))

    def ratio(over: np.ndarray, under: np.ndarray) -> dict[str, Any]:
        drawn = (weights @ over) / np.maximum(weights @ under, 1)
        return {"value": float(over.sum() / max(under.sum(), 1)), "ci95": _percentiles(drawn)}

    each = outcome.tokens / np.maximum(outcome.forwards, 1)
    return {
        "problems": len(outcome.right),
        "exact": {"value": float(outcome.right.mean()), "ci95": wilson(outcome.right)},
        "tokens_per_forward": ratio(outcome.tokens, outcome.forwards),
        "tokens_per_forward_without_commits": ratio(outcome.tokens, outcome.denoise),
        "tokens_per_forward_per_request": {
            "value": float(each.mean()),
            "ci95": _percentiles(weights @ each / len(each)),
        },
        "denoise_forwards_per_block": None
        if outcome.blocks is None
        else ratio(outcome.denoise, outcome.blocks),
        "mean_tokens": float(outcome.tokens.mean()),
        "mean_forwards": float(outcome.forwards.mean()),
        "mean_commit_forwards": float((outcome.forwards - outcome.denoise).mean()),
        "unfinished": sum(reason != "stop" for reason in outcome.finish),
        "seconds": outcome.seconds,
        "draft": None if outcome.drafted is None else outcome.drafted.figures(),
        "tok_s": float(outcome.tokens.sum() / max(outcome.seconds, 1e-9)),
    }


def compare(base: Outcome, other: Outcome) -> dict[str, Any]:
    """`other` compared with `base` on the same problems, by paired bootstrap."""
    weights = _resamples(len(base.right))

    def speed(one: Outcome, w: np.ndarray) -> np.ndarray:
        return (w @ one.tokens) / np.maximum(w @ one.forwards, 1)

    difference = other.right.astype(float) - base.right
    everyone = np.ones((1, len(base.right)))
    return {
        "exact_points": {
            "value": 100 * float(difference.mean()),
            "ci95": _percentiles(100 * (weights @ difference) / len(difference)),
        },
        "speedup": {
            "value": float((speed(other, everyone) / speed(base, everyone))[0]),
            "ci95": _percentiles(speed(other, weights) / speed(base, weights)),
        },
    }


def wilson(right: np.ndarray) -> list[float]:
    """The 95 % interval of a proportion.

    Source: Wilson (1927), score interval.
    """
    n, p = len(right), float(right.mean())
    centre = (p + _Z95**2 / (2 * n)) / (1 + _Z95**2 / n)
    half = _Z95 * math.sqrt(p * (1 - p) / n + _Z95**2 / (4 * n * n)) / (1 + _Z95**2 / n)
    return [max(0.0, centre - half), min(1.0, centre + half)]


def aup(points: Sequence[tuple[float, float]], y_max: float) -> dict[str, Any]:
    """Accuracy under parallelism: the area under accuracy against tokens per forward.

    Points more than 5 percentage points below the slowest one count for nothing, and accuracy
    below the best known weighs less. Values compare only where `y_max` is the same.

    Args:
        points: Tokens per forward and accuracy in percent.
        y_max: The best accuracy of any method on the task, in percent.

    Source: d3LLM's `AUP_leaderboard/aup_utils.py`; it refuses such low points, here they are left
        out.
    """
    ordered = sorted(points)
    floor = ordered[0][1] - 5

    def weighed(y: float) -> float:
        return y * min(float(np.exp(-3 * (1 - y / y_max))), 1.0)

    kept = [point for point in ordered if point[1] >= floor]
    area = kept[0][0] * kept[0][1]
    for (x, y), (after, then) in itertools.pairwise(kept):
        area += (after - x) * (weighed(y) + weighed(then)) / 2
    return {
        "value": area,
        "y_max": y_max,
        "points": len(kept),
        "left_out": len(ordered) - len(kept),
    }


@functools.lru_cache(maxsize=2)
def _resamples(count: int) -> np.ndarray:
    """Bootstrap weights [resample, problem]; the same for every strategy, which pairs them."""
    rng = np.random.default_rng(0)
    return rng.multinomial(count, np.full(count, 1 / count), size=_RESAMPLES).astype(float)


def _percentiles(values: np.ndarray) -> list[float]:
    return [float(v) for v in np.percentile(values, [2.5, 97.5])]
