"""The engine on an accelerator: host overhead, a ragged load, a long prompt among short, memory.

    python benchmarks/engine_gpu.py --out benchmarks/results/engine_h200.json

The work is `fixed` (dllm_jax.bench.fixed: n tokens a step, the readout's own); weights and prompts
are random. Each section builds its own `LLM`, prints its lines as it goes and is written to the
file when it is done; `--sections` selects some. The file explains each figure under "how".
`--smoke` shrinks lengths so that the built-in model can run it on a CPU:

    python benchmarks/engine_gpu.py --smoke --model builtin:tiny-sdar --out /tmp/engine.json
"""

import argparse
import dataclasses
import gc
import json
import time
from pathlib import Path

import jax
import numpy as np

import dllm_jax as dj
from dllm_jax.bench import measure
from dllm_jax.bench.fixed import FixedWork
from dllm_jax.bench.numbers import (
    check_outputs,
    check_readout,
    environment,
    mean_context,
    numbers,
    percentiles,
)
from dllm_jax.bench.throughput import run
from dllm_jax.bench.workload import Lengths, random_work
from dllm_jax.loading.jax_settings import enable_compile_cache

TOKENS_PER_STEP = 4
MOST_OVERHEAD, LEAST_EFFICIENCY, MOST_RISE = 0.03, 0.85, 2.0


def overhead(model, args, say):
    """Host overhead of `LLM.generate` with 1 and with all slots."""
    context, output = (64, 64) if args.smoke else (512, 384)
    slots = 4 if args.smoke else args.slots
    llm = make_llm(
        model,
        max_num_seqs=slots,
        max_model_len=context + output,
        slot_buckets=(1, slots),
        page_buckets=(-(-(context + output + 32) // 64),),
        prefill_buckets=(context,),
        num_pages=2 * slots * (-(-(context + output + 32) // 64)),
    )
    rows = []
    for batch in (1, slots):
        work = random_work(model, batch, Lengths(context, context), Lengths(output, output), 0)
        # The second run finds every prompt in the prefix cache: nothing but decoding is left.
        run(llm, [work], use_tqdm=False)
        walls = []
        for _ in range(args.repeats):
            ran = run(llm, [work], use_tqdm=False)
            check_outputs(ran.outputs)
            walls.append(ran)
        walls.sort(key=lambda one: one.walls_s[0])
        ran = walls[len(walls) // 2]
        measured = numbers(llm, ran)
        measured |= {
            "slots": batch,
            "context": context,
            "output": output,
            "walls_s": [one.walls_s[0] for one in walls],
            "bar": MOST_OVERHEAD,
            "readout": readout(llm, ran, say),
        }
        rows.append(measured)
        say(
            f"overhead   {batch:>3} slots: step {measured['step_ms']:.3f} ms, bare "
            f"{measured['bare_step_ms']:.3f} ms, host_overhead {measured['host_overhead']:.2%} "
            f"(bar {MOST_OVERHEAD:.0%}), {measured['tok_s']:.0f} tok/s, prefill passes "
            f"{measured['prefill_nfe']}"
        )
    how = (
        "1 - decode steps x bare step ms / wall of LLM.generate, all of it: the prompts are in "
        "the prefix cache, so no prefill runs; the wall is the median run of those listed; bare: "
        "the same compiled program, difference of two step counts, from the same context on"
    )
    return {"how": how, "rows": rows, "compile_s": llm.warm_up_s}


def ragged(model, args, say):
    """Log-uniform lengths, all queued at once: how much of the wall is useful work."""
    slots = 4 if args.smoke else args.slots
    inputs, outputs = (Lengths(16, 256), Lengths(8, 64))
    count = 16
    if not args.smoke:
        inputs, outputs, count = Lengths(16, 4096), Lengths(16, 512), args.requests
    longest = inputs.high + outputs.high
    columns = -(-(longest + 32) // 64)
    llm = make_llm(
        model,
        max_num_seqs=slots,
        max_model_len=longest,
        slot_buckets=(1, 4) if args.smoke else args.slot_buckets,
        page_buckets=args.page_buckets,
        prefill_buckets=(64, 256) if args.smoke else args.prefill_buckets,
        num_pages=slots * columns + slots,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    work = random_work(model, count, inputs, outputs, seed=0)
    ran = run(llm, [work])
    check_outputs(ran.outputs)
    layout, wall_s = llm.engine.layout, sum(ran.walls_s)
    context = int(mean_context(ran))
    widest = max(columns for _, columns in ran.steps)
    step_ms = {
        columns: measure.decode_step_ms(llm.engine, slots, columns, context)
        for columns in sorted({widest, layout.page_buckets[0]})
    }
    size = layout.prefill_buckets[-1]
    kind = next(iter(ran.passes))[2]
    pass_ms = {
        columns: measure.prefill_pass_ms(llm.engine, size, columns, kind)
        for columns in layout.page_buckets
        if columns * layout.page_size >= size
    }
    decode_tokens = sum(len(o.outputs[0].token_ids) for o in ran.outputs)
    prefill_tokens = sum(layout.prefill_len(len(o.prompt_token_ids)) for o in ran.outputs)
    prefill_tokens -= sum(o.metrics.cached_tokens for o in ran.outputs)

    def efficiency(columns):
        """At the full-slot step of one page bucket and the fastest prefill pass."""
        useful_s = decode_tokens * step_ms[columns] / (slots * TOKENS_PER_STEP) / 1e3
        return (useful_s + prefill_tokens * min(pass_ms.values()) / size / 1e3) / wall_s

    measured = {
        "how": "(decode tokens x full-slot ms per token + prefill tokens / prefill rate) / wall; "
        "full-slot ms per token: bare ms of the step of all slots at the widest page bucket that "
        f"ran, every row from {context} tokens of context on (the load's mean), over slots x "
        "tokens per step; prefill rate: bare, back to back, largest prefill bucket at the page "
        "bucket where it is fastest, prefixes from position 0; decode tokens: visible tokens; "
        "prefill tokens: whole blocks of the prompts, less what the prefix cache had; both bare "
        "times from the same process; at_smallest uses the smallest page bucket's step",
        "bar": LEAST_EFFICIENCY,
        "efficiency": efficiency(widest),
        "efficiency_at_smallest": efficiency(layout.page_buckets[0]),
        "wall_s": wall_s,
        "decode_tokens": decode_tokens,
        "prefill_tokens": prefill_tokens,
        "full_slot_step_ms": step_ms,
        "prefill_pass_ms": pass_ms,
        "prefill_tok_s": size / min(pass_ms.values()) * 1e3,
        "slot_buckets": layout.slot_buckets,
        "page_buckets": layout.page_buckets,
        "prefill_buckets": layout.prefill_buckets,
        "compile_s": llm.warm_up_s,
        "requests": count,
        "inputs": str(inputs),
        "outputs": str(outputs),
    }
    say(
        f"ragged     {count} requests, {decode_tokens} + {prefill_tokens} tokens in {wall_s:.2f} "
        f"s: efficiency {measured['efficiency']:.3f} (bar {LEAST_EFFICIENCY}), at the smallest "
        "page "
        f"bucket {measured['efficiency_at_smallest']:.3f}; full-slot step ms by columns {step_ms}; "
        f"prefill {measured['prefill_tok_s']:.0f} tok/s"
    )
    if not args.quick:
        measured["numbers"] = numbers(llm, ran)
        for one in measured["numbers"]["decode_programs"]:
            say(f"           decode {one}")
        for one in measured["numbers"]["prefill_programs"]:
            say(f"           prefill {one}")
        say(f"           host_overhead {measured['numbers']['host_overhead']:.2%}")
    measured["readout"] = readout(llm, ran, say)
    return measured


def long_prompt(model, args, say):
    """What running requests notice of a long prompt that arrives among them."""
    running = 2 if args.smoke else 8
    most = model.config.max_position
    long_len = 320 if args.smoke else min(args.long_prompt, most - 96)
    prompt_len, output = (64, 384) if args.smoke else (512, args.long_output)
    short = -(-(prompt_len + output + 32) // 64)
    longest = max(long_len + 64, prompt_len + output)
    columns = -(-(longest + 32) // 64)
    llm = make_llm(
        model,
        max_num_seqs=running + 1,
        max_model_len=longest,
        slot_buckets=(1, running),
        page_buckets=tuple(min(size, columns) for size in (short, 2 * short, 4 * short)),
        prefill_buckets=(64, 256) if args.smoke else args.prefill_buckets,
        num_pages=running * short + -(-(long_len + 128) // 64) + 16,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    engine = llm.engine
    work = random_work(
        model, running, Lengths(prompt_len, prompt_len), Lengths(output, output), seed=1
    )
    (late,) = random_work(model, 1, Lengths(long_len, long_len), Lengths(64, 64), seed=2)
    ended = {}

    def rounds(until):
        """Step times of a running request: wall of each round over its steps, one a step."""
        found, steps, before = [], engine.stats().num_steps, time.perf_counter()
        while not until(len(found)):
            for one in engine.step():
                ended[one.request_id] = one
            now, count = time.perf_counter(), engine.stats().num_steps
            if count > steps:
                found += [(now - before) / (count - steps) * 1e3] * (count - steps)
                steps, before = count, now
        return found

    ids = [engine.add(dj.Request(prompt_token_ids=w.prompt, params=w.params)) for w in work]
    rounds(lambda count: count >= 16)  # every prompt is in, the pipeline runs
    before = rounds(lambda count: count >= (20 if args.smoke else 160))
    late_id = engine.add(
        dj.Request(prompt_token_ids=late.prompt, params=late.params, request_id="late")
    )
    after = rounds(lambda _: late_id in ended)
    survived = sum(one not in ended for one in ids)
    for one in ids:
        engine.abort(one)
    rounds(lambda _: not engine.has_work)
    check_outputs(list(ended.values()))
    ms_before, ms_after = percentiles(before), percentiles(after)
    metrics = ended[late_id].metrics
    measured = {
        "how": "wall between two fetches over the steps read in between, one sample a step; "
        "before: the running requests alone; after: from the arrival of the long prompt to its "
        "end, its prefill and its decoding",
        "bar": MOST_RISE,
        "rise_p99": ms_after["p99"] / ms_before["p99"],
        "rise_p50": ms_after["p50"] / ms_before["p50"],
        "step_ms_before": ms_before,
        "step_ms_after": ms_after,
        "max_ms_before": max(before),
        "max_ms_after": max(after),
        "steps_before": len(before),
        "steps_after": len(after),
        "running": running,
        "still_running_at_the_end": survived,
        "long_prompt": long_len,
        "long_prefill_passes": metrics.prefill_nfe,
        "long_ttfb_s": metrics.ttfb_s,
        "long_e2e_s": metrics.e2e_s,
        "compile_s": llm.warm_up_s,
        "late_compiles": engine.stats().num_late_compiles,
    }
    say(
        f"long       {long_len} tokens among {running}: p99 step {ms_before['p99']:.2f} -> "
        f"{ms_after['p99']:.2f} ms, x{measured['rise_p99']:.2f} (bar {MOST_RISE}); p50 "
        f"{ms_before['p50']:.2f} -> {ms_after['p50']:.2f}; max {measured['max_ms_before']:.2f} -> "
        f"{measured['max_ms_after']:.2f}; {len(after)} steps, {survived} of {running} still ran at "
        f"its end; its first block after {metrics.ttfb_s:.2f} s"
    )
    return measured


def memory(model, args, say):
    """Predicted against measured peak memory, at the sizes the engine chooses by itself."""
    stats = jax.devices()[0].memory_stats()
    length = 256 if args.smoke else 4608
    llm = make_llm(
        model,
        max_num_seqs=4 if args.smoke else args.slots,
        max_model_len=length,
        slot_buckets=(4 if args.smoke else args.slots,),
        page_buckets=(-(-(length + 32) // 64),),
        prefill_buckets=(64,) if args.smoke else args.prefill_buckets[-1:],
    )
    predicted = llm.memory
    if stats is None:
        say(f"memory     not measured: {jax.devices()[0].device_kind} counts none")
        return {"not_measured": "the device counts none", "predicted": str(predicted)}
    work = random_work(
        model, 2 * llm.engine.layout.num_slots, Lengths(64, length // 2), Lengths(16, 64), 3
    )
    check_outputs(run(llm, [work]).outputs)
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    measured = {
        "how": "memory_stats()['peak_bytes_in_use'] of the process after a load; meaningful where "
        "this section runs first",
        "bar": 0.1,
        "predicted": dataclasses.asdict(predicted),
        "predicted_peak_bytes": predicted.peak_bytes,
        "measured_peak_bytes": peak,
        "off_by": predicted.peak_bytes / peak - 1,
        "compile_s": llm.warm_up_s,
    }
    say(
        f"memory     predicted {predicted}, measured {peak / 2**30:.1f} GiB: off by "
        f"{measured['off_by']:.1%} (bar 10%)"
    )
    return measured


SECTIONS = {"memory": memory, "overhead": overhead, "ragged": ragged, "long": long_prompt}


def readout(llm, ran, say):
    """Evidence that the tokens are the model's; where there is evidence against, it says so."""
    try:
        return check_readout(llm, ran)
    except ValueError as error:
        say(f"THE RUN DOES NOT COUNT: {error}")
        return {"failed": str(error)}


class Timed(dj.LLM):
    """An `LLM` that knows how long its warm-up took."""

    warm_up_s = 0.0


def make_llm(model, **sizes):
    """An engine of given sizes over the fixed work, compiled."""
    sizes = {name: size for name, size in sizes.items() if size is not None}
    began = time.perf_counter()
    llm = Timed(model, FixedWork(tokens_per_step=TOKENS_PER_STEP), config=dj.EngineConfig(**sizes))
    jax.block_until_ready(model.params)
    llm.warm_up_s = time.perf_counter() - began
    return llm


def load(args):
    """The model, or its first layers."""
    model = dj.load(args.model)
    if args.layers:
        layers = model.params["layers"][: args.layers]
        model = model.replace(
            params={**model.params, "layers": layers},
            config=dataclasses.replace(model.config, num_layers=len(layers)),
        )
    jax.block_until_ready(model.params)
    return model


def sizes(text):
    """Comma-separated whole numbers."""
    return tuple(int(part) for part in text.split(","))


def parse():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:JetLM/SDAR-1.7B-Chat")
    parser.add_argument("--layers", type=int, help="keep so many layers (a quick look)")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma-separated")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--slot-buckets", type=sizes, default=(4, 8, 16, 24, 32))
    parser.add_argument("--page-buckets", type=sizes, help="ragged: default the engine's")
    parser.add_argument("--prefill-buckets", type=sizes, default=(256, 1024))
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--long-prompt", type=int, default=32000)
    parser.add_argument("--long-output", type=int, default=3328, help="of the running requests")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="ragged: no bare time of every program"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny lengths, for a CPU")
    parser.add_argument("--commit", help="where the checkout has no git")
    parser.add_argument("--out")
    args = parser.parse_args()
    unknown = set(args.sections.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return args


def main():
    """Run the sections, print, write."""
    args = parse()
    enable_compile_cache()
    began = time.perf_counter()
    model = load(args)
    report = {
        "command": "benchmarks/engine_gpu.py",
        "arguments": {name: value for name, value in vars(args).items() if name != "out"},
        "model": args.model,
        "config": dataclasses.asdict(model.config),
        "dtype": str(model.params["embed"].dtype),
        "mode": "fixed",
        "strategy": str(FixedWork(tokens_per_step=TOKENS_PER_STEP)),
        **environment(),
        "sections": {},
    }
    report["commit"] = args.commit or report["commit"]

    def say(line):
        """Print a line with the time since the start."""
        print(f"[{time.perf_counter() - began:6.1f} s] {line}", flush=True)

    say(f"{args.model} on {report['device']}, jax {report['jax']}, commit {report['commit']}")
    for name in args.sections.split(","):
        try:
            report["sections"][name] = SECTIONS[name](model, args, say)
        except Exception as error:  # the other sections still count
            report["sections"][name] = {"failed": f"{type(error).__name__}: {error}"}
            say(f"{name} failed: {type(error).__name__}: {error}")
        gc.collect()  # the engine's pool goes before the next one comes
        if args.out:
            Path(args.out).write_text(json.dumps(report, indent=1, default=_plain) + "\n")
    say("done")


def _plain(value):
    """Numpy numbers as JSON knows them."""
    return value.item() if isinstance(value, np.generic) else str(value)


if __name__ == "__main__":
    main()
