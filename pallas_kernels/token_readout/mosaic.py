"""A Pallas Mosaic kernel for NVIDIA Hopper: the head's product, read out without its logits.

A tile is 64 or 128 rows times some ids. The grid is persistent, and blocks take tiles of the same
ids at the same time, so that the head is read from memory once. A block writes a `Part` for each
row and tile, which XLA joins, and the weights of a law.

The two blocks of a cluster load once what their tiles share: the head if the number of row tiles
is even, otherwise the rows.

`mosaic_launch.py` launches the kernel. In `mosaic_block.py` a thread block loads and multiplies;
`mosaic_logits.py` turns the products into logits and sums them up, `mosaic_ids.py` reads ids.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .. import hopper
from ..layer.fp8 import DTYPE as FP8
from ..layer.fp8 import Fp8Rows, factors_of
from .head import Fp8Head
from .mosaic_block import ID_MULTIPLE, Settings, Tiling
from .mosaic_launch import LINE, WEIGHT, has_forbidden, run
from .mosaic_logits import ROWS, STEP, hottest
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
_WIDTHS = (256, 192)  # ids of a tile
_WIDTH_8_BIT = 128  # of a head in 8 bits: two sums of each logit are in registers
_RING_BYTES = 208 * 1024


def unsupported(hidden: Array, head: Array | Fp8Head, num_top: int) -> str | None:
    """Why this back end cannot take these arguments here, or None."""
    return hopper.unsupported() or unsupported_arguments(hidden, head, num_top)


def unsupported_arguments(hidden: Array, head: Array | Fp8Head, num_top: int) -> str | None:
    """Why no device can take these arguments, or None."""
    V, D = head.shape
    is_8_bit = isinstance(head, Fp8Head)
    fewest, step = (_WIDTH_8_BIT, LINE) if is_8_bit else (min(_WIDTHS), STEP)
    if reason := hopper.unsupported_version():
        return reason
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
    if hidden.dtype != WEIGHT:  # `exp(logit)` overflows float16
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
    stages = _RING_BYTES // (lines * LINE)
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
    settings = Settings(scale=scale, cap=cap, num_top=num_top, tiling=tiling)
    launch = functools.partial(run, settings=settings, interpret=interpret)
    # NumPy arrays stay constants of the program; `jit` would turn them into arguments.
    given = forbidden.astype(np.int32), has_forbidden(forbidden, tiling)
    # Mosaic kernels have no batching rule, so vmap runs them one after another.
    given = *given, penalty, None, None
    parts, found = jax.custom_batching.sequential_vmap(launch)(rows, head, *given)
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
    B = len(classes.codes)
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
        how = {"scale": scale, "cap": cap, "penalty": penalty, "num_top": num_top}
        how |= {"tiling": tiling, "interpret": interpret}
        return jax.tree.map(cut, read_classes(hidden, head, forbidden, classes, **how))
    rows, tiling = _prepared(hidden, head, tiling)
    given = forbidden.astype(np.int32), has_forbidden(forbidden, tiling), penalty, None, classes
    settings = Settings(scale=scale, cap=cap, num_top=num_top, tiling=tiling)
    parts, found = run(rows, head, *given, settings=settings, interpret=interpret)
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
    settings = Settings(scale=scale, cap=cap, is_warm=is_warm, tiling=tiling)
    launch = functools.partial(run, settings=settings, interpret=interpret)
    given = forbidden.astype(np.int32), has_forbidden(forbidden, tiling)
    heat = 1.0 / temperature.astype(jnp.float32)
    given = *given, None, heat, None
    parts, found = jax.custom_batching.sequential_vmap(launch)(hidden, head, *given)
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
