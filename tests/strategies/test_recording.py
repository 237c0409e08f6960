"""Proves that a recorded step does what an unrecorded one does, and that its record is right.

Recording off costs nothing: the decode program is the same text before and after, and no module
under the engine imports the recorder.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.api import generate
from dllm_jax.runner import decode
from dllm_jax.runner.forward import ModelForward
from dllm_jax.strategies import MultiBD
from dllm_jax.strategies.core import driver
from dllm_jax.strategies.core.protocol import TokenStats
from dllm_jax.strategies.core.recording import Recorder
from dllm_jax.strategies.core.state import RUNNING, BlockBuffer
from dllm_jax.strategies.testing.recording import NOT_READ, _one_answer, recorded_step
from dllm_jax.trace.trajectory import TrajectoryError
from tests.contract import harness
from tests.contract.cases import NAMES, PAGE_SIZE, case, once
from tests.project import test_layering

pytestmark = pytest.mark.long

PROMPT = list(range(40, 61))
STRATEGY = MultiBD(block_size=8, buffer_size=2, accept_threshold=0.02)
HOW = {"max_tokens": 40, "temperature": 0.9, "key": jax.random.key(7)}


@pytest.fixture(scope="module")
def trajectory(model):
    return dj.record(model, PROMPT, STRATEGY, **HOW)


# --- any strategy ---------------------------------------------------------------------------------


def prepared(name):
    """A step of a case, recorded or not, and its state before the prompts are taken in."""
    c = case(name)
    requests = [*c.requests, *[None] * (harness.SLOTS - len(c.requests))]
    bare, state, prompt = harness.fresh_state(
        c.strategy, c.model, dict(c.aux), requests, PAGE_SIZE[name], seed=3
    )
    spec = decode.slot_spec(bare, c.model, harness.SLOTS)

    def step(take, model, aux, state):
        return take(bare, ModelForward(model, aux=aux), state, spec)

    return c, bare, state, prompt, step


# Two readouts a step, forwards and readouts inside branches, a drafter, the prompt in the window.
HARD = ("dmax", "fast_dllm_v2", "diffusion_gemma_alone", "dflash", "full_sequence")


@pytest.mark.parametrize(
    "name", [n if n in HARD else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_every_strategy_can_be_recorded(name):
    c, _, state, _, step = prepared(name)
    plain, info = jax.eval_shape(
        lambda *args: step(driver.decode_step, *args), c.model, dict(c.aux), state
    )
    program, (recorded, record) = jax.make_jaxpr(
        lambda *args: step(recorded_step, *args), return_shape=True
    )(c.model, dict(c.aux), state)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), recorded) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), plain
    )
    assert record.nfe.shape == info.nfe.shape
    assert record.confidence.shape == state.buffer.tokens.shape
    assert not program.effects  # no callback: values leave by the result alone


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_recorded_run_is_the_unrecorded_one(name):
    c, bare, state, prompt, step = prepared(name)
    model, aux = c.model, dict(c.aux)

    @jax.jit
    def begin(model, aux, state, prompt):
        return decode.prefill(bare, ModelForward(model, aux=aux), state, prompt, chunk_size=8)

    take = jax.jit(lambda *args: step(recorded_step, *args))
    state = begin(model, aux, state, prompt)
    answered = 0
    while bool(driver.any_running(state)):
        running = np.asarray(state.finish == RUNNING)
        state, record = take(model, aux, state)
        assert not np.asarray(record.accepted)[~running].any()
        assert not np.asarray(record.edited)[~running].any()
        assert not np.asarray(record.nfe)[~running].any()
        answered += int((np.asarray(record.predicted) != NOT_READ).sum())
    rows = once(name).rows
    assert np.asarray(state.buffer.nfe)[: len(rows)].tolist() == [row.nfe for row in rows]
    for b, row in enumerate(rows):
        assert state.output[b, : int(state.output_len[b])].tolist() == row.tokens
    assert answered > 0


# --- what is kept ---------------------------------------------------------------------------------


def stats(token, confidence):
    sure = jnp.asarray(confidence, jnp.float32).reshape(1, 1, -1)
    ids = jnp.asarray(token, jnp.int32).reshape(1, 1, -1)
    none = jnp.zeros((*ids.shape, 0))
    return TokenStats(ids, sure, -sure, none.astype(jnp.int32), none)


def test_of_several_answers_the_one_that_was_written_stands():
    inf = float("inf")
    tokens = jnp.asarray([[[5, 6, 7, 0, 9]]], jnp.int32)
    filled = jnp.asarray([[[True, True, True, False, True]]])
    zero = jnp.zeros((1,), jnp.int32)
    blocks = jnp.zeros((1, 1), jnp.int32)
    after = BlockBuffer(tokens, filled, blocks, zero, zero, zero, blocks, zero, zero)
    first = stats([5, 1, 7, 3, 0], [0.5, 0.1, 0.9, 0.2, -inf])
    second = stats([5, 6, 8, 4, 0], [0.6, 0.7, 0.3, 0.8, -inf])
    third = stats([2, 0, 0, 0, 0], [0.4, -inf, -inf, -inf, -inf])
    one = _one_answer([first, second, third], after)
    # Both named it: the last. The second alone. The first alone. A hole: the last. Not asked.
    assert one.token[0, 0, :4].tolist() == [5, 6, 7, 4]
    np.testing.assert_allclose(one.confidence[0, 0], [0.6, 0.7, 0.9, 0.8, np.nan], rtol=1e-6)
    np.testing.assert_allclose(one.entropy[0, 0], [-0.6, -0.7, -0.9, -0.8, np.nan], rtol=1e-6)


class Model:
    """A model that says the same of every cell; `name` stands for all else a forward has."""

    name = "mine"

    def __call__(self, state, **how):
        return self

    def read(self, ask):
        assert ask.guide is None or ask.guide[0] is self  # without its wrap
        return stats([3, 3], [ask.where, ask.where])


def test_answers_inside_of_other_traces_are_not_kept():
    def step(x):
        recorder = Recorder(Model())
        out = recorder(None)
        assert (recorder.name, out.name) == ("mine", "mine")
        out.predict(0.25)
        jax.lax.cond(x > 0, lambda: out.predict(0.5), lambda: out.predict(0.75))
        jax.vmap(lambda y: out.predict(0.1).confidence * y)(jnp.ones(3))
        out.predict(0.5, guide=(recorder(None), 1.5))
        assert all(answer.out is recorder.forward for answer in recorder.answers)
        return [answer.stats.confidence[0, 0, 0] for answer in recorder.answers]

    assert [float(one) for one in jax.jit(step)(1)] == [0.25, 0.5]


# --- one text ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_trajectory_has_the_tokens_of_generate(model, trajectory):
    out = dj.generate(model, [PROMPT], STRATEGY, **HOW)
    assert trajectory.tokens == out.tokens[0, : out.length[0]].tolist()
    assert trajectory.nfe == out.nfe[0]
    assert (trajectory.prompt, trajectory.limit) == (PROMPT, len(PROMPT) + 40)
    assert trajectory.finish_reason == "length"
    assert trajectory.strategy == "MultiBD"
    assert trajectory.settings["accept_threshold"] == 0.02
    assert trajectory.settings["block_size"] == 8


def test_events_alone_rebuild_the_windows_and_the_text(trajectory):
    cells = {16 + i: PROMPT[16 + i] for i in range(5)}
    start = 16  # two whole blocks of the prompt are in the cache
    for step in trajectory.steps:
        before, after = step.before, step.after
        assert (before.start, after.start) == (start, start)
        for place, token in enumerate(before.tokens.ravel()):
            assert cells.get(start + place, -1) == token
        written = {start + int(i) for i in np.flatnonzero(step.accepted | step.edited)}
        for place, token in enumerate(after.tokens.ravel()):
            if start + place in written:
                cells[start + place] = int(token)
            assert cells.get(start + place, -1) == token
        taken = step.accepted.ravel()
        # What was taken was predicted, above the threshold or as the surest of its block.
        assert (step.predicted.ravel()[taken] == after.tokens.ravel()[taken]).all()
        assert not step.edited.any()
        asked = step.predicted >= 0
        assert (asked == ~np.isnan(step.confidence)).all()
        assert (asked == ~np.isnan(step.entropy)).all()
        assert ((step.confidence[asked] > 0) & (step.confidence[asked] <= 1)).all()
        assert step.commit_len % 8 == 0
        assert step.settled_len <= (after.tokens.ravel() >= 0).sum()
        start += step.commit_len
    text = [cells[len(PROMPT) + i] for i in range(40)]
    assert text == trajectory.tokens
    assert start > 40


def test_row_that_meets_nan_ends_with_nothing_written(model):
    head = {"lm_head": model.params["lm_head"] * jnp.nan}
    found = dj.record(model.replace(params=model.params | head), PROMPT, STRATEGY, **HOW)
    (step,) = found.steps
    assert (found.finish_reason, found.tokens) == ("error", [])
    assert not (step.accepted | step.edited).any()
    assert (step.after.tokens == step.before.tokens).all()


def test_json_holds_all_of_it(trajectory):
    text = trajectory.to_json()
    again = dj.Trajectory.from_json(text)
    assert again.to_json() == text
    for one, other in zip(trajectory.steps, again.steps, strict=True):
        np.testing.assert_array_equal(one.confidence, other.confidence)
        np.testing.assert_array_equal(one.after.tokens, other.after.tokens)
        assert one.accepted.dtype == other.accepted.dtype == bool
    assert json.loads(text)["nfe"] == trajectory.nfe


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("", "JSONDecodeError"),
        ("[]", "TypeError|AttributeError"),
        ('{"version": 1}', "KeyError"),
        ('{"version": 9}', "this trajectory has version=9, and this program reads 1"),
        ('{"version": 1, "nfe": 0, "steps": [], "what": 1}', "TypeError"),
    ],
)
def test_a_file_that_is_no_trajectory_is_refused(text, reported):
    with pytest.raises(TrajectoryError, match=reported):
        dj.Trajectory.from_json(text)


def test_text_is_read_by_the_tokenizer(model):
    ids = model.tokenizer("How many pages?")["input_ids"]
    found = dj.record(model, "How many pages?", STRATEGY, **HOW)
    assert found.prompt == ids
    with pytest.raises(ValueError, match="no tokenizer to read text with"):
        dj.record(model.replace(tokenizer_source=None), "How many pages?", STRATEGY)


# --- off -----------------------------------------------------------------------------------------


def test_program_that_is_not_recorded_is_the_same(model):
    session = generate.start(model, [PROMPT], STRATEGY, **HOW)

    def text():
        run = jax.jit(lambda *args: generate._advance.__wrapped__(*args, None))
        args = (model, session.strategy, session.aux, session.state, jnp.int32(3))
        return run.lower(*args).as_text()

    before = text()
    dj.record(model, PROMPT, STRATEGY, **HOW)
    assert text() == before


@pytest.mark.slow
def test_engine_does_not_know_the_recorder():
    knows = {
        module
        for module, (path, text) in test_layering.sources().items()
        for name in test_layering.imports(module, text, path.name == "__init__.py")
        if name.startswith(("dllm_jax.strategies.testing.recording", "dllm_jax.trace.recording"))
    }
    assert knows == {
        "dllm_jax.trace.recording",
        "dllm_jax.cli.trace",
    }
