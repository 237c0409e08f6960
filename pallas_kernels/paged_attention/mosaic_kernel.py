"""The kernel of the Mosaic form: the work of a computing warpgroup on a tile of rows.

`mosaic_tiles.py` chooses and loads its keys, `mosaic_merge.py` merges the parts of a cluster, and
`mosaic_blocks.py` calls all three.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..hopper import load
from ..hopper.operands import as_operands
from ..layer.fp8 import DTYPE as FP8
from ..layer.fp8 import factors_of
from .mosaic_8_bits import PEAK, interpreted_product, query_parts
from .mosaic_merge import merged
from .mosaic_tiles import (
    FAR,
    ROWS,
    in_order,
    page_of,
    slot_of,
    turns_of,
    whole,
    window_cell,
)

# Score of a hidden key, infinite so that any scale keeps it hidden. With a large finite number and
# a small scale, the multiply-add that subtracts the peak leaves a rounding error of 1e19.
_HIDDEN = -jnp.inf
_FLOOR = -1e28  # initial peak of a row, below every score; finite, so that differences are finite
_NO_MASS = -1e30  # log mass of a row that has seen no key; finite as well
_LOG2_E = 1.4426950408889634


def compute(
    work,
    warpgroup,
    q,
    pool,
    table,
    bits,
    kv_scales,
    results,
    scratch,
    *,
    turn,
    following,
    rules,
    scale,
    tiling,
    chunk,
):
    """A warpgroup's rows: attention over its tiles, the merge of a cluster's parts, the result.

    Args:
        turn: For resident blocks, the number of row tiles done before. Rows then alternate between
            two buffers, and a result is stored from the buffer that its rows were loaded to.
        following: For resident blocks, whether another tile of rows follows, and its work.
    """
    keys, block_size, window = tiling.keys, rules.block_size, rules.window
    _, T, N, H = q.shape
    G, Z = pool[1:3]
    n = N // G
    parts = max(1, keys // Z)
    rows_of_part = keys // parts
    per_warpgroup = ROWS // chunk
    unit_0, units, cell_0 = work.unit_0, work.units, work.cell_0
    start, first, end, causal = work.start, work.first, work.end, work.causal
    layout = plgpu.Layout.WGMMA
    per_row = layout.reduce(1)
    group = whole(0) if tiling.shares_keys or tiling.shares_rows else warpgroup
    width, own_columns = H, None
    if tiling.shares_rows:
        width = H // 2
        own_columns = pl.ds(pl.multiple_of(warpgroup * width, width), width)
    buffer = group if turn is None else group + (turn & 1) * tiling.row_groups
    mine = scratch["rows"].at[buffer]
    unit = unit_0 + group * per_warpgroup

    def box_of(array, i, columns=None, work=work, unit=unit):
        """Unit i of this warpgroup in an array like the queries."""
        one = jnp.minimum(unit + i, units - 1)
        token = jax.lax.div(one, whole(n)) * chunk
        box = (
            work.b,
            pl.ds(pl.multiple_of(token, chunk), chunk),
            work.g * n + jax.lax.rem(one, whole(n)),
        )
        return array.at[*box, columns] if columns is not None else array.at[*box]

    def unit_rows(ref, i):
        return ref.at[pl.ds(i * chunk, chunk)] if per_warpgroup > 1 else ref

    arrived = scratch["rows_in"].at[buffer]

    def ask_for_rows(work, unit, buffer):
        for i in range(per_warpgroup):
            rows, there = scratch["rows"].at[buffer], scratch["rows_in"].at[buffer]
            plgpu.copy_gmem_to_smem(box_of(q, i, None, work, unit), unit_rows(rows, i), there)

    if turn is None:
        asks = work.is_used & (group == warpgroup)
        pl.when(asks)(lambda: ask_for_rows(work, unit, buffer))
    else:
        is_there, then = following
        unit_then = then.unit_0 + group * per_warpgroup
        other = group + ((turn + 1) & 1) * tiling.row_groups
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last result has been stored
        pl.when(turn == 0)(lambda: ask_for_rows(work, unit, buffer))
        pl.when(is_there)(lambda: ask_for_rows(then, unit_then, other))

    # For each row, its cell and the last keys that it sees.
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=per_row)
    unit_of_row = jax.lax.div(row, whole(chunk)) + unit
    token = jax.lax.div(unit_of_row, whole(n)) * chunk + jax.lax.rem(row, whole(chunk))
    cell = cell_0 + token
    anywhere = (1 - in_order(cell, causal, rules)) * FAR
    window_from = window_cell(cell, causal, rules)
    last_cached = start + cell + anywhere
    last_fresh = cell + anywhere
    row_bits = None
    if bits is not None:
        K = bits.shape[1]
        mine_in = jax.lax.div(cell, whole(block_size))
        mine_in = jnp.minimum(mine_in, K - 1)
        of_mask = jnp.minimum(work.b, bits.shape[0] - 1)
        row_bits = jnp.zeros_like(mine_in)
        for block_row in range(K):
            row_bits = jnp.where(mine_in == block_row, bits[of_mask, block_row], row_bits)
    else:
        ends = (jax.lax.div(cell, whole(block_size)) + 1) * block_size - 1
        last_fresh = jnp.minimum(last_fresh, ends)
    if window is not None and not rules.by_block:  # otherwise only the token order is a limit
        last_cached = jnp.minimum(last_cached, start + cell + (window - 1))
        last_fresh = jnp.minimum(last_fresh, cell + (window - 1))

    def across(values, shape):
        return jax.lax.broadcast_in_dim(values, shape, [0])

    def columns_from(zero, shape):
        return zero + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)

    def sees_cached(i, shape):
        j_0 = (i + work.skipped) * keys
        j = columns_from(j_0, shape)
        seen = (j < work.context_len) & (j <= across(last_cached, shape))
        seen &= (j < start + first) | (j >= start + end)
        for part in range(parts):
            hole = j_0 + part * rows_of_part
            page, _ = page_of(work, table, Z, hole)
            seen &= (j < hole) | (j >= jnp.where(page >= 0, hole, hole + rows_of_part))
        if window is not None:
            seen &= j > across(start + window_from - window, shape)
        return seen

    def sees_fresh(i, shape):
        theirs = columns_from(cell_0 + (i - work.cached_tiles + work.fresh_first) * keys, shape)
        seen = (theirs >= first) & (theirs < jnp.minimum(end, cell_0 + T))
        seen &= theirs <= across(last_fresh, shape)
        if bits is not None and row_bits is not None:
            theirs_in = jax.lax.div(theirs, whole(block_size))
            theirs_in = jnp.minimum(theirs_in, bits.shape[1] - 1)
            bit = jax.lax.shift_right_logical(across(row_bits, shape), theirs_in) & 1
            seen &= bit != 0
        if window is not None:
            seen &= theirs > across(window_from - window, shape)
        return seen

    def pass_turn():
        plgpu.barrier_arrive(scratch["turn"].at[0])
        plgpu.barrier_wait(scratch["turn"].at[0])

    takes_turns, is_8_bit = "turn" in scratch, "q_8" in scratch
    is_interpreted = "weights" in scratch
    scale = _LOG2_E * scale
    if kv_scales is not None:
        scale = scale * kv_scales[0, work.g]

    def values_of(value):
        """The right operands of the products with a tile's weights, one for each 8-bit part."""
        if is_8_bit:
            return [value.at[part].T for part in range(parts)]
        return [value if own_columns is None else value.at[:, own_columns]]

    def look(i, carry, sees):
        """Process a tile of keys; `sees` None: every row sees all of them."""
        total, peak, mass = carry
        slot, shape = slot_of(work, tiling, i), (ROWS, keys)
        key, value = scratch["k_ring"].at[slot], scratch["v_ring"].at[slot]
        plgpu.barrier_wait(scratch["k_in"].at[slot])

        def product(sums):
            if own_columns is not None:
                plgpu.wgmma(sums, mine.at[:, own_columns], key.at[:, own_columns].T)
            else:
                for part in query:
                    plgpu.wgmma(sums, part, key.T)
            if takes_turns:
                pass_turn()
            return sums[...]

        score = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        if own_columns is not None:  # the other warpgroup computes the sums of the other half
            scratch["halves"][warpgroup] = score
            plgpu.barrier_arrive(scratch["halves_in"].at[0])
            plgpu.barrier_wait(scratch["halves_in"].at[0])
            score = score + load(scratch["halves"].at[1 - warpgroup], layout)
        if "k_used" in scratch:
            plgpu.barrier_arrive(scratch["k_used"].at[slot])
        if sees is not None:
            score = jnp.where(sees(i, shape), score, _HIDDEN)
        higher = jnp.maximum(peak, score.max(axis=1) * factor)
        shrink = jnp.exp2(peak - higher)
        each, least = factor, higher
        if is_8_bit:  # weights and their sum are 2^PEAK larger, which cancels in the result
            each, least = across(factor, shape), higher - PEAK
        weight = jnp.exp2(score * each - across(least, shape))
        mass = mass * shrink + weight.sum(axis=1)
        weights = [weight.astype(key.dtype)]
        if is_8_bit and not is_interpreted:
            weights = as_operands(weights[0], parts)
        if takes_turns:
            total, mass, higher, shrink, weights = jax.lax.optimization_barrier(
                (total, mass, higher, shrink, weights)
            )
            plgpu.barrier_arrive(scratch["turn"].at[0])  # the softmax is done
            plgpu.barrier_wait(scratch["v_in"].at[slot])
            plgpu.barrier_wait(scratch["turn"].at[0])  # the tensor cores are free
        else:
            plgpu.barrier_wait(scratch["v_in"].at[slot])

        def add(sums):
            for narrow, own in zip(weights, values_of(value), strict=True):
                plgpu.wgmma(sums, narrow, own)

        def added(sums):
            add(sums)
            return sums[...]

        total = total * across(shrink, total.shape)
        if is_interpreted:
            staged = scratch["weights"].at[warpgroup]
            total += interpreted_product(staged, weights[0], values_of(value), width)
        elif is_8_bit:
            # The tensor cores keep some 14 bits of 8-bit products' sums: start a new sum each tile.
            total += pl.run_scoped(added, plgpu.WGMMAAccumulatorRef(total.shape, jnp.float32))
        else:
            total = pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(total))
        plgpu.barrier_arrive(scratch["used"].at[slot])
        return total, higher, mass

    def look_at_all(from_, to, carry, sees):
        if not tiling.shares_keys:
            return jax.lax.fori_loop(from_, to, functools.partial(look, sees=sees), carry)
        first, count = turns_of(work, warpgroup, from_, to)
        step = lambda turn, carry: look(first + 2 * turn, carry, sees)  # noqa: E731
        return jax.lax.fori_loop(whole(0), count, step, carry)

    if turn is None:
        pl.when(work.is_used)(lambda: plgpu.barrier_wait(arrived))
    else:
        plgpu.barrier_wait(arrived)
    query, factor = [mine], scale
    if is_8_bit:
        query = [scratch["q_8"].at[warpgroup, i] for i in range(2)]
        factor = scale * query_parts(mine, query)
    if takes_turns:
        pl.when(warpgroup == 1)(pass_turn)
    carry = (
        plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), layout),
        plgpu.layout_cast(jnp.full((ROWS,), _FLOOR, jnp.float32), per_row),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), per_row),
    )
    for from_, to, sees in (
        (work.cached[0], work.cached[1], sees_cached),
        (work.cached[1], work.cached[2], None),
        (work.cached[2], work.cached[3], sees_cached),
        (work.fresh[0], work.fresh[1], None),
        (work.fresh[1], work.fresh[2], sees_fresh),
    ):
        if from_ is to:
            continue
        carry = look_at_all(from_, to, carry, sees)
    if takes_turns:
        pl.when(warpgroup == 0)(pass_turn)
    total, peak, mass = carry

    live = (cell >= first) & (cell < end) & (mass > 0)
    share_of_row = jnp.where(live, 1.0 / jnp.where(live, mass, 1.0), 0.0)
    if kv_scales is not None:
        share_of_row = share_of_row * kv_scales[1, work.g]
    mean = total * across(share_of_row, total.shape)

    def rounded(values, largest):
        """Rows in the type of the result; 8-bit rows have a scale for this head, in `units`."""
        values = values.astype(q.dtype)
        if "units" not in scratch:
            return values
        factors, scales = factors_of(largest)
        scratch["units"][warpgroup] = scales
        return (values.astype(jnp.float32) * across(factors, values.shape)).astype(FP8)

    def largest_of(values):
        return jnp.abs(values).max(axis=1) if "units" in scratch else None

    def store(staged, columns=None, leads=True):
        """Copy this warpgroup's rows from shared memory to the result."""
        plgpu.commit_smem()
        for i in range(per_warpgroup):

            @pl.when(unit + i < units)
            def _(i=i):
                plgpu.copy_smem_to_gmem(unit_rows(staged, i), box_of(results[0], i, columns))

            if "units" not in scratch:
                continue

            @pl.when((unit + i < units) & leads)
            def _(i=i):
                one = unit + i
                token = work.b * T + jax.lax.div(one, whole(n)) * chunk
                head = work.g * n + jax.lax.rem(one, whole(n))
                target = results[1].at[head, pl.ds(pl.multiple_of(token, chunk), chunk)]
                source = scratch["units"].at[warpgroup, pl.ds(i * chunk, chunk)]
                plgpu.copy_smem_to_gmem(source, target)

        if turn is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # writes end with the launch

    def store_whole():
        if own_columns is None:
            staged = scratch["narrow"].at[warpgroup] if "narrow" in scratch else mine
            staged[...] = rounded(mean, largest_of(mean))
            store(staged)
            return
        meet()  # the other warpgroup has also read the rows
        mine[:, own_columns] = mean.astype(q.dtype)
        plgpu.commit_smem()
        meet()  # the other warpgroup has written its half
        pl.when(warpgroup == 0)(lambda: store(mine))

    def meet():
        plgpu.barrier_arrive(scratch["rows_used"].at[0])
        plgpu.barrier_wait(scratch["rows_used"].at[0])

    def store_part():
        log_mass = jnp.where(live, peak + jnp.log2(jnp.where(live, mass, 1.0)), _NO_MASS)
        place = (work.sequence, jax.lax.axis_index("block") * tiling.row_groups + group)
        if not tiling.is_cluster:
            means, masses = results
            if own_columns is None:
                means[work.split, *place] = mean
                masses[work.split, *place] = log_mass
                return
            means[work.split, *place, :, own_columns] = mean

            @pl.when(warpgroup == 0)
            def _():
                masses[work.split, *place] = log_mass

            return
        index = work.split * 2 + warpgroup if tiling.shares_keys else work.split
        largest = largest_of(mean)
        own, largest = merged(
            mean,
            log_mass,
            largest,
            index=index,
            warpgroup=warpgroup,
            place=place,
            parts=results[1 if largest is None else 2 :],
            scratch=scratch,
            tiling=tiling,
        )
        width = H // tiling.parts
        columns = pl.ds(pl.multiple_of(index * width, width), width)
        staged = scratch["columns"].at[warpgroup]
        staged[...] = rounded(own, largest)
        store(staged, columns, index == 0)

    if tiling.splits == 1:
        store_whole()
    elif work.is_whole is None:
        store_part()
    else:
        pl.when(work.is_whole)(store_whole)
        pl.when(~work.is_whole)(store_part)
