"""From hidden rows to token statistics, streamed: never a whole [rows, vocabulary] array.

A `Readout` says what is asked of the cells of a window. `of_rows` narrows it to the rows to read,
`read_rows` reads them, `Cells.scatter` brings the statistics back to the cells. Likeliest tokens
are read off the product by a kernel where there is one (`dllm_jax.kernels.token_readout`), else
from the logits of a chunk of rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dllm_jax.kernels.token_readout import choose, most_rows, token_readout
from dllm_jax.models.head import Head
from dllm_jax.runner.cells import Cells
from dllm_jax.runner.chunks import FEW_ROWS, ROWS_DRAWN, in_chunks
from dllm_jax.runner.expectation import read_expected
from dllm_jax.runner.reader import Reader
from dllm_jax.scoring.one_rounding import ROWS_READ
from dllm_jax.strategies.core.draw import drawn_law, settled, token_stats
from dllm_jax.strategies.core.protocol import Readout, TokenStats
from dllm_jax.strategies.core.state import by_row


def of_rows(ask: Readout, cells: Cells) -> Readout:
    """A readout of a window's cells as that of the rows of some of them."""
    keys, penalty, ids = jax.tree.map(cells.rows, (ask.keys, ask.penalty, ask.ids))
    guide = None if ask.guide is None else (cells.rows(ask.guide[0]), ask.guide[1])
    own = ask.replace(keys=keys, penalty=penalty, guide=guide, ids=ids)
    return own.replace(where=None, fixed=None, behind=None)


def read_rows(reader: Reader, hidden: Float[Array, "R D"], ask: Readout) -> TokenStats:
    """Statistics of each row, leading axis R."""
    if ask.soft:
        return read_expected(reader, hidden, ask)
    stats = read_stats(reader, hidden, ask.replace(ids=None))
    if ask.ids is None:
        return stats
    return stats.replace(id_probs=read_probs(reader, hidden, ask.ids, stats))


def read_log_probs(
    reader: Reader,
    hidden: Float[Array, "R D"],
    tokens: Int[Array, " R"],
    ask: Readout,
    num_top: int = 0,
) -> Float[Array, "R F"]:
    """Log-probabilities of a token a row, and the likeliest ids: `ForwardOutput.log_probs`.

    Args:
        reader: Of whole logits.
        ask: Of rows, as of `read_stats`.
    """
    sampling = ask.sampling
    assert sampling is not None
    each = sampling.of_rows(len(hidden) // len(sampling.temperature))

    def one(rows: tuple[Any, ...]) -> Array:
        hidden, tokens, sampling, penalty, away = rows
        raw = reader.unembed(hidden)
        moved = raw if away is None else reader.logits(hidden, away, scale)
        law = drawn_law(reader.restricted(moved, penalty), sampling)
        both, token = jnp.stack([law, raw], axis=1), tokens[:, None, None]
        own = jnp.take_along_axis(both, token, axis=2)
        is_own = jnp.arange(both.shape[2], dtype=jnp.int32)[None, None] == token
        # 1 + rest rounds to 1 where a token is all but sure.
        rest = jnp.sum(jnp.where(is_own, 0.0, jnp.exp(both - own)), axis=2)
        logs = jax.nn.log_softmax(both)
        said = jnp.take_along_axis(logs, token, axis=2)[..., 0]
        said = jnp.where(rest < 1.0, -jnp.log1p(rest), said)
        top, ids = jax.lax.top_k(logs[:, 1], num_top)
        return jnp.concatenate([said, ids.astype(jnp.float32), top], axis=1)  # ids are below 2^24

    away, scale = (None, 0.0) if ask.guide is None else ask.guide
    rows = hidden, jnp.maximum(tokens, 0), each, ask.penalty, away
    if reader.one_rounding:
        return _in_whole_chunks(one, rows, ROWS_READ)
    return in_chunks(one, rows, FEW_ROWS)  # of two laws at once


def read_probs(
    reader: Reader, hidden: Float[Array, "R D"], ids: Int[Array, "R N"], stats: TokenStats
) -> Float[Array, "R N"]:
    """Probabilities of given ids, from a few rows of the head and the confidence of the token.

    Args:
        stats: Of the same rows, with "raw" confidences: `p(id) = p(token) exp(l_id - l_token)`.
    """
    unembed, shard = reader.unembed, reader.shard

    def one(rows: tuple[Array, Array]) -> Array:
        hidden, ids = rows
        head = unembed if isinstance(unembed, Head) else None
        logits = unembed(hidden) if head is None else hidden
        size = logits.shape[-1] if head is None else len(head.weights)
        own = ids if shard is None else ids - size * jax.lax.axis_index(shard.axis)
        near = jnp.clip(own, 0, size - 1)
        if head is None:
            found = jnp.take_along_axis(logits, near, axis=-1)
        else:
            few = jax.tree.map(lambda leaf: leaf[near], head.weights)
            of_row = jax.vmap(lambda few, row: dataclasses.replace(head, weights=few)(row))
            found = of_row(few, hidden)
        return found if shard is None else shard.total(jnp.where(near == own, found, 0.0))

    asked = jnp.concatenate([stats.token[:, None], ids], axis=1)
    logits = in_chunks(one, (hidden, asked), whole=FEW_ROWS)
    share = jnp.exp(logits[:, 1:] - logits[:, :1]) * stats.confidence[:, None]
    return jnp.where(reader.forbidden(ids), 0.0, share)


def read_stats(reader: Reader, hidden: Float[Array, "R D"], ask: Readout) -> TokenStats:
    """Statistics of each row, leading axis R.

    Args:
        ask: Of rows; its sampling has a value a row or a slot, whose rows are consecutive. Its
            guide holds rows to move away from.
    """
    sampling, shard, unembed = ask.sampling, reader.shard, reader.unembed
    assert sampling is not None
    away, scale = (None, 0.0) if ask.guide is None else ask.guide
    of_slot = len(hidden) // len(sampling.temperature)

    def one(rows: tuple[Any, ...]) -> TokenStats:
        hidden, ask, away = rows
        logits = reader.logits(hidden, away, scale)
        return in_chunks(drawn, (logits, ask), ROWS_DRAWN, ROWS_DRAWN)

    def drawn(rows: tuple[Any, ...]) -> TokenStats:
        logits, ask = rows
        return token_stats(logits, ask, lambda x: reader.restricted(x, ask.penalty), shard)

    def in_rows() -> TokenStats:
        # Build operands inside the branch: the inputs of a `cond` cost launches.
        each = ask.replace(sampling=sampling.of_rows(of_slot), guide=None)
        # Every chunk reads the head again, and a device's part of it has fewer logits a row.
        whole = FEW_ROWS * (1 if shard is None else jax.lax.axis_size(shard.axis))
        rows = hidden, each, away
        if reader.one_rounding:
            return _in_whole_chunks(one, rows, -(-of_slot // ROWS_READ) * ROWS_READ)
        return in_chunks(one, rows, whole=whole)

    # The kernels read the whole vocabulary out: no allowed ids, no vocabulary over several devices.
    head = unembed if isinstance(unembed, Head) and away is None and shard is None else None
    if head is None:
        return in_rows()
    at_once = most_rows(head.weights)
    implementation = choose(hidden[:at_once], head.weights, ask.num_top)
    if reader.one_rounding:
        implementation = "mosaic"
    if implementation == "xla":
        return in_rows()
    # From NumPy ids the mask is a constant of the program.
    never = reader.forbidden(np.arange(len(head.weights), dtype=np.int32))

    def in_kernel(rows: tuple[Array, tuple[Array, Array] | None]) -> TokenStats:
        hidden, penalty = rows
        read = token_readout(
            hidden,
            head.weights,
            never,
            scale=head.scale,
            cap=head.cap,
            penalty=penalty,
            num_top=ask.num_top,
            implementation=implementation,
        )
        return settled(TokenStats(**read._asdict()))

    # Top-k and the nucleus need all logits, and noise is cheaper outside the kernel. A row's path
    # must not depend on its neighbours: rows that are drawn must not change its rounding.
    plain = sampling.is_plain

    def all_plain() -> TokenStats:
        return in_chunks(in_kernel, (hidden, ask.penalty), at_once, at_once)

    def some_drawn() -> TokenStats:
        drawn = in_rows()
        plain_rows = jnp.repeat(plain, of_slot)
        return jax.lax.cond(
            jnp.any(plain),
            lambda: by_row(plain_rows, all_plain(), drawn),
            lambda: drawn,
        )

    return jax.lax.cond(jnp.all(plain), all_plain, some_drawn)


def _in_whole_chunks(fn: Callable[[Any], Any], rows: Any, size: int) -> Any:
    """`fn` over exactly `size` rows at a time, which decide its rounding; the last is repeated."""
    total = jax.tree.leaves(rows)[0].shape[0]
    if total % size == 0:
        return in_chunks(fn, rows, size, size)
    at = np.minimum(np.arange(-(-total // size) * size), total - 1)
    found = in_chunks(fn, jax.tree.map(lambda leaf: leaf[at], rows), size, size)
    return jax.tree.map(lambda leaf: leaf[:total], found)
