"""Tiny random DFlash drafts in the published forms, written without code under test.

Names and shapes are those of z-lab's files; `rename` gives the other two spellings of them.
"""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from tests.oracles.checkpoints import random_tensors, write_tiny, write_words

# Of a target from `tiny_configs.CONFIGS["qwen3"]`: width 40, 50 tokens, 3 layers, of which two are
# read, not in their order, and the last before the final norm.
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "vocab_size": 50,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 256,
    "num_target_layers": 3,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "dflash_config": {"target_layer_ids": [2, 0], "mask_token_id": 47, "block_size": 5},
}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# What the layers see -> entries of the config: those at the top, and those of dflash_config.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "sliding": (SLIDING, {"causal": False}),
    "inclusive": (SLIDING, {"causal": False, "window_inclusive": True}),
    "sliding_causal": (SLIDING, {}),
    "mixed": ({**MIXED, "attention_bias": True}, {}),
    "yarn": ({"rope_scaling": YARN}, {}),
}

Spelling = Literal["z-lab", "automodel", "muse", "muse, prefixed"]


def config_of(variant: str = "full", **changes: Any) -> dict[str, Any]:
    """The config of a variant; `changes` are entries at the top, `...` removes one."""
    top, own = VARIANTS[variant]
    config = {**CONFIG, **top, "dflash_config": {**CONFIG["dflash_config"], **own}, **changes}
    return {key: value for key, value in config.items() if value is not ...}


def draft_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of z-lab's files."""
    width, inner, size = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    taps = config["dflash_config"]["target_layer_ids"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(taps) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}."
        shapes |= {
            at + "input_layernorm.weight": (width,),
            at + "post_attention_layernorm.weight": (width,),
            at + "self_attn.q_proj.weight": (heads * size, width),
            at + "self_attn.k_proj.weight": (kv_heads * size, width),
            at + "self_attn.v_proj.weight": (kv_heads * size, width),
            at + "self_attn.o_proj.weight": (width, heads * size),
            at + "self_attn.q_norm.weight": (size,),
            at + "self_attn.k_norm.weight": (size,),
            at + "mlp.gate_proj.weight": (inner, width),
            at + "mlp.up_proj.weight": (inner, width),
            at + "mlp.down_proj.weight": (width, inner),
        }
        if config["attention_bias"]:
            for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows * size,)
            shapes[at + "self_attn.o_proj.bias"] = (width,)
    return shapes


def renamed(tensors: dict[str, np.ndarray], spelling: Spelling) -> dict[str, np.ndarray]:
    """The same tensors under another project's names."""
    muse = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    if spelling.startswith("muse"):
        tensors = {muse.get(name, name): tensor for name, tensor in tensors.items()}
    if spelling in ("automodel", "muse, prefixed"):
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return tensors


def write_draft(
    folder: Path,
    variant: str = "full",
    *,
    seed: int = 31,
    dtype: str = "float32",
    spelling: Spelling = "z-lab",
    **changes: Any,
) -> Path:
    """Write a draft of a variant and return its folder."""
    config = config_of(variant, **changes)
    tensors = random_tensors(draft_shapes(config), seed, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(renamed(tensors, spelling), folder / "model.safetensors", {"format": "pt"})
    return folder


def write_pair(folder: Path, *variants: str) -> Path:
    """Write `target`, which reads words, and drafts of it: `draft`, or one a variant."""
    write_tiny("qwen3", folder / "target", seed=40)
    write_words(folder / "target", CONFIG["vocab_size"], "<|MASK|>")
    for variant in variants:
        write_draft(folder / variant, variant)
    if not variants:
        write_draft(folder / "draft")
    return folder
