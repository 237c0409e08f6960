"""Pure operations on the window: which cells are holes, when a block opens, completes, commits.

A step uses them in this order: `open_next`, (forward), `to_cache`, `holes`, `write`,
`finish_step`. `denoise` is all but the first, for strategies that only differ in what they accept.

Source: Diffulex's block buffer, with the rules of docs/strategies.md.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from . import random
from .forward import Forward, TokenStats
from .knobs import Threshold, at_block
from .state import ACTIVE, DUMMY, TO_CACHE, DecodeState, StepInfo


def block_starts(state: DecodeState) -> Int[Array, "B K"]:
    """Absolute position of the first cell of each block."""
    return state.buffer.positions[:, :, 0]


def live_cells(state: DecodeState) -> Bool[Array, "B K S"]:
    """Cells of blocks that are not DUMMY."""
    buffer = state.buffer
    return jnp.broadcast_to(buffer.status[:, :, None] != DUMMY, buffer.tokens.shape)


def holes(state: DecodeState) -> Bool[Array, "B K S"]:
    """Cells of ACTIVE blocks without a token; never a cell of the prompt."""
    buffer = state.buffer
    return (
        (buffer.status[:, :, None] == ACTIVE)
        & ~buffer.filled
        & (buffer.positions >= buffer.prompt_len[:, None, None])
    )


def is_given(state: DecodeState) -> Bool[Array, "B K S"]:
    """Cells whose token the request brought: of its prompt, between its holes, after them."""
    buffer, given = state.buffer, state.limits.given
    prompt = buffer.positions < buffer.prompt_len[:, None, None]
    if given is None:
        return prompt
    positions = buffer.positions.reshape(len(given), -1)
    if state.limits.given_behind:
        positions = positions - buffer.prompt_len[:, None]
    found = jnp.take_along_axis(given, positions, axis=1, mode="fill", fill_value=False)
    return prompt | found.reshape(prompt.shape)


def to_cache(state: DecodeState) -> Bool[Array, "B K S"]:
    """Cells of blocks that commit in this step."""
    buffer = state.buffer
    return jnp.broadcast_to(buffer.status[:, :, None] == TO_CACHE, buffer.tokens.shape)


def progress(state: DecodeState) -> Float[Array, "B K"]:
    """Share of filled cells in each block; cells of the prompt count."""
    return jnp.mean(state.buffer.filled.astype(jnp.float32), axis=2)


def complete(state: DecodeState) -> Bool[Array, "B K"]:
    """Blocks with no hole before the request's limit."""
    buffer = state.buffer
    past_limit = buffer.positions >= buffer.limit[:, None, None]
    return jnp.all(buffer.filled | past_limit, axis=2)


def semi_complete_before(state: DecodeState, threshold: Threshold) -> Bool[Array, "B K"]:
    """Blocks whose predecessor has progress >= `threshold`, and the first block.

    The predecessor of the first block is in the cache, hence complete.
    """
    semi = progress(state) >= at_block(threshold)
    return jnp.concatenate([jnp.ones_like(semi[:, :1]), semi[:, :-1]], axis=1)


def has_stop(state: DecodeState) -> Bool[Array, " B"]:
    """Rows in whose window a generated cell holds a stop id, holes before it or not."""
    buffer = state.buffer
    generated = buffer.filled & ~is_given(state)
    return jnp.any(is_stop(state, buffer.tokens) & generated, axis=(1, 2))


def is_stop(state: DecodeState, tokens: Int[Array, "B K S"]) -> Bool[Array, "B K S"]:
    """Cells whose token is one of the request's stop ids (-1 pads the list)."""
    ids = state.limits.stop_ids[:, None, None, :]
    each = (tokens == ids[..., i] for i in range(ids.shape[-1]))
    # Not along an axis: a reduction is a launch of its own.
    return functools.reduce(jnp.logical_or, each, jnp.zeros(tokens.shape, bool)) & (tokens >= 0)


def open_next(
    state: DecodeState,
    add_block_threshold: Threshold | None = None,
    stable: Bool[Array, "B K"] | None = None,
) -> DecodeState:
    """Open at most one block: the first of an empty window, or the one after enough progress.

    Decided before the forward. No block opens at or past the limit, nor while a stop id stands in
    the window.

    Args:
        add_block_threshold: Progress (>=) the last open block must have; None: one block at a time,
            except after `stable` ones.
        stable: Blocks after which another may open, for strategies that rewrite filled cells;
            None: all.
    """
    buffer = state.buffer
    K = buffer.tokens.shape[1]
    num_open = jnp.sum(buffer.status != DUMMY, axis=1)
    ready = num_open == 0
    last = jnp.maximum(num_open - 1, 0)[:, None]
    if add_block_threshold is not None:
        last_progress = jnp.take_along_axis(progress(state), last, axis=1)
        enough = last_progress >= at_block(add_block_threshold)
        if stable is not None:
            enough &= jnp.take_along_axis(stable, last, axis=1)
        ready |= enough[:, 0]
    elif stable is not None:
        ready |= jnp.take_along_axis(stable, last, axis=1)[:, 0]
    is_next = jnp.arange(K)[None, :] == num_open[:, None]
    opens = is_next & ready[:, None] & (block_starts(state) < buffer.limit[:, None])
    opens &= ~has_stop(state)[:, None]
    status = jnp.where(opens, ACTIVE, buffer.status)
    return state.replace(buffer=buffer.replace(status=status))


def begin(state: DecodeState, first: Int[Array, " B"], where: Bool[Array, " B"]) -> DecodeState:
    """Open the window of rows `where` with the token `first` alone in its first cell."""
    buffer = state.buffer
    S = buffer.tokens.shape[2]
    anchor = where[:, None, None] & (jnp.arange(S) == 0)[None, None]
    return state.replace(
        buffer=buffer.replace(
            tokens=jnp.where(anchor, first[:, None, None], buffer.tokens),
            filled=buffer.filled | anchor,
            status=jnp.where(where[:, None], ACTIVE, buffer.status),
        )
    )


def write(
    state: DecodeState, tokens: Int[Array, "B K S"], accept: Bool[Array, "B K S"]
) -> DecodeState:
    """Fill the accepted cells, except those that the request brought."""
    buffer = state.buffer
    accept = accept & ~is_given(state)
    return state.replace(
        buffer=buffer.replace(
            tokens=jnp.where(accept, tokens, buffer.tokens), filled=buffer.filled | accept
        )
    )


def settled_run(state: DecodeState) -> Int[Array, " B"]:
    """Length of the hole-free run at the window's left."""
    buffer = state.buffer
    B = buffer.tokens.shape[0]
    solid = (buffer.filled & live_cells(state)).reshape(B, -1)
    return _run_at_left(solid)


def _run_at_left(flags: Bool[Array, "B N"]) -> Int[Array, " B"]:
    """Number of set flags before the first unset one: one reduction, where XLA's cumprod is two."""
    N = flags.shape[1]
    return jnp.min(jnp.where(flags, N, jnp.arange(N, dtype=jnp.int32)[None]), axis=1)


def finish_step(
    state: DecodeState, accept: Bool[Array, "B K S"], ready: Bool[Array, "B K"] | None = None
) -> tuple[DecodeState, StepInfo]:
    """End of a step of one forward: promote, count, report.

    Blocks that were TO_CACHE during the forward are in the cache now: they commit. The run of
    complete ACTIVE blocks after them becomes TO_CACHE.

    Args:
        accept: The holes filled in this step; cells written over do not count.
        ready: Complete blocks that may leave, for strategies that rewrite filled cells; only blocks
            that leave are settled then. None: filled cells never change, so all complete blocks may
            leave, and the hole-free run is settled.
    """
    buffer = state.buffer
    S = buffer.tokens.shape[2]
    committed = buffer.status == TO_CACHE
    may_leave = complete(state) if ready is None else complete(state) & ready
    done = committed | ((buffer.status == ACTIVE) & may_leave)
    leading = jnp.arange(done.shape[1])[None] < _run_at_left(done)[:, None]
    status = jnp.where(leading, TO_CACHE, buffer.status)
    block_steps = buffer.block_steps + (buffer.status == ACTIVE).astype(jnp.int32)
    settled_len = settled_run(state)
    if ready is not None:  # holes past the limit leave with their block and are never settled
        settled_len = jnp.minimum(settled_len, jnp.sum(leading, axis=1, dtype=jnp.int32) * S)
    info = StepInfo(
        commit_len=jnp.sum(committed, axis=1).astype(jnp.int32) * S,
        settled_len=settled_len,
        accepted=jnp.sum(accept, axis=(1, 2)).astype(jnp.int32),
        nfe=jnp.ones_like(buffer.nfe),
    )
    return state.replace(buffer=buffer.replace(status=status, block_steps=block_steps)), info


AcceptRule = Callable[[TokenStats, DecodeState, Bool[Array, "B K S"]], Bool[Array, "B K S"]]


def denoise(
    forward: Forward, state: DecodeState, accept_rule: AcceptRule
) -> tuple[DecodeState, StepInfo]:
    """One forward of the window: commit the complete blocks, fill the holes that a rule accepts.

    Args:
        accept_rule: Called with the statistics, the state and the holes; returns the holes to
            fill. It must accept one within `Strategy.patience` steps.
    """
    out = forward(state)
    state = out.store(state, to_cache(state))
    where = holes(state)
    stats = out.predict(where=where, sampling=state.sampling, keys=random.step_keys(state))
    accept = accept_rule(stats, state, where)
    return finish_step(write(state, stats.token, accept), accept)
