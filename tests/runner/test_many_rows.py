"""Proves what accelerators do differently for many slots, on a CPU.

Programs compiled without command buffers, with one around all steps, and without XLA's own products
give the tokens, finish reasons and forwards of the usual ones.
"""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dllm_jax.engine import rounds
from dllm_jax.engine.engine import Engine
from dllm_jax.engine.layout import NO_LIMIT, EngineConfig
from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.engine.texts import ERROR_CODE, REASONS, RUNNING_CODE, STUCK_CODE
from dllm_jax.runner import buckets, programs, xla_options
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


def make_runner(many_rows: int | None = None) -> ModelRunner:
    model = models.plain()
    layout = buckets.make_layout(model, STRATEGY, {}, CONFIG)
    layout = dataclasses.replace(layout, many_rows=many_rows)
    return ModelRunner(model, split_knobs(STRATEGY)[0], {}, layout)


def texts(many_rows: int | None) -> tuple[dict[str, tuple], dict[tuple[str, ...], Any]]:
    """What four requests end with, and the options of decode and prefill by kind and rows."""
    device = make_runner(many_rows)
    ran, call = {}, device._call
    device._call = lambda one: ran.update({one.name[:2]: one.options}) or call(one)
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
    return ended, {name: options for name, options in ran.items() if len(name) == 2}


MANY, LOOP, NOTHING = (
    xla_options.MANY_ROWS,
    xla_options.RECORDED_LOOP,
    xla_options.NOTHING_RECORDED,
)


@pytest.mark.slow
@pytest.mark.parametrize("is_wide", [False, True])
def test_many_slots_and_wide_blocks_have_the_tokens_of_few(is_wide, monkeypatch) -> None:
    one, several, prompt = ("decode", "1"), ("decode", "3"), ("prefill", "1")
    usual, ran = texts(None)
    assert ran == {one: {}, several: {}, prompt: MANY}
    monkeypatch.setattr(xla_options, "WIDE", STRATEGY.block_size + (not is_wide))
    other, ran = texts(3)
    assert other == usual
    wanted = {one: LOOP, several: MANY | NOTHING, prompt: MANY}
    wide = {one: MANY | LOOP, several: MANY | NOTHING, prompt: MANY | NOTHING}
    assert ran == (wide if is_wide else wanted)


def test_options_of_the_compiler(monkeypatch) -> None:
    """Many rows are left to libraries, and a recorded loop is of one slot without grammars."""
    layout, is_profiled = make_runner(many_rows=8).layout, False

    def options(count, is_bound):
        return xla_options.of_decode(layout, count, is_bound, False, is_profiled)

    assert MANY == {"xla_gpu_enable_triton_gemm": False}
    assert "CONDITIONAL,WHILE" in LOOP["xla_gpu_enable_command_buffer"]
    assert [options(count, False) for count in (1, 4, 8)] == [LOOP, {}, MANY | NOTHING]
    assert [options(count, True) for count in (1, 4, 8)] == [{}, {}, MANY | NOTHING]
    is_profiled = True  # a profile holds no launch of a recorded loop
    assert options(1, False) == {}
    monkeypatch.setattr(xla_options, "WIDE", STRATEGY.block_size)
    assert options(1, False) == MANY
    assert options(1, True) == MANY | LOOP
    is_profiled = False
    assert [options(count, False) for count in (1, 4, 8)] == [MANY | LOOP] * 2 + [MANY | NOTHING]


def test_prompts_in_the_cache_cost_no_program_beside_their_steps() -> None:
    """Also where they fill the rows for fresh requests up: a dispatch is 0.7 ms on an H200."""
    size, made = CONFIG.max_num_seqs, Engine(make_runner())
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
    codes = (RUNNING_CODE, ERROR_CODE, STUCK_CODE)
    assert codes == (state.RUNNING, state.ERROR, state.STUCK)
    ended = {code: word for code, word in state.FINISH_REASONS.items() if word is not None}
    assert ended == REASONS | {ERROR_CODE: "error", STUCK_CODE: "error"}
    assert NO_LIMIT == state.NO_LIMIT
