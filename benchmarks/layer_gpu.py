"""The small operations of a layer on a GPU: each alone, then a whole step with one after another.

    python benchmarks/layer_gpu.py --out benchmarks/results/layer_h200.json

First every kernel is held to its XLA form in float32; a wrong one ends the run with an error, after
the times. Then loops on the device: sums and norms in a chain; half a layer each, products
included, over the weights of several layers (more bytes than the cache holds), where an elementwise
sum stands for attention; the cache write of all layers. Barriers between the operations keep XLA
from joining what in a step the attention kernel would part. Last the decode loop of `dj.generate`
at several shapes, with each kernel switched on after the last, Triton's and then Mosaic's: the time
of `--many` steps less that of `--few`, by rounds that each time all forms, and the kernels of one
profiled step of the first form and of those that are chosen.

All programs are lowered first and compiled by several threads; what is not compiled after
`--within` seconds is left out, by name. One JSON file, rewritten as rows come. `--smoke` runs all
of it small on a CPU, the kernels interpreted.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from strategies_gpu import NEVER, Setting, begin, read_program

import dllm_jax as dj
from dllm_jax.api import generate
from dllm_jax.bench import profile
from dllm_jax.bench.numbers import environment
from dllm_jax.kernels.kv_write import reference as write_xla
from dllm_jax.kernels.kv_write import triton as write_triton
from dllm_jax.kernels.layer import LayerOps, api, mosaic, mosaic_rotate, reference, triton
from dllm_jax.kernels.layer.triton import Tiling
from dllm_jax.models.dense import PLAIN
from dllm_jax.models.layers import gate_up_shape
from dllm_jax.runner import cache
from dllm_jax.strategies import MultiBD

EPS = 1e-6
LOOSEST = 8.0  # bfloat16 spacings that a kernel may differ from float32 by


@dataclasses.dataclass(frozen=True)
class Widths:
    """Of a model: width, KV heads, query heads of one, head size, inner width, layers."""

    D: int
    G: int
    n: int
    H: int
    F: int
    L: int


MODELS = {"1.7B": Widths(2048, 8, 2, 128, 6144, 28), "8B": Widths(4096, 8, 4, 128, 12288, 36)}
TINY = {"tiny": Widths(128, 2, 2, 32, 256, 3)}


def tiling(rows, columns, depth, splits, num_warps, num_stages):
    return Tiling(
        rows=rows,
        columns=columns,
        depth=depth,
        splits=splits,
        num_warps=num_warps,
        num_stages=num_stages,
    )


FEW_ROWS = [
    tiling(32, 64, 64, 4, 4, 4),
    tiling(32, 64, 128, 4, 4, 3),
    tiling(32, 32, 128, 4, 4, 4),
    tiling(32, 64, 64, 8, 4, 4),
    tiling(32, 128, 64, 8, 4, 4),
]
MANY_ROWS = [
    tiling(64, 64, 64, 4, 4, 4),
    tiling(128, 64, 64, 4, 4, 4),
    tiling(128, 64, 64, 4, 8, 4),
    tiling(128, 128, 64, 8, 8, 4),
    tiling(64, 128, 64, 4, 4, 4),
    tiling(128, 32, 64, 2, 4, 5),
    tiling(128, 64, 64, 2, 8, 4),
]
TINY_TILES = [tiling(32, 32, 32, 2, 4, 2)]


# --- right before fast ---------------------------------------------------------------------------


def check(widths, rows):
    """Largest error of each kernel, in units of bfloat16's spacing at a value's own size, or 1."""
    rng = np.random.default_rng(rows)

    def draw(*shape, dtype="bfloat16", scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape, np.float32), dtype)

    def error(got, want):
        got, want = (jax.tree.map(lambda a: a.astype(jnp.float32), t) for t in (got, want))
        apart = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b) / (jnp.abs(b) + 1)), got, want)
        worst = max(float(leaf) for leaf in jax.tree.leaves(apart))
        return worst * 256 if np.isfinite(worst) else float("inf")

    def exact(tree):
        return jax.tree.map(lambda a: a.astype(jnp.float32), tree)

    w, found = widths, {}
    plain = [
        jax.jit(f, static_argnames="eps") for f in (reference.add_rms_norm, reference.rotate_qkv)
    ]
    x, y, scale = draw(rows, w.D), draw(rows, w.D), 1 + draw(w.D, scale=0.1)
    parts = draw(3, rows, w.D, dtype="float32")
    for name, other in (("add_rms_norm", y), ("add_rms_norm of parts", parts)):
        got = triton.add_rms_norm(x, other, scale, EPS)
        found[name] = error(got, plain[0](*exact((x, other, scale)), eps=EPS))
    angle = draw(rows, w.H // 2, dtype="float32", scale=9.0)
    qkv, bias = draw(rows, w.G, w.n + 2, w.H), draw(w.G, w.n + 2, w.H)
    q_norm, k_norm = draw(w.H), draw(w.H)
    for name, norms in (("rotate_qkv", (q_norm, k_norm)), ("rotate_qkv, bias", (None, None))):
        more = (None if norms[0] is not None else bias, *norms, jnp.cos(angle), jnp.sin(angle))
        want = plain[1](exact(qkv), *exact(more), eps=EPS)
        found[name] = error(triton.rotate_qkv(qkv, *more, EPS), want)
        if w.D >= 1024:
            found[f"mosaic {name}"] = error(mosaic_rotate.rotate_qkv(qkv, *more, EPS), want)
    if w.D >= 1024:
        for name, other in (("mosaic norm", y), ("mosaic norm of parts", parts)):
            got = mosaic.add_rms_norm(x, other, scale, EPS)
            found[name] = error(got, plain[0](*exact((x, other, scale)), eps=EPS))
        few, both = draw(rows - rows % 8, w.D, scale=w.D**-0.5), draw(*gate_up_shape(w.D, w.F))
        got = api.gated_matmul(few, both, implementation="mosaic")
        want = jnp.einsum("md,dcxw->xmcw", *exact((few, both)), precision="highest")
        want = want.reshape(2, len(few), -1)
        found["gated_matmul"] = error(got, jax.nn.silu(want[0]) * want[1])
        wqkv = both.reshape(w.D, -1)[:, : w.G * (w.n + 2) * w.H].reshape(w.D, w.G, w.n + 2, w.H)
        got = api.qkv_matmul(few, wqkv, implementation="mosaic")
        got = got if got.ndim == 4 else got.sum(axis=0)
        want = jnp.einsum("md,dgnh->mgnh", *exact((few, wqkv)), precision="highest")
        found["qkv_matmul"] = error(got, want)
    tiles = TINY_TILES if w.D < 1024 else FEW_ROWS[:1] + MANY_ROWS[:2]
    inner, weight = draw(rows, w.F, scale=w.F**-0.5), draw(w.F, w.D)
    for one in tiles:
        got = triton.split_matmul(inner, weight, tiling=one).sum(axis=0)
        want = jnp.dot(*exact((inner, weight)), precision="highest")
        found[f"split_matmul {spell(one)}"] = error(got, want)
    pages = tuple(draw(9, w.G, 64, w.H) for _ in range(9))
    new = tuple(draw(rows, w.G, w.H) for _ in range(9))
    place = np.arange(9 * 64)[::-1].copy()[:rows]
    page, offset = jnp.asarray(place // 64, jnp.int32), jnp.asarray(place % 64, jnp.int32)
    page = page.at[::5].set(9 + jnp.arange(len(page[::5]), dtype=jnp.int32))
    by_token = (False,) * len(pages)
    want = write_xla.write_rows(pages, new, page, offset, by_token)
    same = jax.tree.map(
        lambda a, b: bool((a == b).all()),
        write_triton.write_rows(tuple(map(jnp.copy, pages)), new, page, offset, by_token),
        want,
    )
    found["write_rows"] = 0.0 if all(same) else float("inf")
    return found


def spell(one):
    """A tile in a few characters."""
    sides = f"{one.rows}x{one.columns}x{one.depth}"
    return f"{sides} /{one.splits} w{one.num_warps} s{one.num_stages}"


# --- programs ------------------------------------------------------------------------------------


class Job:
    """A program to compile and time, and its row of the report."""

    def __init__(self, row, lowered, run):
        self.row, self.lowered, self.run, self.program = row, lowered, run, None

    def compile(self):
        began = time.perf_counter()
        self.program = self.lowered.compile()
        self.row["compile_s"] = time.perf_counter() - began
        self.lowered = None


def median_us(run, calls, repeats):
    """Microseconds of one of so many calls in a run: median, least and most of the runs."""
    samples = []
    for _ in range(repeats + 2):  # two to warm up
        began = time.perf_counter()
        jax.block_until_ready(run())
        samples.append((time.perf_counter() - began) / calls * 1e6)
    samples = samples[2:]
    return {"us": statistics.median(samples), "min_us": min(samples), "max_us": max(samples)}


def loop_job(row, body, carry, constants, calls, rounds, repeats):
    """A chain of `calls` operations a round; its carry is copied in before each run."""

    @jax.jit
    def loop(carry, constants):
        return jax.lax.fori_loop(0, rounds, lambda i, c: body(i, c, constants), carry)

    def run(program):
        return median_us(lambda: program(carry, constants), calls * rounds, repeats)

    return Job(row, loop.lower(carry, constants), run)


fence = jax.lax.optimization_barrier


def draw_layers(key, w, layers):
    """Weights and scales of several layers, of sizes that keep what passes through them bounded."""

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key, shape):
        return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(shape[0] ** -0.5)

    def one(key):
        keys = jax.random.split(key, 4)
        shapes = {
            "wqkv": (w.D, w.G, w.n + 2, w.H),
            "wo": (w.G * w.n * w.H, w.D),
            "w_gate_up": gate_up_shape(w.D, w.F),
            "w_down": (w.F, w.D),
        }
        drawn = {
            name: draw(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        ones = {"norm": jnp.ones(w.D, jnp.bfloat16), "head_norm": jnp.ones(w.H, jnp.bfloat16)}
        return drawn | ones

    return [one(key) for key in jax.random.split(key, layers)]


def product(x, w, how):
    """A product: XLA's, or the parts of a tile's programs, or as Mosaic's kernel leaves it."""
    if how == "mosaic":
        return api.split_matmul(x, w, implementation="mosaic")
    return triton.split_matmul(x, w, tiling=how) if isinstance(how, Tiling) else x @ w


def add(x, y, layer, how):
    return fence(api.add_rms_norm(x, y, layer["norm"], EPS, implementation=how))


def norm_chain(i, carry, layers, how):
    del i
    if how.startswith("triton "):
        warps = int(how.split()[1])
        for layer in layers:
            carry = fence(triton.add_rms_norm(*carry, layer["norm"], EPS, num_warps=warps))
        return carry
    for layer in layers:
        carry = add(*carry, layer, how)
    return carry


def attention_half(i, carry, constants, norm, rotate, last, first="xla"):
    """Product, rotation, a stand-in for attention, product, sum and norm."""
    del i
    layers, cos, sin = constants
    x, normed = carry
    for layer in layers:
        qkv = api.qkv_matmul(normed, layer["wqkv"], implementation=first)
        scale = layer["head_norm"]
        more = (None, scale, scale, cos, sin, EPS)
        q, k, v = fence(api.rotate_qkv(qkv, *more, dtype=x.dtype, implementation=rotate))
        grouped = q.reshape(len(q), k.shape[1], -1, k.shape[2])
        out = fence((grouped + k[:, :, None] + v[:, :, None]).reshape(len(q), -1))
        x, normed = add(x, product(out, layer["wo"], last), layer, norm)
    return x, normed


def mlp_half(i, carry, layers, norm, last, first="xla"):
    """Product, SiLU, product, sum and norm."""
    del i
    x, normed = carry
    for layer in layers:
        inner = api.gated_matmul(normed, layer["w_gate_up"], implementation=first)
        x, normed = add(x, product(inner, layer["w_down"], last), layer, norm)
    return x, normed


def write_all(i, pages, constants, write):
    """All layers' rows to places that move on from round to round."""
    rows, page, offset = constants
    return write(pages, rows, (page + i) % len(pages[0]), offset, (False,) * len(pages))


def chain_jobs(name, w, rows, layers, args):
    """Programs of one model's widths at so many rows."""
    key = jax.random.key(rows)
    drawn = [jax.random.normal(k, (rows, w.D), jnp.bfloat16) for k in jax.random.split(key)]
    carry = tuple(drawn)
    angle = jax.random.normal(key, (rows, w.H // 2)) * 9
    facts = {"model": name, "rows": rows}

    def job(part, form, body, carry, constants, calls, rounds=args.chain_rounds):
        row = {"part": part, **facts, "form": form}
        return loop_job(row, body, carry, constants, calls, rounds, args.repeats)

    L = len(layers)
    for how in ("xla", "triton 2", "triton 4", "triton 8"):
        body = functools.partial(norm_chain, how=how)
        yield job("add_rms_norm", how, body, carry, layers, L)
    if rows <= 1024:
        num_pages = max(4, 2 * rows // 64)
        keys = jax.random.split(key, 2 * w.L)
        pages = tuple(jax.random.normal(k, (num_pages, w.G, 64, w.H), jnp.bfloat16) for k in keys)
        new = tuple(jax.random.normal(k, (rows, w.G, w.H), jnp.bfloat16) for k in keys)
        place = jnp.arange(rows, dtype=jnp.int32)
        for form, write in (("xla", write_xla.write_rows), ("triton", write_triton.write_rows)):
            body = functools.partial(write_all, write=write)
            constants = (new, place // 64, place % 64)
            rounds = 8 * args.chain_rounds  # the pages are copied in before each run
            yield job("write_rows", form, body, pages, constants, 1, rounds)
    if rows > 1024:
        return
    constants = (layers, jnp.cos(angle), jnp.sin(angle))
    tiles = FEW_ROWS if rows <= 32 else MANY_ROWS
    tiles = TINY_TILES if w.D < 1024 else tiles if rows <= 128 else tiles[3:4]
    forms = [("xla", "xla", None), ("triton", "xla", None)]
    forms += [("triton", "triton", last) for last in (None, *tiles)]
    for norm, rotate, last in forms:
        form = f"norm {norm}, rotate {rotate}, product {spell(last) if last else 'xla'}"
        body = functools.partial(attention_half, norm=norm, rotate=rotate, last=last)
        yield job("attention half", form, body, carry, constants, L)
    # By Mosaic's kernels: the norm, the product behind, the one before, all of them.
    behind = [("mosaic", "xla", None), ("mosaic", "xla", "mosaic"), ("mosaic", "mosaic", None)]
    behind = [*behind, ("mosaic",) * 3] if w.D >= 1024 and rows <= 128 else []
    for norm, first, last in behind:
        form = f"norm {norm}, product {first}, rotate triton, product {last or 'xla'}"
        body = functools.partial(attention_half, norm=norm, rotate="triton", last=last, first=first)
        yield job("attention half", form, body, carry, constants, L)
    forms = [("xla", None), ("triton", None), *(("triton", one) for one in tiles)]
    for norm, last in forms:
        form = f"norm {norm}, product {spell(last) if last else 'xla'}"
        body = functools.partial(mlp_half, norm=norm, last=last)
        yield job("mlp half", form, body, carry, layers, L)
    for norm, first, last in behind:
        form = f"norm {norm}, gated product {first}, product {last or 'xla'}"
        body = functools.partial(mlp_half, norm=norm, last=last, first=first)
        yield job("mlp half", form, body, carry, layers, L)


TRITON = dataclasses.replace(PLAIN, add_rms_norm="triton", rotate_qkv="triton")
# Each form has what those before it have, but "+ split_matmul" and "chosen"; second, whether a
# kernel writes the cache. Of `mosaic` what cannot take a shape is left to XLA.
STEPS = {
    "xla": (PLAIN, False),
    "+ add_rms_norm": (dataclasses.replace(PLAIN, add_rms_norm="triton"), False),
    "+ rotate_qkv": (TRITON, False),
    "+ write_rows": (TRITON, True),
    "+ split_matmul": (dataclasses.replace(TRITON, split_matmul="triton"), True),
    "+ mosaic norm": (dataclasses.replace(TRITON, add_rms_norm=None), None),
    "+ mosaic qkv_matmul": (dataclasses.replace(TRITON, add_rms_norm=None, qkv_matmul=None), None),
    "+ mosaic split_matmul": (LayerOps(rotate_qkv="triton", gated_matmul="xla"), None),
    "+ mosaic gated_matmul": (LayerOps(rotate_qkv="triton"), None),
    "chosen": (LayerOps(), None),
}


@contextlib.contextmanager
def writing(by_kernel):
    """Let what is traced here write its cache by the kernel, by XLA, or (None) as it would."""
    kept = cache.kv_write
    how = None if by_kernel is None else "triton" if by_kernel else "xla"
    cache.kv_write = _Patched(functools.partial(kept.write_rows, implementation=how))
    try:
        yield
    finally:
        cache.kv_write = kept


@dataclasses.dataclass
class _Patched:
    write_rows: object


class Step:
    """The decode loop of one shape in one form."""

    def __init__(self, model, name, request):
        ops, by_kernel = STEPS[name]
        trunk = functools.partial(model.arch.trunk, ops=ops)
        arch = dataclasses.replace(model.arch, trunk=trunk, takes_ops=False)
        self.model = model.replace(arch=arch)
        self.strategy, self.aux, self.state = request
        self.program = None
        with writing(by_kernel):
            self.lowered = generate._advance.lower(
                self.model, self.strategy, self.aux, self.state, jnp.int32(1), None
            )

    def fresh(self):
        """A copy of the request, which a run takes for itself."""
        return jax.block_until_ready(jax.tree.map(jnp.copy, self.state))

    def advance(self, steps, state=None):
        """The request so many steps on; seconds and what came out."""
        state = self.fresh() if state is None else state
        began = time.perf_counter()
        state = self.program(self.model, self.strategy, self.aux, state, jnp.int32(steps))
        jax.block_until_ready(state)
        return time.perf_counter() - began, state

    def step_ms(self, few, many):
        """Milliseconds of one step between the two."""
        spent = [self.advance(steps)[0] for steps in (few, many)]
        return (spent[1] - spent[0]) / (many - few) * 1e3


def step_jobs(name, model, shapes, forms, args):
    """The decode loops of a model, each with the `Step` to time it."""
    for slots, blocks in shapes:
        strategy = MultiBD(
            block_size=32, buffer_size=blocks, accept_threshold=NEVER, add_block_threshold=0.0
        )
        request = begin(model, Setting(strategy), slots, args.context)
        for form in forms:
            row = {"part": "step", "model": name, "shape": f"{slots}x{blocks}x32", "form": form}
            step = Step(model, form, request)
            job = Job(row, step.lowered, None)
            step.lowered = None
            yield job, step


def kernels(step, steps=4, top=24):
    """Microseconds and launches a step of the kernels of a profiled run, the longest first."""
    state = step.fresh()  # its copies are none of the step's
    trace = profile.traced(lambda: step.advance(steps, state)[1])
    spent, count = collections.Counter(), collections.Counter()
    for event in trace.events:
        spent[event.name] += event.duration_ns / 1e3 / steps
        count[event.name] += 1
    return {
        "busy_us": sum(spent.values()),
        "launches": sum(count.values()) / steps,
        "kernels": [
            {"name": name, "us": us, "launches": count[name] / steps}
            for name, us in spent.most_common(top)
        ],
    }


# --- the run -------------------------------------------------------------------------------------


def interpret():
    """For --smoke: the kernels as plain XLA, on a machine without a GPU."""
    for module, names in (
        (triton, ("add_rms_norm", "split_matmul", "rotate_qkv")),
        (write_triton, ("write_rows",)),
    ):
        for name in names:
            setattr(module, name, functools.partial(getattr(module, name), interpret=True))
    triton.unsupported_type = lambda x: None
    write_triton.unsupported = lambda pages, page, token_last: None
    api.choose_tiling = lambda x, w: TINY_TILES[0]


def main():
    """Check, lower, compile, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--few", type=int, default=8)
    parser.add_argument("--many", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--chain-rounds", type=int, default=16)
    parser.add_argument("--layers", type=int, default=12, help="of a chain of half layers")
    parser.add_argument("--threads", type=int, default=12, help="that compile")
    parser.add_argument("--within", type=float, default=65.0, help="leave out what is not compiled")
    parser.add_argument("--only-steps", action="store_true", help="whole steps, without chains")
    parser.add_argument("--shapes", nargs="+", default=["1x4", "1x1", "8x4"], help="slots x blocks")
    parser.add_argument("--forms", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--commit")
    parser.add_argument("--out")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    if args.smoke:
        interpret()
        args.context, args.rounds, args.repeats, args.chain_rounds = 64, 2, 1, 2
        args.few, args.many, args.layers, args.within = 2, 4, 3, 600.0
    report = {"command": "benchmarks/layer_gpu.py", **environment(), "checks": [], "rows": []}
    report["commit"] = args.commit or report["commit"]

    def save():
        if args.out:
            Path(args.out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    widths = TINY if args.smoke else MODELS
    names = {"tiny": "builtin:tiny-sdar"} if args.smoke else {"1.7B": "random:JetLM/SDAR-1.7B-Chat"}
    asked = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    shapes = {"tiny": [(1, 2)], "1.7B": asked, "8B": [(1, 4)]}
    steps, chains = [], []
    ends = [form for form in args.forms if not form.startswith("+")]
    pool = ThreadPoolExecutor(args.threads)
    checks = {pool.submit(check, w, 77): name for name, w in widths.items()}
    pending = {}

    def submit(job):
        pending[pool.submit(job.compile)] = job

    def measured(what):
        print(f"{what}, {time.perf_counter() - began:.0f} s", flush=True)

    def add_steps(name, source, forms):
        model = dj.load(source, dtype="bfloat16")
        for job, step in step_jobs(name, model, shapes[name], forms, args):
            steps.append((job, step))
            submit(job)
        measured(f"{len(steps)} steps lowered")

    for name, source in names.items():
        add_steps(name, source, args.forms)
    if not args.smoke and time.perf_counter() - began < args.within / 2:
        add_steps("8B", "random:JetLM/SDAR-8B-Chat", ends)
    rows_of = [("1.7B", 128), ("1.7B", 32), ("8B", 128), ("1.7B", 1024), ("1.7B", 4096)]
    rows_of = [] if args.only_steps else [("tiny", 20)] if args.smoke else rows_of
    drawn = {name: draw_layers(jax.random.key(3), widths[name], args.layers) for name, _ in rows_of}
    for name, rows in rows_of:
        if time.perf_counter() - began > args.within:
            measured(f"left out: chains of {name} at {rows} rows")
            continue
        for job in chain_jobs(name, widths[name], rows, drawn[name], args):
            chains.append(job)
            submit(job)
    measured(f"{len(chains)} chains lowered")
    for future, name in checks.items():
        try:
            found = future.result()
        except Exception as error:  # what compiles is still worth its time
            found = {f"{type(error).__name__}: {error}"[:500]: float("inf")}
        report["checks"].append({"model": name, "rows": 77, "error": found})
        print(name, {key: round(value, 3) for key, value in found.items()}, flush=True)
    worst = max(max(line["error"].values()) for line in report["checks"])
    wait(pending, timeout=max(0.0, began + args.within - time.perf_counter()))
    pool.shutdown(cancel_futures=True)  # waits for those that are being compiled
    report["compiled_s"] = time.perf_counter() - began
    for future, job in pending.items():
        if future.cancelled():
            job.row["fault"] = "not compiled in time"
        elif (error := future.exception()) is not None:
            job.row["fault"] = f"{type(error).__name__}: {error}"[:500]
        report["rows"].append(job.row)
        if "fault" in job.row:
            print(job.row, flush=True)
    save()
    measured("compiled")

    for job in chains:
        if job.program is None:
            continue
        job.row |= job.run(job.program)
        facts = f"{job.row['part']:>15} {job.row['model']:>5} {job.row['rows']:>5}"
        print(f"{facts} {job.row['us']:9.2f} us  {job.row['form']}", flush=True)
    save()
    live = [(job, step) for job, step in steps if job.program is not None]
    time_steps(live, args, save, began + args.within + 28)
    for job, step in live:
        if job.row["form"] not in ends:
            continue
        if time.perf_counter() - began > args.within + 35:
            measured("left out: profiles")
            break
        job.row["profile"] = one = kernels(step)
        print(
            f"{job.row['model']} {job.row['shape']} {job.row['form']}: "
            f"{one['busy_us']:.0f} us in {one['launches']:.0f}",
            *(f"  {k['us']:8.1f} us {k['launches']:6.1f} x {k['name']}" for k in one["kernels"]),
            sep="\n",
            flush=True,
        )
        save()
    report["wall_s"] = time.perf_counter() - began
    save()
    measured("done" if worst <= LOOSEST else f"done; a kernel is WRONG by {worst} spacings")
    return int(worst > LOOSEST)


def time_steps(live, args, save, until):
    """What the programs say of themselves, then rounds over all of them."""
    tokens = {}
    for job, step in live:
        step.program = job.program
        _, state = step.advance(args.few)
        mine = np.where(np.asarray(state.buffer.filled), np.asarray(state.buffer.tokens), -1)
        first = tokens.setdefault((job.row["model"], job.row["shape"]), mine)
        job.row["tokens_as_first"] = float((mine == first)[(first >= 0) | (mine >= 0)].mean())
        job.row |= read_program(step)
        job.row["samples_ms"] = []
    for turn in range(args.rounds):
        if turn and time.perf_counter() > until:
            break
        at = turn % max(1, len(live))
        for job, step in live[at:] + live[:at]:
            job.row["samples_ms"].append(step.step_ms(args.few, args.many))
    for job, _ in live:
        row = job.row
        row["step_ms"] = statistics.median(row["samples_ms"])
        print(
            f"{row['model']:>5} {row['shape']:>7} {row['form']:<16} {row['step_ms']:7.3f} ms "
            f"[{min(row['samples_ms']):.3f} {max(row['samples_ms']):.3f}], "
            f"{row['pool_copies_in_hlo']} pool copies, aliased {row['pools_aliased']}, "
            f"{row['tokens_as_first']:.3f} of the tokens as the first form's, "
            f"compiled in {row['compile_s']:.0f} s",
            flush=True,
        )
    save()


if __name__ == "__main__":
    sys.exit(main())
