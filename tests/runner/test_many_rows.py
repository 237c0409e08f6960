"""Proves what accelerators do differently for many slots, on a CPU.

The programs without command buffers, with one around all steps, and without XLA's own products give
the tokens, finish reasons and forwards of the usual one. The first runs from
`EngineLayout.many_rows` on, the second for one slot, the third where blocks are wide. A few rows
with long contexts run beside the others within their share (`rounds.BESIDE`), and the others run
enough steps for one of theirs to fit. The host loop, which imports no JAX, knows the device's codes
by the same numbers.
"""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dllm_jax.engine import engine, rounds
from dllm_jax.engine.engine import Engine
from dllm_jax.engine.layout import NO_LIMIT, EngineConfig
from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.runner import buckets, programs, runner
from dllm_jax.runner.runner import ModelRunner
from dllm_jax.strategies import MultiBD
from dllm_jax.strategies.core import state
from dllm_jax.strategies.core.protocol import split_knobs
from tests.contract import models

pytestmark = pytest.mark.long

STRATEGY = MultiBD(0.35, 0.25, 0.5, block_size=4, buffer_size=3)
CONFIG = EngineConfig(
    max_num_seqs=3,
    max_model_len=64,
    page_size=8,
    num_pages=31,
    slot_buckets=(1, 3),
    page_buckets=(9,),
    prefill_buckets=(16,),
    max_steps_per_chunk=2,  # or a fast machine ends the last two texts in one program
)


def texts(many_rows: int | None) -> tuple[dict[str, tuple], list]:
    model = models.plain()
    layout = buckets.make_layout(model, STRATEGY, {}, CONFIG)
    device = ModelRunner(
        model, split_knobs(STRATEGY)[0], {}, dataclasses.replace(layout, many_rows=many_rows)
    )
    ran, call = [], device._call
    device._call = lambda one: ran.append(one.program) or call(one)
    made = Engine(device)
    rng = np.random.default_rng(2)
    for number in range(4):
        prompt = rng.integers(0, models.MASK, 3 + 5 * number).tolist()
        params = SamplingParams(max_tokens=6 + 8 * number, temperature=0.5 * (number % 2))
        made.add(Request(prompt_token_ids=prompt, params=params))
    ended = {}
    while made.has_work:
        for one in made.step():
            text = one.outputs[0]
            ended[one.request_id] = (text.token_ids, text.finish_reason, one.metrics.nfe)
    return ended, ran


@pytest.mark.slow
def test_many_slots_and_wide_blocks_have_the_tokens_of_few(monkeypatch) -> None:
    usual, ran = texts(None)
    forms = {programs.decode, programs.decode_whole, programs.decode_wide, programs.decode_many}
    prefills = {programs.prefill, programs.prefill_wide}
    assert (forms | prefills) & set(ran) == {programs.decode, programs.prefill}
    assert len({form.__wrapped__ for form in forms}) == 1
    monkeypatch.setattr(runner, "WIDE", STRATEGY.block_size)
    other, ran = texts(3)
    assert other == usual
    # One slot is not many.
    wanted = {programs.decode_wide, programs.decode_many, programs.prefill_wide}
    assert (forms | prefills) & set(ran) == wanted
    monkeypatch.setattr(runner, "WIDE", STRATEGY.block_size + 1)
    other, ran = texts(3)
    assert other == usual
    wanted = {programs.decode_whole, programs.decode_many, programs.prefill}
    assert (forms | prefills) & set(ran) == wanted


def test_many_rows_are_left_to_libraries_whatever_the_autotuner_times() -> None:
    def options(program: Any) -> dict[str, Any]:
        return dict(program._jit_info.compiler_options_kvs)

    assert options(programs.decode_many)["xla_gpu_enable_triton_gemm"] is False
    assert options(programs.prefill) == {"xla_gpu_enable_triton_gemm": False}
    assert options(programs.decode_wide)["xla_gpu_enable_triton_gemm"] is False
    assert options(programs.decode_wide_seen) == options(programs.prefill)
    assert options(programs.prefill_wide) == options(programs.decode_many)
    assert options(programs.decode) == {}
    whole = options(programs.decode_whole)
    assert options(programs.decode_wide) == whole | options(programs.prefill)
    assert "CONDITIONAL,WHILE" in whole["xla_gpu_enable_command_buffer"]
    names = ("prefill", "prefill_wide", "decode", "decode_whole", "decode_wide", "decode_many")
    kept = [getattr(programs, name) for name in names]
    assert [programs.OPTIONS.get(one, {}) for one in kept] == [options(one) for one in kept]


def test_prompts_in_the_cache_cost_no_program_beside_their_steps() -> None:
    """Also where they fill the rows for fresh requests up: a dispatch is 0.7 ms on an H200."""
    model, size = models.plain(), CONFIG.max_num_seqs
    layout = buckets.make_layout(model, STRATEGY, {}, CONFIG)
    made = Engine(ModelRunner(model, split_knobs(STRATEGY)[0], {}, layout))
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, models.MASK, 16).tolist() for _ in range(size)]
    ran, call = [], made.runner._call
    made.runner._call = lambda one: ran.append(one.program) or call(one)
    for _ in range(2):
        ran.clear()
        for prompt in prompts:
            made.add(Request(prompt_token_ids=prompt, params=SamplingParams(max_tokens=8)))
        while made.has_work:
            made.step()
        made.runner.wait()
    assert set(ran) == {programs.decode}


class Plan:
    """A scheduler as planning sees it: rows are numbers, each the columns it needs."""

    layout = SimpleNamespace(page_buckets=(2, 40), many_rows=None, max_steps_per_chunk=64)
    live = ()
    has_waiting = False

    def columns(self, rows: list[int]) -> list[int]:
        return rows

    def slot_bucket(self, count: int) -> int:
        return count


class Seconds:
    """Eight narrow rows take 8 s a step, a wide one 12 s, and together they would take 108 s."""

    def decode_s(self, rows: int, columns: int) -> float:
        return rows * {2: 1.0, 40: 12.0}[columns]


def test_few_wide_rows_run_within_their_share() -> None:
    narrow, wide = [2] * 8, [40]
    for steps in (1, 2, 3, 6, 9):
        beside = max(1, min(steps, int(rounds.BESIDE * steps * 8 / 12)))
        found = rounds.groups(Plan(), [*narrow, *wide], steps, Seconds())
        assert found == [(narrow, 2, steps), (wide, 40, beside)]
    # Half as many are no minority: they run as far as the others.
    found = rounds.groups(Plan(), [*narrow, *wide * 4], 6, Seconds())
    assert [steps for _, _, steps in found] == [6, 6]


def test_the_others_run_enough_steps_for_one_of_theirs() -> None:
    rows = [2] * 8 + [40]
    enough = math.ceil(12 / (rounds.BESIDE * 8))
    assert rounds._steps_beside(Plan(), rows, Seconds()) == enough
    assert rounds._steps_beside(Plan(), rows[:8], Seconds()) == 0


def test_the_host_loop_reads_the_devices_codes() -> None:
    codes = (engine.RUNNING_CODE, engine.ERROR_CODE, engine.STUCK_CODE)
    assert codes == (state.RUNNING, state.ERROR, state.STUCK)
    ended = {code: word for code, word in state.FINISH_REASONS.items() if word is not None}
    assert ended == engine.REASONS
    assert NO_LIMIT == state.NO_LIMIT
