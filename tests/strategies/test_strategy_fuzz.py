"""Random scripts: `run_script` must agree with the list decoder, step by step.

A failure prints the seed, which makes its script again. Shapes are constant, so a parametrised case
compiles once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dllm_jax import strategies
from dllm_jax.strategies.testing.script import Trace, run_script
from tests.oracles.list_decoder import (
    DUMMY,
    Result,
    Rule,
    block_diffusion_rule,
    list_ar,
    list_decode,
    multi_bd_rule,
)

FORWARDS, POSITIONS, VOCAB = 24, 40, 6
# With 6 ids, p = .2 leaves exactly .2 on each of the four others: a tie of all five tokens.
GRID = np.array([0.0, 0.05, 0.2, 0.25, 0.5, 0.75, 0.9, 1.0], np.float32)
THRESHOLDS = np.array([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.5])


@dataclass(frozen=True)
class Case:
    """One request with the model that answers it."""

    prompt: list[int]
    token: np.ndarray
    prob: np.ndarray
    limits: dict[str, Any]

    @property
    def limit(self) -> int:
        limit = len(self.prompt) + self.limits["max_tokens"]
        return min(limit, self.limits.get("max_model_len") or limit)


def mask_of(block_size: int) -> int:
    """The mask is the highest id with blocks of two, the lowest with blocks of four."""
    return VOCAB - 1 if block_size == 2 else 0


def draw_case(rng: np.random.Generator, block_size: int) -> Case:
    mask_id = mask_of(block_size)
    ids = np.array([i for i in range(VOCAB) if i != mask_id])
    stops = rng.choice(ids, size=rng.choice([0, 1, 2], p=[0.3, 0.5, 0.2]), replace=False)
    weight = np.where(np.isin(ids, stops), rng.choice([0.01, 0.1, 1.0]), 1.0)
    shape = (FORWARDS, POSITIONS)
    token = rng.choice(ids, size=shape, p=weight / weight.sum()).astype(np.int32)
    if rng.random() < 0.6:
        part = rng.choice(GRID, size=rng.integers(1, len(GRID) + 1), replace=False)
        prob = rng.choice(part, size=shape)
    else:
        prob = rng.random(shape) ** rng.choice([0.2, 1.0])
    prompt = rng.integers(0, VOCAB, size=rng.integers(1, 10)).tolist()
    limits: dict[str, Any] = {
        "max_tokens": int(rng.integers(1, 6 * block_size + 1)),
        "eos_ids": tuple(int(i) for i in stops),
        "mask_id": mask_id,
        "vocab_size": VOCAB,
    }
    if rng.random() < 0.3:
        limits["max_model_len"] = len(prompt) + int(rng.integers(1, 6 * block_size + 1))
    if rng.random() < 0.3:
        limits["max_nfe"] = int(rng.integers(1, 11))
    return Case(prompt, token, prob.astype(np.float32), limits)


def draw_threshold(rng: np.random.Generator) -> float:
    return float(rng.choice(THRESHOLDS) if rng.random() < 0.8 else rng.random())


def check_agreement(trace: Trace, truth: Result, seed: Any) -> None:
    assert (trace.output, trace.finish_reason, trace.nfe) == (
        truth.output,
        truth.finish_reason,
        truth.nfe,
    ), f"{seed=}"
    assert len(trace.steps) == len(truth.steps), f"{seed=}"
    for number, (step, true) in enumerate(zip(trace.steps, truth.steps, strict=True)):
        assert step.new_tokens == true.new_tokens, f"{seed=} {number=}"
        if true.tokens is not None:  # the row did not finish in this step
            window = (step.start, step.tokens, step.status)
            assert window == (true.start, true.tokens, true.status), f"{seed=} {number=}"


# ---- MultiBD ----


@pytest.mark.slow("1|2-2|4$|4-3")
@pytest.mark.parametrize("buffer_size", [1, 2, 3, 4])
@pytest.mark.parametrize("block_size", [2, 4])
def test_multi_bd_agrees_with_the_list_decoder(block_size: int, buffer_size: int) -> None:
    traces = []
    for number in range(200):
        seed = (block_size, buffer_size, number)
        rng = np.random.default_rng(seed)
        case = draw_case(rng, block_size)
        accept, add, semi = (draw_threshold(rng) for _ in range(3))
        if rng.random() < 0.15:  # blocks open at once and fill slowly: the window is full
            accept, add, semi = 0.9, 0.0, 1.5
        sizes = {"block_size": block_size, "buffer_size": buffer_size, "add_block_threshold": add}
        strategy = strategies.MultiBD(
            accept_threshold=accept, semi_complete_threshold=semi, **sizes
        )
        scripted = (case.prompt, case.token, case.prob)
        trace = run_script(strategy, *scripted, **case.limits)
        truth = list_decode(multi_bd_rule(accept, semi), *scripted, **sizes, **case.limits)
        check_agreement(trace, truth, seed)
        traces.append(trace)
    # The draw is worth something: every ending occurs, and windows held several blocks at once.
    assert {trace.finish_reason for trace in traces} >= {"stop", "length", "nfe"}
    widest = max(len(s.status) - s.status.count(DUMMY) for t in traces for s in t.steps)
    assert widest == buffer_size


# ---- BlockDiffusion ----

BLOCK_DIFFUSION = [
    ("sequential", 2, None),
    ("sequential", 4, 2),
    ("static", 2, 1),
    ("static", 4, 3),
    ("dynamic", 2, None),
    ("dynamic", 4, None),
    ("dynamic", 4, 3),
    ("entropy", 2, None),
    ("entropy", 4, None),
]


@pytest.mark.long("None")
@pytest.mark.slow("^(?!.*(3|entropy))")
@pytest.mark.parametrize(("remasking", "block_size", "denoising_steps"), BLOCK_DIFFUSION)
def test_block_diffusion_agrees_with_the_list_decoder(
    remasking: str, block_size: int, denoising_steps: int | None
) -> None:
    undecided = 0
    for number in range(100):
        seed = (block_size, denoising_steps or 0, number)
        rng = np.random.default_rng(seed)
        case = draw_case(rng, block_size)
        accept = draw_threshold(rng)
        bound = float(rng.choice([0.0, 0.3, 1.0, 2.0, 4.0]))
        if remasking == "entropy":
            # A sum over ids rounds by their order: entropies tie exactly for one token only.
            if number % 2:
                case.token[:] = case.token[:, :1]
            else:
                case.prob[:] = rng.random(case.prob.shape)
        fields = {"accept_threshold": accept, "entropy_bound": bound}
        fields |= {"denoising_steps": denoising_steps}
        strategy = strategies.BlockDiffusion(remasking=remasking, block_size=block_size, **fields)
        scripted = (case.prompt, case.token, case.prob)
        trace, truth = run_script(strategy, *scripted, **case.limits), Result()
        rule: Rule = block_diffusion_rule(remasking, **fields, result=truth)
        list_decode(rule, *scripted, block_size=block_size, result=truth, **case.limits)
        if truth.undecided:
            undecided += 1
        else:
            check_agreement(trace, truth, seed)
    assert undecided <= 5


# ---- AR ----


def test_ar_agrees_with_a_plain_loop() -> None:
    reasons = set()
    for seed in range(150):
        case = draw_case(np.random.default_rng((1, seed)), block_size=2)
        trace = run_script(strategies.AR(), case.prompt, case.token, case.prob, **case.limits)
        truth = list_ar(case.prompt, case.token, case.prob, **case.limits)
        check_agreement(trace, truth, seed)
        reasons.add(trace.finish_reason)
    assert reasons >= {"stop", "length", "nfe"}


# ---- mistakes that only two runs or a whole one show ----


def decode(case: Case, **fields: Any) -> Trace:
    strategy = strategies.MultiBD(**fields)
    return run_script(strategy, case.prompt, case.token, case.prob, **case.limits)


@pytest.mark.slow("4")
@pytest.mark.parametrize("block_size", [2, 4])
def test_a_buffer_that_never_adds_is_a_buffer_of_one(block_size: int) -> None:
    """Trap 21: add_block_threshold > 1, K = 4 gives K = 1's tokens with K = 1's bubbles."""
    for seed in range(50):
        case = draw_case(np.random.default_rng((21, block_size, seed)), block_size)
        fields: dict[str, Any] = {"accept_threshold": 0.5, "block_size": block_size}
        one = decode(case, buffer_size=1, **fields)
        four = decode(case, buffer_size=4, add_block_threshold=1.5, **fields)
        assert (one.output, one.finish_reason, one.nfe) == (
            four.output,
            four.finish_reason,
            four.nfe,
        ), f"{seed=}"
        assert [s.start for s in one.steps] == [s.start for s in four.steps], f"{seed=}"
        assert [s.tokens[0] for s in one.steps] == [s.tokens[0] for s in four.steps], f"{seed=}"
