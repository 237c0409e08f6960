"""DiffusionGemma: a canvas of random tokens, denoised whole until its likeliest text is stable.

The model has no mask. A block is a canvas that begins as uniform noise and runs in decoder mode:
its cells see each other, each with the expectation of the last step. A step:

1. Every cell is read at the temperature of the schedule, which falls with the canvas's own steps:
   a drawn token, the likeliest one, the entropy, the expected embedding.
2. The cells of least entropy whose sum stays within a budget show their draw next. Every other cell
   shows fresh noise, whatever it showed before.
3. The likeliest tokens are the text. It is final when enough steps in a row left it unchanged and
   its mean entropy is low enough, or after the last step of the schedule.

Then the text runs once more in encoder mode, in token order, as a prompt does: its keys and values
are those of a prefill. The last canvas of a request is not stored. With few slots the next canvas
begins in the pass that stores the one before it, with the same text.

Source: DiffusionGemma (transformers 5.23, `DiffusionGemmaGenerationMixin`); the budget is
EB-Sampler's (arXiv 2505.24857).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from ..core import blocks, random, sampling
from ..core.checks import check_whole
from ..core.needs import Needs
from ..core.protocol import Conditioned, Forward, ForwardOutput, Knob, Strategy, TokenStats, knob
from ..core.state import ACTIVE, NO_TOKEN, TO_CACHE, Carry, DecodeState, Sampling
from . import canvas

ENCODER, DECODER = 0, 1  # modes of the model
_DRAWS, _FRESH, _RENEWED = 0, 1, 2  # salts
_MOST_STEPS = 1_000_000  # steps of a canvas are counted in 32 bits, and exactly as floats


class DiffusionGemma(Strategy):
    """Uniform diffusion, a canvas at a time.

    Attributes:
        max_denoising_steps: Steps of the schedule: the most that a canvas takes.
        t_min, t_max: Temperatures between which the schedule falls, the higher one first; a
            request's own temperature is a factor; at 0 nothing is drawn and the factor is 1.
        entropy_bound: Nats that a step may keep besides its surest cell.
        stability_threshold: Steps in a row that must leave the text as it was.
        confidence_threshold: Mean entropy in nats below which (strictly) a canvas may end; at 0
            each takes all of its steps.
        early_slots: Most slots at which a canvas begins in the pass that stores the one before it.
            This takes a window of two blocks.
        storing: Whether the next step has such a pass. None: decided in each step.
    """

    max_denoising_steps: Knob = knob(48.0, 1.0, _MOST_STEPS, whole=True)
    t_min: Knob = knob(0.4, up_to="t_max")
    t_max: Knob = knob(0.8, 1e-3)
    entropy_bound: Knob = knob(0.1)
    stability_threshold: Knob = knob(1.0, 0.0, _MOST_STEPS, whole=True)
    confidence_threshold: Knob = knob(0.005)
    early_slots: int = struct.field(pytree_node=False, default=4)
    storing: bool | None = struct.field(pytree_node=False, default=None)
    block_size: int = struct.field(pytree_node=False, default=256)
    buffer_size: int = struct.field(pytree_node=False, default=2)

    def __post_init__(self):
        """Check the fields."""
        super().__post_init__()
        check_whole("early_slots", self.early_slots, 0)
        check_whole("buffer_size", self.buffer_size, 1, 2)

    @property
    def needs(self) -> Needs:
        """A prompt as an autoregressive model takes it, and cells that a request may bring."""
        return Needs("whole_causal", prefill_mode=ENCODER, conditions=True, pins=True)

    @property
    def choices(self) -> tuple[bool, ...]:
        """Whether a pass runs two canvases of a slot."""
        if self.storing is not None:
            return (self.storing,)
        return (False, True) if self.early_slots and self.buffer_size > 1 else (False,)

    def chosen(self, index):
        """This strategy with that pass in every step."""
        return self.replace(storing=self.choices[index])

    def choice(self, state):
        """The wide pass where a running slot stores one canvas and begins the next."""
        return (canvas.any_stores(state) & self._begins_early(state)).astype(jnp.int32)

    def patience(self, window):
        """At least the schedule, over which the likeliest text may stay the same."""
        steps = self.max_denoising_steps.values.astype(jnp.int32)
        return jnp.maximum(super().patience(window), steps + 2)

    def init(self, spec):
        """The canvas in work, the expectation at its cells, and its run of equal texts."""
        S = spec.block_size
        return Carry(
            slot={
                "canvas": jnp.zeros((1, S), jnp.int32),
                "expected": jnp.zeros((1, S, spec.hidden_size), spec.dtype),
                "unchanged": jnp.zeros((1,), jnp.int32),
            }
        )

    def step(self, forward, state):
        """One pass: store what is final, denoise the canvas after it."""
        early = self._begins_early(state)
        is_final = state.buffer.status == TO_CACHE
        state = blocks.open_next(state, stable=is_final) if early else blocks.open_next(state)
        active = state.buffer.status == ACTIVE
        steps = jnp.sum(jnp.where(active, state.buffer.block_steps, 0), axis=1)
        inputs = self._shown(forward, state, steps == 0)
        modes = (DECODER, ENCODER)
        narrow = functools.partial(canvas.run_one, forward, state, inputs, modes)
        both = functools.partial(canvas.run_all, forward, state, inputs, modes)
        choices = self.choices if early else (False,)
        wide = True in choices
        if len(choices) == 1:
            out = both() if wide else narrow()
        else:
            out = jax.lax.cond(self.choice(state) > 0, both, narrow)
        state = out.store(state, blocks.to_cache(state))
        cells = blocks.live_cells(state) & active[:, :, None]
        where = cells if wide else canvas.first_block(state)
        stats = self._read(out, state, self._law(state, steps), where)
        return self._judged(forward, state, stats, cells, steps)

    def _begins_early(self, state: DecodeState) -> bool:
        num_slots, num_blocks = state.buffer.status.shape
        return num_blocks > 1 and num_slots <= self.early_slots

    def _noise(self, forward: Forward, state: DecodeState, salt: int) -> Int[Array, "B K S"]:
        """Uniform ids: of a canvas that begins (`_FRESH`), of the cells of a step (`_RENEWED`)."""
        return random.block_ids(state, forward.vocab_size, salt)

    def _read(
        self, out: ForwardOutput, state: DecodeState, law: Sampling, where: Any
    ) -> TokenStats:
        """Statistics of one canvas of each slot, the cells `where` [B K S]."""
        keys = random.block_keys(state, _DRAWS)
        width = state.buffer.tokens.shape[2]
        # Of the canvas in work nothing is final but what the request brought.
        fixed = blocks.is_given(state) | (state.buffer.status != ACTIVE)[:, :, None]
        return out.predict(
            where=where, sampling=law, keys=keys, num_top=1, width=width, soft=True, fixed=fixed
        )

    def _law(self, state: DecodeState, steps: Int[Array, " B"]) -> Sampling:
        """The schedule's temperature times the request's."""
        count, low = self.max_denoising_steps.values, self.t_min.values
        scheduled = low + (self.t_max.values - low) * ((count - _as_float(steps)) / count)
        own = state.sampling.temperature
        return state.sampling.replace(temperature=scheduled * jnp.where(own > 0, own, 1.0))

    def _shown(
        self, forward: Forward, state: DecodeState, begins: Bool[Array, " B"]
    ) -> Conditioned:
        """The inputs: the canvas in work with its expectation, plain tokens of a stored text."""
        tokens, slot = state.buffer.tokens, state.carry.slot
        noise = self._noise(forward, state, _FRESH)
        shown = jnp.where(begins[:, None, None], noise, slot["canvas"][:, None])
        on = (state.buffer.status == ACTIVE)[:, :, None]
        held = blocks.is_given(state) | ~on
        none = jnp.zeros_like(slot["expected"])
        expected = jnp.where(begins[:, None, None], none, slot["expected"])[:, None]
        return Conditioned(
            ids=jnp.where(held, tokens, shown),
            expected=jnp.broadcast_to(expected, (*tokens.shape, expected.shape[-1])),
            on=jnp.broadcast_to(on, tokens.shape),
        )

    def _judged(
        self,
        forward: Forward,
        state: DecodeState,
        stats: TokenStats,
        active: Bool[Array, "B K S"],
        steps: Int[Array, " B"],
    ):
        """The state after the readout: the next canvas, its text, and whether that is final."""
        buffer, slot = state.buffer, state.carry.slot
        free = active & ~blocks.is_given(state)
        likeliest = jnp.where(stats.token == NO_TOKEN, NO_TOKEN, stats.top_ids[..., 0])
        draws = (state.sampling.temperature > 0)[:, None, None]
        kept = sampling.entropy_bounded(stats, self.entropy_bound, free)
        renewed = self._noise(forward, state, _RENEWED)
        shown = jnp.where(kept, jnp.where(draws, stats.token, likeliest), renewed)

        same = jnp.all((likeliest == buffer.tokens) | ~free, axis=(1, 2)) & (steps > 0)
        unchanged = jnp.where(same, slot["unchanged"] + 1, 0)
        count = _as_float(jnp.maximum(jnp.sum(free, axis=(1, 2)), 1))
        entropy = jnp.sum(jnp.where(free, stats.entropy, 0.0), axis=(1, 2)) / count
        is_sure = entropy < self.confidence_threshold.values
        is_still = _as_float(unchanged) >= self.stability_threshold.values
        is_last = _as_float(steps + 1) >= self.max_denoising_steps.values
        done = (is_still & is_sure) | is_last

        carry = Carry(
            slot={
                "canvas": canvas.cells_of(active, shown),
                "expected": canvas.cells_of(active, stats.soft).astype(slot["expected"].dtype),
                "unchanged": unchanged,
            }
        )
        filled = free & ~buffer.filled
        state = blocks.write(state.replace(carry=carry), likeliest, active)
        return blocks.finish_step(state, filled, ready=done[:, None])


def _as_float(count: Int[Array, " B"]) -> Array:
    return count.astype(jnp.float32)


STRATEGY = DiffusionGemma
