"""A thread block of the Mosaic form: one warpgroup loads, the others compute.

`mosaic.py` launches it. A block computes one tile of rows, or, if resident, several in sequence.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..hopper import whole
from .mosaic_kernel import compute
from .mosaic_loads import drain, load
from .mosaic_tiles import Block, work_of


def attend(*refs, num_operands, extras, names, rules, scale, tiling, chunk, places):
    """A thread block: a tile of rows of a KV head, over its share of the keys.

    With `tiling.resident` a block computes several tiles in sequence.

    Args:
        extras: Names of the optional operands that are given: "bits", "kv_scales".
        places: Number of row tiles of all sequences and heads, of one head, and of resident
            blocks.
    """
    q, k, v, k_pages, v_pages, table, numbers, *given = refs[:num_operands]
    more = dict(zip(extras, given, strict=True))
    block = Block(
        q=q,
        fresh=(k, v),
        pools=(k_pages, v_pages),
        table=table,
        numbers=numbers,
        bits=more.get("bits"),
        kv_scales=more.get("kv_scales"),
        results=refs[num_operands : len(refs) - len(names)],
        scratch=dict(zip(names, refs[len(refs) - len(names) :], strict=True)),
        rules=rules,
        scale=scale,
        tiling=tiling,
        chunk=chunk,
    )
    loads, sums = _registers(tiling.consumers, block.is_8_bit)
    if tiling.resident:
        _attend_in_turns(block, places, loads, sums)
        return
    tile = jax.lax.axis_index("block")
    split = jax.lax.axis_index("split") if tiling.splits > 1 else whole(0)
    work = work_of(block, (jax.lax.axis_index("sequence"), split, tile))
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == tiling.consumers)
    def _():
        plgpu.set_max_registers(loads, action="decrease")
        load(block, work)
        drain(block, work.low, work.high)

    computes = warpgroup < tiling.consumers

    @pl.when(computes if work.is_spare is None else computes & ~work.is_spare)
    def _():
        plgpu.set_max_registers(sums, action="increase")
        compute(block, work, warpgroup)


def _attend_in_turns(block, places, loads, sums):
    """Compute several tiles of rows; the rows and keys of the next load during the current one."""
    warpgroup = jax.lax.axis_index("warpgroup")
    tiles, of_head, stay = places
    first = jax.lax.axis_index("block")
    last = stay - 1 - first
    turns = num_turns(first, last, tiles, stay)

    def work_in(turn, before=None):
        tile = tile_in(turn, first, last, stay)
        tile = jnp.minimum(tile, tiles - 1)  # past the last tile, repeat it
        sequence, place = jax.lax.div(tile, whole(of_head)), jax.lax.rem(tile, whole(of_head))
        return work_of(block, (sequence, whole(0), place), before)

    @pl.when(warpgroup == block.tiling.consumers)
    def _():
        plgpu.set_max_registers(loads, action="decrease")

        def one(turn, before):
            work = work_in(turn, before)
            load(block, work)
            return before + (work.high - work.low)

        count = jax.lax.fori_loop(whole(0), turns, one, whole(0))
        drain(block, whole(0), count)

    @pl.when(warpgroup < block.tiling.consumers)
    def _():
        plgpu.set_max_registers(sums, action="increase")

        def one(turn, before):
            work = work_in(turn, before)
            compute(block, work, warpgroup, turn, (turn + 1 < turns, work_in(turn + 1)))
            return before + (work.high - work.low)

        jax.lax.fori_loop(whole(0), turns, one, whole(0))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def tile_in(turn, first, last, stay):
    """The row tile of a turn; `first` and `last`: index of the block among `stay` from either end.

    Contexts are sorted, the longest first. Serpentine order balances them: the block with the
    longest context in one turn has the shortest in the next.
    """
    return turn * stay + jnp.where((turn & 1) == 0, first, last)


def num_turns(first, last, tiles, stay):
    """The number of turns of a block; other arguments as in `tile_in`."""
    full, rest = divmod(tiles, stay)
    return full + ((last if full % 2 else first) < rest).astype(jnp.int32)


def _registers(consumers, is_8_bit):
    """Registers of each loading thread and of each computing thread.

    Warpgroups share the registers of the launch: 168 a thread for three warpgroups, so 504 for one
    thread of each. A warpgroup that asks for more waits forever.
    """
    if is_8_bit:  # the loading warpgroup transposes fresh values
        return (56, 224) if consumers == 2 else (88, 240)
    return 40, 232 if consumers == 2 else 208
