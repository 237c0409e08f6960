"""Accuracy that `builtin:tiny-sdar` loses with 8-bit weights and rows: the same problems, paired.

    python benchmarks/fp8_accuracy.py --problems 2048 --out fp8_accuracy.json

Both halves of the held-out problems are solved greedily by block diffusion at its default
threshold, with the weights as they are and with `quantization="fp8"`. The file is written after
each half. 2,048 problems a half take some 15 minutes of one CPU core.
"""

import argparse
import json
from pathlib import Path

import dllm_jax as dj
from dllm_jax.bench.numbers import environment
from dllm_jax.tasks import evaluate

MODEL = "builtin:tiny-sdar"
SEED = 5


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=2048, help="of each half")
    parser.add_argument("--halves", default="plain,hard")
    parser.add_argument("--dtype", default="auto", help="of the weights that are rounded")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    models = {how: dj.load(MODEL, args.dtype, quantization=how) for how in (None, "fp8")}
    strategy = dj.strategies.BlockDiffusion(block_size=32, accept_threshold=0.9)
    report = {"model": MODEL, "dtype": args.dtype, "seed": SEED, **environment(), "halves": {}}
    for half in args.halves.split(","):
        problems = evaluate.held_out(half, args.problems, seed=SEED)
        base, other = (
            evaluate.solve(model, strategy, problems, batch_size=args.batch_size, max_tokens=160)
            for model in models.values()
        )
        report["halves"][half] = {
            "base": evaluate.summarise(base),
            "fp8": evaluate.summarise(other),
            "fp8_to_base": evaluate.compare(base, other),
        }
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(half, json.dumps(report["halves"][half]["fp8_to_base"]), flush=True)


if __name__ == "__main__":
    main()
