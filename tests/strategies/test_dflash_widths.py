"""The switch of `DFlash` between drafts and none: it changes no token, and it pays.

Proves that texts are those of `ar`, and rounds those of plain lists, where the width changes from
step to step, 1 among them, however it is chosen. The choice is that of lists in float64
(`oracles/draft_pays.py`). Drafts go on where they are right and end where they are wrong, are
tried now and then, and come back. Ended rows do not count. `break_even` forces either choice.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from dllm_jax.runner import decode
from dllm_jax.runner.forward import ModelForward
from dllm_jax.strategies import AR, DFlash
from dllm_jax.strategies.core import driver
from dllm_jax.strategies.core.state import EMPTY, NO_LIMIT, RUNNING, Carry
from dllm_jax.strategies.dflash import drafting
from tests.contract import drafters, harness, models
from tests.contract.harness import SLOTS, Request
from tests.oracles import draft_pays
from tests.oracles.dflash_decoder import Rounds, dflash_rounds
from tests.strategies.test_dflash import (
    LAYERS,
    ROUND,
    TARGET,
    Wish,
    draw_wish,
    hints_of,
    run,
    same_text,
    table_of,
    told_of,
    with_stops,
)

pytestmark = pytest.mark.long

WANDERED = (1, 3, 5)
ORDER = (0, 2, 1, 0, 0, 2, 2, 1, 1, 2)  # of the widths of `wandering`


def wandering(kind: Any) -> Any:
    """A width for each step that has nothing to do with what pays."""

    class Wandering(kind):
        choices = WANDERED

        def choice(self, state: Any) -> Any:
            return jnp.asarray(ORDER, jnp.int32)[jnp.max(state.buffer.nfe) % len(ORDER)]

    return Wandering(ROUND, LAYERS)


def wandering_rounds(wish: Wish, text: list[int], table: np.ndarray) -> Rounds:
    """What `wandering` makes of a request that is there from the first step on."""
    steps = itertools.cycle(ORDER)

    def drafts(position: int, anchor: int) -> list[int]:
        said = table[position, anchor, 1 : WANDERED[next(steps)]]
        return np.where(said == models.MASK, -1, said).tolist()  # never its mask

    prompt = wish.request.prompt
    how = (wish.request.stops, drafts, wish.request.max_tokens)
    return dflash_rounds([*prompt, *text], len(prompt), *how)


def check_wandering(first: int, count: int, kind: Any = DFlash) -> set[int]:
    """Random batches whose widths wander; the sizes of their rounds."""
    strategy = wandering(kind)
    sizes: set[int] = set()
    for number in range(first, first + count):
        rng = np.random.default_rng((11, number))
        wishes = [draw_wish(rng) for _ in range(4)]
        texts = [one.output for one in run(AR(), wishes)]
        table = hints_of(rng, ROUND, wishes, texts)
        wishes = [with_stops(rng, w, text) for w, text in zip(wishes, texts, strict=True)]
        got = run(strategy, wishes, drafters.hinted(TARGET, table), seed=number)
        for wish, text, one in zip(wishes, texts, got, strict=True):
            truth = wandering_rounds(wish, text, table)
            wanted = (truth.output, truth.finish_reason, truth.counts, told_of(strategy, truth))
            said = (one.output, one.finish_reason, one.counts, one.drafted)
            assert said == wanted, f"{number=}"
            sizes |= set(one.counts)
    return sizes


@pytest.mark.slow
def test_widths_that_change_from_step_to_step_change_no_token() -> None:
    assert check_wandering(0, 3) >= {1, 3, 5}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [wandering(DFlash), DFlash(ROUND, LAYERS)])
def test_stretches_of_one_width_are_the_steps_one_by_one(strategy: Any) -> None:
    """A loop a width, entered once a stretch, leaves what a branch in every step leaves."""
    rng = np.random.default_rng(4)
    wishes = [draw_wish(rng) for _ in range(SLOTS)]
    table = hints_of(rng, ROUND, wishes, [one.output for one in run(AR(), wishes)])
    aux = {"draft": drafters.hinted(TARGET, table)}
    requests: list[Request | None] = [wish.request for wish in wishes]
    bare, state, prompt = harness.fresh_state(strategy, TARGET, aux, requests, 8, 4)

    @functools.partial(jax.jit, compiler_options=harness._QUICK)
    def both(model: Any, aux: Any, state: Any, prompt: Any) -> Any:
        forward = ModelForward(model, aux=aux)
        state = decode.prefill(bare, forward, state, prompt, 16)
        spec = decode.slot_spec(bare, model, SLOTS)

        def one(carry: Any) -> Any:
            return carry[0] + 1, driver.decode_step(bare, forward, carry[1], spec)[0]

        until = (lambda carry: driver.any_running(carry[1])), one, (jnp.int32(0), state)
        stretches = driver.decode_while(
            lambda _, now: driver.any_running(now), bare, forward, state, spec
        )
        single = jax.lax.while_loop(*until)
        return [(n, now.replace(keys=None)) for n, now in (stretches, single)]

    stretches, single = both(TARGET, aux, state, prompt)
    assert int(stretches[0]) > len(WANDERED)
    leaves = map(jax.tree.leaves, (stretches, single))
    for got, wanted in zip(*leaves, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("break_even", [1.25, 2.0, 3.5])
def test_switching_drafts_off_changes_no_token(break_even: float) -> None:
    strategy = DFlash(ROUND, LAYERS, break_even=break_even)
    for number in range(20):
        rng = np.random.default_rng((12, number))
        wishes = [draw_wish(rng) for _ in range(4)]
        texts = run(AR(), wishes)
        table = hints_of(rng, ROUND, wishes, [one.output for one in texts])
        got = run(strategy, wishes, drafters.hinted(TARGET, table), seed=number)
        reported = [(one.output, one.finish_reason) for one in got]
        assert reported == [(one.output, one.finish_reason) for one in texts], f"{number=}"


# --- what is chosen -------------------------------------------------------------------------------


class _Buffer(struct.PyTreeNode):
    start: Any
    limit: Any
    tokens: Any
    filled: Any


class _Limits(struct.PyTreeNode):
    stop_ids: Any
    max_run: Any


class _State(struct.PyTreeNode):
    """What of a state the choice reads."""

    finish: Any
    carry: Any
    buffer: Any
    limits: Any


def state_of(rows: list[draft_pays.Row], finish: list[int] | None = None) -> Any:
    """Requests at the start of a round, nothing counted."""
    B = len(rows)
    zeros = {k: jnp.repeat(v, B, axis=0) for k, v in drafting.no_counts(ROUND).items()}
    lasting = {
        drafting.LENGTH: jnp.asarray([r.length for r in rows], jnp.float32),
        drafting.IDLE: jnp.asarray([r.idle for r in rows], jnp.int32),
    }
    start = jnp.arange(B, dtype=jnp.int32) * 3
    limit = start + 1 + jnp.asarray([r.room for r in rows], jnp.int32)
    cells = jnp.zeros((B, 1, ROUND + 1), jnp.int32)
    return _State(
        finish=jnp.asarray(finish or [RUNNING] * B, jnp.int32),
        carry=Carry(slot=zeros, lasting=lasting),
        buffer=_Buffer(start, limit, cells, cells > 0),
        limits=_Limits(jnp.full((B, 1), -1, jnp.int32), jnp.full((B,), NO_LIMIT, jnp.int32)),
    )


def drafts(rows: list[draft_pays.Row], width: int = ROUND, of: Any = drafting, **how: Any) -> bool:
    """What a module's `pays` says."""
    break_even = jnp.asarray([row.break_even for row in rows], jnp.float32)
    return bool(_pays(of.pays, state_of(rows, **how), width, break_even))


_pays = jax.jit(lambda pays, *args: pays(*args), static_argnums=(0, 2))


def check_choice(of: Any = drafting) -> None:
    rng = np.random.default_rng(0)
    seen: set[tuple[int, bool]] = set()
    for number in range(300):
        slots, width = ((1, 5), (3, 16), (60, 16), (60, 5))[number % 4]
        least = draft_pays.needs(draft_pays.Row(1.0), width, slots)
        near, due = least * rng.choice([0.9, 1.1]), int((least - 1) / draft_pays.PROBE)
        idles = (0, due - 20, due + 20)
        rows = [
            draft_pays.Row(
                length=float(np.clip(rng.normal(near, 0.2), 1, width)),
                idle=int(rng.choice(idles, p=[1 - 1 / slots, 0.5 / slots, 0.5 / slots])),
                room=int(rng.choice([1, 2, 8, 1000], p=[0.05, 0.05, 0.1, 0.8])),
                break_even=float(rng.choice([1.24, 1.25, 1.26])),
            )
            for _ in range(slots)
        ]
        finish = [RUNNING, *rng.choice([RUNNING, EMPTY], slots - 1, p=[0.9, 0.1]).tolist()]
        running = [row for row, code in zip(rows, finish, strict=True) if code == RUNNING]
        if abs(draft_pays.gain(running, width, slots)) < 1e-3 * slots:
            continue
        wanted = draft_pays.pays(running, width, slots)
        assert drafts(rows, width, of, finish=finish) == wanted, (rows, width)
        seen.add((number % 4, wanted))
    assert seen == {(kind, said) for kind in range(4) for said in (False, True)}


def test_drafts_pay_where_those_of_lists_do() -> None:
    check_choice()


def check_learning(of: Any = drafting) -> None:
    rng = np.random.default_rng(1)
    rows = [draft_pays.Row(float(ROUND)) for _ in range(4)]
    for _ in range(40):
        for row in rows:
            row.room = int(rng.integers(1, 9))
        width = int(rng.choice([1, ROUND]))
        right = np.minimum(rng.integers(0, 5, 4), width - 1)
        after = _counted(of.count, state_of(rows), jnp.asarray(right, jnp.int32), width)
        for row, count in zip(rows, right, strict=True):
            row.see(int(count), width)
        lasting = after.carry.lasting
        assert lasting[drafting.IDLE].tolist() == [row.idle for row in rows]
        wanted = [row.length for row in rows]
        np.testing.assert_allclose(lasting[drafting.LENGTH], wanted, rtol=0, atol=1e-5)


_counted = jax.jit(lambda count, *args: count(*args), static_argnums=0)


def test_estimates_after_a_round_are_those_of_lists() -> None:
    check_learning()


def check_runs(of: Any = drafting) -> None:
    """A round that emits all of its tokens at once ends where single tokens would."""
    rng = np.random.default_rng(2)
    places = set()
    for _ in range(60):
        rows = [draft_pays.Row(2.0) for _ in range(4)]
        tokens = rng.integers(1, 3, (4, 6))
        before, most = rng.integers(1, 4, 4), rng.integers(3, 6, 4)
        state = state_of(rows)
        carry = state.carry.replace(slot=state.carry.slot | {of.RUN: jnp.asarray(before)})
        limits = state.limits.replace(max_run=jnp.asarray(most))
        found = of.run_end(state.replace(carry=carry, limits=limits), jnp.asarray(tokens))
        for row, had, longest, end in zip(tokens, before, most, found, strict=True):
            text, place = [row[0]] * had, 0
            while place < 6 and (
                place == 0 or len(set(text[-longest:])) > 1 or len(text) < longest
            ):
                place += 1
                text += row[place : place + 1].tolist()
            assert end == place
            places.add(place)
    assert places == set(range(1, 7))


def test_a_run_ends_a_round_where_single_tokens_end_there() -> None:
    check_runs()


def check_single(of: Any = drafting) -> None:
    """A step that is known to have no drafts counts as one of width 1 does."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        state = state_of([draft_pays.Row(2.0, int(rng.integers(0, 9))) for _ in range(6)])
        tokens = jnp.asarray(rng.integers(1, 3, state.buffer.tokens.shape), jnp.int32)
        filled = jnp.broadcast_to(jnp.arange(6) < 2, tokens.shape)
        runs = {drafting.RUN: jnp.asarray(rng.integers(1, 4, 6), jnp.int32)}
        carry = state.carry.replace(slot=state.carry.slot | runs)
        state = state.replace(
            carry=carry, buffer=state.buffer.replace(tokens=tokens, filled=filled)
        )
        right = jnp.zeros(6, jnp.int32)
        general = _counted(drafting.count, state, right, 1)
        single = of.count(state, right, 1)
        for got, wanted in zip(*map(jax.tree.leaves, (single, general)), strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_a_step_without_drafts_counts_as_one_of_width_1() -> None:
    check_single()


def test_rows_that_have_ended_do_not_count() -> None:
    good, bad = draft_pays.Row(4.0), draft_pays.Row(1.0)
    assert not drafts([good, bad], finish=[EMPTY, RUNNING])
    assert drafts([good, bad], finish=[RUNNING, EMPTY])
    waits = draft_pays.Row(1.0, idle=1000)
    assert not drafts([waits, bad], finish=[EMPTY, RUNNING])
    assert drafts([waits, bad], finish=[RUNNING, EMPTY])


def test_break_even_forces_either_choice() -> None:
    for row in (draft_pays.Row(1.0, room=1), draft_pays.Row(5.0, idle=10**6)):
        assert drafts([dataclasses.replace(row, break_even=0.0)] * 3)
        assert not drafts([dataclasses.replace(row, break_even=math.inf)] * 3)


@pytest.mark.parametrize("width", [2, 3, 5, 16])
@pytest.mark.parametrize("slots", [1, 32, 512])
def test_a_fresh_slot_drafts_in_any_batch(width: int, slots: int) -> None:
    """It expects all drafts to be right, which therefore always pays."""
    estimate = float(drafting.no_estimate(width)[drafting.LENGTH][0])
    assert drafts([draft_pays.Row(estimate)] * slots, width)


# --- how it goes ----------------------------------------------------------------------------------


def long_wish(count: int) -> tuple[list[Wish], list[int]]:
    wishes, text = same_text(0.9, [count])
    return wishes, text[:count]


@pytest.mark.slow
def test_right_drafts_are_all_judged_and_wrong_ones_soon_dropped() -> None:
    wishes, text = long_wish(32)
    right = table_of(wishes[0], text)
    wrong = np.where(right == drafters.NO_HINT, right, (right + 1) % models.MASK)
    strategy = DFlash(ROUND, LAYERS)
    assert strategy.choices == (1, ROUND)
    (one,) = run(strategy, wishes, drafters.hinted(TARGET, right))
    assert one.output == text
    # A last token alone is not worth a draft.
    assert one.counts == [5] * 6 + [1]
    assert one.drafted is not None
    assert one.drafted.counts == (0, 0, 0, 0, 6)
    (one,) = run(strategy, wishes, drafters.hinted(TARGET, wrong))
    assert one.output == text
    assert one.counts == [1] * 31
    assert one.drafted is not None
    assert 2 <= one.drafted.rounds <= 28


def test_drafting_resumes_where_drafts_become_right() -> None:
    """By the lists: wrong for long, then right; the choice by lists is proved above."""
    row, drafted = draft_pays.Row(float(ROUND)), []
    for step in range(600):
        does = draft_pays.pays([row], ROUND, 1)
        row.see(ROUND - 1 if does and step >= 200 else 0, ROUND if does else 1)
        drafted.append(does)
    off = drafted.index(False)
    assert 20 <= off <= 28
    every = 77  # steps: a round costs 1.3 of them, and 0.3 are 1 / 256 of 76.8
    assert drafted[off : off + 2 * every] == [*[False] * every, True, *[False] * (every - 1)]
    back = drafted.index(True, 201)
    assert back <= 200 + every + 1
    assert all(drafted[back:])


def test_a_request_of_one_width_has_no_estimates() -> None:
    spec: Any = type("Spec", (), {"block_size": 6})
    assert {*DFlash(5, LAYERS, 5).init(spec).slot} == {
        drafting.ROUNDS,
        drafting.PROPOSED,
        drafting.ACCEPTED,
        drafting.RUN,
    }
