"""Pallas Triton kernels for NVIDIA GPUs: paths of grammars, one launch each.

The work of a cell is small and needs the result of the next cell. In XLA it takes several launches
a cell, which took more than a third of a step. Here one program handles a slot and loops over its
cells; scores of ids do not depend on other cells, so there a program handles one cell. Tables are
padded to a bucket, but loops end with the grammar. Arrays are flat, so that indices are sums.

Loads are issued in program order, and the first use of a load waits for it. So independent loads
come together, before any use.

JAX has deprecated Pallas Triton. No public type names it, so deleting this file removes it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

_TILE = 128, 4  # states of one iteration, and warps
_HELD = 12  # edges a state of the first tile that are read only once
_EDGES = 4  # edges a state of one iteration, after those or in other tiles
_CELLS = 16  # cells whose states are loaded together, to be in the cache
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
    named = {
        "narrow": narrow,
        "wide": wide,
        "log_mass": log_mass,
        "read": read.astype(jnp.int32),
        "wide_class": grammar.wide,
        "num_wide": grammar.num_wide,
        "class_rows": grammar.class_rows,
        "class_from": grammar.class_from,
        "label_rows": grammar.label_rows,
        "label_from": grammar.label_from,
    }
    out = {
        "score": ((B, W, L), jnp.float32),
        "best": ((B, W, C), jnp.float32),
        "rows": ((B, W, max(Q, Y)), jnp.float32),
    }
    sizes = {"W": W, "N": N, "M": M, "L": L, "C": C, "each": each, "Q": Q, "Y": Y}
    return _launch(_score, named, out, sizes, (B, W), 4, **constants)["score"]


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
            _load(of[name], b * (size + 1) + which + behind, there, 0) for behind in (0, 1)
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
            places = [_load(of[name], column, mine, 0) for column in columns]
            for value in [_load(values, first + place, mine, nothing) for place in places]:
                top = jnp.maximum(top, _sound(value))
            pltriton.store(out["rows"].at[to + row], top, mask=mine)

        jax.lax.fori_loop(0, (count + (_ROWS - 1)) // _ROWS, rows, None)
        barrier()

        def sets(k, top):
            for i in range(_IN_TURN):
                row = begin + (k * _IN_TURN + i)
                top = jnp.maximum(top, _load(out["rows"], to + row, row < end, nothing))
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
        value = _sound(pltriton.load(of["wide"].at[cell * sizes["M"] + m]))
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
    found = _launch(_path, named, out, sizes, (B,), tile[1], **constants)
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
        return kind, known, _load(of["score"], place * L + labels, labels < L, 0.0)

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
            kept = _load(of["delta"], (b * G + state) * C + known, there & holds, 0)
            best = jnp.full((T,), -jnp.inf, jnp.float32), jnp.zeros((T,), jnp.int32)
            if edges:
                best = best_of(edges, best)

            def others(k, best):
                columns = [first + k * _EDGES + i for i in range(_EDGES)]
                return best_of(table(state, columns), best)

            turns = (num_free - first + (_EDGES - 1)) // _EDGES
            free, onto = jax.lax.fori_loop(0, turns, others, best)
            held = _load(out["beta"], behind + kept, there & holds, never)
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
    distance = _load(of["distance"], b * G + state, there, 0)
    value = jnp.where(distance <= room, 0.0, never)
    pltriton.store(out["beta"].at[2 * b * G + state], value, mask=there)


def _table(of, G, D, b, state, columns):
    """Labels and targets of some edges of states; past the last edge label 0, a dead end."""
    places = [((b * G + state) * D + column, (state < G) & (column < D)) for column in columns]
    label = [_load(of["label"], *place, 0) for place in places]
    target = [_load(of["target"], *place, 0) for place in places]
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
            total += _load(out["onto"], place, (every < G) & (w < W), 0)
        end = jnp.minimum(first + _CELLS, W)
        return _follow(out["path"], b * (W + 1), first, end, G, here, follow), total

    pltriton.store(out["path"].at[b * (W + 1)], at)
    start = at, jnp.zeros((T,), jnp.int32)
    _, total = jax.lax.fori_loop(0, (W + (_CELLS - 1)) // _CELLS, cells, start)
    pltriton.store(out["onto_near"].at[b * T + every], total)


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
        value = jnp.where(fits, jnp.maximum(_sound(value), never), 2 * never)
        first = fits & ((value > top) | ((value == top) & (token < held)))
        return jnp.where(first, value, top), jnp.where(first, token, held)

    def ids(k, best):
        place = k * _IDS + jnp.arange(_IDS, dtype=jnp.int32)
        mine = place < count
        number = _load(of["class"], b * N + place, mine, 0)
        mine &= number != no_class
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


def _walk(of, out, sizes, *, skip, hole, barrier):
    del barrier
    b = pl.program_id(0)
    W, G, C = (sizes[name] for name in "WGC")
    every = jnp.arange(pl.next_power_of_2(W), dtype=jnp.int32)
    kinds = _load(of["kind"], b * W + every, every < W, hole)
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


def _sound(value):
    """Replace NaN by the score of a forbidden id."""
    return jnp.where(value == value, value, -jnp.inf)


def _load(ref, index, mask, other):
    value = pltriton.load(ref.at[index], mask=mask, other=other)
    return value.astype(jnp.int32) if jnp.issubdtype(value.dtype, jnp.integer) else value


def _launch(body, named, out, sizes, grid, num_warps, *, interpret=False, **constants):
    """One launch over flat arrays; returns results by name."""

    def kernel(*refs):
        given = dict(zip(named, refs, strict=False))
        made = dict(zip(out, refs[len(named) :], strict=True))
        # Threads of a program read what its other threads have written.
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
