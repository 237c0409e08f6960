"""DiffusionGemma at full size with random weights: 1,024 ids in, 1,024 out, 16 steps a canvas.

    python benchmarks/canvas_gpu.py OUT.json

Fixed work: `confidence_threshold=0`. Seconds are those of one `LLM.generate`, prefill included.
"""

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

import dllm_jax as dj
from dllm_jax.bench.numbers import commit
from dllm_jax.strategies.diffusion_gemma import DiffusionGemma

MODEL = "random:google/diffusiongemma-26B-A4B-it"
STEPS, TOKENS = 16, 1024


def measure(model, slots, early_slots):
    """A row for each of three calls; the first is the shorter one that warms up."""
    strategy = DiffusionGemma(
        max_denoising_steps=float(STEPS), confidence_threshold=0.0, early_slots=early_slots
    )
    rng = np.random.default_rng(0)
    began = time.perf_counter()
    with dj.LLM(model, strategy, max_num_seqs=slots, max_model_len=2304, progress=False) as llm:
        start_s = time.perf_counter() - began
        prompts = [rng.integers(5, 200_000, TOKENS).tolist() for _ in range(slots)]
        for tokens in (TOKENS // 4, TOKENS, TOKENS):
            params = dj.SamplingParams(max_tokens=tokens, ignore_eos=True)
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            written = sum(len(output.outputs[0].token_ids) for output in outputs)
            assert written == slots * tokens, outputs[0].error
            yield {
                "slots": slots,
                "early": early_slots > 0,
                "tokens": written,
                "seconds": seconds,
                "tok_s": written / seconds,
                "nfe": outputs[0].metrics.nfe,
                "start_s": start_s,
            }


def main():
    """Write the rows as they come."""
    out = Path(sys.argv[1])
    model = dj.load(MODEL)
    facts = {"model": MODEL, "steps": STEPS, "jax": jax.__version__, "commit": commit()}
    facts["device"] = jax.devices()[0].device_kind
    rows = []
    for slots, early_slots in ((1, 4), (1, 0), (4, 4)):
        for row in measure(model, slots, early_slots):
            rows.append(row)
            print(json.dumps(row), flush=True)
            out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
