"""Every kind of network at its full size on one GPU: start, memory, and a step beside its floor.

    python benchmarks/families_gpu.py --out benchmarks/results/families_h200.json

`models`: random weights made on the device; 1,024 tokens of prompt are prefilled and blocks of 32
decoded with `multi_bd`, by `dj.generate`'s own loop (`step_time.py` says how a step is timed); the
first token written is checked against cache-free logits. Where there are experts, a script sends
the rows to them (`--routing`, see routing_script.py), because random weights send all to a few. A
run of its own counts the experts that a layer's rows reach, and the floor is that of these.
`folder`: SDAR-8B's shapes are written as a Hugging Face folder on the spot and read back, so that
the files lie in the page cache. Each model runs in a process of its own, so that its peak memory is
its own. Prints a line a model and writes JSON.
"""

import argparse
import contextlib
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from routing_script import scripted
from step_time import BLOCK, check_readout, time_shape

import dllm_jax as dj
from dllm_jax.bench.roofline import floor_ms
from dllm_jax.convert import export_hf, load_params
from dllm_jax.models.moe import MoEConfig
from dllm_jax.strategies import MultiBD

MODELS = (
    "random:JetLM/SDAR-8B-Chat",
    "random:GSAI-ML/LLaDA-8B-Instruct",
    "random:Dream-org/Dream-v0-Instruct-7B",
    "random:inclusionAI/LLaDA2.0-mini",
    "random:JetLM/SDAR-30B-A3B-Chat",
)
FOLDER = "random:JetLM/SDAR-8B-Chat"
CONTEXT = 1024


def measure_model(name, shapes, context, repeats, script, quantization, steps_only=False):
    """Start, memory, prefill and step times of one model in this process.

    With `steps_only` one program is compiled for each shape: no token is checked, no prefill timed,
    and the experts counted are those that rows are sent to.
    """
    began = time.perf_counter()
    model = dj.load(name, quantization=quantization)
    jax.block_until_ready(model.params)
    load_s = time.perf_counter() - began
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    device = jax.devices()[0]
    measured = {
        "model": name,
        "device": device.device_kind,
        "quantization": model.quantization,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.params)),
        "weight_bytes": weights,
        "load_s": load_s,
        "readout_matches_dense": None if steps_only else check_readout(model),
        "prefill_s": None if steps_only else time_prefill(model, context),
        "rows": [],
    }
    has_experts = isinstance(model.config, MoEConfig)
    for slots, blocks in shapes:
        touched, drawn = None, []
        if has_experts and not steps_only:
            touched = count_touched(model, slots, blocks, script)
        with scripted(script, drawn=drawn) if has_experts else contextlib.nullcontext():
            # That the tokens are the readout's is checked above.
            row = time_shape(model, slots, blocks, context, None, repeats, least_tokens=1)
        del row["bar_ms"]  # another model's
        if has_experts and steps_only:
            touched = statistics.mean(n for rows, n in drawn if rows == slots * blocks * BLOCK)
        if has_experts:
            row |= {"routing": script, "experts_touched": touched}
        # The cache grows while steps are timed: the floor is that of the prompt alone.
        work = (slots, BLOCK * blocks, context, device.device_kind, touched)
        row["floor_ms"] = floor_ms(model, *work)
        row["over_floor"] = row["floor_ms"] and row["step_ms"] / row["floor_ms"]
        measured["rows"].append(row)
        print(row, file=sys.stderr, flush=True)  # the process may be stopped behind it
    measured["peak_bytes"] = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return measured


def count_touched(model, slots, blocks, script):
    """Experts that a layer's rows reach in a step, in the mean: counted while it runs."""
    prompts = jnp.ones((slots, BLOCK), jnp.int32)
    strategy = MultiBD(block_size=BLOCK, buffer_size=blocks, add_block_threshold=0.0)
    reached, layers = [], sum(model.config.moe_layers)
    with scripted(script, reached):
        out = dj.generate(
            model, prompts, strategy, max_tokens=256, max_nfe=2 + blocks, ignore_eos=True
        )
        jax.block_until_ready(out)
        jax.effects_barrier()
    return sum(reached[-layers:]) / layers  # of the last step, whose window is full


def time_prefill(model, context):
    """Seconds of one prompt's prefill and a first step, compiled before."""
    prompt = jnp.arange(context, dtype=jnp.int32)[None] % (model.config.vocab_size * 9 // 10)
    strategy = MultiBD(block_size=BLOCK, buffer_size=1)
    spent = []
    for _ in range(3):
        began = time.perf_counter()
        jax.block_until_ready(dj.generate(model, prompt, strategy, max_tokens=32, max_nfe=1))
        spent.append(time.perf_counter() - began)
    return min(spent[1:])


def measure_folder(name):
    """Rates at which a folder just written is read: into host memory, and as a model."""
    model = dj.load(name)
    with tempfile.TemporaryDirectory() as parent:
        began = time.perf_counter()
        folder = export_hf(model.params, model.config, Path(parent) / "model")
        write_s = time.perf_counter() - began
        del model
        size = (folder / "model.safetensors").stat().st_size
        began = time.perf_counter()
        params, _ = load_params(folder)
        host_s = time.perf_counter() - began
        del params
        began = time.perf_counter()
        jax.block_until_ready(dj.load(folder).params)
        load_s = time.perf_counter() - began
    return {
        "model": name,
        "bytes": size,
        "write_gb_s": size / write_s / 1e9,
        "read_gb_s": size / host_s / 1e9,
        "load_gb_s": size / load_s / 1e9,
    }


def in_own_process(*words):
    """What this script prints as JSON with other words; None if it fails.

    The caller itself never touches the device, whose memory the first to do so takes.
    """
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--folder", default=FOLDER, help="model of the folder, or none")
    parser.add_argument("--shapes", default="1x1,1x4,8x1", help="slots x blocks")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--routing", default="uniform", help="see routing_script.py")
    parser.add_argument("--quantization", choices=("fp8", "none"), default="none")
    parser.add_argument("--steps-only", action="store_true", help="one program a shape")
    parser.add_argument("--commit")
    parser.add_argument("--out")
    parser.add_argument("--one", help="measure this model in this process, print JSON")
    parser.add_argument("--one-folder", help="the same of a folder")
    args = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes.split(",")]
    if args.one:
        how = (args.context, args.repeats, args.routing, args.quantization, args.steps_only)
        print(json.dumps(measure_model(args.one, shapes, *how)))
        return 0
    if args.one_folder:
        print(json.dumps(measure_folder(args.one_folder)))
        return 0
    commit = (
        args.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    report = {
        "command": "benchmarks/families_gpu.py",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "block_size": BLOCK,
        "context": args.context,
        "folder": None,
        "models": [],
    }
    same = ["--shapes", args.shapes, "--context", str(args.context), "--repeats", str(args.repeats)]
    same += ["--routing", args.routing, "--quantization", args.quantization]
    same += ["--steps-only"] if args.steps_only else []
    work = [(name, ["--one", name, *same]) for name in args.models.split(",") if name]
    if args.folder != "none":
        work.append(("folder", ["--one-folder", args.folder]))
    failed = 0
    for name, words in work:
        measured = in_own_process(*words)
        failed += measured is None
        if name == "folder":
            report["folder"] = measured
            print(f"folder {measured}", flush=True)
        else:
            report["models"].append(measured or {"model": name, "failed": True})
            print(line(name, measured), flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed else 0


def line(name, measured):
    """One model's figures for people."""
    if measured is None:
        return f"{name}: failed"
    steps = ", ".join(
        f"{row['slots']}x{row['blocks']} {row['step_ms']:.2f} ms"
        + (f" (x{row['over_floor']:.2f} of its floor)" if row["over_floor"] else "")
        + (f" with {row['experts_touched']:.1f} experts" if "routing" in row else "")
        for row in measured["rows"]
    )
    peak = f"{measured['peak_bytes'] / 2**30:.1f} GiB" if measured["peak_bytes"] else "not counted"
    found = f"{name}: {measured['parameters'] / 1e9:.2f} G, load {measured['load_s']:.1f} s, "
    found += f"peak {peak}, {steps}"
    if measured["prefill_s"] is None:
        return f"{found}, nothing checked"
    readout = "right" if measured["readout_matches_dense"] else "WRONG"
    return f"{found}, prefill {1e3 * measured['prefill_s']:.1f} ms, readout {readout}"


if __name__ == "__main__":
    sys.exit(main())
