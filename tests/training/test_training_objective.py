"""Proves the training objective says what a decoder will see.

Every noisy row's logits equal a plain block-causal forward over the composed sequence (clean text
before the noise group, noisy blocks from there on), for every block size and group size drawn; and
the noise has the shares its configuration states.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.models import dense, reference
from dllm_jax.training import objective

pytestmark = pytest.mark.long

CFG = dense.DenseConfig(
    vocab_size=40, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    ffn_size=48, rope_theta=1e4, mask_token_id=1,
)  # fmt: skip
IS_DIGIT = jnp.arange(40) < 15
T = 48
DRAW = jax.jit(objective.draw_noise, static_argnums=1)
LOGITS = jax.jit(objective.noisy_logits, static_argnums=(1, 4))


@pytest.fixture(autouse=True)
def rank_promotion():
    with jax.numpy_rank_promotion("allow"):  # dllm_jax.models promotes ranks
        yield


def draw(rows: int, seed: int = 0, **changes: object) -> tuple[jax.Array, objective.Noise]:
    rng = np.random.default_rng(seed)
    tokens = jnp.asarray(rng.integers(2, 40, (rows, T)), jnp.int32)
    prompt = jnp.asarray(rng.integers(3, 20, rows), jnp.int32)
    cfg = objective.NoiseConfig(**changes)
    return tokens, DRAW(jax.random.key(seed), cfg, tokens, prompt, prompt + 20, IS_DIGIT)


def test_noisy_rows_equal_a_block_causal_forward_over_the_composed_sequence() -> None:
    tokens, noise = draw(12)
    params = dense.init_params(jax.random.key(3), CFG, jnp.float32)
    got = LOGITS(params, CFG, tokens, noise, jnp.float32)
    block, first, masked = (np.asarray(x) for x in (noise.block, noise.first, noise.masked))
    clean = np.asarray(tokens)
    logits_of = jax.jit(reference.dense_logits, static_argnums=1)
    compared = 0
    for row in range(12):
        same = np.equal(block[row][:, None], block[row][None, :])
        causal = block[row][None, :] < block[row][:, None]
        for group in np.unique(first[row]):
            in_group = first[row] == group
            ids = np.where(masked[row], CFG.mask_token_id, clean[row])
            ids = np.where(block[row] < group, clean[row], ids)
            want = logits_of(params, CFG, jnp.asarray(ids)[None], jnp.asarray(same | causal)[None])
            want = np.asarray(want)[0][in_group]
            want[:, CFG.mask_token_id] = -np.inf
            np.testing.assert_allclose(np.asarray(got)[row][in_group], want, atol=2e-5)
            compared += in_group.sum()
    assert compared == 12 * T
    assert len(np.unique(first - block)) > 2  # groups of several blocks were among them


def test_a_noisy_token_changes_no_row_outside_its_view() -> None:
    tokens, noise = draw(12, seed=1)
    params = dense.init_params(jax.random.key(3), CFG, jnp.float32)
    base = LOGITS(params, CFG, tokens, noise, jnp.float32)
    # a masked token: only the clean half knows it
    hidden = np.argwhere(np.asarray(noise.masked))[5]
    row, at = int(hidden[0]), int(hidden[1])
    other = LOGITS(params, CFG, tokens.at[row, at].add(1), noise, jnp.float32)
    moved = np.abs(np.nan_to_num(np.asarray(base - other)[row])).max(axis=1) > 1e-6
    sees_clean = np.asarray(noise.first)[row] > np.asarray(noise.block)[row, at]
    assert not moved[~sees_clean].any()  # in its own group the hidden token must not leak
    assert moved[sees_clean].all() or not sees_clean.any()


def test_noise_follows_its_configuration() -> None:
    _, noise = draw(600, seed=2, full_share=0.0)
    block, first, masked = (np.asarray(x) for x in (noise.block, noise.first, noise.masked))
    sizes = np.sum(block == 0, axis=1)
    for size, share in zip((4, 8, 16, 32), (0.05, 0.15, 0.20, 0.60), strict=True):
        assert abs(np.mean(sizes == size) - share) < 0.07
    assert (first <= block).all()
    assert (block - first).max() == 3
    weight = np.asarray(noise.weight)
    assert (weight[~masked] == 0).all()
    assert (weight[masked] > 0).all()
    uniform = draw(600, seed=3, rule_shares=(1.0, 0.0, 0.0), chained_share=0.0, full_share=0.0)[1]
    own = np.arange(T)[None] >= 20
    assert abs(np.asarray(uniform.masked)[:, 20:].mean() - 0.5) < 0.03
    chained = draw(
        600, seed=3, rule_shares=(1.0, 0.0, 0.0), chained_share=1.0, full_share=0.0,
        group_shares=(0.0, 0.0, 0.0, 1.0), block_shares=(0.0, 1.0, 0.0, 0.0),
    )[1]  # fmt: skip
    depth = np.asarray(chained.block - chained.first)
    ratio = [np.asarray(chained.masked)[(depth == d) & own].mean() for d in range(4)]
    assert ratio == sorted(ratio)
    assert ratio[3] > 0.85


def test_loss_weights_bound_the_inverse_ratio_and_discount_what_follows_the_end() -> None:
    _, noise = draw(50, seed=4, full_share=1.0, rule_shares=(1.0, 0.0, 0.0))
    weight, pos = np.asarray(noise.weight), np.arange(T)
    length = np.random.default_rng(4)
    length.integers(2, 40, (50, T))
    ends = length.integers(3, 20, 50) + 20
    masked = np.asarray(noise.masked)
    for row in range(50):
        late = pos // 32 > (ends[row] - 1) // 32
        np.testing.assert_allclose(weight[row][masked[row] & ~late], 1 / 1.1, rtol=1e-5)
        np.testing.assert_allclose(weight[row][masked[row] & late], 0.05 / 1.1, rtol=1e-5)


def test_the_mask_token_is_never_predicted() -> None:
    tokens, noise = draw(12, seed=5)
    params = dense.init_params(jax.random.key(0), CFG, jnp.float32)
    logits = LOGITS(params, CFG, tokens, noise, jnp.float32)
    assert np.isneginf(np.asarray(logits)[..., CFG.mask_token_id]).all()
    loss = jax.jit(objective.loss, static_argnums=(1, 5))
    value, _ = loss(params, CFG, tokens, noise, IS_DIGIT, jnp.float32)
    assert float(value) == pytest.approx(np.log(39), rel=0.05)
