"""DFlash on one GPU: a round's cost beside a plain decode step, and the gain of a trained pair.

    python benchmarks/dflash_gpu.py --out benchmarks/results/dflash_h200.json

Sections:

`ar`        A check of the baseline: a step of `ar` beside a loop written here, without strategy or
            driver: forward of one token, argmax, write of its keys and values (and the same with a
            second, unused row, whose products are other kernels).
`qwen3_8b`  Qwen3-8B and its 5-layer draft at full size, random weights: a step of `ar`, a round of
            `dflash` at its whole block, the draft pass alone (with the target's head) and the
            verify pass alone (neither writes to a cache), each beside its floor. They give
            tau * t_AR / t_round, the speed-up of a mean accepted length of tau. And `dflash` where
            drafts are never right: at width 1, and with the switch (steps after it has gone off,
            one probe among them).
`pair`      The built-in pair on held-out word problems: `dflash_pair.py`.
`bars`      Only the figures of the bars on time, in about two minutes: one request's loops of `ar`
            and `qwen3_8b` except two, and the loop of `dj.generate` by batch of `pair`. All
            programs are compiled before any is timed.

A step is timed in a loop on the device: the time of `--many` steps less that of `--few`, divided by
the difference. Each turn times all loops of a batch and begins with another one. Ratios are those
of one turn; their median is reported. Prompts are random numbers in the cache, on which no time
depends. Programs are compiled by several threads before anything is timed. Rows are written as they
come, and nothing begins after `--within` seconds. `--smoke` runs tiny random models on a CPU.
"""

import argparse
import collections
import functools
import json
import math
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dflash_pair
import jax
import jax.numpy as jnp
import numpy as np
from dflash_pair import SMALL, small_model
from flax import struct
from strategies_gpu import begin, read_program

import dllm_jax as dj
from dllm_jax.api import generate
from dllm_jax.api.drafts import with_target
from dllm_jax.bench.numbers import environment
from dllm_jax.bench.roofline import RATES, floor_ms
from dllm_jax.engine.layout import PAGE_SIZE
from dllm_jax.kernels.kv_write import page_slots, write_rows
from dllm_jax.kernels.paged_attention import WindowMask, paged_attention
from dllm_jax.models.kv_cache import new_pool
from dllm_jax.runner.forward import ModelForward
from dllm_jax.runner.window_output import TARGET
from dllm_jax.strategies import AR, DFlash
from dllm_jax.strategies.core import random
from dllm_jax.strategies.dflash import DRAFT

QWEN, QWEN_DRAFT = "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"
AR_BAR, DRAFT_BAR, ROUND_BAR, OFF_BAR = 1.05, 1.4, 1.4, 0.97
TAUS = range(2, 9)
SECTIONS = ("ar", "bars", "pair", "qwen3_8b")
PLAIN = ("bare step", "bare step of 2 rows")
BARS = ("ar step", "bare step", "round", "draft pass", "round of width 1", "round, adaptive")
# Steps between which drafts of random weights are off: 77 without and a probe. In the steps before,
# some 14 rounds are lost in finding out.
SWITCHED_OFF = (40, 40 + 78)
COMPILE_SHARE = 0.7  # of the time there is
ACCEPTANCE = "how many drafts are accepted needs real weights: with random ones nearly none is"


# --- models -------------------------------------------------------------------------------------


def load_pair(smoke):
    """Qwen3-8B and its draft with random weights; tiny ones of the same kinds for a CPU."""
    if not smoke:
        models = dj.load(f"random:{QWEN}"), dj.load(f"random:{QWEN_DRAFT}")
    else:
        taps = {"target_layer_ids": [0, 1, 2], "mask_token_id": 3, "block_size": 16}
        own = {"num_hidden_layers": 2, "dflash_config": taps}
        models = small_model(QWEN, SMALL, 0), small_model(QWEN_DRAFT, SMALL | own, 1)
    jax.block_until_ready([one.params for one in models])
    return models


# --- loops on the device ------------------------------------------------------------------------


class Bare(struct.PyTreeNode):
    """What a plain loop needs: the last token, where it stands, its cache, what was written."""

    token: jax.Array  # [B]
    start: jax.Array  # [B]
    pool: tuple
    page_table: jax.Array
    output: jax.Array  # [B O]
    written: jax.Array  # []


@functools.partial(jax.jit, static_argnames=("rows",), donate_argnames=("state",))
def bare_steps(model, state, count, rows):
    """`count` tokens a slot: forward of one, argmax, write of its keys and values. Nothing else.

    Args:
        rows: Of a slot's forward; those past the first see and say nothing, but a product of two
            rows is another kernel.
    """
    cfg, arch, limit = model.config, model.arch, model.defaults.vocab_limit
    num_pages, _, page_size, _ = state.pool[0][0].shape

    def one(_, state):
        start, fresh = state.start, []
        cell = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (len(start), rows))
        mask = WindowMask(
            cell=cell,
            start=start,
            live=jnp.stack([jnp.zeros_like(start), jnp.ones_like(start)], axis=1),
            context_len=start,
            visible=None,
            causal=jnp.ones_like(start, bool),
            block_size=rows,
        )

        def attend(layer, q, k, v):
            fresh.append((k, v))
            return paged_attention(q, k, v, *state.pool[layer], state.page_table, mask)

        ids = jnp.broadcast_to(state.token[:, None], cell.shape)
        x = arch.embed(model.params, cfg, ids)
        hidden, _ = arch.trunk(model.params, cfg, x, start[:, None] + cell, attend)
        logits = arch.unembed(model.params, cfg, hidden)[:, 0]
        ids = jnp.arange(cfg.vocab_size)[None]
        token = jnp.argmax(jnp.where(ids < limit, logits, -jnp.inf), axis=1).astype(jnp.int32)
        # The write waits for the last row, or XLA would copy the cache for those who read it.
        after = jnp.all(jnp.isfinite(hidden.astype(jnp.float32)), axis=2) & (cell == 0)
        slots = page_slots(state.page_table, start[:, None] + cell, after, num_pages, page_size)
        output = jax.lax.dynamic_update_index_in_dim(state.output, token, state.written, 1)
        return state.replace(
            token=token,
            start=start + 1,
            pool=write_rows(state.pool, tuple(fresh), *slots),
            output=output,
            written=state.written + 1,
        )

    return jax.lax.fori_loop(0, count, one, state)


@jax.jit
def draft_passes(model, bare, aux, state, count):
    """The drafter's pass with its readout, again and again, each from what the last one guessed."""
    draft = ModelForward(model, aux=aux).aux[DRAFT]
    size = bare.block_size - 1
    cell = _cells(state)

    def one(_, tokens):
        masked = jnp.where(cell == 0, tokens, draft.mask_id)
        view = state.replace(buffer=state.buffer.replace(tokens=tokens))
        out = draft(view, inputs=masked, live=cell < size, width=size)
        return _shifted(out.predict(where=cell > 0, width=size - 1).token)

    return jax.lax.fori_loop(0, count, one, state.buffer.tokens)


@jax.jit
def verify_passes(model, bare, aux, state, count):
    """The target's pass over a block with taps and readout, each over what the last one said."""
    forward = ModelForward(model, aux=aux)
    size = bare.block_size - 1
    cell = _cells(state)

    def one(_, carry):
        tokens, felt = carry
        view = state.replace(buffer=state.buffer.replace(tokens=tokens))
        out = forward(
            view,
            inputs=tokens,
            live=cell < size,
            causal=True,
            hidden_layers=bare.needs.hidden_layers,
            width=size,
        )
        keys = random.position_keys(view)
        truth = out.predict(where=cell > 0, sampling=state.sampling, keys=keys, width=size).token
        # Somebody must want the taps.
        felt += sum(tap[:, 0, 0, 0].astype(jnp.float32) for tap in out.taps)
        return _shifted(truth), felt

    felt = jnp.zeros(state.finish.shape, jnp.float32)
    return jax.lax.fori_loop(0, count, one, (state.buffer.tokens, felt))


def _cells(state):
    tokens = state.buffer.tokens
    return jnp.broadcast_to(jnp.arange(tokens.shape[2], dtype=jnp.int32), tokens.shape)


def _shifted(tokens):
    """The predicted tokens as the next block: the first one is its anchor."""
    return jnp.roll(tokens, -1, axis=2)


class Loop:
    """A compiled loop and what it begins with.

    Args:
        program: Jitted, of `before`, the state, a count of steps and `after` (static).
        donates: Whether a run takes its state away.
    """

    def __init__(self, name, model, program, before, state, after=(), donates=False):
        self.name, self.model, self.state = name, model, state
        self._before, self._donates = before, donates
        began = time.perf_counter()
        self.program = program.lower(*before, state, jnp.int32(1), *after).compile()
        self.compile_s = time.perf_counter() - began

    def run(self, steps):
        """Seconds of so many steps, and what they leave."""
        state = self.state
        if self._donates:
            state = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        began = time.perf_counter()
        left = jax.block_until_ready(self.program(*self._before, state, jnp.int32(steps)))
        return time.perf_counter() - began, left

    def step_ms(self, few, many):
        """Milliseconds of one step."""
        return (self.run(many)[0] - self.run(few)[0]) / (many - few) * 1e3


def loops_of(model, draft, slots, context, max_tokens, names):
    """Makers of the loops `names` for so many requests, by name; each compiles when called."""
    begun = functools.partial(begin, model, shape=(slots, context), max_tokens=max_tokens)
    advance = functools.partial(Loop, program=generate._advance, after=(None,), donates=True)

    def step(name, strategy, draft=None):
        bare, aux, state = begun(strategy, draft=draft)
        return advance(name, model, before=(model, bare, aux), state=state)

    def plain(name, rows):
        *_, state = begun(AR())
        mine = Bare(
            token=state.buffer.tokens[:, 0, 0],
            start=state.buffer.start,
            pool=state.pools[TARGET],
            page_table=state.page_table,
            output=jnp.zeros((slots, max_tokens), jnp.int32),
            written=jnp.int32(0),
        )
        return Loop(name, model, bare_steps, (model,), mine, (rows,), donates=True)

    def one_pass(name, program):
        bare, aux, state = begun(DFlash(width=draft.config.block_size), draft=draft)
        return Loop(name, model, program, (model, bare, aux), state)

    def rounds(name, **how):
        return step(name, DFlash(**how), draft)

    size = draft.config.block_size if draft else 0
    make = {
        "ar step": lambda name: step(name, AR()),
        "bare step": lambda name: plain(name, 1),
        "bare step of 2 rows": lambda name: plain(name, 2),
        "round": lambda name: rounds(name, width=size),
        "draft pass": lambda name: one_pass(name, draft_passes),
        "verify pass": lambda name: one_pass(name, verify_passes),
        # What a user has of drafts that are not right: the plain step, chosen or fixed.
        "round of width 1": lambda name: rounds(name, width=1),
        "round, adaptive": lambda name: rounds(name),
    }
    return {name: functools.partial(make[name], name) for name in names}


# --- what the compiled programs say --------------------------------------------------------------


def launches(text):
    """Operations of the longest loop's body by kind, those it calls included: kernels, about.

    Branches of a conditional are left out.
    """
    named = computations(text)
    bodies = [named[name] for name in re.findall(r"body=%([\w.\-]+)", text) if name in named]
    return _operations(named, max(bodies, key=len, default=[]))


def branch_launches(text):
    """The same, all kinds together, of each branch of the conditional with the longest one."""
    named, found = computations(text), []
    for measured in re.findall(r"branch_computations=\{([^}]*)\}", text):
        branches = [named.get(name.strip().lstrip("%"), []) for name in measured.split(",")]
        found.append([sum(_operations(named, branch).values()) for branch in branches])
    return max(found, key=max, default=[])


def _operations(named, lines):
    found, left = collections.Counter(), [lines]
    while left:
        for line in left.pop():
            if called := re.search(r" call\(.*to_apply=%([\w.\-]+)", line):
                left.append(named[called[1]])
            elif op := re.search(r" ([a-z][a-z\-]*)\(", line.split(" = ", 1)[-1]):
                found[op[1]] += 1
    free = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
    return {op: count for op, count in found.most_common() if op not in free}


def written_slices(text, elements):
    """Operations that write an array of so many elements: weights cut out and copied, say."""
    found = []
    for name, lines in computations(text).items():
        if "fused" in name or name.endswith("_computation"):
            continue  # what happens within a kernel is not written
        for line in lines:
            made = re.search(r"= \w+\[([\d,]+)\]\S* (copy|slice|fusion|transpose)\(", line)
            if made and math.prod(map(int, made[1].split(","))) == elements:
                found.append(f"{name}: {line.strip()[:300]}")
    return {"count": len(found), "first": found[:3]}


def computations(text):
    """The lines of each computation of a program's text, but its first."""
    parts = re.split(r"\n(?=(?:ENTRY )?%[\w.\-]+ \()", text)[1:]
    return {p.split(" (", 1)[0].split("%")[-1]: p.splitlines()[1:] for p in parts}


# --- floors -------------------------------------------------------------------------------------


def floors_ms(model, draft, slots, context, device_kind):
    """The least time of each loop, by its name: bytes that must move, or operations.

    Source: dflash.md; the draft pass reads its layers and the target's head, a round also `fc` and
    the columns of `wqkv` that make keys and values.
    """
    width = draft.config.block_size
    joined = jax.eval_shape(with_target, model, draft)
    fed = ("fc", "context_norm", "context_wkv")
    layers = joined.replace(params={k: v for k, v in joined.params.items() if k not in fed})
    plain = floor_ms(model, slots, 1, context, device_kind)
    if plain is None:
        return {}
    drafting = floor_ms(layers, slots, width, context, device_kind)
    verifying = floor_ms(model, slots, width, context, device_kind)
    cfg, fc = draft.config, draft.params["fc"]
    weights = fc.size + 2 * cfg.num_layers * cfg.hidden_size * cfg.num_kv_heads * cfg.head_dim
    bandwidth, rate = RATES[device_kind]
    bytes_s, ops_s = weights * fc.dtype.itemsize / bandwidth, 2 * weights * slots * width / rate
    feeding = 1e3 * max(bytes_s, ops_s)
    return {
        "ar step": plain,
        "bare step": plain,
        "bare step of 2 rows": plain,
        "draft pass": drafting,
        "verify pass": verifying,
        "round": drafting + verifying + feeding,
    }


def draft_cache(draft):
    """Bytes a token of the drafter's cache: by its sizes, and of its arrays."""
    cfg = draft.config
    pool = new_pool(cfg, 3, PAGE_SIZE, draft.params["fc"].dtype)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(pool)) / (3 * PAGE_SIZE)
    size = draft.params["fc"].dtype.itemsize
    return {
        "bytes_a_token": held,
        "computed": 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * size,
    }


# --- the run ------------------------------------------------------------------------------------


class Report:
    """The one file, written after every change."""

    def __init__(self, path, **facts):
        self.path, self.content = path, {**facts, "rows": []}

    def row(self, **row):
        """Add a row, or replace the one of the same work."""
        of = ("section", "model", "name", "slots", "temperature", "through")
        rows = self.content["rows"]
        same = [i for i, old in enumerate(rows) if all(old.get(k) == row.get(k) for k in of)]
        if same:
            rows[same[0]] = row
        else:
            rows.append(row)
        self.save()

    def late(self, what):
        """Something that was not measured, and why."""
        print(what, flush=True)
        self.put(late=[*self.content.get("late", []), what])

    def put(self, **facts):
        self.content |= facts
        self.save()

    def save(self):
        if self.path:
            text = json.dumps(self.content, indent=1) + "\n"
            Path(self.path).write_text(text, encoding="utf-8")


def steps(sections, args, report, until, settle=lambda: None):
    """The sections `ar`, `bars` and `qwen3_8b`, which share models and programs.

    Args:
        settle: Called before anything is timed: waits for what compiles elsewhere.
    """
    began = time.perf_counter()
    model, draft = load_pair(args.smoke)
    report.put(model=model.source, draft=draft.source, load_s=time.perf_counter() - began)
    report.put(draft_cache=draft_cache(draft), acceptance=ACCEPTANCE)
    groups = groups_of(sections, model, draft, args)
    if "ar" in sections and (tiny := dflash_pair.target_or_none(args)) is not None:
        groups[tiny.source, 1] = tiny, None, ["ar step", *PLAIN]
    ready = compile_groups(groups, args, report, began, until)
    settle()
    for (source, slots), loops in ready.items():
        if not loops or time.perf_counter() > until:
            report.late(f"{source}, {slots} slots: not timed")
            continue
        beside = groups[source, slots][1]
        time_group(loops, source, slots, beside, args, report, until)


def groups_of(sections, model, draft, args):
    """The models and the names of the loops of each model and number of slots."""
    groups = {}
    if sections & {"ar", "qwen3_8b"}:
        for slots in args.slots:
            mine = ["ar step"]
            if "qwen3_8b" in sections:
                mine += ["round", "draft pass", "verify pass"]
            if "ar" in sections and slots in args.some_slots:
                mine += PLAIN
            if "qwen3_8b" in sections and slots in args.some_slots:
                mine += ["round of width 1", "round, adaptive"]
            groups[model.source, slots] = model, draft, mine
    if "bars" in sections:
        *_, mine = groups.get((model.source, 1), [()])
        groups[model.source, 1] = model, draft, [*dict.fromkeys([*mine, *BARS])]
    return groups


def context_of(model, draft, args):
    """Tokens in the cache: as many as are wanted, or leave room for the longest run."""
    room = max(_steps_of(draft, args)[1], SWITCHED_OFF[1]) + 2
    return min(args.context, model.config.max_position - room)


def _steps_of(draft, args):
    """Steps of a shorter and a longer run."""
    # The pair's steps are short; its text has room for more of them.
    return args.few, args.many if draft is not None else 8 * args.many


def compile_groups(groups, args, report, began, until):
    """The loops of each group that were compiled in time."""
    ready = {group: {} for group in groups}
    limit = began + COMPILE_SHARE * (until - began)
    pool = ThreadPoolExecutor(args.threads)
    jobs = {}
    for group, (model, draft, names) in groups.items():
        context = context_of(model, draft, args)
        for name, make in loops_of(model, draft, group[1], context, args.max_tokens, names).items():
            jobs[group, name] = pool.submit(make)
    for (group, name), job in jobs.items():
        try:
            ready[group][name] = job.result(timeout=max(0.0, limit - time.perf_counter()))
            print(f"{group[0]}, {group[1]} slots, {name}: {ready[group][name].compile_s:.1f} s")
        except Exception as error:  # the other loops still count
            measured = f"{group[0]}, {group[1]} slots, {name}: {type(error).__name__}: {error}"
            report.late(measured[:500])
    pool.shutdown(cancel_futures=True)
    return ready


def time_group(loops, source, slots, draft, args, report, until):
    """Turns over the loops of one batch; rows, and what follows from them."""
    names, samples = list(loops), {name: [] for name in loops}
    run, model = _steps_of(draft, args), loops[names[0]].model
    windows = dict.fromkeys(names, run) | {"round, adaptive": SWITCHED_OFF}
    context, floors = context_of(model, draft, args), {}
    if draft is not None:
        floors = floors_ms(model, draft, slots, context, jax.devices()[0].device_kind)
    of = {"model": source, "slots": slots, "context": context}
    for loop in loops.values():
        loop.run(args.few)
    for turn in range(args.turns):
        if turn and time.perf_counter() > until:
            break
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            samples[name].append(loops[name].step_ms(*windows[name]))
        for name in names:
            mine, floor = samples[name], floors.get(name)
            report.row(
                section="ar" if name.startswith("bare") else "steps",
                **of,
                name=name,
                step_ms=statistics.median(mine),
                min_ms=min(mine),
                max_ms=max(mine),
                samples_ms=list(mine),
                floor_ms=floor,
                over_floor=floor and statistics.median(mine) / floor,
                compile_s=loops[name].compile_s,
            )
    derived = derive(samples, floors)
    if "ar step" in loops:
        derived["ar_program"] = read_program(_as_bench(loops["ar step"]))
    if "bare step" in loops and "ar step" in loops:
        derived["tokens_of_ar_as_bare"] = same_tokens(loops, run[1])
    if "round" in loops:
        derived["round_program"] = read_program(_as_bench(loops["round"]))
    for name, loop in loops.items():
        text = loop.program.as_text()
        derived.setdefault("launches", {})[name] = launches(text)
        if of_branches := branch_launches(text):
            derived.setdefault("launches_of_branches", {})[name] = of_branches
    if "round" in loops:
        cfg = draft.config
        cut, text = 2 * cfg.hidden_size * cfg.num_kv_heads * cfg.head_dim, loops["round"].program
        found = [written_slices(text.as_text(), n * cut) for n in (1, cfg.num_layers)]
        derived["context_weights_copied"] = {
            "count": sum(one["count"] for one in found),
            "first": [line for one in found for line in one["first"]],
        }
    derived["peak_bytes"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    report.put(derived=[*report.content.get("derived", []), {**of, **derived}])
    print(lines_of(of, report, derived), flush=True)


def derive(samples, floors):
    """Ratios and what accepted lengths would give: medians over turns."""

    def ratio(a, b):
        pairs = zip(samples[a], samples[b], strict=True)
        return statistics.median(x / y for x, y in pairs)

    measured = {}
    if {"ar step", "bare step"} <= samples.keys():
        measured |= {"ar_over_bare": ratio("ar step", "bare step"), "ar_bar": AR_BAR}
    for name in ("round of width 1", "round, adaptive"):
        if {name, "ar step"} <= samples.keys():
            measured[f"ar_over_{name}".replace(", ", " ")] = ratio("ar step", name)
    if "draft pass" in samples and floors:
        draft = statistics.median(samples["draft pass"])
        measured |= {"draft_over_floor": draft / floors["draft pass"], "draft_bar": DRAFT_BAR}
    if {"ar step", "round"} <= samples.keys():
        cost = ratio("round", "ar step")
        measured |= {"round_over_ar": cost, "round_bar": ROUND_BAR}
        measured["speedup_at"] = {str(tau): tau / cost for tau in TAUS}
        if floors:
            measured["round_over_ar_floor"] = floors["round"] / floors["ar step"]
    return measured


def same_tokens(loops, steps):
    """How many leading tokens of each row the two loops share."""
    ar, bare = loops["ar step"].run(steps)[1], loops["bare step"].run(steps)[1]
    # The first token of `ar` was drawn when its prompt ended.
    mine, theirs = np.asarray(ar.output)[:, 1 : steps + 1], np.asarray(bare.output)[:, :steps]
    differs = mine != theirs
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), steps)
    return {"steps": steps, "equal_for": first.tolist()}


def _as_bench(loop):
    """A loop in the form that `strategies_gpu.read_program` reads."""
    return argparse.Namespace(program=loop.program, model=loop.model, state=loop.state)


def lines_of(of, report, derived):
    """One batch for people."""
    lines = [f"{of['model']}, {of['slots']} slots, context {of['context']}"]
    for row in report.content["rows"]:
        if {k: row.get(k) for k in of} == of and "step_ms" in row:
            floor, over = row["floor_ms"], row["over_floor"]
            beside = f", floor {floor:.3f}: x{over:.2f}" if floor else ""
            lines.append(
                f"  {row['name']:<20}{row['step_ms']:9.3f} ms [{row['min_ms']:.3f} "
                f"{row['max_ms']:.3f}]{beside}"
            )
    counts = {name: sum(found.values()) for name, found in derived["launches"].items()}
    lines.append(f"  launches a step, about: {counts}")
    if branches := derived.get("launches_of_branches"):
        lines.append(f"  and in each branch: {branches}")
    for name, bar in (("ar_over_bare", "ar_bar"), ("draft_over_floor", "draft_bar")):
        if name in derived:
            lines.append(f"  {name} {derived[name]:.3f} (bar {derived[bar]})")
    for name in ("ar_over_round of width 1", "ar_over_round adaptive"):
        if name in derived:
            lines.append(f"  {name} {derived[name]:.3f} (bar {OFF_BAR})")
    if "round_over_ar" in derived:
        floor = derived.get("round_over_ar_floor")
        lines.append(
            f"  round_over_ar {derived['round_over_ar']:.3f} (bar {derived['round_bar']}"
            f"{f', floor {floor:.2f}' if floor else ''})"
        )
        at = ", ".join(f"{tau}: {x:.2f}" for tau, x in derived["speedup_at"].items())
        lines.append(f"  speed-up at an accepted length of {at} ({ACCEPTANCE})")
    return "\n".join(lines)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default="qwen3_8b,ar,pair")
    parser.add_argument("--slots", type=_ints, default=(1, 8, 32))
    parser.add_argument(
        "--some-slots", type=_ints, default=(1,), help="where `ar` and width 1 are measured too"
    )
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--few", type=int, default=6)
    parser.add_argument("--many", type=int, default=30)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=512, help="more than any run writes")
    parser.add_argument("--threads", type=int, default=12, help="that compile")
    parser.add_argument("--within", type=float, default=120.0, help="begin nothing after so many s")
    dflash_pair.add_arguments(parser)
    parser.add_argument("--commit")
    parser.add_argument("--out")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    sections = set(args.sections.split(","))
    if unknown := sections - {*SECTIONS}:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if args.smoke:
        args.context, args.turns, args.slots = 64, 2, args.slots[:1]
        dflash_pair.make_small(args)
    began = time.perf_counter()
    report = Report(args.out, command="benchmarks/dflash_gpu.py", **environment())
    report.put(commit=args.commit or report.content["commit"], context=args.context)
    until = began + args.within
    loops = dflash_pair.Loops(args, report, until) if "bars" in sections else None
    if sections & {"ar", "bars", "qwen3_8b"}:
        steps(sections, args, report, until, loops.settle if loops else lambda: None)
    if loops:
        loops.time()
    if "pair" in sections:
        dflash_pair.measure(args, report)
    report.put(wall_s=time.perf_counter() - began)
    print(f"{report.content['wall_s']:.0f} s")
    return 1 if report.content.get("late") else 0


def _ints(text):
    return tuple(int(part) for part in text.split(",") if part)


if __name__ == "__main__":
    sys.exit(main())
