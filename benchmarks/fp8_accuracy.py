"""Accuracy that `builtin:tiny-sdar` loses in 8 bits, weights, cache or both, paired by problem.

    python benchmarks/fp8_accuracy.py --problems 2048 --out fp8_accuracy.json

Both halves of the held-out problems are solved greedily by block diffusion at its default
threshold, as the model is, with `quantization="fp8"`, with `kv_cache_dtype="fp8"` and with both.
The file is written after each form of each half. 2,048 problems a half take some 8 minutes of one
CPU core for each of the four.
"""

import argparse
import json
from pathlib import Path

import dllm_jax as dj
from dllm_jax.bench.numbers import environment
from dllm_jax.tasks import evaluate

MODEL = "builtin:tiny-sdar"
SEED = 5
FORMS = {
    "fp8": {"quantization": "fp8"},
    "fp8_cache": {"kv_cache_dtype": "fp8"},
    "fp8_both": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=2048, help="of each half")
    parser.add_argument("--halves", default="plain,hard")
    parser.add_argument("--forms", default=",".join(FORMS), help="weights, cache, both in 8 bits")
    parser.add_argument("--dtype", default="auto", help="of the weights that are rounded")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--commit", help="where the checkout has no git")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    kept = {how: FORMS[how] for how in args.forms.split(",")}
    models = {how: dj.load(MODEL, args.dtype, **settings) for how, settings in kept.items()}
    plain = dj.load(MODEL, args.dtype)
    strategy = dj.strategies.BlockDiffusion(block_size=32, accept_threshold=0.9)
    report = {"model": MODEL, "dtype": args.dtype, "seed": SEED, **environment(), "halves": {}}
    report["commit"] = args.commit or report["commit"]
    for half in args.halves.split(","):
        problems = evaluate.held_out(half, args.problems, seed=SEED)
        how = {"batch_size": args.batch_size, "max_tokens": 160}
        base = evaluate.solve(plain, strategy, problems, **how)
        found = report["halves"][half] = {"base": evaluate.summarise(base)}
        for name, model in models.items():
            solved = evaluate.solve(model, strategy, problems, **how)
            found[name] = evaluate.summarise(solved)
            found[f"{name}_to_base"] = evaluate.compare(base, solved)
            print(half, name, json.dumps(found[f"{name}_to_base"]), flush=True)
            Path(args.out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
