"""Times of passes, estimated from the bytes and operations of their sizes.

They order a strategy's choices until those are timed.

Source of the constants: fitted to Qwen3-8B and the built-in pair on an H200, and to that pair on
two CPU cores (benchmarks/results/dflash_*.json); ratios are within a third of those measured.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from dllm_jax.kernels.token_readout.head import Fp8Head
from dllm_jax.loading.model import Model
from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.moe import MoEConfig
from dllm_jax.models.quantization import is_quantized

# Bytes a second (copy) and bfloat16 operations a second, measured on the device.
RATES = {"NVIDIA H200": (4.3e12, 790e12)}
USUAL_TEXT = 1024  # tokens; most texts end well before max_model_len
_DECODER = ("embed", "lm_head", "final_norm", "layers")


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast a device runs passes.

    Attributes:
        bytes_s, ops_s: Bytes and operations a second. Half of the lesser overlaps with the other.
        layer_s: Seconds of a layer's launches.
        step_s: Seconds of a step outside its passes: the loop's condition, the host's share.
        further_s: Seconds that each further pass of a step adds: inputs, readout, acceptance.
        reads: How often the context goes through memory.
    """

    bytes_s: float
    ops_s: float
    layer_s: float
    step_s: float
    further_s: float
    reads: float


# Other GPUs have a similar ratio of operations to bytes. A CPU gathers the pages, transposes them
# by head and joins them with the fresh keys before it reads them.
ACCELERATOR = Speed(*RATES["NVIDIA H200"], 23e-6, 50e-6, 200e-6, 1.0)
CPU = Speed(20e9, 80e9, 100e-6, 500e-6, 1e-3, 5.0)


def estimate_choices(
    strategy: Any,
    model: Model,
    aux: Mapping[str, Model],
    num_slots: int,
    context: int,
    platform: str,
) -> tuple[float, ...]:
    """Estimated seconds of a step for each of a strategy's choices.

    Devices that share the model make the choices of one, so a text takes the same forwards.

    Args:
        strategy: One that `weighs_costs`: its `cells` give the sizes of each choice's passes.
        model, aux: The networks; only shapes and types of their weights are read.
        context: Cached tokens a slot.
        platform: Of the device, in JAX's words.
    """
    speed = CPU if platform == "cpu" else ACCELERATOR
    sizes = num_slots, context, speed

    def step_s(target_cells: int, draft_cells: int) -> float:
        spent = speed.step_s + _estimate_pass_s(model, target_cells, *sizes)
        for draft in aux.values():
            spent += _feed_s(draft, num_slots * target_cells, speed)
            if draft_cells:
                spent += speed.further_s + _estimate_pass_s(draft, draft_cells, *sizes)
        return spent

    return tuple(step_s(*cells) for cells in strategy.cells)


def _estimate_pass_s(network: Model, cells: int, rows: int, context: int, speed: Speed) -> float:
    params = {name: leaf for name, leaf in network.shapes.items() if name in _DECODER}
    sizes = rows, cells, context, speed.reads, network.kv_dtype
    work = pass_work(params, network.config, *sizes)
    return _both_s(*work, speed) + speed.layer_s * network.config.num_layers


def _feed_s(draft: Model, rows: int, speed: Speed) -> float:
    """Seconds to store rows in a draft's cache: products with its own projections."""
    leaves = jax.tree.leaves([leaf for name, leaf in draft.shapes.items() if name not in _DECODER])
    moved = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return _both_s(moved, 2 * rows * sum(leaf.size for leaf in leaves), speed)


def _both_s(moved: float, operations: float, speed: Speed) -> float:
    parts = moved / speed.bytes_s, operations / speed.ops_s
    return max(parts) + min(parts) / 2


def pass_work(
    params: Any,
    cfg: DenseConfig,
    rows: int,
    cells: int,
    context: float,
    reads: float = 1.0,
    kv_dtype: Any = None,
    touched: float | None = None,
) -> tuple[float, float]:
    """Bytes and operations of a pass over `cells` positions of each row.

    Weights but the embedding are read once, the context of each row `reads` times. Every cell gets
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
    return read * size + reads * cached * kv_size, 2 * used * rows * cells + attention


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
        # `bench.roofline.step_parts`), all else at twice that.
        used += size * (2 if isinstance(leaf, Fp8Head) else share)
    return read, used
