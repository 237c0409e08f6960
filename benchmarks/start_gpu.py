"""From the start of a process to its first token, cold and warm; and a long prompt's prefill.

    python benchmarks/start_gpu.py --out start.json

`first_token`: a process loads the model (random weights made on the device), compiles an engine of
one bucket each for decoding and prefill, and takes one forward behind a prompt of 64 tokens; the
seconds are those from before the process was started to the end of that forward. `cold` begins with
an empty folder of compiled programs, `warm` is the same command again. Each says where they went:
`stages`, one after another, and for every program the seconds of its tracing, lowering, and
compiling or reading from the folder, which threads do at the same time. `ready` (`--ready`): an
engine of 32 slots with all its programs, cold and warm: `ready_s` of `LLM(...)`, the same stages
and programs, its first answer, and the longest step and call of those that follow; then (warm) what
`LLM.generate` adds to the steps of one slot and to which of its programs. `prefill`: the passes of
a prompt of `--prompt` tokens through the engine's compiled program, back to back, at their
positions; its share of the peak counts two operations a weight of the layers and token, and
attention's. Each in its own process.
"""

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BEGAN = time.time()  # of this process, as far as a script can know
FIRST_MODEL, PREFILL_MODEL = "random:JetLM/SDAR-1.7B-Chat", "random:JetLM/SDAR-8B-Chat"
BARS = {"cold_s": 60.0, "warm_s": 10.0, "share_of_peak": 0.5}
READY_BARS = {"cold_s": 40.0, "warm_s": 12.0, "overhead": 0.03}
FORWARDS = 64
BLOCK, BLOCKS = 32, 4  # of the window
TEXT = FORWARDS * BLOCKS * 4  # tokens, more than that many forwards write
SHORT = 64


# What JAX tells of a program, in seconds; "load" is compiling where the folder does not hold it.
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_s",
    "/jax/core/compile/backend_compile_duration": "load_s",
}
FROM_FOLDER = "/jax/compilation_cache/cache_hits"


class Clock:
    """Stages of this process, and what each program took.

    Args:
        began: When the process was started, by the clock on the wall; None: as this module was.
    """

    def __init__(self, began=None):
        self.last = BEGAN if began is None else began
        self.stages = {}
        self.programs = collections.defaultdict(
            lambda: dict.fromkeys(("count", *EVENTS.values()), 0)
        )
        self.num_from_folder = 0
        self.end("interpreter_s")

    def end(self, stage):
        """What was done since the last stage ended."""
        now = time.time()
        self.stages[stage], self.last = now - self.last, now

    def listen(self):
        """Hear of programs, until all of it is told."""
        import jax.monitoring

        jax.monitoring.register_event_duration_secs_listener(self._took)
        jax.monitoring.register_event_listener(self._happened)

    def _took(self, event, seconds, **layout):
        if event in EVENTS:
            name = str(layout.get("fun_name", "?")).removeprefix("jit(").removesuffix(")")
            self.programs[name][EVENTS[event]] += seconds
            self.programs[name]["count"] += EVENTS[event] == "load_s"

    def _happened(self, event, **_):
        self.num_from_folder += event == FROM_FOLDER

    def result(self):
        """All of it, the programs that took longest first."""
        import jax.monitoring

        jax.monitoring.unregister_event_duration_listener(self._took)
        jax.monitoring.unregister_event_listener(self._happened)
        rows = [{"program": name, **row} for name, row in self.programs.items() if row["count"]]
        return {
            "stages": self.stages,
            "num_programs": sum(row["count"] for row in rows),
            "num_from_folder": self.num_from_folder,
            "programs": sorted(rows, key=lambda row: -sum(row[key] for key in EVENTS.values())),
        }


def started(clock, name, sizes=None, **how):
    """An `LLM`, and which packages had bytecode; its stages go to a clock.

    Args:
        sizes: Fields of its `EngineConfig`.
    """
    # Modules without bytecode take several times as long to import.
    bytecode = {name: has_bytecode(name) for name in ("jax", "dllm_jax")}
    import jax

    import dllm_jax as dj
    from dllm_jax.loading.jax_settings import enable_async_dispatch, enable_compile_cache

    load, make_llm = dj.load, dj.LLM  # found, and with them all that they need
    clock.listen()
    clock.end("imports_s")
    enable_compile_cache()
    enable_async_dispatch()  # as `load` does, too late behind the next line
    jax.devices()
    clock.end("device_s")
    model = jax.block_until_ready(load(name))
    clock.end("weights_s")
    config = None if sizes is None else dj.EngineConfig(**sizes)
    llm = make_llm(model, progress=False, config=config, **how)
    clock.end("engine_s")
    # Of it, until they were compiled.
    clock.stages["engine_programs_s"] = llm.engine.runner.device.compile_s
    return llm, bytecode


def first_token(name, began=None):
    """Everything up to the first token, in this process; when it came, by the clock on the wall."""
    clock = Clock(began)
    sizes = {"max_num_seqs": 1, "max_model_len": 4 * SHORT, "slot_buckets": (1,)}
    sizes |= {"page_buckets": (5,), "prefill_buckets": (SHORT,), "num_pages": 10}
    llm, bytecode = started(clock, name, sizes, calibrate=False)
    output = generated(llm, SHORT, 1)
    clock.end("first_forward_s")
    settled = len(output.outputs[0].token_ids)
    return {"came": clock.last, "settled": settled, "has_bytecode": bytecode, **clock.result()}


def generated(llm, max_tokens, forwards):
    """A text of so many forwards, or fewer where a small model is tried on a CPU."""
    import dllm_jax as dj

    params = dj.SamplingParams(max_tokens=max_tokens, max_nfe=forwards, ignore_eos=True)
    (output,) = llm.generate([list(range(1, SHORT + 1))], params, use_tqdm=False)
    if output.error is not None or not output.metrics.nfe:
        raise ValueError(f"no forward: {output}")
    return output


def ready(name, slots, is_warm, began=None):
    """How soon an engine with all its programs answers.

    Prints what it found so far as it goes, so that a run that is cut short leaves figures.

    Args:
        is_warm: Look at the costs of a call as well.
    """
    clock = Clock(began)
    window = {"block_size": BLOCK, "buffer_size": BLOCKS}
    llm, bytecode = started(clock, name, max_num_seqs=slots, **window)
    engine, steps, forwards = llm.engine, [], []
    take, most = engine._take_step, min(TEXT, engine.layout.max_model_len - SHORT)

    def timed():
        at = time.perf_counter()
        take()
        steps.append(time.perf_counter() - at)

    def call():
        at = time.perf_counter()
        forwards.append(generated(llm, most, FORWARDS).metrics.nfe)
        if len(set(forwards)) > 1:
            raise ValueError(f"not the same work: {forwards} forwards")
        return time.perf_counter() - at

    engine._take_step = timed
    call()
    clock.end("first_answer_s")
    result = {"came": clock.last, "has_bytecode": bytecode, "slots": slots, **clock.result()}
    result |= {"ready_s": clock.stages["engine_s"], "device": device_name()}
    result["host_peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tell(result)
    steps.clear()
    calls = [call() for _ in range(9)]
    result |= {"longest_call_s": max(calls), "longest_step_s": max(steps)}
    result["late_compiles"] = engine.stats().num_late_compiles
    tell(result)
    if is_warm:
        tell(result | overhead(llm, call, forwards[0]))


def tell(result):
    print(json.dumps(result), flush=True)


def overhead(llm, call, forwards):
    """The host's share of a call, and what each of its programs takes beside the steps."""
    runner = llm.engine.runner
    call_ms = 1e3 * statistics.median(call() for _ in range(15))
    loops = [bare_loop(runner, forwards // 2) for _ in range(7)]
    each = {name: 1e3 * statistics.median(one[name] for one in loops) for name in loops[0]}
    step_ms = each.pop("step")
    each["engine and LLM"] = call_ms - forwards * step_ms - sum(each.values())
    return {
        "forwards": forwards,
        "call_ms": call_ms,
        "bare_step_ms": step_ms,
        "overhead": 1 - forwards * step_ms / call_ms,
        "parts_ms": each,
    }


def bare_loop(runner, more_steps):
    """Seconds of a step of one slot in the engine's own program, and of what surrounds the steps.

    By two dispatches of more and fewer steps; the texts begin as those of a call do.
    """
    import dataclasses

    import numpy as np

    from dllm_jax.runner import timing

    pages = np.full((1, runner.layout.page_buckets[0]), -1, np.int32)
    text = timing.made_up(runner.layout, pages.shape[1])
    limit = min(SHORT + TEXT, runner.layout.max_model_len)
    text = dataclasses.replace(text, tail=(), prompt_len=SHORT, limit=limit)
    spent, admitted = [], []
    for steps in (4, 4 + more_steps):
        began = time.perf_counter()
        runner.admit(0, text)
        timing.begin(runner, 0, SHORT, pages[0])
        runner.wait()
        admitted.append(time.perf_counter() - began)
        began = time.perf_counter()
        ran = runner.fetch(runner.decode(np.zeros((1,), np.int32), 1, pages, steps, False)).steps
        spent.append((time.perf_counter() - began, ran))
    (less_s, less), (more_s, more) = spent
    if more <= less:
        raise ValueError(f"the text ended after {more} steps")
    step_s = (more_s - less_s) / (more - less)
    return {"step": step_s, "admit": min(admitted), "decode": less_s - less * step_s}


def device_name():
    """What JAX computes on."""
    import jax

    return jax.devices()[0].device_kind


def ready_table(result):
    """The starts of `ready`: stages, programs, and what an answer takes."""
    starts = {name: one for name, one in result.items() if "longest_call_s" in one}
    lines = [table(starts, "first answer")] if starts else []
    for name, one in result.items():
        if name not in starts:
            lines.append(f"{name}: {one}")
            continue
        lines.append(
            f"{name}: ready after {one['ready_s']:.1f} s (bar {READY_BARS[f'{name}_s']:.0f}), "
            f"{one['host_peak_bytes'] / 1e9:.1f} GB of the host; then the longest call "
            f"{one['longest_call_s']:.2f} s, step {one['longest_step_s']:.3f} s, late compilations "
            f"{one['late_compiles']}"
        )
        if "overhead" in one:
            lines.append(
                f"{name}: {one['forwards']} forwards {one['call_ms']:.1f} ms, bare step "
                f"{one['bare_step_ms']:.3f} ms, overhead {one['overhead']:.1%}: {one['parts_ms']}"
            )
    return "\n".join(lines)


def has_bytecode(package):
    """Whether Python need not compile a package, or its first module, when it is imported."""
    found = importlib.util.find_spec(package)
    return found is not None and bool(found.cached) and Path(found.cached).exists()


def prefill(name, prompt, size):
    """Passes of `size` tokens over a whole prompt."""
    import jax

    import dllm_jax as dj
    from dllm_jax.bench import measure
    from dllm_jax.bench.numbers import device_kind
    from dllm_jax.bench.roofline import RATES, step_parts
    from dllm_jax.strategies import MultiBD

    model = dj.load(name)
    strategy = MultiBD(block_size=min(32, size), buffer_size=1)
    columns = -(-(prompt + 2 * strategy.block_size) // 64)
    sizes = {"max_num_seqs": 1, "max_model_len": columns * 64 - strategy.block_size}
    sizes |= {"slot_buckets": (1,), "page_buckets": (columns,), "prefill_buckets": (size,)}
    config = dj.EngineConfig(**sizes, num_pages=2 * columns)
    engine = dj.LLM(model, strategy, calibrate=False, progress=False, config=config).engine
    kind = engine.layout.pass_kind
    passes = [
        measure.prefill_pass_ms(engine, size, columns, kind, first=first)
        for first in range(0, prompt, size)
    ]
    operations = 0.0
    for first in range(0, prompt, size):
        parts = step_parts(model, 1, size // strategy.block_size, strategy.block_size, first)
        operations += sum(ops for part, (_, ops) in parts.items() if part != "head")
    spent_s = sum(passes) / 1e3
    rate = RATES.get(device_kind(), (None, None))[1]
    return {
        "model": name,
        "device": device_kind(),
        "prompt": prompt,
        "pass_tokens": size,
        "pass_ms": passes,
        "prefill_s": spent_s,
        "tok_s": prompt / spent_s,
        "tflop_s": operations / spent_s / 1e12,
        "share_of_peak": rate and operations / spent_s / rate,
        "bar": BARS["share_of_peak"],
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)),
    }


# Settings under which a start is not the one users have: another folder of compiled programs, which
# holds none that compiled in less than a second, and modules that Python compiles at every start.
UNUSUAL = ("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE", "PYTHONDONTWRITEBYTECODE")


def in_own_process(words, cache, keep=lambda result: None):
    """What this script prints last as JSON with other words, and when it was started.

    Args:
        keep: Called with whatever it prints, as it comes.
    """
    usual = {name: value for name, value in os.environ.items() if not name.startswith(UNUSUAL)}
    began = time.time()
    words = [sys.executable, __file__, *words, "--began", repr(began)]
    env = usual | {"XDG_CACHE_HOME": cache}
    result = None
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as process:
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # a library's own words
                result = json.loads(line)
                keep(result)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    return result, began


def table(starts, last):
    """Seconds of the stages, one column a start, and of the programs that took longest.

    Args:
        starts: By name; `s` of each are the seconds until `last`.
    """
    lines = [f"{'seconds':28s}" + "".join(f"{name:>8s}" for name in starts)]

    def line(name, values):
        lines.append(f"{name:28s}" + "".join(f"{value:8.2f}" for value in values))

    for stage in next(iter(starts.values()))["stages"]:
        shown = "  of it programs" if stage == "engine_programs_s" else stage.removesuffix("_s")
        line(shown, (one["stages"][stage] for one in starts.values()))
    line(last, (one["s"] for one in starts.values()))
    for key in EVENTS.values():
        line(
            f"all threads: {key.removesuffix('_s')}",
            (sum(row[key] for row in one["programs"]) for one in starts.values()),
        )
    for name, one in starts.items():
        few = "; ".join(
            f"{row['program']} {row['trace_s']:.2f} + {row['lower_s']:.2f} + {row['load_s']:.2f}"
            for row in one["programs"][:6]
        )
        bare = [package for package, has in one["has_bytecode"].items() if not has]
        if bare:
            lines.append(f"{name}: {' and '.join(bare)} had no bytecode: slow imports")
        lines.append(
            f"{name}: {one['num_programs']} programs, {one['num_from_folder']} of them from the "
            f"folder; trace + lower + load: {few}"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="of both (default: SDAR-1.7B's and SDAR-8B's shapes)")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--pass-tokens", type=int, default=1024)
    parser.add_argument("--commit", help="where the checkout has no git")
    parser.add_argument("--out")
    parser.add_argument(
        "--one", choices=("first_token", "prefill", "ready"), help="in this process"
    )
    parser.add_argument("--ready", action="store_true", help="only the starts of many slots")
    parser.add_argument("--slots", type=int, default=32, help="of --ready")
    parser.add_argument("--is-warm", action="store_true", help="of --one ready: the costs too")
    parser.add_argument("--began", type=float, help="when it was started (time.time())")
    args = parser.parse_args()
    if args.prompt % args.pass_tokens:
        parser.error(f"--prompt {args.prompt} must be whole passes of {args.pass_tokens} tokens")
    if args.one == "first_token":
        result = first_token(args.model or FIRST_MODEL, args.began)
        print(json.dumps({"commit": args.commit} | result))
        return
    if args.one == "ready":
        ready(args.model or FIRST_MODEL, args.slots, args.is_warm, args.began)
        return
    if args.one == "prefill":
        print(json.dumps(prefill(args.model or PREFILL_MODEL, args.prompt, args.pass_tokens)))
        return
    report = {"command": "benchmarks/start_gpu.py", "commit": args.commit, "bars": BARS}
    same = ["--prompt", str(args.prompt), "--pass-tokens", str(args.pass_tokens)]
    same += ["--model", args.model] if args.model else []
    if args.ready:
        ready_starts(args, report, same)
        return
    with tempfile.TemporaryDirectory() as cache:
        first = report["first_token"] = {"model": args.model or FIRST_MODEL}
        for name in ("cold", "warm"):
            result, began = in_own_process(["--one", "first_token", *same], cache)
            result["s"] = seconds = result.pop("came") - began
            first |= {f"{name}_s": seconds, "settled": result.pop("settled"), name: result}
            bar = BARS[f"{name}_s"]
            print(f"first token, {name}: {seconds:.1f} s (bar {bar:.0f})", flush=True)
            save(args.out, report)
        print(table({name: first[name] for name in ("cold", "warm")}, "first token"), flush=True)
        report["prefill"], _ = in_own_process(["--one", "prefill", *same], cache)
    print(report["prefill"], flush=True)
    save(args.out, report)


def ready_starts(args, report, same):
    """A cold start and a warm one, whatever the first comes to."""
    report |= {"bars": READY_BARS, "model": args.model or FIRST_MODEL, "ready": {}}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            words = ["--one", "ready", "--slots", str(args.slots), *same]
            words += ["--is-warm"] * (name == "warm")

            def keep(result, name=name):
                report["ready"][name] = result
                save(args.out, report)

            try:
                result, began = in_own_process(words, cache, keep)
                result["s"] = result.pop("came") - began
            except Exception as error:
                report["ready"].setdefault(name, {})["error"] = repr(error)
            save(args.out, report)
            print(ready_table(report["ready"]), flush=True)


def save(path, report):
    if path:
        Path(path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
