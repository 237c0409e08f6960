"""A Pallas Mosaic kernel for NVIDIA Hopper: the head's product, read out without its logits.

A tile is 64 or 128 rows times some ids. The grid is persistent, and blocks take tiles of the same
ids at the same time, so that the head is read from memory once. A block has a warpgroup that loads,
by TMA through a ring of buffers ahead of the current tile, and one or two that compute 64 rows
each. It writes a `Part` for each row and tile, which XLA joins, and the weights of a law.

A head in 8 bits is multiplied as it is: a 16-bit row is the sum of two 8-bit ones, as a query is in
`paged_attention.mosaic_8_bits`. The tensor cores keep some 14 bits of such sums, so each step of
the depth starts a new one, which float32 adds up.

The two blocks of a cluster load once what their tiles share: the head if the number of row tiles
is even, otherwise the rows.
"""

import dataclasses
import functools
import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .. import hopper
from ..layer.fp8 import DTYPE as FP8
from ..layer.fp8 import Fp8Rows, factors_of
from ..lowered import lowered_once
from .head import Fp8Head
from .result import (
    CODE_STEP,
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

_ROWS = 64  # of a warpgroup
_LEAST_OF_SLOT = 16  # fewer rows of a slot are not worth a warpgroup; not measured
MAX_TOP = 8
_LINE = 128  # bytes of a swizzled line
_STEP = 64  # 16-bit components of a line
_ID_MULTIPLE = 8  # ids of a swizzled tile
_WEIGHT = jnp.bfloat16
_CHUNK = 16  # ids that a warpgroup reads at a time: 8 logits a thread
_MULTIPROCESSORS = 132
_WIDTHS = (256, 192)  # ids of a tile
_WIDTH_8_BIT = 128  # of a head in 8 bits: two sums of each logit are in registers
_RING_BYTES = 208 * 1024
_NEVER = -1e38  # logit of excluded ids; finite, so that differences are finite
_LEAST = -3e38  # below `_NEVER`
_NO_ID = 1 << 24
_LOG2_E = 1.4426950408889634
_LARGEST = 75.1  # with logits up to this, float32 holds the sum of exp(logit) times embeddings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """The tile of one thread block.

    Attributes:
        ids: Ids of the vocabulary.
        consumers: Warpgroups that compute, of 64 rows each.
        stages: Steps of the depth in flight.
        shared: The operand that the two blocks of a cluster share; None: no clusters.
        blocks: Most thread blocks.
    """

    ids: int = 256
    consumers: int = 2
    stages: int = 4
    shared: Literal["head", "rows"] | None = "head"
    blocks: int = _MULTIPROCESSORS

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.consumers * _ROWS


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
    fewest, step = (_WIDTH_8_BIT, _LINE) if is_8_bit else (min(_WIDTHS), _STEP)
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
    if D % step or V % _ID_MULTIPLE or fewest > V:
        return (
            f"needs a width that is a multiple of {step} and ids that are one of {_ID_MULTIPLE}, "
            f"{fewest} or more, got {D=}, {V=}"
        )
    return f"names at most {MAX_TOP} likeliest ids, got {num_top=}" if num_top > MAX_TOP else None


def unsupported_classes(num_rows: int, of_slot: int, num_ids: int) -> str | None:
    """Why no device can read `num_rows` rows by classes, `of_slot` of each slot, or None."""
    if num_ids % ID_STEP:
        return f"needs ids in a multiple of {ID_STEP}, got {num_ids}"
    if of_slot == num_rows or of_slot % _ROWS == 0 or of_slot >= _LEAST_OF_SLOT:
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
    consumers = 1 if num_rows <= _ROWS else 2
    row_tiles = -(-num_rows // (consumers * _ROWS))
    shared: Literal["head", "rows"] = "rows" if row_tiles % 2 else "head"
    ids = _WIDTH_8_BIT if is_8_bit else next(ids for ids in _WIDTHS if ids <= num_ids)
    lines = ids + consumers * _ROWS * (2 if is_8_bit else 1)
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
    spare = 0 if B == 1 else -T % _ROWS

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
        row_tiles = -(-R // (2 * _ROWS))
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
    return 1.0 / temperature.astype(jnp.float32) <= _hottest(cap)


def _hottest(cap: float | None) -> float:
    """The largest factor (1 / temperature) that keeps capped logits below `_LARGEST`."""
    return 0.0 if cap is None else _LARGEST / cap


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

    The further results are the likeliest ids by tile, weights (with `heat`), and logits of ids and
    of classes (with classes).
    """
    row_scales = id_scales = None
    if isinstance(head, Fp8Head):
        (hidden, row_scales), (head, id_scales) = (
            (given.values, given.scales) for given in (hidden, head)
        )
    (R, D), V, ids = hidden.shape[-2:], len(head), tiling.ids
    num_parts = hidden.size // (R * D)
    deep = _LINE // hidden.dtype.itemsize
    of_rows, of_ids = (2 if tiling.shared == shared else 1 for shared in ("head", "rows"))
    row_tiles = -(-R // tiling.rows // of_rows) * of_rows
    id_tiles = len(has_forbidden)
    tiling = dataclasses.replace(tiling, stages=min(tiling.stages, D // deep))

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
    num_rows = row_tiles * tiling.rows
    shapes = {
        name: jax.ShapeDtypeStruct(
            (num_rows, id_tiles), jnp.int32 if name == "token" else jnp.float32
        )
        for name in Part._fields
    }
    if num_top:
        shapes["top_logit"] = jax.ShapeDtypeStruct((num_rows, id_tiles * num_top), jnp.float32)
        shapes["top_id"] = jax.ShapeDtypeStruct((num_rows, id_tiles * num_top), jnp.int32)
    if heat is not None:
        shapes["weights"] = jax.ShapeDtypeStruct((num_rows, V), _WEIGHT)
    of_slot = R
    if classes is not None:
        names = "wide_codes", "wide_among", "num_wide", "narrow", "narrow_from", "whole_step"
        named |= {name: getattr(classes, name).astype(jnp.int32) for name in names}
        of_slot = R // len(classes.codes)
        N, M = classes.narrow.shape[1], classes.wide.shape[1]
        shapes["narrow_logit"] = jax.ShapeDtypeStruct((num_rows, N), jnp.float32)
        shapes["wide"] = jax.ShapeDtypeStruct((M, id_tiles, num_rows), jnp.float32)
        shapes["wide_token"] = jax.ShapeDtypeStruct((M, id_tiles, num_rows), jnp.int32)
    swizzled, stages = hopper.swizzled(deep, hidden.dtype), tiling.stages
    consumers = tiling.consumers
    used = {"num_barriers": stages, "num_arrivals": consumers}
    of_step = stages, num_parts, consumers, _ROWS, deep
    scratch = {
        "rows": plgpu.SMEM(of_step, hidden.dtype, transforms=swizzled),
        "words": plgpu.SMEM((stages, ids, deep), hidden.dtype, transforms=swizzled),
        "loaded": plgpu.Barrier(num_barriers=stages, num_arrivals=num_parts * consumers + 1),
        "used": plgpu.Barrier(**used)
        if tiling.shared is None
        else plgpu.ClusterBarrier(collective_axes=("peer",), **used),
    }
    if heat is not None:  # staging of weights, two pieces a warpgroup
        piece, swizzled = (consumers, 2, _ROWS, _STEP), hopper.swizzled(_STEP, _WEIGHT)
        scratch["leaving"] = plgpu.SMEM(piece, _WEIGHT, transforms=swizzled)
    tiles = row_tiles * id_tiles // (of_rows * of_ids)  # of one cluster
    workers = min(tiles, tiling.blocks // (of_rows * of_ids))
    cluster = {"peer": 2} if tiling.shared else {}

    def body(*refs):
        ends = len(named), len(named) + len(shapes)
        _block(
            dict(zip(named, refs[: ends[0]], strict=True)),
            dict(zip(shapes, refs[ends[0] : ends[1]], strict=True)),
            dict(zip(scratch, refs[ends[1] :], strict=True)),
            scale=scale,
            cap=cap,
            is_warm=is_warm,
            num_top=num_top,
            tiling=tiling,
            tiles=(tiles, workers, row_tiles // of_rows),
            of_slot=of_slot,
        )

    out = hopper.kernel(
        body,
        out_type=list(shapes.values()),
        grid=(workers,),
        grid_names=("worker",),
        cluster=tuple(cluster.values()),
        cluster_names=tuple(cluster),
        kernel_name="token_readout",  # `dllm_jax.bench.head` searches for this name
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*named.values())
    found = dict(zip(shapes, out, strict=True))
    parts = Part(**{name: found.pop(name)[:R] for name in Part._fields})
    by_tile = "wide", "wide_token"
    return parts, {n: leaf[:, :, :R] if n in by_tile else leaf[:R] for n, leaf in found.items()}


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
    is_hit = jnp.any(hit.reshape(-1, _ROWS, len(has_forbidden)), axis=1)
    return jnp.maximum(special, is_hit.astype(jnp.int32))


def _logit(product: Array, scale: Array | float, cap: float | None) -> Array:
    logit = product if isinstance(scale, float) and scale == 1.0 else product * scale
    if cap is None:
        return logit
    # Not `tanh`: the hardware's has 11 bits.
    return cap - (2 * cap) / (jnp.exp(logit * (2 / cap)) + 1.0)


def _power(product: Array, scale: Array | float, heat: Array, cap: float | None) -> Array:
    """Logits times the heat of their rows, as exponents of 2."""
    shape, heat = product.shape, heat * _LOG2_E
    if cap is None:
        return product * scale * _down(heat, shape)
    most, twice = (_down(heat * (n * cap), shape) for n in (1, 2))
    return most - twice / (jnp.exp2(product * (scale * (2 * _LOG2_E / cap))) + 1.0)


def _block(given, out, scratch, *, scale, cap, is_warm, num_top, tiling, tiles, of_slot):
    """One thread block: its tiles one after another."""
    num_tiles, workers, row_groups = tiles
    warpgroup = jax.lax.axis_index("warpgroup")
    worker = jax.lax.axis_index("worker")
    peer = jax.lax.axis_index("peer") if tiling.shared else 0
    (V, D), num_parts, consumers = given["head"].shape, len(given["hidden"]), tiling.consumers
    ids, stages, depth = tiling.ids, tiling.stages, scratch["words"].shape[-1]
    steps = D // depth
    mine = jax.lax.div(num_tiles - worker + (workers - 1), _whole(workers))

    def place_of(i):
        """Row tile, id tile and first id of this block's i-th tile."""
        tile = worker + i * workers
        row_tile = jax.lax.rem(tile, _whole(row_groups))
        id_tile = jax.lax.div(tile, _whole(row_groups))
        if tiling.shared == "head":
            row_tile = 2 * row_tile + peer
        if tiling.shared == "rows":
            id_tile = 2 * id_tile + peer
        # The last tile is moved left to end at V; ids of two tiles belong to the earlier one.
        start = pl.multiple_of(jnp.minimum(id_tile * ids, V - ids), _ID_MULTIPLE)
        return row_tile, id_tile, start

    def slot_of(n):
        return jax.lax.rem(n, _whole(stages))

    def load_tile(i, _):
        row_tile, _, start = place_of(i)

        def load(step, _):
            n = i * steps + step
            slot = slot_of(n)

            @pl.when(n >= stages)
            def _():
                plgpu.barrier_wait(scratch["used"].at[slot])

            loaded = scratch["loaded"].at[slot]
            deep = pl.ds(pl.multiple_of(step * depth, depth), depth)
            plgpu.copy_gmem_to_smem(
                given["head"].at[pl.ds(start, ids), deep],
                scratch["words"].at[slot],
                loaded,
                collective_axes="peer" if tiling.shared == "head" else None,
            )
            for part, group in itertools.product(range(num_parts), range(consumers)):
                row = pl.multiple_of(row_tile * tiling.rows + group * _ROWS, _ROWS)
                plgpu.copy_gmem_to_smem(
                    given["hidden"].at[part, pl.ds(row, _ROWS), deep],
                    scratch["rows"].at[slot, part, group],
                    loaded,
                    collective_axes="peer" if tiling.shared == "rows" else None,
                )

        jax.lax.fori_loop(0, steps, load, None)

    @pl.when(warpgroup == consumers)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        jax.lax.fori_loop(0, mine, load_tile, None)
        # Wait until the last buffers are used: a block may not end while its peer writes to it.
        for last in range(stages):
            plgpu.barrier_wait(scratch["used"].at[slot_of(mine * steps + last)])

    def compute_tile(i, _):
        row_tile, id_tile, start = place_of(i)
        rows = row_tile * consumers + warpgroup
        row = pl.multiple_of(rows * _ROWS, _ROWS)
        slot = codes = None
        if "wide_codes" in given:  # loaded during the products
            slot = jax.lax.div(row, _whole(of_slot))
            slot = jnp.minimum(slot, len(given["num_wide"]) - 1)  # padding rows have no slot
            codes = _codes(given, slot, start, ids)
        scales = None
        if "id_scales" in given:
            by_id = plgpu.Layout.WGMMA.reduce(0)
            scales = _loaded(given["id_scales"].at[pl.ds(start, ids)], by_id)
        special = given["special"][rows if "penalties" in given else 0, id_tile]

        def add_product(sums, slot):
            plgpu.barrier_wait(scratch["loaded"].at[slot])
            for part in range(num_parts):
                own = scratch["rows"].at[slot, part, warpgroup]
                plgpu.wgmma(sums, own, scratch["words"].at[slot].T)

        def products(sums):
            def multiply(step, _):
                n = i * steps + step
                add_product(sums, slot_of(n))
                plgpu.wgmma_wait(1)  # the products of the step before are done

                @pl.when(step > 0)
                def _():
                    plgpu.barrier_arrive(scratch["used"].at[slot_of(n - 1)])

            jax.lax.fori_loop(0, steps, multiply, None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["used"].at[slot_of(i * steps + (steps - 1))])
            return sums[...]

        def added_up(step, total):
            slot = slot_of(i * steps + step)

            def product(sums):
                add_product(sums, slot)
                return sums[...]

            total += pl.run_scoped(product, accumulator)
            plgpu.barrier_arrive(scratch["used"].at[slot])
            return total

        accumulator = plgpu.WGMMAAccumulatorRef((_ROWS, ids), jnp.float32)
        if num_parts == 1:
            sums = pl.run_scoped(products, accumulator)
        else:
            none = plgpu.layout_cast(jnp.zeros((_ROWS, ids), jnp.float32), plgpu.Layout.WGMMA)
            sums = jax.lax.fori_loop(0, steps, added_up, none)
        place = special, row, start, id_tile * ids
        by_row, by = plgpu.Layout.WGMMA.reduce(1), scale
        if scales is not None:
            sums *= jax.lax.broadcast_in_dim(scales, sums.shape, [1])
            of_row = _loaded(given["row_scales"].at[pl.ds(row, _ROWS)], by_row)
            by = _down(of_row * scale, sums.shape)
        if "heat" in given:
            heat = _loaded(given["heat"].at[pl.ds(row, _ROWS)], by_row)
            logit = _restricted(_power(sums, by, heat, cap), *place, given)
            is_plain = True if is_warm else heat <= _hottest(cap)
            weights = out["weights"].at[pl.ds(row, _ROWS)]
            part = _law_part(logit, start, is_plain, weights, scratch["leaving"].at[warpgroup])
        else:
            logit = _restricted(_logit(sums, by, cap), *place, given)
            part = _part(logit, start)
        for name, values in part._asdict().items():
            out[name][pl.ds(row, _ROWS), id_tile] = values
        if codes is not None:
            _put_wide(logit, codes, row, start, id_tile, given["num_wide"][slot], out)
            _put_narrow(logit, row, start, id_tile * ids, slot, given, out["narrow_logit"])
        if num_top:
            _put_top(logit, row, start, id_tile, id_tile * ids, num_top, out)

    @pl.when(warpgroup < consumers)
    def _():
        plgpu.set_max_registers(232, action="increase")
        jax.lax.fori_loop(0, mine, compute_tile, None)
        if "leaving" in scratch:  # writes end with the launch
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _restricted(logit, special, row, start, first, given) -> Array:
    """Restrict the logits of a tile whose ids begin at `start`; ids below `first` are excluded."""
    layout = plgpu.Layout.WGMMA
    by_row, by_id = layout.reduce(1), layout.reduce(0)
    shape = logit.shape

    def restricted(logit):
        token = start + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        forbidden = _loaded(given["forbidden"].at[pl.ds(start, shape[1])], by_id)
        forbidden = jax.lax.broadcast_in_dim(forbidden, shape, [1])
        logit = jnp.where((forbidden != 0) | (token < first), _NEVER, logit)
        if "penalties" in given:
            which, loss = (
                _loaded(given[name].at[pl.ds(row, _ROWS)], by_row)
                for name in ("penalty_ids", "penalties")
            )
            logit -= jnp.where(token == _down(which, shape), _down(loss, shape), 0.0)
        return jnp.maximum(logit, _NEVER)  # a penalty may be infinite

    return jax.lax.cond(special != 0, restricted, lambda logit: logit, logit)


def _down(values, shape):
    return jax.lax.broadcast_in_dim(values, shape, [0])


def _part(logit, start) -> Part:
    """The readout of a warpgroup's tile, whose ids begin at `start`."""
    shape, peak = (_ROWS, _CHUNK), logit.max(axis=1)
    token, mass, spread = _none(logit.shape[1])
    for at in reversed(range(0, logit.shape[1], _CHUNK)):  # the lowest id comes last and wins
        part = logit[:, at : at + _CHUNK]
        token = jnp.where(part == _down(peak, shape), at, token)
        below = (part - _down(peak, shape)) * _LOG2_E
        weight = jnp.exp2(below)
        mass += weight
        spread += weight * below
    return _summed(peak, token, start, mass, spread)


def _put_top(logit, row, start, id_tile, first, num_top, out):
    """Write the likeliest ids of a warpgroup's tile, from id `first` on, the likeliest first."""
    column = plgpu.broadcasted_iota(jnp.int32, logit.shape, 1, layout=plgpu.Layout.WGMMA)
    logit = jnp.where(column + start < first, _LEAST, logit)
    rows = pl.ds(row, _ROWS)
    for i in range(num_top):
        best = logit.max(axis=1)
        token = jnp.where(logit == _down(best, logit.shape), column, _NO_ID).min(axis=1)
        out["top_logit"][rows, id_tile * num_top + i] = _allowed(best)
        out["top_id"][rows, id_tile * num_top + i] = token + start
        logit = jnp.where(column == _down(token, logit.shape), _LEAST, logit)


def _law_part(power, start, is_plain, weights, leaving) -> Part:
    """`_part` of a law, whose logits are exponents of 2; also writes its weights.

    Args:
        is_plain: Rows whose weights are not relative to the tile's peak.
        weights: Target of the weights of the warpgroup's rows.
        leaving: Staging memory for the weights.
    """
    shape, peak = (_ROWS, _CHUNK), power.max(axis=1)
    lowered = None if is_plain is True else jnp.where(is_plain, 0.0, peak)
    token, mass, spread = _none(power.shape[1])
    for i, begin in enumerate(reversed(range(0, power.shape[1], _STEP))):
        wide = power[:, begin : begin + _STEP]
        weight = jnp.exp2(wide if lowered is None else wide - _down(lowered, wide.shape))
        for at in reversed(range(0, _STEP, _CHUNK)):  # the lowest id comes last and wins
            part, own = wide[:, at : at + _CHUNK], weight[:, at : at + _CHUNK]
            token = jnp.where(part == _down(peak, shape), begin + at, token)
            mass += own
            spread += own * (part - _down(peak, shape))
        piece = leaving.at[i % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the previous contents have been copied
        piece[...] = weight.astype(piece.dtype)
        plgpu.commit_smem()
        place = pl.ds(pl.multiple_of(start + begin, _STEP), _STEP)
        plgpu.copy_smem_to_gmem(piece, weights.at[:, place])
    # The weight of the peak, bit for bit, so that the mass of a certain law is exactly 1.
    unit = jnp.exp2(peak if lowered is None else peak - lowered)
    return _summed(peak, token, start, mass, spread, unit)


def _none(ids):
    """Initial token, mass and spread of a warpgroup."""
    layout, shape = plgpu.Layout.WGMMA, (_ROWS, _CHUNK)
    none = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    return plgpu.layout_cast(jnp.full(shape, ids, jnp.int32), layout), none, none


def _summed(peak, token, start, mass, spread, unit: Any = None) -> Part:
    """Reduce over the columns of a thread and over threads to one `Part` a row.

    Args:
        unit: For a law, whose peak is an exponent of 2, the unit of its sums.
    """
    layout = plgpu.Layout.WGMMA
    token += plgpu.broadcasted_iota(jnp.int32, token.shape, 1, layout=layout)
    mass, spread = mass.sum(axis=1), spread.sum(axis=1) * (1 / _LOG2_E)
    some = peak != _NEVER
    if unit is not None:
        peak, mass, spread = peak * (1 / _LOG2_E), mass / unit, spread / unit
    return Part(
        token=token.min(axis=1) + start,
        peak=jnp.where(some, peak, -jnp.inf),
        mass=jnp.where(some, mass, 0.0),
        spread=jnp.where(some, spread, 0.0),
    )


def _codes(given, slot, start, ids):
    """Wide classes of a tile's ids, 32 ids at a time; see `packed_codes`."""
    by_id, many = plgpu.Layout.WGMMA.reduce(0), 4 * CODE_STEP
    first = jax.lax.div(start, _whole(many))

    def words(place):
        place = pl.multiple_of(place * CODE_STEP, CODE_STEP)
        return _loaded(given["wide_codes"].at[slot, pl.ds(place, CODE_STEP)], by_id)

    places = [first + i for i in range(ids // many)]
    return [(words(place), given["wide_among"][slot, place]) for place in places]


def _put_wide(logit, codes, row, start, id_tile, num_wide, out):
    """Write the largest logit of each wide class of the slot in a warpgroup's tile."""
    layout = plgpu.Layout.WGMMA
    shape = _ROWS, CODE_STEP
    rows = pl.ds(row, _ROWS)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)

    def full(value):
        return plgpu.layout_cast(jnp.full(shape, value), layout)

    def one_class(i, _):
        found, mark = (full(jnp.float32(_LEAST)), full(jnp.int32(_NO_ID))), (i + 1) * 0x01010101
        for place, (words, among) in enumerate(codes):

            def of_words(found, place=place, words=words):
                (best, where), differs = found, words ^ mark
                for byte in range(4):
                    first = (4 * place + byte) * CODE_STEP
                    part = logit[:, first : first + CODE_STEP]
                    differ = differs & np.uint32(0xFF << 8 * byte).astype(np.int32)
                    mine = jax.lax.broadcast_in_dim(differ, shape, [1]) == 0
                    better = mine & (part > best)  # ties keep the first
                    best, where = jnp.where(better, part, best), jnp.where(better, first, where)
                return best, where

            some = (jax.lax.shift_right_logical(among, i) & 1) != 0
            found = jax.lax.cond(some, of_words, lambda found: found, found)
        best, where = found
        top = best.max(axis=1)
        token = jnp.where(best == _down(top, shape), where + column, _NO_ID)
        out["wide"][i, id_tile, rows] = _allowed(top)
        out["wide_token"][i, id_tile, rows] = token.min(axis=1) + start

    jax.lax.fori_loop(0, num_wide, one_class, None)


def _put_narrow(logit, row, start, first, slot, given, out):
    """Write the logits of the slot's narrow ids in a warpgroup's tile, from id `first` on."""
    rows, shape = pl.ds(row, _ROWS), (_ROWS, _CHUNK)
    layout = plgpu.Layout.WGMMA
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)

    for begin in range(0, logit.shape[1], ID_STEP):
        part = logit[:, begin : begin + ID_STEP]
        step = jax.lax.div(start + begin, _whole(ID_STEP))
        whole = given["whole_step"][slot, step]
        is_mine = start + begin >= first

        @pl.when(is_mine & (whole > 0))
        def _(part=part, whole=whole):
            place = pl.multiple_of((whole - 1) * ID_STEP, ID_STEP)
            out[rows, pl.ds(place, ID_STEP)] = _allowed(part)

        def one_id(i, _, part=part, begin=begin):
            mine = given["narrow"][slot, i] - (start + begin)
            best = plgpu.layout_cast(jnp.full(shape, jnp.float32(_LEAST)), layout)
            for chunk in range(0, ID_STEP, _CHUNK):
                best = jnp.where(column == mine - chunk, part[:, chunk : chunk + _CHUNK], best)
            out[rows, i] = _allowed(best.max(axis=1))

        begins, ends = (given["narrow_from"][slot, step + i] for i in (0, 1))
        jax.lax.fori_loop(begins, jnp.where(is_mine, ends, begins), one_id, None)


def _allowed(value):
    return jnp.where(value <= _NEVER, -jnp.inf, value)


def _whole(number: int) -> Array:
    return jnp.asarray(number, jnp.int32)


def _loaded(part, layout):
    """Load from global memory, thread by thread if the layout requires it."""
    # jax 0.10 requires an index here.
    return plgpu.load(part, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]
