"""Paths of grammars over windows: the interface and its back end.

The `grammar_*` modules of `strategies.core` define the results: their functions run on any device
and are the reference. A grammar carries these kernels on devices where they are faster
(`Grammar.kernels`).

Letters: B slots, W cells, G states, D edges of a state, C classes, L labels, N narrow ids, M wide
classes. A grammar is a `constraint.Grammar`, whose tables hold their used rows first.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from .triton_ids import label_scores, tokens_along
from .triton_paths import best_path, walk


class PathKernels(NamedTuple):
    """Replacements for functions of the `grammar_*` modules.

    Attributes:
        label_scores: Scores of the labels [B W L] from the readout of ids in each cell.
        best_path: States before each cell and after the last [B W + 1], and their scores [B].
        tokens_along: The likeliest id of each cell's edge and its log probability, both [B W].
        walk: States along known cells [B W + 1].
    """

    label_scores: Callable
    best_path: Callable
    tokens_along: Callable
    walk: Callable


TRITON = PathKernels(label_scores, best_path, tokens_along, walk)


def choose() -> PathKernels | None:
    """The kernels for this device; None if XLA is to be used."""
    return TRITON if jax.default_backend() == "gpu" else None
