"""Edit: fill holes, and revise filled cells until a block no longer changes.

Each forward writes two sets at once in every open block: holes whose token is sure enough (mask to
token), and filled cells for which another token is (token to token). A block leaves when a forward
changes nothing in it, or when its budget of forwards is spent.

Source: LLaDA2.1 (arXiv 2602.08676), the joint threshold of equations 1-3; several blocks at once
as in MBD-LMs, algorithm 5. Budgets and penalty: Diffulex's `EditSamplerMixin`.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from .core import block_rewrite, blocks, random, sampling
from .core.checks import check_number, check_whole
from .core.needs import Needs
from .core.protocol import Knob, Strategy, TokenStats, knob
from .core.state import Carry, DecodeState

_MOST_STEPS = 1_000_000  # forwards of a block are counted in 32 bits


class Edit(Strategy):
    """Joint threshold decoding with token-to-token edits.

    Attributes:
        accept_threshold: A hole is filled when its token's probability is above it (strictly);
            where nothing in a block is, its surest hole is.
        edit_threshold: A filled cell takes another token whose probability is above it
            (strictly).
        add_block_threshold: Progress of the last block (>=) at which the next one opens.
        max_post_edit_steps: Forwards that may edit a block once it has no hole. A block that has
            had this many and its own size in all is filled and leaves as it is.
        penalty_lambda: Subtracted from the logit of a cell's left neighbour in the block, against
            repetition; 0 is off.
    """

    accept_threshold: Knob = knob(0.7)
    edit_threshold: Knob = knob(0.5)
    add_block_threshold: Knob = knob(0.1)
    max_post_edit_steps: int = struct.field(pytree_node=False, default=16)
    penalty_lambda: float = struct.field(pytree_node=False, default=0.0)
    block_size: int = struct.field(pytree_node=False, default=32)
    buffer_size: int = struct.field(pytree_node=False, default=1)
    needs: Needs = struct.field(pytree_node=False, default=Needs("grid_causal"))

    def __post_init__(self):
        """Check the fields."""
        super().__post_init__()
        check_whole("max_post_edit_steps", self.max_post_edit_steps, 0, _MOST_STEPS)
        check_number("penalty_lambda", self.penalty_lambda, "no penalty")

    def init(self, spec):
        """Forwards that a block began without a hole, by block."""
        del spec
        return Carry(blocks={"post_edit_steps": jnp.zeros((1, 1), jnp.int32)})

    def step(self, forward, state):
        """One forward: fill and edit every open block, commit the ready ones."""
        state = blocks.open_next(state, self.add_block_threshold)
        out = forward(state)
        state = out.store(state, blocks.to_cache(state))
        stats = out.predict(
            where=block_rewrite.editable(state),
            sampling=state.sampling,
            keys=random.step_keys(state),
            confidence="raw",
            penalty=self._penalty(state),
        )
        fill, edit = self._fill(stats, state), self._edit(stats, state)
        # Decided on the cells that this forward saw. Cells past the limit hold no block back.
        full = blocks.complete(state)
        post_edit_steps = state.carry.blocks["post_edit_steps"] + full.astype(jnp.int32)
        state = state.replace(carry=Carry(blocks={"post_edit_steps": post_edit_steps}))
        budget = self.max_post_edit_steps
        timed_out = state.buffer.block_steps >= self.block_size + budget
        still = ~jnp.any(edit & block_rewrite.before_limit(state), axis=2)
        done = full & (still | (post_edit_steps > budget))

        everything = blocks.holes(state) | edit
        write = jnp.where(timed_out[:, :, None], everything, (fill | edit) & ~done[:, :, None])
        state, filled = block_rewrite.rewrite(state, stats.token, write)
        return blocks.finish_step(state, filled, ready=done | timed_out)

    def _fill(self, stats: TokenStats, state: DecodeState) -> Bool[Array, "B K S"]:
        """Holes above the threshold, or the surest one, whatever stands before the block."""
        holes = blocks.holes(state)
        one = jnp.ones_like(state.buffer.status)
        return (sampling.above(stats, self.accept_threshold) & holes) | sampling.top_n(
            stats.confidence, one, holes
        )

    def _edit(self, stats: TokenStats, state: DecodeState) -> Bool[Array, "B K S"]:
        """Filled cells with another token above the threshold."""
        sure = stats.confidence > self.edit_threshold.at_token
        return block_rewrite.differs(state, stats.token) & sure

    def _penalty(self, state: DecodeState) -> tuple[Int[Array, "B K S"], Array] | None:
        """The left neighbour's token in the block and its penalty, 0 after a hole."""
        if not self.penalty_lambda:
            return None
        first = ((0, 0), (0, 0), (1, 0))
        ids = jnp.pad(state.buffer.tokens, first)[:, :, :-1]
        known = jnp.pad(state.buffer.filled, first)[:, :, :-1]
        return ids, jnp.where(known, jnp.float32(self.penalty_lambda), 0.0)


STRATEGY = Edit
