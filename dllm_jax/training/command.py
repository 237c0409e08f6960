"""A complete run: config from options, training, scores, curves and a Hugging Face folder."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

from dllm_jax.loading.save import save
from dllm_jax.training import (
    ar,
    cards,
    dflash,
    diffusion_gemma,
    export,
    loop,
    report,
    run_log,
    scoring,
    sdar,
    sft,
)

_MODULES: dict[str, Any] = {
    "sdar": sdar,
    "ar": ar,
    "dflash": dflash,
    "diffusion_gemma": diffusion_gemma,
    "sft": sft,
}
KINDS = {kind: module.TrainConfig() for kind, module in _MODULES.items()}
# buffer, threshold, block size: the settings of the final table
FINAL_SETTINGS = (
    (1, 0.9, 32),
    (2, 0.9, 32),
    (4, 0.9, 32),
    (1, 1.0, 32),  # one token a forward
)
# mean entropies in nats below which a canvas may end; at 0 each takes its whole schedule
FINAL_THRESHOLDS = (0.0, 0.001, 0.005, 0.02, 0.1)
FINAL_PROBLEMS = 2048  # problems of each half, when the run is complete
_FIELDS = {
    "steps": "num_steps",
    "layers": "num_layers",
    "dtype": "compute_dtype",
    "problem_family": "family",
}  # options whose fields have other names
_SHAPE = ("num_layers", "hidden_size", "ffn_size")


def main(
    kind: str,
    out: str,
    given: dict[str, Any],
    *,
    held: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> None:
    """Train or continue; once the run is complete, score it and write its model.

    Args:
        kind: One of `KINDS`.
        out: The run's folder.
        given: Options by the names of their flags without dashes; the recipe sets the others.
        held: As in `loop.run`.
    """
    given = dict(given)
    num_problems = given.pop("final_problems", FINAL_PROBLEMS)
    how = {"max_seconds": given.pop("max_seconds", None), "num_workers": given.pop("workers", 2)}
    how["held"] = held
    folder, config = pathlib.Path(out), make_config(kind, given)
    run = _MODULES[kind].train(config, folder, **how)
    if (folder / "metrics.jsonl").exists():
        report.draw_curves(folder / "metrics.jsonl", folder / "curves.png")
    if not run["done"]:
        print(f"stopped at step {run['step']}; the same command continues")
        return
    finish = {
        "sdar": _finish_sdar,
        "ar": _finish_ar,
        "dflash": _finish_dflash,
        "diffusion_gemma": _finish_diffusion_gemma,
        "sft": _finish_sft,
    }[kind]
    finish(run, config, folder, num_problems)


def make_config(kind: str, given: dict[str, Any]) -> loop.RunConfig:
    """The recipe of a kind with the given options."""
    recipe = KINDS[kind]
    fields = {_FIELDS.get(name, name): value for name, value in given.items()}
    if kind not in ("dflash", "sft"):
        shape = {name: fields.pop(name) for name in _SHAPE if name in fields}
        if kind == "diffusion_gemma" and "num_layers" in shape:
            shape |= diffusion_gemma.layers_of(shape["num_layers"])
        rows = {name: fields[name] for name in ("seed", "batch_size", "family") if name in fields}
        if (longest := fields.pop("row_tokens", None)) is not None:
            rows |= {"lengths": (longest, longest), "room": 1, "example_share": 0.0}
        for name in ("batch_size", "family"):
            fields.pop(name, None)
        fields["model"] = dataclasses.replace(recipe.model, **shape)
        fields["data"] = dataclasses.replace(recipe.data, **rows)
    return dataclasses.replace(recipe, **fields)


def _finish_sft(run: dict[str, Any], config: Any, out: pathlib.Path, num_problems: int) -> None:
    del config, num_problems
    save(run["model"], out / "model")
    print(f"{out / 'model'} holds the model; `dllm-jax eval --data FILE` compares it")


def _finish_ar(run: dict[str, Any], config: Any, out: pathlib.Path, num_problems: int) -> None:
    folder = out / "model"
    export.save_causal(run["params"], config.model, run["tokenizer"], folder)
    model = export.rounded(run["params"], config.model, config.compute_dtype)
    results = scoring.score_tokens(
        model, run["tokenizer"], num_problems=num_problems, family=config.data.family
    )
    _report(results, out)
    cards.write_causal(run, config, folder, results, out / "curves.png")


def _finish_dflash(run: dict[str, Any], config: Any, out: pathlib.Path, num_problems: int) -> None:
    folder, cfg, target = out / "model", run["model_config"], run["target"]
    export.save_draft(run["params"], cfg, target, folder)
    results = []
    if run["tokenizer"] is not None:
        draft = dflash.draft_of(run["params"], cfg, target)
        for temperature in (0.0, 1.0):
            results += scoring.score_tokens(
                target, run["tokenizer"], draft, num_problems=num_problems, temperature=temperature
            )
    _report(results, out)
    cards.write_draft(run, config, folder, results, out / "curves.png")


def _finish_diffusion_gemma(
    run: dict[str, Any], config: Any, out: pathlib.Path, num_problems: int
) -> None:
    folder, noise = out / "model", config.noise
    numbers = {
        "max_denoising_steps": config.max_denoising_steps,
        "t_min": noise.t_min,
        "t_max": noise.t_max,
    }
    export.save_canvas(run["params"], config.model, run["tokenizer"], folder, numbers)
    model = export.rounded(run["params"], config.model, config.compute_dtype, "diffusion_gemma")
    results = [
        result
        for half in scoring.halves_of(config.data.family)
        for temperature in (0.0, 1.0)
        for result in scoring.score_canvases(
            model,
            run["tokenizer"],
            half,
            num_problems=num_problems,
            steps=config.max_denoising_steps,
            thresholds=FINAL_THRESHOLDS,
            temperature=temperature,
            family=config.data.family,
        )
    ]
    _report(results, out)
    cards.write_canvases(run, config, folder, results, out / "curves.png")


def _report(results: list[dict], out: pathlib.Path) -> None:
    for result in results:
        print(run_log.figures(result))
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def _finish_sdar(run: dict[str, Any], config: Any, out: pathlib.Path, num_problems: int) -> None:
    run["params"] = export.calibrate(run["params"], config.head_temperature)
    export.save_folder(run, config, out / "model")
    model = export.rounded(run["params"], config.model, config.compute_dtype, "sdar")
    results = []
    for half in scoring.halves_of(config.data.family):
        for buffer, threshold, block_size in FINAL_SETTINGS:
            result = scoring.score_blocks(
                model,
                run["tokenizer"],
                half,
                num_problems=num_problems,
                buffer=buffer,
                threshold=threshold,
                block_size=block_size,
                family=config.data.family,
            )
            results.append(result)
            print(
                f"{config.data.family or half} block {block_size} buffer {buffer} "
                f"threshold {threshold}: {100 * result['exact']:.2f} % exact, "
                f"{result['tokens_per_forward']:.2f} tokens per forward, "
                f"{result['denoise_per_block']:.2f} denoise forwards a block"
            )
            (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    cards.write_blocks(run, config, out / "model", results, out / "curves.png")
