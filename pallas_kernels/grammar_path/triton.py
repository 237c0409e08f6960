"""Pallas Triton kernels for NVIDIA GPUs: paths of grammars, one launch each.

A cell's work is small, and one cell needs the one behind it: as XLA's launches, several a cell, it
took longer than a third of a step. Here a program is a slot and goes through the cells itself; what
cells need of ids, each apart, is a program a cell. Tables are padded to a bucket, but loops end
where a grammar does. Arrays are flat, so that indices are sums.

JAX has deprecated the Triton kind: no public type names it, and removing it is removing this file.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

_TILE = 256, 8  # states in turn, and warps
_EDGES = 4  # of a state, in turn
_IN_TURN = 8  # ids of a class, or classes of a label
_IDS = 256  # in turn

_NO_ID = jnp.iinfo(jnp.int32).max


def label_scores(
    grammar: Any, narrow: Array, wide: Array, log_mass: Array, read: Array, **constants: Any
) -> Array:
    """See `constraint.scores_of_ids`; `constants` are its module's."""
    (B, W, N), M, L = narrow.shape, wide.shape[2], grammar.num_labels
    C, P = grammar.lowest.shape[1], grammar.pair_class.shape[1]
    named = {
        "narrow": narrow,
        "wide": wide,
        "log_mass": log_mass,
        "read": read.astype(jnp.int32),
        "wide_class": grammar.wide,
        "num_wide": grammar.num_wide,
        "order": grammar.narrow_order,
        "class_from": grammar.class_from,
        "pair_class": grammar.pair_class,
        "label_from": grammar.label_from,
    }
    out = {"score": ((B, W, L), jnp.float32), "best": ((B, W, C), jnp.float32)}
    sizes = {"W": W, "N": N, "M": M, "L": L, "C": C, "P": P}
    return _launch(_score, named, out, sizes, (B, W), 4, **constants)["score"]


def _score(of, out, sizes, *, floor, never, free, barrier):
    b, w = pl.program_id(0), pl.program_id(1)
    cell = b * sizes["W"] + w
    C, L = sizes["C"], sizes["L"]

    def ranges(name, size):
        """Where each of `size` sets begins and ends in an array, and the most turns of one."""
        which = jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32)
        there = which < size
        begin = _load(of[name], b * (size + 1) + which, there, 0)
        end = _load(of[name], b * (size + 1) + which + 1, there, 0)
        turns = (jnp.max(end - begin) + (_IN_TURN - 1)) // _IN_TURN
        return which, begin[:, None], end[:, None], turns

    turn = jnp.arange(_IN_TURN, dtype=jnp.int32)[None]
    number, begin, end, turns = ranges("class_from", C)

    def ids(k, top):
        place = begin + k * _IN_TURN + turn
        mine = place < end
        place = _load(of["order"], b * sizes["N"] + place, mine, 0)
        value = _load(of["narrow"], cell * sizes["N"] + place, mine, -jnp.inf)
        return jnp.maximum(top, jnp.max(_sound(value), axis=1))

    top = jnp.full(number.shape, -jnp.inf, jnp.float32)
    top = jax.lax.fori_loop(0, turns, ids, top)

    def wide(m, top):
        mine = number == pltriton.load(of["wide_class"].at[b * sizes["M"] + m]).astype(jnp.int32)
        value = _sound(pltriton.load(of["wide"].at[cell * sizes["M"] + m]))
        return jnp.where(mine, value, top)

    top = jax.lax.fori_loop(0, pltriton.load(of["num_wide"].at[b]), wide, top)
    mass = top - pltriton.load(of["log_mass"].at[cell])
    mass = jnp.maximum(jnp.where(mass == mass, mass, floor), floor)
    mass = jnp.where(pltriton.load(of["read"].at[cell]) != 0, mass, 0.0)
    pltriton.store(out["best"].at[cell * C + number], mass, mask=number < C)
    barrier()

    label, begin, end, turns = ranges("label_from", L)

    def classes(k, top):
        place = begin + k * _IN_TURN + turn
        mine = place < end
        number = _load(of["pair_class"], b * sizes["P"] + place, mine, 0)
        value = _load(out["best"], cell * C + number, mine, never)
        return jnp.maximum(top, jnp.max(value, axis=1))

    top = jnp.full(label.shape, never, jnp.float32)
    top = jax.lax.fori_loop(0, turns, classes, top)
    pltriton.store(
        out["score"].at[cell * L + label], jnp.where(label == free, 0.0, top), mask=label < L
    )


def best_path(
    grammar: Any,
    at: Array,
    room: Array,
    kind: Array,
    known: Array,
    score: Array,
    tile: tuple[int, int] = _TILE,
    **constants: Any,
) -> tuple[Array, Array]:
    """See `constraint._chain`, for all slots; `constants` are its module's."""
    (B, W, L), (_, G, D), C = score.shape, grammar.target.shape, grammar.delta.shape[2]
    named = {
        "target": grammar.target,
        "label": grammar.label,
        "delta": grammar.delta,
        "distance": grammar.distance,
        "num_states": grammar.num_states,
        "num_edges": grammar.num_edges,
        "at": at,
        "room": room,
        "kind": kind,
        "known": known,
        "score": score,
    }
    out = {
        "path": ((B, W + 1), jnp.int32),
        "value": ((B,), jnp.float32),
        "beta": ((B, W + 1, G), jnp.float32),
        "onto": ((B, W, G), jnp.int32),
    }
    sizes = {"W": W, "L": L, "G": G, "D": D, "C": C, "T": tile[0]}
    found = _launch(_path, named, out, sizes, (B,), tile[1], **constants)
    return found["path"], found["value"]


def _path(of, out, sizes, *, never, skip, is_known, written, barrier):
    b = pl.program_id(0)
    W, L, G, D, C, T = (sizes[name] for name in "WLGDCT")
    blocks = (pltriton.load(of["num_states"].at[b]) + (T - 1)) // T
    turns = (pltriton.load(of["num_edges"].at[b]) + (_EDGES - 1)) // _EDGES
    room = pltriton.load(of["room"].at[b])
    every = jnp.arange(T, dtype=jnp.int32)

    def ends(i, _):
        state = i * T + every
        there = state < G
        distance = _load(of["distance"], b * G + state, there, 0)
        value = jnp.where(distance <= room, 0.0, never)
        pltriton.store(out["beta"].at[(b * (W + 1) + W) * G + state], value, mask=there)

    jax.lax.fori_loop(0, blocks, ends, None)
    barrier()

    def cell(i, _):
        w = W - 1 - i
        kind = pltriton.load(of["kind"].at[b * W + w])
        known = pltriton.load(of["known"].at[b * W + w])
        scores, behind = (b * W + w) * L, (b * (W + 1) + w + 1) * G
        holds = (kind == is_known) | (kind == written)

        def states(block, _):
            state = block * T + every
            there = state < G
            row = b * G + state

            def edges(k, best):
                top, onto = best
                column = k * _EDGES + jnp.arange(_EDGES, dtype=jnp.int32)[None]
                place = row[:, None] * D + column
                mine = there[:, None] & (column < D)
                label = _load(of["label"], place, mine, 0)
                target = _load(of["target"], place, mine, 0)
                through = _load(of["score"], scores + label, mine, 2 * never)
                through += _load(out["beta"], behind + target, mine, 0.0)
                found = jnp.max(through, axis=1)
                column = jnp.broadcast_to(column, place.shape)
                first = jnp.where(through == found[:, None], column, D)
                first = jnp.min(first, axis=1)
                theirs = jnp.max(jnp.where(column == first[:, None], target, 0), axis=1)
                return jnp.maximum(top, found), jnp.where(found > top, theirs, onto)

            none = jnp.full((T,), -jnp.inf, jnp.float32), jnp.zeros((T,), jnp.int32)
            asks = (kind != skip) & (kind != is_known)
            free, onto = jax.lax.fori_loop(0, jnp.where(asks, turns, 0), edges, none)
            kept = _load(of["delta"], row * C + known, there & holds, 0)
            held = _load(out["beta"], behind + kept, there & holds, never)
            same = _load(out["beta"], behind + state, there & (kind == skip), never)
            keeps = (kind == is_known) | ((kind == written) & (held >= free))
            value = jnp.maximum(jnp.where(keeps, held, free), never)
            onto = jnp.where(keeps, kept, onto)
            value = jnp.where(kind == skip, same, value)
            onto = jnp.where(kind == skip, state, onto)
            pltriton.store(out["beta"].at[behind - G + state], value, mask=there)
            pltriton.store(out["onto"].at[(b * W + w) * G + state], onto, mask=there)

        jax.lax.fori_loop(0, blocks, states, None)
        barrier()

    jax.lax.fori_loop(0, W, cell, None)
    at = pltriton.load(of["at"].at[b])
    pltriton.store(out["value"].at[b], pltriton.load(out["beta"].at[b * (W + 1) * G + at]))

    def follow(w, here):
        return pltriton.load(out["onto"].at[(b * W + w) * G + here])

    _put_path(out["path"], b, W, G, at, follow)


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
    named = {
        "path": path,
        "narrow": narrow,
        "wide": wide,
        "wide_token": wide_token,
        "log_mass": log_mass,
        "ids": grammar.narrow,
        "class": grammar.narrow_class,
        "wide_class": grammar.wide,
        "num_wide": grammar.num_wide,
        "num_narrow": grammar.num_narrow,
        "delta": grammar.delta,
    }
    out = {"token": ((B, W), jnp.int32), "confidence": ((B, W), jnp.float32)}
    sizes = {"W": W, "N": N, "M": M, "G": G, "C": C}
    found = _launch(_token, named, out, sizes, (B, W), 4, **constants)
    return found["token"], found["confidence"]


def _token(of, out, sizes, *, never, barrier):
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
        value = jnp.where(fits, jnp.maximum(_sound(value), never), 2 * never)
        first = fits & ((value > top) | ((value == top) & (token < held)))
        return jnp.where(first, value, top), jnp.where(first, token, held)

    def ids(k, best):
        place = k * _IDS + jnp.arange(_IDS, dtype=jnp.int32)
        mine = place < count
        number = _load(of["class"], b * N + place, mine, 0)
        fits = mine & (_load(of["delta"], edges + number, mine, 0) == there)
        value = _load(of["narrow"], cell * N + place, fits, 2 * never)
        return better(best, value, _load(of["ids"], b * N + place, mine, 0), fits)

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


def walk(grammar: Any, at: Array, kind: Array, known: Array, **constants: Any) -> Array:
    """See `constraint.walk`; `constants` are its module's."""
    (B, W), (_, G, C) = kind.shape, grammar.delta.shape
    named = {"delta": grammar.delta, "at": at, "kind": kind, "known": known}
    sizes = {"W": W, "G": G, "C": C}
    return _launch(_walk, named, {"path": ((B, W + 1), jnp.int32)}, sizes, (B,), 1, **constants)[
        "path"
    ]


def _walk(of, out, sizes, *, skip, barrier):
    del barrier
    b = pl.program_id(0)
    W, G, C = (sizes[name] for name in "WGC")

    def follow(w, here):
        known = pltriton.load(of["known"].at[b * W + w])
        onto = pltriton.load(of["delta"].at[(b * G + here) * C + known]).astype(jnp.int32)
        return jnp.where(pltriton.load(of["kind"].at[b * W + w]) == skip, here, onto)

    _put_path(out["path"], b, W, G, pltriton.load(of["at"].at[b]), follow)


def _put_path(path, b, num_cells, num_states, at, follow):
    pltriton.store(path.at[b * (num_cells + 1)], at)

    def step(w, here):
        here = jnp.clip(follow(w, here), 0, num_states - 1)  # a slot without a grammar has any
        pltriton.store(path.at[b * (num_cells + 1) + w + 1], here)
        return here

    jax.lax.fori_loop(0, num_cells, step, at)


def _sound(value):
    """No number counts as an id that is forbidden."""
    return jnp.where(value == value, value, -jnp.inf)


def _load(ref, index, mask, other):
    value = pltriton.load(ref.at[index], mask=mask, other=other)
    return value.astype(jnp.int32) if jnp.issubdtype(value.dtype, jnp.integer) else value


def _launch(body, named, out, sizes, grid, num_warps, *, interpret=False, **constants):
    """One launch over flat arrays; results by name."""

    def kernel(*refs):
        given = dict(zip(named, refs, strict=False))
        made = dict(zip(out, refs[len(named) :], strict=True))
        # Threads of a program read what others of it wrote.
        barrier = (lambda: None) if interpret else pltriton.debug_barrier
        body(given, made, sizes, barrier=barrier, **constants)

    def size(shape):
        return functools.reduce(lambda a, b: a * b, shape)

    found = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((size(shape),), dtype) for shape, dtype in out.values()],
        grid=grid,
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name=f"grammar{body.__name__}",
    )(*(leaf.reshape(-1) for leaf in named.values()))
    shapes = (shape for shape, _ in out.values())
    return {name: leaf.reshape(shape) for name, leaf, shape in zip(out, found, shapes, strict=True)}
