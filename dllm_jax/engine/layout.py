"""Sizes and rules of the device's programs, as plain numbers for the host loop.

`runner.buckets` makes an `EngineLayout` from model, strategy and configuration.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from dllm_jax.engine import checks

# How the rows of a prefill pass see each other: their block and those before it, tokens up to their
# own, or every row. Text after a prompt of kind "full" is recomputed as "blocks".
PassKind = Literal["blocks", "causal", "full"]
# The fields of `core.knobs.Rule`: low, high, whole, up_to.
KnobRule = tuple[float, float, bool, str | None]

NO_LIMIT = 2**31 - 1
PAGE_SIZE = 64  # tokens; one tile of 64 x 128 keys is 16 KB
MOST_PREFILL = 1 << 20  # tokens of a pass
TILE_OF_KEYS = 128  # of attention; where `batch_invariant` cuts prompts
HOLE = -1  # stands for an id that is to be written
# The most that a chunk returns, which also bounds the pages it needs: windows, or tokens a step
# where windows are narrow.
WINDOWS_PER_CHUNK = 4
TOKENS_PER_STEP = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Resources and limits of an engine.

    Attributes:
        max_num_seqs: Slots: texts decoded at once.
        max_model_len: Most tokens of prompt and text together; None: the model's positions.
        page_size: Tokens of a page.
        num_pages: Pages of the pool; None: all that memory holds.
        memory_utilization: Share of the device's memory to use when `num_pages` is None.
        enable_prefix_caching: Reuse pages of equal prefixes.
        max_num_batched_tokens: Most prefill tokens between two decode steps; None: the most that
            keep the step below twice its time. That budget is multiplied by the waiting prompts,
            or, where a text is streamed, by the waiting prompts for each decoding text.
        max_steps_per_chunk: Most decode steps of one dispatch.
        slot_buckets, page_buckets, prefill_buckets: Sizes to compile; None: chosen.
        batch_invariant: A request's tokens are the same bit for bit in any batch, in any order,
            however its prompt is cut or found in the prefix cache, and after a preemption, for
            which it starts over (docs/same_tokens.md). On one Hopper GPU in bfloat16.
        logprobs: Requests may ask for `logprobs` and `record`. Each step then reads the head once
            more; tokens do not change.
    """

    max_num_seqs: int = 8
    max_model_len: int | None = None
    page_size: int = PAGE_SIZE
    num_pages: int | None = None
    memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    max_num_batched_tokens: int | None = None
    max_steps_per_chunk: int = 64
    slot_buckets: tuple[int, ...] | None = None
    page_buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    batch_invariant: bool = False
    logprobs: bool = False

    def __post_init__(self):
        plain: dict[str, Any] = {}
        for name, default in _COUNTS.items():
            if default is not None or getattr(self, name) is not None:
                plain[name] = checks.whole_number(name, getattr(self, name))
        for name in ("enable_prefix_caching", "batch_invariant", "logprobs"):
            plain[name] = checks.boolean(name, getattr(self, name))
        for name in ("slot_buckets", "page_buckets", "prefill_buckets"):
            if (sizes := getattr(self, name)) is not None:
                plain[name] = tuple(checks.listed(name, sizes))
        sizes = self.prefill_buckets or ()
        if any(isinstance(size, int) and size > MOST_PREFILL for size in sizes):
            raise ValueError(
                f"prefill_buckets={checks.short_repr(sizes)} holds more than {MOST_PREFILL}; "
                "a prompt takes several passes: choose smaller ones"
            )
        share = self.memory_utilization
        if not isinstance(share, numbers.Real) or not 0.0 < share <= 1.0:
            raise ValueError(
                f"memory_utilization={checks.short_repr(share)} must be in (0, 1]; 0.9 leaves a "
                "tenth for others"
            )
        checks.set_fields(self, plain | {"memory_utilization": float(share)})


_COUNTS = {
    field.name: field.default
    for field in dataclasses.fields(EngineConfig)
    if field.type in (int, int | None)
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """The rules and sizes the host loop plans by.

    Attributes:
        num_slots, num_pages, page_size, max_model_len, max_steps_per_chunk: As configured.
        block_size: S, tokens of a block.
        window: W, cells of the window: a step commits and writes at most W positions.
        is_grid: Blocks start at multiples of S, not at the prompt's end.
        is_full: Prompt rows all see each other: one pass, reusable only as a whole.
        is_token_causal: Prompt rows see the tokens up to their own.
        in_window: Prompts stay in the window and are never prefilled.
        token_a_step: Each step settles a token at least.
        pins: A request may bring cells of the first block after its prompt.
        starts_filled: A request may bring cells of its first window.
        compute_at_least: Prompt tokens a prefix hit must leave to compute: 0, 1, or a block.
        soft_commits: Committed keys depend on more than tokens, or their bits do: generated pages
            are never shared.
        starts_over: A preempted request starts over: its slot does not hold its whole state, or
            recomputed keys would have other bits.
        prefix_caching: Reuse pages across requests.
        salt: What keys and values depend on besides the tokens: model, adapter, mask, block size.
        vocab_size, stop_token_ids, unread_token_ids: Of the model, as is `mask_id`, which scripts
            that measure read.
        knobs: The strategy's thresholds, with the rule of each.
        knob_values: Those of a request that sets none.
        stuck_text: Why a request ended whose strategy changes nothing; `{}` is the position.
        slot_buckets, page_buckets, prefill_buckets: Compiled sizes, ascending; the last ones
            cover every slot, every page of a request, and (full modes) every prompt.
        many_rows: Slot buckets from this size on run without command buffers; None: none.
        prompts_a_pass: Prompts that share a pass of pieces of the smallest size.
        batch_invariant, logprobs: As configured.
        no_record: Why no request may ask for a record; empty: it may.
        law: What `Record.law` says of model and strategy.
    """

    num_slots: int
    num_pages: int
    page_size: int
    max_model_len: int
    max_steps_per_chunk: int
    block_size: int
    window: int
    is_grid: bool = True
    is_full: bool = False
    is_token_causal: bool = False
    in_window: bool = False
    token_a_step: bool = False
    pins: bool = False
    starts_filled: bool = False
    compute_at_least: int = 0
    soft_commits: bool = False
    starts_over: bool = False
    prefix_caching: bool = True
    salt: bytes = b""
    vocab_size: int
    mask_id: int = -1
    stop_token_ids: tuple[int, ...] = ()
    unread_token_ids: tuple[int, ...] = ()
    knobs: Mapping[str, KnobRule] = dataclasses.field(default_factory=dict)
    knob_values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stuck_text: str = "the strategy changed nothing in the block at position {}"
    slot_buckets: tuple[int, ...]
    page_buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...]
    max_num_batched_tokens: int | None = None
    many_rows: int | None = None
    prompts_a_pass: int = 1
    batch_invariant: bool = False
    logprobs: bool = False
    no_record: str = ""
    law: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def pass_kind(self) -> PassKind:
        """How the rows of a prompt's passes see each other."""
        return "full" if self.is_full else "causal" if self.is_token_causal else "blocks"

    @property
    def pass_kinds(self) -> tuple[PassKind, ...]:
        """The kinds of prefill passes that requests need."""
        if self.in_window:
            return ()
        kinds: set[PassKind] = {self.pass_kind}
        if self.is_full and not self.starts_over:
            kinds.add("blocks")  # text after the prompt, where it is computed again
        return tuple(sorted(kinds))

    @functools.cached_property
    def unit(self) -> int:
        """Tokens whose pages are shared together: whole pages of whole blocks."""
        size = math.lcm(self.page_size, self.block_size if self.is_grid else 1)
        # Pieces of prompts begin where a kernel's tile of keys does.
        return math.lcm(size, TILE_OF_KEYS) if self.batch_invariant else size

    @functools.cached_property
    def most_new(self) -> int:
        """Tokens that a chunk of several steps may emit a row; it ends before it exceeds them."""
        most = max(WINDOWS_PER_CHUNK * self.window, TOKENS_PER_STEP * self.max_steps_per_chunk)
        return min(most, self.max_model_len)

    @property
    def num_kept(self) -> int:
        """Positions whose log-probabilities a slot keeps: what a chunk emits, and the window."""
        return self.most_new + self.window if self.logprobs else 0

    def prefill_len(self, prompt_len: int) -> int:
        """Tokens of a prompt that go to the cache before decoding."""
        if self.in_window:
            return 0
        return prompt_len // self.block_size * self.block_size if self.is_grid else prompt_len

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)


class SamplingNumbers(NamedTuple):
    """How a slot draws, on the host: the fields of `core.state.Sampling`; greedy by default."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


GREEDY = SamplingNumbers()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """One sequence as its slot sees it, in host numbers.

    Attributes:
        tail: Prompt tokens from the window's first cell on, at most W.
        limit: First absolute position that may not be emitted.
        knobs: One value for each of `EngineLayout.knobs`.
        seed, fold: The sequence's random key is `fold_in(key(seed), fold)`.
        given: Ids after the prompt, `HOLE` for one to be written; cells after them are to be
            written too. Only for prompts in the window, or with `pins` or `starts_filled`.
    """

    tail: tuple[int, ...]
    prompt_len: int
    limit: int
    stop_ids: tuple[int, ...]
    max_nfe: int
    max_run: int
    knobs: Mapping[str, float]
    seed: int
    fold: int
    sampling: SamplingNumbers = GREEDY
    given: tuple[int, ...] = ()
    grammar: Any = None

    def num_written(self, length: int) -> int:
        """How many of the text's first `length` tokens were written, not given."""
        given = self.given[:length]
        return length - len(given) + given.count(HOLE)


class DeviceFailure(RuntimeError):
    """A program failed on the device: the donated state, pools included, is gone."""


class CompileFailure(DeviceFailure):
    """A program cannot be traced; it concerns only the requests in `slots`."""

    def __init__(self, message: str, slots: Collection[int]):
        super().__init__(message)
        self.slots = slots
