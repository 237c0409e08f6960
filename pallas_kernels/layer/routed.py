"""What the experts of each row gave, not added up yet: the norm behind them does that."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class RoutedRows:
    """Rows whose numbers are weighted sums over k results.

    Attributes:
        results: In the order of experts, with anything at places that no row names.
        place: Of each result of a row; a number past all places adds nothing.
        weights: Their factors.
    """

    results: Float[Array, "P D"]
    place: Int[Array, "*M k"]
    weights: Float[Array, "*M k"]

    def like(self, rows: Float[Array, "*M D"]) -> "RoutedRows":
        """The same, by rows of this shape."""
        by_row = {"place": self.place, "weights": self.weights}
        by_row = {name: each.reshape(*rows.shape[:-1], -1) for name, each in by_row.items()}
        return dataclasses.replace(self, **by_row)

    @property
    def sums(self) -> Float[Array, "*M D"]:
        """The rows, in float32."""
        there = (self.place < len(self.results))[..., None]
        found = self.results.at[self.place].get(mode="fill", fill_value=0).astype(jnp.float32)
        return jnp.sum(jnp.where(there, found * self.weights[..., None], 0.0), axis=-2)
