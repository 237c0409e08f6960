"""`EditIndel` against worked examples of each step of docs/llada2_2_edits.md and its list decoder.

The gate (`tests.contract.cases`) proves the same on a model and of the engine.
"""

import itertools
import operator
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import strategies
from dllm_jax.api import snapshot
from dllm_jax.api.resume import resume
from dllm_jax.engine.layout import DeviceFailure
from dllm_jax.strategies.testing.script import Trace, run_script
from dllm_jax.trace import replay, trajectory
from tests.contract import cases
from tests.oracles.edit_decoder import Edited
from tests.oracles.indel_decoder import Rules, indel_decode
from tests.strategies.test_edit import draw_edit_case
from tests.strategies.test_strategy_fuzz import Case, check_agreement, draw_threshold
from tests.strategies.test_traces import (
    EOS,
    MASK,
    VOCAB,
    Forward,
    everywhere,
    script,
    windows,
)

DELETE, SPLIT = 28, 29
LITERAL = {
    "accept_threshold": 0.5,
    "edit_threshold": 0.0,
    "max_post_edit_steps": 4,
    "denoising_steps": 4,
    "max_block_steps": 9,
    "delete_token_id": DELETE,
    "split_token_id": SPLIT,
}


def decode_both(
    case: Case, rules: dict[str, Any], package: Any = strategies, **sizes: Any
) -> tuple[Trace, Edited]:
    """A script through the strategy and through the list decoder."""
    given = case.prompt, case.token, case.prob
    strategy = package.EditIndel(**rules, **sizes)
    trace = package.testing.run_script(strategy, *given, **case.limits)
    return trace, indel_decode(Rules(**rules), *given, **sizes, **case.limits)


def follow(
    forwards: list[Forward],
    prompt: tuple[int, ...] = (1, 2, 3, 4),
    package: Any = strategies,
    **how: Any,
) -> Trace:
    """A literal script over one block at a time, on which both decoders must agree."""
    limits = {"max_tokens": how.pop("max_tokens", 24), "mask_id": MASK, "vocab_size": VOCAB}
    limits["eos_ids"] = how.pop("eos_ids", ())
    case = Case(list(prompt), *script(forwards), limits)
    sizes = {"add_block_threshold": 0.1, "block_size": 4, "buffer_size": 1}
    trace, truth = decode_both(case, LITERAL | how, package, **sizes)
    check_agreement(trace, truth, "literal")
    return trace


def says(*cells: Any, sure: float = 0.9) -> Forward:
    """What the first block's cells are said to be: a token, or it and its probability."""
    pairs = (cell if isinstance(cell, tuple) else (cell, sure) for cell in cells)
    return dict(enumerate(pairs, 4))


WHOLE = says(10, 11, 12, 13)
ESCAPES_TWICE = [
    says(0, 11, 10, 10),
    says(20, 11, 10, 10),
    says(0, 12, 10, 10),
    says((20, 0.6), (11, 0.7), 10, 10),
]


# ---- The eight steps ----


def test_a_delete_takes_its_cell_out_and_the_text_moves_up() -> None:
    after = says(10, 12, 13, (14, 0.3))
    forwards = [WHOLE, says(10, DELETE, 12, 13), after, says(10, 12, 13, 14), {}]
    assert windows(follow(forwards))[:4] == [
        "A[10 11 12 13]",
        "A[10 12 13 _]",
        "A[10 12 13 14]",  # a hole that an edit left is wanted at once, however unsure
        "T[10 12 13 14]",
    ]


def test_a_split_puts_a_hole_before_the_token_that_stood_there() -> None:
    forwards = [WHOLE, says(10, SPLIT, 12, 13), says(10, 20, 11, 12), says(10, 20, 11, 12)]
    assert windows(follow(forwards))[:4] == [
        "A[10 11 12 13]",
        "A[10 _ 11 12]",  # 13 is pushed over the end and lost
        "A[10 20 11 12]",
        "T[10 20 11 12]",
    ]


def test_edits_beside_each_other_are_consumed_from_the_left() -> None:
    forwards = [WHOLE, says(DELETE, SPLIT, DELETE, 20), says(7, 11, 20, 8)]
    assert windows(follow(forwards))[1:3] == ["A[_ 11 20 _]", "A[7 11 20 8]"]


def test_holes_may_be_deleted_and_split() -> None:
    """A SPLIT in a hole leaves that hole after the new one; a DELETE brings one up."""
    forwards = [says((SPLIT, 0.9), (5, 0.1), (5, 0.1), (5, 0.1)), says(10, (DELETE, 0.8), 11, 12)]
    assert windows(follow(forwards))[:2] == ["A[_ _ _ _]", "A[10 11 12 _]"]


@pytest.mark.long
def test_the_schedule_wants_its_share_and_every_new_hole() -> None:
    unsure = says((10, 0.4), (11, 0.3), (12, 0.2), (13, 0.1), sure=0)
    assert windows(follow([unsure]))[0] == "A[10 _ _ _]"
    assert windows(follow([unsure], denoising_steps=3))[0] == "A[10 11 _ _]"  # 4 = 2 + 1 + 1
    two_sure = says(10, 11, (12, 0.4), (13, 0.3))
    assert windows(follow([two_sure]))[0] == "A[10 11 _ _]"
    # One hole by a SPLIT and one of the schedule: two are wanted, and one above is not enough.
    split = says(10, SPLIT, (12, 0.4), (13, 0.3))
    third = says(10, (20, 0.3), (11, 0.9), (12, 0.6))
    assert windows(follow([two_sure, split, third]))[1:3] == ["A[10 _ 11 12]", "A[10 20 11 12]"]


def test_past_the_schedule_every_hole_is_filled() -> None:
    """The schedule is over after 4 forwards, of which some gave no text."""
    unsure = says((SPLIT, 0.3), (5, 0.1), (5, 0.1), (5, 0.1))
    trace = follow([unsure] * 4 + [says(10, 11, 12, 13, sure=0.2)])
    assert windows(trace)[4] == "A[10 11 12 13]"


def test_thresholds_are_strict() -> None:
    half = [everywhere((10, 0.5)), everywhere((11, 0.5))]
    assert windows(follow(half))[0] == "A[10 _ _ _]"
    assert windows(follow([WHOLE, half[1]], edit_threshold=0.5))[1] == "T[10 11 12 13]"
    assert windows(follow([WHOLE, half[1]], edit_threshold=0.25))[1] == "A[11 11 11 11]"


def test_the_last_forward_of_the_budget_fills_all_and_edits_by_text_alone() -> None:
    """The fourth forward that began without a first hole."""
    forwards = [
        WHOLE,
        says(10, 11, 12, DELETE),
        says(10, 11, 12, 14),
        says(10, 11, 15, DELETE),
        says(DELETE, SPLIT, 15, (16, 0.1)),
    ]
    assert windows(follow(forwards))[1:5] == [
        "A[10 11 12 _]",
        "A[10 11 12 14]",
        "A[10 11 15 _]",
        "T[0 0 15 16]",  # the likeliest of the others
    ]


@pytest.mark.long
def test_without_a_budget_the_forward_that_fills_the_first_holes_is_the_last() -> None:
    forwards = [says(10, SPLIT, (12, 0.4), (13, 0.4)), says(10, DELETE, 12, SPLIT)]
    trace = follow(forwards, max_post_edit_steps=0)
    assert windows(trace)[:2] == ["A[10 _ _ _]", "T[10 0 12 0]"]


@pytest.mark.long
def test_a_block_has_so_many_forwards_and_no_more() -> None:
    unsure = says((10, 0.4), (11, 0.3), (12, 0.2), (13, 0.1))
    trace = follow([unsure] * 3, max_block_steps=3)
    assert windows(trace)[:3] == ["A[10 _ _ _]", "A[10 11 _ _]", "T[10 11 12 13]"]


def test_a_text_that_was_written_before_is_not_written_again() -> None:
    forwards = [
        says(10, 10, 10, 10),
        says((20, 0.6), (21, 0.7), 10, 10),
        says((10, 0.6), (10, 0.7), 10, 10),  # the first text again: its least sure change is 0
        says(0, 10, 10, 10),
    ]
    assert windows(follow(forwards))[:4] == [
        "A[10 10 10 10]",
        "A[20 21 10 10]",
        "A[0 10 10 10]",
        "T[0 10 10 10]",
    ]


def test_what_stands_instead_is_not_written_again_either() -> None:
    """Two escapes: the first gives a text that was there too, and leaves its cell as it was."""
    assert windows(follow(ESCAPES_TWICE))[2:4] == ["A[0 12 10 10]", "A[0 0 10 10]"]


def test_what_the_prompt_brought_is_no_edit() -> None:
    trace = follow([everywhere((9, 0.99))] * 4, (1, 2, 3, 4, SPLIT, DELETE))
    assert windows(trace)[:2] == [f"A[{SPLIT} {DELETE} 9 9]", f"T[{SPLIT} {DELETE} 9 9]"]


def test_cells_past_the_limit_hold_no_block_back_and_a_split_moves_text_there() -> None:
    two = says(10, 11, (12, 0.2), (13, 0.2))
    trace = follow([two, says(10, 11, SPLIT, SPLIT)], max_tokens=2)
    assert (trace.output, trace.finish_reason, trace.nfe) == ([10, 11], "length", 2)
    trace = follow(
        [two, says(SPLIT, 11, 5, 5), says(20, 10, 11, 5), says(20, 10, 11, 5)], max_tokens=2
    )
    assert (trace.output, trace.nfe) == ([20, 10], 4)


def test_a_stop_that_is_deleted_ends_nothing() -> None:
    forwards = [says(10, EOS, 12, 13), says(10, DELETE, 12, 13), says(10, 12, 13, 14)]
    trace = follow([*forwards, says(10, 12, 13, 14)], max_tokens=4, eos_ids=(EOS,))
    assert (trace.output, trace.finish_reason) == ([10, 12, 13, 14], "length")


# ---- Random scripts ----

# Block size, buffer size, budget, schedule, cap.
SHAPES = [(4, 2, 3, 4, 8), (2, 1, 1, 2, 6), (4, 3, 0, 3, 12), (4, 1, 2, 9, 5)]


def draw_indel_case(rng: np.random.Generator, block_size: int) -> Case:
    """A case of the edits' fuzz; a law that leaves others nothing would tie with the mask."""
    case = draw_edit_case(rng, block_size)
    case.prob[:] = np.minimum(case.prob, np.float32(0.95))
    return case


@pytest.mark.long
@pytest.mark.slow("[123]$")
@pytest.mark.parametrize("shape", SHAPES)
def test_it_agrees_with_the_list_decoder(shape: tuple[int, ...]) -> None:
    size, depth, budget, schedule, cap = shape
    seen: Counter[str] = Counter()
    for number in range(60):
        rng = np.random.default_rng((*shape, number))
        case = draw_indel_case(rng, size)
        accept, edit, add = (draw_threshold(rng) for _ in range(3))
        ids = (2, 1) if depth == 2 else (1, 2) if size == 2 else (5, 2)
        rules = dict(zip(LITERAL, (accept, edit, budget, schedule, cap, *ids), strict=True))
        sizes = {"add_block_threshold": add, "block_size": size, "buffer_size": depth}
        trace, truth = decode_both(case, rules, **sizes)
        check_agreement(trace, truth, (*shape, number))
        assert not {*ids, case.limits["mask_id"]} & set(trace.output), f"{shape} {number}"
        seen += truth.notes
        seen[trace.finish_reason or "-"] += 1
    # The draw is worth something: each step of the rule was met. With the other shapes the schedule
    # is spent, or the budget, before the cap.
    steps = ("forced", "late", "spent", "plain", "escaped", "deleted", "split", "lost", "length")
    wanted = {SHAPES[0]: steps, SHAPES[3]: ("stop", "capped")}.get(shape, ("stop",))
    assert min(seen[name] for name in wanted) > 2, seen


def corpus(package: Any, number: int) -> bool:
    """Whether a package agrees with the list decoder on one script of the mutants' corpus."""
    rng = np.random.default_rng((34, number))
    # One program, then the other.
    ids, budget, schedule, cap = ((2, 1), 4, 3, 9) if number < 90 else ((5, 2), 0, 9, 5)
    size, depth = 4, 3
    case = draw_indel_case(rng, size)
    if number % 5 < 2:  # of two ids, so that texts come again
        case.token[:] = np.where(case.token > 2, 4, 3)
    edges = np.array([0.25, 0.5, 0.75, 0.9], np.float32)
    if number % 4 < 2:
        case.prob[:] = rng.choice(edges, size=case.prob.shape)
    accept, edit = (float(x) for x in rng.choice([0.0, *edges, 1.5], size=2))
    if number % 3 == 0:
        case.limits.update(max_tokens=18, max_model_len=None, max_nfe=None)
    if number % 3 == 1:
        case.limits["eos_ids"] = ()
    rules = dict(zip(LITERAL, (accept, edit, budget, schedule, cap, *ids), strict=True))
    sizes = {"block_size": size, "buffer_size": depth}
    add = float(rng.choice([0.0, 0.25, 0.75]))
    try:
        if number == 149:  # what few scripts do
            follow(ESCAPES_TWICE, package=package)
        found = decode_both(case, rules, package, add_block_threshold=add, **sizes)
        check_agreement(*found, number)
    except AssertionError:
        return False
    return True


# ---- On a model: what shows the window, and what stores it ----


@pytest.mark.slow
def test_events_recordings_and_snapshots_show_text_that_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the gate's case; batches, slots, preemption and prefix hits are the gate's own tests."""
    gate, request = cases.case("edit_indel"), cases.case("edit_indel").requests[0]
    truth, prompt = cases.truth("edit_indel")[0], list(request.prompt)
    room = request.limit - len(prompt)
    strategy = gate.strategy.replace(**dict(request.knobs))
    params = dj.SamplingParams(max_tokens=room, seed=request.seed)

    def make() -> dj.LLM:
        llm = dj.LLM(gate.model, strategy, warm_up=False, max_num_seqs=1, max_model_len=64)
        saver = snapshot.snapshot_saver(gate.model, strategy, llm.config, tmp_path)
        llm.engine.save_snapshot = saver
        return llm

    llm = make()
    events = list(llm.stream(prompt, params, events="denoise"))
    assert [event.metrics.nfe for event in events] == list(range(1, truth.nfe + 1))
    told = list(itertools.accumulate((event.token_ids for event in events), operator.add))
    assert told[-1] == truth.tokens
    assert all(truth.tokens[: len(ids)] == ids for ids in told)

    # The windows of the events are those of a recording, whose frames put back what came out.
    recorded = dj.record(gate.model, prompt, strategy, max_tokens=room)
    assert recorded.tokens == truth.tokens
    assert trajectory.Trajectory.from_json(recorded.to_json()).tokens == truth.tokens
    steps = recorded.steps
    gone = [(s.before.tokens >= 0) & (s.after.tokens < 0) for s in steps]
    assert any(cells.any() for cells in gone), "no filled cell became a hole"
    first, *frames = replay.replay(recorded).frames
    shown = {position: token for position, token, _ in first.put}
    for step, frame in zip(steps, frames, strict=True):
        shown |= {position: token for position, token, _ in frame.put}
        for cell, token in enumerate(step.after.tokens.ravel().tolist()):
            assert shown.get(step.before.start + cell, replay.HOLE) == token

    # A device that fails in the middle, where texts, marks and budgets are at work.
    monkeypatch.setattr("dllm_jax.engine.engine.num_steps", lambda *_, **__: 1)
    llm = make()
    fetch, left = llm.engine.runner.fetch, [truth.nfe // 2]

    def failing(chunk: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise DeviceFailure("RESOURCE_EXHAUSTED: Out of memory")
        return fetch(chunk)

    monkeypatch.setattr(llm.engine.runner, "fetch", failing)
    assert llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].finish_reason == "error"
    (path,) = tmp_path.iterdir()
    saved = snapshot.load_snapshot(path)
    assert snapshot.saved_strategy(saved) == strategy
    engine, _ = resume(saved, 0, gate.model)
    outputs = [output for _ in iter(lambda: engine.has_work, False) for output in engine.step()]
    assert outputs[-1].outputs[0].token_ids == truth.tokens


# ---- What is refused ----


@pytest.mark.parametrize(
    "fields",
    [
        {"max_post_edit_steps": -1},
        {"denoising_steps": 0},
        {"max_block_steps": 1},
        {"max_block_steps": 10**6},
        {"delete_token_id": 1.5},
        {"split_token_id": -1},
        {"delete_token_id": 7, "split_token_id": 7},
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))}="):
        strategies.EditIndel(**fields)


def test_a_script_without_the_two_ids_is_refused() -> None:
    token, prob = script([])
    with pytest.raises(ValueError, match="no delete_token_id or split_token_id; give both"):
        run_script("edit_indel", [1], token, prob, max_tokens=4, mask_id=MASK, vocab_size=VOCAB)
