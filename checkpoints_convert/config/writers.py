"""The entries of a `config.json` in each dialect; the parser of the dialect reads them back.

Each writer takes a network config and the `Layers` of its family.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from .parsers import Layers


def _hf(cfg: Any, layers: Layers) -> dict[str, Any]:
    return {
        **_decoder(cfg),
        **({} if layers.qkv_bias else {"attention_bias": cfg.qkv_bias}),
    }


def _qwen_moe(cfg: Any, layers: Layers) -> dict[str, Any]:
    return {
        **_hf(cfg, layers),
        "num_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "moe_intermediate_size": cfg.expert_size,
        "norm_topk_prob": cfg.norm_topk,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, moe in enumerate(cfg.moe_layers) if not moe],
    }


def _llada_moe(cfg: Any, layers: Layers) -> dict[str, Any]:
    entries = _hf(cfg, layers)
    return {
        **entries,
        "dense_intermediate_size": entries.pop("intermediate_size"),
        "qk_layernorm": cfg.qk_norm,
        "num_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "expert_intermediate_size": cfg.expert_size,
        "shared_expert_intermediate_size": cfg.shared_size or None,
        "moe_layer_freq": [int(moe) for moe in cfg.moe_layers],
    }


def _llada(cfg: Any, layers: Layers) -> dict[str, Any]:
    del layers
    return {
        "d_model": cfg.hidden_size,
        "n_layers": cfg.num_layers,
        "n_heads": cfg.num_heads,
        "n_kv_heads": cfg.num_kv_heads,
        "mlp_hidden_size": cfg.ffn_size,
        "mlp_ratio": 4,
        "vocab_size": cfg.vocab_size,
        "embedding_size": cfg.vocab_size,
        "max_sequence_length": cfg.max_position,
        "rms_norm_eps": cfg.norm_eps,
        "rope": True,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": _scaling(cfg),
        "alibi": False,
        "activation_type": "silu",
        "block_type": "llama",
        "block_group_size": 1,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "attention_layer_norm": False,
        "include_bias": False,
        "include_qkv_bias": cfg.qkv_bias,
        "input_emb_norm": False,
        "scale_logits": cfg.logit_scale != 1.0,
        "weight_tying": cfg.tie_embeddings,
    }


def _llada2(cfg: Any, layers: Layers) -> dict[str, Any]:
    del layers
    rotary = cfg.head_dim if cfg.rotary_dim is None else cfg.rotary_dim
    routing = {"expert_capacity": cfg.expert_capacity, "block_size": cfg.routing_block}
    return {
        **_decoder(cfg),
        "rotary_dim": rotary,
        "partial_rotary_factor": rotary / cfg.head_dim,
        "use_qkv_bias": cfg.qkv_bias,
        "use_bias": cfg.o_bias,
        "use_qk_norm": True,
        "norm_head": False,
        "num_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "moe_intermediate_size": cfg.expert_size,
        "num_shared_experts": cfg.shared_size // cfg.expert_size,
        "first_k_dense_replace": cfg.moe_layers.count(False),
        "score_function": cfg.score,
        "router_dtype": "fp32",
        "norm_topk_prob": cfg.norm_topk,
        "routed_scaling_factor": cfg.routed_scale,
        "moe_router_enable_expert_bias": cfg.expert_bias,
        "n_group": cfg.num_groups,
        "topk_group": cfg.groups_per_token,
        **(routing if cfg.expert_capacity else {}),
    }


def _dflash(cfg: Any, layers: Layers) -> dict[str, Any]:
    sliding = tuple(reach is not None for reach in cfg.windows)
    is_mixed = len({*cfg.causal}) > 1  # a config can state this only by the windows of layers
    if len({*cfg.windows} - {None}) > 1 or (is_mixed and cfg.causal != sliding):
        raise ValueError(
            f"windows={cfg.windows} with causal={cfg.causal} have no form in a config.json; use "
            "one window, and token order in all layers, in none or in those with the window"
        )
    entries = _hf(cfg, layers)
    if not cfg.vocab_size:
        del entries["vocab_size"]
    return {
        **entries,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding],
        "sliding_window": next((reach for reach in cfg.windows if reach is not None), None),
        "dflash_config": {
            "target_layer_ids": list(cfg.target_layer_ids),
            "mask_token_id": cfg.mask_token_id,
            "block_size": cfg.block_size,
            **({} if is_mixed else {"causal": cfg.causal[0]}),
            "input_embedding_scale": cfg.embedding_scale,
            "output_multiplier": cfg.logit_scale,
            "final_logit_softcapping": cfg.logit_cap,
        },
    }


def _diffusion_gemma(cfg: Any, layers: Layers) -> dict[str, Any]:
    del layers

    def rope(theta: float, rotated: int | None, size: int) -> dict[str, Any]:
        if rotated is None:
            return {"rope_type": "default", "rope_theta": theta}
        share = {"partial_rotary_factor": rotated / size}
        return {"rope_type": "proportional", "rope_theta": theta, **share}

    return {
        "canvas_length": cfg.canvas_length,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "diffusion_gemma_text",
            "vocab_size": cfg.vocab_size,
            "hidden_size": cfg.hidden_size,
            "intermediate_size": cfg.ffn_size,
            "num_hidden_layers": cfg.num_layers,
            "num_attention_heads": cfg.num_heads,
            "num_key_value_heads": cfg.num_kv_heads,
            "head_dim": cfg.head_dim,
            "num_global_key_value_heads": cfg.global_num_kv_heads,
            "global_head_dim": cfg.global_head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": cfg.norm_eps,
            "rope_parameters": {
                "sliding_attention": rope(cfg.rope_theta, cfg.rotary_dim, cfg.head_dim),
                "full_attention": rope(
                    cfg.global_rope_theta, cfg.global_rotary_dim, cfg.global_head_dim
                ),
            },
            "attention_bias": False,
            "sliding_window": cfg.window,
            "layer_types": [
                "sliding_attention" if slides else "full_attention" for slides in cfg.sliding
            ],
            "final_logit_softcapping": cfg.logit_cap,
            "max_position_embeddings": cfg.max_position,
            "num_experts": cfg.num_experts,
            "top_k_experts": cfg.experts_per_token,
            "moe_intermediate_size": cfg.expert_size,
            "use_bidirectional_attention": "vision",
            "tie_word_embeddings": True,
        },
    }


def _decoder(cfg: Any) -> dict[str, Any]:
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.ffn_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": _scaling(cfg),
        "max_position_embeddings": cfg.max_position,
        "tie_word_embeddings": cfg.tie_embeddings,
    }


def _scaling(cfg: Any) -> dict[str, Any] | None:
    scaling = cfg.rope_scaling
    if scaling is None:
        return None
    entries = dataclasses.asdict(scaling)
    longest = entries.pop("original_max_position")
    kind = "yarn" if "beta_fast" in entries else "llama3"
    return {"rope_type": kind, **entries, "original_max_position_embeddings": longest}


WRITERS: dict[str, Callable[[Any, Layers], dict[str, Any]]] = {
    "hf": _hf,
    "qwen_moe": _qwen_moe,
    "llada_moe": _llada_moe,
    "llada": _llada,
    "llada2": _llada2,
    "dflash": _dflash,
    "diffusion_gemma": _diffusion_gemma,
}
