"""Proves the training of drafters: the loss of N anchors in one pass is that of N separate passes.

A pass is `oracles/draft_model.py`'s, NumPy on the draft's file, which knows no training (T17 of the
design), for every kind of layer. Besides: which tokens can change a block, which cells weigh what,
where anchors fall, and that epochs hold every answer once and resume anywhere.
"""

import dataclasses
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.api.drafts import with_target
from dllm_jax.models.dflash import DFlashConfig
from dllm_jax.models.quantization import with_quantized_head
from dllm_jax.training import dflash, draft_objective
from tests.oracles.checkpoints import write_tiny
from tests.oracles.draft_files import VARIANTS, write_draft
from tests.oracles.draft_model import draft_hidden

pytestmark = pytest.mark.long

B, T, N, MASK, GAMMA = 2, 14, 4, 47, 2.0


@pytest.fixture(autouse=True)
def _exact():
    with jax.numpy_rank_promotion("allow"), jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        write_tiny("qwen3", Path(name) / "target", seed=40)
        for variant in VARIANTS:
            write_draft(Path(name) / variant, variant)
        yield Path(name)


@pytest.fixture(scope="module")
def target(folder):
    return dj.load(folder / "target", dtype="float32")


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 44, (B, T)).astype(np.int32)
    anchors = np.array([[3, 5, 9, 11], [4, 4, 7, 8]], np.int32)
    valid = np.array([[True] * 4, [True, True, True, False]])
    return tokens, np.array([14, 11], np.int32), anchors, valid


LOSS = jax.jit(draft_objective.loss, static_argnums=1)
LOGITS = jax.jit(draft_objective.block_logits, static_argnums=1)
FEATURES = jax.jit(draft_objective.features, static_argnums=2)


def config_of(target: dj.Model, draft: dj.Model) -> DFlashConfig:
    config = with_target(target, draft).config
    assert isinstance(config, DFlashConfig)
    return config


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_of_many_anchors_is_that_of_separate_passes(folder, target, texts, variant) -> None:
    tokens, length, anchors, valid = texts
    draft = dj.load(folder / variant, dtype="float32")
    cfg = config_of(target, draft)
    S = cfg.block_size
    value, metrics = LOSS(draft.params, cfg, target, tokens, length, anchors, valid, GAMMA)
    features = np.asarray(FEATURES(target, tokens, cfg.target_layer_ids), np.float64)
    table, head = (np.asarray(target.params[k], np.float64) for k in ("embed", "lm_head"))
    cost = weight = first = accepted = 0.0
    for b, k in np.argwhere(valid):
        a = anchors[b, k]
        rows = table[[tokens[b, a], *[MASK] * (S - 1)]]
        logits = draft_hidden(folder / variant, features[b, :a], rows) @ head.T
        run = True
        for j in range(1, min(S, length[b] - a)):
            truth, w = tokens[b, a + j], np.exp(-(j - 1) / GAMMA)
            cost += w * (np.log(np.exp(logits[j]).sum()) - logits[j, truth])
            weight += w
            run = run and logits[j].argmax() == truth
            accepted += run
            first += j == 1 and run
    np.testing.assert_allclose(value, cost / weight, rtol=1e-5)
    np.testing.assert_allclose(metrics["accepted"], 1 + accepted / valid.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["first_accuracy"], first / valid.sum(), rtol=1e-5)


def test_a_block_sees_its_anchor_and_what_comes_before_it(folder, target, texts) -> None:
    """Not its own tokens, not the anchor's state, and nothing of other blocks."""
    tokens, _, anchors, _ = texts
    draft = dj.load(folder / "full", dtype="float32")
    cfg = config_of(target, draft)

    def logits(tokens: np.ndarray, anchors: np.ndarray) -> np.ndarray:
        taps = FEATURES(target, tokens, cfg.target_layer_ids)
        return np.asarray(LOGITS(draft.params, cfg, target, taps, tokens, anchors))

    base = logits(tokens, anchors)
    for at in (2, 5, 6):
        other = tokens.copy()
        other[0, at] += 1
        moved = np.abs(logits(other, anchors)[0] - base[0]).max(axis=(1, 2)) > 1e-6
        assert moved.tolist() == (anchors[0] >= at).tolist()
    alone = anchors.copy()
    alone[:, 1:] = 12
    np.testing.assert_allclose(logits(tokens, alone)[:, 0], base[:, 0], atol=1e-5)


def test_a_targets_head_in_8_bits_is_taken_for_what_it_stands_for(folder, target, texts) -> None:
    tokens, _, anchors, _ = texts
    draft = dj.load(folder / "full", dtype="float32")
    cfg = config_of(target, draft)
    taps = FEATURES(target, tokens, cfg.target_layer_ids)
    small = target.replace(params=with_quantized_head(target.params))
    head = small.params["lm_head"]
    wide = np.asarray(head.values, np.float32) * np.asarray(head.scales)[:, None]
    wide = target.replace(params=target.params | {"lm_head": jnp.asarray(wide)})
    got, want = (LOGITS(draft.params, cfg, one, taps, tokens, anchors) for one in (small, wide))
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_anchors_fall_in_the_response_and_have_a_token_behind_them() -> None:
    prompt = jnp.array([3, 10, 5, 7], jnp.int32)
    length = jnp.array([40, 12, 6, 20], jnp.int32)  # the third has no token after its first
    draw = jax.jit(draft_objective.draw_anchors, static_argnums=3)
    seen = [set() for _ in range(4)]
    for seed in range(40):
        anchors, valid = draw(jax.random.key(seed), prompt, length, 4)
        assert np.asarray(valid).all(axis=1).tolist() == [True, True, False, True]
        for row in (0, 1, 3):
            seen[row] |= set(np.asarray(anchors)[row].tolist())
        assert (np.diff(np.asarray(anchors)[0]) > 0).all()  # one in each part
    assert seen[0] == set(range(3, 39))
    assert seen[1] == {10}
    assert seen[3] == set(range(7, 19))


def test_epochs_hold_every_answer_once_and_resume_anywhere() -> None:
    answers = {"length": np.arange(10), "prompt_len": np.arange(10) + 100}
    feed = dflash.epochs(answers, 3, seed=1, first=0)
    batches = [next(feed) for _ in range(9)]
    for epoch in range(3):
        ids = np.concatenate([b["length"] for b in batches[3 * epoch : 3 * epoch + 3]])
        assert len(set(ids.tolist())) == 9
    assert any(
        (b["length"] != c["length"]).any() for b, c in zip(batches, batches[3:], strict=False)
    )
    for first in (1, 3, 5):
        other = dflash.epochs(answers, 3, seed=1, first=first)
        for wanted in batches[first : first + 3]:
            got = next(other)
            assert (got["length"] == wanted["length"]).all()
            assert (got["prompt_len"] == wanted["length"] + 100).all()


def test_defaults_of_a_draft_come_from_its_target(target) -> None:
    assert dflash.spread(36, 5) == (1, 9, 18, 26, 34)
    assert dflash.spread(6, 3) == (1, 2, 4)
    assert dflash.spread(1, 3) == (0,)
    config = dflash.TrainConfig(mask_token_id=MASK, target_layer_ids=(2, 0), block_size=8)
    cfg = dflash.draft_config(config, target)
    assert (cfg.hidden_size, cfg.features, cfg.vocab_size) == (40, 80, 50)
    for wrong, words in (
        ({"mask_token_id": 50}, r"mask_token_id=50 must be a row of the target's embedding of 50"),
        ({"target_layer_ids": (0, 3)}, r"target_layer_ids=\[0, 3\] must be below the target's 3"),
    ):
        with pytest.raises(ValueError, match=words):
            dflash.draft_config(dataclasses.replace(config, **wrong), target)
