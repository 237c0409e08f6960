"""Several blocks of a text at once, each cell filled when its entropy is low: d3LLM's rule.

All masks are seen from the start. A block opens, one a forward, once enough of the last is filled.
Each hole of low entropy is filled, and one of the first block with holes at least. At a stop id no
block opens, and later cells show it. Source: hao-ai-lab/d3LLM, without its delayed cache.
"""

import jax.numpy as jnp
from flax import struct

from .core import blocks, random, remasking
from .core.knobs import at_slot, at_token
from .core.needs import Needs
from .core.protocol import Carry, Knob, Strategy, knob
from .core.state import StepInfo


class EntropyBlocks(Strategy):
    """Attributes are the entropy in nats, a share of a block's cells, and its length."""

    entropy_threshold: Knob = knob(0.4)
    add_block_threshold: Knob = knob(0.1, high=1.0)
    block_length: int = struct.field(pytree_node=False, default=32)
    block_size: int = struct.field(pytree_node=False, default=32)
    buffer_size: int = struct.field(pytree_node=False, default=16)
    needs: Needs = struct.field(pytree_node=False, default=Needs("in_window", fills_holes=True))

    def init(self, spec):
        """The number of open blocks."""
        return Carry(slot={"opened": jnp.ones((1,), jnp.int32)})

    def step(self, forward, state):
        """Open a block, run everything, fill what is sure."""
        buffer, text = state.buffer, remasking.text_cells(state)
        number = (buffer.positions - buffer.prompt_len[:, None, None]) // self.block_length
        opened = state.carry.slot["opened"]
        last = text & (number == opened[:, None, None] - 1)
        full, size = (jnp.sum(x, (1, 2), jnp.float32) for x in (last & buffer.filled, last))
        opens = (full >= at_slot(self.add_block_threshold) * size) & ~blocks.has_stop(state)
        opened += opens.astype(jnp.int32)
        state = state.replace(carry=state.carry.replace(slot={"opened": opened}))
        is_stop = blocks.is_stop(state, buffer.tokens) & buffer.filled & ~blocks.is_given(state)
        ended = jnp.cumsum(is_stop.reshape(len(opened), -1), axis=1).reshape(text.shape) > 0
        ids = jnp.where(buffer.filled, buffer.tokens, forward.mask_id)
        ids = jnp.where(ended & ~is_stop, state.limits.stop_ids[:, None, :1], ids)
        everything = jnp.ones((1, *2 * text.shape[1:2]), bool)
        out = forward(state, inputs=ids, live=text, visible=everything)
        holes = text & ~buffer.filled & ~ended & (number < opened[:, None, None])
        stats = out.predict(holes, state.sampling, random.step_keys(state), confidence="raw")
        taken = holes & (stats.entropy < at_token(self.entropy_threshold))
        first = holes & remasking.current_block(state, self.block_length).cells
        forced = ~jnp.any(taken & first, axis=(1, 2))
        taken |= remasking.best_cells(-stats.entropy, forced.astype(jnp.int32), first)
        state = blocks.write(state, stats.token, taken)
        count, one = jnp.sum(taken, axis=(1, 2), dtype=jnp.int32), jnp.ones_like(opened)
        return state, StepInfo(0 * one, blocks.settled_run(state), count, one)


STRATEGY = EntropyBlocks
