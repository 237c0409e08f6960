"""Digests of the tokens of 504 fixed requests over every strategy: equal before and after.

    JAX_PLATFORMS=cpu python benchmarks/same_tokens.py --out before.json
    JAX_PLATFORMS=cpu python benchmarks/same_tokens.py --against before.json

Run it before and after a change that must leave tokens alone, on one machine with one jax: exit
status 1 where a digest differs. Texts are short, greedy and drawn, free and constrained, of four
slots at once. Strategies that no built-in model takes run on one with a few parts changed, whose
texts mean nothing. Two minutes on two CPU cores.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
import time

import jax
import jax.numpy as jnp

import dllm_jax as dj
from dllm_jax import strategies
from dllm_jax.models.head import Head, Unembed
from dllm_jax.tasks import evaluate

PROMPTS = 4
CONFIG = dj.EngineConfig(
    max_num_seqs=4,
    max_model_len=128,
    page_size=32,
    num_pages=18,
    slot_buckets=(4,),
    page_buckets=(4,),
    prefill_buckets=(64,),
)
GRAMMARS = (
    dj.Regex(r" [A-Z][a-z]{2,5} has \d{1,3}\."),
    dj.Choice([" yes", " no, they have more"]),
)


def conditioned(model):
    """The model with what `diffusion_gemma` needs: no mask, a mode, expectations, a tied head."""

    def trunk(params, cfg, x, positions, attend, hidden_layers=(), *, mode, **more):
        own = (1.0 + 0.1 * mode).reshape(len(x), -1, 1).astype(x.dtype)
        return model.arch.trunk(params, cfg, x * own, positions, attend, hidden_layers, **more)

    arch = dataclasses.replace(
        model.arch,
        trunk=trunk,
        unembed=Unembed(lambda params, _: Head(params["embed"], embed_scale=1.0)),
        condition=lambda params, cfg, rows, expected: rows + 0.5 * jnp.tanh(expected),
        takes_mode=True,
    )
    config = dataclasses.replace(model.config, mask_token_id=-1)
    return dataclasses.replace(model, arch=arch, config=config)


def cases():
    """Of each case: name, model, strategy, draft."""
    sdar = dj.load("builtin:tiny-sdar", dtype="float32")
    shifted = dataclasses.replace(sdar, config=dataclasses.replace(sdar.config, shift=True))
    causal = dj.load("builtin:tiny-qwen3", dtype="float32")
    sizes = {"block_size": 8, "buffer_size": 2}
    one = {"block_size": 8, "buffer_size": 1}
    whole = {"block_size": 8, "buffer_size": 8}
    V = sdar.config.vocab_size
    draft = "builtin:tiny-qwen3-dflash"
    indel = {"delete_token_id": V - 1, "split_token_id": V - 2}
    canvas = strategies.DiffusionGemma(max_denoising_steps=6, block_size=16)
    return (
        ("ar", causal, strategies.AR(), None),
        ("block_diffusion", sdar, strategies.BlockDiffusion(block_size=8), None),
        ("d2f", sdar, strategies.D2F(**sizes), None),
        ("diffusion_gemma", conditioned(sdar), canvas, None),
        ("dflash", causal, strategies.DFlash(width=8), draft),
        ("dflash,rejection", causal, strategies.DFlash(width=8, acceptance="rejection"), draft),
        ("dmax", sdar, strategies.DMax(**sizes), None),
        ("edit", sdar, strategies.Edit(penalty_lambda=0.5, **one), None),
        ("edit_indel", sdar, strategies.EditIndel(**indel, **one), None),
        ("entropy_blocks", sdar, strategies.EntropyBlocks(block_size=8), None),
        ("fast_dllm_v2", shifted, strategies.FastDLLMV2(block_size=8), None),
        ("full_sequence", sdar, strategies.FullSequence(**whole), None),
        ("full_sequence,guided", sdar, strategies.FullSequence(cfg_scale=1.0, **whole), None),
        ("multi_bd", sdar, strategies.MultiBD(**sizes), None),
    )


def requests():
    """Pairs of a prompt's text and its parameters."""
    how = [
        {},
        {"temperature": 0.7},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 40},
        {"constraint": GRAMMARS[0]},
        {"constraint": GRAMMARS[1], "temperature": 0.8},
        {"constraint": GRAMMARS[0], "constraint_confidence": "plan"},
    ]
    for number, problem in enumerate(evaluate.held_out("plain", PROMPTS, seed=0)):
        for which, fields in enumerate(how):
            seed = 100 * number + which
            prompt = problem.question[:120]
            yield prompt, dj.SamplingParams(max_tokens=16, seed=seed, **fields)


def digest(outputs):
    """Of token ids and finish reasons, in order."""
    told = [(list(text.token_ids), text.finish_reason) for out in outputs for text in out.outputs]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def run():
    """Digests by case."""
    found = {}
    for name, model, strategy, draft in cases():
        began = time.perf_counter()
        llm = dj.LLM(
            model,
            strategy,
            draft=draft,
            config=CONFIG,
            warm_up=False,
            progress=False,
        )
        # Programs with grammars are others: free texts run first, then both kinds side by side.
        work = list(requests())
        free = [one for one in work if one[1].constraint is None]
        outputs = []
        for some in (free, work):
            texts, params = zip(*some, strict=True)
            outputs += llm.generate(list(texts), list(params))
        found[name] = {
            "digest": digest(outputs),
            "requests": len(outputs),
            "tokens": sum(len(text.token_ids) for out in outputs for text in out.outputs),
            "forwards": sum(out.metrics.nfe for out in outputs),
        }
        print(name, found[name], f"{time.perf_counter() - began:.1f} s", flush=True)
        llm.close()
    return found


def main():
    jax.config.update("jax_disable_most_optimizations", True)  # compiling is most of the time
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="file for the digests")
    parser.add_argument("--against", help="file of digests to compare with")
    args = parser.parse_args()
    found = run()
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"jax": jax.__version__, "cases": found}, file, indent=1)
    if args.against:
        with open(args.against) as file:
            before = json.load(file)["cases"]
        changed = [name for name in before if found.get(name) != before[name]]
        print("changed:", ", ".join(changed) or "nothing")
        sys.exit(bool(changed))


if __name__ == "__main__":
    main()
