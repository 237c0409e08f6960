"""Accuracy that a small trained model loses in 8 bits, paired by problem.

    python benchmarks/fp8_accuracy.py --problems 2048 --out fp8_accuracy.json
    python benchmarks/fp8_accuracy.py --model /tmp/canvas/model --family sums --forms fp8,fp8_head \
        --problems 2048 --temperatures 0,1 --out canvas.json

`builtin:tiny-sdar` solves both halves of the held-out problems by block diffusion at its default
threshold, as the model is and with weights, cache or both in 8 bits. A canvas model, such as
`dllm-jax train diffusion_gemma` makes, solves one family at its defaults, one canvas at a time. The
file is written after each form. 2,048 problems a half take some 8 minutes of one CPU core for each
form of tiny-sdar.
"""

import argparse
import itertools
import json
from pathlib import Path

import dllm_jax as dj
from dllm_jax.api.strategy import family_strategy
from dllm_jax.bench.numbers import environment
from dllm_jax.tasks import evaluate, problems, summary

MODEL = "builtin:tiny-sdar"
SEED = 5
FORMS = {
    "fp8": {"quantization": "fp8"},
    "fp8_head": {"quantization": "fp8", "quantize_head": True},
    "fp8_cache": {"kv_cache_dtype": "fp8"},
    "fp8_both": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL, help="a folder, or builtin:NAME")
    parser.add_argument("--problems", type=int, default=2048, help="of each half")
    parser.add_argument("--halves", default="plain,hard")
    parser.add_argument("--family", help="problems of this family alone, in place of the halves")
    parser.add_argument("--temperatures", default="0")
    parser.add_argument("--forms", default="fp8,fp8_cache,fp8_both", help=f"of {', '.join(FORMS)}")
    parser.add_argument("--dtype", default="auto", help="of the weights that are rounded")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--commit", help="where the checkout has no git")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    if unknown := set(args.forms.split(",")) - set(FORMS):
        parser.error(f"--forms {','.join(sorted(unknown))}: one of {', '.join(FORMS)}")
    kept = {how: FORMS[how] for how in args.forms.split(",")}
    models = {how: dj.load(args.model, args.dtype, **settings) for how, settings in kept.items()}
    plain = dj.load(args.model, args.dtype)
    strategy = dj.strategies.BlockDiffusion(block_size=32, accept_threshold=0.9)
    if plain.defaults.strategy == "diffusion_gemma":
        strategy = family_strategy(plain, "diffusion_gemma", buffer_size=1)
    halves = [problems.half_of(args.family)] if args.family else args.halves.split(",")
    report = {"model": args.model, "dtype": args.dtype, "seed": SEED, "family": args.family}
    report |= {**environment(), "halves": {}}
    report["commit"] = args.commit or report["commit"]
    for half, heat in itertools.product(halves, args.temperatures.split(",")):
        some = evaluate.held_out(half, args.problems, SEED, args.family)
        how = {"batch_size": args.batch_size, "max_tokens": 160, "temperature": float(heat)}
        base = evaluate.solve(plain, strategy, some, **how)
        name = half if heat == "0" else f"{half} at {heat}"
        found = report["halves"][name] = {"base": summary.summarise(base)}
        for form, model in models.items():
            solved = evaluate.solve(model, strategy, some, **how)
            found[form] = summary.summarise(solved)
            found[f"{form}_to_base"] = summary.compare(base, solved)
            print(name, form, json.dumps(found[f"{form}_to_base"]), flush=True)
            Path(args.out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
