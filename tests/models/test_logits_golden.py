"""Logits agree with torch and transformers, for checkpoints loaded through the public door.

Each folder under `golden/` was written by `make_golden.py`: tensor names, config spellings and
logits all come from transformers' Qwen3, none of them from code of ours. What is proven: the weight
table (with query heads != width, grouped heads, shards, tying), and every line of the arithmetic,
under the three masks. Float32, highest matmul precision, differences of at most 1e-4.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.convert import convert, load_params

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-4
MASKS = ("full", "block_causal", "causal")


@pytest.fixture(scope="module", params=["sdar", "qwen3"])
def case(request):
    folder = GOLDEN / request.param
    return dj.load(folder, dtype="float32"), np.load(folder / "logits.npz")


@pytest.mark.versions
@pytest.mark.parametrize("attention", MASKS)
def test_logits_agree_with_transformers(case, attention):
    model, golden = case
    with jax.default_matmul_precision("highest"):
        logits = model.logits(golden["token_ids"], attention, block_size=4)
    assert logits.dtype == jnp.float32
    assert np.std(golden[attention]) > 1  # the comparison is of something
    np.testing.assert_allclose(logits, golden[attention], rtol=0, atol=TOLERANCE)


def test_masks_differ(case):
    _, golden = case
    for a, b in (("full", "causal"), ("full", "block_causal"), ("block_causal", "causal")):
        assert np.abs(golden[a] - golden[b]).max() > 100 * TOLERANCE


def test_block_size_defaults_to_the_familys(case):
    model, golden = case
    kind = {"sdar": "block_causal", "qwen3": "causal"}[model.defaults.family]
    with jax.default_matmul_precision("highest"):
        logits = model.logits(golden["token_ids"])
    np.testing.assert_allclose(logits, golden[kind], rtol=0, atol=TOLERANCE)


def test_logits_survive_conversion(case, tmp_path):
    model, golden = case
    folder = convert(GOLDEN / model.defaults.family, tmp_path / "converted", dtype="auto")
    again = dj.load(folder, dtype="float32")
    with jax.default_matmul_precision("highest"):
        logits = again.logits(golden["token_ids"], "full")
    np.testing.assert_allclose(logits, golden["full"], rtol=0, atol=TOLERANCE)
    assert (again.config, again.defaults) == (model.config, model.defaults)


@pytest.mark.parametrize("swap", ["gate_up", "kv", "heads", "rope_pairs"])
def test_golden_files_notice_a_wrong_table(swap):
    """A mistake that no shape betrays changes the logits by far more than the tolerance."""
    model, golden = dj.load(GOLDEN / "sdar", dtype="float32"), np.load(GOLDEN / "sdar/logits.npz")
    params, _ = load_params(GOLDEN / "sdar", "float32")
    for layer in params["layers"]:
        fused = layer["wqkv"]
        if swap == "gate_up":
            layer["w_gate_up"] = layer["w_gate_up"][:, :, ::-1]
        elif swap == "kv":
            layer["wqkv"] = np.concatenate([fused[:, :, :-2], fused[:, :, :-3:-1]], axis=2)
        elif swap == "heads":
            layer["wqkv"] = np.concatenate([fused[:, ::-1, :-2], fused[:, :, -2:]], axis=2)
        else:
            layer["wqkv"] = np.concatenate([fused[:, :, :-2, ::-1], fused[:, :, -2:]], axis=2)
    broken = model.replace(params=jax.tree.map(jnp.asarray, params))
    difference = np.abs(broken.logits(golden["token_ids"], "full") - golden["full"]).max()
    assert difference > 1000 * TOLERANCE
