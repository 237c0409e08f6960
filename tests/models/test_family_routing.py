"""Which experts a row goes to is what float64 says, near ties and block routing included.

`oracles/families.py` chooses in float64, of equal scores the lowest expert.
"""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.models import moe, reference
from dllm_jax.models.moe import MoEConfig
from tests.golden.folders import read_tensors, write_tensors
from tests.oracles import families
from tests.oracles.checkpoints import write_tiny
from tests.oracles.families import reference_logits, run, visibility

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("highest_precision")]

TOLERANCE = 1e-4
ROWS, WIDTH, EXPERTS = 64, 40, 12
LENGTH = 10


def router_of(**changes) -> tuple[MoEConfig, SimpleNamespace]:
    """A router's facts, as the model and as the reference hold them."""
    cfg = MoEConfig(
        vocab_size=50,
        hidden_size=WIDTH,
        num_layers=1,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=56,
        num_experts=EXPERTS,
        experts_per_token=3,
        expert_size=24,
        moe_layers=(True,),
        **changes,
    )
    facts = SimpleNamespace(
        kind="LLaDA2MoeModelLM" if cfg.score == "sigmoid" else "Qwen3MoeForCausalLM",
        chosen=cfg.experts_per_token,
        normalise=cfg.norm_topk,
        scale=cfg.routed_scale,
        groups=cfg.num_groups,
        kept_groups=cfg.groups_per_token,
        capacity=cfg.expert_capacity,
        routing_block=cfg.routing_block,
    )
    return cfg, facts


ROUTERS = {
    "softmax": {},
    "sigmoid": {"score": "sigmoid", "routed_scale": 2.5},
    "groups": {"score": "sigmoid", "num_groups": 3, "groups_per_token": 2},
    "blocks": {"score": "sigmoid", "expert_capacity": 7, "routing_block": 4},
}


def both(cfg, facts, x, router, bias, positions=None, live=None):
    """The model's choice and the reference's, of the same float32 numbers."""
    positions = np.arange(len(x)) if positions is None else positions
    ids, weights = moe.route(
        cfg,
        jnp.asarray(x)[None],
        jnp.asarray(router),
        None if bias is None else jnp.asarray(bias),
        jnp.asarray(positions)[None],
        None if live is None else jnp.asarray(live)[None],
    )
    layer = {"mlp.gate.weight": router.T.astype(np.float64)}
    if bias is not None:
        layer["mlp.gate.expert_bias"] = bias.astype(np.float64)
    wanted = families.route(facts, x.astype(np.float64), layer, positions, live)
    return np.asarray(ids)[0], np.asarray(weights)[0], wanted


def twins(kind: str, seed: int):
    """Rows and a router of which each expert has a twin that scores 1e-6 to 1e-5 apart.

    Twins differ by the weight of one component, which is 1 in every row. As three experts are
    chosen, every row's choice ends between two twins (or between groups and blocks of them).
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    x[:, -1] = 1
    router = rng.normal(size=(WIDTH, EXPERTS)) / np.sqrt(WIDTH)
    router[:, 1::2] = router[:, ::2]
    # The slope of a score is far below 1: a quarter at most, a share of the law in a softmax.
    router[-1] += rng.permuted(np.tile([0.0, 4e-5], (EXPERTS // 2, 1)), axis=1).reshape(-1)
    bias = None
    if kind != "softmax":
        bias = np.repeat(rng.normal(size=EXPERTS // 2) * 0.1, 2).astype(np.float32)
    return x, router.astype(np.float32), bias


def gaps(choice: np.ndarray, chosen: int) -> np.ndarray:
    """How far the last chosen expert of each row lies above the first that was not."""
    best = -np.sort(-choice, axis=1)
    return best[:, chosen - 1] - best[:, chosen]


@pytest.mark.parametrize("kind", ROUTERS)
def test_twins_are_told_apart(kind):
    cfg, facts = router_of(**ROUTERS[kind])
    for seed in range(3):
        x, router, bias = twins(kind, seed)
        ids, weights, wanted = both(cfg, facts, x, router, bias)
        gap = gaps(wanted.choice, 3)
        near = (gap > 1e-6) & (gap < 1e-5)
        assert near.mean() > 0.5, gap  # the ties are near, and float32 can tell
        np.testing.assert_array_equal(ids[near], wanted.ids[near])
        np.testing.assert_allclose(weights[near], wanted.weights[near], rtol=0, atol=1e-5)
        short = router.astype(ml_dtypes.bfloat16).astype(np.float32)
        rounded, _, _ = both(cfg, facts, x, short, bias)
        assert (rounded[near] != wanted.ids[near]).any(axis=1).mean() > 0.2


@pytest.mark.parametrize("kind", ROUTERS)
def test_equal_scores_take_the_lowest_expert(kind):
    """Small whole numbers, so that equal scores are equal in any arithmetic."""
    cfg, facts = router_of(**ROUTERS[kind])
    rng = np.random.default_rng(5)
    x = rng.integers(-1, 2, (ROWS, WIDTH)).astype(np.float32)
    router = np.zeros((WIDTH, EXPERTS), np.float32)
    router[:8] = rng.integers(-1, 2, (8, EXPERTS)) / 2
    bias = None if kind == "softmax" else np.zeros(EXPERTS, np.float32)
    ids, weights, wanted = both(cfg, facts, x, router, bias)
    assert (gaps(wanted.choice, 3) == 0).mean() > 0.2
    np.testing.assert_array_equal(ids, wanted.ids)
    np.testing.assert_allclose(weights, wanted.weights, rtol=0, atol=1e-6)


def test_a_capacity_of_all_experts_is_plain_top_k():
    cfg, facts = router_of(score="sigmoid", expert_capacity=EXPERTS, routing_block=4)
    plain, _ = router_of(score="sigmoid")
    x, router, bias = twins("sigmoid", 9)
    ids, weights, wanted = both(cfg, facts, x, router, bias)
    np.testing.assert_array_equal(ids, wanted.ids)
    others = both(plain, facts, x, router, bias)
    np.testing.assert_array_equal(ids, others[0])
    np.testing.assert_array_equal(weights, others[1])
    tight = dataclasses.replace(cfg, expert_capacity=4)
    assert (both(tight, facts, x, router, bias)[0] != ids).any()


@pytest.mark.parametrize("start", [0, 3, 32, 45])
def test_routing_blocks_lie_on_the_absolute_grid(start):
    """Windows begin anywhere; rows of a block choose together wherever the first row stands."""
    cfg, facts = router_of(**ROUTERS["blocks"])
    x, router, bias = twins("blocks", start)
    positions = start + np.arange(ROWS)
    live = np.random.default_rng(start).random(ROWS) < 0.6
    ids, _, wanted = both(cfg, facts, x, router, bias, positions, live)
    sure = live & (gaps(wanted.choice, 3) > 1e-6)
    assert sure.sum() > 20
    np.testing.assert_array_equal(ids[sure], wanted.ids[sure])
    assert (ids[~live] == EXPERTS).all()  # a dead row goes to no expert


# --- through a folder -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llada2", "sdar_moe"])
def test_a_folder_of_twins_gives_the_right_logits(tmp_path, family):
    """Twins whose biases differ by 4e-6 or, without those, their routers by 3e-5 of their size."""
    groups = {"n_group": 3} if family == "llada2" else {}
    folder = write_tiny(family, tmp_path, seed=11, **groups)
    tensors = read_tensors(folder)
    rng = np.random.default_rng(11)
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        tensors[name][1::2] = tensors[name][::2]
        sides = rng.permuted(np.tile([0.0, 1.0], (EXPERTS // 2, 1)), axis=1).reshape(-1)
        bias = name.replace("weight", "expert_bias")
        if bias in tensors:
            tensors[bias][1::2] = tensors[bias][::2]
            tensors[bias] += (4e-6 * sides).astype(np.float32)
        else:
            tensors[name] *= (1 + 3e-5 * sides).astype(np.float32)[:, None]
    write_tensors(folder, tensors)
    ids = rng.integers(0, 50, LENGTH)
    wanted = run(folder, ids, visibility("full", LENGTH))
    gap = np.concatenate([gaps(layer.choice, 3) for layer in wanted.routing.values()])
    assert gap.min() > 5e-7
    assert ((gap > 1e-6) & (gap < 1e-5)).mean() > 0.9
    logits = dj.load(folder, dtype="float32").logits(ids[None], "full")[0]
    np.testing.assert_allclose(logits, wanted.logits, rtol=0, atol=TOLERANCE)
    for name in [name for name in tensors if name.endswith(("expert_bias", "mlp.gate.weight"))]:
        tensors[name] = tensors[name].astype(ml_dtypes.bfloat16).astype(np.float32)
    write_tensors(folder, tensors)
    rounded = reference_logits(folder, ids, visibility("full", LENGTH))
    assert np.abs(rounded - wanted.logits).max() > 1000 * TOLERANCE


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """A folder whose rows use 5 experts of 12 in each block of 5 tokens, and its model."""
    folder = tmp_path_factory.mktemp("blocks")
    write_tiny("llada2_2", folder, seed=4, block_size=5, expert_capacity=5)
    return folder, dj.load(folder, dtype="float32")


def rows_of(model, ids, live, start=(0, 0)):
    """Logits [B T V] of the live rows, which see each other; rows stand at `start` and after."""
    ids, live = np.asarray(ids), np.asarray(live)
    positions = jnp.asarray(start)[:, None] + jnp.arange(ids.shape[1])[None]
    seen = jnp.broadcast_to(live[:, None], (*ids.shape, ids.shape[1]))
    hidden, _ = model.arch.trunk(
        model.params,
        model.config,
        model.arch.embed(model.params, model.config, ids),
        positions,
        lambda _, q, k, v: reference.attention(q, k, v, seen),
        live=jnp.asarray(live),
    )
    return np.asarray(model.arch.unembed(model.params, model.config, hidden))


def test_padding_has_no_say_in_a_routing_block(blocks):
    """Texts of 6 and 9 tokens end inside a block; what is fed after them changes nothing."""
    folder, model = blocks
    ids = np.random.default_rng(0).integers(0, 50, (2, LENGTH))
    lengths = np.array([6, 9])
    live = np.arange(LENGTH)[None] < lengths[:, None]
    logits = rows_of(model, ids, live)
    others = rows_of(model, np.where(live, ids, (ids + 11) % 50), live)
    for row, length in enumerate(lengths):
        alone = reference_logits(folder, ids[row, :length], visibility("full", length))
        np.testing.assert_allclose(logits[row, :length], alone, rtol=0, atol=TOLERANCE)
        np.testing.assert_array_equal(logits[row, :length], others[row, :length])
    # Were the padding's say heard, the last block would choose otherwise.
    heard = [
        run(folder, row, np.broadcast_to(alive, (LENGTH, LENGTH)), live=said).logits[:length]
        for row, alive, length in zip(ids, live, lengths, strict=True)
        for said in (alive, None)
    ]
    assert max(np.abs(heard[i] - heard[i + 1]).max() for i in (0, 2)) > 1000 * TOLERANCE


def test_texts_of_a_batch_do_not_share_routing_blocks(blocks):
    """Each row of a batch, at positions of its own, is what it is alone."""
    folder, model = blocks
    ids = np.random.default_rng(1).integers(0, 50, (2, LENGTH))
    starts = (2, 40)  # the first inside a block
    logits = rows_of(model, ids, np.ones((2, LENGTH), bool), starts)
    for row, start in enumerate(starts):
        alone = reference_logits(folder, ids[row], visibility("full", LENGTH), start=start)
        np.testing.assert_allclose(logits[row], alone, rtol=0, atol=TOLERANCE)
    swapped = rows_of(model, ids[::-1], np.ones((2, LENGTH), bool), starts[::-1])[::-1]
    np.testing.assert_allclose(logits, swapped, rtol=0, atol=1e-5)


def test_a_tight_capacity_changes_the_logits(blocks, tmp_path):
    """So the reference's blocks are of consequence, and the model's are not top-k."""
    folder, model = blocks
    ids = np.random.default_rng(1).integers(0, 50, LENGTH)
    loose = write_tiny(
        "llada2_2", tmp_path / "loose", seed=4, expert_capacity=EXPERTS, block_size=5
    )
    plain = write_tiny(
        "llada2", tmp_path / "plain", seed=4, rope_theta=3000000, n_group=1, topk_group=1
    )
    wanted = [reference_logits(f, ids, visibility("full", LENGTH)) for f in (folder, loose, plain)]
    np.testing.assert_array_equal(wanted[1], wanted[2])
    assert np.abs(wanted[0] - wanted[1]).max() > 1000 * TOLERANCE
    for source, logits in zip((folder, loose, plain), wanted, strict=True):
        found = model if source == folder else dj.load(source, dtype="float32")
        np.testing.assert_allclose(
            found.logits(ids[None], "full")[0], logits, rtol=0, atol=TOLERANCE
        )
