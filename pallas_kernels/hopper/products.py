"""Products over parts of a 128-byte line, for which Pallas has no operation."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.mosaic.gpu.wgmma import ir, llvm, nvvm, wgmma_m64
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from . import swizzled


def products_of_parts(
    rows: Any, weights: Any, parts: Sequence[Sequence[int]], is_interpreted: bool
) -> list[Array]:
    """Separate products over ranges of K of two 8-bit operands in shared memory, [64 K] and [N K].

    Pallas multiplies whole lines of 128 bytes. The tensor cores take 32 bytes at a time, from any
    place in a line, if the descriptor of the operand points there.

    Args:
        parts: First column and number of columns of each range; multiples of 32.
        is_interpreted: The interpreter runs this; it takes any range and has no descriptors.
    """
    count, depth = weights.shape
    shape = rows.shape[0], count
    if is_interpreted or all(first % 128 == size % 128 == 0 for first, size in parts):

        def product(*sums):
            for each, (first, size) in zip(sums, parts, strict=True):
                deep = pl.ds(first, size)
                plgpu.wgmma(each, rows.at[:, deep], weights.at[:, deep].T)
            return [each[...] for each in sums]

        return pl.run_scoped(product, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * len(parts))
    where = plgpu.RefType(swizzled(depth, jnp.float8_e4m3fn))
    out = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(where, where), return_type=[out] * len(parts))
    def run(_, a, b):
        b = mgpu.utils.memref_transpose(b, (1, 0, 3, 2))
        line = {"swizzle": 128, "large_tile": (128, 128)}
        sides = [
            mma_utils.create_descriptor(a, group_size=(64, 128), logical_k_major=False, **line),
            mma_utils.create_descriptor(b, group_size=(128, count), logical_k_major=True, **line),
        ]
        bases = [base for (base, _), _, _ in sides]
        lines = [stride for _, (_, stride), _ in sides]  # bytes between successive lines of a row
        i64 = ir.IntegerType.get_signless(64)
        kind = mgpu.utils.dtype_to_ir_type(jnp.float8_e4m3fn)
        sums = [mgpu.WGMMAAccumulator.zero(*shape) for _ in parts]
        found = []
        for each, (first, size) in zip(sums, parts, strict=True):
            registers = each._value.registers
            for at in range(first, first + size, 32):
                offsets = [at // 128 * stride + at % 128 for stride in lines]
                of_a, of_b = (
                    llvm.add(
                        base,
                        mgpu.utils.c(mma_utils.encode_addr(offset), i64),
                        overflow_flags=llvm.IntegerOverflowFlags.none,
                    )
                    for base, offset in zip(bases, offsets, strict=True)
                )
                registers = wgmma_m64(
                    registers,
                    of_a,
                    of_b,
                    a_transpose=False,
                    b_transpose=False,
                    a_k_stride=32,
                    b_k_stride=32,
                    n=count,
                    swizzle=32,  # one instruction
                    a_element_type=kind,
                    b_element_type=kind,
                )
            found.append(registers)
        nvvm.wgmma_commit_group_sync_aligned()
        nvvm.wgmma_wait_group_sync_aligned(0)
        arrays = [
            mgpu.FragmentedArray(
                _registers=registers, _layout=each._value.layout, _is_signed=each._value.is_signed
            )
            for registers, each in zip(found, sums, strict=True)
        ]
        return [mgpu.optimization_barrier(one).to_layout(mgpu.WGMMA_LAYOUT) for one in arrays]

    return run(rows, weights)  # pyright: ignore[reportCallIssue]
