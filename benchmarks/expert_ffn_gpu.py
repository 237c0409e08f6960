"""Routed experts on the device JAX finds: first right, then how near to the memory's speed.

Per shape every form is held to a float32 truth computed on the device, expert by expert; one that
is wrong is not timed. Then a loop on the device runs it over the weights of several layers, each
with its own routing, moved on every round: no layer's experts are in the cache when it comes again.
Rows and routing depend on the last result, so nothing is left out or overlapped; `glue` is the loop
with a copy in the operation's place, and is taken off.

    python benchmarks/expert_ffn_gpu.py --models LLaDA2-mini --out /tmp/expert_ffn_mini.json
    python benchmarks/expert_ffn_gpu.py --tiny      # every line of it on a CPU, in a minute

Prints a table and writes JSON after each line of it: microseconds of one call (median of the runs),
GB/s of the expert weights its rows touch, and the floor: these bytes at 4.3 TB/s, or the useful
products at 790 TFLOP/s. Compiling takes most of its time: a few seconds a line.
"""

import argparse
import functools
import json
import platform
import statistics
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.kernels.expert_ffn import grouped, reference, tiles, triton
from dllm_jax.kernels.expert_ffn.triton import Block, Tiling

MODELS = {  # experts, width, inner, experts of a row
    "LLaDA2-mini": (256, 2048, 512, 8),
    "LLaDA2-flash": (256, 4096, 1024, 8),
    "SDAR-30B-A3B": (128, 2048, 768, 8),
}
TINY = {"tiny": (8, 64, 32, 2)}
BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12  # one H200: copy, dense bfloat16
TOLERANCE = {"bfloat16": 1e-2, "float32": 2e-5}  # of a result and the root mean square of all
TF32_TOLERANCE = 5e-3


def block(columns, depth=64, num_warps=4, num_stages=4):
    return Block(columns=columns, depth=depth, num_warps=num_warps, num_stages=num_stages)


TILINGS = {
    "triton": Tiling(),
    "triton 16 rows": Tiling(rows=16),
    "triton 16 rows, deep": Tiling(rows=16, gate_up=block(64, 128), down=block(128, 128, 4, 3)),
    "triton 32 rows": Tiling(rows=32),
    "triton narrow": Tiling(gate_up=block(32, 64, 4, 5), down=block(64, 64, 4, 5)),
    "triton deep": Tiling(gate_up=block(64, 128, 4, 3), down=block(128, 128, 4, 3)),
    "triton wide": Tiling(gate_up=block(128, 64, 8, 3), down=block(256, 64, 8, 3)),
    "triton 128 rows": Tiling(rows=128, gate_up=block(64, 64, 8), down=block(128, 64, 8)),
}


def forms(interpret):
    """Name -> function of (x, ids, weights, w_gate_up, w_down); the first is the copy."""
    found = {
        "glue": lambda x, *_: x,
        "tile table": _only_table,
        "grouped 16": grouped.expert_ffn,
        "grouped 64": functools.partial(grouped.expert_ffn, tile_rows=64),
        "dense": reference.expert_ffn,
    }
    for name, tiling in TILINGS.items():
        found[name] = functools.partial(triton.expert_ffn, tiling=tiling, interpret=interpret)
    return found


def _only_table(x, ids, weights, w_gate_up, w_down):
    """The bookkeeping of the kernels alone."""
    table = tiles.tile_table(ids, len(w_down), Tiling().rows)
    used = sum(leaf.sum() for leaf in table)
    return x + (used < 0).astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def draw_layer(key, shape, dtype):
    """Weights whose results are of order one."""
    experts, width, inner, _ = shape
    first, second = jax.random.split(key)
    w_gate_up = jax.random.normal(first, (experts, width, 2, inner), dtype) * width**-0.5
    return w_gate_up, jax.random.normal(second, (experts, inner, width), dtype) * inner**-0.5


def draw_rows(seed, rows, shape, dtype, layers):
    """Rows, and for each layer the experts of each row, all different, and their weights."""
    experts, width, _, k = shape
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((layers, rows, experts)), axis=-1)[..., :k]
    weights = rng.random((layers, rows, k), np.float32)
    weights /= weights.sum(axis=-1, keepdims=True)
    x = jnp.asarray(rng.standard_normal((rows, width), np.float32), dtype)
    return x, jnp.asarray(ids, jnp.int32), jnp.asarray(weights)


@jax.jit
def truth(x, ids, weights, w_gate_up, w_down):
    """Expert by expert over all rows, in float32 but for the rounding before `w_down`."""
    dot = functools.partial(jnp.dot, precision="highest")

    def add(e, total):
        gate_up, down = w_gate_up[e].astype(jnp.float32), w_down[e].astype(jnp.float32)
        rows = x.astype(jnp.float32)
        inner = jax.nn.silu(dot(rows, gate_up[:, 0])) * dot(rows, gate_up[:, 1])
        inner = inner.astype(x.dtype).astype(jnp.float32)
        share = jnp.where(ids == e, weights, 0).sum(axis=1, keepdims=True)
        return total + share * dot(inner, down)

    return jax.lax.fori_loop(0, len(w_down), add, jnp.zeros(x.shape, jnp.float32))


def error_of(function, arguments, wanted, scale):
    """Largest difference from the truth, over its size plus `scale`; NaN is infinitely wrong."""
    got = jax.jit(function)(*arguments).astype(jnp.float32)
    error = float((jnp.abs(got - wanted) / (jnp.abs(wanted) + scale)).max())
    return error if np.isfinite(error) else float("inf")


def time_form(function, x, ids, weights, layers, rounds, repeats):
    """Microseconds of one call in a loop on the device, and seconds to compile it."""
    experts = len(layers[0][1])

    @jax.jit
    def loop(x, ids, weights, layers):
        def one_round(i, x):
            for layer, (w_gate_up, w_down) in enumerate(layers):
                never = jnp.isnan(x[0, 0]).astype(jnp.int32)  # a router would wait for x too
                moved = (ids[layer] + 37 * i + never) % experts
                out = function(x, moved, weights[layer], w_gate_up, w_down)
                x = x + out * jnp.asarray(1e-3, x.dtype)
            return x

        return jax.lax.fori_loop(0, rounds, one_round, x)

    began = time.perf_counter()
    program = loop.lower(x, ids, weights, layers).compile()
    compile_s = time.perf_counter() - began
    samples = []
    for _ in range(repeats + 2):  # two to warm up
        began = time.perf_counter()
        out = jax.block_until_ready(program(x, ids, weights, layers))
        samples.append((time.perf_counter() - began) / (rounds * len(layers)) * 1e6)
    assert bool(jnp.isfinite(out).all()), "the loop's rows are not finite"
    samples = samples[2:]
    return statistics.median(samples), min(samples), max(samples), compile_s


def floor_us(rows, shape, ids, itemsize):
    """The least time, and the bytes of weights: those of the experts touched, mean over layers."""
    _, width, inner, k = shape
    touched = np.mean([len(np.unique(layer)) for layer in np.asarray(ids)])
    weight_bytes = touched * 3 * width * inner * itemsize
    flops = rows * k * 6 * width * inner
    return max(weight_bytes / BYTES_PER_S, flops / FLOPS_PER_S) * 1e6, weight_bytes, touched


def measure_shape(model, shape, rows, dtype, layers, args):
    """Lines of the table for one shape."""
    x, ids, weights = draw_rows(rows, rows, shape, dtype, len(layers))
    first = (x, ids[0], weights[0], *layers[0])
    wanted = jax.block_until_ready(truth(*first))
    # A dead pair and a row of dead ones: what no expert touches is written by nobody.
    dead = (x, ids[0].at[0, 0].set(-1).at[-1].set(shape[0]), *first[2:])
    wanted_dead = jax.block_until_ready(truth(*dead))
    scale = jnp.sqrt(jnp.mean(jnp.square(wanted)))
    least, weight_bytes, touched = floor_us(rows, shape, ids, x.dtype.itemsize)
    tolerance = TF32_TOLERANCE if dtype == "float32" and not args.tiny else TOLERANCE[dtype]
    glue_us = 0.0
    for name, function in forms(interpret=jax.default_backend() != "gpu").items():
        if args.only and name not in ("glue", *args.only.split(",")):
            continue
        line = {"model": model, "rows": rows, "dtype": dtype, "form": name, "floor_us": least}
        line |= {"touched": touched, "weight_bytes": weight_bytes}
        try:
            if name not in ("glue", "tile table"):
                line["error"] = error_of(function, first, wanted, scale)
                line["error_dead"] = error_of(function, dead, wanted_dead, scale)
                line["right"] = max(line["error"], line["error_dead"]) <= tolerance
            if line.get("right", True):
                timed = time_form(function, x, ids, weights, layers, args.rounds, args.repeats)
                line |= dict(zip(("us", "min_us", "max_us", "compile_s"), timed, strict=True))
                glue_us = line["us"] if name == "glue" else glue_us
                line["net_us"] = line["us"] - glue_us
                line["gb_s"] = weight_bytes / max(line["net_us"], 1e-3) / 1e3
        except Exception as error:  # a tiling may not compile; the table says so and goes on
            line["failed"] = f"{type(error).__name__}: {error}"[:500]
        yield line


def show(line):
    """One printed line."""
    told = f"{line['model']:>13} {line['dtype']:>8} T {line['rows']:>5} {line['form']:<22}"
    if "failed" in line:
        return f"{told} FAILED {line['failed'][:90]}"
    if not line.get("right", True):
        return f"{told} WRONG by {line['error']:.1e}, with dead pairs {line['error_dead']:.1e}"
    if "error" not in line:
        return f"{told} {line['us']:9.1f} us"
    return (
        f"{told} {line['us']:9.1f} us, net {line['net_us']:9.1f} [{line['min_us']:.1f} "
        f"{line['max_us']:.1f}], {line['gb_s']:7.0f} GB/s, floor {line['floor_us']:.1f} us "
        f"(x {line['net_us'] / line['floor_us']:.2f}), error {line['error']:.0e}, "
        f"compile {line['compile_s']:.1f} s"
    )


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default="4,32,128,1024")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--only", default=None, help="forms, comma-separated")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="small shapes, kernels interpreted")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    if args.tiny:
        args.models, args.rows, args.dtypes = "tiny", "2,20", "bfloat16,float32"
        args.layers, args.rounds, args.repeats = 2, 2, 1
        args.only = args.only or "tile table,grouped 16,dense,triton"
    return args


def main():
    """Check, time, print, write."""
    args = parse()
    git = ["git", "rev-parse", "--short", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    report = {
        "command": "benchmarks/expert_ffn_gpu.py",
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": args.commit or head,
        "layers": args.layers,
        "rounds": args.rounds,
        "repeats": args.repeats,
        "lines": [],
    }
    print({key: value for key, value in report.items() if key != "lines"}, flush=True)
    for model in args.models.split(","):
        shape = (MODELS | TINY)[model]
        for dtype in args.dtypes.split(","):
            keys = jax.random.split(jax.random.key(0), args.layers)
            layers = [draw_layer(key, shape, dtype) for key in keys]
            for rows in map(int, args.rows.split(",")):
                for line in measure_shape(model, shape, rows, dtype, layers, args):
                    report["lines"].append(line)
                    print(show(line), flush=True)
                    if args.out:
                        with open(args.out, "w") as file:
                            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
