"""The facts of a dense network in a Hugging Face `config.json`, and what must not be in one.

Both spellings are read: top-level `rope_theta` / `rope_scaling`, and the `rope_parameters` of
transformers 5. Nothing here knows families or special tokens.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

Json = Mapping[str, Any]

_MAX_POSITION = 32768  # where a config names no length
_NORM_EPS = 1e-6  # the default of Qwen3Config
# Entries that are no plain values: what they must be where they are given.
_KINDS: dict[str, Any] = {
    "architectures": list | str,
    "auto_map": Mapping,
    "layer_types": list,
    "rope_scaling": Mapping,
    "rope_parameters": Mapping,
    "dllm_jax": Mapping,
}
_ROPE_KEYS = ("rope_scaling", "rope_parameters")
_QUANTISATION_KEYS = ("quantization_config", "compression_config")


def well_formed(config: Json, problems: list[str]) -> Json:
    """The config without the entries of a wrong JSON type, each of which is a problem."""
    kept = dict(config)
    for key, kind in _KINDS.items():
        if kept.get(key) is not None and not isinstance(kept[key], kind):
            name = "an object" if kind is Mapping else "a list"
            problems.append(f"{key}={kept.pop(key)!r} must be {name} or null")
    return kept


def refusals(config: Json) -> Iterable[str]:
    """Features of a config that the dense network does not have; each is a reason to refuse it."""
    act = config.get("hidden_act", "silu")
    if act != "silu":
        yield f'hidden_act={act!r} is not supported; only "silu" is'
    if config.get("use_sliding_window"):
        yield "use_sliding_window=true is not supported; only full attention is"
    kinds = sorted({str(kind) for kind in config.get("layer_types") or ()} - {"full_attention"})
    if kinds:
        yield f'layer_types holds {kinds}; only "full_attention" is supported'
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            yield f"{key}=true is not supported; these families have no bias"
    for key in _ROPE_KEYS:
        yield from _rope_refusals(config, key)
    for key in _QUANTISATION_KEYS:
        if config.get(key):
            method = _mapping(config, key).get("quant_method")
            yield (
                f"the weights are quantised ({key}: quant_method={method!r}), which is not "
                "supported; use the bfloat16 checkpoint"
            )


def network_fields(config: Json, problems: list[str]) -> dict[str, Any]:
    """The fields of `DenseConfig` that a config states; reasons against them go to `problems`."""

    def whole(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f"{key}={value!r} must be a positive whole number")
            return 0
        return value

    def number(key: str, value: Any) -> float:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            problems.append(f"{key}={value!r} must be a positive number")
            return 0.0
        return float(value)

    heads, hidden = whole("num_attention_heads"), whole("hidden_size")
    if config.get("head_dim") is None and heads and hidden % heads:
        problems.append(
            f"head_dim is not given and num_attention_heads={heads} does not divide "
            f"hidden_size={hidden}; state head_dim"
        )
    theta = _mapping(config, "rope_parameters").get("rope_theta", config.get("rope_theta"))
    return {
        "vocab_size": whole("vocab_size"),
        "hidden_size": hidden,
        "num_layers": whole("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": whole("num_key_value_heads", heads),
        "head_dim": whole("head_dim", max(hidden // max(heads, 1), 1)),
        "ffn_size": whole("intermediate_size"),
        "rope_theta": number("rope_theta", theta),
        "norm_eps": number("rms_norm_eps", config.get("rms_norm_eps", _NORM_EPS)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "max_position": whole("max_position_embeddings", _MAX_POSITION),
    }


def _rope_refusals(config: Json, key: str) -> Iterable[str]:
    rope = _mapping(config, key)
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if any(isinstance(value, Mapping) for value in rope.values()):
        yield f"{key} differs from layer to layer, which is not supported"
    elif kind != "default":
        yield f'{key} type {kind!r} is not supported; only null or "default" is'
    elif rope and partial not in (None, 1):
        yield f"partial_rotary_factor={partial} is not supported; only 1.0 is"


def _mapping(config: Json, key: str) -> Json:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}
