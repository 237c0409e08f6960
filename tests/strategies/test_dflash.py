"""`DFlash`: the tokens of `ar` with the same keys, whatever is drafted, in the fewest rounds.

Proves, on pages full of garbage, over random ragged batches of greedy and sampled requests with
top-k, top-p, stop ids and limits of their own, that tokens and finish reasons are those of `AR`,
and that each round emits what plain lists emit (`oracles/dflash_decoder.py`). Drafters are random,
always right, always wrong, right by chance, and not finite. Stops and limits may lie anywhere in a
block. Also proves how a draft is bound, and that wrong versions of the file are noticed. The
contract's case proves the network's side, the caches, preemption and prefix hits.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.engine.requests import DraftMetrics
from dllm_jax.runner import decode
from dllm_jax.runner.forward import ModelForward
from dllm_jax.strategies import AR, DFlash
from dllm_jax.strategies.core import driver
from dllm_jax.strategies.core.protocol import Taps
from dllm_jax.strategies.core.state import FINISH_REASONS, NO_LIMIT, Sampling
from dllm_jax.strategies.dflash import drafting
from tests.contract import dense, drafters, harness, models
from tests.contract.harness import ROOM, SLOTS, Request
from tests.oracles.dflash_decoder import Rounds, dflash_rounds

pytestmark = pytest.mark.long

LAYERS = (0, 1)  # of the toy target, after which its streams are tapped
TARGET = models.causal()
BLOCK = DFlash(5, LAYERS, 5)


@dataclasses.dataclass(frozen=True)
class Wish:
    """A request and how its tokens are drawn."""

    request: Request
    top_k: int = 0
    top_p: float = 1.0
    max_run: int = NO_LIMIT


@dataclasses.dataclass(frozen=True)
class Ended:
    """What became of one request."""

    output: list[int]
    finish_reason: str | None
    counts: list[int]
    drafted: DraftMetrics | None
    guesses: np.ndarray = dataclasses.field(compare=False)  # [rounds, drafter's cells and one more]


class Spied:
    """A drafter that keeps the last block it drafted."""

    def __init__(self, inner: ModelForward):
        self._inner, self.guesses = inner, jnp.zeros((SLOTS, 1, 0), jnp.int32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, state: Any, *, inputs: Any = None, **how: Any) -> Any:
        out = self._inner(state, inputs=inputs, **how)
        if not isinstance(inputs, Taps):
            self.guesses = out.predict().token
        return out


@functools.partial(jax.jit, compiler_options=harness._QUICK)
def _run(strategy, model, aux, state, prompt):
    forward: Any = ModelForward(model, aux=aux)
    plain = forward.aux
    state = decode.prefill(strategy, forward, state, prompt, 16)
    spec = decode.slot_spec(strategy, model, SLOTS)

    def one(state, _):
        # What a branch of several widths drafts may not leave it.
        spied = Spied(plain["draft"]) if aux and len(strategy.choices) == 1 else None
        forward.aux = {"draft": spied} if spied else plain
        state, info = driver.decode_step(strategy, forward, state, spec)
        return state, (info.accepted, spied.guesses[:, 0] if spied else None)

    return jax.lax.scan(one, state, length=ROOM)


def drafted_of(state: Any, b: int) -> DraftMetrics | None:
    """What the row's carry says of its drafts."""
    slot = state.carry.slot
    leaves = [slot.get(name) for name in (drafting.ROUNDS, drafting.PROPOSED, drafting.ACCEPTED)]
    return DraftMetrics(*(tuple(leaf[b].tolist()) for leaf in leaves)) if slot else None


def run(strategy: Any, wishes: list[Wish], draft: Any = None, seed: int = 0) -> list[Ended]:
    """Up to `SLOTS` requests at once, to their ends."""
    aux = {} if draft is None else {"draft": draft}
    requests: list[Request | None] = [w.request for w in wishes]
    requests += [None] * (SLOTS - len(requests))
    padded = [*wishes, *[Wish(Request((0,), 1))] * (SLOTS - len(wishes))]
    bare, state, prompt = harness.fresh_state(strategy, TARGET, aux, requests, 8, seed)
    state = state.replace(
        sampling=Sampling(
            state.sampling.temperature,
            jnp.asarray([w.top_k for w in padded], jnp.int32),
            jnp.asarray([w.top_p for w in padded], jnp.float32),
        ),
        limits=state.limits.replace(max_run=jnp.asarray([w.max_run for w in padded], jnp.int32)),
    )
    state, history = _run(bare, TARGET, aux, state, prompt)
    state, (counts, guesses) = jax.device_get((state.replace(keys=None, pools=None), history))
    return [
        Ended(
            state.output[b, : state.output_len[b]].tolist(),
            FINISH_REASONS[int(state.finish[b])],
            counts[: state.buffer.nfe[b], b].tolist(),
            drafted_of(state, b),
            np.zeros(0) if guesses is None else guesses[: state.buffer.nfe[b], b],
        )
        for b in range(len(wishes))
    ]


# --- random requests, random drafts ---------------------------------------------------------------


def draw_wish(rng: np.random.Generator) -> Wish:
    request = Request(
        tuple(rng.integers(0, models.PADDED, rng.integers(1, 31)).tolist()),
        max_tokens=int(rng.integers(1, ROOM + 1)),
        temperature=float(rng.choice([0.0, 0.0, 0.7, 1.3])),
        seed=int(rng.integers(0, 2**31)),
    )
    return Wish(request, int(rng.choice([0, 0, 3])), float(rng.choice([1.0, 1.0, 0.8])))


def with_runs(rng: np.random.Generator, wish: Wish) -> Wish:
    """Half of them end with a run of equal tokens."""
    return dataclasses.replace(wish, max_run=int(rng.choice([NO_LIMIT, NO_LIMIT, 2, 3])))


def with_stops(rng: np.random.Generator, wish: Wish, text: list[int]) -> Wish:
    """Two in three get stop ids, most of them one that the text holds."""
    stops = tuple(rng.choice([*text, 3], size=rng.integers(1, 3)).tolist())
    if rng.random() < 0.35:
        return wish
    return dataclasses.replace(wish, request=dataclasses.replace(wish.request, stops=stops))


def hints_of(
    rng: np.random.Generator, size: int, wishes: list[Wish], texts: list[list[int]]
) -> np.ndarray:
    """Drafts for every anchor of these texts; a share of them, its own for each text, is wrong."""
    table = drafters.no_hints(size)
    for wish, text in zip(wishes, texts, strict=True):
        whole = [*wish.request.prompt, *text, *rng.integers(0, models.MASK, size).tolist()]
        drafters.hint(table, whole, len(wish.request.prompt))
    wrong = rng.random(table.shape) < rng.choice([0.0, 0.1, 0.3, 1.0])
    ids = rng.integers(0, models.MASK, table.shape)
    return np.where(wrong & (table != drafters.NO_HINT), ids, table).astype(np.int32)


def rounds_of(strategy: DFlash, wish: Wish, text: list[int], table: np.ndarray) -> Rounds:
    width = strategy.width or strategy.draft_block_size

    def drafts(position: int, anchor: int) -> list[int]:
        said = table[position, anchor, 1:width]
        return np.where(said == models.MASK, -1, said).tolist()  # a drafter never says its mask

    prompt = wish.request.prompt
    how = (wish.request.stops, drafts, wish.request.max_tokens)
    return dflash_rounds([*prompt, *text], len(prompt), *how)


def told_of(strategy: DFlash, truth: Rounds) -> DraftMetrics:
    size = strategy.draft_block_size or 0
    counts = (truth.sizes[n] for n in range(1, size + 1))
    places = range(1, size)
    reported = (tuple(counter[p] for p in places) for counter in (truth.proposed, truth.accepted))
    return DraftMetrics(tuple(counts), *reported)


def compare(
    strategy: Any, wishes: list[Wish], texts: list[list[int]], table: np.ndarray, seed: Any
) -> list[Ended]:
    """Requests with these drafts, against the lists, which know what `AR` writes."""
    got = run(strategy, wishes, drafters.hinted(TARGET, table), seed=seed[-1])
    for wish, text, one in zip(wishes, texts, got, strict=True):
        truth = rounds_of(strategy, wish, text, table)
        wanted = (truth.output, truth.finish_reason, truth.counts)
        assert (one.output, one.finish_reason, one.counts) == wanted, f"{seed=}"
        assert one.drafted == told_of(strategy, truth), f"{seed=}"
    return got


def check_batches(strategy: Any, first: int, count: int) -> list[Ended]:
    """Random batches of random requests."""
    done: list[Ended] = []
    for number in range(first, first + count):
        seed = (7, strategy.draft_block_size, strategy.width or 0, number)
        rng = np.random.default_rng(seed)
        wishes = [draw_wish(rng) for _ in range(int(rng.integers(2, SLOTS + 1)))]
        # Drafts go on after a run.
        texts = [one.output for one in run(AR(), wishes)]
        table = hints_of(rng, strategy.draft_block_size, wishes, texts)
        wishes = [with_runs(rng, wish) for wish in wishes]
        texts = [one.output for one in run(AR(), wishes)]
        wishes = [with_stops(rng, w, text) for w, text in zip(wishes, texts, strict=True)]
        done += compare(strategy, wishes, texts, table, seed)
    return done


@pytest.mark.slow
def test_random_requests_have_the_tokens_of_ar() -> None:
    done = check_batches(BLOCK, 0, 14)
    assert len(done) >= 40
    assert {one.finish_reason for one in done} == {"stop", "length", "repetition"}
    assert {n for one in done for n in one.counts} == {1, 2, 3, 4, 5}
    # The drafter's mask is an id like any other to the target.
    assert any(models.MASK in one.output for one in done)


# --- drafters of one kind -------------------------------------------------------------------------

ROUND = 5  # of `BLOCK`


def same_text(temperature: float, lengths: list[int]) -> tuple[list[Wish], list[int]]:
    """One request cut at several lengths, and its longest text."""
    prompt = tuple(range(3, 3 + 7))
    long = Wish(Request(prompt, ROOM, temperature, seed=11))
    wishes = [
        dataclasses.replace(long, request=dataclasses.replace(long.request, max_tokens=n))
        for n in lengths
    ]
    return wishes, run(AR(), [long])[0].output


def table_of(wish: Wish, text: list[int]) -> np.ndarray:
    table = drafters.no_hints(ROUND)
    drafters.hint(table, [*wish.request.prompt, *text], len(wish.request.prompt))
    return table


@pytest.mark.slow("lengths1")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("lengths", [[1, 2, 5, 6], [7, 11, 12, 32]])
def test_right_drafts_are_all_taken_and_wrong_ones_cost_nothing(
    lengths: list[int], temperature: float
) -> None:
    wishes, text = same_text(temperature, lengths)
    assert models.MASK not in text, "which no drafter says"
    right = table_of(wishes[0], text)
    wrong = np.where(right == drafters.NO_HINT, right, (right + 1) % models.MASK)
    cut = [text[:n] for n in lengths]
    for one, n in zip(compare(BLOCK, wishes, cut, right, (0,)), lengths, strict=True):
        assert len(one.counts) == max(1, math.ceil((n - 1) / ROUND))
        assert set(one.counts[:-1]) <= {ROUND}
    for one, n in zip(compare(BLOCK, wishes, cut, wrong, (1,)), lengths, strict=True):
        assert one.counts == [1] * max(1, n - 1)


def test_a_stop_id_may_be_any_draft_of_a_block_or_the_token_behind() -> None:
    wishes, text = same_text(0.9, [ROOM] * SLOTS)
    places = [text.index(token) for token in dict.fromkeys(text)][: 3 * SLOTS]
    assert {(at - 1) % ROUND for at in places if at} == set(range(ROUND))  # of a block all right
    right = table_of(wishes[0], text)
    for table in (right, np.where(right == drafters.NO_HINT, right, (right + 1) % models.MASK)):
        for first in range(0, len(places), SLOTS):
            some = places[first : first + SLOTS]
            stopped = [
                dataclasses.replace(w, request=dataclasses.replace(w.request, stops=(text[at],)))
                for w, at in zip(wishes, some, strict=True)
            ]
            done = compare(BLOCK, stopped, [text] * SLOTS, table, (first,))
            assert [len(one.output) for one in done] == some


def test_a_drafter_that_is_not_finite_changes_nothing() -> None:
    rng = np.random.default_rng(3)
    wishes = [draw_wish(rng) for _ in range(SLOTS)]
    draft = drafters.hinted(TARGET, drafters.no_hints(ROUND))
    broken = jax.tree.map(lambda leaf: leaf * np.nan, draft.params["layers"])
    got = run(BLOCK, wishes, draft.replace(params=draft.params | {"layers": broken}))
    assert all((one.guesses[:, 1:ROUND] == -1).all() for one in got)
    assert [(o.output, o.finish_reason) for o in got] == [
        (o.output, o.finish_reason) for o in run(AR(), wishes)
    ]


def check_guesses(strategy: Any) -> int:
    """Each block of the network's own drafts, against a dense pass; how many there were."""
    rng = np.random.default_rng(5)
    wishes = [draw_wish(rng) for _ in range(SLOTS)]
    net, draft_net = dense.Net(TARGET), dense.Net(models.drafter(TARGET))
    done = run(strategy, wishes, drafters.hinted(TARGET, drafters.no_hints(ROUND)))
    seen = 0
    for wish, one in zip(wishes, done, strict=True):
        anchor = len(wish.request.prompt)
        text = [*wish.request.prompt, *one.output]
        for count, guesses in zip(one.counts[:6], one.guesses, strict=False):
            taps = np.concatenate(dense.causal_rows(net, text[:anchor]).taps, axis=-1)
            rows = dense.draft_rows(draft_net, taps, text[anchor], ROUND - 1).logits
            reported = [draft_net.law(row).draw()[0] for row in rows[1:]]
            assert guesses[1:ROUND].tolist() == reported
            anchor, seen = anchor + count, seen + 1
    return seen


def test_the_drafter_guesses_what_a_dense_pass_of_it_guesses() -> None:
    """Anchor in front, masks after, all seeing all, and the taps of the text before the anchor."""
    assert check_guesses(BLOCK) >= 12
