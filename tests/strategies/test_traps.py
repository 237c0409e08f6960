"""The tests that docs/traps.md names exist, and those of its traps that no other file holds."""

import ast
import dataclasses
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import strategies
from dllm_jax.strategies import load_strategy
from dllm_jax.strategies.core.protocol import knob_rules
from tests.contract import engine as toy
from tests.contract import models
from tests.contract.cases import case
from tests.contract.harness import Request, decode_paged

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| ([DTNA]?)(\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
TRAPS = {"": 30, "D": 31, "T": 38, "N": 20, "A": 25}  # how many of each kind, numbered from 1
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


@functools.cache
def named_in(file: str) -> set[str]:
    """The tests of the file with this name, which lies in one folder of `tests`."""
    (path,) = (ROOT / "tests").rglob(file)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_trap_has_tests_that_exist() -> None:
    page = (ROOT / "docs" / "traps.md").read_text(encoding="utf-8")
    rows = ROW.findall(page)
    numbers = sorted((of, int(number)) for of, number, *_ in rows)
    assert numbers == sorted((of, i + 1) for of, count in TRAPS.items() for i in range(count))
    without = [of + number for of, number, _, tests in rows if not NAMED.search(tests)]
    assert without == ["27", "N20"], "no guessed limit, no hardware here"
    missing = [
        f"{file}::{name}" for file, name in NAMED.findall(page) if name not in named_in(file)
    ]
    assert missing == []


@pytest.mark.parametrize("name", sorted(set(strategies.strategy_names()) - {"dmax"}))
def test_strategies_that_rewrite_nothing_have_no_stability(name: str) -> None:
    """Trap 28: the reference lets such a gate shut every block after an incomplete one."""
    with pytest.raises(ValueError, match=r"token_stability_threshold=0.5: \w+ has no such field"):
        load_strategy(name, token_stability_threshold=0.5)


@pytest.mark.parametrize("name", strategies.strategy_names())
def test_thresholds_given_in_part_leave_the_others(name: str) -> None:
    """Trap 29: the reference wants all of them or none."""
    plain = load_strategy(name)
    rules = knob_rules(plain)
    bounds = {rule.up_to for rule in rules.values()}
    for knob, rule in rules.items():
        value = 2.0 if rule.whole or knob in bounds else 0.25
        changed = load_strategy(name, **{knob: value})
        assert getattr(changed, knob) == value
        assert changed.replace(**{knob: getattr(plain, knob)}) == plain


BARRED = (models.MASK, models.PADDED, 4, 9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, {"compat": "diffulex"}, {"merge": "iter_smooth_topk", "token_merge_top_k": 3}]
)
def test_dmax_never_draws_or_mixes_what_is_no_token(fields: dict[str, Any]) -> None:
    """Traps 10 and 11, on a head whose likeliest ids are those; greedy, and the draw wild."""
    model = models.plain()
    defaults = dataclasses.replace(model.defaults, forbidden_token_ids=(4, 9))
    head = model.params["lm_head"]
    loud = model.replace(
        defaults=defaults,
        params=model.params | {"lm_head": head.at[jnp.asarray(BARRED)].mul(20.0)},
    )
    strategy = strategies.DMax(accept_threshold=0.2, block_size=4, buffer_size=2, **fields)
    requests: list[Request | None] = [
        Request(tuple(range(5, 16)), 14, seed=1, temperature=3.0),
        Request((7, 7, 7), 11, seed=2),
    ]
    decoded = decode_paged(strategy, loud, requests)
    mixed = 0
    for row in decoded.rows:
        assert not set(BARRED) & set(row.tokens)
        for old, _ in row.steps:
            carry = old.carry.tokens
            shown = carry["merge_ids"][carry["merge_on"] & (carry["merge_probs"][..., 0] > 0)]
            assert not set(BARRED) & set(shown.ravel().tolist())
            mixed += shown.size
    assert mixed > 20
    plain = loud.logits(jnp.arange(8, 16)[None])
    assert set(BARRED) & set(np.asarray(plain).argmax(-1).ravel().tolist()), "none was likely"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["edit", "edit_indel", "dmax"])
def test_emitted_text_is_never_taken_back(name: str) -> None:
    """Trap 9: a listener hears more of a text, never another one, though the window changes it."""
    reported: dict[int, list[list[int]]] = {}
    windows: dict[int, list[dict[int, int]]] = {}

    def between(engine: Any) -> None:
        for sample in engine.scheduler.live:
            reported.setdefault(sample.rank[1], []).append(list(sample.tokens))
            if sample.saved is not None:
                got, row = sample.saved
                buffer = engine.runner.unpack(got.saved(row))["buffer"]
                cells = np.asarray(buffer.tokens).ravel().tolist()
                filled = np.asarray(buffer.filled).ravel().tolist()
                start = int(np.asarray(buffer.start).ravel()[0])
                seen = {start + i: t for i, t in enumerate(cells) if filled[i]}
                windows.setdefault(sample.rank[1], []).append(seen)

    requests = case(name).requests
    with toy.steps_a_chunk(1):
        outputs = toy.run(toy.make_engine(name), [toy.wish(r) for r in requests], between)
    assert toy.ends(outputs) == [toy.wanted(name, r) for r in requests]
    for texts, output in zip(reported.values(), outputs, strict=True):
        final = output.outputs[0].token_ids
        assert len(texts) > 3
        assert all(final[: len(text)] == text for text in texts)
    changed = sum(
        before[position] != after.get(position, before[position])
        for seen in windows.values()
        for before, after in itertools.pairwise(seen)
        for position in before
    )
    assert changed > 0, "no window changed what it held"
