"""Memory of an engine: predicted and counted by the device; and the time of its start.

    python benchmarks/memory_check.py --model random:JetLM/SDAR-1.7B-Chat --max-num-seqs 32

Builds an `LLM` as a user would, fills every slot with texts near the longest, and prints one JSON
object: the plan in bytes, its peak, the device's `peak_bytes_in_use` and their ratio (null on the
CPU, which counts nothing), seconds of the start, and the timed programs. With `--starts 2` it
starts again in a new process: the first start compiles what the compile cache lacks, the second
reads everything from it.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time

import jax
import numpy as np

import dllm_jax as dj

BAR = 0.1  # of the measured peak


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin:tiny-sdar")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--memory-utilization", type=float, default=0.9)
    parser.add_argument("--num-pages", type=int)
    parser.add_argument("--starts", type=int, default=1)
    args = parser.parse_args()
    measured = measure(args)
    print(json.dumps(measured), flush=True)
    if args.starts > 1:
        again = [*sys.argv, "--starts", str(args.starts - 1)]
        subprocess.run([sys.executable, *again], check=True)
    return 0 if measured["ratio"] is None or abs(measured["ratio"] - 1) <= BAR else 1


def measure(args):
    began = time.perf_counter()
    model = dj.load(args.model)
    jax.block_until_ready(model.params)
    loaded = time.perf_counter()
    after_load = counted()
    llm = dj.LLM(
        model,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        memory_utilization=args.memory_utilization,
        num_pages=args.num_pages,
    )
    ready = time.perf_counter()
    fill(llm)
    plan, peak, device = llm.memory, counted(), llm.engine.runner
    cost = device.cost
    return {
        "model": args.model,
        "device": jax.devices()[0].device_kind,
        "plan": dataclasses.asdict(plan),
        "peak_after_load": after_load,
        "predicted": plan.peak_bytes,
        "measured": peak,
        "ratio": peak and plan.peak_bytes / peak,
        "load_s": loaded - began,
        "start_s": ready - loaded,
        "compile_s": device.device.compile_s,
        "programs": len(device.device.compiled),
        "late_compiles": llm.engine.stats().num_late_compiles,
        "decode_ms": cost and {f"{n}x{c}": 1e3 * s for (n, c), s in cost.decode.items()},
        "prefill_ms": cost
        and {
            kind: {f"{n}x{c}": 1e3 * s for (n, c), s in times.items()}
            for kind, times in cost.prefill.items()
        },
    }


def counted():
    """The most that was in use so far; None where the device does not count."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def fill(llm):
    """Every slot with a text of nearly the longest length."""
    layout = llm.engine.layout
    length = max(1, min(layout.max_model_len, 4096) - 32)
    draw = np.random.default_rng(0)
    prompts = [
        draw.integers(0, layout.vocab_size, length).tolist() for _ in range(layout.num_slots)
    ]
    llm.generate(prompts, dj.SamplingParams(max_tokens=16, ignore_eos=True))


if __name__ == "__main__":
    sys.exit(main())
