"""Results of each row's experts before their sum, which the following norm computes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class RoutedRows:
    """Rows that are weighted sums over k results each.

    Attributes:
        results: Results by place, sorted by expert; arbitrary at places that no row names.
        place: Place of each result of a row; a number past all places adds nothing.
        weights: Factor of each result.
    """

    results: Float[Array, "P D"]
    place: Int[Array, "*M k"]
    weights: Float[Array, "*M k"]

    def like(self, rows: Float[Array, "*M D"]) -> "RoutedRows":
        """The same with the leading axes of `rows`."""
        by_row = {"place": self.place, "weights": self.weights}
        by_row = {name: each.reshape(*rows.shape[:-1], -1) for name, each in by_row.items()}
        return dataclasses.replace(self, **by_row)

    @property
    def sums(self) -> Float[Array, "*M D"]:
        """The weighted sums, in float32."""
        there = (self.place < len(self.results))[..., None]
        found = self.results.at[self.place].get(mode="fill", fill_value=0).astype(jnp.float32)
        return jnp.sum(jnp.where(there, found * self.weights[..., None], 0.0), axis=-2)
