"""A published folder as the NumPy reference reads it: facts, float64 tensors, a merged adapter.

With json and safetensors alone. A layer's tensors are handed out under Llama's names, so that
`families` states each piece of arithmetic once.
"""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray
Weights = dict[str, Array]

_LLADA_NAMES = {  # of a block's tensors, in Llama's words
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


def read_facts(folder: Path) -> SimpleNamespace:
    """A published config.json as the facts that the arithmetic needs."""
    config = json.loads((folder / "config.json").read_text())
    kind = config["architectures"][0]
    facts = _llada_facts(config) if kind == "LLaDAModelLM" else _named_facts(config, kind)
    facts.kind, facts.eps = kind, config["rms_norm_eps"]
    rope = {**config, **(config.get("rope_parameters") or {})}
    facts.theta = rope["rope_theta"]
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    facts.scaling = scaling if scaling.get("rope_type", scaling.get("type")) == "llama3" else None
    facts.rotated = config.get("rotary_dim") or int(
        facts.size * rope.get("partial_rotary_factor", 1.0)
    )
    return facts


def _llada_facts(config: dict[str, Any]) -> SimpleNamespace:
    heads, width, at = config["n_heads"], config["d_model"], "model.transformer."
    return SimpleNamespace(
        layers=config["n_layers"],
        heads=heads,
        kv_heads=config["n_kv_heads"] or (1 if config["multi_query_attention"] else heads),
        size=width // heads,
        tied=config["weight_tying"],
        routed=[False] * config["n_layers"],
        logit_scale=1 / math.sqrt(width) if config["scale_logits"] else 1.0,
        embed=at + "wte.weight",
        norm=at + "ln_f.weight",
        head=at + "ff_out.weight",
    )


def _named_facts(config: dict[str, Any], kind: str) -> SimpleNamespace:
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    facts = SimpleNamespace(
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        size=config.get("head_dim") or config["hidden_size"] // heads,
        tied=config["tie_word_embeddings"],
        routed=[False] * layers,
        logit_scale=1.0,
        embed="model.embed_tokens.weight",
        norm="model.norm.weight",
        head="lm_head.weight",
    )
    if "num_experts" not in config:
        return facts
    facts.num_experts = config["num_experts"]
    facts.chosen = config["num_experts_per_tok"]
    facts.normalise = config["norm_topk_prob"]
    if kind == "LLaDAMoEModelLM":
        facts.routed = [bool(flag) for flag in config["moe_layer_freq"]]
        facts.normalise = False  # whatever the config says
    elif kind == "LLaDA2MoeModelLM":
        facts.embed = "model.word_embeddings.weight"
        facts.routed = [i >= config["first_k_dense_replace"] for i in range(layers)]
        facts.groups, facts.kept_groups = config.get("n_group"), config.get("topk_group")
        facts.scale = config["routed_scaling_factor"]
        facts.capacity = config.get("expert_capacity") or 0
        facts.routing_block = config.get("block_size")
    else:
        step, dense = config["decoder_sparse_step"], config["mlp_only_layers"]
        facts.routed = [(i + 1) % step == 0 and i not in dense for i in range(layers)]
    return facts


def read_weights(folder: Path) -> Weights:
    """Every tensor of a folder, in float64."""
    weights: Weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= {name: t.astype(np.float64) for name, t in load_file(path).items()}
    return weights


def merged(weights: Weights, adapter: Path) -> Weights:
    """The weights with a LoRA adapter added: `W + (alpha / r) B A`."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    weights = dict(weights)
    for name, down in tensors.items():
        if "lora_A" not in name:
            continue
        module = name.split(".lora_A")[0].removeprefix("base_model.model.")
        rank = _of_module(config["rank_pattern"], module, config["r"])
        alpha = _of_module(config["alpha_pattern"], module, config["lora_alpha"])
        factor = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        up = tensors[name.replace("lora_A", "lora_B")].astype(np.float64)
        weights[module + ".weight"] = weights[module + ".weight"] + factor * up @ down
    return weights


def _of_module(pattern: dict[str, Any], module: str, usual: Any) -> Any:
    found = (v for key, v in pattern.items() if re.fullmatch(rf"(.*\.)?({key})", module))
    return next(found, usual)


def layer_weights(facts: SimpleNamespace, weights: Weights, i: int) -> Weights:
    """One layer's tensors under Llama's names; a fused projection is cut up."""
    if facts.kind == "LLaDAModelLM":
        at = f"model.transformer.blocks.{i}."
        return {
            f"{ours}.{leaf}": weights[f"{at}{theirs}.{leaf}"]
            for ours, theirs in _LLADA_NAMES.items()
            for leaf in ("weight", "bias")
            if f"{at}{theirs}.{leaf}" in weights
        }
    at = f"model.layers.{i}."
    layer = {n.removeprefix(at): tensor for n, tensor in weights.items() if n.startswith(at)}
    if facts.kind != "LLaDA2MoeModelLM":
        return layer
    ends = np.cumsum([facts.heads, facts.kv_heads]) * facts.size
    for leaf in ("weight", "bias"):
        if (fused := layer.get(f"attention.query_key_value.{leaf}")) is not None:
            for name, part in zip("qkv", np.split(fused, ends), strict=True):
                layer[f"self_attn.{name}_proj.{leaf}"] = part
        if (out := layer.get(f"attention.dense.{leaf}")) is not None:
            layer[f"self_attn.o_proj.{leaf}"] = out
    layer["self_attn.q_norm.weight"] = layer["attention.query_layernorm.weight"]
    layer["self_attn.k_norm.weight"] = layer["attention.key_layernorm.weight"]
    return layer
