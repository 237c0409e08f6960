"""cuDNN's fused attention over gathered pages: NVIDIA GPUs, 16-bit types."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..kv_write import fp8
from .mask import WindowMask, sees

_MAX_HEAD = 128  # cuDNN's forward attention on every architecture it supports


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
    cached = [x.at[jnp.maximum(page_table, 0)].get(mode="clip") for x in (k_pages, v_pages)]
    keys = jnp.concatenate([_in_order(cached[0]), k], axis=1)
    values = jnp.concatenate([_in_order(fp8.by_token(cached[1])), v], axis=1)
    if kv_scales is not None:  # powers of two: exact in bfloat16, whose range holds the products
        k_scale, v_scale = (own.astype(q.dtype)[None, None, :, None] for own in kv_scales)
        keys, values = keys.astype(q.dtype) * k_scale, values.astype(q.dtype) * v_scale
    visible = sees(mask, page_table, Z)
    return jax.nn.dot_product_attention(
        q, keys, values, mask=visible[:, None], scale=scale, implementation="cudnn"
    )


def _in_order(pages: Float[Array, "B C G Z H"]) -> Float[Array, "B CZ G H"]:
    """Cached rows of each sequence in order of position; rows of no page are arbitrary."""
    B, _, G, _, H = pages.shape
    return pages.swapaxes(2, 3).reshape(B, -1, G, H)
