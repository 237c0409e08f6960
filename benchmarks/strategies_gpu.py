"""What a decode step of each strategy costs beside `multi_bd`'s, at the same window and work.

    python benchmarks/strategies_gpu.py --out benchmarks/results/strategies_h200.json

One model with random weights, one request, a window of 4 blocks of 32 cells; strategies of one
block have one of 128, so that every forward computes as many rows and reads the head for all of
them. Thresholds are out of reach and blocks open at once: each step fills what its rule forces,
every block is live in every timed step and nothing finishes; the script runs the steps one by one
before and ends with an error where that is not so. No guidance.

A step is timed in `dj.generate`'s own device loop: the time of a run of `--many` steps less that of
`--few`, over the steps between. Each round times all strategies, beginning with another one, and
each ratio is to `multi_bd` in the same round. The prompt's keys and values are random numbers and
not a prefill's: no time depends on them, and no prefill need be compiled. `ar` and `fast_dllm_v2`
need a shifted model: the same weights, declared to be shifted.

From the compiled programs: how often a step copies a pool, and for how many rows it holds float32
logits at once: fewer than slots x window, where that is more than `readout.FEW_ROWS`. So must the
programs of `--wide-slots` requests; that compiles all of it once more, last, and only where it is
asked for.

Programs are compiled by several threads, each strategy's row is written once its program is there,
and the times after every round: whatever ends the script, what was measured is in the file. Nothing
new is begun after `--within` seconds; a strategy whose program was not compiled by then says so.
`--smoke` shrinks all of it for a CPU and `--model builtin:tiny-sdar`.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.api import generate
from dllm_jax.bench.numbers import environment
from dllm_jax.bench.roofline import floor_ms
from dllm_jax.runner import decode
from dllm_jax.runner.chunks import FEW_ROWS
from dllm_jax.runner.forward import ModelForward
from dllm_jax.runner.window_output import TARGET
from dllm_jax.strategies import (
    AR,
    D2F,
    BlockDiffusion,
    DMax,
    Edit,
    FastDLLMV2,
    FullSequence,
    MultiBD,
)
from dllm_jax.strategies.core.state import DUMMY, RUNNING

BASE = "multi_bd"
BAR, DMAX_BAR = 1.05, 1.10
MAX_TOKENS = 256  # more than any run writes
NEVER = 2.0  # a threshold above every probability
COMPILE_SHARE = 0.7  # of the time there is; the rest is for the rounds


@dataclasses.dataclass(frozen=True)
class Setting:
    """A strategy under test.

    Attributes:
        bar: The most its step may cost, as a multiple of the base's.
        context: Tokens of its prompt; None: as many as all others have.
    """

    strategy: object
    bar: float | None = BAR
    shifted: bool = False
    context: int | None = None
    max_tokens: int = MAX_TOKENS


def settings(blocks, block_size, context):
    """The strategies by name, each with its thresholds out of reach."""
    window = blocks * block_size
    whole = {"block_size": block_size, "buffer_size": context // block_size + blocks}
    several = {"accept_threshold": NEVER, "add_block_threshold": 0.0}
    several |= {"block_size": block_size, "buffer_size": blocks}
    one = {"accept_threshold": NEVER, "block_size": window, "buffer_size": 1}
    return {
        BASE: Setting(MultiBD(**several)),
        "d2f": Setting(D2F(**several)),
        "edit": Setting(Edit(edit_threshold=NEVER, **several)),
        "dmax": Setting(DMax(commit_confidence=NEVER, **several), DMAX_BAR),
        "dmax, compat": Setting(
            DMax(commit_confidence=NEVER, compat="diffulex", **several), DMAX_BAR
        ),
        "block_diffusion": Setting(BlockDiffusion(**one)),
        # Sub-blocks of one cell begin with a hole each, so every pass is a full one.
        "fast_dllm_v2, full": Setting(FastDLLMV2(sub_block_size=1, **one), shifted=True),
        "fast_dllm_v2, refinement": Setting(
            FastDLLMV2(sub_block_size=window // 4, **one), shifted=True
        ),
        # Prompt and text share the window.
        "full_sequence": Setting(
            FullSequence(block_size=block_size, buffer_size=blocks),
            context=window // 2,
            max_tokens=window // 2,
        ),
        "full_sequence, whole prompt": Setting(FullSequence(**whole), bar=None, max_tokens=window),
        "full_sequence, dual cache": Setting(
            FullSequence(cache="dual", block_length=window, **whole), bar=None, max_tokens=window
        ),
        "block_diffusion, one block": Setting(
            BlockDiffusion(accept_threshold=NEVER, block_size=block_size), bar=None
        ),
        "ar": Setting(AR(), bar=None, shifted=True),
    }


# --- one strategy, ready to run ----------------------------------------------------------------


class Bench:
    """A strategy's decode loop, compiled, and a request in the middle of its life."""

    def __init__(self, model, setting, slots, context):
        config = dataclasses.replace(model.config, shift=setting.shifted)
        self.model = model.replace(config=config)
        self.strategy, self.aux, self.state = _begin(self.model, setting, slots, context)
        began = time.perf_counter()
        self.program = generate._advance.lower(
            self.model, self.strategy, self.aux, self.state, jnp.int32(1), None
        ).compile()
        self.compile_s = time.perf_counter() - began

    def fresh(self):
        """A copy of the request: a run takes its own away."""
        return jax.block_until_ready(jax.tree.map(jnp.copy, self.state))

    def advance(self, state, steps):
        """So many steps of the device loop, waited for."""
        state = self.program(self.model, self.strategy, self.aux, state, jnp.int32(steps))
        return jax.block_until_ready(state)

    def step_ms(self, few, many):
        """Milliseconds of one step between the `few`-th and the `many`-th."""
        spent = []
        for steps in (few, many):
            state = self.fresh()
            began = time.perf_counter()
            self.advance(state, steps)
            spent.append(time.perf_counter() - began)
        return (spent[1] - spent[0]) / (many - few) * 1e3


def _begin(model, setting, slots, context):
    shape = slots, setting.context or context
    return begin(model, setting.strategy, shape, max_tokens=setting.max_tokens)


def begin(model, strategy, shape, **wishes):
    """The bare strategy, its models, and a state whose prompts are cached as random numbers.

    Args:
        shape: Prompts, and tokens of each.
    """
    rng = np.random.default_rng(7)
    prompts = jnp.asarray(rng.integers(0, model.config.vocab_size * 9 // 10, shape), jnp.int32)
    wishes = generate.Wishes(ignore_eos=True, **wishes)
    _, (bare, aux), batch = generate._prepare(model, prompts, strategy, wishes)
    state = generate._fresh(model, bare, aux, batch, wishes.max_tokens)
    leaves, tree = jax.tree.flatten(state.pools)
    keys = jax.random.split(jax.random.key(11, impl="rbg"), len(leaves) + 1)
    drawn = [
        jax.random.normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=False)
    ]
    boundary = jax.random.normal(keys[-1], state.boundary.shape, state.boundary.dtype)
    state = state.replace(pools=jax.tree.unflatten(tree, drawn), boundary=boundary)
    # What prefill would leave to the strategy, such as the first token of `ar`.
    return bare, aux, decode.absorb_nothing(bare, ModelForward(model, aux=aux), state)


def watch(bench, few, many):
    """The steps one by one: what was live and what was written in those that are timed."""
    state, live, filled, committed = bench.advance(bench.fresh(), few), [], [], 0
    size = state.buffer.tokens.shape[2]
    for _ in range(few, many):
        start, before = int(state.buffer.start[0]), _tokens(state)
        state = bench.advance(state, 1)
        moved = int(state.buffer.start[0]) - start
        # What left with the step was live in its forward.
        live.append(int(np.sum(np.asarray(state.buffer.status[0]) != DUMMY)) + moved // size)
        filled.append(_tokens(state) - before)
        committed += moved
    buffer = state.buffer
    held = np.asarray(buffer.tokens[0])[np.asarray(buffer.filled[0])]
    emitted = np.asarray(state.output[0, : int(state.output_len[0])])
    return {
        "live_blocks": [min(live), max(live)],
        "tokens_per_step": [min(filled), max(filled)],
        "committed_tokens": committed,
        "forwards": int(buffer.nfe[0]),
        "running": bool(np.all(np.asarray(state.finish) == RUNNING)),
        "different_tokens": len({*held.tolist(), *emitted.tolist()}),
    }


def _tokens(state):
    """Filled cells of the first request, those in the cache included."""
    return int(state.buffer.start[0]) + int(np.sum(np.asarray(state.buffer.filled[0])))


def faults(setting, seen, many):
    """Why the steps are no equal work, as words."""
    blocks = setting.strategy.buffer_size
    wrong = []
    if seen["live_blocks"] != [blocks, blocks]:
        wrong.append(f"live blocks {seen['live_blocks']} instead of {blocks}")
    if seen["forwards"] != many or not seen["running"]:
        wrong.append(f"{seen['forwards']} forwards in {many} steps, running {seen['running']}")
    if seen["tokens_per_step"][0] < 1:
        wrong.append(f"tokens a step {seen['tokens_per_step']}")
    return wrong


# --- what the compiled programs say ------------------------------------------------------------


def logit_rows(text, vocab):
    """Rows of each distinct float32 array that has an axis of the vocabulary's size.

    What a fusion holds inside is in registers; its operands and results are arrays.
    """
    inside = set(re.findall(r"fusion\([^\n]*calls=(%?[\w.\-]+)", text))
    shapes = set()
    for body in re.split(r"\n(?=%|ENTRY)", text):
        if body.split(" ", 1)[0] not in inside:
            shapes |= set(re.findall(r"= \(?f32\[([\d,]+)\]", body))
    found = [tuple(map(int, dims.split(","))) for dims in shapes]
    return sorted({math.prod(shape) // vocab for shape in found if vocab in shape})


def read_program(bench):
    """Of the timed program: pool copies, and the largest float32 array along the vocabulary."""
    text, vocab = bench.program.as_text(), bench.model.config.vocab_size
    pools = bench.state.pools
    shape = ",".join(map(str, pools[TARGET][0][0].shape))
    copies = rf"= \w+\[{shape}\]\S* (?:copy|copy-start|select|transpose|convert)\("
    cache = sum(leaf.nbytes for leaf in jax.tree.leaves(pools))
    memory = bench.program.memory_analysis()
    return {
        "pool_copies_in_hlo": len(re.findall(copies, text)),
        "pools_aliased": memory.alias_size_in_bytes >= cache,
        "logit_rows_in_hlo": max(logit_rows(text, vocab), default=0),
        "temp_bytes": memory.temp_size_in_bytes,
    }


def wide_logit_rows(model, setting, slots, context):
    """The most rows of float32 logits in the program of so many requests, and rows of the window.

    One layer is compiled: depth has no part in it.
    """
    config = dataclasses.replace(model.config, shift=setting.shifted, num_layers=1)
    params = {**model.params, "layers": model.params["layers"][:1]}
    shallow = model.replace(params=params, config=config)
    bare, aux, state = _begin(shallow, setting, slots, context)
    program = generate._advance.lower(shallow, bare, aux, state, jnp.int32(1), None).compile()
    return {
        "slots": slots,
        "rows": slots * bare.buffer_size * bare.block_size,
        "logit_rows": max(logit_rows(program.as_text(), config.vocab_size), default=0),
    }


# --- the run -----------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:JetLM/SDAR-8B-Chat")
    parser.add_argument("--shape", default="1x4x32", help="slots x blocks x block size")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--few", type=int, default=6)
    parser.add_argument("--many", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--wide-slots", type=int, default=0, help="e.g. 16; 0 leaves it out")
    parser.add_argument("--threads", type=int, default=8, help="that compile")
    parser.add_argument("--within", type=float, default=140.0, help="begin nothing after so many s")
    parser.add_argument("--only", help="names, separated by semicolons; the base is always run")
    parser.add_argument("--commit")
    parser.add_argument("--out")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.context, args.rounds = 64, 2
    slots, blocks, block_size = map(int, args.shape.split("x"))
    began = time.perf_counter()
    model = dj.load(args.model)
    jax.block_until_ready(model.params)
    report = {
        "command": "benchmarks/strategies_gpu.py",
        "model": args.model,
        "dtype": str(model.params["embed"].dtype),
        **environment(),
        "shape": args.shape,
        "context": args.context,
        "steps": [args.few, args.many],
        "rounds": args.rounds,
        "load_s": time.perf_counter() - began,
        "floor_ms": floor_ms(
            model, slots, blocks * block_size, args.context, jax.devices()[0].device_kind
        ),
        "rows": [],
    }
    report["commit"] = args.commit or report["commit"]
    chosen = settings(blocks, block_size, args.context)
    if args.only:
        chosen = {n: s for n, s in chosen.items() if n in (BASE, *args.only.split(";"))}
    benches = compile_all(model, chosen, args, report, began + COMPILE_SHARE * args.within)
    time_all(benches, args, report, began + args.within)
    if args.wide_slots:
        check_wide(model, chosen, args, report)
    report["wall_s"] = time.perf_counter() - began
    save(args.out, report)
    print(table(report))
    return 1 if any(row["faults"] for row in report["rows"]) else 0


def compile_all(model, chosen, args, report, until):
    """Compile every strategy's program, look at its steps, write its row; those that were ready."""
    slots = int(args.shape.split("x")[0])
    report["rows"] = [
        {"name": name, "bar": setting.bar, "faults": ["not compiled in time"]}
        for name, setting in chosen.items()
    ]
    rows = {row["name"]: row for row in report["rows"]}
    benches, taken = {}, set()
    pool = ThreadPoolExecutor(args.threads)
    ready = {
        pool.submit(Bench, model, setting, slots, args.context): name
        for name, setting in chosen.items()
    }

    def take(future):
        name = ready[future]
        taken.add(name)
        if (error := future.exception()) is not None:  # the other strategies still count
            rows[name]["faults"] = [f"{type(error).__name__}: {error}"[:500]]
            print(f"{name}: {rows[name]['faults'][0]}", flush=True)
            return
        bench, setting = future.result(), chosen[name]
        seen, read = watch(bench, args.few, args.many), read_program(bench)
        wrong = faults(setting, seen, args.many)
        strategy = bench.strategy
        cells = slots * strategy.buffer_size * strategy.block_size
        half = model.params["embed"].dtype.itemsize == 2  # float32 weights look like logits
        if setting.bar and half and read["logit_rows_in_hlo"] >= cells > FEW_ROWS:
            wrong.append(f"{read['logit_rows_in_hlo']} rows of logits at once")
        if args.model.startswith("random:") and seen["different_tokens"] <= 4:
            wrong.append("the tokens are not a readout's")
        rows[name] |= {
            "strategy": repr(setting.strategy),
            "window": f"{slots} x {strategy.buffer_size} x {strategy.block_size}",
            "compile_s": bench.compile_s,
            "faults": wrong,
            **seen,
            **read,
        }
        benches[name] = bench
        print(f"{name}: compiled in {bench.compile_s:.1f} s, {seen} {wrong or ''}", flush=True)
        save(args.out, report)

    with contextlib.suppress(TimeoutError):
        for future in as_completed(ready, timeout=max(0.0, until - time.perf_counter())):
            take(future)
    pool.shutdown(cancel_futures=True)  # waits for those that are being compiled
    for future, name in ready.items():
        if name not in taken and not future.cancelled():
            take(future)
    return {name: benches[name] for name in chosen if name in benches}


def check_wide(model, chosen, args, report):
    """Hold the programs of many slots to the readout's bound; nothing is timed any more."""
    judged = [row for row in report["rows"] if row["bar"]]
    with ThreadPoolExecutor(args.threads) as pool:
        found = pool.map(
            lambda row: wide_logit_rows(model, chosen[row["name"]], args.wide_slots, args.context),
            judged,
        )
        for row, wide in zip(judged, found, strict=True):
            row["wide"] = wide
            if wide["logit_rows"] >= wide["rows"]:
                row["faults"].append(f"{wide['logit_rows']} rows of logits at once")
            save(args.out, report)


def time_all(benches, args, report, until):
    """Rounds over all strategies, each beginning with another one; medians into the rows."""
    names = list(benches)
    if BASE not in benches:
        return  # its row says why
    samples = {name: [] for name in names}
    for turn in range(args.rounds):
        if turn and time.perf_counter() > until:
            break
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            samples[name].append(benches[name].step_ms(args.few, args.many))
        for row in report["rows"]:
            if row["name"] in benches:
                row |= times(row, samples[row["name"]], samples[BASE])
        save(args.out, report)


def times(row, mine, base):
    """What the rounds so far say of one strategy."""
    ratios = [a / b for a, b in zip(mine, base, strict=True)]
    ratio = statistics.median(ratios)
    return {
        "step_ms": statistics.median(mine),
        "min_ms": min(mine),
        "max_ms": max(mine),
        "ratio": ratio,
        "min_ratio": min(ratios),
        "max_ratio": max(ratios),
        "samples_ms": list(mine),
        "within_bar": row["bar"] is None or ratio <= row["bar"],
    }


def save(path, report):
    if path:
        Path(path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def table(report):
    """The figures for people."""
    lines = [
        f"{report['model']}, {report['device']}, jax {report['jax']}, {report['shape']}, "
        f"context {report['context']}, floor {report['floor_ms'] or 0:.2f} ms",
        f"{'':<28}{'window':>12}{'step ms':>9}{'min':>8}{'max':>8}{'ratio':>7}"
        f"{'[min, max]':>16}{'bar':>6}  pool copies, rows of logits, the same of many slots",
    ]
    for row in report["rows"]:
        if "ratio" not in row:
            lines.append(f"{row['name']:<28}  not timed: {'; '.join(row['faults'])}")
            continue
        wide = row.get("wide")
        spread = f"[{row['min_ratio']:.3f}, {row['max_ratio']:.3f}]"
        lines.append(
            f"{row['name']:<28}{row['window']:>12}{row['step_ms']:>9.3f}{row['min_ms']:>8.3f}"
            f"{row['max_ms']:>8.3f}{row['ratio']:>7.3f}{spread:>16}{row['bar'] or '-':>6}"
            f"  {row['pool_copies_in_hlo']}, {row['logit_rows_in_hlo']}, "
            f"{'{logit_rows} of {rows}'.format(**wide) if wide else '-'}"
            f"{'' if row['within_bar'] else '  ABOVE ITS BAR'}"
            f"{'  ' + '; '.join(row['faults']) if row['faults'] else ''}"
        )
    return "\n".join([*lines, f"{report.get('wall_s', 0):.0f} s"])


if __name__ == "__main__":
    sys.exit(main())
