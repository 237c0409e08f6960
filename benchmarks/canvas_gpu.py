"""DiffusionGemma at full size with random weights: 1,024 ids in, 1,024 out, 16 steps a canvas.

    python benchmarks/canvas_gpu.py --out OUT.json --within 380

Fixed work (`confidence_threshold` 0), temperature 1. Every call has prompts of its own, so that no
prefix is found. One engine takes 1 and 4 requests in turn, one stores each canvas alone, one takes
16. Each compiles a step a number of slots and one size of prefill, all together. Seconds are those
of one `LLM.generate`, prefill included. `ms_per_forward` and `decode_tok_s` are worked out from the
seconds of one canvas and of all, in which the prefill cancels. `experts_touched` are those of each
layer that a canvas of random tokens reaches. The file is rewritten after every row; no part begins
after `--within` seconds.
"""

import argparse
import collections
import functools
import json
import re
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.bench import measure as measuring
from dllm_jax.bench import profile
from dllm_jax.bench.numbers import commit
from dllm_jax.models import gemma, reference
from dllm_jax.strategies.diffusion_gemma import DiffusionGemma

MODEL = "random:google/diffusiongemma-26B-A4B-it"
STEPS = 16
FLOOR_MS = {None: {1: 13.2, 4: 20.9, 16: 55.7}, "fp8": {1: 7.3}}  # one H200, context 1.5 k
SLOTS, ALONE = (1, 4, 16), (1,)
EARLY = 4  # most slots at which a canvas begins beside the store of the one before it


class Report:
    """What was measured so far, in a file."""

    def __init__(self, path, within, facts, began):
        self.path, self.within, self.facts = Path(path), within, facts
        self.rows, self.began = [], began

    @property
    def seconds(self):
        return time.perf_counter() - self.began

    def add(self, **row):
        self.rows.append(row)
        print(f"{self.seconds:6.1f} s", json.dumps(row), flush=True)
        self.path.write_text(json.dumps({**self.facts, "rows": self.rows}, indent=1) + "\n")

    def is_late(self, what):
        if self.seconds > self.within:
            self.add(left_out=what)
        return self.seconds > self.within


class Calls:
    """Timed calls of one engine."""

    def __init__(self, llm, tokens):
        self.llm, self.tokens = llm, tokens
        self.rng = np.random.default_rng(0)

    def __call__(self, slots, tokens, **limits):
        """Seconds, and forwards of a request, of `slots` new prompts."""
        top = self.llm.model.config.vocab_size * 3 // 4  # images and sounds have ids above
        prompts = self.rng.integers(5, top, (slots, self.tokens)).tolist()
        params = [
            dj.SamplingParams(max_tokens=tokens, temperature=1.0, seed=i, ignore_eos=True, **limits)
            for i in range(slots)
        ]
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        for output in outputs:
            assert output.error is None, output.error
            assert output.metrics.cached_tokens == 0, "a prefix was found"
            assert limits or len(output.outputs[0].token_ids) == tokens
        return seconds, max(output.metrics.nfe for output in outputs)


def measure(report, model, slots, early_slots, tokens, profiled):
    """Rows of one engine, by its number of requests."""
    canvas = model.defaults.block_size
    strategy = DiffusionGemma(
        max_denoising_steps=float(STEPS),
        confidence_threshold=0.0,
        early_slots=early_slots,
        block_size=canvas,
    )
    longest = 2 * tokens + canvas
    pages = -(-(longest + canvas) // 64)  # what one text may need: one size of table
    config = dj.EngineConfig(
        max_num_seqs=max(slots),
        max_model_len=longest,
        num_pages=max(slots) * pages + 1,
        max_num_batched_tokens=max(slots) * tokens,  # prompts are prefilled before any is decoded
        slot_buckets=slots,
        page_buckets=(pages,),
        prefill_buckets=(tokens,),
    )
    began = time.perf_counter()
    how = {"config": config, "progress": False, "calibrate": False}
    with dj.LLM(model, strategy, **how) as llm:
        report.add(start_s=time.perf_counter() - began, slots=slots, peak_gb=peak_gb())
        call = Calls(llm, tokens)
        for count in slots:
            if report.is_late(f"{count} slots"):
                break
            call(count, canvas)  # the first of a size
            one_s, one_nfe = min(call(count, canvas) for _ in range(2))
            prefill_s = min(call(count, canvas, max_nfe=1)[0] for _ in range(3))
            for _ in range(1 if count == max(SLOTS) else 2):
                seconds, nfe = call(count, tokens)
                forward_s = (seconds - one_s) / max(nfe - one_nfe, 1)
                floor = FLOOR_MS[model.quantization].get(count)
                report.add(
                    slots=count,
                    early=0 < count <= early_slots,
                    tokens=count * tokens,
                    seconds=seconds,
                    tok_s=count * tokens / seconds,
                    nfe=nfe,
                    ms_per_forward=1e3 * forward_s,
                    of_floor=None if floor is None else 1e3 * forward_s / floor,
                    decode_tok_s=count * (tokens - canvas) / max(seconds - one_s, 1e-9),
                    one_canvas_s=one_s,
                    one_canvas_ms=1e3 * (one_s - prefill_s) / max(one_nfe - 1, 1),
                    prefill_ms=1e3 * (prefill_s - forward_s) / count,
                    peak_gb=peak_gb(),
                )
            if profiled and count in (min(SLOTS), max(SLOTS)):
                with measuring.profiled(llm.engine):
                    call(count, canvas)  # compiles
                    launches(report, count, functools.partial(call, count, canvas), one_nfe)


def launches(report, slots, run, steps, shown=70, waits=12):
    """Where the time of a call with a prefill and so many steps goes, kernel by kernel.

    `waits` are the times between two launches in which nothing ran, by the two kernels' names.
    """
    spent, count = collections.defaultdict(float), collections.Counter()
    idle, times = collections.defaultdict(float), collections.Counter()
    end = last = None
    for event in sorted(profile.traced(run).events, key=lambda event: event.start_ns):
        # A fusion has a number of its own in each layer.
        name = re.sub(r"[_.]?\d+$", "", event.name)[:60]
        spent[name] += event.duration_ns
        count[name] += 1
        if end is not None and event.start_ns > end:
            idle[last, name] += event.start_ns - end
            times[last, name] += 1
        end, last = max(end or 0, event.start_ns + event.duration_ns), name
    report.add(
        profile=f"{slots} slots: prefills and a canvas each",
        steps=steps,
        total_ms=sum(spent.values()) / 1e6,
        idle_ms=sum(idle.values()) / 1e6,
        kernels=[
            {"name": name, "ms": round(ns / 1e6, 3), "calls": count[name]}
            for name, ns in sorted(spent.items(), key=lambda pair: -pair[1])[:shown]
        ],
        waits=[
            {"behind": pair[0], "before": pair[1], "ms": round(ns / 1e6, 3), "times": times[pair]}
            for pair, ns in sorted(idle.items(), key=lambda pair: -pair[1])[:waits]
        ],
    )


def peak_gb():
    """The most that this process held so far; loading counts too."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use", 0) / 1e9


def touched(model):
    """Experts of each layer that a canvas of random tokens reaches, without a text before it."""
    cfg, canvas = model.config, model.defaults.block_size
    ids = np.random.default_rng(1).integers(5, cfg.vocab_size, (1, canvas))
    sees, reached = jnp.ones((1, canvas, canvas), bool), []
    choose = gemma.choose_experts

    def counting(*given, **how):
        ids, weights = choose(*given, **how)
        count = jnp.sum(jnp.zeros(cfg.num_experts, jnp.int32).at[ids.reshape(-1)].max(1))
        # Layers that are alike share a trace, so each tells when it runs.
        jax.debug.callback(lambda count: reached.append(int(count)), count, ordered=True)
        return ids, weights

    def run(params, ids):
        rows = gemma.embed(params, cfg, ids)
        rows = gemma.condition(params, cfg, rows, jnp.zeros_like(rows))
        at = jnp.broadcast_to(jnp.arange(canvas), ids.shape)
        mode = jnp.full((1,), gemma.DECODER, jnp.int32)

        def attend(layer, q, k, v):
            return reference.attention(q, k, v, sees, gemma.layer_view(cfg, layer).scale)

        return gemma.trunk(params, cfg, rows, at, attend, mode=mode)[0]

    jax.clear_caches()  # of layers that were traced without counting
    with mock.patch.object(gemma, "choose_experts", counting):
        jax.block_until_ready(jax.jit(run)(model.params, jnp.asarray(ids, jnp.int32)))
    jax.effects_barrier()
    return reached


def main():
    """Measure until time is up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--within", type=float, default=380.0)
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--quantization", choices=["none", "fp8"])
    parser.add_argument("--quantize-head", action="store_true")
    parser.add_argument("--slots", type=int, nargs="+", default=list(SLOTS))
    parser.add_argument("--parts", nargs="+", default=["few", "alone", "many", "touched"])
    parser.add_argument("--profile", action="store_true", help="of 1 slot, kernel by kernel")
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt, and of a text")
    args = parser.parse_args()
    began = time.perf_counter()
    # Before JAX looks for devices, as users do: `dj.load` says who launches what the loops need.
    rounded = {"quantization": args.quantization, "quantize_head": args.quantize_head}
    model = dj.load(args.model, **rounded)
    jax.block_until_ready(model.params)
    facts = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": args.commit,
        "model": args.model,
        "quantization": f"{args.quantization}, head" if args.quantize_head else args.quantization,
        "steps_per_canvas": STEPS,
        "prompt_tokens": args.tokens,
        "seed": "prompts: NumPy's 0; weights: the model's own; requests: 0, 1, ...",
    }
    report = Report(args.out, args.within, facts, began)
    report.add(load_s=report.seconds, peak_gb=peak_gb())
    engines = {
        "few": {"slots": tuple(n for n in args.slots if n <= EARLY), "early_slots": EARLY},
        "alone": {"slots": ALONE, "early_slots": 0},
        "many": {"slots": tuple(n for n in args.slots if n > EARLY), "early_slots": EARLY},
    }
    for name, engine in engines.items():
        if name in args.parts and engine["slots"] and not report.is_late(name):
            profiled = args.profile and name != "alone"
            measure(report, model, **engine, tokens=args.tokens, profiled=profiled)
    if "touched" in args.parts and not report.is_late("experts touched"):
        report.add(experts_touched=touched(model))


if __name__ == "__main__":
    main()
