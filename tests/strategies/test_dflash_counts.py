"""Counts of drafts, from the device to what users read.

Proves that `metrics.draft` and the engine's counts are those of the request's rounds: among other
requests, resumed after a preemption, with its prompt's pages found or computed, over its samples,
and aborted. A draft that is rarely right is warned of once, unless limits cut its rounds short.
test_dflash.py proves what a round counts.
"""

import dataclasses
import math
import warnings

import numpy as np
import pytest

from dllm_jax.bench import measure
from dllm_jax.engine.inbox import WARN_ROUNDS, SharedEngine, draft_warning
from dllm_jax.engine.requests import DraftMetrics, RequestOutput
from dllm_jax.runner import packing
from tests.contract import engine as toy
from tests.contract.cases import case
from tests.contract.engine import make_engine, run, steps_a_chunk, wish

pytestmark = pytest.mark.long

NAME = "dflash"
REQUESTS = [dataclasses.replace(one, stops=()) for one in case(NAME).requests]


def drafts(outputs: list[RequestOutput]) -> list[DraftMetrics]:
    return [draft(one) for one in outputs]


def draft(output: RequestOutput) -> DraftMetrics:
    assert output.metrics.draft is not None
    return output.metrics.draft


def test_counts_do_not_depend_on_neighbours_or_preemption():
    alone = [run(make_engine(NAME), [wish(r)])[0] for r in REQUESTS]
    for one in alone:
        reported = draft(one)
        assert reported.rounds == one.metrics.nfe
        emitted = len(one.outputs[0].token_ids) - 1  # the first is the prompt's
        assert sum(n * count for n, count in enumerate(reported.counts, 1)) == emitted
        assert reported.mean_accepted_length == emitted / reported.rounds
        assert sum(reported.accepted) > 0
    engine = make_engine(NAME)
    with steps_a_chunk(1):
        moved = run(engine, [wish(r) for r in [*REQUESTS, *REQUESTS]], toy.preempting())
    assert all(one.metrics.num_preemptions > 1 for one in moved)
    assert drafts(moved) == drafts(alone) * 2
    cached = run(engine, [wish(r) for r in REQUESTS])
    assert sum(one.metrics.cached_tokens for one in cached) > 0
    assert drafts(cached) == drafts(alone)
    stats, every = engine.stats(), drafts(alone) * 3
    assert stats.draft_rounds == sum(one.rounds for one in every)
    assert stats.draft_tokens_proposed == sum(sum(one.proposed) for one in every)
    assert stats.draft_tokens_accepted == sum(sum(one.accepted) for one in every)


@pytest.mark.slow
def test_counts_add_over_samples_and_include_aborted_ones():
    engine = make_engine(NAME)
    (both,) = run(engine, [wish(REQUESTS[1], n=2)])
    assert draft(both).rounds == both.metrics.nfe
    request_id = engine.add(wish(REQUESTS[1]))
    with steps_a_chunk(1):
        for _ in range(6):
            engine.step()
    (running,) = engine.outputs()
    engine.abort(request_id)
    (ended,) = engine.step()
    assert draft(running) == draft(ended)
    assert 0 < draft(ended).rounds == ended.metrics.nfe


def test_strategies_that_do_not_draft_have_no_counts():
    device = toy.make_device("ar", allocate=False)
    slot = device.unpack(np.zeros((device.num_words,), np.int32))
    assert packing.draft_metrics(slot["carry"].slot) is None


def test_figures_of_counts():
    reported = DraftMetrics((3, 0, 1), (4, 2), (1, 1)) + DraftMetrics((1, 0, 0), (1, 0), (0, 0))
    assert reported == DraftMetrics((4, 0, 1), (5, 2), (1, 1))
    assert (reported.rounds, reported.mean_accepted_length) == (5, 7 / 5)
    assert reported.accepted_per_position == (1 / 5, 1 / 2)
    empty = DraftMetrics((0, 0), (0,), (0,))
    assert math.isnan(empty.mean_accepted_length)
    assert math.isnan(empty.accepted_per_position[0])


def rounds(num, accepted, proposed=None):
    """Counts of rounds of two drafts of which the first was accepted so often."""
    reported = num if proposed is None else proposed
    return DraftMetrics((num - accepted, accepted, 0), (reported, reported), (accepted, 0))


def test_a_draft_that_is_rarely_right_is_warned_of():
    reported = draft_warning(rounds(WARN_ROUNDS, 1))
    assert reported is not None
    assert "1.02 tokens a round over 64 rounds" in reported
    assert "language); the temperature is high. " in reported
    assert "dtype" not in reported, "a draft of another is refused where it is loaded"
    assert draft_warning(rounds(WARN_ROUNDS - 1, 0)) is None
    assert draft_warning(rounds(100, 15)) is None
    assert draft_warning(rounds(100, 14)) is not None
    # Nine in ten rounds had no room for a draft: what was judged was right.
    assert draft_warning(rounds(1000, 80, proposed=100)) is None
    assert draft_warning(DraftMetrics((100, 0), (0,), (0,))) is None


def test_the_warning_comes_once():
    engine = SharedEngine(toy.make_device("ar", allocate=False))
    engine.advance()
    engine.drafted = rounds(WARN_ROUNDS, 0)
    with pytest.warns(UserWarning, match=r"hardly ever right: 1\.00 .*\(chat template") as reported:
        engine.step()
    assert [one.filename for one in reported] == [__file__], (
        "the caller's line, none of the package"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.advance()


@pytest.mark.slow("ar")
@pytest.mark.parametrize("name", ["ar", NAME])
def test_first_tokens_are_those_of_the_first_commit(name):
    """What runs tells when `ttfb_s` is known; a dispatch of several steps brings more at once."""
    wishes = [wish(dataclasses.replace(one, stops=())) for one in case(name).requests]
    seen = []
    for steps in (1, 3):
        engine, firsts = make_engine(name), {}
        with measure.recording(engine) as ran, steps_a_chunk(steps):
            for one in wishes:
                engine.add(one)
            while engine.has_work:
                for output in [*engine.step(), *engine.outputs()]:
                    if output.metrics.ttfb_s is not None:
                        firsts.setdefault(output.request_id, len(output.outputs[0].token_ids))
        assert ran.firsts == firsts
        seen.append(list(firsts.values()))
    # In one step the token of the prompt and one more; or a round, of one token to all its cells.
    if name == "ar":
        assert seen == [[2] * len(wishes), [4] * len(wishes)]
    else:
        size = engine.layout.block_size - 1
        assert 2 <= min(seen[0]) < max(seen[0]) <= size + 1 < max(seen[1])
