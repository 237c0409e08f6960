"""Paths of grammars over windows: the interface and its back end.

What is computed is defined by `strategies.core.constraint`, whose functions run on any device and
are the reference; a grammar carries these kernels where they are faster (`Grammar.kernels`).

Letters: B slots, W cells, G states, D edges of a state, C classes, L labels, N narrow ids, M wide
classes. A grammar is a `constraint.Grammar`, whose tables hold their used rows first.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from . import triton


class PathKernels(NamedTuple):
    """What replaces the functions of `constraint`.

    Attributes:
        label_scores: Scores of the labels [B W L], of what cells say of ids.
        best_path: States before each cell and behind the last [B W + 1], and their scores [B].
        tokens_along: The likeliest id of each cell's edge, and its log probability, both [B W].
        walk: States along known cells [B W + 1].
    """

    label_scores: Callable
    best_path: Callable
    tokens_along: Callable
    walk: Callable


TRITON = PathKernels(triton.label_scores, triton.best_path, triton.tokens_along, triton.walk)


def choose() -> PathKernels | None:
    """The kernels for this device; None where XLA does it."""
    return TRITON if jax.default_backend() == "gpu" else None
