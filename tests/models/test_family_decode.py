"""Every family decodes on pages as an independent reading of its files says.

A tiny checkpoint with the family's own names is decoded through `LLM`; the truth is a growing list
(`dense_blocks`) over NumPy float64 on the files' tensors (`tests.oracles.families`), which knows no
cache, no window and nothing of ours.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.engine.layout import EngineConfig
from dllm_jax.strategies import AR, MultiBD
from tests.contract.dense import Law, decode_tokens
from tests.contract.dense_blocks import decode_blocks, threshold_rule
from tests.contract.harness import Request
from tests.oracles.checkpoints import write_tiny
from tests.oracles.families import reference_logits

pytestmark = pytest.mark.long

BLOCK, DEPTH = 4, 3
ACCEPT, ADD, SEMI = 0.12, 0.25, 0.5
SHIFTED = ("dream", "diffucoder", "fast_dllm_v2")
NOT_SHIFTED = ("llada", "dream_reasoner", "stable_diffcoder", "sdar", "sdar_moe")
MASKED = (*SHIFTED, *NOT_SHIFTED, "llada2", "llada2_2")
QUICK = ("dream", "llada2_2")
CAUSAL = ("qwen3", "qwen3_moe", "llama31")
MASK_ID = 47  # stated, for the families' own ids are past these vocabularies
OWN_MASK_ID = {"stable_diffcoder": 5}
NEVER = {"llada2_2": (48, 49)}  # deletes and splits


class Files:
    """A checkpoint as `dense_blocks` takes a network."""

    def __init__(self, folder, family):
        self.folder, self.shift = folder, family in SHIFTED
        self.mask = -1 if family in CAUSAL else OWN_MASK_ID.get(family, MASK_ID)
        self.forbidden = [i for i in (self.mask, *NEVER.get(family, ())) if i >= 0]

    def __call__(self, inputs, positions, sees, modes=None):
        assert list(positions) == list(range(len(inputs)))
        return SimpleNamespace(logits=reference_logits(self.folder, inputs, sees))

    def law(self, logits):
        return Ids(logits, self.forbidden)


class Ids(Law):
    """A row of logits without some ids."""

    def __init__(self, logits, forbidden):
        self.logits = logits.astype(np.float64)
        self.logits[forbidden] = -np.inf


def truth(folder, family, prompt, max_tokens):
    """Tokens and forwards of one request, cache-free, and the blocks each step committed."""
    found = decode_blocks(
        Files(folder, family),
        Request(tuple(prompt), max_tokens),
        threshold_rule(ACCEPT, SEMI),
        size=BLOCK,
        depth=DEPTH,
        add=ADD,
    )
    return found.tokens, found.nfe, found.log


def make_llm(folder, num_pages, strategy=None):
    config = EngineConfig(
        max_num_seqs=3,
        max_model_len=64,
        page_size=8,
        num_pages=num_pages,
        slot_buckets=(3,),
        page_buckets=(8,),
        prefill_buckets=(8,),
        max_steps_per_chunk=2,
    )
    strategy = strategy or MultiBD(ACCEPT, ADD, SEMI, block_size=BLOCK, buffer_size=DEPTH)
    return dj.LLM(folder, strategy, config=config, dtype="float32", progress=False)


@pytest.mark.slow("llada2_2")
@pytest.mark.parametrize(
    "family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in MASKED]
)
def test_family_decodes_as_its_files_say(family, tmp_path):
    stated = {} if family in OWN_MASK_ID else {"mask_token_id": MASK_ID}
    folder = write_tiny(family, tmp_path, seed=3, **stated)
    draw = np.random.default_rng(len(family))
    ids = np.arange(6, MASK_ID)
    prompts = [draw.choice(ids, n).tolist() for n in (3, 22, 16)]
    params = dj.SamplingParams(max_tokens=18, ignore_eos=True)
    wanted = [truth(folder, family, prompt, 18) for prompt in prompts]
    assert any(count > 1 for _, _, log in wanted for count in log)  # several commits at once
    # 11 pages of 8 for texts of 21, 40 and 34 tokens: somebody has to go.
    llm = make_llm(folder, num_pages=11)
    outs = llm.generate(prompts, params)
    assert [(o.outputs[0].token_ids, o.metrics.nfe) for o in outs] == [w[:2] for w in wanted]
    assert sum(o.metrics.num_preemptions for o in outs)
    turn = [*prompts[1], *outs[1].outputs[0].token_ids, *prompts[0]]
    [again] = llm.generate([prompts[1]], params)
    assert again.metrics.cached_tokens >= 16
    assert (again.outputs[0].token_ids, again.metrics.nfe) == wanted[1][:2]
    [second] = llm.generate([turn], dataclasses.replace(params, max_tokens=10))
    assert second.metrics.cached_tokens >= 32
    tokens, nfe, _ = truth(folder, family, turn, 10)
    assert (second.outputs[0].token_ids, second.metrics.nfe) == (tokens, nfe)


@pytest.mark.slow
@pytest.mark.parametrize("family", CAUSAL)
def test_causal_family_decodes_as_its_files_say(family, tmp_path):
    folder = write_tiny(family, tmp_path, seed=5)
    draw = np.random.default_rng(len(family))
    prompts = [draw.integers(0, 44, n).tolist() for n in (3, 22, 16)]
    llm = make_llm(folder, num_pages=10, strategy=AR())
    outs = llm.generate(prompts, dj.SamplingParams(max_tokens=12, ignore_eos=True))
    wanted = [decode_tokens(Files(folder, family), Request(tuple(p), 12)) for p in prompts]
    assert [o.outputs[0].token_ids for o in outs] == [one.tokens for one in wanted]
