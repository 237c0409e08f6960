"""Requests at the edges of sizes and limits, on the real device programs.

Proves over the gate's cases (each with a dense, cache-free truth) that requests end with the right
tokens, reason and forwards, and leave every page free.
"""

import dataclasses

import pytest

from tests.contract import engine as toy
from tests.contract import models
from tests.contract.cases import NAMES, case, sweep
from tests.contract.engine import ends, make_engine, run, steps_a_chunk, wanted, wish

CACHED = [name for name in NAMES if name not in ("full_sequence", "full_sequence_dual")]

QUICK = ("multi_bd_shifted", "d2f_whole_full", "fast_dllm_v2", "diffusion_gemma_alone")
FEW = sweep(
    ("d2f_whole_full", "fast_dllm_v2", "diffusion_gemma_alone"),
    (
        "multi_bd",
        "d2f_grid_full",
        "d2f_whole_full",
        "ar",
        "fast_dllm_v2",
        "dflash",
        "diffusion_gemma_alone",
    ),
)


def longest(name):
    """A request whose prompt has 21 tokens (16 where all of it stands in the window)."""
    return case(name).requests[1]


def cut(name, length, **changed):
    """A prompt of this many tokens."""
    ids = (longest(name).prompt * 2)[:length]
    return dataclasses.replace(longest(name), prompt=ids, suffix=(), **changed)


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(QUICK))
def test_prompts_of_any_length_end_as_the_truth(name):
    """One token, under a block, exactly one, exactly a page (8, 16), and around them."""
    requests = [cut(name, length, max_tokens=6) for length in (1, 3, 4, 7, 8, 12, 16, 17, 24)]
    got = run(make_engine(name), [wish(r) for r in requests])
    assert ends(got) == [wanted(name, r) for r in requests]


@pytest.mark.slow("^(?!.*multi_bd_shifted)")
@pytest.mark.parametrize("name", sweep(QUICK))
def test_limits_that_are_no_multiple_of_a_block(name):
    requests = [cut(name, length, max_tokens=m) for length in (3, 8) for m in (1, 2, 3, 5, 9)]
    got = run(make_engine(name), [wish(r) for r in requests])
    assert ends(got) == [wanted(name, r) for r in requests]
    assert [len(one.outputs[0].token_ids) for one in got] == [1, 2, 3, 5, 9] * 2


@pytest.mark.long("fast_dllm_v2")
@pytest.mark.slow("diffusion_gemma")
@pytest.mark.parametrize("name", sweep(QUICK, CACHED))
def test_a_pool_that_a_text_outgrows_alone_ends_it_with_what_it_has(name):
    """At the first position that a block after it would not fit."""
    engine = make_engine(name, num_pages=3)
    request = cut(name, 9, max_tokens=55)
    (got,) = run(engine, [wish(request)])
    assert got.outputs[0].finish_reason == "length"
    room = 3 * engine.layout.page_size - engine.layout.block_size - 9
    assert ends([got]) == [wanted(name, dataclasses.replace(request, max_tokens=min(room, 55)))]


@pytest.mark.long("fast_dllm_v2|diffusion_gemma")
@pytest.mark.parametrize("name", sweep(QUICK))
def test_the_mask_id_in_a_prompt_is_a_token_like_another(name):
    prompt = list(longest(name).prompt)
    for place in (0, 5, len(prompt) - 1):
        prompt[place] = models.MASK
    request = dataclasses.replace(longest(name), prompt=tuple(prompt))
    got = run(make_engine(name), [wish(request), wish(longest(name))])
    assert ends(got) == [wanted(name, request), wanted(name, longest(name))]


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.long("fast_dllm_v2|diffusion_gemma")
@pytest.mark.parametrize("name", sweep(QUICK))
def test_stop_ids_of_the_request_and_of_the_model(name):
    tokens = wanted(name, longest(name))[0]
    stop = tokens[len(tokens) // 2]
    stopped = dataclasses.replace(longest(name), stops=(stop,))
    assert wanted(name, stopped)[1] == "stop"
    engine = make_engine(name, stop_token_ids=(stop,))
    own = wish(stopped, ignore_eos=True)
    models_own = wish(longest(name))
    ignored = wish(longest(name), ignore_eos=True)
    with steps_a_chunk(toy.MOST_STEPS):
        got = run(engine, [own, models_own, ignored])
    want = wanted(name, stopped)
    assert ends(got) == [want, want, wanted(name, longest(name))]


@pytest.mark.long("fast_dllm_v2|diffusion_gemma")
@pytest.mark.parametrize("steps", [1, toy.MOST_STEPS])
@pytest.mark.parametrize("name", sweep(QUICK))
def test_max_nfe_ends_with_what_is_settled(name, steps):
    tokens, _, nfe = wanted(name, longest(name))
    engine = make_engine(name)
    with steps_a_chunk(steps):
        got = run(engine, [wish(longest(name), max_nfe=n) for n in range(1, nfe)])
    for n, one in enumerate(got, 1):
        assert (one.outputs[0].finish_reason, one.metrics.nfe) == ("nfe", n)
        assert one.outputs[0].token_ids == tokens[: len(one.outputs[0].token_ids)]
    lengths = [len(one.outputs[0].token_ids) for one in got]
    assert lengths == sorted(lengths)
    assert lengths[0] < len(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("preempted", [False, True])
def test_a_run_of_equal_tokens_ends_a_text(preempted):
    """One embedding for all ids: the model says one thing. What it said comes back with a slot.

    Which cells are filled first is a matter of rounding then, and not the same for a text that is
    computed again; so how long it is after each step is asked for first.
    """
    name = "multi_bd"
    params = case(name).model.params
    same = params | {"embed": params["embed"].at[:].set(params["embed"][5])}
    engine = make_engine(name, toy.make_device(name, case(name).model.replace(params=same)))
    request = cut(name, 3, max_tokens=25)

    def output(**wishes):
        with steps_a_chunk(1):
            (got,) = run(engine, [wish(request, **wishes)], toy.preempting() if preempted else None)
        return got.outputs[0]

    lengths = [len(output(max_nfe=n).token_ids) for n in range(1, 33)]
    assert lengths[0] < 5 < lengths[-1] == 25
    for most in (2, 5, 18, 30):
        got = output(max_repetition_run=most)
        assert len(set(got.token_ids)) == 1
        assert got.token_ids[0] != 0, "an output that was lost would be zeros"
        assert len(got.token_ids) == next((n for n in lengths if n >= most), 25)
        assert got.finish_reason == ("repetition" if most < 25 else "length")


# --- the same prompt ------------------------------------------------------------------------------


@pytest.mark.long("fast_dllm_v2|diffusion_gemma")
@pytest.mark.parametrize("name", sweep(QUICK))
def test_equal_prompts_together_and_one_behind_another(name):
    request = dataclasses.replace(longest(name), temperature=0.9)
    other = dataclasses.replace(request, seed=11)
    engine = make_engine(name)
    with steps_a_chunk(1):
        for one in (request, other):
            engine.add(wish(one))
        early = [one for _ in range(4) for one in engine.step()]
        late = [engine.add(wish(one)) for one in (other, request)]
        done = toy.finish(engine) | {one.request_id: one for one in early}
    got = [done[i] for i in ("0", "1", *late)]
    assert ends(got) == [wanted(name, one) for one in (request, other, other, request)]


# --- leaving --------------------------------------------------------------------------------------


@pytest.mark.long("fast_dllm_v2|diffusion_gemma")
@pytest.mark.parametrize("name", FEW)
def test_aborted_requests_leave_and_change_nothing(name):
    """While it waits, in its prefill, while it decodes, twice, and when it is gone."""
    requests = [*case(name).requests, longest(name), *case(name).requests]
    for after in range(4):
        engine = make_engine(name)
        with steps_a_chunk(1):
            order = [engine.add(wish(r)) for r in requests]
            for _ in range(after):
                assert not engine.step()
            waits, runs = order[-1], order[1]
            assert engine.abort(waits)
            assert engine.abort(runs)
            assert engine.abort(runs), "it is known until its output was given"
            done = toy.finish(engine)
        assert not engine.abort(runs)
        assert not engine.abort("nobody")
        for gone in (waits, runs):
            one = done[gone].outputs[0]
            assert one.finish_reason == "abort"
            tokens = wanted(name, requests[order.index(gone)])[0]
            assert one.token_ids == tokens[: len(one.token_ids)]
        kept = [i for i in range(len(order)) if order[i] not in (waits, runs)]
        want = [wanted(name, requests[i]) for i in kept]
        assert ends([done[order[i]] for i in kept]) == want


@pytest.mark.long("fast_dllm_v2|diffusion_gemma")
@pytest.mark.parametrize("name", FEW)
def test_a_request_that_takes_over_the_slot_of_an_aborted_one_is_itself(name):
    """Its predecessor's last chunk is still on its way."""
    engine = make_engine(name, prefix_caching=False)
    with steps_a_chunk(toy.MOST_STEPS):
        for turn in range(6):
            request = case(name).requests[turn % 3]
            gone = [engine.add(wish(longest(name), n=toy.SLOTS))]
            for _ in range(1 + turn % 3):
                engine.step()
            engine.abort(gone[0])
            kept = engine.add(wish(request))
            assert ends([toy.finish(engine)[kept]]) == [wanted(name, request)]
