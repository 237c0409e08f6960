"""The checkpoints whose logits `families.npz` holds: rewritten by each test run from these lines.

Only tokens and logits are stored; `tests.oracles.checkpoints` draws the same weights again.
"""

from pathlib import Path
from typing import Any

from tests.oracles.checkpoints import write_tiny

LENGTH, BLOCK = 10, 4  # a length that ends inside a block
MASKS = ("full", "block_causal", "causal")

# Name of a case -> its family and what differs from `tiny_configs`.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada", {}),
    "dream": ("dream", {}),
    "diffucoder": ("diffucoder", {}),
    "dream_reasoner": ("dream_reasoner", {}),
    "stable_diffcoder": ("stable_diffcoder", {}),
    "fast_dllm_v2": ("fast_dllm_v2", {}),
    "fast_dllm_v2_tied": ("fast_dllm_v2", {"tie_word_embeddings": True}),
    "sdar": ("sdar", {}),
    "sdar_moe": ("sdar_moe", {}),
    "llada2": ("llada2", {}),
    # Block routing that excludes nothing is plain top-k, which transformers does compute.
    "llada2_2_unlimited": ("llada2_2", {"expert_capacity": 12, "block_size": 5}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 4},
    ),
    "llama31": ("llama31", {}),
    "illada": ("illada", {}),
    "llada_moe": ("llada_moe", {}),
    "a2d_qwen3": ("a2d_qwen3", {}),
    "a2d_qwen2": ("a2d_qwen2", {}),
    "a2d_llama": ("a2d_llama", {}),
    "open_dcoder": ("open_dcoder", {}),
}


def write_case(name: str, folder: Path) -> Path:
    """The checkpoint of a case, with a seed of its own."""
    family, changes = CASES[name]
    return write_tiny(family, folder, seed=100 + list(CASES).index(name), **changes)
