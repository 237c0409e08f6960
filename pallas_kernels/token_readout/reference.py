"""The reference for any device; it writes all logits to memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..layer.fp8 import Fp8Rows
from .head import Fp8Head, products
from .result import SHARE, IdClasses, IdReadout, LawReadout, Part, TokenReadout, finish


def read(
    hidden: Array,
    head: Array | Fp8Head,
    forbidden: Array,
    *,
    scale: float,
    cap: float | None,
    penalty: tuple[Array, Array] | None,
    num_top: int,
) -> TokenReadout:
    """See `api.token_readout`."""
    logits = _restricted(_logits(hidden, head, scale, cap), forbidden, penalty)
    return _of_logits(logits, num_top)[0]


def read_classes(
    hidden: Array,
    head: Array | Fp8Head,
    forbidden: Array,
    classes: IdClasses,
    *,
    scale: float,
    cap: float | None,
    penalty: tuple[Array, Array] | None,
    num_top: int,
) -> tuple[TokenReadout, IdReadout]:
    """See `api.class_readout`."""
    logits = _restricted(_logits(hidden, head, scale, cap), forbidden, penalty)
    read, log_mass = _of_logits(logits, num_top)

    def of_slot(logits: Array, classes: IdClasses) -> tuple[Array, Array, Array]:
        place = jnp.arange(len(classes.wide), dtype=classes.codes.dtype)
        mine = classes.codes[None] == -(place + 1)[:, None]

        def one(mine: Array) -> tuple[Array, Array]:
            among = jnp.where(mine[None], logits, -jnp.inf)
            best = jnp.max(among, axis=1)
            ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
            is_best = mine[None] & (among == best[:, None])
            lowest = jnp.where(is_best, ids[None], jnp.iinfo(jnp.int32).max)
            return best, jnp.min(lowest, axis=1)

        best, token = jax.lax.map(one, mine)
        return logits[:, classes.narrow], best.T, token.T

    by_slot = logits.reshape(len(classes.codes), -1, logits.shape[1])
    found = jax.vmap(of_slot)(by_slot, classes)
    narrow, wide, wide_token = (leaf.reshape(len(logits), -1) for leaf in found)
    return read, IdReadout(narrow, wide, wide_token, log_mass)


def _restricted(logits: Array, forbidden: Array, penalty: tuple[Array, Array] | None) -> Array:
    logits = jnp.where(forbidden[None, :], -jnp.inf, logits)
    if penalty is None:
        return logits
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    return logits - jnp.where(ids[None] == penalty[0][:, None], penalty[1][:, None], 0.0)


def _of_logits(logits: Array, num_top: int) -> tuple[TokenReadout, Array]:
    """The readout of logits, and the logarithm of their mass."""
    peak = jnp.max(logits, axis=1)
    down = logits - peak[:, None]
    weight = jnp.exp(down)
    whole = Part(
        token=jnp.argmax(logits, axis=1).astype(jnp.int32),
        peak=peak,
        mass=jnp.sum(weight, axis=1),
        spread=jnp.sum(jnp.where(weight > 0, weight * down, 0.0), axis=1),
    )
    top_logits, top_ids = jax.lax.top_k(logits, num_top)
    read = finish(whole, top_logits, top_ids.astype(jnp.int32))
    return read, whole.peak + jnp.log(whole.mass)


def read_law(
    hidden: Array | Fp8Rows,
    head: Array | Fp8Head,
    forbidden: Array,
    temperature: Array,
    *,
    scale: float,
    cap: float | None,
    dtype: Any,
    is_warm: bool = False,
) -> LawReadout:
    """See `api.law_readout`."""
    del is_warm
    logits = _logits(hidden, head, scale, cap)
    logits = jnp.where(forbidden[None, :], -jnp.inf, logits)
    return of_law(logits / temperature[:, None], dtype)


def of_law(law: Array, dtype: Any, best: tuple[Array, Array] | None = None) -> LawReadout:
    """The readout of a law [R V], given as logits.

    Args:
        best: Peak and token if `law` holds only a part of the ids, with tokens counted from the
            first id of the part; None: find them in `law`.
    """
    num_rows, num_ids = law.shape
    if best is None:
        best = jnp.max(law, axis=1), jnp.argmax(law, axis=1).astype(jnp.int32)
    peak, token = best
    # Summed by shares, all sums have one shape and one launch, which also rounds the weights.
    wide = jnp.pad(law, ((0, 0), (0, -num_ids % SHARE)), constant_values=-jnp.inf)
    wide = wide.reshape(num_rows, -1, SHARE)
    down = wide - peak[:, None, None]  # NaN where nothing is allowed
    weight = jnp.exp(down)
    # Exclude the token by its id: in a fusion the highest value and the peak may round differently,
    # by more than the mass of all other ids.
    ids = jnp.arange(wide.shape[1] * SHARE, dtype=jnp.int32).reshape(1, -1, SHARE)
    other = jnp.where(ids != token[:, None, None], weight, 0.0)
    spread = jnp.where(other > 0, other * down, 0.0)
    shares, others, spreads = (jnp.sum(each, axis=2) for each in (weight, other, spread))
    return LawReadout(
        token=token,
        rest=jnp.sum(others, axis=1),
        spread=jnp.sum(spreads, axis=1),
        weights=weight.astype(dtype).reshape(num_rows, -1)[:, :num_ids],
        shares=shares,
        unit=jnp.ones(num_rows),
    )


def _logits(
    hidden: Array | Fp8Rows, head: Array | Fp8Head, scale: float, cap: float | None
) -> Array:
    logits = products(hidden, head) * scale
    return logits if cap is None else cap * jnp.tanh(logits / cap)
