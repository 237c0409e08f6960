"""Proves what a log-probability is of: one forward, recomputed here without cache, pages or window.

A record says which forward wrote a token. The text as that forward saw it goes through
`Model.logits`; canvases go through the dense truth of the gate.
"""

import dataclasses
import json
import os
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import SamplingParams
from dllm_jax.strategies import Edit, EditIndel, MultiBD, as_strategy, blocks, sampling
from dllm_jax.strategies.core.recording import NUM_COLUMNS
from tests.contract import dense, models
from tests.contract import engine as toy
from tests.contract.cases import case
from tests.contract.dense_canvas import DECODER

pytestmark = pytest.mark.long

SIZES = {"max_num_seqs": 2, "max_model_len": 64, "page_size": 8, "num_pages": 24}
SIZES |= {"slot_buckets": (2,), "prefill_buckets": (8,), "max_steps_per_chunk": 4}
KEEPS = dj.EngineConfig(**SIZES, logprobs=True)
PROMPT = list(range(3, 14))
BLOCKS = MultiBD(0.05, 0.1, 0.5, block_size=4, buffer_size=3)


def engine_of(model, strategy, config=KEEPS, **more):
    return dj.LLM(model, strategy, config=config, warm_up=False, progress=False, **more)


def written_by(model, record, block_size):
    """Raw log-probabilities of the last write of each token, from the text of its forward."""
    found, P = [], len(record.prompt_ids)
    for place in range(record.length):
        (writes,) = np.nonzero(record.position == P + place)
        at = writes[-1]
        end = ((P + place) // block_size + 1) * block_size
        seen = np.full(64, model.config.mask_token_id)  # later blocks are not seen
        seen[:P] = record.prompt_ids
        for i in np.flatnonzero((record.step < record.step[at]) & (record.position < end)):
            seen[record.position[i]] = record.token[i]
        rows = model.logits(seen[None], block_size=block_size)
        found.append(jax.nn.log_softmax(rows[0, P + place]))
    return np.stack(found)


@pytest.mark.parametrize("strategy", [BLOCKS, Edit(0.05, 0.01, block_size=4, buffer_size=2)])
def test_written_tokens_are_as_likely_as_their_forward_said(strategy):
    model = models.plain()
    llm = engine_of(model, strategy)
    params = SamplingParams(max_tokens=21, logprobs=3, ignore_eos=True)
    (one,) = llm.generate([PROMPT], params)[0].outputs
    recorded = dj.record(model, PROMPT, strategy, max_tokens=21, ignore_eos=True).record
    want = written_by(model, recorded, 4)
    assert len(one.logprobs) == len(one.token_ids) == recorded.length == 21
    for token, said, row in zip(one.token_ids, one.logprobs, want, strict=True):
        assert next(iter(said)) == token
        best = np.argsort(-row, kind="stable")[:3].tolist()
        assert set(said) == {token, *best}
        for name, value in said.items():
            assert abs(value - row[name]) < 1e-4
    if isinstance(strategy, Edit):
        assert recorded.is_edit.any()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("ar", {}),
        pytest.param("dflash", {}, marks=pytest.mark.slow),
        pytest.param("dflash", {"acceptance": "rejection"}, marks=pytest.mark.slow),
    ],
)
def test_causal_texts_have_the_exact_conditionals(name, how):
    c = case(name)
    prompt, strategy = [*c.requests[0].prompt], c.strategy.replace(**how)
    llm = engine_of(c.model, strategy, toy.config_of(name, logprobs=True), **dict(c.aux))
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=0, logprobs=0, record=not how)
    (one,) = llm.generate([prompt], params)[0].outputs
    rows = c.model.logits([prompt + one.token_ids], attention="causal")[0]
    law = jax.nn.log_softmax(rows)[len(prompt) - 1 :]
    said = [values[token] for token, values in zip(one.token_ids, one.logprobs, strict=True)]
    np.testing.assert_allclose(said, [law[i, t] for i, t in enumerate(one.token_ids)], atol=1e-4)
    if how:
        assert llm.engine.drafted.accepted[0] > 0
        return
    assert (one.record.align, one.record.step[0]) == ("causal", -1)
    never = c.model.forbidden(np.arange(models.VOCAB))
    drawn = jax.nn.log_softmax(np.where(never, -np.inf, rows / 0.8))[len(prompt) - 1 :]
    want = [drawn[i, t] for i, t in enumerate(one.token_ids)]
    np.testing.assert_allclose(one.record.log_probs, want, atol=1e-4)


def test_a_canvas_has_those_of_its_last_denoising_forward():
    c, forwards = case("diffusion_gemma"), []
    request = dataclasses.replace(c.requests[0], fold=(0,))
    run = dense.Net.__call__

    def spied(net, inputs, positions, sees, modes=None, **how):
        seen = run(net, inputs, positions, sees, modes, **how)
        forwards.append((list(positions), list(modes or []), seen.logits))
        return seen

    with mock.patch.object(dense.Net, "__call__", spied):
        truth = c.truth(request=request)
    want = {}
    for positions, modes, logits in forwards:
        for at, mode, row in zip(positions, modes, logits, strict=False):
            if mode == DECODER:
                want[at] = jax.nn.log_softmax(row)
    llm = engine_of(c.model, c.strategy, toy.config_of("diffusion_gemma", logprobs=True))
    params = dataclasses.replace(toy.wish(c.requests[0]).params, logprobs=5)
    (one,) = llm.generate([list(request.prompt)], params)[0].outputs
    assert one.token_ids == truth.tokens
    for place, (token, said) in enumerate(zip(one.token_ids, one.logprobs, strict=True)):
        row = want[len(request.prompt) + place]
        assert all(abs(value - row[name]) < 1e-3 for name, value in said.items())
        assert token in said
    with pytest.raises(ValueError, match="may write a cell more than once"):
        llm.generate([PROMPT], dataclasses.replace(params, record=True))


# --- records --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_engine_and_steps_on_the_host_keep_the_same_record(temperature):
    model, key = models.plain(), jax.random.key(9)
    wish = {"max_tokens": 30, "temperature": temperature, "top_k": 40, "stop_token_ids": [7, 60]}
    ours = dj.record(model, [PROMPT, PROMPT[:6]], BLOCKS, key=key, **wish)
    llm = engine_of(model, BLOCKS, seed=9)
    for b, output in enumerate(
        llm.generate([PROMPT, PROMPT[:6]], SamplingParams(**wish, record=True))
    ):
        record, other = output.outputs[0].record, ours[b].record
        for name in ("prompt_ids", "position", "step", "token", "is_edit"):
            np.testing.assert_array_equal(getattr(record, name), getattr(other, name), name)
        np.testing.assert_allclose(record.log_prob, other.log_prob, atol=1e-5)
        assert (record.length, record.last, record.align) == (other.length, other.last, "grid")
        assert record.law["finish_reason"] == output.outputs[0].finish_reason
        assert record.last % 4 == 3
        assert record.last >= len(record.prompt_ids) + record.length - 1
        assert (record.steps >= 0).all()


def test_preempted_and_streamed_texts_have_the_record_of_a_calm_run():
    model = models.plain()
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=4, record=True, logprobs=1)
    (calm,) = engine_of(model, BLOCKS).generate([PROMPT], params)
    llm = engine_of(model, BLOCKS, dataclasses.replace(KEEPS, max_steps_per_chunk=1))
    inbox = llm.engine.inbox()
    inbox.add(dj.Request(prompt_token_ids=PROMPT, params=params))
    outputs = []
    for step in range(200):
        outputs += llm.engine.step()
        if step in (3, 5):
            for sequence in list(llm.engine.scheduler.live):
                llm.engine.scheduler.preempt(sequence)
        if inbox._box:
            break
    (one,), (want,) = inbox._box[0].outputs, calm.outputs
    assert inbox._box[0].metrics.num_preemptions == 2
    assert (one.token_ids, one.logprobs) == (want.token_ids, want.logprobs)
    np.testing.assert_array_equal(one.record.log_prob, want.record.log_prob)
    np.testing.assert_array_equal(one.record.step, want.record.step)
    inbox.close()
    events = list(llm.stream(PROMPT, params, events="denoise"))
    assert [said for event in events for said in event.logprobs] == want.logprobs
    assert [event.record is None for event in events] == [True] * (len(events) - 1) + [False]
    shown = [event for event in events if any(cell is not None for cell in event.window)]
    for event in shown:
        for cell, said in zip(event.window, event.window_logprobs, strict=True):
            assert (cell is None) == (said is None)
            assert said is None or said <= 0
    assert shown


def test_file_holds_the_records_and_what_was_kept(tmp_path):
    model = models.plain()
    keep = ("token", "confidence", "entropy", "log_prob", "top")
    how = {"max_tokens": 9, "keep": keep, "num_top": 2, "logits_at": [12, 13]}
    records = [one.record for one in dj.record(model, [PROMPT, PROMPT[:5]], BLOCKS, **how)]
    dj.save_records(records, tmp_path / "texts.npz")
    for record, again in zip(records, dj.load_records(tmp_path / "texts.npz"), strict=True):
        for field in dataclasses.fields(dj.Record):
            if field.name != "kept":
                np.testing.assert_array_equal(
                    getattr(record, field.name), getattr(again, field.name)
                )
        for name, values in record.kept.items():
            np.testing.assert_array_equal(values, again.kept[name])
        kept = record.kept
        reads = list(zip(kept["position"], kept["step"], strict=True))
        np.testing.assert_allclose(kept["log_prob"], np.log(kept["confidence"]), atol=1e-4)
        for at, step, logits in zip(
            kept["logits_position"], kept["logits_step"], kept["logits"], strict=True
        ):
            i = reads.index((at, step))
            assert kept["top_ids"][i].tolist() == np.argsort(-logits)[:2].tolist()
            raw = jax.nn.log_softmax(logits)
            np.testing.assert_allclose(kept["top_log_probs"][i], np.sort(raw)[::-1][:2], atol=1e-5)
    (tmp_path / "other.npz").write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(ValueError, match=r"holds no records .* give what save_records wrote"):
        dj.load_records(tmp_path / "other.npz")
    _damaged_records_are_one_line(tmp_path)
    with pytest.raises(ValueError, match="keep='tokens' is not known; use some of token, conf"):
        dj.record(model, PROMPT, BLOCKS, keep=["tokens"])


# --- off ------------------------------------------------------------------------------------------


def programs(llm):
    """The texts of all programs of an engine, lowered anew."""
    runner, found = llm.engine.runner, []
    with mock.patch.object(runner, "run", lambda call, slots=(): found.append(call)):
        runner.begin(0, np.zeros((runner.programs.kept,), np.float32))
        rows = np.arange(2, dtype=np.int32)
        runner.decode(rows, 2, np.zeros((2, 1), np.int32), 1, True)
    return [runner.device.lower(call).as_text() for call in found]


def test_an_engine_that_keeps_nothing_has_the_programs_that_it_had():
    off = dataclasses.replace(KEEPS, logprobs=False)
    before = programs(engine_of(models.plain(), BLOCKS, off))
    kept = programs(engine_of(models.plain(), BLOCKS))
    assert programs(engine_of(models.plain(), BLOCKS, off)) == before != kept
    rows = f"x{NUM_COLUMNS}xf32"
    assert not any(rows in text for text in before)
    assert any(rows in text for text in kept)


def test_what_an_engine_does_not_keep_is_asked_for_by_name():
    off = engine_of(models.plain(), BLOCKS, dataclasses.replace(KEEPS, logprobs=False))
    for params in (SamplingParams(logprobs=0), SamplingParams(record=True)):
        with pytest.raises(ValueError, match=r"make it with LLM\(logprobs=True\), or start"):
            off.generate([PROMPT], params)
    with pytest.raises(ValueError, match=r"logprobs=6 must be a whole number in \[0, 5\]"):
        SamplingParams(logprobs=6)
    with pytest.raises(ValueError, match="record=True with stop strings"):
        engine_of(models.plain(), BLOCKS).generate([PROMPT], SamplingParams(record=True, stop="a"))
    moves = EditIndel(delete_token_id=3, split_token_id=4, block_size=4)
    with pytest.raises(ValueError, match="logprobs=True: tokens of EditIndel move"):
        engine_of(models.plain(), moves)


def reads_logits(forward, state):
    """A step of a user's that asks for no statistics."""
    state = blocks.open_next(state)
    out = forward(state)
    state = out.store(state, blocks.to_cache(state))
    holes = blocks.holes(state)
    return blocks.finish_step(blocks.write(state, out.logits().argmax(-1), holes), holes)


def test_a_step_that_asks_for_no_statistics_is_refused_by_name():
    llm = engine_of(models.plain(), as_strategy(reads_logits, block_size=4, buffer_size=1))
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=4, logprobs=0))
    assert "reads_logits takes its tokens from no predict(...)" in output.error


def test_the_law_is_of_the_logits_and_not_of_a_rounded_probability():
    """Of a token that is nearly sure, and of one that hardly ever comes."""
    model = models.plain()
    sure = {"lm_head": model.params["lm_head"] * 20}
    sure = model.replace(params=model.params | sure)
    places = range(11, 43)
    record = dj.record(sure, PROMPT, BLOCKS, max_tokens=32, logits_at=places).record
    log_probs, found = dict(zip(record.position, record.log_prob, strict=True)), []
    never = model.forbidden(np.arange(models.VOCAB))
    step = dict(zip(record.position, record.step, strict=True))
    kept = record.kept
    for at, when, row in zip(
        kept["logits_position"], kept["logits_step"], kept["logits"], strict=True
    ):
        if step[at] == when:
            others = np.sort(np.where(never, -np.inf, row.astype(np.float64)))[::-1]
            found.append((log_probs[at], -np.log1p(np.exp(others[1:] - others[0]).sum())))
    said, want = np.array(found).T
    np.testing.assert_allclose(said, want, rtol=1e-4)
    assert ((want < 0) & (want > -6e-8)).any()


def accepts_by(name, least):
    def step(forward, state):
        state = blocks.open_next(state)
        out = forward(state)
        state = out.store(state, blocks.to_cache(state))
        holes = blocks.holes(state)
        stats = out.predict(where=holes, confidence="drawn", log_prob=name == "log_prob")
        one = jnp.ones_like(state.buffer.status)
        accept = (getattr(stats, name) > least) & holes
        accept |= sampling.top_n(stats.confidence, one, holes)
        return blocks.finish_step(blocks.write(state, stats.token, accept), accept)

    return as_strategy(step, block_size=4, buffer_size=1)


def test_a_strategy_reads_the_number_itself():
    how = {"max_tokens": 20, "keep": ["log_prob"]}
    by_log = dj.record(models.plain(), PROMPT, accepts_by("log_prob", float(np.log(0.06))), **how)
    by_prob = dj.record(models.plain(), PROMPT, accepts_by("confidence", 0.06), **how)
    assert by_log.tokens == by_prob.tokens
    assert by_log.nfe == by_prob.nfe < 20


def _damaged_records_are_one_line(folder):
    with np.load(folder / "texts.npz") as file:
        held = dict(file)
    facts = json.loads(str(held["facts"]))
    huge = json.dumps([{**one, "length": 10**12} for one in facts])
    wrong = [np.array(1.5), np.array([-1, -1]), np.array([2**62]), np.array("x"), np.zeros((2, 2))]
    cases = [(name, value) for name in held for value in wrong if "kept" not in name]
    for name, value in [*cases, ("facts", np.array(huge)), ("facts", np.array("[1]"))]:
        np.savez(folder / "wrong.npz", **{**held, name: value})
        with pytest.raises(ValueError, match=r"holds no records .*; give what") as refused:
            dj.load_records(folder / "wrong.npz")
        assert "\n" not in str(refused.value)
    np.savez_compressed(folder / "wrong.npz", **held)
    with pytest.raises(ValueError, match="is compressed"):
        dj.load_records(folder / "wrong.npz")
    os.mkfifo(folder / "pipe")
    with pytest.raises(ValueError, match="is no regular file; give a file"):
        dj.load_records(folder / "pipe")
