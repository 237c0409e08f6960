"""A drafter beside the target it was trained for: whether they fit, and what it takes from it.

Nothing here loads a model or knows how drafts are judged.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dllm_jax.loading.model import Model
from dllm_jax.models import dflash
from dllm_jax.models.dflash import DFlashConfig


def check_draft(target: Model, draft: Model) -> None:
    """Refuse a draft that cannot be this target's.

    Raises:
        ValueError: With every reason; a draft of another target of the same sizes passes, and
            shows in how little of what it drafts is accepted.
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
    """Refuse weights of another width or type."""
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


def with_target(target: Model, draft: Model) -> Model:
    """The draft with its target's embedding and head, which are shared, not copied.

    Beside its layers stand their `context_weights` once more (84 MB of Qwen3-8B's draft). What the
    target never draws the draft does not either. A drafter that has an embedding of its own stays
    as it is.

    Raises:
        ValueError: If the two do not fit (`check_draft`).
    """
    check_draft(target, draft)
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
        params["context_wkv"] = _context_weights(draft.params)
    return draft.replace(params=params, config=config, defaults=defaults)


_context_weights = jax.jit(dflash.context_weights)


def refuse_draft(model: Model) -> None:
    """Refuse a drafter where a model is wanted that can be decoded by itself.

    Raises:
        ValueError: If it is one.
    """
    if model.arch.context_kv is not None:
        raise ValueError(
            f"model {model.source!r} is a drafter, no model by itself: it has no embedding and no "
            "head; load the target it was trained for, and give this as draft="
        )
