"""A plain decoder for evaluation while training: whole rows recomputed at every forward, no cache.

Block diffusion with a window of `buffer` open blocks on the absolute grid, greedy, by the rules of
threshold decoding: accept tokens above a threshold, open the next block once the last one has
begun, force the best token of a block that has stalled behind a nearly full one. With a window of
one a complete block costs a forward of its own before the next opens. Kept apart from the engine
on purpose: the two are compared. Nothing here knows about text or answers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from dllm_jax.models import dense, reference


class Decoded(struct.PyTreeNode):
    """What came out, per row.

    Attributes:
        tokens: The rows; what follows the first end-of-sequence token is unspecified.
        forwards: Forwards until the row ended, the prompt's prefill not counted.
        commits: Those of them that could not write any token (they only store a finished block).
        ended: Whether an end-of-sequence token was reached.
    """

    tokens: Int[Array, "B T"]
    forwards: Int[Array, " B"]
    commits: Int[Array, " B"]
    ended: Bool[Array, " B"]


class _State(struct.PyTreeNode):
    out: Decoded
    holes: Bool[Array, "B T"]
    start: Int[Array, " B"]  # first block not yet committed
    stop: Int[Array, " B"]  # one past the last open block
    alive: Bool[Array, " B"]


@functools.partial(jax.jit, static_argnames=("cfg", "block_size", "eos_id", "dtype"))
def decode(
    params: Any,
    cfg: dense.DenseConfig,
    tokens: Int[Array, "B T"],
    prompt_len: Int[Array, " B"],
    threshold: float,
    buffer: int = 1,
    add_threshold: float = 0.1,
    semi_threshold: float = 0.9,
    *,
    eos_id: int,
    block_size: int = 32,
    dtype: Any = jnp.bfloat16,
) -> Decoded:
    """Fill rows after their prompts until each has an end-of-sequence token with no hole before.

    Args:
        tokens: Prompts, padded with anything to the row length, a multiple of `block_size`.
    """
    B, T = tokens.shape
    num_blocks = T // block_size
    pos = jnp.arange(T)[None]
    block = pos // block_size
    number = jnp.arange(num_blocks)[None]
    own = pos >= prompt_len[:, None]
    mask = jnp.broadcast_to(reference.visibility("block_causal", T, block_size)[None], (B, T, T))
    forbidden = (jnp.arange(cfg.vocab_size) == cfg.mask_token_id)[None, None]
    weights = jax.tree.map(lambda w: w.astype(dtype), params)

    def in_blocks(x: Array) -> Array:
        return x.reshape(B, num_blocks, block_size)

    def predict(ids: Array) -> tuple[Array, Array]:
        x = dense.embed(weights, cfg, ids)
        positions = jnp.broadcast_to(pos, (B, T))
        attend = lambda _, q, k, v: reference.attention(q, k, v, mask)  # noqa: E731
        hidden, _ = dense.trunk(weights, cfg, x, positions, attend)
        logits = jnp.where(forbidden, -jnp.inf, dense.unembed(weights, cfg, hidden))
        best = jnp.max(logits, axis=-1) - jax.nn.logsumexp(logits, axis=-1)
        return jnp.argmax(logits, axis=-1).astype(tokens.dtype), jnp.exp(best)

    def body(state: _State) -> _State:
        open_holes = jnp.sum(in_blocks(state.holes), axis=-1)
        # open: the last open block has begun, or none is open; one block a forward
        last = jnp.maximum(state.stop - 1, 0)[:, None]
        progress = 1 - jnp.take_along_axis(open_holes, last, axis=1)[:, 0] / block_size
        grow = (state.stop - state.start < buffer) & (progress >= add_threshold)
        grow = (grow | (state.stop == state.start)) & (state.stop < num_blocks) & state.alive
        stop = state.stop + grow.astype(jnp.int32)

        choice, sure = predict(jnp.where(state.holes, cfg.mask_token_id, state.out.tokens))
        in_window = (block >= state.start[:, None]) & (block < stop[:, None])
        free = state.holes & in_window & state.alive[:, None]
        accept = free & (sure > threshold)
        # force: no token is sure, and the block before is nearly full (or not in the window)
        before = jnp.where(number == 0, 0, jnp.roll(open_holes, 1, axis=1))
        ready = (number == state.start[:, None]) | (1 - before / block_size >= semi_threshold)
        force = ready & ~jnp.any(in_blocks(accept), axis=-1)
        best = jnp.argmax(in_blocks(jnp.where(free, sure, -1.0)), axis=-1)
        is_best = jax.nn.one_hot(best, block_size, dtype=bool) & force[..., None]
        accept = accept | (free & is_best.reshape(B, T))

        # commit: leading blocks complete before this forward are stored by it
        complete = (open_holes == 0) & (number < stop[:, None]) | (number < state.start[:, None])
        leading = jnp.sum(jnp.cumprod(complete.astype(jnp.int32), axis=1), axis=1)
        holes = state.holes & ~accept
        filled = jnp.where(accept, choice, state.out.tokens)
        first_eos = jnp.min(jnp.where((filled == eos_id) & ~holes & own, pos, T), axis=1)
        first_hole = jnp.min(jnp.where(holes, pos, T), axis=1)
        ended = first_eos < first_hole
        alive = state.alive.astype(jnp.int32)
        only_commit = alive * (1 - jnp.any(free, axis=1).astype(jnp.int32))
        return _State(
            out=Decoded(
                tokens=filled,
                forwards=state.out.forwards + alive,
                commits=state.out.commits + only_commit,
                ended=ended,
            ),
            holes=holes,
            start=jnp.where(state.alive, leading, state.start),
            stop=stop,
            alive=state.alive & ~ended & (first_hole < T),
        )

    zero = jnp.zeros(B, jnp.int32)
    first_block = prompt_len // block_size
    state = _State(
        out=Decoded(tokens=tokens, forwards=zero, commits=zero, ended=jnp.zeros(B, bool)),
        holes=own,
        start=first_block,
        # A block that the prompt has begun is open from the start, as in the engine.
        stop=first_block + (prompt_len % block_size > 0).astype(jnp.int32),
        alive=prompt_len < T,
    )
    return jax.lax.while_loop(lambda s: jnp.any(s.alive), body, state).out
