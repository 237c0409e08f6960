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
        """The rows of these cells; any row for those past the window."""
        rows = cells.reshape(len(cells), self.width, *cells.shape[3:])
        if isinstance(self.first, int):
            end = self.first + self.size
            return rows if self.size == self.width else rows[:, self.first : end]
        cell = self.first[:, None] + jnp.arange(self.size, dtype=jnp.int32)[None]
        cell = jnp.minimum(cell, self.width - 1)
        if rows.ndim == 2:  # keys, say
            return rows[jnp.arange(len(rows))[:, None], cell]
        return jnp.take_along_axis(rows, cell[:, :, None], axis=1)

    def rows(self, cells: Float[Array, "B K S ..."]) -> Float[Array, "R ..."]:
        """The rows of these cells, slot after slot."""
        own = self.narrow(cells)
        return own.reshape(own.shape[0] * own.shape[1], *own.shape[2:])

    def widen(self, rows: Any) -> Any:
        """A tree of [B T ...] as [B W ...], zero in other cells.

        Gathers, which XLA fuses with their readers; scatters would be kernels and fills of their
        own.
        """
        return jax.tree.map(self._widened, rows)

    def _widened(self, rows: Array) -> Array:
        (B, T, *axes), size = rows.shape, self.width
        if isinstance(self.first, int):
            if size == T:
                return rows
            ends = self.first, size - self.first - T
            return jnp.pad(rows, ((0, 0), ends, *((0, 0),) * len(axes)))
        place = jnp.arange(size, dtype=jnp.int32)[None] - self.first[:, None]
        place = place.reshape(B, size, *(1,) * len(axes))
        held = (place >= 0) & (place < T)
        place = jnp.clip(place, 0, T - 1)
        return jnp.where(held, jnp.take_along_axis(rows, place, axis=1), jnp.zeros((), rows.dtype))

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
