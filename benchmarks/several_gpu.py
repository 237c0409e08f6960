"""One model on several devices: the tokens of one, step times, replicas, state on every device.

    python benchmarks/several_gpu.py --out several.json --devices 1,2 --within 420

Parts, by what they are worth; each is a process of its own with a limit, as in `run_gpu.py`, and
the file is written whenever one of them has a row, so that a hang costs its own part alone:

`sums`: reductions of a layer's rows by the kernel, against XLA's, and what each takes.
`step`: SDAR-8B, a decode step in a device loop (`bare_ms`) and in `LLM.generate` (`step_ms`; what
lies between is the host's); on several devices also by other means of adding up (`FORMS`); after
more than 1,000 steps, whether all devices hold the same state.
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
from jax.sharding import PartitionSpec
from run_gpu import Section

import dllm_jax as dj
from dllm_jax.bench import measure
from dllm_jax.bench.numbers import environment
from dllm_jax.bench.step import Shape, step_strategy
from dllm_jax.cluster import peer_memory
from dllm_jax.kernels.layer import add_rms_norm, reduced_rms_norm
from dllm_jax.loading.jax_settings import enable_async_dispatch
from dllm_jax.models import reference
from dllm_jax.models.published import PUBLISHED
from dllm_jax.models.sharding import over_devices, total
from dllm_jax.strategies import MultiBD

PAGE = 64
SMALL, LARGE, EXPERTS = (f"random:JetLM/SDAR-{name}-Chat" for name in ("1.7B", "8B", "30B-A3B"))
# The published mixture of experts with fewer layers, so that float32 fits and is quick.
FEWER = "made/SDAR-30B-A3B of 4 layers"
NO_BUFFERS = {"xla_gpu_enable_command_buffer": "", "xla_gpu_graph_min_graph_size": 10**6}
ONE_SHOT = {"xla_gpu_unsupported_use_all_reduce_one_shot_kernel": True}
# What XLA records in command buffers by itself.
_USUAL = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
RECORDED = {"xla_gpu_enable_command_buffer": f"{_USUAL},COLLECTIVES"}
LOOP = {"xla_gpu_enable_command_buffer": f"{_USUAL},COLLECTIVES,CONDITIONAL,WHILE"}
# How a step's sums are added up: XLA's options for the decode program, and whether layers add up
# by the kernel. The first is what the engine runs.
FORMS: dict[str, tuple[dict[str, Any], bool]] = {
    "kernel": ({}, True),
    "xla": ({}, False),
    "xla_one_shot": (ONE_SHOT, False),
    "kernel_no_command_buffers": (NO_BUFFERS, True),
    "kernel_loop": (LOOP, True),
    "xla_recorded_one_shot": (RECORDED | ONE_SHOT, False),
    "xla_recorded": (RECORDED, False),
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
    return runner.submit(lambda: _digests(runner.state)).result()


def _digests(state):
    found = {}
    for leaf in jax.tree.leaves(state.replace(pools=None)):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        for shard in leaf.addressable_shards:
            digest = found.setdefault(shard.device.id, hashlib.sha256())
            digest.update(np.asarray(shard.data).tobytes())
    return {one.hexdigest() for one in found.values()}


# --- sums ----------------------------------------------------------------------------------------


def sums(args, rows):
    """Reductions by the kernel and by XLA on arrays whose sums are exact in any order."""
    for count in args.devices:
        if count > 1:
            rows.guard(f"sums on {count}", _sums, args, rows, count)


def _sums(args, rows, count):
    split = over_devices(count)
    shared = peer_memory.made(split)
    if shared is None:
        raise RuntimeError("the devices' kernels do not reach each other")
    whole, parts = PartitionSpec(), PartitionSpec(split.axis)
    draw = np.random.default_rng(count)

    def by_xla(peers, x, y, scale):
        del peers
        return add_rms_norm(x, total(y, x, split.axis), scale, 1e-6)

    def by_kernel(peers, x, y, scale):
        return reduced_rms_norm(x, y, scale, 1e-6, peers)

    def both(peers, x, y, scale):
        mine, y = total(y[0], x, split.axis, peers), y[0]
        pairs: Any = zip(
            (*by_kernel(peers, x, y, scale), mine),
            (*by_xla(peers, x, y, scale), total(y, x, split.axis)),
            strict=True,
        )
        gaps = [jnp.max(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))) for a, b in pairs]
        return jnp.stack(gaps)[None]

    specs = parts, whole, parts, whole
    check = jax.jit(lambda *given: split.run(both, given, specs, parts))
    for (M, D), X, kind in (
        ((128, 4096), 3, "bfloat16"),
        ((256, 2048), 1, "bfloat16"),
        ((128, 4096), 1, "float32"),
    ):
        worst = []
        for _ in range(4):
            x = jnp.asarray(draw.integers(-4, 5, (M, D)), kind)
            y = jnp.asarray(draw.integers(-4, 5, (count, X, M, D)), "float32" if X > 1 else kind)
            y = y[:, 0] if X == 1 else y
            scale = jnp.asarray(draw.integers(1, 3, D), kind)
            worst.append(np.asarray(check(shared.peers, x, y, scale)).max(axis=0))
        facts = {"devices": count, "rows": [M, D], "parts": X, "dtype": kind}
        # Of the new residual, its norm, and the sum alone; the largest of all devices.
        rows.add(**facts, worst=[float(each) for each in np.max(worst, axis=0)])

    x, scale = jnp.ones((128, 4096), jnp.bfloat16), jnp.ones(4096, jnp.bfloat16)
    for name, form in (("kernel", by_kernel), ("xla", by_xla)):

        def body(peers, x, scale, form=form):
            def step(_, x):
                for _ in range(36):
                    x = form(peers, x, x, scale)[1]
                return x

            return jax.lax.fori_loop(0, 20, step, x)

        given = shared.peers, x, scale
        chain = jax.jit(
            lambda *given, body=body: split.run(body, given, specs[:2] + specs[3:], whole)
        )
        jax.block_until_ready(chain(*given))
        times = []
        for _ in range(5):
            began = time.perf_counter()
            jax.block_until_ready(chain(*given))
            times.append((time.perf_counter() - began) / 720 * 1e6)
        rows.add(devices=count, form=name, us_a_launch=sorted(times)[2])


# --- steps ---------------------------------------------------------------------------------------


def step(args, rows):
    """A step of one text with a window of four blocks, by number of devices and form."""
    counts = [count for count in args.devices if count > 1 or not args.only_several]
    texts: list[Any] = []
    # Those that fit on a GPU together are started at once.
    for some in [counts[:1], counts[1:]] if args.model == EXPERTS else [counts]:
        if some:
            rows.guard(f"{some} devices", _steps, args, rows, some, texts)
        gc.collect()


def _steps(args, rows, counts, texts):
    steps, tokens = args.steps, 2 * args.steps + 8 * args.block
    began = time.perf_counter()
    models = [load(args.model, count) for count in counts]
    loaded_s, began = time.perf_counter() - began, time.perf_counter()
    _ = models[0].tokenizer  # transformers is not imported by two threads at once
    strategy = step_strategy(models[0], Shape(1, 4, args.block))
    sizes = itertools.repeat((strategy, 1, args.context, tokens))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        llms = list(pool.map(lambda model, sizes: start(model, *sizes), models, sizes))
    rows.add(loaded_s=loaded_s, start_s=time.perf_counter() - began)
    work = [
        (count, llm, name, Form(llm, *FORMS[name]))
        for name in args.forms.split(",")
        for count, llm in zip(counts, llms, strict=True)
        if count > 1 or name == args.forms.split(",")[0]
    ]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        began = time.perf_counter()
        list(pool.map(lambda one: one[-1].compile(), work))
        rows.add(compiled_s=time.perf_counter() - began)
    for count, llm, name, form in work:
        given = requests(models[0], 1, args.context, tokens, False, steps)
        with form:
            rows.guard(
                f"{count} devices, {name}",
                _form,
                *(args, rows, llm, given, texts, form.compiled.as_text() or ""),
                {"devices": count, "form": name},
            )
    for llm in llms:
        llm.close()


class Form:
    """A way to add up, for an engine while this is entered."""

    def __init__(self, llm, options, by_kernel):
        self.runner = runner = llm.engine.runner
        self.bucket = llm.engine.layout.slot_buckets[-1], llm.engine.layout.page_buckets[-1]
        # Such options are for GPUs alone.
        self.options = options if jax.default_backend() == "gpu" else {}
        model = runner.programs.model
        self.programs = runner.programs.replace(
            model=model.replace(exchange=model.exchange if by_kernel else None)
        )

    def compile(self):
        slots, columns = self.bucket
        table = np.full((slots, columns), -1, np.int32)
        rows = np.arange(slots, dtype=np.int32)
        (call,) = self.runner.calls(lambda runner: runner.decode(rows, slots, table, 2, False))
        device, self.key = self.runner.device, call.name
        device.take(self.programs)
        self.compiled = device.lower(call).compile(self.options)
        device.take(self.runner.programs)

    def __enter__(self):
        device = self.runner.device
        self.usual, device.compiled[self.key] = device.compiled[self.key], self.compiled
        device.take(self.programs)

    def __exit__(self, *_):
        self.runner.device.compiled[self.key] = self.usual
        self.runner.device.take(self.runner.programs)


def _form(args, rows, llm, given, texts, program, row):
    text = 2 * (32 + measure.FEW_STEPS) + 8 * args.block
    bucket = llm.engine.layout.slot_buckets[-1], llm.engine.layout.page_buckets[-1]
    first = llm.engine.stats().num_steps
    found = _text_of(generated(llm, *given)[0])[0]  # the prompt is in the cache from now on
    samples = measure.decode_step_samples(
        llm.engine, *bucket, args.context, min(32, args.steps), args.repeats, text
    )
    bare_ms = sorted(samples)[len(samples) // 2]
    texts.append(found)
    wanted = texts[0]
    same = sum(a == b for a, b in zip(found, wanted, strict=False)) / len(wanted)
    rows.add(**row, bare_ms=bare_ms, same_tokens=same)
    half = [dataclasses.replace(one, max_nfe=args.steps // 2) for one in given[1]]
    walls, halves, alike, steps = [], [], True, 0
    for _ in range(args.repeats):
        for times, params in ((walls, given[1]), (halves, half)):
            before, began = llm.engine.stats().num_steps, time.perf_counter()
            generated(llm, given[0], params)
            times.append(1e3 * (time.perf_counter() - began))
            ran = llm.engine.stats().num_steps - before
            if times is walls:
                steps = ran
        alike &= len(digests(llm)) == 1
    wall_ms, half_ms = (sorted(times)[len(times) // 2] for times in (walls, halves))
    step_ms = wall_ms / steps
    rows.facts["rows"].pop()
    rows.add(
        **row,
        model=args.model,
        bare_ms=bare_ms,
        bare_samples=samples,
        step_ms=step_ms,
        host_overhead=1 - bare_ms / step_ms,
        # What a request takes beside its steps, and a step in a request.
        request_ms=2 * half_ms - wall_ms,
        slope_ms=(wall_ms - half_ms) / (steps - steps // 2),
        reductions=measure.num_reductions(program),
        same_tokens=same,
        steps=llm.engine.stats().num_steps - first,
        same_state_on_all_devices=bool(alike),
        weights_bytes=llm.memory.weights_bytes,
        page_bytes=llm.memory.page_bytes,
        memory=[(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.devices()],
    )
    if row["devices"] > 1 and jax.default_backend() == "gpu" and row["form"] == args.profile:
        trace, ran = measure.decode_trace(llm.engine, *bucket, args.context, 8, text)
        kernels = collections.defaultdict(list)
        for event in trace.events:
            # Reductions have numbers in their names.
            kernels[re.sub(r"\d+", "#", event.name[:80])].append(event.duration_ns / 1e3)
        most = sorted(kernels.items(), key=lambda one: -sum(one[1]))[:14]
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
    for kind in args.kinds.split(","):
        name, dtype = KINDS[kind]
        name = args.model if args.smoke else name
        jax.config.update("jax_default_matmul_precision", "highest" if dtype == "float32" else None)
        rows.guard(kind, _tokens, args, rows, name, dtype)
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
        kind: requests(models[0], args.texts, context, args.tokens, kind == "drawn")
        for kind in ("greedy", "drawn")
    }
    wanted = {kind: generated(one, *work) for kind, work in kinds.items()}
    for count, several in zip(args.devices[1:], others, strict=True):
        row = {"model": name, "dtype": dtype, "devices": count, "requests": args.texts}
        for kind, work in kinds.items():
            pairs = zip(generated(several, *work), wanted[kind], strict=True)
            parted = [
                i for i, (found, truth) in enumerate(pairs) if _text_of(found) != _text_of(truth)
            ]
            row[f"same_{kind}"] = args.texts - len(parted)
            if kind == "greedy" and parted:
                row["gaps"] = _gaps(models[0], strategy.block_size, one, several, work, parted[:8])
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


PARTS = {f.__name__: f for f in (sums, step, tokens, replicas, soak)}


def sections(args):
    """The parts as programs with limits, by what they are worth."""
    base = [sys.executable, __file__, "--devices", args.devices_text, "--out", "{out}"]
    base += ["--adds", args.adds]
    small = "--model builtin:tiny-sdar --context 64 --block 8 --steps 16 --repeats 2 --tokens 16"
    small += " --slots 4 --texts 8 --seconds 10"

    slower = 4 if args.smoke else 1

    def part(words, limit_s, env=()):
        before = ["env", *env] if env else []
        command = (*before, *base, *words.split())
        return Section(command, (*command, *small.split(), "--smoke"), limit_s * slower)

    off = ("XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT=0",)
    whole = ("XLA_PYTHON_CLIENT_MEM_FRACTION=0.95",)
    others = ",".join(name for name in FORMS if name not in ("kernel", "xla"))
    most = f"--devices {args.devices[-1]} --only-several"
    found = {
        "sums": part("--part sums", 60),
        "step": part(
            f"--part step --model {LARGE} --forms kernel,xla --profile kernel --repeats 3", 150
        ),
        "forms": part(f"--part step --model {LARGE} --forms {others} {most} --repeats 3", 110),
        "replicas": part(f"--part replicas --model {SMALL} --slots 8", 80),
        "experts": part(f"--part step --model {EXPERTS} --forms kernel --repeats 3", 90, whole),
        "async_off": part(
            f"--part step --model {LARGE} --forms kernel {most} --repeats 3", 80, off
        ),
        "soak": part(f"--part soak --model {SMALL} --seconds 300", 330),
    }
    ends = f"--devices {args.devices[0]},{args.devices[-1]}"
    for dtype in ("bfloat16", "float32"):
        kinds = f"experts_{dtype},dense_{dtype}"
        found[f"tokens_{dtype}"] = part(f"--part tokens --kinds {kinds} {ends}", 120)
    return found


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
    sizes = {"context": 512, "block": 32, "steps": 200, "repeats": 5, "tokens": 32, "slots": 4}
    for name, value in (sizes | {"seconds": 300, "texts": 64}).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=argparse.SUPPRESS)
    parser.add_argument("--only-several", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--profile", help=argparse.SUPPRESS)
    parser.add_argument("--forms", default="kernel,xla", help=argparse.SUPPRESS)
    parser.add_argument("--kinds", default=",".join(KINDS), help=argparse.SUPPRESS)
    parser.add_argument(
        "--adds",
        choices=["usual", "kernel", "xla"],
        default="usual",
        help="how the engine adds up; kernel: on any number of devices",
    )
    args = parser.parse_args()
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    enable_async_dispatch()  # before anyone looks for devices
    if args.adds == "xla":
        peer_memory.made = lambda split: None
    if args.adds == "kernel":
        peer_memory.MOST_DEVICES = 8
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
