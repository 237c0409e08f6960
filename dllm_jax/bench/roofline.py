"""The least time a decode step can take: bytes it must move, operations it must do.

Only for devices whose rates were measured; None elsewhere. Experts are counted as random routing
hits them: so many different ones are read, and each cell goes through a few.
"""

from typing import Any

import jax

from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.moe import MoEConfig

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
    cells = rows * window
    read, used = _weights(model.params, cfg, cells)
    cached = 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * context * rows
    attention = 4 * cfg.num_layers * cfg.num_heads * cfg.head_dim * (context + window) * cells
    size = model.params["embed"].dtype.itemsize
    seconds = max((read + cached) * size / bandwidth, (2 * used * cells + attention) / rate)
    return seconds * 1e3


def _weights(params: Any, cfg: DenseConfig, cells: int) -> tuple[float, float]:
    """Weights that a step of so many cells reads, and those that one cell is multiplied with."""
    read = used = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path[-1].key
        if name == "embed" and not cfg.tie_embeddings:
            continue
        if isinstance(cfg, MoEConfig) and name.startswith("experts"):
            share = cfg.experts_per_token / cfg.num_experts
            read += leaf.size * (1 - (1 - share) ** cells)
            used += leaf.size * share
        else:
            read += leaf.size
            used += leaf.size
    return read, used
