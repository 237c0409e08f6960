"""A step of `full_sequence` with `append=True`: what it costs as the window grows and the text not.

    python benchmarks/append_gpu.py --out benchmarks/results/append_h200.json
    python benchmarks/append_gpu.py --small      # a tiny network, on any machine

Rows that the network runs are counted in a run of their own, on any machine; times are meant for a
GPU, as XLA's attention on a CPU reads the whole page table. The text stays at `--live` cells, a
prompt and one block, so that a step in a window of 4,096 should take what one in a window of 512
takes (bar: 1.1). One token is written a forward; runs of few and of many forwards differ by the
steps that are timed. Windows take turns. Prints a line a window, with the ratio to the first;
`--whole` also decodes without `append`, which runs all of the window.
"""

import argparse
import dataclasses
import json
import platform
import statistics
import time
from pathlib import Path

import jax

import dllm_jax as dj
from dllm_jax.loading.model import Model
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.dense import init_params
from dllm_jax.models.families import parse_config
from dllm_jax.models.published import PUBLISHED
from dllm_jax.strategies import FullSequence

MODEL = "GSAI-ML/iLLaDA-8B-Instruct"
BLOCK, FEW, MANY = 32, 4, 28  # forwards of a run; all of them fill the first block


def tiny():
    """A network of the same family that any machine runs."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    parsed = parse_config({**PUBLISHED[MODEL], **sizes, **heads})
    params = init_params(jax.random.key(0), parsed.config, "float32")
    return Model(params, parsed.config, arch_of(parsed.config), parsed.defaults, source="tiny")


def run_s(model, window, live, slots, forwards, append):
    """Seconds of so many forwards, and the forwards that ran."""
    strategy = FullSequence(block_length=BLOCK, append=append, buffer_size=window // BLOCK)
    prompt = [7 + i % 97 for i in range(live - BLOCK)]
    how = {"max_tokens": window - len(prompt), "max_nfe": forwards, "ignore_eos": True}
    began = time.perf_counter()
    out = dj.generate(model, [prompt] * slots, strategy, **how)
    nfe = jax.device_get(out.nfe)
    spent = time.perf_counter() - began
    if set(nfe.tolist()) != {forwards}:
        raise ValueError(f"{nfe=} must be {forwards}: a text ended early")
    return spent


def counted(model, rows):
    """The model, which also adds the rows of each pass that runs to a list."""

    def trunk(params, cfg, x, *args, **options):
        jax.debug.callback(lambda size=x.shape[1]: rows.append(size))
        return model.arch.trunk(params, cfg, x, *args, **options)

    return model.replace(arch=dataclasses.replace(model.arch, trunk=trunk))


def main():
    """Time a step in each window."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a tiny network")
    parser.add_argument("--model", default=f"random:{MODEL}")
    parser.add_argument("--windows", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--live", type=int, default=300)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--whole", action="store_true", help="also without append")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = tiny() if args.small else dj.load(args.model)
    cases = [(window, True) for window in args.windows]
    cases += [(window, False) for window in args.windows] if args.whole else []

    def step_ms(window, append):
        few, many = (
            run_s(model, window, args.live, args.slots, forwards, append)
            for forwards in (FEW, MANY)
        )
        return 1e3 * (many - few) / (MANY - FEW)

    ran = {}
    for window, append in cases:
        rows = []
        run_s(counted(tiny(), rows), window, args.live, args.slots, FEW, append)
        jax.effects_barrier()
        ran[window, append] = max(rows)
        step_ms(window, append)  # compile
    times = {case: [] for case in cases}
    for _ in range(args.repeats):
        for case in cases:
            times[case].append(step_ms(*case))
    first = statistics.median(times[cases[0]])
    rows = []
    for (window, append), found in times.items():
        middle = statistics.median(found)
        kind = "appended" if append else "whole"
        facts = {"window": window, "form": kind, "rows_run": ran[window, append]}
        rows.append({**facts, "step_ms": middle, "all_ms": found})
        text = f"{middle:8.3f} ms, {middle / first:.3f} of the first"
        print(f"{window:6} cells, {kind:8}: {ran[window, append]:5} rows, {text}")
    facts = {
        "model": "tiny" if args.small else args.model,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "live": args.live,
        "slots": args.slots,
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
