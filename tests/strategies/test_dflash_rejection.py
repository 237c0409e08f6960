"""`DFlash` by rejection: another text than `ar`'s with the same distribution, whatever is drafted.

Proves `rejection.reject` by enumeration: over every draft and every chance the tokens of a round,
continued by the target alone, have the target's distribution (3 ids, 2 drafts). Proves it by
chi-squared as well, on 5 ids and drawn numbers. A draft of probability NaN neither stays nor is
drawn from. On the network, with 5 ids, the joint distribution of three tokens is compared with the
dense, cache-free one by chi-squared. Rows at temperature 0 are those of `ar`, also next to others.
Neighbours, slots and preemption change nothing, because rounds resume where they were.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.strategies import AR, DFlash
from dllm_jax.strategies.dflash import rejection
from tests.contract import dense, drafters, models
from tests.strategies.test_dflash import LAYERS, ROUND, SLOTS, TARGET, draw_wish, run

pytestmark = pytest.mark.long

# Quotients p / q are multiples of 1/8, so eight chances between them tell all there is.
STEPS = 8
DRAFT_LAWS = np.array([[4, 2, 2], [2, 2, 4]]) / 8
FIRST = np.array([2, 5, 1]) / 8
SECOND = np.array([[1, 3, 4], [6, 1, 1], [2, 2, 4]]) / 8  # by the first token
THIRD = np.array([[3, 4, 1], [1, 1, 6], [5, 2, 1]]) / 8  # by the second


def law_of_three(of: Any = rejection) -> np.ndarray:
    """Law of three tokens after an anchor, summed over all drafts and chances; [3 3 3]."""
    grid = (np.arange(STEPS) + 0.5) / STEPS
    drafts = np.array([*itertools.product(range(3), repeat=2)])
    chances = np.array([*itertools.product(grid, repeat=2)])
    tokens = np.repeat(drafts, len(chances), axis=0)
    p = np.stack(
        [np.repeat(FIRST[None], len(tokens), axis=0), SECOND[tokens[:, 0]], THIRD[tokens[:, 1]]],
        axis=1,
    )
    q = np.repeat(DRAFT_LAWS[None], len(tokens), axis=0)
    right, behind = of.reject(
        *(jnp.asarray(part, jnp.float32) for part in (p, q)),
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(np.tile(chances, (len(drafts), 1)), jnp.float32),
    )
    found = np.zeros((3, 3, 3))
    for one, kept, law in zip(tokens, np.asarray(right), np.asarray(behind), strict=True):
        weight = DRAFT_LAWS[0, one[0]] * DRAFT_LAWS[1, one[1]] / len(chances)
        for text in itertools.product(range(3), repeat=3):
            if list(text[:kept]) != one[:kept].tolist():
                continue
            rest = [SECOND[text[0], text[1]], THIRD[text[1], text[2]]][kept:]
            found[text] += weight * law[text[kept]] * np.prod(rest)
    return found


def check_enumeration(of: Any = rejection) -> None:
    wanted = FIRST[:, None, None] * SECOND[:, :, None] * THIRD[None]
    np.testing.assert_allclose(law_of_three(of), wanted, rtol=0, atol=2e-7)


def test_every_round_enumerated_has_the_law_of_the_target() -> None:
    check_enumeration()


def chi_squared(counts: np.ndarray, law: np.ndarray) -> float:
    """In standard deviations above its mean; cells that expect few are taken together."""
    expected = counts.sum() * law
    few = expected < 8
    reported = np.append(counts[~few], counts[few].sum())
    wanted = np.append(expected[~few], expected[few].sum())
    reported, wanted = reported[wanted > 0], wanted[wanted > 0]
    freedom = len(reported) - 1
    return float((np.sum((reported - wanted) ** 2 / wanted) - freedom) / np.sqrt(2 * freedom))


FAR = 5.0  # one in a million, of such sums


def check_drawn(of: Any = rejection) -> float:
    """40,000 rounds of 3 drafts of 5 ids, each place with laws of its own."""
    rng = np.random.default_rng(4)
    num, V = 40_000, 5
    p = rng.dirichlet(np.ones(V), size=4)
    q = rng.dirichlet(np.ones(V), size=3)
    tokens = np.stack([rng.choice(V, num, p=row) for row in q], axis=1)
    right, behind = of.reject(
        jnp.asarray(np.repeat(p[None], num, axis=0), jnp.float32),
        jnp.asarray(np.repeat(q[None], num, axis=0), jnp.float32),
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(rng.random((num, 3)), jnp.float32),
    )
    edges = np.cumsum(np.asarray(behind), axis=1)
    own = np.minimum((rng.random((num, 1)) > edges).sum(axis=1), V - 1)
    text = np.stack([rng.choice(V, num, p=row) for row in p], axis=1)  # the target goes on
    place, kept = np.arange(4)[None], np.asarray(right)[:, None]
    text = np.where(place < kept, np.pad(tokens, ((0, 0), (0, 1))), text)
    text = np.where(place == kept, own[:, None], text)
    counts = np.zeros((V,) * 3)
    np.add.at(counts, tuple(text[:, :3].T), 1)
    law = p[0][:, None, None] * p[1][None, :, None] * p[2][None, None]
    assert {*np.unique(kept)} == {0, 1, 2, 3}
    return chi_squared(counts, law)


def test_drawn_rounds_have_the_law_of_the_target() -> None:
    assert check_drawn() < FAR


def test_nan_probabilities_never_stay_and_are_never_drawn_from() -> None:
    p = jnp.full((2, 2, 3), 1 / 3, jnp.float32)
    q = jnp.asarray([[[jnp.nan] * 3], [[0.2, 0.3, 0.5]]], jnp.float32)
    tokens, chances = jnp.asarray([[-1], [2]], jnp.int32), jnp.zeros((2, 1), jnp.float32)
    right, behind = rejection.reject(p, q, tokens, chances)
    assert right.tolist() == [0, 1]
    np.testing.assert_allclose(behind, 1 / 3)
    right, behind = rejection.reject(p * jnp.nan, q, tokens, chances)
    assert right.tolist() == [0, 0]
    assert np.isnan(np.asarray(behind)).all()


def test_equal_laws_keep_every_draft() -> None:
    rng = np.random.default_rng(0)
    p = jnp.asarray(rng.dirichlet(np.ones(5), size=(64, 4)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 5, (64, 3)), jnp.int32)
    chances = jnp.asarray(rng.random((64, 3)), jnp.float32)
    right, behind = rejection.reject(p, p[:, :3], tokens, chances)
    assert (np.asarray(right) == 3).all()
    np.testing.assert_array_equal(behind, p[:, 3] / jnp.sum(p[:, 3], axis=1, keepdims=True))


# --- on the network -------------------------------------------------------------------------------


def five_ids() -> tuple[Any, Any]:
    """A target of five ids, broad laws, and a drafter of it that never says the last, its mask."""
    target = models.plain(4, shift=True, vocab_size=5, mask_token_id=-1)
    target = target.replace(params=target.params | {"lm_head": target.params["lm_head"] / 2})
    defaults = dataclasses.replace(target.defaults, vocab_limit=None)
    draft = models.drafter(target)
    config = dataclasses.replace(draft.config, vocab_size=5, mask_token_id=4)
    return target.replace(defaults=defaults), draft.replace(config=config, defaults=defaults)


def check_texts(kind: Any = DFlash, **how: Any) -> float:
    """Chi-squared of the second to fourth token of 4,096 texts."""
    target, draft = five_ids()
    strategy = kind(4, LAYERS, acceptance="rejection")
    prompt, num = [3, 1, 4, 1, 0], 512
    counts, rounds = np.zeros((5,) * 3), []
    for seed in range(8):
        out = dj.generate(
            target,
            [prompt] * num,
            strategy,
            draft=draft,
            max_tokens=4,
            temperature=1.2,
            key=jax.random.key(seed),
            **how,
        )
        np.add.at(counts, tuple(np.asarray(out.tokens)[:, 1:].T), 1)
        rounds += np.asarray(out.nfe).tolist()
    assert {*rounds} >= {1, 2, 3}
    return chi_squared(counts, dense_law(target, prompt, **how))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"top_k": 3}, {"top_p": 0.8}])
def test_texts_have_the_law_of_the_target(how: dict[str, Any]) -> None:
    assert check_texts(**how) < FAR


def dense_law(target: Any, prompt: list[int], **how: Any) -> np.ndarray:
    """Law of the second to fourth token of a text, from dense passes."""
    net, law = dense.Net(target), np.zeros((5,) * 4)
    for text in itertools.product(range(5), repeat=3):
        rows = dense.causal_rows(net, [*prompt, *text]).logits[len(prompt) - 1 :]
        reported = [cut(row / 1.2, **how) for row in rows]
        law[text] = np.prod([reported[i][text[i]] for i in range(3)]) * reported[3]
    return law.sum(axis=0)


def cut(logits: np.ndarray, top_k: int = 5, top_p: float = 1.0) -> np.ndarray:
    """Probabilities of the k likeliest ids, and of the fewest of them that hold top_p."""
    law = np.exp(logits.astype(np.float64) - logits.max())
    law[law < np.sort(law)[-top_k]] = 0.0
    law /= law.sum()
    order = np.argsort(-law)
    before = np.cumsum(law[order]) - law[order]
    law[order[before >= top_p]] = 0.0
    return law / law.sum()


@pytest.mark.slow
def test_greedy_rows_are_those_of_ar_beside_others() -> None:
    strategy = DFlash(ROUND, LAYERS, acceptance="rejection")
    assert strategy.choices == (ROUND,)
    draft, seen = drafters.hinted(TARGET, drafters.no_hints(ROUND)), 0
    for number in range(12):
        rng = np.random.default_rng((13, number))
        wishes = [draw_wish(rng) for _ in range(SLOTS)]
        got, plain = run(strategy, wishes, draft, seed=number), run(AR(), wishes)
        for wish, one, want in zip(wishes, got, plain, strict=True):
            assert one.finish_reason == want.finish_reason == "length"
            assert len(one.output) == len(want.output)
            if wish.request.temperature == 0.0:
                assert one.output == want.output, f"{number=}"
                seen += 1
        moved = run(strategy, wishes[::-1], draft, seed=number + 1)[::-1]
        assert [one.output for one in moved] == [one.output for one in got]
        counts = {n for one in got for n in one.counts}
        assert counts <= {1, 2, 3, 4, 5}
    assert seen >= 12


@pytest.mark.slow
def test_rejection_ignores_a_drafter_that_is_not_finite() -> None:
    rng = np.random.default_rng(3)
    wishes = [draw_wish(rng) for _ in range(SLOTS)]
    draft = drafters.hinted(TARGET, drafters.no_hints(ROUND))
    broken = jax.tree.map(lambda leaf: leaf * np.nan, draft.params["layers"])
    draft = draft.replace(params=draft.params | {"layers": broken})
    for one in run(DFlash(ROUND, LAYERS, acceptance="rejection"), wishes, draft):
        assert one.finish_reason == "length"
        assert {*one.counts} == {1}


def test_rejection_refuses_several_widths() -> None:
    draft = models.drafter(TARGET)
    for strategy, message in (
        (
            DFlash(4, LAYERS, acceptance="typical"),
            "acceptance=.typical. is not one of match, rejection",
        ),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message):
            dj.generate(TARGET, [[1, 2]], strategy, draft=draft)
