"""The choice of tiles for products of few rows, and why the kernels cannot take operands."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..hopper import MULTIPROCESSORS, SHARED_BYTES
from .fp8 import DTYPE as FP8
from .fp8 import Fp8Matrix
from .mosaic import num_rows, unsupported_pair

ROWS = 64  # rows of a warpgroup's product
MOST_ROWS = 2 * ROWS  # the registers hold the sums of two warpgroups
ROW_MULTIPLE = 8  # rows of a swizzled tile
_STEP = 64  # least columns of a tile
# Columns of a tile of a product with one rounding; wider ones for matrices of more blocks than run
# at once (LLaDA-8B's query, key and value), which otherwise go to XLA.
ANY_COLUMNS = (_STEP, 2 * _STEP)
_LINE_BYTES = 128  # depth of a tile: the longest line that can be swizzled
_LINE = 16  # 16-bit columns of the shortest line that can be swizzled
_MOST_STAGES = 8
_LEAST_DEEP = 3  # least stages of double depth; with two, gate and up take 9 to 26 % longer
# Bytes in flight of all thread blocks together. With 2 to 3 MiB more, SDAR-8B's down projection
# takes 29.1 us instead of 28.2, gate and up 51.8 instead of 50.8.
_IN_FLIGHT_BYTES = 22 * 2**20
_MOST_SPLITS = 4
GROUP = 64  # least columns of a group with one scale
PART = 32  # 8-bit columns of one instruction
_SHALLOW = 2048  # up to this depth, tiles of half the columns win (8 bits, few rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """The work of one thread block.

    Attributes:
        columns: Columns of the weights.
        depth: Depth of both operands in one step.
        stages: Steps in flight.
        splits: Blocks that split the depth of a tile; the reader adds up their partial sums.
    """

    columns: int = 64
    depth: int = 64
    stages: int = 4
    splits: int = 1


def unsupported_turn(width: int) -> str | None:
    """Why `gated_matmul` cannot take gate and up interleaved by `width` columns, or None."""
    if width % _LINE:  # each piece of the result is swizzled separately
        return f"needs turns of a multiple of {_LINE} columns, got {width}"
    return None


def unsupported_product(x: Array, w: Array | Fp8Matrix, tiling: Tiling | None) -> str | None:
    """Why the products cannot take such operands, or None; `w` as [K N]."""
    rows = num_rows(x)
    if reason := unsupported_pair(x, w):
        return reason
    if rows > MOST_ROWS or rows % ROW_MULTIPLE:
        return f"needs a multiple of {ROW_MULTIPLE} rows, at most {MOST_ROWS}, got {rows}"
    if tiling is None:
        tiles = f"tiles of {_STEP} columns or more, at most {MULTIPROCESSORS} side by side"
        return f"needs whole {tiles}, got {w.shape}"
    return None


def choose_tiling(
    x: Array | jax.ShapeDtypeStruct,
    w: Array | Fp8Matrix,
    columns: tuple[int, ...] = (_STEP,),
    is_gated: bool = False,
    dtype: Any = None,
    groups: int = 1,
    splits: int | None = None,
) -> Tiling | None:
    """A tiling for `x @ w` with `w` as [K N]; None if no whole tiles fit.

    All its thread blocks run at once. It is within 4 % of the fastest tiling tried on an H200 with
    the shapes of SDAR-1.7B and -8B (benchmarks/notes/few_row_products.md).

    Args:
        columns: Widths to try, in order.
        is_gated: Half the columns come out, without partial sums.
        dtype: Type of the resulting rows; None for that of `x`.
        groups: Number of scales of an 8-bit row.
        splits: Parts of the depth, if fixed (`segments`).
    """
    K, N = w.shape
    consumers = -(-num_rows(x) // ROWS)
    rows, itemsize = consumers * ROWS, w.dtype.itemsize
    line = _LINE_BYTES // itemsize
    is_8_bit = w.dtype == FP8
    is_deep = consumers == 1 and (is_8_bit or not is_gated)
    if is_8_bit and is_deep and not is_gated and K <= _SHALLOW:
        columns = (_STEP // 2, *columns)
    depths = (2 * line, line) if is_deep else (line,)
    if is_deep and groups > 1:
        depths += (3 * line,)  # whole groups of 96
    # The 8-bit gate and up were timed with stages chosen by the unpadded number of rows.
    asked = num_rows(x) if is_8_bit and is_gated else rows
    for width in columns:
        blocks = N // width
        if N % width or not 0 < blocks <= MULTIPROCESSORS:
            continue
        most = 1 if is_gated else min(MULTIPROCESSORS // blocks, _MOST_SPLITS)
        for depth in depths:
            several = range(most, 0, -1) if splits is None else (splits,)
            parts = next((n for n in several if K % (n * depth) == 0), 0)
            if not parts or (groups > 1 and depth * groups % K):  # of whole groups
                continue
            kind = result_dtype(dtype or x.dtype, parts)
            staged = rows * (width // 2 if is_gated else width) * kind.itemsize
            staged = staged if is_staged(num_rows(x), kind) else 0
            staged += (rows * -(-groups // parts) + width) * 4 if is_8_bit else 0  # their scales
            step = depth * itemsize
            stages = (SHARED_BYTES - staged) // ((rows + width) * step)
            in_flight = _IN_FLIGHT_BYTES // ((asked + width) * step * blocks * parts)
            stages = min(stages, in_flight, _MOST_STAGES)
            if is_gated and depth > line and stages < _LEAST_DEEP:
                continue
            return Tiling(columns=width, depth=depth, stages=stages, splits=parts)
    return None


def segments(w: Array) -> int:
    """Number of parts of the depth in which sums of a product with `w` [K N] are accumulated.

    It depends on the matrix alone, so that the bits of a row do not depend on the number of rows.
    """
    tiling = choose_tiling(jax.ShapeDtypeStruct((MOST_ROWS, len(w)), w.dtype), w, ANY_COLUMNS)
    return 1 if tiling is None else tiling.splits


def result_dtype(dtype: Any, splits: int) -> jnp.dtype:
    """The type of a product's result: `dtype`, or float32 for partial sums."""
    return jnp.dtype(dtype if splits == 1 else jnp.float32)


def is_staged(rows: int, dtype: jnp.dtype) -> bool:
    """Whether results are stored through shared memory and TMA.

    A tile with fewer rows needs it, since rows past the last must not be written. It also pays for
    16 bits: adjacent threads hold two numbers each, so a direct store fills half a sector only. It
    saves 1.2 us of SDAR-8B's qkv with 128 rows.
    """
    return rows % ROWS > 0 or dtype.itemsize <= 2
