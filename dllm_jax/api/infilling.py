"""Texts with holes as requests: what stands before the first hole, and what follows it.

Data flow: prefix and suffix as token ids -> cells, where the mask token is a hole -> `HoledText`,
whose parts are fields of a `Request`. Nothing here runs a model.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from dllm_jax.engine.layout import HOLE
from dllm_jax.loading.model import Model
from dllm_jax.loading.tokenizer import encode


class HoledText(NamedTuple):
    """A text with at least one hole.

    Attributes:
        prompt: Ids before the first hole.
        num_holes: Holes there: `max_tokens` of the request.
        suffix: What follows them, -1 for a further hole.
    """

    prompt: list[int]
    num_holes: int
    suffix: list[int]


def holed_text(
    model: Model, strategy: Any, prefix: Sequence[int], gap: int, suffix: Sequence[int]
) -> HoledText:
    """The text of a prefix, `gap` holes and a suffix; the mask token in either is a hole as well.

    Args:
        strategy: It must see the whole text at once.

    Raises:
        ValueError: There is no hole, or the text does not fit the model or the strategy's window.
    """
    total, window = len(prefix) + gap + len(suffix), strategy.block_size * strategy.buffer_size
    if total > model.config.max_position:
        raise ValueError(
            f"prefix, holes and suffix are {total} tokens, {model.source} takes "
            f"{model.config.max_position}; shorten them or lower max_tokens"
        )
    if total > window:
        raise ValueError(
            f"prefix, holes and suffix are {total} tokens, the window has {window}; "
            f"use buffer_size={-(-total // strategy.block_size)} or lower max_tokens"
        )
    mask = model.config.mask_token_id
    cells = [*_cells(prefix, mask), *[HOLE] * gap, *_cells(suffix, mask)]
    if HOLE not in cells:
        raise ValueError(f"the text has no hole; {_ask_for_one(model)}")
    first = cells.index(HOLE)
    end = next((i for i in range(first, total) if cells[i] != HOLE), total)
    return HoledText(cells[:first], end - first, cells[end:])


def check_infills(strategy: Any) -> None:
    """Refuse a strategy that does not see what follows a hole.

    Raises:
        ValueError: It does not keep the whole text in its window.
    """
    if strategy.needs.prompt != "in_window":
        raise ValueError(
            f"{type(strategy).__name__} does not see what stands behind a hole; "
            'use strategy="full_sequence"'
        )


def _cells(ids: Sequence[int], mask: int) -> list[int]:
    return [HOLE if token == mask else token for token in ids]


def _ask_for_one(model: Model) -> str:
    """What to do about a text without a hole."""
    mask, tokenizer = model.config.mask_token_id, model.tokenizer
    if mask < 0:
        return "the model has no mask token, so give a suffix"
    text = None if tokenizer is None else tokenizer.decode([mask])
    if text and encode(tokenizer, text, special=False) == [mask]:
        return f"write {text} for each token that is wanted, or give a suffix"
    why = "" if tokenizer is None else "its tokenizer has no mask token: "
    return f"{why}give token ids with {mask} as holes, or a suffix"
