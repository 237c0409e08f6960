"""Paged block attention: the interface, the mask it means, and the choice of back end.

Every back end computes the same function: the queries of a window attend to the cached pages of
their request and to the window's own fresh keys. Prefill is the same call with a larger window.
Nothing here knows about strategies or models.

Letters: B sequences, T computed rows, N query heads, G KV heads, H head size, P pages in the
pool, Z page size, C pages of a sequence, K blocks in the window.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

Implementation = Literal["xla", "cudnn"]

# Scores up to which XLA beats cuDNN, whose kernel has one block of threads a head and sequence.
# SDAR-1.7B on an H200, ms a step, XLA / cuDNN: 0.4 M scores 1.98 / 2.53, 1.8 M 2.88 / 3.31,
# 14 M 11.1 / 8.8 (benchmarks/results/step_time_h200_back_ends.json).
_XLA_SCORES = 4_000_000


class WindowMask(struct.PyTreeNode):
    """Who sees whom, in a form small enough to travel to a kernel.

    Attributes:
        cell: Window cell of each computed row; its block is `cell // block_size`.
        start: Absolute position of cell 0.
        live: First and one past the last live cell, [B 2]; other cells neither see nor are seen.
        context_len: Cached keys seen, counted from position 0.
        visible: Whether row block q sees key block k; leading axis B or 1.
        causal: Rows in token order as well.
        block_size: Cells of a block.
    """

    cell: Int[Array, "B T"]
    start: Int[Array, " B"]
    live: Int[Array, "B 2"]
    context_len: Int[Array, " B"]
    visible: Bool[Array, "B K K"]
    causal: Bool[Array, " B"]
    block_size: int = struct.field(pytree_node=False)

    def rows_live(self) -> Bool[Array, "B T"]:
        """Computed rows that take part."""
        return (self.cell >= self.live[:, :1]) & (self.cell < self.live[:, 1:])

    def sees_context(self, length: int) -> Bool[Array, "B T L"]:
        """Row i sees cached position j.

        A position that is both cached and live is seen fresh, not cached; in token order a row
        sees no cached position behind its own.
        """
        j = jnp.arange(length)[None, None, :]
        edges = (self.start[:, None] + self.live)[:, :, None, None]
        refreshed = (j >= edges[:, 0]) & (j < edges[:, 1])
        cached = (j < self.context_len[:, None, None]) & ~refreshed
        position = (self.start[:, None] + self.cell)[:, :, None]
        in_order = ~self.causal[:, None, None] | (j <= position)
        return cached & in_order & self.rows_live()[:, :, None]

    def sees_fresh(self) -> Bool[Array, "B T T"]:
        """Row i sees the fresh key of row j."""
        live = self.rows_live()
        block = jnp.clip(self.cell // self.block_size, 0, self.visible.shape[1] - 1)
        visible = jnp.broadcast_to(self.visible, (len(block), *self.visible.shape[1:]))
        rows = jnp.take_along_axis(visible, block[:, :, None], axis=1)
        pairs = jnp.take_along_axis(rows, block[:, None, :], axis=2)
        in_order = ~self.causal[:, None, None] | (self.cell[:, None, :] <= self.cell[:, :, None])
        return pairs & in_order & live[:, :, None] & live[:, None, :]


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
        implementation: "xla" (any device, the truth), "cudnn" (NVIDIA GPU, 16-bit), or None: the
            one measured to be faster that supports the arguments.

    Returns:
        Rows that are not live hold any finite values: no other row sees them.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    from pallas_kernels.paged_attention import cudnn, reference

    if implementation is None:
        small = (
            q.shape[0] * q.shape[1] * q.shape[2] * _num_keys(k, k_pages, page_table) < _XLA_SCORES
        )
        implementation = "xla" if small or cudnn.unsupported(q) else "cudnn"
    if implementation == "xla":
        return reference.attention(q, k, v, k_pages, v_pages, page_table, mask)
    if implementation == "cudnn":
        reason = cudnn.unsupported(q)
        if reason:
            raise NotImplementedError(f'implementation="cudnn": {reason}; use "xla"')
        return cudnn.attention(q, k, v, k_pages, v_pages, page_table, mask)
    raise ValueError(f'{implementation=} is not one of "xla", "cudnn"')


def _num_keys(k: Array, k_pages: Array, page_table: Array) -> int:
    return page_table.shape[1] * k_pages.shape[2] + k.shape[1]


def sees(mask: WindowMask, page_table: Int[Array, "B C"], page_size: int) -> Bool[Array, "B T U"]:
    """The whole mask over gathered context, then fresh keys."""
    context = mask.sees_context(page_table.shape[1] * page_size)
    present = jnp.repeat(page_table >= 0, page_size, axis=1)[:, None, :]
    return jnp.concatenate([context & present, mask.sees_fresh()], axis=-1)


def on_gpu() -> bool:
    """Whether the default device is a GPU."""
    return jax.default_backend() == "gpu"
