"""Costs of the widths of a drafting strategy: timed by the engine, given as data.

Proves that each choice is timed alone, without the cost of a dispatch, for numbers of slots that
stand for those below them, also where made-up texts end early. A real engine measures as it starts,
compiles nothing later, and writes the tokens of `ar`. Costs that the user gives are neither
measured nor replaced.
"""

import dataclasses
import math
import types

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.runner import timing
from dllm_jax.strategies import AR, DFlash
from tests.compile.test_warm_up import TimedDevice, layout, pass_s
from tests.contract import models
from tests.contract.engine import make_device

pytestmark = pytest.mark.long

LAYERS = (0, 1)


class ChoosingDevice(TimedDevice):
    """Steps take what the one choice takes that `choice_costs` leaves; texts end after some."""

    programs = types.SimpleNamespace(strategy=DFlash(8, LAYERS))

    def __init__(self, layout, step_s, text_steps=10**9):
        super().__init__(layout, step_s, pass_s)
        self.choice_costs, self.text_steps, self.left = {}, text_steps, 0

    def admit(self, slot, placement):
        super().admit(slot, placement)
        self.left = self.text_steps

    def decode(self, rows, num_active, pages, num_steps, early):
        ((num_slots, costs),) = self.choice_costs.items()
        (choice,) = (i for i, cost in enumerate(costs) if math.isfinite(cost))
        assert num_slots == len(rows)
        steps = min(num_steps, self.left)
        self.left -= steps
        self.now += 0.005 + steps * self.step_s(num_slots, choice)
        return steps


def step_s(rows, choice):
    return 1e-4 * (1 + rows * choice)


@pytest.mark.parametrize("text_steps", [10**9, 11])
def test_each_choice_is_timed_free_of_what_a_dispatch_costs(text_steps):
    sizes = dataclasses.replace(
        layout(), is_grid=False, is_token_causal=True, slot_buckets=(1, 2, 4, 8, 20, 24)
    )
    made = ChoosingDevice(sizes, step_s, text_steps)
    found = timing.time_choices(made, made.clock)
    assert list(found) == [1, 4, 20, 24]
    for rows, costs in found.items():
        assert costs == pytest.approx([step_s(rows, choice) for choice in range(3)])
    assert made.is_new, "the made-up requests are gone"


def test_a_wider_choice_costs_no_less():
    made = ChoosingDevice(layout(), lambda rows, choice: (2e-3, 1e-3, 3e-3)[choice])
    for costs in timing.time_choices(made, made.clock).values():
        assert costs == pytest.approx([2e-3, 2e-3, 3e-3])


def test_costs_are_found_by_the_next_more_slots():
    device = make_device("ar", allocate=False)
    strategy = DFlash(8, LAYERS)
    assert device._with_costs(3) is device.programs, "`ar` has no choices"
    assert device.choice_costs == {}
    device.programs = device.programs.replace(strategy=strategy)
    device.choice_costs = {1: (1.0, 2.0, 3.0), 4: (4.0, 5.0, 6.0)}
    for slots, costs in ((1, (1, 2, 3)), (2, (4, 5, 6)), (4, (4, 5, 6)), (9, (4, 5, 6))):
        np.testing.assert_array_equal(device._with_costs(slots).strategy.costs, costs)
    assert not strategy.replace(costs=(1.0, 2.0, 3.0)).weighs_costs
    assert not strategy.replace(width=4).weighs_costs
    assert not AR().weighs_costs


@pytest.mark.slow
def test_an_engine_measures_as_it_starts_and_writes_what_ar_writes():
    target = models.causal()
    config = dj.EngineConfig(max_num_seqs=2, max_model_len=128, page_size=16)
    prompts = [list(range(1, 4 + i)) for i in range(6)]
    params = dj.SamplingParams(max_tokens=40, temperature=0.8, seed=3)

    def made(strategy, **draft):
        return dj.LLM(target, strategy, config=config, progress=False, **draft)

    def texts(llm):
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

    drafting = made(DFlash(4, LAYERS), draft=models.drafter(target))
    measured = drafting.engine.runner.choice_costs
    assert list(measured) == [1, 2]
    assert all(len(costs) == 3 and 0 < costs[0] <= costs[2] for costs in measured.values())
    wanted = texts(made(AR()))
    assert texts(drafting) == wanted
    rounds = []
    for costs in ((1.0, 9.0, 9.0), (1.0, 1.1, 1.2)):
        drafting.engine.runner.choice_costs = {2: costs}
        before = drafting.engine.stats().draft_rounds
        assert texts(drafting) == wanted
        rounds.append(drafting.engine.stats().draft_rounds - before)
    assert rounds[0] == 0 < rounds[1]
    assert drafting.engine.stats().num_late_compiles == 0
    reported = made(DFlash(4, LAYERS, costs=(1.0, 9.0, 9.0)), draft=models.drafter(target))
    assert reported.engine.runner.choice_costs == {}
    assert texts(reported) == wanted
    assert reported.engine.stats().draft_rounds == 0
    # What the first texts have shown of drafts that are never right, the next ones know.
    dear = made(DFlash(4, LAYERS, costs=(1.0, 1.6, 2.2)), draft=models.drafter(target))
    seen = []
    for _ in range(3):
        assert texts(dear) == wanted
        seen.append(dear.engine.stats().draft_rounds)
    assert seen[0] > 0, seen
    assert seen[2] - seen[1] <= seen[0] / 3, seen
