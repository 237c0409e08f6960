"""Texts that keep to automata in the engine, over the toy models of the contract's gate.

A request's text is its own: alone, in a batch, after preemption at each fetch, beside requests with
other automata and with none. Those end as they do without a neighbour that has one.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.kernels import grammar_path
from dllm_jax.loading.load import place
from dllm_jax.models.sharding import over_devices
from dllm_jax.runner import grammar_readout, grammars
from dllm_jax.runner.grammars import ready
from dllm_jax.runner.state import DeviceState
from dllm_jax.strategies.core import grammar_plan, grammar_walk
from tests.contract.cases import NAMES, case, sweep
from tests.contract.engine import (
    ends,
    finish,
    make_device,
    make_engine,
    preempting,
    run,
    steps_a_chunk,
    wanted,
    wish,
)
from tests.contract.models import MASK, PADDED, VOCAB
from tests.structured.toys import closed, random_toy

STOP = 5
# Drafts that stay by chance are refused.
CASES = [name for name in NAMES if not name.startswith(("dflash_rejection", "edit_indel"))]
# What reads whole laws or drafts has no such form.
ONE_PASS = [name for name in CASES if not name.startswith(("dflash", "diffusion_gemma"))]
ROOM = 9


def _toy(seed):
    rng = np.random.default_rng(seed)
    while True:
        toy = random_toy(rng, VOCAB, STOP, (MASK, PADDED), states=6, classes=5)
        if 2 <= toy.distance[toy.start] <= ROOM - 1:
            return toy


TOYS = [_toy(seed) for seed in range(4)]


def _bound(name, toy, spare, which=0, **sampled):
    prompt = case(name).requests[which % len(case(name).requests)].prompt or [1]
    room = int(toy.distance[toy.start]) + spare
    params = SamplingParams(max_tokens=room, stop_token_ids=(STOP,), **sampled)
    return Request(prompt_token_ids=prompt, params=params, grammar=ready(toy, VOCAB))


def _mixed(name):
    """Greedy texts, and two that are drawn."""
    drawn = {"temperature": 1.0, "seed": 3}
    greedy = {"seed": 3}  # a canvas begins with noise all the same
    each = zip(TOYS, (0, 3, 4, 5), (greedy, greedy, drawn, drawn), strict=True)
    return [_bound(name, toy, spare, i, **how) for i, (toy, spare, how) in enumerate(each)]


def _assert_whole(outputs):
    for output, toy in zip(outputs, TOYS, strict=True):
        (text,) = output.outputs
        assert output.error is None
        assert (text.finish_reason, text.constraint_met) == ("stop", True)
        assert toy.may_end(toy.after(toy.start, text.token_ids))


@pytest.mark.long
@pytest.mark.parametrize("name", sweep(("multi_bd",), CASES))
def test_texts_are_whole_and_the_same_alone_and_after_preemption(name):
    together = run(make_engine(name), _mixed(name))
    _assert_whole(together)
    alone = [run(make_engine(name), [one])[0] for one in _mixed(name)]
    assert ends(alone) == ends(together)
    engine = make_engine(name)
    with steps_a_chunk(1):
        assert ends(run(engine, _mixed(name), preempting())) == ends(together)
    assert engine.stats().num_preemptions > 0
    with steps_a_chunk(1):
        assert ends(run(make_engine(name), _mixed(name)[::-1]))[::-1] == ends(together)


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(("multi_bd",), ONE_PASS))
def test_kernels_and_one_pass_over_the_head_write_the_same(name, monkeypatch):
    wanted = run(make_engine(name), _mixed(name))
    interpreted = (functools.partial(fn, interpret=True) for fn in grammar_path.api.TRITON)
    kernels = grammar_path.PathKernels(*interpreted)
    monkeypatch.setattr(grammar_path, "choose", lambda: kernels)
    passes = []
    monkeypatch.setattr(grammar_readout, "reads_ids", lambda *_: passes.append(1) or True)
    jax.clear_caches()
    device = make_device(name)  # the shared one has its programs
    try:
        for some in (_mixed(name), _mixed(name)[:2]):  # with drawn texts and without
            assert ends(run(make_engine(name, device), some)) == ends(wanted[: len(some)])
    finally:
        jax.clear_caches()
    assert passes


@pytest.mark.long
@pytest.mark.parametrize("name", sweep(("multi_bd",), CASES))
def test_neighbours_without_an_automaton_end_as_the_truth(name):
    free = case(name).requests
    engine = make_engine(name)
    outputs = run(engine, [*map(wish, free), _bound(name, TOYS[1], 2)])
    assert ends(outputs[:-1]) == [wanted(name, one) for one in free]
    assert outputs[-1].outputs[0].constraint_met


def _anything():
    """An automaton that takes every text."""
    class_of = np.ones(VOCAB, np.int32)
    class_of[STOP] = 2
    return closed(class_of, np.array([[0, 0, 0], [0, 1, 0]], np.int32), np.array([False, True]), 1)


@pytest.mark.parametrize(
    "name",
    sweep(("multi_bd", "full_sequence", "dmax"), CASES),
)
def test_b11_a_grammar_that_forbids_nothing_changes_nothing(name):
    """The models are toys, sure of nothing; some texts end before the limit.

    A whole text at its limit ends with "stop" where it is held to a grammar.
    """
    free = [wish(one, stop_token_ids=(STOP,), temperature=0.0) for one in case(name).requests]
    held = [dataclasses.replace(one, grammar=ready(_anything(), VOCAB)) for one in free]
    texts = [
        [(tokens, nfe) for tokens, _, nfe in ends(run(make_engine(name), some))]
        for some in (held, free)
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "wide"), [(2, 3), (8, grammars.WIDE)])
def test_devices_that_share_a_model_keep_to_the_same_automata(parts, wide, monkeypatch):
    """Of 40 ids a device has 5 or 20: classes of few ids and of many lie across devices."""
    monkeypatch.setattr(grammars, "WIDE", wide)
    together = run(make_engine("multi_bd"), _mixed("multi_bd"))
    model = place(case("multi_bd").model, over_devices(parts))
    engine = make_engine("multi_bd", make_device("multi_bd", model))
    outputs = run(engine, _mixed("multi_bd"))
    _assert_whole(outputs)
    assert ends(outputs) == ends(together)


@pytest.mark.long
def test_fifty_automata_at_once_compile_nothing():
    engine = make_engine("multi_bd")
    run(engine, [_bound("multi_bd", TOYS[0], 1, i) for i in range(3)])
    known = set(engine.runner.device.compiled)
    toys = [_toy(seed) for seed in range(10, 60)]
    outputs = run(engine, [_bound("multi_bd", toy, 1, i) for i, toy in enumerate(toys)])
    for output, toy in zip(outputs, toys, strict=True):
        assert output.outputs[0].constraint_met
        assert toy.may_end(toy.after(toy.start, output.outputs[0].token_ids))
    assert set(engine.runner.device.compiled) == known


@pytest.mark.slow
def test_a_mixed_load_with_aborts_is_whole():
    """256 requests, a third of them free, the others of 40 automata; one in eight is aborted."""
    engine, rng = make_engine("multi_bd"), np.random.default_rng(0)
    toys, free = [_toy(seed) for seed in range(100, 140)], case("multi_bd").requests
    ids = []
    for i in range(256):
        bound = _bound("multi_bd", toys[i % 40], i % 5, i) if i % 3 else None
        ids.append(engine.add(bound or wish(free[i // 3 % len(free)])))
    doomed = rng.permutation(ids)[:32].tolist()

    def between(engine):
        if doomed and rng.random() < 0.3:
            engine.abort(doomed.pop())

    done = finish(engine, between)
    num_aborted = 0
    for i, number in enumerate(ids):
        (text,) = done[number].outputs
        if text.finish_reason == "abort":
            num_aborted += 1
            assert not text.constraint_met
        elif i % 3:
            toy = toys[i % 40]
            assert text.constraint_met
            assert toy.may_end(toy.after(toy.start, text.token_ids))
        else:
            assert ends([done[number]]) == [wanted("multi_bd", free[i // 3 % len(free)])]
    assert num_aborted > 10


@pytest.mark.slow
def test_a_program_without_an_automaton_keeps_its_text(monkeypatch):
    """Byte for byte: behind requests that had one, and where nothing of automata can be traced."""

    texts, lower = {}, DeviceState.lower

    def noted(device, call):
        lowered = lower(device, call)
        texts.setdefault(call.key, []).append(lowered.as_text())
        return lowered

    monkeypatch.setattr(DeviceState, "lower", noted)
    free = list(map(wish, case("multi_bd").requests))
    engine = make_engine("multi_bd", make_device("multi_bd"))
    run(engine, [_bound("multi_bd", TOYS[0], 1)])
    run(engine, free)
    jax.clear_caches()  # what was traced already would not be traced again
    for name in ("plan", "plan_each"):
        monkeypatch.setattr(grammar_plan, name, None)
    for name in ("walk", "conform"):
        monkeypatch.setattr(grammar_walk, name, None)
    run(make_engine("multi_bd", make_device("multi_bd")), free)
    decodes = [said for key, said in texts.items() if key[0] == "decode" and len(said) == 2]
    assert decodes
    for behind, without in decodes:
        assert behind == without
