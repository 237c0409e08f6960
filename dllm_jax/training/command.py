"""The `train` command: options of a kind, a run, then scores, curves and a Hugging Face folder.

Nothing here knows how a step is computed.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from dllm_jax.training import (
    ar,
    cards,
    dflash,
    export,
    held_out,
    loop,
    report,
    run_log,
    sdar,
    solving,
)

KINDS = {
    "sdar": "a block-diffusion model, on arithmetic word problems",
    "ar": "a causal model on the same problems, a target for drafters",
    "dflash": "a drafter for a target, on the target's own answers",
}
# buffer, threshold, block size: the settings of the final table
FINAL_SETTINGS = (
    (1, 0.9, 32),
    (2, 0.9, 32),
    (4, 0.9, 32),
    (1, 1.0, 32),  # one token a forward
)
_DEFAULTS = {"sdar": sdar.TrainConfig(), "ar": ar.TrainConfig(), "dflash": dflash.TrainConfig()}


def parser(kind: str = "sdar") -> argparse.ArgumentParser:
    """Options of `dllm-jax train KIND`; names are those of the config's fields."""
    options = argparse.ArgumentParser(
        prog=f"dllm-jax train {kind}", description=f"Train {KINDS[kind]}, or continue."
    )
    default: Any = _DEFAULTS[kind]
    add = options.add_argument
    add("--out", required=True, help="folder of the run; a run found there is continued")
    add("--steps", dest="num_steps", type=int, default=default.num_steps, help="length of the run")
    add("--budget-seconds", type=float, help="length of the run in seconds, instead of --steps")
    add("--max-seconds", type=float, help="stop this call, with a checkpoint, after so long")
    size = default.batch_size if kind == "dflash" else default.data.batch_size
    add("--batch-size", type=int, default=size)
    add("--seed", type=int, default=0)
    add("--muon-lr", type=float, default=default.muon_lr)
    add("--adam-lr", type=float, default=default.adam_lr)
    layers = default.num_layers if kind == "dflash" else default.model.num_layers
    add("--layers", type=int, default=layers)
    add("--ffn-size", type=int, default=None if kind == "dflash" else default.model.ffn_size)
    add("--workers", type=int, default=2, help="processes that make data; 0: none of their own")
    add("--eval-problems", type=int, default=default.eval_problems, help="per half and evaluation")
    add("--evals", type=int, default=default.evals, help="evaluations in the run, evenly spaced")
    add("--final-problems", type=int, default=2048, help="per half, when the run is complete")
    add("--log-every", type=int, default=default.log_every)
    if kind != "dflash":
        add("--hidden-size", type=int, default=default.model.hidden_size)
    if kind == "sdar":
        add("--head-temperature", type=float, default=default.head_temperature)
    if kind == "dflash":
        ids = lambda text: tuple(int(i) for i in text.split(","))  # noqa: E731
        add("--target", required=True, help="what is drafted for: all that --model takes")
        add("--prompts", help='file, one a line or .jsonl with "prompt"; else word problems')
        add("--target-layer-ids", type=ids, help="layers it reads, from 0, as 1,9,17")
        add("--mask-token-id", type=int, help="a token that no text uses")
        for name in _NUMBERS:
            flag, value = f"--{name.replace('_', '-')}", getattr(default, name)
            add(flag, type=float if name in _REAL else int, default=value)
    return options


_REAL = ("gamma", "greedy_share", "response_seconds")
_NUMBERS = (
    "block_size", "anchors", "row_tokens", "num_responses", "response_batch", "response_tokens",
    *_REAL,
)  # fmt: skip
_CALL = ("out", "max_seconds", "workers", "final_problems")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 also when a time limit ended this call before the run was complete."""
    words = list(sys.argv[1:] if argv is None else argv)
    kind = words.pop(0) if words and words[0] in KINDS else "sdar"
    args = vars(parser(kind).parse_args(words))
    call = {name: args.pop(name) for name in _CALL}
    out = pathlib.Path(call["out"])
    config = make_config(kind, args)
    train = {"sdar": sdar.train, "ar": ar.train, "dflash": dflash.train}[kind]
    run = train(config, out, max_seconds=call["max_seconds"], num_workers=call["workers"])
    report.draw_curves(out / "metrics.jsonl", out / "curves.png")
    if not run["done"]:
        print(f"stopped at step {run['step']}; the same command continues")
        return 0
    finish = {"sdar": _finish_sdar, "ar": _finish_ar, "dflash": _finish_dflash}[kind]
    finish(run, config, out, call["final_problems"])
    return 0


def make_config(kind: str, args: dict[str, Any]) -> loop.RunConfig:
    """The config of a kind from its options."""
    default: Any = _DEFAULTS[kind]
    args = dict(args)
    if kind == "dflash":
        return dataclasses.replace(default, num_layers=args.pop("layers"), **args)
    shape = {"num_layers": args.pop("layers")}
    shape |= {name: args.pop(name) for name in ("hidden_size", "ffn_size")}
    data = dataclasses.replace(default.data, seed=args["seed"], batch_size=args.pop("batch_size"))
    return dataclasses.replace(
        default, model=dataclasses.replace(default.model, **shape), data=data, **args
    )


def _finish_ar(run: dict[str, Any], config: Any, out: pathlib.Path, num_problems: int) -> None:
    folder = out / "model"
    export.save_causal(run["params"], config.model, run["tokenizer"], folder)
    model = export.rounded(run["params"], config.model, config.compute_dtype)
    results = solving.score(model, run["tokenizer"], num_problems=num_problems)
    _report(results, out)
    cards.write_causal(run, config, folder, results, out / "curves.png")


def _finish_dflash(run: dict[str, Any], config: Any, out: pathlib.Path, num_problems: int) -> None:
    folder, cfg, target = out / "model", run["model_config"], run["target"]
    export.save_draft(run["params"], cfg, target, folder)
    results = []
    if run["tokenizer"] is not None:
        draft = dflash.draft_of(run["params"], cfg, target)
        for temperature in (0.0, 1.0):
            results += solving.score(
                target, run["tokenizer"], draft, num_problems=num_problems, temperature=temperature
            )
    _report(results, out)
    cards.write_draft(run, config, folder, results, out / "curves.png")


def _report(results: list[dict], out: pathlib.Path) -> None:
    for result in results:
        print(run_log.figures(result))
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def _finish_sdar(run: dict[str, Any], config: Any, out: pathlib.Path, num_problems: int) -> None:
    run["params"] = export.calibrate(run["params"], config.head_temperature)
    export.save_folder(run, config, out / "model", curves=out / "curves.png")
    results = []
    for half in ("plain", "hard"):
        for buffer, threshold, block_size in FINAL_SETTINGS:
            result = held_out.score(
                run["params"], config.model, run["tokenizer"], half,
                num_problems=num_problems, buffer=buffer, threshold=threshold,
                block_size=block_size, row_len=max(config.data.lengths),
            )  # fmt: skip
            results.append(result)
            print(
                f"{half} block {block_size} buffer {buffer} threshold {threshold}: "
                f"{100 * result['exact']:.2f} % exact, {result['tokens_per_forward']:.2f} tokens "
                f"per forward, {result['denoise_per_block']:.2f} denoise forwards a block"
            )
            (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    export.write_card(run, config, out / "model", results)
