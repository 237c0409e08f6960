"""Proves that errors in a user's strategy name the line and the remedy (issue 23, item 6).

An error in a user's step names `file.py:line` and keeps Python's "Did you mean"; a knob that is no
number fails when the strategy is made; rules take plain numbers where a strategy has no knob.
"""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from dllm_jax.cli.errors import one_line
from dllm_jax.strategies import (
    BlockDiffusion,
    DMax,
    FullSequence,
    MultiBD,
    Strategy,
    blocks,
    sampling,
)
from dllm_jax.strategies.core.errors import described
from dllm_jax.strategies.core.knobs import knob
from dllm_jax.strategies.core.resolve import as_strategy, load_strategy
from dllm_jax.strategies.testing import run_script

SCRIPT: Any = {
    "token": np.tile(np.arange(16), (24, 1)),
    "prob": np.tile(np.linspace(0.95, 0.3, 16), (24, 1)),
    "max_tokens": 12,
    "mask_id": 50,
    "vocab_size": 64,
}
SIZES: Any = {"block_size": 4, "buffer_size": 2}
WRONG_STEPS = {
    "blocks.open_nxt(state)": "AttributeError: module 'dllm_jax.strategies.core.blocks' has no "
    "attribute 'open_nxt'. Did you mean: 'open_next'?",
    "bloks.open_next(state)": "NameError: name 'bloks' is not defined. Did you mean: 'blocks'?",
    "blocks.open_next(state.bufer)": "AttributeError: 'DecodeState' object has no attribute "
    "'bufer'. Did you mean: 'buffer'?",
}


def failure(call):
    with pytest.raises(Exception) as failed:  # noqa: PT011  (any error of a user)
        call()
    return failed.value


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python suggests nothing to programs before")
@pytest.mark.parametrize("wrong", WRONG_STEPS)
def test_an_error_in_a_users_step_names_its_line_and_what_was_meant(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from dllm_jax.strategies import blocks\n\n\ndef step(forward, state):\n"
        f"    state = {wrong}\n    return blocks.denoise(forward, state, lambda s, t, h: h)\n"
    )
    strategy = load_strategy("mine.py:step", **SIZES)
    error = failure(lambda: run_script(strategy, [7] * 4, **SCRIPT))
    assert described(error) == f"{WRONG_STEPS[wrong]} (mine.py:5)"
    assert one_line(error) == described(error)


def test_an_error_below_a_users_step_names_the_users_line(tmp_path):
    """Also a `ValueError`, which is shown without its type, and one raised in our code."""
    file = tmp_path / "deeper.py"
    file.write_text(
        "from dllm_jax.strategies import blocks, sampling\n\n\ndef step(forward, state):\n"
        "    return blocks.denoise(forward, blocks.open_next(state), rule)\n\n\n"
        "def rule(stats, state, holes):\n    return sampling.margin(stats) > 0.5\n"
    )
    strategy = load_strategy(f"{file}:step", **SIZES)
    error = failure(lambda: run_script(strategy, [7] * 4, **SCRIPT))
    assert one_line(error) == (
        "margin needs two tokens a cell and has 0; predict with num_top=2 " + f"({file}:9)"
    )


def test_an_error_while_a_file_is_loaded_names_its_line(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import math\n\nhalf = math.sqr(0.25)\n")
    error = failure(lambda: load_strategy(f"{file}:step"))
    assert "has no attribute 'sqr'" in str(error)
    assert str(error).endswith(f"({file}:3)); mend the file")


def test_a_misspelled_name_in_a_file_is_told_the_nearest(tmp_path):
    file = tmp_path / "named.py"
    file.write_text("def surest_two(forward, state):\n    return state\n")
    with pytest.raises(ValueError, match="has no 'surest_to'; did you mean 'surest_two'"):
        load_strategy(f"{file}:surest_to")


def test_an_error_of_our_own_has_no_line():
    error = failure(lambda: load_strategy("multi_bad"))
    assert one_line(error) == str(error)
    assert described(KeyError("x")) == "KeyError: 'x'"


@pytest.mark.parametrize("kind", [MultiBD, DMax])
@pytest.mark.parametrize(
    "value", ["x", "0.5", True, np.True_, float("nan"), -0.1, [0.5], {}, 10**400, 1j]
)
def test_a_knob_that_is_no_number_fails_when_the_strategy_is_made(kind, value):
    with pytest.raises(ValueError, match="accept_threshold"):
        kind(accept_threshold=value)
    with pytest.raises(ValueError, match="accept_threshold"):
        kind().replace(accept_threshold=value)


@pytest.mark.parametrize("kind", [MultiBD, BlockDiffusion, DMax])
def test_arrays_of_thresholds_are_numbers(kind):
    name = "add_block_threshold" if hasattr(kind, "add_block_threshold") else None
    field = name or next(f.name for f in dataclasses.fields(kind) if "knob" in f.metadata)
    each = jnp.linspace(0.1, 0.9, 3)
    made = jax.vmap(lambda value: kind(**{field: value}))(each)
    assert getattr(made, field).shape == (3,)
    with pytest.raises(ValueError, match="array of bool"):
        kind(**{field: each > 0.5})


def test_a_transformation_may_put_anything_into_a_strategy():
    named = jax.tree.map(lambda value: "leaf", MultiBD())
    assert named.accept_threshold == "leaf"
    assert jax.tree.structure(named) == jax.tree.structure(MultiBD())


def test_sizes_that_are_traced_are_refused_where_the_class_is_made():
    with pytest.raises(TypeError, match=r"Mine.block_size would be data.*pytree_node=False"):

        class Mine(Strategy):
            block_size: int = 4
            buffer_size: int = 1

            def step(self, forward, state):
                raise NotImplementedError


def plain(forward, state):
    """`multi_bd` with its numbers written down."""

    def rule(stats, state, holes):
        sure = sampling.above(stats, 0.75) & holes
        return sure | sampling.forced_top1(stats, state, 0.5)

    return blocks.denoise(forward, blocks.open_next(state, 0.25), rule)


@pytest.mark.slow
def test_rules_take_plain_numbers():
    knobs = MultiBD(0.75, add_block_threshold=0.25, semi_complete_threshold=0.5, **SIZES)
    written = run_script(as_strategy(plain, **SIZES), [7] * 4, **SCRIPT)
    assert written == run_script(knobs, [7] * 4, **SCRIPT)
    assert len(written.output) == 12


@pytest.mark.long
@pytest.mark.parametrize("rule", ["leftmost_sure", "entropy_bounded", "factor_bounded"])
def test_rules_of_one_number_take_it_plain(rule):
    def accept(threshold):
        return lambda stats, state, holes: getattr(sampling, rule)(stats, threshold, holes)

    def step(forward, state):
        return blocks.denoise(forward, blocks.open_next(state), accept(0.5))

    found = run_script(as_strategy(step, **SIZES), [7] * 4, **SCRIPT)
    assert found.finish_reason == "length"


class Written(FullSequence):
    """Its knob is a number of the program."""

    accept_threshold: float = struct.field(pytree_node=False, default=0.5)


@pytest.mark.long
def test_timesteps_take_a_plain_number():
    how: Any = {"remasking": "maskgit_plus", "steps": 30, "block_size": 4, "buffer_size": 4}
    knob = run_script(FullSequence(accept_threshold=0.5, **how), [7] * 4, **SCRIPT)
    assert run_script(Written(**how), [7] * 4, **SCRIPT) == knob
    certain = run_script(Written(accept_threshold=1.0, **how), [7] * 4, **SCRIPT)
    assert certain.nfe > knob.nfe  # a forward may fill nothing


def test_a_knob_bounded_by_none_is_refused():
    class Bounded(BlockDiffusion):
        least: float = knob(0.1, 0.0, 1.0, up_to="most")

    with pytest.raises(ValueError, match="up_to='most' of least names no knob; use one of"):
        Bounded()


def test_a_threshold_without_an_axis_is_refused():
    several: Any = jnp.ones(1)

    def step(forward, state):
        return blocks.denoise(forward, blocks.open_next(state, several), lambda s, t, h: h)

    with pytest.raises(ValueError, match=r"shape \(1,\) does not say its axis"):
        run_script(as_strategy(step, **SIZES), [7] * 4, **SCRIPT)
