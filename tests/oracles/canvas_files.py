"""Tiny random DiffusionGemma checkpoints, spelled as the release is, in four shapes.

The shapes are those that the addendum of the model's note asks for: the release's 5:1 pattern, one
KV head, more global KV heads than sliding ones, windows of 3 to 16 below and above the canvas. No
factor is left at 1, and encoder and decoder have factors of their own. `gain` damps every branch:
at 1 a net is chaotic, at 0.2 its canvases converge.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles.checkpoints import _uniform, write_files

_S, _F = "sliding_attention", "full_attention"


def _rope(share: float = 0.25, sliding: float = 1e4, full: float = 1e6) -> dict[str, Any]:
    return {
        _S: {"rope_type": "default", "rope_theta": sliding},
        _F: {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": full},
    }


_BASE: dict[str, Any] = {
    "model_type": "diffusion_gemma_text",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_experts": 6,
    "top_k_experts": 2,
    "sliding_window": 8,
    "use_bidirectional_attention": "vision",
    "rms_norm_eps": 1e-6,
    "layer_types": [_S, _F, _S, _F],
    "max_position_embeddings": 512,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": _rope(),
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
# Name of a shape -> what differs under `text_config`, and the length of a canvas.
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "base": ({}, 12),
    "pattern": (
        {
            "num_hidden_layers": 6,
            "layer_types": [_S] * 5 + [_F],
            "num_key_value_heads": 1,
            "head_dim": 8,
            "num_global_key_value_heads": 2,
            "global_head_dim": 16,
            "sliding_window": 5,
            "num_experts": 5,
            "top_k_experts": 3,
            "vocab_size": 131,
            "rope_parameters": _rope(0.5),
        },
        8,
    ),
    "groups": (
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "num_global_key_value_heads": 2,
            "global_head_dim": 16,
            "sliding_window": 16,
            "num_experts": 8,
            "top_k_experts": 1,
            "vocab_size": 128,
        },
        10,
    ),
    "numbers": (
        {
            "layer_types": [_F, _S, _S, _F],
            "sliding_window": 3,
            "rms_norm_eps": 1e-5,
            "final_logit_softcapping": 5.0,
            "hidden_size": 48,
            "intermediate_size": 40,
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "global_head_dim": 24,
            "rope_parameters": _rope(0.25, 5e3, 2e5),
        },
        7,
    ),
}
GENERATION: dict[str, Any] = {
    "max_denoising_steps": 6,
    "t_min": 0.3,
    "t_max": 0.9,
    "stability_threshold": 2,
    "confidence_threshold": 0.01,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.2},
    "max_new_tokens": 256,
    "eos_token_id": [1, 90],
    "pad_token_id": 0,
}


def config_of(shape: str = "base", /, **text: Any) -> dict[str, Any]:
    """The `config.json` of a shape; `text` are entries of its text_config."""
    changes, canvas = SHAPES[shape]
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
        "canvas_length": canvas,
        "image_token_id": 96,
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 16},
        "text_config": {**_BASE, **changes, **text},
    }


def tensor_shapes(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every text tensor that the release would store, experts packed."""
    D, F, M, E = (
        text[key]
        for key in ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_experts")
    )
    mlp = {"gate_proj.weight": (F, D), "up_proj.weight": (F, D), "down_proj.weight": (D, F)}
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (text["vocab_size"], D),
        "norm.weight": (D,),
        "self_conditioning.pre_norm.weight": (D,),
        **{f"self_conditioning.{name}": shape for name, shape in mlp.items()},
    }
    encoder = {}
    for i, kind in enumerate(text["layer_types"]):
        G, H = text["num_key_value_heads"], text["head_dim"]
        if kind == _F:
            G, H = text["num_global_key_value_heads"], text["global_head_dim"]
        N, at = text["num_attention_heads"], f"layers.{i}."
        attention: dict[str, tuple[int, ...]] = {
            "q_proj.weight": (N * H, D),
            "k_proj.weight": (G * H, D),
            **({} if kind == _F else {"v_proj.weight": (G * H, D)}),
            "o_proj.weight": (D, N * H),
            "q_norm.weight": (H,),
            "k_norm.weight": (H,),
        }
        shapes |= {f"{at}self_attn.{name}": shape for name, shape in attention.items()}
        shapes |= {f"{at}mlp.{name}": shape for name, shape in mlp.items()}
        shapes |= {
            at + "router.proj.weight": (E, D),
            at + "router.scale": (D,),
            at + "router.per_expert_scale": (E,),
            at + "experts.gate_up_proj": (E, 2 * M, D),
            at + "experts.down_proj": (E, D, M),
            at + "layer_scalar": (1,),
        }
        for norm in (
            *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"),
            *("post_feedforward_layernorm", "pre_feedforward_layernorm_2"),
            *("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
        ):
            shapes[f"{at}{norm}.weight"] = (D,)
        encoder[f"model.encoder.language_model.layers.{i}.layer_scalar"] = (1,)
    return {**{f"model.decoder.{name}": shape for name, shape in shapes.items()}, **encoder}


def random_tensors(shape: str = "base", seed: int = 0, gain: float = 1.0) -> dict[str, np.ndarray]:
    """Weights by name, float32."""
    tensors = {}
    for name, size in tensor_shapes(config_of(shape)["text_config"]).items():
        value = _uniform(seed, name, size)
        if len(size) == 1:  # norms, scales, factors
            value = 1 + 0.23 * value
        elif "embed_tokens" in name:
            value = 0.9 * value
        else:
            value = value / math.sqrt(size[-1])
        branches = ("post_attention_layernorm.", "post_feedforward_layernorm.", "conditioning.down")
        damped = gain if any(part in name for part in branches) else 1.0
        tensors[name] = (damped * value).astype(np.float32)
    return tensors


def write_canvas(
    folder: Path, shape: str = "base", seed: int = 0, gain: float = 1.0, **text: Any
) -> Path:
    """Write a checkpoint with its generation_config and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape, **text)))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    write_files(folder, random_tensors(shape, seed, gain), None)
    return folder
