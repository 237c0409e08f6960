"""Where the time of one decode step goes: kernels by total time, from a profile of the device loop.

python benchmarks/profile_step.py --slots 1 --blocks 1 --top 30 [--hlo step.hlo.txt]

Where there are experts, `--routing` sends the rows to them (see routing_script.py).
"""

import argparse
import collections
import contextlib
import glob
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from routing_script import scripted

import dllm_jax as dj
from dllm_jax.api import generate
from dllm_jax.strategies import MultiBD


def main():
    """Compile the loop, run it warm under the profiler, print kernel totals per step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:JetLM/SDAR-1.7B-Chat")
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--implementation", default=None)
    parser.add_argument("--top", type=int, default=40)
    parser.add_argument("--routing", default=None, help="of the experts, see routing_script.py")
    parser.add_argument("--quantization", choices=("fp8", "none"), default="none")
    parser.add_argument("--hlo", default=None, help="write the optimised HLO here")
    args = parser.parse_args()
    with scripted(args.routing) if args.routing else contextlib.nullcontext():
        profile(args)


def profile(args):
    """The step of `args`."""
    model = dj.load(args.model, quantization=args.quantization)
    prompts = jnp.asarray(
        np.random.default_rng(0).integers(0, 1000, (args.slots, args.context)), jnp.int32
    )
    strategy = MultiBD(buffer_size=args.blocks, add_block_threshold=0.0)
    session = generate.start(
        model,
        prompts,
        strategy,
        max_tokens=256,
        ignore_eos=True,
        attention_implementation=args.implementation,
    )
    if args.hlo:
        compiled = generate._advance.lower(
            model, session.strategy, session.aux, session.state, jnp.int32(1), args.implementation
        ).compile()
        with open(args.hlo, "w") as file:
            file.write(compiled.as_text())
    session = generate.advance(model, session, 8, args.implementation)
    jax.block_until_ready(session.state.finish)
    began = time.perf_counter()
    session = generate.advance(model, session, args.steps, args.implementation)
    jax.block_until_ready(session.state.finish)
    print(f"without the profiler: {(time.perf_counter() - began) / args.steps * 1e3:.3f} ms a step")
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            session = generate.advance(model, session, args.steps, args.implementation)
            jax.block_until_ready(session.state.finish)
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(path)
    for plane in data.planes:
        if "GPU" not in plane.name:
            continue
        total, count = collections.Counter(), collections.Counter()
        first, last = float("inf"), 0.0
        for line in plane.lines:
            if "Stream" not in line.name:
                continue
            for event in line.events:
                total[event.name] += event.duration_ns
                count[event.name] += 1
                first = min(first, event.start_ns)
                last = max(last, event.start_ns + event.duration_ns)
        busy, span = sum(total.values()), last - first
        per = args.steps * 1e3
        print(
            f"{plane.name}: per step {span / per:.1f} us wall, {busy / per:.1f} us in "
            f"{sum(count.values()) / args.steps:.1f} kernels"
        )
        for name, spent in total.most_common(args.top):
            print(f"{spent / per:9.2f} us {count[name] / args.steps:7.2f} x  {name[:110]}")


if __name__ == "__main__":
    main()
