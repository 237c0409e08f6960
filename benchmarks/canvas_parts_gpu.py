"""Parts of a step of DiffusionGemma at full size: is each kernel right, and is it faster than XLA?

    python benchmarks/canvas_parts_gpu.py --out OUT.json --within 250

Each form of an operation runs in a loop on the device, whose inputs it leaves as they are; its
result is held to the same operation in float32 by XLA, relative to the norm of the result. All are
compiled together first. Then `canvas_gpu.py`'s engine decodes with the kernels that were right and
faster, and 1 slot's launches by time are printed. The file is rewritten after every row.
"""

import argparse
import functools
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import canvas_gpu
import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.bench.numbers import commit
from dllm_jax.kernels.layer import Fp8Sums, LayerOps, gate, norm_rotate, sandwich_norm
from dllm_jax.kernels.paged_attention import WindowMask, api, paged_attention
from dllm_jax.kernels.router import Rule, choose_experts, route
from dllm_jax.kernels.token_readout import law_readout
from dllm_jax.models.head import Head
from dllm_jax.runner import expectation, forward
from dllm_jax.runner.reader import Reader
from dllm_jax.strategies.core.protocol import Readout
from dllm_jax.strategies.core.state import Sampling

V, D, E, CANVAS, PAGE, WINDOW = 262_144, 2816, 128, 256, 64, 1024
CONTEXT, EPS = 1536, 1e-6
ROUTERS = {  # of other families: experts, whether they have a bias, and the rule
    "LLaDA2-mini": (256, True, Rule(k=8, score="sigmoid", factor=2.5, groups=8, kept_groups=4)),
    "SDAR-30B-A3B": (128, False, Rule(k=8)),
}
SLIDING, GLOBAL = (16, 8, 256), (16, 2, 512)  # query heads, KV heads, their size
BOUND = 2e-2  # of the error of 16 bits
NEAR_TIES = 0.99  # share of tokens, or of experts, that must be the same


_TRACING = threading.Lock()  # a form of the readout is patched in meanwhile


class Case(NamedTuple):
    """An operation on given inputs.

    Attributes:
        name: What it is called in the report.
        part: The choice that it belongs to.
        run: From the back end's name and the inputs to what comes out.
        given: Inputs. The first is what a loop makes each call wait for.
        whole: Inputs of the reference; None: `given` in float32.
        forms: Back ends.
        count: Calls of a loop.
    """

    name: str
    part: str
    run: Callable[..., Any]
    given: tuple[Any, ...]
    whole: tuple[Any, ...] | None = None
    forms: tuple[str, ...] = ("xla", "mosaic")
    count: int = 50


def wide(given: Any) -> Any:
    """Numbers of 16 bits in 32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, given)


def looped(run: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The last of `count` results, each call behind the one before it."""

    def whole(first, *rest):
        def body(_, carry):
            # What goes round is not known to stay the same: nothing is taken out of the loop.
            first, _ = jax.lax.optimization_barrier(carry)
            return first, run(first, *rest)

        kinds = jax.eval_shape(run, first, *rest)
        none = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), kinds)
        return jax.lax.fori_loop(0, count, body, (first, none))[1]

    return whole


def draws(seed: int, *shapes: tuple[int, ...], scale: float = 1.0) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [
        scale * jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    ]


# --- the operations ------------------------------------------------------------------------------


def heads(rows: int, kind: tuple[int, int, int]) -> Case:
    N, G, H = kind
    is_global = kind is GLOBAL
    qkv, q_norm, k_norm = draws(0, (1, rows, G, N // G + 2 - is_global, H), (H,), (H,))
    angle = jax.random.uniform(jax.random.key(1), (1, rows, H // 2)) * 9

    def run(form, qkv, *rest):
        how = {"shares_values": is_global, "implementation": form}
        return norm_rotate(qkv, *rest, EPS, **how)

    name = f"heads {rows} {'global' if is_global else 'sliding'}"
    return Case(name, "heads", run, (qkv, q_norm, k_norm, jnp.cos(angle), jnp.sin(angle)))


def norms(rows: int, is_second: bool) -> Case:
    """A half of a layer's norms behind its last product, whose parts XLA may add up in them."""
    depth = D * 3 // 4 if is_second else D * 16 // 11  # of the down product, of the output's
    inner, w = draws(1, (rows, depth), (depth, D))
    x, b, *scales = draws(2, *[(1, rows, D)] * 2, *[(D,)] * 4, (2,))
    mode = jnp.arange(rows)[None] % 3 == 0

    def first(form, x, inner, w, _, mode, s, t, u, *__):
        a = (inner @ w).reshape(x.shape)
        return sandwich_norm(x, ((a, s),), (t, u), EPS, implementation=form)

    def second(form, x, inner, w, b, mode, s, t, u, v, factors):
        a = (inner @ w).reshape(x.shape)
        branches, how = ((a, s), (b, t)), {"outer": u, "factor": (factors, mode)}
        return sandwich_norm(x, branches, (v,), EPS, **how, implementation=form)

    name = f"norms {rows} {'second' if is_second else 'first'}"
    given = (x, inner, w, b, mode, *scales)
    return Case(name, "norms", second if is_second else first, given)


def small(rows: int) -> list[Case]:
    """What follows the products of 8 bits, whose scales it applies, and makes rows of 8 bits."""
    x, b, *scales = draws(10, *[(1, rows, D)] * 2, *[(D,)] * 4, (2,))
    mode = jnp.arange(rows)[None] % 3 == 0
    by_row = jax.random.uniform(jax.random.key(11), (1, rows)) + 0.5

    def product(*outputs: int) -> tuple[jax.Array, ...]:
        sums, by_column = draws(12, (1, rows, *outputs), outputs)
        return sums.astype(jnp.float32), by_row, jnp.abs(by_column.astype(jnp.float32)) + 0.5

    def turned(form, *given):
        *sums, q_norm, k_norm, cos, sin = given
        how = {"dtype": jnp.bfloat16, "implementation": form}
        return norm_rotate(Fp8Sums(*sums), q_norm, k_norm, cos, sin, EPS, **how)

    def first(form, x, *given):
        *sums, s, t, u = given
        how = {"is_quantized": True, "implementation": form}
        return sandwich_norm(x, ((Fp8Sums(*sums), s),), (t, u), EPS, **how)

    def second(form, x, *given):
        *sums, b, mode, s, t, u, v, factors = given
        branches, how = ((Fp8Sums(*sums), s), (b, t)), {"outer": u, "factor": (factors, mode)}
        how |= {"is_quantized": True, "implementation": form}
        return sandwich_norm(x, branches, (v,), EPS, **how)

    def gated(form, *sums):
        how = {"dtype": jnp.bfloat16, "is_quantized": True, "implementation": form}
        return gate(Fp8Sums(*sums), "gelu", **how)

    N, G, H = SLIDING
    norm = draws(13, (H,))[0]
    angle = jax.random.uniform(jax.random.key(1), (1, rows, H // 2)) * 9
    tables = jnp.cos(angle), jnp.sin(angle)
    given = {
        "heads": (turned, (*product(G, N // G + 2, H), norm, norm, *tables)),
        "norms first": (first, (x, *product(D), *scales[:3])),
        "norms second": (second, (x, *product(D), b, mode, *scales)),
        "gate": (gated, product(66, 2, 32)),
    }
    # Held to XLA's form: two roundings to 8 bits may fall apart.
    return [
        Case(f"small {name} {rows}", "small", run, own, own) for name, (run, own) in given.items()
    ]


def router(rows: int) -> Case:
    x, scale, weights, factors = draws(3, (rows, D), (D,), (D, E), (E,))

    def run(form, x, *rest):
        return choose_experts(x, *rest, k=8, eps=EPS, implementation=form)

    return Case(
        f"router {rows}", "router", run, (x, scale, weights, factors, jnp.arange(rows) >= 3)
    )


def router_of(name: str, rows: int) -> Case:
    """The choice of experts of a family whose rows are 2,048 wide."""
    experts, has_bias, rule = ROUTERS[name]
    x, weights, bias = draws(14, (rows, 2048), (2048, experts), (experts,))
    bias = 0.1 * bias.astype(jnp.float32) if has_bias else None

    def run(form, x, weights, bias, live):
        return route(x, weights, bias, live, rule=rule, implementation=form)

    given = (x, weights * 2048**-0.5, bias, jnp.arange(rows) >= 3)
    return Case(f"route {name} {rows}", "route", run, given)


def attention(
    name: str,
    slots: int,
    rows: int,
    kind: tuple[int, int, int],
    causal: bool,
    orders: bool = False,
    context: int = CONTEXT,
) -> Case:
    """A pass over a canvas, or a prefill."""
    N, G, H = kind
    C = -(-(context + rows) // PAGE)
    table = jax.random.permutation(jax.random.key(5), slots * C).reshape(slots, C)
    fresh = [(slots, rows, heads, H) for heads in (N, G, G)]
    q, *rest = draws(slots, *fresh, *[(slots * C, G, PAGE, H)] * 2, scale=0.25)
    mask = WindowMask(
        cell=jnp.broadcast_to(jnp.arange(rows), (slots, rows)).astype(jnp.int32),
        start=jnp.full((slots,), context, jnp.int32),
        live=jnp.broadcast_to(jnp.asarray([0, rows], jnp.int32), (slots, 2)),
        context_len=jnp.full((slots,), context, jnp.int32),
        visible=None,
        causal=jnp.asarray([[True, False]] * slots) if orders else jnp.full((slots,), causal),
        block_size=rows // 2 if orders else CANVAS if causal else rows,
        window=WINDOW if kind is SLIDING else None,
        by_block=True,
        context_is_before=True,
    )

    def run(form, q, *rest):
        return paged_attention(q, *rest, scale=1.0, implementation=form)

    part = "attention" if kind is SLIDING else "wide"
    return Case(f"{part} {name}", part, run, (q, *rest, table.astype(jnp.int32), mask))


def readout(rows: int, table: jax.Array) -> Case:
    """Statistics and expectation of rows that are drawn."""
    (hidden,) = draws(6, (rows, D), scale=4.0)
    slots = rows // CANVAS
    keys = jax.random.split(jax.random.key(7), rows)
    how = Sampling(
        temperature=jnp.linspace(0.4, 0.8, slots),
        top_k=jnp.zeros(slots, jnp.int32),
        top_p=jnp.ones(slots),
    )

    def run(form, hidden, table, how, keys):
        read = functools.partial(law_readout, implementation=form)
        with mock.patch.object(expectation, "law_readout", read):
            head = Head(table, cap=30.0, embed_scale=53.0)
            reader = Reader(head, lambda ids: ids == 4)
            ask = Readout(sampling=how, keys=keys, num_top=1)
            return expectation.read_expected(reader, hidden, ask)

    # In float32 a table of this size would be another 3 GB: XLA's form is what it is held to.
    given = (hidden, table, how, keys)
    return Case(f"readout {rows}", "readout", run, given, given, count=max(1, 4096 // rows))


def law(table: jax.Array) -> Case:
    """The law itself, of few rows, held to float32."""
    (hidden,) = draws(8, (128, D), scale=4.0)
    given = (hidden, table, jnp.arange(V) == 4, jnp.linspace(0.4, 1.0, 128))

    def run(form, *given):
        read = law_readout(*given, cap=30.0, implementation=form)
        weights = read.weights.astype(jnp.float32) * read.unit[:, None]
        return read._replace(weights=weights, unit=jnp.ones_like(read.unit))

    return Case("law 128", "readout", run, given, count=4)


def cases(names: set[str]) -> list[Case]:
    found = []
    if "heads" in names:
        found += [heads(256, SLIDING), heads(256, GLOBAL), heads(4096, SLIDING)]
    if "norms" in names:
        found += [norms(rows, is_second) for rows in (256, 4096) for is_second in (False, True)]
    if "small" in names:
        found += small(256)
    if "router" in names:
        found += [router(256), router(4096)]
    if "route" in names:
        found += [router_of(name, rows) for name in ROUTERS for rows in (32, 1024, 4096)]
    if "attention" in names:
        found += [
            attention("canvas 1", 1, 256, SLIDING, False),
            attention("beside a store", 1, 512, SLIDING, False, True),
            attention("prefill", 1, 1024, SLIDING, True, False, 0),
        ]
    if "wide" in names:
        found += [attention(str(slots), slots, 256, GLOBAL, False) for slots in (1, 4, 16)]
        found += [attention("beside a store", 1, 512, GLOBAL, False, True)]
        found += [attention("prefill", 1, 1024, GLOBAL, True, False, 0)]
    if "readout" in names:
        (table,) = draws(9, (V, D), scale=0.02)
        found += [readout(256, table), law(table), readout(1024, table)]
    return found


# --- checking and timing -------------------------------------------------------------------------


def differences(got: Any, want: Any) -> dict[str, float]:
    """By output: the relative error of numbers, the share of whole numbers that are the same."""
    found = {}
    names = got._fields if hasattr(got, "_fields") else range(len(jax.tree.leaves(got)))
    if hasattr(got, "__dataclass_fields__"):
        names = [name for name in got.__dataclass_fields__ if getattr(got, name) is not None]
    for name, a, b in zip(names, jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if np.issubdtype(a.dtype, np.integer):
            found[f"{name} same"] = float(np.mean(a == b))
        else:
            a, b = a.astype(np.float64), b.astype(np.float64)
            scale = max(float(np.linalg.norm(b)), 1e-30)
            found[str(name)] = float(np.linalg.norm(a - b)) / scale
    return found


def is_right(found: dict[str, float]) -> bool:
    return all(
        value >= NEAR_TIES if name.endswith(" same") else value <= BOUND
        for name, value in found.items()
        # Of rows that drew another token, or chose another expert, the numbers are others.
        if name not in ("confidence", "shares")
    )


def compiled(case: Case, form: str | None) -> Any:
    """The loop of a form; None: the reference, once."""
    given = case.given if form or case.whole is not None else wide(case.given)
    run = functools.partial(case.run, form or "xla")
    with _TRACING, jax.default_matmul_precision("highest" if form is None else None):
        lowered = jax.jit(looped(run, case.count if form else 1)).lower(*given)
    return lowered.compile()


def last_line() -> str:
    error = sys.exc_info()[1]
    return f"{type(error).__name__}: {error}"[:300]


def check(report: Any, names: set[str]) -> set[str]:
    """Rows of all cases; which parts were right in each of theirs and not slower in the first."""
    todo = cases(names)
    with ThreadPoolExecutor(8) as pool:
        futures = {
            (case.name, form): pool.submit(compiled, case, form)
            for case in todo
            for form in (None, *case.forms)
        }
    report.add(part="compiled", count=len(futures))
    good, bad = set(), set()
    for case in todo:
        ms = {}
        try:
            whole = case.given if case.whole is not None else wide(case.given)
            want = futures[case.name, None].result()(*whole)
        except Exception:
            report.add(case=case.name, form="reference", failed=last_line())
            want = None
        for form in case.forms:
            try:
                run = futures[case.name, form].result()
                found = {} if want is None else differences(run(*case.given), want)
                walls = []
                for _ in range(4):
                    began = time.perf_counter()
                    jax.block_until_ready(run(*case.given))
                    walls.append(time.perf_counter() - began)
                ms[form] = 1e3 * min(walls) / case.count
                report.add(case=case.name, form=form, us=1e3 * ms[form], found=found)
                if form == "mosaic":
                    fine = want is not None and is_right(found) and ms[form] < ms.get("xla", 1e9)
                    (good if fine else bad).add(case.part)
            except Exception:
                report.add(case=case.name, form=form, failed=last_line())
                bad |= {case.part} if form == "mosaic" else set()
        want = None
    return good - bad


def patches(forms: set[str]) -> ExitStack:
    """Contexts in which the named parts run in their kernels."""
    found = ExitStack()
    fields = {"heads": "norm_rotate", "norms": "sandwich_norm", "router": "choose_experts"}
    named: dict[str, Any] = {fields[name]: "mosaic" for name in forms & set(fields)}
    with_forms = functools.partial(LayerOps, **named)
    found.enter_context(mock.patch.object(forward, "LayerOps", with_forms))
    if "attention" in forms:
        back_ends = api._back_ends

        def eager(q, k_pages, page_table, mask):
            every = back_ends(q, k_pages, page_table, mask)
            one = every["mosaic"]
            is_fast = q.shape[1] <= api.MOSAIC_ROWS and ("wide" in forms or q.shape[3] <= 256)
            return every | {"mosaic": one._replace(is_fast=is_fast)}

        found.enter_context(mock.patch.object(api, "_back_ends", eager))
    if "readout" in forms:
        by_kernel = functools.partial(law_readout, implementation="mosaic")
        found.enter_context(mock.patch.object(expectation, "law_readout", by_kernel))
    return found


def main():
    """Measure until time is up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--within", type=float, default=250.0)
    parser.add_argument("--model", default=canvas_gpu.MODEL)
    parser.add_argument("--parts", default="heads,norms,router,route,attention,readout,step,wide")
    parser.add_argument("--forms", help="of the step; left out: what was right and faster")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    facts = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": commit(),
        "model": args.model,
        "context": CONTEXT,
        "readout_floor_ms": {"256": 0.96, "1024": 3.8},
    }
    report = canvas_gpu.Report(args.out, args.within, facts, time.perf_counter())
    parts = set(args.parts.split(","))
    last = {"wide"} if "step" in parts else set()  # behind the steps
    forms = check(report, parts - {"step"} - last)
    if args.forms is not None:
        forms = set(args.forms.split(",")) - {""}
    report.add(part="step", forms=sorted(forms))
    if "step" not in parts or report.is_late("step"):
        return
    model = dj.load(args.model)
    jax.block_until_ready(model.params)
    with patches(forms):
        how = {"tokens": args.tokens, "early_slots": canvas_gpu.EARLY, "profiled": True}
        canvas_gpu.measure(report, model, tuple(args.slots), **how)
        check(report, parts & {"wide"})  # behind what a kernel that hangs would take with it
        if not report.is_late("stored alone"):
            how |= {"early_slots": 0, "profiled": False}
            canvas_gpu.measure(report, model, canvas_gpu.ALONE, **how)


if __name__ == "__main__":
    main()
