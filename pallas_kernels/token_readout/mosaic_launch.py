"""The launch of the readout's Mosaic kernel: its operands, results and shared memory."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .. import hopper
from ..lowered import lowered_once
from .head import Fp8Head
from .mosaic_block import Settings, Tiling, run_block
from .mosaic_logits import ROWS, STEP
from .result import IdClasses, Part

LINE = 128  # bytes of a swizzled line
WEIGHT = jnp.bfloat16
_OF_CLASSES = "wide_codes", "wide_among", "num_wide", "narrow", "narrow_from", "whole_step"


@lowered_once(static_argnames=("settings", "interpret"))
def run(
    hidden, head, forbidden, has_forbidden, penalty, heat, classes, *, settings: Settings, interpret
) -> tuple[Part, dict[str, Array]]:
    """One launch: the parts of all tiles, and further results by name.

    Further results: likeliest ids by tile, weights (with `heat`), logits of ids and of classes.
    """
    row_scales = id_scales = None
    if isinstance(head, Fp8Head):
        row_scales, id_scales = hidden.scales, head.scales
        hidden, head = hidden.values, head.values
    tiling = settings.tiling
    (R, D), V, ids = hidden.shape[-2:], len(head), tiling.ids
    num_parts = hidden.size // (R * D)
    of_rows, of_ids = (2 if tiling.shared == shared else 1 for shared in ("head", "rows"))
    row_tiles, id_tiles = -(-R // tiling.rows // of_rows) * of_rows, len(has_forbidden)
    stages = min(tiling.stages, D * hidden.dtype.itemsize // LINE)
    tiling = dataclasses.replace(tiling, stages=stages)
    settings = dataclasses.replace(settings, tiling=tiling)

    def padded(rows, value, axis=0):
        width = [(0, 0)] * rows.ndim
        width[axis] = 0, row_tiles * tiling.rows - R
        return rows if not width[axis][1] else jnp.pad(rows, width, constant_values=value)

    rows = padded(hidden.reshape(num_parts, R, D), 0, axis=1)
    named = {"hidden": rows, "head": head, "forbidden": forbidden}
    if penalty is not None:
        named["penalty_ids"], named["penalties"] = padded(penalty[0], -1), padded(penalty[1], 0.0)
    if heat is not None:  # factor of the logits, 1 / temperature
        named["heat"] = padded(heat, 1.0)
    if row_scales is not None:
        named["row_scales"], named["id_scales"] = padded(row_scales, 1.0), id_scales
    named["special"] = _special(has_forbidden, named.get("penalty_ids"), V, ids)
    of_slot = R
    if classes is not None:
        named |= {name: getattr(classes, name).astype(jnp.int32) for name in _OF_CLASSES}
        of_slot = R // len(classes.codes)
    num_weights = 0 if heat is None else V
    shapes = _shapes(row_tiles * tiling.rows, id_tiles, settings.num_top, num_weights, classes)
    scratch = _scratch(tiling, hidden.dtype, num_parts, heat is not None)
    tiles = row_tiles * id_tiles // (of_rows * of_ids)  # of one cluster
    workers = min(tiles, tiling.blocks // (of_rows * of_ids))

    sizes = {"workers": workers, "row_groups": row_tiles // of_rows, "of_slot": of_slot}

    def body(*refs):
        refs = iter(refs)
        given, made, held = (
            {name: next(refs) for name in names} for names in (named, shapes, scratch)
        )
        run_block(given, made, held, settings, num_tiles=tiles, **sizes)

    out = hopper.kernel(
        body,
        out_type=list(shapes.values()),
        grid=(workers,),
        grid_names=("worker",),
        cluster=(2,) if tiling.shared else (),
        cluster_names=("peer",) if tiling.shared else (),
        kernel_name="token_readout",  # `dllm_jax.bench.head` searches for this name
        num_threads=tiling.consumers + 1,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*named.values())
    found = dict(zip(shapes, out, strict=True))
    parts = Part(**{name: found.pop(name)[:R] for name in Part._fields})
    return parts, {n: leaf[:, :, :R] if leaf.ndim == 3 else leaf[:R] for n, leaf in found.items()}


def _shapes(
    rows: int, id_tiles: int, num_top: int, num_weights: int, classes: IdClasses | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """The results: parts, likeliest ids, `num_weights` weights of a law, logits of classes."""
    real, whole = (
        functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.float32, jnp.int32)
    )
    shapes = {name: (whole if name == "token" else real)((rows, id_tiles)) for name in Part._fields}
    if num_top:
        shapes["top_logit"] = real((rows, id_tiles * num_top))
        shapes["top_id"] = whole((rows, id_tiles * num_top))
    if num_weights:
        shapes["weights"] = jax.ShapeDtypeStruct((rows, num_weights), WEIGHT)
    if classes is not None:
        N, M = classes.narrow.shape[1], classes.wide.shape[1]
        shapes["narrow_logit"] = real((rows, N))
        shapes["wide"], shapes["wide_token"] = (kind((M, id_tiles, rows)) for kind in (real, whole))
    return shapes


def _scratch(tiling: Tiling, dtype: Any, num_parts: int, has_weights: bool) -> dict[str, Any]:
    """Shared memory and barriers of a thread block whose rows are `num_parts` rows each."""
    stages, consumers, deep = tiling.stages, tiling.consumers, LINE // dtype.itemsize
    swizzled = hopper.swizzled(deep, dtype)
    used = plgpu.Barrier(num_barriers=stages, num_arrivals=consumers)
    if tiling.shared is not None:
        used = plgpu.ClusterBarrier(
            collective_axes=("peer",), num_barriers=stages, num_arrivals=consumers
        )
    of_step = stages, num_parts, consumers, ROWS, deep
    scratch = {
        "rows": plgpu.SMEM(of_step, dtype, transforms=swizzled),
        "words": plgpu.SMEM((stages, tiling.ids, deep), dtype, transforms=swizzled),
        "loaded": plgpu.Barrier(num_barriers=stages, num_arrivals=num_parts * consumers + 1),
        "used": used,
    }
    if has_weights:  # staging of weights, two pieces a warpgroup
        piece, swizzled = (consumers, 2, ROWS, STEP), hopper.swizzled(STEP, WEIGHT)
        scratch["leaving"] = plgpu.SMEM(piece, WEIGHT, transforms=swizzled)
    return scratch


def has_forbidden(forbidden: Any, tiling: Tiling) -> Any:
    """Whether each tile holds forbidden ids; ids past the last one count as forbidden."""
    xp = np if isinstance(forbidden, np.ndarray) else jnp
    many = 2 if tiling.shared == "rows" else 1
    id_tiles = -(-len(forbidden) // tiling.ids // many) * many
    wide = xp.pad(forbidden, (0, id_tiles * tiling.ids - len(forbidden)), constant_values=True)
    return xp.any(wide.reshape(id_tiles, -1), axis=1).astype(np.int32)


def _special(has_forbidden, penalty_ids, num_ids, ids) -> Array:
    """Whether a warpgroup's tile has ids that are forbidden, of another tile, or penalised.

    One row stands for all rows if there are no penalties.
    """
    special = has_forbidden[None]
    if penalty_ids is None:
        return special
    start = jnp.minimum(jnp.arange(len(has_forbidden), dtype=jnp.int32) * ids, num_ids - ids)
    which = penalty_ids[:, None]
    hit = (which >= start[None]) & (which < start[None] + ids)
    is_hit = jnp.any(hit.reshape(-1, ROWS, len(has_forbidden)), axis=1)
    return jnp.maximum(special, is_hit.astype(jnp.int32))
