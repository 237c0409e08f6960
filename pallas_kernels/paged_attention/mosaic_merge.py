"""How the blocks of a cluster merge their parts of a result of the Mosaic form.

Each block takes some columns; where its two warpgroups share keys, each of these does. What the
others have of them they store into its shared memory, or into global memory where that is too small
and where the kernel is interpreted: the interpreter knows no other block's shared memory. Mosaic
begins no block of a cluster before all are there, and none ends before it has its parts. Plain
stores: Pallas's own `async_store_smem` counts the bytes of every thread at the peer's barrier,
which took 2.8 us more (benchmarks/notes/attention.md).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ..hopper import cluster, load, swizzled

SWIZZLE = 32  # bytes of a row of 8 columns in float32, the fewest that a block takes


def part_transforms():
    """How a part's columns lie in shared memory: 8 rows of 32 bytes, swizzled."""
    return swizzled(SWIZZLE // 4, jnp.float32)


def merged(
    mean, log_mass, largest=None, *, index, warpgroup, place, parts, scratch, tiling
) -> tuple[Array, Array | None]:
    """This part's columns of the mean over all parts, each weighted by the mass of its keys.

    Beside it, what no number of any column is above: the mean of `largest` in the same way. All
    parts compute the same.

    Args:
        mean, log_mass: Of this part's keys, for each row of the warpgroup.
        largest: Of the numbers of `mean`; None: not asked for.
        index: Which part this is.
        warpgroup: Which of the block's.
        place: Where the warpgroup's rows are in `parts`.
        parts: Means and masses of all parts in global memory; none where `scratch` holds them.
        scratch: What `mosaic` makes.
        tiling: See `mosaic.Tiling`.
    """
    layout = plgpu.Layout.WGMMA
    per_row = layout.reduce(1)
    width = mean.shape[1] // tiling.parts
    arrived = scratch["parts_in"].at[0]
    own, bounds = None, []
    if parts:
        means, masses, *bounds = parts
        means[index, *place] = mean
        masses[index, *place] = log_mass
        for each in bounds:
            each[index, *place] = largest
        columns = pl.ds(pl.multiple_of(index * width, width), width)
        means = [means.at[i, *place, :, columns] for i in range(tiling.parts)]
        masses = [masses.at[i, *place] for i in range(tiling.parts)]
        bounds = [each.at[i, *place] for each in bounds for i in range(tiling.parts)]
        _fence("gpu", scratch)
        plgpu.barrier_arrive(arrived)
        plgpu.barrier_wait(arrived)
        _fence("gpu", scratch)
    else:
        theirs, masses = scratch["means"], scratch["masses"]
        own, lies = jnp.zeros_like(mean[:, :width]), part_transforms()
        for peer in range(tiling.parts):
            block, owner = divmod(peer, 2) if tiling.shares_keys else (peer, warpgroup)
            cluster.store_row(log_mass, masses.at[owner, index], block)
            if largest is not None:
                cluster.store_row(largest, scratch["largest"].at[owner, index], block)
            columns = mean[:, peer * width : (peer + 1) * width]
            own = jnp.where(jnp.broadcast_to(index == peer, own.shape), columns, own)

            @pl.when(index != peer)
            def _(columns=columns, peer=peer, block=block, owner=owner):
                place = index - (index > peer).astype(jnp.int32)
                cluster.store_mean(columns, theirs.at[owner, place], block, lies, SWIZZLE)

        means = [theirs.at[warpgroup, i] for i in range(tiling.parts - 1)]
        masses = [masses.at[warpgroup, i] for i in range(tiling.parts)]
        if largest is not None:
            bounds = [scratch["largest"].at[warpgroup, i] for i in range(tiling.parts)]
        _fence("cluster", scratch)
        plgpu.barrier_arrive(arrived)
        plgpu.barrier_wait(arrived)  # shared memory is not cached, so no fence is needed
    masses = [load(one, per_row) for one in masses]
    peak = functools.reduce(jnp.maximum, masses)
    weights = [jnp.exp2(one - peak) for one in masses]
    across = lambda row: jax.lax.broadcast_in_dim(row, (len(row), width), [0])  # noqa: E731
    if own is None:
        terms = [load(one, layout) * across(w) for one, w in zip(means, weights, strict=True)]
    else:
        terms = [own * across(jnp.exp2(log_mass - peak))]
        for i, one in enumerate(means):  # of part i, or of the next where the own is not behind it
            is_before = (index > i).astype(jnp.float32)
            weight = weights[i] * is_before + weights[i + 1] * (1.0 - is_before)
            terms.append(load(one, layout) * across(weight))
    whole = functools.reduce(jnp.add, weights)
    bound = None
    if bounds:
        terms_of = [
            load(one, per_row) * weight for one, weight in zip(bounds, weights, strict=True)
        ]
        bound = functools.reduce(jnp.add, terms_of) / whole
    return functools.reduce(jnp.add, terms) / across(whole), bound


def _fence(scope, scratch):
    """Order the stores of the warpgroup's threads before its later loads and arrivals."""
    if "weights" not in scratch:  # not interpreted
        cluster.fence(scope)
