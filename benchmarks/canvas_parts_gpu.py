"""Parts of a step of DiffusionGemma at full size, alone and within it: readout, attention, kernels.

    python benchmarks/canvas_parts_gpu.py --out OUT.json --within 150

Each form of the readout and of attention is first held to float32 products of the same inputs,
relative to the norm of the result, and then timed in a loop on the device. Then an engine of one
slot decodes canvases of 16 fixed steps with the forms that are named, under the profiler: kernels
by time, milliseconds a forward. The file is rewritten after every row; a part that fails says so.
"""

import argparse
import collections
import functools
import sys
import time
from contextlib import ExitStack
from typing import Any
from unittest import mock

import canvas_gpu
import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.bench import profile
from dllm_jax.bench.numbers import commit
from dllm_jax.kernels.paged_attention import WindowMask, api, paged_attention
from dllm_jax.kernels.token_readout import law_readout
from dllm_jax.models.head import Head
from dllm_jax.runner import expectation
from dllm_jax.strategies.core.state import Sampling
from dllm_jax.strategies.diffusion_gemma import DiffusionGemma

V, D, CANVAS, PAGE, WINDOW = 262_144, 2816, 256, 64, 1024
CONTEXT = 1536
READOUT_FLOOR_MS = {256: 0.96, 512: 1.91, 1024: 3.8, 4096: 15.3}


def timed(step, carry, consts, count=20):
    """Milliseconds of `step(carry, consts) -> carry`, the least of four loops on the device."""

    @jax.jit
    def loop(carry, consts):
        return jax.lax.fori_loop(0, count, lambda _, c: step(c, consts), carry)

    jax.block_until_ready(loop(carry, consts))
    walls = []
    for _ in range(4):
        began = time.perf_counter()
        jax.block_until_ready(loop(carry, consts))
        walls.append(time.perf_counter() - began)
    return 1e3 * min(walls) / count


def error(got, want):
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


# --- readout -------------------------------------------------------------------------------------


def readout(report, rows_of=(256, 1024)):
    """The expected embedding with its draws, by form."""
    key = jax.random.split(jax.random.key(0), 3)
    table = jax.random.normal(key[0], (V, D), jnp.bfloat16) * 0.02
    named = {"xla": None, "mosaic": "mosaic"}
    for rows in rows_of:
        hidden = jax.random.normal(key[1], (rows, D), jnp.bfloat16) * 4
        keys = jax.random.split(key[2], rows)
        how = Sampling(
            temperature=jnp.linspace(0.4, 0.8, rows // CANVAS),
            top_k=jnp.zeros(rows // CANVAS, jnp.int32),
            top_p=jnp.ones(rows // CANVAS),
        )

        def read(hidden, consts, how=how):
            table, keys = consts
            head = Head(table, cap=30.0, embed_scale=53.0)
            never = lambda ids: ids == 4  # noqa: E731
            return expectation.read_expected(head, hidden, how, keys, forbidden=never, num_top=1)

        answers = {}
        for name, form in named.items():
            for at_once in (256, 512, 1024) if rows > 256 else (256,):
                patched = functools.partial(law_readout, implementation=form)
                try:
                    with (
                        mock.patch.object(expectation, "ROWS", at_once),
                        mock.patch.object(expectation, "law_readout", patched),
                    ):
                        got = jax.jit(lambda h, c: read(h, c))(hidden, (table, keys))
                        answers.setdefault("want", jax.tree.map(np.asarray, got))
                        want = answers["want"]
                        ms = timed(
                            lambda h, c: h + 1e-6 * read(h, c).soft.astype(h.dtype),
                            hidden,
                            (table, keys),
                            count=max(1, 4096 // rows),
                        )
                    report.add(
                        part="readout",
                        rows=rows,
                        form=name,
                        at_once=at_once,
                        ms=ms,
                        of_floor=ms / READOUT_FLOOR_MS[rows],
                        soft_error=error(got.soft, want.soft),
                        entropy_error=error(got.entropy, want.entropy),
                        same_best=float(np.mean(np.asarray(got.top_ids) == want.top_ids)),
                        same_draw=float(np.mean(np.asarray(got.token) == want.token)),
                    )
                except Exception:
                    report.add(part="readout", rows=rows, form=name, failed=last_line())
    exact(report, table)


def exact(report, table):
    """Laws of a few rows, each form held to float32."""
    hidden = jax.random.normal(jax.random.key(5), (128, D), jnp.bfloat16) * 4
    never, heat = jnp.arange(V) == 4, jnp.linspace(0.4, 1.0, 128)
    want = law_readout(hidden.astype(jnp.float32), table.astype(jnp.float32), never, heat, cap=30.0)
    for form in ("xla", "mosaic"):
        try:
            got = law_readout(hidden, table, never, heat, cap=30.0, implementation=form)
            names = ("rest", "spread", "shares", "weights")
            errors = {name: error(getattr(got, name), getattr(want, name)) for name in names}
            same = float(jnp.mean(got.token == want.token))
            report.add(part="law", form=form, same_best=same, errors=errors)
        except Exception:
            report.add(part="law", form=form, failed=last_line())


# --- attention -----------------------------------------------------------------------------------


def attention_case(slots, rows, heads, window, causal, orders=False, context=CONTEXT):
    """Random inputs of a pass over a canvas, or of a prefill."""
    N, G, H = heads
    C = -(-(context + rows) // PAGE)
    key = jax.random.split(jax.random.key(slots), 6)
    draw = lambda k, *shape: jax.random.normal(k, shape, jnp.bfloat16) * 0.25  # noqa: E731
    table = jax.random.permutation(key[5], slots * C).reshape(slots, C).astype(jnp.int32)
    size = rows if not orders else rows // 2
    mask = WindowMask(
        cell=jnp.broadcast_to(jnp.arange(rows), (slots, rows)).astype(jnp.int32),
        start=jnp.full((slots,), context, jnp.int32),
        live=jnp.broadcast_to(jnp.asarray([0, rows], jnp.int32), (slots, 2)),
        context_len=jnp.full((slots,), context, jnp.int32),
        visible=None,
        causal=jnp.asarray([[True, False]] * slots) if orders else jnp.full((slots,), causal),
        block_size=CANVAS if causal else size,
        window=window,
        by_block=True,
        context_is_before=True,
    )
    shapes = (slots, rows, N, H), (slots, rows, G, H), (slots, rows, G, H)
    pools = [(slots * C, G, PAGE, H)] * 2
    data = [draw(k, *shape) for k, shape in zip(key, (*shapes, *pools), strict=False)]
    return data, table, mask


SLIDING, GLOBAL = (16, 8, 256), (16, 2, 512)
CASES: dict[str, Any] = {
    "canvas 1": (1, 256, SLIDING, WINDOW, False),
    "canvas 4": (4, 256, SLIDING, WINDOW, False),
    "canvas 16": (16, 256, SLIDING, WINDOW, False),
    "beside a store": (1, 512, SLIDING, WINDOW, False, True),
    "prefill": (1, 1024, SLIDING, WINDOW, True, False, 0),
    "global 1": (1, 256, GLOBAL, None, False),
    "global 16": (16, 256, GLOBAL, None, False),
}


def attention(report):
    """Attention of one layer, by form."""
    for name, settings in CASES.items():
        data, table, mask = attention_case(*settings)
        full = [x.astype(jnp.float32) for x in data]
        with jax.default_matmul_precision("highest"):
            want = paged_attention(*full, table, mask, scale=1.0, implementation="xla")
        for form in ("xla",) if "global" in name else ("xla", "mosaic"):
            try:
                run = functools.partial(paged_attention, scale=1.0, implementation=form)
                got = jax.jit(run)(*data, table, mask)
                ms = timed(
                    lambda q, rest: q + 1e-6 * run(q, *rest),  # noqa: B023
                    data[0],
                    (*data[1:], table, mask),
                    count=50,
                )
                report.add(part="attention", case=name, form=form, ms=ms, error=error(got, want))
            except Exception:
                report.add(part="attention", case=name, form=form, failed=last_line())


# --- the step ------------------------------------------------------------------------------------


def patches(forms):
    """Contexts in which the named parts run in their kernels."""
    found = ExitStack()
    if "attention" in forms:
        back_ends = api._back_ends

        def eager(q, k_pages, page_table, mask):
            every = back_ends(q, k_pages, page_table, mask)
            one = every["mosaic"]
            return every | {"mosaic": one._replace(is_fast=q.shape[1] <= api.MOSAIC_ROWS)}

        found.enter_context(mock.patch.object(api, "_back_ends", eager))
    if "readout" in forms:
        by_kernel = functools.partial(law_readout, implementation="mosaic")
        found.enter_context(mock.patch.object(expectation, "law_readout", by_kernel))
    return found


def step(report, model, forms, slots, tokens=1024, shown=60):
    """Forwards by time and number of slots, and the kernels of one canvas of one slot."""
    canvas = model.defaults.block_size
    strategy = DiffusionGemma(
        max_denoising_steps=float(canvas_gpu.STEPS), confidence_threshold=0.0, block_size=canvas
    )
    longest = 2 * tokens + canvas
    pages = -(-(longest + canvas) // PAGE)
    config = dj.EngineConfig(
        max_num_seqs=max(slots),
        max_model_len=longest,
        num_pages=max(slots) * pages + 1,
        max_num_batched_tokens=max(slots) * tokens,
        slot_buckets=slots,
        page_buckets=(pages,),
        prefill_buckets=(tokens,),
    )
    jax.clear_caches()  # what was traced with other forms
    began = time.perf_counter()
    with patches(forms), dj.LLM(model, strategy, config=config, progress=False) as llm:
        report.add(part="start", forms=forms, seconds=time.perf_counter() - began)
        call = canvas_gpu.Calls(llm, tokens)
        for count in slots:
            if report.is_late(f"{count} slots"):
                return
            call(count, canvas)
            one_s, one_nfe = min(call(count, canvas) for _ in range(2))
            prefill_s, _ = call(count, canvas, max_nfe=1)
            all_s, all_nfe = min(call(count, tokens) for _ in range(3 if count == 1 else 1))
            forward_ms = 1e3 * (all_s - one_s) / (all_nfe - one_nfe)
            report.add(
                part="step",
                forms=forms,
                slots=count,
                ms_per_forward=forward_ms,
                of_floor=forward_ms / canvas_gpu.FLOOR_MS[count],
                tok_s=count * tokens / all_s,
                decode_tok_s=count * (tokens - canvas) / (all_s - one_s),
                prefill_ms=1e3 * prefill_s - forward_ms,
                nfe=all_nfe,
                seconds=all_s,
                peak_gb=canvas_gpu.peak_gb(),
            )
            if count == 1:
                kernels(report, forms, lambda: call(1, canvas), one_nfe, shown)


def kernels(report, forms, run, steps, shown):
    """Where the time of a call goes."""
    spent, count = collections.defaultdict(float), collections.Counter()
    for event in profile.traced(run).events:
        spent[event.name] += event.duration_ns
        count[event.name] += 1
    measured = [
        {"name": name[:90], "ms": ns / 1e6, "calls": count[name]}
        for name, ns in sorted(spent.items(), key=lambda pair: -pair[1])[:shown]
    ]
    total = sum(spent.values()) / 1e6
    report.add(part="profile", forms=forms, steps=steps, total_ms=total, kernels=measured)


def last_line():
    error = sys.exc_info()[1]
    return f"{type(error).__name__}: {error}"[:300]


def main():
    """Measure until time is up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--within", type=float, default=150.0)
    parser.add_argument("--model", default=canvas_gpu.MODEL)
    parser.add_argument("--parts", default="attention,readout,step")
    parser.add_argument("--forms", default="attention+readout", help="of the step, one after one")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4])
    args = parser.parse_args()
    facts = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": commit(),
        "model": args.model,
        "context": CONTEXT,
        "readout_floor_ms": READOUT_FLOOR_MS,
    }
    report = canvas_gpu.Report(args.out, args.within, facts)
    model = None
    for part in args.parts.split(","):
        if part == "step":
            model = dj.load(args.model)
            jax.block_until_ready(model.params)
        for forms in args.forms.split(",") if part == "step" else ("",):
            if report.is_late(f"{part} {forms}"):
                continue
            try:
                if part == "step":
                    step(report, model, forms, tuple(args.slots))
                else:
                    {"attention": attention, "readout": readout}[part](report)
            except Exception:
                report.add(part=part, forms=forms, failed=last_line())


if __name__ == "__main__":
    main()
