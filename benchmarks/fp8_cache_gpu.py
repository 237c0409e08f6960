"""Attention over a cache in 8 bits on a Hopper GPU, beside one in bfloat16.

    python benchmarks/fp8_cache_gpu.py --out fp8_cache_h200.json --within 100

`check`: tilings of the Mosaic form on every kind of mask against the XLA form in float32 over the
same 8-bit numbers. `time`: cells of `paged_attention_cells.py`, both
caches, tilings beside the one that is chosen; only tilings that `check` found right. A call is
timed in a loop on the device over pools of many layers; `glue`, the loop alone, is taken off.
Programs are compiled by several threads before the first is timed, and the JSON file is rewritten
after every row. `--dry` runs one of each on a CPU, interpreted, and a tiny cell.
"""

import argparse
import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import paged_attention_cells as cells
from fp8_gpu import Run, compiled
from jax.experimental.pallas import mosaic_gpu as plgpu

from dllm_jax.bench.numbers import environment
from dllm_jax.kernels.kv_write import fp8
from dllm_jax.kernels.paged_attention import mosaic, reference
from dllm_jax.kernels.paged_attention.mask import facts

SCALE = 2.0**-5
TOLERANCE = 6e-2  # a weight is rounded to 4 bits
CELLS = (
    ("SDAR-8B", 32, 8192, 32),
    ("SDAR-1.7B", 32, 8192, 32),
    ("SDAR-8B", 32, "ragged", 32),
    ("SDAR-1.7B", 32, "ragged", 32),
    ("LLaDA-8B", 8, 8192, 32),
    ("SDAR-8B", 8, 8192, 128),
    ("SDAR-8B", 1, 512, 32),
    ("SDAR-8B", 1, 512, 128),
    ("SDAR-1.7B", 1, 512, 32),
    ("SDAR-8B", 1, 8192, 32),
    ("SDAR-1.7B", 32, 512, 128),
)
NARROW = mosaic.Tiling(stages=6)
ONE_WIDE = mosaic.Tiling(keys=128, stages=4)
WIDE = dataclasses.replace(ONE_WIDE, consumers=2, ping_pong=True)
TILINGS = {
    "1": NARROW,
    "1 x2": dataclasses.replace(NARROW, splits=2),
    "1 k128": ONE_WIDE,
    "1 k128 s5": dataclasses.replace(ONE_WIDE, stages=5),
    "1 k128 x2": dataclasses.replace(ONE_WIDE, splits=2),
    "2": dataclasses.replace(NARROW, consumers=2),
    "2 x2": dataclasses.replace(NARROW, consumers=2, splits=2),
    "2 k128": dataclasses.replace(WIDE, ping_pong=False),
    "2 k128 pp": WIDE,
    "2 k128 pp x2": dataclasses.replace(WIDE, splits=2, stages=3),
    "2 shared x2": mosaic.Tiling(consumers=2, splits=2, shares_keys=True),
    "2 shared k128 x2": dataclasses.replace(WIDE, splits=2, shares_keys=True, ping_pong=False),
    "2 pp r132": mosaic.Tiling(consumers=2, ping_pong=True, resident=132),
    "2 k128 pp r132": dataclasses.replace(WIDE, stages=3, resident=132),
}
ONE = ("1", "1 k128", "1 k128 s5", "1 k128 x2", "2 shared k128 x2")
TWO = ("2", "2 k128", "2 k128 pp", "2 k128 pp x2")
TRIED = {
    ("SDAR-8B", 32, 8192, 32): TWO,
    ("SDAR-1.7B", 32, 8192, 32): ONE,
    ("LLaDA-8B", 8, 8192, 32): ("1 k128", "1 k128 x2"),
    ("SDAR-8B", 8, 8192, 128): ("2", "2 k128 pp"),
    ("SDAR-8B", 1, 512, 128): ("2 shared x2",),
    ("SDAR-1.7B", 32, 512, 128): ("2 pp r132", "2 k128 pp r132"),
}


def in_8_bits(x):
    return fp8.quantize(x.swapaxes(1, 2), jnp.full((x.shape[1],), SCALE)).swapaxes(1, 2)


def check(run, features, names, is_dry):
    """The names of tilings that are right."""
    right, programs, inputs = set(), {}, {}
    for feature in features:
        q, k, v, k_pages, v_pages, table, mask = cells.feature_case(feature)
        k, v = (in_8_bits(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (k, v))
        pages = in_8_bits(k_pages), in_8_bits(v_pages).swapaxes(2, 3)
        scales = jnp.full((2, k.shape[2]), SCALE)
        forms = {}
        for name in names:
            how = {"interpret": plgpu.InterpretGPUParams()} if is_dry else {}
            forms[name] = functools.partial(mosaic.attention, tiling=TILINGS[name], **how)
        wanted = np.asarray(
            jax.jit(functools.partial(reference.attention, scale=q.shape[-1] ** -0.5))(
                q.astype(jnp.float32), k, v, *pages, table, mask, kv_scales=scales
            )
        )
        for name, call in forms.items():
            key = f"{feature} {name}"
            inputs[key] = (name, mask, wanted, (q, k, v, *pages, table, mask, scales))
            programs[key] = (
                lambda *a, call=call: call(*a[:7], kv_scales=a[7]),
                inputs[key][3],
            )
    wrong = set()
    for key, program in compiled(run, programs).items():
        name, mask, wanted, arguments = inputs[key]

        def one(key=key, program=program, name=name, mask=mask, wanted=wanted, args=arguments):
            got = np.asarray(program(*args).astype(jnp.float32))
            live = np.asarray(mask.rows_live())
            error = float(np.abs(got - wanted)[live].max())
            is_right = bool(np.isfinite(got).all() and error <= TOLERANCE)
            run.keep(part="check", what=key, error=error, is_right=is_right)
            (right if is_right else wrong).add(name)

        run.attempt(f"check {key}", one)
    return right - wrong


def loop_of(call, layers):
    def loop(rounds, q, k, v, k_pages, v_pages, tables, numbers, scales):
        def one(i, last):
            table = jax.lax.optimization_barrier(tables[jax.lax.rem(i, layers)])
            rows = jax.lax.optimization_barrier(q + last * jnp.bfloat16(1e-3))
            rows += jnp.minimum(table[0, 0], 0).astype(rows.dtype)
            return call(rows, k, v, k_pages, v_pages, table, numbers, scales)

        return jax.lax.fori_loop(0, rounds, one, jnp.zeros_like(q))

    return loop


def attention(settings, q, k, v, k_pages, v_pages, table, numbers, scales):
    more = {"bits": None, "kv_scales": None if k.dtype == q.dtype else scales}
    scale = q.shape[-1] ** -0.5
    return mosaic._run((q, k, v), (k_pages, v_pages), table, numbers, more, scale=scale, **settings)


def programs_of(cell, right, is_dry):
    """The programs of a cell, and what each is."""
    drawn = cells.draw(cell, is_dry)
    interpret = plgpu.InterpretGPUParams() if is_dry else None
    model, B, _, T = cell
    N, G, H = cells.HEADS[model]
    kinds = {"bfloat16": jnp.bfloat16, "fp8": fp8.DTYPE}
    tables = jnp.asarray(drawn.tables)
    numbers = facts(drawn.mask, tables[0], cells.PAGE)
    shape = lambda dtype, *s: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    q, scales = shape(jnp.bfloat16, B, T, N, H), shape(jnp.float32, 2, G)
    programs, forms = {}, {}
    for kind, dtype in kinds.items():
        own, pool = shape(dtype, B, T, G, H), shape(dtype, *drawn.pool)
        values = shape(dtype, *drawn.pool[:2], H, cells.PAGE) if kind == "fp8" else pool
        arguments = (1, q, own, own, pool, values, tables, numbers, scales)
        chosen = mosaic.choose_tiling(q, pool, tables[0])
        tilings = {"chosen": chosen}
        if kind == "fp8":
            tilings |= {n: TILINGS[n] for n in TRIED.get(cell, ()) if n in right}
        else:
            programs["glue"] = (loop_of(lambda q, *_: q, len(tables)), arguments)
            forms["glue"] = (kind, "")
        measured = set()
        for name, tiling in tilings.items():
            if tiling in measured:
                continue
            measured.add(tiling)
            key = f"{kind} {name}"
            settings = {"rules": drawn.mask.rules, "tiling": tiling, "interpret": interpret}
            call = functools.partial(attention, settings)
            programs[key], forms[key] = (loop_of(call, len(tables)), arguments), (kind, str(tiling))
    return drawn, numbers, programs, forms


def report(run, cell, drawn, numbers, programs, forms, flat, repeats):
    """Time the programs of a cell, one after another, on the same numbers.

    The cache in bfloat16 holds those of the cache in 8 bits, so that results are the same.
    """
    model, B, _, T = cell
    N, G, H = cells.HEADS[model]
    memory_us, compute_us, _ = cells.floors_us(drawn)
    glue, base = 0.0, None
    used = int(np.prod(drawn.pool))
    operands = {}
    wide = lambda x: in_8_bits(x).astype(x.dtype) * SCALE  # noqa: E731
    for kind, narrow in (("bfloat16", wide), ("fp8", in_8_bits)):
        # Not in one program: XLA may leave out a rounding that is followed by a wider type.
        pools = [narrow(x[:used].reshape(drawn.pool)) for x in flat]
        pools[1] = pools[1].swapaxes(2, 3) if kind == "fp8" else pools[1]
        rows = [x[: B * T * G * H].reshape(B, G, T, H) for x in flat]
        own = [narrow(x).swapaxes(1, 2) for x in rows]
        q = flat[0][1000 : 1000 + B * T * N * H].reshape(B, T, N, H)
        operands[kind] = (q, *own, *pools, jnp.asarray(drawn.tables), numbers)
    scales = jnp.full((2, G), SCALE)
    rounds = 1 if run.dry else int(min(400, max(20, 6e3 / max(memory_us, compute_us, 8.0))))
    truth = None
    for key, program in programs.items():
        kind, tiling = forms[key]

        def one(key=key, program=program, kind=kind, tiling=tiling):
            nonlocal glue, base, truth
            found = np.asarray(program(1, *operands[kind], scales).astype(jnp.float32))
            if key == "bfloat16 chosen":
                truth = found
            samples = []
            for _ in range(repeats + 1):
                began = time.perf_counter()
                jax.block_until_ready(program(rounds, *operands[kind], scales))
                samples.append((time.perf_counter() - began) / rounds * 1e6)
            us = statistics.median(samples[1:])
            glue = us if key == "glue" else glue
            net = us - glue
            base = net if key == "bfloat16 chosen" else base
            row = {"part": "time", "cell": list(cell), "form": key, "tiling": tiling, "us": us}
            row |= {"net_us": net, "spread": [min(samples[1:]), max(samples[1:])]}
            row |= {"memory_us": memory_us / (2 if kind == "fp8" else 1), "compute_us": compute_us}
            if kind == "fp8" and truth is not None:
                row["error"] = float(np.abs(found - truth).max())
                row["is_right"] = bool(np.isfinite(found).all() and row["error"] <= TOLERANCE)
                row["bfloat16_over_fp8"] = base / net
            run.keep(**row)

        run.attempt(f"time {cell} {key}", one)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--within", type=float, default=100.0, help="seconds")
    parser.add_argument("--cells", help='numbers of those to time; default: all; "" for none')
    parser.add_argument("--tilings", help="names, of those beside the chosen one; default: all")
    parser.add_argument(
        "--features",
        default="blocks|visible|window|group of 7|large pages, long",
        help='kinds of masks that are checked; "" for none: cells are compared all the same',
    )
    parser.add_argument("--commit", help="where the checkout has no git")
    parser.add_argument("--dry", action="store_true", help="one tiling and a tiny cell, on a CPU")
    args = parser.parse_args()
    run = Run(args.out, args.within, args.dry)
    run.report["command"] = "benchmarks/fp8_cache_gpu.py"
    run.report |= environment()
    run.report["commit"] = args.commit or run.report["commit"]
    chosen = list(range(len(CELLS)))
    if args.cells is not None:
        chosen = [int(one) for one in args.cells.split(",") if one]
    names = list(TILINGS) if args.tilings is None else args.tilings.split(",")
    features = ["blocks"] if args.dry else args.features.split("|") if args.features else []
    names = names[:1] if args.dry else names
    right = set(names)
    if features:
        right = run.attempt("check", lambda: check(run, features, names, args.dry)) or set()
        print("right:", sorted(right), flush=True)
    size = 1 << 17 if args.dry else cells.POOL_NUMBERS
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    flat = [draw(jax.random.key(i), (size,), jnp.bfloat16) for i in range(2)]
    timed = cells.TINY if args.dry else [CELLS[i] for i in chosen]
    made = {cell: programs_of(cell, right, args.dry) for cell in timed}
    every = {(cell, key): call for cell, one in made.items() for key, call in one[2].items()}
    every = compiled(run, every)
    for cell, (drawn, numbers, programs, forms) in made.items():
        own = {key: every[cell, key] for key in programs if (cell, key) in every}
        timing = functools.partial(report, run, cell, drawn, numbers, own, forms, flat, 5)
        run.attempt(f"time {cell}", timing)
    run.write()
    for row in run.report["rows"]:
        if row["part"] == "time":
            ratio = row.get("bfloat16_over_fp8")
            measured = f" x{ratio:.2f}" if ratio else ""
            print(*row["cell"], f"{row['form']:<22} {row['net_us']:8.1f} us{measured}", flush=True)
    return 1 if run.report["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
