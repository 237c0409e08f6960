"""One model on several devices: the tokens of one, step times, replicas, state on every device.

    python benchmarks/several_gpu.py --tp 1,2,4,8 --replicas 8 --out several.json

For each number of devices an engine of one bucket decodes the same requests, greedily and drawn;
tokens, forwards and finish reasons are compared with those of the first number. `bare_ms` is a
decode step in a device loop, `step_ms` one in `LLM.generate`; what lies between is the host's.
`reductions` are the all-reduces of the compiled decode program. After every text the digests of
all state that each device must hold alike are compared. `--replicas N` decodes in N processes of
one device each at once. The load goes on until `--minutes` are over; what has not begun by then is
left out, and the file is written after every part. A run that hangs is ended by its caller's limit:
the file then says in which part. On a CPU:

    XLA_FLAGS=--xla_force_host_platform_device_count=4 JAX_PLATFORMS=cpu \
        python benchmarks/several_gpu.py --model builtin:tiny-sdar --tp 1,2 --tokens 32 --minutes 1
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dllm_jax as dj
from dllm_jax.bench import measure
from dllm_jax.bench.numbers import environment

REDUCTION = re.compile(r" all-reduce(?:-start)?\(")
PAGE = 64


def requests(model, count, context, tokens, drawn):
    """Prompts of random ids, the same for every engine."""
    draw = np.random.default_rng(0)
    most = min(model.config.vocab_size, 4000)
    prompts = [
        {"prompt_token_ids": draw.integers(5, most, size=context).tolist()} for _ in range(count)
    ]
    how: dict[str, Any] = (
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9} if drawn else {"temperature": 0.0}
    )
    params = [
        dj.SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i, **how) for i in range(count)
    ]
    return prompts, params


def digests(state):
    """A digest of each device's copy of all state but the pools."""
    found = {}
    for leaf in jax.tree.leaves(state.replace(pools=None)):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        for shard in leaf.addressable_shards:
            digest = found.setdefault(shard.device.id, hashlib.sha256())
            digest.update(np.asarray(shard.data).tobytes())
    return {one.hexdigest() for one in found.values()}


def engine(args, parts):
    """An engine of one decode and one prefill program, and the seconds that it took to start."""
    began = time.perf_counter()
    columns = -(-(args.context + args.tokens + 128) // PAGE)
    config = dj.EngineConfig(
        max_num_seqs=args.slots,
        page_size=PAGE,
        num_pages=args.slots * (columns + 1),
        max_model_len=columns * PAGE,
        slot_buckets=(args.slots,),
        page_buckets=(columns,),
        prefill_buckets=(min(512, args.context),),
    )
    llm = dj.LLM(
        args.model,
        config=config,
        tensor_parallel_size=parts,
        progress=False,
        calibrate=False,
        warm_up="all",
    )
    return llm, time.perf_counter() - began


def measured(args, parts, truth):
    """One number of devices; `truth` are the texts of the first one, None for that one."""
    llm, start_s = engine(args, parts)
    texts, walls, alike = [], [], True
    for drawn in (False, True):
        given = requests(llm.model, args.slots, args.context, args.tokens, drawn)
        outputs = []
        for _ in range(args.repeats):
            steps, began = llm.engine.stats().num_steps, time.perf_counter()
            outputs = llm.generate(*given, use_tqdm=False)
            wall_s = time.perf_counter() - began
            walls.append((drawn, 1e3 * wall_s / (llm.engine.stats().num_steps - steps)))
            alike &= len(digests(llm.engine.runner.state)) == 1
        texts += [
            (output.outputs[0].token_ids, output.outputs[0].finish_reason, output.metrics.nfe)
            for output in outputs
        ]
    layout = llm.engine.layout
    bucket = layout.slot_buckets[-1], layout.page_buckets[-1]
    program = measure.decode_program(llm.engine, *bucket)
    row = {
        "devices": parts,
        "start_s": start_s,
        "bare_ms": measure.decode_step_ms(llm.engine, *bucket, args.context, 8, args.repeats),
        "step_ms": min(ms for drawn, ms in walls if not drawn),
        "drawn_step_ms": min(ms for drawn, ms in walls if drawn),
        "reductions": len(REDUCTION.findall(program)),
        "late_compiles": llm.engine.stats().num_late_compiles,
        "same_state_on_all_devices": bool(alike),
        "weights_bytes": llm.memory.weights_bytes,
        "page_bytes": llm.memory.page_bytes,
        "texts": len(texts),
        "same_texts": None
        if truth is None
        else sum(one == other for one, other in zip(texts, truth, strict=True)),
    }
    llm.close()
    return row, texts


def replica(args):
    """The tokens a second of a process that sees one device; it waits for the others."""
    llm, _ = engine(args, 1)
    given = requests(llm.model, args.slots, args.context, args.tokens, False)
    llm.generate(*given, use_tqdm=False)
    print("ready", flush=True)
    sys.stdin.readline()
    began, tokens = time.perf_counter(), 0
    for _ in range(args.repeats):
        outputs = llm.generate(*given, use_tqdm=False)
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
    print(json.dumps(tokens / (time.perf_counter() - began)), flush=True)


def replicas(count):
    """Tokens a second of so many processes of one device each, together."""
    command = [sys.executable, __file__, "--replica", *sys.argv[1:]]
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
    try:
        for one in running:
            while "ready" not in (line := one.stdout.readline()):
                if not line:
                    raise RuntimeError("a replica ended before it was ready")
        for one in running:
            one.stdin.write("\n")
            one.stdin.flush()
        return {"replicas": count, "tok_s": sum(float(one.stdout.readline()) for one in running)}
    finally:
        for one in running:
            one.kill()


def soak(args, parts, until):
    """Load until a moment: texts, and whether all devices held the same after each."""
    llm, _ = engine(args, parts)
    given = requests(llm.model, 2 * args.slots, args.context, args.tokens, True)
    texts, alike, wanted, changed = 0, True, None, 0
    while time.perf_counter() < until:
        found = [o.outputs[0].token_ids for o in llm.generate(*given, use_tqdm=False)]
        wanted = wanted or found
        changed += found != wanted
        texts += len(found)
        alike &= len(digests(llm.engine.runner.state)) == 1
    llm.close()
    return {"devices": parts, "texts": texts, "changed": changed, "same_state": bool(alike)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="random:JetLM/SDAR-8B-Chat")
    parser.add_argument("--tp", default="1,2,4,8", help="numbers of devices, the truth first")
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of a text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=0, help="processes of one GPU each")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.replica:
        replica(args)
        return
    until = time.perf_counter() + 60 * args.minutes
    facts = {"command": sys.argv, "setting": environment(), "rows": [], "part": ""}

    def keep(part):
        facts["part"] = part
        if args.out is not None:
            args.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        print(part, json.dumps(facts["rows"][-1]) if facts["rows"] else "", flush=True)

    truth, last = None, 1
    numbers = [int(number) for number in args.tp.split(",")]
    for parts in numbers:
        if parts > jax.device_count() or time.perf_counter() > until:
            continue
        keep(f"tp {parts}")
        row, texts = measured(args, parts, truth)
        truth, last = truth or texts, parts
        facts["rows"].append(row)
    if args.replicas and time.perf_counter() < until:
        keep("replicas")
        facts["replicas"] = replicas(args.replicas)
    keep("soak")
    facts["soak"] = soak(args, last, until)
    keep("done")
    print(json.dumps({name: facts.get(name) for name in ("replicas", "soak")}))


if __name__ == "__main__":
    main()
