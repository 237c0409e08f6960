"""Shapes at which a loop over sorted tiles beats all experts over all rows, on this machine's CPU.

    python benchmarks/expert_ffn_cpu.py --out benchmarks/results/expert_ffn_cpu.json

Prints a table and writes JSON: per shape the minimum of many interleaved runs of each back end in
milliseconds (on a busy machine the minimum is the most reliable), and which of them
`implementation=None` takes.
"""

import argparse
import json
import os
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.kernels.expert_ffn import api, grouped, reference

EXPERTS = ((4, 2), (8, 2), (16, 4), (64, 8))  # experts, experts of a row
WIDTHS = ((64, 64), (256, 128), (512, 512), (1024, 512))
ROWS = (1, 4, 8, 16, 32, 64, 256)
MOST_WORK = 2.5e9  # rows x experts x widths beyond which dense is not worth the wait


def draw(rows, k, experts, width, inner, dtype, seed=0):
    """Unit-normal data, each row routed to `k` different experts."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((rows, experts)), axis=1)[:, :k]

    def normal(*shape, scale=1.0):
        return jnp.asarray(rng.standard_normal(shape, np.float32) * scale, dtype)

    return (
        normal(rows, width),
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(rng.random((rows, k)), jnp.float32),
        normal(experts, width, 2, inner, scale=width**-0.5),
        normal(experts, inner, width, scale=inner**-0.5),
    )


def least_ms(functions, arguments, budget_s):
    """Least time of each function, called in turn."""
    for function in functions:
        jax.block_until_ready(function(*arguments))
    least = [float("inf")] * len(functions)
    end = time.perf_counter() + budget_s
    runs = 0
    while time.perf_counter() < end or runs < 5:
        for i, function in enumerate(functions):
            began = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            least[i] = min(least[i], (time.perf_counter() - began) * 1e3)
        runs += 1
    return least


def measure(shape, dtype, budget_s):
    """One line of the table."""
    rows, k, experts, width, inner = shape
    arguments = draw(*shape, dtype)
    functions = [jax.jit(reference.expert_ffn), jax.jit(grouped.expert_ffn)]
    dense_ms, grouped_ms = least_ms(functions, arguments, budget_s)
    return {
        "rows": rows,
        "k": k,
        "experts": experts,
        "width": width,
        "inner": inner,
        "dtype": dtype,
        "dense_ms": dense_ms,
        "grouped_ms": grouped_ms,
        "chosen": api.choose(arguments[0], arguments[1], arguments[4]),
    }


def main():
    """Time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds a shape")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    report = {
        "command": "benchmarks/expert_ffn_cpu.py",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "tile_rows": grouped.TILE_ROWS,
        "rows": [],
    }
    for dtype in args.dtypes.split(","):
        for (experts, k), (width, inner), rows in (
            (e, w, r) for e in EXPERTS for w in WIDTHS for r in ROWS
        ):
            if rows * experts * width * inner > MOST_WORK:
                continue
            row = measure((rows, k, experts, width, inner), dtype, args.budget)
            report["rows"].append(row)
            ratio = row["dense_ms"] / row["grouped_ms"]
            lost = ratio if row["chosen"] == "dense" else 1 / ratio
            print(
                f"E {experts:3} k {k} D {width:4} F {inner:3} T {rows:3} {dtype}: dense "
                f"{row['dense_ms']:8.3f} grouped {row['grouped_ms']:8.3f} ms, ratio {ratio:5.2f}, "
                f"{row['chosen']}{'  loses' if lost > 1.25 else ''}",
                flush=True,
            )
    if args.out:
        with open(args.out, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
