"""Leaves of a model on their devices, one after another: those of a file, and drawn ones."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.tree_util import GetAttrKey
from jaxtyping import Array, Int

from dllm_jax.convert.scaled import Scaled
from dllm_jax.models.dense import INIT_STD, is_norm
from dllm_jax.models.quantization import as_stored, quantized, stored_width
from dllm_jax.models.sharding import Split

_DRAW = 1 << 26  # elements of a random leaf drawn at a time


def one_by_one(
    config: Any, is_small: Callable[[Any], bool], split: Split | None
) -> Callable[..., Any]:
    """A function that puts leaves on their devices; while one is copied, the next is read.

    Args:
        is_small: Whether the leaf of a key path is rounded to 8 bits.
        split: Devices that share the leaves; None: the default one.
    """
    under_way: list[Any] = []

    def settled(read: Any) -> Any:
        """Hand over a leaf, or rows of one, once the last leaf is on its devices."""
        if not isinstance(read, np.ndarray):  # `map` lets go of rows before the next are read
            return map(settled, read)
        jax.block_until_ready(under_way)  # before another takes memory in 16 bits
        under_way.clear()
        return read

    def put(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        if split is None:
            return _put(leaf)
        is_whole = isinstance(leaf, np.ndarray)
        return split.put(path, leaf, config) if is_whole else split.put_rows(path, leaf)

    def keep(path: tuple[Any, ...], leaf: Any) -> Any:
        if isinstance(leaf, Scaled):
            leaf = dataclasses.replace(leaf, values=settled(leaf.values))
            placed = _put_stored(path, leaf, config, split)
        else:
            placed = put(path, settled(leaf))
            placed = quantized(path, placed, split) if is_small(path) else placed
        under_way.append(placed)
        return placed

    return keep


def _put(leaf: np.ndarray) -> jax.Array:
    """An array of the host on the default device, which brings its axes in order."""
    # On a CPU device_put would alias the host buffer, so copy it. `jnp.array` would compile a
    # program for every shape.
    if jax.default_backend() == "cpu":
        leaf = np.array(leaf)
    order = sorted(range(leaf.ndim), key=lambda axis: -leaf.strides[axis])
    there = jax.device_put(leaf.transpose(order))
    is_ordered = order == sorted(order)
    return there if is_ordered else _turned(there, tuple(np.argsort(order).tolist()))


@partial(jax.jit, static_argnames="axes")
def _turned(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return x.transpose(axes)


def _put_stored(path: tuple[Any, ...], leaf: Scaled, config: Any, split: Split | None) -> Any:
    """A leaf that is stored in 8 bits, on the device or on those of a split."""
    name, depth = getattr(path[-1], "key", path[-1]), leaf.form.depth
    fill = partial(_filled, width=stored_width(name, depth, split))
    if split is None:
        values, scales = _put(fill(leaf.values)), _put(leaf.scales)
    else:
        of_values, of_scales = ((*path, GetAttrKey(part)) for part in ("values", "scales"))
        scales = split.put(of_scales, leaf.scales, config)
        if isinstance(leaf.values, np.ndarray):
            values = split.put(of_values, fill(leaf.values), config)
        else:
            values = split.put_rows(of_values, map(fill, leaf.values))
    return as_stored(name, values, scales, depth, split)


def _filled(rows: np.ndarray, width: int) -> np.ndarray:
    """Rows padded with zeros to a width."""
    missing = width - rows.shape[-1]
    return np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)]) if missing else rows


def random_leaf(index: int, path: tuple[Any, ...], leaf: Any) -> jax.Array:
    """One leaf, finished before the next begins, to bound memory; norms are ones.

    Only drawn shapes need a compiled program.
    """
    if is_norm(path):
        return jax.device_put(np.ones(leaf.shape, leaf.dtype))
    return jax.block_until_ready(_draw(np.int32(index), leaf.shape, leaf.dtype))


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _draw(index: Int[Array, ""], shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normal numbers, in parts of the first axis to bound the memory of bits and float32 values."""
    # rbg compiles and draws many times faster than threefry.
    key = jax.random.fold_in(jax.random.key(0, impl="rbg"), index)
    parts = next(n for n in range(1, shape[0] + 1) if _is_enough(n, shape))

    def part(key: jax.Array) -> jax.Array:
        some = jax.random.normal(key, (shape[0] // parts, *shape[1:]))
        return (INIT_STD * some).astype(dtype)

    if parts == 1:
        return part(key)
    return jax.lax.map(part, jax.random.split(key, parts)).reshape(shape)


def _is_enough(parts: int, shape: tuple[int, ...]) -> bool:
    """Whether `parts` divides the first axis and each part is small, or a single row."""
    return shape[0] % parts == 0 and (math.prod(shape) // parts <= _DRAW or parts == shape[0])
