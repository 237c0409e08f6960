"""Attention alone on the device JAX finds: first right, then how near to the floor.

Per cell (sequences, context, rows, heads) every form is held to a float32 truth computed on the
device; one that is wrong is not timed. Then a loop on the device runs it over several layers' own
pools, 0.8 GB of them where a cell is smaller, so that no key is in the cache when it comes again.
The rows of a call depend on the last result; `glue` is the loop alone, and is taken off.

    python benchmarks/paged_attention_gpu.py --out /tmp/attention.json
    python benchmarks/paged_attention_gpu.py --tiny     # every line of it on a CPU, in a minute

Prints a table and writes JSON after each cell: microseconds of one call (median of the runs), TB/s
of keys and values, and the floor: bytes at 4.3 TB/s, or the useful products at 790 TFLOP/s.
"""

import argparse
import dataclasses
import functools
import json
import platform
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import WindowMask, cudnn, reference, triton

BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12  # one H200: copy, dense bfloat16
POOL_BYTES = 0.8e9
PAGE, BLOCK = 64, 32
TOLERANCE = 2e-2  # of a result and the root mean square of all
HEADS = {  # query heads, KV heads, head size
    "SDAR-8B": (32, 8, 128),
    "SDAR-1.7B": (16, 8, 128),
    "LLaDA-8B": (32, 32, 128),
    "Dream-7B": (28, 4, 128),
}
CELLS = [  # model, sequences, context (None: ragged), rows
    ("SDAR-1.7B", 1, 512, 32),
    ("SDAR-1.7B", 1, 512, 128),
    ("SDAR-1.7B", 8, 512, 128),
    ("SDAR-1.7B", 32, 512, 128),
    ("SDAR-1.7B", 1, 8192, 32),
    ("SDAR-8B", 1, 512, 128),
    ("SDAR-8B", 8, 1024, 32),
    ("SDAR-8B", 1, 8192, 128),
    ("SDAR-8B", 32, None, 32),
    ("SDAR-8B", 1, 3584, 512),
    ("LLaDA-8B", 8, 1024, 32),
    ("Dream-7B", 8, 1024, 32),
]
TINY = [("SDAR-1.7B", 1, 128, 8)]
VARIANTS = {
    "triton": {},
    "triton r32": {"rows": 32},
    "triton r128 w8": {"rows": 128, "num_warps": 8},
    "triton k32": {"keys": 32},
    "triton r32 k32": {"rows": 32, "keys": 32},
    "triton stages 2": {"num_stages": 2},
    "triton stages 4": {"num_stages": 4},
}


def forms(q, k_pages, table, only, interpret):
    """Name -> function of (q, k, v, k_pages, v_pages, table, mask), and what it is."""
    found = {"glue": (lambda q, *_: q, ""), "xla": (reference.attention, "")}
    if not interpret:
        found["cudnn"] = (cudnn.attention, "")
    usual = triton.choose_tiling(q, k_pages, table)
    seen = set()
    for name, changes in VARIANTS.items():
        tiling = dataclasses.replace(usual, **changes)
        for factor in (1, 2, 0.5) if name == "triton" else (1,):
            splits = max(1, min(int(tiling.splits * factor), table.shape[1]))
            one = dataclasses.replace(tiling, splits=splits)
            if one in seen:
                continue
            seen.add(one)
            call = functools.partial(triton.attention, tiling=one, interpret=interpret)
            found[f"{name} x{splits}"] = (call, str(one))
    return {
        name: form
        for name, form in found.items()
        if only is None or name == "glue" or any(name.startswith(one) for one in only)
    }


def draw(cell, seed=0):
    """Rows, pools of several layers, table and mask of a cell; contexts end inside a page."""
    model, B, context, T = cell
    N, G, H = HEADS[model]
    rng = np.random.default_rng(seed)
    if context is None:
        lengths = np.exp(rng.uniform(np.log(64), np.log(8192), B)).astype(np.int32)
    else:
        lengths = context - rng.integers(0, PAGE, B).astype(np.int32)
    columns = -(-int(lengths.max()) // PAGE)
    held = -(-lengths // PAGE)
    pages = int(held.sum()) + 1
    order = rng.permutation(pages - 1) + 1
    table = np.full((B, columns), -1, np.int32)
    for b in range(B):
        table[b, : held[b]], order = order[: held[b]], order[held[b] :]
    layer_bytes = 2 * pages * G * PAGE * H * 2
    layers = int(min(64, max(2, -(-POOL_BYTES // layer_bytes))))
    normal = jax.jit(
        lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1
    )
    keys = iter(jax.random.split(jax.random.key(seed), 2 * layers + 3))
    shape = (pages, G, PAGE, H)
    pools = [(normal(next(keys), shape), normal(next(keys), shape)) for _ in range(layers)]
    q, k, v = (normal(next(keys), (B, T, heads, H)) for heads in (N, G, G))
    mask = WindowMask(
        cell=jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T)),
        start=jnp.asarray(lengths),
        live=jnp.broadcast_to(jnp.asarray([0, T], jnp.int32), (B, 2)),
        context_len=jnp.asarray(lengths),
        visible=None,
        causal=jnp.zeros((B,), bool),
        block_size=BLOCK,
    )
    return (q, k, v), pools, jnp.asarray(table), mask, lengths


def floor_us(cell, lengths):
    """The least time, and the bytes of keys and values."""
    model, B, _, T = cell
    N, G, H = HEADS[model]
    blocks = np.arange(T) // BLOCK
    fresh = int(np.minimum((blocks + 1) * BLOCK, T).sum())
    flops = 4 * N * H * (T * int(lengths.sum()) + B * fresh)
    kv_bytes = 4 * G * H * (int(lengths.sum()) + B * T)
    moved = kv_bytes + 4 * B * T * N * H
    return max(moved / BYTES_PER_S, flops / FLOPS_PER_S) * 1e6, kv_bytes, flops


def loop_of(function, rounds):
    """A compiled-to-be loop over the layers; rows depend on the last result."""

    def loop(q, k, v, pools, table, mask):
        def one_round(_, q):
            for k_pages, v_pages in pools:
                q = q + function(q, k, v, k_pages, v_pages, table, mask) * jnp.bfloat16(1e-3)
            return q

        return jax.lax.fori_loop(0, rounds, one_round, q)

    return jax.jit(loop)


def measure(cell, args):
    """Lines of the table for one cell."""
    rows, pools, table, mask, lengths = draw(cell)
    interpret = jax.default_backend() != "gpu"
    least, kv_bytes, flops = floor_us(cell, lengths)
    first = (*rows, *pools[0], table, mask)
    as_32 = [x.astype(jnp.float32) for x in first[:5]]
    with jax.default_matmul_precision("highest"):
        wanted = jax.block_until_ready(jax.jit(reference.attention)(*as_32, table, mask))
    scale = jnp.sqrt(jnp.mean(jnp.square(wanted)))
    rounds = 1 if args.tiny else max(1, int(4e3 / (len(pools) * max(least, 8.0))))
    told = forms(rows[0], pools[0][0], table, args.only and args.only.split(","), interpret)

    def compiled(function):
        began = time.perf_counter()
        try:
            program = loop_of(function, rounds).lower(*rows, pools, table, mask).compile()
            return program, time.perf_counter() - began, None
        except Exception as error:  # a tiling may not compile; the table says so and goes on
            return None, 0.0, f"{type(error).__name__}: {error}"[:500]

    with ThreadPoolExecutor(12) as pool:
        programs = dict(
            zip(told, pool.map(lambda form: compiled(form[0]), told.values()), strict=True)
        )
    glue_us = 0.0
    for name, (function, what) in told.items():
        line = {"model": cell[0], "sequences": cell[1], "context": cell[2], "rows": cell[3]}
        line |= {"form": name, "tiling": what, "floor_us": least, "kv_bytes": kv_bytes}
        program, compile_s, failure = programs[name]
        if failure is None and name != "glue":
            got = jax.jit(function)(*first).astype(jnp.float32)
            error = float((jnp.abs(got - wanted) / (jnp.abs(wanted) + scale)).max())
            line["error"] = error if np.isfinite(error) else float("inf")
            line["right"] = line["error"] <= TOLERANCE
        if failure is not None:
            line["failed"] = failure
        elif line.get("right", True):
            samples = []
            for _ in range(args.repeats + 2):
                began = time.perf_counter()
                out = jax.block_until_ready(program(*rows, pools, table, mask))
                samples.append((time.perf_counter() - began) / (rounds * len(pools)) * 1e6)
            assert bool(jnp.isfinite(out).all()), "the loop's rows are not finite"
            line["us"] = statistics.median(samples[2:])
            line["min_us"], line["max_us"] = min(samples[2:]), max(samples[2:])
            line["compile_s"] = compile_s
            glue_us = line["us"] if name == "glue" else glue_us
            line["net_us"] = line["us"] - glue_us
            line["tb_s"] = kv_bytes / max(line["net_us"], 1e-3) / 1e6
            line["tflop_s"] = flops / max(line["net_us"], 1e-3) / 1e6
        yield line


def show(line):
    """One printed line."""
    context = line["context"] or "ragged"
    told = f"{line['model']:>9} {line['sequences']:>2}x{context!s:<6} T{line['rows']:>4}"
    told = f"{told} {line['form']:<20}"
    if "failed" in line:
        return f"{told} FAILED {line['failed'][:120]}"
    if not line.get("right", True):
        return f"{told} WRONG by {line['error']:.1e}"
    if "error" not in line:
        return f"{told} {line['us']:8.1f} us"
    return (
        f"{told} net {line['net_us']:8.1f} us [{line['min_us']:.1f} {line['max_us']:.1f}] "
        f"{line['tb_s']:5.2f} TB/s {line['tflop_s']:4.0f} TF/s floor {line['floor_us']:.1f} "
        f"(x {line['net_us'] / line['floor_us']:.2f}) error {line['error']:.0e}"
    )


def main():
    """Check, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", help="numbers of the list of cells, comma-separated")
    parser.add_argument("--only", help="forms by the beginning of their names, comma-separated")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="small shapes, kernels interpreted")
    parser.add_argument("--commit")
    parser.add_argument("--out")
    args = parser.parse_args()
    git = ["git", "rev-parse", "--short", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    report = {
        "command": "benchmarks/paged_attention_gpu.py",
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": args.commit or head,
        "page_size": PAGE,
        "block_size": BLOCK,
        "repeats": args.repeats,
        "lines": [],
    }
    cells = TINY if args.tiny else CELLS
    if args.cells:
        cells = [cells[int(i)] for i in args.cells.split(",")]
    if args.tiny:
        args.only, args.repeats = args.only or "xla,triton x", 1
    print({key: value for key, value in report.items() if key != "lines"}, flush=True)
    for cell in cells:
        for line in measure(cell, args):
            report["lines"].append(line)
            print(show(line), flush=True)
        if args.out:
            with open(args.out, "w") as file:
                json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
