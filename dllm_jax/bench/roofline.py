"""The least time of a decode step: the bytes it must move, the operations it must do.

Only for devices whose rates were measured; None elsewhere. Experts are counted for random routing:
each distinct expert that is hit is read once, and each cell goes through a few.
"""

from collections.abc import Iterator
from typing import Any

import jax

from dllm_jax.kernels.token_readout.head import Fp8Head
from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.moe import MoEConfig
from dllm_jax.models.quantization import is_quantized

# Bytes a second (copy) and bfloat16 operations a second, measured on the device.
RATES = {"NVIDIA H200": (4.3e12, 790e12)}
LINKS = {"NVIDIA H200": 450e9}  # bytes a second from a device to the others, by NVLink


def floor_ms(
    model: Any,
    rows: int,
    window: int,
    context: float,
    device_kind: str,
    touched: float | None = None,
) -> float | None:
    """Milliseconds of one step of `rows` windows at `context` cached tokens each.

    Devices that share the model share its work; their communication may overlap with it.

    Args:
        touched: Experts of a layer that its rows reach, if known.
    """
    if device_kind not in RATES or not isinstance(model.config, DenseConfig):
        return None
    bandwidth, rate = RATES[device_kind]
    work = (model.shapes, model.config, rows, window, context)
    moved, operations = pass_work(*work, kv_dtype=model.kv_dtype, touched=touched)
    return 1e3 * max(moved / bandwidth, operations / rate) / num_devices(model)


def num_devices(model: Any) -> int:
    """Devices that share a model."""
    return 1 if model.split is None else model.split.num_parts


def reductions_ms(model: Any, cells: int, device_kind: str) -> dict[str, Any] | None:
    """The least communication of devices that share a model, in one step of `cells` cells.

    A layer has two sums of rows, and the embedding has one. Each device sends and receives at least
    2 (N - 1) / N of the bytes of a sum. The few numbers of the readout and of 8-bit scales are not
    counted.

    Returns:
        Sums, bytes of one, and the milliseconds of all (None for an unknown device); None for one
        device.
    """
    count = num_devices(model)
    if count == 1:
        return None
    sums = 2 * model.config.num_layers + 1
    size = cells * model.config.hidden_size * model.params["embed"].dtype.itemsize
    link = LINKS.get(device_kind)
    crossing = 2 * (count - 1) / count * size
    return {"sums": sums, "bytes": size, "ms": link and 1e3 * sums * crossing / link}


def step_parts(
    model: Any, rows: int, blocks: int, block_size: int, context: float, expects: bool = False
) -> dict[str, tuple[float, float]] | None:
    """Bytes and operations of the parts of one step, which run one after another.

    The sum over parts of the larger of bytes / bandwidth and operations / rate is a sharper bound
    than `floor_ms`, which lets all parts overlap. `activations` are the rows between products,
    written once and read once.

    For a model that devices share, the figures are for one device: all but the activations are
    split evenly.

    Args:
        expects: The expected embedding of every cell is read out too, by one more product with the
            head.

    Returns:
        dense, experts (if any), attention, head, expected (if any), activations; None for other
        kinds of networks.
    """
    cfg = model.config
    if not isinstance(cfg, DenseConfig):
        return None
    window = blocks * block_size
    cells = rows * window
    params, size = model.shapes, model.params["embed"].dtype.itemsize
    read, used = weights(params, cfg, cells)
    head = cfg.vocab_size * cfg.hidden_size
    head_read = head / 2 if is_quantized(model.params.get("lm_head")) else head
    # With an 8-bit head, rows are in 8 bits as well if an expectation is read.
    head_used = head_read if expects else head
    experts_read = experts_used = 0.0
    layers = params["layers"]
    widths = [cfg.ffn_size if "w_gate_up" in layer else 0 for layer in layers]
    if isinstance(cfg, MoEConfig):
        experts = [layer for layer in layers if "router" in layer]
        experts_read, experts_used = weights([_experts(layer) for layer in experts], cfg, cells)
        moe_width = cfg.experts_per_token * cfg.expert_size + cfg.shared_size
        widths = [
            width + moe_width * moe for width, moe in zip(widths, cfg.moe_layers, strict=True)
        ]
    moved = attended = 0.0
    for (heads, head_dim), seen in layer_reads(cfg, context):
        # The prefix is read once; fresh keys and values are written and read; rows go in and out.
        cached = heads * rows * (seen + 2 * window) * model.kv_dtype.itemsize / size
        moved += 2 * head_dim * (cached + cfg.num_heads * cells)
        keys = seen + block_size * (blocks + 1) / 2  # of a row, on average
        attended += 4 * head_dim * cfg.num_heads * cells * keys
    parts = {
        "dense": (read - head_read - experts_read, 2 * (used - head - experts_used) * cells),
        "experts": (experts_read, 2 * experts_used * cells),
        "attention": (moved, attended),
        "head": (head_read, 2 * head_used * cells),
        "expected": (head * expects, 2 * head * cells * expects),
        "activations": (sum(8 * cfg.hidden_size + 4 * width for width in widths) * cells, 0.0),
    }
    each = {name: num_devices(model) if name != "activations" else 1 for name in parts}
    return {
        name: (size * moved / each[name], ops / each[name])
        for name, (moved, ops) in parts.items()
        if moved
    }


def experts_read(model: Any, cells: int) -> float | None:
    """Experts of a layer that `cells` cells reach with random routing; None: no experts.

    `step_parts` assumes this number; a step that reaches fewer reads less.
    """
    cfg = model.config
    if not isinstance(cfg, MoEConfig):
        return None
    share = cfg.experts_per_token / cfg.num_experts
    return cfg.num_experts * (1 - (1 - share) ** cells)


def _experts(layer: Any) -> Any:
    return {name: leaf for name, leaf in layer.items() if name.startswith("experts")}


def parts_ms(parts: dict[str, tuple[float, float]], device_kind: str) -> dict[str, float] | None:
    """Milliseconds of each part of `step_parts`; None if the device's rates are unknown."""
    if device_kind not in RATES:
        return None
    bandwidth, rate = RATES[device_kind]
    return {name: 1e3 * max(b / bandwidth, ops / rate) for name, (b, ops) in parts.items()}


def pass_work(
    params: Any,
    cfg: DenseConfig,
    rows: int,
    cells: int,
    context: float,
    kv_dtype: Any = None,
    touched: float | None = None,
) -> tuple[float, float]:
    """Bytes and operations of a pass over `cells` positions of each row.

    Weights but the embedding are read once, and so is the context of each row. Every cell gets
    logits, which are never written.

    Args:
        kv_dtype: Of the cache; None: the embedding's.
        touched: As in `weights`.
    """
    read, used = weights(params, cfg, rows * cells, touched)
    cached = attention = 0.0
    for (heads, size), seen in layer_reads(cfg, context):
        cached += 2 * heads * size * seen * rows
        attention += 4 * size * cfg.num_heads * (seen + cells) * rows * cells
    size = params["embed"].dtype.itemsize
    kv_size = size if kv_dtype is None else kv_dtype.itemsize
    return read * size + cached * kv_size, 2 * used * rows * cells + attention


def layer_reads(cfg: DenseConfig, context: float) -> Iterator[tuple[tuple[int, int], float]]:
    """For each layer its KV heads and their size, and how much of a context it reads."""
    for i in range(cfg.num_layers):
        reach = cfg.reach(i)
        yield cfg.heads(i), context if reach is None else min(context, reach)


def weights(
    params: Any, cfg: DenseConfig, cells: int, touched: float | None = None
) -> tuple[float, float]:
    """Weights that a step of `cells` reads, and those that one cell is multiplied with.

    `touched` experts of a layer are read; None: the number that random routing hits. Both are in
    weights of the type of the embedding, taken for 16 bits where there are matrices in 8 bits.
    """
    read = used = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized):
        name = path[-1].key
        if name == "embed" and "lm_head" in params:
            continue
        hit = share = 1.0
        if isinstance(cfg, MoEConfig) and name.startswith("experts"):
            share = cfg.experts_per_token / cfg.num_experts
            hit = 1 - (1 - share) ** cells if touched is None else touched / cfg.num_experts
        size = leaf.values.size / 2 if is_quantized(leaf) else leaf.size
        read += size * hit
        # Half the bytes; a head is multiplied at the rate of 16 bits (but see
        # `step_parts`), all else at twice that.
        used += size * (2 if isinstance(leaf, Fp8Head) else share)
    return read, used
