"""The strategy that decodes a model, and its fields.

`dj.generate`, `LLM` and the command line choose here, so they agree:
`resolve_strategy` -> `bind_draft` -> `Bound`.
"""

import math
from typing import Any, Protocol

import numpy as np
from jax.core import Tracer

from dllm_jax.api.drafts import Bound, Source, bind_draft, refuse_draft
from dllm_jax.engine.checks import short_repr
from dllm_jax.engine.requests import SamplingParams
from dllm_jax.loading.model import Model
from dllm_jax.models.families import FamilyDefaults
from dllm_jax.strategies.core.resolve import load_strategy, strategy_names

# Strategies with an accept threshold of their own scale. `edit` and `dmax` may revise what they
# accepted, so theirs is low; `full_sequence` follows a schedule, so its threshold is 1.
_OWN_THRESHOLD = ("edit", "edit_indel", "dmax", "full_sequence")
# Fields that the family sets where they are None.
_SIZES, _EDIT_IDS = ("block_size", "buffer_size"), ("delete_token_id", "split_token_id")
_TOKEN_BY_TOKEN, _DRAFTED = "ar", "dflash"


class Described(Protocol):
    """A model, or a report on a checkpoint."""

    @property
    def defaults(self) -> FamilyDefaults:
        """The decoding defaults of the family."""
        ...


def bind_strategy(
    model: Model, strategy: Any = None, draft: Source | None = None, **fields: Any
) -> Bound:
    """The strategy to run, with its drafter.

    Args:
        strategy: A name, an import path, a value or a step function; None: `usual_strategy`.
        draft: The drafter, loaded or not.
        fields: Fields of a strategy given by name or None; those of None are left out.

    Raises:
        ValueError: The model cannot run the strategy, or the drafter fits neither.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    if fields:
        name = usual_strategy(model, draft) if strategy is None else strategy
        if not isinstance(name, str) or ":" in name:
            raise ValueError(
                f"{', '.join(fields)} go with a strategy given by name; "
                "set them on the strategy value"
            )
        strategy = family_strategy(model, name, **fields)
    bound = bind_draft(resolve_strategy(model, strategy, draft), draft, model)
    check_fit(model, bound.strategy)
    return bound


# --- the strategy and its fields ---------------------------------------------------------------


def alternatives_note(model: Described) -> str | None:
    """The other strategies that a checkpoint of this form may have been made for, None if none.

    LLaDA2.0, LLaDA2.1 and DMax, for example, have the same files.
    """
    defaults = model.defaults
    if not defaults.alternatives:
        return None
    return (
        f"the files do not tell whether it was made for {defaults.strategy!r} or for "
        f"{' or '.join(map(repr, defaults.alternatives))}; name a strategy where it was another"
    )


def usual_strategy(model: Described, draft: Any = None) -> str:
    """The name of the strategy of a model when the user names none: the family's.

    Args:
        draft: The drafter, None without one. With one, `dflash` replaces `ar`; any other strategy
            stays, and `bind_draft` then refuses the drafter.
    """
    own = model.defaults.strategy
    return _DRAFTED if draft is not None and own == _TOKEN_BY_TOKEN else own


def resolve_strategy(model: Model, strategy: Any, draft: Any = None) -> Any:
    """A strategy value with every size and edit id set; None is `usual_strategy`."""
    refuse_draft(model)
    if strategy is None:
        strategy = family_strategy(model, usual_strategy(model, draft))
    elif isinstance(strategy, str) and ":" not in strategy:
        strategy = family_strategy(model, strategy)
    strategy = load_strategy(strategy)
    usual = {name: getattr(model.defaults, name) for name in (*_SIZES, *_EDIT_IDS)}
    missing = {name: value for name, value in usual.items() if getattr(strategy, name, 0) is None}
    return strategy.replace(**missing) if missing else strategy


def family_strategy(model: Model, name: str, **overrides: Any) -> Any:
    """The strategy called `name` with the fields of the model's family, then `overrides`."""
    refuse_draft(model)
    plain = load_strategy(name)
    defaults = model.defaults
    fields: dict[str, Any] = {
        "add_block_threshold": defaults.add_block_threshold,
        "semi_complete_threshold": defaults.semi_complete_threshold,
    }
    if name == defaults.strategy or not {name, defaults.strategy} & {*_OWN_THRESHOLD}:
        fields["accept_threshold"] = defaults.accept_threshold
    # Elsewhere the algorithm sets the size, as AR its 2.
    if plain.needs.prompt.is_grid or plain.needs.conditions:
        fields["block_size"] = defaults.block_size
    if name == defaults.strategy:
        fields |= {"buffer_size": defaults.buffer_size, **dict(defaults.numbers)}
        for key in ("edit_threshold", "remasking", "block_length", "append"):
            if (value := getattr(defaults, key)) is not None:
                fields[key] = value
    known = {k: v for k, v in fields.items() if hasattr(plain, k)}
    strategy = load_strategy(plain, **{**known, **overrides})
    if plain.needs.prompt.in_window and "buffer_size" not in overrides:
        # The window holds the whole text here, so it is bounded by the model's positions.
        most = max(1, model.config.max_position // (strategy.block_size or defaults.block_size))
        strategy = strategy.replace(buffer_size=min(strategy.buffer_size or most, most))
    return strategy


def short_name(strategy: Any) -> str:
    """The name under which `load_strategy` knows a strategy; its class's for one of the user's."""
    kind = type(strategy)
    names = (name for name in strategy_names() if type(load_strategy(name)) is kind)
    return next(names, kind.__name__)


def default_params(model: Model, strategy: Any, **params: Any) -> SamplingParams:
    """Sampling parameters, with the family's temperature and top-p where `params` has none.

    The family's values apply only with the family's own strategy. With another one, temperature and
    top-p would change which confidences a threshold accepts, so decoding is greedy.
    """
    own = model.defaults.strategy
    if own not in strategy_names() or type(strategy) is not type(load_strategy(own)):
        return SamplingParams(**params)
    return SamplingParams(**model.defaults.sampling | params)


def check_fit(model: Model, strategy: Any) -> None:
    """Refuse a strategy that the model cannot run, before anything is allocated or compiled."""
    cfg, name = model.config, type(strategy).__name__
    for field in ("block_size", "buffer_size"):
        check_number(field, getattr(strategy, field), 1, cfg.max_position, whole=True)
    window = strategy.block_size * strategy.buffer_size
    if window > cfg.max_position:
        raise ValueError(
            f"block_size={strategy.block_size} times buffer_size={strategy.buffer_size} is "
            f"{window} tokens, more than the model's {cfg.max_position} positions; "
            "choose smaller ones"
        )
    instead = f"use the family's own strategy, {model.defaults.strategy!r}"
    if strategy.needs.boundary and not cfg.shift:
        raise ValueError(
            f"{name} continues from the row before its window, which predicts the next token only "
            f"in shifted (autoregressive) models; {model.defaults.family} is none: {instead}"
        )
    if strategy.needs.conditions and model.arch.condition is None:
        raise ValueError(
            f"{name} feeds back what was expected of each cell, which {model.defaults.family} has "
            f"no weights for: {instead}"
        )
    if None in (getattr(strategy, field, 0) for field in _EDIT_IDS):
        raise ValueError(
            f"{name} deletes and inserts by two ids, delete_token_id and split_token_id, and "
            f"{model.defaults.family} has none: {instead}"
        )
    denoises = strategy.needs.prompt.is_grid or strategy.needs.prompt.in_window
    if denoises and cfg.mask_token_id < 0:
        raise ValueError(
            f"{name} denoises masks, and {model.defaults.family} has no mask token: {instead}"
        )
    _check_routing(model, strategy, name)


def _check_routing(model: Model, strategy: Any, name: str) -> None:
    """A pass must hold whole routing blocks: the tokens of one choose their experts together."""
    routing = model.routing_block
    if strategy.block_size % routing:
        raise ValueError(
            f"block_size={strategy.block_size} must be a multiple of {routing}, the tokens of "
            f"{model.defaults.family} that are routed together; use {model.defaults.block_size}"
        )
    if routing > 1 and not strategy.needs.prompt.is_grid:
        raise ValueError(
            f"{name} takes the prompt in as {strategy.needs.prompt.value!r}, which splits the "
            f"blocks of {routing} tokens that {model.defaults.family} routes together; use a "
            f"strategy on the grid of blocks, such as {model.defaults.strategy!r}"
        )


def check_number(
    name: str, value: Any, low: float, high: float | None, whole: bool = False
) -> None:
    """Check a number, or each of an array; tracers pass unchecked."""
    if value is None or isinstance(value, Tracer):
        return
    try:
        found = np.asarray(math.nan if isinstance(value, bool) else value, np.float64)
    except Exception:  # whatever a value raises that is no array
        found = np.full((), math.nan)
    fits = (found >= low) & (found <= (math.inf if high is None else high))
    if whole:
        fits &= np.mod(found, 1, where=fits, out=np.ones_like(found)) == 0
    if not fits.all():
        if found.ndim == 1:
            at = int(np.argmin(fits))
            name, value = f"{name}[{at}]", np.asarray(value)[at]
        kind = "a whole number" if whole else "a number"
        given = short_repr(value.item() if isinstance(value, np.generic) else value)
        raise ValueError(f"{name}={given} must be {kind} in [{low}, {high}]; choose a value there")
