"""Makes two folders of tiny random weights, named and spelled by torch and transformers.

Run by hand where torch is installed (the `oracle` extra); the tests read its output without torch:

    python tests/golden/make_golden.py

What transformers says of every family is in `families.npz` (`make_family_golden.py`).

`sdar/`  untied, bfloat16 files, spread over shards of free names with one layer in two of them.
`qwen3/` tied, float32, one file. Both have num_heads * head_dim != hidden_size and grouped queries.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
BLOCK = 4
SIZES = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
}


def network(seed: int, tied: bool, dtype: torch.dtype) -> Qwen3ForCausalLM:
    """A float32 network whose weights are random values of `dtype`."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen3Config(**SIZES, rope_parameters=rope, tie_word_embeddings=tied)
    config._attn_implementation = "eager"
    model = Qwen3ForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in dict(model.named_parameters()).values():
            noise = torch.randn(weight.shape, generator=generator)
            value = 1 + 0.3 * noise if weight.ndim == 1 else 0.25 * noise
            weight.copy_(value.to(dtype).float())
    return model


def tensors(model: Qwen3ForCausalLM, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The state under transformers' own names; a tied head is stored once."""
    state = {name: t.to(dtype).contiguous() for name, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def make_sdar() -> None:
    """The config as SDAR's repositories write it: old spellings, a class of their own."""
    folder = HERE / "sdar"
    folder.mkdir(exist_ok=True)
    model = network(11, tied=False, dtype=torch.bfloat16)
    files = ("layer-a.safetensors", "layer-b.safetensors", "others.safetensors")
    weight_map = {
        name: files[i % 3] for i, name in enumerate(sorted(tensors(model, torch.float32)))
    }
    state = tensors(model, torch.bfloat16)
    for file in files:
        save_file({n: state[n] for n, f in weight_map.items() if f == file}, folder / file)
    total = sum(t.numel() * t.element_size() for t in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    config = {
        "architectures": ["SDARForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"},
        "model_type": "sdar",
        **SIZES,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "block_size": BLOCK,
        "mask_token_id": 95,
        "bos_token_id": 90,
        "eos_token_id": 91,
        "pad_token_id": 90,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def make_qwen3() -> None:
    """The config as transformers 5 writes it."""
    folder = HERE / "qwen3"
    folder.mkdir(exist_ok=True)
    model = network(21, tied=True, dtype=torch.float32)
    save_file(tensors(model, torch.float32), folder / "model.safetensors", {"format": "pt"})
    config = {**model.config.to_diff_dict(), "architectures": ["Qwen3ForCausalLM"]}
    config |= {"eos_token_id": [91, 90], "dtype": "float32", "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    make_sdar()
    make_qwen3()
