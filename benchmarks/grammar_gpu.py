"""Structured output on an accelerator: a step with grammars and without, and its parts.

    python benchmarks/grammar_gpu.py parts --out parts.json
    python benchmarks/grammar_gpu.py steps --model random:JetLM/SDAR-8B-Chat --shapes 1x4x32

`parts` checks the kernels against XLA's form and times them. `steps` runs the same engine with no
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

NEVER = -1e9


def timed(fn, *args, count=30, repeats=5, together=None):
    """Milliseconds of a call within a loop on the device: the median."""

    @jax.jit
    def loop(count, args):
        def body(_, carry):
            first, *rest = args
            out = fn(first + carry.astype(first.dtype), *rest)
            found = jax.tree.leaves(out)[0].ravel()[0].astype(jnp.float32)
            return carry + jnp.minimum(jnp.abs(found), 0.0)

        return jax.lax.fori_loop(0, count, body, jnp.float32(0.0))

    found = []
    few, many = 3, 3 + count
    jax.block_until_ready((loop(few, args), loop(many, args)))
    for _ in range(repeats):
        with alone(together):
            walls = []
            for number in (few, many):
                began = time.perf_counter()
                jax.block_until_ready(loop(number, args))
                walls.append(time.perf_counter() - began)
        found.append((walls[1] - walls[0]) / count * 1e3)
    return statistics.median(found)


@contextlib.contextmanager
def alone(together):
    """No other process that was told of the folder is here."""
    if together is None:
        yield
        return
    with open(Path(together.rsplit(":", 1)[0], "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- parts ----------------------------------------------------------------------------------------


def parts(args, say):
    """Each kernel against plain JAX, the plans bit for bit, and times."""
    from dllm_jax.kernels.token_readout import IdClasses, class_readout, token_readout
    from dllm_jax.runner import grammars
    from dllm_jax.strategies.core import constraint, grammar_plan

    V, D = (3200, 64) if args.smoke else (151_936, 2048)
    own = [tool_grammar(V, schema=schema)[0] for schema in (TOOL, TOOL["properties"]["arguments"])]
    bucket = grammars.bucket_of(own[1], grammars.bucket_of(own[0], None))
    kernels = None if args.smoke else grammar_path.api.TRITON
    shapes = [tuple(map(int, one.split("x"))) for one in args.cells.split(",")]
    rng = np.random.default_rng(0)
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    head = draw(jax.random.key(0), (V, D)) * jnp.bfloat16(3 * D**-0.5)
    never = np.arange(V) == V - 1
    time_of = functools.partial(timed, together=args.together)

    def of_shape(B, W):
        shape = f"{B}x{W}"
        mine = [own[slot % 2] for slot in range(B)]
        rows = [grammars.padded(one, bucket) for one in mine]
        rows = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
        classes = IdClasses(**{name: getattr(rows, name) for name in IdClasses._fields})
        hidden = draw(jax.random.key(B * W), (B * W, D))
        plain = functools.partial(token_readout, head=head, forbidden=never)
        if args.plain:
            say("readout", shape, "as without", time_of(lambda h: plain(h)[1:3], hidden), "")
        # The head is an argument: a constant of the program would be compiled with it.
        full = functools.partial(class_readout, forbidden=never, implementation=args.form)
        named = {"head": head, "classes": classes}
        try:
            read, ids = jax.jit(full)(hidden, **named)
        except Exception as error:
            say("readout", shape, str(args.form), None, f"{type(error).__name__}: {error}"[:200])
            return
        found = away(read, ids, logits_of(hidden, head, never), mine)
        say("readout", shape, f"by classes, {args.form}", None, found)
        if not args.check:
            ms = time_of(lambda h, named: full(h, **named)[0][1:], hidden, named)
            say("readout", shape, f"by classes, {args.form}", ms, "")
        ids = grammar_plan.IdStats(*(leaf.reshape(B, W, *leaf.shape[1:]) for leaf in ids))
        kind = rng.choice([0, 1, 2, 2, 2, 2], (B, W)).astype(np.int32)
        view = constraint.View(
            grammar=rows.replace(kernels=None),
            at=jnp.asarray([one.start for one in mine], jnp.int32),
            bound=jnp.ones((B,), bool),
            kind=jnp.asarray(kind),
            known=jnp.asarray(
                [a_text(rng, *given) for given in zip(mine, kind, strict=True)], jnp.int32
            ),
            room=jnp.asarray(rng.integers(20, 60, B), jnp.int32),
        )
        holes = view.replace(kind=jnp.full((B, W), constraint.HOLE))
        asked = jnp.asarray(rng.random((B, W)) < 0.8)

        def planned(mass, view, ids, asked, kernels):
            view = view.replace(grammar=view.grammar.replace(kernels=kernels))
            plan = grammar_plan.plan_of_ids(view, ids._replace(log_mass=mass), asked)
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
        if kernels is None or args.check:
            return
        seen = view.replace(grammar=rows.replace(kernels=kernels))

        def score(mass, seen, ids, asked):
            return kernels.label_scores(
                seen.grammar, ids.narrow, ids.wide, mass, asked, floor=-80.0, never=NEVER, free=1
            )

        def path(scores, seen, tile=TILES[0], kind=constraint.HOLE):
            kind = jnp.full((B, W), kind)
            given = seen.at, seen.room, kind, seen.known, scores
            named = {"never": NEVER, "skip": 0, "is_known": 1, "written": 3}
            found = kernels.best_path(seen.grammar, *given, tile=tile, **named)
            return found[1], found

        def token(mass, seen, path, ids):
            given = seen.grammar, path, *ids._replace(log_mass=mass)
            return kernels.tokens_along(*given, never=NEVER, no_class=0)[1]

        def walk(known, seen):
            kind = jnp.ones((B, W), jnp.int32)
            given = seen.grammar, seen.at, kind, known.astype(jnp.int32)
            return kernels.walk(*given, skip=0, hole=2)

        ms, scores = time_of(score, ids.log_mass, seen, ids, asked), score(*given)
        say("kernel", shape, "label scores", ms, "")
        for tile in TILES:
            ms = time_of(functools.partial(path, tile=tile), scores, seen)
            say("kernel", shape, f"best path, {tile}", ms, "states, warps")
        for name, kind in (("skipped", constraint.SKIP), ("known", constraint.KNOWN)):
            ms = time_of(functools.partial(path, kind=kind), scores, seen)
            say("kernel", shape, f"best path, cells {name}", ms, "")
        ms = time_of(token, ids.log_mass, seen, plan[1].path, ids)
        say("kernel", shape, "tokens along", ms, "")
        ms = time_of(walk, jnp.asarray(view.known, jnp.float32), seen)
        say("kernel", shape, "walk", ms, "of known cells")

    for shape in shapes:
        of_shape(*shape)


TILES = (128, 4), (256, 8), (64, 2)


def a_text(rng, grammar, kind):
    """Classes of a text that the grammar has, cell by cell."""
    state, classes = grammar.start, []
    for skips in kind == 0:
        goes_on = np.flatnonzero(grammar.delta[state][1:]) + 1
        classes.append(int(rng.choice(goes_on)))
        state = state if skips else int(grammar.delta[state, classes[-1]])
    return classes


@jax.jit
def logits_of(hidden, head, never):
    """In plain JAX."""
    products = jax.lax.dot_general(
        hidden, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return jnp.where(never, -jnp.inf, products)


def away(read, ids, logits, grammars):
    """How far a readout by classes is from logits, of what each slot's grammar has."""
    far, of_slot = np.zeros(4), len(logits) // len(grammars)
    for slot, grammar in enumerate(grammars):
        rows, has = slice(slot * of_slot, (slot + 1) * of_slot), grammar.arrays
        mine, codes = logits[rows], has["codes"]
        said = jnp.where(has["narrow_class"] > 0, ids.narrow[rows, : len(has["narrow"])], 0.0)
        true = jnp.where(has["narrow_class"] > 0, mine[:, has["narrow"]], 0.0)
        far[0] = max(far[0], differ(said, true))
        for place in range(len(has["wide"])):
            among = jnp.where(codes == -(place + 1), mine, -jnp.inf)
            far[1] = max(far[1], differ(ids.wide[rows, place], jnp.max(among, axis=1)))
            token = ids.wide_token[rows, place][:, None]
            theirs = jnp.take_along_axis(among, token, axis=1)[:, 0]
            far[2] = max(far[2], differ(theirs, jnp.max(among, axis=1)))
    far[3] = differ(read.confidence, jnp.max(jax.nn.softmax(logits, axis=1), axis=1))
    named = zip(("narrow", "wide", "wide ids", "confidence"), far, strict=True)
    return "away: " + ", ".join(f"{name} {value:.1e}" for name, value in named)


def differ(a, b):
    """The largest difference; of infinities alike none."""
    return float(jnp.max(jnp.where(a == b, 0.0, jnp.abs(a - b))))


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


def tool_grammar(num_ids, stops=None, never=None, schema=None):
    """The grammar of a tool's call, its states, and the seconds it took."""
    from dllm_jax import structured
    from dllm_jax.runner import grammars

    words = structured.spellings(vocabulary(num_ids))
    stops = (num_ids - 2,) if stops is None else stops
    never = np.array([num_ids - 1] if never is None else [never])
    began = time.perf_counter()
    automaton = structured.compile(
        structured.JsonSchema(TOOL if schema is None else schema),
        words,
        stops,
        never,
        grammars.BUCKETS[-1].states,
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
    parser.add_argument("--cells", default="1x128,8x128", help="slots x cells, of parts")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="of both ways by turns")
    parser.add_argument("--check", action="store_true", help="parts: no times")
    parser.add_argument("--plain", action="store_true", help="parts: also without grammars")
    parser.add_argument("--profile", action="store_true", help="also by kernel")
    parser.add_argument("--together", help="FOLDER:COUNT of processes that compile at once")
    parser.add_argument("--form", choices=["xla", "mosaic"], help="of the readout by classes")
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

    {"parts": parts, "steps": steps}[args.part](args, say)


if __name__ == "__main__":
    main()
