"""The KV cache of a network: its pools, and the scales of one in 8 bits, one for each head.

Scales are a bound computed from the weights. A normed row is at most as long as the root of its
width (before the norm's scale), so its product with a column is at most that root times the length
of the column. This bound is loose, by some 2^6 for values. It costs no precision, because 8-bit
floats keep three bits of mantissa over a range of 2^15, and it needs no calibration run.
"""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dllm_jax.kernels.kv_write import fp8
from dllm_jax.kernels.layer.fp8 import Fp8Matrix
from dllm_jax.models.dflash import DFlashConfig
from dllm_jax.models.gemma import GemmaConfig
from dllm_jax.models.sharding import Split

# K and V of each layer, [P G Z H]; V of 8 bits is [P G H Z].
Pool = tuple[tuple[Array, Array], ...]

KV_FP8 = fp8.DTYPE
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3"]
KV_CACHE_DTYPES: tuple[KVCacheDType, ...] = ("auto", "fp8", "fp8_e4m3")


def unsupported(config: Any) -> str | None:
    """Why the keys and values of this network cannot be cached in 8 bits, or None."""
    if isinstance(config, GemmaConfig):
        return "DiffusionGemma's cache has no form in 8 bits"
    if isinstance(config, DFlashConfig):
        return "a draft's cache has no form in 8 bits; its target's may have one"
    return None


def kv_scales(params: Any, split: Split | None = None) -> tuple[Float[Array, "2 G"], ...]:
    """Divisors of the keys and of the values of each head, by layer.

    Args:
        split: The devices that share the weights; each holds the scales of its heads.
    """
    return tuple(_layer_scales(layer, split) for layer in params["layers"])


@functools.partial(jax.jit, static_argnames="split")
def _layer_scales(layer: Any, split: Split | None) -> Float[Array, "2 G"]:
    if split is None:
        return _scales(layer)
    where = split.specs({"kv_scales": 0})["kv_scales"]
    return split.run(_scales, (layer,), (split.specs(layer),), where)


def _scales(layer: Any) -> Float[Array, "2 G"]:
    norm = layer["attn_norm"].astype(jnp.float32)
    w = layer["wqkv"]
    if isinstance(w, Fp8Matrix):  # [G n+2 H D]
        columns = w.values[:, -2:].astype(jnp.float32) * w.scales[:, -2:, :, None]
    else:
        columns = jnp.moveaxis(w[:, :, -2:], 0, -1).astype(jnp.float32)
    most = math.sqrt(len(norm)) * jnp.linalg.norm(
        columns * norm[None, None, None], axis=-1
    )  # [G 2 H]
    if "bqkv" in layer:
        most += jnp.abs(layer["bqkv"][:, -2:].astype(jnp.float32))
    keys, values = jnp.max(most, axis=-1).T
    keys *= math.sqrt(2)  # a pair, rotated
    if "k_norm" in layer:
        scale = jnp.max(jnp.abs(layer["k_norm"].astype(jnp.float32)))
        keys = jnp.full_like(keys, math.sqrt(columns.shape[-2])) * scale
    return fp8.scales_of(jnp.stack([keys, values]))


def new_pool(
    cfg: Any, num_pages: int, page_size: int, dtype: Any, split: Split | None = None
) -> Pool:
    """An empty pool for every layer of a model; zeros, so that stale rows are finite.

    Args:
        split: The devices that share the model; the pool is then one device's.
    """
    parts = 1 if split is None else split.num_parts

    def empty(layer: int) -> tuple[Array, Array]:
        heads, size = cfg.heads(layer)
        own = math.lcm(heads, parts) // parts  # heads that do not divide are repeated
        keys = jnp.zeros((num_pages, own, page_size, size), dtype)
        if split is not None:
            keys = jax.lax.pcast(keys, (split.axis,), to="varying")
        return keys, jnp.zeros_like(keys.mT if fp8.is_token_last(keys) else keys)

    return tuple(empty(i) for i in range(cfg.num_layers))
