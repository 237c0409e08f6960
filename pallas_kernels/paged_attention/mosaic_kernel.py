"""The kernel of the Mosaic form: the work of a computing warpgroup on a tile of rows.

`mosaic_rows.py` says which keys the rows see, `mosaic_tiles.py` chooses the keys and
`mosaic_loads.py` loads them, `mosaic_merge.py` merges the parts of a cluster, and
`mosaic_blocks.py` calls all of them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ..hopper import load, whole
from ..hopper.operands import as_operands
from ..layer.fp8 import DTYPE as FP8
from ..layer.fp8 import factors_of
from .mosaic_8_bits import PEAK, interpreted_product, query_parts
from .mosaic_merge import merged
from .mosaic_rows import LAYOUT, Rows, down, rows_of, sight_of
from .mosaic_tiles import ROWS, Block, Work, slot_of, turns_of

# Score of a hidden key, infinite so that any scale keeps it hidden. With a large finite number and
# a small scale, the multiply-add that subtracts the peak leaves a rounding error of 1e19.
_HIDDEN = -jnp.inf
_FLOOR = -1e28  # initial peak of a row, below every score; finite, so that differences are finite
_NO_MASS = -1e30  # log mass of a row that has seen no key; finite as well
_LOG2_E = 1.4426950408889634


def compute(
    block: Block,
    work: Work,
    warpgroup: Array,
    turn: Array | None = None,
    following: tuple[Array, Work] | None = None,
) -> None:
    """A warpgroup's rows: attention over its tiles, the merge of a cluster's parts, the result.

    Args:
        turn: For resident blocks, the number of row tiles done before. Rows then alternate between
            two buffers, and a result is stored from the buffer that its rows were loaded to.
        following: For resident blocks, whether another tile of rows follows, and its work.
    """
    rows = rows_of(block, work, warpgroup, turn)
    _ask_for_rows(rows, turn, following)
    sight, scale = sight_of(rows), _LOG2_E * block.scale
    if block.kv_scales is not None:
        scale = scale * block.kv_scales[0, work.g]
    if turn is None:
        pl.when(work.is_used)(lambda: plgpu.barrier_wait(rows.arrived))
    else:
        plgpu.barrier_wait(rows.arrived)
    query, factor = [rows.staged], scale
    if block.is_8_bit:
        query = [block.scratch["q_8"].at[warpgroup, i] for i in range(2)]
        factor = scale * query_parts(rows.staged, query)
    takes_turns = "turn" in block.scratch
    if takes_turns:
        pl.when(warpgroup == 1)(lambda: _meet(block, "turn"))
    carry = (
        plgpu.layout_cast(jnp.zeros((ROWS, rows.width), jnp.float32), LAYOUT),
        plgpu.layout_cast(jnp.full((ROWS,), _FLOOR, jnp.float32), LAYOUT.reduce(1)),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), LAYOUT.reduce(1)),
    )
    for from_, to, sees in (
        (work.cached[0], work.cached[1], sight.cached),
        (work.cached[1], work.cached[2], None),
        (work.cached[2], work.cached[3], sight.cached),
        (work.fresh[0], work.fresh[1], None),
        (work.fresh[1], work.fresh[2], sight.fresh),
    ):
        if from_ is to:
            continue
        look = functools.partial(_look, rows=rows, query=query, factor=factor, sees=sees)
        carry = _look_at_all(rows, look, from_, to, carry)
    if takes_turns:
        pl.when(warpgroup == 0)(lambda: _meet(block, "turn"))
    result = _result_of(rows, sight.cell, *carry, is_resident=turn is not None)
    if block.tiling.splits == 1:
        result.store_whole()
    elif work.is_whole is None:
        result.store_part()
    else:
        pl.when(work.is_whole)(result.store_whole)
        pl.when(~work.is_whole)(result.store_part)


def _ask_for_rows(rows: Rows, turn, following) -> None:
    """Load the rows; those of a resident block's next tile too, and its first only in turn 0."""
    if turn is None:
        pl.when(rows.work.is_used & (rows.group == rows.warpgroup))(rows.load)
        return
    is_there, then = following
    unit = then.unit_0 + rows.group * rows.block.units
    buffer = rows.group + ((turn + 1) & 1) * rows.block.tiling.row_groups
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last result has been stored
    pl.when(turn == 0)(rows.load)
    pl.when(is_there)(dataclasses.replace(rows, work=then, unit=unit, buffer=buffer).load)


def _look_at_all(rows: Rows, look, from_, to, carry):
    """Process the tiles of keys in [from_, to), or every other one if two warpgroups share them."""
    if not rows.block.tiling.shares_keys:
        return jax.lax.fori_loop(from_, to, look, carry)
    first, count = turns_of(rows.work, rows.warpgroup, from_, to)
    step = lambda turn, carry: look(first + 2 * turn, carry)  # noqa: E731
    return jax.lax.fori_loop(whole(0), count, step, carry)


def _look(i, carry, *, rows: Rows, query, factor, sees):
    """Process a tile of keys: the online softmax of its scores, and the products with its values.

    Args:
        carry: Weighted sum of the values, peak and mass of each row.
        query: Left operands whose products with the keys are added.
        factor: Factor of the scores, as exponents of 2; one a row in 8 bits.
        sees: Which keys each row sees; None: every row sees all of them.
    """
    total, peak, mass = carry
    block, scratch = rows.block, rows.block.scratch
    slot, takes_turns = slot_of(rows.work, block.tiling, i), "turn" in scratch
    score = _scores(rows, query, slot)
    if "k_used" in scratch:
        plgpu.barrier_arrive(scratch["k_used"].at[slot])
    if sees is not None:
        score = jnp.where(sees(i, score.shape), score, _HIDDEN)
    higher = jnp.maximum(peak, score.max(axis=1) * factor)
    shrink = jnp.exp2(peak - higher)
    each, least = factor, higher
    if block.is_8_bit:  # weights and their sum are 2^PEAK larger, which cancels in the result
        each, least = down(factor, score.shape), higher - PEAK
    weight = jnp.exp2(score * each - down(least, score.shape))
    mass = mass * shrink + weight.sum(axis=1)
    weights = [weight.astype(scratch["k_ring"].dtype)]
    if block.is_8_bit and not block.is_interpreted:
        weights = as_operands(weights[0], scratch["v_ring"].shape[1])
    if takes_turns:
        total, mass, higher, shrink, weights = jax.lax.optimization_barrier(
            (total, mass, higher, shrink, weights)
        )
        plgpu.barrier_arrive(scratch["turn"].at[0])  # the softmax is done
        plgpu.barrier_wait(scratch["v_in"].at[slot])
        plgpu.barrier_wait(scratch["turn"].at[0])  # the tensor cores are free
    else:
        plgpu.barrier_wait(scratch["v_in"].at[slot])
    total = _with_values(rows, total * down(shrink, total.shape), weights, slot)
    plgpu.barrier_arrive(scratch["used"].at[slot])
    return total, higher, mass


def _scores(rows: Rows, query, slot) -> Array:
    """Products of the rows with the keys of a buffer."""
    block, scratch, columns = rows.block, rows.block.scratch, rows.columns
    key = scratch["k_ring"].at[slot]
    plgpu.barrier_wait(scratch["k_in"].at[slot])

    def product(sums):
        if columns is not None:
            plgpu.wgmma(sums, rows.staged.at[:, columns], key.at[:, columns].T)
        else:
            for part in query:
                plgpu.wgmma(sums, part, key.T)
        if "turn" in scratch:
            _meet(block, "turn")
        return sums[...]

    shape = ROWS, block.tiling.keys
    score = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    if columns is not None:  # the other warpgroup computes the sums of the other half
        scratch["halves"][rows.warpgroup] = score
        _meet(block, "halves_in")
        score = score + load(scratch["halves"].at[1 - rows.warpgroup], LAYOUT)
    return score


def _with_values(rows: Rows, total, weights, slot):
    """The sum of `total` and the products of weights with the values of a buffer."""
    block, value = rows.block, rows.block.scratch["v_ring"].at[slot]
    if block.is_8_bit:
        values = [value.at[part].T for part in range(value.shape[0])]
    else:
        values = [value if rows.columns is None else value.at[:, rows.columns]]

    def add(sums):
        for narrow, own in zip(weights, values, strict=True):
            plgpu.wgmma(sums, narrow, own)

    def added(sums):
        add(sums)
        return sums[...]

    if block.is_interpreted:
        staged = block.scratch["weights"].at[rows.warpgroup]
        return total + interpreted_product(staged, weights[0], values, rows.width)
    if block.is_8_bit:
        # The tensor cores keep some 14 bits of 8-bit products' sums: start a new sum each tile.
        return total + pl.run_scoped(added, plgpu.WGMMAAccumulatorRef(total.shape, jnp.float32))
    return pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(total))


def _meet(block: Block, name: str) -> None:
    """Wait until the other warpgroup has come to this barrier, too."""
    plgpu.barrier_arrive(block.scratch[name].at[0])
    plgpu.barrier_wait(block.scratch[name].at[0])


def _result_of(rows: Rows, cell, total, peak, mass, is_resident: bool) -> "_Result":
    """The result of rows with these sums."""
    block, facts = rows.block, rows.work.facts
    live = (cell >= facts.first) & (cell < facts.end) & (mass > 0)
    share_of_row = jnp.where(live, 1.0 / jnp.where(live, mass, 1.0), 0.0)
    if block.kv_scales is not None:
        share_of_row = share_of_row * block.kv_scales[1, rows.work.g]
    mean = total * down(share_of_row, total.shape)
    sums = {"mean": mean, "live": live, "peak": peak, "mass": mass}
    return _Result(rows=rows, is_resident=is_resident, **sums)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Result:
    """The result of a warpgroup's rows over the keys of its block."""

    rows: Rows
    mean: Array  # of the values
    live: Array  # whether a row is live and has seen a key
    peak: Array
    mass: Array
    is_resident: bool

    def store_whole(self) -> None:
        """Store the rows, which no other block shares."""
        rows, scratch = self.rows, self.rows.block.scratch
        if rows.columns is None:
            staged = scratch["narrow"].at[rows.warpgroup] if "narrow" in scratch else rows.staged
            staged[...] = self._rounded(self.mean, self._largest())
            self._store(staged)
            return
        _meet(rows.block, "rows_used")  # the other warpgroup has also read the rows
        rows.staged[:, rows.columns] = self.mean.astype(rows.block.q.dtype)
        plgpu.commit_smem()
        _meet(rows.block, "rows_used")  # the other warpgroup has written its half
        pl.when(rows.warpgroup == 0)(lambda: self._store(rows.staged))

    def store_part(self) -> None:
        """Store the part of the block's share of the keys, or merge the parts of a cluster."""
        rows, work, tiling = self.rows, self.rows.work, self.rows.block.tiling
        mass = jnp.log2(jnp.where(self.live, self.mass, 1.0))
        log_mass = jnp.where(self.live, self.peak + mass, _NO_MASS)
        row_tile = jax.lax.axis_index("block") * tiling.row_groups + rows.group
        place = work.sequence, row_tile
        if not tiling.is_cluster:
            means, masses = rows.block.results
            if rows.columns is None:
                means[work.split, *place] = self.mean
                masses[work.split, *place] = log_mass
                return
            means[work.split, *place, :, rows.columns] = self.mean

            @pl.when(rows.warpgroup == 0)
            def _():
                masses[work.split, *place] = log_mass

            return
        index = work.split * 2 + rows.warpgroup if tiling.shares_keys else work.split
        largest, scratch = self._largest(), rows.block.scratch
        own, largest = merged(
            self.mean,
            log_mass,
            largest,
            index=index,
            warpgroup=rows.warpgroup,
            place=place,
            parts=rows.block.results[1 if largest is None else 2 :],
            scratch=scratch,
            tiling=tiling,
        )
        width = rows.width // tiling.parts
        columns = pl.ds(pl.multiple_of(index * width, width), width)
        staged = scratch["columns"].at[rows.warpgroup]
        staged[...] = self._rounded(own, largest)
        self._store(staged, columns, index == 0)

    def _largest(self) -> Array | None:
        """Largest number of each row, if rows are rounded to 8 bits."""
        is_rounded = "units" in self.rows.block.scratch
        return jnp.abs(self.mean).max(axis=1) if is_rounded else None

    def _rounded(self, values, largest) -> Array:
        """Rows in the type of the result; 8-bit rows have a scale for this head, in `units`."""
        block = self.rows.block
        values = values.astype(block.q.dtype)
        if "units" not in block.scratch:
            return values
        factors, scales = factors_of(largest)
        block.scratch["units"][self.rows.warpgroup] = scales
        return (values.astype(jnp.float32) * down(factors, values.shape)).astype(FP8)

    def _store(self, staged, columns: Any = None, leads: Any = True) -> None:
        """Copy rows from shared memory to the result; `leads`: their scales, too."""
        rows, block = self.rows, self.rows.block
        plgpu.commit_smem()
        for i in range(block.units):

            @pl.when(rows.unit + i < rows.work.units)
            def _(i=i):
                target = rows.box(block.results[0], i, columns)
                plgpu.copy_smem_to_gmem(rows.of_unit(staged, i), target)

            if "units" not in block.scratch:
                continue

            @pl.when((rows.unit + i < rows.work.units) & leads)
            def _(i=i):
                one, n, chunk = rows.unit + i, block.heads, block.chunk
                token = rows.work.facts.b * block.q.shape[1]
                token = token + jax.lax.div(one, whole(n)) * chunk
                head = rows.work.g * n + jax.lax.rem(one, whole(n))
                target = block.results[1].at[head, pl.ds(pl.multiple_of(token, chunk), chunk)]
                units = block.scratch["units"].at[rows.warpgroup, pl.ds(i * chunk, chunk)]
                plgpu.copy_smem_to_gmem(units, target)

        if not self.is_resident:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # writes end with the launch
