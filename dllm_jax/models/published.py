"""Published configs by hub name, for `random:NAME`: real sizes without real weights.

Source: config.json of these repositories on the Hugging Face hub.
"""

from typing import Any

from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.families import config_json


def _config(
    family: str, layers: int, width: int, heads: int, ffn: int, *, tied: bool = False
) -> dict[str, Any]:
    """One config.json; all of these share vocabulary, KV heads, head size and special tokens."""
    cfg = DenseConfig(
        vocab_size=151936,
        hidden_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=ffn,
        tie_embeddings=tied,
        max_position=32768 if family == "sdar" else 40960,
        shift=family != "sdar",
        mask_token_id=151669 if family == "sdar" else -1,
    )
    return {**config_json(family, cfg), "eos_token_id": 151645, "pad_token_id": 151643}


PUBLISHED: dict[str, dict[str, Any]] = {
    "JetLM/SDAR-1.7B-Chat": _config("sdar", 28, 2048, 16, 6144),
    "JetLM/SDAR-4B-Chat": _config("sdar", 36, 2560, 32, 9728),
    "JetLM/SDAR-8B-Chat": _config("sdar", 36, 4096, 32, 12288),
    "Qwen/Qwen3-0.6B": _config("qwen3", 28, 1024, 16, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _config("qwen3", 28, 2048, 16, 6144, tied=True),
    "Qwen/Qwen3-4B": _config("qwen3", 36, 2560, 32, 9728, tied=True),
    "Qwen/Qwen3-8B": _config("qwen3", 36, 4096, 32, 12288),
}
