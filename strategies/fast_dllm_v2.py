"""Fast-dLLM v2: a block filled sub-block by sub-block over a dual cache of prefix and block.

1. The first token of a block comes from the row before it: the last of the prompt, or of the block
   committed before. This is how the autoregressive model that was adapted predicts it.
2. The first forward of a block runs the whole block and caches it provisionally. So does each
   forward while the current sub-block begins with a hole. The others run that sub-block alone.
3. Holes of the current sub-block are filled where the model is surer than the threshold, and the
   surest hole in any case. The next sub-block follows once none is left.
4. One more forward of the whole block puts its final keys and values into the cache.

The model is shifted: row i predicts cell i + 1. The authors let row 0 of a window predict cell 0.
Here no cell is read from such a row: a block's first cell is seeded, and a sub-block that begins
with a hole runs with the row before it. Two more things differ. The seed is drawn as every other
token is (theirs is greedy at any temperature). A block that the request's limit cuts ends there,
where theirs is filled to its end.

Source: Fast-dLLM v2 (arXiv 2509.26328) and the `generate` of its authors' checkpoints.
"""

import jax.numpy as jnp
from flax import struct

from .core import blocks, dual_cache, random, sampling
from .core.needs import Needs
from .core.protocol import Knob, Strategy, knob


class FastDLLMV2(Strategy):
    """One block of sub-blocks.

    Attributes:
        accept_threshold: A token is accepted when its probability is above it (strictly); the
            surest of the sub-block always is.
        sub_block_size: Cells that are filled before those after them; it divides `block_size`.
        use_block_cache: Run sub-blocks alone where they may; False runs the whole block each time.
    """

    accept_threshold: Knob = knob(0.9)
    sub_block_size: int = struct.field(pytree_node=False, default=8)
    use_block_cache: bool = struct.field(pytree_node=False, default=True)
    block_size: int = struct.field(pytree_node=False, default=32)
    buffer_size: int = struct.field(pytree_node=False, default=1)
    needs: Needs = struct.field(
        pytree_node=False,
        default=Needs("grid_causal", boundary=True, provisional_cache="across_steps"),
    )

    def step(self, forward, state):
        """Fill cells of the current sub-block, or commit a finished block."""
        self._check(*state.buffer.tokens.shape[1:])
        state, seeded = dual_cache.seed_block(forward, blocks.open_next(state))
        cells = dual_cache.sub_block(state, self.sub_block_size)
        if self.use_block_cache:
            refine = dual_cache.may_refine(state, cells)
            out, live = dual_cache.run(forward, state, cells, refine, self.sub_block_size)
            state = out.store(state, live)
        else:
            out = forward(state, live=dual_cache.text_cells(state))
            state = out.store(state, blocks.to_cache(state))
        holes = blocks.holes(state) & cells
        stats = out.predict(where=holes, sampling=state.sampling, keys=random.step_keys(state))
        surest = sampling.top_n(stats.confidence, jnp.ones_like(state.buffer.status), holes)
        accept = sampling.above(stats, self.accept_threshold) | surest
        return blocks.finish_step(blocks.write(state, stats.token, accept), accept | seeded)

    def _check(self, num_blocks: int, block_size: int) -> None:
        if num_blocks != 1:
            raise ValueError(
                f"buffer_size={num_blocks}: Fast-dLLM v2 refines one block at a time; use 1"
            )
        if self.sub_block_size < 1 or block_size % self.sub_block_size:
            raise ValueError(
                f"sub_block_size={self.sub_block_size} must divide {block_size=}; "
                "use a divisor, such as block_size itself"
            )


STRATEGY = FastDLLMV2
