"""DFlash: speculative decoding with a drafter that fills a block at once; lossless.

The window is an anchor (the last token known), the drafts behind it, and one more cell. In a step:

1. The drafter runs (anchor, mask, ..., mask) once: each row sees all of them and the context.
2. The target runs (anchor, drafts) once, causally: row i says which token follows cell i.
3. Drafts are right up to the first that is not what the target says; they and that token of the
   target's are the text. The last of them is the next anchor.
4. The rows of the anchor and of the right drafts go to both caches: their keys and values to the
   target's, keys and values made of the target's residual streams to the drafter's.

What the target says is drawn with the key of the absolute position, which is how `ar` draws. So a
draft is a guess at a draw that it cannot change: the text is that of `ar`, whatever the drafter and
the temperature. (In bfloat16 the target's rows may round otherwise in a pass of another width.)

Source: DFlash (arXiv 2602.06036) and its authors' loop, which draws what the target says and
keeps the drafts that match it too, but with noise that has no position.
"""

import jax.numpy as jnp
from flax import struct

from strategies import blocks, drafting, random
from strategies.protocol import Needs, Taps
from strategies.state import Carry, StepInfo

DRAFT = "draft"


class DFlash(struct.PyTreeNode):
    """A block of drafts, judged in one pass. What is None is the draft model's (`bind`).

    Attributes:
        draft_block_size: Cells the drafter runs: the anchor and the masks behind it.
        target_layer_ids: Layers of the target, counted from 0, whose output the drafter is fed.
        width: Cells the target runs, the anchor among them: the drafts past it are not looked at.
            None: all that the drafter ran.
    """

    draft_block_size: int | None = struct.field(pytree_node=False, default=None)
    target_layer_ids: tuple[int, ...] | None = struct.field(pytree_node=False, default=None)
    width: int | None = struct.field(pytree_node=False, default=None)
    buffer_size: int = struct.field(pytree_node=False, default=1)

    @property
    def block_size(self) -> int:
        """Cells of the window: the drafter's, and one for the token behind drafts all right."""
        return (self.draft_block_size or 16) + 1  # before a draft is bound: the published size

    @property
    def needs(self) -> Needs:
        """A causal prompt, a drafter, and the streams its context is made of."""
        # Stream j is what layer j - 1 leaves; stream 0 is the embedding.
        streams = tuple(layer + 1 for layer in self.target_layer_ids or ())
        return Needs("whole_causal", hidden_layers=streams, boundary=True, aux=(DRAFT,))

    def bind(self, draft_config):
        """This strategy with what the draft model was trained for.

        Args:
            draft_config: Has `block_size` and `target_layer_ids`.

        Raises:
            ValueError: The strategy has layers of its own that are not those.
        """
        layers = tuple(draft_config.target_layer_ids)
        if self.target_layer_ids not in (None, layers):
            raise ValueError(
                f"target_layer_ids={self.target_layer_ids} are not {layers}, which the draft was "
                "trained with; leave target_layer_ids out"
            )
        size = self.draft_block_size or draft_config.block_size
        return self.replace(draft_block_size=size, target_layer_ids=layers)

    def init(self, spec):
        """Counts of how the drafts of a request fare."""
        return Carry(slot=drafting.no_counts(spec.block_size - 1))

    def absorb(self, chunk, state):
        """Give the drafter its context of the prompt; draw the first token, the first anchor."""
        if chunk.out is not None:
            state = self._context(chunk.forward, chunk.out, chunk.state, chunk.valid, None, state)
        keys = random.position_keys(state)[:, 0, 0]
        first = chunk.forward.predict(state.boundary, sampling=state.sampling, keys=keys)
        return blocks.begin(state, first.token, chunk.last)

    def step(self, forward, state):
        """Draft, judge, keep what is right and one token more."""
        buffer, draft = state.buffer, forward.aux[DRAFT]
        size, width = self._sizes(buffer.tokens.shape[1])
        cell = jnp.broadcast_to(jnp.arange(size + 1, dtype=jnp.int32), buffer.tokens.shape)
        masked = jnp.where(cell == 0, buffer.tokens, draft.mask_id)
        guess = draft(state, inputs=masked, live=cell < size, width=size).predict()
        block = jnp.where(cell == 0, buffer.tokens, guess.token)
        live = cell < width
        out = forward(
            state,
            inputs=block,
            live=live,
            causal=True,
            hidden_layers=self.needs.hidden_layers,
            width=width,
        )
        keys = random.position_keys(state)
        truth = out.predict(where=cell > 0, sampling=state.sampling, keys=keys).token
        right = ((block == truth) & live)[:, 0, 1:].astype(jnp.int32)
        right = jnp.sum(jnp.cumprod(right, axis=1), axis=1, dtype=jnp.int32)
        count = jnp.clip(buffer.limit - buffer.start - 1, 1, 1 + right)  # what may be emitted
        kept = cell < count[:, None, None]
        state = out.store(state, kept)
        state = self._context(forward, out, state, kept, width, state)
        state = blocks.write(state, truth, (cell > 0) & (cell <= count[:, None, None]))
        state = drafting.count(state, right, width - 1)
        return state, StepInfo(
            commit_len=count, settled_len=count + 1, accepted=count, nfe=jnp.ones_like(count)
        )

    def _context(self, forward, out, view, where, width, state):
        """Store the drafter's keys and values of the rows `where` of the target's pass `out`."""
        if not out.taps:
            raise ValueError(
                "DFlash has no target_layer_ids: bind the draft model, whose config says them "
                "(draft=...), or name them"
            )
        taps = Taps(jnp.concatenate(out.taps, axis=-1))
        return forward.aux[DRAFT](view, inputs=taps, live=where, width=width).store(state, where)

    def _sizes(self, num_blocks):
        """Cells that the drafter and the target run, checked."""
        size = self.block_size - 1
        width = size if self.width is None else self.width
        if num_blocks != 1:
            raise ValueError(f"buffer_size={num_blocks}: DFlash drafts one block at a time; use 1")
        if size < 2:
            raise ValueError(f"draft_block_size={size} leaves no cell to draft; use 2 or more")
        if not 2 <= width <= size:
            raise ValueError(
                f"width={width} must be in [2, {size}], the anchor and drafts of a block; "
                "without any draft, use the strategy 'ar'"
            )
        return size, width


STRATEGY = DFlash
