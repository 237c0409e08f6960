"""Full-sequence diffusion: models trained without a cache, decoded as their authors do.

Prompt, text and what follows it stand in one window, and every cell sees every other.

1. The text is cut in blocks of `block_length` from the prompt's end, filled from left to right.
2. The model runs over the whole window. With `cfg_scale` it runs once more with all given tokens
   hidden, and the logits move away from those of that run.
3. In the current block the schedule's number of holes is filled, best scores first, and all
   whose token is surer than `accept_threshold`.

With `append` the masks of later blocks do not exist yet: a forward runs prompt and text up to the
current block's end, in the least of a few widths, so a window may be long.

With `cache` only a block's first forward runs everything, and stores all keys and values. Later
ones run the text from the block on ("prefix") or the block alone ("dual") and see the rest as
stored: an approximation, because in such a model every key depends on every cell.

Source: LLaDA (arXiv 2502.09992), Dream (arXiv 2508.15487), Fast-dLLM (arXiv 2505.22618); iLLaDA's
generation code for blocks that are appended and for the end of its thoughts.
"""

from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool

from .core import blocks, dual_cache, random, remasking, sampling
from .core.checks import check_number, check_one_of, check_whole, is_whole, short_repr
from .core.needs import Needs
from .core.protocol import Forward, ForwardOutput, Knob, Strategy, knob
from .core.remasking import Rule, TextBlock
from .core.state import Carry, DecodeState, StepInfo

Cache = Literal["prefix", "dual"]

_MOST_STEPS = 1_000_000
_NARROWEST = 512  # cells of a pass; fewer take hardly less time


class FullSequence(Strategy):
    """Diffusion over prompt and text together.

    Attributes:
        accept_threshold: Tokens whose probability is above it (strictly) are taken besides the
            schedule's; from 1 up none is. Below 1 all but "origin" take one at least.
        steps: Forwards of a text, shared evenly by its blocks; None: one token a forward.
        block_length: Tokens of a block of the text; None: the text is one block.
        remasking: LLaDA's: "low_confidence", the most probable tokens, or "random" ones, evenly
            spread over the forwards. Dream's, by timesteps: "maskgit_plus" (the most probable),
            "margin", "entropy", or "origin", which takes each hole by chance.
        cfg_scale: Strength of classifier-free guidance; 0: none, and one forward a step.
        append: Later blocks do not exist until they are begun (iLLaDA). Needs `block_length`.
        end_think: Ids of the text that ends a thought, such as `</think>`; empty: it is not pushed.
        end_think_boost, end_think_power: What is added to the logit of the next id of that text, at
            the leftmost hole: the boost times a power of the share of the limit that is written.
        cache: What a block's later forwards do not run again; None: nothing.
        block_size, buffer_size: Their product is the window, for prompt, text and what follows.
    """

    accept_threshold: Knob = knob(1.0)
    steps: int | None = struct.field(pytree_node=False, default=None)
    block_length: int | None = struct.field(pytree_node=False, default=None)
    remasking: Rule = struct.field(pytree_node=False, default="low_confidence")
    cfg_scale: float = struct.field(pytree_node=False, default=0.0)
    append: bool = struct.field(pytree_node=False, default=False)
    end_think: tuple[int, ...] = struct.field(pytree_node=False, default=())
    end_think_boost: float = struct.field(pytree_node=False, default=0.0)
    end_think_power: float = struct.field(pytree_node=False, default=3.0)
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
        check_one_of("append", self.append, (False, True))
        if self.append and self.block_length is None:
            raise ValueError("append=True appends blocks; give block_length, such as 32")
        are_ids = isinstance(self.end_think, tuple) and all(map(is_whole, self.end_think))
        if not are_ids or min(self.end_think, default=0) < 0:
            raise ValueError(f"end_think={short_repr(self.end_think)} must be ids; give a tuple")
        for name in ("end_think_boost", "end_think_power"):
            check_number(name, getattr(self, name), "no boost")
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
        text = self._text(state, block)
        out, state = self._run(forward, state, block, is_new, text)
        stats = out.predict(
            where=holes,
            sampling=state.sampling,
            keys=random.step_keys(state, salt=remasking.DRAW_STREAM),
            confidence="raw" if self.remasking in remasking.OF_LLADA else "drawn",
            num_top=2 if self.remasking == "margin" else 0,
            guide=self._guide(forward, state, text),
            width=self.block_length if self.append else None,
            penalty=self._toward_end(state, holes),
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

    def _text(self, state: DecodeState, block: TextBlock) -> Bool[Array, "B K S"]:
        """The cells that exist: with `append` up to the block's end, or the last that is filled."""
        text = remasking.text_cells(state)
        if not self.append:
            return text
        buffer = state.buffer
        filled = jnp.max(jnp.where(buffer.filled, buffer.positions + 1, 0), axis=(1, 2))
        return text & (buffer.positions < jnp.maximum(block.end, filled)[:, None, None])

    def _toward_end(
        self, state: DecodeState, holes: Bool[Array, "B K S"]
    ) -> tuple[Array, Array] | None:
        """The penalty that pushes a thought towards its end; None without a boost."""
        if not (self.end_think and self.end_think_boost):
            return None
        ids, share = remasking.next_of(self.end_think, state, holes)
        return ids, jnp.where(share > 0, -self.end_think_boost * share**self.end_think_power, 0)

    @property
    def _widths(self) -> tuple[int, ...]:
        """Widths of a pass where the text grows: they double, so it runs at most twice its text."""
        cells = self.block_size * self.buffer_size
        return tuple(_NARROWEST << i for i in range(cells // _NARROWEST)) if self.append else ()

    def _run(
        self,
        forward: Forward,
        state: DecodeState,
        block: TextBlock,
        is_new: Bool[Array, " B"],
        text: Bool[Array, "B K S"],
    ) -> tuple[ForwardOutput, DecodeState]:
        """The forward over the window, or over the part of it that is not cached."""
        visible, widths = _all_see_all(state), self._widths
        if self.cache is None:
            how = {"visible": visible, "stores": False}
            return dual_cache.run_narrow(forward, state, text, widths, **how), state
        if self.cache == "prefix":
            window = self.block_size * self.buffer_size
            widths = (*widths, window // 4, window // 2)
        elif self.block_length is not None:
            widths = (*widths, self.block_length + forward.shift)
        how = {"alone": self.cache == "dual", "widths": widths, "visible": visible}
        return dual_cache.run_text(forward, state, block, is_new, text, **how)

    def _guide(
        self, forward: Forward, state: DecodeState, text: Bool[Array, "B K S"]
    ) -> tuple[ForwardOutput, float] | None:
        """The forward with all given tokens hidden, and the scale of guidance."""
        if not self.cfg_scale:
            return None
        buffer = state.buffer
        written = buffer.filled & ~blocks.is_given(state)
        shown = jnp.where(written, buffer.tokens, forward.mask_id)
        how = {"inputs": shown, "visible": _all_see_all(state), "stores": False}
        return dual_cache.run_narrow(forward, state, text, self._widths, **how), self.cfg_scale


def _all_see_all(state: DecodeState) -> np.ndarray:
    K = state.buffer.tokens.shape[1]
    return np.ones((1, K, K), bool)  # known while tracing: a window may have any number of blocks


STRATEGY = FullSequence
