"""Loads of tiles of keys and values into the rings of a thread block, by its loading warpgroup."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ..hopper import whole
from ..hopper.operands import BOX, turn
from .mosaic_tiles import Block, Work, order_of, page_of, slot_of, whole_tiles


def load(block: Block, work: Work) -> None:
    """Load the tiles of this work in order, as the loading warpgroup; `drain` must follow."""
    for span, is_cached in ((work.cached, True), (work.fresh, False)):
        bring = functools.partial(_bring, block, work, is_cached)
        jax.lax.fori_loop(span[0], span[-1], bring, None)


def _bring(block: Block, work: Work, is_cached: bool, i, _):
    """Load keys and values of a tile, each once its buffer has been used."""
    scratch, tiling = block.scratch, block.tiling
    slot, order = slot_of(work, tiling, i), order_of(work, i)

    def wait_until(name):
        pl.when(order >= tiling.stages)(lambda: plgpu.barrier_wait(scratch[name].at[slot]))

    if not tiling.shares_rows:
        wait_until("used")
    pair = block.pools if is_cached else block.fresh
    for array, name, used in zip(pair, "kv", ("k_used", "used"), strict=True):
        if tiling.shares_rows:
            wait_until(used)
        ring, arrived = scratch[f"{name}_ring"].at[slot], scratch[f"{name}_in"].at[slot]
        if block.is_8_bit and name == "v":
            _bring_values(block, work, i, is_cached, ring, arrived)
        elif is_cached:
            places, tokens = _cached_boxes(block, work, i)
            _fill(block, ring, arrived, [array.at[*place, tokens] for place in places])
        else:
            box = math.gcd(whole_tiles(block.num_fresh), tiling.keys)
            _fill(block, ring, arrived, [array.at[at] for at in _fresh_boxes(block, work, i, box)])


def _fill(block: Block, buffer, arrived, sources) -> None:
    """Load keys or values box by box."""
    keys, size = block.tiling.keys, block.tiling.keys // len(sources)
    for place, source in enumerate(sources):
        part = buffer if size == keys else buffer.at[pl.ds(place * size, size)]
        plgpu.copy_gmem_to_smem(source, part, arrived)
    loads = loads_of(keys, whole_tiles(block.num_fresh), block.pools[0].shape[2])
    for _spare in range(loads - len(sources)):  # the barrier counts loads
        plgpu.barrier_arrive(arrived)


def _cached_boxes(block: Block, work: Work, i):
    """The boxes of a cached tile: whole pages, or some tokens of a larger page."""
    keys, Z = block.tiling.keys, block.pools[0].shape[2]
    j = (i + work.skipped) * keys
    found = [page_of(block, work, j + at) for at in range(0, keys, min(keys, Z))]
    tokens = pl.ds(0, Z)
    if keys < Z:
        tokens = pl.ds(pl.multiple_of(found[0][1], keys), keys)
    return [(jnp.maximum(page, 0), work.g) for page, _ in found], tokens


def _fresh_boxes(block: Block, work: Work, i, box: int):
    """The boxes of a tile of the window.

    Copies of the last box fill the tile past the last key: the product needs whole tiles of finite
    values, and the mask hides the copies.
    """
    T, keys = whole_tiles(block.num_fresh), block.tiling.keys
    token = (i - work.cached_tiles + work.fresh_first) * keys
    tokens = [jnp.minimum(token + at, T - box) for at in range(0, keys, box)]
    tokens = [pl.ds(pl.multiple_of(one, box), box) for one in tokens]
    return [(work.facts.b, one, work.g) for one in tokens]


def _bring_values(block: Block, work: Work, i, is_cached: bool, buffer, arrived) -> None:
    """Load 8-bit values, whose tokens are adjacent, page by page."""
    parts = block.tiling.keys // min(block.tiling.keys, block.pools[0].shape[2])
    if is_cached:
        places, tokens = _cached_boxes(block, work, i)
        for part, place in enumerate(places):
            source = block.pools[1].at[*place, :, tokens]
            plgpu.copy_gmem_to_smem(source, buffer.at[part], arrived)
        return
    boxes = [block.fresh[1].at[place] for place in _fresh_boxes(block, work, i, BOX)]
    each = len(boxes) // parts
    for part in range(parts):
        turn(boxes[part * each :][:each], buffer.at[part], block.is_interpreted)
    plgpu.commit_smem()
    for _part in range(parts):
        plgpu.barrier_arrive(arrived)


def loads_of(keys, rows, page_size) -> int:
    """Arrivals at the barrier of a tile: the number of smallest boxes in `keys`."""
    return keys // min(keys, page_size, math.gcd(rows, keys))


def drain(block: Block, low: Array, high: Array) -> None:
    """Wait until the last tiles of [low, high) are used; a thread block must not end earlier."""
    stages = block.tiling.stages

    def wait(i, _, name):
        plgpu.barrier_wait(block.scratch[name].at[jax.lax.rem(i - low, whole(stages))])

    for name in ("used", "k_used"):
        if name in block.scratch:
            body = functools.partial(wait, name=name)
            jax.lax.fori_loop(jnp.maximum(high - stages, low), high, body, None)
