"""A function over the rows of arrays, some at a time, so that its arrays in memory stay small."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

ROWS_AT_ONCE = 512  # float32 logits of one chunk: 311 MB at 152k ids
FEW_ROWS = 64  # read in one chunk; more rows take at least two
ROWS_DRAWN = 128  # cuts and noise take several times the memory of the logits


def in_chunks(
    fn: Callable[[Any], Any], rows: Any, at_once: int = ROWS_AT_ONCE, whole: int = FEW_ROWS
) -> Any:
    """`fn` over the leading axis of `rows`, `at_once` at a time and at most half of them.

    Args:
        whole: Rows that are one chunk.
    """
    total = jax.tree.leaves(rows)[0].shape[0]
    if total <= whole:
        return fn(rows)
    chunks = max(2, -(-total // at_once))
    size = -(-total // chunks)

    # Places, not slices: XLA copies a slice separately, and records no loop around such a copy.
    def places(chunk: Array) -> Array:
        return chunk * size + jnp.arange(size)

    @jax.jit  # traced once, for the shapes and for the loop
    def one(chunk: Array) -> Any:
        # Places past the end repeat the last row; their results are dropped.
        at = jnp.minimum(places(chunk), total - 1)
        return fn(jax.tree.map(lambda leaf: leaf[at], rows))

    def put(chunk: Array, found: Any) -> Any:
        how = {"mode": "drop", "unique_indices": True}
        at = places(chunk)
        return jax.tree.map(lambda old, new: old.at[at].set(new, **how), found, one(chunk))

    def zeros(like: Any) -> Array:
        whole = jnp.zeros((total, *like.shape[1:]), like.dtype)
        kind = getattr(like, "manual_axis_type", None)  # since jax 0.11
        axes = kind.varying if kind else getattr(like, "vma", None)
        return jax.lax.pcast(whole, tuple(axes), to="varying") if axes else whole

    like = jax.eval_shape(one, 0)
    return jax.lax.fori_loop(0, chunks, put, jax.tree.map(zeros, like))
