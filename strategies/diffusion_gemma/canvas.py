"""A block in work next to a final one: how both go through the model in one pass, or one alone.

For models of two modes. A block in work (ACTIVE) runs in the decoder's, in which its cells see each
other. A final one (TO_CACHE) runs in the encoder's, in token order, and its keys and values are
those of a prefill of its text.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from ..core.forward import Forward, ForwardOutput
from ..core.state import RUNNING, TO_CACHE, DecodeState

Modes = tuple[int, int]  # of a block in work, of a final one


def any_stores(state: DecodeState) -> Bool[Array, ""]:
    """Whether the next pass stores the first block of some running slot."""
    return jnp.any(state.buffer.status[:, 0] == TO_CACHE, where=state.finish == RUNNING)


def first_block(state: DecodeState) -> Bool[np.ndarray, "B K S"]:
    """Cells of the first block, known while tracing."""
    shape = state.buffer.tokens.shape
    return np.broadcast_to(np.arange(shape[1])[None, :, None] == 0, shape)


def run_all(forward: Forward, state: DecodeState, inputs: Any, modes: Modes) -> ForwardOutput:
    """A pass over all blocks of the window, each in its mode."""
    final = state.buffer.status == TO_CACHE
    return forward(state, inputs=inputs, causal=final, mode=_mode(modes, final))


def run_one(forward: Forward, state: DecodeState, inputs: Any, modes: Modes) -> ForwardOutput:
    """A pass over the first block of the window, in its mode."""
    final = (state.buffer.status == TO_CACHE)[:, 0]
    return forward(
        state,
        inputs=inputs,
        live=first_block(state),
        causal=final,
        mode=_mode(modes, final),
        width=state.buffer.tokens.shape[2],
    )


def cells_of(active: Bool[Array, "B K S"], leaf: Any) -> Array:
    """The cells [B S ...] of the one block in work, from [B K S ...]."""
    on = active if leaf.ndim == 3 else active[..., None]
    return jnp.sum(jnp.where(on, leaf, jnp.zeros((), leaf.dtype)), axis=1)


def _mode(modes: Modes, final: Bool[Array, "B ..."]) -> Array:
    in_work, stored = modes
    return jnp.where(final, stored, in_work)
