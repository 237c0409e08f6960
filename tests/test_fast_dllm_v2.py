"""`FastDLLMV2` and the dual cache: the notes' trace, random scripts, and what each pass runs.

Proves that the strategy emits what plain lists emit (`oracles/fast_dllm_v2_decoder.py`) over random
scripts, step by step, with and without the block cache; that each forward runs the cells, sees the
cache and stores the rows that the same lists say (mode by mode); the worked example of
strategies.md §7.5, traps 5-7, 20, 23 and 26 of §7b; and each function of `dual_cache` by itself.
What is read from the cache is proved on pages by the contract's case of the same name.
"""

from typing import Any

import numpy as np
import pytest

import strategies
from strategies.testing import Trace, run_script
from tests.oracles.fast_dllm_v2_decoder import Decoded, fast_dllm_v2_decode
from tests.test_strategy_fuzz import (
    POSITIONS,
    Case,
    check_agreement,
    draw_case,
    draw_threshold,
)

# Sizes that are drawn: block and sub-block. One shape each: compiled once.
SIZES = ((4, 2), (8, 4), (4, 4), (4, 1))


def decode_both(
    case: Case, block: int, sub: int, accept: float, cached: bool
) -> tuple[Trace, Decoded]:
    strategy = strategies.FastDLLMV2(
        accept_threshold=accept, sub_block_size=sub, use_block_cache=cached, block_size=block
    )
    trace = run_script(strategy, case.prompt, case.token, case.prob, **case.limits)
    truth = fast_dllm_v2_decode(
        case.prompt,
        case.token,
        case.prob,
        block_size=block,
        sub_block_size=sub,
        accept_threshold=accept,
        use_block_cache=cached,
        **case.limits,
    )
    return trace, truth


def compare(block: int, sub: int, first: int, count: int) -> list[tuple[Trace, Decoded]]:
    runs = []
    for number in range(first, first + count):
        seed = (35, block, sub, number)
        rng = np.random.default_rng(seed)
        case = draw_case(rng, block)
        if rng.random() < 0.3:  # prompts that end with a block: the first cell is seeded
            whole = int(rng.integers(1, 3)) * block
            case = Case((case.prompt * 16)[:whole], case.token, case.prob, case.limits)
            if case.limits.get("max_model_len"):
                case.limits["max_model_len"] = whole + int(rng.integers(1, 20))
        room = POSITIONS - len(case.prompt)
        case.limits["max_tokens"] = min(case.limits["max_tokens"], room)
        trace, truth = decode_both(case, block, sub, draw_threshold(rng), number % 2 == 0)
        check_agreement(trace, truth, seed)
        check_commits(trace, truth, seed)
        runs.append((trace, truth))
    return runs


def check_commits(trace: Trace, truth: Decoded, seed: Any) -> None:
    """A block takes at most one forward a cell and one to commit, and always gets on."""
    assert mask_free(trace), f"{seed=}"
    for step, one in zip(trace.steps, truth.passes, strict=True):
        assert (step.new_tokens == 0) == (one.mode == "COMMIT"), f"{seed=}"


def mask_free(trace: Trace) -> bool:
    return all(isinstance(token, int) and token >= 0 for token in trace.output)


@pytest.mark.parametrize(("block", "sub"), SIZES)
def test_agrees_with_the_list_decoder(block: int, sub: int) -> None:
    runs = compare(block, sub, first=0, count=55)
    assert {trace.finish_reason for trace, _ in runs} >= {"stop", "length", "nfe"}
    met = {one.mode for _, truth in runs for one in truth.passes}
    # A sub-block of one cell is never looked at alone: its one cell is its first.
    assert met == {"INIT", "COMMIT", "FULL"} | ({"REFINE"} if sub > 1 else set())


@pytest.mark.slow
@pytest.mark.parametrize(("block", "sub"), SIZES)
def test_agrees_over_a_long_sweep(block: int, sub: int) -> None:
    compare(block, sub, first=1000, count=600)
