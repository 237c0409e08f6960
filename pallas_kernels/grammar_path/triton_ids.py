"""Triton kernels over the ids of a cell, one program a cell: scores of labels, and tokens."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from .triton_launch import fields, launch, load, sound

_ROWS = 128  # rows of ids or of classes in one iteration
_IN_TURN = 4  # rows of a class or of a label in one iteration
_IDS = 256  # ids of one iteration
_NO_ID = jnp.iinfo(jnp.int32).max


def label_scores(
    grammar: Any, narrow: Array, wide: Array, log_mass: Array, read: Array, **constants: Any
) -> Array:
    """See `constraint.scores_of_ids`; `constants` are its module's."""
    (B, W, N), M, L = narrow.shape, wide.shape[2], grammar.num_labels
    C = grammar.lowest.shape[1]
    (_, each, Q), Y = grammar.class_rows.shape, grammar.label_rows.shape[2]
    named = {"narrow": narrow, "wide": wide, "log_mass": log_mass, "read": read.astype(jnp.int32)}
    named |= {"wide_class": grammar.wide} | fields(grammar, "num_wide", "class_rows", "class_from")
    named |= fields(grammar, "label_rows", "label_from")
    out = {
        "score": ((B, W, L), jnp.float32),
        "best": ((B, W, C), jnp.float32),
        "rows": ((B, W, max(Q, Y)), jnp.float32),
    }
    sizes = {"W": W, "N": N, "M": M, "L": L, "C": C, "each": each, "Q": Q, "Y": Y}
    return launch(_score, named, out, sizes, (B, W), 4, **constants)["score"]


def _score(of, out, sizes, *, floor, never, free, barrier):
    b, w = pl.program_id(0), pl.program_id(1)
    cell = b * sizes["W"] + w
    C, L, each = sizes["C"], sizes["L"], sizes["each"]
    to = cell * max(sizes["Q"], sizes["Y"])

    def ends(name, size):
        """For each of `size` sets: its number, its first row, and the row after its last."""
        which = jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32)
        there = which < size
        begin, end = (
            load(of[name], b * (size + 1) + which + behind, there, 0) for behind in (0, 1)
        )
        return which, begin, end

    is_read = pltriton.load(of["read"].at[cell]) != 0

    def maxima(name, width, ranges, values, first, nothing):
        """The largest of `values` of each set, whose indices into `values` are listed in rows."""
        which, begin, end = ranges
        count = jnp.max(end)

        def rows(block, _):
            row = block * _ROWS + jnp.arange(_ROWS, dtype=jnp.int32)
            mine, top = row < count, jnp.full((_ROWS,), nothing, jnp.float32)
            columns = [(b * each + i) * width + row for i in range(each)]
            places = [load(of[name], column, mine, 0) for column in columns]
            for value in [load(values, first + place, mine, nothing) for place in places]:
                top = jnp.maximum(top, sound(value))
            pltriton.store(out["rows"].at[to + row], top, mask=mine)

        jax.lax.fori_loop(0, (count + (_ROWS - 1)) // _ROWS, rows, None)
        barrier()

        def sets(k, top):
            for i in range(_IN_TURN):
                row = begin + (k * _IN_TURN + i)
                top = jnp.maximum(top, load(out["rows"], to + row, row < end, nothing))
            return top

        turns = (jnp.max(end - begin) + (_IN_TURN - 1)) // _IN_TURN
        return jax.lax.fori_loop(0, turns, sets, jnp.full(which.shape, nothing, jnp.float32))

    # In a cell that was not read all classes score alike, so skip their ids.
    number, begin, end = ends("class_from", C)
    ranges = number, begin, jnp.where(is_read, end, 0)
    top = maxima(
        "class_rows", sizes["Q"], ranges, of["narrow"], cell * sizes["N"], jnp.float32(-jnp.inf)
    )

    def wide(m, top):
        mine = number == pltriton.load(of["wide_class"].at[b * sizes["M"] + m]).astype(jnp.int32)
        value = sound(pltriton.load(of["wide"].at[cell * sizes["M"] + m]))
        return jnp.where(mine, value, top)

    num_wide = jnp.where(is_read, pltriton.load(of["num_wide"].at[b]), 0)
    top = jax.lax.fori_loop(0, num_wide, wide, top)
    mass = top - pltriton.load(of["log_mass"].at[cell])
    mass = jnp.maximum(jnp.where(mass == mass, mass, floor), floor)
    mass = jnp.where(is_read, mass, 0.0)
    pltriton.store(out["best"].at[cell * C + number], mass, mask=number < C)
    barrier()

    label, *_ = ranges = ends("label_from", L)
    top = maxima("label_rows", sizes["Y"], ranges, out["best"], cell * C, jnp.float32(never))
    most = jnp.max(jnp.where(label < L, top, never), axis=0)
    top = jnp.where(label == free, 0.0, jnp.where(top > never, top - most, never))
    pltriton.store(out["score"].at[cell * L + label], top, mask=label < L)


def tokens_along(
    grammar: Any,
    path: Array,
    narrow: Array,
    wide: Array,
    wide_token: Array,
    log_mass: Array,
    **constants: Any,
) -> tuple[Array, Array]:
    """See `constraint.tokens_of_ids`; `constants` are its module's."""
    (B, W, N), M = narrow.shape, wide.shape[2]
    _, G, C = grammar.delta.shape
    named = {"path": path, "narrow": narrow, "wide": wide, "wide_token": wide_token}
    named |= {"log_mass": log_mass, "ids": grammar.narrow, "class": grammar.narrow_class}
    named |= {"wide_class": grammar.wide} | fields(grammar, "num_wide", "num_narrow", "delta")
    out = {"token": ((B, W), jnp.int32), "confidence": ((B, W), jnp.float32)}
    sizes = {"W": W, "N": N, "M": M, "G": G, "C": C}
    found = launch(_token, named, out, sizes, (B, W), 4, **constants)
    return found["token"], found["confidence"]


def _token(of, out, sizes, *, never, no_class, barrier):
    del barrier
    b, w = pl.program_id(0), pl.program_id(1)
    W, N, M, G, C = (sizes[name] for name in "WNMGC")
    cell = b * W + w
    here = pltriton.load(of["path"].at[b * (W + 1) + w])
    there = pltriton.load(of["path"].at[b * (W + 1) + w + 1])
    edges = (b * G + here) * C
    count = pltriton.load(of["num_narrow"].at[b])

    def better(best, value, token, fits):
        top, held = best
        value = jnp.where(fits, jnp.maximum(sound(value), never), 2 * never)
        first = fits & ((value > top) | ((value == top) & (token < held)))
        return jnp.where(first, value, top), jnp.where(first, token, held)

    def ids(k, best):
        place = k * _IDS + jnp.arange(_IDS, dtype=jnp.int32)
        mine = place < count
        number = load(of["class"], b * N + place, mine, 0)
        mine &= number != no_class
        fits = mine & (load(of["delta"], edges + number, mine, 0) == there)
        value = load(of["narrow"], cell * N + place, fits, 2 * never)
        return better(best, value, load(of["ids"], b * N + place, mine, 0), fits)

    def wide(m, best):
        number = pltriton.load(of["wide_class"].at[b * M + m]).astype(jnp.int32)
        fits = pltriton.load(of["delta"].at[edges + number]).astype(jnp.int32) == there
        value = pltriton.load(of["wide"].at[cell * M + m])
        token = pltriton.load(of["wide_token"].at[cell * M + m])
        return better(best, *(jnp.broadcast_to(one, (_IDS,)) for one in (value, token, fits)))

    best = jnp.full((_IDS,), 2 * never, jnp.float32), jnp.full((_IDS,), _NO_ID, jnp.int32)
    best = jax.lax.fori_loop(0, (count + (_IDS - 1)) // _IDS, ids, best)
    value, token = jax.lax.fori_loop(0, pltriton.load(of["num_wide"].at[b]), wide, best)
    top = jnp.max(value, axis=0)
    token = jnp.min(jnp.where(value == top, token, _NO_ID), axis=0)
    score = top - pltriton.load(of["log_mass"].at[cell])
    pltriton.store(out["token"].at[cell], token)
    pltriton.store(out["confidence"].at[cell], jnp.where(top > never, score, -jnp.inf))
