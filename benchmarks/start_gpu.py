"""From the start of a process to its first token, cold and warm; and a long prompt's prefill.

    python benchmarks/start_gpu.py --out start.json

`first_token`: a process loads the model (random weights made on the device), compiles an engine of
one bucket each for decoding and prefill, and takes one forward behind a prompt of 64 tokens; the
seconds are those from before the process was started to the end of that forward. `cold` begins with
an empty folder of compiled programs, `warm` is the same command again. Each says where they went:
`stages`, one behind another, and for every program the seconds of its tracing, lowering, and
compiling or reading from the folder, which threads do at the same time. `ready` (`--ready`): an
engine of 32 slots with all its buckets, cold and warm: the seconds of `LLM(...)`, then one request
after another while the smaller programs are compiled behind them, with the longest step of the
engine and the longest call, beside those afterwards; then (warm) what `LLM.generate` adds to the
steps of one slot and to which of its programs, and the costs that were worked out beside measured
ones. `prefill`: the passes of a
prompt of `--prompt` tokens through the engine's compiled program, back to back, at their positions;
its share of the peak counts two operations a weight of the layers and token, and attention's. Each
in its own process.
"""

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

BEGAN = time.time()  # of this process, as far as a script can know
FIRST_MODEL, PREFILL_MODEL = "random:JetLM/SDAR-1.7B-Chat", "random:JetLM/SDAR-8B-Chat"
BARS = {"cold_s": 60.0, "warm_s": 10.0, "share_of_peak": 0.5}
READY_BARS = {"cold_s": 30.0, "warm_s": 8.0, "all_s": 90.0, "stall_s": 1.0, "overhead": 0.03}
WARM_SHARE = 0.4  # of the wait for programs behind
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
        self.waits_s = 0.0  # of the thread that runs programs, for compiling
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
            self.waits_s += seconds * (threading.current_thread().name == "dllm-device")

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
            "waits_s": self.waits_s,
            "programs": sorted(rows, key=lambda row: -sum(row[key] for key in EVENTS.values())),
        }


def first_token(name, began=None):
    """Everything up to the first token, in this process; when it came, by the clock on the wall."""
    clock = Clock(began)
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
    sizes = {"max_num_seqs": 1, "max_model_len": 4 * SHORT, "slot_buckets": (1,)}
    sizes |= {"page_buckets": (5,), "prefill_buckets": (SHORT,), "num_pages": 10}
    llm = make_llm(model, calibrate=False, progress=False, config=dj.EngineConfig(**sizes))
    clock.end("engine_s")
    clock.stages["engine_programs_s"] = llm.engine.runner.compile_s  # of it, until they were there
    params = dj.SamplingParams(max_tokens=SHORT, max_nfe=1, ignore_eos=True)
    (output,) = llm.generate([list(range(1, SHORT + 1))], params, use_tqdm=False)
    clock.end("first_forward_s")
    if output.error is not None or output.metrics.nfe != 1:
        raise ValueError(f"no first forward: {output}")
    settled = len(output.outputs[0].token_ids)
    return {"came": clock.last, "settled": settled, "has_bytecode": bytecode, **clock.result()}


def ready(name, slots, wait_s, is_warm):
    """How soon an engine answers, and what is compiled behind its requests costs them.

    Prints what it found so far as it goes.

    Args:
        wait_s: Seconds to wait for the programs behind.
        is_warm: Look at the costs of a call as well.
    """
    import jax

    import dllm_jax as dj
    from dllm_jax.loading.jax_settings import enable_async_dispatch, enable_compile_cache

    def say(what):  # as it comes, so that a run that is cut short leaves figures
        print(f"{time.time() - BEGAN:6.1f} s {what}", file=sys.stderr, flush=True)

    make_llm = dj.LLM
    enable_compile_cache()
    enable_async_dispatch()
    say("imported")
    model = jax.block_until_ready(dj.load(name))
    say("model loaded")
    clock = Clock()
    clock.listen()
    began = time.perf_counter()
    window = {"block_size": BLOCK, "buffer_size": BLOCKS}
    llm = make_llm(model, max_num_seqs=slots, progress=False, **window)
    result = {"ready_s": time.perf_counter() - began, "slots": slots, "device": device_name()}
    result["ready_programs"] = clock.result()
    say(f"ready after {result['ready_s']:.1f} s")
    for row in result["ready_programs"]["programs"][:6]:
        say(json.dumps(row))
    tell(result)
    steps, engine = [], llm.engine
    take = engine._take_step

    def timed():
        at = time.perf_counter()
        take()
        steps.append(time.perf_counter() - at)

    engine._take_step = timed
    most = min(TEXT, engine.layout.max_model_len - SHORT)
    params = dj.SamplingParams(max_tokens=most, max_nfe=FORWARDS, ignore_eos=True)
    forwards = []  # FORWARDS, but for a small model that is tried on a CPU

    def call():
        at = time.perf_counter()
        (output,) = llm.generate([list(range(1, SHORT + 1))], params, use_tqdm=False)
        forwards.append(output.metrics.nfe)
        if output.error is not None or len(set(forwards)) > 1:
            raise ValueError(f"not the work: {output}")
        return time.perf_counter() - at

    result["first_answer_s"] = call()
    say(f"first answer after {result['first_answer_s']:.2f} s more")
    clock = Clock()
    clock.listen()
    calls, counts, last = [], [], began
    while time.perf_counter() - began < result["ready_s"] + wait_s:
        stats = engine.stats()
        if not counts or stats.num_compiled > counts[-1][1]:
            last = time.perf_counter()
            counts.append((round(last - began, 2), stats.num_compiled, stats.num_programs))
            say(f"{stats.num_compiled} of {stats.num_programs} programs")
        if stats.num_compiled == stats.num_programs:
            break
        calls.append(call())
    result["programs"] = counts
    result["all_s"] = last - began - result["ready_s"]
    result["behind"] = {"calls": len(calls), "longest_call_s": max(calls, default=0.0)}
    result["behind"]["longest_step_s"] = max(steps[1:])
    result["behind_programs"] = clock.result()
    say(json.dumps(result["behind"] | {"waits_s": result["behind_programs"]["waits_s"]}))
    result["late_compiles"] = engine.stats().num_late_compiles
    steps.clear()
    after = [call() for _ in range(9)]
    result["after"] = {"longest_call_s": max(after), "longest_step_s": max(steps)}
    say(json.dumps(result["after"]))
    tell(result)
    if not is_warm:
        return
    if engine.runner._behind is not None:  # whatever did not come in time is not waited for
        engine.runner._behind.close()
        engine.runner._behind.join()
    columns = engine.layout.page_buckets[0]
    if engine.runner.decode_sizes(1, columns) == (1, columns):
        result |= overhead(llm, call, forwards[0])
        say(json.dumps({name: result[name] for name in ("call_ms", "overhead", "parts_ms")}))
        tell(result)
        result |= costs(llm.engine.runner)
    tell(result)


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


def costs(runner):
    """Costs as the engine has them beside measured ones."""
    from dllm_jax.runner import timing

    result = {}
    worked_out = runner.cost
    measured = timing.calibrate(runner, budget_s=3.0)
    if worked_out is not None:
        pairs = [("decode", worked_out.decode, measured.decode)]
        pairs += [(kind, worked_out.prefill[kind], of) for kind, of in measured.prefill.items()]
        result["costs_ms"] = [
            [kind, *sizes, 1e3 * worked[sizes], 1e3 * seconds]
            for kind, worked, of in pairs
            for sizes, seconds in sorted(of.items())
        ]
    return result


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
    """The starts of `ready` beside their bars."""
    lines = []
    for name, one in result.items():
        if "after" not in one:
            lines.append(f"{name:5s} {one}")
            continue
        done, of = one["programs"][-1][1:]
        lines.append(
            f"{name:5s} ready {one['ready_s']:.1f} s, first answer +{one['first_answer_s']:.2f} s, "
            f"{done} of {of} programs +{one['all_s']:.1f} s, longest step meanwhile "
            f"{one['behind']['longest_step_s']:.3f} s (then {one['after']['longest_step_s']:.3f}), "
            f"longest call {one['behind']['longest_call_s']:.2f} s (then "
            f"{one['after']['longest_call_s']:.2f}), late {one['late_compiles']}"
        )
        if "overhead" in one:
            lines.append(
                f"{name:5s} {one['forwards']} forwards {one['call_ms']:.1f} ms, bare step "
                f"{one['bare_step_ms']:.3f} ms, overhead {one['overhead']:.1%}: {one['parts_ms']}"
            )
        ratios = [worked / measured for *_, worked, measured in one.get("costs_ms", ())]
        if ratios:
            lines.append(
                f"{name:5s} costs as worked out over measured: {min(ratios):.2f} to "
                f"{max(ratios):.2f} in {len(ratios)} programs"
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
    from dllm_jax.bench.roofline import step_parts
    from dllm_jax.runner.timing import RATES
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


def table(result):
    """Seconds of the stages, one column a start, and of the programs that took longest."""
    starts = {name: result[name] for name in ("cold", "warm") if name in result}
    lines = [f"{'seconds':28s}" + "".join(f"{name:>8s}" for name in starts)]

    def line(name, values):
        lines.append(f"{name:28s}" + "".join(f"{value:8.2f}" for value in values))

    for stage in next(iter(starts.values()))["stages"]:
        shown = "  of it programs" if stage == "engine_programs_s" else stage.removesuffix("_s")
        line(shown, (one["stages"][stage] for one in starts.values()))
    line("first token", (result[f"{name}_s"] for name in starts))
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
    parser.add_argument("--wait", type=float, default=100.0, help="seconds for programs behind")
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
        ready(args.model or FIRST_MODEL, args.slots, args.wait, args.is_warm)
        os._exit(0)  # what is still being compiled is not waited for
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
            seconds = result.pop("came") - began
            first |= {f"{name}_s": seconds, "settled": result.pop("settled"), name: result}
            bar = BARS[f"{name}_s"]
            print(f"first token, {name}: {seconds:.1f} s (bar {bar:.0f})", flush=True)
            save(args.out, report)
        print(table(first), flush=True)
        report["prefill"], _ = in_own_process(["--one", "prefill", *same], cache)
    print(report["prefill"], flush=True)
    save(args.out, report)


def ready_starts(args, report, same):
    """A cold start and a warm one, whatever the first comes to."""
    report |= {"bars": READY_BARS, "model": args.model or FIRST_MODEL, "ready": {}}
    with tempfile.TemporaryDirectory() as cache:
        for name, wait in (("cold", args.wait), ("warm", WARM_SHARE * args.wait)):
            words = ["--one", "ready", "--slots", str(args.slots), "--wait", str(wait), *same]
            words += ["--is-warm"] * (name == "warm")

            def keep(result, name=name):
                report["ready"][name] = result
                save(args.out, report)

            try:
                in_own_process(words, cache, keep)
            except Exception as error:
                report["ready"].setdefault(name, {})["error"] = repr(error)
                save(args.out, report)
            print(ready_table(report["ready"]), flush=True)


def save(path, report):
    if path:
        Path(path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
