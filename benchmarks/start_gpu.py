"""From the start of a process to its first token, cold and warm; and a long prompt's prefill.

    python benchmarks/start_gpu.py --out start.json

`first_token`: a process loads the model (random weights made on the device), compiles an engine of
one bucket each for decoding and prefill, and takes one forward behind a prompt of 64 tokens; the
seconds are those from before the process was started to the end of that forward. `cold` begins with
an empty folder of compiled programs, `warm` is the same command again. `prefill`: the passes of a
prompt of `--prompt` tokens through the engine's compiled program, back to back, at their positions;
its share of the peak counts two operations a weight of the layers and token, and attention's. Each
in its own process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FIRST_MODEL, PREFILL_MODEL = "random:JetLM/SDAR-1.7B-Chat", "random:JetLM/SDAR-8B-Chat"
BARS = {"cold_s": 60.0, "warm_s": 10.0, "share_of_peak": 0.5}
SHORT = 64


def first_token(name):
    """Everything up to the first token, in this process; when it came, by the clock on the wall."""
    import dllm_jax as dj
    from dllm_jax.compile_cache import enable_compile_cache

    enable_compile_cache()
    model = dj.load(name)
    sizes = {"max_num_seqs": 1, "max_model_len": 4 * SHORT, "slot_buckets": (1,)}
    sizes |= {"page_buckets": (5,), "prefill_buckets": (SHORT,), "num_pages": 10}
    llm = dj.LLM(model, calibrate=False, progress=False, config=dj.EngineConfig(**sizes))
    params = dj.SamplingParams(max_tokens=SHORT, max_nfe=1, ignore_eos=True)
    (output,) = llm.generate([list(range(1, SHORT + 1))], params, use_tqdm=False)
    came = time.time()
    if output.error is not None or output.metrics.nfe != 1:
        raise ValueError(f"no first forward: {output}")
    return {"came": came, "settled": len(output.outputs[0].token_ids)}


def prefill(name, prompt, size):
    """Passes of `size` tokens over a whole prompt."""
    import jax

    import dllm_jax as dj
    from dllm_jax.bench import measure
    from dllm_jax.bench.numbers import device_kind
    from dllm_jax.bench.roofline import RATES, step_parts
    from dllm_jax.facts import PASS_KINDS
    from strategies import MultiBD

    model = dj.load(name)
    strategy = MultiBD(block_size=min(32, size), buffer_size=1)
    columns = -(-(prompt + 2 * strategy.block_size) // 64)
    sizes = {"max_num_seqs": 1, "max_model_len": columns * 64 - strategy.block_size}
    sizes |= {"slot_buckets": (1,), "page_buckets": (columns,), "prefill_buckets": (size,)}
    config = dj.EngineConfig(**sizes, num_pages=2 * columns)
    engine = dj.LLM(model, strategy, calibrate=False, progress=False, config=config).engine
    kind = PASS_KINDS[strategy.needs.prompt]
    passes = [
        measure.prefill_pass_ms(engine, size, columns, kind, first=first)
        for first in range(0, prompt, size)
    ]
    operations = 0.0
    for first in range(0, prompt, size):
        parts = step_parts(model, 1, size // strategy.block_size, strategy.block_size, first)
        operations += sum(ops for part, (_, ops) in parts.items() if part != "head")
    spent_s = sum(passes) / 1e3
    rate = RATES.get(device_kind(), (None, None))[1]
    return {
        "model": name,
        "device": device_kind(),
        "prompt": prompt,
        "pass_tokens": size,
        "pass_ms": passes,
        "prefill_s": spent_s,
        "tok_s": prompt / spent_s,
        "tflop_s": operations / spent_s / 1e12,
        "share_of_peak": rate and operations / spent_s / rate,
        "bar": BARS["share_of_peak"],
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)),
    }


def in_own_process(words, cache):
    """What this script prints as JSON with other words, and when it was started."""
    began = time.time()
    done = subprocess.run(
        [sys.executable, __file__, *words],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "XDG_CACHE_HOME": cache},
    )
    return json.loads(done.stdout.splitlines()[-1]), began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="of both (default: SDAR-1.7B's and SDAR-8B's shapes)")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--pass-tokens", type=int, default=1024)
    parser.add_argument("--out")
    parser.add_argument("--one", choices=("first_token", "prefill"), help="in this process")
    args = parser.parse_args()
    if args.prompt % args.pass_tokens:
        parser.error(f"--prompt {args.prompt} must be whole passes of {args.pass_tokens} tokens")
    if args.one == "first_token":
        print(json.dumps(first_token(args.model or FIRST_MODEL)))
        return
    if args.one == "prefill":
        print(json.dumps(prefill(args.model or PREFILL_MODEL, args.prompt, args.pass_tokens)))
        return
    report = {"command": "benchmarks/start_gpu.py", "bars": BARS}
    same = ["--prompt", str(args.prompt), "--pass-tokens", str(args.pass_tokens)]
    same += ["--model", args.model] if args.model else []
    with tempfile.TemporaryDirectory() as cache:
        report["first_token"] = {"model": args.model or FIRST_MODEL}
        for name in ("cold_s", "warm_s"):
            told, began = in_own_process(["--one", "first_token", *same], cache)
            report["first_token"] |= {name: told["came"] - began, "settled": told["settled"]}
            print(f"first token, {name} {told['came'] - began:.1f} (bar {BARS[name]})", flush=True)
            save(args.out, report)
        report["prefill"], _ = in_own_process(["--one", "prefill", *same], cache)
    print(report["prefill"], flush=True)
    save(args.out, report)


def save(path, report):
    if path:
        Path(path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
