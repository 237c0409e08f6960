"""Network fields from the `config.json` of each dialect: names of entries, traps, refusals.

A dialect is a way of writing configs; several families share one. Each parser returns the fields
of the family's config class as a dictionary.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from .fields import Fields, common_refusals, no_partial_rope, rope

_MAX_POSITION = 32768  # default of a config without a length
_MOST_LAYERS = 10_000  # more are a typing mistake
_ROUTING_BLOCK = 32  # LLaDA2.2's default


class Layers(NamedTuple):
    """Properties of a family's layers that its config does not state.

    Attributes:
        qk_norm: Queries and keys are normalised.
        qkv_bias: Queries, keys and values have a bias, the output projection has none (Qwen2).
        norm_topk: Expert weights are divided by their sum (SDAR-MoE's own code).
        rms_only: Refuse `layer_norm_eps`, which would mean another norm (iLLaDA).
    """

    qk_norm: bool = False
    qkv_bias: bool = False
    norm_topk: bool = False
    rms_only: bool = False


# Reads a dialect; returns the fields of the network's config class.
Parser = Callable[[Fields, Layers], dict[str, Any]]


def hf(fields: Fields, layers: Layers) -> dict[str, Any]:
    """Llama's names, which Qwen2, Qwen3 and their descendants share."""
    common_refusals(fields)
    if fields.config.get("mlp_bias"):
        fields.problems.append("mlp_bias=true is not supported; these families have no bias there")
    if layers.rms_only and fields.config.get("layer_norm_eps") is not None:
        size = fields.config["layer_norm_eps"]
        fields.problems.append(f"layer_norm_eps={size!r} means LayerNorm; only RMSNorm (null) is")
    theta, scaling, partial = rope(fields)
    no_partial_rope(fields, partial)
    # Qwen2 layers always have a bias; Dream and Fast-dLLM state attention_bias=false or nothing.
    bias = False if layers.qkv_bias else fields.flag("attention_bias")
    return {
        **decoder(fields),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qk_norm": layers.qk_norm,
        "qkv_bias": layers.qkv_bias or bias,
        "o_bias": bias,
    }


def qwen_moe(fields: Fields, layers: Layers) -> dict[str, Any]:
    """Qwen3-MoE's names: experts in all layers except some."""
    config, network = fields.config, hf(fields, layers)
    step = fields.whole("decoder_sparse_step", 1)
    dense = set(_layer_numbers(fields, "mlp_only_layers"))
    alias = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    if config.get("num_experts") not in (None, config.get(alias)):
        fields.problems.append(
            f"num_experts={config['num_experts']!r} and {alias}={config[alias]!r} must be equal"
        )
    norm = fields.flag("norm_topk_prob", layers.norm_topk)
    if layers.norm_topk and not norm:
        fields.notes.append(
            "norm_topk_prob=false is ignored: the family's own code always divides the "
            "weights of the chosen experts by their sum"
        )
    return {
        **network,
        "num_experts": fields.whole(alias if config.get("num_experts") is None else "num_experts"),
        "experts_per_token": fields.whole("num_experts_per_tok"),
        "expert_size": fields.whole("moe_intermediate_size"),
        "moe_layers": tuple(
            i not in dense and step > 0 and (i + 1) % step == 0
            for i in range(network["num_layers"])
        ),
        "norm_topk": norm or layers.norm_topk,
    }


def llada_moe(fields: Fields, layers: Layers) -> dict[str, Any]:
    """LLaDA-MoE's names for Qwen3-MoE's layers; expert weights are never divided by their sum.

    Source: modeling_lladamoe.py of LLaDA-MoE-7B-A1B, which does not read `norm_topk_prob`, groups
    or a factor of the weights.
    """
    config, count = fields.config, fields.whole("num_hidden_layers", most=_MOST_LAYERS)
    for key, allowed, why in (
        ("moe_router_score_function", "softmax", "scores are one law over all experts"),
        ("moe_router_enable_expert_bias", False, "the bias would enter the weights"),
    ):
        fields.must_be(key, allowed, why=why)
    if config.get("clip_qkv") is not None:
        fields.problems.append(f"clip_qkv={config['clip_qkv']!r} is not supported; only null is")
    usual = {"norm_topk_prob": False, "routed_scaling_factor": 1, "router_num_group": 1}
    if unread := [key for key in usual if config.get(key) not in (None, usual[key])]:
        fields.notes.append(f"{', '.join(unread)}: the family's own code does not read it")
    given: Any = config.get("moe_layer_freq", [1] * count)
    routed = cast(list[Any], given) if isinstance(given, list) else []
    if len(routed) != count or any(flag not in (0, 1) for flag in routed):
        fields.problems.append(f"moe_layer_freq={given!r} must hold 0 or 1 for each of {count}")
        routed = [1] * count
    size = fields.whole("expert_intermediate_size")
    dense = fields.whole("dense_intermediate_size", (size or 1) if all(routed) else None)
    named = Fields({**config, "intermediate_size": dense or 1}, fields.problems, fields.notes)
    return {
        **hf(named, layers),
        "qk_norm": fields.flag("qk_layernorm", layers.qk_norm),
        "num_experts": fields.whole("num_experts"),
        "experts_per_token": fields.whole("num_experts_per_tok"),
        "expert_size": size,
        "shared_size": fields.whole("shared_expert_intermediate_size", 0, low=0),
        "moe_layers": tuple(map(bool, routed)),
        "norm_topk": False,
    }


def llada(fields: Fields, layers: Layers) -> dict[str, Any]:
    """LLaDA-8B's own names, which are OLMo's."""
    del layers
    config, problems = fields.config, fields.problems
    common_refusals(fields)
    for key, allowed, why in (
        ("activation_type", "silu", "its feed-forward half has three matrices"),
        ("block_type", "llama", "other blocks have other weights"),
        ("layer_norm_type", "rms", "there is no other norm"),
        ("layer_norm_with_affine", True, "each norm has a scale"),
        ("rope", True, "positions enter by rotation"),
        ("alibi", False, "positions enter by rotation"),
        ("bias_for_layer_norm", False, "norms have no bias"),
        ("attention_layer_norm", False, "queries and keys are not normed"),
        ("input_emb_norm", False, "embeddings are not normed"),
        ("include_bias", False, "the feed-forward half has no bias"),
        ("block_group_size", 1, "layers are not grouped"),
    ):
        fields.must_be(key, allowed, why=why)
    if config.get("clip_qkv") is not None:
        problems.append(f"clip_qkv={config['clip_qkv']!r} is not supported; only null is")
    theta, scaling, partial = rope(fields)
    no_partial_rope(fields, partial)
    heads, width = fields.whole("n_heads"), fields.whole("d_model")
    kv_heads = fields.whole("n_kv_heads", 1 if config.get("multi_query_attention") else heads or 1)
    if fields.flag("multi_query_attention") and kv_heads != 1:
        problems.append(f"n_kv_heads={kv_heads} beside multi_query_attention=true must be 1")
    rows = fields.whole("embedding_size", fields.whole("vocab_size") or 1)
    return {
        "vocab_size": rows,
        "hidden_size": width,
        "num_layers": fields.whole("n_layers", most=_MOST_LAYERS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": fields.divided("n_heads", "d_model"),
        "ffn_size": _llada_ffn(fields, width),
        "norm_eps": fields.number("rms_norm_eps", 1e-5),
        "tie_embeddings": fields.flag("weight_tying"),
        "max_position": fields.whole("max_sequence_length", 4096),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qk_norm": False,
        "qkv_bias": fields.flag("include_qkv_bias"),
        "logit_scale": 1 / math.sqrt(width) if fields.flag("scale_logits") and width else 1.0,
    }


def llada2(fields: Fields, layers: Layers) -> dict[str, Any]:
    """LLaDA2's names, which come from Ling: fused projections, sigmoid routing, groups."""
    del layers
    common_refusals(fields)
    for key, allowed, why in (
        ("use_qk_norm", True, "queries and keys are normed"),
        ("score_function", "sigmoid", "each expert has a probability of its own"),
        ("router_dtype", "fp32", "scores of 16 bits would tie"),
        ("norm_head", False, "rows of the head are not normed"),
        ("use_rmsnorm", True, "there is no other norm"),
    ):
        fields.must_be(key, allowed, why=why)
    theta, scaling, partial = rope(fields)
    network = decoder(fields)
    experts = fields.whole("num_experts")
    expert_size = fields.whole("moe_intermediate_size")
    first = fields.whole("first_k_dense_replace", 0, low=0)
    groups, kept = _groups(fields, experts)
    capacity = fields.whole("expert_capacity", 0, low=0)
    return {
        **network,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rotary_dim": _rotary_dim(fields, network["head_dim"], partial),
        "qk_norm": True,
        "qkv_bias": fields.flag("use_qkv_bias"),
        "o_bias": fields.flag("use_bias"),
        "num_experts": experts,
        "experts_per_token": fields.whole("num_experts_per_tok"),
        "expert_size": expert_size,
        "shared_size": fields.whole("num_shared_experts", 0, low=0) * expert_size,
        "moe_layers": tuple(i >= first for i in range(network["num_layers"])),
        "score": "sigmoid",
        "norm_topk": fields.flag("norm_topk_prob", True),
        "routed_scale": fields.number("routed_scaling_factor", 1.0),
        "expert_bias": fields.flag("moe_router_enable_expert_bias", True),
        "num_groups": groups,
        "groups_per_token": kept,
        "expert_capacity": capacity,
        "routing_block": fields.whole("block_size", _ROUTING_BLOCK) if capacity else 1,
    }


PARSERS = {f.__name__: f for f in (hf, qwen_moe, llada_moe, llada, llada2)}


def decoder(fields: Fields) -> dict[str, Any]:
    """Sizes under Llama's names."""
    heads, head_dim = fields.whole("num_attention_heads"), fields.config.get("head_dim")
    usual = None
    if head_dim is None:
        usual = fields.divided("num_attention_heads", "hidden_size", "head_dim")
    return {
        "vocab_size": fields.whole("vocab_size"),
        "hidden_size": fields.whole("hidden_size"),
        "num_layers": fields.whole("num_hidden_layers", most=_MOST_LAYERS),
        "num_heads": heads,
        "num_kv_heads": fields.whole("num_key_value_heads", heads or 1),
        "head_dim": fields.whole("head_dim", usual),
        "ffn_size": fields.whole("intermediate_size"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_embeddings": fields.flag("tie_word_embeddings"),
        "max_position": fields.whole("max_position_embeddings", _MAX_POSITION),
    }


def _llada_ffn(fields: Fields, width: int) -> int:
    if fields.config.get("mlp_hidden_size") is not None:
        return fields.whole("mlp_hidden_size")
    size = fields.number("mlp_ratio", 4, most=2**31 - 1) * width
    if size % 1:
        fields.problems.append(f"mlp_ratio times d_model={width} is {size}; state mlp_hidden_size")
    return int(size)


def _rotary_dim(fields: Fields, head_dim: int, partial: float | None) -> int | None:
    """Rotated components of a head, None for all; `rotary_dim` wins over the share."""
    share = None if partial is None else int(head_dim * partial)
    if fields.config.get("rotary_dim") is None:
        return None if share in (None, head_dim) else share
    stated = fields.whole("rotary_dim")
    if share not in (None, stated):
        fields.notes.append(
            f"rotary_dim={stated} but partial_rotary_factor={partial} of head_dim={head_dim} is "
            f"{share}; using rotary_dim"
        )
    return None if stated == head_dim else stated


def _groups(fields: Fields, experts: int) -> tuple[int, int]:
    """Number of groups of experts, and number of groups that a row may use; (1, 1): no groups."""
    groups = fields.whole("n_group", 0, low=0)
    if groups <= 1:
        return 1, 1
    if experts % groups:
        fields.notes.append(
            f"n_group={groups} does not divide num_experts={experts}: a row chooses among all "
            "experts, as in the published code"
        )
        return 1, 1
    kept = fields.whole("topk_group")
    if kept > groups:
        fields.problems.append(f"topk_group={kept} must be at most n_group={groups}")
    return groups, kept


def _layer_numbers(fields: Fields, key: str) -> list[int]:
    numbers: Any = fields.config.get(key) or []
    if isinstance(numbers, Mapping) or not all(
        isinstance(i, int) and not isinstance(i, bool) for i in numbers
    ):
        fields.problems.append(f"{key}={numbers!r} must be a list of layer numbers")
        return []
    return list(numbers)
