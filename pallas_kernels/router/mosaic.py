"""Pallas Mosaic kernels for NVIDIA Hopper: two launches from rows to their experts.

1. `_multiply`: a tile of 64 rows times a part of the depth, on the tensor cores and yet in float32.
   The router has 16 bits, and a scaled row is the sum of three numbers of 16 bits each: three
   products whose terms are exact. The norm's own factor waits: it is one number a row.
2. `_choose`: four rows, a row to each warp: the parts added, the norm's factor, softmax, and the
   likeliest expert k times.
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
from ..hopper import load, swizzled
from ..layer.mosaic_heads import layout_of_rows

_ROWS = 64  # of a product
_DEPTH = 64  # of a step
# Rows, and most steps of a part for as many: on an H200 both launches take 9.6 us for 256 rows in
# parts of two steps, 11.9 of four; for 4,096 rows, with the loop's 10, 75 and 65.
_STEPS = ((1024, 2), (float("inf"), 4))
_PARTS = 3  # numbers of 16 bits whose sum has the 24 bits of one of 32
_CHOSEN = 4  # rows of a program that chooses
_WIDEST = 256  # of a row that is loaded at once


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
        most = next(steps for rows, steps in _STEPS if rows >= T)
        steps = math.gcd(D // _DEPTH, most)
        splits = D // _DEPTH // steps

        def staged(*shape):
            return plgpu.SMEM(shape, x.dtype, transforms=swizzled(_DEPTH, x.dtype))

        parts = hopper.kernel(
            _multiply,
            out_type=jax.ShapeDtypeStruct((splits, T, E), jnp.float32),
            grid=(T // _ROWS, splits),
            grid_names=("rows", "split"),
            kernel_name="router_scores",
            scratch_types=[
                staged(steps, _ROWS, _DEPTH),
                staged(steps, _DEPTH, E),
                staged(steps, _PARTS, _ROWS, _DEPTH),
                plgpu.Barrier(num_barriers=steps, num_arrivals=2),
            ],
            interpret=interpret,
        )(x, scale, router)
        kinds = (jnp.int32, jnp.float32)
        return hopper.kernel(
            functools.partial(_choose, eps=eps),
            out_type=[jax.ShapeDtypeStruct((T, k), kind) for kind in kinds],
            grid=(T // _CHOSEN,),
            grid_names=("rows",),
            kernel_name="router_choice",
            # Nothing reads what is written here, so threads need not wait for their warpgroup.
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
            interpret=interpret,
        )(parts, x, expert_scale, live.astype(jnp.int32))

    # Mosaic kernels have no batching rule, so vmap runs them one after another.
    return jax.custom_batching.sequential_vmap(lambda *all: tuple(run(*all)))(
        x, scale, router, expert_scale, live
    )


def _multiply(x, scale, router, out, rows, weights, parts, loaded):
    """A tile of rows times some of the depth; the norm's factor of a row is not in it."""
    steps = rows.shape[0]
    row = pl.multiple_of(jax.lax.axis_index("rows") * _ROWS, _ROWS)
    split, layout = jax.lax.axis_index("split"), plgpu.Layout.WGMMA
    tile = (_ROWS, _DEPTH)
    deep = [
        pl.ds(pl.multiple_of((split * steps + i) * _DEPTH, _DEPTH), _DEPTH) for i in range(steps)
    ]
    for i, at in enumerate(deep):
        plgpu.copy_gmem_to_smem(x.at[pl.ds(row, _ROWS), at], rows.at[i], loaded.at[i])
        plgpu.copy_gmem_to_smem(router.at[at], weights.at[i], loaded.at[i])
    for i, at in enumerate(deep):
        plgpu.barrier_wait(loaded.at[i])
        by = load(scale.at[at], layout.reduce(0)).astype(jnp.float32) * x.shape[1] ** -0.5
        by = jax.lax.broadcast_in_dim(by, tile, [1])
        rest = load(rows.at[i], layout, optimized=True).astype(jnp.float32) * by
        for part in range(_PARTS):
            own = rest.astype(x.dtype)
            parts[i, part] = own
            rest -= own.astype(jnp.float32)
    plgpu.commit_smem()

    def products(sums):
        for i in range(steps):
            for part in reversed(range(_PARTS)):
                plgpu.wgmma(sums, parts.at[i, part], weights.at[i])
        plgpu.wgmma_wait(0)
        return sums[...]

    shape = (_ROWS, router.shape[1])
    sums = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    out[split, pl.ds(row, _ROWS)] = sums


def _choose(parts, x, expert_scale, live, ids, weights, *, eps):
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
    from_last = (E - 1) - number
    chosen = []
    for _ in range(k):
        best = jnp.max(scores, axis=1)
        # The lowest of equals is the highest from the last on: a maximum is one instruction.
        which = (E - 1) - jnp.max(jnp.where(scores == across(best), from_last, -1), axis=1)
        mine = number == across(which)
        chosen.append((which, best, jnp.sum(jnp.where(mine, own, 0.0), axis=1)))
        scores = jnp.where(mine, -1.0, scores)
    total = functools.reduce(jnp.add, [best for _, best, _ in chosen])
    is_live = load(live.at[rows], layout.reduce(1)) != 0
    for j, (which, best, factor) in enumerate(chosen):
        ids[rows, j] = jnp.where(is_live, which, E)
        weights[rows, j] = best / total * factor
