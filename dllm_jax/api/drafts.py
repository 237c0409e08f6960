"""The drafter of a speculative strategy: loaded, checked, and joined to its target."""

import dataclasses
import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dllm_jax.engine.checks import short_repr
from dllm_jax.loading.load import load
from dllm_jax.loading.model import Model
from dllm_jax.loading.sources import LoadError
from dllm_jax.models import dflash
from dllm_jax.models.dflash import DFlashConfig
from dllm_jax.models.sharding import Split

Source = Model | str | os.PathLike[str]


class Bound(NamedTuple):
    """A strategy with every size set, and the auxiliary models that it needs, by name."""

    strategy: Any
    aux: dict[str, Model]

    @property
    def draft(self) -> Model | None:
        """The drafter, None without one."""
        return next(iter(self.aux.values()), None)


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
    if not isinstance(draft, Model | str | os.PathLike | None):
        raise ValueError(
            f"draft has type {type(draft).__name__}; give what dj.load takes, or what it returns"
        )
    source = draft.source if isinstance(draft, Model) else draft and os.fspath(draft)
    given = f"draft={short_repr(source)}"
    if not names:
        other = ", or use the strategy 'dflash'" if target.config.shift else ""
        raise ValueError(
            f"{given} does not fit {name}, which uses no draft; leave the draft out{other}"
        )
    if len(names) > 1:
        raise ValueError(
            f"{given}: {name} needs {len(names)} models beside its own, {short_repr(names)}; one "
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
