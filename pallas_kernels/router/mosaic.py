"""Pallas Mosaic kernels for NVIDIA Hopper: two launches from rows to their experts.

1. Multiply a tile of up to 64 rows by a part of the depth. Tensor cores give float32 results here,
   since products of 16-bit numbers are exact. `scores` takes normed rows; `scaled_scores` splits
   each number of a scaled row into a sum of three 16-bit numbers. With many rows a block takes the
   whole depth, part by part, for some of the experts. Parts have the same depth for any number of
   rows, and are added in order, so that the bits of a row's scores do not depend on other rows.
2. `mosaic_choice.py`: add the parts and pick the best experts of each row.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .. import hopper
from ..hopper import load, swizzled, whole
from ..lowered import lowered_once
from .mosaic_choice import LANES, ROWS, choose, choose_scaled
from .reference import Rule

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
_NUMBERS = 3  # 16-bit numbers whose sum has the 24 bits of a float32
_LEAST_ROWS = 8  # rows of a swizzled tile


def unsupported(x: Array, router: Array) -> str | None:
    """Why `choose_experts` cannot take these arguments here, or None."""
    return _unsupported(x, router, ROWS, (64, 128))


def unsupported_route(x: Array, router: Array, rule: Rule) -> str | None:
    """Why `route` cannot take these arguments here, or None."""
    if reason := _unsupported(x, router, _LEAST_ROWS, (64, 128, 256)):  # two, four or eight a lane
        return reason
    if LANES % rule.groups:
        return f"needs a number of groups that divides {LANES}, got {rule.groups}"
    return None


def _unsupported(x: Array, router: Array, rows: int, experts: tuple[int, ...]) -> str | None:
    D, E = router.shape
    if reason := hopper.unsupported() or hopper.unsupported_version():
        return reason
    if x.dtype != jnp.bfloat16 or router.dtype != x.dtype:
        return f"needs rows and router in bfloat16, got {x.dtype} and {router.dtype}"
    if not len(x) or len(x) % rows or D % _DEPTH or E not in experts:
        return (
            f"needs a multiple of {rows} rows and of {_DEPTH} components, and a number of experts "
            f"in {experts}, got {len(x)}, {D} and {E}"
        )
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

    def run(x, router, given):
        return choose(scores(x, router, interpret), len(x), given, rule, interpret)

    given = {} if bias is None else {"bias": bias.reshape(LANES, -1)}
    if live is not None:
        given["live"] = live.astype(jnp.int32)
    # Mosaic kernels have no batching rule, so vmap runs them one after another.
    return jax.custom_batching.sequential_vmap(run)(x, router, given)


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
        parts = scaled_scores(x, scale, router, interpret)
        return choose_scaled(parts, x, expert_scale, live.astype(jnp.int32), k, eps, interpret)

    # As in `route`.
    return jax.custom_batching.sequential_vmap(run)(x, scale, router, expert_scale, live)


class _Cut(NamedTuple):
    """The division of a product among blocks and their steps."""

    splits: int  # blocks that split the depth
    parts: int  # of a block
    ahead: int  # of them in flight
    steps: int  # of a part
    width: int  # experts of a block


def _cut(T: int, D: int, E: int, most_split: int, split_width: int) -> _Cut:
    steps = math.gcd(D // _DEPTH, _PART)
    count = D // _DEPTH // steps
    if most_split >= T:
        return _Cut(count, 1, 1, steps, min(E, split_width))
    return _Cut(1, count, min(_AHEAD, count), steps, min(E, _WIDTH))


def scores(x: Array, router: Array, interpret: Any) -> Array:
    """Scores of normed rows by part of the depth; rows are padded to whole tiles of 64."""
    D, E = router.shape
    cut = _cut(len(x), D, E, _MOST_SPLIT_NORMED, _WIDTH)
    loaded = plgpu.Barrier(num_barriers=cut.ahead * cut.steps, num_arrivals=2)
    return _launch(_multiply, (x, router), cut, [loaded], interpret)


def scaled_scores(x: Array, scale: Array, router: Array, interpret: Any) -> Array:
    """`scores` of rows times `scale`, without the norm's factor of each row."""
    D, E = router.shape
    cut = _cut(len(x), D, E, _MOST_SPLIT, E)
    more = [
        plgpu.SMEM((cut.ahead, cut.steps, _DEPTH), x.dtype),
        *([] if interpret is None else [_staged(x.dtype, ROWS, _DEPTH)]),
        plgpu.Barrier(num_barriers=cut.ahead, num_arrivals=3 * cut.steps),
    ]
    return _launch(_multiply_scaled, (x, scale, router), cut, more, interpret)


def _launch(
    body: Callable[..., None], given: tuple[Array, ...], cut: _Cut, more: list[Any], interpret: Any
) -> Array:
    """Multiply the first operand by the last; `more` is scratch after the two rings."""
    x, *_, router = given
    tiles, E = len(x) // math.gcd(len(x), ROWS), router.shape[1]
    return hopper.kernel(
        functools.partial(body, count=cut.parts),
        out_type=jax.ShapeDtypeStruct((cut.splits, tiles * ROWS, E), jnp.float32),
        grid=(tiles, E // cut.width, cut.splits),
        grid_names=("rows", "experts", "split"),
        kernel_name="router_scores",
        scratch_types=[
            _staged(x.dtype, cut.ahead, cut.steps, ROWS, _DEPTH),
            _staged(x.dtype, cut.ahead, cut.steps, _DEPTH, cut.width),
            *more,
        ],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=interpret is None),
        interpret=interpret,
    )(*given)


def _staged(dtype: Any, *shape: int) -> Any:
    return plgpu.SMEM(shape, dtype, transforms=swizzled(_DEPTH, dtype))


def _multiply(x, router, out, rows, weights, loaded, *, count):
    """A tile of rows times some experts, over `count` parts of the depth."""
    steps, tile, split = rows.shape[1], jax.lax.axis_index("rows"), jax.lax.axis_index("split")
    height, width = math.gcd(x.shape[0], ROWS), weights.shape[-1]
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
    out[split, pl.ds(pl.multiple_of(tile * ROWS, ROWS), ROWS), experts] = total


def _sum_of_parts(copy, multiply, ahead, count, width):
    """Separate products of `count` parts of the depth, added in order.

    The second launch adds its parts in the same order.

    Args:
        copy: Starts the load of a part into a slot of the ring.
        multiply: Waits for the part in a slot and adds its product to an accumulator.
        ahead: Slots of the ring.
    """

    def step(i):
        def products(sums):
            multiply(sums, jax.lax.rem(i, whole(ahead)))

            @pl.when((i > 0) & (i - 1 + ahead < count))
            def _():
                plgpu.commit_smem()  # all threads have used the previous part
                copy(i - 1 + ahead, jax.lax.rem(i - 1 + ahead, whole(ahead)))

            plgpu.wgmma_wait(0)
            return sums[...]

        sums = plgpu.WGMMAAccumulatorRef((ROWS, width), jnp.float32)
        return pl.run_scoped(products, sums)

    for i in range(ahead):
        copy(whole(i), whole(i))
    if count == 1:
        return step(whole(0))
    total = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
    return jax.lax.fori_loop(0, count, lambda i, total: total + step(i), total)


def _multiply_scaled(x, scale, router, out, rows, weights, scales, *refs, count):
    """`_multiply` of scaled rows, without the norm's factor of each row."""
    *held, loaded = refs
    (ahead, steps, _, width), D = weights.shape, x.shape[1]
    row = pl.ds(pl.multiple_of(jax.lax.axis_index("rows") * ROWS, ROWS), ROWS)
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
        for _ in range(_NUMBERS):
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
