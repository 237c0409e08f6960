"""Traps of drafting that no other file holds; docs/traps.md lists all of them, and who does."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.api.strategy import default_params, resolve_strategy
from dllm_jax.models.families import ConfigError, parse_config
from dllm_jax.strategies import AR, DFlash
from dllm_jax.strategies.core.state import RUNNING
from dllm_jax.tasks.evaluate import encode, held_out
from tests.contract import drafters, harness, models
from tests.contract.cases import PAGE_SIZE, case, once
from tests.contract.harness import Request
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


def to_the_host_and_back(state):
    """Its leaves as NumPy arrays, keys as numbers, and a new state of them."""
    leaves, tree = jax.tree.flatten(state.replace(keys=jax.random.key_data(state.keys)))
    there = [np.array(leaf) for leaf in leaves]
    back = jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in there])
    return back.replace(keys=jax.random.wrap_key_data(back.keys))


@pytest.mark.slow
def test_a_state_goes_to_the_host_and_back_between_any_two_rounds():
    """T14, after every round of the contract's case."""
    c = case("dflash")
    requests: list[Request | None] = [*c.requests]
    requests += [None] * (harness.SLOTS - len(requests))
    bare, state, prompt = harness.fresh_state(
        c.strategy, c.model, dict(c.aux), requests, PAGE_SIZE["dflash"], seed=0
    )
    state = harness.prefill(bare, c.model, dict(c.aux), state, prompt, 8)
    while (np.asarray(state.finish) == RUNNING).any():
        state, _ = harness.step(bare, c.model, dict(c.aux), to_the_host_and_back(state))
    for b, row in enumerate(once("dflash").rows):
        assert state.output[b, : state.output_len[b]].tolist() == row.tokens
        assert int(state.buffer.nfe[b]) == row.nfe


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


# --- where there is time -------------------------------------------------------------------------

WIDE = 32  # requests, half of them greedy


def half_pair() -> tuple[dj.Model, list[list[int]], np.ndarray]:
    rng = np.random.default_rng(12)
    prompts = [rng.integers(0, models.MASK, rng.integers(1, 24)).tolist() for _ in range(WIDE)]
    return models.causal(jnp.bfloat16), prompts, np.resize([0.0, 0.0, 0.8, 1.3], WIDE)


def texts(out) -> list[list[int]]:
    return [out.tokens[b, : int(out.length[b])].tolist() for b in range(len(out.tokens))]


@pytest.mark.slow
def test_in_bfloat16_drafts_do_not_change_a_text_of_one_width(record_property):
    """T16: bit for bit the same tokens whatever is drafted; and as `ar`'s but for near-ties."""
    target, prompts, temperature = half_pair()
    how = {"max_tokens": 32, "temperature": temperature, "key": jax.random.key(4)}
    plain = texts(dj.generate(target, prompts, AR(), **how))
    rng = np.random.default_rng(1)
    right = drafters.no_hints(4)
    for prompt, text in zip(prompts, plain, strict=True):
        drafters.hint(right, [*prompt, *text], len(prompt))
    wrong = np.where(right == drafters.NO_HINT, right, (right + 1) % models.MASK)
    tables = {
        "its own": drafters.no_hints(4),
        "right": right,
        "wrong": wrong,
        "constant": np.full_like(right, 7),
        "random": rng.integers(0, models.MASK, right.shape).astype(np.int32),
    }
    strategy = DFlash(4, (0, 1), width=4)  # chosen widths follow what is accepted
    got, nfe = {}, {}
    for name, table in tables.items():
        out = dj.generate(target, prompts, strategy, draft=drafters.hinted(target, table), **how)
        got[name], nfe[name] = texts(out), int(np.sum(out.nfe))
    assert all(one == got["its own"] for one in got.values())
    assert nfe["right"] < nfe["its own"] <= nfe["wrong"]
    ties = 0
    for prompt, text, other, hot in zip(prompts, plain, got["right"], temperature, strict=True):
        if text == other or hot > 0:
            continue
        at = next(i for i, pair in enumerate(zip(text, other, strict=True)) if len({*pair}) == 2)
        row = np.asarray(target.logits(jnp.asarray([[*prompt, *text[:at]]]), attention="causal"))
        best, second = row[0, -1, text[at]], row[0, -1, other[at]]
        assert abs(best - second) <= 2**-6 * np.abs(row[0, -1]).max(), (at, best, second)
        ties += 1
    record_property("near_ties", ties)
    print(f"{ties} of {sum(temperature == 0)} greedy texts differ from ar's behind a near-tie")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the draft is hardly ever right")  # it is random
@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_of_any_size_hold_both_caches(folder, page_size):
    """T4: greedy and sampled, ragged prompts, several samples; the pool is short."""
    target = dj.load(folder / "target", dtype="float32")
    params = [
        dj.SamplingParams(max_tokens=18, temperature=t, seed=i, n=n)
        for i, (t, n) in enumerate([(0.0, 1), (0.8, 2), (1.2, 2)])
    ]
    config = dj.EngineConfig(
        max_num_seqs=4,
        max_model_len=64,
        page_size=page_size,
        num_pages=80 // page_size,
        slot_buckets=(4,),
        prefill_buckets=(32,),
    )

    def run(strategy, **draft):
        llm = dj.LLM(target, strategy, config=config, warm_up=False, **draft)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        return [[one.token_ids for one in o.outputs] for o in outputs], llm.engine.stats()

    plain, _ = run(AR())
    drafted, stats = run(DFlash(), draft=folder / "draft")
    assert drafted == plain
    assert stats.num_preemptions > 0 or page_size > 1


@pytest.mark.slow
def test_a_text_is_streamed_as_it_settles(folder):
    """Pieces join to the text, each round's at once; two samples are told apart."""
    target = dj.load(folder / "target", dtype="float32")
    llm = dj.LLM(
        target,
        draft=folder / "draft",
        max_num_seqs=2,
        max_model_len=64,
        page_size=16,
        warm_up=False,
    )
    params = dj.SamplingParams(max_tokens=20, temperature=0.9, seed=3, n=2)
    (whole,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
    joined = ["", ""]
    for event in llm.stream(PROMPTS[1], params):
        joined[event.index] += event.text
    assert joined == [one.text for one in whole.outputs]
    assert joined[0] != joined[1]


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
