"""Routed experts: the interface, what it means, and the choice of back end.

Every back end computes the same function: each row goes through the experts it was routed to, and
the weighted results are added. Routing happened before; nothing here knows about models or masks.

Letters: T rows, k experts of a row, E experts, D model width, F an expert's inner width.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from . import grouped, reference, triton
from .transforms import transformable

Implementation = Literal["dense", "grouped", "triton"]

# On a CPU the reference wins where its work is nothing beside the bookkeeping of tiles, and where
# rows are few and experts too, so that tiles are mostly padding and most experts are read anyway.
# Over 110 shapes this rule costs 5 % more than the better form, 1.6 times at worst; always grouped
# 28 % and 3.4 times, always dense 23 % and 4.4 (benchmarks/results/expert_ffn_cpu.json).
DENSE_WORK = 1_000_000  # T x E x D x F
DENSE_ROWS = 16
DENSE_SHARE = 4  # experts per expert of a row

_grouped = transformable(grouped.expert_ffn)
_triton = transformable(triton.expert_ffn)


def expert_ffn(
    x: Float[Array, "T D"],
    expert_ids: Int[Array, "T k"],
    expert_weights: Float[Array, "T k"],
    w_gate_up: Float[Array, "E D 2 F"],
    w_down: Float[Array, "E F D"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "T D"]:
    """`sum over k of weight * (silu(x Wg) * (x Wu)) Wd`, each expert with its own Wg, Wu and Wd.

    Products are taken in the dtype of `x` and accumulated in float32, as is the sum over k. No row
    is dropped, and a row's result does not depend on the other rows.

    Args:
        expert_ids: Experts of each row; one outside [0, E) is no expert: it adds nothing, and all
            but "dense" read no weight for it. Rows that are not live have nothing but such ids.
        expert_weights: What each result counts for, float32; the router normalises, not this.
        w_gate_up: Index 0 of the axis of 2 is the gate.
        implementation: "dense" (every expert over every row: the truth; any device), "grouped"
            (a loop over the experts that have rows; any device), "triton" (NVIDIA GPU), or None:
            the one measured to be fastest that takes the arguments.

    Returns:
        In the dtype of `x`; zeros in rows without an expert, whatever stands in them.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    _check(x, expert_ids, expert_weights, w_gate_up, w_down)
    if implementation is None:
        implementation = choose(x, expert_ids, w_down)
    arguments = (x, expert_ids, expert_weights, w_gate_up, w_down)
    if implementation == "dense":
        return reference.expert_ffn(*arguments)
    if implementation == "grouped":
        return _grouped(*arguments)
    if implementation == "triton":
        reason = triton.unsupported(x, w_down)
        if reason:
            raise NotImplementedError(f'implementation="triton": {reason}; use "grouped"')
        return _triton(*arguments)
    raise ValueError(f'{implementation=} is not one of "dense", "grouped", "triton"')


def choose(x: Array, expert_ids: Array, w_down: Array) -> Implementation:
    """What `implementation=None` takes for such arguments on this machine."""
    if jax.default_backend() == "gpu":
        return "grouped" if triton.unsupported(x, w_down) else "triton"
    T, k = expert_ids.shape
    few = T <= DENSE_ROWS and len(w_down) <= DENSE_SHARE * k
    return "dense" if few or T * w_down.size <= DENSE_WORK else "grouped"


def _check(
    x: Array, expert_ids: Array, expert_weights: Array, w_gate_up: Array, w_down: Array
) -> None:
    """Shapes that disagree would broadcast or slice into a wrong answer."""
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
    if not jnp.issubdtype(expert_ids.dtype, jnp.integer):
        raise ValueError(f"{expert_ids.dtype=} must be an integer type")
