"""Some consecutive cells of each window: those of a narrow pass, or of a narrow readout."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class Cells(NamedTuple):
    """`size` cells of each window [K S] from `first` on; rows past the window belong to no cell."""

    shape: tuple[int, int, int]
    first: Int[Array, " B"] | int
    size: int

    @property
    def width(self) -> int:
        """Cells of a window."""
        return self.shape[1] * self.shape[2]

    def narrow(self, cells: Float[Array, "B K S ..."]) -> Float[Array, "B T ..."]:
        """The rows of these cells."""
        B, K, S = self.shape
        return narrowed(cells.reshape(B, K * S, *cells.shape[3:]), self.first, self.size)

    def rows(self, cells: Float[Array, "B K S ..."]) -> Float[Array, "R ..."]:
        """The rows of these cells, slot after slot."""
        own = self.narrow(cells)
        return own.reshape(own.shape[0] * own.shape[1], *own.shape[2:])

    def widen(self, rows: Any) -> Any:
        """A tree of [B T ...] as [B W ...], zero in other cells."""
        return jax.tree.map(lambda leaf: widened(leaf, self.first, self.width), rows)

    def scatter(self, rows: Any) -> Any:
        """A tree of [R ...] as [B K S ...], zero in other cells."""

        def one(leaf: Array) -> Array:
            own = leaf.reshape(self.shape[0], self.size, *leaf.shape[1:])
            return self.widen(own).reshape(*self.shape, *leaf.shape[1:])

        return jax.tree.map(one, rows)


def first_cells(
    where: Bool[Array, "B K S"] | np.ndarray, width: int | None
) -> tuple[Cells, Bool[Array, "B K S"] | np.ndarray]:
    """The first `width` cells from the first of `where` on (None: the window), and those `where`.

    If `where` is known while tracing and the same in all rows, both results are NumPy's. Narrowing
    is then a slice and widening a pad, which XLA fuses.
    """
    B, K, S = where.shape
    if width is None:
        return Cells((B, K, S), 0, K * S), where
    flat = where.reshape(len(where), -1)
    cell = np.arange(flat.shape[1], dtype=np.int32)[None]
    if isinstance(flat, np.ndarray) and (flat == flat[:1]).all() and flat[0].sum() >= width:
        start = int(flat[0].argmax())
        held = (flat & (cell < start + width)).reshape(where.shape)
        return Cells((B, K, S), start, width), held
    first = jnp.argmax(flat, axis=1).astype(jnp.int32)
    held = (flat & (cell < first[:, None] + width)).reshape(where.shape)
    return Cells((B, K, S), first, width), held


def narrowed(rows: Float[Array, "B W ..."], first: Int[Array, " B"] | int, width: int) -> Array:
    """The rows of `width` cells from `first` on; any row for those past the window."""
    if isinstance(first, int):
        return rows if width == rows.shape[1] else rows[:, first : first + width]
    cell = first[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    cell = jnp.minimum(cell, rows.shape[1] - 1)
    if rows.ndim == 2:  # keys, say
        return rows[jnp.arange(len(rows))[:, None], cell]
    return jnp.take_along_axis(rows, cell[:, :, None], axis=1)


def widened(rows: Array, first: Int[Array, " B"] | int, size: int) -> Array:
    """Rows [B T ...] of the cells from `first` on as [B size ...], zero elsewhere.

    A gather, which XLA fuses with its reader; a scatter would be a kernel and a fill of its own.
    """
    if isinstance(first, int):
        behind = size - first - rows.shape[1]
        if size == rows.shape[1]:
            return rows
        return jnp.pad(rows, ((0, 0), (first, behind), *((0, 0),) * (rows.ndim - 2)))
    place = jnp.arange(size, dtype=jnp.int32)[None] - first[:, None]
    place = place.reshape(*place.shape, *(1,) * (rows.ndim - 2))
    held = (place >= 0) & (place < rows.shape[1])
    place = jnp.clip(place, 0, rows.shape[1] - 1)
    return jnp.where(held, jnp.take_along_axis(rows, place, axis=1), jnp.zeros((), rows.dtype))
