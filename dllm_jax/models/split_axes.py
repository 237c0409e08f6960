"""The axis of each leaf that is split over devices, and leaves whose axes do not divide."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dllm_jax.models.layers import gate_up_shape

# The axis of a leaf that is split, by its name; every other leaf is whole on every device. Split
# axes are outer ones, so that a part is a run of memory.
AXES = {
    "embed": 0,  # [V D]
    "lm_head": 0,
    "wqkv": 1,  # [D G n+2 H]
    "wqk": 1,  # [D G n+1 H]
    "bqkv": 0,
    "wo": 0,  # [N H D]
    "context_wkv": 2,  # [D L G 2 H]
    "w_gate_up": 1,  # [D C 2 W]
    "w_down": 0,  # [C*W D]
    "shared_gate_up": 1,
    "shared_down": 0,
    "experts_gate_up": 0,  # [E D 2 F]
    "experts_down": 0,
    "kv_scales": 1,  # of a `Model`, [2 G]
    "peers": 0,  # of an `Exchange`
    "inbox": 0,
}
_PARTS = ("values", "scales")  # of a matrix, or a head, in 8 bits


def fitted(params: Any, cfg: Any, num_parts: int) -> Any:
    """Parameters of the same function whose split axes are multiples of `num_parts`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: fitted_leaf(path, leaf, cfg, num_parts), params
    )


def fitted_leaf(path: Any, leaf: Any, cfg: Any, num_parts: int) -> Any:
    """The leaf at a key path in the form of `fitted`.

    KV heads are repeated and their query heads are distributed over the copies. The last query head
    may be repeated as padding; only one copy counts. Repeating it, rather than adding zeros, keeps
    the largest number of a row, which determines its 8-bit scale. Groups of gate and up, experts
    and ids are padded with zeros, which add nothing.
    """
    if split_axis(path) is None:
        return leaf
    name, part = name_of(path)
    layer = getattr(path[1], "idx", path[1]) if len(path) > 2 else 0
    heads = cfg.heads(layer)
    if part is None or is_split_by_row(name):
        return _fitted(name, leaf, cfg, heads, num_parts)
    if part == "scales":
        return _fitted(name, leaf[None], cfg, heads, num_parts)[0]
    xp = _module(leaf)
    return xp.moveaxis(_fitted(name, xp.moveaxis(leaf, -1, 0), cfg, heads, num_parts), 0, -1)


def _fitted(name: str, leaf: Array, cfg: Any, heads: tuple[int, int], num_parts: int) -> Array:
    """Fit a leaf with the axes of its 16-bit form; N and H of `wo` may be one axis."""
    groups, size = heads
    copies = num_parts // math.gcd(groups, num_parts)
    if name in ("wqkv", "wqk", "bqkv"):
        return _dealt(leaf, copies, 1 if name == "wqk" else 2)
    if name == "wo":
        if copies == 1:
            return leaf
        queries = _padded(leaf.reshape(groups, -1, size, leaf.shape[-1]), 1, copies)
        return queries.reshape(-1, *leaf.shape[1:])
    turn = 1
    if name in ("w_down", "shared_down"):
        turn = gate_up_shape(cfg.hidden_size, leaf.shape[0])[-1]
    return _padded(leaf, AXES[name], num_parts * turn)


def _dealt(leaf: Array, copies: int, behind: int) -> Array:
    """Repeat every KV head of [... G n+m H] `copies` times and distribute its n query heads.

    The last m heads of a group are key and value, or one head that is both.
    """
    if copies == 1:
        return leaf
    xp = _module(leaf)
    queries = _padded(leaf[..., :-behind, :], leaf.ndim - 2, copies, mode="edge")
    *axes, num_groups, num_queries, size = queries.shape
    queries = queries.reshape(*axes, num_groups * copies, num_queries // copies, size)
    others = xp.repeat(leaf[..., -behind:, :], copies, axis=leaf.ndim - 3)
    return xp.concatenate([queries, others], axis=-2)


def _padded(leaf: Array, axis: int, multiple: int, mode: str = "constant") -> Array:
    """Pad an axis to a multiple with zeros, or with its last entry ("edge")."""
    missing = -leaf.shape[axis] % multiple
    if not missing:
        return leaf
    widths = [(0, missing if i == axis else 0) for i in range(leaf.ndim)]
    return _module(leaf).pad(leaf, widths, mode=mode)


def split_axis(path: Any) -> int | None:
    """The axis along which the leaf at a key path is split; None: whole on every device."""
    name, part = name_of(path)
    axis = AXES.get(name)
    if part is None or axis is None or is_split_by_row(name):
        return axis
    if axis:  # outputs, which come first in 8 bits
        return axis - 1
    return 1 if part == "values" else None  # inputs, which come last


def is_split_by_row(name: str) -> bool:
    """Whether a leaf is split by experts or ids, which are the first axis in 8 bits as well."""
    return name.startswith("experts") or name in ("embed", "lm_head")


def name_of(path: Any) -> tuple[str, str | None]:
    """The name of the leaf at a key path, and its part ("values" or "scales") if it has 8 bits."""
    *before, last = path
    name = getattr(last, "name", None)
    if before and name in _PARTS:
        return name_of(before)[0], name
    if before and hasattr(last, "idx"):  # one of a tuple
        return name_of(before)
    return name or getattr(last, "key", last), None


def _module(leaf: Any) -> Any:
    return np if isinstance(leaf, np.ndarray) else jnp
