"""`FastDLLMV2` and the dual cache: a worked trace, random scripts, and the rows of each pass.

`oracles/fast_dllm_v2_decoder.py` says both. test_contract.py proves on pages what is read from the
cache.
"""

import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import strategies
from dllm_jax.api.strategy import check_fit
from dllm_jax.strategies.core import dual_cache
from dllm_jax.strategies.core.state import (
    ACTIVE,
    RUNNING,
    STOP,
    TO_CACHE,
    BlockBuffer,
    DecodeState,
    Limits,
)
from dllm_jax.strategies.testing.script import Trace, run_script
from tests.contract.cases import case as contract_case
from tests.contract.cases import paged
from tests.contract.cases import truth as contract_truth
from tests.contract.dense import Net
from tests.contract.dense_sub_blocks import decode_sub_blocks
from tests.contract.models import plain
from tests.oracles.fast_dllm_v2_decoder import Decoded, Pass, fast_dllm_v2_decode
from tests.strategies.recorded import Ran, recording
from tests.strategies.test_strategy_fuzz import (
    POSITIONS,
    Case,
    check_agreement,
    draw_case,
    draw_threshold,
)
from tests.strategies.test_traces import EOS, MASK, VOCAB, column, everywhere, script, windows

# Sizes that are drawn: block and sub-block. One shape each: compiled once.
SIZES = ((4, 2), (8, 4), (4, 1), (4, 4))


def decode_both(
    case: Case,
    block: int,
    sub: int,
    accept: float,
    cached: bool,
    package: ModuleType = strategies,
) -> tuple[Trace, Decoded]:
    strategy = package.FastDLLMV2(
        accept_threshold=accept, sub_block_size=sub, use_block_cache=cached, block_size=block
    )
    script = (case.prompt, case.token, case.prob)
    trace = package.testing.run_script(strategy, *script, **case.limits)
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


def compare(
    block: int, sub: int, count: int, package: ModuleType = strategies
) -> list[tuple[Trace, Decoded]]:
    runs = []
    for number in range(count):
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
        trace, truth = decode_both(case, block, sub, draw_threshold(rng), number % 2 == 0, package)
        check_agreement(trace, truth, seed)
        check_commits(trace, truth, seed)
        runs.append((trace, truth))
    return runs


def check_commits(trace: Trace, truth: Decoded, seed: Any) -> None:
    """Every forward fills a cell but those that commit."""
    for step, one in zip(trace.steps, truth.passes, strict=True):
        assert (step.new_tokens == 0) == (one.mode == "COMMIT"), f"{seed=}"


@pytest.mark.long
@pytest.mark.slow("2|8|4-4")
@pytest.mark.parametrize(("block", "sub"), SIZES)
def test_agrees_with_the_list_decoder(block: int, sub: int) -> None:
    runs = compare(block, sub, count=70)
    assert {trace.finish_reason for trace, _ in runs} >= {"stop", "length", "nfe"}
    met = {one.mode for _, truth in runs for one in truth.passes}
    # A sub-block of one cell is never looked at alone: its one cell is its first.
    assert met == {"INIT", "COMMIT", "FULL"} | ({"REFINE"} if sub > 1 else set())


# ---- what each forward runs, sees and stores ----


def passes_of(ran: list[Ran]) -> list[Pass]:
    """Whether a forward was narrow is all that can be known of its mode."""
    return [
        Pass("REFINE" if one.width else "WHOLE", one.first, one.end, one.context, one.stored)
        for one in ran
    ]


def compare_passes(package: ModuleType, cached: bool, numbers: range) -> set[tuple[str, bool]]:
    """Which modes were met, and whether on a whole block or one that the limit cuts."""
    met = set()
    with recording(package) as ran:
        for number in numbers:
            rng = np.random.default_rng((36, number))
            case = draw_case(rng, 8)
            case.limits.update(max_tokens=int(rng.integers(9, 20)), max_nfe=16, eos_ids=())
            ran.clear()
            _, truth = decode_both(case, 8, 4, 0.5, cached, package)
            jax.effects_barrier()
            wanted = [
                one if one.mode == "REFINE" else dataclasses.replace(one, mode="WHOLE")
                for one in truth.passes
            ]
            assert passes_of(ran) == wanted, f"{number=}"
            met |= {(one.mode, one.context % 8 > 0 or one.end % 8 > 0) for one in truth.passes}
    return met


@pytest.mark.long
@pytest.mark.slow("whole blocks")
@pytest.mark.parametrize("cached", [True, False], ids=["block cache", "whole blocks"])
def test_each_forward_runs_sees_and_stores_what_the_lists_say(cached: bool) -> None:
    """Mode by mode, the limit's cut included (trap 26; the reference crashes there, B6)."""
    met = compare_passes(strategies, cached, range(40))
    modes = ("INIT", "REFINE") if cached else ("FULL",)
    assert met == {(mode, cut) for mode in modes for cut in (True, False)} | {("COMMIT", False)}


# ---- the worked example, and what it does not show ----


def by_lists(forwards: Any, prompt: list[int], **options: Any) -> Any:
    token, prob = script(forwards)
    return fast_dllm_v2_decode(prompt, token, prob, mask_id=MASK, vocab_size=VOCAB, **options)


def by_strategy(forwards: Any, prompt: list[int], **options: Any) -> Any:
    token, prob = script(forwards)
    fields = ("block_size", "sub_block_size", "accept_threshold", "use_block_cache")
    own = {name: options.pop(name) for name in fields if name in options}
    strategy = strategies.FastDLLMV2(**own)
    return run_script(strategy, prompt, token, prob, mask_id=MASK, vocab_size=VOCAB, **options)


@pytest.fixture(params=[by_lists, by_strategy], ids=["list_decoder", "run_script"])
def decode(request: pytest.FixtureRequest) -> Any:
    return request.param


SMALL: dict[str, Any] = {"block_size": 8, "sub_block_size": 4, "accept_threshold": 0.9}
# The notes' b = 4, N = 2. Their step 1 is our prefill.
TRACED = [
    {11: (12, 0.95)},
    {},  # nothing above: 10 is forced to the default token
    {13: (16, 0.95)},
    {14: (17, 0.95), 15: (18, 0.93)},
    {},  # 12, the last
    {},  # commit: nothing is sampled
    {16: (20, 0.3), 17: (21, 0.95)},  # the pending token 20 counts as a new one
]


@pytest.mark.long("run_script-whole blocks")
@pytest.mark.parametrize("cached", [True, False], ids=["block cache", "whole blocks"])
def test_the_traced_example(decode: Any, cached: bool) -> None:
    trace = decode(TRACED, list(range(1, 11)), **SMALL, use_block_cache=cached, max_tokens=32)
    assert windows(trace)[:7] == [
        "A[9 10 _ 12 _ _ _ _]",
        "A[9 10 1 12 _ _ _ _]",
        "A[9 10 1 12 _ 16 _ _]",
        "A[9 10 1 12 _ 16 17 18]",
        "T[9 10 1 12 1 16 17 18]",
        "D",
        "A[20 21 _ _ _ _ _ _]",
    ]
    assert column(trace, "new_tokens")[:7] == [1, 1, 1, 2, 1, 0, 2]
    assert column(trace, "start")[:7] == [8, 8, 8, 8, 8, 16, 16]
    assert list(trace.output)[:8] == [1, 12, 1, 16, 17, 18, 20, 21]


def test_the_passes_of_the_traced_example() -> None:
    """The notes' modes; the first INIT is stored, which the reference leaves out (B5)."""
    with recording(strategies) as ran:
        by_strategy(TRACED, list(range(1, 11)), **SMALL, max_tokens=32, max_nfe=7)
        jax.effects_barrier()
    init, refine = Pass("WHOLE", 8, 16, 8, 8), Pass("REFINE", 8, 12, 16, 4)
    assert passes_of(ran) == [init, refine, init, init, init, init, Pass("WHOLE", 16, 24, 16, 8)]


def test_an_aligned_prompt_is_seeded(decode: Any) -> None:
    """B7. The seed is there before the first forward, which may refine right behind it."""
    forwards = [{8: (20, 0.3), 9: (21, 0.95)}, {10: (22, 0.95), 11: (23, 0.95)}]
    trace = decode(forwards, list(range(1, 9)), **SMALL, max_tokens=4)
    assert windows(trace) == ["A[20 21 _ _ _ _ _ _]"]
    assert column(trace, "new_tokens") == [2, 2]
    assert (list(trace.output), trace.finish_reason, trace.nfe) == ([20, 21, 22, 23], "length", 2)


def test_a_seed_may_be_all_that_is_wanted(decode: Any) -> None:
    trace = decode([{8: (20, 0.3)}], list(range(1, 9)), **SMALL, max_tokens=1)
    assert (list(trace.output), trace.finish_reason, trace.nfe) == ([20], "length", 1)


def test_a_seed_that_stops_ends_the_request(decode: Any) -> None:
    trace = decode([{8: (EOS, 0.3)}], list(range(1, 9)), **SMALL, max_tokens=9, eos_ids=(EOS,))
    assert (list(trace.output), trace.finish_reason, trace.nfe) == ([], "stop", 1)


def test_a_stop_behind_a_hole_of_its_sub_block_waits(decode: Any) -> None:
    """Trap 8: and one in the prompt, or in a sub-block not yet looked at, is none."""
    forwards = [{10: (EOS, 0.95), 13: (EOS, 0.95)}, {9: (11, 0.95)}]
    trace = decode(forwards, [1, EOS, 3, 4, 5, 6, 7, 8, 9], **SMALL, max_tokens=9, eos_ids=(EOS,))
    assert windows(trace) == ["A[9 _ 30 _ _ _ _ _]"]
    assert (list(trace.output), trace.finish_reason, trace.nfe) == ([11], "stop", 2)


def test_the_limit_cuts_a_sub_block(decode: Any) -> None:
    """Traps 20 and 26: a cell at the limit takes no part, though the model is sure of it."""
    forwards = [{10: (22, 0.3), 11: (23, 0.99), 12: (24, 0.99)}, {9: (21, 0.2)}]
    trace = decode(forwards, list(range(1, 10)), **SMALL, max_tokens=2)
    assert windows(trace) == ["A[9 _ 22 _ _ _ _ _]"]
    assert (list(trace.output), trace.finish_reason, trace.nfe) == ([21, 22], "length", 2)


@pytest.mark.parametrize(("accept", "nfe"), [(1.0, 8), (0.0, 3)])
def test_certainty_at_threshold_one_and_anything_at_zero(
    decode: Any, accept: float, nfe: int
) -> None:
    """Trap 23: 1 is not above 1, so a token a forward; above 0 is a sub-block a forward."""
    options = {**SMALL, "accept_threshold": accept}
    trace = decode([everywhere((10, 1.0))] * 12, [1, 2], **options, max_tokens=7)
    # Six cells to the end of the block, one commit, and the seed of the next with its forward.
    assert (list(trace.output), trace.nfe) == ([10] * 7, nfe + (accept == 0.0))


def test_ties_go_to_the_lowest_position_and_mask_ids_of_a_prompt_are_tokens(decode: Any) -> None:
    """Traps 5 to 7; strictly above, so .5 is not enough at .5."""
    options = {**SMALL, "accept_threshold": 0.5}
    trace = decode([everywhere((10, 0.5))] * 2, [MASK, 2, MASK], **options, max_tokens=9)
    assert windows(trace)[:2] == ["A[_ 2 _ 10 _ _ _ _]", "A[_ 2 _ 10 10 _ _ _]"]


# ---- what it refuses ----


def test_sizes_that_do_not_fit_are_refused() -> None:
    for field, match in (
        ({"sub_block_size": 3}, "sub_block_size=3 must divide block_size=8"),
        ({"sub_block_size": 0}, "sub_block_size=0 must divide block_size=8"),
        ({"buffer_size": 2}, "buffer_size=2: Fast-dLLM v2 refines one block at a time; use 1"),
    ):
        strategy = strategies.FastDLLMV2(block_size=8, sub_block_size=4).replace(**field)
        with pytest.raises(ValueError, match=match):
            run_script(strategy, [1], *script([{}]), max_tokens=4, mask_id=MASK, vocab_size=VOCAB)


def test_a_model_that_is_not_shifted_is_refused() -> None:
    """Its last row says nothing of the next block's first token."""
    with pytest.raises(ValueError, match="FastDLLMV2 continues from the row before its window"):
        check_fit(plain(), strategies.FastDLLMV2(block_size=8))
    check_fit(plain(shift=True), strategies.FastDLLMV2(block_size=8))


# ---- the dual cache, function by function ----

A, T = ACTIVE, TO_CACHE


def window(rows: list[str], status: list[int], **more: Any) -> DecodeState:
    """A state of which only the buffer and `finish` mean anything; `x` is filled, `_` a hole."""
    filled = np.array([[[cell == "x" for cell in row]] for row in rows])
    B, S = len(rows), len(rows[0])
    fields = {
        "start": [8] * B,
        "prompt_len": [8] * B,
        "limit": [99] * B,
        "steps": [1] * B,
        "finish": [RUNNING] * B,
    } | more

    def column_of(name: str) -> Any:
        return jnp.asarray(fields[name], jnp.int32)

    none: Any = None
    return DecodeState(
        buffer=BlockBuffer(
            tokens=jnp.full((B, 1, S), 5, jnp.int32),
            filled=jnp.asarray(filled),
            status=jnp.asarray(status, jnp.int32)[:, None],
            start=column_of("start"),
            prompt_len=column_of("prompt_len"),
            limit=column_of("limit"),
            block_steps=column_of("steps")[:, None],
            nfe=jnp.zeros((B,), jnp.int32),
            idle=jnp.zeros((B,), jnp.int32),
        ),
        finish=column_of("finish"),
        keys=jax.random.split(jax.random.key(0), B),
        boundary=jnp.arange(B, dtype=jnp.float32)[:, None],
        sampling=none,
        limits=Limits(stop_ids=none, max_nfe=none, max_run=none),
        carry=none,
        knobs=none,
        rows=none,
        page_table=none,
        pools=none,
        output=none,
        output_len=none,
    )


def cells(mask: Any) -> list[str]:
    return ["".join("x" if cell else "." for cell in row[0]) for row in np.asarray(mask)]


class _Spy:
    """A forward that keeps what it is called with, and predicts a seed of 7."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.seeds = 0

    def __call__(self, state: Any, **options: Any) -> Any:
        self.calls.append(options)
        return jnp.zeros(())

    def predict(self, hidden: Any, sampling: Any, keys: Any, **_: Any) -> Any:
        self.seeds += 1
        assert keys.shape == hidden.shape[:1]
        nothing = jnp.zeros(hidden.shape[:1])
        return strategies.TokenStats(7 + hidden[:, 0].astype(int), nothing, nothing, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("finish", "width"), [([RUNNING] * 3, None), ([RUNNING, RUNNING, STOP], 2)]
)
def test_a_batch_is_narrow_where_every_running_row_refines(
    finish: list[int], width: int | None
) -> None:
    """Trap 26: requests in unlike modes share a forward, of the full width."""
    state = window(["x___"] * 3, [A] * 3, limit=[99, 11, 99], finish=finish)
    sub_block = dual_cache.sub_block(state, 2)
    spy: Any = _Spy()
    with jax.disable_jit():
        _, live = dual_cache.run(spy, state, sub_block, jnp.asarray([True, True, False]), 2)
    (call,) = spy.calls
    assert call["width"] == width
    assert cells(call["live"]) == cells(live) == ["xx..", "xx..", "xxxx"]
    # Committed text and the block, to the limit; the committed text alone.
    assert call["context_len"].tolist() == [12, 11, 8]


def test_only_open_blocks_that_begin_with_a_hole_are_seeded() -> None:
    rows = ["____", "x___", "____", "____", "xxxx"]
    finish = [RUNNING, RUNNING, STOP, RUNNING, RUNNING]
    state = window(rows, [A, A, A, 0, T], finish=finish)
    spy: Any = _Spy()
    with jax.disable_jit():
        new, seeded = dual_cache.seed_block(spy, state)
    assert spy.seeds == 1
    assert cells(seeded) == ["x...", "....", "....", "....", "...."]
    assert cells(new.buffer.filled) == ["x...", "x...", "....", "....", "xxxx"]
    assert new.buffer.tokens[0, 0].tolist() == [7, 5, 5, 5]
    with jax.disable_jit():
        dual_cache.seed_block(spy, new)
    assert spy.seeds == 1, "the head ran for nobody"


def check_corpus(package: ModuleType, corpus: str) -> None:
    """Raise AssertionError if a package differs from the oracles on a corpus of the mutants."""
    if corpus == "passes":
        compare_passes(package, cached=True, numbers=range(12))
    else:
        compare(8, 4, count=60, package=package)


# ---- on pages (the contract's case) ----


def test_the_contracts_case_meets_every_mode_and_mixes_them() -> None:
    logs = [truth.log for truth in contract_truth("fast_dllm_v2")]
    assert {mode for log in logs for mode in log} == {"init", "refine", "commit"}
    together = [set(step) for step in zip(*logs, strict=False)]
    assert {"refine"} in together, "a step of the narrow program"
    assert any("refine" in modes and len(modes) > 1 for modes in together)
    limits = [request.limit % 8 for request in contract_case("fast_dllm_v2").requests]
    assert any(limits), "a block is cut"


@pytest.mark.slow
def test_whole_blocks_on_pages_decode_as_the_dense_run() -> None:
    c = contract_case("fast_dllm_v2")
    truth = functools.partial(decode_sub_blocks, Net(c.model), size=8, sub=4, accept=0.5)
    wanted = [truth(request, block_cache=False) for request in c.requests]
    rows = paged("fast_dllm_v2", strategy=c.strategy.replace(use_block_cache=False)).rows
    assert [(r.tokens, r.nfe) for r in rows] == [(t.tokens, t.nfe) for t in wanted]
    # What is read from the block's cache shows: the texts are not those of the other mode.
    assert [t.tokens for t in wanted] != [t.tokens for t in contract_truth("fast_dllm_v2")]
