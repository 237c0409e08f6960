"""A Pallas Mosaic kernel for NVIDIA Hopper: the head's product, read out without its logits.

A tile is 64 or 128 rows times some ids. The grid is persistent, and blocks take tiles of the same
ids at the same time, so that the head is read from memory once. A block writes a `Part` for each
row and tile, which XLA joins, and the weights of a law (`mosaic_block.py`).

The two blocks of a cluster load once what their tiles share: the head if the number of row tiles
is even, otherwise the rows.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .. import hopper
from ..layer.fp8 import DTYPE as FP8
from ..layer.fp8 import Fp8Rows, factors_of
from ..lowered import lowered_once
from .head import Fp8Head
from .mosaic_block import ID_MULTIPLE, ROWS, STEP, Tiling, hottest, run_block
from .result import (
    ID_STEP,
    SHARE,
    IdClasses,
    IdReadout,
    LawReadout,
    Part,
    TokenReadout,
    finish,
    joined,
    joined_maxima,
)

_LEAST_OF_SLOT = 16  # fewer rows of a slot are not worth a warpgroup; not measured
MAX_TOP = 8
_LINE = 128  # bytes of a swizzled line
_WEIGHT = jnp.bfloat16
_WIDTHS = (256, 192)  # ids of a tile
_WIDTH_8_BIT = 128  # of a head in 8 bits: two sums of each logit are in registers
_RING_BYTES = 208 * 1024
_OF_CLASSES = "wide_codes", "wide_among", "num_wide", "narrow", "narrow_from", "whole_step"


def unsupported(hidden: Array, head: Array | Fp8Head, num_top: int) -> str | None:
    """Why this back end cannot take these arguments here, or None."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if jax.default_backend() != "gpu" or capability != "9.0":
        return "needs an NVIDIA GPU of the Hopper kind"
    return unsupported_arguments(hidden, head, num_top)


def unsupported_arguments(hidden: Array, head: Array | Fp8Head, num_top: int) -> str | None:
    """Why no device can take these arguments, or None."""
    V, D = head.shape
    is_8_bit = isinstance(head, Fp8Head)
    fewest, step = (_WIDTH_8_BIT, _LINE) if is_8_bit else (min(_WIDTHS), STEP)
    if jax.__version_info__ < (0, 11, 2):
        return f"needs jax 0.11.2, got {jax.__version__}"
    if not len(hidden):
        return "needs at least one row"
    if is_8_bit:
        if hidden.dtype != jnp.bfloat16:  # two 8-bit numbers hold its mantissa
            return f"needs rows in bfloat16 for a head in 8 bits, got {hidden.dtype}"
    elif hidden.dtype not in (jnp.bfloat16, jnp.float16) or head.dtype != hidden.dtype:
        return (
            f"needs rows and head in bfloat16 or float16, both alike, got {hidden.dtype} and "
            f"{head.dtype}"
        )
    if D % step or V % ID_MULTIPLE or fewest > V:
        return (
            f"needs a width that is a multiple of {step} and ids that are one of {ID_MULTIPLE}, "
            f"{fewest} or more, got {D=}, {V=}"
        )
    return f"names at most {MAX_TOP} likeliest ids, got {num_top=}" if num_top > MAX_TOP else None


def unsupported_classes(num_rows: int, of_slot: int, num_ids: int) -> str | None:
    """Why no device can read `num_rows` rows by classes, `of_slot` of each slot, or None."""
    if num_ids % ID_STEP:
        return f"needs ids in a multiple of {ID_STEP}, got {num_ids}"
    if of_slot == num_rows or of_slot % ROWS == 0 or of_slot >= _LEAST_OF_SLOT:
        return None
    return f"needs {_LEAST_OF_SLOT} rows of a slot or more, got {of_slot}"


def unsupported_law(hidden: Array, head: Array | Fp8Head) -> str | None:
    """Why this back end cannot read laws of these arguments here, or None."""
    V = len(head)
    if V % SHARE:
        return f"needs ids in a multiple of {SHARE}, got {V}"
    if hidden.dtype != _WEIGHT:  # `exp(logit)` overflows float16
        return f"needs rows in bfloat16, got {hidden.dtype}"
    return unsupported(hidden, head, 0)


def choose_tiling(num_rows: int, num_ids: int, is_8_bit: bool = False) -> Tiling:
    """Tiles of one width, so that a row's statistics do not depend on the number of rows.

    us on an H200, SDAR-1.7B, 256 / 192 ids: 128 rows 170 / 165, 256 rows 246 / 257, 1,024 rows
    904 / 911 (benchmarks/results/readout_mosaic_h200.json).
    """
    consumers = 1 if num_rows <= ROWS else 2
    row_tiles = -(-num_rows // (consumers * ROWS))
    shared: Literal["head", "rows"] = "rows" if row_tiles % 2 else "head"
    ids = _WIDTH_8_BIT if is_8_bit else next(ids for ids in _WIDTHS if ids <= num_ids)
    lines = ids + consumers * ROWS * (2 if is_8_bit else 1)
    stages = _RING_BYTES // (lines * _LINE)
    return Tiling(ids=ids, consumers=consumers, stages=stages, shared=shared)


def read(
    hidden: Array,
    head: Array | Fp8Head,
    forbidden: Array,
    *,
    scale: float,
    cap: float | None,
    penalty: tuple[Array, Array] | None,
    num_top: int,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> TokenReadout:
    """See `api.token_readout`; `interpret`, an `InterpretGPUParams`, is for tests on a CPU."""
    rows, tiling = _prepared(hidden, head, tiling)
    run = functools.partial(_run, scale=scale, cap=cap, num_top=num_top, tiling=tiling)
    run = functools.partial(run, interpret=interpret)
    # NumPy arrays stay constants of the program; `jit` would turn them into arguments.
    given = forbidden.astype(np.int32), _has_forbidden(forbidden, tiling)
    # Mosaic kernels have no batching rule, so vmap runs them one after another.
    parts, found = jax.custom_batching.sequential_vmap(run)(rows, head, *given, penalty, None, None)
    return _finished(joined(parts), found, num_top, len(head))


def read_classes(
    hidden: Array,
    head: Array | Fp8Head,
    forbidden: Array,
    classes: IdClasses,
    *,
    scale: float,
    cap: float | None,
    penalty: tuple[Array, Array] | None,
    num_top: int,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> tuple[TokenReadout, IdReadout]:
    """See `api.class_readout`; `interpret` as in `read`."""
    B, how = len(classes.codes), {"scale": scale, "cap": cap, "num_top": num_top}
    T = len(hidden) // B
    spare = 0 if B == 1 else -T % ROWS

    def of_slots(leaf: Array, rows: int) -> Array:
        return leaf.reshape(B, rows, *leaf.shape[1:])

    def padded(leaf: Array) -> Array:  # a warpgroup has rows of one slot
        wide = jnp.pad(of_slots(leaf, T), ((0, 0), (0, spare), *[(0, 0)] * (leaf.ndim - 1)))
        return wide.reshape(B * (T + spare), *leaf.shape[1:])

    def cut(leaf: Array) -> Array:
        return of_slots(leaf, T + spare)[:, :T].reshape(B * T, *leaf.shape[1:])

    if spare:
        hidden, penalty = jax.tree.map(padded, (hidden, penalty))
        how |= {"penalty": penalty, "tiling": tiling, "interpret": interpret}
        return jax.tree.map(cut, read_classes(hidden, head, forbidden, classes, **how))
    rows, tiling = _prepared(hidden, head, tiling)
    given = forbidden.astype(np.int32), _has_forbidden(forbidden, tiling), penalty, None, classes
    parts, found = _run(rows, head, *given, **how, tiling=tiling, interpret=interpret)
    whole = joined(parts)
    wide, token = joined_maxima(found["wide"], found["wide_token"], axis=1)
    log_mass = whole.peak + jnp.log(whole.mass)
    ids = IdReadout(found["narrow_logit"], wide.T, token.T, log_mass)
    return _finished(whole, found, num_top, len(head)), ids


def _prepared(
    hidden: Array, head: Array | Fp8Head, tiling: Tiling | None
) -> tuple[Array | Fp8Rows, Tiling]:
    """The rows as the kernel multiplies them, and the tile."""
    is_8_bit = isinstance(head, Fp8Head)
    if tiling is None:
        tiling = choose_tiling(len(hidden), len(head), is_8_bit)
    return (_two_parts(hidden) if is_8_bit else hidden), tiling


def _two_parts(rows: Array) -> Fp8Rows:
    """16-bit rows as the sum of two 8-bit ones, [2 R D], that share a scale.

    bfloat16 has 8 bits of mantissa, and two e4m3 numbers have 4 each. The sum is exact, except that
    numbers below 2^-9 of the row's largest are off by at most 2^-17 of it.
    """
    values = rows.astype(jnp.float32)
    factors, scales = factors_of(jnp.max(jnp.abs(values), axis=1))
    values *= factors[:, None]
    # reduce_precision, because XLA would remove a cast to 8 bits and back.
    first = jax.lax.reduce_precision(values, 8, 3)
    return Fp8Rows(jnp.stack([first, values - first]).astype(FP8), scales)


def _finished(whole: Part, found: dict[str, Array], num_top: int, num_ids: int) -> TokenReadout:
    if not num_top:
        none = jnp.zeros((len(whole.peak), 0))
        return finish(whole, none.astype(jnp.float32), none.astype(jnp.int32))
    # Of equal logits `top_k` takes the first, and candidates are sorted by id.
    logits, place = jax.lax.top_k(found["top_logit"], num_top)
    ids = jnp.take_along_axis(found["top_id"], place, axis=1)
    return finish(whole, logits, jnp.minimum(ids, num_ids - 1))  # a row of NaN has no valid id


def read_law(
    hidden: Array | Fp8Rows,
    head: Array | Fp8Head,
    forbidden: Array,
    temperature: Array,
    *,
    scale: float,
    cap: float | None,
    dtype: Any,
    is_warm: bool = False,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> LawReadout:
    """See `api.law_readout`; the ids of a tile are a share.

    Weights are plain `exp(logit)` if no logit can overflow it: logits are capped and the
    temperature is not low. Otherwise the weights of a tile are relative to the tile's peak, and a
    second pass reads and writes all of them to make them relative to the row's peak.
    """
    R, V = len(temperature), len(head)
    if tiling is None:
        row_tiles = -(-R // (2 * ROWS))
        # Tiles of ids may not overlap: weights of shared ids would be written twice.
        is_row_shared = row_tiles % 2 and V // SHARE % 2 == 0
        tiling = Tiling(ids=SHARE, shared="rows" if is_row_shared else "head")
    how = {"scale": scale, "cap": cap, "is_warm": is_warm, "tiling": tiling}
    run = functools.partial(_run, **how, interpret=interpret)
    given = forbidden.astype(np.int32), _has_forbidden(forbidden, tiling)
    heat = 1.0 / temperature.astype(jnp.float32)
    given = *given, None, heat, None
    parts, found = jax.custom_batching.sequential_vmap(run)(hidden, head, *given)
    whole = joined(parts)
    known = parts.peak > -jnp.inf
    brought = jnp.where(known, jnp.exp(parts.peak - whole.peak[:, None]), 0.0)[:, : V // SHARE]
    is_plain = is_warm_row(temperature, cap)
    weights = found["weights"]
    if not is_warm:
        by = jnp.where(is_plain[:, None], 1.0, brought)
        weights = weights.reshape(R, -1, SHARE).astype(jnp.float32) * by[:, :, None]
    return LawReadout(
        token=whole.token,
        rest=jnp.where(whole.mass > 0, whole.mass - 1, jnp.nan),
        spread=whole.spread,
        weights=weights.reshape(R, V).astype(dtype),
        shares=parts.mass[:, : V // SHARE] * brought,
        unit=jnp.where(is_plain, jnp.exp(-whole.peak), 1.0),
    )


def is_warm_row(temperature: Array, cap: float | None) -> Array:
    """Whether the weights of each row are plain `exp(logit)`, see `read_law`."""
    return 1.0 / temperature.astype(jnp.float32) <= hottest(cap)


@lowered_once(static_argnames=("scale", "cap", "is_warm", "num_top", "tiling", "interpret"))
def _run(
    hidden,
    head,
    forbidden,
    has_forbidden,
    penalty,
    heat,
    classes,
    *,
    scale,
    cap,
    is_warm=False,
    num_top=0,
    tiling,
    interpret,
) -> tuple[Part, dict[str, Array]]:
    """One launch: the parts of all tiles, and further results by name.

    Further results: likeliest ids by tile, weights (with `heat`), logits of ids and of classes.
    """
    row_scales = id_scales = None
    if isinstance(head, Fp8Head):
        row_scales, id_scales = hidden.scales, head.scales
        hidden, head = hidden.values, head.values
    (R, D), V, ids = hidden.shape[-2:], len(head), tiling.ids
    num_parts = hidden.size // (R * D)
    of_rows, of_ids = (2 if tiling.shared == shared else 1 for shared in ("head", "rows"))
    row_tiles, id_tiles = -(-R // tiling.rows // of_rows) * of_rows, len(has_forbidden)
    tiling = dataclasses.replace(
        tiling, stages=min(tiling.stages, D * hidden.dtype.itemsize // _LINE)
    )

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
    shapes = _shapes(row_tiles * tiling.rows, id_tiles, num_top, heat is not None and V, classes)
    scratch = _scratch(tiling, hidden.dtype, num_parts, heat is not None)
    tiles = row_tiles * id_tiles // (of_rows * of_ids)  # of one cluster
    workers = min(tiles, tiling.blocks // (of_rows * of_ids))

    how = {"scale": scale, "cap": cap, "is_warm": is_warm, "num_top": num_top, "tiling": tiling}
    how |= {"num_tiles": tiles, "workers": workers, "row_groups": row_tiles // of_rows}

    def body(*refs):
        refs = iter(refs)
        kinds = ({name: next(refs) for name in names} for names in (named, shapes, scratch))
        run_block(*kinds, **how, of_slot=of_slot)

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
        shapes["weights"] = jax.ShapeDtypeStruct((rows, num_weights), _WEIGHT)
    if classes is not None:
        N, M = classes.narrow.shape[1], classes.wide.shape[1]
        shapes["narrow_logit"] = real((rows, N))
        shapes["wide"], shapes["wide_token"] = (kind((M, id_tiles, rows)) for kind in (real, whole))
    return shapes


def _scratch(tiling: Tiling, dtype: Any, num_parts: int, has_weights: bool) -> dict[str, Any]:
    """Shared memory and barriers of a thread block whose rows are `num_parts` rows each."""
    stages, consumers, deep = tiling.stages, tiling.consumers, _LINE // dtype.itemsize
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
        piece, swizzled = (consumers, 2, ROWS, STEP), hopper.swizzled(STEP, _WEIGHT)
        scratch["leaving"] = plgpu.SMEM(piece, _WEIGHT, transforms=swizzled)
    return scratch


def _has_forbidden(forbidden, tiling):
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
