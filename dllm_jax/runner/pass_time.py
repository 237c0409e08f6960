"""What a strategy's choices take, by arithmetic: for loops in which nobody has timed them.

A pass reads its weights and its context and does its products; a few figures a device say how fast.
Only ratios count: drafts are judged more or fewer at a time by them, and no token depends on it.

Source: fitted to Qwen3-8B and the built-in pair on an H200, and to that pair on two CPU cores
(benchmarks/results/dflash_*.json); ratios come out within a third of what was measured there.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from dllm_jax.loading.model import Model
from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.moe import MoEConfig

# Bytes a second (copy) and bfloat16 operations a second, measured on the device.
RATES = {"NVIDIA H200": (4.3e12, 790e12)}
USUAL_TEXT = 1024  # tokens; most texts end before they are as long as they may be
_DECODER = ("embed", "lm_head", "final_norm", "layers")


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast a device runs passes.

    Attributes:
        bytes_s, ops_s: Bytes and operations a second. Half of the lesser hides behind the other.
        layer_s: Seconds of a layer's launches.
        step_s: Seconds of a step beside its passes: a loop's turn, the engine's half.
        further_s: Seconds of each further pass of a step beside that: inputs, readout, judging.
        reads: How often the context goes through memory.
    """

    bytes_s: float
    ops_s: float
    layer_s: float
    step_s: float
    further_s: float
    reads: float


# Other GPUs have about as many operations a byte. On a CPU the pages are gathered, turned by head,
# and joined with the fresh keys before they are read.
ACCELERATOR = Speed(*RATES["NVIDIA H200"], 23e-6, 50e-6, 200e-6, 1.0)
CPU = Speed(20e9, 80e9, 100e-6, 500e-6, 1e-3, 5.0)


def choice_costs(
    strategy: Any,
    model: Model,
    aux: Mapping[str, Model],
    num_slots: int,
    context: int,
    platform: str,
) -> tuple[float, ...]:
    """Seconds, about, of a step of each of a strategy's choices.

    Args:
        strategy: It `weighs_costs`: its `cells` say what each choice runs.
        model, aux: The networks; of their weights only shapes and types are looked at.
        context: Cached tokens a slot.
        platform: Of the device, in JAX's words.
    """
    speed = CPU if platform == "cpu" else ACCELERATOR

    def step_s(own: int, beside: int) -> float:
        spent = speed.step_s + _pass_s(model, num_slots, own, context, speed)
        for other in aux.values():
            spent += _feed_s(other, num_slots * own, speed)
            if beside:
                spent += speed.further_s + _pass_s(other, num_slots, beside, context, speed)
        return spent

    return tuple(step_s(own, beside) for own, beside in strategy.cells)


def _pass_s(model: Model, num_slots: int, cells: int, context: int, speed: Speed) -> float:
    """Seconds of a pass of so many cells a slot."""
    cfg, rows = model.config, num_slots * cells
    params = {name: leaf for name, leaf in model.params.items() if name in _DECODER}
    read, used = weights(params, cfg, rows)
    heads = cfg.num_layers * cfg.head_dim
    cached = 2 * heads * cfg.num_kv_heads * context * num_slots
    attention = 4 * heads * cfg.num_heads * (context + cells) * rows
    size = model.params["embed"].dtype.itemsize
    moved = (read + speed.reads * cached) * size
    return _both_s(moved, 2 * used * rows + attention, speed) + speed.layer_s * cfg.num_layers


def _feed_s(model: Model, rows: int, speed: Speed) -> float:
    """Seconds in which a drafter is given so many rows: products with what no decoder has."""
    own = [leaf for name, leaf in model.params.items() if name not in _DECODER]
    leaves = jax.tree.leaves(own)
    moved = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return _both_s(moved, 2 * rows * sum(leaf.size for leaf in leaves), speed)


def _both_s(moved: float, operations: float, speed: Speed) -> float:
    parts = moved / speed.bytes_s, operations / speed.ops_s
    return max(parts) + min(parts) / 2


def weights(params: Any, cfg: DenseConfig, cells: int) -> tuple[float, float]:
    """Weights that a step of so many cells reads, and those that one cell is multiplied with.

    Experts are counted as random routing hits them.
    """
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
