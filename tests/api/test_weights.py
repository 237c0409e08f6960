"""Proves that weights are replaced, and leave the device and come back, without a new program.

Texts after a swap are those of a fresh engine, and nothing of the old weights is read from the
cache (issue 50, item 6; rollouts.md of the design notes, section 5).
"""

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.api import weights
from tests.api.test_llm import CONFIG, GREEDY, PROMPTS, STRATEGY


def changed(model):
    """A model of the same shapes that answers otherwise."""
    head = model.params["embed"]
    return model.replace(params={**model.params, "embed": head.at[:, ::2].multiply(-0.5)})


@pytest.fixture(scope="module")
def model():
    return dj.load("builtin:tiny-sdar")


@pytest.fixture
def make(model):
    """A fresh engine of a model of its own arrays: those of an engine are deleted in a swap."""

    def make(of=model):
        own = of.replace(params=jax.tree.map(lambda leaf: leaf.copy(), of.params))
        return dj.LLM(own, STRATEGY, config=CONFIG, warm_up=False)

    return make


def texts(llm):
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1]]  # the second finds the first one's prefix
    return [one.outputs[0].text for one in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.long
def test_texts_after_a_swap_are_those_of_a_fresh_engine(model, make):
    other = changed(model)
    with make(other) as fresh:
        expected = texts(fresh)
    with make() as llm:
        before = texts(llm)
        assert before != expected
        runner, num = llm.engine.runner, len(llm.engine.runner.device.compiled)
        leaf = llm.model.params["embed"]
        copy = other.replace(params=jax.tree.map(lambda leaf: leaf.copy(), other.params))
        staged = weights.stage(llm, lambda: copy)
        assert texts(llm) == before  # staged, and not yet in use
        weights.replace(llm, staged)
        assert llm.engine.stats().num_pages_held == 0
        assert texts(llm) == expected
        assert leaf.is_deleted()
        assert (len(runner.device.compiled), llm.model.source) == (num, model.source)


@pytest.mark.long
def test_a_model_that_sleeps_is_on_the_host_and_wakes_as_it_was(make):
    with make() as llm:
        before, num = texts(llm), len(llm.engine.runner.device.compiled)
        leaves = jax.tree.leaves((llm.model.params, llm.engine.runner.state))
        held = weights.sleep(llm)
        assert all(leaf.is_deleted() for leaf in leaves)
        assert all(isinstance(array, np.ndarray) for array, _ in held)
        weights.wake(llm, held)
        assert texts(llm) == before
        assert len(llm.engine.runner.device.compiled) == num


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda m: m.replace(config=None), "of another config"),
        (lambda m: m.replace(params={**m.params, "more": m.params["embed"]}), "other tensors"),
        (
            lambda m: m.replace(params={**m.params, "embed": m.params["embed"][:9]}),
            "the engine has float32",
        ),
        (
            lambda m: m.replace(
                params={**m.params, "embed": m.params["embed"].at[7, 3].set(np.nan)}
            ),
            "['embed'] holds a value that is not finite",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_changes(model, make, spoil, said):
    with make() as llm:
        params = llm.model.params
        with pytest.raises(ValueError, match=said.replace("[", r"\[")):
            weights.stage(llm, lambda: spoil(model))
        assert llm.model.params is params
        inbox = llm.engine.inbox()
        inbox.add(dj.Request(prompt_token_ids=[1, 2, 3], params=GREEDY))
        with pytest.raises(RuntimeError, match="requests run"):
            weights.replace(llm, model)
        inbox.close()
