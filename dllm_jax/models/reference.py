"""Cache-free attention and logits: the reference for paged decoding.

`Model.logits` and the trainer use them too.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.models.architecture import DENSE, Architecture
from dllm_jax.models.view import View


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B U G H"],
    v: Float[Array, "B U G H"],
    visible: Bool[Array, "B T U"],
    scale: float | None = None,
) -> Float[Array, "B T N H"]:
    """Grouped-query attention under a mask, softmax in float32; a row that sees nothing gives 0.

    `scale` is the factor of the scores; None: one over the root of the head size.
    """
    B, T, N, H = q.shape
    G = k.shape[2]
    grouped = q.reshape(B, T, G, N // G, H)
    scores = jnp.einsum("btgnh,bugh->bgntu", grouped, k, preferred_element_type=jnp.float32)
    mask = visible[:, None, None]
    scores = jnp.where(
        mask, scores * (H**-0.5 if scale is None else scale), jnp.finfo(jnp.float32).min
    )
    weights = jnp.where(mask, jax.nn.softmax(scores, axis=-1), 0.0)
    out = jnp.einsum("bgntu,bugh->btgnh", weights.astype(v.dtype), v)
    return out.reshape(B, T, N, H)


def dense_logits(
    params: Any,
    cfg: Any,
    token_ids: Int[Array, "B T"],
    visible: Bool[Array, "B T T"],
    arch: Architecture = DENSE,
) -> Float[Array, "B T V"]:
    """Raw logits of every row (row i belongs to input i) under any visibility, without a cache."""
    return arch.unembed(params, cfg, dense_rows(params, cfg, token_ids, visible, arch))


def dense_rows(
    params: Any,
    cfg: Any,
    token_ids: Int[Array, "B T"],
    visible: Bool[Array, "B T T"],
    arch: Architecture = DENSE,
    positions: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """The rows before the head; `positions` None: the text begins at 0."""
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        view = View() if arch.layer_view is None else arch.layer_view(cfg, layer)
        seen = visible
        if view.window is not None:
            apart = jnp.abs(positions[:, :, None] - positions[:, None])
            seen = seen & (apart < view.window)
        return attention(q, k, v, seen, view.scale)

    return arch.trunk(params, cfg, arch.embed(params, cfg, token_ids), positions, attend)[0]


def visibility(kind: str, length: int, block_size: int) -> Bool[Array, "T T"]:
    """The mask called `kind`: "full", "causal" or "block_causal" on the absolute block grid."""
    row, column = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    if kind == "full":
        return jnp.ones((length, length), bool)
    if kind == "causal":
        return column <= row
    if kind == "block_causal":
        return column // block_size <= row // block_size
    raise ValueError(f'attention={kind!r} is not one of "full", "block_causal", "causal"')


def noisy_visibility(length: int, block_size: int) -> Bool[Array, "U U"]:
    """Of [noisy; clean] rows, U = 2 T: a noisy block sees the clean ones before it, and itself."""
    block = jnp.arange(length) // block_size
    q, k = block[:, None], block[None]
    noisy = jnp.concatenate([q == k, k < q], axis=1)
    clean = jnp.concatenate([jnp.zeros_like(q == k), k <= q], axis=1)
    return jnp.concatenate([noisy, clean], axis=0)
