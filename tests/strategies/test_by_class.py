"""Proves that a strategy is never run by a program compiled for one of another class.

Two classes of the same fields with the same values are one pytree structure to JAX, whatever their
steps do; each `jax.jit` of the package that takes a strategy must see two.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import dllm_jax as dj
from dllm_jax.api import generate
from dllm_jax.strategies import (
    BlockDiffusion,
    DFlash,
    Knob,
    Needs,
    Strategy,
    knob,
    load_strategy,
    sampling,
)
from dllm_jax.strategies.core.protocol import split_knobs
from dllm_jax.strategies.testing import invariants, random_requests
from dllm_jax.strategies.testing import script as scripts
from dllm_jax.tasks import evaluate
from dllm_jax.trace import recording
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
    scripts.run_script(strategy, [1], row, row * 0.9, max_tokens=4, mask_id=0, vocab_size=4)


ENTRIES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "generate._generate": (generate, lambda s: dj.generate(MODEL, PROMPTS, s)),
    "generate._start": (generate, lambda s: generate.start(MODEL, PROMPTS, s)),
    "generate._advance": (
        generate,
        lambda s: generate.advance(MODEL, generate.start(MODEL, PROMPTS, s, max_tokens=4)),
    ),
    "recording._recorded": (
        recording,
        lambda s: dj.record(MODEL, PROMPTS[0], s, max_tokens=4),
    ),
    "evaluate._run": (
        evaluate,
        lambda s: evaluate._finish(MODEL, generate.start(MODEL, PROMPTS, s, max_tokens=4)),
    ),
    "script._run": (scripts, script),
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


@pytest.mark.versions
@pytest.mark.parametrize("name", ENTRIES)
def test_a_strategy_of_another_class_is_another_argument(name, monkeypatch):
    module, call = ENTRIES[name]
    one, other = structures(monkeypatch, module, name.split(".")[1], call)
    assert one != other
    again, _ = structures(monkeypatch, module, name.split(".")[1], call)
    assert again == one, "the same strategy would be compiled twice"


@pytest.mark.versions
def test_the_engines_programs_are_others_for_another_class():
    one, other = (make_device("multi_bd", allocate=False) for _ in range(2))
    assert jax.tree.structure(one.programs) == jax.tree.structure(other.programs)
    own = one.programs.strategy
    theirs = type("Own", (type(own),), {})(**vars(own))
    assert jax.tree.structure(one.programs.replace(strategy=theirs)) != jax.tree.structure(
        one.programs
    )


def numbered(number: int) -> Any:
    return type("Numbered", (Strategy,), {"step": lambda *_: number})()


def numbered_apart(number: int) -> Any:
    """A pytree of no class of ours, adopted."""
    return load_strategy(type("Numbered", (struct.PyTreeNode,), {"step": lambda *_: number})())


@pytest.mark.versions
@pytest.mark.parametrize("of", [numbered, numbered_apart])
def test_many_classes_of_no_fields_run_their_own_steps(of):
    """As plain `struct.PyTreeNode`s, every sixth runs another class's step under jax 0.10."""
    run = jax.jit(lambda strategy: strategy.step(None, None))
    assert [int(run(of(number))) for number in range(40)] == [*range(40)]


@pytest.mark.versions
def test_classes_are_told_apart_at_every_depth():
    bare = split_knobs(DFlash(8, (1,)))[0]
    for one, other in (PAIR, ([bare, PAIR[0]], [bare, PAIR[1]]), ({"a": PAIR[0]}, {"a": PAIR[1]})):
        assert jax.tree.structure(one) != jax.tree.structure(other)
        again = jax.tree.map(lambda leaf: leaf, one)
        assert again == one
        assert jax.tree.structure(again) == jax.tree.structure(one)


class Apart(struct.PyTreeNode):
    """A strategy that does not inherit from `Strategy`."""

    accept_threshold: Knob = knob(0.5)
    block_size: int = struct.field(pytree_node=False, default=4)
    buffer_size: int = struct.field(pytree_node=False, default=1)

    def step(self, forward, state):
        return BlockDiffusion.step(self, forward, state)

    def _accept(self, stats, state, holes):
        surest = sampling.top_n(stats.confidence, jnp.ones_like(state.buffer.status), holes)
        return surest | sampling.above(stats, self.accept_threshold)


@pytest.mark.long
def test_a_pytree_with_a_step_is_adopted_with_its_fields_and_the_defaults():
    found = load_strategy(Apart(), block_size=8)
    assert isinstance(found, Strategy)
    assert isinstance(found, Apart)
    assert (found.block_size, found.accept_threshold) == (8, 0.5)
    assert found == load_strategy(Apart(block_size=8))
    assert jax.tree.structure(found) == jax.tree.structure(load_strategy(Apart(block_size=8)))
    assert (found.name, found.made_of, found.needs) == ("Apart", Apart, Needs("grid_causal"))
    assert not found.absorbs
    invariants.check_invariants(Apart())
    out = dj.generate(MODEL, PROMPTS, Apart(), max_tokens=4)
    same = BlockDiffusion(0.5, block_size=4, remasking="dynamic")
    assert out.tokens.tolist() == dj.generate(MODEL, PROMPTS, same, max_tokens=4).tokens.tolist()


@pytest.mark.versions
def test_what_has_a_step_and_no_fields_is_refused():
    class Plain:
        def step(self, forward, state):
            return forward, state

    with pytest.raises(ValueError, match=r"write class Plain\(dllm_jax.strategies.Strategy\)"):
        load_strategy(Plain())


@pytest.mark.versions
def test_the_class_is_not_a_field():
    """Of what users see of a strategy: its repr, its fields, equality."""
    assert repr(Apart()).startswith("Apart(accept_threshold=0.5, block_size=4")
    names = [field.name for field in dataclasses.fields(BlockDiffusion)]
    assert names == [*inspect.signature(BlockDiffusion).parameters]
    assert names[0] == "accept_threshold"
    assert PAIR[0] != PAIR[1]
