"""Every kind of network at its full size on one GPU: start, memory, and a step beside its floor.

    python benchmarks/families_gpu.py --out benchmarks/results/families_h200.json

`models`: random weights made on the device; 1,024 tokens of prompt are prefilled and blocks of 32
decoded with `multi_bd`, by `dj.generate`'s own loop (`step_time.py` says how a step is timed); the
first token written is checked against cache-free logits. Where there are experts, a script sends
the rows to them (`--routing`, see routing_script.py), because random weights send all to a few. A
run of its own counts the experts that a layer's rows reach, and the floor is that of these.
`folder`: the tensors of a published config are written as a Hugging Face folder on the spot and
read back, as plain bytes and as a model, so that the file lies in the page cache. Each model runs
in a process of its own, so that its peak memory is its own, and its programs compile side by side.
Prints a line a model and writes JSON.

Several of these scripts may share a device (`XLA_PYTHON_CLIENT_MEM_FRACTION`) with one `--turns`
file: nothing else of theirs compiles or runs while one of them times.
"""

import argparse
import concurrent.futures
import contextlib
import fcntl
import functools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from routing_script import scripted
from step_time import BLOCK, FEW, check_readout, loop_of, time_shape

import dllm_jax as dj
from dllm_jax.bench.roofline import floor_ms
from dllm_jax.convert.rules import placements, tensor_shapes
from dllm_jax.convert.tensor_names import table_of
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.families import parse_config
from dllm_jax.models.moe import MoEConfig
from dllm_jax.models.published import PUBLISHED
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
THREADS = min(16, os.cpu_count() or 1)  # of the loader
PIECE = 1 << 23  # bytes


def measure_model(name, shapes, context, repeats, scripts, quantization, steps_only, turns):
    """Start, memory, prefill and step times of one model in this process.

    With `steps_only` one program is compiled for each shape: no token is checked, no prefill timed,
    and the experts counted are those that rows are sent to.
    """
    alone = taking_turns(turns)
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
        "readout_matches_dense": None,
        "prefill_s": None,
        "rows": [],
    }
    if not steps_only:
        prefill = functools.partial(run_prefill, model, context)
        (matches, _), _ = side_by_side([functools.partial(check_readout, model), prefill])
        measured["readout_matches_dense"] = matches
        with alone():
            measured["prefill_s"] = min(side_by_side([prefill])[1][0] for _ in range(2))
    has_experts = isinstance(model.config, MoEConfig)
    for script in scripts if has_experts else [None]:
        measured["rows"] += time_shapes(
            model, shapes, context, repeats, script, not steps_only, alone
        )
    measured["peak_bytes"] = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return measured


def time_shapes(model, shapes, context, repeats, script, is_counted, alone):
    """A row for each shape, with experts by `script`; None: the model has none."""
    touched = [None] * len(shapes)
    if script and is_counted:
        touched = count_touched(model, shapes, script)
    drawn, rows = [], []
    with scripted(script, drawn=drawn) if script else contextlib.nullcontext():
        loops = [loop_of(model, *shape, context, None) for shape in shapes]
        _, spent = side_by_side([functools.partial(loop, FEW) for loop in loops])
        for (slots, blocks), reached, compile_s in zip(shapes, touched, spent, strict=True):
            with alone():
                # That the tokens are the readout's is checked above.
                row = time_shape(model, slots, blocks, context, None, repeats, least_tokens=1)
            del row["bar_ms"]  # another model's
            row["compile_s"] = compile_s
            if script:
                sent = [n for count, n in drawn if count == slots * blocks * BLOCK]
                reached = statistics.mean(sent) if reached is None else reached
                row |= {"routing": script, "experts_touched": reached}
            # The cache grows while steps are timed: the floor is that of the prompt alone.
            work = (slots, BLOCK * blocks, context, jax.devices()[0].device_kind, reached)
            row["floor_ms"] = floor_ms(model, *work)
            row["over_floor"] = row["floor_ms"] and row["step_ms"] / row["floor_ms"]
            rows.append(row)
            print(row, file=sys.stderr, flush=True)  # the process may be stopped behind it
    return rows


def side_by_side(calls):
    """Their results, and seconds of each, in threads of their own so that they compile at once."""

    def timed(call):
        began = time.perf_counter()
        return call(), time.perf_counter() - began

    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return tuple(zip(*pool.map(timed, calls), strict=True))


def taking_turns(path):
    """A context in which no other process that was given this file compiles or times."""
    if path is None:
        return contextlib.nullcontext
    file = open(path, "a")  # noqa: SIM115 (held as long as the process lives)
    fcntl.flock(file, fcntl.LOCK_SH)

    @contextlib.contextmanager
    def alone():
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_SH)

    return alone


def count_touched(model, shapes, script):
    """Experts that a layer reaches in a step of each shape, in the mean: counted while it runs."""
    reached, layers = [], sum(model.config.moe_layers)

    def run(slots, blocks):
        prompts = jnp.ones((slots, BLOCK), jnp.int32)
        strategy = MultiBD(block_size=BLOCK, buffer_size=blocks, add_block_threshold=0.0)
        how = {"max_tokens": 256, "max_nfe": 2 + blocks, "ignore_eos": True}
        jax.block_until_ready(dj.generate(model, prompts, strategy, **how))

    with scripted(script, reached):
        side_by_side([functools.partial(run, *shape) for shape in shapes])
        jax.effects_barrier()
    found = [
        [n for rows, n in reached if rows == slots * blocks * BLOCK] for slots, blocks in shapes
    ]
    return [sum(each[-layers:]) / layers for each in found]  # of the last step: its window is full


def run_prefill(model, context):
    """One prompt's prefill and a first step."""
    prompt = jnp.arange(context, dtype=jnp.int32)[None] % (model.config.vocab_size * 9 // 10)
    strategy = MultiBD(block_size=BLOCK, buffer_size=1)
    return jax.block_until_ready(dj.generate(model, prompt, strategy, max_tokens=32, max_nfe=1))


def measure_folder(name):
    """Rates at which a folder just written is read: as plain bytes, and as a model."""
    with tempfile.TemporaryDirectory() as parent:
        path = write_folder(name, Path(parent))
        size = path.stat().st_size
        began = time.perf_counter()
        read_plainly(path, size)
        read_s = time.perf_counter() - began
        began = time.perf_counter()
        model = dj.load(parent, "bfloat16")
        jax.block_until_ready(model.params)
        load_s = time.perf_counter() - began
    return {
        "model": name,
        "device": jax.devices()[0].device_kind,
        "bytes": size,
        "threads": THREADS,
        "read_gb_s": size / read_s / 1e9,
        "load_gb_s": size / load_s / 1e9,
        "load_s_over_read_s": load_s / read_s,
    }


def write_folder(name, folder):
    """The one file of weights: a published config's tensors, in bfloat16, of a few numbers."""
    published = PUBLISHED[name.removeprefix("random:")]
    family, config, *_ = parse_config(published, name=name)
    shapes = arch_of(config).param_shapes(config)
    header, size = {}, 0
    for tensor, shape in tensor_shapes(placements(table_of(family).rules_for(), shapes)).items():
        end = size + 2 * math.prod(shape)
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [size, end]}
        size = end
    (folder / "config.json").write_text(json.dumps(published))
    text = json.dumps(header).encode()
    numbers = np.random.default_rng(0).normal(0, 0.02, PIECE // 2).astype(jnp.bfloat16).tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, size, PIECE):
            file.write(numbers[: size - start])
    return folder / "model.safetensors"


def read_plainly(path, size):
    """Read a file by as many threads as the loader has, into memory of their own."""

    def read(first):
        memory = memoryview(bytearray(PIECE))
        for start in range(first * PIECE, size, THREADS * PIECE):
            os.preadv(file.fileno(), [memory], start)

    with path.open("rb") as file, concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(read, range(THREADS)))


def in_own_process(*words):
    """What this script prints as JSON with other words; None if it fails.

    The caller itself never touches the device, whose memory the first to do so takes.
    """
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--folder", default=FOLDER, help="published config of the folder, or none")
    parser.add_argument("--shapes", default="1x1,1x4,8x1", help="slots x blocks")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--routing", default="uniform", help="one or more of routing_script.py")
    parser.add_argument("--turns", help="a file, shared by scripts that share the device")
    parser.add_argument("--quantization", choices=("fp8", "none"), default="none")
    parser.add_argument("--steps-only", action="store_true", help="one program a shape")
    parser.add_argument("--commit")
    parser.add_argument("--out")
    parser.add_argument("--one", help="measure this model in this process, print JSON")
    parser.add_argument("--one-folder", help="the same of a folder with this config")
    args = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes.split(",")]
    if args.one:
        how = (args.context, args.repeats, args.routing.split(","), args.quantization)
        more = (args.steps_only, args.turns)
        print(json.dumps(measure_model(args.one, shapes, *how, *more)))
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
    same += ["--turns", args.turns] if args.turns else []
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
