"""Traps of drafting that no other file holds; docs/traps.md lists all of them, and who does."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.api.strategy import default_params, resolve_strategy
from dllm_jax.models.families import ConfigError, parse_config
from dllm_jax.strategies import AR, DFlash
from dllm_jax.tasks.evaluate import encode, held_out
from tests.contract import drafters, harness, models
from tests.oracles.draft_files import CONFIG, write_pair
from tests.oracles.tiny_configs import CONFIGS
from tests.strategies import test_dflash as rounds

pytestmark = pytest.mark.long

PROMPTS = [list(range(1, 4)), list(range(5, 26)), list(range(30, 38))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


# --- ids that are no drafts, or no tokens --------------------------------------------------------


def masked_text() -> tuple[rounds.Wish, list[int]]:
    """A request whose text holds the drafter's mask after its first token, and that text."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        drawn = [rounds.draw_wish(rng) for _ in range(harness.SLOTS)]
        long = dataclasses.replace(drawn[0].request, max_tokens=harness.ROOM)
        wishes = [
            dataclasses.replace(w, request=dataclasses.replace(long, seed=i, temperature=1.3))
            for i, w in enumerate(drawn)
        ]
        for wish, one in zip(wishes, rounds.run(AR(), wishes), strict=True):
            if models.MASK in one.output[2:]:
                return wish, one.output
    raise AssertionError("the mask was never drawn")


@pytest.mark.slow
def test_the_mask_of_the_drafter_is_a_token_and_may_end_a_text():
    """T10: it survives in the text, and a stop id that is the mask stops there."""
    wish, text = masked_text()
    stopped = dataclasses.replace(
        wish, request=dataclasses.replace(wish.request, stops=(models.MASK,))
    )
    table = drafters.no_hints(rounds.ROUND)
    drafters.hint(table, [*wish.request.prompt, *text], len(wish.request.prompt))
    wishes = [wish, stopped]
    got = rounds.compare(rounds.BLOCK, wishes, [text, text], table, (0,))
    assert models.MASK in got[0].output
    assert got[1].output == text[: text.index(models.MASK)]
    assert got[1].finish_reason == "stop"


def test_rows_of_the_head_that_are_no_token_are_neither_drafted_nor_written(monkeypatch):
    """Trap 12: the likeliest id of all is one past the tokenizer's vocabulary."""
    plain = rounds.TARGET
    head = plain.params["lm_head"].at[models.PADDED].mul(20.0)
    loud = plain.replace(params=plain.params | {"lm_head": head})
    monkeypatch.setattr(rounds, "TARGET", loud)
    rng = np.random.default_rng(3)
    wishes = [rounds.draw_wish(rng) for _ in range(harness.SLOTS)]
    draft = drafters.hinted(loud, drafters.no_hints(rounds.ROUND))
    got = rounds.run(rounds.BLOCK, wishes, draft)
    assert [one.output for one in got] == [one.output for one in rounds.run(AR(), wishes)]
    for one in got:
        assert models.PADDED not in one.output
        assert models.PADDED not in one.guesses[:, 1 : rounds.ROUND]
    logits = loud.logits(jnp.arange(16)[None], attention="causal")
    assert models.PADDED in np.asarray(logits).argmax(-1), "it was never the likeliest"


# --- the state -----------------------------------------------------------------------------------


def test_memory_is_planned_for_both_caches(folder):
    """Trap 21: of a token 2 x layers x heads x width numbers in each."""
    sizes = {"max_num_seqs": 1, "max_model_len": 64, "page_size": 16, "warm_up": False}
    llm = dj.LLM(folder / "target", draft=folder / "draft", dtype="float32", **sizes)

    def bytes_of(config):
        heads = config["num_key_value_heads"] * config["head_dim"]
        return 16 * 4 * 2 * config["num_hidden_layers"] * heads

    assert llm.memory.page_bytes == bytes_of(CONFIGS["qwen3"]) + bytes_of(CONFIG)
    pools = llm.engine.runner.state.pools
    pages = {name: pool[0][0].shape[0] for name, pool in pools.items()}
    assert pages == dict.fromkeys(("target", "draft"), llm.memory.num_pages), "one table for both"


# --- what is asked of other loops, and other models ----------------------------------------------


def test_what_a_folder_asks_of_other_loops_changes_neither_side(folder, tmp_path):
    """Trap 24: transformers' plain greedy loop obeys these; `ar` and `dflash` draw alike."""
    asked = {"repetition_penalty": 1.3, "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    parsed = parse_config(CONFIGS["qwen3"], asked)
    assert parsed == parse_config(CONFIGS["qwen3"])
    target = dj.load(folder / "target", dtype="float32")
    drawn = [
        default_params(target, resolve_strategy(target, None, draft)) for draft in (None, "draft")
    ]
    assert drawn[0] == drawn[1] == dj.SamplingParams()


@pytest.mark.parametrize(
    "name", ["Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"]
)
def test_a_target_with_a_state_that_no_cache_undoes_is_refused(name):
    """§2.7: rejected drafts would stay in it."""
    with pytest.raises(ConfigError, match=r"linear attention.*state"):
        parse_config({**CONFIGS["qwen3"], "architectures": [name]})


# --- a trained draft -----------------------------------------------------------------------------


@pytest.mark.slow
def test_what_befalls_a_request_costs_a_trained_draft_nothing():
    """Traps 8 and 11, where acceptance shows them: used slots, hits, pieces, preemption.

    The counts of each request are those of the first time.
    """
    target, draft = dj.load("builtin:tiny-qwen3"), dj.load("builtin:tiny-qwen3-dflash")
    prompts = encode(target, held_out("plain", 4, seed=5))
    params = dj.SamplingParams(max_tokens=120)
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 256, "page_size": 16}
    sizes |= {"slot_buckets": (2,), "prefill_buckets": (32,)}

    def reported(llm):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [(one.outputs[0].token_ids, one.metrics.draft) for one in outputs], outputs

    def make(**more):
        config = dj.EngineConfig(**sizes, **more)
        strategy = DFlash(width=16)  # a chosen one would follow the neighbours
        return dj.LLM(target, strategy, draft=draft, config=config, warm_up=False)

    llm = make()
    once, _ = reported(llm)
    assert all(drafted and drafted.mean_accepted_length >= 5 for _, drafted in once)
    again, outputs = reported(llm)
    assert again == once
    assert min(one.metrics.cached_tokens for one in outputs) > 0
    assert max(map(len, prompts)) > 32, "no prompt came in pieces"
    short = make(num_pages=17, enable_prefix_caching=False)
    assert reported(short)[0] == once
    assert short.engine.stats().num_preemptions > 0
