"""Text with holes: between a prefix and a suffix, at mask tokens, or among parts.

Data flow: `pairs` of prefix and suffix -> `request_of` each -> a `Request` whose prompt ends at
the first hole.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

from dllm_jax.api import prompts
from dllm_jax.api.prompts import Prompt
from dllm_jax.engine import checks
from dllm_jax.engine.layout import HOLE
from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.loading.model import Model
from dllm_jax.loading.tokenizer import encode
from dllm_jax.structured import Hole, Template


class Ends(NamedTuple):
    """The texts before and after the tokens to write."""

    prefix: Prompt
    suffix: Prompt | None


def pairs(strategy: Any, prefix: Any, suffix: Any) -> list[Ends]:
    """Prefixes, each with its suffix.

    Args:
        prefix, suffix: As of `LLM.infill`.

    Raises:
        ValueError: Their numbers differ, or the strategy does not see text after a hole.
    """
    prefixes = _each(prefix)
    is_fixed = not all(_is_parts(one) and _is_template(one) for one in prefixes)
    if is_fixed and not strategy.needs.takes_given:
        raise ValueError(
            f"{type(strategy).__name__} does not see what stands behind a hole; use "
            'strategy="full_sequence", or holes of constraints'
        )
    suffixes: list[Prompt | None] = [None] if suffix is None else [*_each(suffix)]
    if len(suffixes) == 1:
        suffixes *= len(prefixes)
    if len(suffixes) != len(prefixes):
        raise ValueError(
            f"{len(suffixes)} suffixes for {len(prefixes)} prefixes; give one, or one a prefix"
        )
    return [Ends(*pair) for pair in zip(prefixes, suffixes, strict=True)]


def request_of(model: Model, strategy: Any, ends: Ends, params: SamplingParams) -> Request:
    """The request that writes the tokens between two ends.

    Raises:
        ValueError: There is no hole, or the text does not fit the model or the strategy's window.
    """
    prefix, suffix = ends
    if _is_parts(prefix):
        if suffix is not None:
            raise ValueError("a suffix beside a list of parts; make it the last part")
        return _of_parts(model, strategy, prefix, params)
    request = prompts.request_of(model, prefix, params)
    gap = 0 if suffix is None else params.max_tokens
    if gap is None:
        raise ValueError("max_tokens=None beside a suffix; give the number of tokens to write")
    ids = [] if suffix is None else prompts.ids_of(model, suffix, special=False)
    return infill_request(model, strategy, request, gap, ids)


def _of_parts(model: Model, strategy: Any, parts: Any, params: SamplingParams) -> Request:
    """The request of a text in parts, some of which are holes."""
    first = next(i for i, one in enumerate(parts) if isinstance(one, str | Hole))
    messages, parts = [*parts[:first]], parts[first:]
    for one in parts:
        if not isinstance(one, str | Hole):
            raise ValueError(
                f"a part is {checks.short_repr(one)}; give texts and Holes, and messages "
                "before them"
            )
    head = next(i for i, one in enumerate(parts) if isinstance(one, Hole))
    before = prompts.rendered(model, messages) if messages else ""
    prompt, rest = before + "".join(parts[:head]), parts[head:]
    ids = prompts.ids_of(model, prompt, special=not messages)  # a template writes them by name
    request = Request(prompt_token_ids=ids, params=params, prompt=prompt)
    if _is_template(rest):
        if params.constraint is not None:
            raise ValueError("a constraint beside holes of constraints; give it to a hole")
        each: list[Any] = [one.of if isinstance(one, Hole) else one for one in rest]
        held = dataclasses.replace(params, constraint=Template(tuple(each)))
        return dataclasses.replace(request, params=held)
    cells: list[int] = []
    for one in rest:
        if isinstance(one, str):
            cells += prompts.ids_of(model, one, special=False)
        elif isinstance(one.of, int):
            cells += [HOLE] * one.of
        else:
            raise ValueError(
                "holes of so many tokens beside holes of constraints; use one kind in a text"
            )
    return infill_request(model, strategy, request, 0, cells)


def infill_request(
    model: Model, strategy: Any, request: Request, gap: int, suffix: Sequence[int]
) -> Request:
    """The request whose prompt is followed by `gap` holes and a suffix.

    A mask token in the prompt or the suffix is a hole as well. The new prompt ends at the first
    hole, `max_tokens` counts the holes there, and the suffix is the rest.

    Raises:
        ValueError: There is no hole, or the text does not fit the model or the strategy's window.
    """
    mask, most = model.config.mask_token_id, model.config.max_position
    text = [*request.prompt_token_ids, *[mask] * gap, *suffix]
    total, window = len(text), strategy.block_size * strategy.buffer_size
    in_window = strategy.needs.prompt.in_window  # else the engine checks the text after the prompt
    if total > most:
        raise ValueError(
            f"prefix, holes and suffix are {total} tokens, {model.source} takes {most}; "
            "shorten them or lower max_tokens"
        )
    if in_window and total > window:
        raise ValueError(
            f"prefix, holes and suffix are {total} tokens, the window has {window}; "
            f"use buffer_size={-(-total // strategy.block_size)} or lower max_tokens"
        )
    cells = [HOLE if token in (mask, HOLE) else token for token in text]
    if HOLE not in cells:
        raise ValueError(f"the text has no hole; {_how_to_ask(model)}")
    first = cells.index(HOLE)
    end = next((i for i in range(first, total) if cells[i] != HOLE), total)
    return dataclasses.replace(
        request,
        prompt_token_ids=cells[:first],
        params=dataclasses.replace(request.params, max_tokens=end - first),
        suffix_token_ids=cells[end:],
    )


def _how_to_ask(model: Model) -> str:
    """The remedy for a text without a hole."""
    mask, tokenizer = model.config.mask_token_id, model.tokenizer
    if mask < 0:
        return "the model has no mask token, so give a suffix"
    text = None if tokenizer is None else tokenizer.decode([mask])
    if text and encode(tokenizer, text, special=False) == [mask]:
        return f"write {text} for each token to fill in, or give a suffix"
    why = "" if tokenizer is None else "its tokenizer has no mask token: "
    return f"{why}give token ids with {mask} as holes, or a suffix"


def _each(given: Any) -> list[Prompt]:
    """A list of prompts, from one or several."""
    is_one = prompts.is_conversation(given) or _is_parts(given)
    if is_one or isinstance(given, str) or not isinstance(given, Sequence):
        return [given]
    return list(given) if any(not hasattr(one, "__index__") for one in given) else [given]


def _is_parts(given: Any) -> TypeGuard[Sequence[Any]]:
    """Whether it is a text in parts, with holes among them."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return False
    return any(isinstance(one, Hole) for one in given)


def _is_template(parts: Sequence[Any]) -> bool:
    """Whether all holes of a text in parts are constraints."""
    return not any(isinstance(one, Hole) and isinstance(one.of, int) for one in parts)
