"""The training objective: noisy blocks and their clean text in one pass of the model.

Data flow: tokens -> noise (masked positions and groups of blocks) -> rows [noisy ; clean] -> loss
on the masked tokens. Block `b` of a row sees the clean text before its noise group and the noisy
blocks of the group up to itself, exactly as a decoder with that many open blocks. Group size 1 is
block diffusion (Arriola et al. 2025, arXiv 2503.09573, §3; SDAR, arXiv 2510.06303); larger groups
are multi-block teacher forcing.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from dllm_jax.models import dense, reference

_CLOSING_BLOCK = 32  # tokens past the block of this size with the end have little weight
_CLOSING_WEIGHT = 0.05
_RATIO_FLOOR = 0.1  # loss weight of a block is 1 / (masked share + floor), the ELBO's 1/t bounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """The noise of rows; every choice is drawn per row.

    Attributes:
        block_sizes: Block sizes that the model learns, each a multiple of the first.
        block_shares: Share of each block size.
        group_shares: Shares of noise groups of 1, 2, ... blocks.
        chained_share: Share of rows whose blocks get noisier along a group, as in a window that
            decodes several blocks at once; in other rows ratios are independent.
        rule_shares: Shares of the rules that choose masked tokens: uniform; digits and words with
            separate ratios; digits hidden after a cut and shown before it, which is the input of a
            decoder that is sure of the wording.
        full_share: Share of blocks that are masked entirely.
    """

    block_sizes: tuple[int, ...] = (4, 8, 16, 32)
    block_shares: tuple[float, ...] = (0.05, 0.15, 0.20, 0.60)
    group_shares: tuple[float, ...] = (0.4, 0.2, 0.1, 0.3)
    chained_share: float = 0.5
    rule_shares: tuple[float, float, float] = (0.4, 0.3, 0.3)
    full_share: float = 0.1


class Noise(struct.PyTreeNode):
    """The noise of a batch of rows.

    Attributes:
        block: Block number of each position.
        first: First block of the noise group of each position.
        masked: Positions whose token is replaced by the mask.
        weight: Loss weight, 0 at positions that are not masked.
    """

    block: Int[Array, "B T"]
    first: Int[Array, "B T"]
    masked: Bool[Array, "B T"]
    weight: Float[Array, "B T"]


def draw_noise(
    key: PRNGKeyArray,
    cfg: NoiseConfig,
    tokens: Int[Array, "B T"],
    prompt_len: Int[Array, " B"],
    length: Int[Array, " B"],
    is_digit: Bool[Array, " V"],
) -> Noise:
    """Draw block size, grouping, ratios and masks of every row.

    Args:
        length: Tokens up to and including the first end-of-sequence token.
        is_digit: Which vocabulary entries are digits.
    """
    B, T = tokens.shape
    keys = iter(jax.random.split(key, 12))
    rows, pos = (B, 1), jnp.arange(T)[None, :]
    max_blocks = T // cfg.block_sizes[0]

    def choose(values: tuple, shares: tuple) -> Array:
        return jax.random.choice(next(keys), jnp.array(values), rows, p=jnp.array(shares))

    def per_block(values: Array, block: Array) -> Array:  # [B, blocks] -> [B, T]
        return jnp.take_along_axis(values, block, axis=1)

    block_size = choose(cfg.block_sizes, cfg.block_shares)
    block = pos // block_size
    size = choose(tuple(range(1, len(cfg.group_shares) + 1)), cfg.group_shares)
    phase = jax.random.randint(next(keys), rows, 0, size)
    unclipped = (block + phase) // size * size - phase
    first = jnp.maximum(unclipped, 0)

    # chained: p_j = 1 - prod_{i <= j in the group} (1 - u_i), never falling along the group
    u = jax.random.uniform(next(keys), (B, max_blocks))
    u = jnp.where(jax.random.uniform(next(keys), u.shape) < cfg.full_share, 1.0, u)
    log_keep = jnp.maximum(jnp.log1p(-u), -50.0)
    before = jnp.cumsum(log_keep, axis=1) - log_keep
    chained = 1 - jnp.exp(per_block(before + log_keep, block) - per_block(before, first))
    is_chained = jax.random.uniform(next(keys), rows) < cfg.chained_share
    ratio = jnp.where(is_chained, chained, per_block(u, block))

    # separate ratios for words; and a cut through each group
    other = per_block(jax.random.uniform(next(keys), (B, max_blocks)), block)
    where_cut = per_block(jax.random.uniform(next(keys), (B, max_blocks)), first)
    group_start = first * block_size
    group_end = jnp.minimum((unclipped + size) * block_size, T)
    extent = (group_end - group_start).astype(jnp.float32)
    cut = group_start.astype(jnp.float32) + where_cut * extent
    digit = is_digit[tokens]
    rule = choose((0, 1, 2), cfg.rule_shares)
    word_ratio = jnp.where(rule == 0, ratio, jnp.where(rule == 1, other, other**2))
    right_of_cut = (pos.astype(jnp.float32) >= cut).astype(jnp.float32)
    digit_ratio = jnp.where(rule == 2, right_of_cut, ratio)
    chance = jnp.where(digit, digit_ratio, word_ratio)
    chance = jnp.where((per_block(u, block) == 1.0) & (rule != 2), 1.0, chance)
    own = pos >= prompt_len[:, None]
    masked = own & (jax.random.uniform(next(keys), (B, T)) < chance)

    in_block = jax.nn.one_hot(block, max_blocks, dtype=jnp.float32)
    counts = jnp.einsum("btn,btc->bnc", in_block, jnp.stack([masked, own], -1).astype(jnp.float32))
    share = per_block(counts[..., 0] / jnp.maximum(counts[..., 1], 1.0), block)
    late = pos // _CLOSING_BLOCK > (length[:, None] - 1) // _CLOSING_BLOCK
    weight = masked.astype(jnp.float32) / (share + _RATIO_FLOOR)
    weight = weight * jnp.where(late, _CLOSING_WEIGHT, 1.0)
    return Noise(block=block, first=first, masked=masked, weight=weight)


def visible(noise: Noise) -> tuple[Bool[Array, "B T U"], Bool[Array, "B T T"]]:
    """The masks of noisy rows over [noisy ; clean] (U = 2T), and of clean rows over clean."""
    q, k = noise.block[:, :, None], noise.block[:, None, :]
    first = noise.first[:, :, None]
    noisy_to_noisy = (first <= k) & (k <= q)
    return jnp.concatenate([noisy_to_noisy, k < first], axis=-1), k <= q


def noisy_logits(
    params: Any,
    cfg: dense.DenseConfig,
    tokens: Int[Array, "B T"],
    noise: Noise,
    dtype: Any = jnp.bfloat16,
) -> Float[Array, "B T V"]:
    """Logits of the noisy rows without the mask token, as in decoding."""
    B, T = tokens.shape
    to_both, to_clean = visible(noise)
    ids = jnp.concatenate([jnp.where(noise.masked, cfg.mask_token_id, tokens), tokens], axis=1)
    # a product with one-hot rows: the gradient of a gather is a slow scatter into few rows
    x = jax.nn.one_hot(ids, cfg.vocab_size, dtype=dtype) @ params["embed"].astype(dtype)

    def attend(_: int, q: Array, k: Array, v: Array) -> Array:
        noisy = reference.attention(q[:, :T], k, v, to_both)
        clean = reference.attention(q[:, T:], k[:, T:], v[:, T:], to_clean)
        return jnp.concatenate([noisy, clean], axis=1)

    pos = jnp.arange(T)
    positions = jnp.broadcast_to(jnp.concatenate([pos, pos]), (B, 2 * T))
    hidden, _ = dense.trunk(params, cfg, x, positions, attend)
    logits = dense.unembed(params, cfg, hidden[:, :T])
    is_mask = (jnp.arange(cfg.vocab_size) == cfg.mask_token_id)[None, None]
    return jnp.where(is_mask, -jnp.inf, logits)


def loss(
    params: Any,
    cfg: dense.DenseConfig,
    tokens: Int[Array, "B T"],
    noise: Noise,
    is_digit: Bool[Array, " V"],
    dtype: Any = jnp.bfloat16,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Weighted cross entropy of the masked tokens, and accuracies for the log."""
    logits = noisy_logits(params, cfg, tokens, noise, dtype)
    one_hot = jax.nn.one_hot(tokens, cfg.vocab_size, dtype=bool)
    right = jnp.sum(jnp.where(one_hot, logits, 0.0), axis=-1)
    right = jnp.where(tokens == cfg.mask_token_id, 0.0, right)
    cost = jax.nn.logsumexp(logits, axis=-1) - right
    total = jnp.sum(noise.weight)
    hit = (jnp.argmax(logits, axis=-1) == tokens) & noise.masked
    digits = noise.masked & is_digit[tokens]

    def share(of: Array, among: Array) -> Array:
        return jnp.sum(of, dtype=jnp.float32) / jnp.maximum(jnp.sum(among, dtype=jnp.float32), 1.0)

    metrics = {
        "token_accuracy": share(hit, noise.masked),
        "digit_accuracy": share(hit & digits, digits),
    }
    return jnp.sum(cost * noise.weight) / jnp.maximum(total, 1.0), metrics
