"""Keys and values of 8 bits (e4m3) in the Mosaic form of paged attention.

A query is split into the exact sum of two 8-bit numbers; a weight is rounded to one. Hopper
multiplies 8 bits only if the contracted axis is contiguous, so the tokens of values must be
adjacent: the cache stores them so, and `hopper.operands` transposes fresh ones.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..hopper import load
from ..layer.fp8 import DTYPE as FP8
from ..layer.fp8 import factors_of

# The largest weight is 2^PEAK (e4m3 holds up to 448). Weights below 2^-14 of the largest of their
# row have fewer than 4 bits, and those below 2^-18 of it are zero, as in FlashAttention-3.
PEAK = 8.0


def query_parts(rows, parts):
    """Write 16-bit rows as the sum of two 8-bit numbers, and return their scales.

    bfloat16 has 8 bits of mantissa, and two e4m3 numbers have 4 each. The sum is exact, except that
    numbers below 2^-9 of the row's largest are off by at most 2^-17 of it.
    """
    values = load(rows, plgpu.Layout.WGMMA).astype(jnp.float32)
    factors, scales = factors_of(jnp.abs(values).max(axis=1))
    values = values * jax.lax.broadcast_in_dim(factors, values.shape, [0])
    for part in parts:
        narrow = values.astype(FP8)
        part[...] = narrow
        values = values - narrow.astype(jnp.float32)
    plgpu.commit_smem()
    return scales


def interpreted_product(staged, weight, values, width):
    """`weight @ value` for the interpreter, by way of shared memory and with separate sums.

    Args:
        values: Each belongs to a share of the columns of the weight.
    """
    rows = staged.shape[0]
    size = staged.shape[1] // len(values)
    staged[...] = weight
    plgpu.commit_smem()

    def product(sums):
        for i, value in enumerate(values):
            plgpu.wgmma(sums, staged.at[:, pl.ds(i * size, size)], value)
        return sums[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((rows, width), jnp.float32))
