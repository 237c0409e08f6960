"""`FullSequence`: random scripts against its authors' loops, the rows of each pass, and its edges.

`oracles/full_sequence_decoder.py` says both. Dense runs prove decoding on pages, guidance and both
caches, in the contract's case `full_sequence_dual` and below.
"""

import dataclasses
import functools
import itertools
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import strategies
from dllm_jax.api import generate
from dllm_jax.api.strategy import check_fit
from dllm_jax.engine.layout import EngineConfig
from dllm_jax.runner.reader import Reader
from dllm_jax.runner.readout import read_stats
from dllm_jax.strategies.core import remasking
from dllm_jax.strategies.core.protocol import Readout
from dllm_jax.strategies.core.state import NO_TOKEN, Sampling
from dllm_jax.strategies.testing.script import Trace, run_script
from tests.contract.cases import case as contract_case
from tests.contract.cases import full_sequence_case
from tests.contract.cases import truth as contract_truth
from tests.contract.dense import Net
from tests.contract.dense_full_sequence import decode_full_sequence
from tests.contract.harness import Request, decode_paged
from tests.contract.models import causal, plain
from tests.models.test_family_decode import MASK_ID, Files
from tests.oracles.checkpoints import write_tiny
from tests.oracles.full_sequence_decoder import (
    Decoded,
    Pass,
    full_sequence_decode,
    get_num_transfer_tokens,
    number_transfer_tokens,
    p_transfer,
)
from tests.strategies.recorded import recording
from tests.strategies.test_strategy_fuzz import (
    POSITIONS,
    Case,
    check_agreement,
    draw_case,
    draw_threshold,
)
from tests.strategies.test_traces import EOS, MASK, VOCAB, column, everywhere, script, windows

S, K = 4, 10
assert S * K == POSITIONS

# Remasking, steps, block_length, cache. One program each; mutants are noticed by one of these.
HOWS: dict[str, tuple[Any, ...]] = {
    "low_confidence": ("low_confidence", 7, 5, None),
    "entropy": ("entropy", 6, None, None),
    "margin": ("margin", None, 4, "dual"),
    "origin": ("origin", 5, 6, None),
}
QUICK = ("low_confidence", "entropy", "margin")
RULES = ("low_confidence", "maskgit_plus", "margin", "entropy", "random", "origin")
SHAPES = ((None, None, None), (5, None, None), (None, 6, "prefix"), (9, 4, "dual"), (3, 3, None))
ALL = [(rule, *shape) for rule in RULES for shape in SHAPES]


@functools.cache
def uniform(nfe: int, position: int) -> float:
    """What a request under `run_script` draws to order its cells: stream 1, forward, salt 1."""
    key = jax.random.split(jax.random.key(0), 1)[0]
    for data in (1, nfe, 1, position):
        key = jax.random.fold_in(key, data)
    return float(jax.random.uniform(key))


def fields_of(how: tuple[Any, ...], accept: float) -> dict[str, Any]:
    names = ("remasking", "steps", "block_length", "cache")
    sizes = {"accept_threshold": accept, "block_size": S, "buffer_size": K}
    return dict(zip(names, how, strict=True)) | sizes


def decode_both(
    case: Case, how: tuple[Any, ...], accept: float, package: ModuleType = strategies
) -> tuple[Trace, Decoded]:
    fields = fields_of(how, accept)
    scripted = (case.prompt, case.token, case.prob)
    trace = package.testing.run_script(package.FullSequence(**fields), *scripted, **case.limits)
    return trace, full_sequence_decode(*scripted, **fields, uniform=uniform, **case.limits)


def draw(seed: tuple[int, ...]) -> tuple[Case, float]:
    rng = np.random.default_rng(seed)
    case = draw_case(rng, S)
    room = POSITIONS - len(case.prompt)
    case.limits["max_tokens"] = min(case.limits["max_tokens"], room)
    return case, draw_threshold(rng) if rng.random() < 0.5 else 1.0


def compare(
    how: tuple[Any, ...], first: int, count: int, package: ModuleType = strategies
) -> list[Trace]:
    traces = []
    for number in range(first, first + count):
        case, accept = draw((37, number))
        trace, truth = decode_both(case, how, accept, package)
        check_agreement(trace, truth, (number, how))
        assert case.limits["mask_id"] not in trace.output
        traces.append(trace)
    return traces


@pytest.mark.long("margin")
@pytest.mark.parametrize("name", QUICK)
def test_agrees_with_the_authors_loops(name: str) -> None:
    traces = compare(HOWS[name], first=0, count=70)
    assert {trace.finish_reason for trace in traces} >= {"stop", "length", "nfe"}


@pytest.mark.slow
@pytest.mark.parametrize("how", ALL)
def test_agrees_over_a_long_sweep(how: tuple[Any, ...]) -> None:
    compare(how, first=1000, count=80)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_agrees_with_the_authors_loop_under_guidance(scale: float) -> None:
    """A step reads two rows of the script: the guided law is no row's own."""
    fields = fields_of(("low_confidence", 7, 5, None), 1.0) | {"cfg_scale": scale}
    for number in range(60):
        case, fields["accept_threshold"] = draw((39, number))
        rng = np.random.default_rng((40, number))
        prob = rng.uniform(0.05, 0.95, case.prob.shape).astype(np.float32)
        scripted = (case.prompt, case.token, prob)
        trace = run_script(strategies.FullSequence(**fields), *scripted, **case.limits)
        check_agreement(trace, full_sequence_decode(*scripted, **fields, **case.limits), number)


def test_a_stop_cuts_what_the_authors_program_would_write() -> None:
    """Which goes on to the end of the text: nothing before the stop is any other."""
    how, stopped = HOWS["low_confidence"], 0
    for number in range(200, 240):
        case, accept = draw((37, number))
        case.limits["max_tokens"] = min(case.limits["max_tokens"], 20)
        case.limits.pop("max_nfe", None)
        trace, _ = decode_both(case, how, accept)
        unstopped = dict(case.limits, eos_ids=())
        script_ = (case.prompt, case.token, case.prob)
        whole = full_sequence_decode(*script_, **fields_of(how, accept), **unstopped)
        ends = [i for i, token in enumerate(whole.output) if token in case.limits["eos_ids"]]
        assert trace.output == whole.output[: ends[0] if ends else None], f"{number=}"
        assert trace.nfe <= whole.nfe
        stopped += trace.nfe < whole.nfe
    assert stopped > 5, "no text ended early"


# ---- what each forward runs, sees and stores ----


def compare_passes(package: ModuleType, cache: str, count: int) -> set[int]:
    """Which widths were met."""
    offered = (10, 20, S * K) if cache == "prefix" else (4, S * K)
    met = set()
    with recording(package) as ran:
        for number in range(count):
            case, _ = draw((38, number))
            ran.clear()
            _, truth = decode_both(case, ("low_confidence", None, 4, cache), 0.9, package)
            jax.effects_barrier()
            passes = [Pass(one.first, one.end, one.cached, one.stored) for one in ran]
            assert passes == truth.passes, f"{number=}"
            widths = [one.width or S * K for one in ran]
            needed = [one.end - one.first for one in passes]
            assert widths == [next(w for w in offered if w >= n) for n in needed], f"{number=}"
            met |= {*widths}
    return met


@pytest.mark.slow
def test_each_forward_runs_sees_and_stores_what_the_lists_say() -> None:
    assert compare_passes(strategies, "dual", 20) == {4, S * K}


@pytest.mark.slow
def test_a_prefix_cache_runs_the_rest_of_the_text() -> None:
    assert compare_passes(strategies, "prefix", 40) == {10, 20, S * K}


def test_48_4_a_pass_is_as_wide_as_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 4,096 cells a step with 300 live runs the rows that a window of 512 runs."""
    widths: list[int | None] = []
    call = strategies.testing.script._ScriptedForward.__call__

    def recorded(self: Any, state: Any, **options: Any) -> Any:
        jax.debug.callback(lambda: widths.append(options.get("width")), ordered=True)
        return call(self, state, **options)

    monkeypatch.setattr(strategies.testing.script._ScriptedForward, "__call__", recorded)
    how = {"block_length": 32, "append": True, "steps": 1, "block_size": 32}
    token, prob = np.full((8, 4096), 1, np.int32), np.full((8, 4096), 0.2, np.float32)
    given = {"mask_id": MASK, "vocab_size": VOCAB, "max_nfe": 8}
    for buffer_size, narrow in ((16, None), (128, 512)):
        strategy = strategies.FullSequence(**how, buffer_size=buffer_size)
        run_script(strategy, [7] * 268, token, prob, max_tokens=32 * buffer_size - 268, **given)
        jax.effects_barrier()
        # Blocks of 32 after 268 cells: the eighth ends at 524.
        assert widths == [narrow] * 7 + [narrow and 1024], buffer_size
        del widths[:]


# ---- worked by hand ----


def by_lists(forwards: Any, prompt: list[int], **options: Any) -> Any:
    token, prob = script(forwards)
    return full_sequence_decode(prompt, token, prob, mask_id=MASK, vocab_size=VOCAB, **options)


def by_strategy(forwards: Any, prompt: list[int], **options: Any) -> Any:
    token, prob = script(forwards)
    names = {*fields_of(HOWS["entropy"], 1.0)}
    own = {name: options.pop(name) for name in names if name in options}
    strategy = strategies.FullSequence(**own)
    return run_script(strategy, prompt, token, prob, mask_id=MASK, vocab_size=VOCAB, **options)


# Each asks for a program of its own: the sweeps above hold the two equal where time is short.
@pytest.fixture(
    params=[by_lists, pytest.param(by_strategy, marks=pytest.mark.slow)],
    ids=["list_decoder", "run_script"],
)
def decode(request: pytest.FixtureRequest) -> Any:
    return request.param


SMALL: dict[str, Any] = {"block_size": 4, "buffer_size": 3, "accept_threshold": 1.0}
LLADA = {**SMALL, "remasking": "low_confidence", "steps": 4, "block_length": 4}


def test_the_authors_example_of_llada(decode: Any) -> None:
    """Two tokens of prompt, blocks of four by two forwards: 2 + 2, then the next block's.

    What the model is surest of, position 9, belongs to the second block and waits.
    """
    first = {3: (10, 0.6), 4: (11, 0.5), 5: (12, 0.7), 9: (20, 0.99)}
    trace = decode([first, {}, {6: (13, 0.5), 9: (14, 0.9)}], [7, 8], **LLADA, max_tokens=8)
    assert windows(trace)[:3] == [
        "A[7 8 _ 10] A[_ 12 _ _] A[_ _ _ _]",
        "A[7 8 1 10] A[1 12 _ _] A[_ _ _ _]",
        "A[7 8 1 10] A[1 12 13 _] A[_ 14 _ _]",
    ]
    assert column(trace, "new_tokens") == [2, 2, 2, 2]
    assert (list(trace.output), trace.finish_reason) == ([1, 10, 1, 12, 13, 1, 1, 14], "length")


def test_blocks_and_steps_that_do_not_divide(decode: Any) -> None:
    """Ten tokens in blocks of 4, 4 and 2; five forwards make one a block, seven make two."""
    how = {**LLADA, "steps": 5}
    assert column(decode([], [7, 8], **how, max_tokens=10), "new_tokens") == [4, 4, 2]
    how = {**LLADA, "steps": 7, "block_length": 3}  # 3, 3, 3 and 1: one forward each
    assert column(decode([], [7, 8], **how, max_tokens=10), "new_tokens") == [3, 3, 3, 1]
    how = {**LLADA, "steps": 8, "block_length": 5}  # four forwards for five: the remainder first
    assert column(decode([], [7, 8], **how, max_tokens=10), "new_tokens") == [2, 1, 1, 1] * 2
    how = {**LLADA, "steps": 99, "block_length": None}  # more forwards than tokens: one each
    assert column(decode([], [7, 8], **how, max_tokens=5), "new_tokens") == [1] * 5


def test_dreams_timesteps(decode: Any) -> None:
    """8 x .999 / 4 = 1.998; 7 x .999 / 3.001 = 2.3; 5 x .999 / 2.002 = 2.5; the rest."""
    how = {**SMALL, "remasking": "entropy", "steps": 4, "block_length": None}
    trace = decode([{5: (10, 0.9), 3: (11, 0.8)}], [7, 8], **how, max_tokens=8)
    assert column(trace, "new_tokens") == [1, 2, 2, 3]
    assert windows(trace)[0] == "A[7 8 _ _] A[_ 10 _ _] A[_ _ _ _]"


def test_a_token_a_forward_by_timesteps_begins_with_none(decode: Any) -> None:
    """As the authors': 5 x .999 / 5 is below 1, and the last forward makes up for it."""
    how = {**SMALL, "remasking": "maskgit_plus", "steps": None, "block_length": None}
    trace = decode([], [7, 8], **how, max_tokens=5)
    assert column(trace, "new_tokens") == [0, 1, 1, 1, 2]
    sped = {**how, "accept_threshold": 0.99}
    trace = decode([], [7, 8], **sped, max_tokens=5)
    assert column(trace, "new_tokens") == [1] * 5


def test_the_margin_ranks_and_the_probability_accepts(decode: Any) -> None:
    """.5 of 30 ids has a margin of .48; two of .5 tie and the left one goes first."""
    how = {**SMALL, "remasking": "margin", "steps": None, "block_length": 4}
    how["accept_threshold"] = 0.9
    forward = {3: (10, 0.5), 4: (11, 0.5), 5: (12, 0.95), 2: (13, 0.9)}
    trace = decode([forward], [7, 8], **how, max_tokens=4)
    assert windows(trace)[0] == "A[7 8 _ _] A[_ 12 _ _] D"
    trace = decode([dict(list(forward.items())[:2])], [7, 8], **how, max_tokens=4)
    assert windows(trace)[0] == "A[7 8 _ 10] A[_ _ _ _] D"


@pytest.mark.parametrize(("accept", "nfe"), [(1.0, 6), (0.0, 2), (0.5, 6)])
def test_certainty_at_threshold_one_and_anything_at_zero(
    decode: Any, accept: float, nfe: int
) -> None:
    """Trap 23: 1 is not above 1, nor .5 above .5; above 0 is a block a forward."""
    how = {**LLADA, "steps": None, "accept_threshold": accept}
    sure = 1.0 if accept == 1.0 else 0.5
    trace = decode([everywhere((10, sure))] * 12, [1, 2], **how, max_tokens=6)
    assert (list(trace.output), trace.nfe) == ([10] * 6, nfe)


def test_a_stop_behind_a_hole_waits_and_what_is_behind_it_does_not(decode: Any) -> None:
    """Trap 8; a stop id and a mask id in the prompt are tokens."""
    how = {**LLADA, "steps": None}
    forwards = [{4: (EOS, 0.9)}, {3: (12, 0.8)}, {2: (13, 0.7)}]
    trace = decode(forwards, [EOS, MASK], **how, max_tokens=8, eos_ids=(EOS,))
    assert windows(trace) == [
        "A[30 _ _ _] A[30 _ _ _] A[_ _ _ _]",
        "A[30 _ _ 12] A[30 _ _ _] A[_ _ _ _]",
    ]
    assert (list(trace.output), trace.finish_reason, trace.nfe) == ([13, 12], "stop", 3)


def test_ties_go_to_the_lowest_position(decode: Any) -> None:
    trace = decode([everywhere((10, 0.5))] * 3, [1, 2], **LLADA, max_tokens=4)
    assert windows(trace)[0] == "A[1 2 10 _] A[_ _ _ _] D"  # one block: four forwards


# ---- the rules of remasking, function by function ----


def ints(*values: Any) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def test_an_even_quota_fills_a_block_in_its_steps_remainder_first() -> None:
    asked, wanted = [], []
    for holes, steps in itertools.product(range(1, 40), repeat=2):
        asked += [(holes, steps, step) for step in range(steps)]
        wanted += get_num_transfer_tokens(holes, steps)
    assert remasking.even_quota(*ints(*asked).T).tolist() == wanted


def test_timesteps_fill_what_float64_says_and_nearly_always_what_float32_does() -> None:
    """Over whole runs: from all holes, each forward on what the last one left.

    None of these steps shares a factor with 999; where one does, the product may be a whole number,
    and a float falls to either side of it.
    """
    asked, wanted, single = [], [], []
    for holes, steps in itertools.product((8, 31, 64, 128, 256, 512, 1000), repeat=2):
        left = holes
        for step in range(steps):
            asked.append((left, steps, step))
            wanted.append(number_transfer_tokens(left, steps, step))
            single.append(left if step == steps - 1 else in_float32(left, steps, step))
            left -= wanted[-1]
        assert left == 0
    assert remasking.timestep_quota(*ints(*asked).T).tolist() == wanted
    assert np.mean(np.array(single) != wanted) < 3e-4


def in_float32(left: int, steps: int, step: int) -> int:
    """As torch computes it: `linspace` counts from the nearer end."""
    width = np.float32((np.float32(1e-3) - np.float32(1)) / np.float32(steps))

    def timestep(i: int) -> np.float32:
        if i < (steps + 1) // 2:
            return np.float32(1) + width * np.float32(i)
        return np.float32(1e-3) - width * np.float32(steps - i)

    share = np.float32(1) - timestep(step + 1) / timestep(step)
    return int(np.float32(left) * share)


def test_each_chance_is_that_of_the_timesteps() -> None:
    for steps in (1, 2, 7, 512):
        step = jnp.arange(steps, dtype=jnp.int32)
        got = remasking.timestep_chance(jnp.full_like(step, steps), step)
        np.testing.assert_allclose(got, [p_transfer(steps, i) for i in range(steps)], rtol=1e-5)


def stats_of(confidence: Any, entropy: Any = None, top: Any = None) -> Any:
    sure = jnp.asarray(confidence, jnp.float32)
    nothing = jnp.zeros_like(sure)
    top = nothing[..., None] if top is None else jnp.asarray(top, jnp.float32)
    entropy = nothing if entropy is None else jnp.asarray(entropy, jnp.float32)
    return strategies.TokenStats(nothing.astype(int), sure, entropy, top.astype(int), top)


def test_scores_rank_as_their_names_say() -> None:
    stats = stats_of([[[0.5, 0.4]]], [[[1.0, 0.5]]], [[[[0.5, 0.45], [0.4, 0.1]]]])
    noise = jnp.asarray([[[0.1, 0.2]]])
    want = {
        "low_confidence": [0.5, 0.4],
        "maskgit_plus": [0.5, 0.4],
        "margin": [0.05, 0.3],
        "entropy": [-1.0, -0.5],
        "random": [0.1, 0.2],
    }
    for name, values in want.items():
        got = remasking.scores(name, stats, noise)  # type: ignore[arg-type]
        np.testing.assert_allclose(got[0, 0], values, rtol=1e-5)
    with pytest.raises(ValueError, match="ranks by noise; give uniform numbers a cell"):
        remasking.scores("random", stats)


def test_the_best_cells_are_those_of_the_whole_window() -> None:
    score = jnp.asarray([[[3.0, 9.0], [5.0, 5.0]], [[0.0, 0.0], [0.0, -1.0]]])
    among = jnp.asarray([[[True, False], [True, True]], [[False, True], [True, True]]])
    best = remasking.best_cells(score, ints(2, 1), among)
    assert best.tolist() == [[[False, False], [True, True]], [[False, True], [False, False]]]
    assert not remasking.best_cells(score, ints(0, 0), among).any()
    rng = np.random.default_rng(0)
    for width in (1, 5, 12, 40):  # all of them lie within this many cells
        among = rng.random((3, 4, 10)) < 0.7
        start = rng.integers(0, 40, (3, 1))
        cell = np.arange(40)[None]
        among &= ((cell >= start) & (cell < start + width)).reshape(3, 4, 10)
        score = jnp.asarray(rng.integers(0, 4, (3, 4, 10)), jnp.float32)
        given = score, ints(*rng.integers(0, width + 1, 3)), jnp.asarray(among)
        near = remasking.best_cells(*given, width)
        assert np.array_equal(near, remasking.best_cells(*given))


# ---- on pages, against dense runs ----


def shifted() -> Any:
    return plain(5, shift=True)


VARIANTS: dict[str, tuple[Any, float, dict[str, Any]]] = {
    "guided": (plain, 0.8, {"remasking": "low_confidence", "steps": 7, "cfg_scale": 0.7}),
    "random": (plain, 1.0, {"remasking": "random", "steps": 5}),
    "maskgit_plus": (plain, 0.7, {"remasking": "maskgit_plus", "steps": 9}),
    "margin": (shifted, 1.0, {"remasking": "margin", "steps": 5}),
    "origin": (shifted, 1.0, {"remasking": "origin", "steps": 6}),
    "prefix": (plain, 0.6, {"remasking": "low_confidence", "cache": "prefix"}),
    "prefix shifted": (shifted, 1.0, {"remasking": "entropy", "cache": "prefix"}),
    "dual": (plain, 0.6, {"remasking": "low_confidence", "cache": "dual"}),
    "appended": (plain, 1.0, {"append": True, "end_think": (7, 8, 9), "end_think_boost": 20.0}),
    "appended shifted": (shifted, 0.7, {"remasking": "entropy", "append": True}),
    "appended guided": (plain, 1.0, {"append": True, "cfg_scale": 0.7, "steps": 7}),
    "appended prefix": (plain, 0.6, {"append": True, "cache": "prefix"}),
    "appended dual": (shifted, 0.6, {"append": True, "cache": "dual"}),
}


@pytest.mark.parametrize(
    "name",
    [n if n == "guided" else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS],
)
@pytest.mark.parametrize("block_length", [6, pytest.param(None, marks=pytest.mark.slow)])
def test_decoding_on_pages_equals_the_dense_run(name: str, block_length: int | None) -> None:
    make, accept, how = VARIANTS[name]
    if how.get("append") and block_length is None:
        pytest.skip("appended are blocks")
    how = {"remasking": "low_confidence", **how}
    case = full_sequence_case(make(), accept, **how, block_length=block_length)
    rows = decode_paged(case.strategy, case.model, list(case.requests), move_at=2).rows
    wanted = [case.truth(request=request) for request in case.requests]
    assert [(r.tokens, r.reason, r.nfe) for r in rows] == [
        (t.tokens, t.reason, t.nfe) for t in wanted
    ]


def test_the_contracts_case_runs_narrow_and_wide_rows_together() -> None:
    logs = [truth.log for truth in contract_truth("full_sequence_dual")]
    together = [set(step) for step in zip(*logs, strict=False)]
    assert {"part"} in together, "a step of the narrow program"
    assert any(len(kinds) > 1 for kinds in together)


@pytest.mark.slow
def test_frozen_keys_and_guidance_change_what_is_written() -> None:
    """Else the runs above would prove nothing of either."""
    case = contract_case("full_sequence_dual")
    how: dict[str, Any] = {"remasking": "entropy", "accept": 1.0, "block_length": 6}
    ways: tuple[dict[str, Any], ...] = ({}, {"cache": "dual"}, {"cfg_scale": 0.7})
    net, texts = Net(case.model), set()
    for way in ways:
        truths = (decode_full_sequence(net, request, **how, **way) for request in case.requests)
        texts.add(tuple(tuple(truth.tokens) for truth in truths))
    assert len(texts) == len(ways)


def test_a_guided_law_is_that_of_the_moved_logits() -> None:
    """Also what may never be drawn stays so, and a row that is no number is noticed."""
    rng = np.random.default_rng(0)
    own, other, head = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 4), (3, 4), (4, 9))
    )

    @jax.jit
    def read(guide: Any) -> Any:
        reader = Reader(lambda h: h @ head, lambda i: i == 2)
        return read_stats(reader, own, Readout(sampling=Sampling.greedy(3), guide=guide))

    logits = np.array(other @ head + 2.5 * ((own - other) @ head))
    logits[:, 2] = -np.inf
    law = np.exp(logits - logits.max(1, keepdims=True))
    law /= law.sum(1, keepdims=True)
    stats = read((other, 1.5))
    assert stats.token.tolist() == law.argmax(1).tolist()
    np.testing.assert_allclose(stats.confidence, law.max(1), rtol=1e-5)
    np.testing.assert_allclose(read((other, 0.0)).confidence, read(None).confidence, rtol=1e-5)
    assert read((other.at[1].set(jnp.nan), 1.5)).token.tolist()[1] == NO_TOKEN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "how", "max_tokens"),
    [
        ("llada", {"remasking": "low_confidence", "block_length": 32}, 35),
        ("dream", {"remasking": "entropy"}, 14),
    ],
)
def test_a_family_decodes_by_default_as_its_files_say(
    family: str, how: dict[str, Any], max_tokens: int, tmp_path: Path
) -> None:
    """Through `LLM`, told to be greedy and no more; the truth is NumPy on the files' tensors."""
    folder = write_tiny(family, tmp_path, seed=3, mask_token_id=MASK_ID)
    config = EngineConfig(max_num_seqs=2, slot_buckets=(2,), page_buckets=(8,), page_size=32)
    llm = dj.LLM(folder, config=config, dtype="float32", progress=False)
    prompts = [[7, 8, 9], [10, 11, 12, 13, 14]]
    params = dj.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    net: Any = Files(folder, family)
    for prompt, out in zip(prompts, llm.generate(prompts, params), strict=True):
        truth = decode_full_sequence(net, Request(tuple(prompt), max_tokens), **how)
        assert (out.outputs[0].token_ids, out.metrics.nfe) == (truth.tokens, truth.nfe)


@pytest.mark.slow
def test_guidance_holds_no_logits_of_the_whole_window() -> None:
    """Read from the compiled loop: 2,048 cells are read out 512 at a time, twice each."""
    case = full_sequence_case(plain(), 1.0, remasking="low_confidence", cfg_scale=0.5)
    strategy = case.strategy.replace(block_size=32, buffer_size=16)
    session = generate.start(case.model, [[1, 2]] * 4, strategy, max_tokens=99)
    program = generate._advance.lower(
        case.model, session.strategy, session.aux, session.state, jnp.int32(3), None
    ).compile()
    text, vocab = program.as_text(), case.model.config.vocab_size
    assert f"f32[512,{vocab}]" in text
    assert not re.search(rf"f32\[(2048|1024|4,512|4,16,32|2,1024),{vocab}\]", text)


# ---- what it needs and refuses ----


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"steps": 0}, r"steps=0 must be a whole number in \[1, 1000000\]; choose one"),
        ({"steps": 2.5}, "steps=2.5 must be a whole number"),
        ({"block_length": -1}, "block_length=-1 must be a whole number of at least 1"),
        ({"block_length": True}, "block_length=True must be a whole number"),
        ({"remasking": "topk"}, "remasking='topk' is not one of low_confidence, random, maskgit_p"),
        ({"remasking": None}, "remasking=None is not one of"),
        ({"cache": "suffix"}, "cache='suffix' is not one of None, prefix, dual; choose one"),
        ({"cfg_scale": -1}, "cfg_scale=-1 must be a number of at least 0; 0 is no guidance"),
        ({"append": True}, "append=True appends blocks; give block_length, such as 32"),
        ({"append": 2}, "append=2 is not one of False, True"),
        ({"end_think": 5}, "end_think=5 must be ids; give a tuple"),
        ({"end_think": (5, -1)}, "must be ids; give a tuple"),
        ({"end_think_boost": float("nan")}, "end_think_boost=nan must be a number of at least 0"),
        ({"cfg_scale": 1.0, "cache": "dual"}, "cfg_scale=1.0 runs .* cache='dual' keeps .* one of"),
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        strategies.FullSequence(**fields)


def test_only_a_cached_request_starts_over() -> None:
    plain = strategies.Needs("in_window", fills_holes=True)
    assert strategies.FullSequence().needs == plain
    cached = strategies.FullSequence(cache="dual").needs
    assert cached == dataclasses.replace(plain, provisional_cache="across_steps")


def test_a_model_without_a_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="FullSequence denoises masks, and toy has no mask token"):
        check_fit(causal(), strategies.FullSequence(block_size=8, buffer_size=4))


def test_a_text_that_the_window_does_not_hold_is_refused_with_the_size_to_use() -> None:
    strategy = strategies.FullSequence(block_size=8, buffer_size=4)
    with pytest.raises(ValueError, match=r"3 \+ 30 tokens, the window has 32; use buffer_size=5"):
        dj.generate(plain(), [[1, 2, 3]], strategy, max_tokens=30)


def check_corpus(package: ModuleType, corpus: str) -> None:
    """Raise AssertionError if a package differs from the oracles on a corpus of the mutants."""
    if corpus == "passes":
        compare_passes(package, "dual", 6)
    else:
        compare(HOWS[corpus], first=0, count=60, package=package)
