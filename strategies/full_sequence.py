"""Full-sequence diffusion: models trained without a cache, decoded as their authors do.

Prompt, text and what follows it stand in one window, and every cell sees every other.

1. The text is cut in blocks of `block_length` from the prompt's end, filled from left to right.
2. The model runs over the whole window. With `cfg_scale` it runs once more with all given tokens
   hidden, and the logits move away from those of that run.
3. Of the holes of the current block the best-scored are filled, as many as the schedule says, and
   all whose token is surer than `accept_threshold`.

With `cache` only a block's first forward runs everything, and stores all keys and values. Later
ones run the text from the block on ("prefix") or the block alone ("dual") and see the rest as
stored: an approximation, because in such a model every key depends on every cell.

Source: LLaDA (arXiv 2502.09992), Dream (arXiv 2508.15487), Fast-dLLM (arXiv 2505.22618).
"""

from typing import Literal, get_args

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool

from .core import blocks, dual_cache, random, remasking, sampling
from .core.checks import check_number, check_one_of, check_whole
from .core.needs import Needs
from .core.protocol import Forward, ForwardOutput, Knob, Strategy, knob
from .core.remasking import Rule, TextBlock
from .core.state import Carry, DecodeState, StepInfo

Cache = Literal["prefix", "dual"]

_MOST_STEPS = 1_000_000


class FullSequence(Strategy):
    """Diffusion over prompt and text together.

    Attributes:
        accept_threshold: Tokens whose probability is above it (strictly) are taken beside the
            schedule's; from 1 up none is. Below 1 all but "origin" take one at least.
        steps: Forwards of a text, shared evenly by its blocks; None: one token a forward.
        block_length: Tokens of a block of the text; None: the text is one block.
        remasking: LLaDA's: "low_confidence", the most probable tokens, or "random" ones, evenly
            spread over the forwards. Dream's, by timesteps: "maskgit_plus" (the most probable),
            "margin", "entropy", or "origin", which takes each hole by chance.
        cfg_scale: Strength of classifier-free guidance; 0: none, and one forward a step.
        cache: What a block's later forwards do not run again; None: nothing.
        block_size, buffer_size: Their product is the window, for prompt, text and what follows.
    """

    accept_threshold: Knob = knob(1.0)
    steps: int | None = struct.field(pytree_node=False, default=None)
    block_length: int | None = struct.field(pytree_node=False, default=None)
    remasking: Rule = struct.field(pytree_node=False, default="low_confidence")
    cfg_scale: float = struct.field(pytree_node=False, default=0.0)
    cache: Cache | None = struct.field(pytree_node=False, default=None)
    block_size: int = struct.field(pytree_node=False, default=32)
    buffer_size: int = struct.field(pytree_node=False, default=16)

    def __post_init__(self):
        """Check the fields."""
        super().__post_init__()
        if self.steps is not None:
            check_whole("steps", self.steps, 1, _MOST_STEPS)
        if self.block_length is not None:
            check_whole("block_length", self.block_length, 1)
        check_one_of("remasking", self.remasking, get_args(Rule))
        check_one_of("cache", self.cache, (None, *get_args(Cache)))
        check_number("cfg_scale", self.cfg_scale, "no guidance")
        if self.cfg_scale and self.cache:
            raise ValueError(
                f"cfg_scale={self.cfg_scale} runs the model on two inputs and "
                f"cache={self.cache!r} keeps the keys of one; use one of the two"
            )

    @property
    def needs(self) -> Needs:
        """Everything in the window; its cache lives past the window's start."""
        reads = "across_steps" if self.cache else "none"
        return Needs("in_window", provisional_cache=reads, fills_holes=True)

    def patience(self, window):
        """As long as the schedule of a block, which may fill nothing until its last forward."""
        return max(super().patience(window), self.steps or 0)

    def init(self, spec):
        """The block of the last forward, the holes it began with and its forwards so far."""
        del spec
        return Carry(slot=remasking.no_block())

    def step(self, forward, state):
        """Fill holes of the current block with one forward, or two with guidance."""
        block = remasking.current_block(state, self.block_length)
        holes = block.cells & ~state.buffer.filled
        state, is_new = remasking.count(state, block, holes)
        out, state = self._run(forward, state, block, is_new)
        stats = out.predict(
            where=holes,
            sampling=state.sampling,
            keys=random.step_keys(state, salt=remasking.DRAW_STREAM),
            confidence="raw" if self.remasking in remasking.OF_LLADA else "drawn",
            num_top=2 if self.remasking == "margin" else 0,
            guide=self._guide(forward, state),
        )
        how = self.steps, self.block_length, self.accept_threshold
        accept = remasking.fill(self.remasking, stats, state, holes, *how)
        accept |= sampling.above(stats, self.accept_threshold) & holes
        state = blocks.write(state, stats.token, accept)
        one = jnp.ones_like(state.buffer.nfe)
        return state, StepInfo(
            commit_len=0 * one,
            settled_len=blocks.settled_run(state),
            accepted=jnp.sum(accept, axis=(1, 2), dtype=jnp.int32),
            nfe=2 * one if self.cfg_scale else one,
        )

    def _run(
        self, forward: Forward, state: DecodeState, block: TextBlock, is_new: Bool[Array, " B"]
    ) -> tuple[ForwardOutput, DecodeState]:
        """The forward over the window, or over the part of it that is not cached."""
        visible = _all_see_all(state)
        if self.cache is None:
            return forward(state, live=remasking.text_cells(state), visible=visible), state
        if self.cache == "prefix":
            window = self.block_size * self.buffer_size
            widths = (window // 4, window // 2)
        else:
            widths = () if self.block_length is None else (self.block_length + forward.shift,)
        alone = self.cache == "dual"
        return dual_cache.run_text(
            forward, state, block, is_new, alone=alone, widths=widths, visible=visible
        )

    def _guide(self, forward: Forward, state: DecodeState) -> tuple[ForwardOutput, float] | None:
        """The forward with all given tokens hidden, and the scale of guidance."""
        if not self.cfg_scale:
            return None
        buffer = state.buffer
        written = buffer.filled & ~blocks.is_given(state)
        shown = jnp.where(written, buffer.tokens, forward.mask_id)
        text, visible = remasking.text_cells(state), _all_see_all(state)
        return forward(state, inputs=shown, live=text, visible=visible), self.cfg_scale


def _all_see_all(state: DecodeState) -> Bool[Array, "1 K K"]:
    K = state.buffer.tokens.shape[1]
    return jnp.ones((1, K, K), bool)


STRATEGY = FullSequence
