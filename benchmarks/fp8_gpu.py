"""Products and decode steps in 8 bits on a Hopper GPU, beside bfloat16 and beside XLA.

    python benchmarks/fp8_gpu.py --out fp8_h200.json --within 190

The parts may fail alone, and the JSON file is rewritten after every row.

`check`: Mosaic's products and norm against float64 and against XLA, in a process of its own, which
is killed if it hangs. If a kernel is wrong, the parts behind it run XLA's form and say so.
`products`: the matrices of SDAR-8B at 32 and 128 rows, streamed from
memory (more bytes than the cache holds): the product alone on rows that are in 8 bits already, with
the rounding of bfloat16 rows in front, in Mosaic's form and in XLA's, and the bfloat16 product that
a layer takes by default; the norm with and without its rounding. `layers`: layers without their
attention in a loop on the device, at 32 and 128 rows, and by the profiler what a layer launches.
`steps`: the compiled decode step of an engine in a bare loop, SDAR-8B and -1.7B, weights in 8 bits
and in bfloat16, beside the floor; with `_kv` behind it, a form has its cache in 8 bits, with
`_head` its head, with `_many` products of many rows by Mosaic.
`--forms fp8_rows,fp8,bfloat16` times in `layers` and `steps` also
the form in which a launch of its own rounds what gate and up leave, a scale a row.
`profiles`: what a layer of the step launches. `tilings`: other tiles of the Mosaic form.
Programs are compiled by several threads before the first is timed. No part begins, and no program
is compiled, after `--within` seconds. `--dry` runs all of it small on a CPU, kernels interpreted.
"""

import argparse
import collections
import contextlib
import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.bench import measure, profile, roofline
from dllm_jax.bench.numbers import environment
from dllm_jax.bench.roofline import RATES
from dllm_jax.bench.step import Shape, _bucket, _engine, context_len, step_strategy, text_len
from dllm_jax.kernels.hopper import MULTIPROCESSORS, SHARED_BYTES
from dllm_jax.kernels.layer import (
    Fp8Matrix,
    LayerOps,
    add_rms_norm,
    api_products,
    fp8,
    gated_matmul,
    mosaic_few,
    mosaic_few_tiling,
    mosaic_many_tiling,
    qkv_matmul,
    quantize_rows,
    rotate_qkv,
    split_matmul,
)
from dllm_jax.loading.load import with_kv_cache
from dllm_jax.models import dense
from dllm_jax.models.layers import gate_up_shape, rope_tables, swiglu
from dllm_jax.models.quantization import quantized, with_quantized_head

EPS = 1e-6
THREADS = 12
ENGINES = 4  # that compile side by side: what holds the GIL is a third of it
REPEATS, CALLS = 5, 20
LARGE, SMALL = "random:JetLM/SDAR-8B-Chat", "random:JetLM/SDAR-1.7B-Chat"
# Model and shape, by what they are worth.
STEPS = (
    *((LARGE, shape) for shape in ("1x1x32", "1x4x32", "8x4x32")),
    *((SMALL, shape) for shape in ("1x1x32", "1x4x32", "8x4x32")),
)
OPERATIONS = {"wqkv": qkv_matmul, "w_gate_up": gated_matmul, "w_down": split_matmul}
COPIES = {"wqkv": 24, "w_gate_up": 10, "w_down": 16}  # matrices of a program, one a layer
NORMS = 64  # one behind another in a program
WIDTHS = {"8B": (4096, 12288, 8, 6, 128), "1.7B": (2048, 6144, 8, 4, 128)}  # D F G n+2 H
# Of a value plus one. The tensor cores keep 14 bits of a sum of numbers in 8 bits.
LOOSEST = 0.05
CHECK_S = 90.0
FORMS = ("bfloat16", "fp8", "fp8_rows", "fp8_many", "fp8_head", "fp8_kv", "bfloat16_kv")
LAYERS, LOOPS = 12, 4  # of a program that is nothing but layers


class Run:
    """What was found, and the clock."""

    def __init__(self, path, within, dry):
        self.path, self.within, self.dry = Path(path), within, dry
        self.began = time.monotonic()
        self.report = {"command": "benchmarks/fp8_gpu.py", "dry": dry, "rows": [], "failures": {}}

    @property
    def seconds(self):
        return time.monotonic() - self.began

    @property
    def is_late(self):
        return self.seconds > self.within

    def keep(self, **row):
        self.report["rows"].append(row)
        self.write()
        print(f"{self.seconds:6.1f} s  {json.dumps(row)}", flush=True)

    def write(self):
        self.report["seconds"] = self.seconds
        half = self.path.with_suffix(".part")
        half.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")
        half.replace(self.path)

    def fails(self, what, error):
        lines = traceback.format_exception(error)
        self.report["failures"][what] = "".join(lines)[-3000:]
        self.write()
        print(f"{self.seconds:6.1f} s  FAILED {what}: {str(error)[:500]}", flush=True)

    def attempt(self, what, call):
        """What a call returns; None, and a note, if it fails or time is over."""
        if self.is_late:
            self.report["failures"].setdefault(what, "not begun: time is over")
            return None
        try:
            return call()
        except Exception as error:
            self.fails(what, error)
            return None


_IN_PYTHON = threading.Lock()  # lowering holds the GIL; in turns, the first is there first


def compiled(run, programs):
    """Programs by name, compiled side by side; those that fail are left out."""

    def compile_one(call, arguments):
        with _IN_PYTHON:
            lowered = jax.jit(call).lower(*arguments)
        return lowered.compile()

    def build(name):
        made = run.attempt(f"compile {name}", lambda: compile_one(*programs[name]))
        print(f"{run.seconds:6.1f} s  compiled {name}", flush=True)
        return made

    with ThreadPoolExecutor(THREADS) as pool:
        made = dict(zip(programs, pool.map(build, programs), strict=True))
    return {name: program for name, program in made.items() if program is not None}


def seconds_of(program, arguments, calls):
    """Seconds of one call, and of sending it: medians of some runs of many calls."""
    jax.block_until_ready(program(*arguments))
    found, sent = [], []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(calls):
            out = program(*arguments)
        sent.append((time.perf_counter() - began) / calls)
        jax.block_until_ready(out)
        found.append((time.perf_counter() - began) / calls)
    return statistics.median(found), statistics.median(sent)


# --- numerics ---------------------------------------------------------------------------------


def exact(x, w):
    """The product of the numbers that are stored, on the host."""

    def whole(one):
        return np.asarray(one.values).astype(np.float32) * np.asarray(one.scales)[..., None]

    return (whole(fp8.quantize_rows(x)) @ whole(w.flat).T).reshape(*x.shape[:-1], *w.shape[1:])


def gated(both):
    gate, up = (
        np.asarray(jnp.asarray(both[..., i, :]).astype(jnp.bfloat16)).astype(np.float64)
        for i in range(2)
    )
    return (gate / (1 + np.exp(-gate)) * up).reshape(*both.shape[:-3], -1)


def apart(got, want):
    return float(np.max(np.abs(np.asarray(got, np.float64) - want) / (np.abs(want) + 1)))


def drawn(seed, *shape):
    """Rows, or a matrix whose products with such rows are of the order of one."""
    scale = 1.0 if len(shape) == 2 else shape[0] ** -0.5
    x = jax.random.normal(jax.random.key(seed, impl="rbg"), shape, jnp.bfloat16)
    return x * jnp.asarray(scale, x.dtype)


def check(run, widths, counts, form):
    """Whether each operation agrees with the product of the numbers that are stored."""
    programs, inputs, wants = {}, {}, {}
    most = counts[-1]
    for model, (D, F, G, heads, H) in widths.items():
        shapes = {"wqkv": (D, G, heads, H), "w_gate_up": gate_up_shape(D, F), "w_down": (F, 1, D)}
        for i, (name, shape) in enumerate(shapes.items()):
            w = fp8.quantize_matrix(drawn(i, *shape))
            w = w.flat if name == "w_down" else w
            x = drawn(10 + i, most, shape[0])
            truth = exact(x, w)
            wants[model, name] = gated(truth) if name == "w_gate_up" else truth
            for rows in counts if model == "8B" else counts[-2:]:
                for how in {form, "xla"} if rows == most else {form}:
                    key = (model, name, rows, how)
                    call = functools.partial(OPERATIONS[name], implementation=how)
                    inputs[key] = (x[:rows], w)
                    programs[key] = (call, inputs[key])
        x, y, scale = drawn(20, most, D), drawn(21, most, D), jnp.ones((D,), jnp.bfloat16)
        for how in {form, "xla"}:
            key = (model, "norm", most, how)
            inputs[key] = (x, y, scale)
            norm = functools.partial(add_rms_norm, eps=EPS, is_quantized=True, implementation=how)
            programs[key] = (norm, inputs[key])
        for width in (D, F):
            for how in {form, "xla"}:
                key = (f"{model} {width}", "rounding", most, how)
                inputs[key] = (drawn(22, most, width),)
                round_rows = functools.partial(quantize_rows, implementation=how)
                programs[key] = (round_rows, inputs[key])
    normed = {}
    for key, program in compiled(run, programs).items():

        def one(key=key, program=program):
            model, name, rows, how = key
            out = program(*inputs[key])
            if name == "norm":
                normed[model, name, how] = jax.tree.map(np.asarray, out[1])
                return
            if name == "rounding":
                normed[model, name, how] = jax.tree.map(np.asarray, out)
                return
            want = wants[model, name][:rows]
            got = np.asarray(out).astype(np.float64).reshape(-1, *want.shape).sum(axis=0)
            off = apart(got, want)
            row = {"model": model, "what": name, "rows": rows, "form": how, "apart": off}
            run.keep(part="check", **row, is_right=off < LOOSEST)

        run.attempt(f"check {key}", one)
    for model, name in dict.fromkeys(key[:2] for key in normed):
        keys = [(model, name, how) for how in (form, "xla")]
        pair = [normed[key] for key in keys if key in normed]
        if len(pair) == 2:
            values = float(np.mean(pair[0].values.view(np.uint8) == pair[1].values.view(np.uint8)))
            scales = apart(pair[0].scales, pair[1].scales.astype(np.float64))
            measured = {"same_values": values, "scales_apart": scales}
            is_right = values > 0.98 and scales < 1e-2
            run.keep(part="check", model=model, what=name, **measured, is_right=is_right)


def checked(run, arguments):
    """Whether all that `check` finds in a process of its own is right."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "check.json"
        words = [sys.executable, __file__, "--only-check", "--out", str(out), *arguments]
        try:
            subprocess.run(words, timeout=CHECK_S, check=False)
        except subprocess.TimeoutExpired as error:
            run.fails("check", error)
            return False
        if not out.exists():
            run.fails("check", RuntimeError("it left no result"))
            return False
        report = json.loads(out.read_text(encoding="utf-8"))
    run.report["rows"] += report["rows"]
    run.report["failures"] |= report["failures"]
    run.write()
    rows = report["rows"]
    return bool(rows) and not report["failures"] and all(row["is_right"] for row in rows)


def leave_mosaic():
    """Products with matrices in 8 bits, and the rounding in front of them, in XLA's form."""
    norm = dense.add_rms_norm
    for module, name in (
        (mosaic_few_tiling, "unsupported_product"),
        (mosaic_many_tiling, "unsupported_gated"),
        (mosaic_many_tiling, "unsupported_product"),
    ):
        held = getattr(module, name)

        def reason(x, w, *tiling, held=held):
            return "failed its check" if isinstance(w, Fp8Matrix) else held(x, w, *tiling)

        setattr(module, name, reason)
    api_products.quantize_rows = fp8.quantize_rows
    dense.add_rms_norm = lambda *rows, is_quantized=False, **how: norm(*rows, **how)


@contextlib.contextmanager
def form_of(how):
    """What is traced meanwhile has this form."""
    takes, many = api_products.takes_groups, api_products.MOSAIC_MANY_FP8_ROWS
    if how == "fp8_rows":
        api_products.takes_groups = lambda *_: False
    api_products.MOSAIC_MANY_FP8_ROWS = 4096 if how == "fp8_many" else many
    try:
        yield
    finally:
        api_products.takes_groups, api_products.MOSAIC_MANY_FP8_ROWS = takes, many


def weights_of(how):
    return "bfloat16" if how.startswith("bfloat16") else "fp8"


def cached(model, how):
    """The model with the cache and the head of a form."""
    if how.endswith("_head"):
        model = model.replace(params=with_quantized_head(model.params))
    return with_kv_cache(model, "fp8" if how.endswith("_kv") else "auto")


# --- products -----------------------------------------------------------------------------------


def chain(call):
    """One product a matrix, in order, each of rows of its own: nothing can be joined."""

    def many(rows, matrices):
        outs = []
        for x, w in zip(rows, matrices, strict=True):
            if outs:
                x, outs[-1] = jax.lax.optimization_barrier((x, outs[-1]))
            outs.append(call(x, w))
        return outs

    return many


def norms(is_quantized):
    """One norm behind another, each of the sum that the one before left."""

    def many(x, y, scales):
        outs = []
        for scale in scales:
            x, normed = add_rms_norm(x, y, scale, EPS, is_quantized=is_quantized)
            outs.append(normed)
        return x, outs

    return many


def floor_us(kind, w, rows):
    """Of bytes and of operations, whichever is longer; None for an unknown device."""
    if kind not in RATES:
        return None
    bandwidth, rate = RATES[kind]
    size = int(np.prod(w.shape))
    is_small = isinstance(w, Fp8Matrix)
    moved = size * (1 if is_small else 2)
    return 1e6 * max(moved / bandwidth, 2 * rows * size / rate / (2 if is_small else 1))


def products(run, plain, matrices, counts, form, kind, calls):
    """Times of each product in each form, and of the norm."""
    rng = np.random.default_rng(1)
    programs, inputs, facts = {}, {}, {}

    def add(name, rows, how, call, given, held):
        key = f"{name} {rows} {how}"
        programs[key] = (chain(call), (given, held))
        inputs[key] = (given, held)
        facts[key] = {"what": name, "rows": rows, "form": how}
        facts[key]["floor_us"] = floor_us(kind, held[0], rows)

    for rows in counts:
        for name, small in matrices.items():
            call = functools.partial(OPERATIONS[name], dtype=jnp.bfloat16)
            given = [
                jnp.asarray(rng.standard_normal((rows, small[0].shape[0])), jnp.bfloat16)
                for _ in small
            ]
            ready = [fp8.quantize_rows(x) for x in given]
            for how in sorted({form, "xla"}):
                own = functools.partial(call, implementation=how)
                add(name, rows, f"{how}, rows in 8 bits", own, ready, small)
                add(name, rows, f"{how}, rounding in front", own, given, small)
            add(name, rows, "bfloat16", OPERATIONS[name], given, plain[name][: len(small)])
        width = matrices["wqkv"][0].shape[0]
        x, y = jnp.asarray(rng.standard_normal((2, rows, width)), jnp.bfloat16)
        for is_quantized in (False, True):
            how = "to 8 bits" if is_quantized else "bfloat16"
            key = f"norm {rows} {how}"
            inputs[key] = (x, y, [jnp.ones((width,), jnp.bfloat16)] * NORMS)
            programs[key] = (norms(is_quantized), inputs[key])
            facts[key] = {"what": "norm", "rows": rows, "form": how}
    timed(run, "products", programs, inputs, facts, calls)


def timed(run, part, programs, inputs, facts, calls):
    """A row for each program."""
    for key, program in compiled(run, programs).items():

        def one(key=key, program=program):
            count = len(inputs[key][-1])
            us, sent = (1e6 * s / count for s in seconds_of(program, inputs[key], calls))
            row = facts[key] | {"us": us, "sent_us": sent}
            if row.get("floor_us"):
                row["over_floor"] = us / row["floor_us"]
            run.keep(part=part, **row)

        run.attempt(f"time {key}", one)


def tilings(run, matrices, counts, kind, calls):
    """The few-row forms with other tiles."""
    rng = np.random.default_rng(2)
    programs, inputs, facts = {}, {}, {}
    for rows in counts:
        for name, small in matrices.items():
            ready = [
                fp8.quantize_rows(
                    jnp.asarray(rng.standard_normal((rows, small[0].shape[0])), jnp.bfloat16)
                )
                for _ in small
            ]
            is_gated = name == "w_gate_up"
            held = small if is_gated else [w.flat for w in small]
            for tiling in candidates(rows, held[0].flat.shape, is_gated):
                call = mosaic_few.gated_matmul if is_gated else mosaic_few.split_matmul
                own = functools.partial(call, tiling=tiling, dtype=jnp.bfloat16)
                key = f"{name} {rows} {tiling}"
                programs[key] = (chain(own), (ready, held))
                inputs[key] = (ready, held)
                facts[key] = {"what": name, "rows": rows, "tiling": vars(tiling)}
                facts[key]["floor_us"] = floor_us(kind, held[0], rows)
    timed(run, "tilings", programs, inputs, facts, calls)


def candidates(rows, shape, is_gated):
    """Whole tiles that fit, few of them."""
    K, N = shape
    groups = -(-rows // 64)
    for columns in (128, 192, 256) if is_gated else (64, 128):
        for depth in (128, 256):
            if N % columns or N // columns > MULTIPROCESSORS:
                continue
            most = 1 if is_gated else MULTIPROCESSORS // (N // columns)
            for splits in sorted({1, most}):
                if K % (splits * depth) or (splits == 1 and most > 1 and depth == 128):
                    continue
                staged = groups * 64 * columns * 2 // (2 if is_gated else 1)
                stages = min(8, (SHARED_BYTES - staged) // ((groups * 64 + columns) * depth))
                if stages >= 2:
                    yield mosaic_few_tiling.Tiling(
                        columns=columns, depth=depth, stages=stages, splits=splits
                    )


# --- layers -------------------------------------------------------------------------------------


def layers_in_a_loop(cfg, ops, x, layers, cos, sin):
    """A model's layers again and again, queries in the place of what attention gives."""

    def normed(x, y, scale, reader):
        return add_rms_norm(x, y, scale, EPS, is_quantized=isinstance(reader, Fp8Matrix))

    def body(_, carry):
        x, rows = carry
        for layer, after in zip(layers, (*layers[1:], layers[0]), strict=True):
            qkv = qkv_matmul(rows, layer["wqkv"], dtype=x.dtype)
            norms = layer.get("q_norm"), layer.get("k_norm")
            q, _, _ = rotate_qkv(qkv, None, *norms, cos, sin, EPS, dtype=x.dtype)
            wo = layer["wo"]
            wo = wo if isinstance(wo, Fp8Matrix) else wo.reshape(-1, cfg.hidden_size)
            y = split_matmul(q.reshape(*x.shape[:-1], -1), wo)
            x, rows = normed(x, y, layer["mlp_norm"], layer["w_gate_up"])
            y = swiglu(rows, layer["w_gate_up"], layer["w_down"], ops, x.dtype)
            x, rows = normed(x, y, after["attn_norm"], after["wqkv"])
        return x, rows

    first = normed(x, jnp.zeros_like(x), layers[0]["attn_norm"], layers[0]["wqkv"])
    return jax.lax.fori_loop(0, LOOPS, body, first)[0]


def layer_times(run, models, forms, counts, calls):
    """Microseconds of a layer without its attention, and what it launches."""
    programs, inputs, facts = {}, {}, {}
    made = {}
    for how in forms:
        for source, weights in models:
            if weights != weights_of(how):
                continue
            model = models[source, weights]
            cfg, layers = model.config, model.params["layers"][:LAYERS]
            for rows in counts:
                key = f"{source} {rows} {how}"
                tables = rope_tables(jnp.arange(rows)[None], cfg.head_dim, cfg.rope_theta)
                x = drawn(30, 1, rows, cfg.hidden_size)
                inputs[key] = (x, layers, *tables)
                call = functools.partial(layers_in_a_loop, cfg, LayerOps())
                programs[key] = (call, inputs[key])
                facts[key] = {"model": source, "rows": rows, "form": how}
        with form_of(how):
            own = {key: programs[key] for key in programs if facts[key]["form"] == how}
            made |= compiled(run, own)
    for key, program in made.items():

        def one(key=key, program=program):
            count = len(inputs[key][1]) * LOOPS
            seconds, sent = seconds_of(program, inputs[key], calls)
            run.keep(
                part="layers", **facts[key], us=1e6 * seconds / count, sent_us=1e6 * sent / count
            )

        run.attempt(f"time layers {key}", one)
    for key, program in made.items():

        def look(key=key, program=program):
            trace = profile.traced(lambda: jax.block_until_ready(program(*inputs[key])))
            run.keep(part="layer launches", **facts[key], **a_layer(trace))

        run.attempt(f"profile layers {key}", look)


def a_layer(trace, anchor="rotate"):
    """The launches of a layer in their order: name, median us, median us to the next one.

    Layers are told apart by a kernel that each has once.
    """
    events = sorted(trace.events, key=lambda event: event.start_ns)
    begins = [i for i, event in enumerate(events) if trace.on_gpu and anchor in event.name]
    parts = [events[a : b + 1] for a, b in itertools.pairwise(begins)]
    if not parts:
        return {"launches": None, "in_order": []}
    most = collections.Counter(tuple(e.name for e in part) for part in parts).most_common(1)[0][0]
    parts = [part for part in parts if tuple(e.name for e in part) == most]
    found = []
    for i, name in enumerate(most[:-1]):
        us = statistics.median(part[i].duration_ns for part in parts) / 1e3
        starts = statistics.median(part[i + 1].start_ns - part[i].start_ns for part in parts) / 1e3
        found.append([name[:60], round(us, 2), round(starts - us, 2)])
    return {"launches": len(found), "layers": len(parts), "in_order": found}


# --- steps --------------------------------------------------------------------------------------


def in_8_bits(model):
    """The model with the matrices of its layers rounded, both in memory."""
    return model.replace(params=jax.tree_util.tree_map_with_path(quantized, model.params))


def step_engine(model, shape, context, steps):
    strategy = step_strategy(model, shape)
    context = context_len(model, strategy, context, steps)
    text = text_len(strategy, steps)
    # No prefill runs here: what is not compiled ahead is not compiled.
    llm = _engine(model, strategy, shape.slots, context, text, None, None, warm_up=False)
    return llm, context, text


def step_times(run, models, shapes, forms, is_profiled, *settings):
    """Engines made and compiled side by side, a form after another; each timed by itself."""
    found = {}
    apart = ("fp8_rows", "fp8_many")
    for group in (tuple(how for how in forms if how not in apart), *((how,) for how in apart)):
        own = [how for how in group if how in forms]
        if not own:
            continue
        jax.clear_caches()  # a form is chosen when a program is traced
        with form_of(own[0]):
            looks = _step_times(run, models, shapes, own, *settings, found)
            for what, look in looks if is_profiled else ():  # before other forms are traced
                run.attempt(what, look)


def _step_times(run, models, shapes, forms, kind, context, steps, found):

    def build(one):
        source, shape, how = one
        what = f"engine {source} {shape} {how}"

        def made():
            model = models[source, weights_of(how)]
            llm, begin, text = step_engine(cached(model, how), Shape.parse(shape), context, steps)
            measure.decode_step_samples(llm.engine, *_bucket(llm), begin, 4, 1, text)
            print(f"{run.seconds:6.1f} s  compiled {what}", flush=True)
            return llm, begin, text

        return run.attempt(what, made)

    for model in models.values():
        _ = model.tokenizer  # imports that threads must not race for
    wanted = [(*one, how) for one in shapes for how in forms]  # by what they are worth
    wanted = [one for one in wanted if (one[0], weights_of(one[2])) in models]
    with ThreadPoolExecutor(ENGINES) as pool:
        ready = list(pool.map(build, wanted))
    profiles = []
    for (source, shape, how), one in zip(wanted, ready, strict=True):
        if one is None:
            continue

        def time_one(source=source, shape=shape, how=how, one=one):
            llm, begin, text = one
            samples = measure.decode_step_samples(
                llm.engine, *_bucket(llm), begin, steps, REPEATS, text
            )
            ms, size = statistics.median(samples), Shape.parse(shape)
            model = cached(models[source, weights_of(how)], how)
            found[source, shape, how] = ms
            parts = roofline.step_parts(model, size.slots, size.blocks, size.block_size, begin)
            each = roofline.parts_ms(parts, kind) if parts else None
            row = {"model": source, "shape": shape, "form": how, "context": begin, "bare_ms": ms}
            row["range"] = [min(samples), max(samples)]
            if each:
                floor = sum(each.values())
                row |= {"floor_in_turn_ms": floor, "over_floor": ms / floor, "floor_parts_ms": each}
            if (base := found.get((source, shape, "bfloat16"))) and how != "bfloat16":
                row["bfloat16_over_this"] = base / ms
            run.keep(part="steps", **row)

        def look(source=source, shape=shape, how=how, one=one):
            llm, begin, text = one
            trace, ran = measure.decode_trace(llm.engine, *_bucket(llm), begin, 4, text)
            facts = {"model": source, "shape": shape, "form": how, "steps": ran}
            busy = sum(event.duration_ns for event in trace.events) / 1e6 / ran
            measured = {"busy_ms": busy, "launches_a_step": len(trace.events) / ran}
            run.keep(part="profiles", **facts, **measured, **a_layer(trace))

        run.attempt(f"step {source} {shape} {how}", time_one)
        profiles.append((f"profile {source} {shape} {how}", look))
    return profiles


# --- quality --------------------------------------------------------------------------------------


def agreement(run, models, source, prompts, length):
    """Logits in 8 bits against bfloat16: KL and the first choice, also of scaled embeddings."""
    base, other = (models[source, how] for how in ("bfloat16", "fp8"))
    ids = np.random.default_rng(3).integers(0, base.defaults.vocab_limit, (prompts, length))

    def compare(a, b):
        a, b = a[:, -1], b[:, -1]  # the last row of each prompt
        p, q = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
        kl = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
        same = jnp.argmax(a, axis=-1) == jnp.argmax(b, axis=-1)
        return kl, same, jnp.isfinite(a).all() & jnp.isfinite(b).all()

    for factor in (1.0, 1e3, 1e-3):
        found = []
        for rows in np.split(ids, max(1, prompts // 8)):
            logits = []
            for model in (base, other):
                embed = model.params["embed"]
                params = model.params | {"embed": embed * jnp.asarray(factor, embed.dtype)}
                logits.append(model.replace(params=params).logits(jnp.asarray(rows)))
            found.append(jax.tree.map(np.asarray, compare(*logits)))
        kl, same, finite = (
            np.concatenate([np.atleast_1d(x) for x in xs]) for xs in zip(*found, strict=True)
        )
        run.keep(
            part="agreement",
            model=source,
            factor=factor,
            prompts=prompts,
            kl_mean=float(kl.mean()),
            kl_max=float(kl.max()),
            top_1=float(same.mean()),
            finite=bool(finite.all()),
        )


def wanted_steps(named):
    """Model and shape of each step that is timed."""
    if named is None:
        return STEPS
    sources = {"8B": LARGE, "1.7B": SMALL}
    return tuple((sources[model], shape) for model, shape in map(str.split, named.split(",")))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--within", type=float, default=190.0, help="seconds")
    parser.add_argument("--parts", default="check,layers,products,steps,profiles,agreement,tilings")
    parser.add_argument("--forms", default="fp8,bfloat16", help=", ".join(FORMS))
    parser.add_argument(
        "--shapes", help='of `steps`, as "8B 1x4x32,1.7B 1x1x32"; default: all six of them'
    )
    parser.add_argument("--rows", help='of `products` and `layers`; default: "32,128"')
    parser.add_argument("--context", type=int, default=512, help="cached tokens, of `steps`")
    parser.add_argument("--commit", help="where the checkout has no git")
    parser.add_argument("--dry", action="store_true", help="small, on a CPU")
    parser.add_argument("--only-check", action="store_true", help="in this process")
    args = parser.parse_args()
    parts, dry = args.parts.split(","), args.dry
    run = Run(args.out, args.within, dry)
    form, counts = ("xla", (8, 16)) if dry else ("mosaic", (32, 128))
    if args.rows:
        counts = tuple(map(int, args.rows.split(",")))
    if args.only_check:
        widths = {"8B": (64, 128, 2, 4, 16)} if dry else WIDTHS
        many = [rows for rows in counts if rows > 128]
        run.attempt("check", lambda: check(run, widths, (8, 32, 72, 128, *many), form))
        run.write()
        return 0
    passed_on = ["--dry"] * dry + (["--rows", args.rows] if args.rows else [])
    if "check" in parts and not checked(run, passed_on):
        leave_mosaic()
        form = "xla"
    run.report |= {"form": form, **environment()}  # takes the device
    run.report["commit"] = args.commit or run.report["commit"]
    kind = run.report["device"]
    large, small = ("builtin:tiny-sdar",) * 2 if dry else (LARGE, SMALL)
    calls, context, steps = (2, 64, 8) if dry else (CALLS, args.context, 32)
    shapes = ((large, "1x1x8"),) if dry else wanted_steps(args.shapes)
    forms = [how for how in FORMS if how in args.forms.split(",")]
    models = {}

    def load(source):
        models[source, "bfloat16"] = dj.load(source, "bfloat16")
        models[source, "fp8"] = in_8_bits(models[source, "bfloat16"])

    run.attempt("load the large model", lambda: load(large))
    print(f"{run.seconds:6.1f} s  loaded {large}", flush=True)
    if (large, "fp8") in models and {"products", "tilings"} & set(parts):
        layers = {how: models[large, how].params["layers"] for how in ("bfloat16", "fp8")}
        plain, matrices = (
            {name: [layer[name] for layer in layers[how][:most]] for name, most in COPIES.items()}
            for how in ("bfloat16", "fp8")
        )
        if "products" in parts:
            run.attempt(
                "products", lambda: products(run, plain, matrices, counts, form, kind, calls)
            )
    if {"steps", "layers"} & set(parts) and small != large:
        run.attempt("load the small model", lambda: load(small))
    if "layers" in parts:
        run.attempt("layers", lambda: layer_times(run, models, forms, counts, calls))
    if "steps" in parts:
        for source in dict.fromkeys((large, small)):
            own = [shape for shape in shapes if shape[0] == source]
            settings = ("profiles" in parts, kind, context, steps)
            timing = functools.partial(step_times, run, models, own, forms, *settings)
            run.attempt(f"steps {source}", timing)
    if "agreement" in parts and (large, "fp8") in models:
        sizes = (8, 16) if dry else (64, 32)
        run.attempt("agreement", lambda: agreement(run, models, large, *sizes))
    if "tilings" in parts and form == "mosaic" and (large, "fp8") in models:
        run.attempt("tilings", lambda: tilings(run, matrices, counts, kind, calls))
    run.write()
    print(f"{run.seconds:6.1f} s  done, {len(run.report['failures'])} failures", flush=True)
    return 1 if run.report["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
