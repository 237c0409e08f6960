"""The truth: gather the pages, build the mask by definition, softmax in float32. Any device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.paged_attention.api import WindowMask, sees


def attention(
    q: Array, k: Array, v: Array, k_pages: Array, v_pages: Array, page_table: Array, mask: WindowMask
) -> Array:
    """See `api.paged_attention`; a row that sees nothing gives zeros, never NaN."""
    B, T, N, H = q.shape
    G, Z = k_pages.shape[1:3]
    keys = jnp.concatenate([_by_head(k_pages, page_table), k.swapaxes(1, 2)], axis=2)
    values = jnp.concatenate([_by_head(v_pages, page_table), v.swapaxes(1, 2)], axis=2)
    visible = sees(mask, page_table, Z)[:, None, None]
    # The query heads of a KV head are rows of one product.
    grouped = q.reshape(B, T, G, N // G, H)
    scores = jnp.einsum("btgnh,bguh->bgntu", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(visible, scores * H**-0.5, jnp.finfo(jnp.float32).min)
    weights = jnp.where(visible, jax.nn.softmax(scores, axis=-1), 0.0)
    out = jnp.einsum(
        "bgntu,bguh->btgnh",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    return out.reshape(B, T, N, H).astype(q.dtype)


def _by_head(pages: Array, page_table: Array) -> Array:
    """Cached rows of each sequence, [B G CZ H]: contiguous per head, as the products want them."""
    B, C = page_table.shape
    _, G, Z, H = pages.shape
    found = pages.at[jnp.maximum(page_table, 0)].get(mode="clip")
    return found.swapaxes(1, 2).reshape(B, G, C * Z, H)
