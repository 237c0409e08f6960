"""Stores to the shared memory of another block of a cluster, and fences among its blocks."""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array


def store_mean(mean: Array, ref: Any, peer: int, transforms: Any, swizzle: int) -> None:
    """Store tiles to the same place in the shared memory of another block of the cluster.

    Args:
        transforms, swizzle: Layout of the target.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(transforms)))
    def store(_, mean, ref):
        llvm = utils.llvm  # pyright: ignore[reportPrivateImportUsage]
        shape = {"layout": mean.layout, "shape": mean.shape, "ref_tiling_rank": 2}
        generic = llvm.PointerType.get()
        for get, _, _, pointer in mean.transfer_tiled(_of_peer(ref, peer, False), swizzle, **shape):
            llvm.store(get(mean.registers), llvm.addrspacecast(generic, pointer))

    store(mean, ref)  # pyright: ignore[reportCallIssue]


def store_row(values: Array, ref: Any, peer: int) -> None:
    """Store one number a row to the same place in another block of the cluster."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA.reduce(1), plgpu.RefType()))
    def store(_, values, ref):
        values.store_untiled(_of_peer(ref, peer, True), optimized=False)

    store(values, ref)  # pyright: ignore[reportCallIssue]


def _of_peer(ref, peer, generic):
    """A reference to the shared memory of another block; the cluster has one axis."""
    index = utils.ir.IndexType.get()  # pyright: ignore[reportPrivateImportUsage]
    axis = utils.gpu.Dimension.x  # pyright: ignore[reportPrivateImportUsage]
    return utils.get_cluster_ref(ref, axis, utils.c(peer, index), generic=generic)


def fence(scope: str) -> None:
    """Order the stores of the warpgroup's threads before its later loads and arrivals."""

    @plgpu.inline_mgpu()
    def run(_):
        utils.inline_ptx(f"fence.acq_rel.{scope};", has_side_effects=True)  # pyright: ignore[reportAttributeAccessIssue]
        utils.warpgroup_barrier()  # one thread arrives for all

    run()  # pyright: ignore[reportCallIssue]
