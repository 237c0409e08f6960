"""What the Mosaic kernels share: the GPU that they need, its sizes, loads, rings, and swizzles."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.mosaic.gpu.wgmma import ir, llvm, nvvm, wgmma_m64
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

MULTIPROCESSORS = 132
SHARED_BYTES = 226 * 1024  # of 227 KiB; barriers need the rest


def unsupported() -> str | None:
    """Why no Mosaic kernel runs on this device, or None."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if jax.default_backend() != "gpu" or capability != "9.0":
        return "needs an NVIDIA GPU of the Hopper kind"
    return None


def unsupported_version() -> str | None:
    """Why no Mosaic kernel runs with this JAX, or None."""
    if jax.__version_info__ < (0, 11, 2):
        return f"needs jax 0.11.2, got {jax.__version__}"
    return None


def kernel(body: Callable[..., None], **options: Any) -> Callable[..., Any]:
    """`plgpu.kernel`, each of whose operands begins at a whole line of 256 bytes.

    XLA has a custom call read a slice in place, wherever it begins ("dynamic slice fusion"), and
    Mosaic refuses that at the launch. XLA does not look behind a barrier, which costs nothing.
    """
    launch = plgpu.kernel(body, **options)
    return lambda *operands: launch(*jax.lax.optimization_barrier(operands))


def load(ref: Any, layout: Any, optimized: bool = False) -> Array:
    """A whole reference, in registers of this layout."""
    # jax 0.10 requires an index here.
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]


def load_scales(ref: Any, axis: int, shape: tuple[int, int]) -> Array:
    """Scales of rows (axis 0) or columns of a product, for each of its sums."""
    scales = load(ref, plgpu.Layout.WGMMA.reduce(1 - axis))
    return jax.lax.broadcast_in_dim(scales, shape, [axis])


def next_buffer(slot: Array, stages: int) -> Array:
    """The next slot of a ring; a remainder would take some 40 instructions."""
    return jnp.where(slot == stages - 1, 0, slot + 1).astype(jnp.int32)


def swizzled(width: int, dtype: jax.typing.DTypeLike, parts: int = 1):
    """How a buffer lies in shared memory for products and TMA: tiles of 8 lines, swizzled.

    Args:
        parts: 2 if the lines are those of [lines, several, width], which a product takes side by
            side.
    """
    itemsize = jnp.dtype(dtype).itemsize
    line = math.gcd(width, 128 // itemsize)
    tiled = plgpu.TilingTransform((8, *[1] * (parts - 1), line))  # pyright: ignore[reportAbstractUsage]
    return tiled, plgpu.SwizzleTransform(line * itemsize)  # pyright: ignore[reportAbstractUsage]


def products_of_parts(
    rows: Any, weights: Any, parts: Sequence[Sequence[int]], is_interpreted: bool
) -> list[Array]:
    """Products of parts of what lies in shared memory [64 K] and [N K], 8 bits, each by itself.

    Pallas multiplies whole lines of 128 bytes; the tensor cores take 32 bytes of one at a time, at
    any place, if the descriptor of the operand says so.

    Args:
        parts: First column of each, and how many; multiples of 32.
        is_interpreted: By the interpreter, which takes any part and has no descriptors.
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
        lines = [stride for _, (_, stride), _ in sides]  # bytes from a line to the next of a row
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
