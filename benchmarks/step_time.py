"""Time of one decode step of `dj.generate`'s device loop, on whatever device JAX finds.

A run with `max_nfe` = N costs prefill + N steps, so the difference of two runs is steps alone: the
loop of `generate` itself, with rotary embedding, cache writes, block mask, readout and sampling.
`max_nfe` is data, so both runs are one executable. Weights and prompts are random. No token reaches
the threshold, so each step accepts one by force: the work is fixed, and the written tokens are the
readout's own (they are returned and checked against it).

    python benchmarks/step_time.py --out benchmarks/results/step_time.json

Prints a table and writes JSON: per shape the median, minimum and maximum in milliseconds.
"""

import argparse
import dataclasses
import json
import platform
import re
import statistics
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.api import generate
from dllm_jax.models import reference
from dllm_jax.strategies import MultiBD

BARS_MS = {(1, 1): 2.6, (1, 4): 3.2, (8, 4): 9.0, (32, 4): 33.0}
BLOCK = 32


FEW, MANY = 8, 72  # steps of two runs, whose difference is steps alone


def loop_of(model, slots, blocks, context, implementation):
    """A function that runs so many steps at slots x blocks x 32, every block live."""
    rng = np.random.default_rng(slots * 10 + blocks)
    vocab = model.config.vocab_size * 9 // 10
    prompts = jnp.asarray(rng.integers(0, vocab, (slots, context)), jnp.int32)
    strategy = MultiBD(block_size=BLOCK, buffer_size=blocks, add_block_threshold=0.0)

    def run(steps):
        out = dj.generate(
            model,
            prompts,
            strategy,
            max_tokens=256,
            max_nfe=steps,
            ignore_eos=True,
            attention_implementation=implementation,
        )
        return jax.block_until_ready(out)

    return run


def time_shape(model, slots, blocks, context, implementation, repeats, least_tokens=5):
    """Milliseconds of one step.

    `least_tokens` different ones must come out; rows that look alike agree in some random models.
    """
    run = loop_of(model, slots, blocks, context, implementation)
    began = time.perf_counter()
    out = run(FEW)
    compile_s = time.perf_counter() - began
    assert int(out.nfe.max()) == FEW, out.nfe
    run(MANY)
    samples = []
    for _ in range(repeats):
        spent = []
        for steps in (FEW, MANY):
            began = time.perf_counter()
            out = run(steps)
            spent.append(time.perf_counter() - began)
        samples.append((spent[1] - spent[0]) / (MANY - FEW) * 1e3)
    tokens = np.unique(np.asarray(out.tokens))
    assert len(tokens) >= least_tokens, f"the tokens are not a readout's: {tokens}"
    return {
        "slots": slots,
        "blocks": blocks,
        "context": context,
        "implementation": implementation,
        "step_ms": statistics.median(samples),
        "min_ms": min(samples),
        "max_ms": max(samples),
        "bar_ms": BARS_MS.get((slots, blocks)),
        "compile_s": compile_s,
        "tokens": np.asarray(out.tokens[0, :8]).tolist(),
    }


def check_readout(model) -> bool:
    """The first token `generate` writes is the argmax of cache-free logits over the same window."""
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, model.config.vocab_size * 9 // 10, (1, 64))
    strategy = MultiBD(block_size=BLOCK, buffer_size=1, accept_threshold=2.0)
    one = generate.advance(
        model, generate.start(model, jnp.asarray(prompt, jnp.int32), strategy, max_tokens=32)
    )
    buffer = one.state.buffer
    (cell,) = np.flatnonzero(np.asarray(buffer.filled[0, 0]))
    ids = np.concatenate([prompt[0], np.full(BLOCK, model.config.mask_token_id)])[None]
    visible = reference.visibility("block_causal", ids.shape[1], BLOCK)[None]
    every = reference.dense_logits(
        model.params, model.config, jnp.asarray(ids, jnp.int32), visible, model.arch
    )
    logits = np.array(every[0, 64 + cell - int(model.config.shift)])
    logits[model.config.mask_token_id] = -np.inf
    chosen = int(buffer.tokens[0, 0, cell])
    return bool(logits[chosen] >= logits[: model.defaults.vocab_limit].max() - 0.1)


def read_program(model) -> dict[str, object]:
    """What the compiled loop at 1 x 1 says of itself: is the head there, is a pool ever copied."""
    strategy = MultiBD(block_size=BLOCK, buffer_size=1)
    session = generate.start(model, jnp.ones((1, 64), jnp.int32), strategy, max_tokens=64)
    program = generate._advance.lower(
        model, session.strategy, session.aux, session.state, jnp.int32(4), None
    ).compile()
    text, vocab = program.as_text(), model.config.vocab_size
    pages = session.state.pools["target"][0][0]
    shape = ",".join(map(str, pages.shape))
    pools = sum(leaf.nbytes for leaf in jax.tree.leaves(session.state.pools))
    return {
        "head_in_hlo": bool(re.search(rf"f32\[(?:{BLOCK},{vocab}|{vocab},{BLOCK})\]", text)),
        "pool_copies_in_hlo": len(
            re.findall(rf"= \w+\[{shape}\]\S* (?:copy|copy-start|select|transpose|convert)\(", text)
        ),
        "pools_aliased": program.memory_analysis().alias_size_in_bytes >= pools,
    }


def main():
    """Check, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:JetLM/SDAR-1.7B-Chat")
    parser.add_argument(
        "--shapes", default="1x1,1x4,8x4,32x4", help="slots x blocks, comma-separated"
    )
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument(
        "--implementations", default="auto", help="auto, xla, cudnn; comma-separated"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    model = dj.load(args.model)
    jax.block_until_ready(model.params)
    commit = (
        args.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    report = {
        "command": "benchmarks/step_time.py",
        "model": args.model,
        "config": dataclasses.asdict(model.config),
        "dtype": str(model.params["embed"].dtype),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "mode": "fixed",
        "block_size": BLOCK,
        "readout_matches_dense": check_readout(model),
        **read_program(model),
        "rows": [],
    }
    print({k: v for k, v in report.items() if k not in ("config", "rows")}, flush=True)
    for shape in args.shapes.split(","):
        slots, blocks = map(int, shape.split("x"))
        for implementation in args.implementations.split(","):
            chosen = None if implementation == "auto" else implementation
            row = time_shape(model, slots, blocks, args.context, chosen, args.repeats)
            report["rows"].append(row)
            print(
                f"{shape:>6} {implementation:>6} {row['step_ms']:8.3f} ms "
                f"[{row['min_ms']:.3f} {row['max_ms']:.3f}] bar {row['bar_ms']} "
                f"compile {row['compile_s']:.0f} s",
                flush=True,
            )
            if args.out:
                with open(args.out, "w") as file:
                    json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
