"""Routed experts: the interface and its back ends.

Every back end computes the same function: each row goes through the experts it was routed to, and
the weighted results are added.

Letters: T rows, k experts of a row, E experts, D model width, F an expert's inner width.
"""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .. import dispatch
from ..activation import Activation
from ..dispatch import BackEnd
from ..layer.routed import RoutedRows
from . import grouped, mosaic, reference
from .fp8 import Fp8Experts
from .mosaic import Dense
from .transforms import transformable

Implementation = Literal["dense", "grouped", "mosaic"]

# On a CPU the reference is faster for little work, where the bookkeeping of tiles costs more than
# it saves, and for few rows and experts, where tiles are mostly padding and most experts are read
# anyway. Cost over the better form, mean of 110 shapes and worst: this rule 5 % and 1.6 times,
# always grouped 28 % and 3.4 times, always dense 23 % and 4.4 times
# (benchmarks/results/expert_ffn_cpu.json).
DENSE_WORK = 1_000_000  # T x E x D x F
DENSE_ROWS = 16
DENSE_SHARE = 4  # experts in all, per expert of a row
# Most rows for which the launches of experts include a dense half. With more, the tensor cores
# bound the products, and XLA's are faster.
DENSE_HALF_ROWS = 1024


def expert_ffn(
    x: Float[Array, "T D"],
    expert_ids: Int[Array, "T k"],
    expert_weights: Float[Array, "T k"],
    w_gate_up: Float[Array, "E D 2 F"] | Fp8Experts,
    w_down: Float[Array, "E F D"] | Fp8Experts,
    *,
    activation: Activation = "silu",
    is_summed: bool = True,
    implementation: Implementation | None = None,
) -> Float[Array, "T D"] | RoutedRows:
    """`sum over k of weight * (silu(x Wg) * (x Wu)) Wd`, each expert with its own Wg, Wu and Wd.

    Products have operands in the dtype of `x` and float32 sums, as has the sum over k. No row is
    dropped, and a row's result does not depend on the other rows. 8-bit experts are multiplied with
    8-bit rows: the rows of `x` and those between the products are rounded with one scale each.

    Args:
        expert_ids: Experts of each row. An id outside [0, E) adds nothing, and only "dense" reads
            weights for it. Rows that are not live have only such ids.
        expert_weights: Factor of each result, float32, normalised by the router.
        w_gate_up: Index 0 of the axis of 2 is the gate.
        activation: Activation of the gate; "gelu" is the tanh approximation.
        is_summed: False leaves the sum over k to the following norm, if the back end supports it.
        implementation: "dense" (every expert over every row: the reference; any device), "grouped"
            (a loop over the experts that have rows; any device), "mosaic" (Hopper, rows of 16 bits,
            jax 0.11; it rounds each expert's result to the dtype of `x` before the sum), or None
            for the fastest that supports the arguments.

    Returns:
        Rows in the dtype of `x`; zeros for a row without an expert.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    _check(x, expert_ids, expert_weights, w_gate_up, w_down)
    arguments = (x, expert_ids, expert_weights, w_gate_up, w_down)
    back_ends = _back_ends(x, expert_ids, w_down, activation)
    if not is_summed and dispatch.choose(implementation, back_ends) == "mosaic":
        return _routed_rows(*arguments, activation=activation)[0]
    return dispatch.run(implementation, back_ends, *arguments)


def takes_dense(x: Array, expert_ids: Array, w_down: Array | Fp8Experts, dense: Dense) -> bool:
    """Whether `routed_and_dense` is faster than separate launches for the dense half."""
    chosen = choose(x, expert_ids, w_down) == "mosaic" and len(x) <= DENSE_HALF_ROWS
    return chosen and mosaic.unsupported_beside(w_down, dense) is None


def routed_and_dense(
    x: Float[Array, "T D"],
    expert_ids: Int[Array, "T k"],
    expert_weights: Float[Array, "T k"],
    w_gate_up: Float[Array, "E D 2 F"] | Fp8Experts,
    w_down: Float[Array, "E F D"] | Fp8Experts,
    dense: Dense,
    *,
    activation: Activation = "silu",
) -> tuple[RoutedRows, RoutedRows]:
    """`expert_ffn` and a dense half in the same launches; the following norms add both up.

    Args:
        dense: 8-bit rows of the dense half, its interleaved gate and up, and its down. None in
            place of rows: it takes those of the experts.
    """
    given = x, expert_ids, expert_weights, w_gate_up, w_down, dense
    routed, plain = _routed_rows(*given, activation=activation)
    return routed, plain


def _routed_rows(*given: Any, activation: Activation) -> tuple[RoutedRows, ...]:
    run = functools.partial(mosaic.routed_rows, activation=activation)
    # Mosaic kernels have no batching rule, so vmap runs them one after another.
    return jax.custom_batching.sequential_vmap(run)(*given)


def choose(x: Array, expert_ids: Array, w_down: Array | Fp8Experts) -> Implementation:
    """The name of the back end that `implementation=None` runs for such arguments."""
    return dispatch.choose(None, _back_ends(x, expert_ids, w_down))


def _back_ends(
    x: Array, expert_ids: Array, w_down: Array | Fp8Experts, activation: Activation = "silu"
) -> dict[Implementation, BackEnd]:
    T, k = expert_ids.shape
    is_few = T <= DENSE_ROWS and len(w_down) <= DENSE_SHARE * k
    is_little = is_few or T * math.prod(w_down.shape) <= DENSE_WORK
    return {
        "mosaic": BackEnd(
            transformable(mosaic.expert_ffn, activation), mosaic.unsupported(x, w_down)
        ),
        "dense": BackEnd(
            functools.partial(reference.expert_ffn, activation=activation),
            is_fast=is_little and jax.default_backend() != "gpu",
        ),
        "grouped": BackEnd(transformable(grouped.expert_ffn, activation)),
    }


def _check(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    w_gate_up: Array | Fp8Experts,
    w_down: Array | Fp8Experts,
) -> None:
    """Refuse shapes that would broadcast or slice into a wrong result."""
    T, D = x.shape
    E, F, _ = w_down.shape
    if expert_ids.shape != expert_weights.shape or len(expert_ids) != T:
        raise ValueError(
            f"{expert_ids.shape=} and {expert_weights.shape=} must both be [T k] with T={T}, "
            "the rows of x"
        )
    if w_gate_up.shape != (E, D, 2, F) or w_down.shape[2] != D:
        raise ValueError(
            f"{w_gate_up.shape=} and {w_down.shape=} must be [E D 2 F] and [E F D] with D={D}, "
            "the width of x"
        )
    if isinstance(w_gate_up, Fp8Experts) != isinstance(w_down, Fp8Experts):
        raise ValueError(f"{w_gate_up.dtype=} and {w_down.dtype=}: both or none must have 8 bits")
    if not jnp.issubdtype(expert_ids.dtype, jnp.integer):
        raise ValueError(f"{expert_ids.dtype=} must be an integer type")
