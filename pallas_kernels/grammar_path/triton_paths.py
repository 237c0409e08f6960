"""Triton kernels over the cells of a slot, one program a slot: the best path, and a known one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from .triton_launch import fields, launch, load

_TILE = 128, 4  # states of one iteration, and warps
_HELD = 12  # edges a state of the first tile that are read only once
_EDGES = 4  # edges a state of one iteration, after those or in other tiles
_CELLS = 16  # cells whose states are loaded together, to be in the cache


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
    """See `grammar_paths.chain`, for all slots; `constants` are its module's."""
    (B, W, L), (_, G, D), C = score.shape, grammar.target.shape, grammar.delta.shape[2]
    tables = "target", "label", "delta", "distance", "num_states", "num_edges"
    named = fields(grammar, *tables)
    named |= {"at": at, "room": room, "kind": kind, "known": known, "score": score}
    # Two alternating rows of `beta` hold a cell's values and the next one's, so they stay in cache.
    out = {
        "path": ((B, W + 1), jnp.int32),
        "value": ((B,), jnp.float32),
        "beta": ((B, 2, G), jnp.float32),
        "onto": ((B, W, G), jnp.int32),
        # Targets of prefetching loads, so that the compiler does not remove them.
        "scores_near": ((B, L), jnp.float32),
        "onto_near": ((B, tile[0]), jnp.int32),
    }
    sizes = {"W": W, "L": L, "G": G, "D": D, "C": C, "T": tile[0]}
    found = launch(_path, named, out, sizes, (B,), tile[1], **constants)
    return found["path"], found["value"]


def _path(of, out, sizes, *, never, skip, is_known, written, barrier):
    """Compute the best value from each state on, from the last cell to the first; then the path.

    The values of a cell's states are in `beta` until the cell before it is done.
    """
    b = pl.program_id(0)
    W, L, G, D, C, T = (sizes[name] for name in "WLGDCT")
    blocks = (pltriton.load(of["num_states"].at[b]) + (T - 1)) // T
    num_edges = pltriton.load(of["num_edges"].at[b])
    room = pltriton.load(of["room"].at[b])
    every = jnp.arange(T, dtype=jnp.int32)
    labels = jnp.arange(pl.next_power_of_2(L), dtype=jnp.int32)
    ends = functools.partial(_store_ends, of, out, G, b, room, every, never)
    jax.lax.fori_loop(0, blocks, ends, None)
    barrier()

    def read_ahead(w):
        """Load a cell's kind, class and scores; the scores are prefetched into the cache."""
        place = b * W + jnp.maximum(w, 0)
        kind, known = (pltriton.load(of[name].at[place]) for name in ("kind", "known"))
        return kind, known, load(of["score"], place * L + labels, labels < L, 0.0)

    table = functools.partial(_table, of, G, D, b)
    held_edges = table(every, range(min(_HELD, D)))

    def cell(i, carry):
        w = W - 1 - i
        half, (kind, known, near), total = carry
        after = read_ahead(w - 1)
        scores, behind, to = (b * W + w) * L, (2 * b + half) * G, (2 * b + 1 - half) * G
        holds, is_cell = (kind == is_known) | (kind == written), kind != skip
        num_free = jnp.where(kind == is_known, 0, num_edges)

        best_of = functools.partial(_best_of, of["score"], scores, out["beta"], behind)

        def states(block, edges):
            state = block * T + every
            there, first = state < G, len(edges)
            kept = load(of["delta"], (b * G + state) * C + known, there & holds, 0)
            best = jnp.full((T,), -jnp.inf, jnp.float32), jnp.zeros((T,), jnp.int32)
            if edges:
                best = best_of(edges, best)

            def others(k, best):
                columns = [first + k * _EDGES + i for i in range(_EDGES)]
                return best_of(table(state, columns), best)

            turns = (num_free - first + (_EDGES - 1)) // _EDGES
            free, onto = jax.lax.fori_loop(0, turns, others, best)
            held = load(out["beta"], behind + kept, there & holds, never)
            keeps = (kind == is_known) | ((kind == written) & (held >= free))
            value = jnp.maximum(jnp.where(keeps, held, free), never)
            pltriton.store(out["beta"].at[to + state], value, mask=there)
            onto = jnp.where(keeps, kept, onto)
            pltriton.store(out["onto"].at[(b * W + w) * G + state], onto, mask=there)

        def tiles(_, none):
            states(0, held_edges)
            jax.lax.fori_loop(1, blocks, lambda block, _: states(block, ()), none)

        def stay(block, _):
            state = block * T + every
            pltriton.store(out["onto"].at[(b * W + w) * G + state], state, mask=state < G)

        jax.lax.fori_loop(0, is_cell.astype(jnp.int32), tiles, None)
        jax.lax.fori_loop(0, jnp.where(is_cell, 0, blocks), stay, None)
        barrier()
        return jnp.where(is_cell, 1 - half, half), after, total + near

    first = jnp.int32(0), read_ahead(W - 1), jnp.zeros(labels.shape, jnp.float32)
    half, _, total = jax.lax.fori_loop(0, W, cell, first)
    pltriton.store(out["scores_near"].at[b * L + labels], total, mask=labels < L)
    at = pltriton.load(of["at"].at[b])
    value = pltriton.load(out["beta"].at[(2 * b + half) * G + at])
    pltriton.store(out["value"].at[b], value)

    _store_path(out, sizes, b, at, every)


def _store_ends(of, out, G, b, room, every, never, i, _):
    """Store the values after the last cell of a tile of states: too far from an end, `never`."""
    state = i * len(every) + every
    there = state < G
    distance = load(of["distance"], b * G + state, there, 0)
    value = jnp.where(distance <= room, 0.0, never)
    pltriton.store(out["beta"].at[2 * b * G + state], value, mask=there)


def _table(of, G, D, b, state, columns):
    """Labels and targets of some edges of states; past the last edge label 0, a dead end."""
    places = [((b * G + state) * D + column, (state < G) & (column < D)) for column in columns]
    label = [load(of["label"], *place, 0) for place in places]
    target = [load(of["target"], *place, 0) for place in places]
    return list(zip(label, target, strict=True))


def _best_of(score, scores, beta, after, edges, best):
    """The best of `best` and the values through edges of each state, and the state it goes on to.

    Args:
        score, scores: Scores of labels, and where those of the cell begin.
        beta, after: Values of states, and where those of the next cell begin.
    """
    through = [pltriton.load(score.at[scores + label]) for label, _ in edges]
    onward = [pltriton.load(beta.at[after + target]) for _, target in edges]
    top, onto = best
    for one, value, (_, target) in zip(through, onward, edges, strict=True):
        better = one + value > top
        top = jnp.where(better, one + value, top)
        onto = jnp.where(better, target, onto)
    return top, onto


def _store_path(out, sizes, b, at, every):
    """Follow the chosen edges from state `at`, and store the states of all cells."""
    W, G, T = (sizes[name] for name in "WGT")

    def follow(w, here):
        return pltriton.load(out["onto"].at[(b * W + w) * G + here])

    def cells(i, carry):
        here, total = carry
        first = i * _CELLS
        for w in (first + i for i in range(_CELLS)):
            place = (b * W + w) * G + every
            total += load(out["onto"], place, (every < G) & (w < W), 0)
        end = jnp.minimum(first + _CELLS, W)
        return _follow(out["path"], b * (W + 1), first, end, G, here, follow), total

    pltriton.store(out["path"].at[b * (W + 1)], at)
    start = at, jnp.zeros((T,), jnp.int32)
    _, total = jax.lax.fori_loop(0, (W + (_CELLS - 1)) // _CELLS, cells, start)
    pltriton.store(out["onto_near"].at[b * T + every], total)


def walk(grammar: Any, at: Array, kind: Array, known: Array, **constants: Any) -> Array:
    """See `grammar_walk.walk`; `constants` are its module's."""
    (B, W), (_, G, C) = kind.shape, grammar.delta.shape
    named = {"delta": grammar.delta, "at": at, "kind": kind, "known": known}
    sizes = {"W": W, "G": G, "C": C}
    out = {"path": ((B, W + 1), jnp.int32)}
    return launch(_walk, named, out, sizes, (B,), 1, **constants)["path"]


def _walk(of, out, sizes, *, skip, hole, barrier):
    del barrier
    b = pl.program_id(0)
    W, G, C = (sizes[name] for name in "WGC")
    every = jnp.arange(pl.next_power_of_2(W), dtype=jnp.int32)
    kinds = load(of["kind"], b * W + every, every < W, hole)
    count = jnp.min(jnp.where(kinds == hole, every, W))
    at = pltriton.load(of["at"].at[b])
    pltriton.store(
        out["path"].at[b * (W + 1) + 1 + every],
        jnp.broadcast_to(at, every.shape),
        mask=(every >= count) & (every < W),
    )

    def follow(w, here):
        known = pltriton.load(of["known"].at[b * W + w])
        onto = pltriton.load(of["delta"].at[(b * G + here) * C + known]).astype(jnp.int32)
        return jnp.where(pltriton.load(of["kind"].at[b * W + w]) == skip, here, onto)

    pltriton.store(out["path"].at[b * (W + 1)], at)
    _follow(out["path"], b * (W + 1), 0, count, G, at, follow)


def _follow(path, to, first, end, num_states, here, follow):
    """Walk cells from state `here`, store the states in the slot's path, return the last one."""

    def step(w, here):
        here = jnp.clip(follow(w, here), 0, num_states - 1)  # slots without a grammar
        pltriton.store(path.at[to + w + 1], here)
        return here

    return jax.lax.fori_loop(first, end, step, here)
