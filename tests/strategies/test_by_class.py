"""Proves that a strategy is never run by a program compiled for one of another class.

Two classes of the same fields with the same values are one pytree structure to JAX, whatever their
steps do; each `jax.jit` of the package that takes a strategy must see two.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import struct

import dllm_jax as dj
from dllm_jax.api import generate
from dllm_jax.strategies import BlockDiffusion, DFlash
from dllm_jax.strategies.core.protocol import ByClass, split_knobs
from dllm_jax.strategies.testing import invariants, random_requests
from dllm_jax.strategies.testing import script as testing
from dllm_jax.tasks import evaluate
from dllm_jax.trace import trajectory
from tests.contract import models
from tests.contract.engine import make_device


class Other(BlockDiffusion):
    """The same fields, and a step of its own."""

    def step(self, forward, state):
        return super().step(forward, state)


class Caught(Exception):
    """What a jitted function was called with."""


MODEL = models.plain()
PROMPTS = [[1, 2, 3]]
PAIR = (BlockDiffusion(block_size=4), Other(block_size=4))


def script(strategy: Any) -> None:
    row = np.ones((3, 8), np.int32)
    testing.run_script(strategy, [1], row, row * 0.9, max_tokens=4, mask_id=0, vocab_size=4)


ENTRIES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "generation._generate": (generate, lambda s: dj.generate(MODEL, PROMPTS, s)),
    "generation._start": (generate, lambda s: generate.start(MODEL, PROMPTS, s)),
    "generation._advance": (
        generate,
        lambda s: generate.advance(MODEL, generate.start(MODEL, PROMPTS, s, max_tokens=4)),
    ),
    "trajectory._recorded": (
        trajectory,
        lambda s: dj.record(MODEL, PROMPTS[0], s, max_tokens=4),
    ),
    "evaluate._run": (
        evaluate,
        lambda s: evaluate._finish(MODEL, generate.start(MODEL, PROMPTS, s, max_tokens=4)),
    ),
    "testing._run": (testing, script),
    "random_requests._admit": (random_requests, invariants.check_invariants),
    "invariants._step": (invariants, invariants.check_invariants),
}


def structures(monkeypatch: Any, module: Any, name: str, call: Any) -> Iterator[Any]:
    """What `jit` compares of the arguments, for either strategy."""

    def catch(*args: Any, **static: Any) -> None:
        raise Caught(jax.tree.structure(args))

    monkeypatch.setattr(module, name, catch)
    for strategy in PAIR:
        with pytest.raises(Caught) as caught:
            call(strategy)
        yield caught.value.args[0]


@pytest.mark.parametrize("name", ENTRIES)
def test_a_strategy_of_another_class_is_another_argument(name, monkeypatch):
    module, call = ENTRIES[name]
    one, other = structures(monkeypatch, module, name.split(".")[1], call)
    assert one != other
    again, _ = structures(monkeypatch, module, name.split(".")[1], call)
    assert again == one, "the same strategy would be compiled twice"


def test_the_engines_programs_are_others_for_another_class():
    one, other = (make_device("multi_bd", allocate=False) for _ in range(2))
    assert jax.tree.structure(one.programs) == jax.tree.structure(other.programs)
    theirs = ByClass(type("Own", (type(one.strategy),), {})(**vars(one.strategy)))
    assert jax.tree.structure(one.programs.replace(by_class=theirs)) != jax.tree.structure(
        one.programs
    )


def test_many_classes_of_no_fields_run_their_own_steps():
    """Bare, every sixth runs another's under jax 0.10."""
    run = jax.jit(lambda by_class: by_class.strategy.step())

    def of(number: int) -> Any:
        return type("Numbered", (struct.PyTreeNode,), {"step": lambda _: number})()

    assert [int(run(ByClass(of(number)))) for number in range(40)] == [*range(40)]


def test_classes_are_told_apart_at_every_depth():
    bare = split_knobs(DFlash(8, (1,)))[0]
    for one, other in (PAIR, ([bare, PAIR[0]], [bare, PAIR[1]]), ({"a": PAIR[0]}, {"a": PAIR[1]})):
        assert jax.tree.structure(ByClass(one)) != jax.tree.structure(ByClass(other))
        again = jax.tree.map(lambda leaf: leaf, ByClass(one))
        assert again.strategy == one
        assert jax.tree.structure(again) == jax.tree.structure(ByClass(one))
