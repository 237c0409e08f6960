"""Multi-block diffusion: up to K blocks denoised together, committed from the left.

A block opens once the one before it has some progress. It accepts the tokens that the model is
sure of, and takes its surest token by force only after a nearly complete block. The forward that
commits the first block denoises those after it, so no forward is spent on the cache alone.

Source: MBD-LMs, algorithm 5; Diffulex's `multi_bd`.
"""

from flax import struct

from .core import blocks, sampling
from .core.needs import Needs
from .core.protocol import Knob, Strategy, knob


class MultiBD(Strategy):
    """Pipelined blocks after a block-causal prefix.

    Attributes:
        accept_threshold: A token is accepted when its probability is above it (strictly); from 1
            up nothing is, and each step takes its surest token alone.
        add_block_threshold: Progress of the last block (>=) at which the next one opens.
        semi_complete_threshold: Progress of the block before (>=) that allows a forced token.
    """

    accept_threshold: Knob = knob(0.9)
    add_block_threshold: Knob = knob(0.1)
    semi_complete_threshold: Knob = knob(0.9)
    block_size: int = struct.field(pytree_node=False, default=32)
    buffer_size: int = struct.field(pytree_node=False, default=4)
    needs: Needs = struct.field(pytree_node=False, default=Needs("grid_causal", fills_holes=True))

    def step(self, forward, state):
        """One denoise step of the whole window."""
        state = blocks.open_next(state, self.add_block_threshold)
        return blocks.denoise(forward, state, self._accept)

    def _accept(self, stats, state, _):
        return sampling.above(stats, self.accept_threshold) | sampling.forced_top1(
            stats, state, self.semi_complete_threshold
        )


STRATEGY = MultiBD
