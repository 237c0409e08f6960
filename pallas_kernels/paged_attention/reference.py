"""The reference: gathered pages, the mask by definition, softmax in float32. Any device."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..kv_write import fp8
from .mask import WindowMask, sees, within_reach


@functools.partial(jax.jit, static_argnames="scale")  # traced once for layers that are alike
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
    cached = [x.at[jnp.maximum(page_table, 0)].get(mode="clip") for x in (k_pages, v_pages)]
    keys = jnp.concatenate([_by_head(cached[0]), k.swapaxes(1, 2)], axis=2)
    values = jnp.concatenate([_by_head(fp8.by_token(cached[1])), v.swapaxes(1, 2)], axis=2)
    if kv_scales is not None:  # from 8 bits, which is exact
        keys, values = keys.astype(q.dtype), values.astype(q.dtype)
    visible = sees(mask, page_table, Z)[:, None, None]
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


def _by_head(pages: Float[Array, "B C G Z H"]) -> Float[Array, "B G CZ H"]:
    """Cached rows of each sequence: contiguous per head, as the products want them."""
    B, _, G, _, H = pages.shape
    return pages.swapaxes(1, 2).reshape(B, G, -1, H)
