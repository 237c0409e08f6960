"""Tiny random checkpoints of every family, spelled as the published ones are.

The tensor names, config keys, shards and layouts of experts are those of the real folders; NumPy
and safetensors alone write them, so no code under test is used. A tensor's values depend on its
name and the seed only: the same weights come out whatever the shards, the layout of the experts,
the tying, and the version of NumPy (its bit generators are stable, its distributions are not).
"""

import json
import math
import re
import zlib
from pathlib import Path
from typing import Any, Literal

import ml_dtypes  # noqa: F401  (gives NumPy the name "bfloat16")
import numpy as np
from safetensors.numpy import save_file

from tests.oracles.tiny_configs import CONFIGS, MASK_TOKENS

Shards = Literal["round_robin", "layers"] | None
Experts = Literal["split", "merged", "packed"]


def write_tiny(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: Shards = None,
    experts: Experts = "split",
    bias_dtype: str = "float32",
    **config_overrides: Any,
) -> Path:
    """Write a checkpoint and return its folder.

    Args:
        family: A key of `tiny_configs.CONFIGS`.
        dtype: Type of the tensors; values are drawn first and rounded to it.
        shards: None for one file; "round_robin" deals the tensors over three, so that a layer and
            a set of experts lie in all of them; "layers" names a file after each layer.
        experts: One tensor a matrix and expert, one a matrix ("merged", as training frameworks
            write), or two in all with gate and up in one ("packed", as transformers 5 writes).
        bias_dtype: Type of the experts' biases: LLaDA2.1's, or "bfloat16", LLaDA2.0's.
        config_overrides: Entries of config.json; `...` removes one.
    """
    config = {**CONFIGS[family], **config_overrides}
    config = {key: value for key, value in config.items() if value is not ...}
    if experts == "merged" and config["model_type"] == "llada2_moe":
        config["model_type"] = "llada2_moe_veomni"
    tensors = random_tensors(tensor_shapes(config), seed, dtype, bias_dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if (mask := MASK_TOKENS.get(family)) and "mask_token_id" not in config:
        write_words(folder, config["vocab_size"], mask)
    write_files(folder, with_experts(tensors, experts), shards)
    return folder


def write_words(folder: Path, vocab_size: int, mask: str) -> None:
    """A tokenizer of words `w0`, `w1`, ..., the third but last of which is the mask token."""
    mask_id = vocab_size - 3
    words = {f"w{i}": i for i in range(vocab_size) if i != mask_id}
    added = {"id": mask_id, "content": mask, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{**added, **flags}],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w3"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "mask_token": mask}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a published config implies, experts split."""
    kind = config["architectures"][0]
    if kind == "LLaDAModelLM":
        return _llada_shapes(config)
    is_llada2 = kind == "LLaDA2MoeModelLM"
    vocab, width = config["vocab_size"], config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        f"model.{'word_embeddings' if is_llada2 else 'embed_tokens'}.weight": (vocab, width),
        "model.norm.weight": (width,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, width)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes[at + "input_layernorm.weight"] = shapes[at + "post_attention_layernorm.weight"] = (
            width,
        )
        attention = _fused_attention(config) if is_llada2 else _attention(config, kind)
        ffn = (
            _experts(config)
            if has_experts(config, i)
            else _mlp(width, config.get("dense_intermediate_size") or config["intermediate_size"])
        )
        shapes |= {at + name: shape for name, shape in attention.items()}
        shapes |= {f"{at}mlp.{name}": shape for name, shape in ffn.items()}
        shared = config.get("shared_expert_intermediate_size")
        if shared and has_experts(config, i):
            shapes |= _mlp(width, shared, at + "shared_expert.")
    return shapes


def has_experts(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer routes, by the config's own rule."""
    if "first_k_dense_replace" in config:
        return layer >= config["first_k_dense_replace"]
    if "moe_layer_freq" in config:
        return bool(config["moe_layer_freq"][layer])
    if "num_experts" not in config or layer in config["mlp_only_layers"]:
        return False
    return (layer + 1) % config["decoder_sparse_step"] == 0


def _heads(config: dict[str, Any]) -> tuple[int, int, int]:
    heads = config["num_attention_heads"]
    return (
        heads,
        config["num_key_value_heads"],
        config.get("head_dim") or config["hidden_size"] // heads,
    )


_QWEN2 = (
    "DreamModel",
    "Fast_dLLM_QwenForCausalLM",
    "A2DQwen2LMHeadModel",
    "Qwen2ForCausalLM",
)


def _attention(config: dict[str, Any], kind: str) -> dict[str, tuple[int, ...]]:
    heads, kv_heads, size = _heads(config)
    width, at = config["hidden_size"], "self_attn."
    is_qwen2 = kind in _QWEN2
    stated = bool(config.get("attention_bias"))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        shapes[f"{at}{name}_proj.weight"] = (count * size, width)
        if is_qwen2 or stated:
            shapes[f"{at}{name}_proj.bias"] = (count * size,)
    shapes[at + "o_proj.weight"] = (width, heads * size)
    if stated and not is_qwen2:
        shapes[at + "o_proj.bias"] = (width,)
    if not is_qwen2 and config["model_type"] not in ("llama", "illada", "a2d-llama"):
        shapes[at + "q_norm.weight"] = shapes[at + "k_norm.weight"] = (size,)
    return shapes


def _fused_attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    heads, kv_heads, size = _heads(config)
    width, rows, at = config["hidden_size"], (heads + 2 * kv_heads) * size, "attention."
    return {
        at + "query_key_value.weight": (rows, width),
        **({at + "query_key_value.bias": (rows,)} if config["use_qkv_bias"] else {}),
        at + "query_layernorm.weight": (size,),
        at + "key_layernorm.weight": (size,),
        at + "dense.weight": (width, heads * size),
        **({at + "dense.bias": (width,)} if config["use_bias"] else {}),
    }


def _mlp(width: int, inner: int, at: str = "") -> dict[str, tuple[int, ...]]:
    return {
        at + "gate_proj.weight": (inner, width),
        at + "up_proj.weight": (inner, width),
        at + "down_proj.weight": (width, inner),
    }


def _experts(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner, count = (
        config["hidden_size"],
        config.get("expert_intermediate_size") or config["moe_intermediate_size"],
        config["num_experts"],
    )
    shapes: dict[str, tuple[int, ...]] = {"gate.weight": (count, width)}
    if config.get("moe_router_enable_expert_bias"):
        shapes["gate.expert_bias"] = (count,)
    for e in range(count):
        shapes |= _mlp(width, inner, f"experts.{e}.")
    if shared := config.get("num_shared_experts"):
        shapes |= _mlp(width, shared * inner, "shared_experts.")
    return shapes


def _llada_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, heads = config["d_model"], config["n_heads"]
    size = width // heads
    kv_heads = config["n_kv_heads"] or (1 if config["multi_query_attention"] else heads)
    inner = config["mlp_hidden_size"] or config["mlp_ratio"] * width
    vocab, at = config["embedding_size"] or config["vocab_size"], "model.transformer."
    shapes: dict[str, tuple[int, ...]] = {
        at + "wte.weight": (vocab, width),
        at + "ln_f.weight": (width,),
    }
    if not config["weight_tying"]:
        shapes[at + "ff_out.weight"] = (vocab, width)
    for i in range(config["n_layers"]):
        block = f"{at}blocks.{i}."
        shapes[block + "attn_norm.weight"] = shapes[block + "ff_norm.weight"] = (width,)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            shapes[f"{block}{name}_proj.weight"] = (count * size, width)
            if config["include_qkv_bias"]:
                shapes[f"{block}{name}_proj.bias"] = (count * size,)
        shapes[block + "attn_out.weight"] = (width, heads * size)
        shapes[block + "ff_proj.weight"] = shapes[block + "up_proj.weight"] = (inner, width)
        shapes[block + "ff_out.weight"] = (width, inner)
    return shapes


# What a layer adds to the residual stream; small, or rows would grow alike with depth.
_OUTPUT = re.compile(r"(o_proj|attention\.dense|attn_out|down_proj|blocks\.\d+\.ff_out)\.weight")


def random_tensors(
    shapes: dict[str, tuple[int, ...]], seed: int, dtype: str, bias_dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """Values under which logits spread by one to three and rows go to different experts."""
    tensors = {}
    for name, shape in shapes.items():
        value = _uniform(seed, name, shape)
        if name.endswith("expert_bias"):
            tensors[name] = (0.2 * value).astype(bias_dtype)
        elif "norm" in name or name.endswith("ln_f.weight"):
            tensors[name] = (1 + 0.3 * value).astype(dtype)
        elif name.endswith("bias"):
            tensors[name] = (0.3 * value).astype(dtype)
        else:
            scale = 0.5 if _OUTPUT.search(name) else 1.6
            tensors[name] = (scale / math.sqrt(shape[-1]) * value).astype(dtype)
    return tensors


def _uniform(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Uniform values of mean 0 and variance 1, from the bits themselves."""
    source = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
    bits = np.asarray(source.random_raw(math.prod(shape))).reshape(shape)
    return ((bits >> np.uint64(11)) * 2.0**-52 - 1) * math.sqrt(3)


def with_experts(tensors: dict[str, np.ndarray], experts: Experts) -> dict[str, np.ndarray]:
    """The same weights with each layer's experts in one tensor a matrix, or in two."""
    if experts == "split":
        return tensors
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for at in sorted({name.split("experts.")[0] for name in tensors if ".experts." in name}):
        count = sum(name.startswith(at + "experts.") for name in tensors) // 3
        gate, up, down = (
            np.stack([tensors[f"{at}experts.{e}.{m}_proj.weight"] for e in range(count)])
            for m in ("gate", "up", "down")
        )
        kept[at + "experts.down_proj"] = down
        if experts == "merged":
            kept[at + "experts.gate_proj"], kept[at + "experts.up_proj"] = gate, up
        else:
            kept[at + "experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
    return kept


def write_files(folder: Path, tensors: dict[str, np.ndarray], shards: Shards) -> None:
    """The tensors as one file, or as several with an index."""
    if shards is None:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    file_of = {}
    for i, name in enumerate(sorted(tensors)):
        layer = next((part for part in name.split(".") if part.isdigit()), None)
        if shards == "round_robin":
            file_of[name] = f"model-{i % 3 + 1:05d}-of-00003.safetensors"
        else:
            file_of[name] = (
                "others.safetensors" if layer is None else f"layer-{layer}-ep-0-of-1.safetensors"
            )
    for file in set(file_of.values()):
        part = {name: tensors[name] for name in tensors if file_of[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_adapter(
    folder: Path,
    dst: Path,
    r: int = 4,
    alpha: float = 8,
    *,
    seed: int = 1,
    leaf: str = ".weight",
    prefix: str = "base_model.model.",
    **config_overrides: Any,
) -> Path:
    """Write a LoRA adapter for a checkpoint, as PEFT spells it, and return its folder.

    Args:
        leaf: What follows `lora_A` and `lora_B` in a name; ".default.weight" and "" occur too.
        prefix: What stands before the checkpoint's own name.
        config_overrides: Entries of adapter_config.json; `...` removes one.
    """
    config = json.loads((folder / "config.json").read_text())
    is_llada = config["architectures"] == ["LLaDAModelLM"]
    targets = ["q_proj", "k_proj", "v_proj", "attn_out" if is_llada else "o_proj"]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in tensor_shapes(config).items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in targets:
            shapes[f"{prefix}{module}.lora_A{leaf}"] = (r, shape[1])
            shapes[f"{prefix}{module}.lora_B{leaf}"] = (shape[0], r)
    adapter = {
        "peft_type": "LORA",
        "base_model_name_or_path": "",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.1,
        "modules_to_save": None,
        "r": r,
        "target_modules": targets,
        "task_type": None,
        "use_dora": False,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        **config_overrides,
    }
    adapter = {key: value for key, value in adapter.items() if value is not ...}
    dst.mkdir(parents=True, exist_ok=True)
    (dst / "adapter_config.json").write_text(json.dumps(adapter, indent=1))
    values = {
        name: (0.2 * _uniform(seed, name, shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(values, dst / "adapter_model.safetensors", {"format": "pt"})
    return dst
