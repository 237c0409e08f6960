"""The `config.json` of DFlash drafters: attention windows, target layers, refusals.

The target layers and the mask token depend on the training of the drafter, so the config must
state them.
"""

from typing import Any, cast

from .fields import Fields, Json, common_refusals, no_partial_rope, rope, shown
from .parsers import Layers, decoder

_BLOCK_SIZE = 16  # the default of z-lab/dflash
_SLIDING, _FULL = "sliding_attention", "full_attention"
_MUSE = {"MuseGlimmerAssistantModel", "muse_glimmer_assistant"}
_DFLASH_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_READ = (
    *("target_layer_ids", "mask_token_id", "block_size", "causal", "use_swa", "swa_window_size"),
    *("window_inclusive", "input_embedding_scale", "output_multiplier", "attention_sink_bias"),
    *("final_logit_softcapping", "sample_from_anchor"),
    *_DFLASH_2,
)


def dflash(fields: Fields, layers: Layers) -> dict[str, Any]:
    """Network fields from Qwen3's names and `dflash_config`, whose entries win over the others.

    Source: z-lab/dflash (dflash/model.py), vllm (models/qwen3_dflash.py) for which entry wins.
    """
    common_refusals(fields, windows=True)
    _refuse(fields)
    said = fields.object("dflash_config")
    config = {**fields.config, **said}
    own = Fields(config, fields.problems, fields.notes)
    unread = sorted(key for key in said if key not in _READ)
    if unread:
        fields.notes.append(f"dflash_config holds entries that are not read: {', '.join(unread)}")
    theta, scaling, partial = rope(fields)
    no_partial_rope(fields, partial)
    # vocab_size is optional, since the target also states it.
    vocab = {} if fields.config.get("vocab_size") is not None else {"vocab_size": 1}
    network = decoder(Fields({**fields.config, **vocab}, fields.problems, fields.notes))
    windows, causal = _views(own, said, network["num_layers"])
    bias = fields.flag("attention_bias")
    mask = own.whole("mask_token_id", low=0)
    size = 0 if vocab else network["vocab_size"]
    if size and mask >= size:
        fields.problems.append(f"mask_token_id={mask} must be below vocab_size={size}")
    block_size = own.whole("block_size", _BLOCK_SIZE)
    if block_size == 1:
        fields.problems.append(
            "block_size=1 drafts nothing; it counts the anchor, so 2 is the least"
        )
    return {
        **network,
        "vocab_size": size,
        "tie_embeddings": False,  # a drafter has neither embedding nor head
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qk_norm": layers.qk_norm,
        "qkv_bias": bias,
        "o_bias": bias,
        "mask_token_id": mask,
        "target_layer_ids": _taps(own),
        "block_size": block_size,
        "windows": windows,
        "causal": causal,
        "embedding_scale": own.number("input_embedding_scale", 1.0),
        "logit_scale": own.number("output_multiplier", 1.0),
        "logit_cap": _cap(own),
    }


def _refuse(fields: Fields) -> None:
    """Add a problem for each feature of other drafters that this network lacks."""
    said = fields.object("dflash_config")
    for key in _DFLASH_2:
        if said.get(key):
            fields.problems.append(
                f"{key}={said[key]!r} is of DFlash 2, whose convolutions and selector are not "
                "supported; use a DFlash draft of the first version"
            )
    for key, why in (
        ("sample_from_anchor", "each cell predicts its own position"),
        ("attention_sink_bias", "the softmax has no sink"),
    ):
        if said.get(key):
            fields.problems.append(f"{key}={shown(said[key])} is not supported: {why}")
    vocab, drafted = (fields.config.get(key) for key in ("vocab_size", "draft_vocab_size"))
    if drafted not in (None, vocab):
        fields.problems.append(
            f"draft_vocab_size={drafted!r} is not supported: a draft here has its target's head, "
            "not one of a smaller vocabulary"
        )
    width, read = (fields.config.get(key) for key in ("hidden_size", "target_hidden_size"))
    if read not in (None, width):
        fields.problems.append(
            f"target_hidden_size={read!r} must be hidden_size={width!r}: a draft reads rows of its "
            "target's embedding and writes rows for its head"
        )


def _taps(own: Fields) -> tuple[int, ...]:
    """Layers of the target whose states are read; required, as a wrong guess drafts badly."""
    stated = own.config.get("target_layer_ids")
    ids = cast("list[Any]", stated) if isinstance(stated, list) else []
    are_layers = all(type(i) is int and i >= 0 for i in ids)
    if not are_layers or not ids or len(set(ids)) < len(ids):
        own.problems.append(
            f"target_layer_ids={stated!r} must list different layers of the target, counted from "
            "0; take them from the training of this draft"
        )
        return ()
    return tuple(ids)


def _views(own: Fields, said: Json, layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """The attention window of each layer, and whether it is causal."""
    config, is_muse = own.config, _is_muse(own.config)
    kinds = config.get("layer_types")
    if kinds is None:  # transformers' default for its own class is to slide everywhere
        kinds = [_SLIDING if is_muse else _FULL] * layers
    if len(kinds) != layers or any(kind not in (_SLIDING, _FULL) for kind in kinds):
        own.problems.append(
            f'layer_types={kinds!r} must say "{_FULL}" or "{_SLIDING}" for each of the '
            f"num_hidden_layers={layers} layers"
        )
        return (), ()
    sliding = [kind == _SLIDING for kind in kinds]
    causal = [
        own.flag("is_causal", own.flag("causal", slides and not is_muse)) for slides in sliding
    ]
    if own.flag("use_swa") and not any(sliding):
        sliding = [True] * layers
    reach = None
    if any(sliding):
        key = "sliding_window" if said.get("swa_window_size") is None else "swa_window_size"
        # transformers counts positions on one side; others count all that a row sees, with its own.
        reach = own.whole(key) + own.flag("window_inclusive", is_muse)
    return tuple(reach if slides else None for slides in sliding), tuple(causal)


def _is_muse(config: Json) -> bool:
    """Whether the config is of the class in transformers, which has other defaults."""
    named = config.get("architectures") or [config.get("model_type")]
    return not _MUSE.isdisjoint([named] if isinstance(named, str) else map(str, named))


def _cap(own: Fields) -> float | None:
    if own.config.get("final_logit_softcapping") is None:
        return None
    return own.number("final_logit_softcapping")
