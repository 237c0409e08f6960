"""The write of new keys and values into pages: every form checked, then timed, on one GPU.

    python benchmarks/kv_write_gpu.py --out benchmarks/results/kv_write_h200.json
    python benchmarks/kv_write_gpu.py --dtype float8_e4m3fn --models SDAR-1.7B --forms xla mosaic

Per model all arrays of all layers are written at once, to places that move on from round to round,
by a loop on the device that owns the pages: microseconds of one write, the median of the runs.
In 8 bits values are token-last, as in an engine's cache; `keys_alone` has none that are.
"""

import argparse
import functools
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.bench.numbers import environment
from dllm_jax.kernels.kv_write import fp8, mosaic, reference

# Arrays, KV heads, their size.
MODELS = {"SDAR-1.7B": (56, 8, 128), "LLaDA2-mini": (40, 4, 128), "DiffusionGemma": (50, 8, 256)}
FORMS = {"xla": reference, "mosaic": mosaic}
PAGE = 64


def draw(arrays, heads, size, rows, dtype, keys_alone):
    """Pages and new rows, all different, and which pages are token-last."""
    num_pages = max(4, 2 * rows // PAGE)
    keys = jax.random.split(jax.random.key(rows), 2 * arrays)

    def drawn(key, *shape):
        return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)

    last = fp8.is_token_last(jnp.zeros((), dtype)) and not keys_alone
    token_last = (False, last) * (arrays // 2)
    sizes = [(size, PAGE) if last else (PAGE, size) for last in token_last]
    pages = tuple(drawn(key, num_pages, heads, *own) for key, own in zip(keys, sizes, strict=False))
    return pages, tuple(drawn(key, rows, heads, size) for key in keys[arrays:]), token_last


def is_right(write, pages, rows, token_last):
    """Whether it writes what XLA writes, bit for bit: rows in order, and some that go nowhere."""
    last = len(pages[0]) * PAGE - 1
    in_order, backwards = np.arange(5, 5 + len(rows[0])), last - np.arange(len(rows[0]))
    for place, dropped in ((in_order, None), (backwards, slice(None, None, 5))):
        page, offset = jnp.asarray(place // PAGE, jnp.int32), jnp.asarray(place % PAGE, jnp.int32)
        if dropped is not None:
            page = page.at[dropped].add(len(pages[0]))
        got = write(tuple(map(jnp.copy, pages)), rows, page, offset, token_last)
        want = reference.write_rows(pages, rows, page, offset, token_last)
        if not all(bool((a == b).all()) for a, b in zip(got, want, strict=True)):
            return False
    return True


def time_form(write, pages, rows, token_last, rounds, repeats):
    """Microseconds of one write, median, least and most."""
    place = jnp.arange(len(rows[0]), dtype=jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(pages, rows):
        def one(i, pages):
            page = (place // PAGE + i) % len(pages[0])
            return write(pages, rows, page, place % PAGE, token_last)

        return jax.lax.fori_loop(0, rounds, one, pages)

    pages, samples = tuple(map(jnp.copy, pages)), []
    for _ in range(repeats + 2):  # two to warm up
        began = time.perf_counter()
        pages = jax.block_until_ready(loop(pages, rows))
        samples.append((time.perf_counter() - began) / rounds * 1e6)
    samples = samples[2:]
    return {"us": statistics.median(samples), "min_us": min(samples), "max_us": max(samples)}


def main():
    """Check, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[32, 128, 1024])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float8_e4m3fn"))
    parser.add_argument("--keys-alone", action="store_true", help="no pages are token-last")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out")
    args = parser.parse_args()
    report = {"command": "benchmarks/kv_write_gpu.py", **environment(), "lines": []}
    for model in args.models:
        for count in args.rows:
            drawn = draw(*MODELS[model], count, args.dtype, args.keys_alone)
            for form in args.forms:
                line = {"model": model, "rows": count, "form": form, "dtype": args.dtype}
                line["keys_alone"] = args.keys_alone
                write = FORMS[form].write_rows
                try:
                    line["right"] = is_right(write, *drawn)
                    if line["right"]:
                        line |= time_form(write, *drawn, args.rounds, args.repeats)
                except Exception as error:  # the others are still worth their time
                    line["fault"] = f"{type(error).__name__}: {error}"[:500]
                report["lines"].append(line)
                print(line, flush=True)
                if args.out:
                    Path(args.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
