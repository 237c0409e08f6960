"""The activations of gated feed-forward networks, in a form that XLA and Pallas both take."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

Activation = Literal["silu", "gelu"]

GELU_SLOPE = 1.5957691216057308  # 2 sqrt(2 / pi)
GELU_CUBE = 0.044715


def gelu(x: Array) -> Array:
    """GELU by its tanh approximation, as `x * sigmoid(...)`; computed in float32.

    Source: Hendrycks & Gimpel 2016, §2.
    """
    wide = x.astype(jnp.float32)
    gate = jax.nn.sigmoid(GELU_SLOPE * (wide + GELU_CUBE * wide * wide * wide))
    return (wide * gate).astype(x.dtype)


ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {"silu": jax.nn.silu, "gelu": gelu}
