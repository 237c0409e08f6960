"""From model, strategy and configuration to the sizes the engine is built with.

Every size between two buckets is padded to the larger one; every bucket is a program to compile. On
an accelerator every pass reads all weights, so larger passes are cheaper a token. On the CPU they
are not: time grows with the tokens.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from dllm_jax.engine import checks
from dllm_jax.engine.layout import PAGE_SIZE, TILE_OF_KEYS, EngineConfig, EngineLayout
from dllm_jax.engine.record import Align
from dllm_jax.loading.model import Model
from dllm_jax.scoring.one_rounding import network_rules
from dllm_jax.strategies.core import driver
from dllm_jax.strategies.core.knobs import knob_rules, split_knobs
from dllm_jax.strategies.core.needs import PromptMode
from dllm_jax.strategies.core.resolve import settings

# Each size is a program to compile. Measured on a ragged load (docs/adr/0034): six sizes
# of 32 slots take less time than ten did.
SLOT_BUCKETS = (1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
CPU_SLOT_BUCKETS = (1, 4, 16, 64, 256)
# Attention divides one slot's context by the width of its page table, so short texts of a model of
# long ones keep a table of their own. XLA's attention, on a CPU, gathers the whole table.
SHORT_TABLE = 2048  # tokens
CPU_PAGE_BUCKETS = (16, 64, 256, 1024)
MANY_ROWS = 8  # slots from which on a step takes longer than launching it
PROMPTS_A_PASS, TOKENS_A_PASS = 8, 512  # of passes that take several short prompts in
# Fewer than 128 tokens cost an accelerator what 128 do: reading the weights.
PREFILL_BUCKETS = (128, 512)
CPU_PREFILL_BUCKETS = (64,)


def make_layout(
    model: Model, strategy: Any, aux: Mapping[str, Model], config: EngineConfig
) -> EngineLayout:
    """The sizes and rules of an engine.

    Args:
        strategy: With its numbers and sizes.

    Raises:
        ValueError: The configuration does not fit the model.
    """
    cfg, needs = model.config, strategy.needs
    knobs = split_knobs(strategy)[1]
    max_len = cfg.max_position if config.max_model_len is None else config.max_model_len
    if max_len > cfg.max_position:
        raise ValueError(
            f"max_model_len={max_len} is more than the model's {cfg.max_position} positions; "
            "lower it"
        )
    S, W = strategy.block_size, strategy.block_size * strategy.buffer_size
    keeps = needs.boundary or cfg.shift or strategy.absorbs
    least = (S if needs.prompt.is_grid else 1) if keeps else 0
    columns = -(-max(max_len + S, W) // config.page_size)
    _check(config, max_len, columns)
    on_cpu = is_on_cpu(model)
    slots = config.slot_buckets or (CPU_SLOT_BUCKETS if on_cpu else SLOT_BUCKETS)
    prefill = config.prefill_buckets or (CPU_PREFILL_BUCKETS if on_cpu else PREFILL_BUCKETS)
    if config.prefill_buckets is None:
        prefill = tuple(size for size in prefill if size < 2 * max_len) or prefill[:1]
    prefill = _prefill_buckets(prefill, needs.prompt, max_len, S)
    widths = config.page_buckets or _page_buckets(columns, config.page_size, S, on_cpu)
    if config.batch_invariant:
        _check_invariant(model, aux, config, strategy)
        widths = ()
    most = min(PROMPTS_A_PASS, TOKENS_A_PASS // prefill[0], config.max_num_seqs)
    has_pieces = not (needs.prompt.is_full or needs.prompt.in_window)
    return EngineLayout(
        num_slots=config.max_num_seqs,
        num_pages=config.num_pages or 2 * config.max_num_seqs * columns,
        page_size=config.page_size,
        max_model_len=max_len,
        max_steps_per_chunk=config.max_steps_per_chunk,
        block_size=S,
        window=W,
        is_grid=needs.prompt.is_grid,
        is_full=needs.prompt.is_full,
        is_token_causal=needs.prompt.is_token_causal,
        in_window=needs.prompt.in_window,
        token_a_step=needs.token_a_step,
        pins=needs.pins,
        starts_filled=needs.starts_filled,
        compute_at_least=least,
        # The bits of what a window stores follow from where it began; a prompt has other pieces.
        soft_commits=needs.soft_commits or config.batch_invariant,
        starts_over=needs.starts_over or config.batch_invariant,
        prefix_caching=config.enable_prefix_caching,
        salt=_salt(model, strategy, aux),
        vocab_size=cfg.vocab_size,
        mask_id=cfg.mask_token_id,
        stop_token_ids=tuple(model.defaults.stop_token_ids),
        unread_token_ids=model.defaults.unread_token_ids,
        knobs=knob_rules(strategy),
        knob_values={name: float(value) for name, value in knobs.items()},
        stuck_text=driver.stuck_text(strategy, "{}"),
        slot_buckets=_buckets(slots, config.max_num_seqs),
        page_buckets=_buckets(widths, columns),
        prefill_buckets=prefill,
        max_num_batched_tokens=config.max_num_batched_tokens,
        many_rows=None if on_cpu else MANY_ROWS,
        # On a CPU a dispatch is cheap, and prompts take as long together as apart.
        prompts_a_pass=max(1, most) if has_pieces and not on_cpu else 1,
        batch_invariant=config.batch_invariant,
        logprobs=_kept(config, strategy),
        no_record=no_record(strategy),
        law=law_of(model, strategy),
    )


def no_record(strategy: Any) -> str:
    """Why the last writes to a text are not all that a record has; empty: they are."""
    if strategy.needs.fills_holes and strategy.holds_constraints:
        return ""
    return (
        f"record: {strategy.name} may write a cell more than once, and only the last write is "
        "kept here; leave it out, or use dj.record"
    )


def _kept(config: EngineConfig, strategy: Any) -> bool:
    """Whether log-probabilities are kept."""
    if config.logprobs and not (strategy.holds_constraints or strategy.needs.fills_holes):
        raise ValueError(
            f"logprobs=True: tokens of {strategy.name} move, so no single forward says how likely "
            "they were; leave it out, or use another strategy"
        )
    return config.logprobs


def law_of(model: Model, strategy: Any) -> dict[str, Any]:
    """What `Record.law` says of a model and a strategy: JSON values."""
    defaults = model.defaults
    return {
        "model": model.source,
        "mask_id": model.config.mask_token_id,
        "forbidden_ids": list(defaults.forbidden_token_ids),
        "vocab_limit": defaults.vocab_limit,
        "quantization": model.quantization,
        "kv_dtype": str(model.kv_dtype),
        "strategy": strategy.name,
        "settings": plain_settings(strategy),
        "block_size": strategy.block_size,
        "align": _align(strategy),
    }


def _align(strategy: Any) -> Align:
    needs = strategy.needs
    if needs.prompt.in_window:
        return "window"
    return "grid" if needs.prompt.is_grid else "causal" if needs.token_a_step else "prompt"


def plain_settings(strategy: Any) -> dict[str, Any]:
    """Fields of a strategy that are numbers, strings or None."""
    found = {}
    for name in settings(strategy):
        value = getattr(strategy, name)
        if getattr(value, "ndim", None) == 0:
            value = value.item()
        if value is None or isinstance(value, bool | int | float | str):
            found[name] = value
    return found


def _salt(model: Model, strategy: Any, aux: Mapping[str, Model]) -> bytes:
    """Everything besides the tokens that keys and values depend on, as bytes."""
    needs = strategy.needs
    parts = {
        "model": model.source,
        "aux": {name: aux[name].source for name in needs.aux},
        "prompt": needs.prompt,
        "prefill_mode": needs.prefill_mode,
        "block_size": 0 if needs.prompt.is_token_causal else strategy.block_size,
    }
    return json.dumps(parts, sort_keys=True).encode()


def _buckets(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    return (*sorted(size for size in set(sizes) if size < most), most)


def _page_buckets(columns: int, page_size: int, block_size: int, on_cpu: bool) -> tuple[int, ...]:
    """Widths of page tables that are well below the number of columns."""
    if on_cpu:
        return tuple(size for size in CPU_PAGE_BUCKETS if 2 * size <= columns)
    short = -(-(SHORT_TABLE + block_size) // page_size)
    return (short,) if 5 * short <= 4 * columns else ()


def _prefill_buckets(
    given: tuple[int, ...], prompt: PromptMode, max_len: int, block_size: int
) -> tuple[int, ...]:
    """Ascending; whole blocks unless causal; in full modes up to every prompt."""

    def blocks(size: int) -> int:
        return size if prompt.is_token_causal else -(-size // block_size) * block_size

    sizes = [*given]
    if prompt.is_full:
        sizes = [size for size in sizes if size < max_len]
        size = 2 * max(sizes, default=max_len)
        while size < max_len:
            sizes.append(size)
            size *= 2
        sizes.append(max_len)
    return tuple(sorted({blocks(size) for size in sizes}))


def _check(config: EngineConfig, max_len: int, columns: int) -> None:
    """Raise ValueError where sizes do not go together."""
    if config.page_size > max(max_len, PAGE_SIZE):
        raise ValueError(
            f"page_size={config.page_size} is more than a whole text, {max_len} tokens "
            f"(max_model_len); use page_size={PAGE_SIZE}"
        )
    most = {"slot_buckets": config.max_num_seqs, "page_buckets": columns, "prefill_buckets": None}
    for name, limit in most.items():
        sizes = getattr(config, name)
        if sizes is None:
            continue
        wrong = [size for size in sizes if not isinstance(size, int) or size < 1]
        if wrong or not sizes:
            raise ValueError(
                f"{name}={checks.short_repr(sizes)} must be whole numbers >= 1; leave it out for "
                "some"
            )
        if limit is not None and max(sizes) > limit:
            what = "max_num_seqs" if name == "slot_buckets" else "the pages of a whole text"
            raise ValueError(
                f"{name}={checks.short_repr(sizes)} holds {max(sizes)}, more than {what}, "
                f"{limit}; leave it out"
            )


def _check_invariant(
    model: Model, aux: Mapping[str, Model], config: EngineConfig, strategy: Any
) -> None:
    """Refuse what `batch_invariant` cannot promise; kernels refuse sizes when they are compiled."""
    W = strategy.block_size * strategy.buffer_size
    rules = (
        *network_rules(model),
        (not is_on_cpu(model), "weights in the memory of that GPU"),
        (not aux or strategy.holds_constraints, 'acceptance="match"'),
        (
            strategy.needs.token_a_step or W % 16 == 0,
            f"a window of a multiple of 16 cells, not {W}",
        ),
        (len(config.page_buckets or (1,)) == 1, "one size of page_buckets"),
        (
            all(size % TILE_OF_KEYS == 0 for size in config.prefill_buckets or ()),
            f"prefill_buckets of multiples of {TILE_OF_KEYS}",
        ),
    )
    if missing := [text for is_kept, text in rules if not is_kept]:
        raise ValueError(
            f"batch_invariant=True needs {'; '.join(missing)}; change that or leave it out"
        )


def is_on_cpu(model: Model) -> bool:
    """Whether the weights are in the memory of the host."""
    return next(iter(model.params["embed"].devices())).platform == "cpu"


def progress_line() -> Callable[[str, int, int], None]:
    """A progress bar for `compile.warm_up`, on stderr if that is a terminal."""
    from tqdm import tqdm

    bars: list[tqdm] = []

    def show(name: str, done: int, total: int) -> None:
        if not bars:
            bars.append(
                tqdm(total=total, unit="program", desc="compiling", leave=False, disable=None)
            )
        bars[0].set_postfix_str(name, refresh=False)
        bars[0].update(done - bars[0].n)
        if done == total:
            bars.pop().close()

    return show
