"""A slot as 32-bit words: one transfer a chunk brings everything of a slot that decoding changes.

Nothing here knows what the leaves mean, but for which of them a slot needs to go on.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dllm_jax.strategies.core.state import DecodeState


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each leaf of a slot stands among its words."""

    tree: Any
    leaves: tuple[tuple[int, int, tuple[int, ...], str], ...]  # offset, words, shape, dtype
    size: int


def kept_part(state: DecodeState) -> dict[str, Any]:
    """What a slot needs to go on but what its request says and what it has emitted."""
    return {
        "buffer": state.buffer,
        "finish": state.finish,
        "carry": state.carry.replace(lasting={}),  # the slot's: it stays there
        "boundary": state.boundary,
        "output_len": state.output_len,
    }


def layout_of(part: Any) -> Layout:
    """Where the leaves of a `kept_part` with leading slot axis go."""
    leaves, tree = jax.tree.flatten(part)
    placed, offset = [], 0
    for leaf in leaves:
        shape = tuple(leaf.shape[1:])
        size = math.prod(shape)
        placed.append((offset, size, shape, str(leaf.dtype)))
        offset += size
    return Layout(tree, tuple(placed), offset)


def pack(part: Any) -> Int[Array, "R X"]:
    """Slots as words."""
    words = []
    for leaf in jax.tree.leaves(part):
        flat = leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:]))
        if jnp.issubdtype(flat.dtype, jnp.floating):
            flat = jax.lax.bitcast_convert_type(flat.astype(jnp.float32), jnp.int32)
        words.append(flat.astype(jnp.int32))
    return jnp.concatenate(words, axis=1)


def unpack(words: Int[Array, "R X"], layout: Layout) -> Any:
    """Slots from their words."""
    leaves = []
    for offset, size, shape, dtype in layout.leaves:
        flat = words[:, offset : offset + size]
        if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            flat = jax.lax.bitcast_convert_type(flat, jnp.float32)
        leaves.append(flat.astype(dtype).reshape(len(words), *shape))
    return jax.tree.unflatten(layout.tree, leaves)


def host_unpack(words: np.ndarray, layout: Layout) -> Any:
    """One slot from its words, on the host, without the slot axis."""
    leaves = [
        _host_leaf(words[offset : offset + size], dtype).reshape(shape)
        for offset, size, shape, dtype in layout.leaves
    ]
    return jax.tree.unflatten(layout.tree, leaves)


def slot_leaf(words: np.ndarray, layout: Layout, name: str) -> np.ndarray | None:
    """One of a strategy's own `slot` leaves from the words of a slot; None where there is none."""
    numbered = jax.tree.unflatten(layout.tree, range(len(layout.leaves)))
    number = numbered["carry"].slot.get(name)
    if number is None:
        return None
    offset, size, shape, dtype = layout.leaves[number]
    return _host_leaf(words[offset : offset + size], dtype).reshape(shape)


def _host_leaf(words: np.ndarray, dtype: str) -> np.ndarray:
    if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        return words.view(np.float32)
    return words.astype(dtype)
