"""The functions of a network as one value, which plugs any family into the engine.

Their signatures are those of `dense.py`; `cfg` is the config of the family.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from dllm_jax.models import dense, dflash, gemma, moe
from dllm_jax.models.view import View


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The functions of one network; compares by identity of its functions, so it may be static.

    Attributes:
        param_shapes: `(cfg, dtype) -> tree of ShapeDtypeStruct`.
        embed: `(params, cfg, ids) -> rows [..., D]`.
        trunk: `(params, cfg, x, positions, attend, hidden_layers) -> (rows, taps)`; with
            `takes_mode` it also takes `mode`, int32 [B] or [B T], as a keyword, with `takes_live`
            `live`, with `takes_ops` `ops`.
        unembed: `(params, cfg, hidden [..., D]) -> float32 logits [..., V]`. An `Unembed` exposes
            its matrix, so that a kernel can read tokens without logits in memory.
        context_kv: `(params, cfg, vectors, positions) -> ((k, v) of each layer)` for a network
            that caches keys and values of given vectors (a drafter), else None.
        layer_view: `(cfg, layer) -> View`: the part of the mask that a layer sees, and the scale of
            its scores. None if all layers are alike.
        condition: `(params, cfg, rows [..., D], expected [..., D]) -> rows` mixes embeddings with
            the expected embeddings of their cells. None: no `Conditioned` inputs.
        takes_mode: Whether `trunk` takes `mode`.
        takes_live: Whether `trunk` takes `live`, bool [B T]: the rows that belong to a text.
        takes_ops: Whether `trunk` takes `ops`, the back ends of a layer's small operations.
            Several devices can share the network only if it does.
    """

    param_shapes: Callable[..., Any]
    embed: Callable[..., Any]
    trunk: Callable[..., Any]
    unembed: Callable[..., Any]
    context_kv: Callable[..., Any] | None = None
    layer_view: Callable[[Any, int], View] | None = None
    condition: Callable[..., Any] | None = None
    takes_mode: bool = False
    takes_live: bool = False
    takes_ops: bool = False


DENSE = Architecture(
    param_shapes=dense.param_shapes,
    embed=dense.embed,
    trunk=dense.trunk,
    unembed=dense.unembed,
    takes_ops=True,
)

MOE = dataclasses.replace(DENSE, param_shapes=moe.param_shapes, trunk=moe.trunk, takes_live=True)

DFLASH = dataclasses.replace(
    DENSE,
    param_shapes=dflash.param_shapes,
    embed=dflash.embed,
    unembed=dflash.unembed,
    context_kv=dflash.context_kv,
    layer_view=dflash.layer_view,
)

GEMMA = Architecture(
    param_shapes=gemma.param_shapes,
    embed=gemma.embed,
    trunk=gemma.trunk,
    unembed=gemma.unembed,
    layer_view=gemma.layer_view,
    condition=gemma.condition,
    takes_mode=True,
    takes_live=True,
    takes_ops=True,
)


def arch_of(cfg: dense.DenseConfig) -> Architecture:
    """The network that a config describes."""
    if isinstance(cfg, gemma.GemmaConfig):
        return GEMMA
    if isinstance(cfg, dflash.DFlashConfig):
        return DFLASH
    return MOE if isinstance(cfg, moe.MoEConfig) else DENSE
