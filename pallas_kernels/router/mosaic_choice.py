"""The second launch of the router: from scores to the best experts and their weights.

A block takes four rows, one a warp: it adds up the parts of the scores and picks the best expert k
times. `choose` serves `route`, `choose_scaled` serves `choose_experts`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .. import hopper
from ..hopper import load, tiled
from ..layer.mosaic_heads import layout_of_rows
from .reference import Rule

ROWS = 64  # of a product
LANES = 32
_CHOSEN = 4  # rows of a program
_WIDEST = 256  # numbers of a row that are loaded at once
_LOWEST = -(2**31)  # lowest key

Choice = tuple[Array, Array]  # experts and weights of rows


def choose(parts: Array, count: int, given: dict[str, Array], rule: Rule, interpret: Any) -> Choice:
    """The experts of `count` normed rows; `given` may hold a "bias" by lane, and "live"."""
    parts = parts.reshape(*parts.shape[:2], LANES, -1)  # a row's scores by lane
    body = functools.partial(_choose, names=given, rows=math.gcd(count, ROWS), rule=rule)
    return _launch(body, (parts, *given.values()), (count, rule.k), interpret)


def choose_scaled(
    parts: Array, x: Array, expert_scale: Array, live: Array, k: int, eps: float, interpret: Any
) -> Choice:
    """The experts of rows `x` that still lack the norm's factor, and their weights."""
    given = parts, x, expert_scale, live
    return _launch(functools.partial(_choose_scaled, eps=eps), given, (len(x), k), interpret)


def _launch(
    body: Callable[..., None], given: Any, shape: tuple[int, int], interpret: Any
) -> Choice:
    kinds = (jnp.int32, jnp.float32)
    found = hopper.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, kind) for kind in kinds],
        grid=(shape[0] // _CHOSEN,),
        grid_names=("rows",),
        kernel_name="router_choice",
        # The kernel never reads its own writes, so threads need not wait for their warpgroup.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(*given)
    return tuple(found)


def _choose(parts, *refs, names, rows, rule):
    """The experts of four rows."""
    given = dict(zip(names, refs[: len(names)], strict=True))
    ids, weights = refs[len(names) :]
    splits, *_, size = parts.shape
    first = jax.lax.axis_index("rows") * _CHOSEN
    tile, layout = (_CHOSEN, LANES, size), _layout_of_lanes(size)
    mine = pl.ds(pl.multiple_of(first, _CHOSEN), _CHOSEN)
    first += jax.lax.div(first, jnp.int32(rows)) * (ROWS - rows)
    source = pl.ds(pl.multiple_of(first, _CHOSEN), _CHOSEN)

    def across(values):
        return jax.lax.broadcast_in_dim(values, tile, [0])

    logits = functools.reduce(jnp.add, [load(parts.at[i, source], layout) for i in range(splits)])
    if rule.score == "softmax":
        scores = jnp.exp(logits - across(_most(logits)))
        scores = scores / across(jnp.sum(jnp.sum(scores, axis=2), axis=1))
    else:
        scores = 1 / (1 + jnp.exp(-logits))
    choice = scores
    if "bias" in given:
        own = load(given["bias"], layout.reduce(0)).astype(jnp.float32)
        choice = scores + jax.lax.broadcast_in_dim(own, tile, [1, 2])
    lane, number = (plgpu.broadcasted_iota(jnp.int32, tile, i, layout=layout) for i in (1, 2))
    number += lane * size
    keys, values = _ordered(choice), _ordered(scores)
    if rule.groups > 1:
        keys = _within_groups(keys, rule, layout)
    chosen = []
    for which, best, is_it in _best(keys, number, rule.k, across):
        chosen.append((which, _numbers(best) if choice is scores else _at(values, is_it)))
    factor = rule.factor
    if rule.is_normed:
        total = functools.reduce(jnp.add, [score for _, score in chosen])
        factor = factor / (total + rule.least)
    is_live = None
    if "live" in given:
        is_live = load(given["live"].at[mine], layout.reduce(2).reduce(1)) != 0
    for j, (which, score) in enumerate(chosen):
        ids[mine, j] = which if is_live is None else jnp.where(is_live, which, LANES * size)
        weights[mine, j] = score * factor


def _choose_scaled(parts, x, expert_scale, live, ids, weights, *, eps):
    """The experts of four rows."""
    (splits, _, E), D, k = parts.shape, x.shape[1], ids.shape[1]
    rows = pl.ds(pl.multiple_of(jax.lax.axis_index("rows") * _CHOSEN, _CHOSEN), _CHOSEN)
    tile, layout, width = (_CHOSEN, E), layout_of_rows(E), math.gcd(D, _WIDEST)

    def across(values):
        return jax.lax.broadcast_in_dim(values, tile, [0])

    def square(start):
        piece = load(x.at[rows, pl.ds(start, width)], layout_of_rows(width)).astype(jnp.float32)
        return piece * piece

    squares = functools.reduce(jnp.add, map(square, range(0, D, width)))
    factor = jax.lax.rsqrt(jnp.sum(squares, axis=1) / D + eps)
    added = functools.reduce(jnp.add, [load(parts.at[i, rows], layout) for i in range(splits)])
    logits = added * across(factor)
    weight = jnp.exp(logits - across(jnp.max(logits, axis=1)))
    scores = weight / across(jnp.sum(weight, axis=1))

    own = load(expert_scale, layout.reduce(0)).astype(jnp.float32)
    own = jax.lax.broadcast_in_dim(own, tile, [1])
    number = plgpu.broadcasted_iota(jnp.int32, tile, 1, layout=layout)
    own = _ordered(own)
    chosen = [
        (which, _numbers(best), _at(own, is_it))
        for which, best, is_it in _best(_ordered(scores), number, k, across)
    ]
    total = functools.reduce(jnp.add, [best for _, best, _ in chosen])
    is_live = load(live.at[rows], layout.reduce(1)) != 0
    for j, (which, best, factor) in enumerate(chosen):
        ids[rows, j] = jnp.where(is_live, which, E)
        weights[rows, j] = best / total * factor


def _layout_of_lanes(size: int) -> Any:
    """A layout of four rows, one a warp; a lane holds `size` adjacent numbers."""
    return tiled(((_CHOSEN, LANES, size),), warp_dims=(-3,), lane_dims=(-2,))


def _most(keys):
    """The highest key of each row."""
    for axis in range(keys.ndim - 1, 0, -1):
        keys = jnp.max(keys, axis=axis)
    return keys


def _ordered(values):
    """Integers in the order of these floats: a warp finds their maximum in one instruction."""
    return _flipped(jax.lax.bitcast_convert_type(values, jnp.int32))


def _numbers(keys):
    """The floats that `_ordered` turned into these keys."""
    return jax.lax.bitcast_convert_type(_flipped(keys), jnp.float32)


def _flipped(bits):
    """Flip all bits but the sign of negative numbers, whose bits grow with their magnitude."""
    return jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)


def _best(keys, number, k, across):
    """The k highest keys of a row, one after another: index, key, and mask of its position."""
    last = math.prod(keys.shape[1:]) - 1
    for _ in range(k):
        best = _most(keys)
        # Counted from the last index, the lowest of equal keys is the maximum.
        which = last - _most(jnp.where(keys == across(best), last - number, -1))
        is_it = number == across(which)
        yield which, best, is_it
        keys = jnp.where(is_it, _LOWEST, keys)


def _at(keys, where):
    """The key of each row at the position of the mask."""
    return _numbers(_most(jnp.where(where, keys, _LOWEST)))


def _within_groups(keys, rule, layout):
    """Keys, the lowest one outside the groups with the highest sum of their two best experts.

    The experts of a lane belong to one group; the lane first finds its own two best.
    """
    lanes, row = keys.shape[:2], layout.reduce(2)
    lane = plgpu.broadcasted_iota(jnp.int32, lanes, 1, layout=row)
    group = jax.lax.div(lane, jnp.int32(LANES // rule.groups))

    def two_best(keys, second=None):
        """The two highest of the last axis; `second` has a lower candidate for each number."""
        best = jnp.max(keys, axis=keys.ndim - 1)
        is_it = keys == jax.lax.broadcast_in_dim(best, keys.shape, list(range(keys.ndim - 1)))
        count = jnp.sum(jnp.where(is_it, 1, 0), axis=keys.ndim - 1)
        rest = jnp.where(is_it, _LOWEST if second is None else second, keys)
        return best, jnp.where(count > 1, best, jnp.max(rest, axis=keys.ndim - 1))

    best, second = two_best(keys)
    is_mine = [group == i for i in range(rule.groups)]
    # All groups advance together: the steps of one group wait for each other and for the lanes.
    pairs = [two_best(jnp.where(own, best, _LOWEST), second) for own in is_mine]
    masses = [_numbers(one) + _numbers(other) for one, other in pairs]
    kept = jnp.zeros_like(group)
    for i, (mass, own) in enumerate(zip(masses, is_mine, strict=True)):
        # The number of better groups, computed once a row and not for each expert.
        others = [(other >= mass) if j < i else (other > mass) for j, other in enumerate(masses)]
        better = [jnp.where(it, 1, 0) for j, it in enumerate(others) if j != i]
        is_kept = functools.reduce(jnp.add, better) < rule.kept_groups
        kept = jnp.where(own, jax.lax.broadcast_in_dim(jnp.where(is_kept, 1, 0), lanes, [0]), kept)
    return jnp.where(jax.lax.broadcast_in_dim(kept, keys.shape, [0, 1]) != 0, keys, _LOWEST)
