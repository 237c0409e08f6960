"""Paged block attention: the interface and its back ends.

Every back end computes the same function: the queries of a window attend to the cached pages of
their request and to the window's own fresh keys. Prefill is the same call with a larger window.

Letters: B sequences, T computed rows, N query heads, G KV heads, H head size, P pages in the
pool, Z page size, C pages of a sequence, K blocks in the window.
"""

import functools
from typing import Literal

from jaxtyping import Array, Float, Int

from .. import dispatch
from ..dispatch import BackEnd
from ..layer.fp8 import Fp8Groups
from . import cudnn, mosaic, reference
from .mask import WindowMask
from .mosaic_tiling import choose_alike

Implementation = Literal["xla", "cudnn", "mosaic"]

# The most rows of a sequence at which Mosaic's kernel was measured and was the fastest. us a call
# on an H200, sequences x rows at a context, Mosaic / the better use of cuDNN: SDAR-8B, 1 x 32 at
# 8k 16 / 140, 1 x 512 at 3.5k 52 / 119, 1 x 1,024 at 3k 113 / 218; LLaDA-8B, 32 x 128 at 1k
# 192 / 382, 8 x 256 at 1k 92 / 250 (benchmarks/results/paged_attention_h200.json).
MOSAIC_ROWS = 1024

# Number of scores up to which XLA is faster than cuDNN, which runs one thread block per head and
# sequence.
# SDAR-1.7B on an H200, ms a step, XLA / cuDNN: 0.4 M scores 1.98 / 2.53, 1.8 M 2.88 / 3.31,
# 14 M 11.1 / 8.8 (benchmarks/results/step_time_h200_back_ends.json).
XLA_SCORES = 4_000_000


def paged_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B U G H"],
    v: Float[Array, "B U G H"],
    k_pages: Float[Array, "P G Z H"],
    v_pages: Float[Array, "P G Z H"] | Float[Array, "P G H Z"],
    page_table: Int[Array, "B C"],
    mask: WindowMask,
    *,
    scale: float | None = None,
    kv_scales: Float[Array, "2 G"] | None = None,
    is_quantized: bool = False,
    one_rounding: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"] | Fp8Groups:
    """Attention of the window's rows over cached pages and fresh keys, softmax in float32.

    Args:
        q, k, v: Rotated queries and fresh keys and values: of the computed rows, U = T, or as
            `mask.whole_tile` returns them.
        k_pages, v_pages: The pools of this layer, which are only read. Values of 8 bits, and no
            others, are [P G H Z] (`kv_write.fp8.is_token_last`).
        page_table: Pages of each sequence in order of position; -1 for a missing page.
        mask: Which keys each row sees.
        scale: Factor of the scores; None: one over the root of the head size.
        kv_scales: For keys and values of 8 bits, cached and fresh: the factors of the keys and of
            the values of each head, powers of two (`kv_write.fp8`).
        is_quantized: Allow rows in 8 bits with a scale for each head of a row. They are returned
            if the kernel can round them in the same launch.
        one_rounding: With "mosaic", split the keys alike for any number of sequences, and for any
            number of rows from 128 on, so that a row's bits do not depend on them; after
            `whole_tile` for any number of rows.
        implementation: "xla" (any device, the reference), "cudnn" (NVIDIA GPU, 16-bit), "mosaic"
            (Hopper, bfloat16, jax 0.11), or None for the fastest that supports the arguments.

    Returns:
        Rows that are not live hold arbitrary finite values.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    arguments = (q, k, v, k_pages, v_pages, page_table, mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if dispatch.is_plain(implementation):
        return reference.attention(*arguments, scale=scale, kv_scales=kv_scales)
    back_ends = _back_ends(q, k_pages, page_table, mask)
    own = back_ends["mosaic"]
    if is_quantized:
        own = own._replace(run=functools.partial(own.run, is_quantized=True))
    if one_rounding and not own.unsupported:
        tiling = choose_alike(q, k_pages, page_table, mask.keys_from_0)
        if mask.keys_from_0 and tiling.splits > 1:  # shares of the keys follow a window's beginning
            own = own._replace(unsupported="needs keys that no blocks share; use fewer tokens")
        own = own._replace(run=functools.partial(own.run, tiling=tiling))
    back_ends["mosaic"] = own
    return dispatch.run(implementation, back_ends, *arguments, scale=scale, kv_scales=kv_scales)


def choose(q: Array, k_pages: Array, page_table: Array, mask: WindowMask) -> Implementation:
    """The name of the back end that `implementation=None` runs for such arguments."""
    return dispatch.choose(None, _back_ends(q, k_pages, page_table, mask))


def _back_ends(
    q: Array, k_pages: Array, page_table: Array, mask: WindowMask
) -> dict[Implementation, BackEnd]:
    B, T, N, _ = q.shape
    scores = B * T * N * (page_table.shape[1] * k_pages.shape[2] + T)
    on_mosaic = mosaic.unsupported(q, k_pages, mask)
    # A canvas with its window on an H200, us, XLA / Mosaic. Head 256: 256 rows 62 / 32, with a
    # store 116 / 42, a prefill of 1,024 rows 239 / 41 (benchmarks/results/canvas_parts_h200.json).
    # Head 512, Mosaic with its merge: 256 rows of one slot 90 / 50, of four 294 / 152, of 16
    # 1,039 / 580 (canvas_attention_h200.json); a prefill on an H100 280 / 143
    # (canvas_wide_h100.json).
    return {
        "mosaic": BackEnd(mosaic.attention, on_mosaic, T <= MOSAIC_ROWS),
        "cudnn": BackEnd(cudnn.attention, cudnn.unsupported(q), scores >= XLA_SCORES),
        "xla": BackEnd(reference.attention),
    }
