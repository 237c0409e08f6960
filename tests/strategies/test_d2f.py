"""`D2F`: a worked trace, the list decoder, and the authors' loop.

A LLaDA or Dream folder with a D2F adapter is decoded by it, as NumPy on the files' tensors says.
test_contract.py and test_engine_device.py cover pages, preemption and prefix hits on both grids.
"""

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import strategies
from dllm_jax.api.strategy import resolve_strategy
from dllm_jax.cli import strategy as cli_strategy
from dllm_jax.cli.errors import UsageError
from dllm_jax.engine.layout import EngineConfig
from dllm_jax.loading.model import Model
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.families import parse_config
from dllm_jax.models.family import with_d2f_adapter
from dllm_jax.strategies import D2F, load_strategy
from dllm_jax.strategies.testing.script import Trace, run_script
from tests.contract.dense_blocks import decode_blocks, threshold_rule
from tests.contract.harness import Request
from tests.models.test_family_decode import MASK_ID, Files
from tests.oracles.checkpoints import write_adapter, write_tiny
from tests.oracles.d2f_decoder import paper_decode
from tests.oracles.families import run
from tests.oracles.list_decoder import list_decode, multi_bd_rule
from tests.oracles.tiny_configs import CONFIGS
from tests.strategies.test_strategy_fuzz import (
    Case,
    check_agreement,
    draw_case,
    draw_threshold,
    mask_of,
)
from tests.strategies.test_traces import MASK, column, script, windows
from tests.strategies.test_traces import VOCAB as TRACE_VOCAB

# ---- the trace ----


def test_the_trace_by_script():
    aligned = [
        {4: (9, 0.95), 5: (10, 0.95), 6: (11, 0.3), 7: (12, 0.2)},
        {5: (20, 0.99), 6: (11, 0.95), 7: (12, 0.95)},
        {8: (25, 0.95)},
        {},
    ]
    token, prob = script(aligned)
    limits = {"max_tokens": 32, "mask_id": MASK, "vocab_size": TRACE_VOCAB}
    strategy = D2F(accept_threshold=0.9, block_size=4, buffer_size=2)
    trace = run_script(strategy, [1, 2, 3, 4], token, prob, **limits)
    assert windows(trace)[:4] == [
        "A[9 10 _ _] D",
        "T[9 10 11 12] A[_ _ _ _]",
        "A[25 _ _ _] D",
        "A[25 1 _ _] A[_ _ _ _]",  # opened before the forward: 1 of 4 is filled
    ]
    assert column(trace, "start")[:4] == [4, 4, 8, 8]
    assert column(trace, "new_tokens")[:4] == [2, 2, 1, 1]


# ---- the prompt ----


def test_the_option_decides_how_the_prompt_is_taken_in():
    assert load_strategy("d2f") == D2F()
    assert load_strategy("d2f").needs.prompt == "grid_full"
    aligned = load_strategy("d2f", align_blocks_to_prompt=True)
    assert aligned.needs.prompt == "whole_full"
    reported = (D2F().add_block_threshold, D2F().semi_complete_threshold, D2F().accept_threshold)
    assert (*reported, D2F().block_size, D2F().buffer_size) == (0.1, 0.9, 0.95, 32, 4)
    with pytest.raises(ValueError, match="D2F has no such field to set; its fields are accept_"):
        load_strategy("d2f", needs="grid_causal")


def test_the_command_line_sets_the_option():
    parsed = parse_config({**CONFIGS["llada"], "mask_token_id": 47})
    model = Model({}, parsed.config, arch_of(parsed.config), with_d2f_adapter(parsed.defaults))
    found = cli_strategy.resolve(model, None, None, {"align_blocks_to_prompt": True})
    assert found == D2F(align_blocks_to_prompt=True)
    with pytest.raises(UsageError, match="align_blocks_to_prompt=3 is not true or false"):
        cli_strategy.resolve(model, "d2f", None, {"align_blocks_to_prompt": 3})


# ---- random scripts ----


def setting(rng: np.random.Generator) -> dict[str, float]:
    accept, add, semi = (draw_threshold(rng) for _ in range(3))
    if rng.random() < 0.15:  # blocks open at once and fill slowly: the window is full
        accept, add, semi = 0.9, 0.0, 1.5
    return {"accept": accept, "add": add, "semi": semi}


def value(package: Any, thresholds: dict[str, float], **fields: Any) -> Any:
    return package.D2F(
        accept_threshold=thresholds["accept"],
        add_block_threshold=thresholds["add"],
        semi_complete_threshold=thresholds["semi"],
        **fields,
    )


def run_both(package: Any, seed: Any, aligned: bool, S: int, K: int) -> tuple[Trace, Any, Case]:
    rng = np.random.default_rng(seed)
    case = draw_case(rng, S)
    thresholds = setting(rng)
    strategy = value(
        package, thresholds, align_blocks_to_prompt=aligned, block_size=S, buffer_size=K
    )
    trace = package.testing.run_script(strategy, case.prompt, case.token, case.prob, **case.limits)
    truth = list_decode(
        multi_bd_rule(thresholds["accept"], thresholds["semi"]),
        case.prompt,
        case.token,
        case.prob,
        add_block_threshold=thresholds["add"],
        aligned=aligned,
        block_size=S,
        buffer_size=K,
        **case.limits,
    )
    return trace, truth, case


@pytest.mark.slow("2$|False-4|True-2")
@pytest.mark.parametrize(("S", "K"), [(2, 3), (4, 2), (4, 4)])
@pytest.mark.parametrize("aligned", [False, True])
def test_d2f_agrees_with_the_list_decoder(aligned, S, K):
    traces = []
    for number in range(40):
        seed = (7, int(aligned), S, K, number)
        trace, truth, case = run_both(strategies, seed, aligned, S, K)
        check_agreement(trace, truth, seed)
        origin = len(case.prompt) if aligned else 0
        assert all((step.start - origin) % S == 0 for step in trace.steps), f"{seed=}"
        traces.append(trace)
    assert {trace.finish_reason for trace in traces} >= {"stop", "length", "nfe"}
    assert max(len(s.status) - s.status.count(0) for t in traces for s in t.steps) >= min(K, 3)


# ---- the authors' loop ----


def test_aligned_blocks_write_the_authors_text():
    """The window holds as many blocks as a text can have, as their loop's does."""
    S, found = 4, []
    for number in range(100):
        seed = (8, S, number)
        rng = np.random.default_rng(seed)
        case = draw_case(rng, S)
        thresholds = setting(rng)
        for name in ("add", "semi"):  # above 1, theirs never begins or never ends
            thresholds[name] = min(thresholds[name], 1.0)
        most = int(rng.integers(S, 4 * S + 1))
        # Theirs needs a forward a token at most; the script repeats its last row.
        token, prob = (np.concatenate([x, x, x]) for x in (case.token, case.prob))
        said = {"mask_id": mask_of(S), "vocab_size": case.limits["vocab_size"]}
        eos = case.limits["eos_ids"]
        how = {"block_size": S, "max_new_tokens": most, "eos_ids": eos, **thresholds, **said}
        theirs, forwards = paper_decode(case.prompt, token, prob, **how)
        strategy = value(
            strategies, thresholds, align_blocks_to_prompt=True, block_size=S, buffer_size=5
        )
        ours = run_script(strategy, case.prompt, token, prob, max_tokens=most, eos_ids=eos, **said)
        stop = next((i for i, cell in enumerate(theirs) if cell in eos), None)
        if stop is not None:
            assert (ours.output, ours.finish_reason) == (theirs[:stop], "stop"), f"{seed=}"
            assert ours.nfe <= forwards, f"{seed=}"
        else:
            # Theirs stops at whole blocks; to there the texts are one.
            assert len(theirs) == most // S * S, f"{seed=}"
            assert ours.output[: len(theirs)] == theirs, f"{seed=}"
            assert most % S or (ours.finish_reason, ours.nfe) == ("length", forwards), f"{seed=}"
        found.append((ours, forwards))
    assert any(ours.finish_reason == "stop" and ours.nfe < forwards for ours, forwards in found)
    assert {ours.finish_reason for ours, _ in found} == {"stop", "length"}


def agrees(package: ModuleType) -> bool:
    """Whether a package agrees with the list decoder on the corpus of the mutants."""
    for number in range(200):
        seed = (9, number)
        trace, truth, _ = run_both(package, seed, aligned=number % 2 == 0, S=4, K=3)
        try:
            check_agreement(trace, truth, seed)
        except AssertionError:
            return False
    return True


# ---- folders with a D2F adapter ----


class Adapted(Files):
    """A checkpoint with an adapter, as `dense_blocks` takes a network."""

    def __init__(self, folder: Path, family: str, adapter: Path):
        super().__init__(folder, family)
        self.adapter = adapter

    def __call__(self, inputs, positions, sees, modes=None):
        found = run(self.folder, inputs, sees, adapter=self.adapter, positions=positions)
        return SimpleNamespace(logits=found.logits)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "aligned"),
    [
        ("dream", True),
        *(
            pytest.param(*which, marks=pytest.mark.slow)
            for which in (("dream", False), ("llada", True), ("llada", False))
        ),
    ],
)
def test_a_folder_with_an_adapter_is_decoded_by_d2f(family, aligned, tmp_path):
    folder = write_tiny(family, tmp_path / "base", seed=3, mask_token_id=MASK_ID)
    adapter = write_adapter(folder, tmp_path / "D2F_adapter")
    model = dj.load(folder, lora=adapter, dtype="float32")
    strategy = resolve_strategy(model, None)
    assert strategy == D2F()  # the published settings are its defaults
    strategy = D2F(0.12, 0.25, 0.5, aligned, block_size=4, buffer_size=3)
    prompts = [
        np.random.default_rng(5).choice(np.arange(6, MASK_ID), n).tolist() for n in (3, 22, 16)
    ]
    wanted = []
    for prompt in prompts:
        found = decode_blocks(
            Adapted(folder, family, adapter),
            Request(tuple(prompt), 18),
            threshold_rule(0.12, 0.5),
            size=4,
            depth=3,
            add=0.25,
            prompt=strategy.needs.prompt,
        )
        wanted.append((found.tokens, found.nfe))
    config = EngineConfig(
        max_num_seqs=3,
        max_model_len=64,
        page_size=8,
        num_pages=11,  # for texts of 21, 40 and 34 tokens: somebody has to go
        slot_buckets=(3,),
        page_buckets=(8,),
        prefill_buckets=(32,),
        max_steps_per_chunk=2,
    )
    llm = dj.LLM(model, strategy, config=config, progress=False)
    params = dj.SamplingParams(max_tokens=18, ignore_eos=True)
    outs = llm.generate(prompts, params)
    assert [(o.outputs[0].token_ids, o.metrics.nfe) for o in outs] == wanted
    assert sum(o.metrics.num_preemptions for o in outs)
    # The whole prompt is found or nothing; the short pool may have lost it before the first.
    for again in (llm.generate([prompts[1]], params)[0] for _ in range(2)):
        assert (again.outputs[0].token_ids, again.metrics.nfe) == wanted[1]
    assert again.metrics.cached_tokens == (22 if aligned else 20)
    [longer] = llm.generate([[*prompts[1], *prompts[0]]], params)
    assert longer.metrics.cached_tokens == 0
