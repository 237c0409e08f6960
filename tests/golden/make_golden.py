"""Makes the golden files: tiny random checkpoints and what torch and transformers say of them.

Run by hand where torch is installed (the `oracle` extra); the tests read its output without torch:

    python tests/golden/make_golden.py

Every other family: `make_family_golden.py`, which stores logits and no weights.

`sdar/`  untied, bfloat16 files, spread over shards of free names with one layer in two of them.
`qwen3/` tied, float32, one file. Both have num_heads * head_dim != hidden_size and grouped queries.
`logits.npz` in each: `token_ids` and float32 logits under full, block-causal (4) and causal masks.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
BATCH, LENGTH, BLOCK = 2, 23, 4  # a length that ends inside a block
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


def visible(kind: str) -> torch.Tensor:
    """Which key each query sees, written position by position."""
    sees = {
        "full": lambda query, key: True,
        "causal": lambda query, key: key <= query,
        "block_causal": lambda query, key: key // BLOCK <= query // BLOCK,
    }[kind]
    rows = [[sees(query, key) for key in range(LENGTH)] for query in range(LENGTH)]
    return torch.tensor(rows)


def write_logits(model: Qwen3ForCausalLM, seed: int, folder: Path) -> None:
    """Run the model under each mask and store what it says."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SIZES["vocab_size"], (BATCH, LENGTH), generator=generator)
    arrays = {"token_ids": ids.numpy().astype(np.int32)}
    for kind in ("full", "block_causal", "causal"):
        blocked = torch.finfo(torch.float32).min * (~visible(kind)).float()
        mask = blocked[None, None].expand(BATCH, 1, LENGTH, LENGTH)
        with torch.no_grad():
            arrays[kind] = model(input_ids=ids, attention_mask=mask).logits.numpy()
    np.savez_compressed(folder / "logits.npz", **arrays)


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
    write_logits(model, 12, folder)
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
    write_logits(model, 22, folder)
    save_file(tensors(model, torch.float32), folder / "model.safetensors", {"format": "pt"})
    config = {**model.config.to_diff_dict(), "architectures": ["Qwen3ForCausalLM"]}
    config |= {"eos_token_id": [91, 90], "dtype": "float32", "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    make_sdar()
    make_qwen3()
