"""Model cards: description, training and scores of a trained model."""

import pathlib
import platform
import shutil
from typing import Any

import jax

from dllm_jax.training.tokenizer import MASK_ID

_FRONT = """---
license: apache-2.0
library_name: dllm-jax
pipeline_tag: text-generation
---
"""


def write_blocks(
    run: dict[str, Any],
    config: Any,
    folder: pathlib.Path,
    results: list[dict],
    curves: pathlib.Path,
) -> None:
    """README.md and curves of a run of `sdar`."""
    samples = run["step"] * config.data.batch_size
    rows = "\n".join(
        f"| {r['half']} | {r['block_size']} | {r['buffer']} | {r['threshold']} "
        f"| {100 * r['exact']:.2f} ± {100 * r['exact_ci']:.2f} "
        f"| {r['tokens_per_forward']:.2f} ± {r['tokens_per_forward_ci']:.2f} "
        f"| {r['forwards']:.2f} ({r['commit_only']:.2f}) | {r['denoise_per_block']:.2f} |"
        for r in results
    )
    text = f"""\
A block-diffusion language model of {_millions(run)} M parameters that solves arithmetic word
problems, several tokens per forward pass. It is SDAR-shaped (Qwen3 arithmetic, block-causal
attention, no shift) and shipped with dllm_jax as `builtin:tiny-sdar`; it knows nothing else.

{_dense_shape(config.model)}
- **Prompt**: `<|user|>question<|assistant|>`; the response begins with a space and ends with
  `<|eos|>`. The mask token is `<|mask|>` (id {MASK_ID}). Blocks of 4, 8, 16 and 32 were trained;
  32 is the default.
- **Data**: the project's own seeded generator (`dllm_jax/tasks/problems.py`), fresh samples all
  through; {1 - config.data.hard_share:.0%} plain word problems (numbers below 1000),
  {config.data.hard_share:.0%} hard ones (serial chains, numbers to 9999, worked partial products
  and quotients). One instance in sixteen, by a hash of its numbers, is held out.
- **Training**: {run["step"]} steps of {config.data.batch_size} rows of
  {" or ".join(map(str, config.data.lengths))} tokens = {samples / 1e6:.1f} M samples in
  {run["seconds"]:.0f} s (compilation and evaluation included) on {_device()};
  Muon {config.muon_lr:g} and Adam {config.adam_lr:g}, seed {config.seed}; {_versions()}.
  Last training loss {run["metrics"].get("loss", 0.0):.4f},
  masked digits right {run["metrics"].get("digit_accuracy", 0.0):.2%} (many cannot be known yet).
  The same seed on other devices gives another model.
- **Head**: divided by {config.head_temperature:g} after training, so that an accept threshold of
  0.9 keeps tokens that are accepted together consistent; greedy choices are those of the trained
  head. To draw samples use a temperature of {1 / config.head_temperature:.2f} or lower.
- **Limits**: trained on rows of at most {max(config.data.lengths)} tokens, English templates
  only, whole numbers, results below 10000.

![curves](curves.png)

## Results

Held-out problems, greedy, {_count(results)} per half, weights in
{config.compute_dtype}; ± is the 95 % half-width. Forwards are all forwards after the prompt's
prefill, in brackets those that only commit a finished block; threshold 1.0 is one token a forward.

| half | block | buffer | threshold | exact % | tokens per forward | forwards | denoise per block |
|---|---|---|---|---|---|---|---|
{rows}
"""
    _write(folder, "tiny-sdar", text, curves)


def write_causal(
    run: dict[str, Any],
    config: Any,
    folder: pathlib.Path,
    results: list[dict],
    curves: pathlib.Path,
) -> None:
    """README.md and curves of a run of `ar`."""
    text = f"""\
A causal language model of {_millions(run)} M parameters that solves arithmetic word problems, of
Qwen3's shape. It is a target for drafters (DFlash) that runs offline; it knows nothing else.

{_dense_shape(config.model)}
- **Prompt**: `<|user|>question<|assistant|>`; the response begins with a space and ends with
  `<|eos|>`.
- **Data**: the project's own seeded generator (`dllm_jax/tasks/problems.py`), fresh samples all
  through; {1 - config.data.hard_share:.0%} plain word problems, {config.data.hard_share:.0%} hard
  ones. One instance in sixteen, by a hash of its numbers, is held out.
- **Objective**: cross entropy of the next token; a token of the prompt weighs
  {config.prompt_weight:g} of one of the response.
{_training(run, config)}
- **Limits**: rows of at most {config.data.lengths[0]} tokens, English templates only, whole
  numbers, results below 10000.

![curves](curves.png)

## Results

Held-out problems, greedy, {_count(results)} a half, weights in {config.compute_dtype}.

| half | exact % | tokens an answer |
|---|---|---|
{_rows(results, ("half", "exact", "tokens"))}
"""
    _write(folder, "tiny-qwen3", text, curves)


def write_canvases(
    run: dict[str, Any],
    config: Any,
    folder: pathlib.Path,
    results: list[dict],
    curves: pathlib.Path,
) -> None:
    """README.md and curves of a run of `diffusion_gemma`."""
    m, noise = config.model, config.noise
    data = f"word problems of the family `{config.data.family}`"
    if config.data.family is None:
        data = f"word problems, {config.data.hard_share:.0%} of them hard"
    rows = "\n".join(
        f"| {r['half']} | {r['temperature']:g} | {r['threshold']:g} "
        f"| {100 * r['exact']:.2f} ± {100 * r['exact_ci']:.2f} | {r['tokens_per_forward']:.2f} "
        f"| {r['steps_per_canvas']:.2f} |"
        for r in results
    )
    text = f"""\
A uniform-diffusion language model of {_millions(run)} M parameters, of DiffusionGemma's shape, that
solves arithmetic word problems canvas by canvas; it knows nothing else.

- **Shape**: {m.num_layers} layers ({sum(m.sliding)} sliding, window {m.window}), width
  {m.hidden_size}, {m.num_experts} experts of which a token takes {m.experts_per_token}, canvases of
  {m.canvas_length}, vocabulary {m.vocab_size}. Weights bf16.
- **Prompt**: `<|user|>question<|assistant|>`; the response begins with a space and ends with
  `<|eos|>`.
- **Data**: the project's own seeded generator, fresh samples all through; {data}. One instance in
  sixteen, by a hash of its numbers, is held out.
- **Objective**: cross entropy of every cell of one canvas a row, with a uniform share of its cells
  replaced by random ids, plus that of the encoder's next tokens; {noise.conditioned_share:.0%} of
  the rows are conditioned on a first pass.
{_training(run, config)}

![curves](curves.png)

## Results

Held-out problems, {_count(results)} a row, weights in {config.compute_dtype}, at most
{config.max_denoising_steps} steps a canvas; ± is the 95 % half-width. A threshold is a mean entropy
in nats below which a canvas may end; at 0 the work is fixed. Forwards count a store of a canvas.

| half | temperature | threshold | exact % | tokens per forward | steps a canvas |
|---|---|---|---|---|---|
{rows}
"""
    _write(folder, "tiny-diffusion-gemma", text, curves)


def write_draft(
    run: dict[str, Any],
    config: Any,
    folder: pathlib.Path,
    results: list[dict],
    curves: pathlib.Path,
) -> None:
    """README.md and curves of a run of `dflash`."""
    m = run["model_config"]
    prompts = "the built-in word problems" if config.prompts is None else f"`{config.prompts}`"
    scores = f"""
## Results

Held-out problems, {_count(results)} a half, drafter and target in
{run["target"].params["embed"].dtype}. Accepted length: visible tokens of the answers over rounds of
the real strategy (block {m.block_size}, all drafts judged), the target's own token of each round
counted.

| half | temperature | accepted length | exact % | tokens an answer |
|---|---|---|---|---|
{_rows(results, ("half", "temperature", "accepted", "exact", "tokens"))}
"""
    text = f"""\
A DFlash drafter (arXiv 2602.06036) of {_millions(run)} M parameters for `{config.target}`: it
fills {m.block_size - 1} tokens behind an anchor in one pass. It changes no text, only the speed.

- **Shape**: {m.num_layers} layers, width {m.hidden_size}, SwiGLU {m.ffn_size}; reads the target
  behind its layers {list(m.target_layer_ids)}, counted from 0; mask token {m.mask_token_id};
  embedding and head are the target's. Weights bf16.
- **Data**: {len(run["answers"]["length"])} answers of the target itself to prompts of {prompts},
  a share of {config.greedy_share:g} greedy, the rest drawn at temperature 1; cut to
  {config.row_tokens} tokens.
- **Objective**: {config.anchors} random anchors a text and step; cross entropy of the masked
  cells, weight exp(-(j - 1) / gamma) at cell j.
- **Training**: {run["step"]} steps of {config.batch_size} texts in {run["seconds"]:.0f} s
  (compilation and evaluation included) on {_device()}; Muon {config.muon_lr:g} and Adam
  {config.adam_lr:g}, seed {config.seed}; {_versions()}. Last training loss
  {run["metrics"].get("loss", 0.0):.4f}, accepted length on its texts
  {run["metrics"].get("accepted", 0.0):.2f} (teacher-forced).

![curves](curves.png)
{scores if results else ""}"""
    _write(folder, "dflash", text, curves)


def _write(folder: pathlib.Path, title: str, text: str, curves: pathlib.Path) -> None:
    title = title if folder.name == "model" else folder.name
    (folder / "README.md").write_text(f"{_FRONT}# {title}\n\n{text}", encoding="utf-8")
    shutil.copyfile(curves, folder / "curves.png")


def _dense_shape(m: Any) -> str:
    return f"""\
- **Shape**: {m.num_layers} layers, width {m.hidden_size}, {m.num_heads} query and
  {m.num_kv_heads} key/value heads of {m.head_dim}, SwiGLU {m.ffn_size}, RoPE theta
  {m.rope_theta:g}, untied head, vocabulary {m.vocab_size}. Weights bf16."""


def _training(run: dict[str, Any], config: Any) -> str:
    return f"""\
- **Training**: {run["step"]} steps of {config.data.batch_size} rows of {config.data.lengths[0]}
  tokens in {run["seconds"]:.0f} s (compilation and evaluation included) on {_device()};
  Muon {config.muon_lr:g} and Adam {config.adam_lr:g}, seed {config.seed}; {_versions()}. Last
  training loss {run["metrics"].get("loss", 0.0):.4f}."""


def _rows(results: list[dict], names: tuple[str, ...]) -> str:
    def cell(name: str, value: Any) -> str:
        if name == "exact":
            return f"{100 * value:.2f}"
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    return "\n".join(
        "| " + " | ".join(cell(name, result[name]) for name in names) + " |" for result in results
    )


def _count(results: list[dict]) -> int:
    return results[0]["num_problems"] if results else 0


def _millions(run: dict[str, Any]) -> str:
    return f"{sum(leaf.size for leaf in jax.tree.leaves(run['params'])) / 1e6:.2f}"


def _device() -> str:
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"


def _versions() -> str:
    return f"jax {jax.__version__}, Python {platform.python_version()}"
