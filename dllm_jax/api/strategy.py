"""The strategy that decodes a model, its fields, and the drafter beside it.

`dj.generate`, `LLM` and the command line choose here, so they agree:
`resolve_strategy` -> `bind_draft` -> `Bound`, which is not resolved again.
"""

import dataclasses
import functools
import math
import os
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from dllm_jax.engine.checks import short_repr
from dllm_jax.engine.requests import SamplingParams
from dllm_jax.loading.load import load
from dllm_jax.loading.model import Model
from dllm_jax.loading.sources import LoadError
from dllm_jax.models import dflash
from dllm_jax.models.dflash import DFlashConfig
from dllm_jax.models.families import FamilyDefaults
from dllm_jax.models.sharding import Split
from dllm_jax.strategies.core.resolve import load_strategy, strategy_names

# Strategies with an accept threshold of their own scale. `edit` and `dmax` may revise what they
# accepted, so theirs is low; `full_sequence` follows a schedule, so its threshold is 1.
_OWN_THRESHOLD = ("edit", "edit_indel", "dmax", "full_sequence")
# Fields that the family sets where they are None.
_SIZES, _EDIT_IDS = ("block_size", "buffer_size"), ("delete_token_id", "split_token_id")
_TOKEN_BY_TOKEN, _DRAFTED = "ar", "dflash"

Source = Model | str | os.PathLike[str]


class Described(Protocol):
    """A model, or a report on a checkpoint."""

    @property
    def defaults(self) -> FamilyDefaults:
        """The decoding defaults of the family."""
        ...


class Bound(NamedTuple):
    """A strategy with every size set, and the auxiliary models that it needs, by name."""

    strategy: Any
    aux: dict[str, Model]

    @property
    def draft(self) -> Model | None:
        """The drafter, None without one."""
        return next(iter(self.aux.values()), None)


def bind_strategy(
    model: Model, strategy: Any = None, draft: Source | None = None, **fields: Any
) -> Bound:
    """The strategy to run, with its drafter; a `Bound` is checked and returned.

    Args:
        strategy: A name, an import path, a value or a step function; None: `usual_strategy`.
        draft: The drafter, loaded or not.
        fields: Fields of a strategy given by name or None; those of None are left out.

    Raises:
        ValueError: The model cannot run the strategy, or the drafter fits neither.
    """
    if isinstance(strategy, Bound):
        check_fit(model, strategy.strategy)
        for other in strategy.aux.values():
            check_devices(model, other)
        return strategy
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


def default_params(model: Model, strategy: Any, **params: Any) -> SamplingParams:
    """Sampling parameters, with the family's temperature and top-p where `params` has none.

    Only under the family's own strategy. Under another, temperature and top-p would change which
    confidences a threshold accepts, so decoding is greedy.
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
    """Check a plain number; arrays and tracers pass unchecked."""
    if value is None or isinstance(value, Tracer) or np.ndim(value) > 0:
        return
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not low <= number <= (math.inf if high is None else high) or (whole and number % 1):
        kind = "a whole number" if whole else "a number"
        given = short_repr(value.item() if isinstance(value, np.generic) else value)
        raise ValueError(f"{name}={given} must be {kind} in [{low}, {high}]; choose a value there")


# --- the drafter -------------------------------------------------------------------------------


def bind_draft(strategy: Any, draft: Source | None, target: Model) -> Bound:
    """The strategy with its drafter loaded and joined to the target.

    `strategy.bind` sets what the drafter was trained for: its block, and the layers it reads.

    Raises:
        ValueError: The strategy uses no drafter, or lacks one, or the drafter does not fit.
    """
    names = strategy.needs.aux
    if not names and draft is None:
        return Bound(strategy, {})
    name = type(strategy).__name__
    source = draft.source if isinstance(draft, Model) else draft and os.fspath(draft)
    given = f"draft={short_repr(source)}"
    if not names:
        other = ", or use the strategy 'dflash'" if target.config.shift else ""
        raise ValueError(
            f"{given} does not fit {name}, which uses no draft; leave the draft out{other}"
        )
    if len(names) > 1:
        raise ValueError(
            f"{given}: {name} needs {len(names)} models beside its own ({', '.join(names)}), one "
            "can be given; use a strategy that needs one"
        )
    if draft is None:
        raise ValueError(
            f"{given}: {name} drafts with a model of its own; give one (draft=, --draft)"
        )
    if not isinstance(draft, Model):
        try:
            dtype = str(target.params["embed"].dtype)
            draft = load(draft, dtype=dtype, mesh=target.split)
        except LoadError as error:
            raise LoadError(f"draft: {error}") from error
    joined = with_target(target, draft)
    if isinstance(draft.config, DFlashConfig):
        strategy = strategy.bind(draft.config)
    return Bound(strategy, {names[0]: joined})


def with_target(target: Model, draft: Model) -> Model:
    """The drafter with its target's embedding and head, which are shared, not copied.

    The `context_weights` of its layers are stored a second time (84 MB for Qwen3-8B's drafter).
    The drafter inherits the tokens that the target may not draw. A drafter that has its own
    embedding is returned unchanged.

    Raises:
        ValueError: The two do not fit (`check_draft`).
    """
    check_draft(target, draft)
    check_devices(target, draft)
    if "embed" in draft.params:
        return draft
    names = ("embed",) if target.config.tie_embeddings else ("embed", "lm_head")
    config = dataclasses.replace(
        draft.config,
        vocab_size=target.config.vocab_size,
        tie_embeddings=target.config.tie_embeddings,
    )
    defaults = dataclasses.replace(
        draft.defaults,
        vocab_limit=target.defaults.vocab_limit,
        forbidden_token_ids=target.defaults.forbidden_token_ids,
    )
    params = draft.params | {name: target.params[name] for name in names}
    if isinstance(draft.config, DFlashConfig):
        params["context_wkv"] = _context_weights(draft.params, draft.split)
    return draft.replace(params=params, config=config, defaults=defaults)


@functools.partial(jax.jit, static_argnames=("split",))
def _context_weights(params: Any, split: Split | None) -> Array:
    if split is None:
        return dflash.context_weights(params)
    made = split.specs({"context_wkv": params["fc"]})["context_wkv"]
    return split.run(dflash.context_weights, (params,), (split.specs(params),), made)


def check_devices(target: Model, draft: Model) -> None:
    """Refuse a drafter on other devices than its target: it would draft garbage.

    Raises:
        ValueError: It is.
    """
    if draft.split == target.split:
        return
    where = "one device" if target.split is None else f"{target.split.num_parts} devices"
    raise ValueError(
        f"draft={draft.source!r} does not lie on the devices of its target, {where}; give both the "
        "same mesh (dj.load(..., mesh=)), or give the draft's source"
    )


def check_draft(target: Model, draft: Model) -> None:
    """Refuse a drafter that cannot serve this target.

    Raises:
        ValueError: With every reason. A drafter of another target of the same sizes passes; it
            shows in a low acceptance rate.
    """
    cfg, of = draft.config, target.config
    if draft.arch.context_kv is None:
        raise ValueError(
            f"draft={draft.source!r} is a {draft.defaults.family} model, which reads no states of "
            "a target; give a drafter, such as a DFlash draft of this target"
        )
    if target.arch.context_kv is not None:
        refuse_draft(target)
    if not isinstance(cfg, DFlashConfig):
        return
    past = [i for i in cfg.target_layer_ids if i >= of.num_layers]
    rules = (
        (
            cfg.hidden_size == of.hidden_size,
            f"its hidden_size={cfg.hidden_size} must be the target's {of.hidden_size}",
        ),
        (
            not past,
            f"its target_layer_ids={list(cfg.target_layer_ids)} hold {past}, past the target's "
            f"{of.num_layers} layers (counted from 0)",
        ),
        (
            cfg.vocab_size in (0, of.vocab_size),
            f"its vocab_size={cfg.vocab_size} must be the target's {of.vocab_size}",
        ),
        (
            cfg.mask_token_id < of.vocab_size,
            f"its mask_token_id={cfg.mask_token_id} must be a row of the target's embedding of "
            f"{of.vocab_size}",
        ),
    )
    problems = [text for is_kept, text in rules if not is_kept]
    if problems:
        raise ValueError(
            f"draft={draft.source!r} does not fit the target {target.source!r}: "
            f"{'; '.join(problems)}. Give the draft that was trained for this target"
        )
    _check_weights(target, draft, cfg)


def _check_weights(target: Model, draft: Model, cfg: DFlashConfig) -> None:
    """Refuse weights of another width or dtype."""
    fc, kind = draft.params["fc"], target.params["embed"].dtype
    if fc.shape[0] != cfg.features:
        raise ValueError(
            f"draft={draft.source!r}: fc takes {fc.shape[0]} features, but its {cfg.features} are "
            f"{len(cfg.target_layer_ids)} states of {cfg.hidden_size}; correct target_layer_ids"
        )
    if fc.dtype == jnp.float16:  # outliers of the states overflow (InternLM/lmdeploy#4991)
        raise ValueError(
            f"draft={draft.source!r} in float16 overflows where it joins the target's states; "
            'load target and draft with dtype="bfloat16"'
        )
    if fc.dtype != kind:
        raise ValueError(
            f"draft={draft.source!r} is {fc.dtype} and its target {kind}; load both with one "
            f'dtype, for example the draft with dtype="{kind}"'
        )


def refuse_draft(model: Model) -> None:
    """Refuse a drafter as the model to decode.

    Raises:
        ValueError: The model is a drafter.
    """
    if model.arch.context_kv is not None:
        raise ValueError(
            f"model {model.source!r} is a drafter, no model by itself: it has no embedding and no "
            "head; load the target it was trained for, and give this as draft="
        )
