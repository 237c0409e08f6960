"""From model, strategy and configuration to the sizes the engine is built with."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from dllm_jax.facts import EngineConfig, Facts
from dllm_jax.model import Model
from strategies.protocol import knob_ranges, split_knobs

SLOT_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PAGE_BUCKET_STEP = 4  # each page bucket is so many times the one before
FIRST_PAGE_BUCKET = 16
PREFILL_BUCKETS = (64, 128, 256, 512, 1024)


def make_facts(
    model: Model,
    strategy: Any,
    aux: Mapping[str, Model],
    config: EngineConfig,
) -> Facts:
    """The sizes and rules of an engine.

    Args:
        strategy: With its numbers and sizes.

    Raises:
        ValueError: The configuration does not fit the model.
    """
    cfg, needs = model.config, strategy.needs
    bare, knobs = split_knobs(strategy)
    max_len = cfg.max_position if config.max_model_len is None else config.max_model_len
    if max_len > cfg.max_position:
        raise ValueError(
            f"max_model_len={max_len} is more than the model's {cfg.max_position} positions; "
            "lower it"
        )
    S, W = strategy.block_size, strategy.block_size * strategy.buffer_size
    has_absorb = hasattr(bare, "absorb")
    keeps = needs.boundary or cfg.shift or has_absorb
    least = (S if needs.prompt.startswith("grid") else 1) if keeps else 0
    if needs.prompt == "whole_causal":
        least = 1
    columns = -(-max(max_len + S, W) // config.page_size)
    return Facts(
        num_slots=config.max_num_seqs,
        num_pages=config.num_pages or 2 * config.max_num_seqs * columns,
        page_size=config.page_size,
        max_model_len=max_len,
        max_steps_per_chunk=config.max_steps_per_chunk,
        block_size=S,
        window=W,
        prompt_mode=needs.prompt,
        compute_at_least=least,
        soft_commits=needs.soft_commits,
        prefix_caching=config.enable_prefix_caching,
        salt=_salt(model, strategy, aux),
        vocab_size=cfg.vocab_size,
        mask_id=cfg.mask_token_id,
        stop_token_ids=tuple(model.defaults.stop_token_ids),
        knobs=knob_ranges(strategy),
        knob_values={name: float(value) for name, value in knobs.items()},
        slot_buckets=_buckets(config.slot_buckets or SLOT_BUCKETS, config.max_num_seqs),
        page_buckets=_buckets(config.page_buckets or _page_buckets(columns), columns),
        prefill_buckets=_prefill_buckets(config.prefill_buckets, needs.prompt, max_len, S),
        max_num_batched_tokens=config.max_num_batched_tokens,
    )


def _salt(model: Model, strategy: Any, aux: Mapping[str, Model]) -> bytes:
    """What keys and values depend on beside the tokens."""
    needs = strategy.needs
    said = {
        "model": model.source,
        "aux": {name: aux[name].source for name in needs.aux},
        "prompt": needs.prompt,
        "prefill_mode": needs.prefill_mode,
        "block_size": strategy.block_size if needs.prompt != "whole_causal" else 0,
    }
    return json.dumps(said, sort_keys=True).encode()


def _buckets(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    return (*sorted(size for size in set(sizes) if size < most), most)


def _page_buckets(columns: int) -> tuple[int, ...]:
    """Powers from a first one on, none of them close below the last."""
    sizes, size = [], FIRST_PAGE_BUCKET
    while 2 * size <= columns:
        sizes.append(size)
        size *= PAGE_BUCKET_STEP
    return tuple(sizes)


def _prefill_buckets(
    given: tuple[int, ...] | None, prompt: str, max_len: int, block_size: int
) -> tuple[int, ...]:
    """Ascending; whole blocks unless causal; in full modes up to every prompt."""

    def blocks(size: int) -> int:
        return size if prompt == "whole_causal" else -(-size // block_size) * block_size

    sizes = [*(given or (size for size in PREFILL_BUCKETS if size < 2 * max_len))]
    if prompt.endswith("full"):
        sizes = [size for size in sizes if size < max_len]
        size = 2 * max(sizes, default=64)
        while size < max_len:
            sizes.append(size)
            size *= 2
        sizes.append(max_len)
    return tuple(sorted({blocks(size) for size in sizes}))


def progress_line() -> Callable[[str, int, int], None]:
    """A bar for `Device.warm_up`, on a terminal."""
    from tqdm import tqdm

    bar = tqdm(total=0, unit="program", desc="compiling", leave=False, disable=None)

    def show(name: str, done: int, total: int) -> None:
        bar.total = total
        bar.set_postfix_str(name, refresh=False)
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show
