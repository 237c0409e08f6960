"""The `config.json` and `generation_config.json` of DiffusionGemma.

Two spellings are supported: `global_head_dim` and `num_global_key_value_heads` of the release, and
`per_layer_config`, which transformers writes. Every entry is read, known to change nothing here, or
refused by name. The vision part is ignored.
"""

from collections.abc import Mapping
from typing import Any, cast

from .fields import Fields, Json, common_refusals, shown, well_formed
from .parsers import Layers

_SLIDING, _FULL = "sliding_attention", "full_attention"
_PATTERN = 6  # in a config that lists no layers, the last of every 6 is global
_MOST_LAYERS = 10_000
_SAMPLER = "EntropyBoundSamplerConfig"
_NUMBERS = (
    "max_denoising_steps",
    "t_min",
    "t_max",
    "entropy_bound",
    "stability_threshold",
    "confidence_threshold",
)
# Entries that have no effect here or are read elsewhere: ids, types, training, images.
_KNOWN = {
    *("architectures", "model_type", "auto_map", "dllm_jax", "transformers_version"),
    *("_name_or_path", "dtype", "torch_dtype", "initializer_range", "attention_dropout"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "tie_word_embeddings"),
    *("boi_token_id", "eoi_token_id", "image_token_id", "video_token_id", "vision_config"),
    *("vision_soft_tokens_per_image", "use_bidirectional_attention"),
}
_ROOT = {*_KNOWN, "text_config", "canvas_length", "quantization_config", "compression_config"}
_TEXT = {
    *_KNOWN,
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "layer_types"),
    *("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads", "head_dim"),
    *("global_head_dim", "per_layer_config", "hidden_activation", "hidden_act", "rms_norm_eps"),
    *("max_position_embeddings", "rope_parameters", "attention_bias", "attention_k_eq_v"),
    *("sliding_window", "sliding_window_pattern", "final_logit_softcapping", "num_experts"),
    *("top_k_experts", "moe_intermediate_size", "enable_moe_block"),
}


def diffusion_gemma(fields: Fields, layers: Layers) -> dict[str, Any]:
    """Network fields from Gemma 4's names under `text_config`, and the length of a canvas."""
    del layers
    common_refusals(fields)
    _tied(fields)
    _refuse_unknown(fields, _ROOT, "config.json")
    said = fields.config.get("text_config")
    if not isinstance(said, Mapping):
        fields.problems.append(f"text_config={said!r} must be an object: it describes the network")
        said = {}
    text = Fields(well_formed(cast("Json", said), fields.problems), fields.problems, fields.notes)
    _refuse(text)
    sliding = _sliding(text)
    kv_heads, head_dim = text.whole("num_key_value_heads"), text.whole("head_dim")
    global_heads, global_dim = _global_heads(text, sliding, kv_heads, head_dim)
    theta, rotary = _rope(text, _SLIDING, head_dim)
    global_theta, global_rotary = _rope(text, _FULL, global_dim)
    return {
        "canvas_length": fields.whole("canvas_length"),
        "vocab_size": text.whole("vocab_size"),
        "hidden_size": text.whole("hidden_size"),
        "num_layers": len(sliding),
        "num_heads": text.whole("num_attention_heads"),
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn_size": text.whole("intermediate_size"),
        "norm_eps": text.number("rms_norm_eps", 1e-6),
        "tie_embeddings": True,
        "max_position": text.whole("max_position_embeddings"),
        "rope_theta": theta,
        "rotary_dim": rotary,
        "qk_norm": True,
        "num_experts": text.whole("num_experts"),
        "experts_per_token": text.whole("top_k_experts"),
        "expert_size": text.whole("moe_intermediate_size"),
        "moe_layers": (True,) * len(sliding),
        "sliding": sliding,
        "window": text.whole("sliding_window"),
        "global_num_kv_heads": global_heads,
        "global_head_dim": global_dim,
        "global_rope_theta": global_theta,
        "global_rotary_dim": global_rotary,
        "logit_cap": _cap(text),
    }


def numbers(generation: Json, problems: list[str]) -> tuple[tuple[str, float], ...]:
    """The denoising settings of a `generation_config.json`, by the strategy's field names.

    The strategy checks their ranges.
    """
    sampler = Fields(generation, problems, []).object("sampler_config")
    if not sampler and generation.get("sampler_config"):
        problems.append(
            f"generation_config.json: sampler_config={shown(generation['sampler_config'])} must be "
            "an object"
        )
    if sampler.get("_cls_name") not in (None, _SAMPLER):
        problems.append(
            f"generation_config.json: sampler_config is a {sampler['_cls_name']!r}; only "
            f'"{_SAMPLER}" is supported'
        )
    said = {**generation, **sampler}
    found: dict[str, float] = {}
    for name in _NUMBERS:
        value = said.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf"):
            problems.append(
                f"generation_config.json: {name}={shown(value)} must be a number of at least 0"
            )
        elif name == "entropy_bound" and not value:
            problems.append(f"generation_config.json: {name}={value!r} must be above 0")
        else:
            found[name] = float(value)
    return tuple(found.items())


def _refuse(text: Fields) -> None:
    """Add a problem for each feature of other Gemma 4 networks that this one lacks."""
    for key in ("hidden_activation", "hidden_act"):
        text.must_be(key, "gelu_pytorch_tanh", why="the feed-forward halves are gated by it")
    text.must_be("attention_bias", False, why="no projection has a bias")
    text.must_be("enable_moe_block", True, why="every layer has experts beside its dense half")
    text.must_be("attention_k_eq_v", True, why="values of global layers are made of their keys")
    text.must_be("use_bidirectional_attention", "vision", why="the encoder of text is causal")
    _tied(text)
    _refuse_unknown(text, _TEXT, "text_config")


def _tied(fields: Fields) -> None:
    fields.must_be(
        "tie_word_embeddings", True, why="embedding, head, encoder and decoder share their weights"
    )


def _refuse_unknown(fields: Fields, known: set[str], where: str) -> None:
    """Refuse unknown entries, which may describe another network, unless they are off or empty."""
    for key, value in fields.config.items():
        if key not in known and value not in (None, False, 0, "", [], {}):
            fields.problems.append(
                f"{where} holds {key}={shown(value)}, which is not supported: it is unknown what "
                "it changes; remove it if that is nothing"
            )


def _sliding(text: Fields) -> tuple[bool, ...]:
    """Which layers slide; the last one is always global, as in transformers."""
    count = text.whole("num_hidden_layers", most=_MOST_LAYERS)
    kinds = text.config.get("layer_types")
    if kinds is None:
        pattern = text.whole("sliding_window_pattern", _PATTERN)
        kinds = [_SLIDING if pattern and (i + 1) % pattern else _FULL for i in range(count)]
    if len(kinds) != count or any(kind not in (_SLIDING, _FULL) for kind in kinds):
        text.problems.append(
            f'layer_types={kinds!r} must say "{_FULL}" or "{_SLIDING}" for each of the '
            f"num_hidden_layers={count} layers"
        )
        return (False,) * count
    if kinds and kinds[-1] != _FULL:
        text.notes.append(
            f'layer_types ends with "{_SLIDING}"; the last layer is global all the same'
        )
        kinds = [*kinds[:-1], _FULL]
    return tuple(kind == _SLIDING for kind in kinds)


def _global_heads(
    text: Fields, sliding: tuple[bool, ...], kv_heads: int, head_dim: int
) -> tuple[int, int]:
    """Number and size of the KV heads of the global layers, in either spelling."""
    said = text.config.get("per_layer_config")
    if said is None:
        return text.whole("num_global_key_value_heads", kv_heads or 1), text.whole(
            "global_head_dim"
        )
    if not isinstance(said, Mapping):
        text.problems.append(f"per_layer_config={said!r} must be an object by layer number")
        return 1, 2
    by_layer = cast("Mapping[Any, Any]", said)
    usual = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    found: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
    for i, slides in enumerate(sliding):
        entry: Any = by_layer.get(str(i), by_layer.get(i)) or {}
        if not isinstance(entry, Mapping) or set(cast("Json", entry)) - set(usual):
            text.problems.append(
                f"per_layer_config of layer {i} is {entry!r}; it may hold {' and '.join(usual)}"
            )
            return 1, 2
        own = Fields({**usual, **cast("Json", entry)}, text.problems, text.notes)
        found[slides].add((own.whole("num_key_value_heads"), own.whole("head_dim")))
    if len(found[False]) > 1 or found[True] - {(kv_heads, head_dim)}:
        text.problems.append(
            f"per_layer_config={said!r} must be the same for all global layers, and leave sliding "
            "ones as they are"
        )
    pair = next(iter(found[False]), (kv_heads, head_dim))
    stated = {
        "num_global_key_value_heads": pair[0],
        "global_head_dim": pair[1],
    }
    for key, value in stated.items():
        if text.config.get(key) not in (None, value):
            text.problems.append(
                f"{key}={text.config[key]!r} and per_layer_config, which says {value}, must agree"
            )
    return pair


def _rope(text: Fields, kind: str, head_dim: int) -> tuple[float, int | None]:
    """Theta, and the number of rotated components of a head (None: all)."""
    entry = text.object("rope_parameters").get(kind)
    if not isinstance(entry, Mapping):
        text.problems.append(
            f"rope_parameters[{kind!r}]={entry!r} must be an object with rope_theta"
        )
        return 1.0, None
    entry = cast("Json", entry)
    theta = text.number("rope_theta", inside=entry)
    share = text.number("partial_rotary_factor", 1.0, inside=entry, most=1)
    known = {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}
    others = sorted(set(entry) - known)
    is_proportional = entry.get("rope_type", "default") == "proportional"
    rule = 'only "default", and "proportional" with a partial_rotary_factor up to 1, are supported'
    if entry.get("rope_type", "default") not in ("default", "proportional") or others:
        text.problems.append(f"rope_parameters[{kind!r}]={dict(entry)!r}: {rule}")
    elif (share != 1 and not is_proportional) or entry.get("factor") not in (None, 1):
        text.problems.append(f"rope_parameters[{kind!r}]={dict(entry)!r}: {rule}, without a factor")
    rotated = 2 * int(share * head_dim // 2)
    return theta, None if rotated == head_dim else rotated


def _cap(text: Fields) -> float | None:
    if text.config.get("final_logit_softcapping") is None:
        return None
    return text.number("final_logit_softcapping")
