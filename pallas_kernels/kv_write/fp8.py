"""Keys and values in 8 bits (e4m3): a scale for each head, fixed before the first token.

Scales are powers of two: scaling is exact, and only the rounding to three bits of mantissa loses
precision. A row's 8-bit values depend on the row and the scales alone, so they are the same in any
step and batch.

Pages of 8-bit values are [P G H Z], with tokens contiguous; all other pages are [P G Z H]. The
tensor cores require the contracted axis of 8-bit operands to be contiguous, and weighted values are
summed over tokens.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

DTYPE = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(DTYPE).max)  # 448
_LEAST, _MOST = 2.0**-60, 2.0**60  # range of scales: inverses and products with a row stay finite


def is_token_last(v_pages: Any) -> bool:
    """Whether a pool of values is [P G H Z] and not [P G Z H], as pools of keys always are."""
    return v_pages.dtype.itemsize == 1


def by_token_shape(pages: Any, last: bool) -> tuple[int, int, int, int]:
    """The sizes P G Z H of an array of pages, whether its tokens come last or not."""
    P, G, *sizes = pages.shape
    Z, H = reversed(sizes) if last else sizes
    return P, G, Z, H


def unlike(pages: Sequence[Any], token_last: Sequence[bool]) -> str | None:
    """Why one launch cannot write to all these arrays, or None."""
    kinds = {
        (by_token_shape(mine, last), mine.dtype)
        for mine, last in zip(pages, token_last, strict=True)
    }
    return "needs pages of one shape and type in every layer" if len(kinds) > 1 else None


def scales_of(largest: Float[Array, " G"]) -> Float[Array, " G"]:
    """The scale of each head with this largest magnitude: a power of two, float32."""
    exponent = jnp.ceil(jnp.log2(jnp.maximum(largest, _LEAST) / LARGEST))
    return jnp.clip(jnp.ldexp(jnp.float32(1), exponent.astype(jnp.int32)), _LEAST, _MOST)


def quantize(rows: Float[Array, "*M G H"], scales: Float[Array, " G"]) -> Float[Array, "*M G H"]:
    """Rows in e4m3, each head divided by its scale; too large numbers are clipped to 448."""
    by_head = (1 / scales).reshape(*(1,) * (rows.ndim - 2), -1, 1)
    values = rows.astype(jnp.float32) * by_head
    return jnp.clip(values, -LARGEST, LARGEST).astype(DTYPE)
