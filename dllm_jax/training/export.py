"""Weights under training as a `Model`, and a finished run as a Hugging Face folder."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import tokenizers

from dllm_jax.loading import checkpoints
from dllm_jax.loading.model import Model
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.dflash import DFlashConfig
from dllm_jax.models.families import config_json, parse_config
from dllm_jax.models.gemma import GemmaConfig
from dllm_jax.training.tokenizer import EOS_ID, MASK_ID, PAD_ID, save_tokenizer

BLOCK_SIZE = 32
# The decoding defaults of the exported model: those of `strategies.MultiBD()`.
DECODING = {
    "strategy": "multi_bd",
    "buffer_size": 4,
    "accept_threshold": 0.9,
    "add_block_threshold": 0.1,
    "semi_complete_threshold": 0.9,
}
_IDS = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}


def as_model(params: Any, cfg: DenseConfig, family: str = "qwen3") -> Model:
    """Weights under training as a model for decoding, without a tokenizer."""
    ids = {} if family == "dflash" else _IDS
    parsed = parse_config({**config_json(family, cfg), **ids})
    return Model(params=params, config=cfg, arch=arch_of(cfg), defaults=parsed.defaults)


def rounded(params: Any, cfg: DenseConfig, dtype: str, family: str = "qwen3") -> Model:
    """`as_model` with weights cast to `dtype` by one program, on one device."""
    placed = jax.device_put(params, jax.devices()[0])
    return as_model(jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), placed), cfg, family)


def save_draft(params: Any, cfg: DFlashConfig, target: Model, folder: pathlib.Path) -> None:
    """Write a drafter in z-lab's layout: weights (bf16) and configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints.export_hf(
        params,
        cfg,
        folder,
        family="dflash",
        extra_config={"num_target_layers": target.config.num_layers, "model_type": "qwen3"},
    )


def save_causal(
    params: Any, cfg: DenseConfig, tokenizer: tokenizers.Tokenizer, folder: pathlib.Path
) -> None:
    """Write a causal model of `ar`: weights (bf16), configuration, tokenizer."""
    _save(params, cfg, tokenizer, folder, "qwen3", {"do_sample": False})


def save_canvas(
    params: Any,
    cfg: GemmaConfig,
    tokenizer: tokenizers.Tokenizer,
    folder: pathlib.Path,
    numbers: dict[str, float],
) -> None:
    """Write a DiffusionGemma in the released layout: weights (bf16), configuration, tokenizer.

    Args:
        numbers: Denoising settings, by their names in `generation_config.json`.
    """
    _save(params, cfg, tokenizer, folder, "diffusion_gemma", numbers)


def calibrate(params: Any, temperature: float) -> Any:
    """The weights with every logit divided by `temperature` (the head must not be tied)."""
    return params | {"lm_head": params["lm_head"] / temperature}


def save_folder(run: dict[str, Any], config: Any, folder: pathlib.Path) -> None:
    """Write a model of `sdar`: weights (bf16), configuration, tokenizer."""
    blocks = {"mask_token_id": MASK_ID, "block_size": BLOCK_SIZE}
    _save(
        run["params"], config.model, run["tokenizer"], folder,
        "sdar", {**blocks, "do_sample": False}, {**blocks, "dllm_jax": DECODING},
    )  # fmt: skip


def _save(
    params: Any,
    cfg: DenseConfig,
    tokenizer: tokenizers.Tokenizer,
    folder: pathlib.Path,
    family: str,
    generation: dict[str, Any],
    more: dict[str, Any] | None = None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints.export_hf(params, cfg, folder, family=family, extra_config=_IDS | (more or {}))
    text = json.dumps(_IDS | generation, indent=2) + "\n"
    (folder / "generation_config.json").write_text(text)
    save_tokenizer(tokenizer, folder, cfg.max_position)
