"""The reference for any device: gathered pages, the full mask, softmax in float32."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..kv_write import fp8
from .mask import WindowMask, sees, within_reach


@functools.partial(jax.jit, static_argnames="scale")  # traced once for equal layers
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
    """See `api.paged_attention`; a row that sees nothing gives zeros, never NaN."""
    B, T, N, H = q.shape
    G, Z = k_pages.shape[1:3]
    mask, page_table = within_reach(mask, page_table, Z)
    cached = _by_head(k_pages, page_table)
    keys = jnp.concatenate([cached, k.swapaxes(1, 2)], axis=2)
    cached = _by_head(v_pages, page_table, fp8.is_token_last(v_pages))
    values = jnp.concatenate([cached, v.swapaxes(1, 2)], axis=2)
    if kv_scales is not None:  # widening 8 bits is exact
        keys, values = keys.astype(q.dtype), values.astype(q.dtype)
    visible = sees(mask, page_table, Z, k.shape[1])[:, None, None]
    # The query heads of a KV head are rows of one product.
    rows = q.reshape(B, T, G, N // G, H).transpose(0, 2, 3, 1, 4).reshape(B, G, -1, H)
    scores = jnp.einsum("bgrh,bguh->bgru", rows, keys, preferred_element_type=jnp.float32)
    scores = scores.reshape(B, G, N // G, T, -1)
    if kv_scales is not None:
        scores *= kv_scales[0][None, :, None, None, None]
    scores = jnp.where(visible, scores * scale, jnp.finfo(jnp.float32).min)
    weights = jnp.where(visible, jax.nn.softmax(scores, axis=-1), 0.0)
    weights = weights.astype(values.dtype).reshape(B, G, N // G * T, -1)
    out = jnp.einsum("bgru,bguh->bgrh", weights, values, preferred_element_type=jnp.float32)
    if kv_scales is not None:
        out *= kv_scales[1][None, :, None, None]
    out = out.astype(q.dtype).reshape(B, G, N // G, T, H).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, N, H)


def _by_head(pages: Array, page_table: Array, is_token_last: bool = False) -> Array:
    """Cached rows of each sequence, [B G CZ H]: contiguous per head, as the products need them."""
    found = pages.at[jnp.maximum(page_table, 0)].get(mode="clip")
    found = found.mT if is_token_last else found
    B, C, G, Z, H = found.shape
    return found.swapaxes(1, 2).reshape(B, G, C * Z, H)
