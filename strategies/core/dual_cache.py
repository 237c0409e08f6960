"""A block refined over a provisional cache of itself: which cells run, and what they see.

The window is one block (K = 1), cut in sub-blocks that are filled from left to right. A *full* pass
runs the whole block after the committed text. Stored past `start`, holes and all, its keys and
values are the block's provisional cache. A *refinement* runs one sub-block alone and sees the rest
of its block as it was last stored. Cells at or past the request's limit take no part: they are
neither shown nor filled, and nothing past the limit is stored or read. `run_text` and `run_narrow`
are for windows of any size.

Source: Fast-dLLM v2 (arXiv 2509.26328), hierarchical caching; Fast-dLLM (2505.22618), DualCache.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from . import blocks, random
from .forward import Forward, ForwardOutput
from .remasking import TextBlock
from .state import RUNNING, DecodeState


def text_cells(state: DecodeState) -> Bool[Array, "B 1 S"]:
    """Cells of the open block before the request's limit: what a full pass runs."""
    buffer = state.buffer
    return blocks.live_cells(state) & (buffer.positions < buffer.limit[:, None, None])


def seed_block(forward: Forward, state: DecodeState) -> tuple[DecodeState, Bool[Array, "B 1 S"]]:
    """Write the first token of blocks that begin with a hole; also returns the cells written.

    The last row before the block predicts it: the prompt's, or the last commit's. It is drawn with
    the key of its position. If no block begins with a hole, the head of the model does not run.
    """
    buffer = state.buffer
    is_first = (jnp.arange(buffer.tokens.shape[2]) == 0)[None, None]
    seeded = blocks.holes(state) & is_first & (state.finish == RUNNING)[:, None, None]

    def draw() -> Int[Array, " B"]:
        keys = random.position_keys(state)[:, 0, 0]
        return forward.predict(
            state.boundary, sampling=state.sampling, keys=keys, first_of=state
        ).token

    token = jax.lax.cond(jnp.any(seeded), draw, lambda: jnp.zeros_like(buffer.start))
    return blocks.write(state, token[:, None, None], seeded), seeded


def sub_block(state: DecodeState, size: int) -> Bool[Array, "B 1 S"]:
    """Cells of the leftmost sub-block with a hole, up to the request's limit."""
    open_cells = blocks.holes(state) & text_cells(state)
    cell = jnp.arange(open_cells.shape[2])[None, None]
    first = jnp.argmax(open_cells, axis=2, keepdims=True)
    has_hole = jnp.any(open_cells, axis=2, keepdims=True)
    return (cell // size == first // size) & has_hole & text_cells(state)


def may_refine(state: DecodeState, cells: Bool[Array, "B 1 S"]) -> Bool[Array, " B"]:
    """Rows whose sub-block `cells` may run alone.

    The block must have been stored since it opened, and the sub-block's first cell must be filled:
    a hole there is predicted by the row of the cell before, which such a pass does not run.
    """
    buffer = state.buffer
    first = cells & (jnp.cumsum(cells, axis=2) == 1)
    has_head = jnp.any(first & buffer.filled, axis=(1, 2))
    return has_head & (buffer.block_steps[:, 0] > 0)


def run(
    forward: Forward,
    state: DecodeState,
    cells: Bool[Array, "B 1 S"],
    refine: Bool[Array, " B"],
    width: int,
) -> tuple[ForwardOutput, Bool[Array, "B 1 S"]]:
    """One pass of rows that refine `cells` and rows that run whole; also returns the live cells.

    A refinement sees the committed text and its block as stored, except for its own cells, which
    are fresh. Where every running row refines, the pass is `width` rows wide; a mixed batch takes
    the full width. Store the live cells outside: a pool that two branches write would be copied.
    """
    buffer = state.buffer
    whole = text_cells(state)
    live = jnp.where(refine[:, None, None], cells, whole)
    stored = buffer.start + jnp.sum(whole, axis=(1, 2), dtype=jnp.int32)
    context_len = jnp.where(refine, stored, buffer.start)

    def pass_of(width: int | None) -> Callable[[], ForwardOutput]:
        return lambda: forward(state, live=live, context_len=context_len, width=width)

    all_refine = jnp.all(refine | (state.finish != RUNNING))
    return jax.lax.cond(all_refine, pass_of(width), pass_of(None)), live


def run_narrow(
    forward: Forward,
    state: DecodeState,
    live: Bool[Array, "B K S"],
    widths: tuple[int, ...],
    **options: Any,
) -> ForwardOutput:
    """One pass over `live`, as wide as the running row with most live cells needs.

    Store outside: a pool that two branches write would be copied.

    Args:
        widths: Widths to choose from; those the window does not exceed are left out.
        **options: Further arguments of `forward`.
    """
    B, K, S = live.shape
    widths = tuple(sorted({width for width in widths if width < K * S}))

    def pass_of(width: int | None) -> Callable[[], ForwardOutput]:
        return lambda: forward(state, live=live, width=width, **options)

    if not widths:
        return pass_of(None)()
    count = jnp.sum(live.reshape(B, -1), axis=1, dtype=jnp.int32)
    most = jnp.max(jnp.where(state.finish == RUNNING, count, 0))
    fitting = jnp.sum(most > jnp.asarray(widths, jnp.int32), dtype=jnp.int32)
    return jax.lax.switch(fitting, [pass_of(width) for width in (*widths, None)])


def run_text(
    forward: Forward,
    state: DecodeState,
    block: TextBlock,
    is_new: Bool[Array, " B"],
    text: Bool[Array, "B K S"],
    *,
    alone: bool,
    widths: tuple[int, ...],
    visible: Bool[Array, "1 K K"] | np.ndarray,
) -> tuple[ForwardOutput, DecodeState]:
    """One pass over a text that is in the window; also returns the state with what was stored.

    In the first forward of a block everything runs and is stored. Later ones run the text from the
    block on and see what is before it as it was stored.

    Args:
        block: The block of the text that is being filled.
        is_new: Rows whose block begins with this forward.
        text: The cells of the text, and those that will be.
        alone: Later forwards run the block alone, and see what is after it as stored, too.
        widths: As of `run_narrow`.
        visible: As of `Forward`.
    """
    positions = state.buffer.positions
    # In a shifted model the cell before the block predicts its first one.
    part = text & (positions >= block.begin[:, None, None] - int(forward.shift))
    if alone:
        part &= positions < block.end[:, None, None]
    out = run_narrow(
        forward,
        state,
        live=jnp.where(is_new[:, None, None], text, part),
        widths=widths,
        visible=visible,
        context_len=jnp.sum(text, axis=(1, 2), dtype=jnp.int32),
    )
    return out, out.store(state, text & is_new[:, None, None])
