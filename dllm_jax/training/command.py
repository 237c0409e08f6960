"""The `train` command: options, a run of the loop, then scores, curves and a Hugging Face folder.

Nothing here knows how a step is computed.
"""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence

from dllm_jax.training import export, held_out, loop, report, stream

# buffer, threshold, block size: the settings of the final table
FINAL_SETTINGS = (
    (1, 0.9, 32),
    (2, 0.9, 32),
    (4, 0.9, 32),
    (1, 1.0, 32),  # one token a forward
)


def parser(add_help: bool = True) -> argparse.ArgumentParser:
    """Options of `dllm-jax train`."""
    options = argparse.ArgumentParser(
        prog="dllm-jax train",
        add_help=add_help,
        description="Train the built-in tiny model on arithmetic word problems, or continue.",
    )
    default = loop.TrainConfig()
    add = options.add_argument
    add("--out", required=True, help="folder of the run; a run found there is continued")
    add("--steps", type=int, default=default.num_steps, help="length of the run")
    add("--budget-seconds", type=float, help="length of the run in seconds, instead of --steps")
    add("--max-seconds", type=float, help="stop this call, with a checkpoint, after so long")
    add("--batch-size", type=int, default=default.data.batch_size)
    add("--seed", type=int, default=0)
    add("--muon-lr", type=float, default=default.muon_lr)
    add("--adam-lr", type=float, default=default.adam_lr)
    add("--head-temperature", type=float, default=default.head_temperature)
    add("--layers", type=int, default=default.model.num_layers)
    add("--hidden-size", type=int, default=default.model.hidden_size)
    add("--ffn-size", type=int, default=default.model.ffn_size)
    add("--workers", type=int, default=2, help="processes that make data; 0: none of their own")
    add("--eval-problems", type=int, default=default.eval_problems, help="per half and evaluation")
    add("--evals", type=int, default=default.evals, help="evaluations in the run, evenly spaced")
    add("--final-problems", type=int, default=2048, help="per half, when the run is complete")
    add("--log-every", type=int, default=default.log_every)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 also when a time limit ended this call before the run was complete."""
    args = parser().parse_args(argv)
    out = pathlib.Path(args.out)
    default = loop.TrainConfig()
    config = loop.TrainConfig(
        model=dataclasses.replace(
            default.model,
            num_layers=args.layers,
            hidden_size=args.hidden_size,
            ffn_size=args.ffn_size,
        ),
        data=stream.StreamConfig(seed=args.seed, batch_size=args.batch_size),
        seed=args.seed,
        num_steps=args.steps,
        budget_seconds=args.budget_seconds,
        muon_lr=args.muon_lr,
        adam_lr=args.adam_lr,
        eval_problems=args.eval_problems,
        evals=args.evals,
        log_every=args.log_every,
        head_temperature=args.head_temperature,
    )
    run = loop.train(config, out, max_seconds=args.max_seconds, num_workers=args.workers)
    report.draw_curves(out / "metrics.jsonl", out / "curves.png")
    if not run["done"]:
        print(f"stopped at step {run['step']}; the same command continues")
        return 0
    run["params"] = export.calibrate(run["params"], config.head_temperature)
    export.save_folder(run, config, out / "model", curves=out / "curves.png")
    results = []
    for half in ("plain", "hard"):
        for buffer, threshold, block_size in FINAL_SETTINGS:
            result = held_out.score(
                run["params"], config.model, run["tokenizer"], half,
                num_problems=args.final_problems, buffer=buffer, threshold=threshold,
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
    return 0
