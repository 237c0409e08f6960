"""cuDNN's fused attention over gathered pages: NVIDIA GPUs, 16-bit types."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.paged_attention.api import WindowMask, gather_pages, on_gpu, sees

_MAX_HEAD = 128  # cuDNN's forward attention on every architecture it supports


def unsupported(q: Array) -> str | None:
    """Why this back end cannot run these queries, or None."""
    if not on_gpu():
        return "needs an NVIDIA GPU"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > _MAX_HEAD:
        return f"needs a head size that is a multiple of 8 up to {_MAX_HEAD}, got {q.shape[-1]}"
    return None


def attention(
    q: Array, k: Array, v: Array, k_pages: Array, v_pages: Array, page_table: Array, mask: WindowMask
) -> Array:
    """See `api.paged_attention`."""
    Z = k_pages.shape[2]
    keys = jnp.concatenate([gather_pages(k_pages, page_table), k], axis=1)
    values = jnp.concatenate([gather_pages(v_pages, page_table), v], axis=1)
    visible = sees(mask, page_table, Z)
    out = jax.nn.dot_product_attention(
        q, keys, values, mask=visible[:, None], implementation="cudnn"
    )
    # A row that sees nothing is an average of everything here; by contract it is zero.
    return jnp.where(mask.rows_live()[:, :, None, None], out, 0)
