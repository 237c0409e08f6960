"""DFlash: speculative decoding with a drafter that fills a block at once; lossless.

The window is an anchor (the last known token), the drafts after it, and one more cell. A step:

1. The drafter runs (anchor, mask, ..., mask) once. Each row sees all of them and the context.
2. The target runs (anchor, drafts) once, causally. Row i predicts the token after cell i.
3. Drafts are right up to the first that differs from the target's token. The right ones and that
   token of the target are emitted; the last of them is the next anchor.
4. The rows of the anchor and of the right drafts are stored: the target's keys and values in its
   cache, keys and values made of its residual streams in the drafter's.

The target's token is drawn with the key of its absolute position, as in `ar`. A draft is a guess at
that draw and cannot change it, so the text is that of `ar` for any drafter and temperature. (In
bfloat16 the rows of a wider pass round differently unless the engine is `batch_invariant`.)

With `acceptance="rejection"` drafts are drawn and stay by chance (`rejection`). The text then
has the distribution of `ar`'s, but is another one.

Drafting switches off while rounds emit fewer tokens than they cost (`drafting.pays`). Step 1 is
then left out and step 2 runs the anchor alone, as in `ar`. Step 4 stays, so that drafting can
resume.

Source: DFlash (arXiv 2602.06036) and its authors' loop, which also draws the target's tokens and
keeps the drafts that match, but with noise that has no position.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ..core import blocks, random
from ..core.forward import Readout
from ..core.knobs import Knob, at_slot, knob
from ..core.needs import Needs
from ..core.protocol import Strategy, Taps
from ..core.state import Carry, StepInfo
from . import drafting, rejection
from .draft_settings import bound, check_width

DRAFT = "draft"


class DFlash(Strategy):
    """A block of drafts, judged in one pass. Fields of None come from the draft model (`bind`).

    Attributes:
        draft_block_size: Cells the drafter runs: the anchor and the masks after it.
        target_layer_ids: Layers of the target, counted from 0, whose output the drafter reads.
        width: Cells the target runs in every step, the anchor among them. Drafts past it are not
            judged; at 1 none are drawn. None: the whole block, or 1 while drafts do not pay.
        acceptance: "match": a draft stays if it is what the target draws. "rejection": drafts are
            drawn from the drafter's distribution and stay as in speculative sampling. All logits
            of the pass are in memory then. The text depends on where rounds begin, so every step
            drafts.
        break_even: Tokens that a round must emit on average for drafts to pay, for one request.
            More slots raise it (`drafting.pays`). At 0 every step drafts, at infinity none. It has
            no effect where the width is fixed. Texts do not depend on it, except for near ties of
            bfloat16.
    """

    draft_block_size: int | None = struct.field(pytree_node=False, default=None)
    target_layer_ids: tuple[int, ...] | None = struct.field(pytree_node=False, default=None)
    width: int | None = struct.field(pytree_node=False, default=None)
    acceptance: Literal["match", "rejection"] = struct.field(pytree_node=False, default="match")
    break_even: Knob = knob(1.25)
    buffer_size: int = struct.field(pytree_node=False, default=1)

    @property
    def block_size(self) -> int:
        """Cells of the window: the drafter's, and one for the token after drafts all right."""
        size = self.draft_block_size
        return 17 if size is None else size + 1  # before a draft is bound: the published size

    @property
    def needs(self) -> Needs:
        """A causal prompt, a drafter, and the residual streams of its context."""
        # Stream j is what layer j - 1 leaves; stream 0 is the embedding.
        streams = tuple(layer + 1 for layer in self.target_layer_ids or ())
        return Needs(
            "whole_causal",
            hidden_layers=streams,
            boundary=True,
            aux=(DRAFT,),
            token_a_step=True,
            fills_holes=True,
        )

    @property
    def choices(self) -> tuple[int, ...]:
        """The widths that a step may have."""
        if self.width is not None:
            return (self.width,)
        size = self.block_size - 1
        return (size,) if self.acceptance == "rejection" else (1, size)

    @property
    def holds_constraints(self) -> bool:
        """Whether the text can be held to a grammar: not where drafts stay by chance."""
        return self.acceptance == "match"

    def bind(self, draft_config):
        """This strategy with the `block_size` and `target_layer_ids` of a draft model."""
        return bound(self, draft_config)

    def init(self, spec):
        """Zero counts of drafts, and the estimate of a round's length, which outlives a request."""
        size = spec.block_size - 1
        estimate = drafting.no_estimate(size) if self.makes_choices else {}
        return Carry(slot=drafting.no_counts(size), lasting=estimate)

    def absorb(self, chunk, state):
        """Store the drafter's context of the prompt; draw the first token, the first anchor."""
        if chunk.out is not None:
            context = self._context(chunk.forward, chunk.out, chunk.state, chunk.valid, None)
            state = context.store(state, chunk.valid)
        keys = random.position_keys(state)[:, 0, 0]
        opened = blocks.begin(state, jnp.zeros_like(state.finish), chunk.last)
        first = chunk.forward.predict(
            state.boundary, sampling=state.sampling, keys=keys, first_of=opened
        )
        return blocks.begin(state, first.token, chunk.last)

    def step(self, forward, state):
        """Draft, judge, keep the right drafts and one token of the target."""
        check_width(self, state.buffer.tokens.shape[1])
        widths = self.choices
        rounds = [functools.partial(self._round, forward, width=width) for width in widths]
        if len(widths) == 1:
            width = widths[0]
            out, context, truth, right = rounds[0](state)
        else:
            choice = self.choice(state)
            width = jnp.asarray(widths, jnp.int32)[choice]
            out, context, truth, right = jax.lax.switch(choice, rounds, state)
        cell = jnp.arange(self.block_size, dtype=jnp.int32)[None, None]
        count = jnp.ones_like(right)  # what may be emitted
        if widths != (1,):
            text = jnp.where(cell == 0, state.buffer.tokens, truth)[:, 0]
            count = drafting.emitted(state, text, right)
        kept = cell < count[:, None, None]
        state = context.store(out.store(state, kept), kept)
        state = blocks.write(state, truth, (cell > 0) & (cell <= count[:, None, None]))
        state = drafting.count(state, right, width)
        return state, StepInfo(
            commit_len=count, settled_len=count + 1, accepted=count, nfe=jnp.ones_like(count)
        )

    def _round(self, forward, state, width):
        """Both passes and their verdict: a branch, so nothing is stored here.

        Returns:
            The target's pass, the drafter's context of it, the tokens after the anchor by cells,
            and how many drafts were right.
        """
        tokens, draft = state.buffer.tokens, forward.aux[DRAFT]
        size = self.block_size - 1
        # Known while tracing, so that what is narrow is cut out and not gathered.
        cell = np.broadcast_to(np.arange(size + 1, dtype=np.int32), tokens.shape)
        live, block, drafted, how = cell < width, tokens, None, {}
        if self.acceptance == "rejection":
            how = {
                "sampling": state.sampling,
                "keys": random.position_keys(state, rejection.DRAFTS),
            }
        if width > 1:
            masked = jnp.where(cell == 0, tokens, draft.mask_id)
            drafted = draft(state, inputs=masked, live=cell < size, width=size)
            guess = drafted.predict(where=cell > 0, width=width - 1, **how)
            block = jnp.where(cell == 0, tokens, guess.token)
        out = forward(
            state,
            inputs=block,
            live=live,
            causal=True,
            hidden_layers=self.needs.hidden_layers,
            width=width,
        )
        context = self._context(forward, out, state, live, width)
        if self.acceptance == "rejection":
            truth, right = rejection.judge(forward, draft, state, out, drafted, block[:, 0, :width])
            out.chose(truth, Readout(where=cell > 0, sampling=state.sampling, width=width))
            return out, context, truth, right
        return out, context, *drafting.match(out, state, block, width)

    def _context(self, forward, out, view, where, width):
        """The drafter's keys and values of the rows `where` of the target's pass `out`."""
        if not out.taps:
            raise ValueError(
                "DFlash has no target_layer_ids: bind the draft model, whose config says them "
                "(draft=...), or name them"
            )
        taps = Taps(jnp.concatenate(out.taps, axis=-1))
        return forward.aux[DRAFT](view, inputs=taps, live=where, width=width)

    def chosen(self, index):
        """This strategy with the width of that choice in every step."""
        return self.replace(width=self.choices[index])

    def choice(self, state):
        """The index of the next step's width in `choices`."""
        check_width(self, state.buffer.tokens.shape[1])  # a loop runs one of `chosen`
        drafts = drafting.pays(state, self.choices[-1], at_slot(self.break_even))
        return drafts.astype(jnp.int32)


STRATEGY = DFlash
