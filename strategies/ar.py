"""Plain autoregressive decoding: one token a forward, drawn by position.

The window is an anchor (the last known token) and a hole after it. The forward runs the anchor,
whose row predicts the hole. The anchor goes to the cache, and the window moves on by one.

A draw depends on the absolute position alone, so speculative decoding with the same keys reproduces
it token for token.
"""

import jax.numpy as jnp
from flax import struct

from .core import blocks, random
from .core.needs import Needs
from .core.protocol import Strategy
from .core.state import StepInfo


class AR(Strategy):
    """Next-token decoding of a model whose row i predicts token i + 1."""

    block_size: int = struct.field(pytree_node=False, default=2)
    buffer_size: int = struct.field(pytree_node=False, default=1)
    needs: Needs = struct.field(
        pytree_node=False,
        default=Needs("whole_causal", boundary=True, token_a_step=True, fills_holes=True),
    )

    def absorb(self, chunk, state):
        """Draw the first token from the prompt's last row: the first anchor."""
        keys = random.position_keys(state)[:, 0, 0]
        opened = blocks.begin(state, jnp.zeros_like(state.finish), chunk.last)
        first = chunk.forward.predict(
            state.boundary, sampling=state.sampling, keys=keys, first_of=opened
        )
        return blocks.begin(state, first.token, chunk.last)

    def step(self, forward, state):
        """Run the anchor, fill the hole after it."""
        if state.buffer.tokens.shape[1:] != (1, 2):
            raise ValueError(
                f"block_size={self.block_size}, buffer_size={self.buffer_size}: the window is "
                "an anchor and a hole; leave both at their defaults, 2 and 1"
            )
        anchor = state.buffer.filled
        out = forward(state, live=anchor, causal=True, width=1)
        state = out.store(state, anchor)
        keys = random.position_keys(state)
        stats = out.predict(where=~anchor, sampling=state.sampling, keys=keys, width=1)
        state = blocks.write(state, stats.token, ~anchor)
        one = jnp.ones_like(state.buffer.nfe)
        return state, StepInfo(commit_len=one, settled_len=2 * one, accepted=one, nfe=one)


STRATEGY = AR
