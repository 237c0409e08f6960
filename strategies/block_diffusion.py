"""Block diffusion, one block at a time, with a choice of remasking rule.

A block is denoised until no hole is left, then one more forward writes it to the cache. The
remasking rule decides which holes a step fills.

Source: Block Diffusion (arXiv 2503.09573), algorithm 2; the rules are SDAR's (arXiv 2510.06303)
and, for the entropy bound, EB-Sampler's (arXiv 2505.24857).
"""

from typing import Literal, get_args

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool

from .core import blocks, random, sampling
from .core.checks import check_one_of, check_whole
from .core.needs import Needs
from .core.protocol import Knob, Strategy, TokenStats, knob
from .core.state import DecodeState

Remasking = Literal["sequential", "static", "dynamic", "entropy", "random"]
_ORDER_STREAM = 1  # salt of the order of cells; tokens are drawn with 0


class BlockDiffusion(Strategy):
    """One block at a time.

    Attributes:
        accept_threshold: Probability (strictly) above which "dynamic" accepts.
        entropy_bound: Nats that "entropy" may spend in a step besides its surest token.
        remasking: "sequential": the leftmost holes; "static": the surest ones; "dynamic": all
            above the threshold, or the surest if those are too few; "entropy": the surest ones
            within the bound; "random": any.
        denoising_steps: Forwards over which the quota of the first three and of "random" spreads
            a block; None is one token a forward.
    """

    accept_threshold: Knob = knob(0.9)
    entropy_bound: Knob = knob(0.1)
    remasking: Remasking = struct.field(pytree_node=False, default="dynamic")
    denoising_steps: int | None = struct.field(pytree_node=False, default=None)
    block_size: int = struct.field(pytree_node=False, default=32)
    buffer_size: int = struct.field(pytree_node=False, default=1)
    needs: Needs = struct.field(pytree_node=False, default=Needs("grid_causal", fills_holes=True))

    def __post_init__(self):
        """Check the fields."""
        super().__post_init__()
        check_one_of("remasking", self.remasking, get_args(Remasking))
        if self.denoising_steps is not None:
            check_whole("denoising_steps", self.denoising_steps, 1)

    def step(self, forward, state):
        """One denoise step, or the commit of a finished block."""
        return blocks.denoise(forward, blocks.open_next(state), self._accept)

    def _accept(
        self, stats: TokenStats, state: DecodeState, holes: Bool[Array, "B K S"]
    ) -> Bool[Array, "B K S"]:
        quota = sampling.quota(state, self.denoising_steps or state.buffer.tokens.shape[2])
        surest = sampling.top_n(stats.confidence, quota, holes)
        match self.remasking:
            case "sequential":
                leftmost = -state.buffer.positions.astype(jnp.float32)
                return sampling.top_n(leftmost, quota, holes)
            case "static":
                return surest
            case "dynamic":
                sure = sampling.above(stats, self.accept_threshold) & holes
                enough = jnp.sum(sure, axis=2, keepdims=True) >= quota[:, :, None]
                return jnp.where(enough, sure, surest)
            case "entropy":
                return sampling.entropy_bounded(stats, self.entropy_bound, holes)
            case "random":
                order = random.uniforms(state, salt=_ORDER_STREAM)
                return sampling.top_n(order, quota, holes)


STRATEGY = BlockDiffusion
