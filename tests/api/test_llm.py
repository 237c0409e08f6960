"""Proves that `LLM` keeps the promises of its signatures over a real model and a real tokenizer.

Truths: `dj.generate`, the tokenizer's decoding of whole texts, and a fresh engine without a prefix
cache. After each test the shared engine holds no slot, no page and no output of anyone.
"""

import inspect
import itertools
import runpy
import signal
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import CompletionOutput, Request, SamplingParams
from dllm_jax.engine import inbox
from dllm_jax.strategies import MultiBD
from dllm_jax.tasks.problems import problem

# One bucket of slots, pages and prompts each: few programs, small ones.
CONFIG = dj.EngineConfig(
    max_num_seqs=2,
    max_model_len=224,
    page_size=16,
    num_pages=64,
    slot_buckets=(2,),
    prefill_buckets=(64,),
    max_steps_per_chunk=2,  # or a fast machine runs the 8 forwards of a text at once
)
UNCACHED = replace(CONFIG, enable_prefix_caching=False)
# Careful, so that texts take several forwards and blocks are committed one after the other.
STRATEGY = MultiBD(block_size=32, buffer_size=1, accept_threshold=0.99)
# Answers of 45 to 48 tokens: they end in their second block.
QUESTIONS = [problem("plain", 5, index, heldout=True).question for index in (150, 90, 86)]
PROMPTS = [f"<|user|>{question}<|assistant|>" for question in QUESTIONS]
GREEDY = SamplingParams(max_tokens=64)


@pytest.fixture(scope="module")
def model():
    return dj.load("builtin:tiny-sdar")


@pytest.fixture(scope="module")
def shared(model):
    return dj.LLM(model, STRATEGY, config=CONFIG, warm_up=False)


@pytest.fixture
def llm(shared):
    """The shared one, idle before and after."""
    yield shared
    assert drained(shared) == []
    assert_idle(shared)


def fresh(model, **more):
    return dj.LLM(
        **{"model": model, "strategy": STRATEGY, "config": CONFIG, "warm_up": False} | more
    )


def drained(llm):
    """What nobody asked for."""
    outputs = []
    while llm.engine.has_work:
        outputs += llm.engine.step()
    return [output for output in outputs if output.request_id]


def assert_idle(llm):
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages_held) == (0, 0, 0)
    llm.engine.scheduler.pool.check([])


@pytest.fixture(scope="module")
def truth(model):
    """Tokens and forwards of `dj.generate` for the prompts, greedily."""
    return decoded(model, PROMPTS, STRATEGY)


def decoded(model, prompts, strategy, **options):
    """As `dj.generate` does it: three rows, one program for all tests."""
    rows = [ids(model, prompt) for prompt in prompts]
    out = dj.generate(model, rows, strategy, max_tokens=64, **options)
    rows = zip(np.asarray(out.tokens), out.length, out.nfe, strict=True)
    return [(row[:n].tolist(), int(nfe)) for row, n, nfe in rows]


def ids(model, text):
    return model.tokenizer(text, add_special_tokens=False)["input_ids"]


def tokens(output):
    return [one.token_ids for one in output.outputs]


def joined(events):
    """Text and ids of a stream's pieces."""
    return "".join(e.text for e in events), [token for e in events for token in e.token_ids]


# --- generate -------------------------------------------------------------------------------------


def test_generate_takes_texts_and_ids_and_keeps_their_order(llm, model, truth):
    as_ids = [ids(model, prompt) for prompt in PROMPTS]
    forms = [PROMPTS, as_ids, [PROMPTS[0], as_ids[1], np.array(as_ids[2])]]
    for prompts in forms:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [tokens(output) for output in outputs] == [[want] for want, _ in truth]
        for output, prompt, given in zip(outputs, as_ids, prompts, strict=True):
            assert output.prompt_token_ids == prompt
            assert output.prompt == (given if isinstance(given, str) else None)
            assert output.finished
            assert output.error is None
            one = output.outputs[0]
            assert one.text == model.tokenizer.decode(one.token_ids, skip_special_tokens=True)
            assert (one.index, one.finish_reason, one.window) == (0, "stop", ())
    alone = llm.generate(PROMPTS[1], GREEDY)
    assert [tokens(output) for output in alone] == [[truth[1][0]]]


def test_each_prompt_has_its_own_parameters(llm, truth):
    every = [SamplingParams(max_tokens=5), GREEDY, SamplingParams(max_nfe=2, max_tokens=64)]
    outputs = llm.generate(PROMPTS, every)
    assert tokens(outputs[0]) == [truth[0][0][:5]]
    assert tokens(outputs[1]) == [truth[1][0]]
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", "stop", "nfe"]
    assert outputs[2].metrics.nfe == 2


def test_metrics_count_what_was_spent(model, truth):
    ticks = itertools.count()
    llm = fresh(model, clock=lambda: float(next(ticks)))
    (output,) = llm.generate([PROMPTS[0]], GREEDY)
    metrics, (want, nfe) = output.metrics, truth[0]
    assert metrics.nfe == nfe
    assert metrics.tokens_per_forward == len(want) / nfe
    assert (metrics.cached_tokens, metrics.num_preemptions) == (0, 0)
    assert metrics.prefill_nfe == 1
    assert 0 < metrics.ttfb_s < metrics.e2e_s
    (again,) = llm.generate([PROMPTS[0]], GREEDY)
    prefix = len(output.prompt_token_ids) // 32 * 32
    assert (again.metrics.cached_tokens, again.metrics.prefill_nfe) == (prefix, 0)
    assert tokens(again) == [want]


def test_one_refused_prompt_ends_with_its_reason_and_the_others_go_on(llm, truth):
    prompts = [PROMPTS[0], [], [5000], PROMPTS[1], "<|user|>" + "word " * 400, None]
    outputs = llm.generate(prompts, GREEDY)
    assert tokens(outputs[0]) == [truth[0][0]]
    assert tokens(outputs[3]) == [truth[1][0]]
    reasons = ["empty", "id 5000", "raise max_model_len", "None"]
    for i, reason in zip((1, 2, 4, 5), reasons, strict=True):
        assert reason in outputs[i].error
        assert outputs[i].finished
        assert outputs[i].outputs == [CompletionOutput(0, "", [], "error")]
        assert outputs[i].metrics.nfe == 0
    assert outputs[4].prompt == prompts[4]


def test_only_refused_prompts_raise_the_first_reason(llm):
    with pytest.raises(ValueError, match="id 5000, outside the vocabulary"):
        llm.generate([[5000], []])
    with pytest.raises(ValueError, match="no threshold 'speed'; it has accept_threshold"):
        llm.generate(PROMPTS[0], SamplingParams(strategy_overrides={"speed": 1.0}))


def test_tokenizer_that_fails_ends_its_own_request(llm, model, truth, monkeypatch):
    decode = model.tokenizer.decode

    def failing(token_ids, **options):
        if truth[1][0][0] in token_ids:
            raise RuntimeError("no such piece")
        return decode(token_ids, **options)

    token = truth[1][0][0]
    spoilt = [i for i, (want, _) in enumerate(truth) if token in want]
    monkeypatch.setattr(model.tokenizer, "decode", failing)
    outputs = llm.generate(PROMPTS, GREEDY)
    for i, output in enumerate(outputs):
        reason = output.outputs[0].finish_reason
        assert reason == ("error" if i in spoilt else "stop")
        assert ("no such piece" in (output.error or "")) == (i in spoilt)
    assert 1 in spoilt


def test_progress_bar_counts_prompts_on_a_terminal(llm, monkeypatch):
    import tqdm

    bars = []

    class Bar(tqdm.tqdm):
        def __init__(self, *args, **options):
            bars.append((options["total"], options["disable"]))
            self.seen = 0
            super().__init__(*args, **{**options, "disable": True})

        def update(self, count=1):
            self.seen += count
            bars.append(self.seen)

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    llm.generate([PROMPTS[0], []], SamplingParams(max_tokens=3))
    assert bars == [(2, None), 1, 2]
    del bars[:]
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=3), use_tqdm=False)
    assert bars[0] == (1, True)


# --- keys, knobs, several texts -------------------------------------------------------------------


# Hot, for this model is sure of itself; and not for long.
HOT = {"temperature": 3.0, "max_nfe": 20}


def test_texts_of_one_prompt_share_its_pages(model):
    llm = fresh(model, config=UNCACHED)
    params = SamplingParams(**HOT, seed=4, n=4)
    (output,) = llm.generate(PROMPTS[:1], params)
    prefix = len(output.prompt_token_ids) // 32 * 32
    assert prefix > 0
    assert output.metrics.cached_tokens == 3 * prefix
    assert output.metrics.prefill_nfe == 1
    assert output.metrics.nfe >= 4
    count = sum(len(one.token_ids) for one in output.outputs)
    assert output.metrics.tokens_per_forward == count / output.metrics.nfe
    assert_idle(llm)


def test_overrides_are_of_one_request(llm, model, truth):
    eager = SamplingParams(max_tokens=64, strategy_overrides={"accept_threshold": np.float32(0.5)})
    before = llm.engine.stats().num_late_compiles
    outputs = llm.generate([PROMPTS[0], PROMPTS[0]], [GREEDY, eager])
    assert tokens(outputs[0]) == [truth[0][0]]
    strategy = STRATEGY.replace(accept_threshold=0.5)
    want, nfe = decoded(model, PROMPTS[:1] * 3, strategy)[0]
    assert tokens(outputs[1]) == [want]
    assert outputs[1].metrics.nfe == nfe < outputs[0].metrics.nfe
    assert llm.engine.stats().num_late_compiles == before


# --- stop strings ---------------------------------------------------------------------------------


def test_b10_a_stop_string_that_is_a_special_token_ends_the_text(llm, truth):
    """No text shows special tokens, so the string alone would never be found."""
    (own,) = llm.engine.layout.stop_token_ids
    name = llm.tokenizer.convert_ids_to_tokens(own)
    want, _ = truth[0]
    params = SamplingParams(max_tokens=64, stop=["never there", name], ignore_eos=True)
    one = llm.generate(PROMPTS[:1], params)[0].outputs[0]
    assert (one.finish_reason, one.stop_reason, one.token_ids) == ("stop", name, want)
    # The model's own end comes before the rest of such a string.
    params = SamplingParams(max_tokens=64, stop=[f"{name}\n"])
    assert llm.generate(PROMPTS[:1], params)[0].outputs[0].token_ids == want
    for text, ignored in ((f"\n{name}", False), (f"{name}\n", True)):
        params = SamplingParams(max_tokens=64, stop=text, ignore_eos=ignored)
        with pytest.raises(ValueError, match=rf"or stop_token_ids=\[{own}\]$") as raised:
            llm.generate(PROMPTS[:1], params)
        assert "\n" not in str(raised.value)


def test_stop_string_across_a_block_edge_cuts_text_and_tokens(llm, model, truth):
    prompt, (want, _) = ids(model, PROMPTS[0]), truth[0]
    edge = -len(prompt) % 32  # tokens of the first block
    text = model.tokenizer.decode(want)
    middle = len(model.tokenizer.decode(want[:edge]))
    stop = text[middle - 4 : middle + 4]
    begin = text.index(stop)
    assert begin == middle - 4
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=64, stop=[stop, "never there"]))
    one = output.outputs[0]
    assert (one.text, one.finish_reason) == (text[:begin], "stop")
    fewest = next(n for n in range(edge) if len(model.tokenizer.decode(want[:n])) >= begin)
    assert one.token_ids == want[:fewest]
    events = list(llm.stream(prompt, SamplingParams(max_tokens=64, stop=stop)))
    assert joined(events) == (text[:begin], want[:fewest])


def test_stop_ids_and_no_end_of_text(llm, truth):
    want = truth[0][0]
    token = want[20]
    (output,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=64, stop_token_ids=[token]))
    assert tokens(output) == [want[: want.index(token)]]
    assert output.outputs[0].stop_reason == token
    (own,) = llm.engine.layout.stop_token_ids
    for params, reason in (
        (SamplingParams(max_tokens=64), None),
        (SamplingParams(max_tokens=64, stop_token_ids=[own]), None),
        (SamplingParams(max_tokens=64, stop_token_ids=[own], ignore_eos=True), own),
    ):
        (one,) = llm.generate(PROMPTS[:1], params)[0].outputs
        assert (one.finish_reason, one.stop_reason, one.token_ids) == ("stop", reason, want)
    (output,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=64, ignore_eos=True))
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 64
    params = SamplingParams(max_tokens=64, ignore_eos=True, max_repetition_run=4)
    (output,) = llm.generate(PROMPTS[:1], params)
    assert output.outputs[0].finish_reason in ("repetition", "length")


# --- streams --------------------------------------------------------------------------------------


def test_pieces_of_a_stream_join_to_the_text(llm, model, truth):
    events = list(llm.stream(PROMPTS[0], GREEDY))
    want, nfe = truth[0]
    assert joined(events) == (model.tokenizer.decode(want), want)
    assert len(events) > 2
    assert all(event.text or event.token_ids for event in events[:-1])
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]
    last = events[-1].metrics
    assert (last.nfe, last.tokens_per_forward) == (nfe, len(want) / nfe)
    ttfbs = [event.metrics.ttfb_s for event in events]
    known = [ttfb for ttfb in ttfbs if ttfb is not None]
    assert ttfbs == [None] * (len(events) - len(known)) + known[:1] * len(known)
    assert 0 < known[0] <= last.e2e_s
    # Known once a block was committed, so not before the prompt's own block was full.
    first_block = -len(ids(model, PROMPTS[0])) % 32
    written = [len(joined(events[: i + 1])[1]) for i in range(len(events))]
    assert written[len(events) - len(known)] >= first_block > 0
    assert (events[0].request_id, events[0].index, events[0].error) == (
        events[-1].request_id,
        0,
        None,
    )


@pytest.mark.long
def test_several_texts_of_a_stream_are_told_apart(llm):
    params = SamplingParams(**HOT, seed=4, n=3)
    (want,) = llm.generate(PROMPTS[:1], params)
    events = list(llm.stream(PROMPTS[0], params))
    assert all(e.text or e.token_ids or e.finish_reason for e in events)
    for one in want.outputs:
        mine = [event for event in events if event.index == one.index]
        assert joined(mine) == (one.text, one.token_ids)
        assert [e.finish_reason for e in mine if e.finish_reason] == [one.finish_reason]
        assert mine[-1].finish_reason


def test_denoise_events_show_every_forward(llm, model, truth):
    want, nfe = truth[0]
    events = list(llm.stream(PROMPTS[0], GREEDY, events="denoise"))
    assert [event.metrics.nfe for event in events] == list(range(1, nfe + 1))
    settled, holes = [], []
    for event in events:
        settled += event.token_ids
        assert settled == want[: len(settled)]
        holes.append(event.window.count(None))
        assert len(event.window) <= 32
    assert settled == want
    assert any(holes)
    assert any(token is not None for event in events for token in event.window)


def test_trajectory_holds_what_every_forward_wrote(llm, model, truth):
    outputs = llm.generate([*PROMPTS, []], GREEDY, trajectory=True)
    for output, prompt, (want, nfe) in zip(outputs, PROMPTS, truth, strict=False):
        events = output.metrics.trajectory
        assert [event.metrics.nfe for event in events] == list(range(1, nfe + 1))
        assert joined(events) == (model.tokenizer.decode(want), want)
        assert events == like(llm.stream(prompt, GREEDY, events="denoise"), events)
        assert output.metrics.nfe == nfe
    assert outputs[3].metrics.trajectory is None
    assert llm.generate(PROMPTS[0], GREEDY)[0].metrics.trajectory is None


def like(events, others):
    """Events with the names and times of others."""
    pairs = zip(events, others, strict=True)
    return tuple(replace(a, request_id=b.request_id, metrics=b.metrics) for a, b in pairs)


def test_leaving_a_stream_early_frees_its_slot_and_pages(llm, truth):
    for _ in llm.stream(PROMPTS[0], GREEDY):
        break
    assert_idle(llm)
    stream = llm.stream(PROMPTS[0], GREEDY)  # not one event is read
    assert llm.engine.stats().num_waiting == 1
    del stream
    assert_idle(llm)
    with llm.stream(PROMPTS[0], GREEDY) as stream:
        next(stream)
        assert llm.engine.stats().num_running == 1
        stream.close()
        assert_idle(llm)
        assert list(stream) == []
    assert tokens(llm.generate(PROMPTS[0], GREEDY)[0]) == [truth[0][0]]


def test_callers_take_turns_and_lose_nothing(llm, model, truth):
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    mine = llm.engine.add(Request(prompt_token_ids=ids(model, PROMPTS[2]), params=GREEDY))
    texts = ["", ""]
    for pair in itertools.zip_longest(first, second):  # turn by turn
        for i, event in enumerate(pair):
            texts[i] += event.text if event else ""
        if pair[0] and pair[0].finish_reason is None:
            outputs = llm.generate(PROMPTS[1], SamplingParams(max_tokens=3))  # and in between
            assert tokens(outputs[0]) == [truth[1][0][:3]]
    assert texts == [model.tokenizer.decode(want) for want, _ in truth[:2]]
    own = drained(llm)
    assert [(one.request_id, tokens(one)) for one in own] == [(mine, [truth[2][0]])]


def test_stream_that_goes_within_a_step_ends_after_it(llm, model, truth, monkeypatch):
    held, other = [llm.stream(PROMPTS[0], GREEDY)], llm.stream(PROMPTS[1], GREEDY)
    fetch, running = llm.engine.runner.fetch, []

    def collected(*args):
        held.clear()  # as a garbage collector would
        running.append(llm.engine.stats().num_running)
        return fetch(*args)

    monkeypatch.setattr(llm.engine.runner, "fetch", collected)
    assert "".join(event.text for event in other) == model.tokenizer.decode(truth[1][0])
    assert running[0] == 2
    assert set(running[1:]) == {1}


def test_a_step_of_the_user_brings_streams_on(llm, model, truth):
    stream = llm.stream(PROMPTS[0], GREEDY)
    assert drained(llm) == []  # nothing of it is the user's
    assert "".join(event.text for event in stream) == model.tokenizer.decode(truth[0][0])


def test_aborted_stream_says_so(llm):
    stream = llm.stream(PROMPTS[0], GREEDY)
    event = next(stream)
    assert llm.engine.abort(event.request_id)
    assert [event.finish_reason for event in stream][-1] == "abort"
    assert not llm.engine.abort(event.request_id)


def test_stream_that_fails_says_why(llm, model, monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("no such piece")

    monkeypatch.setattr(model.tokenizer, "decode", failing)
    events = list(llm.stream(PROMPTS[0], GREEDY))
    assert events[-1].finish_reason == "error"
    assert "no such piece" in events[-1].error


# --- interrupts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_interrupt_ends_its_requests_and_leaves_the_engine_usable(llm, truth, monkeypatch, way):
    other = llm.stream(PROMPTS[2], GREEDY)
    fetch, at = llm.engine.runner.fetch, []

    def interrupted(*args):
        at.append("before")
        if len(at) == 3:
            signal.raise_signal(signal.SIGINT)
        got = fetch(*args)
        at.append("after")  # the step goes on to its end
        return got

    monkeypatch.setattr(llm.engine.runner, "fetch", interrupted)
    stream = llm.stream(PROMPTS[0], GREEDY) if way == "stream" else None  # and is held on to
    call = {
        "generate": lambda: llm.generate(PROMPTS[:2], GREEDY),
        "stream": lambda: list(stream),
    }[way]
    with pytest.raises(KeyboardInterrupt):
        call()
    monkeypatch.undo()
    assert at == ["before", "after"] * 2
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    assert "".join(event.text for event in other).endswith(".")
    assert_idle(llm)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [tokens(output) for output in outputs] == [[want] for want, _ in truth]


def test_handler_that_only_takes_note_interrupts_nothing(llm, truth, monkeypatch):
    fetch, noted = llm.engine.runner.fetch, []

    def pressed(*args):
        signal.raise_signal(signal.SIGINT)
        return fetch(*args)

    before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    monkeypatch.setattr(llm.engine.runner, "fetch", pressed)
    try:
        (output,) = llm.generate(PROMPTS[0], GREEDY, trajectory=True)  # a fetch for each forward
    finally:
        signal.signal(signal.SIGINT, before)
    assert tokens(output) == [truth[0][0]]
    assert noted[: truth[0][1]] == [signal.SIGINT] * truth[0][1]


def test_second_interrupt_does_not_wait():
    def press_twice():
        with inbox.InterruptsHeld():
            signal.raise_signal(signal.SIGINT)
            reached.append(1)
            signal.raise_signal(signal.SIGINT)
            reached.append(2)

    reached, before = [], signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is before


# --- chat -----------------------------------------------------------------------------------------


def test_second_turn_prefills_only_what_is_new(model):
    llm = fresh(model)
    talk = [{"role": "user", "content": QUESTIONS[0]}]
    (first,) = llm.chat(talk, GREEDY)
    assert first.prompt == PROMPTS[0]
    answer = first.outputs[0]
    talk += [
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": QUESTIONS[1]},
    ]
    before = llm.engine.stats()
    (second,) = llm.chat(talk, GREEDY)
    after = llm.engine.stats()
    known = first.prompt_token_ids + answer.token_ids
    assert second.prompt_token_ids[: len(known)] == known
    # Of the first turn all blocks are there but the last, which was not committed when it ended.
    cached = second.metrics.cached_tokens
    assert cached > len(first.prompt_token_ids)
    assert cached >= len(known) // 32 * 32 - 32
    assert after.prefix_hits - before.prefix_hits == cached // 16
    left = len(second.prompt_token_ids) // 32 * 32 - cached
    assert second.metrics.prefill_nfe == -(-left // 64)
    (uncached,) = fresh(model, config=UNCACHED).chat(talk, GREEDY)
    assert tokens(uncached) == tokens(second)
    assert uncached.metrics.cached_tokens == 0
    assert_idle(llm)


def test_several_conversations_are_answered_in_order(llm, truth):
    talks = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat([*talks, "no conversation", [{"role": "user"}, 3]], GREEDY)
    assert [tokens(output) for output in outputs[:3]] == [[want] for want, _ in truth]
    assert [output.outputs[0].finish_reason for output in outputs[3:]] == ["error"] * 2
    assert all("is no conversation; give a list" in output.error for output in outputs[3:])


def test_conversations_go_where_prompts_do(llm, model, truth):
    talks = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.generate([talks[0], PROMPTS[1], talks[2]], GREEDY)
    assert [tokens(output) for output in outputs] == [[want] for want, _ in truth]
    assert [output.prompt for output in outputs] == PROMPTS
    (alone,) = llm.generate(talks[0], GREEDY)
    assert tokens(alone) == [truth[0][0]]
    assert joined(list(llm.stream(talks[1], GREEDY)))[1] == truth[1][0]


def test_raw_text_for_a_chat_model_warns_once(llm, monkeypatch):
    monkeypatch.setattr(llm, "_is_advised", False)
    few = SamplingParams(max_tokens=1)
    llm.generate([PROMPTS[0], {"prompt": PROMPTS[1]}, [5, 6]], few)
    with pytest.warns(UserWarning, match=r"without the chat template; use llm\.chat") as caught:
        llm.generate(["2 + 2 =", "3 + 3 ="], few)
    list(llm.stream("2 + 2 =", few))
    assert [warning.filename for warning in caught] == [__file__]


# --- what users of vLLM expect ----------------------------------------------------------------


def test_prompts_and_parameters_of_vllm_work(llm, model, truth):
    as_ids = ids(model, PROMPTS[1])
    prompts = [{"prompt": PROMPTS[0]}, {"prompt_token_ids": as_ids}, {"prompt": "x"}]
    prompts[2]["prompt_token_ids"] = ids(model, PROMPTS[2])
    llm._is_advised = True
    outputs = llm.generate(prompts, sampling_params=replace(GREEDY, top_k=-1))
    assert [tokens(output) for output in outputs] == [[want] for want, _ in truth]
    assert [output.prompt for output in outputs] == [PROMPTS[0], None, "x"]
    (alone,) = llm.generate({"prompt": PROMPTS[0]}, sampling_params=GREEDY)
    assert tokens(alone) == [truth[0][0]]
    assert llm.generate([]) == llm.generate([], GREEDY) == []
    assert llm.tokenizer is llm.get_tokenizer() is model.tokenizer
    assert SamplingParams(top_k=0).top_k is SamplingParams(top_k=-1).top_k is None
    with pytest.raises(TypeError, match="params and sampling_params are the same; give one"):
        llm.generate(PROMPTS[0], GREEDY, sampling_params=GREEDY)


def test_max_tokens_none_writes_what_fits(llm, truth):
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[0], endless)
    one = output.outputs[0]
    assert one.finish_reason == "length"
    assert len(output.prompt_token_ids) + len(one.token_ids) == CONFIG.max_model_len
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=None))
    assert tokens(output) == [truth[0][0]]


def test_representations_are_one_short_line(llm, model):
    (output,) = llm.generate(PROMPTS[0], GREEDY)
    for value, said in (
        (llm, "LLM('builtin:tiny-sdar', MultiBD(block_size=32"),
        (model, "Model('builtin:tiny-sdar', family="),
        (output, "(stop)], nfe="),
    ):
        assert said in repr(value)
        assert len(repr(value)) < 300
        assert "\n" not in repr(value)


def test_a_closed_llm_has_ended_everything_and_refuses_by_name(model):
    with fresh(model) as llm:
        stream = llm.stream(PROMPTS[0], GREEDY)
        runner = llm.engine.runner
        next(stream)
        leaves = jax.tree.leaves(runner.state)
    assert [event.finish_reason for event in stream][-1] == "abort"
    assert not runner._worker.is_alive()
    assert all(leaf.is_deleted() for leaf in leaves if leaf is not None)
    llm.close()
    for call in (
        lambda: llm.generate(PROMPTS[0]),
        lambda: llm.generate([]),
        lambda: llm.stream(PROMPTS[0]),
        lambda: llm.engine.step(),
        lambda: llm.engine.add(Request(prompt_token_ids=[5])),
    ):
        with pytest.raises(RuntimeError, match="the engine is closed; make a new LLM"):
            call()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SamplingParams(repetition_penalty=1.1), "max_repetition_run"),
        (lambda: SamplingParams(min_tokens=3), "ignore_eos"),
        (lambda: SamplingParams(prompt_logprobs=1), "Model.logits"),
        (lambda: SamplingParams(max_new_tokens=3), "max_tokens"),
        (lambda: SamplingParams(zzz=3), "it has max_tokens, temperature"),
        (lambda: dj.LLM("builtin:tiny-sdar", max_length=3), "max_model_len"),
        (lambda: dj.LLM("builtin:tiny-sdar", enforce_eager=True), "warm_up"),
    ],
)
def test_unknown_field_is_refused_with_the_nearest(make, said):
    with pytest.raises(TypeError, match=r"has no field '\w+'; [^\n]*$") as caught:
        make()
    assert said in str(caught.value)


# --- models, arguments ----------------------------------------------------------------------------


def test_model_without_a_tokenizer_takes_ids(model, truth):
    bare = model.replace(tokenizer_source=None, source="random:tiny")
    llm = fresh(bare)
    (output,) = llm.generate([ids(model, PROMPTS[0])], GREEDY)
    assert (tokens(output), output.outputs[0].text) == ([truth[0][0]], "")
    with pytest.raises(ValueError, match=r"'random:tiny' has no tokenizer .* give lists of token"):
        llm.generate(PROMPTS[0])
    with pytest.raises(ValueError, match="stop strings need a tokenizer; use stop_token_ids"):
        llm.generate([[5, 6]], SamplingParams(stop="x"))
    with pytest.raises(ValueError, match="has no tokenizer and no chat template"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_example_of_continuous_batching_answers_everyone(llm, capsys):
    path = Path(__file__).resolve().parents[2] / "examples" / "continuous_batching.py"
    runpy.run_path(str(path))["main"](llm)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines].count("in") == 3
    assert "streamed On each of the days" in "\n".join(lines)
    answers = [line.partition("The answer is ")[2].split(".")[0] for line in lines]
    assert sorted(answer for answer in answers if answer) == ["24", "275", "369", "40"]


SIGNATURES = {
    "__init__": (
        "model strategy block_size buffer_size dtype max_num_seqs max_model_len page_size "
        "memory_utilization num_pages enable_prefix_caching tensor_parallel_size "
        "attention_implementation draft seed"
    ),
    "generate": "prompts params use_tqdm",
    "chat": "messages params use_tqdm sampling_params tools tool_choice parallel_tool_calls "
    "tool_format thinking_token_budget template_kwargs",
    "stream": "prompt params events",
    "infill": "prefix suffix params",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_promised_ones(name):
    found = list(inspect.signature(getattr(dj.LLM, name)).parameters)[1:]
    promised = SIGNATURES[name].split()
    assert found[: len(promised)] == promised
    defaults = inspect.signature(dj.LLM).parameters
    usual = {"dtype": "auto", "max_num_seqs": 8, "page_size": 64, "memory_utilization": 0.9}
    usual |= {"enable_prefix_caching": True, "tensor_parallel_size": 1, "seed": 0}
    usual |= {"lora": None, "tokenizer": None, "batch_invariant": False}  # passed on
    assert {name: defaults[name].default for name in usual} == usual


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tensor_parallel_size": 9}, "tensor_parallel_size=9 needs 9 devices, this process sees"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be a whole number"),
        ({"seed": -1}, "seed=-1 must be a whole number"),
        ({"seed": True}, "seed=True must be a whole number"),
        ({"seed": "x"}, "seed='x' must be a whole number"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16' is for a model that is loaded here"),
        ({"model": 3}, "model has type int; give what dj.load takes"),
        ({"config": CONFIG, "page_size": 16}, "page_size beside config"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be a whole number"),
        ({"page_size": 1.5}, "page_size=1.5 must be a whole number"),
        ({"memory_utilization": 2.0}, "memory_utilization=2.0 must be in"),
        ({"gpu_memory_utilization": 2.0}, "memory_utilization=2.0 must be in"),
        ({"memory_utilization": "all"}, "memory_utilization='all' must be in"),
        ({"max_model_len": 10_000}, "more than the model's 512 positions; lower it"),
        ({"strategy": "nothing"}, "nothing"),
        ({"strategy": STRATEGY, "block_size": 16}, "go with a strategy given by name"),
        ({"strategy": "multi_bd", "block_size": 0}, "block_size"),
        ({"draft": "builtin:tiny-sdar"}, "draft='builtin:tiny-sdar' does not fit MultiBD"),
        ({"warm_up": "all"}, "warm_up='all' must be True or False"),
        ({"warm_up_constraints": "x"}, "warm_up_constraints='x' must be True, False or None"),
    ],
)
def test_wrong_argument_is_one_line(model, arguments, said):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        dj.LLM(**{"model": model, "warm_up": False} | arguments)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda llm: llm.generate([5, 6]), "flat list of token ids; wrap"),
        (lambda llm: llm.generate(np.array([5, 6])), "flat list of token ids; wrap"),
        (lambda llm: llm.generate(None), "prompts has type NoneType; give a text"),
        (lambda llm: llm.generate({"text": "x"}), "a prompt has no field 'text'; give prompt or"),
        (lambda llm: llm.generate([{}]), "the prompt is {}; give it prompt or prompt_token_ids"),
        (lambda llm: llm.generate([[1.5]]), "the prompt is [1.5]; give one list of whole numbers"),
        (lambda llm: llm.generate(PROMPTS[0], [GREEDY] * 2), "2 params for 1 prompts; give one"),
        (
            lambda llm: llm.generate(PROMPTS[0], {"n": 2}),
            "params holds a value of type dict; give SamplingParams",
        ),
        (lambda llm: llm.chat([]), "messages is empty"),
        (lambda llm: llm.chat("hello"), "messages has type str; give a list"),
        (lambda llm: llm.stream("x", events="all"), "events='all' is not known; use \"commit\""),
        (lambda llm: llm.stream(PROMPTS[0], {"n": 2}), "params has type dict; give SamplingParams"),
        (lambda llm: llm.stream([]), "the prompt is empty"),
        (lambda llm: llm.infill("x", "y"), "and the window has"),
    ],
)
def test_wrong_call_is_one_line_and_leaves_nothing(llm, call, said):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        call(llm)
    assert said in str(caught.value)


def test_sizes_go_with_a_strategy_by_name(model):
    llm = dj.LLM(
        model, block_size=16, buffer_size=2, max_num_seqs=np.int64(2), warm_up=False, num_pages=9
    )
    assert (llm.strategy.block_size, llm.strategy.buffer_size) == (16, 2)
    assert llm.strategy.accept_threshold == 0.9
    assert llm.config.max_num_seqs == 2
