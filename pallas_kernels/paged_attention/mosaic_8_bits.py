"""What the Mosaic form of paged attention does with keys and values of 8 bits (e4m3).

A query is multiplied as the sum of two such numbers, which is exact; a weight is rounded to one.
Hopper multiplies 8 bits only where the contracted axis is contiguous, so values lie with their
tokens side by side: those of the cache do, `hopper.operands` turns fresh ones.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..hopper import load
from ..layer.fp8 import DTYPE as FP8
from ..layer.fp8 import factors_of

# Weights are up to 2^PEAK, of the 448 that e4m3 holds: below 2^-14 of their row's largest they have
# fewer than 4 bits, and below 2^-18 of it they are zero, as in FlashAttention-3.
PEAK = 8.0


def query_parts(rows, parts):
    """Write rows of 16 bits as the sum of two numbers of 8; what they are to be multiplied by.

    bfloat16 has 8 bits of mantissa, e4m3 has 4, and a sign of its own: nothing is lost but of
    numbers below 2^-9 of the row's largest, which are off by 2^-17 of that at most.
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
    """`weight @ value` for the interpreter: from shared memory into separate sums.

    Args:
        values: Of a share of the weight's columns each.
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
