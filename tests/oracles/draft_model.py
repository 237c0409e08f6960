"""What a DFlash draft computes, in NumPy float64 on the file's own tensors, from its equations.

One sequence, no cache: every key of the context is made anew. Nothing of the packages under test is
used; `test_draft_model` holds it to what transformers says.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray


def read_draft(folder: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """A draft of z-lab's spelling: its config and its tensors in float64."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    return config, {name: tensor.astype(np.float64) for name, tensor in tensors.items()}


def draft_hidden(folder: Path, features: Array, rows: Array) -> Array:
    """Rows [B D] after the final norm.

    Args:
        features: Joined hidden states of the target [L F], of the positions 0 to L - 1.
        rows: Embedding of the anchor, at L, and of the masks after it [B D].
    """
    config, weights = read_draft(folder)
    own, eps = config["dflash_config"], config["rms_norm_eps"]
    L, B = len(features), len(rows)
    context = norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    at, x = np.arange(L + B), rows
    kinds = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
    for i, kind in enumerate(kinds):
        layer = {
            name.removeprefix(f"layers.{i}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{i}.")
        }
        slides = kind == "sliding_attention"
        ahead = at[None, :] - at[L:, None]
        seen = np.ones((B, L + B), bool)
        if slides:
            reach = config["sliding_window"] + own.get("window_inclusive", False)
            seen &= np.abs(ahead) < reach
        if own.get("causal", slides):
            seen &= ahead <= 0
        normed = norm(x, layer["input_layernorm.weight"], eps)
        x = x + attention(config, layer, normed, np.concatenate([context, normed]), at, seen)
        z = norm(x, layer["post_attention_layernorm.weight"], eps)
        gate = z @ layer["mlp.gate_proj.weight"].T
        both = gate / (1 + np.exp(-gate)) * (z @ layer["mlp.up_proj.weight"].T)
        x = x + both @ layer["mlp.down_proj.weight"].T
    return norm(x, weights["norm.weight"], eps)


def attention(
    config: dict[str, Any], layer: dict[str, Array], x: Array, keys: Array, at: Array, seen: Array
) -> Array:
    """Rows `x`, the last of `keys`, attend to those of `keys` that are `seen`."""
    size, eps = config["head_dim"], config["rms_norm_eps"]
    share = config["num_attention_heads"] // config["num_key_value_heads"]

    def projected(rows: Array, name: str) -> Array:
        bias = layer.get(f"self_attn.{name}_proj.bias", 0)
        return (rows @ layer[f"self_attn.{name}_proj.weight"].T + bias).reshape(len(rows), -1, size)

    q = norm(projected(x, "q"), layer["self_attn.q_norm.weight"], eps)
    k = norm(projected(keys, "k"), layer["self_attn.k_norm.weight"], eps)
    q, k, v = turned(q, at[-len(x) :], config), turned(k, at, config), projected(keys, "v")
    out = np.empty_like(q)
    for h in range(q.shape[1]):
        score = q[:, h] @ k[:, h // share].T / np.sqrt(size)
        weight = np.where(seen, np.exp(score - score.max(axis=1, keepdims=True)), 0)
        out[:, h] = weight / weight.sum(axis=1, keepdims=True) @ v[:, h // share]
    bias = layer.get("self_attn.o_proj.bias", 0)
    return out.reshape(len(x), -1) @ layer["self_attn.o_proj.weight"].T + bias


def norm(x: Array, scale: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale


def turned(x: Array, positions: Array, config: dict[str, Any]) -> Array:
    """Rotary embedding of [T N H], components j and j + H/2 in pairs."""
    half = x.shape[-1] // 2
    frequencies, gain = rotation(half, config["rope_theta"], config.get("rope_scaling"))
    angle = (positions[:, None] * frequencies)[:, None]
    a, b = x[..., :half], x[..., half:]
    both = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
    return gain * np.concatenate(both, axis=-1)


def rotation(half: int, theta: float, scaling: dict[str, Any] | None) -> tuple[Array, float]:
    """Frequencies of the pairs, and what rotated rows are multiplied by.

    Of YaRN (arXiv 2309.00071, §3.2, §3.4) as published models use it: pairs that turn more than 32
    times in the original length stay, those that turn less than once are slowed by the factor, and
    between the first of these and the last of those, in whole pairs, there is a ramp.
    """
    plain = theta ** (-np.arange(half) / half)
    if scaling is None:
        return plain, 1.0
    assert scaling["rope_type"] == "yarn"
    factor, length = scaling["factor"], scaling["original_max_position_embeddings"]
    pair = np.log(length / (2 * np.pi * np.array([32.0, 1.0]))) * half / np.log(theta)
    low, high = max(np.floor(pair[0]), 0), min(np.ceil(pair[1]), 2 * half - 1)
    ramp = np.clip((np.arange(half) - low) / (high - low), 0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, 1 + 0.1 * np.log(factor)
