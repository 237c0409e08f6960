"""Head and token statistics alone on the device JAX finds: first right, then how fast.

Per cell (model, rows; all greedy) every form is held to a float32 truth computed on the device; one
that is wrong is not timed. Then a loop on the device runs it over two
heads in turn, each larger than the cache. The rows of a call depend on the last result; `glue` is
the loop alone, and is taken off. Forms take turns, so that the clocks are the same for all: the
kernels in several tilings and XLA's readout in chunks of so many rows, as `token_stats` reads
logits and with all statistics from one pass.

    python benchmarks/readout_gpu.py --out /tmp/readout.json
    python benchmarks/readout_gpu.py --cells 5,6 --only mosaic
    python benchmarks/readout_gpu.py --smoke     # every line of it on a CPU

Prints a table and writes JSON after each cell: microseconds of one readout (median of the runs),
the floor (bytes of the head at 4.3 TB/s, or products at 790 TFLOP/s) and scratch memory.
"""

import argparse
import functools
import json
import platform
import re
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from dllm_jax.kernels.token_readout import mosaic, reference
from dllm_jax.kernels.token_readout.result import Part, finish, joined
from dllm_jax.strategies.core.draw import token_stats
from dllm_jax.strategies.core.protocol import Readout
from dllm_jax.strategies.core.state import Sampling

BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12  # one H200: copy, dense bfloat16
NUM_HEADS = 2
HEADS = {"SDAR-1.7B": (151936, 2048), "SDAR-8B": (151936, 4096)}  # ids, width
CELLS = [  # model, rows
    ("SDAR-1.7B", 128),
    ("SDAR-1.7B", 32),
    ("SDAR-8B", 128),
    ("SDAR-8B", 32),
    ("SDAR-1.7B", 256),
    ("SDAR-1.7B", 1024),
    ("SDAR-1.7B", 4096),
    ("SDAR-1.7B", 512),
    ("SDAR-1.7B", 64),
    ("SDAR-8B", 1024),
]
SAMPLE_US = 12e3  # of a run, about
SMOKE = r"^(xla 32|one pass 32|mosaic)"
CLOSE = 2e-3  # logits of a token that may be taken for the likeliest
TOLERANCE = 2e-3  # of confidence, relative, and entropy, in nats


def mosaic_tilings(rows, interpret):
    """What is tried of the other kernel: ids, stages, what is shared."""
    if interpret:
        return [(64, 4, "rows")]
    shared = "rows" if rows <= 128 else "head"
    return [(256, 4, shared), (192, 5, shared), (256, 4, None), (192, 5, None)]


def chunk_sizes(rows):
    """Rows that XLA reads out at once."""
    if rows <= 256:
        return [rows, rows // 2]
    return [1024, 512, 256] if rows > 1024 else [1024, 512]


def in_chunks(read, size):
    """`read` over so many rows at a time."""

    def chunked(hidden, head):
        if len(hidden) <= size:
            return read(hidden, head)
        out = jax.lax.map(lambda part: read(part, head), hidden.reshape(-1, size, hidden.shape[1]))
        return tuple(leaf.reshape(-1) for leaf in out)

    return chunked


def forbidden_ids(num_ids):
    """The mask and what lies past the tokenizer's last id, as of SDAR."""
    ids = jnp.arange(num_ids, dtype=jnp.int32)
    return (ids == num_ids - 267) | (ids >= num_ids - 266)


def logits_of(hidden, head):
    """The product, restricted."""
    logits = jax.lax.dot_general(
        hidden, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return jnp.where(forbidden_ids(len(head))[None], -jnp.inf, logits)


def two_passes(hidden, head):
    """As the engine reads out: the largest and its id, then the sums."""
    R = len(hidden)
    stats = token_stats(
        jax.lax.dot_general(
            hidden, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        ),
        Readout(sampling=Sampling.greedy(R)),
        restrict=lambda x: jnp.where(forbidden_ids(len(head))[None], -jnp.inf, x),
    )
    return stats.token, stats.confidence, stats.entropy


def one_pass(hidden, head):
    """All statistics from one reduction."""
    logits = logits_of(hidden, head)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    one, zero = jnp.ones_like(logits), jnp.zeros_like(logits)
    never = logits == -jnp.inf
    whole = joined(Part(ids, logits, jnp.where(never, 0.0, one), zero))
    return finish(whole, zero[:, :0], ids[:, :0])[:3]


def in_kernel(hidden, head, *, tiling, interpret):
    """The kernel for Hopper."""
    return mosaic.read(
        hidden,
        head,
        forbidden_ids(len(head)),
        scale=1.0,
        cap=None,
        penalty=None,
        num_top=0,
        tiling=tiling,
        interpret=interpret,
    )[:3]


def nothing(hidden, head):
    """What stands around a readout in the loop."""
    del head
    row = hidden[:, 0].astype(jnp.float32)
    return jnp.zeros(row.shape, jnp.int32), row, row


def forms(rows, interpret):
    """Name -> function of (hidden, head) to token, confidence, entropy."""
    found = {"glue": nothing}
    for size in chunk_sizes(rows):
        found[f"xla {size}"] = in_chunks(two_passes, size)
    found[f"one pass {min(rows, 1024)}"] = in_chunks(one_pass, 1024)
    for ids, stages, shared in mosaic_tilings(rows, interpret):
        tiling = mosaic.Tiling(ids=ids, stages=stages, shared=shared)
        how = plgpu.InterpretGPUParams() if interpret else None
        name = f"mosaic {ids} s{stages} shared {shared}"
        found[name] = functools.partial(in_kernel, tiling=tiling, interpret=how)
    return found


def loop_of(read):
    """A loop over the heads; rows depend on every statistic of the last readout, times `change`."""

    def loop(hidden, heads, rounds, change):
        def one_round(_, carry):
            hidden, _ = carry
            for head in heads:
                stats = read(hidden, head)
                token, sure, entropy = stats
                moved = change * (sure + 1e-3 * entropy + 1e-9 * token.astype(jnp.float32))
                hidden = hidden + moved.astype(hidden.dtype)[:, None]
            return hidden, stats

        row = jnp.zeros((len(hidden),), jnp.float32)
        blank = (row.astype(jnp.int32), row, row)
        return jax.lax.fori_loop(0, rounds, one_round, (hidden, blank))

    return jax.jit(loop)


@jax.jit
def truth(hidden, head):
    """Logits, log-probabilities and entropy; all in float32."""
    logits = logits_of(hidden.astype(jnp.float32), head.astype(jnp.float32))
    log_p = jax.nn.log_softmax(logits, axis=1)
    entropy = -jnp.sum(jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0.0), axis=1)
    return logits, log_p, entropy


@jax.jit
def faults(token, sure, entropy, logits, log_p, true_entropy):
    """By how much the worst row is off: logit of its token, confidence, entropy."""
    at = lambda x: jnp.take_along_axis(x, token[:, None], axis=1)[:, 0]  # noqa: E731
    short = jnp.max(jnp.max(logits, axis=1) - at(logits))
    p = jnp.exp(at(log_p))
    return short, jnp.max(jnp.abs(sure - p) / p), jnp.max(jnp.abs(entropy - true_entropy))


@functools.lru_cache(2)
def draw(V, D):
    """Heads of one model: normal, so that logits have a spread of 2."""
    make = jax.jit(
        lambda key: jax.random.normal(key, (V, D), jnp.bfloat16) * jnp.bfloat16(2 * D**-0.5)
    )
    return [make(key) for key in jax.random.split(jax.random.key(0), NUM_HEADS)]


def measure(cell, sizes, args):
    """Lines of the table for one cell."""
    model, R = cell
    V, D = sizes
    interpret = jax.default_backend() != "gpu"
    heads = draw(V, D)
    hidden = jax.random.normal(jax.random.key(R), (R, D), jnp.bfloat16)
    least = max(2 * V * D / BYTES_PER_S, 2 * R * V * D / FLOPS_PER_S) * 1e6
    rounds = 1 if args.smoke else max(1, int(SAMPLE_US / (NUM_HEADS * least)))
    inputs = (hidden, heads)
    one, many = (jnp.int32(1), jnp.float32(0)), (jnp.int32(rounds), jnp.float32(1e-3))
    found = forms(R, interpret)
    kept = re.compile(SMOKE if args.smoke else args.only)
    found = {name: form for name, form in found.items() if name == "glue" or kept.search(name)}

    def compiled(read):
        began = time.perf_counter()
        try:
            program = loop_of(read).lower(*inputs, *many).compile()
            return program, time.perf_counter() - began, None
        except Exception as error:  # a tiling may not compile; the table says so and goes on
            return None, 0.0, f"{type(error).__name__}: {error}"[:400]

    with jax.default_matmul_precision("highest"):
        wanted = truth(hidden, heads[-1])
    with ThreadPoolExecutor(12) as pool:
        programs = dict(zip(found, pool.map(compiled, found.values()), strict=True))
    lines, samples = [], {}
    for name, (program, compile_s, failure) in programs.items():
        line = {"model": model, "rows": R, "form": name, "floor_us": least}
        lines.append(line)
        if failure is not None:
            line["failed"] = failure
            continue
        text = program.as_text()
        line["compile_s"] = compile_s
        line["holds_logits"] = f"f32[{R},{V}]" in text or f"f32[{V},{R}]" in text
        memory = program.memory_analysis()
        line["scratch_bytes"] = None if memory is None else memory.temp_size_in_bytes
        if name != "glue":
            off = faults(*program(*inputs, *one)[1], *wanted)
            line["off"] = [float(x) for x in off]
            line["right"] = bool(np.all(np.asarray(line["off"]) <= [CLOSE, TOLERANCE, TOLERANCE]))
        if line.get("right", True):
            samples[name] = []
    for _ in range(args.repeats + 2):
        for name, taken in samples.items():
            began = time.perf_counter()
            out, _ = jax.block_until_ready(programs[name][0](*inputs, *many))
            taken.append((time.perf_counter() - began) / (rounds * NUM_HEADS) * 1e6)
            assert bool(jnp.isfinite(out).all()), "the loop's rows are not finite"
    for line in lines:
        if taken := samples.get(line["form"], [])[2:]:
            line["us"] = statistics.median(taken)
            line["min_us"], line["max_us"] = min(taken), max(taken)
            line["net_us"] = line["us"] - statistics.median(samples["glue"][2:])
    return lines


def odd_case(read, sizes, interpret):
    """Everything at once on odd sizes, kernel against reference: how far apart, in words."""
    R, V, D, n = sizes
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.standard_normal((R, D)), jnp.bfloat16).at[5].set(jnp.nan)
    head = jnp.asarray(rng.standard_normal((V, D)) * 3 * D**-0.5, jnp.bfloat16)
    head = head.at[V - 1].set(head[3])  # ties across tiles
    options = {
        "scale": 0.9,
        "cap": 8.0,
        "penalty": (jnp.asarray(rng.integers(0, V, R), jnp.int32), jnp.ones((R,), jnp.float32)),
        "num_top": n,
    }
    forbidden = jnp.asarray(rng.random(V) < 0.01)
    both = [
        jax.jit(functools.partial(f, **options))(hidden, head, forbidden)
        for f in (functools.partial(read, interpret=interpret), reference.read)
    ]
    mine, theirs = ([np.delete(np.asarray(x), 5, axis=0) for x in one] for one in both)
    return {
        "tokens": int((mine[0] != theirs[0]).sum()),
        "confidence": float(np.abs(mine[1] / theirs[1] - 1).max()),
        "entropy": float(np.abs(mine[2] - theirs[2]).max()),
        "top_ids": int((mine[3] != theirs[3]).sum()),
        "top_probs": float(np.abs(mine[4] - theirs[4]).max(initial=0.0)),
        "nan_row": bool(np.isnan(both[0].confidence[5])),
    }


def show(line):
    """One printed line."""
    measured = f"{line['model']:>9} {line['rows']:>4} {line['form']:<26}"
    if "failed" in line:
        return f"{measured} FAILED {line['failed'][:120]}"
    if not line.get("right", True):
        return f"{measured} WRONG by {line['off']}"
    if line["form"] == "glue":
        return f"{measured} {line['us']:8.1f} us"
    return (
        f"{measured} net {line['net_us']:8.1f} us [{line['min_us']:.1f} {line['max_us']:.1f}] "
        f"floor {line['floor_us']:.0f} (x {line['net_us'] / line['floor_us']:.2f}) "
        f"{'logits, ' if line['holds_logits'] else ''}"
        f"scratch {(line['scratch_bytes'] or 0) / 1e6:.1f} MB, compiled {line['compile_s']:.1f} s"
    )


def main():
    """Check, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", help="numbers of the list of cells, comma-separated")
    parser.add_argument("--only", default="", help="forms whose name has this pattern")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=75, help="no cell begins after this")
    parser.add_argument("--smoke", action="store_true", help="small shapes, kernels interpreted")
    parser.add_argument("--commit")
    parser.add_argument("--out")
    args = parser.parse_args()
    began = time.perf_counter()
    git = ["git", "rev-parse", "--short", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    interpret = jax.default_backend() != "gpu"
    # Rows, ids, width and how many likeliest ids are named.
    odd = (35, 304, 64, 3) if interpret else (300, 151664, 256, 3)
    by_mosaic, how = mosaic.read, None
    if interpret:
        by_mosaic = functools.partial(mosaic.read, tiling=mosaic.Tiling(ids=64, shared="rows"))
        how = plgpu.InterpretGPUParams()
    report = {
        "command": "benchmarks/readout_gpu.py",
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": args.commit or head,
        "repeats": args.repeats,
        "odd_case": odd_case(by_mosaic, odd, how),
        "lines": [],
    }
    print({key: value for key, value in report.items() if key != "lines"}, flush=True)
    cells = CELLS if not args.cells else [CELLS[int(i)] for i in args.cells.split(",")]
    if args.smoke:
        cells, args.repeats = [("SDAR-1.7B", 32)], 1
    for cell in cells:
        sizes = (704, 64) if args.smoke else HEADS[cell[0]]
        if time.perf_counter() - began > args.budget_s:
            print("out of time before", cell, flush=True)
            report.setdefault("left_out", []).append(cell)
            continue
        lines = measure(cell, sizes, args)
        report["lines"] += lines
        print(*map(show, lines), sep="\n", flush=True)
        if args.out:
            with open(args.out, "w") as file:
                json.dump(report, file, indent=1)
    print(f"{time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
