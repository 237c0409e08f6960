"""From token statistics to the cells to accept: the rules that are the parts of a strategy.

Each takes statistics of the window and returns the cells to fill.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from . import blocks
from .forward import TokenStats
from .knobs import Threshold, at_token
from .state import DecodeState


def above(stats: TokenStats, threshold: Threshold) -> Bool[Array, "B K S"]:
    """Cells whose confidence is strictly above the threshold.

    Source: Fast-dLLM (arXiv 2505.22618), §3.3, confidence-aware parallel decoding.
    """
    return stats.confidence > at_token(threshold)


def forced_top1(
    stats: TokenStats, state: DecodeState, semi_complete_threshold: Threshold
) -> Bool[Array, "B K S"]:
    """The surest hole of each block whose predecessor is semi-complete; ties: lowest position.

    Joined with `above` it changes nothing in a block with a cell above (its surest hole is one of
    those), and forces one token elsewhere. The predecessor is read before this step's writes, so a
    block whose context is still open does not guess.

    Source: MBD-LMs, algorithm 5 (top-1 fallback).
    """
    may = blocks.semi_complete_before(state, semi_complete_threshold)
    return top_n(stats.confidence, may.astype(jnp.int32), blocks.holes(state))


def leftmost_sure(
    stats: TokenStats, threshold: Threshold, among: Bool[Array, "B K S"]
) -> Bool[Array, "B K S"]:
    """The cells of each block before its first one below the threshold (strictly), at least one.

    Only cells `among` are taken or end the run. An unsure cell ends it however sure the later
    ones are; if the first cell is unsure, it alone is taken.

    Source: DMax (arXiv 2604.08302), `decode_uniform`.
    """
    unsure = among & (stats.confidence < at_token(threshold))
    before_unsure = jnp.cumsum(unsure.astype(jnp.int32), axis=2) == 0
    first = jnp.cumsum(among.astype(jnp.int32), axis=2) == 1
    return among & (before_unsure | first)


def top_n(
    score: Float[Array, "B K S"], n: Int[Array, "B K"], among: Bool[Array, "B K S"]
) -> Bool[Array, "B K S"]:
    """The `n` best-scored cells of each block, ties to the lowest position, only `among`."""
    return (rank(score, among) < n[:, :, None]) & among


def rank(score: Float[Array, "B K S"], among: Bool[Array, "B K S"]) -> Int[Array, "B K S"]:
    """Rank of each cell in its block, the highest score first; ties: lower position first.

    Cells not `among` come last. S is small, so every pair is compared, which makes ties independent
    of the implementation of a sort.
    """
    score = jnp.where(among, score, -jnp.inf)
    # Fused into both sides of the comparison, a score may be rounded in two ways, and a cell then
    # outranks itself. (On a CPU jaxlib 0.10 drops the barrier too early: values of `predict` are
    # safe there, arithmetic on them may not be.)
    score = jax.lax.optimization_barrier(score)
    index = jnp.arange(score.shape[-1]).reshape(*(1,) * (score.ndim - 1), -1)
    mine, other = score[..., :, None], score[..., None, :]
    tie = (other == mine) & (index[..., None, :] < index[..., :, None])
    return jnp.sum((other > mine) | tie, axis=-1)


def quota(state: DecodeState, denoising_steps: int) -> Int[Array, "B K"]:
    """Cells to fill in this step so that a block takes `denoising_steps` of them, remainder first.

    Source: LLaDA (arXiv 2502.09992) and SDAR (2510.06303), `get_num_transfer_tokens`.
    """
    S = state.buffer.tokens.shape[2]
    base, remainder = divmod(S, denoising_steps)
    share = base + (state.buffer.block_steps < remainder).astype(jnp.int32)
    return jnp.maximum(share, 1)


def entropy_bounded(
    stats: TokenStats, bound: Threshold, among: Bool[Array, "B K S"]
) -> Bool[Array, "B K S"]:
    """Cells by rising entropy whose exclusive prefix sum of entropies is <= `bound` nats.

    The surest cell always passes.

    Source: EB-Sampler (arXiv 2505.24857).
    """
    place = rank(-stats.entropy, among)
    entropy = jnp.where(among, stats.entropy, 0.0)
    before = place[..., None, :] < place[..., :, None]
    spent = jnp.sum(jnp.where(before, entropy[..., None, :], 0.0), axis=-1)
    return among & (spent <= at_token(bound))


def factor_bounded(
    stats: TokenStats, factor: Threshold, among: Bool[Array, "B K S"]
) -> Bool[Array, "B K S"]:
    """Cells by falling confidence, the n-th of a block while (n + 1) (1 - confidence) < `factor`.

    The more cells are taken at once, the surer the last of them must be. The surest cell always
    passes. Both terms grow with n, so the first cell that fails ends the run. The rule is the
    paper's. The authors' code admits equality, and takes all cells if only the last one fails.

    Source: Fast-dLLM (arXiv 2505.22618), §3.3, factor-based parallel decoding.
    """
    n = rank(stats.confidence, among) + 1
    doubt = (n + 1).astype(jnp.float32) * (1.0 - stats.confidence)
    return among & ((doubt < at_token(factor)) | (n == 1))


def margin(stats: TokenStats) -> Float[Array, "B K S"]:
    """Probability of the likeliest token less that of the next one: a score to rank by.

    A cell torn between two tokens scores low, however unlikely the others are. Cells not asked for
    score -inf. Call `predict` with `num_top=2`.

    Raises:
        ValueError: The statistics hold fewer than two tokens a cell (at trace time).

    Source: Kim et al. (arXiv 2502.06768), §4, top-K probability margin.
    """
    held = stats.top_probs.shape[-1]
    if held < 2:
        raise ValueError(f"margin needs two tokens a cell and has {held}; predict with num_top=2")
    gap = stats.top_probs[..., 0] - stats.top_probs[..., 1]
    return jnp.where(stats.confidence == -jnp.inf, -jnp.inf, gap)
