"""Tiny configurations of every family, spelled as the published `config.json` files are.

Sizes are chosen so that mistakes show: heads that do not fill the width where the family allows it
(6 * 16 != 40), three query heads to a KV head, more than ten experts (of whose names "10" sorts
before "2"), groups and a capacity that exclude some of what a row would choose.
"""

from typing import Any

_COMMON = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_OWN_HEAD = {"hidden_size": 40, "head_dim": 16, "attention_bias": False}  # 6 * 16 != 40
_MASK = {"mask_token_id": 47, "bos_token_id": 44, "eos_token_id": 45, "pad_token_id": 44}
_NO_WINDOW = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 3}
_DREAM = {"architectures": ["DreamModel"], "model_type": "Dream", "use_mrope": False}
_FAST = {"architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen"}
_EXPERTS = {
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
_SPARSE = {**_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []}
_LLADA2 = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    **_COMMON,
    **_EXPERTS,
    "hidden_size": 40,
    "head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_router_enable_expert_bias": True,
    "n_group": 4,
    "norm_head": False,
    "num_shared_experts": 1,
    "pad_token_id": 45,
    "partial_rotary_factor": 0.5,
    "rope_theta": 600000,
    "rotary_dim": 8,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "topk_group": 2,
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_sliding_window": False,
}
_LLADA_MOE = {
    "architectures": ["LLaDAMoEModelLM"],
    "model_type": "lladamoe",
    **{key: value for key, value in _COMMON.items() if key != "intermediate_size"},
    "attention_bias": False,
    "clip_qkv": None,
    "dense_intermediate_size": 56,
    "expert_intermediate_size": 24,
    "moe_layer_freq": [0, 1, 1],
    "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax",
    "norm_topk_prob": None,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "pad_token_id": 45,
    "partial_rotary_factor": 1,
    "qk_layernorm": True,
    "rope_theta": 50000,
    "routed_scaling_factor": 1,
    "router_num_group": None,
    "router_topk_group": None,
    "shared_expert_intermediate_size": None,
}
_LLADA = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 48,
    "embedding_size": 50,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "max_sequence_length": 256,
    "mlp_hidden_size": 56,
    "mlp_ratio": 4,
    "multi_query_attention": None,
    "n_heads": 6,
    "n_kv_heads": 2,
    "n_layers": 3,
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "vocab_size": 50,
    "weight_tying": False,
    "mask_token_id": 47,
    "eos_token_id": 45,
    "pad_token_id": 45,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _named(architecture: str, model_type: str) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type}


CONFIGS: dict[str, dict[str, Any]] = {
    "llada": _LLADA,
    "dream": {**_DREAM, **_COMMON, **_NO_WINDOW, **_MASK},
    "diffucoder": {**_DREAM, **_COMMON, **_NO_WINDOW, **_MASK},
    "dream_reasoner": {
        **_named("DreamForCausalLM", "Dream"),
        **_COMMON,
        **_OWN_HEAD,
        **_MASK,
        "block_size": 32,
    },
    "stable_diffcoder": {
        **_named("StableDiffcoderForCausalLM", "llama"),
        **_COMMON,
        "auto_map": {
            "AutoModelForCausalLM": "modeling_stable_diffcoder.StableDiffcoderForCausalLM"
        },
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 500000.0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
    },
    "fast_dllm_v2": {
        **_FAST,
        **_COMMON,
        **_NO_WINDOW,
        "bd_size": 32,
        "layer_types": ["full_attention"] * 3,
    },
    "sdar": {**_named("SDARForCausalLM", "sdar"), **_COMMON, **_OWN_HEAD, **_MASK, "block_size": 4},
    "sdar_moe": {
        **_named("SDARMoeForCausalLM", "sdar_moe"),
        **_COMMON,
        **_OWN_HEAD,
        **_SPARSE,
        **_MASK,
    },
    "llada2": _LLADA2,
    "llada2_2": {
        **_LLADA2,
        "rope_theta": 3000000,
        "expert_capacity": 5,
        "block_size": 4,
        "delete_token_id": 48,
        "split_token_id": 49,
    },
    "qwen3": {**_named("Qwen3ForCausalLM", "qwen3"), **_COMMON, **_OWN_HEAD, "eos_token_id": 45},
    "qwen3_moe": {
        **_named("Qwen3MoeForCausalLM", "qwen3_moe"),
        **_COMMON,
        **_OWN_HEAD,
        **_SPARSE,
        "eos_token_id": 45,
    },
    "llama31": {
        **_named("LlamaForCausalLM", "llama"),
        **_COMMON,
        "attention_bias": False,
        "head_dim": 16,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3,
        "bos_token_id": 44,
        "eos_token_id": [45, 46],
    },
    "illada": {
        **_named("ILLaDAForCausalLM", "illada"),
        **_COMMON,
        "attention_bias": False,
        "mlp_bias": False,
        "layer_norm_eps": None,
        "resid_pdrop": 0.0,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
    },
    "llada_moe": _LLADA_MOE,
    "a2d_qwen3": {
        **_named("A2DQwen3LMHeadModel", "a2d-qwen3"),
        **_COMMON,
        **_OWN_HEAD,
        **_NO_WINDOW,
        "tie_word_embeddings": True,
        "eos_token_id": 45,
    },
    "a2d_qwen2": {
        **_named("A2DQwen2LMHeadModel", "a2d-qwen2"),
        **_COMMON,
        **_NO_WINDOW,
        "eos_token_id": 45,
    },
    "a2d_llama": {
        **_named("A2DLlamaLMHeadModel", "a2d-llama"),
        **_COMMON,
        "attention_bias": False,
        "head_dim": 16,
        "mlp_bias": False,
        "eos_token_id": 45,
    },
    "open_dcoder": {
        **_named("Qwen2ForCausalLM", "qwen2"),
        **_COMMON,
        **_NO_WINDOW,
        "eos_token_id": 45,
    },
}

# Families whose config.json names no mask token: the tokenizer does.
MASK_TOKENS = {
    "fast_dllm_v2": "|<MASK>|",
    "llada2": "<|mask|>",
    "llada2_2": "<|mask|>",
    "llada_moe": "<|mask|>",
    "a2d_qwen3": "<|mask|>",
    "a2d_qwen2": "<|mask|>",
    "a2d_llama": "<|mask|>",
    "open_dcoder": "[MASK]",
}
