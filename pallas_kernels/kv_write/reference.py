"""The reference for any device: one scatter per array."""

import functools

import jax
from jaxtyping import Array


def write_rows(
    pages: tuple[Array, ...],
    rows: tuple[Array, ...],
    page: Array,
    offset: Array,
    token_last: tuple[bool, ...],
) -> tuple[Array, ...]:
    """See `api.write_rows`; an array that is `token_last` is [P G H Z]."""
    return tuple(
        _put(mine, new, page, offset, last)
        for mine, new, last in zip(pages, rows, token_last, strict=True)
    )


@functools.partial(jax.jit, static_argnames="is_token_last")  # traced once for equal layers
def _put(mine: Array, new: Array, page: Array, offset: Array, is_token_last: bool) -> Array:
    flat = new.reshape(-1, *new.shape[-2:]).astype(mine.dtype)
    where = mine.at[page, :, :, offset] if is_token_last else mine.at[page, :, offset]
    return where.set(flat, mode="drop", unique_indices=True)
