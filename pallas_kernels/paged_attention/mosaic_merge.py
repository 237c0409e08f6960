"""The merge of the parts of a result among the blocks of a cluster, in the Mosaic form.

Each block merges some columns of the result; if its two warpgroups share keys, each warpgroup does.
The other blocks store their part of these columns into its shared memory. They use global memory
if shared memory is too small, or under the interpreter, which cannot reach another block's shared
memory. Mosaic starts the blocks of a cluster together, and a block ends only after it has received
its parts. Plain stores are used because Pallas's `async_store_smem` counts the bytes of every
thread at the barrier of the peer, which took 2.8 us more (benchmarks/notes/attention.md).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ..hopper import cluster, load, swizzled

SWIZZLE = 32  # bytes of 8 float32 columns of a row, the fewest that a block merges


def part_transforms():
    """Layout of the columns of a part in shared memory: tiles of 8 rows of 32 bytes, swizzled."""
    return swizzled(SWIZZLE // 4, jnp.float32)


def merged(
    mean, log_mass, largest=None, *, index, warpgroup, place, parts, scratch, tiling
) -> tuple[Array, Array | None]:
    """This part's columns of the mean over all parts, each weighted by the mass of its keys.

    Also returns an upper bound of every column: the weighted mean of `largest`, which is the same
    for all parts.

    Args:
        mean, log_mass: Mean and log mass of this part's keys, for each row of the warpgroup.
        largest: Largest number of each row of `mean`; None if the bound is not needed.
        index: Index of this part.
        warpgroup: Index of the warpgroup in its block.
        place: Where the rows of the warpgroup are in `parts`.
        parts: Means and masses of all parts in global memory; empty if `scratch` holds them.
        scratch: The scratch memory that `mosaic` allocates.
        tiling: See `mosaic_tiling.Tiling`.
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
        for i, one in enumerate(means):  # skip this block's own part: later parts shift by one
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
