"""A thread block of the readout's Mosaic kernel; `mosaic.py` launches it.

One warpgroup loads, by TMA through a ring of buffers ahead of the current tile; one or two compute
64 rows each.

A head in 8 bits is multiplied as it is: a 16-bit row is the sum of two 8-bit ones, as a query is in
`paged_attention.mosaic_8_bits`. The tensor cores keep some 14 bits of such sums, so each step of
the depth starts a new one, which float32 adds up.
"""

import dataclasses
import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ..hopper import MULTIPROCESSORS
from .result import CODE_STEP, ID_STEP, Part

ROWS = 64  # of a warpgroup
STEP = 64  # 16-bit components of a line
ID_MULTIPLE = 8  # ids of a swizzled tile
_CHUNK = 16  # ids that a warpgroup reads at a time: 8 logits a thread
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
    blocks: int = MULTIPROCESSORS

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.consumers * ROWS


def run_block(given, out, scratch, *, tiling: Tiling, num_tiles: int, **settings: Any) -> None:
    """One thread block: its tiles one after another.

    Args:
        given, out, scratch: References by name: operands; results; shared memory and barriers.
        num_tiles: Tiles of all blocks, or of all clusters.
        settings: As in `_Block`.
    """
    warpgroup = jax.lax.axis_index("warpgroup")
    worker = jax.lax.axis_index("worker")
    peer = jax.lax.axis_index("peer") if tiling.shared else 0
    workers = settings["workers"]
    count = jax.lax.div(num_tiles - worker + (workers - 1), _whole(workers))
    where = {"warpgroup": warpgroup, "worker": worker, "peer": peer, "count": count}
    refs = {"given": given, "out": out, "scratch": scratch}
    block = _Block(**refs, **where, tiling=tiling, **settings)
    pl.when(warpgroup == tiling.consumers)(block.load)
    pl.when(warpgroup < tiling.consumers)(block.compute)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Block:
    """A thread block, as one of its warpgroups sees it."""

    given: dict[str, Any]
    out: dict[str, Any]
    scratch: dict[str, Any]
    tiling: Tiling
    scale: float
    cap: float | None
    is_warm: bool  # see `mosaic.read_law`
    num_top: int
    workers: int  # blocks, or clusters
    row_groups: int  # row tiles, or pairs of them if the blocks of a cluster share the head
    of_slot: int  # rows of a slot
    warpgroup: Array
    worker: Array
    peer: Any  # index in the cluster
    count: Array  # number of its tiles

    @property
    def steps(self) -> int:
        """Steps of the depth."""
        return self.given["head"].shape[1] // self.scratch["words"].shape[-1]

    def place_of(self, i) -> tuple[Array, Array, Array]:
        """Row tile, id tile and first id of the block's i-th tile."""
        tile, ids = self.worker + i * self.workers, self.tiling.ids
        row_tile = jax.lax.rem(tile, _whole(self.row_groups))
        id_tile = jax.lax.div(tile, _whole(self.row_groups))
        if self.tiling.shared == "head":
            row_tile = 2 * row_tile + self.peer
        if self.tiling.shared == "rows":
            id_tile = 2 * id_tile + self.peer
        # The last tile is moved left to end at V; ids of two tiles belong to the earlier one.
        start = jnp.minimum(id_tile * ids, self.given["head"].shape[0] - ids)
        return row_tile, id_tile, pl.multiple_of(start, ID_MULTIPLE)

    def slot_of(self, n) -> Array:
        """The buffer of the ring for step n of all tiles."""
        return jax.lax.rem(n, _whole(self.tiling.stages))

    def load(self) -> None:
        """Load all tiles, as the loading warpgroup."""
        plgpu.set_max_registers(40, action="decrease")
        jax.lax.fori_loop(0, self.count, self._load_tile, None)
        # Wait until the last buffers are used: a block may not end while its peer writes to it.
        for last in range(self.tiling.stages):
            slot = self.slot_of(self.count * self.steps + last)
            plgpu.barrier_wait(self.scratch["used"].at[slot])

    def _load_tile(self, i, _):
        given, scratch, tiling = self.given, self.scratch, self.tiling
        (row_tile, _, start), depth = self.place_of(i), scratch["words"].shape[-1]

        def load(step, _):
            n = i * self.steps + step
            slot = self.slot_of(n)

            @pl.when(n >= tiling.stages)
            def _():
                plgpu.barrier_wait(scratch["used"].at[slot])

            loaded = scratch["loaded"].at[slot]
            deep = pl.ds(pl.multiple_of(step * depth, depth), depth)
            plgpu.copy_gmem_to_smem(
                given["head"].at[pl.ds(start, tiling.ids), deep],
                scratch["words"].at[slot],
                loaded,
                collective_axes="peer" if tiling.shared == "head" else None,
            )
            parts = range(len(given["hidden"]))
            for part, group in itertools.product(parts, range(tiling.consumers)):
                row = pl.multiple_of(row_tile * tiling.rows + group * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(
                    given["hidden"].at[part, pl.ds(row, ROWS), deep],
                    scratch["rows"].at[slot, part, group],
                    loaded,
                    collective_axes="peer" if tiling.shared == "rows" else None,
                )

        jax.lax.fori_loop(0, self.steps, load, None)

    def compute(self) -> None:
        """Read out this warpgroup's rows of all tiles."""
        plgpu.set_max_registers(232, action="increase")
        jax.lax.fori_loop(0, self.count, self._compute_tile, None)
        if "leaving" in self.scratch:  # writes end with the launch
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _compute_tile(self, i, _):
        given, out, ids = self.given, self.out, self.tiling.ids
        row_tile, id_tile, start = self.place_of(i)
        rows = row_tile * self.tiling.consumers + self.warpgroup
        row = pl.multiple_of(rows * ROWS, ROWS)
        slot = codes = scales = None
        if "wide_codes" in given:  # loaded during the products
            slot = jax.lax.div(row, _whole(self.of_slot))
            slot = jnp.minimum(slot, len(given["num_wide"]) - 1)  # padding rows have no slot
            codes = _codes(given, slot, start, ids)
        if "id_scales" in given:
            by_id = plgpu.Layout.WGMMA.reduce(0)
            scales = _loaded(given["id_scales"].at[pl.ds(start, ids)], by_id)
        special = given["special"][rows if "penalties" in given else 0, id_tile]
        sums, by = self._sums(i), self.scale
        place = special, row, start, id_tile * ids
        if scales is not None:
            sums *= jax.lax.broadcast_in_dim(scales, sums.shape, [1])
            of_rows = given["row_scales"].at[pl.ds(row, ROWS)]
            of_row = _loaded(of_rows, plgpu.Layout.WGMMA.reduce(1))
            by = _down(of_row * self.scale, sums.shape)
        if "heat" in given:
            logit, part = self._law(sums, by, place)
        else:
            logit = _restricted(_logit(sums, by, self.cap), *place, given)
            part = _part(logit, start)
        for name, values in part._asdict().items():
            out[name][pl.ds(row, ROWS), id_tile] = values
        if codes is not None:
            _put_wide(logit, codes, row, start, id_tile, given["num_wide"][slot], out)
            _put_narrow(logit, row, start, id_tile * ids, slot, given, out["narrow_logit"])
        if self.num_top:
            _put_top(logit, row, start, id_tile, id_tile * ids, self.num_top, out)

    def _sums(self, i) -> Array:
        """The products of the i-th tile; those of two 8-bit parts are added up step by step."""
        shape, used = (ROWS, self.tiling.ids), self.scratch["used"]
        accumulator = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)

        def products(sums):
            def multiply(step, _):
                n = i * self.steps + step
                self._add_product(sums, self.slot_of(n))
                plgpu.wgmma_wait(1)  # the products of the step before are done

                @pl.when(step > 0)
                def _():
                    plgpu.barrier_arrive(used.at[self.slot_of(n - 1)])

            jax.lax.fori_loop(0, self.steps, multiply, None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(used.at[self.slot_of(i * self.steps + (self.steps - 1))])
            return sums[...]

        def added_up(step, total):
            slot = self.slot_of(i * self.steps + step)

            def product(sums):
                self._add_product(sums, slot)
                return sums[...]

            total += pl.run_scoped(product, accumulator)
            plgpu.barrier_arrive(used.at[slot])
            return total

        if len(self.given["hidden"]) == 1:
            return pl.run_scoped(products, accumulator)
        none = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        return jax.lax.fori_loop(0, self.steps, added_up, none)

    def _add_product(self, sums, slot) -> None:
        plgpu.barrier_wait(self.scratch["loaded"].at[slot])
        for part in range(len(self.given["hidden"])):
            own = self.scratch["rows"].at[slot, part, self.warpgroup]
            plgpu.wgmma(sums, own, self.scratch["words"].at[slot].T)

    def _law(self, sums, by, place: tuple[Any, Any, Any, Any]) -> tuple[Array, Part]:
        """Logits of a law as exponents of 2, and their readout; stores their weights."""
        rows = pl.ds(place[1], ROWS)
        heat = _loaded(self.given["heat"].at[rows], plgpu.Layout.WGMMA.reduce(1))
        logit = _restricted(_power(sums, by, heat, self.cap), *place, self.given)
        is_plain = True if self.is_warm else heat <= hottest(self.cap)
        weights, leaving = self.out["weights"].at[rows], self.scratch["leaving"]
        return logit, _law_part(logit, place[2], is_plain, weights, leaving.at[self.warpgroup])


def hottest(cap: float | None) -> float:
    """The largest factor (1 / temperature) that keeps capped logits below `_LARGEST`."""
    return 0.0 if cap is None else _LARGEST / cap


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
                _loaded(given[name].at[pl.ds(row, ROWS)], by_row)
                for name in ("penalty_ids", "penalties")
            )
            logit -= jnp.where(token == _down(which, shape), _down(loss, shape), 0.0)
        return jnp.maximum(logit, _NEVER)  # a penalty may be infinite

    return jax.lax.cond(special != 0, restricted, lambda logit: logit, logit)


def _down(values, shape):
    return jax.lax.broadcast_in_dim(values, shape, [0])


def _part(logit, start) -> Part:
    """The readout of a warpgroup's tile, whose ids begin at `start`."""
    shape, peak = (ROWS, _CHUNK), logit.max(axis=1)
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
    rows = pl.ds(row, ROWS)
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
    shape, peak = (ROWS, _CHUNK), power.max(axis=1)
    lowered = None if is_plain is True else jnp.where(is_plain, 0.0, peak)
    token, mass, spread = _none(power.shape[1])
    for i, begin in enumerate(reversed(range(0, power.shape[1], STEP))):
        wide = power[:, begin : begin + STEP]
        weight = jnp.exp2(wide if lowered is None else wide - _down(lowered, wide.shape))
        for at in reversed(range(0, STEP, _CHUNK)):  # the lowest id comes last and wins
            part, own = wide[:, at : at + _CHUNK], weight[:, at : at + _CHUNK]
            token = jnp.where(part == _down(peak, shape), begin + at, token)
            mass += own
            spread += own * (part - _down(peak, shape))
        piece = leaving.at[i % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the previous contents have been copied
        piece[...] = weight.astype(piece.dtype)
        plgpu.commit_smem()
        place = pl.ds(pl.multiple_of(start + begin, STEP), STEP)
        plgpu.copy_smem_to_gmem(piece, weights.at[:, place])
    # The weight of the peak, bit for bit, so that the mass of a certain law is exactly 1.
    unit = jnp.exp2(peak if lowered is None else peak - lowered)
    return _summed(peak, token, start, mass, spread, unit)


def _none(ids):
    """Initial token, mass and spread of a warpgroup."""
    layout, shape = plgpu.Layout.WGMMA, (ROWS, _CHUNK)
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
    shape = ROWS, CODE_STEP
    rows = pl.ds(row, ROWS)
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
    rows, shape = pl.ds(row, ROWS), (ROWS, _CHUNK)
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
