"""Shared parts of the Mosaic kernels: device checks, sizes of the GPU, loads, rings and layouts.

This folder alone uses names that Mosaic does not promise to keep: `jax.experimental.mosaic`, and
`inline_mgpu`. tests/kernels/test_hopper.py looks each of them up, so that a version of JAX that
lacks one fails there.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
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


def by_lane(**options: Any) -> Any:
    """`plgpu.CompilerParams` of a kernel that gives every layout and uses no shared memory.

    By default jax 0.11 infers layouts, in Python, for which such a kernel takes 4 to 8 times as
    long to lower. Kernels with shared memory keep the default, by which they were measured.
    """
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, **options)


def kernel(body: Callable[..., None], **options: Any) -> Callable[..., Any]:
    """`plgpu.kernel` with every operand aligned to 256 bytes.

    XLA may pass a slice of an array in place ("dynamic slice fusion"), and the launch then fails
    because Mosaic requires aligned operands. An optimization barrier prevents that at no cost.
    """
    launch = plgpu.kernel(body, **options)
    return lambda *operands: launch(*jax.lax.optimization_barrier(operands))


def whole(number: Any) -> Array:
    """Convert a number to int32, the type of all integers of the kernels."""
    return jnp.asarray(number, jnp.int32)


def load(ref: Any, layout: Any, optimized: bool = False) -> Array:
    """Load a whole reference into registers of this layout."""
    # jax 0.10 requires an index here.
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]


def load_scales(ref: Any, axis: int, shape: tuple[int, int]) -> Array:
    """Scales of the rows (axis 0) or columns (axis 1) of a product, broadcast to its sums."""
    scales = load(ref, plgpu.Layout.WGMMA.reduce(1 - axis))
    return jax.lax.broadcast_in_dim(scales, shape, [axis])


def next_buffer(slot: Array, stages: int) -> Array:
    """The next slot of a ring, without a remainder, which takes some 40 instructions."""
    return jnp.where(slot == stages - 1, 0, slot + 1).astype(jnp.int32)


def swizzled(width: int, dtype: jax.typing.DTypeLike, parts: int = 1):
    """Layout of a shared memory buffer for products and TMA: swizzled tiles of 8 lines.

    Args:
        parts: 2 for a buffer [lines, several, width], whose middle axis a product reads as more
            lines.
    """
    itemsize = jnp.dtype(dtype).itemsize
    line = math.gcd(width, 128 // itemsize)
    tiled = plgpu.TilingTransform((8, *[1] * (parts - 1), line))  # pyright: ignore[reportAbstractUsage]
    return tiled, plgpu.SwizzleTransform(line * itemsize)  # pyright: ignore[reportAbstractUsage]


def tiled(
    tiles: tuple[tuple[int, ...], ...], warp_dims: tuple[int, ...], lane_dims: tuple[int, ...]
) -> Any:
    """A register layout of nested tiles; a lane holds the last axis contiguously.

    Args:
        tiles: Shapes of the tiles; each divides the one before it.
        warp_dims, lane_dims: Axes of the tiled shape, counted from its end, over which warps and
            lanes are spread.
    """
    return plgpu.Layout.TILED(Tiling(tiles), warp_dims, lane_dims, vector_dim=-1)
