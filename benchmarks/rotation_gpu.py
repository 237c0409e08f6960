"""Norm and rotation of heads: every form checked against XLA's, then timed, on one GPU.

    python benchmarks/rotation_gpu.py --out benchmarks/results/rotation_h200.json

A loop on the device calls it in a chain: microseconds of one call less those of the loop with a
copy in its place, the median of the runs.
"""

import argparse
import functools
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from dllm_jax.bench.numbers import environment
from dllm_jax.kernels.layer import mosaic_rotate, reference

# KV heads, query heads of one, size of a head, rotated pairs.
MODELS = {"SDAR-1.7B": (8, 2, 128, 64), "SDAR-30B": (4, 8, 128, 64), "LLaDA2": (4, 4, 128, 32)}
FORMS = {"xla": reference, "mosaic": mosaic_rotate}
EPS, SPACING = 1e-6, 2**-8  # of bfloat16, of a value plus one


def draw(shape, rows):
    """One product's rows and what turns them."""
    G, n, H, R2 = shape
    keys = jax.random.split(jax.random.key(rows), 4)
    qkv = jax.random.normal(keys[0], (rows, G, n + 2, H), jnp.bfloat16)
    norms = (1 + 0.1 * jax.random.normal(key, (H,), jnp.bfloat16) for key in keys[1:3])
    angle = 9 * jax.random.normal(keys[3], (rows, R2))
    return qkv, (None, *norms, jnp.cos(angle), jnp.sin(angle))


def error_of(run, qkv, more):
    """Largest difference from XLA's, in spacings."""
    both = (
        jax.jit(functools.partial(one.rotate_qkv, eps=EPS))(qkv, *more) for one in (run, reference)
    )
    apart = jax.tree.map(
        lambda a, b: jnp.max(jnp.abs(a.astype("f4") - b.astype("f4")) / (jnp.abs(b) + 1)), *both
    )
    return float(jnp.max(jnp.asarray(apart)).astype("f4")) / SPACING


def time_form(run, qkv, more, rounds, repeats):
    """Microseconds of a round: median, least and most."""

    @jax.jit
    def loop(qkv, more):
        def one(i, qkv):
            q, k, v = run(qkv, *more)
            G, n = qkv.shape[1], qkv.shape[2] - 2
            heads = q.reshape(len(qkv), G, n, -1), k[:, :, None], v[:, :, None]
            return jax.lax.optimization_barrier(jnp.concatenate(heads, axis=2))

        return jax.lax.fori_loop(0, rounds, one, qkv)

    samples = []
    for _ in range(repeats + 2):  # two to warm up
        began = time.perf_counter()
        jax.block_until_ready(loop(qkv, more))
        samples.append((time.perf_counter() - began) / rounds * 1e6)
    samples = samples[2:]
    return statistics.median(samples), min(samples), max(samples)


def plain(qkv, *_):
    """No norm and no rotation: the loop's own work."""
    q, k, v = jnp.split(qkv, (qkv.shape[2] - 2, qkv.shape[2] - 1), axis=2)
    return q.reshape(len(qkv), -1, qkv.shape[-1]), k[:, :, 0], v[:, :, 0]


def main():
    """Check, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[32, 128, 1024, 8192])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out")
    args = parser.parse_args()
    report = {"command": "benchmarks/rotation_gpu.py", **environment(), "lines": []}
    for model in args.models:
        for rows in args.rows:
            qkv, more = draw(MODELS[model], rows)
            glue_us, *_ = time_form(plain, qkv, more, args.rounds, args.repeats)
            for form in args.forms:
                line = {"model": model, "rows": rows, "form": form, "glue_us": glue_us}
                try:
                    run = functools.partial(FORMS[form].rotate_qkv, eps=EPS)
                    line["error"] = error_of(FORMS[form], qkv, more)
                    timed = time_form(run, qkv, more, args.rounds, args.repeats)
                    line |= dict(zip(("us", "min_us", "max_us"), timed, strict=True))
                    line["net_us"] = line["us"] - glue_us
                except Exception as error:  # the others are still worth their time
                    line["fault"] = f"{type(error).__name__}: {error}"[:500]
                report["lines"].append(line)
                print(line, flush=True)
                if args.out:
                    Path(args.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
