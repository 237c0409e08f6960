"""Attention alone on the device JAX finds: first right, then how near to the floor.

Three parts, each with its lines in one JSON file, written as they come:

- `check`: tilings of the Mosaic form on small cases that hold every feature of the mask (no
  context, partial pages, missing pages, dead slots and cells, positions seen fresh, blocks, token
  order, a window), against the XLA form in float32. No other part times what failed.
- `cells`: the fixed list of 40 cells (`paged_attention_cells.py`), against both of cuDNN's ways.
- `tune`: variants of it on the decode step's shapes and on prefill.

A call is timed in a loop on the device. Every turn takes other pages, of pools of 2 GB, so that no
key is in the cache when it comes again; its rows depend on the last result. What depends on the
mask alone is computed before the loop, as it is once a step. `glue`, the loop alone, is taken off:
the host's turn of it takes some 25 us, behind which a call of few microseconds hides in part.

    python benchmarks/paged_attention_gpu.py --out attention.json --parts check,cells --seconds 165
    python benchmarks/paged_attention_gpu.py --out attention.json --parts tune --cells 2,12
    python benchmarks/paged_attention_gpu.py --tiny     # every line of it on a CPU, in a minute

Child processes do the work, `--workers` of them: tracing and compiling take longest, and one of
them times at once. One that is silent for `--patience` seconds while it runs a form is ended, what
it was at is told as hung, and another goes on behind it. Times are medians in microseconds a call;
the floor is bytes at 4.3 TB/s, or the useful products at 790 TFLOP/s.
"""

import argparse
import contextlib
import fcntl
import functools
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

MEMORY_SHARE, COMPUTE_SHARE, FIXED_US = 0.60, 0.45, 6.0  # issue 6's bar for a cell
LEAST_GAIN = 1.3  # over cuDNN at 32 rows, the same
CELL = ("model", "sequences", "context", "rows")
GROUP = 4  # cells that are compiled together
WAITS = "waiting"  # what a child is at that may last: it compiles, or another has the device
SLOW = 6  # times the patience with one that waits
TOLERANCE = 2e-2  # of a result and the root mean square of all


def keep(line):
    """Hand a line to the process that writes."""
    print(json.dumps(line), flush=True)


@contextlib.contextmanager
def alone(path):
    """Hold the device among the children, and say that one waits for it."""
    with open(path, "a") as file:
        measured = 0.0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - measured > 2:
                    keep({"began": WAITS})
                    measured = time.monotonic()
                time.sleep(0.01)
        yield  # closing the file, or the end of the process, gives it back


def share(args, items):
    """What of a list this child does."""
    return items[args.worker :: args.workers]


def passes_bar(us, memory_us, compute_us):
    """Issue 6: within the floor over a share of the peak, and six microseconds."""
    share = MEMORY_SHARE if memory_us >= compute_us else COMPUTE_SHARE
    return us <= max(memory_us, compute_us) / share + FIXED_US


def check(args, skip):
    """Every tiling on every feature; a line each."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import paged_attention_cells as cells

    from dllm_jax.kernels.paged_attention import reference

    named = [
        (f"check {form} / {case}", form, case)
        for form in cells.checked_forms(args.tiny)
        for case in cells.FEATURES
        if args.tiny or cells.is_checked(form, case)
    ]
    named = share(args, named[:2] if args.tiny else named)
    named = [one for one in named if one[0] not in skip]

    def prepare(one):
        _, form, case = one
        arguments = cells.feature_case(case)
        try:
            call = cells.checked_forms(args.tiny)[form]
            return arguments, jax.jit(call).lower(*arguments).compile(), None
        except Exception as error:  # the table says so and goes on
            return arguments, None, f"{type(error).__name__}: {error}"[:1500]

    with ThreadPoolExecutor(-(-14 // args.workers)) as pool:
        prepared = [pool.submit(prepare, one) for one in named]
        for (name, _, _), future in zip(named, prepared, strict=True):
            keep({"began": WAITS})
            arguments, program, failure = future.result()
            if failure:
                keep({"name": name, "failed": failure})
                continue
            keep({"began": name})
            got = np.asarray(program(*arguments).astype(jnp.float32))
            as_32 = [x.astype(jnp.float32) for x in arguments[:5]]
            with jax.default_matmul_precision("highest"):
                truth = functools.partial(reference.attention, scale=as_32[0].shape[-1] ** -0.5)
                wanted = np.asarray(jax.jit(truth)(*as_32, *arguments[5:]))
            live = np.asarray(arguments[6].rows_live())
            error = np.abs(got - wanted)[live].max()
            is_zero = bool((got[~live] == 0).all())
            right = bool(np.isfinite(got).all() and error <= TOLERANCE and is_zero)
            keep({"name": name, "error": float(error), "dead_rows_zero": is_zero, "right": right})


def timed(args, skip, part):
    """Lines of the cells of a part."""
    import jax
    import paged_attention_cells as cells

    chosen = cells.TINY if args.tiny else cells.PARTS[part]
    if args.cells:
        chosen = [chosen[int(i)] for i in args.cells.split(",")]
    chosen = share(args, chosen)
    pools = cells.Pools(args.tiny)
    only = args.only.split(",") if args.only else None
    for at in range(0, len(chosen), GROUP):
        work = []
        keep({"began": WAITS})
        # Nothing is timed while Python traces: both want the interpreter's lock.
        with ThreadPoolExecutor(-(-14 // args.workers)) as threads:
            for cell in chosen[at : at + GROUP]:
                drawn = cells.draw(cell, args.tiny)
                measured = {}
                for form, (prepare, call, what) in cells.forms(drawn, part, only).items():
                    name = f"{part} {'-'.join(map(str, cell))} {form}"
                    if name not in skip or form == "glue":
                        loop = cells.loop_of(prepare, call, len(drawn.tables))
                        program = threads.submit(cells.compiled, drawn, loop, 1)
                        measured[form] = (name, what, program)
                work.append((drawn, measured, threads.submit(cells.compiled, drawn, cells.truth)))
        for drawn, measured, truth in work:
            programs = {
                form: (name, what, one.result()) for form, (name, what, one) in measured.items()
            }
            true_program = truth.result()[0]
            with alone(args.lock):
                operands = pools.operands(drawn)
                wanted = jax.block_until_ready(true_program(*operands))
                time_cell(args, part, drawn, programs, operands, wanted)


def time_cell(args, part, drawn, measured, operands, wanted):
    """Lines of the compiled forms of a cell."""
    import jax
    import paged_attention_cells as cells

    memory_us, compute_us, kv_bytes = cells.floors_us(drawn)
    glue_us = 0.0
    for form, (name, what, (program, failure)) in measured.items():
        line = {"name": name, "part": part, "form": form, "tiling": what}
        line |= dict(zip(CELL, drawn.cell, strict=True))
        line |= {"memory_us": memory_us, "compute_us": compute_us, "kv_bytes": kv_bytes}
        if failure:
            keep(line | {"failed": failure})
            continue
        keep({"began": name})
        out = jax.block_until_ready(program(1, *operands))
        if form != "glue":
            line["error"] = cells.error(out, wanted)
            line["right"] = line["error"] <= TOLERANCE
            if not line["right"]:
                keep(line)
                continue
        rounds = 2 if args.tiny else int(min(600, max(20, 8e3 / max(memory_us, compute_us, 8.0))))
        samples = []
        for _ in range(args.repeats + 1):
            began = time.perf_counter()
            jax.block_until_ready(program(rounds, *operands))
            samples.append((time.perf_counter() - began) / rounds * 1e6)
        line["us"] = statistics.median(samples[1:])
        line["min_us"], line["max_us"] = min(samples[1:]), max(samples[1:])
        glue_us = line["us"] if form == "glue" else glue_us
        line["net_us"] = line["us"] - glue_us
        line["passes"] = passes_bar(line["net_us"], memory_us, compute_us)
        keep(line)


def show(line):
    """One printed line."""
    measured = f"{line['name']:<58}"
    if "failed" in line:
        return f"{measured} FAILED {line['failed'][:160]}"
    if not line.get("right", True):
        return f"{measured} WRONG by {line['error']:.1e}"
    if "us" not in line:
        return f"{measured} error {line['error']:.0e}"
    if line["form"] == "glue":
        return f"{measured} {line['us']:8.1f} us"
    floor = max(line["memory_us"], line["compute_us"])
    tb_s = line["kv_bytes"] / max(line["net_us"], 1e-3) / 1e6
    return (
        f"{measured} net {line['net_us']:8.1f} us [{line['min_us']:.1f} {line['max_us']:.1f}] "
        f"{tb_s:5.2f} TB/s floor {floor:.1f} (x {line['net_us'] / floor:.2f}) "
        f"{'meets' if line['passes'] else 'misses'} the bar"
    )


def summary(lines):
    """The figures that issue 6 names, of the part `cells`."""
    found = {}
    for line in lines:
        if line.get("part") == "cells" and "net_us" in line and line["form"] != "glue":
            found.setdefault(tuple(line[key] for key in CELL), {})[line["form"]] = line
    rows = {}
    for cell, forms in found.items():
        ours = [x for form, x in forms.items() if not form.startswith("cudnn")]
        theirs = [x for form, x in forms.items() if form.startswith("cudnn")]
        if not ours:
            continue
        best = min(ours, key=lambda x: x["us"])
        row = {"best": best["form"], "passes": best["passes"], "gain": None, "faster": None}
        if theirs:
            other = min(theirs, key=lambda x: x["us"])
            row["faster"] = best["us"] < other["us"]
            row["gain"] = other["net_us"] / best["net_us"] if best["net_us"] > 0 else None
        rows[cell] = row
    compared = [row["faster"] for row in rows.values() if row["faster"] is not None]
    gains = {cell: row["gain"] for cell, row in rows.items() if cell[3] == 32 and row["gain"]}
    of_32 = gains.values()
    short = {"-".join(map(str, cell)): gain for cell, gain in gains.items() if gain < LEAST_GAIN}
    return {
        "cells": len(rows),
        "meet_the_bar": sum(row["passes"] for row in rows.values()),
        "compared_with_cudnn": len(compared),
        "faster_than_cudnn": sum(compared),
        "gain_at_32_rows_median": statistics.median(of_32) if of_32 else None,
        "gain_at_32_rows_least": min(of_32) if of_32 else None,
        "gain_at_32_rows_too_small": short,
    }


def child(args):
    """What the process that works does; one JSON line of output a result."""
    import jax

    # A cell's program is small, and the machine new: keep nothing.
    jax.config.update("jax_enable_compilation_cache", False)
    keep({"device": jax.devices()[0].device_kind, "jax": jax.__version__})
    skip = set(json.loads(sys.stdin.readline()))
    for part in args.parts.split(","):
        if part not in skip:
            check(args, skip) if part == "check" else timed(args, skip, part)
            keep({"done": part})


def main():
    """Start the child, watch it, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="check,cells,tune")
    parser.add_argument("--cells", help="numbers of the cells of a part, comma-separated")
    parser.add_argument("--only", help="forms by the beginning of their names, comma-separated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=400, help="then stop, whatever is left")
    parser.add_argument("--patience", type=float, default=20, help="seconds until a form is hung")
    parser.add_argument("--workers", type=int, help="processes; 6, or 1 with --tiny")
    parser.add_argument("--tiny", action="store_true", help="small shapes, kernels interpreted")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    parser.add_argument("--commit")
    parser.add_argument("--out")
    args = parser.parse_args()
    args.workers = args.workers or (1 if args.tiny else 6)
    if args.worker is not None:
        return child(args)
    began = time.monotonic()
    git = ["git", "rev-parse", "--short", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    report = {
        "command": "benchmarks/paged_attention_gpu.py",
        "arguments": sys.argv[1:],
        "python": platform.python_version(),
        "commit": args.commit or head,
        "repeats": args.repeats,
        "lines": [],
    }
    said = threading.Lock()

    def work(worker):
        skip, finished = [], False
        while not finished and time.monotonic() - began < args.seconds:
            finished = watch(args, report, skip, began, worker, said)
        return finished

    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(args.workers) as pool:
        args.lock = lock.name
        finished = all(list(pool.map(work, range(args.workers))))
    report["summary"] = summary(report["lines"])
    report["seconds"], report["finished"] = time.monotonic() - began, finished
    write(args, report)
    print(report["summary"])


def watch(args, report, skip, began, worker, said):
    """Run one child; whether it finished. What it did, and hung at, joins `skip`."""
    command = [sys.executable, __file__, *sys.argv[1:]]
    command += ["--worker", str(worker), "--workers", str(args.workers), "--lock", args.lock]
    pipe = subprocess.PIPE
    # They share a device, and none may use it while another times.
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags}
    if args.tiny:  # the interpreter of Mosaic kernels needs a thread for each warpgroup
        environment["NPROC"] = "32"

    def tell(line):
        skip.append(line["name"])
        with said:
            report["lines"].append(line)
            print(show(line), flush=True)
            write(args, report)

    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        heard = queue.Queue()

        def listen():
            for text in process.stdout:
                heard.put(text)
            heard.put(None)

        threading.Thread(target=listen, daemon=True).start()
        process.stdin.write(json.dumps(skip) + "\n")
        process.stdin.flush()
        at = WAITS
        while True:
            left = args.seconds - (time.monotonic() - began)
            patience = args.patience * (SLOW if args.tiny or at == WAITS else 1)
            try:
                text = heard.get(timeout=max(0.1, min(patience, left)))
            except queue.Empty:
                process.kill()
                if left > patience:
                    tell({"name": at, "failed": f"hung: nothing for {patience} s"})
                return at == WAITS
            if text is None:
                code = process.wait()
                if code:
                    tell({"name": at, "failed": f"the process ended with {code}"})
                return code == 0 or at == WAITS
            if not text.startswith("{"):
                print(text, end="")
                continue
            line = json.loads(text)
            if "device" in line:
                report |= line
            elif "began" in line:
                at = line["began"]
            elif "done" in line:
                skip.append(line["done"])
            else:
                tell(line)


def write(args, report):
    """The one file, whole."""
    if args.out:
        with open(args.out, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
