"""Discrete diffusion forcing: pipelined blocks after a prompt that sees itself whole.

Up to K blocks are denoised together. Each sees the prompt, the blocks before it and itself. The
forward that commits the first block denoises those after it. These rules are those of `multi_bd`.
What differs is the prompt: one pass takes it in, in which every row sees every other. Its keys and
values depend on all of it, so its pages are reused for the same whole prompt only.

The authors' code latches a block's right to a forced token ("fully activated") once the block
before it is nearly complete. Filled cells stay filled, so reading that progress anew is the same.
It stops adding blocks at an end-of-text token, as `open_next` does, and after
`max_new_tokens // block_size` blocks, where a request here gets all of its `max_tokens`.

Source: D2F (arXiv 2508.09192), §4.2 and the authors' decoder; Diffulex's `d2f`.
"""

from flax import struct

from .core import blocks, sampling
from .core.needs import Needs
from .core.protocol import Knob, Strategy, knob


class D2F(Strategy):
    """Pipelined blocks after a prompt in full attention.

    Attributes:
        accept_threshold: A token is accepted when its probability is above it (strictly); from 1
            up nothing is, and each step takes its surest token alone.
        add_block_threshold: Progress of the last block (>=) at which the next one opens.
        semi_complete_threshold: Progress of the block before (>=) that allows a forced token.
        align_blocks_to_prompt: Blocks start where the prompt ends, as the authors train and
            decode; False puts them on the absolute grid, the first one sharing the prompt's rest.
    """

    accept_threshold: Knob = knob(0.95)
    add_block_threshold: Knob = knob(0.1)
    semi_complete_threshold: Knob = knob(0.9)
    align_blocks_to_prompt: bool = struct.field(pytree_node=False, default=False)
    block_size: int = struct.field(pytree_node=False, default=32)
    buffer_size: int = struct.field(pytree_node=False, default=4)

    @property
    def needs(self) -> Needs:
        """The prompt in one full pass: whole blocks of it, or all of it, before the window."""
        prompt = "whole_full" if self.align_blocks_to_prompt else "grid_full"
        return Needs(prompt, fills_holes=True)

    def step(self, forward, state):
        """One denoise step of the whole window."""
        state = blocks.open_next(state, self.add_block_threshold)
        return blocks.denoise(forward, state, self._accept)

    def _accept(self, stats, state, _):
        return sampling.above(stats, self.accept_threshold) | sampling.forced_top1(
            stats, state, self.semi_complete_threshold
        )


STRATEGY = D2F
