"""Structured output on an accelerator: a step with grammars and without, and its parts.

    python benchmarks/grammar_gpu.py parts --out parts.json
    python benchmarks/grammar_gpu.py steps --model random:JetLM/SDAR-8B-Chat --shapes 1x4x32

`parts` checks the kernels against XLA's form and times both. `steps` runs the same engine with no
slot constrained and with all of them, in bare device loops of one process, by turns. `--smoke`
shrinks the parts for a CPU.
"""

import argparse
import collections
import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.kernels import grammar_path
from dllm_jax.kernels.token_readout import api as readouts

NEVER = -1e9


def timed(fn, *args, count=30, repeats=5):
    """Milliseconds of a call within a loop on the device, the median, and its output."""

    @jax.jit
    def loop(count, args):
        def body(_, carry):
            first, *rest = args
            out = fn(first + carry.astype(first.dtype), *rest)
            found = jax.tree.leaves(out)[0].ravel()[0].astype(jnp.float32)
            return carry + jnp.minimum(jnp.abs(found), 0.0)

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


# --- parts ----------------------------------------------------------------------------------------


def parts(args, say):
    """Each kernel against XLA's form, bit for bit, and the times of both."""
    from dllm_jax.kernels.token_readout import IdClasses, class_readout, token_readout
    from dllm_jax.runner import grammars
    from dllm_jax.strategies.core import constraint

    V, D = (3000, 64) if args.smoke else (151_936, 2048)
    grammar = tool_grammar(V)[0]
    kernels = None if args.smoke else grammar_path.api.TRITON
    shapes = [tuple(map(int, one.split("x"))) for one in args.cells.split(",")]
    rng = np.random.default_rng(0)
    head = jnp.asarray(rng.standard_normal((V, D), np.float32) * 3 * D**-0.5, jnp.bfloat16)
    never = jnp.arange(V) == V - 1

    def of_shape(B, W):
        shape = f"{B}x{W}"
        rows = grammars.stacked([grammars.padded(grammar, grammars.bucket_of(grammar, None))] * B)
        classes = IdClasses(**{name: getattr(rows, name) for name in IdClasses._fields})
        hidden = jnp.asarray(rng.standard_normal((B * W, D)), jnp.bfloat16)
        plain = functools.partial(token_readout, head=head, forbidden=never)
        full = functools.partial(class_readout, head=head, forbidden=never, classes=classes)
        ms, alone = timed(lambda h: plain(h)[1:3], hidden)
        say("readout", shape, "as without grammars", ms, "")
        truth = full(hidden, implementation="xla")[1] if B * W <= 128 else None
        for form in ("xla",) if args.smoke else ("triton", "mosaic"):
            reads = functools.partial(full, implementation=form)
            try:
                ms, both = timed(lambda h, reads=reads: (reads(h)[0].confidence, reads(h)), hidden)
            except Exception as error:
                say("readout", shape, form, None, f"{type(error).__name__}: {str(error)[:200]}")
                continue
            read, ids = both[1]
            near = float(jnp.max(jnp.abs(read.confidence - alone[0]) / alone[0]))
            far = away(ids, truth, rows)
            truth = ids if truth is None else truth
            say("readout", shape, f"by classes, {form}", ms, f"confidence {near:.1e} off; {far}")
        ids = constraint.IdStats(*(leaf.reshape(B, W, *leaf.shape[1:]) for leaf in ids))
        kind = rng.choice([0, 1, 2, 2, 2, 2], (B, W)).astype(np.int32)
        view = constraint.View(
            grammar=rows.replace(kernels=None),
            at=jnp.full((B,), grammar.start, jnp.int32),
            bound=jnp.ones((B,), bool),
            kind=jnp.asarray(kind),
            known=jnp.asarray(rng.integers(1, grammar.delta.shape[1], (B, W)), jnp.int32),
            room=jnp.asarray(rng.integers(20, 60, B), jnp.int32),
        )
        holes = view.replace(kind=jnp.full((B, W), constraint.HOLE))
        asked = jnp.asarray(rng.random((B, W)) < 0.8)

        def planned(mass, view, ids, asked, kernels):
            view = view.replace(grammar=view.grammar.replace(kernels=kernels))
            plan = constraint.plan_of_ids(view, ids._replace(log_mass=mass), asked)
            return plan.confidence, plan, plan.value > constraint.NEVER

        in_xla = jax.jit(functools.partial(planned, kernels=None))
        by_kernel = jax.jit(functools.partial(planned, kernels=kernels))
        for name, seen in (("random cells", view), ("holes", holes)):
            given = ids.log_mass, seen, ids, asked
            truth, plan = in_xla(*given), by_kernel(*given)
            same = all(
                bool((a == b).all())
                for a, b in zip(jax.tree.leaves(plan[1]), jax.tree.leaves(truth[1]), strict=True)
            )
            found = f"{float(truth[2].mean()):.2f} have a path"
            say("plan", shape, name, None, f"{'same' if same else 'DIFFERS'}; {found}")
        say("plan", shape, "by kernels", timed(by_kernel, *given)[0], "")
        seen = view.replace(grammar=rows.replace(kernels=kernels))
        known = jnp.asarray(view.known, jnp.float32)

        def score(mass, seen, ids, asked):
            return kernels.label_scores(
                seen.grammar, ids.narrow, ids.wide, mass, asked, floor=-80.0, never=NEVER, free=1
            )

        def path(scores, seen, tile):
            kind = jnp.full((B, W), constraint.HOLE)
            given = seen.at, seen.room, kind, seen.known, scores
            named = {"never": NEVER, "skip": 0, "is_known": 1, "written": 3}
            found = kernels.best_path(seen.grammar, *given, tile=tile, **named)
            return found[1], found

        def walk(known, seen):
            kind = jnp.ones((B, W), jnp.int32)
            known = known.astype(jnp.int32)
            return seen.grammar.kernels.walk(seen.grammar, seen.at, kind, known, skip=0)

        if kernels is not None:
            ms, scores = timed(score, ids.log_mass, seen, ids, asked)
            say("kernel", shape, "label scores", ms, "")
            for tile in ((256, 8), (128, 4), (256, 4), (128, 2)):
                ms = timed(functools.partial(path, tile=tile), scores, seen)[0]
                say("kernel", shape, f"best path, {tile}", ms, "states, warps")
            say("kernel", shape, "walk", timed(walk, known, seen)[0], "")

    try:
        for shape in shapes:
            of_shape(*shape)
    finally:
        if args.together:
            arrived(args.together)


def away(ids, truth, rows):
    """How far two readouts by classes are apart, of what the grammar has."""
    if truth is None:
        return ""
    narrow, wide = int(rows.num_narrow[0]), int(rows.num_wide[0])
    far = jnp.max(jnp.abs(ids.narrow[:, :narrow] - truth.narrow[:, :narrow]))
    far_wide = jnp.max(jnp.abs(ids.wide[:, :wide] - truth.wide[:, :wide]))
    tokens = jnp.mean(ids.wide_token[:, :wide] == truth.wide_token[:, :wide])
    return f"away {float(far):.1e}, {float(far_wide):.1e}; wide ids {float(tokens):.4f} the same"


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


def tool_grammar(num_ids, stops=None, never=None):
    """The grammar of a tool's call, its states, and the seconds it took."""
    from dllm_jax import structured
    from dllm_jax.runner import grammars

    words = structured.spellings(vocabulary(num_ids))
    stops = (num_ids - 2,) if stops is None else stops
    never = np.array([num_ids - 1] if never is None else [never])
    began = time.perf_counter()
    automaton = structured.compile(
        structured.JsonSchema(TOOL), words, stops, never, grammars.BUCKETS[-1].states
    )
    grammar = grammars.ready(automaton, num_ids)
    return grammar, len(automaton.delta), time.perf_counter() - began


def steps(args, say):
    """Steps of an engine, none constrained and all constrained, and where the difference lies.

    Processes that were told of each other compile at once, and measure one after another when all
    have compiled.
    """
    from dllm_jax.bench import measure, step
    from dllm_jax.loading.load import load

    model = load(args.model)
    ids = model.config.vocab_size
    stops = tuple(model.defaults.stop_token_ids) or (ids - 1,)
    grammar, states, seconds = tool_grammar(ids, stops, model.config.mask_token_id)
    say("compile", "tool schema", str(states), seconds * 1e3, "")
    for shape in map(step.Shape.parse, args.shapes.split(",")):
        strategy = step.step_strategy(model, shape)
        context = step.context_len(model, strategy, args.context, args.steps)
        text = step.text_len(strategy, args.steps)
        llm = step._engine(model, strategy, shape.slots, context, text, None, None)
        loop = llm.engine, *step._bucket(llm), context, args.steps
        runner = llm.engine.runner
        name = f"{shape.slots}x{shape.blocks}x{strategy.block_size}"
        ways = {"none": runner, "all": Bound(runner, grammar)}
        for way, llm.engine.runner in ways.items():
            began = time.perf_counter()
            measure.decode_step_samples(*loop, 1, text)
            say("program", name, way, (time.perf_counter() - began) * 1e3, "compiled, or not")
        with turn(args.together):
            found = {}
            for way in ("none", "all") * args.rounds:
                llm.engine.runner = ways[way]
                samples = measure.decode_step_samples(*loop, args.repeats, text)
                found[way] = found.get(way, []) + samples
                say("step", name, way, statistics.median(samples), spread(samples))
            none, every = (statistics.median(found[way]) for way in ("none", "all"))
            say("step", name, "more", (every / none - 1) * 100, "percent")
            if args.profile:
                traces = {}
                for way, llm.engine.runner in ways.items():
                    trace, ran = measure.decode_trace(*loop, text)
                    traces[way] = totals(trace, ran)
                compared(name, traces, say)
        llm.engine.runner = runner
        llm.close()


def spread(samples):
    return f"{min(samples):.3f}-{max(samples):.3f}"


def totals(trace, steps):
    """Launches and microseconds a step, by kernel."""
    found = collections.defaultdict(lambda: [0.0, 0.0])
    for event in trace.events:
        found[event.name][0] += 1 / steps
        found[event.name][1] += event.duration_ns / 1e3 / steps
    return found


def compared(shape, traces, say):
    """Of which kernels a step with grammars has more, or less."""
    for way, found in traces.items():
        launches, us = (sum(one[i] for one in found.values()) for i in (0, 1))
        say("profile", shape, way, us / 1e3, f"{launches:.1f} launches a step")
    both = {name for found in traces.values() for name in found}
    more = {
        name: [b - a for a, b in zip(*(traces[way][name] for way in traces), strict=True)]
        for name in both
    }
    for name, (launches, us) in sorted(more.items(), key=lambda one: -abs(one[1][1]))[:40]:
        say("profile", shape, name[:60], us / 1e3, f"{launches:+.2f} launches")


def arrived(together):
    folder, count = together.rsplit(":", 1)
    Path(folder, str(os.getpid())).touch()
    return folder, count


@contextlib.contextmanager
def turn(together):
    """Waits for the others to have compiled, and then for the device; `FOLDER:COUNT`."""
    if together is None:
        yield
        return
    folder, count = arrived(together)
    latest = time.perf_counter() + 50
    while len(list(Path(folder).glob("[0-9]*"))) < int(count) and time.perf_counter() < latest:
        time.sleep(0.2)
    with open(Path(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main():
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["parts", "steps"])
    parser.add_argument("--model", default="builtin:tiny-sdar")
    parser.add_argument("--shapes", default="1x1,1x4")
    parser.add_argument("--cells", default="8x16,1x128,8x128", help="slots x cells, of parts")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="of both ways by turns")
    parser.add_argument("--profile", action="store_true", help="also by kernel")
    parser.add_argument("--together", help="FOLDER:COUNT of processes that compile at once")
    parser.add_argument("--form", choices=["xla", "triton", "mosaic"], help="of the kernels")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.form:
        readouts.TRITON_CLASSES = 0 if args.form == "xla" else readouts.TRITON_ROWS
        readouts.MOSAIC_CLASSES = args.form == "mosaic"
    rows = []

    def say(part, shape, name, ms, measured):
        rows.append({"part": part, "shape": shape, "form": name, "ms": ms, "measured": measured})
        shown = "      -" if ms is None else f"{ms:9.4f}"
        print(f"{part:12s} {shape:16s} {name:28s} {shown}  {measured}", flush=True)
        if args.out:
            facts = {"device": str(jax.devices()[0].device_kind), "jax": jax.__version__}
            Path(args.out).write_text(json.dumps(facts | {"rows": rows}, indent=1))

    {"parts": parts, "steps": steps}[args.part](args, say)


if __name__ == "__main__":
    main()
