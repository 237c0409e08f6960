"""Block rewrite: tokens written over the open blocks, filled cells included.

For strategies that revise accepted tokens until the block leaves. A cell of the prompt is never
written, and a token written over another one does not count as accepted.

Source: LLaDA2.1 (arXiv 2602.08676), token-to-token editing; Diffulex's `mixin/block_rewrite`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from . import blocks
from .state import ACTIVE, DecodeState


def editable(state: DecodeState) -> Bool[Array, "B K S"]:
    """Cells of ACTIVE blocks after the prompt, filled or not: all that may be written."""
    buffer = state.buffer
    return (buffer.status[:, :, None] == ACTIVE) & (
        buffer.positions >= buffer.prompt_len[:, None, None]
    )


def differs(state: DecodeState, tokens: Int[Array, "B K S"]) -> Bool[Array, "B K S"]:
    """Editable cells that hold a token other than `tokens`; never a hole."""
    buffer = state.buffer
    return editable(state) & buffer.filled & (tokens != buffer.tokens)


def rewrite(
    state: DecodeState, tokens: Int[Array, "B K S"], where: Bool[Array, "B K S"]
) -> tuple[DecodeState, Bool[Array, "B K S"]]:
    """Write `tokens` in the editable cells of `where`.

    Returns:
        The state, and the written cells that were holes, for `blocks.finish_step`.
    """
    where = where & editable(state)
    return blocks.write(state, tokens, where), where & ~state.buffer.filled


def before_limit(state: DecodeState) -> Bool[Array, "B K S"]:
    """Cells that may be emitted; cells past the limit hold no block back."""
    buffer = state.buffer
    return jnp.broadcast_to(buffer.positions < buffer.limit[:, None, None], buffer.tokens.shape)


def stability(state: DecodeState, tokens: Int[Array, "B K S"]) -> Float[Array, "B K"]:
    """Share of each block's filled cells that hold `tokens`; 1 where none is filled.

    Cells of the prompt count, as in Diffulex.
    """
    filled = state.buffer.filled
    same = filled & (tokens == state.buffer.tokens)
    count = jnp.sum(filled, axis=2)
    return jnp.where(count > 0, jnp.sum(same, axis=2) / jnp.maximum(count, 1), 1.0)
