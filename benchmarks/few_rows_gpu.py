"""Attention and readout of few rows: every back end right first, then timed.

    python benchmarks/few_rows_gpu.py --out few_rows.json
    python benchmarks/few_rows_gpu.py --tiny     # XLA's forms of small cells, on a CPU

Processes compile their shares of the list at once; then one after another checks and times, while
the others wait. A program is a loop on the device: each turn takes the pages of another layer or
another head, so that nothing is in the cache, and its rows depend on the last result. `glue` is
the loop alone. Times are medians in microseconds a call, net of the glue.

- `rows`: Mosaic's attention for numbers of rows that are no multiples of 16, checked and not timed.
- `attention`: sequences x rows at a context.
- `readout`: the likeliest ids of a head in 16 or 8 bits, with or without further ids.
- `classes`: the readout of slots with a grammar, slots x rows.
"""

import argparse
import functools
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import paged_attention_cells as cells

from dllm_jax.kernels.dispatch import BackEnd
from dllm_jax.kernels.paged_attention import paged_attention
from dllm_jax.kernels.token_readout import IdClasses, class_readout, token_readout
from dllm_jax.kernels.token_readout import api as readout
from dllm_jax.kernels.token_readout.head import quantize_head

HEADS = {"SDAR-1.7B": (151_936, 2048), "SDAR-8B": (151_936, 4096)}  # ids, width
SAMPLE_S = 8e-3
UNROLLED = 8  # calls of attention a turn: the host takes some 25 us to start the next one
CLOSE = 2e-2  # of attention, of a result and the root mean square of all
CLOSE_LOGIT, CLOSE_CONFIDENCE = 2e-2, 1e-2  # a head of 8 bits has sums of some 14 bits
_ODD = {1: 8, 2: 32, 4: 1, 8: 8, 15: 8, 17: 1, 24: 8, 33: 32}  # rows: sequences
_SHAPES = ((1, 1), (8, 1), (32, 1), (1, 8), (1, 16), (8, 16), (32, 16))
TASKS = [
    *(("attention", "SDAR-1.7B", B, context, T) for context in (1024, 8192) for B, T in _SHAPES),
    *(("attention", "SDAR-8B", B, 1024, T) for B, T in ((1, 1), (8, 1), (32, 1), (8, 16))),
    *(("rows", model, B, "ragged", T) for model in HEADS for T, B in _ODD.items()),
    *(("readout", model, R, "16", 0) for R in (1, 8, 32, 64, 96, 128) for model in HEADS),
    *(("readout", model, R, "8", 0) for R in (1, 32, 64, 128, 1024) for model in HEADS),
    *(("readout", model, R, "16", 3) for R in (32, 128) for model in HEADS),
    ("readout", "SDAR-1.7B", 128, "16", 8),
    *(("classes", "SDAR-1.7B", B, T) for B, T in ((1, 32), (8, 1), (32, 1), (4, 32))),
]
TINY = [("attention", "SDAR-1.7B", 1, 128, 4), ("rows", "SDAR-1.7B", 1, 128, 5)]
TINY += [("readout", "SDAR-1.7B", 4, "8", 2), ("classes", "SDAR-1.7B", 2, 3)]


def say(**line):
    print(json.dumps(line), flush=True)


def supported(back_ends: dict[str, BackEnd]) -> list[str]:
    return [name for name, one in back_ends.items() if not one.unsupported]


# --- attention ------------------------------------------------------------------------------------


def attention_programs(task, is_tiny):
    """Name -> program, and what runs the cell: (check, time) of a program."""
    kind, *cell = task
    drawn = cells.draw(tuple(cell), is_tiny)
    whole = {
        name: (lambda _, mask: mask, functools.partial(paged_attention, implementation=name), "")
        for name in ("xla" if is_tiny else "mosaic",)
    }
    is_timed = kind == "attention" and not is_tiny
    forms = cells.forms(drawn, "few", None) if is_timed else whole
    loops = {
        name: cells.loop_of(prepare, call, len(drawn.tables), UNROLLED if is_timed else 1)
        for name, (prepare, call, _) in forms.items()
    }
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    programs = {
        name: functools.partial(cells.compiled, drawn, loop, rounds) for name, loop in loops.items()
    }
    programs["truth"] = functools.partial(cells.compiled, drawn, cells.truth)
    return programs, functools.partial(run_attention, drawn, is_tiny)


def run_attention(drawn, is_tiny, programs, line):
    operands = _pools(is_tiny).operands(drawn)
    wanted = programs.pop("truth")(*operands)
    first = jnp.broadcast_to(
        operands[5][:1], operands[5].shape
    )  # all calls of a turn read its pages
    checked = *operands[:5], first, operands[6]
    times, floor = {}, max(cells.floors_us(drawn)[:2])
    rounds = int(min(60, max(3, SAMPLE_S * 1e6 / UNROLLED / max(floor, 10))))
    for name, program in programs.items():
        if name != "glue":
            off = cells.error(program(jnp.int32(1), *checked), wanted)
            line.setdefault("off", {})[name] = off
            if off > CLOSE:
                line.setdefault("wrong", []).append(name)
                continue
        if "glue" in programs:
            times[name] = timed(
                lambda p=program: p(jnp.int32(rounds), *operands), rounds * UNROLLED
            )
    return line | net(times) | {"floor_us": floor}


@functools.cache
def _pools(is_tiny):
    return cells.Pools(is_tiny)


# --- readout --------------------------------------------------------------------------------------


def readout_programs(task, is_tiny):
    kind, model, *_ = task
    V, D = (704, 128) if is_tiny else HEADS[model]
    forbidden = np.arange(V) >= V - 267
    if kind == "classes":
        _, _, B, T = task
        R, bits, num_top = B * T, "16", 0
        classes = some_classes(B, V, is_tiny)
    else:
        _, _, R, bits, num_top = task
        classes = None
    hidden = jax.ShapeDtypeStruct((R, D), jnp.bfloat16)
    head = jax.ShapeDtypeStruct((V, D), jnp.bfloat16)
    head = jax.eval_shape(quantize_head, head) if bits == "8" else head
    if classes is None:
        names = supported(readout._back_ends(hidden, head, num_top))
    else:
        names = supported(readout._with_classes(hidden, head, num_top, R // len(classes.codes)))

    def read(hidden, head, classes, name):
        how = {"num_top": num_top, "implementation": name}
        if classes is None:
            return token_readout(hidden, head, forbidden, **how), ()
        return class_readout(hidden, head, forbidden, classes, **how)

    def glue(hidden, *_):
        row = hidden[:, 0].astype(jnp.float32)
        token, none = jnp.zeros(row.shape, jnp.int32), jnp.zeros((R, num_top))
        return readout.TokenReadout(token, row, row, none.astype(jnp.int32), none), ()

    def loop_of(read):
        def loop(rounds, change, hidden, heads, classes):
            def one(_, carry):
                hidden, out = carry
                for head in heads:
                    out = read(hidden, head, classes)
                    # Of classes without an id the logits are arbitrary, infinite or no numbers.
                    moved = sum(
                        jnp.sum(
                            jnp.clip(
                                jnp.nan_to_num(leaf.reshape(R, -1).astype(jnp.float32)), -99, 99
                            ),
                            axis=1,
                        )
                        for leaf in jax.tree.leaves(out)
                    )
                    hidden = hidden + (change * moved).astype(hidden.dtype)[:, None]
                return hidden, out

            blank = jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
                jax.eval_shape(read, hidden, heads[0], classes),
            )
            return jax.lax.fori_loop(0, rounds, one, (hidden, blank))

        return loop

    forms = {name: functools.partial(read, name=name) for name in names} | {"glue": glue}
    number = functools.partial(jax.ShapeDtypeStruct, ())
    given = number(jnp.int32), number(jnp.float32), hidden, [head, head], classes

    def compiled(loop):
        try:
            return jax.jit(loop).lower(*given).compile(), None
        except Exception as error:  # the table says so and goes on
            return None, f"{type(error).__name__}: {error}"[:600]

    programs = {name: functools.partial(compiled, loop_of(form)) for name, form in forms.items()}
    return programs, functools.partial(run_readout, (R, V, D), bits, classes, is_tiny)


@functools.cache
def _heads(V, D, bits):
    make = jax.jit(lambda key: jax.random.normal(key, (V, D), jnp.bfloat16) * (3 * D**-0.5))
    heads = [make(key).astype(jnp.bfloat16) for key in jax.random.split(jax.random.key(0))]
    return [quantize_head(head) for head in heads] if bits == "8" else heads


@jax.jit
def _truth(hidden, head):
    """Logits in float32."""
    if not isinstance(head, jax.Array):
        head = head.values.astype(jnp.float32) * head.scales[:, None]
    rows = (x.astype(jnp.float32) for x in (hidden, head))
    logits = jnp.einsum("rd,vd->rv", *rows, precision="highest")
    return jnp.where(jnp.arange(logits.shape[1]) >= logits.shape[1] - 267, -jnp.inf, logits)


def run_readout(sizes, bits, classes, is_tiny, programs, line):
    R, V, D = sizes
    heads = _heads(V, D, bits)
    hidden = jax.random.normal(jax.random.key(R), (R, D), jnp.bfloat16)
    logits = _truth(hidden, heads[-1])
    law = jax.nn.softmax(logits, axis=1)
    floor = V * D * (1 if bits == "8" else 2) / cells.BYTES_PER_S * 1e6
    rounds = 1 if is_tiny else max(2, int(SAMPLE_S * 1e6 / (2 * floor)))
    times, ids = {}, {}
    still, moves = (jnp.int32(1), jnp.float32(0)), (jnp.int32(rounds), jnp.float32(1e-7))
    for name in sorted(programs, key=lambda name: name != "xla"):  # others are compared with XLA's
        program = programs[name]
        if name != "glue":
            read, ids[name] = program(*still, hidden, heads, classes)[1]
            at = lambda x, token=read.token: jnp.take_along_axis(x, token[:, None], 1)[:, 0]  # noqa: E731
            short = float(jnp.max(logits.max(axis=1) - at(logits)))
            off = float(jnp.max(jnp.abs(read.confidence / at(law) - 1)))
            line.setdefault("off", {})[name] = [short, off]
            right = short <= CLOSE_LOGIT and off <= CLOSE_CONFIDENCE
            if read.top_ids.shape[1]:
                tops = jnp.take_along_axis(law, read.top_ids, axis=1)
                best = jax.lax.top_k(law, tops.shape[1])[0]
                right &= bool(jnp.allclose(tops, best, rtol=2 * CLOSE_CONFIDENCE))
                right &= bool(jnp.allclose(read.top_probs, best, rtol=2 * CLOSE_CONFIDENCE))
            if classes is not None and name != "xla":
                right &= same_classes(ids[name], ids.get("xla"), classes)
            if not right:
                line.setdefault("wrong", []).append(name)
                continue
        times[name] = timed(lambda p=program: p(*moves, hidden, heads, classes), 2 * rounds)
    return line | net(times) | {"floor_us": floor}


def same_classes(got, want, classes):
    """Whether the logits of all classes and narrow ids are those of another back end."""
    if want is None:
        return True
    narrow = jnp.arange(want.narrow.shape[1]) < jnp.max(classes.narrow_from[0])
    wide = jnp.arange(want.wide.shape[1]) < classes.num_wide[0]
    pairs = (got.narrow[:, narrow], want.narrow[:, narrow]), (got.wide[:, wide], want.wide[:, wide])
    return all(bool(jnp.allclose(a, b, atol=CLOSE_LOGIT)) for a, b in pairs)


@functools.cache
def some_classes(B, V, is_tiny):
    """Classes of a tool's call, the same in each slot."""
    import grammar_gpu

    from dllm_jax.runner import grammars

    own = grammar_gpu.tool_grammar(V if not is_tiny else 704, schema=grammar_gpu.TOOL)[0]
    padded = grammars.padded(own, grammars.bucket_of(own, None))
    rows = jax.tree.map(lambda leaf: jnp.stack([leaf] * B), padded)
    return IdClasses(**{name: jnp.asarray(getattr(rows, name)) for name in IdClasses._fields})


# --- processes ------------------------------------------------------------------------------------


def timed(run, calls):
    samples = []
    for _ in range(7):
        began = time.perf_counter()
        jax.block_until_ready(run())
        samples.append((time.perf_counter() - began) / calls * 1e6)
    return statistics.median(samples[2:])


def net(times):
    glue = times.pop("glue", 0.0)
    return {"glue_us": glue, "us": {name: us - glue for name, us in times.items()}}


def child(args, tasks):
    """Compile this process's share; on a word, check and time it."""
    jax.config.update("jax_enable_compilation_cache", False)
    mine = tasks[args.worker :: args.workers]
    of_kind = {"attention": attention_programs, "rows": attention_programs}
    with ThreadPoolExecutor(8) as threads:
        work = []
        for task in mine:
            programs, run = of_kind.get(task[0], readout_programs)(task, args.tiny)
            work.append((task, {n: threads.submit(p) for n, p in programs.items()}, run))
        work = [(task, {n: p.result() for n, p in ps.items()}, run) for task, ps, run in work]
    say(ready=True, device=jax.devices()[0].device_kind, jax=jax.__version__)
    sys.stdin.readline()
    for task, programs, run in work:
        line = {"task": task, "failed": {n: why for n, (_, why) in programs.items() if why}}
        say(began=task)
        try:
            found = run({n: p for n, (p, _) in programs.items() if p is not None}, line)
        except Exception as error:
            found = line | {"wrong": [f"{type(error).__name__}: {error}"[:600]]}
        say(**found)


def show(line):
    name = " ".join(map(str, line["task"]))
    times = "  ".join(f"{form} {us:8.1f}" for form, us in line.get("us", {}).items())
    off = line.get("off", {}).values()
    worst = max(np.ravel([*off]).tolist(), default=0.0)
    bad = "".join(f"  {key} {line[key]}" for key in ("wrong", "failed") if line.get(key))
    return f"{name:<34} floor {line.get('floor_us', 0):6.1f}  {times}  (off {worst:.0e}){bad}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="kinds of tasks, comma-separated")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--patience", type=float, default=20, help="seconds until a task is hung")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on a CPU")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out")
    args = parser.parse_args()
    tasks = TINY if args.tiny else TASKS
    tasks = [task for task in tasks if args.only is None or task[0] in args.only.split(",")]
    if args.worker is not None:
        return child(args, tasks)
    began, report = time.monotonic(), {"arguments": sys.argv[1:], "lines": []}
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    workers, pipe = [], subprocess.PIPE
    for worker in range(min(args.workers, len(tasks))):
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(worker)]
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        heard = queue.Queue()

        def listen(process=process, heard=heard):
            for text in process.stdout:
                heard.put(text)
            heard.put(None)

        threading.Thread(target=listen, daemon=True).start()
        workers.append((process, heard))
    # All compile first: nothing else may run while one times.
    for process, heard in workers:
        text = heard.get()
        if text is None:
            print(f"a process ended with {process.wait()}", flush=True)
            continue
        report |= json.loads(text)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    for process, heard in workers:
        if process.poll() is not None:
            continue
        process.stdin.write("go\n")
        process.stdin.flush()
        at = None
        while True:
            try:
                text = heard.get(timeout=args.patience)
            except queue.Empty:
                process.kill()
                print(f"HUNG at {at}, the rest of this process's share is left out", flush=True)
                report["lines"].append({"task": at, "failed": "hung"})
                break
            if text is None:
                break
            line = json.loads(text)
            if "began" in line:
                at = line["began"]
                continue
            report["lines"].append(line)
            print(show(line), flush=True)
            if args.out:
                with open(args.out, "w") as file:
                    json.dump(report, file, indent=1)
        process.wait()
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
