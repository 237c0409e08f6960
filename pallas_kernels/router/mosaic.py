"""Pallas Mosaic kernels for NVIDIA Hopper: two launches from rows to their experts.

1. Multiply a tile of up to 64 rows by a part of the depth. Tensor cores give float32 results here,
   since products of 16-bit numbers are exact. `_multiply` takes normed rows. `_multiply_scaled`
   splits each number of a scaled row into a sum of three 16-bit numbers; the second launch applies
   the factor of the norm, one number a row. With many rows a block takes the whole depth, part by
   part, for some of the experts. Parts have the same depth for any number of rows, and are added in
   order, so that the bits of a row's scores do not depend on other rows.
2. Four rows, one a warp: add the parts, compute the scores, and pick the best expert k times.
   `_choose` serves `route`, `_choose_scaled` serves `choose_experts`.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .. import hopper
from ..hopper import load, swizzled, tiled
from ..layer.mosaic_heads import layout_of_rows
from ..lowered import lowered_once
from .reference import Rule

_ROWS = 64  # rows of a product
_DEPTH = 64  # depth of a step
_PART = 2  # steps of a part, for any number of rows
# Most rows for which the second launch adds up the parts; with more, a block of the first adds up
# all of them. us of both launches on an H200, second / first: LLaDA2, 256 rows 8.6 / 10.7, 512 rows
# 10.5 / 10.9, 1,024 rows 17.5 / 12.1, 4,096 rows 58 / 26; scaled rows, 1,024 rows 16 / 42, 2,048
# rows 26 / 42, 4,096 rows 57 / 43.
_MOST_SPLIT_NORMED, _MOST_SPLIT = 512, 2048
# Experts of a block. Blocks that write parts of scaled rows take all experts, since each block
# first splits the rows into three numbers. us on an H200, all experts / 64: LLaDA2, 32 rows 3.4 /
# 1.9, 128 rows 3.6 / 2.3, 256 rows 3.9 / 3.2, 512 rows 5.4 / 4.8; DiffusionGemma, 256 rows 4.2 /
# 4.8, 1,024 rows 10.3 / 12.5.
_WIDTH = 64
_AHEAD = 3  # parts in flight in a block
_PARTS = 3  # 16-bit numbers whose sum has the 24 bits of a float32
_CHOSEN = 4  # rows of a program that chooses
_WIDEST = 256  # numbers of a row that are loaded at once
_EXPERTS = (64, 128, 256)  # two, four or eight a lane
_LANES = 32
_LEAST_ROWS = 8  # rows of a swizzled tile
_LOWEST = -(2**31)  # lowest key


def unsupported(x: Array, router: Array) -> str | None:
    """Why this back end cannot take these arguments here, or None."""
    return hopper.unsupported() or unsupported_arguments(x, router)


def unsupported_arguments(x: Array, router: Array) -> str | None:
    """Why no device can take these arguments, or None."""
    D, E = router.shape
    if reason := hopper.unsupported_version():
        return reason
    if x.dtype != jnp.bfloat16 or router.dtype != x.dtype:
        return f"needs rows and router in bfloat16, got {x.dtype} and {router.dtype}"
    if not len(x) or len(x) % _ROWS or D % _DEPTH or E not in (64, 128):
        return (
            f"needs a multiple of {_ROWS} rows and of {_DEPTH} components, and 64 or 128 experts, "
            f"got {len(x)}, {D} and {E}"
        )
    return None


def unsupported_route(x: Array, router: Array, rule: Rule) -> str | None:
    """Why `route` cannot take these arguments here, or None."""
    D, E = router.shape
    if reason := hopper.unsupported() or hopper.unsupported_version():
        return reason
    if x.dtype != jnp.bfloat16 or router.dtype != x.dtype:
        return f"needs rows and router in bfloat16, got {x.dtype} and {router.dtype}"
    if not len(x) or len(x) % _LEAST_ROWS or D % _DEPTH or E not in _EXPERTS:
        return (
            f"needs a multiple of {_LEAST_ROWS} rows and of {_DEPTH} components, and 64, 128 or "
            f"256 experts, got {len(x)}, {D} and {E}"
        )
    if _LANES % rule.groups:
        return f"needs a number of groups that divides {_LANES}, got {rule.groups}"
    return None


@lowered_once(static_argnames=("rule", "interpret"))
def route(
    x: Array,
    router: Array,
    bias: Array | None,
    live: Array | None,
    *,
    rule: Rule,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """See `api.route`; `interpret`, an `InterpretGPUParams`, is for tests on a CPU."""
    names = [name for name, given in (("bias", bias), ("live", live)) if given is not None]

    def run(x, router, *given):
        rows = math.gcd(len(x), _ROWS)
        parts = _scores(x, router, interpret)
        parts = parts.reshape(*parts.shape[:2], _LANES, -1)  # a row's scores by lane
        return _launch_choice(
            functools.partial(_choose, names=names, rows=rows, rule=rule),
            (parts, *given),
            (len(x), rule.k),
            interpret,
        )

    bias = None if bias is None else bias.reshape(_LANES, -1)
    given = [each for each in (bias, live) if each is not None]
    given = [each.astype(jnp.int32) if each.dtype == jnp.bool_ else each for each in given]
    # Mosaic kernels have no batching rule, so vmap runs them one after another.
    run = jax.custom_batching.sequential_vmap(lambda *all, run=run: tuple(run(*all)))
    return run(x, router, *given)


def _scores(x: Array, router: Array, interpret: Any) -> Array:
    """Scores of normed rows, in parts of the depth; rows are padded to whole tiles of 64."""
    (T, D), E = x.shape, router.shape[1]
    splits, count, steps, width = _parts(T, D, E, _MOST_SPLIT_NORMED, _WIDTH)
    tiles, ahead = T // math.gcd(T, _ROWS), min(_AHEAD, count)
    return hopper.kernel(
        functools.partial(_multiply, count=count),
        out_type=jax.ShapeDtypeStruct((splits, tiles * _ROWS, E), jnp.float32),
        grid=(tiles, E // width, splits),
        grid_names=("rows", "experts", "split"),
        kernel_name="router_scores",
        scratch_types=[
            _staged(x.dtype, ahead, steps, _ROWS, _DEPTH),
            _staged(x.dtype, ahead, steps, _DEPTH, width),
            plgpu.Barrier(num_barriers=ahead * steps, num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(x, router)


def _parts(T: int, D: int, E: int, most_split: int, split_width: int) -> tuple[int, int, int, int]:
    """Blocks that split the depth, parts of a block, steps of a part, and experts of a block."""
    steps = math.gcd(D // _DEPTH, _PART)
    count = D // _DEPTH // steps
    is_split = most_split >= T
    width = min(E, split_width if is_split else _WIDTH)
    return (count, 1, steps, width) if is_split else (1, count, steps, width)


def _staged(dtype: Any, *shape: int) -> Any:
    return plgpu.SMEM(shape, dtype, transforms=swizzled(_DEPTH, dtype))


def _launch_choice(body: Any, given: Any, shape: tuple[int, int], interpret: Any) -> Any:
    """Experts and weights of shape `shape`, four rows a program."""
    kinds = (jnp.int32, jnp.float32)
    return hopper.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, kind) for kind in kinds],
        grid=(shape[0] // _CHOSEN,),
        grid_names=("rows",),
        kernel_name="router_choice",
        # The kernel never reads its own writes, so threads need not wait for their warpgroup.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(*given)


def _multiply(x, router, out, rows, weights, loaded, *, count):
    """A tile of rows times some experts, over `count` parts of the depth."""
    steps, tile, split = rows.shape[1], jax.lax.axis_index("rows"), jax.lax.axis_index("split")
    height, width = math.gcd(x.shape[0], _ROWS), weights.shape[-1]
    here = pl.ds(pl.multiple_of(tile * height, height), height)
    experts = pl.ds(pl.multiple_of(jax.lax.axis_index("experts") * width, width), width)

    def copy(i, slot):
        for j in range(steps):
            first = ((split * count + i) * steps + j) * _DEPTH
            at = pl.ds(pl.multiple_of(first, _DEPTH), _DEPTH)
            target, arrived = rows.at[slot, j, pl.ds(0, height)], loaded.at[slot * steps + j]
            plgpu.copy_gmem_to_smem(x.at[here, at], target, arrived)
            plgpu.copy_gmem_to_smem(router.at[at, experts], weights.at[slot, j], arrived)

    def multiply(sums, slot):
        for j in range(steps):
            plgpu.barrier_wait(loaded.at[slot * steps + j])
            plgpu.wgmma(sums, rows.at[slot, j], weights.at[slot, j])

    total = _sum_of_parts(copy, multiply, rows.shape[0], count, width)
    out[split, pl.ds(pl.multiple_of(tile * _ROWS, _ROWS), _ROWS), experts] = total


def _sum_of_parts(copy, multiply, ahead, count, width):
    """Separate products of `count` parts of the depth, added in order.

    The second launch adds its parts in the same order.

    Args:
        copy: Starts the load of a part into a slot of the ring.
        multiply: Waits for the part in a slot and adds its product to an accumulator.
        ahead: Slots of the ring.
    """
    number = functools.partial(jnp.asarray, dtype=jnp.int32)

    def step(i):
        def products(sums):
            multiply(sums, jax.lax.rem(i, number(ahead)))

            @pl.when((i > 0) & (i - 1 + ahead < count))
            def _():
                plgpu.commit_smem()  # all threads have used the previous part
                copy(i - 1 + ahead, jax.lax.rem(i - 1 + ahead, number(ahead)))

            plgpu.wgmma_wait(0)
            return sums[...]

        sums = plgpu.WGMMAAccumulatorRef((_ROWS, width), jnp.float32)
        return pl.run_scoped(products, sums)

    for i in range(ahead):
        copy(number(i), number(i))
    if count == 1:
        return step(number(0))
    total = plgpu.layout_cast(jnp.zeros((_ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
    return jax.lax.fori_loop(0, count, lambda i, total: total + step(i), total)


def _choose(parts, *refs, names, rows, rule):
    """The experts of four rows."""
    given = dict(zip(names, refs[: len(names)], strict=True))
    ids, weights = refs[len(names) :]
    splits, *_, size = parts.shape
    first = jax.lax.axis_index("rows") * _CHOSEN
    tile, layout = (_CHOSEN, _LANES, size), _layout_of_lanes(size)
    mine = pl.ds(pl.multiple_of(first, _CHOSEN), _CHOSEN)
    first += jax.lax.div(first, jnp.int32(rows)) * (_ROWS - rows)
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
        ids[mine, j] = which if is_live is None else jnp.where(is_live, which, _LANES * size)
        weights[mine, j] = score * factor


def _layout_of_lanes(size: int) -> Any:
    """A layout of four rows, one a warp; a lane holds `size` adjacent numbers."""
    return tiled(((_CHOSEN, _LANES, size),), warp_dims=(-3,), lane_dims=(-2,))


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
    group = jax.lax.div(lane, jnp.int32(_LANES // rule.groups))

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


@functools.partial(jax.jit, static_argnames=("k", "eps", "interpret"))  # layers lower once
def choose_experts(
    x: Array,
    scale: Array,
    router: Array,
    expert_scale: Array,
    live: Array,
    *,
    k: int,
    eps: float,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """See `api.choose_experts`; `interpret`, an `InterpretGPUParams`, is for tests on a CPU."""

    def run(x, scale, router, expert_scale, live):
        (T, D), E = x.shape, router.shape[1]
        splits, count, steps, width = _parts(T, D, E, _MOST_SPLIT, E)
        ahead = min(_AHEAD, count)
        scratch = [
            _staged(x.dtype, ahead, steps, _ROWS, _DEPTH),
            _staged(x.dtype, ahead, steps, _DEPTH, width),
            plgpu.SMEM((ahead, steps, _DEPTH), x.dtype),
            *([] if interpret is None else [_staged(x.dtype, _ROWS, _DEPTH)]),
            plgpu.Barrier(num_barriers=ahead, num_arrivals=3 * steps),
        ]
        parts = hopper.kernel(
            functools.partial(_multiply_scaled, count=count),
            out_type=jax.ShapeDtypeStruct((splits, T, E), jnp.float32),
            grid=(T // _ROWS, E // width, splits),
            grid_names=("rows", "experts", "split"),
            kernel_name="router_scores",
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=interpret is None),
            interpret=interpret,
        )(x, scale, router)
        given = parts, x, expert_scale, live.astype(jnp.int32)
        return _launch_choice(functools.partial(_choose_scaled, eps=eps), given, (T, k), interpret)

    # Mosaic kernels have no batching rule, so vmap runs them one after another.
    return jax.custom_batching.sequential_vmap(lambda *all: tuple(run(*all)))(
        x, scale, router, expert_scale, live
    )


def _multiply_scaled(x, scale, router, out, rows, weights, scales, *refs, count):
    """`_multiply` of scaled rows, without the norm's factor of each row."""
    *held, loaded = refs
    (ahead, steps, _, width), D = weights.shape, x.shape[1]
    row = pl.ds(pl.multiple_of(jax.lax.axis_index("rows") * _ROWS, _ROWS), _ROWS)
    experts = pl.ds(pl.multiple_of(jax.lax.axis_index("experts") * width, width), width)
    split, layout = jax.lax.axis_index("split"), plgpu.Layout.WGMMA

    def copy(i, slot):
        for j in range(steps):
            first = ((split * count + i) * steps + j) * _DEPTH
            at = pl.ds(pl.multiple_of(first, _DEPTH), _DEPTH)
            pairs = (x.at[row, at], rows), (router.at[at, experts], weights), (scale.at[at], scales)
            for source, target in pairs:
                plgpu.copy_gmem_to_smem(source, target.at[slot, j], loaded.at[slot])

    def parts_of(slot, j):
        """Scaled rows as sums of 16-bit numbers, the smallest first."""
        by = load(scales.at[slot, j], layout.reduce(0)).astype(jnp.float32) * D**-0.5
        rest = load(rows.at[slot, j], layout, optimized=True).astype(jnp.float32)
        rest *= jax.lax.broadcast_in_dim(by, rest.shape, [1])
        found = []
        for _ in range(_PARTS):
            found.append(rest.astype(x.dtype))
            rest -= found[-1].astype(jnp.float32)
        return reversed(found)

    def multiply(sums, slot):
        plgpu.barrier_wait(loaded.at[slot])
        for j in range(steps):
            for part in parts_of(slot, j):
                own = part
                if held:  # the interpreter multiplies operands in shared memory only
                    (own,) = held
                    own[...] = part
                plgpu.wgmma(sums, own, weights.at[slot, j])

    out[split, row, experts] = _sum_of_parts(copy, multiply, ahead, count, width)


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
