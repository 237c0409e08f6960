"""Forwards of whole texts and of blocks after them, without the engine's paged cache."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.models import reference
from dllm_jax.models.sharding import partitioned

LOGITS_AT_ONCE = 128  # rows of the vocabulary in memory: 78 MB in float32 at 152k ids


class Rows(NamedTuple):
    """Rows of a forward as arrays, padded with copies of nothing.

    Attributes:
        ids: i32[R W], hidden cells as the mask.
        positions: i32[R W].
        live: bool[R W], cells that are seen by their block.
        text: i32[R], whose own keys a row sees.
        seen: i32[R W 2], keys of the prompt and of the text itself that a cell sees.
        reads: i32[R N], cells whose output is read.
        targets: i32[R N].
    """

    ids: np.ndarray
    positions: np.ndarray
    live: np.ndarray
    text: np.ndarray
    seen: np.ndarray
    reads: np.ndarray
    targets: np.ndarray


@functools.partial(jax.jit, static_argnames=("kind", "block_size"))
def keys(
    model: Any,
    prompt: Any,
    ids: Int[Array, "R T"],
    starts: Int[Array, " R"],
    lengths: Int[Array, " R"],
    *,
    kind: str,
    block_size: int,
) -> list[tuple[Float[Array, "R T G H"], Float[Array, "R T G H"]]]:
    """Keys and values of each layer of rows of clean text after the prompt; [] of none.

    Args:
        prompt: Those of the prompt, all before `starts`; None: there is none.
        lengths: Tokens of each row; the others are seen by none of them.
    """
    count, length = ids.shape
    if not length:
        return []

    def body(params: Any, prompt: Any, ids: Array, starts: Array, lengths: Array) -> Any:
        at = jnp.arange(length)
        visible = reference.visibility(kind, length, block_size)[None]
        visible = jnp.broadcast_to(visible, (count, length, length))
        visible &= (at[None] < lengths[:, None])[:, None]
        before = 0 if not prompt else prompt[0][0].shape[1]
        is_before = jnp.arange(before)[None] < starts[:, None]
        is_before = jnp.broadcast_to(is_before[:, None], (count, length, before))
        positions = starts[:, None] + at[None].astype(jnp.int32)
        found, _ = _run(model, params, ids, positions, [(prompt, None, is_before)], visible)
        return found

    return partitioned(model.split, body, model.params, prompt or [], ids, starts, lengths)


@functools.partial(jax.jit, static_argnames=("kind", "lead"))
def forward(
    model: Any,
    prompt: Any,
    own: Any,
    rows: "Rows",
    *,
    kind: str,
    lead: int,
) -> tuple[Float[Array, "R N"], Bool[Array, "R N"]]:
    """Log-probabilities of targets at cells of rows, and whether each is the likeliest."""
    length = rows.ids.shape[1]

    def body(params: Any, prompt: Any, own: Any, *args: Array) -> Any:
        ids, positions, live, text, seen, reads, targets = args
        own_kind = "causal" if kind == "causal" else "full"
        visible = live[:, None] & reference.visibility(own_kind, length, length)[None]
        # The row before the block is only read: its keys are in the cache.
        visible &= (jnp.arange(length) >= lead)[None, :, None]
        parts = []
        for cache, of, keys in ((prompt, None, seen[..., :1]), (own, text, seen[..., 1:])):
            size = cache[0][0].shape[1] if cache else 0
            parts.append((cache, of, jnp.arange(size)[None, None] < keys))
        _, hidden = _run(model, params, ids, positions, parts, visible)
        rows = jnp.take_along_axis(hidden, reads[..., None], axis=1)

        def one(pair: tuple[Array, Array]) -> tuple[Array, Array]:
            row, target = pair
            logits = model.arch.unembed(params, model.config, row)
            never = model.forbidden(jnp.arange(logits.shape[-1], dtype=jnp.int32))
            logits = jnp.where(never, -jnp.inf, logits)
            value = logits[target] - jax.nn.logsumexp(logits)
            return value, jnp.argmax(logits) == target

        flat = rows.reshape(-1, rows.shape[-1]), targets.reshape(-1)
        at_once = min(LOGITS_AT_ONCE, targets.size)
        values, surest = jax.lax.map(one, flat, batch_size=at_once)
        return values.reshape(targets.shape), surest.reshape(targets.shape)

    return partitioned(model.split, body, model.params, prompt, own, *rows)


def _run(
    model: Any,
    params: Any,
    ids: Int[Array, "R W"],
    positions: Int[Array, "R W"],
    caches: Sequence[tuple[Any, Int[Array, " R"] | None, Bool[Array, "R W P"]]],
    visible: Bool[Array, "R W W"],
) -> tuple[list[tuple[Array, Array]], Float[Array, "R W D"]]:
    """Keys and values of each layer, and the hidden rows.

    Args:
        caches: Keys and values by layer, the entry of them that each row sees (None: the only
            one), and which of them each cell sees.
        visible: Which cells of its row each cell sees.
    """
    arch, cfg, count = model.arch, model.config, len(ids)
    made: list[tuple[Array, Array]] = []
    caches = [cache for cache in caches if cache[0]]
    mask = jnp.concatenate([*(cache[2] for cache in caches), visible], axis=2)

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        made.append((k, v))

        def with_cached(new: Array, part: int) -> Array:
            old = [
                jnp.broadcast_to(cache[layer][part], (count, *cache[layer][part].shape[1:]))
                if of is None
                else cache[layer][part][of]
                for cache, of, _ in caches
            ]
            return jnp.concatenate([*old, new], axis=1)

        return reference.attention(q, with_cached(k, 0), with_cached(v, 1), mask)

    hidden, _ = arch.trunk(params, cfg, arch.embed(params, cfg, ids), positions, attend)
    return made, hidden
