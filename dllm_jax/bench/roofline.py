"""The least time a decode step can take: bytes it must move, operations it must do.

Only for dense networks and devices whose rates were measured; None elsewhere.
"""

from typing import Any

import jax

from dllm_jax.models.dense import DenseConfig

# Bytes a second (copy) and bfloat16 operations a second, measured on the device.
RATES = {"NVIDIA H200": (4.3e12, 790e12)}


def floor_ms(model: Any, rows: int, window: int, context: float, device_kind: str) -> float | None:
    """Milliseconds of one step of `rows` windows at `context` cached tokens each.

    Weights but the embedding are read once, keys and values of each row once; every cell of the
    window gets logits, which are never written.
    """
    cfg = model.config
    if device_kind not in RATES or not isinstance(cfg, DenseConfig):
        return None
    bandwidth, rate = RATES[device_kind]
    leaves = jax.tree.leaves(model.params)
    size = leaves[0].dtype.itemsize
    head = cfg.vocab_size * cfg.hidden_size
    weights = sum(leaf.size for leaf in leaves) - (0 if cfg.tie_embeddings else head)
    cached = 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * context * rows
    cells = rows * window
    attention = 4 * cfg.num_layers * cfg.num_heads * cfg.head_dim * (context + window) * cells
    seconds = max((weights + cached) * size / bandwidth, (2 * weights * cells + attention) / rate)
    return seconds * 1e3
