"""The numbers of `jax.random.gumbel`, cell by cell, for kernels that make them where they are used.

`jax.random.gumbel(key, (V,), float32)[i]` is a function of key and i alone (threefry with
partitionable counters, JAX's default); here it is written in operations that a kernel has.
Source: Salmon et al. 2011 (Threefry-2x32, 20 rounds); jax.random.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_MANTISSA = 23  # bits of a float32
_ONE = 0x3F800000  # 1.0
_TINY = 1.1754943508222875e-38  # the smallest normal number: what 0 becomes


def reproducible(keys: PRNGKeyArray) -> bool:
    """Whether `gumbel` gives what `jax.random.gumbel` does for such keys, as JAX is set."""
    config: Any = jax.config  # its type names no such attributes
    typed = jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    return (
        typed
        and str(jax.random.key_impl(keys)) == "threefry2x32"
        and bool(config.jax_threefry_partitionable)
        and not config.jax_high_dynamic_range_gumbel
    )


def gumbel(key: tuple[Array, Array], index: Array) -> Float[Array, "..."]:
    """Number `index` (int32) of the key whose two uint32 words are given, of its shape."""
    bits = _threefry(key, index.astype(jnp.uint32))
    mantissa = (bits >> jnp.uint32(32 - _MANTISSA)) | jnp.uint32(_ONE)
    uniform = jax.lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0
    return -jnp.log(-jnp.log(jnp.where(uniform == 0.0, _TINY, uniform)))


def _threefry(key: tuple[Array, Array], low: Array) -> Array:
    """Both words of the block for the counter (0, low), joined by xor."""
    words = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    a, b = jnp.broadcast_to(words[0], low.shape), low + words[1]
    for i in range(5):
        for turn in _ROTATIONS[i % 2]:
            a = a + b
            b = (b << jnp.uint32(turn)) | (b >> jnp.uint32(32 - turn))
            b = a ^ b
        a = a + words[(i + 1) % 3]
        b = b + words[(i + 2) % 3] + jnp.uint32(i + 1)
    return a ^ b
