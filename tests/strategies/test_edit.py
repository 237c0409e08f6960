"""`Edit` against worked traces, and against its list decoder over random scripts.

On the contract's toy model: the penalty, and that the mask id and padded rows are never drawn.
"""

import dataclasses
from collections import Counter
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import strategies
from dllm_jax.strategies.testing.script import Trace, run_script
from tests.contract import dense, dense_blocks, models
from tests.contract.dense_edit import edit_rule
from tests.contract.harness import Request, decode_paged
from tests.oracles.edit_decoder import Edited, edit_decode
from tests.strategies.test_strategy_fuzz import Case, check_agreement, draw_case, draw_threshold
from tests.strategies.test_traces import (
    EOS,
    MASK,
    VOCAB,
    Forward,
    column,
    everywhere,
    script,
    windows,
)


def decode_both(
    case: Case,
    *,
    accept: float = 0.7,
    edit: float = 0.5,
    add: float = 0.1,
    budget: int = 16,
    block_size: int = 4,
    buffer_size: int = 2,
) -> tuple[Trace, Edited]:
    """A script through the strategy and through the list decoder."""
    fields = {"accept_threshold": accept, "edit_threshold": edit, "add_block_threshold": add}
    fields |= {"max_post_edit_steps": budget, "block_size": block_size, "buffer_size": buffer_size}
    scripted = (case.prompt, case.token, case.prob)
    trace = run_script(strategies.Edit(**fields), *scripted, **case.limits)
    return trace, edit_decode(*scripted, **fields, **case.limits)


def follow(forwards: list[Forward], prompt: list[int], **fields: Any) -> Trace:
    """A literal script, on which both decoders must agree."""
    limits = {"max_tokens": fields.pop("max_tokens", 24), "mask_id": MASK, "vocab_size": VOCAB}
    limits["eos_ids"] = fields.pop("eos_ids", ())
    trace, truth = decode_both(Case(prompt, *script(forwards), limits), **fields)
    check_agreement(trace, truth, "literal")
    return trace


# ---- the worked example ----


SETTLED = {4: (10, 0.9), 5: (11, 0.9), 6: (14, 0.9), 7: (13, 0.9)}
WORKED: list[Forward] = [
    # Step 1 of the notes is our prefill. Step 2: two of block 1 are above .7.
    {4: (10, 0.8), 5: (11, 0.6), 6: (12, 0.75), 7: (13, 0.4)},
    # Step 3: 11 is forced, 12 becomes 14 (.55 > .5); block 2 is forced though block 1 has a hole.
    {4: (10, 0.9), 5: (11, 0.6), 6: (14, 0.55), 7: (13, 0.3), 10: (1, 0.21)},
    # Step 4: block 1 is full, and waits for a forward that changes nothing.
    SETTLED | {8: (20, 0.9), 9: (21, 0.9)},
    # Step 5: nothing changes in block 1, so it may leave; 21 becomes 22.
    SETTLED | {8: (20, 0.9), 9: (22, 0.9)},
    # Step 6, the commit of block 1: 8 and 9 predict 1 with .2, no edit at .5, but one at 0.
    {},
]
FIRST_STEPS = [
    "A[10 _ 12 _] D",
    "A[10 11 14 _] A[_ _ 1 _]",
    "A[10 11 14 13] A[20 21 1 _]",
    "T[10 11 14 13] A[20 22 1 1]",
]


def test_the_worked_example() -> None:
    trace = follow(WORKED, [1, 2, 3, 4])
    assert windows(trace)[:5] == [*FIRST_STEPS, "T[20 22 1 1] D"]
    assert column(trace, "new_tokens")[:5] == [2, 2, 3, 1, 0]


def test_the_worked_example_with_the_edits_of_the_reference() -> None:
    """Its threshold of edits never reaches its sampler: every other token is taken."""
    trace = follow(WORKED, [1, 2, 3, 4], edit=0.0)
    assert windows(trace)[:6] == [*FIRST_STEPS, "A[1 1 1 1] D", "T[1 1 1 1] A[1 _ _ _]"]
    assert column(trace, "new_tokens")[:5] == [2, 2, 3, 1, 0]


# ---- Rules, one at a time ----


def test_thresholds_are_strict() -> None:
    half = everywhere((10, 0.5))
    assert windows(follow([half] * 4, [1] * 4, accept=0.5, buffer_size=1))[0] == "A[10 _ _ _]"
    other = [everywhere((10, 0.9)), everywhere((11, 0.5))]
    assert windows(follow(other, [1] * 4, edit=0.5, buffer_size=1))[1] == "T[10 10 10 10]"
    assert windows(follow(other, [1] * 4, edit=0.25, buffer_size=1))[1] == "A[11 11 11 11]"


@pytest.mark.long
def test_edits_end_with_their_budget() -> None:
    """A model that changes its mind for ever: the budget's edits, then nothing is written."""
    flips = [everywhere((10 + i, 0.9)) for i in range(9)]
    for budget in (0, 1, 3):
        shown = windows(follow(flips, [1] * 4, budget=budget, buffer_size=1))
        last = f"{10 + budget} " * 4
        wanted = [f"A[{f'{10 + i} ' * 4}".strip() + "]" for i in range(budget + 1)]
        assert shown[: budget + 2] == [*wanted, f"T[{last.strip()}]"]


def test_a_block_that_never_fills_is_filled_at_its_last_forward() -> None:
    """One forced cell a forward would take 4; the budgets are spent by edits, not by holes."""
    flips = [everywhere((10 + i, 0.6)) for i in range(12)]
    trace = follow(flips, [1] * 4, accept=1.0, edit=0.5, budget=0, buffer_size=1)
    # Four forced cells, edited as they stand, then the forward that says nothing may change.
    assert windows(trace)[:5] == [
        "A[10 _ _ _]",
        "A[11 11 _ _]",
        "A[12 12 12 _]",
        "A[13 13 13 13]",
        "T[14 14 14 14]",  # forward 5, the block's size and a budget of 0: timed out, and edited
    ]


def test_the_first_forward_of_a_block_counts_as_0_also_where_the_prompt_opened_it() -> None:
    """The reference counts it as 1: it is timed out in forward 5, and so edits it once more."""
    flips = [everywhere((10 + i, 0.6)) for i in range(12)]
    trace = follow(flips, [1] * 5, accept=1.0, edit=0.5, budget=1, buffer_size=1)
    assert windows(trace)[:5] == [
        "A[1 10 _ _]",
        "A[1 11 11 _]",
        "A[1 12 12 12]",
        "A[1 13 13 13]",  # its one edit
        "T[1 13 13 13]",
    ]


@pytest.mark.long
def test_a_timed_out_block_waits_for_the_one_before_it() -> None:
    """Block 1 is settled late; block 2, timed out by then, is edited on until it may leave."""
    slow = [{4: (20 + i, 0.9), 5: (10, 0.3), 6: (10, 0.3), 7: (10, 0.3)} for i in range(6)]
    forwards = [f | dict.fromkeys(range(8, 12), (10 + i, 0.9)) for i, f in enumerate(slow)]
    trace = follow(forwards, [1] * 4, accept=0.5, budget=1, add=0.0, max_tokens=16)
    assert windows(trace)[:6] == [
        "A[20 _ _ _] D",
        "A[21 10 _ _] A[11 11 11 11]",
        "A[22 10 10 _] A[12 12 12 12]",
        "A[23 10 10 10] A[12 12 12 12]",  # block 2 has had its one edit
        "A[24 10 10 10] A[12 12 12 12]",
        "T[25 10 10 10] T[12 12 12 12]",  # block 1 has had the forwards of its size and one
    ]


# ---- stops that are not final ----


def test_a_stop_that_is_edited_away_ends_nothing() -> None:
    """Trap 8. It holds back new blocks only while it stands."""
    forwards: list[Forward] = [
        {4: (10, 0.9), 5: (EOS, 0.9)},
        {4: (10, 0.9), 5: (EOS, 0.9), 6: (11, 0.9), 7: (12, 0.9)},
        {4: (10, 0.9), 5: (13, 0.9), 6: (11, 0.9), 7: (12, 0.9)},
        {4: (10, 0.9), 5: (13, 0.9), 6: (11, 0.9), 7: (12, 0.9)},
        *[dict.fromkeys(range(8, 16), (14, 0.9))] * 7,
    ]
    trace = follow(forwards, [1, 2, 3, 4], eos_ids=(EOS,), max_tokens=8)
    assert windows(trace)[:4] == [
        "A[10 EOS _ _] D".replace("EOS", str(EOS)),
        "A[10 EOS 11 12] D".replace("EOS", str(EOS)),
        "A[10 13 11 12] D",
        "T[10 13 11 12] A[1 _ _ _]",
    ]
    assert (trace.output, trace.finish_reason) == ([10, 13, 11, 12, 14, 14, 14, 14], "length")


def test_a_stop_ends_the_request_with_the_block_that_leaves() -> None:
    whole = {4: (10, 0.9), 5: (11, 0.9), 6: (EOS, 0.9), 7: (12, 0.9)}
    trace = follow([whole] * 3, [1, 2, 3, 4], eos_ids=(EOS,))
    # The first forward fills it all; only the second, which changes nothing, makes it final.
    assert (trace.output, trace.finish_reason, trace.nfe) == ([10, 11], "stop", 2)


def test_a_stop_may_come_by_an_edit() -> None:
    late = {4: (10, 0.9), 5: (EOS, 0.9), 6: (11, 0.9), 7: (12, 0.9)}
    early = late | {5: (13, 0.9)}
    trace = follow([early, late, late], [1, 2, 3, 4], eos_ids=(EOS,))
    assert (trace.output, trace.finish_reason, trace.nfe) == ([10], "stop", 3)


def test_cells_past_the_limit_hold_no_block_back() -> None:
    """Two tokens wanted of a block of four: what the rest of it does is of no account."""
    two = {4: (10, 0.9), 5: (11, 0.9)}
    restless: list[Forward] = [
        two | {6: (20 + i, 0.9 - 0.6 * (i == 0)), 7: (12, 0.2)} for i in range(5)
    ]
    trace = follow(restless, [1, 2, 3, 4], max_tokens=2)
    assert (trace.output, trace.finish_reason, trace.nfe) == ([10, 11], "length", 2)


def test_the_prompt_in_a_shared_block_is_never_edited() -> None:
    trace = follow([everywhere((9, 0.99))] * 4, [1, 2, 3, MASK, 5, 6], edit=0.0)
    assert windows(trace)[0] == "A[5 6 9 9] A[9 9 9 9]"
    trace = follow([everywhere((9, 0.99))] * 4, [1, 2, MASK], edit=0.0)
    assert trace.steps[0].tokens[0] == [1, 2, MASK, 9]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_post_edit_steps": -1},
        {"max_post_edit_steps": 2**31 - 1},
        {"max_post_edit_steps": 1.5},
        {"penalty_lambda": -0.1},
        {"penalty_lambda": float("nan")},
        {"penalty_lambda": "much"},
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))}="):
        strategies.Edit(**fields)


# ---- Random scripts ----


def draw_edit_case(rng: np.random.Generator, block_size: int) -> Case:
    """A case of the common fuzz; in a half of them the model mostly stands by what it said."""
    case = draw_case(rng, block_size)
    if rng.random() < 0.5:
        shape = case.token.shape
        keeps = rng.random((1, shape[1])) < rng.choice([0.6, 0.9, 1.0])
        case.token[:] = np.where(keeps, case.token[:1], case.token)
        stays = rng.random((1, shape[1])) < 0.5
        case.prob[:] = np.where(stays, case.prob[:1], case.prob)
    return case


@pytest.mark.slow("3")
@pytest.mark.parametrize(("block_size", "buffer_size", "budget"), [(2, 1, 1), (4, 2, 3), (4, 3, 0)])
def test_edit_agrees_with_the_list_decoder(block_size: int, buffer_size: int, budget: int) -> None:
    traces, truths = [], []
    for number in range(70):
        seed = (block_size, buffer_size, budget, number)
        rng = np.random.default_rng(seed)
        case = draw_edit_case(rng, block_size)
        accept, edit, add = (draw_threshold(rng) for _ in range(3))
        sizes = {"block_size": block_size, "buffer_size": buffer_size}
        trace, truth = decode_both(case, accept=accept, edit=edit, add=add, budget=budget, **sizes)
        check_agreement(trace, truth, seed)
        traces.append(trace)
        truths.append(truth)
    # The draw is worth something: every ending, edits, force, and both budgets spent.
    assert {trace.finish_reason for trace in traces} >= {"stop", "length"}
    assert sum(t.edits for t in truths) > 100
    seen = sum((t.notes for t in truths), Counter())
    assert min(seen["forced"], seen["timed out"], sum(t.unsaid for t in truths)) > 2


# ---- On a model: the penalty, and ids that are never drawn ----

ASKED = [
    Request(tuple(range(3, 6)), 14, seed=1, temperature=0.9),
    Request(tuple(range(5, 26)), 11, seed=2),
    Request((7, 7, 7, 7, 7), 18, seed=3, knobs=(("edit_threshold", 0.1),)),
]


def edits_on_pages(model: Any, requests: list[Request], **fields: Any) -> list[Any]:
    fields = {"max_post_edit_steps": 2, "block_size": 4, "buffer_size": 3} | fields
    rows = decode_paged(strategies.Edit(0.35, 0.3, 0.25, **fields), model, list(requests)).rows
    return [(row.tokens, row.reason, row.nfe) for row in rows]


@pytest.mark.long
def test_the_penalty_is_on_the_left_neighbour_and_keeps_the_noise() -> None:
    """Against the dense run, greedy and sampled; the reference forgets its noise here."""
    model = models.plain()
    net = dense.Net(model)

    def truth(penalty: float) -> list[Any]:
        rule = edit_rule(0.35, 0.3, 2, penalty)
        ends = [
            dense_blocks.decode_blocks(
                net, request, rule, size=4, depth=3, add=0.25, settles_ready=True
            )
            for request in ASKED
        ]
        return [(end.tokens, end.reason, end.nfe) for end in ends]

    got = edits_on_pages(model, ASKED, penalty_lambda=2.0)
    assert got == truth(2.0)
    without = truth(0.0)
    assert all(one != other for one, other in zip(got, without, strict=True))
    greedy = [dataclasses.replace(ASKED[0], temperature=0.0)]
    assert edits_on_pages(model, greedy, penalty_lambda=2.0)[0] != got[0]


@pytest.mark.long
def test_ids_that_are_no_tokens_are_never_drawn() -> None:
    """Trap 10 and 11, and LLaDA2.2's edit ids, with the bars low and the draw wild."""
    model = models.plain()
    barred = {models.MASK, models.PADDED, 4, 9}
    defaults = dataclasses.replace(model.defaults, forbidden_token_ids=(4, 9))
    head = model.params["lm_head"]
    loud = model.replace(
        defaults=defaults,
        params=model.params | {"lm_head": head.at[..., jnp.asarray(sorted(barred))].mul(20.0)},
    )
    wild = [dataclasses.replace(r, temperature=3.0, knobs=()) for r in ASKED]
    for tokens, _, _ in edits_on_pages(loud, [*wild, ASKED[1]]):
        assert not barred & set(tokens)
    plain = loud.logits(jnp.arange(8, 16)[None])
    assert barred & set(np.asarray(plain).argmax(-1).ravel().tolist()), "none of them was likely"


# ---- Mutants ----


def corpus(package: Any, number: int) -> bool:
    """Whether a package agrees with the list decoder on one script of the mutants' corpus."""
    rng = np.random.default_rng((33, number))
    case = draw_edit_case(rng, 4)
    edges = np.array([0.25, 0.5, 0.75, 0.9], np.float32)
    if number % 2:
        case.prob[:] = rng.choice(edges, size=case.prob.shape)
    accept, edit = (float(x) for x in rng.choice([*edges, 1.5], size=2))
    fields: dict[str, Any] = {
        "accept_threshold": accept,
        "edit_threshold": edit,
        "add_block_threshold": float(rng.choice([0.0, 0.25, 0.75])),
        "max_post_edit_steps": 1,
        "block_size": 4,
        "buffer_size": 3,
    }
    if number % 3 == 0:
        case.limits.update(max_tokens=18, max_model_len=None, max_nfe=None)
    if number % 3 == 1:
        case.limits["eos_ids"] = ()
    script_ = (case.prompt, case.token, case.prob)
    trace = package.testing.run_script(package.Edit(**fields), *script_, **case.limits)
    try:
        check_agreement(trace, edit_decode(*script_, **fields, **case.limits), number)
    except AssertionError:
        return False
    return True
