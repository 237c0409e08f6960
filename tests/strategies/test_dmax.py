"""`DMax` decodes as in the paper, and as Diffulex does with `compat="diffulex"`.

Worked traces, random scripts against the list decoder, the numbers of a mixture, and on a network
soft commits against a dense run.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import strategies
from dllm_jax.cli import entry
from dllm_jax.cli import strategy as cli_strategy
from dllm_jax.cli.strategy import given_fields
from dllm_jax.runner.forward import ModelForward
from dllm_jax.strategies import DMax, TokenStats
from dllm_jax.strategies.core import driver, token_merge
from dllm_jax.strategies.core.protocol import PerSlot, SlotSpec, split_knobs
from dllm_jax.strategies.core.state import DUMMY, DecodeState
from dllm_jax.strategies.testing import random_model
from dllm_jax.strategies.testing.script import Trace, run_script
from tests.contract import cases, dense, dense_blocks, dense_dmax, models
from tests.contract import engine as on_device
from tests.contract.cases import case as gate_case
from tests.contract.harness import Request, decode_paged
from tests.oracles.dmax_decoder import Rules, dmax_decode
from tests.strategies.test_strategy_batch import batch_state
from tests.strategies.test_strategy_fuzz import (
    FORWARDS,
    THRESHOLDS,
    Case,
    check_agreement,
    draw_case,
)
from tests.strategies.test_traces import EOS, MASK, column, everywhere, script, windows
from tests.strategies.test_traces import VOCAB as TRACE_VOCAB

MODES = ["paper", "diffulex"]


def strategy_of(
    rules: Rules, block_size: int, buffer_size: int, kind: Any = DMax, **fields: Any
) -> Any:
    return kind(
        accept_threshold=rules.accept,
        add_block_threshold=rules.add,
        token_stability_threshold=rules.stability,
        commit_confidence=rules.commit,
        compat=None if rules.paper else "diffulex",
        block_size=block_size,
        buffer_size=buffer_size,
        **fields,
    )


# --- worked traces, step by step ------------------------------------------------------------------


def by_list(rules: Rules, *script: Any, **limits: Any) -> Any:
    return dmax_decode(rules, *script, **limits)


def by_window(
    rules: Rules, *script: Any, block_size: int, buffer_size: int, **limits: Any
) -> Trace:
    return run_script(strategy_of(rules, block_size, buffer_size), *script, **limits)


@pytest.fixture(params=[by_list, by_window], ids=["list_decoder", "run_script"])
def decode(request: pytest.FixtureRequest) -> Callable[..., Any]:
    def run(mode: str, forwards: Sequence[Mapping[int, Any]], prompt: list[int], **words: Any):
        numbers = {k: words.pop(k) for k in ("accept", "add", "stability") if k in words}
        limits = {"max_tokens": 32, "mask_id": MASK, "vocab_size": TRACE_VOCAB, **words}
        rules = Rules(paper=mode == "paper", **numbers)
        return request.param(rules, prompt, *script(forwards), block_size=4, **limits)

    return run


TRACE_A = [
    # The notes' step 1 is our prefill. Position 7 is sure, but 6 has closed the run.
    {4: (10, 0.8), 5: (11, 0.6), 6: (12, 0.4), 7: (13, 0.9)},
    # 11 becomes 14 without any threshold; block 2 is forced to its leftmost hole.
    {4: (10, 0.95), 5: (14, 0.7), 6: (12, 0.6), 7: (13, 0.55), 8: (15, 0.3)},
    {4: (10, 0.95), 5: (14, 0.95), 6: (12, 0.95), 7: (13, 0.95), 8: (15, 0.4), 9: (16, 0.6)},
    # The commit of block 1: 16 becomes 17, and the leftmost hole is forced.
    {8: (15, 0.4), 9: (17, 0.6), 10: (1, 0.2)},
]


@pytest.mark.long("run_script-diffulex")
@pytest.mark.parametrize("mode", MODES)
def test_two_blocks_follow_the_trace(decode: Callable[..., Any], mode: str) -> None:
    """The buffers of the two modes are the same; the mixtures are not (below)."""
    trace = decode(mode, TRACE_A, [1, 2, 3, 4], buffer_size=2)
    assert windows(trace)[:4] == [
        "A[10 11 _ _] D",
        "A[10 14 12 13] A[15 _ _ _]",
        "T[10 14 12 13] A[15 16 _ _]",
        "A[15 17 1 _] D",
    ]
    assert column(trace, "new_tokens")[:4] == [2, 3, 1, 1]
    assert column(trace, "start")[:4] == [4, 4, 4, 8]


@pytest.mark.long("run_script-diffulex")
@pytest.mark.parametrize("mode", MODES)
def test_a_block_that_changed_last_leaves_only_in_the_reference(
    decode: Callable[..., Any], mode: str
) -> None:
    """One block at a time."""
    changed = {**everywhere((10, 0.6)), 5: (11, 0.6)}
    forwards = [everywhere((10, 0.6)), changed, changed]
    trace = decode(mode, forwards, [1, 2, 3, 4], buffer_size=1)
    settled = {"diffulex": ["T[10 11 10 10]", "D"], "paper": ["A[10 11 10 10]", "T[10 11 10 10]"]}
    assert windows(trace)[:3] == ["A[10 10 10 10]", *settled[mode]]


# --- rules one by one -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("least", "after"), [(0.9, "T"), (0.89, "A")])
def test_a_sure_block_leaves_with_its_last_fill(
    decode: Callable[..., Any], mode: str, least: float, after: str
) -> None:
    """.9 is sure enough (trap 1); a cell filled before has a say in the paper's rule alone."""
    forwards = [
        {**everywhere((10, 0.95)), 7: (13, 0.3)},
        {**everywhere((10, 0.95)), 4: (10, 0.95), 7: (13, least)},
    ]
    trace = decode(mode, forwards, [1, 2, 3, 4], buffer_size=1)
    assert windows(trace)[:2] == ["A[10 10 10 _]", f"{after}[10 10 10 13]"]
    forwards[1][4] = (10, 0.3)
    trace = decode(mode, forwards, [1, 2, 3, 4], buffer_size=1)
    kept = after if mode == "diffulex" else "A"
    assert windows(trace)[1] == f"{kept}[10 10 10 13]"


@pytest.mark.long("run_script-diffulex")
@pytest.mark.parametrize("mode", MODES)
def test_the_run_ends_below_the_threshold_and_not_at_it(
    decode: Callable[..., Any], mode: str
) -> None:
    forwards = [{4: (10, 0.5), 5: (11, 0.4999), 6: (12, 0.9)}, {4: (10, 0.5)}]
    trace = decode(mode, forwards, [1, 2, 3, 4], buffer_size=1)
    assert windows(trace)[:2] == ["A[10 _ _ _]", "A[10 1 _ _]"]


def test_a_block_that_never_rests_leaves_after_as_many_steps_as_cells(
    decode: Callable[..., Any],
) -> None:
    flips = [everywhere((10 + i, 0.6)) for i in range(12)]
    trace = decode("paper", flips, [1, 2, 3, 4], buffer_size=1)
    assert windows(trace)[:6] == [
        "A[10 10 10 10]",
        "A[11 11 11 11]",
        "A[12 12 12 12]",
        "T[13 13 13 13]",
        "D",
        "A[15 15 15 15]",
    ]
    trace = decode("diffulex", flips, [1, 2, 3, 4], buffer_size=1)
    assert windows(trace)[:3] == ["A[10 10 10 10]", "T[11 11 11 11]", "D"]


@pytest.mark.long("run_script-diffulex")
@pytest.mark.parametrize("mode", MODES)
def test_cells_of_the_prompt_are_not_judged_and_not_written(
    decode: Callable[..., Any], mode: str
) -> None:
    """Trap 6: what the model says of them neither keeps the block nor changes them."""
    forwards = [{**everywhere((10, 0.95)), 4: (20, 0.3), 5: (21, 0.99)}] * 3
    trace = decode(mode, forwards, [1, 2, 3, 4, 5, MASK], buffer_size=1)
    assert windows(trace)[:2] == ["T[5 _ 10 10]", "D"]  # a prompt may hold the mask (trap 7)
    assert column(trace, "new_tokens")[:2] == [2, 0]


@pytest.mark.long("run_script-diffulex")
@pytest.mark.parametrize("mode", MODES)
def test_a_stop_that_is_edited_away_is_none(decode: Callable[..., Any], mode: str) -> None:
    """Trap 8: nothing opens next to the stop; once it is gone the request goes on."""
    forwards = [
        {4: (10, 0.7), 5: (EOS, 0.7)},
        {4: (10, 0.7), 5: (11, 0.7), 6: (12, 0.7), 7: (13, 0.3)},
        {4: (10, 0.95), 5: (11, 0.95), 6: (12, 0.95), 7: (13, 0.95), 8: (14, 0.95)},
        {8: (14, 0.95)},
    ]
    trace = decode(mode, forwards, [1, 2, 3, 4], buffer_size=2, eos_ids=(EOS,))
    assert windows(trace)[:3] == [
        "A[10 30 _ _] D",
        "A[10 11 12 _] D",
        "T[10 11 12 13] A[14 _ _ _]",
    ]
    assert list(trace.output)[:4] == [10, 11, 12, 13]


@pytest.mark.long("run_script-diffulex")
@pytest.mark.parametrize("mode", MODES)
def test_a_stop_ends_a_request_when_its_block_may_leave(
    decode: Callable[..., Any], mode: str
) -> None:
    """Trap 9: a filled stop is not settled while its block may be rewritten."""
    row = {4: (10, 0.7), 5: (EOS, 0.7), 6: (12, 0.7), 7: (13, 0.7)}
    trace = decode(mode, [row] * 4, [1, 2, 3, 4], buffer_size=2, eos_ids=(EOS,))
    assert windows(trace) == ["A[10 30 12 13] D"]
    assert (list(trace.output), trace.finish_reason, trace.nfe) == ([10], "stop", 2)


@pytest.mark.long("run_script-diffulex")
@pytest.mark.parametrize("mode", MODES)
def test_cells_past_the_limit_hold_no_block_back(decode: Callable[..., Any], mode: str) -> None:
    """Trap 20: five tokens; the last three cells of block 2 are written, not waited for."""
    forwards = [everywhere((10, 0.95)), {8: (22, 0.95)}, everywhere((1, 0.95))]
    trace = decode(mode, forwards, [1, 2, 3, 4], buffer_size=1, max_tokens=5)
    # The commit of block 1 is the forward between.
    assert (trace.finish_reason, trace.nfe) == ("length", 3)
    assert list(trace.output) == [10] * 4 + [1]


@pytest.mark.long("run_script-diffulex")
@pytest.mark.parametrize("mode", MODES)
def test_stability_keeps_the_next_block_closed(decode: Callable[..., Any], mode: str) -> None:
    """Two cells, of which one changed: .5 is enough at .5 (>=), and is not at .6."""
    forwards = [
        {4: (10, 0.8), 5: (11, 0.6)},
        {4: (10, 0.8), 5: (12, 0.6), 6: (13, 0.6)},
        {4: (10, 0.8), 5: (12, 0.6), 6: (13, 0.6)},
    ]
    for least, opened in ((0.5, "A[1 _ _ _]"), (0.6, "D")):
        trace = decode(mode, forwards, [1, 2, 3, 4], buffer_size=2, stability=least, add=0.75)
        # The ratio is 1 where nothing was filled: only progress keeps block 2 closed at first.
        assert windows(trace)[:2] == ["A[10 11 _ _] D", "A[10 12 13 _] D"]
        assert windows(trace)[2] == f"A[10 12 13 1] {opened}"


@pytest.mark.long("run_script-diffulex")
@pytest.mark.parametrize("mode", MODES)
def test_a_threshold_of_one_and_of_zero(decode: Callable[..., Any], mode: str) -> None:
    """Trap 23 for a rule that is not strict: certainty passes at 1, and all does at 0."""
    certain = decode(mode, [everywhere((10, 1.0))] * 2, [1, 2, 3, 4], buffer_size=1, accept=1.0)
    assert windows(certain)[0] == "T[10 10 10 10]"
    unsure = decode(mode, [everywhere((10, 0.999))] * 2, [1, 2, 3, 4], buffer_size=1, accept=1.0)
    assert windows(unsure)[0] == "A[10 _ _ _]"
    free = decode(mode, [{}], [1, 2, 3, 4], buffer_size=1, accept=0.0)
    assert windows(free)[0] == "A[1 1 1 1]"


# --- random scripts -------------------------------------------------------------------------------


def draw_rules(rng: np.random.Generator, paper: bool) -> Rules:
    def threshold(usual: float) -> float:
        return float(rng.choice(THRESHOLDS)) if rng.random() < 0.6 else usual

    return Rules(
        accept=threshold(0.5),
        add=threshold(0.25),
        stability=float(rng.choice([0.0, 0.0, 0.5, 0.75, 1.0])),
        commit=threshold(0.75),
        paper=paper,
    )


def draw_dmax(seed: Any, block_size: int) -> tuple[np.random.Generator, Case]:
    """Half of the scripts repeat what they said, so that blocks come to rest."""
    rng = np.random.default_rng(seed)
    case = draw_case(rng, block_size)
    if rng.random() < 0.5:
        keep = rng.random(case.token.shape) < 0.8
        for i in range(1, FORWARDS):
            case.token[i] = np.where(keep[i], case.token[i - 1], case.token[i])
    return rng, case


@contextlib.contextmanager
def mixtures_of(package: ModuleType) -> Iterator[list[dict[int, tuple[int, float, float]]]]:
    """The mixtures that the scripted forwards of `package` are given, forward by forward."""
    testing, shown = package.testing.script, []
    plain = testing._ScriptedForward.__call__

    def note(positions: Any, mix: Any) -> None:
        where = np.nonzero(np.asarray(mix.on))
        parts = (positions, mix.ids[..., 0], mix.probs[..., 0], mix.base_weight)
        rows = zip(*(np.asarray(part)[where].tolist() for part in parts), strict=True)
        shown.append({p: (t, sure, rest) for p, t, sure, rest in rows})

    def call(self: Any, state: Any, **words: Any) -> Any:
        jax.debug.callback(note, state.buffer.positions, words["inputs"], ordered=True)
        return plain(self, state, **words)

    testing._run.clear_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing._ScriptedForward, "__call__", call)
        yield shown
    testing._run.clear_cache()


def check_dmax(
    package: ModuleType,
    shown: list[dict[int, Any]],
    rules: Rules,
    case: Case,
    sizes: dict[str, int],
    weight: float = 1.0,
) -> Trace:
    """Texts and mixtures of a script are those of the list decoder."""
    parts = (case.prompt, case.token, case.prob)
    truth = dmax_decode(rules, *parts, **sizes, **case.limits)
    shown.clear()
    strategy = strategy_of(rules, **sizes, kind=package.DMax, token_merge_weight=weight)
    trace = package.testing.run_script(strategy, *parts, **case.limits)
    jax.effects_barrier()
    check_agreement(trace, truth, (rules, sizes))
    wanted = [
        {p: (t, float(sure), float(np.float32(1) - sure)) for p, (t, sure) in one.items()}
        for one in truth.shown
    ]
    assert shown == (wanted if weight else [{} for _ in wanted])
    return trace


# One size each: `run_script` compiles for each.
@pytest.mark.long
@pytest.mark.parametrize(
    ("block_size", "buffer_size", "mode"), [(4, 3, "paper"), (2, 2, "diffulex")]
)
def test_random_scripts_agree_with_the_list_decoder(
    block_size: int, buffer_size: int, mode: str
) -> None:
    sizes = {"block_size": block_size, "buffer_size": buffer_size}
    traces = []
    with mixtures_of(strategies) as shown:
        for number in range(100):
            rng, case = draw_dmax((block_size, buffer_size, number), block_size)
            rules = draw_rules(rng, mode == "paper")
            traces.append(check_dmax(strategies, shown, rules, case, sizes))
    assert {trace.finish_reason for trace in traces} >= {"stop", "length", "nfe"}
    widest = max(len(s.status) - s.status.count(DUMMY) for t in traces for s in t.steps)
    assert widest == buffer_size


PAPER_SHOWS = [
    {},
    {4: (10, 0.8), 5: (11, 0.6)},
    {4: (10, 0.95), 5: (14, 0.7), 6: (12, 0.6), 7: (13, 0.55), 8: (15, 0.3)},
    {8: (15, 0.4), 9: (16, 0.6)},  # block 1 commits from its plain tokens
]
DIFFULEX_SHOWS = [
    {},
    {4: (10, 0.8), 5: (11, 0.6)},
    {4: (10, 1.0), 5: (14, 1.0), 6: (12, 0.6), 7: (13, 0.55), 8: (15, 0.3)},
    {4: (10, 1.0), 5: (14, 1.0), 6: (12, 1.0), 7: (13, 1.0), 8: (15, 1.0), 9: (16, 0.6)},
]


@pytest.mark.parametrize(("mode", "wanted"), [("paper", PAPER_SHOWS), ("diffulex", DIFFULEX_SHOWS)])
def test_the_mixtures_of_the_trace(mode: str, wanted: list[dict[int, Any]]) -> None:
    """The mixtures of either mode, as the next forward is given them."""
    token, prob = script(TRACE_A)
    limits: Any = {"max_tokens": 32, "mask_id": MASK, "vocab_size": TRACE_VOCAB}
    rules = Rules(paper=mode == "paper")
    truth = dmax_decode(rules, [1, 2, 3, 4], token, prob, block_size=4, buffer_size=2, **limits)
    exact = [{p: (t, np.float32(sure)) for p, (t, sure) in one.items()} for one in wanted]
    assert truth.shown[:4] == exact


# --- the numbers of a mixture ---------------------------------------------------------------------

A_ID, M_ID = 1, 0
TABLE = jnp.array([[0.0, 2.0], [3.0, 0.0]])


def embedded(mix: Any) -> list[float]:
    forward = ModelForward(models.plain())
    forward.embed = lambda ids: TABLE[ids]  # two ids of two numbers
    return np.asarray(forward._mixture(mix))[0, 0, 0].tolist()


def one_cell(value: Any) -> Any:
    return jnp.full((1, 1, 1), value)


def test_a_mixture_has_the_numbers_of_the_notes() -> None:
    token, on = one_cell(A_ID), one_cell(True)
    soft = token_merge.of_token(token, one_cell(0.8), on)
    assert embedded(token_merge.beside_mask(soft, M_ID, renormalize=False)) == pytest.approx(
        [2.4, 0.4]
    )
    assert embedded(token_merge.beside_mask(soft, M_ID)) == pytest.approx(
        [2.76190, 0.46032], abs=1e-5
    )
    top = TokenStats(
        token, one_cell(0.5), one_cell(0.0), token[..., None], one_cell(0.8)[..., None]
    )
    top = token_merge.of_top(top, on)
    assert top.rest.item() == pytest.approx(0.2)
    one = PerSlot(jnp.ones(1))
    assert embedded(token_merge.beside_token(top, token, one)) == pytest.approx([5.4, 0.0])
    half = PerSlot(jnp.full(1, 0.5))
    assert embedded(token_merge.beside_token(top, token, half)) == pytest.approx([4.2, 0.0])


def test_a_certain_token_is_its_plain_embedding() -> None:
    soft = token_merge.of_token(one_cell(A_ID), one_cell(1.0000001), one_cell(True))
    assert embedded(token_merge.beside_mask(soft, M_ID)) == [3.0, 0.0]


# --- drawn tokens ---------------------------------------------------------------------------------


class Drawing:
    """Draws id 2 where it is asked to draw, though id 1 is likelier."""

    mask_id, vocab_size, inputs = M_ID, 8, None

    def __call__(self, state: DecodeState, **words: Any) -> "Drawing":
        self.inputs, self.shape = words["inputs"], state.buffer.tokens.shape
        return self

    def predict(self, sampling: Any = None, **_: Any) -> TokenStats:
        token, sure = (1, 0.75) if sampling is None else (2, 0.25)
        token, sure = jnp.full(self.shape, token), jnp.full(self.shape, sure)
        none = jnp.zeros((*self.shape, 0))
        return TokenStats(token, sure, jnp.zeros(self.shape), none.astype(int), none)

    def store(self, state: DecodeState, where: Any) -> DecodeState:
        del where
        return state


@jax.jit
def drawing_step(strategy: Any, state: DecodeState) -> Any:
    forward: Any = Drawing()
    spec = SlotSpec(1, 1, 4, 8, 0, M_ID, jnp.float32)
    state, _ = driver.decode_step(strategy, forward, state, spec)
    return state, forward.inputs


@pytest.mark.parametrize(("mode", "blended"), [("paper", (1, 0.75)), ("diffulex", (2, 0.25))])
def test_a_drawn_token_is_written_and_the_likeliest_is_blended(
    mode: str, blended: tuple[int, float]
) -> None:
    """The reference blends what was written."""
    strategy = DMax(block_size=4, buffer_size=1, compat=None if mode == "paper" else "diffulex")
    bare, knobs = split_knobs(strategy)
    limits: dict[str, Any] = {"max_tokens": 8, "eos_ids": ()}
    case = Case([5] * 4, np.zeros((1, 1)), np.zeros((1, 1)), limits)
    knobs = {name: np.array([value]) for name, value in knobs.items()}
    state = batch_state(bare, [case], jax.random.split(jax.random.key(0), 1), knobs)
    spec = SlotSpec(1, 1, 4, 8, 0, M_ID, jnp.float32)
    state = state.replace(
        carry=driver.broadcast_carry(bare.init(spec), spec),
        sampling=state.sampling.replace(temperature=jnp.ones(1)),
    )
    state, _ = drawing_step(bare, state)
    # .25 is below the threshold: one cell, with the token that was drawn.
    assert state.buffer.tokens[0, 0].tolist() == [2, 0, 0, 0]
    _, mix = drawing_step(bare, state)
    assert mix.on[0, 0].tolist() == [True, False, False, False]
    assert (mix.ids[0, 0, 0, 0].item(), mix.probs[0, 0, 0, 0].item()) == blended


# --- fields ---------------------------------------------------------------------------------------


def test_the_command_line_sets_its_fields() -> None:
    words = ["--token-stability-threshold", "0.5", "--set", "compat=diffulex", "--block-size", "8"]
    args = entry.parse(["generate", "--model", "x", "--strategy", "dmax", *words])
    chosen = cli_strategy.resolve(models.plain(), args.strategy, None, given_fields(args))
    numbers = (chosen.token_stability_threshold, chosen.accept_threshold, chosen.block_size)
    assert (type(chosen), chosen.compat, *numbers) == (DMax, "diffulex", 0.5, 0.5, 8)


def test_soft_commits_are_the_references() -> None:
    assert not DMax().needs.soft_commits
    assert DMax(compat="diffulex").needs.soft_commits
    assert DMax().needs.prompt == "grid_causal"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"merge": "dmax"}, "merge='dmax' is not one of dmax_topk, iter_smooth_topk"),
        ({"compat": "paper"}, "compat='paper' is not one of None, diffulex; choose one"),
        ({"token_merge_top_k": 0}, "token_merge_top_k=0 must be a whole number of at least 1"),
    ],
)
def test_fields_are_checked(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DMax(**fields)


def test_a_mixture_of_more_ids_than_there_are_is_refused() -> None:
    wide = DMax(merge="iter_smooth_topk", token_merge_top_k=random_model.VOCAB + 1)
    with pytest.raises(ValueError, match=r"token_merge_top_k=9 must be a whole number in \[1, 8\]"):
        wide.init(random_model.slot_spec(wide, 1))


# --- on a network ---------------------------------------------------------------------------------


def eager_requests() -> list[Any]:
    """Blocks leave with what was filled last at any confidence: so commits are really soft."""
    knobs = (("accept_threshold", 0.2), ("commit_confidence", 0.0))
    return [dataclasses.replace(one, knobs=knobs) for one in gate_case("dmax").requests]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"compat": "diffulex"}, {"paper": False}),
        pytest.param(
            {"merge": "iter_smooth_topk", "token_merge_top_k": 3, "token_merge_weight": 0.5},
            {"smooth": (3, 0.5)},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["diffulex", "iter_smooth_topk"],
)
def test_the_other_forms_decode_as_a_dense_run(fields: dict[str, Any], rule: Any) -> None:
    """Real paging against a cache-free run; the paper's own form is a case of the gate.

    Soft commits: the blocks after see, and the cache holds, what a block showed as it left.
    """
    c, seen = gate_case("dmax"), Counter()
    net, is_soft = dense.Net(c.model), "compat" in fields
    requests = eager_requests() if is_soft else list[Any](c.requests)
    most = 0.0
    decoded = decode_paged(c.strategy.replace(**fields), c.model, requests)
    for request, row in zip(requests, decoded.rows, strict=True):
        soft: dict[int, np.ndarray] | None = {} if is_soft else None
        truth = dense_blocks.decode_blocks(
            net,
            request,
            dense_dmax.dmax_rule(net, 0.4, seen=seen, **rule),
            size=4,
            depth=3,
            add=0.5,
            settles_ready=True,
            soft_commits=soft,
        )
        assert (row.tokens, row.reason, row.nfe) == (truth.tokens, truth.reason, truth.nfe)
        if not soft:
            continue
        text = [*request.prompt, *row.tokens][: row.cached // 4 * 4]
        first = len(request.prompt) // 4 * 4
        assert len(text) > len(request.prompt)
        shown = [soft.get(p, text[p]) for p in range(first, len(text))]
        wanted = dense_blocks.block_rows(net, request, shown, first, 4, "grid_causal").kv
        plain = dense_blocks.text_kv(net, request, text, 4)
        for got, want, hard in zip(decoded.cache(row), wanted, plain, strict=True):
            for a, b, z in zip(got, want, hard, strict=True):
                np.testing.assert_allclose(a[: len(text)], b, rtol=1e-4, atol=1e-4)
                most = max(most, float(np.abs(b - z).max()))
    assert most > 0.1 if is_soft else seen["changed"] > 20


def truth_with_soft_commits(request: Request) -> dense.Truth:
    net = dense.Net(gate_case("dmax").model)
    rule = dense_dmax.dmax_rule(net, 0.4, paper=False)
    return dense_blocks.decode_blocks(
        net, request, rule, size=4, depth=3, add=0.5, settles_ready=True, soft_commits={}
    )


@pytest.mark.slow
def test_the_engine_starts_soft_commits_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted after every fetch and with prompts found again, the tokens are the same."""
    gate = gate_case("dmax")
    name, strategy = "dmax_diffulex", gate.strategy.replace(compat="diffulex")
    made = dataclasses.replace(
        gate, strategy=strategy, truth=truth_with_soft_commits, requests=tuple(eager_requests())
    )
    monkeypatch.setitem(cases.CASES, name, lambda: made)
    monkeypatch.setitem(cases.PAGE_SIZE, name, 8)
    wanted = [on_device.wanted(name, request) for request in made.requests]
    wishes = [on_device.wish(request) for request in made.requests]
    engine = on_device.make_engine(name)
    assert engine.layout.soft_commits
    assert engine.layout.starts_over
    with on_device.steps_a_chunk(1):
        assert on_device.ends(on_device.run(engine, wishes, on_device.preempting())) == wanted
    assert engine.stats().num_preemptions >= 6
    again = on_device.run(engine, [on_device.wish(request) for request in made.requests])
    assert on_device.ends(again) == wanted
    assert sum(one.metrics.cached_tokens for one in again) > 0


def test_the_case_of_the_gate_meets_every_way_out_of_a_block() -> None:
    c, seen = gate_case("dmax"), Counter()
    net = dense.Net(c.model)
    rule = dense_dmax.dmax_rule(net, 0.4, seen=seen)
    for request in c.requests:
        dense_blocks.decode_blocks(net, request, rule, size=4, depth=3, add=0.5, settles_ready=True)
    for name in ("still=True", "certain=True", "tired=True"):
        assert any(name in one for one in seen), name
    assert min(seen["changed"], seen["forced"], seen["drew another"]) > 5


def test_the_limit_cuts_a_block_that_leaves_with_holes() -> None:
    """Nothing past the limit is waited for: such a block may leave while it has holes there."""
    trace = by_window(
        Rules(),
        [1, 2, 3, 4],
        *script([{4: (10, 0.95)}]),
        block_size=4,
        buffer_size=2,
        max_tokens=1,
        mask_id=MASK,
        vocab_size=TRACE_VOCAB,
    )
    assert (trace.output, trace.finish_reason, trace.nfe) == ([10], "length", 1)
