"""What a warpgroup writes by id: the likeliest ids of its tile, and classes of ids."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..hopper import load, whole
from .mosaic_logits import CHUNK, NEVER, ROWS, down
from .result import CODE_STEP, ID_STEP

_LEAST = -3e38  # below `NEVER`
_NO_ID = 1 << 24


def put_top(logit, row, start, id_tile, first, num_top, out):
    """Write the likeliest ids of a warpgroup's tile, from id `first` on, the likeliest first."""
    column = plgpu.broadcasted_iota(jnp.int32, logit.shape, 1, layout=plgpu.Layout.WGMMA)
    logit = jnp.where(column + start < first, _LEAST, logit)
    rows = pl.ds(row, ROWS)
    for i in range(num_top):
        best = logit.max(axis=1)
        token = jnp.where(logit == down(best, logit.shape), column, _NO_ID).min(axis=1)
        out["top_logit"][rows, id_tile * num_top + i] = _allowed(best)
        out["top_id"][rows, id_tile * num_top + i] = token + start
        logit = jnp.where(column == down(token, logit.shape), _LEAST, logit)


def codes_of(given, slot, start, ids):
    """Wide classes of a tile's ids, 32 ids at a time; see `packed_codes`."""
    by_id, many = plgpu.Layout.WGMMA.reduce(0), 4 * CODE_STEP
    first = jax.lax.div(start, whole(many))

    def words(place):
        place = pl.multiple_of(place * CODE_STEP, CODE_STEP)
        return load(given["wide_codes"].at[slot, pl.ds(place, CODE_STEP)], by_id)

    places = [first + i for i in range(ids // many)]
    return [(words(place), given["wide_among"][slot, place]) for place in places]


def put_wide(logit, codes, row, start, id_tile, num_wide, out):
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
        token = jnp.where(best == down(top, shape), where + column, _NO_ID)
        out["wide"][i, id_tile, rows] = _allowed(top)
        out["wide_token"][i, id_tile, rows] = token.min(axis=1) + start

    jax.lax.fori_loop(0, num_wide, one_class, None)


def put_narrow(logit, row, start, first, slot, given, out):
    """Write the logits of the slot's narrow ids in a warpgroup's tile, from id `first` on."""
    rows, shape = pl.ds(row, ROWS), (ROWS, CHUNK)
    layout = plgpu.Layout.WGMMA
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)

    for begin in range(0, logit.shape[1], ID_STEP):
        part = logit[:, begin : begin + ID_STEP]
        step = jax.lax.div(start + begin, whole(ID_STEP))
        order = given["whole_step"][slot, step]
        is_mine = start + begin >= first

        @pl.when(is_mine & (order > 0))
        def _(part=part, order=order):
            place = pl.multiple_of((order - 1) * ID_STEP, ID_STEP)
            out[rows, pl.ds(place, ID_STEP)] = _allowed(part)

        def one_id(i, _, part=part, begin=begin):
            mine = given["narrow"][slot, i] - (start + begin)
            best = plgpu.layout_cast(jnp.full(shape, jnp.float32(_LEAST)), layout)
            for chunk in range(0, ID_STEP, CHUNK):
                best = jnp.where(column == mine - chunk, part[:, chunk : chunk + CHUNK], best)
            out[rows, i] = _allowed(best.max(axis=1))

        begins, ends = (given["narrow_from"][slot, step + i] for i in (0, 1))
        jax.lax.fori_loop(begins, jnp.where(is_mine, ends, begins), one_id, None)


def _allowed(value):
    return jnp.where(value <= NEVER, -jnp.inf, value)
