"""`DiffusionGemma` by its rules: when a canvas ends, and which settings a request may have.

`test_contract.py` compares it with a list decoder, `test_diffusion_gemma_golden.py` with
transformers.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from dllm_jax.strategies import DiffusionGemma, load_strategy
from dllm_jax.strategies.core.protocol import check_knobs
from dllm_jax.strategies.testing.script import Trace, run_script
from tests.contract.cases import case, once, paged, truth

SIZE, STEPS = 4, 6


def check_case(module: Any, name: str) -> None:
    """A module's strategy on a case of the gate."""
    unsure = run([A], prob=0.2, strategy=module.DiffusionGemma)
    assert unsure.nfe == STEPS
    fixed = run([A], confidence_threshold=0.0, strategy=module.DiffusionGemma)
    assert fixed.nfe == STEPS, "a threshold of 0 is never met"
    again = run([A, A, B], stability_threshold=2, strategy=module.DiffusionGemma)
    assert again.nfe == 5, "a run of equal texts begins anew"
    known = case(name).strategy
    fields = {field.name: getattr(known, field.name) for field in dataclasses.fields(known)}
    rows = paged(name, strategy=module.DiffusionGemma(**fields)).rows
    assert [(row.tokens, row.reason, row.nfe) for row in rows] == [
        (one.tokens, one.reason, one.nfe) for one in truth(name)
    ]


def run(
    texts: list[list[int]], prob: float = 1.0, strategy: Any = DiffusionGemma, **fields: Any
) -> Trace:
    """One canvas of a script whose forward i says `texts[i]`, the last one for good."""
    token = np.full((STEPS + 4, 32), 5)
    for i in range(len(token)):
        token[i, 1 : 1 + SIZE] = texts[min(i, len(texts) - 1)]
    made = strategy(**{"max_denoising_steps": STEPS, "block_size": SIZE, "buffer_size": 1} | fields)
    law = np.full(token.shape, prob, np.float32)
    return run_script(made, [3], token, law, max_tokens=SIZE, mask_id=-1, vocab_size=12)


A, B = [7, 7, 8, 8], [7, 7, 8, 9]


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_k_equal_texts_behind_the_first_end_a_canvas(k: int) -> None:
    """Trap T14: k means k + 1 equal texts."""
    assert run([A], stability_threshold=k).nfe == k + 1
    assert run([A, B], stability_threshold=k).nfe == (k + 2 if k else 1)
    assert run([A, B, A], stability_threshold=k).nfe == (k + 3 if k else 1)


def test_confidence_is_strict_and_zero_is_fixed_work() -> None:
    """Trap T15: laws of one token have entropy 0, which is not below 0."""
    assert run([A], confidence_threshold=0.0).nfe == STEPS
    assert run([A], confidence_threshold=1e-30).nfe == 2


def test_an_unsure_canvas_takes_its_schedule() -> None:
    assert run([A], prob=0.2).nfe == STEPS
    assert run([A], prob=0.2, confidence_threshold=9.0).nfe == 2


def test_the_text_is_the_last_steps_likeliest() -> None:
    """Trap T13."""
    trace = run([A, B, A, A, A, B], max_denoising_steps=6, confidence_threshold=0.0)
    assert (trace.output, trace.finish_reason) == (B, "length")


def test_the_last_canvas_is_not_stored() -> None:
    trace = run([A])
    assert [step.start for step in trace.steps] == [1, 1]


@pytest.mark.slow
def test_a_text_does_not_depend_on_when_the_canvas_before_it_is_stored() -> None:
    """Trap T28; a canvas begun early saves its store."""
    early, alone = once("diffusion_gemma").rows, once("diffusion_gemma_alone").rows
    assert [row.tokens for row in early] == [row.tokens for row in alone]
    assert [row.nfe for row in early] < [row.nfe for row in alone]


def test_numbers_that_are_not_whole_are_refused() -> None:
    for name in ("max_denoising_steps", "stability_threshold"):
        with pytest.raises(ValueError, match=f"{name}=1.5 is not a whole number; round it"):
            load_strategy("diffusion_gemma", **{name: 1.5})
    with pytest.raises(ValueError, match="buffer_size=3 must be a whole number in"):
        DiffusionGemma(buffer_size=3)


def test_a_temperature_that_would_rise_is_refused() -> None:
    text = "t_min=0.9 is above t_max=0.8; lower t_min or raise t_max"
    for make in (DiffusionGemma, functools.partial(load_strategy, "diffusion_gemma")):
        with pytest.raises(ValueError, match=text):
            make(t_min=0.9)
        assert make(t_min=0.9, t_max=0.9).t_min == 0.9
    strategy = DiffusionGemma(t_max=2.0)
    check_knobs(strategy, {"t_min": 2.0})
    with pytest.raises(ValueError, match=r"t_min=2.5 is above t_max=2.0"):
        check_knobs(strategy, {"t_min": 2.5})
