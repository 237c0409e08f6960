"""A strategy that changes nothing ends its request with an error that names cause and remedy.

Issue 23, item 5.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import strategies
from dllm_jax.strategies import as_strategy
from dllm_jax.strategies.core import blocks, driver, sampling
from dllm_jax.strategies.core.protocol import PATIENCE, bind_knobs, knob_rules
from dllm_jax.strategies.core.state import FINISH_REASONS, STUCK
from dllm_jax.strategies.testing.script import run_script

MASK, VOCAB = 0, 16


def accepts_nothing(forward, state):
    """A step that waits for a confidence which never comes."""
    return blocks.denoise(forward, blocks.open_next(state), lambda stats, *_: stats.confidence > 2)


def fills_two(forward, state):
    """A step that fills two cells of each block, and no more."""

    def rule(stats, state, holes):
        is_begun = jnp.sum(state.buffer.filled, axis=2, keepdims=True) > 1  # besides the prompt
        two = jnp.full_like(state.buffer.status, 2)
        return sampling.top_n(stats.confidence, two, holes) & ~is_begun

    return blocks.denoise(forward, blocks.open_next(state), rule)


def flips(forward, state):
    """A step that fills one cell and then writes it over and over."""
    state = blocks.open_next(state)
    forward(state)
    last = (state.buffer.positions == 3) & blocks.live_cells(state)
    tokens = jnp.where(state.buffer.tokens == 5, 6, 5)
    filled = last & ~state.buffer.filled
    return blocks.finish_step(blocks.write(state, tokens, last), filled)


def run(strategy, *, forwards=400, prob=0.1, **more):
    shape = (forwards, 64)
    script = np.full(shape, 5), np.full(shape, prob)
    return run_script(strategy, [1], *script, max_tokens=8, mask_id=MASK, vocab_size=VOCAB, **more)


def small(step):
    return as_strategy(step, block_size=4, buffer_size=1)


def test_a_step_that_accepts_nothing_ends_with_its_reason():
    trace = run(small(accepts_nothing))
    assert (trace.finish_reason, trace.nfe, trace.output) == ("error", PATIENCE, [])
    assert trace.error is not None
    for part in ("accepts_nothing", "position 0", "sampling.forced_top1", "Strategy.patience"):
        assert part in trace.error
    assert len(trace.error) < 300


@pytest.mark.long
def test_the_count_begins_anew_with_each_change():
    trace = run(small(fills_two))
    assert (trace.finish_reason, trace.nfe) == ("error", PATIENCE + 1)
    assert [step.new_tokens for step in trace.steps] == [2] + PATIENCE * [0]


def test_a_cell_that_is_written_over_is_a_change():
    assert run(small(flips)).finish_reason is None


def test_a_limit_of_forwards_comes_first():
    assert run(small(accepts_nothing), max_nfe=PATIENCE).finish_reason == "nfe"


@pytest.mark.long
def test_a_wide_window_waits_longer():
    trace = run(as_strategy(accepts_nothing, block_size=16, buffer_size=4))
    assert (trace.finish_reason, trace.nfe) == ("error", 2 * 64)


@pytest.mark.long
@pytest.mark.parametrize("rule", ["maskgit_plus", "entropy", "margin", "low_confidence"])
def test_a_schedule_of_many_forwards_is_waited_for(rule):
    strategy = strategies.FullSequence(remasking=rule, steps=300, block_size=4, buffer_size=4)
    trace = run(strategy)
    assert trace.finish_reason == "length"
    idle = longest = 0
    for step in trace.steps:
        idle = 0 if step.new_tokens else idle + 1
        longest = max(longest, idle)
    waits = rule != "low_confidence"  # that one fills a token a forward, then is done
    assert (longest > PATIENCE) == waits


def test_a_canvas_may_take_all_of_its_schedule():
    strategy = strategies.DiffusionGemma()
    given = {name: jnp.asarray([300.0, 4000.0]) for name in knob_rules(strategy)}
    assert bind_knobs(strategy, given).patience(512).tolist() == [2 * 512, 4002]


# ---- the engine, `generate` and `record` ----


@pytest.mark.slow
def test_every_loop_reports_a_stuck_strategy():
    strategy = small(accepts_nothing)
    model = dj.load("builtin:tiny-sdar")
    out = dj.generate(model, [[5, 6, 7]], strategy, max_tokens=8)
    assert (int(out.finish[0]), int(out.nfe[0])) == (STUCK, PATIENCE)
    assert FINISH_REASONS[STUCK] == "error"
    reported = dj.record(model, [5, 6, 7], strategy, max_tokens=8)
    with dj.LLM(model, strategy=strategy, max_num_seqs=1, max_model_len=64) as llm:
        (output,) = llm.generate([[5, 6, 7]], dj.SamplingParams(max_tokens=8))
    assert reported.finish_reason == output.outputs[0].finish_reason == "error"
    assert reported.error == output.error == driver.stuck_text(strategy, 0)
