"""cuDNN's fused attention over gathered pages: NVIDIA GPUs, 16-bit types."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..kv_write import fp8
from .mask import WindowMask, sees

_MAX_HEAD = 128  # limit of cuDNN's forward attention on every architecture that it supports


def unsupported(q: Array) -> str | None:
    """Why this back end cannot run these queries, or None."""
    if jax.default_backend() != "gpu":
        return "needs an NVIDIA GPU"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > _MAX_HEAD:
        return f"needs a head size that is a multiple of 8 up to {_MAX_HEAD}, got {q.shape[-1]}"
    return None


def attention(
    q: Array,
    k: Array,
    v: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    mask: WindowMask,
    *,
    scale: float,
    kv_scales: Array | None = None,
) -> Array:
    """See `api.paged_attention`."""
    Z = k_pages.shape[2]
    keys = jnp.concatenate([_gather_pages(k_pages, page_table), k], axis=1)
    cached = _gather_pages(v_pages, page_table, fp8.is_token_last(v_pages))
    values = jnp.concatenate([cached, v], axis=1)
    if kv_scales is not None:  # powers of two: products are exact in bfloat16
        k_scale, v_scale = (own.astype(q.dtype)[None, None, :, None] for own in kv_scales)
        keys, values = keys.astype(q.dtype) * k_scale, values.astype(q.dtype) * v_scale
    visible = sees(mask, page_table, Z, k.shape[1])
    return jax.nn.dot_product_attention(
        q, keys, values, mask=visible[:, None], scale=scale, implementation="cudnn"
    )


def _gather_pages(
    pages: Array, page_table: Int[Array, "B C"], is_token_last: bool = False
) -> Float[Array, "B CZ G H"]:
    """Cached rows of each sequence in order of position; arbitrary where a page is missing."""
    found = pages.at[jnp.maximum(page_table, 0)].get(mode="clip")
    found = found.mT if is_token_last else found
    B, C, G, Z, H = found.shape
    return found.swapaxes(2, 3).reshape(B, C * Z, G, H)
