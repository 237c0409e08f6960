"""The choice of tiles for products of many rows, and why the kernels cannot take operands."""

import math
from collections.abc import Iterable

from jaxtyping import Array

from ..hopper import MULTIPROCESSORS
from .fp8 import DTYPE, Fp8Matrix
from .mosaic import num_rows, unsupported_pair

CONSUMERS, ROWS = 2, 64  # warpgroups that multiply, and rows of each
TILE = CONSUMERS * ROWS  # rows of a tile
DEPTH_BYTES = 128  # depth of a step
# Columns of a tile (gate and up together), in order of preference: the registers hold 256 sums a
# row; 192 columns are up to 2 % slower, but often fill the chip better.
_COLUMNS = (256, 192)
# Columns of a tile of a 16-bit product. H200, SDAR-1.7B, 1,024 rows: 128 columns are 14 to 38 %
# faster than 256, which give one round of tiles, so that nothing overlaps with the last stores.
_PRODUCT_COLUMNS = (256, 128, 64)
_MOST_STAGES = 6  # most steps in flight that fit in shared memory
_TURNS = (16, 32, 64)  # widths of the groups in which gate and up are interleaved
_CLOSE = 0.02  # smaller differences of shares count as ties


def unsupported_gated(x: Array, w: Array | Fp8Matrix) -> str | None:
    """Why `gated_matmul` cannot take such operands, or None; `w` as [D C 2 W]."""
    depth = DEPTH_BYTES // w.dtype.itemsize
    rows, (D, C, _, W) = num_rows(x), w.shape
    if reason := unsupported_pair(x, w):
        return reason
    if rows % TILE:
        return f"needs a multiple of {TILE} rows where there are more, got {rows}"
    if W not in _TURNS or not _widths(w, W):
        return (
            f"needs turns of 16, 32 or 64 columns, 96 or 128 of gate in each tile, got {C} of {W}"
        )
    if D % depth or max(_widths(w, W)) * depth > D * 2 * W:
        return f"needs a multiple of {depth} as depth, a step of it for each turn, got {D}"
    return _unsupported_depth(D, w)


def unsupported_product(x: Array, w: Array | Fp8Matrix) -> str | None:
    """Why `matmul` cannot take such operands, or None; `w` as [K N]."""
    rows, (K, N) = num_rows(x), w.shape
    if reason := unsupported_pair(x, w):
        return reason
    if rows % TILE:
        return f"needs a multiple of {TILE} rows where there are more, got {rows}"
    columns = _COLUMNS if w.dtype == DTYPE else _PRODUCT_COLUMNS
    if all(N % n for n in columns):
        return f"needs whole tiles of {', '.join(map(str, columns))} columns, got {N}"
    return _unsupported_depth(K, w)


def _unsupported_depth(depth: int, w: Array | Fp8Matrix) -> str | None:
    """Why a product cannot have this depth, or None.

    The scales of a tile overwrite those of the tile before the last. The warpgroups that multiply
    have finished that tile only if the ring has come round since, so a tile has a least depth.
    """
    step = DEPTH_BYTES // w.dtype.itemsize
    if depth % step or (w.dtype == DTYPE and depth < _MOST_STAGES * step):
        least = f", {_MOST_STAGES} or more" if w.dtype == DTYPE else ""
        return f"needs a depth of whole steps of {step}{least}, got {depth}"
    return None


def choose_columns(x: Array, w: Array | Fp8Matrix) -> tuple[int, float]:
    """Columns of a tile, and the mean share of multiprocessors that are then busy.

    Args:
        w: As [D C 2 W], or as [K N] for `matmul`.
    """
    turn = w.shape[-1] if len(w.shape) == 4 else 1
    return _busiest(num_rows(x), math.prod(w.shape[1:]), _widths(w, turn))


def product_columns(rows: int, w: Array, segments: int) -> int:
    """Columns of a tile of `matmul` in 16 bits: the most that fill the chip in several rounds.

    With segments the registers hold sums and totals, so a tile has at most 128 columns. Tiles of 64
    are for what runs in one round: they read three quarters as much for half the work.
    """
    N = w.shape[1]

    def fits(columns: int) -> bool:
        has_rounds = rows // TILE * N // columns > MULTIPROCESSORS
        if columns < TILE:
            return not has_rounds or N % TILE > 0
        return columns == TILE or (segments == 1 and has_rounds)

    return _busiest(rows, N, (n for n in _PRODUCT_COLUMNS if N % n == 0 and fits(n)))[0]


def _busiest(rows: int, width: int, every: Iterable[int]) -> tuple[int, float]:
    """The first of the tile widths that keep most multiprocessors busy, and their mean share."""
    tiles = {columns: rows // TILE * width // columns for columns in every}
    shares = {
        n: count / (MULTIPROCESSORS * -(-count // MULTIPROCESSORS)) for n, count in tiles.items()
    }
    best = max(shares.values())
    return next((columns, share) for columns, share in shares.items() if share > best - _CLOSE)


def _widths(w: Array | Fp8Matrix, turn: int) -> list[int]:
    """The tile widths that divide the columns and hold whole groups of gate and up."""
    width = math.prod(w.shape[1:])
    return [n for n in _COLUMNS if n % (2 * turn) == 0 and width % n == 0]
