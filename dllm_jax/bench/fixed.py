"""Work of a known size: a strategy that fills exactly n holes a step, whatever the confidence.

L tokens take ceil(L / n) forwards, so two runs differ only in speed. The tokens come from the
readout and only their number is fixed, so no part of a forward can be skipped. Canvases have no
holes: `DiffusionGemma` does fixed work if no confidence ends a canvas before its schedule does.
"""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from dllm_jax.strategies.core import blocks, random, sampling
from dllm_jax.strategies.core.protocol import Strategy
from dllm_jax.strategies.core.state import ACTIVE, DUMMY, DecodeState
from dllm_jax.strategies.diffusion_gemma import DiffusionGemma

USUAL_STEPS = 16  # steps of a canvas in the figures that vLLM publishes


class FixedWork(Strategy):
    """The n surest holes of the leftmost block that has any, spilling over into the next ones.

    Every block opens at once; blocks commit as in `MultiBD`, in the forward after their last hole.

    Attributes:
        tokens_per_step: n. A block that is being committed still occupies the window, so the
            blocks after it must have n holes: 2 n <= (K - 1) S + 1.
    """

    tokens_per_step: int = struct.field(pytree_node=False, default=4)
    block_size: int = struct.field(pytree_node=False, default=32)
    buffer_size: int = struct.field(pytree_node=False, default=4)

    def __post_init__(self):
        """Refuse a window in which a step could find fewer than n holes."""
        if self.block_size is None or self.buffer_size is None:
            return  # the family's sizes are filled in later
        if self.buffer_size < 2:
            raise ValueError(
                f"buffer_size={self.buffer_size} must be at least 2: while a block commits, the "
                "one behind it is filled; raise it"
            )
        most = most_tokens(self.block_size, self.buffer_size)
        if not 1 <= self.tokens_per_step <= most:
            raise ValueError(
                f"tokens_per_step={self.tokens_per_step} must be in [1, {most}] in a window of "
                f"{self.buffer_size} blocks of {self.block_size}; lower it or raise buffer_size"
            )

    def step(self, forward, state):
        """One forward of the whole window, and n of its tokens."""
        state = open_all(state)
        out = forward(state)
        state = out.store(state, blocks.to_cache(state))
        # Cells past the limit hold no output: filling them would be work that is not counted.
        wanted = blocks.holes(state) & (state.buffer.positions < state.buffer.limit[:, None, None])
        stats = out.predict(where=wanted, sampling=state.sampling, keys=random.step_keys(state))
        accept = sampling.top_n(stats.confidence, leftmost(wanted, self.tokens_per_step), wanted)
        return blocks.finish_step(blocks.write(state, stats.token, accept), accept)


def tokens_a_step(strategy: Any) -> int | None:
    """Tokens of each denoising step if the work is fixed, else None."""
    if isinstance(strategy, DiffusionGemma) and strategy.confidence_threshold == 0:
        return -(-strategy.block_size // int(strategy.max_denoising_steps))
    return strategy.tokens_per_step if isinstance(strategy, FixedWork) else None


def fixed_canvas(size: int, count: int | None) -> dict[str, float]:
    """Fields of `DiffusionGemma` for `count` tokens a step; None: canvases of 16 steps."""
    steps = min(USUAL_STEPS, size) if count is None else -(-size // count)
    return {"confidence_threshold": 0.0, "max_denoising_steps": float(steps)}


def most_tokens(block_size: int, buffer_size: int) -> int:
    """Most tokens a step for which every step finds holes.

    At most S - 1 + n cells are filled when a step begins; K S - (S - 1 + n) >= n must be open.
    """
    return ((buffer_size - 1) * block_size + 1) // 2


def open_all(state: DecodeState) -> DecodeState:
    """Open every block that holds a position before the limit."""
    buffer = state.buffer
    opens = (buffer.status == DUMMY) & (blocks.block_starts(state) < buffer.limit[:, None])
    return state.replace(buffer=buffer.replace(status=jnp.where(opens, ACTIVE, buffer.status)))


def leftmost(holes: Bool[Array, "B K S"], count: int) -> Int[Array, "B K"]:
    """How many holes of each block make up the `count` leftmost, whole blocks first.

    Worked example: holes [3, 32, 32], count 4 -> [3, 1, 0].
    """
    in_block = jnp.sum(holes, axis=2)
    before = jnp.cumsum(in_block, axis=1) - in_block
    return jnp.clip(count - before, 0, in_block).astype(jnp.int32)


STRATEGY = FixedWork
