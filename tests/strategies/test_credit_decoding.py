"""`examples/credit_decoding.py`, the guide's strategy, tested as a user would test a file.

It agrees with a list decoder of the published algorithm over random scripts, keeps the contract,
and the guide quotes the file as it is.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import strategies
from dllm_jax.strategies import load_strategy
from dllm_jax.strategies.core.protocol import PerSlot, TokenStats
from dllm_jax.strategies.core.state import NO_TOKEN, Sampling
from dllm_jax.strategies.testing import invariants
from dllm_jax.strategies.testing.script import Trace, run_script
from tests.contract import models
from tests.contract.cases import MIXED
from tests.contract.harness import decode_paged
from tests.oracles.credit_decoder import Credited, Rules, credit_decode
from tests.strategies.test_strategy_fuzz import (
    VOCAB,
    Case,
    check_agreement,
    draw_case,
    draw_threshold,
)

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "examples" / "credit_decoding.py"


@pytest.fixture(scope="module")
def credit() -> Any:
    return load_strategy(f"{FILE}:CreditDecoding")


def test_the_file_is_short() -> None:
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 150


def test_the_guide_quotes_the_file() -> None:
    guide = (ROOT / "docs" / "write_a_strategy.md").read_text(encoding="utf-8")
    quotes = re.findall(r"^```py\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    assert quotes
    source = FILE.read_text(encoding="utf-8")
    assert [quote for quote in quotes if quote not in source] == []


# ---- worked by hand ----

SCRIPT = {
    "token": np.tile(np.arange(8), (8, 1)),
    "prob": np.tile(np.array([0, 0, 0, 0, 0.6, 0.6, 0.6, 0.3]), (8, 1)),
    "max_tokens": 4,
    "mask_id": 50,
    "vocab_size": 64,
}
BY_HAND = {"accept_threshold": 0.75, "credit_power": 1.0, "credit_weight": 1.0}
SIZES = {"block_size": 4, "buffer_size": 1}


def test_a_token_that_stays_the_likeliest_is_taken(credit: Any) -> None:
    # p = .6: paid .6, .6 * 1.6 / 1.36 = .706; then 1.08, .6 * 2.08 / 1.648 = .757 and accepted.
    trace = run_script(credit.replace(**BY_HAND, **SIZES), [9, 9, 9, 9], **SCRIPT)
    shown = [step.tokens[0] for step in trace.steps[:2]]
    assert shown == [[4, 50, 50, 50], [4, 5, 6, 50]]
    assert ([step.new_tokens for step in trace.steps], trace.output) == ([1, 2, 1], [4, 5, 6, 7])


@pytest.mark.parametrize(
    ("changed", "new_tokens"),
    [
        ({"credit_weight": 0.0}, [1, 1, 1, 1]),
        ({"credit_decay": 0.0}, [1, 1, 1, 1]),
        ({"credit_decay": 0.0, "accept_threshold": 0.7}, [3, 1]),  # .706 at once
        ({"credit_decay": 1.0, "accept_threshold": 0.767}, [1, 2, 1]),  # 1.2: 1.32 / 1.72 = .7674
    ],
)
def test_the_numbers_of_the_example_count(
    credit: Any, changed: dict[str, float], new_tokens: list[int]
) -> None:
    trace = run_script(credit.replace(**BY_HAND | changed, **SIZES), [9, 9, 9, 9], **SCRIPT)
    assert [step.new_tokens for step in trace.steps] == new_tokens


def test_a_probability_at_the_threshold_is_enough(credit: Any) -> None:
    at = {"credit_weight": 0.0, "accept_threshold": float(np.float32(0.6))}
    trace = run_script(credit.replace(**at, **SIZES), [9, 9, 9, 9], **SCRIPT)
    assert [step.new_tokens for step in trace.steps] == [3, 1]


def test_a_hole_needs_an_account() -> None:
    with pytest.raises(ValueError, match="num_accounts=0 must be at least 1"):
        load_strategy(f"{FILE}:CreditDecoding", num_accounts=0)


# ---- random scripts ----


def draw_rules(rng: np.random.Generator, accounts: int | None) -> Rules:
    return Rules(
        accept=draw_threshold(rng),
        decay=float(rng.choice([0.0, 0.5, 0.8, 1.0])),
        power=float(rng.choice([0.0, 0.2, 1.0])),
        weight=float(rng.choice([0.0, 0.7, 2.0])),
        add=draw_threshold(rng),
        semi=draw_threshold(rng),
        accounts=accounts,
    )


def draw_credit(seed: Any, block_size: int) -> tuple[np.random.Generator, Case]:
    """A script that never says 1: after fusion such holes tie but for rounding."""
    rng = np.random.default_rng(seed)
    case = draw_case(rng, block_size)
    case.prob[:] = np.minimum(case.prob, np.float32(0.96875))
    return rng, case


def both(
    kind: Any, case: Case, rules: Rules, block_size: int, buffer_size: int
) -> tuple[Trace, Credited]:
    """A script through the strategy and through the list decoder."""
    strategy = kind.replace(
        accept_threshold=rules.accept,
        credit_decay=rules.decay,
        credit_power=rules.power,
        credit_weight=rules.weight,
        add_block_threshold=rules.add,
        semi_complete_threshold=rules.semi,
        num_accounts=VOCAB if rules.accounts is None else rules.accounts,
        block_size=block_size,
        buffer_size=buffer_size,
    )
    trace = run_script(strategy, case.prompt, case.token, case.prob, **case.limits)
    truth = credit_decode(
        case.prompt,
        case.token,
        case.prob,
        rules,
        block_size=block_size,
        buffer_size=buffer_size,
        **case.limits,
    )
    return trace, truth


# block size, blocks in the window, accounts (None: the whole vocabulary)
SHAPES = [(4, 3, 2), (4, 2, None), (4, 1, 1), (2, 3, 2)]


@pytest.mark.slow("shape[023]")
@pytest.mark.parametrize("shape", SHAPES)
def test_credit_agrees_with_the_list_decoder(
    credit: Any, shape: tuple[int, int, int | None]
) -> None:
    block_size, buffer_size, accounts = shape
    seen: list[Credited] = []
    for number in range(120):
        seed = (block_size, buffer_size, accounts or VOCAB, number)
        rng, case = draw_credit(seed, block_size)
        rules = draw_rules(rng, accounts)
        trace, truth = both(credit, case, rules, block_size, buffer_size)
        if not truth.undecided:
            check_agreement(trace, truth, (seed, rules))
            seen.append(truth)
    # The draw is worth something.
    assert len(seen) > 100
    assert {truth.finish_reason for truth in seen} >= {"stop", "length", "nfe"}
    assert sum(truth.gained > 0 for truth in seen) > 12
    if block_size > 2:  # a hole must wait
        assert accounts == 1 or sum(truth.turned > 0 for truth in seen) > 1
        assert accounts is None or sum(truth.evicted > 0 for truth in seen) > 12


@pytest.mark.slow
def test_without_credits_it_is_multi_bd(credit: Any) -> None:
    """But at the threshold itself, which a drawn number does not meet."""
    sizes: dict[str, Any] = {"block_size": 4, "buffer_size": 3}
    for number in range(60):
        rng, case = draw_credit((5, number), 4)
        knobs = {
            "accept_threshold": float(rng.random()),
            "add_block_threshold": draw_threshold(rng),
            "semi_complete_threshold": draw_threshold(rng),
        }
        traces = [
            run_script(one, case.prompt, case.token, case.prob, **case.limits)
            for one in (
                strategies.MultiBD(**sizes).replace(**knobs),
                credit.replace(credit_weight=0.0, num_accounts=2, **knobs, **sizes),
            )
        ]
        assert traces[0] == traces[1], f"{number=}"


# ---- what a script does not show ----


def test_a_drawn_token_has_its_share_as_confidence_and_nan_stays_nan(credit: Any) -> None:
    """Cells: greedy, drawn from the likeliest, drawn from the rest, not finite, not asked for."""
    ids = jnp.full((5, 1, 1, 2), jnp.asarray([7, 9]))
    credits = jnp.full((5, 1, 1, 2), jnp.asarray([1.0, 3.0]))
    cell = (5, 1, 1)
    stats = TokenStats(
        token=jnp.asarray([7, 7, 3, NO_TOKEN, 0]).reshape(cell),
        confidence=jnp.asarray([0.5, 0.5, 0.1, 1.0, -jnp.inf]).reshape(cell),
        entropy=jnp.zeros(cell),
        top_ids=jnp.full((*cell, 2), jnp.asarray([7, 9])),
        top_probs=jnp.full((*cell, 2), jnp.asarray([0.5, 0.3])).at[3].set(jnp.nan),
    )
    drawing = Sampling(
        jnp.asarray([0.0, 0.7, 0.7, 0.7, 0.0]), jnp.zeros((5,), jnp.int32), jnp.ones((5,))
    )
    bound = credit.replace(credit_weight=PerSlot(jnp.ones((5,))), num_accounts=2)
    fused = bound._fuse(ids, credits, stats, drawing)
    # Gains 2 and 4: .5 -> 1, .3 -> 1.2, the rest .2 stays; the sum is 2.4.
    assert fused.token.reshape(-1).tolist() == [9, 7, 3, NO_TOKEN, 0]
    expected = [1.2 / 2.4, 1.0 / 2.4, 0.1 / 2.4, 1.0, -np.inf]
    np.testing.assert_allclose(fused.confidence.reshape(-1), expected, rtol=1e-6)


def test_a_slot_and_its_neighbours_change_nothing(credit: Any) -> None:
    strategy = credit.replace(accept_threshold=0.6, block_size=4, buffer_size=3)
    model = models.plain()

    def ends(requests: Any, **words: Any) -> list[tuple[list[int], str | None, int]]:
        rows = decode_paged(strategy, model, list(requests), **words).rows
        return [(row.tokens, row.reason, row.nfe) for row in rows]

    together = ends(MIXED)
    assert any(nfe < len(tokens) for tokens, _, nfe in together)
    assert ends(MIXED, seed=5, move_at=2) == together
    assert ends([None, None, MIXED[1]], seed=6) == together[1:2]


@pytest.mark.slow
@pytest.mark.parametrize("buffer_size", [1, 3])
def test_it_keeps_the_contract(credit: Any, buffer_size: int) -> None:
    strategy = credit.replace(block_size=4, buffer_size=buffer_size)
    for seed in range(15):
        invariants.check_invariants(strategy, max_block_steps=5, seed=seed)


# ---- the tests of the tests ----

# What is wrong: expression, what replaces it.
MUTANTS = {
    "no_decay": ("credits * self.credit_decay.at_token[..., None]", "credits"),
    "pays_late": ("ids, credits = self._pay(ids", "new, paid = self._pay(ids"),
    "pays_everybody": ("place = jnp.where(jnp.any", "place = ids == ids; jnp.where(jnp.any"),
    "richest_leaves": ("jnp.argmin(credits", "jnp.argmax(credits"),
    "inherits": ("jnp.where(held, credits, 0.0)", "credits"),
    "no_power": ("prob ** self.credit_power.at_token[..., None]", "prob"),
    "no_sum": ("1.0 + jnp.sum(boosted - stats.top_probs, axis=-1)", "jnp.ones(boosted.shape[:-1])"),
    "sum_of_the_known": (
        "1.0 + jnp.sum(boosted - stats.top_probs, axis=-1)",
        "jnp.sum(boosted, axis=-1)",
    ),
    "the_likeliest": ("jnp.argmax(boosted, axis=-1", "jnp.argmax(stats.top_probs, axis=-1"),
    "no_force": ("accept = (sure & holes) | forced", "accept = sure & holes"),
    "plain_force": ("stats = self._fuse(", "said, stats = stats, self._fuse("),
}
AND_ALSO = {
    "pays_late": ('kept = {"ids": ids.reshape(flat), "credits": credits.reshape(flat)}',
                  'kept = {"ids": new.reshape(flat), "credits": paid.reshape(flat)}'),
    "plain_force": ("sampling.forced_top1(stats,", "sampling.forced_top1(said,"),
}  # fmt: skip


@pytest.fixture
def _compile_quickly() -> Iterator[None]:
    """A mutant is compiled for a few dozen scripts of a few steps."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
@pytest.mark.usefixtures("_compile_quickly")
@pytest.mark.parametrize("name", [None, *MUTANTS])
def test_every_broken_rule_is_noticed(name: str | None, tmp_path: Path) -> None:
    source = FILE.read_text(encoding="utf-8")
    for old, new in [table[name] for table in (MUTANTS, AND_ALSO) if name in table]:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path = tmp_path / f"mutant_{name}.py"
    path.write_text(source, encoding="utf-8")
    kind = load_strategy(f"{path}:CreditDecoding")
    caught = 0
    for number in range(300):
        rng, case = draw_credit((6, number), 4)
        rules = draw_rules(rng, 2)
        trace, truth = both(kind, case, rules, 4, 2)
        if truth.undecided:
            continue
        try:
            check_agreement(trace, truth, number)
        except AssertionError:
            caught += 1
            break
    assert caught == (name is not None)
