"""A finished run as an ordinary Hugging Face folder, with its model card.

The weights go through `checkpoints_convert`, the way back of the path every checkpoint takes in.
Nothing here knows how the model was trained, beyond what the card says.
"""

import json
import pathlib
import platform
import shutil
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
from dllm_jax.training import sdar
from dllm_jax.training.tokenizer import EOS_ID, MASK_ID, PAD_ID, save_tokenizer

BLOCK_SIZE = 32
# How the model is decoded when nothing is said: the numbers of `strategies.MultiBD()`.
DECODING = {
    "strategy": "multi_bd",
    "buffer_size": 4,
    "accept_threshold": 0.9,
    "add_block_threshold": 0.1,
    "semi_complete_threshold": 0.9,
}


_IDS = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}


def as_model(params: Any, cfg: DenseConfig, family: str = "qwen3") -> Model:
    """Weights under training as a model that decodes, without a tokenizer."""
    ids = {} if family == "dflash" else _IDS
    parsed = parse_config({**config_json(family, cfg), **ids})
    return Model(params=params, config=cfg, arch=arch_of(cfg), defaults=parsed.defaults)


def rounded(params: Any, cfg: DenseConfig, dtype: str, family: str = "qwen3") -> Model:
    """`as_model` of weights in `dtype`, on one device: one program for all of them."""
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
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints.export_hf(params, cfg, folder, family="qwen3", extra_config=_IDS)
    generation = {**_IDS, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, folder, cfg.max_position)


def calibrate(params: Any, temperature: float) -> Any:
    """The weights with every logit divided by `temperature` (the head must not be tied)."""
    return params | {"lm_head": params["lm_head"] / temperature}


def save_folder(
    run: dict[str, Any],
    config: sdar.TrainConfig,
    folder: pathlib.Path,
    curves: pathlib.Path | None = None,
) -> None:
    """Write weights (bf16), configuration, tokenizer and curves; `write_card` adds the card."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints.export_hf(
        run["params"],
        config.model,
        folder,
        extra_config={
            **_IDS,
            "mask_token_id": MASK_ID,
            "block_size": BLOCK_SIZE,
            "dllm_jax": DECODING,
        },
    )
    generation = {**_IDS, "mask_token_id": MASK_ID, "block_size": BLOCK_SIZE, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(run["tokenizer"], folder, config.model.max_position)
    if curves is not None:
        shutil.copyfile(curves, folder / "curves.png")


def write_card(
    run: dict[str, Any],
    config: sdar.TrainConfig,
    folder: pathlib.Path,
    results: list[dict],
    measured_with: str = "the trainer's dense decoder in bf16",
) -> None:
    """Write README.md: what the model is, how it was made and how it scores."""
    m = config.model
    num_params = sum(leaf.size for leaf in jax.tree.leaves(run["params"]))
    samples = run["step"] * config.data.batch_size
    rows = "\n".join(
        f"| {r['half']} | {r['block_size']} | {r['buffer']} | {r['threshold']} "
        f"| {100 * r['exact']:.2f} ± {100 * r['exact_ci']:.2f} "
        f"| {r['tokens_per_forward']:.2f} ± {r['tokens_per_forward_ci']:.2f} "
        f"| {r['forwards']:.2f} ({r['commit_only']:.2f}) | {r['denoise_per_block']:.2f} |"
        for r in results
    )
    card = f"""---
license: apache-2.0
library_name: dllm-jax
pipeline_tag: text-generation
---
# tiny-sdar

A block-diffusion language model of {num_params / 1e6:.2f} M parameters that solves arithmetic word
problems, several tokens per forward pass. It is SDAR-shaped (Qwen3 arithmetic, block-causal
attention, no shift) and shipped with dllm_jax as `builtin:tiny-sdar`; it knows nothing else.

- **Shape**: {m.num_layers} layers, width {m.hidden_size}, {m.num_heads} query and
  {m.num_kv_heads} key/value heads of {m.head_dim}, SwiGLU {m.ffn_size}, RoPE theta
  {m.rope_theta:g}, untied head, vocabulary {m.vocab_size}. Weights bf16.
- **Prompt**: `<|user|>question<|assistant|>`; the response begins with a space and ends with
  `<|eos|>`. The mask token is `<|mask|>` (id {MASK_ID}). Blocks of 4, 8, 16 and 32 were trained;
  32 is the default.
- **Data**: the project's own seeded generator (`dllm_jax/tasks/problems.py`), fresh samples all
  through; {1 - config.data.hard_share:.0%} plain word problems (numbers below 1000),
  {config.data.hard_share:.0%} hard ones (serial chains, numbers to 9999, worked partial products
  and quotients). One instance in sixteen, by a hash of its numbers, is held out.
- **Training**: {run["step"]} steps of {config.data.batch_size} rows of
  {" or ".join(map(str, config.data.lengths))} tokens = {samples / 1e6:.1f} M samples in
  {run["seconds"]:.0f} s (compilation and evaluation included) on
  {jax.device_count()} x {jax.devices()[0].device_kind};
  Muon {config.muon_lr:g} and Adam {config.adam_lr:g}, seed {config.seed}; jax {jax.__version__},
  Python {platform.python_version()}. Last training loss {run["metrics"].get("loss", 0.0):.4f},
  masked digits right {run["metrics"].get("digit_accuracy", 0.0):.2%} (many cannot be known yet).
  The same seed on other devices gives another model.
- **Head**: divided by {config.head_temperature:g} after training, so that an accept threshold of
  0.9 keeps tokens that are accepted together consistent; greedy choices are those of the trained
  head. To draw samples use a temperature of {1 / config.head_temperature:.2f} or lower.
- **Limits**: trained on rows of at most {max(config.data.lengths)} tokens, English templates
  only, whole numbers, results below 10000.

![curves](curves.png)

## Results

Held-out problems, greedy, {results[0]["num_problems"] if results else 0} per half, with
{measured_with}; ± is the 95 % half-width. Forwards are all forwards after
the prompt's prefill, in brackets those that only store a finished block; threshold 1.0 is one
token a forward.

| half | block | buffer | threshold | exact % | tokens per forward | forwards | denoise per block |
|---|---|---|---|---|---|---|---|
{rows}
"""
    (folder / "README.md").write_text(card, encoding="utf-8")
