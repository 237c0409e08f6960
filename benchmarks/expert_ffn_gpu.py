"""Routed experts on the device JAX finds: first right, then how near to the memory's speed.

Per shape every form is held to a float32 truth computed on the device, expert by expert, as it is
and with pairs of no expert; a row must have the same bits alone and in the batch. One that is wrong
is not timed. Then a loop on the device runs it over the weights of several layers, each with its
own routing, moved on every round: no layer's experts are in the cache when it comes again. Rows and
routing depend on the last result, so nothing is left out or overlapped; `glue` is the loop with a
copy in the operation's place, and is taken off.

    python benchmarks/expert_ffn_gpu.py --models LLaDA2-mini --out /tmp/expert_ffn_mini.json
    python benchmarks/expert_ffn_gpu.py --dtypes fp8 --only mosaic  # experts and rows in 8 bits
    python benchmarks/expert_ffn_gpu.py --tiny      # every line of it on a CPU, in a minute

Routing is scripted (`--routing`, see routing_script.py), and the experts that rows touch are
counted.

Prints a table and writes JSON after each line of it: microseconds of one call (median of the runs),
GB/s of the expert weights its rows touch, and the floor: these bytes at 4.3 TB/s, or the useful
products at 790 TFLOP/s, in 8 bits at twice that. Programs of one shape compile side by side.
"""

import argparse
import collections
import concurrent.futures
import functools
import itertools
import json
import platform
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from routing_script import draw_ids

from dllm_jax.bench.numbers import commit
from dllm_jax.bench.profile import traced
from dllm_jax.kernels.activation import ACTIVATIONS
from dllm_jax.kernels.expert_ffn import grouped, mosaic, reference, tiles
from dllm_jax.kernels.expert_ffn.fp8 import Fp8Experts, quantize_experts
from dllm_jax.kernels.layer.fp8 import quantize

MODELS = {  # experts, width, inner, experts of a row
    "LLaDA2-mini": (256, 2048, 512, 8),
    "LLaDA2-flash": (256, 4096, 1024, 8),
    "SDAR-30B-A3B": (128, 2048, 768, 8),
    "DiffusionGemma": (128, 2816, 704, 8),
}
TINY = {"tiny": (8, 128, 64, 2)}
GELU = ("DiffusionGemma",)
SLOW = ("grouped", "dense")  # timed once
ALONE = 3  # rows that are computed apart from the others too
BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12  # one H200: copy, dense bfloat16
# Of a result and the root mean square of all; in bfloat16 the result of an expert may be rounded.
# In 8 bits the tensor cores' sums are apart by 0.3 % (fp8_h200_products.json), by which numbers
# between the products fall on the other side of a rounding: 1.7 % of all results in the mean.
TOLERANCE = {"bfloat16": 2e-2, "float32": 2e-5, "fp8": 2e-1}
MEAN_TOLERANCE = 2.5e-2  # of the root mean square; the rounding itself is 5e-2
TF32_TOLERANCE = 5e-3


# By rows of an expert, in the mean, up to: warpgroups, columns of gate and up, columns of down, and
# rows of a tile if they take turns.
MOSAIC_TILINGS = {
    24: ((1, 128, 128), (1, 128, 256), (1, 256, 256)),
    96: ((1, 256, 256), (2, 128, 256), (2, 256, 256)),
    160: ((3, 128, 128), (2, 128, 128, 192)),
    1e9: ((2, 128, 128, 320), (2, 128, 256)),
}


def forms(activation, rows, shape, dtype, interpret, tilings):
    """Name -> function of (x, ids, weights, w_gate_up, w_down); the first is the copy."""
    experts, _, _, k = shape
    given = functools.partial(functools.partial, activation=activation)
    found = {
        "glue": lambda x, *_: x,
        "tile table": _only_table,
        "grouped 16": given(grouped.expert_ffn),
        "grouped 64": given(grouped.expert_ffn, tile_rows=64),
        "dense": given(reference.expert_ffn),
    }
    if interpret:  # as slow as a CPU is
        return found
    near = tilings or next(
        tried for most, tried in MOSAIC_TILINGS.items() if rows * k / experts <= most
    )
    for numbers in near:
        names = ("groups", "gate_up", "down", "rows")
        tiling = mosaic.Tiling(**dict(zip(names, numbers, strict=False)))
        found[f"mosaic {' '.join(map(str, numbers))}"] = given(mosaic.expert_ffn, tiling=tiling)
    return found


def _only_table(x, ids, weights, w_gate_up, w_down):
    """The bookkeeping of the kernels alone."""
    table = tiles.tile_table(ids, len(w_down), 64)
    used = sum(leaf.sum() for leaf in table)
    return x + (used < 0).astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def draw_layer(key, shape, dtype):
    """Weights whose results are of order one."""
    experts, width, inner, _ = shape
    first, second = jax.random.split(key)
    kind = "bfloat16" if dtype == "fp8" else dtype
    w_gate_up = jax.random.normal(first, (experts, width, 2, inner), kind) * width**-0.5
    w_down = jax.random.normal(second, (experts, inner, width), kind) * inner**-0.5
    return (
        tuple(map(quantize_experts, (w_gate_up, w_down))) if dtype == "fp8" else (w_gate_up, w_down)
    )


def draw_rows(seed, rows, shape, dtype, layers, script):
    """Rows, and for each layer the experts of each row, all different, and their weights."""
    experts, width, _, k = shape
    rng = np.random.default_rng(seed)
    ids = np.stack([draw_ids(rng, script, rows, experts, k) for _ in range(layers)])
    weights = rng.random((layers, rows, k), np.float32)
    weights /= weights.sum(axis=-1, keepdims=True)
    x = jnp.asarray(rng.standard_normal((rows, width), np.float32), dtype)
    return x, jnp.asarray(ids), jnp.asarray(weights)


@functools.partial(jax.jit, static_argnames="activation")
def truth(x, ids, weights, w_gate_up, w_down, *, activation="silu"):
    """Expert by expert over all rows, in float32 but for the roundings."""
    dot = functools.partial(jnp.dot, precision="highest")

    def of(e, w):
        if not isinstance(w, Fp8Experts):
            return w[e].astype(jnp.float32)
        values = w.values[e][..., : w.depth].astype(jnp.float32)
        return jnp.moveaxis(values * w.scales[e][..., None], -1, 0)

    def rounded(rows):
        if not isinstance(w_down, Fp8Experts):
            return rows.astype(jnp.float32)
        values, scales = quantize(rows, is_rows=True)
        values = jax.lax.optimization_barrier(values)  # XLA leaves casts there and back out
        return values.astype(jnp.float32) * scales[:, None]

    def add(e, total):
        gate_up, down, rows = of(e, w_gate_up), of(e, w_down), rounded(x)
        inner = ACTIVATIONS[activation](dot(rows, gate_up[:, 0])) * dot(rows, gate_up[:, 1])
        kind = jnp.finfo(x.dtype)  # a cast there and back XLA may leave out
        inner = rounded(jax.lax.reduce_precision(inner, kind.nexp, kind.nmant))
        share = jnp.where(ids == e, weights, 0).sum(axis=1, keepdims=True)
        return total + share * dot(inner, down)

    return jax.lax.fori_loop(0, len(w_down), add, jnp.zeros(x.shape, jnp.float32))


def error_of(got, wanted, scale):
    """Largest difference from the truth, over its size plus `scale`; NaN is infinitely wrong."""
    error = float((jnp.abs(got.astype(jnp.float32) - wanted) / (jnp.abs(wanted) + scale)).max())
    return error if np.isfinite(error) else float("inf")


def compile_form(function, rounds, x, ids, weights, layers):
    """A loop on the device over all layers, and seconds to compile it.

    So many rounds are a constant: else the host would ask after each whether there is another, and
    the first launches of the next would wait for it.

    It returns the rows of the last round, and what the first layer gave in it: after one round, the
    operation's result for the arguments.
    """
    experts = len(layers[0][1])

    @jax.jit
    def loop(x, ids, weights, layers):
        def one_round(i, carry):
            x, outs = carry[0], []
            for layer, (w_gate_up, w_down) in enumerate(layers):
                never = jnp.isnan(x[0, 0]).astype(jnp.int32)  # a router would wait for x too
                is_one = (ids[layer] >= 0) & (ids[layer] < experts)
                moved = (ids[layer] + 37 * i + never) % experts
                moved = jnp.where(is_one, moved, ids[layer])
                outs.append(function(x, moved, weights[layer], w_gate_up, w_down))
                x = x + outs[-1] * jnp.asarray(1e-3, x.dtype)
            return x, outs[0]

        return jax.lax.fori_loop(0, rounds, one_round, (x, jnp.full_like(x, jnp.nan)))

    began = time.perf_counter()
    program = loop.lower(x, ids, weights, layers).compile()
    return program, time.perf_counter() - began


def time_form(program, x, ids, weights, layers, rounds, repeats):
    """Microseconds of one call: median, least and most."""
    samples = []
    for _ in range(repeats + 2):  # two to warm up
        began = time.perf_counter()
        out = jax.block_until_ready(program(x, ids, weights, layers))
        samples.append((time.perf_counter() - began) / (rounds * len(layers)) * 1e6)
    assert bool(jnp.isfinite(out[0]).all()), "the loop's rows are not finite"
    samples = samples[2:]
    return statistics.median(samples), min(samples), max(samples)


def kernels_of(program, x, ids, weights, layers, rounds):
    """Microseconds of each kernel in one call of the operation, glue included."""
    spent = collections.Counter()
    for event in traced(lambda: jax.block_until_ready(program(x, ids, weights, layers))).events:
        spent[event.name] += event.duration_ns / 1e3 / (rounds * len(layers))
    return {name: round(us, 2) for name, us in spent.most_common(12)}


def floor_us(rows, shape, ids, itemsize):
    """The least time, and the bytes of weights: those of the experts touched, mean over layers."""
    _, width, inner, k = shape
    touched = np.mean([len(np.unique(layer)) for layer in np.asarray(ids)])
    weight_bytes = touched * 3 * width * inner * itemsize
    flops = rows * k * 6 * width * inner
    rate = FLOPS_PER_S * (2 if itemsize == 1 else 1)
    return max(weight_bytes / BYTES_PER_S, flops / rate) * 1e6, weight_bytes, touched


def check_form(program, x, ids, weights, layers, activation, tolerance):
    """What is known of its results; `right` if it may be timed.

    NaN is in rows of no expert, which must not be read.
    """
    experts, layer = len(layers[0][1]), layers[0]

    def run(x, ids):
        out = program(x, ids, weights, layers)[1]
        wanted = truth(jnp.nan_to_num(x), ids[0], weights[0], *layer, activation=activation)
        scale = jnp.sqrt(jnp.mean(jnp.square(wanted)))
        mean = float(jnp.sqrt(jnp.mean(jnp.square(out.astype(jnp.float32) - wanted))) / scale)
        return out, error_of(out, wanted, scale), mean

    out, error, mean = run(x, ids)
    # A dead pair and a row of dead ones: what no expert touches is never written.
    dead = ids.at[:, 0, 0].set(-1).at[:, -1].set(experts)
    _, error_dead, _ = run(x.at[-1].set(jnp.nan), dead)
    others = jnp.arange(len(x)) >= ALONE
    nobody = jnp.where(others[:, None], -1, ids)
    alone, *_ = run(jnp.where(others[:, None], jnp.nan, x), nobody)
    return {
        "error": error,
        "error_dead": error_dead,
        "mean_error": mean,
        "same_alone": bool(jnp.array_equal(alone[:ALONE], out[:ALONE])),
        "right": max(error, error_dead) <= tolerance and mean <= MEAN_TOLERANCE,
    }


def measure_shape(model, shape, rows, dtype, layers, args, tilings):
    """Lines of the table for one shape."""
    kind = "bfloat16" if dtype == "fp8" else dtype
    x, ids, weights = draw_rows(rows, rows, shape, kind, len(layers), args.routing)
    activation = "gelu" if model in GELU else "silu"
    itemsize = jax.tree.leaves(layers)[0].dtype.itemsize
    least, weight_bytes, touched = floor_us(rows, shape, ids, itemsize)
    tolerance = TF32_TOLERANCE if dtype == "float32" and not args.tiny else TOLERANCE[dtype]
    is_cpu = jax.default_backend() != "gpu"
    found = forms(activation, rows, shape, dtype, is_cpu, tilings)
    only = [name for name in (args.only or "").split(",") if name]
    wanted_forms = {
        name: function
        for name, function in found.items()
        if not only or name in ("glue", *only) or ("mosaic" in only and name.startswith("mosaic"))
    }

    given = (x, ids, weights, layers)
    with concurrent.futures.ThreadPoolExecutor(args.threads) as pool:
        work = {
            (name, rounds): pool.submit(compile_form, function, rounds, *given)
            for name, function in wanted_forms.items()
            for rounds in {1, 1 if name.split()[0] in SLOW else args.rounds}
        }
    glue_us = 0.0
    for i, name in enumerate(wanted_forms):
        # Other rows for each form, so that what another left in memory is wrong here.
        given = (jax.random.permutation(jax.random.key(i), x), *given[1:])
        line = {"model": model, "rows": rows, "dtype": dtype, "form": name, "floor_us": least}
        line |= {"routing": args.routing, "touched": touched, "weight_bytes": weight_bytes}
        try:
            rounds, repeats = (1, 1) if name.split()[0] in SLOW else (args.rounds, args.repeats)
            program, line["compile_s"] = work[name, 1].result()
            if name not in ("glue", "tile table"):
                line |= check_form(program, *given, activation, tolerance)
            if line.get("right", True):
                program, _ = work[name, rounds].result()
                timed = time_form(program, *given, rounds, repeats)
                line |= dict(zip(("us", "min_us", "max_us"), timed, strict=True))
                glue_us = line["us"] if name == "glue" else glue_us
                line["net_us"] = line["us"] - glue_us
                if args.profile and name.startswith("mosaic"):
                    line["kernels"] = kernels_of(program, *given, rounds)
                line["gb_s"] = weight_bytes / max(line["net_us"], 1e-3) / 1e3
        except Exception as error:  # a tiling may not compile; the table says so and goes on
            line["failed"] = f"{type(error).__name__}: {error}"[:500]
        yield line


def show(line):
    """One printed line."""
    measured = (
        f"{line['model']:>14} {line['dtype']:>8} T {line['rows']:>5}, {line['touched']:5.1f} "
        f"experts ({line['routing']}) {line['form']:<22}"
    )
    if "failed" in line:
        return f"{measured} FAILED {line['failed'][:90]}"
    if not line.get("right", True):
        return (
            f"{measured} WRONG by {line['error']:.1e}, mean {line['mean_error']:.1e}, with dead "
            f"pairs {line['error_dead']:.1e}"
        )
    if "error" not in line:
        return f"{measured} {line['us']:9.1f} us"
    return (
        f"{measured} {line['us']:9.1f} us, net {line['net_us']:9.1f} [{line['min_us']:.1f} "
        f"{line['max_us']:.1f}], {line['gb_s']:7.0f} GB/s, floor {line['floor_us']:.1f} us "
        f"(x {line['net_us'] / line['floor_us']:.2f}), error {line['error']:.0e}, mean "
        f"{line['mean_error']:.1e}, "
        f"{'same' if line['same_alone'] else 'OTHER'} alone, compile {line['compile_s']:.1f} s"
        + "".join(f"\n      {us:9.2f} {name[:90]}" for name, us in line.get("kernels", {}).items())
    )


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default="32,128,256,1024,4096")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--routing", default="uniform", help="uniform, a number, zipf or a file")
    parser.add_argument("--threads", type=int, default=8, help="that compile")
    parser.add_argument("--only", default=None, help="forms, comma-separated; mosaic: all of it")
    parser.add_argument(
        "--cases",
        default=None,
        help='instead of all models by all rows, with tilings of mosaic: "LLaDA2-mini:32:1 128 256/'
        '1 256 256,DiffusionGemma:256:"',
    )
    parser.add_argument("--profile", action="store_true", help="name each kernel's time too")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="small shapes, kernels interpreted")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    if args.tiny:
        args.models, args.rows, args.dtypes = "tiny", "2,20", "bfloat16,float32,fp8"
        args.layers, args.rounds, args.repeats = 2, 2, 1
        args.only = args.only or "tile table,grouped 16,dense"
    return args


def main():
    """Check, time, print, write."""
    args = parse()
    report = {
        "command": "benchmarks/expert_ffn_gpu.py",
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": args.commit or commit(),
        "layers": args.layers,
        "routing": args.routing,
        "rounds": args.rounds,
        "repeats": args.repeats,
        "lines": [],
    }
    print({key: value for key, value in report.items() if key != "lines"}, flush=True)
    drawn, layers = None, []
    for model, dtype, rows, tilings in cases(args):
        shape = (MODELS | TINY)[model]
        if drawn != (model, dtype):
            drawn, layers = (model, dtype), []  # the last model's go first
            keys = jax.random.split(jax.random.key(0), args.layers)
            layers = [draw_layer(key, shape, dtype) for key in keys]
        for line in measure_shape(model, shape, rows, dtype, layers, args, tilings):
            report["lines"].append(line)
            print(show(line), flush=True)
            if args.out:
                with open(args.out, "w") as file:
                    json.dump(report, file, indent=1)


def cases(args):
    """Models, types, rows, and the tilings to try; none: those of the table."""
    if args.cases is None:
        every = itertools.product(args.models.split(","), args.dtypes.split(","))
        return [(*one, int(rows), []) for one in every for rows in args.rows.split(",")]
    found = []
    for case in args.cases.split(","):
        model, rows, tilings = case.split(":")
        tilings = [tuple(map(int, each.split())) for each in tilings.split("/") if each]
        found += [(model, dtype, int(rows), tilings) for dtype in args.dtypes.split(",")]
    return found


if __name__ == "__main__":
    main()
