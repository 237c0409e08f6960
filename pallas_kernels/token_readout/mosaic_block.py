"""A thread block of the readout's Mosaic kernel; `mosaic_launch.py` launches it.

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
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ..hopper import MULTIPROCESSORS, load, whole
from .mosaic_ids import codes_of, put_narrow, put_top, put_wide
from .mosaic_logits import ROWS, down, hottest, law_part, logits_of, part_of, powers_of, restricted
from .result import Part

ID_MULTIPLE = 8  # ids of a swizzled tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """The tile of one thread block."""

    ids: int = 256  # of the vocabulary
    consumers: int = 2  # warpgroups that compute, of 64 rows each
    stages: int = 4  # steps of the depth in flight
    # The operand that the two blocks of a cluster share; None: no clusters.
    shared: Literal["head", "rows"] | None = "head"
    blocks: int = MULTIPROCESSORS  # at most

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.consumers * ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The static settings of a launch."""

    scale: float
    cap: float | None
    num_top: int = 0
    is_warm: bool = False  # see `mosaic.read_law`
    tiling: Tiling


def run_block(given, out, scratch, settings: Settings, *, num_tiles: int, **sizes: Any) -> None:
    """One thread block: its tiles one after another.

    Args:
        given, out, scratch: References by name: operands; results; shared memory and barriers.
        num_tiles: Tiles of all blocks, or of all clusters.
        sizes: As in `_Block`.
    """
    tiling, workers = settings.tiling, sizes["workers"]
    warpgroup = jax.lax.axis_index("warpgroup")
    worker = jax.lax.axis_index("worker")
    peer = jax.lax.axis_index("peer") if tiling.shared else 0
    count = jax.lax.div(num_tiles - worker + (workers - 1), whole(workers))
    where = {"warpgroup": warpgroup, "worker": worker, "peer": peer, "count": count}
    block = _Block(given=given, out=out, scratch=scratch, settings=settings, **where, **sizes)
    pl.when(warpgroup == tiling.consumers)(block.load)
    pl.when(warpgroup < tiling.consumers)(block.compute)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Block:
    """A thread block, as one of its warpgroups sees it."""

    given: dict[str, Any]
    out: dict[str, Any]
    scratch: dict[str, Any]
    settings: Settings
    workers: int  # blocks, or clusters
    row_groups: int  # row tiles, or pairs of them if the blocks of a cluster share the head
    of_slot: int  # rows of a slot
    warpgroup: Array
    worker: Array
    peer: Any  # index in the cluster
    count: Array  # number of its tiles

    @property
    def tiling(self) -> Tiling:
        """The tile."""
        return self.settings.tiling

    @property
    def steps(self) -> int:
        """Steps of the depth."""
        return self.given["head"].shape[1] // self.scratch["words"].shape[-1]

    def place_of(self, i) -> tuple[Array, Array, Array]:
        """Row tile, id tile and first id of the block's i-th tile."""
        tile, ids = self.worker + i * self.workers, self.tiling.ids
        row_tile = jax.lax.rem(tile, whole(self.row_groups))
        id_tile = jax.lax.div(tile, whole(self.row_groups))
        if self.tiling.shared == "head":
            row_tile = 2 * row_tile + self.peer
        if self.tiling.shared == "rows":
            id_tile = 2 * id_tile + self.peer
        # The last tile is moved left to end at V; ids of two tiles belong to the earlier one.
        start = jnp.minimum(id_tile * ids, self.given["head"].shape[0] - ids)
        return row_tile, id_tile, pl.multiple_of(start, ID_MULTIPLE)

    def slot_of(self, n) -> Array:
        """The buffer of the ring for step n of all tiles."""
        return jax.lax.rem(n, whole(self.tiling.stages))

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

        def load_step(step, _):
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

        jax.lax.fori_loop(0, self.steps, load_step, None)

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
            slot = jax.lax.div(row, whole(self.of_slot))
            slot = jnp.minimum(slot, len(given["num_wide"]) - 1)  # padding rows have no slot
            codes = codes_of(given, slot, start, ids)
        if "id_scales" in given:
            by_id = plgpu.Layout.WGMMA.reduce(0)
            scales = load(given["id_scales"].at[pl.ds(start, ids)], by_id)
        special = given["special"][rows if "penalties" in given else 0, id_tile]
        sums, by = self._sums(i), self.settings.scale
        place = special, row, start, id_tile * ids
        if scales is not None:
            sums *= jax.lax.broadcast_in_dim(scales, sums.shape, [1])
            of_rows = given["row_scales"].at[pl.ds(row, ROWS)]
            of_row = load(of_rows, plgpu.Layout.WGMMA.reduce(1))
            by = down(of_row * self.settings.scale, sums.shape)
        if "heat" in given:
            logit, part = self._law(sums, by, place)
        else:
            logit = restricted(logits_of(sums, by, self.settings.cap), *place, given)
            part = part_of(logit, start)
        for name, values in part._asdict().items():
            out[name][pl.ds(row, ROWS), id_tile] = values
        if codes is not None:
            put_wide(logit, codes, row, start, id_tile, given["num_wide"][slot], out)
            put_narrow(logit, row, start, id_tile * ids, slot, given, out["narrow_logit"])
        if self.settings.num_top:
            put_top(logit, row, start, id_tile, id_tile * ids, self.settings.num_top, out)

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
        heat = load(self.given["heat"].at[rows], plgpu.Layout.WGMMA.reduce(1))
        logit = restricted(powers_of(sums, by, heat, self.settings.cap), *place, self.given)
        is_plain = True if self.settings.is_warm else heat <= hottest(self.settings.cap)
        weights, leaving = self.out["weights"].at[rows], self.scratch["leaving"]
        return logit, law_part(logit, place[2], is_plain, weights, leaving.at[self.warpgroup])
