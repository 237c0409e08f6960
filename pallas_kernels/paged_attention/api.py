"""Paged block attention: the interface, the mask it means, and the choice of back end.

Every back end computes the same function: the queries of a window attend to the cached pages of
their request and to the window's own fresh keys. Prefill is the same call with a larger window.
Nothing here knows about strategies or models.

Letters: B sequences, T computed rows, N query heads, G KV heads, H head size, P pages in the
pool, Z page size, C pages of a sequence, K blocks in the window.
"""

from typing import Literal

from jaxtyping import Array, Float, Int

from . import cudnn, mosaic, reference, triton
from .mask import WindowMask

Implementation = Literal["xla", "cudnn", "triton", "mosaic"]

# Rows of a sequence up to which each kernel was measured, and won. On an H200, microseconds a
# call, Mosaic / Triton / the better way of cuDNN, in the tilings that were chosen then: SDAR-8B,
# 1 x 32 rows at context 8k 16 / 24 / 140; LLaDA-8B, 32 x 128 at 1k 192 / 298 / 382, 8 x 256 at 1k
# 92 / 151 / 250; SDAR-8B, 1 x 512 behind 3.5k 52 / 108 / 119, 1 x 1,024 behind 3k 113 / 224 / 218
# (benchmarks/results/paged_attention_h200.json). Mosaic takes multiples of 16 rows.
MOSAIC_ROWS = 1024
TRITON_ROWS = 128

# Scores up to which XLA beats cuDNN, whose kernel has one block of threads a head and sequence.
# SDAR-1.7B on an H200, ms a step, XLA / cuDNN: 0.4 M scores 1.98 / 2.53, 1.8 M 2.88 / 3.31,
# 14 M 11.1 / 8.8 (benchmarks/results/step_time_h200_back_ends.json).
XLA_SCORES = 4_000_000


def paged_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T G H"],
    v: Float[Array, "B T G H"],
    k_pages: Float[Array, "P G Z H"],
    v_pages: Float[Array, "P G Z H"],
    page_table: Int[Array, "B C"],
    mask: WindowMask,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of the window's rows over cached pages and fresh keys, softmax in float32.

    Args:
        q, k, v: Rotated queries and fresh keys and values of the computed rows.
        k_pages, v_pages: The pools of this layer. They are only read.
        page_table: Pages of each sequence in order of position; -1 where there is none.
        mask: Who sees whom.
        implementation: "xla" (any device, the truth), "cudnn" and "triton" (NVIDIA GPU, 16-bit),
            "mosaic" (Hopper, bfloat16, jax 0.11), or None: the one measured to be fastest that
            takes the arguments.

    Returns:
        Rows that are not live hold any finite values: no other row sees them.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    if implementation is None:
        implementation = choose(q, k_pages, page_table, mask)
    if implementation == "xla":
        return reference.attention(q, k, v, k_pages, v_pages, page_table, mask)
    if implementation == "cudnn":
        reason = cudnn.unsupported(q)
        if reason:
            raise NotImplementedError(f'implementation="cudnn": {reason}; use "xla"')
        return cudnn.attention(q, k, v, k_pages, v_pages, page_table, mask)
    if implementation == "triton":
        reason = triton.unsupported(q, k_pages)
        if reason:
            raise NotImplementedError(f'implementation="triton": {reason}; use "xla"')
        return triton.attention(q, k, v, k_pages, v_pages, page_table, mask)
    if implementation == "mosaic":
        reason = mosaic.unsupported(q, k_pages, mask)
        if reason:
            raise NotImplementedError(f'implementation="mosaic": {reason}; use "xla"')
        return mosaic.attention(q, k, v, k_pages, v_pages, page_table, mask)
    raise ValueError(f'{implementation=} is not one of "xla", "cudnn", "triton", "mosaic"')


def choose(q: Array, k_pages: Array, page_table: Array, mask: WindowMask) -> Implementation:
    """What `implementation=None` takes for such arguments on this machine."""
    B, T, N, _ = q.shape
    if T <= MOSAIC_ROWS and not mosaic.unsupported(q, k_pages, mask):
        return "mosaic"
    if T <= TRITON_ROWS and not triton.unsupported(q, k_pages):
        return "triton"
    scores = B * T * N * (page_table.shape[1] * k_pages.shape[2] + T)
    return "xla" if scores < XLA_SCORES or cudnn.unsupported(q) else "cudnn"
