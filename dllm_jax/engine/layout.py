"""What the host loop must know of the device's programs: sizes and rules, as plain numbers.

Made once by `device` from model, strategy and configuration. Nothing here imports JAX.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Literal

PromptMode = Literal["grid_causal", "grid_full", "whole_causal", "whole_full", "in_window"]

# How the rows of a prefill pass see each other: blocks and those before them, tokens and those
# before them, or everything. Text behind a prompt of one of the full modes is recomputed as blocks.
PassKind = Literal["blocks", "causal", "full"]
PASS_KINDS: dict[str, PassKind] = {
    "grid_causal": "blocks",
    "grid_full": "full",
    "whole_causal": "causal",
    "whole_full": "full",
}

NO_LIMIT = 2**31 - 1
HOLE = -1  # in the place of an id: a cell to be written
# What a chunk may bring to the host, which also bounds the pages it may need: so many windows, or,
# where windows are narrow, so many tokens for each of its steps.
WINDOWS_PER_CHUNK = 4
TOKENS_PER_STEP = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Resources and limits of an engine.

    Attributes:
        max_num_seqs: Slots: texts decoded at once.
        max_model_len: Most tokens of prompt and text together; None: the model's positions.
        page_size: Tokens of a page.
        num_pages: Pages of the pool; None: as many as memory holds.
        memory_utilization: Share of the device's memory to use when `num_pages` is None.
        enable_prefix_caching: Reuse pages of equal prefixes.
        max_num_batched_tokens: Most prefill tokens between two decode steps; None: as many as
            keep the step below twice its time, for each waiting prompt where nobody watches.
        max_steps_per_chunk: Most decode steps of one dispatch.
        slot_buckets, page_buckets, prefill_buckets: Sizes to compile; None: chosen.
    """

    max_num_seqs: int = 8
    max_model_len: int | None = None
    page_size: int = 64
    num_pages: int | None = None
    memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    max_num_batched_tokens: int | None = None
    max_steps_per_chunk: int = 64
    slot_buckets: tuple[int, ...] | None = None
    page_buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None

    def __post_init__(self):
        whole = ("max_num_seqs", "page_size", "max_steps_per_chunk")
        optional = ("max_model_len", "num_pages", "max_num_batched_tokens")
        for name in (*whole, *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number >= 1; choose one")
        share = self.memory_utilization
        if not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise ValueError(
                f"memory_utilization={self.memory_utilization!r} must be in (0, 1]; "
                "0.9 leaves a tenth for others"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """The rules and sizes the host loop plans by.

    Attributes:
        num_slots, num_pages, page_size, max_model_len, max_steps_per_chunk: As configured.
        block_size: S, tokens of a block.
        window: W, cells of the window: a step commits and writes at most so many positions.
        prompt_mode: How prompts are taken in (`dllm_jax.strategies.core.protocol.Needs.prompt`).
        compute_at_least: Prompt tokens a prefix hit must leave to compute: 0, 1, or a block.
        soft_commits: Committed keys depend on more than tokens: generated pages are never shared.
        starts_over: A preempted request does so: its tokens and its slot do not say all of it.
        prefix_caching: Reuse pages across requests.
        salt: What keys and values depend on beside the tokens: model, adapter, mask, block size.
        vocab_size, mask_id, stop_token_ids: Of the model.
        knobs: The strategy's thresholds, with the range of each.
        slot_buckets, page_buckets, prefill_buckets: Compiled sizes, ascending; the last ones
            cover every slot, every page of a request, and (full modes) every prompt.
        many_rows: Slot buckets from here on run without command buffers; None: none does.
        prompts_a_pass: Prompts whose pieces of the smallest size one pass takes in; 1: none does.
    """

    num_slots: int
    num_pages: int
    page_size: int
    max_model_len: int
    max_steps_per_chunk: int
    block_size: int
    window: int
    prompt_mode: PromptMode
    compute_at_least: int = 0
    soft_commits: bool = False
    starts_over: bool = False
    prefix_caching: bool = True
    salt: bytes = b""
    vocab_size: int
    mask_id: int = -1
    stop_token_ids: tuple[int, ...] = ()
    knobs: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    knob_values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    slot_buckets: tuple[int, ...]
    page_buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...]
    max_num_batched_tokens: int | None = None
    many_rows: int | None = None
    prompts_a_pass: int = 1

    @functools.cached_property
    def is_grid(self) -> bool:
        """Blocks lie on the absolute grid."""
        return self.prompt_mode.startswith("grid")

    @functools.cached_property
    def is_full(self) -> bool:
        """Prompt rows all see each other: one pass, reusable only as a whole."""
        return self.prompt_mode.endswith("full")

    @functools.cached_property
    def unit(self) -> int:
        """Tokens whose pages are shared together: whole pages of whole blocks."""
        return math.lcm(self.page_size, self.block_size if self.is_grid else 1)

    @functools.cached_property
    def most_new(self) -> int:
        """Tokens a chunk of several steps may emit a row: it ends before it could emit more."""
        most = max(WINDOWS_PER_CHUNK * self.window, TOKENS_PER_STEP * self.max_steps_per_chunk)
        return min(most, self.max_model_len)

    def prefill_len(self, prompt_len: int) -> int:
        """Tokens of a prompt that go to the cache before decoding."""
        if self.prompt_mode == "in_window":
            return 0
        return prompt_len // self.block_size * self.block_size if self.is_grid else prompt_len

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """One sequence as its slot sees it, in host numbers.

    Attributes:
        tail: Prompt tokens from the first cell of the window on, at most W.
        limit: First absolute position that may not be emitted.
        knobs: One value for each of `EngineLayout.knobs`.
        seed, fold: The sequence's random key is `fold_in(key(seed), fold)`.
        given: Ids from the prompt's end on, `HOLE` for a cell to be written (prompts in the
            window); the text behind them is to be written too.
    """

    tail: tuple[int, ...]
    prompt_len: int
    limit: int
    temperature: float
    top_k: int
    top_p: float
    stop_ids: tuple[int, ...]
    max_nfe: int
    max_run: int
    knobs: Mapping[str, float]
    seed: int
    fold: int
    given: tuple[int, ...] = ()

    def num_written(self, length: int) -> int:
        """How many of the first `length` tokens of the text were written, not given."""
        return length - sum(token != HOLE for token in self.given[:length])


class DeviceFailure(RuntimeError):
    """A program failed on the device: the donated state, pools included, is gone."""
