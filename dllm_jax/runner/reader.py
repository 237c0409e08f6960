"""How hidden rows become logits, and which ids may be predicted."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dllm_jax.strategies.core.draw import Shard


class Reader(NamedTuple):
    """How rows become logits, and which ids count.

    Attributes:
        unembed: Hidden rows to float32 logits; of a `Head` a kernel may read them.
        forbidden: Ids, of NumPy or of JAX, to a mask of those never drawn.
        shard: The head is a device's part, among several devices.
        one_rounding: A row's bits do not depend on the number of slots.
    """

    unembed: Callable[[Array], Array]
    forbidden: Callable[[Any], Any]
    shard: Shard | None = None
    one_rounding: bool = False

    def logits(self, hidden: Array, away: Array | None, scale: float) -> Float[Array, "R V"]:
        """Logits, moved by `scale` from those of `away` if given: `ForwardOutput.predict`."""
        logits = self.unembed(hidden)
        if away is None:
            return logits
        others = self.unembed(away)
        return others + (1.0 + scale) * (logits - others)

    def restricted(
        self, logits: Float[Array, "R V"], penalty: tuple[Array, Array] | None = None
    ) -> Float[Array, "R V"]:
        """-inf for forbidden ids; less the penalty of an id a row."""
        ids = ids_of(logits, self.shard)
        logits = jnp.where(self.forbidden(ids), -jnp.inf, logits)
        if penalty is None:
            return logits
        return logits - jnp.where(ids[None] == penalty[0][:, None], penalty[1][:, None], 0.0)


def ids_of(logits: Array, shard: Shard | None) -> Int[Array, " V"]:
    """The ids that logits are of."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    return ids if shard is None else shard.first(logits) + ids
