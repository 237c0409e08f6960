"""Edit with deletes and inserts: a block is revised until it stays as it is, its length too.

As in `edit`, a forward writes holes and filled cells at once. Two of the ids it may write are no
text: DELETE takes its cell out, and SPLIT puts a hole before the token that stood in its cell. They
are consumed in the same step, from the left. A block keeps its size: what lacks at its end becomes
holes, and what is pushed over its end is lost. An edit never crosses into another block.

Source: the decoder of LLaDA2.2 as FluxServe's `levenshtein.py` ports it (docs/llada2_2_edits.md).
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool

from ..core import block_rewrite, blocks, random, sampling
from ..core.checks import check_whole
from ..core.needs import Needs
from ..core.protocol import Knob, Strategy, TokenStats, knob
from ..core.state import ACTIVE, Carry, DecodeState
from . import indel

_MOST_STEPS = 1000  # a block's written texts are kept, one a forward
_ESCAPES = 5


class EditIndel(Strategy):
    """Joint threshold decoding with token-to-token edits, deletes and inserts.

    Attributes:
        accept_threshold: Holes are filled whose token's probability is above it (strictly), if
            they are the number that the schedule wants; else that number of the surest.
        edit_threshold: A filled cell takes another token whose probability is above it
            (strictly).
        add_block_threshold: Progress of the last block (>=) at which the next one opens.
        max_post_edit_steps: The last of this many forwards without a hole of the block's first ones
            is final: it fills every hole, and the block leaves. 0: the forward that fills the last
            of those is.
        denoising_steps: Forwards over which the schedule spreads the holes a block opens with. A
            later forward fills every hole.
        max_block_steps: The last of this many forwards of a block is final too.
        delete_token_id, split_token_id: The two ids; None: those of the model's family.
    """

    accept_threshold: Knob = knob(0.5)
    edit_threshold: Knob = knob(0.0)
    add_block_threshold: Knob = knob(0.1)
    max_post_edit_steps: int = struct.field(pytree_node=False, default=16)
    denoising_steps: int = struct.field(pytree_node=False, default=32)
    max_block_steps: int = struct.field(pytree_node=False, default=128)
    delete_token_id: int | None = struct.field(pytree_node=False, default=None)
    split_token_id: int | None = struct.field(pytree_node=False, default=None)
    block_size: int = struct.field(pytree_node=False, default=32)
    buffer_size: int = struct.field(pytree_node=False, default=1)
    needs: Needs = struct.field(pytree_node=False, default=Needs("grid_causal"))

    def __post_init__(self):
        """Check the fields."""
        super().__post_init__()
        check_whole("max_post_edit_steps", self.max_post_edit_steps, 0, _MOST_STEPS)
        check_whole("denoising_steps", self.denoising_steps, 1, _MOST_STEPS)
        check_whole("max_block_steps", self.max_block_steps, 2, _MOST_STEPS)
        for name in ("delete_token_id", "split_token_id"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 0, 2**31 - 1)
        if self.delete_token_id is not None and self.delete_token_id == self.split_token_id:
            raise ValueError(f"delete_token_id={self.delete_token_id} is split_token_id too")

    @property
    def holds_constraints(self) -> bool:
        """Text that moves is not held to a grammar."""
        return False

    @property
    def edit_ids(self) -> tuple[int, int]:
        """DELETE and SPLIT."""
        if self.delete_token_id is None or self.split_token_id is None:
            raise ValueError("edit_indel has no delete_token_id or split_token_id; give both")
        return self.delete_token_id, self.split_token_id

    def init(self, spec):
        """The memory of a block while it is open."""
        written = (1, 1, self.max_block_steps, spec.block_size)
        leaves = {
            "original": jnp.zeros((1, 1, spec.block_size), bool),  # the first holes, as they move
            "post_edit_steps": jnp.zeros((1, 1), jnp.int32),
            "final": jnp.zeros((1, 1), bool),
            "written": jnp.full(written, indel.NOTHING, jnp.int32),
        }
        return Carry(blocks=leaves)

    def step(self, forward, state):
        """One forward: fill and edit every open block, consume the edits, commit the ready."""
        state = blocks.open_next(state, self.add_block_threshold)
        out = forward(state)
        state = out.store(state, blocks.to_cache(state))
        editable = block_rewrite.editable(state)
        stats = out.predict(
            where=editable,
            sampling=state.sampling,
            keys=random.step_keys(state),
            confidence="raw",
            num_top=3,
            allow=self.edit_ids,
        )
        buffer, known, holes = state.buffer, state.carry.blocks, blocks.holes(state)
        counts = block_rewrite.before_limit(state)  # other cells hold no block back
        original = jnp.where(buffer.block_steps[:, :, None] == 0, holes, known["original"])
        waiting = holes & original & counts

        fill = self._fill(stats, state, original)
        edit = block_rewrite.differs(state, stats.token)
        edit &= stats.confidence > self.edit_threshold.at_token

        active = buffer.status == ACTIVE
        post = known["post_edit_steps"] + active.astype(jnp.int32)
        post = jnp.where(jnp.any(waiting, axis=2), 0, post)
        if self.max_post_edit_steps:
            last = post >= self.max_post_edit_steps
        else:
            last = jnp.any(waiting, axis=2) & ~jnp.any(waiting & ~fill, axis=2)
        last |= buffer.block_steps >= self.max_block_steps - 1
        final = (last & active) | known["final"]

        before = jnp.where(buffer.filled, buffer.tokens, indel.HOLE)
        plain = indel.plain(stats, self.edit_ids)
        token = jnp.where(final[:, :, None], plain, stats.token)
        write = jnp.where(final[:, :, None], holes | edit, fill | edit)
        write &= ~known["final"][:, :, None]
        text = jnp.where(write, token, before)
        for _ in range(_ESCAPES):
            again = indel.repeats(text, known["written"]) & ~final
            text = indel.escape(text, before, stats, again)
        written = indel.remember(known["written"], text, buffer.block_steps, active)

        movable = editable & ~final[:, :, None]
        after, original = indel.consume(text, before, original, movable, self.edit_ids)
        still = ~jnp.any((after != before) & counts, axis=2)
        leaves = {"original": original, "post_edit_steps": post, "final": final, "written": written}
        full = after != indel.HOLE
        tokens = jnp.where(full, after, buffer.tokens)
        moved = buffer.replace(tokens=tokens, filled=full)
        state = state.replace(buffer=moved, carry=Carry(blocks=leaves))
        return blocks.finish_step(state, full & ~buffer.filled, ready=still | final)

    def _fill(
        self, stats: TokenStats, state: DecodeState, original: Bool[Array, "B K S"]
    ) -> Bool[Array, "B K S"]:
        """Holes above the threshold, or the surest ones that the schedule wants and the new ones.

        The first holes are spread evenly over the schedule, the remainder first.
        """
        holes, step = blocks.holes(state), state.buffer.block_steps
        first = jnp.sum(block_rewrite.editable(state), axis=2)
        share, rest = jnp.divmod(first, self.denoising_steps)
        new = jnp.sum(holes & ~original, axis=2)
        wanted = share + (step < rest).astype(jnp.int32) + new
        sure = holes & sampling.above(stats, self.accept_threshold)
        enough = jnp.sum(sure, axis=2) >= wanted
        surest = sampling.top_n(stats.confidence, wanted, holes)
        fill = jnp.where(enough[:, :, None], sure, surest)
        return jnp.where((step >= self.denoising_steps)[:, :, None], holes, fill)


STRATEGY = EditIndel
