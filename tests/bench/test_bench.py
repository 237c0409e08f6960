"""Proves the benchmark's own arithmetic, so that its figures can be believed."""

import dataclasses
import math
import random
from collections import Counter
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.bench import measure, numbers, throughput, workload
from dllm_jax.bench.fixed import FixedWork, most_tokens
from dllm_jax.strategies.core import blocks
from dllm_jax.strategies.testing.script import run_script
from dllm_jax.tasks.problems import problem

pytestmark = pytest.mark.long

MASK, VOCAB = 50, 51


# --- fixed work ---------------------------------------------------------------------------------


def by_hand(prompt_len, count, n, S, prob):
    """Filled positions after each step: the n best of the leftmost block with holes, then the next.

    Whole blocks leave nothing to decide, so only the border block is looked at.
    """
    holes = list(range(prompt_len, prompt_len + count))
    steps = []
    while holes:
        taken = []
        for block in sorted({x // S for x in holes}):
            mine = sorted((x for x in holes if x // S == block), key=lambda x: (-prob[x], x))
            taken += mine[: n - len(taken)]
        steps.append(set(taken))
        holes = [x for x in holes if x not in steps[-1]]
    return steps


@pytest.mark.slow("3|4")
@pytest.mark.parametrize(
    ("prompt_len", "count", "n", "S", "K"),
    [(8, 24, 4, 8, 4), (5, 30, 3, 8, 2), (3, 17, 4, 8, 2), (1, 40, 6, 4, 4), (8, 9, 1, 8, 2)],
)
def test_fixed_work_fills_the_surest_of_the_leftmost_block(prompt_len, count, n, S, K):
    rng = np.random.default_rng(prompt_len)
    width = prompt_len + count
    forwards = math.ceil(count / n)
    token = rng.integers(0, MASK, (forwards, width + S))
    prob = np.repeat(rng.permutation(width + S)[None] / (2 * width + 2 * S) + 0.4, forwards, axis=0)
    trace = run_script(
        FixedWork(tokens_per_step=n, block_size=S, buffer_size=K),
        list(range(prompt_len)),
        token,
        prob,
        max_tokens=count,
        mask_id=MASK,
        vocab_size=VOCAB,
    )
    expected = by_hand(prompt_len, count, n, S, prob[0])
    assert trace.nfe == len(expected) == forwards
    assert [step.new_tokens for step in trace.steps] == [len(one) for one in expected]
    when = {x: i for i, one in enumerate(expected) for x in one}
    assert trace.output == [int(token[when[x], x]) for x in range(prompt_len, width)]
    assert trace.finish_reason == "length"


def test_fixed_work_refuses_a_window_in_which_a_step_may_lack_holes():
    for S, K in ((8, 2), (32, 4), (4, 3)):
        most = most_tokens(S, K)
        count = 12 * S + 1
        trace = run_script(
            FixedWork(tokens_per_step=most, block_size=S, buffer_size=K),
            [0] * (S - 1),
            np.ones((count, count + 3 * S), int),
            np.full((count, count + 3 * S), 0.5),
            max_tokens=count,
            mask_id=MASK,
            vocab_size=VOCAB,
        )
        assert trace.nfe == math.ceil(count / most)
        with pytest.raises(ValueError, match=rf"must be in \[1, {most}\]"):
            FixedWork(tokens_per_step=most + 1, block_size=S, buffer_size=K)


# --- a small engine -----------------------------------------------------------------------------

SIZES = {
    "max_num_seqs": 3,
    "max_model_len": 96,
    "num_pages": 12,
    "page_size": 16,
    "slot_buckets": (1, 3),
    "page_buckets": (7,),
    "prefill_buckets": (16, 64),
}


def small_llm(folder, strategy):
    return dj.LLM(str(folder), strategy, config=dj.EngineConfig(**SIZES), progress=False)


@pytest.fixture(scope="module")
def llm(random_folder):
    return small_llm(random_folder, FixedWork(tokens_per_step=3, block_size=8, buffer_size=2))


@pytest.fixture(scope="module")
def work(llm):
    lengths = workload.Lengths(4, 48), workload.Lengths(5, 33)
    return workload.random_work(llm.model, 7, *lengths, seed=3)


@pytest.mark.slow
def test_what_an_engine_ran_is_counted_as_its_books_say(llm, work):
    ran = throughput.run(llm, [work[:4], work[4:]], use_tqdm=False)
    outputs = ran.outputs
    assert [len(o.outputs[0].token_ids) for o in outputs] == [w.params.max_tokens for w in work]
    assert [o.metrics.nfe for o in outputs] == [-(-w.params.max_tokens // 3) for w in work]
    # One page bucket: a round is one dispatch, so its steps are counted the same on both sides.
    assert sum(ran.steps.values()) == ran.counts["num_steps"] > 0
    assert set(ran.steps) <= {(1, 7), (3, 7)}
    assert sum(ran.passes.values()) == sum(o.metrics.prefill_nfe for o in outputs) > 0
    assert len(ran.walls_s) == 2
    assert not isinstance(llm.engine.runner, measure.Recording)

    reported = numbers.numbers(llm, ran)
    decode_s = sum(ran.walls_s) - reported["prefill_s"]
    bare_s = sum(p["steps"] * p["bare_ms"] for p in reported["decode_programs"]) / 1e3
    assert reported["host_overhead"] == pytest.approx(1 - bare_s / decode_s)
    assert reported["step_ms"] == pytest.approx(decode_s / ran.counts["num_steps"] * 1e3)
    assert reported["visible_tokens"] == sum(w.params.max_tokens for w in work)
    assert reported["nfe"] == sum(-(-w.params.max_tokens // 3) for w in work)
    assert reported["decode_tok_s"] == pytest.approx(reported["visible_tokens"] / decode_s)
    assert {p["pages"] for p in reported["prefill_programs"]} == {7}
    assert reported["late_compiles"] == 0
    llm.engine.scheduler.pool.check([])


def test_requests_that_arrive_get_the_tokens_of_requests_that_are_there(llm, work):
    there = throughput.run(llm, [work], use_tqdm=False)
    coming = throughput.run(llm, [workload.arriving(work, 40.0, seed=1)], use_tqdm=False)
    tokens = [o.outputs[0].token_ids for o in there.outputs]
    assert [o.outputs[0].token_ids for o in coming.outputs] == tokens
    assert coming.walls_s[0] >= workload.arriving(work, 40.0, seed=1)[-1].arrival_s
    assert (there.waited, coming.waited) == (False, True)
    # Waiting for arrivals is nobody's overhead.
    assert numbers.numbers(llm, coming)["host_overhead"] is None


class MadeUp(FixedWork):
    """Counts as fixed work but never reads anything out."""

    def step(self, forward, state):
        holes = blocks.holes(state)
        accept = holes & (jnp.cumsum(holes.reshape(holes.shape[0], -1), axis=1) <= 3).reshape(
            holes.shape
        )
        state = blocks.open_next(state)
        out = forward(state)
        state = out.store(state, blocks.to_cache(state))
        ids = (state.buffer.positions % 7).astype(jnp.int32)
        return blocks.finish_step(blocks.write(state, ids, accept), accept)


@pytest.mark.slow
def test_tokens_that_are_not_read_out_are_found_out(llm, work, random_folder):
    ran = throughput.run(llm, [work[:2]], use_tqdm=False)
    readout = numbers.check_readout(llm, ran)
    assert readout["head_in_program"]
    assert readout["first_token_matches_dense"]
    cheat = small_llm(random_folder, MadeUp(tokens_per_step=3, block_size=8, buffer_size=2))
    ran = throughput.run(cheat, [work[:2]], use_tqdm=False)
    with pytest.raises(ValueError, match="'head_in_program': False"):
        numbers.check_readout(cheat, ran)
    assert not measure.first_token_is_the_models(cheat)


def test_a_failed_request_stops_the_report(llm, work):
    too_long = workload.Work([5] * 200, work[0].params)
    with pytest.raises(ValueError, match="request 1 failed: the prompt has 200 tokens"):
        throughput.measure_batches(llm, [[work[0], too_long]], use_tqdm=False)


def test_measuring_an_engine_at_work_is_refused(llm, work):
    request_id = llm.engine.add(dj.Request(prompt_token_ids=work[0].prompt))
    with pytest.raises(ValueError, match="engine is at work"):
        measure.decode_step_ms(llm.engine, 1, 7, 16)
    llm.engine.abort(request_id)
    while llm.engine.has_work:
        llm.engine.step()


def test_a_model_len_without_room_to_measure_is_named(llm, monkeypatch):
    layout = dataclasses.replace(llm.engine.layout, max_model_len=15)
    monkeypatch.setattr(llm.engine, "layout", layout)
    with pytest.raises(ValueError, match="max_model_len=15 is less than the two blocks of 8 that"):
        measure.decode_step_ms(llm.engine, 1, 7, 16)


# --- bare times ---------------------------------------------------------------------------------


class Ticking:
    """A device whose programs take known times on a clock of its own, launch and transfer apart."""

    launch_s, step_s, pass_s = 0.5, 0.002, 0.03

    def __init__(self, layout):
        self.layout, self.now = layout, 0.0
        self.tables = []

    def __getattr__(self, name):
        if name in ("admit", "begin", "wait"):
            return lambda *_: None
        raise AttributeError(name)

    def decode(self, rows, num_active, pages, num_steps, early):
        assert num_active == len(rows)
        assert not early
        self.tables.append(pages.copy())
        return num_steps

    def fetch(self, steps):
        self.now += self.launch_s + steps * self.step_s
        return SimpleNamespace(steps=steps)

    def prefill(self, slot, tokens, first, end, live_end, last, pages, size, kind):
        assert len(tokens) == end - first <= size
        assert (pages >= 0).all()
        self.now += self.pass_s


def test_bare_times_are_differences_in_which_launch_cancels(llm, monkeypatch):
    device = Ticking(llm.engine.layout)
    engine = dj.Engine(device)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: device.now)
    assert measure.decode_step_ms(engine, 3, 7, 32, steps=8) == pytest.approx(2.0)
    assert measure.prefill_pass_ms(engine, 64, 7, "blocks") == pytest.approx(30.0)
    rows = device.tables[-1]
    held = rows[rows >= 0]
    assert len(set(held.tolist())) == held.size == 12  # every row over pages of its own
    engine.scheduler.pool.check([])  # and they were given back


# --- numbers ------------------------------------------------------------------------------------


def output(prompt_len, tokens, ttfb_s, e2e_s, nfe=4, text=""):
    metrics = dj.Metrics(nfe, 1, 0, 0, tokens / nfe, ttfb_s, e2e_s)
    one = dj.CompletionOutput(0, text, [7] * tokens, "length")
    return dj.RequestOutput("0", None, [1] * prompt_len, [one], True, metrics)


def test_numbers_are_those_worked_out_by_hand(llm, monkeypatch):
    monkeypatch.setattr(measure, "decode_step_ms", lambda engine, rows, *_: {1: 2.0, 3: 5.0}[rows])
    monkeypatch.setattr(measure, "prefill_pass_ms", lambda *_, **__: 100.0)
    of = problem("plain", 0, 0)
    ran = numbers.Ran(
        work=[workload.Work([1], None, problem=of)] * 2,
        outputs=[
            # 3 tokens came with the first commit; 20 after it in 2 s.
            output(5, 23, 1.0, 3.0, text=of.response),
            dataclasses.replace(output(16, 8, 0.5, 0.5, text="None."), request_id="1"),
        ],
        walls_s=[1.25, 2.75],
        steps=Counter({(1, 7): 100, (3, 7): 500}),
        passes=Counter({(16, 7, "blocks", 1): 10}),
        counts=dict.fromkeys(throughput.COUNTED, 0) | {"num_steps": 400},
        firsts={"0": 3, "1": 8},
    )
    reported = numbers.numbers(llm, ran)
    assert reported["wall_s"] == 4.0
    assert reported["visible_tokens"] == 31
    assert reported["tokens_per_forward"] == pytest.approx(31 / 8)
    assert reported["tok_s"] == pytest.approx(31 / 4)
    assert reported["tpot_s"] == pytest.approx({"p50": 0.1, "p90": 0.1, "p99": 0.1})
    assert reported["e2e_s"]["p50"] == pytest.approx(1.75)
    assert reported["accuracy"] == 0.5
    assert reported["prefill_s"] == pytest.approx(1.0)
    # 100 x 2 ms + 500 x 5 ms = 2.7 s of the 3 s that are not prefill.
    assert reported["host_overhead"] == pytest.approx(0.1)
    assert reported["step_ms"] == pytest.approx(3.0 / 400 * 1e3)
    assert reported["bare_step_ms"] == pytest.approx(2.7 / 400 * 1e3)
    assert reported["batch_s"]["p50"] == pytest.approx(2.0)


def test_percentiles_leave_out_what_is_not_there():
    values = [*range(101), None]
    assert numbers.percentiles(values) == pytest.approx({"p50": 50, "p90": 90, "p99": 99})
    assert numbers.percentiles([None]) is None


# --- work ---------------------------------------------------------------------------------------


def test_lengths_are_log_uniform():
    rng = random.Random(0)
    drawn = [workload.Lengths(16, 4095).draw(rng) for _ in range(4000)]
    octaves = Counter(int(math.log2(one)) for one in drawn)
    assert sorted(octaves) == list(range(4, 12))
    assert all(400 < count < 600 for count in octaves.values())
    assert {workload.Lengths(7, 7).draw(rng) for _ in range(50)} == {7}
    assert {workload.Lengths(1, 3).draw(rng) for _ in range(200)} == {1, 2, 3}
    with pytest.raises(ValueError, match="low <= high"):
        workload.Lengths(5, 4)


def test_random_work_holds_no_special_id_and_repeats_by_seed(llm):
    model, args = llm.model, (workload.Lengths(16, 64), workload.Lengths(1, 9))
    work = workload.random_work(model, 40, *args, seed=1)
    ids = {token for one in work for token in one.prompt}
    special = {model.config.mask_token_id, *model.defaults.stop_token_ids}
    assert not ids & special
    assert len(ids) > 300
    assert work == workload.random_work(model, 40, *args, seed=1)
    assert work != workload.random_work(model, 40, *args, seed=2)
    assert all(one.params.ignore_eos for one in work)


def test_arrivals_come_at_the_rate_asked_for(llm):
    work = workload.random_work(llm.model, 1, *[workload.Lengths(2, 2)] * 2, seed=0) * 2000
    times = [one.arrival_s for one in workload.arriving(work, 50.0, seed=0)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(40.0, rel=0.1)
    gaps = np.diff(times)
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.1)  # exponential


def test_word_problems_are_asked_as_chat(llm):
    work = workload.problem_work(llm.model, 4, 60, seed=0)
    reported = llm.model.tokenizer.decode(work[1].prompt)
    assert work[1].problem == problem("hard", 0, 0, heldout=True)
    assert work[1].problem.question in reported
    assert reported.startswith("<|user|>")
    assert reported.endswith("<|assistant|>")
    bare = llm.model.replace(tokenizer_source=None)
    with pytest.raises(ValueError, match="no tokenizer to read text with"):
        workload.encode(bare, "text")
