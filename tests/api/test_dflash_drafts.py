"""`DFlash` with drafts in their published form: what is read of them, and no token is changed.

A random draft is hardly ever right: one of the built-in pair is in test_examples.py.
"""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.api.drafts import bind_draft
from dllm_jax.strategies import AR, DFlash
from dllm_jax.strategies.core.needs import Needs
from tests.contract import models
from tests.oracles.draft_files import CONFIG, write_pair

pytestmark = pytest.mark.long

LAYERS = tuple(CONFIG["dflash_config"]["target_layer_ids"])
SIZE = CONFIG["dflash_config"]["block_size"]
PROMPTS = [list(range(1, 4)), list(range(5, 26)), list(range(30, 38))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("drafts"), "full", "mixed")


@pytest.fixture(scope="module")
def target(folder):
    return dj.load(folder / "target", dtype="float32")


def test_the_draft_says_block_and_layers(folder, target):
    bound, aux = bind_draft(DFlash(), str(folder / "full"), target)
    assert bound == DFlash(SIZE, LAYERS)
    assert bound.block_size == SIZE + 1  # a cell for the token after drafts all right
    assert bound.needs.hidden_layers == (3, 1)  # what layers 2 and 0 leave, in the draft's order
    assert list(aux) == ["draft"]


def test_what_the_strategy_says_of_the_block_stays(folder, target):
    bound, _ = bind_draft(DFlash(3, width=2), folder / "full", target)
    assert bound == DFlash(3, LAYERS, 2)


def test_other_layers_than_the_drafts_are_refused(folder, target):
    with pytest.raises(ValueError, match=r"target_layer_ids=\(0, 2\) are not \(2, 0\), which the"):
        bind_draft(DFlash(target_layer_ids=(0, 2)), str(folder / "full"), target)


def test_a_draft_that_nobody_asked_for_is_named(folder, target):
    draft = dj.load(folder / "full", dtype="float32")
    for given in (draft, folder / "full", str(folder / "full")):
        with pytest.raises(ValueError, match=f"draft='{folder / 'full'}' does not fit AR, which"):
            bind_draft(AR(), given, target)
    two: Any = SimpleNamespace(needs=Needs("whole_causal", aux=("draft", "judge")))
    for given in (draft, None):
        with pytest.raises(
            ValueError, match=r"needs 2 models beside its own, \('draft', 'judge'\); one"
        ):
            bind_draft(two, given, target)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (DFlash(1, LAYERS), "draft_block_size=1 leaves no cell to draft; use 2 or more"),
        (DFlash(4, LAYERS, 5), r"width=5 must be in \[1, 4\], the anchor and drafts of a block"),
        (DFlash(4, LAYERS, 0), r"width=0 must be in \[1, 4\]"),
        (DFlash(4, LAYERS, buffer_size=2), "buffer_size=2: DFlash drafts one block at a time"),
    ],
)
def test_sizes_that_cannot_be_are_refused(folder, target, strategy, message):
    with pytest.raises(ValueError, match=message):
        dj.generate(target, PROMPTS, strategy, draft=str(folder / "full"))


def bound(**fields):
    config: Any = SimpleNamespace(block_size=16, target_layer_ids=(2, 0))
    return DFlash(**fields).bind(config)


IN_BLOCK = "must be in [1, 16], the anchor and drafts of a block; choose it there"
NO_WHOLE = "must be a whole number; give one"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft_block_size": 0}, "draft_block_size=0 leaves no cell to draft; use 2 or more"),
        ({"draft_block_size": 4.0}, f"draft_block_size=4.0 {NO_WHOLE}"),
        ({"width": 99}, f"width=99 {IN_BLOCK}"),
        ({"width": "8"}, f"width='8' {NO_WHOLE}"),
        ({"width": 2.0}, f"width=2.0 {NO_WHOLE}"),
        ({"width": True}, f"width=True {NO_WHOLE}"),
        ({"break_even": -1.0}, "break_even=-1.0 is outside [0.0, inf]; choose a value inside it"),
        ({"target_layer_ids": [2, 1]}, "target_layer_ids=[2, 1] are not (2, 0), which the draft"),
    ],
)
def test_what_no_draft_can_have_is_refused_before_anything_is_compiled(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)) as reported:
        bound(**fields)
    assert "\n" not in str(reported.value)


def test_lists_are_as_good_as_tuples():
    assert bound(target_layer_ids=[2, 0]) == DFlash(16, (2, 0))


def test_a_strategy_without_layers_says_so():
    target = models.causal()
    with pytest.raises(ValueError, match="DFlash has no target_layer_ids"):
        dj.generate(target, PROMPTS, DFlash(4), draft=models.drafter(target))


@pytest.mark.slow
def test_an_engine_gives_the_tokens_of_ar(folder, target):
    config = dj.EngineConfig(max_num_seqs=2, max_model_len=64, page_size=16)
    params = [
        dj.SamplingParams(max_tokens=20, temperature=t, seed=i, n=n)
        for i, (t, n) in enumerate([(0.0, 1), (0.8, 3), (1.2, 2)])
    ]

    def texts(strategy, **draft):
        llm = dj.LLM(target, strategy, config=config, warm_up=False, **draft)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        return [[one.token_ids for one in output.outputs] for output in outputs]

    # A random one; left to itself the strategy gives it up before the engine has seen enough.
    with pytest.warns(UserWarning, match="hardly ever right") as reported:
        drafted = texts(DFlash(width=2), draft=str(folder / "full"))
    assert [one.filename for one in reported] == [__file__]
    assert drafted == texts(DFlash(), draft=str(folder / "full")) == texts(AR())


@pytest.mark.parametrize(
    ("strategy", "draft", "said"),
    [
        ("ar", "full", "does not fit AR, which uses no"),
        ("dflash", "target", "give a drafter, such as a DFlash draft"),
    ],
)
def test_the_command_asks_for_a_draft_that_fits(folder, fails, strategy, draft, said):
    words = ["generate", "w1 w2", "--raw", "--model", str(folder / "target"), "--dtype", "float32"]
    assert said in fails(1, *words, "--strategy", strategy, "--draft", str(folder / draft))


@pytest.mark.slow
def test_a_target_in_8_bits_has_its_own_tokens_with_a_draft(folder):
    """The draft knows other states: what it guesses is judged by the target all the same."""
    small = dj.load(folder / "target", dtype="float32", quantization="fp8")
    prompts = [[5, 9, 3, 8, 7], [4, 4, 6]]
    alone, drafted = (
        dj.generate(small, prompts, max_tokens=12, stop_token_ids=(), **more)
        for more in ({}, {"draft": folder / "full"})
    )
    assert small.quantization == "fp8"
    assert np.array_equal(alone.tokens[:, :12], drafted.tokens[:, :12])
    assert drafted.nfe.sum() <= alone.nfe.sum()
