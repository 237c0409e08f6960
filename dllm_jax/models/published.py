"""Published configs by hub name, for `random:NAME`: real sizes without real weights.

Source: config.json of these repositories on the Hugging Face hub, entries that say nothing of the
network or of its tokens left out. What could not be seen: theta of DreamReasoner and LLaDA2.2-mini,
whether SDAR-1.7B's head is tied (its siblings' are not), the length of DMax-16B and of the drafter,
theta of iLLaDA and LLaDA-MoE, and the mask id of Open-dCoder.
"""

from typing import Any

Config = dict[str, Any]


def _hf(
    architecture: str,
    model_type: str,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    **more: Any,
) -> Config:
    """A config with Llama's names."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


_ENDS = {"bos_token_id": 151643, "eos_token_id": 151643, "pad_token_id": 151643}  # of Qwen
_QWEN2 = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28}
_DREAM = {**_QWEN2, **_ENDS, "use_mrope": False, "mask_token_id": 151666}
_QWEN3 = {**_ENDS, "eos_token_id": 151645, "attention_bias": False, "head_dim": 128}
_SDAR = {**_QWEN3, "mask_token_id": 151669, "max_position_embeddings": 32768}
_EXPERTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _dream(positions: int = 131072) -> Config:
    sizes = (28, 3584, 28, 4, 18944, 152064)
    return _hf("DreamModel", "Dream", *sizes, **_DREAM, max_position_embeddings=positions)


def _fast_dllm(layers: int, width: int, heads: int, ffn: int, vocab: int, *, tied: bool) -> Config:
    sizes = (layers, width, heads, 2 if tied else 4, ffn, vocab)
    more = {**_QWEN2, **_ENDS, "eos_token_id": 151645, "tie_word_embeddings": tied}
    names = ("Fast_dLLM_QwenForCausalLM", "Fast_dLLM_Qwen")
    return _hf(*names, *sizes, **more, max_position_embeddings=32768, bd_size=32)


def _sdar(layers: int, width: int, heads: int, ffn: int) -> Config:
    return _hf("SDARForCausalLM", "sdar", layers, width, heads, 8, ffn, 151936, **_SDAR)


def _a2d(base: Config) -> Config:
    """An autoregressive model's config as A2D writes it."""
    kind = base["architectures"][0].removesuffix("ForCausalLM")
    names = {"architectures": [f"A2D{kind}LMHeadModel"], "model_type": f"a2d-{kind.lower()}"}
    return {**base, **names}


def _qwen3(layers: int, width: int, heads: int, ffn: int, *, tied: bool) -> Config:
    more = {**_QWEN3, "tie_word_embeddings": tied, "max_position_embeddings": 40960}
    return _hf("Qwen3ForCausalLM", "qwen3", layers, width, heads, 8, ffn, 151936, **more)


def _dflash(taps: list[int], layers: int, width: int, heads: int, ffn: int) -> Config:
    sizes = (layers, width, heads, 8, ffn, 151936)
    own = {"target_layer_ids": taps, "mask_token_id": 151669, "block_size": 16}
    more = {**_QWEN3, "max_position_embeddings": 40960, "dflash_config": own}
    return _hf("DFlashDraftModel", "qwen3", *sizes, **more)


def _llada2(*, flash: bool = False, **more: Any) -> Config:
    sizes = (32, 4096, 32, 4, 9216) if flash else (20, 2048, 16, 4, 5120)
    config = _hf("LLaDA2MoeModelLM", "llada2_moe", *sizes, 157184)
    return {
        **config,
        "head_dim": 128,
        "rope_theta": 600000,
        "partial_rotary_factor": 0.5,
        "rotary_dim": 64,
        "max_position_embeddings": 32768,
        "first_k_dense_replace": 1,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024 if flash else 512,
        "num_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "norm_head": False,
        "use_bias": False,
        "use_qkv_bias": False,
        "use_qk_norm": True,
        "use_sliding_window": False,
        "eos_token_id": 156892,
        "pad_token_id": 156892,
        **more,
    }


_LLADA_8B: Config = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "mlp_ratio": 4,
    "vocab_size": 126464,
    "embedding_size": 126464,
    "max_sequence_length": 4096,
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "alibi": False,
    "activation_type": "silu",
    "block_type": "llama",
    "block_group_size": 1,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "attention_layer_norm": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "multi_query_attention": None,
    "scale_logits": False,
    "weight_tying": False,
    "mask_token_id": 126336,
    "eos_token_id": 126081,
    "pad_token_id": 126081,
}
_LLADA_MOE = _hf(
    *("LLaDAMoEModelLM", "llada"),
    *(16, 2048, 16, 16, 8192, 157184),
    **{"rope_theta": 50000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    **{"num_experts": 64, "num_experts_per_tok": 8, "expert_intermediate_size": 1024},
    **{"eos_token_id": 156892, "pad_token_id": 156892},
)
_DREAM_REASONER = _hf(
    *("DreamForCausalLM", "Dream"),
    *(36, 4096, 32, 8, 12288, 151936),
    **_SDAR,
    block_size=32,
)
_SEED: Config = {  # sizes, length and ends of Seed-Coder-8B
    **_hf("StableDiffcoderForCausalLM", "llama", 32, 4096, 32, 8, 14336, 155136),
    **{"rope_theta": 500000.0, "max_position_embeddings": 8192},
    **{"attention_bias": False, "mlp_bias": False},
    **{"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2},
}
_CLASS = "modeling_stable_diffcoder.StableDiffcoderForCausalLM"
_STABLE_DIFFCODER = {**_SEED, "auto_map": {"AutoModelForCausalLM": _CLASS}}
_ILLADA_NAMES = {"architectures": ["ILLaDAForCausalLM"], "model_type": "illada"}
_ILLADA = {**_SEED, **_ILLADA_NAMES, "tie_word_embeddings": True}
_MOE_SIZES = (48, 2048, 32, 4, 6144, 151936)
_SDAR_MOE = _hf("SDARMoeForCausalLM", "sdar_moe", *_MOE_SIZES, **_SDAR, **_EXPERTS)
_QWEN3_MOE = _hf("Qwen3MoeForCausalLM", "qwen3_moe", *_MOE_SIZES, **_QWEN3, **_EXPERTS)
_QWEN3_MOE["max_position_embeddings"] = 40960
_LLAMA = _hf(
    *("LlamaForCausalLM", "llama"),
    *(32, 4096, 32, 8, 14336, 128256),
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling={
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    max_position_embeddings=131072,
    attention_bias=False,
    mlp_bias=False,
    bos_token_id=128000,
    eos_token_id=[128001, 128008, 128009],
)
_ROUTED: Config = {  # LLaDA2.2
    "expert_capacity": 48,
    "block_size": 32,
    "delete_token_id": 156930,
    "split_token_id": 156931,
    "rope_theta": 3000000,
    "max_position_embeddings": 131072,
}

_DIFFUSION_GEMMA: Config = {
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "model_type": "diffusion_gemma",
    "canvas_length": 256,
    "eos_token_id": [1, 106, 50],
    "boi_token_id": 255999,
    "eoi_token_id": 258882,
    "image_token_id": 258880,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "diffusion_gemma_text",
        "vocab_size": 262144,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1000000.0,
                "partial_rotary_factor": 0.25,
            },
        },
        "attention_bias": False,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision",
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
}

_QWEN2_CODER = {
    **_hf("Qwen2ForCausalLM", "qwen2", 24, 896, 14, 2, 4864, 151936, **_QWEN2, **_ENDS),
    **{"eos_token_id": 151645, "tie_word_embeddings": True, "max_position_embeddings": 32768},
}

PUBLISHED: dict[str, Config] = {
    **dict.fromkeys(
        ("GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-1.5"), _LLADA_8B
    ),
    **dict.fromkeys(("Dream-org/Dream-v0-Base-7B", "Dream-org/Dream-v0-Instruct-7B"), _dream()),
    **dict.fromkeys((f"apple/DiffuCoder-7B-{x}" for x in ("Base", "Instruct", "cpGRPO")), _dream()),
    **dict.fromkeys(("GSAI-ML/iLLaDA-8B-Base", "GSAI-ML/iLLaDA-8B-Instruct"), _ILLADA),
    **dict.fromkeys(
        (f"inclusionAI/LLaDA-MoE-7B-A1B-{x}" for x in ("Base", "Instruct")), _LLADA_MOE
    ),
    **{
        f"dllm-hub/{name}-diffusion-{kind}-v0.1": _a2d(base)
        for name, base in (
            ("Qwen3-0.6B", _qwen3(28, 1024, 16, 3072, tied=True)),
            ("Qwen2.5-Coder-0.5B-Instruct", _QWEN2_CODER),
        )
        for kind in ("mdlm", "bd3lm")
    },
    "fredzzp/open-dcoder-0.5B": {**_QWEN2_CODER, "mask_token_id": 151665},
    "Dream-org/DreamReasoner-8B": _DREAM_REASONER,
    "ByteDance-Seed/Stable-DiffCoder-8B-Base": _STABLE_DIFFCODER,
    "ByteDance-Seed/Stable-DiffCoder-8B-Instruct": _STABLE_DIFFCODER,
    "Efficient-Large-Model/Fast_dLLM_v2_1.5B": _fast_dllm(28, 1536, 12, 8960, 151936, tied=True),
    "Efficient-Large-Model/Fast_dLLM_v2_7B": _fast_dllm(28, 3584, 28, 18944, 152064, tied=False),
    "JetLM/SDAR-1.7B-Chat": _sdar(28, 2048, 16, 6144),
    "JetLM/SDAR-4B-Chat": _sdar(36, 2560, 32, 9728),
    "JetLM/SDAR-8B-Chat": _sdar(36, 4096, 32, 12288),
    "JetLM/SDAR-8B-Chat-b32": _sdar(36, 4096, 32, 12288),
    "JetLM/SDAR-30B-A3B-Chat": _SDAR_MOE,
    "JetLM/SDAR-30B-A3B-Chat-b32": _SDAR_MOE,
    "inclusionAI/LLaDA2.0-mini": _llada2(),
    "inclusionAI/LLaDA2.0-mini-CAP": _llada2(),
    "inclusionAI/LLaDA2.0-flash": _llada2(flash=True),
    "inclusionAI/LLaDA2.0-flash-CAP": _llada2(flash=True),
    "inclusionAI/LLaDA2.1-mini": _llada2(),
    "inclusionAI/LLaDA2.1-flash": _llada2(flash=True),
    "inclusionAI/LLaDA2.2-mini": _llada2(**_ROUTED),
    "inclusionAI/LLaDA2.2-flash": _llada2(flash=True, **_ROUTED),
    "google/diffusiongemma-26B-A4B-it": _DIFFUSION_GEMMA,
    "Zigeng/DMax-16B": _llada2(model_type="llada2_moe_veomni", max_position_embeddings=16384),
    "Qwen/Qwen3-0.6B": _qwen3(28, 1024, 16, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(28, 2048, 16, 6144, tied=True),
    "Qwen/Qwen3-4B": _qwen3(36, 2560, 32, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3(36, 4096, 32, 12288, tied=False),
    "Qwen/Qwen3-30B-A3B": _QWEN3_MOE,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA,
    "z-lab/Qwen3-4B-DFlash-b16": _dflash([1, 9, 17, 25, 33], 5, 2560, 32, 9728),
    "z-lab/Qwen3-8B-DFlash-b16": _dflash([1, 9, 17, 25, 33], 5, 4096, 32, 12288),
}
