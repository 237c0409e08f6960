"""Random keys of a step: one a cell, from the request's own key.

Keys do not depend on the slot or the batch, so a request draws the same numbers wherever it runs. A
leading fold separates the streams: by position, by step, by a block's own step.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from .state import DecodeState

_POSITION_STREAM, _STEP_STREAM = 0, 1  # further ones are the further draws of a position
_BLOCK_STREAM = 2**31 - 1


def _fold(keys: PRNGKeyArray, data: Array) -> PRNGKeyArray:
    """Fold `data` into `keys`, element by element, after broadcasting."""
    shape = jnp.broadcast_shapes(keys.shape, data.shape)
    folded = jax.vmap(jax.random.fold_in)(
        jnp.broadcast_to(keys, shape).reshape(-1), jnp.broadcast_to(data, shape).reshape(-1)
    )
    return folded.reshape(shape)


def keys_at(keys: PRNGKeyArray, positions: Int[Array, "B ..."], further: int = 0) -> PRNGKeyArray:
    """Keys of absolute positions alone, as AR and DFlash use.

    Args:
        further: Number of the draw at a position; the text itself is drawn with 0.
    """
    rows = keys.reshape(-1, *(1,) * (positions.ndim - 1))
    stream = _STEP_STREAM + further if further else _POSITION_STREAM
    return _fold(_fold(rows, jnp.asarray(stream)), positions)


def position_keys(state: DecodeState, further: int = 0) -> PRNGKeyArray:
    """One key a cell [B K S], a function of the request's key and the absolute position."""
    return keys_at(state.keys, state.buffer.positions, further)


def step_keys(state: DecodeState, salt: int = 0) -> PRNGKeyArray:
    """One key a cell [B K S], of the request's key, its forward count and the position.

    Args:
        salt: Number of the draw in a step.
    """
    step = _fold(_fold(state.keys, jnp.asarray(_STEP_STREAM)), state.buffer.nfe)
    step = _fold(step, jnp.asarray(salt))
    return _fold(step[:, None, None], state.buffer.positions)


def block_keys(state: DecodeState, salt: int = 0) -> PRNGKeyArray:
    """One key a cell [B K S], of the request's key, its block's own step and the position.

    Forwards that the block did not take part in do not count, so its draws do not depend on when
    the text before it was stored.

    Args:
        salt: Number of the draw in a step.
    """
    rows = _fold(_fold(state.keys, jnp.asarray(_BLOCK_STREAM)), jnp.asarray(salt))
    own = _fold(rows[:, None], state.buffer.block_steps)
    return _fold(own[:, :, None], state.buffer.positions)


def position_uniforms(state: DecodeState, further: int) -> Float[Array, "B K S"]:
    """One number in [0, 1) a cell, drawn with `position_keys`."""
    keys = position_keys(state, further)
    return jax.vmap(jax.random.uniform)(keys.reshape(-1)).reshape(keys.shape)


def uniforms(state: DecodeState, salt: int) -> Float[Array, "B K S"]:
    """One number in [0, 1) a cell, drawn with `step_keys`: an order of the cells, or chances."""
    keys = step_keys(state, salt)
    return jax.vmap(jax.random.uniform)(keys.reshape(-1)).reshape(keys.shape)


def block_ids(state: DecodeState, vocab_size: int, salt: int) -> Int[Array, "B K S"]:
    """One uniform id a cell, drawn with `block_keys`."""
    keys = block_keys(state, salt)
    draw = jax.vmap(lambda key: jax.random.randint(key, (), 0, vocab_size))
    return draw(keys.reshape(-1)).reshape(keys.shape)
