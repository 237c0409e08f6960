"""`vmap` and gradients for back ends that are loops or kernels and define neither."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from ..activation import Activation
from . import reference

ExpertFfn = Callable[..., Array]


@functools.cache
def transformable(function: ExpertFfn, activation: Activation = "silu") -> ExpertFfn:
    """The function with a fixed activation, a vmap over rows and the gradient of the reference.

    Rows do not depend on each other, so a batch of calls with the same experts is one call. The
    gradient takes the memory and time of the reference.
    """
    # The default activation stays out of the call, so that names of its programs do not change.
    named = {} if activation == "silu" else {"activation": activation}
    function = functools.partial(function, **named) if named else function
    by_rows = jax.custom_batching.custom_vmap(function)

    @by_rows.def_vmap
    def _(axis_size: int, batched: list[Any], *args: Any) -> tuple[Array, bool]:
        if any(jax.tree.leaves(batched[3:])):  # the calls have different experts
            leaves, tree = jax.tree.flatten(args)
            which = jax.tree.leaves(batched)
            each = [a for a, is_batched in zip(leaves, which, strict=True) if is_batched]

            def call(one: list[Array]) -> Array:
                return by_rows(*jax.tree.unflatten(tree, _merge(one, leaves, which)))

            return jax.lax.map(call, each), True
        rows = [
            a if is_batched else jax.numpy.broadcast_to(a, (axis_size, *a.shape))
            for a, is_batched in zip(args[:3], batched[:3], strict=True)
        ]
        out = by_rows(*(a.reshape(-1, a.shape[-1]) for a in rows), *args[3:])
        return out.reshape(rows[0].shape), True

    with_gradient = jax.custom_vjp(lambda *args: by_rows(*args))
    with_gradient.defvjp(
        lambda *args: (by_rows(*args), args), functools.partial(_pull_back, activation)
    )
    return with_gradient


def _merge(one: list[Array], args: list[Array], batched: list[bool]) -> list[Array]:
    """All arrays of one call of the batch."""
    mine = iter(one)
    return [next(mine) if is_batched else a for a, is_batched in zip(args, batched, strict=True)]


def _pull_back(activation: Activation, args: tuple[Any, ...], cotangent: Array) -> tuple[Any, ...]:
    x, expert_ids, *weights = args
    _, pull = jax.vjp(
        lambda x, *weights: reference.expert_ffn(x, expert_ids, *weights, activation=activation),
        x,
        *weights,
    )
    dx, *d_weights = pull(cotangent)
    return dx, None, *d_weights
