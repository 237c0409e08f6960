"""One model on several devices: the tokens of one, step times, replicas, state on every device.

    python benchmarks/several_gpu.py --out several.json --devices 1,2 --within 420

Parts, by what they are worth; each is a process of its own with a limit, as in `run_gpu.py`, and
the file is written whenever one of them has a row, so that a hang costs its own part alone:

`step`: SDAR-8B, a decode step in a device loop (`bare_ms`) and in `LLM.generate` (`step_ms`; what
lies between is the host's); on several devices also with XLA's one-shot reductions, without command
buffers, and with reductions recorded in them (`FORMS`); after more than 1,000 steps, whether all
devices hold the same state.
`tokens`: 64 requests, greedily and drawn, on one device and on several. In float32 they must be the
same. In bfloat16 a sum's order decides near-ties: where two texts part, `gaps` are the differences
of the logits between which each chose, by logits computed without a cache.
`experts`: the step of SDAR-30B-A3B. `replicas`: processes of one device each, alone and together.
`async_off`: the step with XLA's own dispatch.
`soak`: mixed requests until `--within` is over.

On two CPU devices, everything small:

    XLA_FLAGS=--xla_force_host_platform_device_count=2 JAX_PLATFORMS=cpu \
        python benchmarks/several_gpu.py --smoke --devices 1,2 --out several.json --within 420

NVLink multicast stays off (`NCCL_NVLS_ENABLE=0`).
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import gc
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import run_gpu
from run_gpu import Section

import dllm_jax as dj
from dllm_jax.bench import measure
from dllm_jax.bench.numbers import environment
from dllm_jax.bench.step import Shape, step_strategy
from dllm_jax.loading.jax_settings import enable_async_dispatch
from dllm_jax.models import reference
from dllm_jax.models.published import PUBLISHED
from dllm_jax.runner import programs
from dllm_jax.strategies import MultiBD

PAGE = 64
SMALL, LARGE, EXPERTS = (f"random:JetLM/SDAR-{name}-Chat" for name in ("1.7B", "8B", "30B-A3B"))
# The published mixture of experts with fewer layers, so that float32 fits and is quick.
FEWER = "made/SDAR-30B-A3B of 4 layers"
NO_BUFFERS = {"xla_gpu_enable_command_buffer": "", "xla_gpu_graph_min_graph_size": 10**6}
ONE_SHOT = {"xla_gpu_unsupported_use_all_reduce_one_shot_kernel": True}
# XLA's own set, and reductions.
RECORDED = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,COLLECTIVES"
}
# XLA's options for the decode program; the first is what the engine runs.
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "one_shot": ONE_SHOT,
    "no_command_buffers": NO_BUFFERS,
    "recorded": RECORDED,
    "recorded_one_shot": RECORDED | ONE_SHOT,
}


class Rows:
    """What a part has found so far, in its file at every moment."""

    def __init__(self, args):
        self.out = args.out
        self.facts = {"command": sys.argv, "setting": environment(), "rows": []}

    def add(self, **row):
        self.facts["rows"].append(row)
        half = self.out.with_suffix(".half")
        half.write_text(json.dumps(self.facts, indent=1) + "\n", encoding="utf-8")
        half.replace(self.out)
        print(json.dumps(row), flush=True)

    def guard(self, what, function, *args):
        """Run a piece of a part; what it raises is a row, and the next piece runs."""
        try:
            function(*args)
        except Exception as error:
            self.add(failed=what, error=f"{type(error).__name__}: {error}"[:2000])


def load(name, count, dtype="auto"):
    """A model on so many devices."""
    if name == FEWER:
        PUBLISHED[FEWER] = PUBLISHED["JetLM/SDAR-30B-A3B-Chat"] | {"num_hidden_layers": 4}
        name = f"random:{FEWER}"
    devices = np.array(jax.devices()[:count])
    mesh = None if count == 1 else dj.Split(jax.sharding.Mesh(devices, ("tp",)))
    return dj.load(name, dtype, mesh=mesh)


def start(model, strategy, slots, context, tokens):
    """An engine of one decode and one prefill program."""
    window = strategy.block_size * strategy.buffer_size
    columns = -(-(context + tokens + window + strategy.block_size) // PAGE)
    config = dj.EngineConfig(
        max_num_seqs=slots,
        page_size=PAGE,
        num_pages=slots * (columns + 1),
        max_model_len=columns * PAGE - strategy.block_size,
        slot_buckets=(slots,),
        page_buckets=(columns,),
        prefill_buckets=(min(512, context),),
    )
    return dj.LLM(model, strategy, config=config, progress=False, calibrate=False)


def requests(model, count, context, tokens, drawn, steps=None):
    """Prompts of random ids that may be read, the same for every engine."""
    draw = np.random.default_rng(0)
    most = min(model.defaults.vocab_limit, 4000)
    mask = model.config.mask_token_id
    rows = draw.integers(5, most, size=(count, context))
    prompts = [[int(token) if token != mask else 4 for token in row] for row in rows]
    how: dict[str, Any] = {"temperature": 0.0}
    if drawn:
        how = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
    params = [
        dj.SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i, max_nfe=steps, **how)
        for i in range(count)
    ]
    return prompts, params


def generated(llm, prompts, params, **how):
    outputs = llm.generate(prompts, params, use_tqdm=False, **how)
    for output in outputs:
        if output.error:
            raise RuntimeError(output.error)
    return outputs


def digests(llm):
    """A digest of each device's copy of all state but the pools, once nothing runs."""
    runner = llm.engine.runner
    return runner._submit(lambda: _digests(runner.state)).result()


def _digests(state):
    found = {}
    for leaf in jax.tree.leaves(state.replace(pools=None)):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        for shard in leaf.addressable_shards:
            digest = found.setdefault(shard.device.id, hashlib.sha256())
            digest.update(np.asarray(shard.data).tobytes())
    return {one.hexdigest() for one in found.values()}


# --- steps ---------------------------------------------------------------------------------------


def step(args, rows):
    """A step of one text with a window of four blocks, by number of devices and form."""
    steps, tokens = args.steps, 2 * args.steps + 8 * args.block
    for count in args.devices:
        if args.only_several and count == 1:
            continue
        rows.guard(f"{count} devices", _step, args, rows, count, steps, tokens)
        gc.collect()


def _step(args, rows, count, steps, tokens):
    began = time.perf_counter()
    model = load(args.model, count)
    loaded_s, began = time.perf_counter() - began, time.perf_counter()
    strategy = step_strategy(model, Shape(1, 4, args.block))
    llm = start(model, strategy, 1, args.context, tokens)
    start_s = time.perf_counter() - began
    bucket = llm.engine.layout.slot_buckets[-1], llm.engine.layout.page_buckets[-1]
    given = requests(model, 1, args.context, tokens, False, steps)
    usual = programs.decode
    names = args.forms.split(",") if count > 1 else ["default"]
    forms = {name: FORMS[name] for name in names}
    try:
        for name, options in forms.items():
            # Such options are for GPUs alone.
            options = options if jax.default_backend() == "gpu" else {}
            programs.decode = jax.jit(
                programs._decode, donate_argnames=("state",), compiler_options=options or None
            )
            compiled = llm.engine.runner.compiled  # of the form before
            for key in [key for key in compiled if key[0] == "decode"]:
                del compiled[key]
            rows.guard(
                f"{count} devices, {name}",
                _form,
                *(args, rows, llm, given, bucket),
                {"devices": count, "form": name, "loaded_s": loaded_s, "start_s": start_s},
            )
    finally:
        programs.decode = usual
        llm.close()


def _form(args, rows, llm, given, bucket, row):
    text = 2 * (32 + measure.FEW_STEPS) + 8 * args.block
    samples = measure.decode_step_samples(
        llm.engine, *bucket, args.context, min(32, args.steps), args.repeats, text
    )
    program = measure.decode_program(llm.engine, *bucket)
    first = llm.engine.stats().num_steps
    generated(llm, *given)  # the prompt is in the cache from now on
    walls, alike = [], True
    for _ in range(args.repeats):
        before, began = llm.engine.stats().num_steps, time.perf_counter()
        generated(llm, *given)
        ran = llm.engine.stats().num_steps - before
        walls.append(1e3 * (time.perf_counter() - began) / ran)
        alike &= len(digests(llm)) == 1
    bare_ms, step_ms = sorted(samples)[len(samples) // 2], sorted(walls)[len(walls) // 2]
    rows.add(
        **row,
        model=args.model,
        bare_ms=bare_ms,
        bare_samples=samples,
        step_ms=step_ms,
        host_overhead=1 - bare_ms / step_ms,
        reductions=measure.num_reductions(program),
        steps=llm.engine.stats().num_steps - first,
        same_state_on_all_devices=bool(alike),
        weights_bytes=llm.memory.weights_bytes,
        page_bytes=llm.memory.page_bytes,
        memory=[(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.devices()],
    )
    if (
        row["devices"] > 1
        and jax.default_backend() == "gpu"
        and row["form"] != "no_command_buffers"
    ):
        trace, ran = measure.decode_trace(llm.engine, *bucket, args.context, 8, text)
        kernels = collections.defaultdict(list)
        for event in trace.events:
            # Reductions have numbers in their names.
            kernels[re.sub(r"\d+", "#", event.name[:80])].append(event.duration_ns / 1e3)
        most = sorted(kernels.items(), key=lambda one: -sum(one[1]))[:12]
        rows.add(
            devices=row["devices"],
            form=row["form"],
            kernels_us={
                name: [len(us) / ran / row["devices"], sum(us) / len(us)] for name, us in most
            },
        )


# --- tokens --------------------------------------------------------------------------------------


KINDS = {
    "dense_float32": (SMALL, "float32"),
    "experts_float32": (FEWER, "float32"),
    "dense_bfloat16": (SMALL, "bfloat16"),
    "experts_bfloat16": (FEWER, "bfloat16"),
}


def tokens(args, rows):
    """The requests of one device, on several."""
    dense, experts = (args.model, args.model) if args.smoke else (SMALL, FEWER)
    for dtype in ("float32", "bfloat16"):
        jax.config.update("jax_default_matmul_precision", "highest" if dtype == "float32" else None)
        for name in dict.fromkeys((dense, experts)):
            rows.guard(f"{name} in {dtype}", _tokens, args, rows, name, dtype)
            gc.collect()


def _tokens(args, rows, name, dtype):
    strategy = MultiBD(block_size=args.block // 2, buffer_size=2)
    context = args.context // 8
    models = [load(name, count, dtype) for count in args.devices]
    _ = models[0].tokenizer  # transformers is not imported by two threads at once
    with concurrent.futures.ThreadPoolExecutor() as pool:
        sizes = itertools.repeat((strategy, args.slots, context, args.tokens))
        one, *others = pool.map(lambda model, sizes: start(model, *sizes), models, sizes)
    kinds = {
        kind: requests(models[0], args.slots, context, args.tokens, kind == "drawn")
        for kind in ("greedy", "drawn")
    }
    wanted = {kind: generated(one, *work) for kind, work in kinds.items()}
    for count, several in zip(args.devices[1:], others, strict=True):
        row = {"model": name, "dtype": dtype, "devices": count, "requests": args.slots}
        for kind, work in kinds.items():
            pairs = zip(generated(several, *work), wanted[kind], strict=True)
            parted = [
                i for i, (found, truth) in enumerate(pairs) if _text_of(found) != _text_of(truth)
            ]
            row[f"same_{kind}"] = args.slots - len(parted)
            if kind == "greedy" and parted:
                row["gaps"] = _gaps(models[0], strategy.block_size, one, several, work, parted)
        row["same_state"] = len(digests(several)) == 1
        row["distinct_tokens"] = len({t for o in wanted["greedy"] for t in _text_of(o)[0]})
        rows.add(**row)
        several.close()
    one.close()


def _text_of(output):
    return (
        tuple(output.outputs[0].token_ids),
        output.outputs[0].finish_reason,
        output.metrics.nfe,
    )


def _gaps(model, size, one, several, work, parted):
    """For each text that parted: by how much the logits differ between which each chose."""
    some = [[every[i] for i in parted] for every in work]
    pairs = zip(*(generated(llm, *some, trajectory=True) for llm in (one, several)), strict=True)
    length = -(-max(len(p) + q.max_tokens + 4 * size for p, q in zip(*some, strict=True)) // size)
    visible = reference.visibility("block_causal", length * size, size)[None]
    mask, limit = model.config.mask_token_id, model.defaults.vocab_limit

    @jax.jit
    def read(params, ids):
        logits = reference.dense_logits(params, model.config, ids, visible, model.arch)[0]
        logits = logits.astype(jnp.float32).at[:, mask].set(-jnp.inf)
        return jnp.where(jnp.arange(logits.shape[-1]) < limit, logits, -jnp.inf)

    found = []
    for prompt, (a, b) in zip(some[0], pairs, strict=True):
        before, now = _parting(_canvases(a), _canvases(b))
        cells = [mask if cell is None else cell for cell in before]
        ids = np.full((1, length * size), mask, np.int32)
        ids[0, : len(prompt) + len(cells)] = [*prompt, *cells]
        logits = np.asarray(read(model.params, jnp.asarray(ids)))[len(prompt) :]
        found.append(_gap(logits, *now))
    return sorted(found)


def _canvases(output):
    """Settled tokens and the window behind them, after each forward."""
    settled, found = [], [[]]
    for event in output.metrics.trajectory:
        settled += event.token_ids
        found.append([*settled, *event.window])
    return found


def _parting(one, other):
    """The last canvas that two texts share, and the two that follow."""
    shared: list[Any] = []
    for a, b in itertools.zip_longest(one, other, fillvalue=[]):
        pairs = [*itertools.zip_longest(a, b)]
        if any(x != y for x, y in pairs):
            return shared, (a, b)
        shared = a
    raise ValueError("the texts are the same")


def _gap(logits, a, b):
    """The difference of what two choices of one canvas are worth, by its logits.

    Two tokens of a cell are worth their logits, two cells the probability of their best token.
    """
    worst, mine, others = 0.0, [], []
    for cell, (x, y) in enumerate(itertools.zip_longest(a, b)):
        if x == y:
            continue
        row = logits[cell]
        if x is not None and y is not None:
            worst = max(worst, abs(float(row[x] - row[y])))
        else:
            peak = row.max()
            (mine if y is None else others).append(-float(np.log(np.exp(row - peak).sum())))
    worst = max([worst, *(abs(x - y) for x in mine for y in others)])
    return worst if bool(mine) == bool(others) else float("inf")


# --- replicas ------------------------------------------------------------------------------------


def replica(args):
    """A process that sees one device: it decodes whenever it is asked to, and says how fast."""
    model = load(args.model, 1)
    strategy = step_strategy(model, Shape(args.slots, 4, args.block))
    llm = start(model, strategy, args.slots, args.context, 2 * args.steps + 8 * args.block)
    text = 2 * args.steps + 8 * args.block
    given = requests(model, args.slots, args.context, text, False, args.steps)
    generated(llm, *given)
    print("ready", flush=True)
    for _ in sys.stdin:
        began, count = time.perf_counter(), 0
        for _ in range(args.repeats):
            count += sum(len(o.outputs[0].token_ids) for o in generated(llm, *given))
        print(json.dumps(count / (time.perf_counter() - began)), flush=True)


def replicas(args, rows):
    """Tokens a second of processes of one device each: one at a time, and all at once."""
    count = args.devices[-1]
    command = [sys.executable, __file__, *sys.argv[1:], "--part", "replica"]
    running: list[Any] = [
        subprocess.Popen(
            command,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": str(i)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]

    def ask(some):
        for one in some:
            one.stdin.write("\n")
            one.stdin.flush()
        return [float(one.stdout.readline()) for one in some]

    try:
        for one in running:
            while "ready" not in (line := one.stdout.readline()):
                if not line:
                    raise RuntimeError("a replica ended before it was ready")
        alone = [ask([one])[0] for one in running]
        together = ask(running)
        ratio = sum(together) / (sum(alone) / count)
        rows.add(replicas=count, alone_tok_s=alone, together_tok_s=together, ratio=ratio)
    finally:
        for one in running:
            one.kill()


def soak(args, rows):
    """Mixed requests until a moment: the same texts, and the same state on all devices."""
    model = load(args.model, args.devices[-1])
    strategy = MultiBD(block_size=args.block, buffer_size=4)
    llm = start(model, strategy, args.slots, args.context, args.tokens)
    draw = np.random.default_rng(1)
    prompts, params = requests(model, 3 * args.slots, args.context, args.tokens, True)
    prompts = [prompt[: draw.integers(1, len(prompt))] for prompt in prompts]
    params = [
        dataclasses.replace(
            one,
            max_tokens=int(draw.integers(1, args.tokens)),
            temperature=(0.0, 0.8, 1.0)[i % 3],
            top_k=(50, 0)[i % 2] if i % 3 else 0,
            top_p=(0.9, 1.0)[i % 2] if i % 3 else 1.0,
        )
        for i, one in enumerate(params)
    ]
    began, wanted, texts, changed, alike = time.perf_counter(), None, 0, 0, True
    while time.perf_counter() - began < args.seconds:
        found = [_text_of(output)[0] for output in generated(llm, prompts, params)]
        wanted = wanted or found
        changed += sum(a != b for a, b in zip(found, wanted, strict=True))
        texts += len(found)
        alike &= len(digests(llm)) == 1
        seconds = time.perf_counter() - began
        rows.facts["rows"] = []
        rows.add(
            devices=args.devices[-1],
            seconds=seconds,
            texts=texts,
            changed=changed,
            same_state=bool(alike),
            steps=llm.engine.stats().num_steps,
        )
    llm.close()


PARTS = {f.__name__: f for f in (step, tokens, replicas, soak)}


def sections(args):
    """The parts as programs with limits, by what they are worth."""
    base = [sys.executable, __file__, "--devices", args.devices_text, "--out", "{out}"]
    base += ["--forms", args.forms, "--kinds", args.kinds]
    small = "--model builtin:tiny-sdar --context 64 --block 8 --steps 16 --repeats 2 --tokens 16"
    small += " --slots 8 --seconds 10"

    slower = 4 if args.smoke else 1

    def part(words, limit_s, env=()):
        before = ["env", *env] if env else []
        command = (*before, *base, *words.split())
        return Section(command, (*command, *small.split(), "--smoke"), limit_s * slower)

    off = ("XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT=0",)
    whole = ("XLA_PYTHON_CLIENT_MEM_FRACTION=0.95",)
    one = "--forms default --only-several"
    return {
        "step": part(f"--part step --model {LARGE}", 180),
        "tokens": part("--part tokens", 200),
        "replicas": part(f"--part replicas --model {SMALL} --slots 8", 80),
        "experts": part(f"--part step --model {EXPERTS} {one} --repeats 3", 90, whole),
        "async_off": part(f"--part step --model {LARGE} {one} --repeats 3", 80, off),
        "soak": part(f"--part soak --model {SMALL} --slots 16 --seconds 300", 330),
    }


def table(report):
    """What was found, briefly."""
    for name, section in report["sections"].items():
        print(f"{name}: {section['status']}")
        for row in (section.get("result") or {}).get("rows", []):
            measured = {
                key: round(value, 4) if isinstance(value, float) else value
                for key, value in row.items()
                if key not in ("bare_samples", "loaded_s", "weights_bytes", "page_bytes", "memory")
            }
            print(f"    {json.dumps(measured)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", default="1,2", help="numbers of devices, the truth first")
    parser.add_argument("--within", type=float, default=420.0, help="seconds for everything")
    parser.add_argument("--parts", help="comma-separated, in order")
    parser.add_argument("--smoke", action="store_true", help="everything small, on a CPU")
    parser.add_argument("--commit", help="where the checkout has no git")
    for name, value in (("part", None), ("model", LARGE)):
        parser.add_argument(f"--{name}", default=value, help=argparse.SUPPRESS)
    sizes = {"context": 512, "block": 32, "steps": 200, "repeats": 5, "tokens": 32, "slots": 64}
    for name, value in (sizes | {"seconds": 300}).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=argparse.SUPPRESS)
    parser.add_argument("--only-several", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--forms", default=",".join(FORMS), help="of a step on several devices")
    kinds = ",".join(KINDS)
    parser.add_argument("--kinds", default=kinds, help=f"whose tokens are compared, of {kinds}")
    args = parser.parse_args()
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    enable_async_dispatch()  # before anyone looks for devices
    args.devices_text = args.devices
    args.devices = [int(number) for number in args.devices.split(",")]
    if args.part == "replica":
        replica(args)
    elif args.part is not None:
        PARTS[args.part](args, Rows(args))
    else:
        chosen = ["--sections", args.parts] if args.parts else []
        chosen += ["--smoke"] if args.smoke else []
        chosen += ["--commit", args.commit] if args.commit else []
        words = ["--out", str(args.out), "--within", str(args.within), *chosen]
        status = run_gpu.main(words, sections(args))
        table(json.loads(args.out.read_text(encoding="utf-8")))
        return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
