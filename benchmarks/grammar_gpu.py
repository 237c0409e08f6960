"""Structured output on an accelerator: a step with grammars and without, and forms of its parts.

    python benchmarks/grammar_gpu.py forms --out forms.json
    python benchmarks/grammar_gpu.py steps --model random:JetLM/SDAR-8B-Chat --shapes 1x4

`forms` times the chain over the window and the readout by classes alone, each form checked against
the plain one first. `steps` runs the same compiled engine with no slot constrained and with all of
them, in bare device loops of one process. `--smoke` shrinks both for a CPU.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

NEVER = -1e9


def timed(fn, *args, count=30, repeats=5):
    """Milliseconds of a call within a loop on the device, the median, and its output."""

    @functools.partial(jax.jit, static_argnums=0)
    def loop(count, args):
        def body(_, carry):
            first, *rest = args
            out = fn(first + carry, *rest)
            return carry + jax.tree.leaves(out)[0].ravel()[0].astype(jnp.float32) * 0.0

        return jax.lax.fori_loop(0, count, body, jnp.float32(0.0))

    out = jax.block_until_ready(jax.jit(fn)(*args))
    found = []
    few, many = 3, 3 + count
    jax.block_until_ready((loop(few, args), loop(many, args)))
    for _ in range(repeats):
        walls = []
        for number in (few, many):
            began = time.perf_counter()
            jax.block_until_ready(loop(number, args))
            walls.append(time.perf_counter() - began)
        found.append((walls[1] - walls[0]) / count * 1e3)
    return statistics.median(found), out


# --- the chain -----------------------------------------------------------------------------------


def chain_scan(score, target, label, last, kind, held, at, unroll=1):
    """The form in use: two scans over the cells of each slot, scores by label."""

    def one(score, target, label, last, kind, held, at):
        def back(beta, cell):
            kind, held, score = cell
            through = score[label] + beta[target]
            value = jnp.where(kind == 1, beta[held], jnp.max(through, axis=1))
            return jnp.maximum(jnp.where(kind == 0, beta, value), NEVER), beta

        _, behind = jax.lax.scan(back, last, (kind, held, score), reverse=True, unroll=unroll)

        def walk(at, cell):
            kind, held, score, beta = cell
            through = score[label[at]] + beta[target[at]]
            onto = jnp.where(kind == 1, held[at], target[at, jnp.argmax(through)])
            onto = jnp.where(kind == 0, at, onto)
            return onto, onto

        return jax.lax.scan(walk, at, (kind, held, score, behind), unroll=unroll)[1]

    return jax.vmap(one)(score, target, label, last, kind, held, at)


def chain_maps(score, target, label, last, kind, held, at, unroll=8):
    """Best successors of all states in one backward pass; the path by composition of maps."""
    W, G = kind.shape[1], target.shape[1]

    def one(score, target, label, last, kind, held, at):
        edges = score[:, label]  # [W G D]

        def back(beta, cell):
            kind, held, edges = cell
            through = edges + beta[target]
            best = jnp.max(through, axis=1)
            onto = jnp.take_along_axis(target, jnp.argmax(through, axis=1)[:, None], axis=1)[:, 0]
            value = jnp.where(kind == 1, beta[held], best)
            onto = jnp.where(kind == 1, held, onto)
            value = jnp.maximum(jnp.where(kind == 0, beta, value), NEVER)
            return value, jnp.where(kind == 0, jnp.arange(G), onto)

        _, onto = jax.lax.scan(back, last, (kind, held, edges), reverse=True, unroll=unroll)
        maps = jax.lax.associative_scan(lambda a, b: jnp.take_along_axis(b, a, axis=-1), onto)
        return maps[:, at]

    del W
    return jax.vmap(one)(score, target, label, last, kind, held, at)


def chain_kernel(score, target, label, last, kind, held, at, *, warps=8, interpret=False):
    """One launch, a program a slot; scores of edges are made before it."""
    B, W = kind.shape
    _, G, D = target.shape
    edges = jax.vmap(lambda score, label: score[:, label])(score, label)

    def body(edges, target, last, kind, held, at, path, beta, succ):
        b = pl.program_id(0)
        state = jnp.arange(G, dtype=jnp.int32)
        row = jnp.broadcast_to(b, (G,)).astype(jnp.int32)
        wide = (G, D)
        places = jnp.broadcast_to(state[:, None], wide)
        rows = jnp.broadcast_to(row[:, None], wide)
        columns = jnp.broadcast_to(jnp.arange(D, dtype=jnp.int32)[None, :], wide)
        onto = pltriton.load(target.at[rows, places, columns])

        def of_beta(w, at):
            flat = jnp.broadcast_to(w, at.shape).astype(jnp.int32)
            first = jnp.broadcast_to(b, at.shape).astype(jnp.int32)
            return pltriton.load(beta.at[first, flat, at])

        def put(w, values, into):
            cell = jnp.broadcast_to(w, (G,)).astype(jnp.int32)
            pltriton.store(into.at[row, cell, state], values)

        put(jnp.int32(W), pltriton.load(last.at[row, state]), beta)
        if not interpret:
            pltriton.debug_barrier()

        def step(i, _):
            w = W - 1 - i
            cell = jnp.broadcast_to(w, wide).astype(jnp.int32)
            through = pltriton.load(edges.at[rows, cell, places, columns]) + of_beta(w + 1, onto)
            best = jnp.max(through, axis=1)
            place = jnp.min(jnp.where(through == best[:, None], columns, D), axis=1)
            following = jnp.max(jnp.where(columns == place[:, None], onto, 0), axis=1)
            kept = pltriton.load(held.at[row, jnp.broadcast_to(w, (G,)).astype(jnp.int32), state])
            what = pltriton.load(kind.at[b, w])
            value = jnp.where(what == 1, of_beta(w + 1, kept), best)
            following = jnp.where(what == 1, kept, following)
            value = jnp.maximum(jnp.where(what == 0, of_beta(w + 1, state), value), NEVER)
            put(w, value, beta)
            put(w, jnp.where(what == 0, state, following), succ)
            if not interpret:
                pltriton.debug_barrier()
            return 0

        jax.lax.fori_loop(0, W, step, 0)

        def walk(w, here):
            here = pltriton.load(succ.at[b, w, here])
            pltriton.store(path.at[b, w], here)
            return here

        jax.lax.fori_loop(0, W, walk, pltriton.load(at.at[b]))

    shapes = [
        jax.ShapeDtypeStruct((B, W), jnp.int32),
        jax.ShapeDtypeStruct((B, W + 1, G), jnp.float32),
        jax.ShapeDtypeStruct((B, W, G), jnp.int32),
    ]
    return pl.pallas_call(
        body,
        out_shape=shapes,
        grid=(B,),
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="grammar_path",
    )(edges, target, last, kind, held, at)[0]


def chain_case(B, W, G, D, L, seed=0):
    """Random automata of few edges a state, holes and known cells."""
    rng = np.random.default_rng(seed)
    degree = np.minimum(1 + rng.geometric(0.4, (B, G)), D)
    has = np.arange(D)[None, None] < degree[..., None]
    target = np.where(has, rng.integers(1, G, (B, G, D)), 0).astype(np.int32)
    label = np.where(has, rng.integers(2, L, (B, G, D)), 0).astype(np.int32)
    score = rng.normal(-5, 3, (B, W, L)).astype(np.float32)
    score[:, :, 0], score[:, :, 1] = NEVER, 0.0
    last = np.where(rng.random((B, G)) < 0.5, 0.0, NEVER).astype(np.float32)
    kind = rng.choice([0, 1, 2, 2, 2], (B, W)).astype(np.int32)
    held = rng.integers(1, G, (B, W, G)).astype(np.int32)
    return (*map(jnp.asarray, (score, target, label, last, kind, held)), jnp.ones((B,), jnp.int32))


# --- the readout by classes ----------------------------------------------------------------------


def maxima_in_turn(logits, class_of, wide):
    """The form in use: one masked argmax after another."""

    def one(i, found):
        own = jnp.where((class_of == wide[i])[None], logits, -jnp.inf)
        top = jnp.argmax(own, axis=1).astype(jnp.int32)
        value = jnp.take_along_axis(own, top[:, None], axis=1)[:, 0]
        return found[0].at[:, i].set(value), found[1].at[:, i].set(top)

    T, M = len(logits), len(wide)
    blank = jnp.full((T, M), -jnp.inf), jnp.zeros((T, M), jnp.int32)
    return jax.lax.fori_loop(0, jnp.sum(wide > 0), one, blank)


def maxima_kernel(logits, class_of, wide, *, ids=2048, rows=4, warps=4, interpret=False):
    """One launch that reads the logits once, a tile of rows and ids a program."""
    T, V = logits.shape
    M = len(wide)
    tiles = -(-V // ids)

    def body(logits, class_of, wide, value, token):
        i, j = pl.program_id(0), pl.program_id(1)
        place = i * rows + jnp.arange(rows, dtype=jnp.int32)
        column = j * ids + jnp.arange(ids, dtype=jnp.int32)
        shape = (rows, ids)
        where = (
            jnp.broadcast_to(jnp.minimum(place, T - 1)[:, None], shape),
            jnp.broadcast_to(column[None, :], shape),
        )
        mask = jnp.broadcast_to((column < V)[None, :], shape)
        score = pltriton.load(logits.at[where], mask=mask, other=-jnp.inf)
        of = pltriton.load(class_of.at[column], mask=column < V, other=0)
        for c in range(M):
            mine = jnp.broadcast_to((of == pltriton.load(wide.at[jnp.int32(c)]))[None, :], shape)
            own = jnp.where(mine, score, -jnp.inf)
            best = jnp.max(own, axis=1)
            first = jnp.min(jnp.where(own == best[:, None], where[1], V), axis=1)
            spot = (place, jnp.full((rows,), c, jnp.int32), jnp.broadcast_to(j, (rows,)))
            spot = tuple(one.astype(jnp.int32) for one in spot)
            pltriton.store(value.at[spot], best, mask=place < T)
            pltriton.store(token.at[spot], first, mask=place < T)

    value, token = pl.pallas_call(
        body,
        out_shape=[
            jax.ShapeDtypeStruct((T, M, tiles), jnp.float32),
            jax.ShapeDtypeStruct((T, M, tiles), jnp.int32),
        ],
        grid=(-(-T // rows), tiles),
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="class_maxima",
    )(logits, class_of, wide)
    best = jnp.max(value, axis=2)
    return best, jnp.min(jnp.where(value == best[..., None], token, V), axis=2)


def forms(args, say):
    """Every form of both parts."""
    shapes = [(1, 8, 16, 4)] if args.smoke else [(1, 32, 256, 32), (1, 128, 256, 32)]
    shapes += [] if args.smoke else [(32, 128, 256, 32), (1, 128, 256, 16), (1, 128, 1024, 64)]
    interpret = args.smoke
    for B, W, G, D in shapes:
        case = chain_case(B, W, G, D, 16 if args.smoke else 256)
        truth = None
        ways = {
            "scan": chain_scan,
            "scan, unrolled by 8": functools.partial(chain_scan, unroll=8),
            "maps, unrolled by 8": chain_maps,
        }
        for warps in (4, 8, 16):
            ways[f"kernel, {warps} warps"] = functools.partial(
                chain_kernel, warps=warps, interpret=interpret
            )
        for name, fn in ways.items():
            if G > 256 and "unrolled" in name:
                continue
            say("chain", f"{B}x{W} G{G} D{D}", name, *attempt(fn, case, truth))
            if truth is None:
                truth = jax.block_until_ready(jax.jit(fn)(*case))
    V = 500 if args.smoke else 151_936
    for T in [4] if args.smoke else [32, 128, 512]:
        rng = np.random.default_rng(1)
        logits = jnp.asarray(rng.normal(0, 3, (T, V)).astype(np.float32))
        class_of = jnp.asarray(rng.choice([0, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8], V).astype(np.int32))
        case = logits, class_of, jnp.arange(1, 9, dtype=jnp.int32)
        truth = jax.block_until_ready(jax.jit(maxima_in_turn)(*case))
        ways = {"in turn": maxima_in_turn}
        for rows, ids, warps in ((1, 4096, 4), (2, 2048, 4), (4, 2048, 8), (4, 1024, 4)):
            ways[f"kernel {rows}x{ids}, {warps} warps"] = functools.partial(
                maxima_kernel, rows=rows, ids=ids, warps=warps, interpret=interpret
            )
        for name, fn in ways.items():
            say("class maxima", f"{T}x{V}", name, *attempt(fn, case, truth))


def attempt(fn, case, truth):
    """Milliseconds, and whether the output is the plain form's; or what went wrong."""
    try:
        ms, out = timed(fn, *case, count=3 if jax.default_backend() == "cpu" else 30)
        same = truth is None or all(
            bool((a == b).all())
            for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(truth), strict=True)
        )
        return ms, "same" if same else "DIFFERS"
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"


# --- steps ---------------------------------------------------------------------------------------


TOOL = {
    "type": "object",
    "properties": {
        "name": {"enum": ["get_weather", "get_time", "search"]},
        "arguments": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer"},
            },
            "required": ["city"],
        },
    },
    "required": ["name", "arguments"],
}


def vocabulary(num_ids, seed=0):
    """Words like those of a published vocabulary: bytes, digits, marks of JSON, many letters."""
    rng = np.random.default_rng(seed)
    words = [bytes([i]) for i in range(256)]
    marks = ['", "', '":', '{"', '"}', "},", '": "', '"name', "city", "days", "unit", "search"]
    words += [one.encode() for one in marks]
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJ      .,;-'", np.uint8)
    known = set(words)
    while len(words) < num_ids - 300:
        word = rng.choice(letters, rng.integers(2, 9)).tobytes()
        if word not in known:
            known.add(word)
            words.append(word)
    return words + [None] * 300


class Bound:
    """A runner whose every request has a grammar."""

    def __init__(self, inner, grammar):
        self._inner, self._grammar = inner, grammar

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def admit(self, slot, placement):
        self._inner.admit(slot, dataclasses.replace(placement, grammar=self._grammar))


def steps(args, say):
    """Steps of an engine, none constrained and all constrained."""
    from dllm_jax import structured
    from dllm_jax.bench import measure, step
    from dllm_jax.loading.load import load
    from dllm_jax.runner import grammars

    model = load(args.model)
    ids = model.config.vocab_size
    spelt = vocabulary(ids)
    stops = tuple(model.defaults.stop_token_ids) or (ids - 1,)
    began = time.perf_counter()
    words = structured.spellings(spelt)
    say("compile", "vocabulary", f"{ids} ids", (time.perf_counter() - began) * 1e3, "")
    began = time.perf_counter()
    never = np.array([model.config.mask_token_id])
    automaton = structured.compile(
        structured.JsonSchema(TOOL), words, stops, never, grammars.BUCKETS[-1].states
    )
    grammar = grammars.ready(automaton, ids)
    say(
        "compile", "tool schema", str(len(automaton.delta)), (time.perf_counter() - began) * 1e3, ""
    )
    for shape in map(step.Shape.parse, args.shapes.split(",")):
        strategy = step.step_strategy(model, shape)
        context = step.context_len(model, strategy, args.context, args.steps)
        text = step.text_len(strategy, args.steps)
        llm = step._engine(model, strategy, shape.slots, context, text, None, None)
        bucket = step._bucket(llm)
        runner = llm.engine.runner
        name = f"{shape.slots}x{shape.blocks}x{strategy.block_size}"
        found = {}
        for way in ("none", "all", "none again"):
            llm.engine.runner = Bound(runner, grammar) if way == "all" else runner
            try:
                samples = measure.decode_step_samples(
                    llm.engine, *bucket, context, args.steps, args.repeats, text
                )
                found[way] = statistics.median(samples)
                spread = f"{min(samples):.3f}-{max(samples):.3f}"
                say("step", name, way, found[way], spread)
            except Exception as error:
                traceback.print_exc()
                say("step", name, way, None, f"{type(error).__name__}: {str(error)[:120]}")
            llm.engine.runner = runner
        if {"none", "all"} <= set(found):
            more = found["all"] / found["none"] - 1
            say("step", name, "more", more * 100, "percent")
        llm.close()


def main():
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["forms", "steps"])
    parser.add_argument("--model", default="builtin:tiny-sdar")
    parser.add_argument("--shapes", default="1x1,1x4")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = []

    def say(part, shape, name, ms, measured):
        rows.append({"part": part, "shape": shape, "form": name, "ms": ms, "measured": measured})
        shown = "      -" if ms is None else f"{ms:9.4f}"
        print(f"{part:12s} {shape:16s} {name:28s} {shown}  {measured}", flush=True)
        if args.out:
            facts = {"device": str(jax.devices()[0].device_kind), "jax": jax.__version__}
            Path(args.out).write_text(json.dumps(facts | {"rows": rows}, indent=1))

    {"forms": forms, "steps": steps}[args.part](args, say)


if __name__ == "__main__":
    main()
