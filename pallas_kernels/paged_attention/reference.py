"""The truth: gather the pages, build the mask by definition, softmax in float32. Any device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.paged_attention.api import WindowMask, gather_pages, sees


def attention(
    q: Array, k: Array, v: Array, k_pages: Array, v_pages: Array, page_table: Array, mask: WindowMask
) -> Array:
    """See `api.paged_attention`; a row that sees nothing gives zeros, never NaN."""
    B, T, N, H = q.shape
    G, Z = k_pages.shape[1:3]
    keys = jnp.concatenate([gather_pages(k_pages, page_table), k], axis=1)
    values = jnp.concatenate([gather_pages(v_pages, page_table), v], axis=1)
    visible = sees(mask, page_table, Z)[:, None, None]
    grouped = q.reshape(B, T, G, N // G, H)
    scores = jnp.einsum("btgnh,bugh->bgntu", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(visible, scores * H**-0.5, jnp.finfo(jnp.float32).min)
    weights = jnp.where(visible, jax.nn.softmax(scores, axis=-1), 0.0)
    # Cached rows nobody wrote hold zeros; a NaN that got there would survive a weight of zero.
    out = jnp.einsum("bgntu,bugh->btgnh", weights.astype(values.dtype), values)
    return out.reshape(B, T, N, H)
