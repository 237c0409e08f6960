"""The requirements of a strategy: how its prompt is prefilled, and what else it reads."""

import dataclasses
import enum
from typing import Any, Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array

from .checks import check_one_of

# What a step reads of the cache past `start`.
CacheReads = Literal["none", "same_step", "across_steps"]


class PromptMode(enum.StrEnum):
    """How the prompt reaches the cache.

    Attributes:
        GRID_CAUSAL: Whole blocks are prefilled block-causally; the rest enters the window.
        GRID_FULL: The same blocks are stored, from one pass in which all prompt rows see each
            other.
        WHOLE_CAUSAL: The whole prompt is prefilled token-causally; the window starts at its end.
        WHOLE_FULL: The whole prompt is prefilled in one pass in which all its rows see each other.
        IN_WINDOW: Nothing is prefilled; the prompt, and text after it, are filled window cells.
    """

    GRID_CAUSAL = "grid_causal"
    GRID_FULL = "grid_full"
    WHOLE_CAUSAL = "whole_causal"
    WHOLE_FULL = "whole_full"
    IN_WINDOW = "in_window"

    @property
    def is_grid(self) -> bool:
        """Blocks start at multiples of the block size, not at the prompt's end."""
        return self in (PromptMode.GRID_CAUSAL, PromptMode.GRID_FULL)

    @property
    def is_full(self) -> bool:
        """All prompt rows see each other, so one pass computes them."""
        return self in (PromptMode.GRID_FULL, PromptMode.WHOLE_FULL)

    @property
    def is_token_causal(self) -> bool:
        """Each prompt row sees the tokens up to its own."""
        return self is PromptMode.WHOLE_CAUSAL

    @property
    def in_window(self) -> bool:
        """The prompt stays in the window and is never prefilled."""
        return self is PromptMode.IN_WINDOW

    def prefill_len(self, prompt_len: Array, block_size: int) -> Array:
        """Tokens of the prompt that are cached before decoding; the rest enters the window."""
        if self.in_window:
            return jnp.zeros_like(prompt_len)
        return prompt_len // block_size * block_size if self.is_grid else prompt_len


@dataclasses.dataclass(frozen=True)
class Needs:
    """Requirements of a strategy on the engine.

    Attributes:
        prompt: How the prompt is prefilled; a `PromptMode` or its name.
        hidden_layers: Residual streams that prefill hands to `absorb` as `chunk.out.taps`.
        boundary: Keep the raw hidden row of the position before the window.
        prefill_mode: The model mode of prefill (models with several modes).
        aux: Names of further models, such as a drafter, each with pools of its own.
        soft_commits: Committed keys and values depend on more than the committed tokens. Such
            pages are never shared, and a preempted request starts over.
        provisional_cache: What a step reads of the cache past `start`. "none": nothing, and the
            engine refuses `context_len`. "same_step": what the same step stored. "across_steps":
            what an earlier step stored. The slot then does not hold the whole request, so a
            preempted request starts over.
        token_a_step: Each step settles a token at least, so steps can be bounded by tokens.
        conditions: Inputs are `Conditioned`: only a network that mixes them runs the strategy.
        pins: A request may bring cells of the first block after a "whole_causal" prompt.
        fills_holes: The strategy writes predicted tokens to holes, and nothing else. Then a request
            may bring cells of its first window after a "grid" or a "whole_full" prompt, which are
            filled from the start, and what is written to the text of a grammar need not be checked.

    Raises:
        ValueError: `prompt` or `provisional_cache` is none of its names.
    """

    prompt: Any = PromptMode.GRID_CAUSAL
    hidden_layers: tuple[int, ...] = ()
    boundary: bool = False
    prefill_mode: int = 0
    aux: tuple[str, ...] = ()
    soft_commits: bool = False
    provisional_cache: CacheReads = "none"
    token_a_step: bool = False
    conditions: bool = False
    pins: bool = False
    fills_holes: bool = False

    def __post_init__(self):
        check_one_of("prompt", self.prompt, [*PromptMode])
        check_one_of("provisional_cache", self.provisional_cache, get_args(CacheReads))
        object.__setattr__(self, "prompt", PromptMode(self.prompt))

    @property
    def takes_given(self) -> bool:
        """A request may bring cells after its prompt."""
        return self.prompt.in_window or self.pins or self.starts_filled

    @property
    def starts_filled(self) -> bool:
        """A request may bring cells of its first window, which are filled from the start."""
        fits = not self.prompt.in_window and not self.prompt.is_token_causal
        return self.fills_holes and fits

    @property
    def starts_over(self) -> bool:
        """A preempted request starts over: its tokens and its slot are not all of its state."""
        return self.soft_commits or self.provisional_cache == "across_steps"
