"""Pallas Mosaic kernels for NVIDIA Hopper: sums of rows and their norms; rows rounded to 8 bits.

A thread block has one warpgroup and one row. Results are rounded wherever the reference rounds.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from .. import hopper
from ..lowered import lowered_once
from .fp8 import DTYPE as FP8
from .fp8 import Fp8Rows, Fp8Sums, factors_of_scalar
from .routed import RoutedRows

_THREADS, _VECTOR = 128, 4  # threads that norm a row, and numbers that each loads at once
_WIDEST = 4096  # longest row that was measured
_ROUNDED_VECTOR, _WIDEST_ROUNDED = 8, 16384  # the same two for rows that are rounded to 8 bits


def unsupported_row(x: Array) -> str | None:
    """Why `add_rms_norm` cannot take such rows, or None."""
    return _unsupported_width(x, _THREADS * _VECTOR, _WIDEST)


def unsupported_sandwich(x: Array) -> str | None:
    """Why `sandwich_norm` cannot take such rows, or None."""
    return _unsupported_width(x, 2 * _THREADS, _WIDEST)


def unsupported_rounded(x: Array) -> str | None:
    """Why `quantize_rows` cannot take such rows, or None."""
    return _unsupported_width(x, _THREADS * _VECTOR, _WIDEST_ROUNDED)


def _unsupported_width(x: Array, step: int, most: int) -> str | None:
    if x.shape[-1] % step or x.shape[-1] > most:
        return f"needs rows of a multiple of {step} up to {most}, got {x.shape[-1]}"
    return None


@lowered_once(static_argnames=("eps", "is_quantized", "interpret"))
def add_rms_norm(
    x: Array,
    y: Array | tuple[Array | RoutedRows, ...],
    scale: Array,
    eps: float,
    *,
    is_quantized: bool = False,
    interpret: Any = None,
) -> tuple[Array, Array | Fp8Rows]:
    """See `api.add_rms_norm`."""

    def run(x, y, scale):
        D = x.shape[-1]
        rows = x.reshape(-1, D)
        given, groups = [], []  # addends: partial sums (one array) or routed rows (three)
        for each in y:
            if isinstance(each, RoutedRows):
                lists = each.place.reshape(len(rows), -1), each.weights.reshape(len(rows), -1)
                mine = [each.results, *lists]
            else:
                mine = [each.reshape(-1, *rows.shape)]
            given += mine
            groups.append(len(mine))
        kind = jax.ShapeDtypeStruct(rows.shape, x.dtype)
        out = [kind, kind]
        if is_quantized:
            out = [kind, kind.update(dtype=FP8), jax.ShapeDtypeStruct((len(rows),), jnp.float32)]
        total, normed, *scales = hopper.kernel(
            functools.partial(_add_rms_norm, groups=groups, eps=eps),
            out_type=out,
            grid=(len(rows),),
            grid_names=("row",),
            kernel_name="add_rms_norm",
            interpret=interpret,
        )(rows, scale, *given)
        total, normed = total.reshape(x.shape), normed.reshape(x.shape)
        return total, Fp8Rows(normed, scales[0].reshape(x.shape[:-1])) if scales else normed

    return jax.custom_batching.sequential_vmap(run)(x, y if isinstance(y, tuple) else (y,), scale)


def weighted(results, place, weights, row, layout):
    """The weighted sum over a row's experts, in their order; see `RoutedRows`."""
    total = None
    for j in range(place.shape[1]):
        at = place[row, j]
        is_there = at < results.shape[0]
        values = hopper.load(results.at[jnp.where(is_there, at, 0)], layout).astype(jnp.float32)
        share = jnp.where(is_there, weights[row, j], 0.0)
        part = jnp.where(jnp.broadcast_to(is_there, values.shape), values, 0.0) * share
        total = part if total is None else total + part
    assert total is not None
    return total


def _add_rms_norm(x, scale, *refs, groups, eps):
    """One row, by one warpgroup."""
    given, out = refs[: sum(groups)], refs[sum(groups) :]
    row, (_, D) = jax.lax.axis_index("row"), x.shape
    layout = plgpu.Layout.WG_STRIDED((D,), vec_size=_VECTOR)

    def load(ref):
        return hopper.load(ref, layout).astype(jnp.float32)

    addends = []
    for size in groups:
        own, given = given[:size], given[size:]
        if size == 3:
            results, place, weights = own
            addends.append(weighted(results, place, weights, row, layout))
        else:
            parts = [load(own[0].at[i, row]) for i in range(own[0].shape[0])]
            whole = functools.reduce(jnp.add, parts)
            # Round as a product of many rows does before it gets here, so that bits agree.
            addends.append(whole.astype(x.dtype).astype(jnp.float32))
    kept = (load(x.at[row]) + functools.reduce(jnp.add, addends)).astype(x.dtype)
    store_normed(kept, load(scale), row, out, eps)


def store_normed(kept, scale, row, out, eps):
    """Store a row and its norm; the norm has 8 bits if `out` has a third reference, for scales."""
    total, normed, *scales = out
    total[row] = kept
    dtype, kept = kept.dtype, kept.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.sum(kept * kept) / len(kept) + eps)
    scaled, by = (each.astype(dtype).astype(jnp.float32) for each in (kept * factor, scale))
    rounded = (scaled * by).astype(dtype)
    if not scales:
        normed[row] = rounded
        return
    rounded = rounded.astype(jnp.float32)
    factor, unit = factors_of_scalar(jnp.max(jnp.abs(rounded)), rounded.shape)
    normed[row] = (rounded * factor).astype(FP8)
    scales[0][row] = unit


@functools.partial(jax.jit, static_argnames=("eps", "is_quantized", "interpret"))
def sandwich_norm(  # layers lower once
    x: Array,
    branches: tuple[tuple[Array | Fp8Sums | RoutedRows, Array], ...],
    following: tuple[Array, ...],
    eps: float,
    *,
    outer: Array | None = None,
    factor: tuple[Array, Array] | None = None,
    is_quantized: bool = False,
    interpret: Any = None,
) -> tuple[Array, tuple[Array | Fp8Rows, ...]]:
    """See `api.sandwich_norm`."""

    def run(x, branches, following, outer, factor):
        rows = x.reshape(-1, x.shape[-1])
        named = {"x": rows}
        for i, (y, scale) in enumerate(branches):
            if isinstance(y, Fp8Sums):
                named |= {f"rows{i}": y.rows.reshape(-1), f"columns{i}": y.columns}
                y = y.sums
            if isinstance(y, RoutedRows):
                lists = {"place": y.place, "weights": y.weights}
                named |= {f"{name}{i}": a.reshape(len(rows), -1) for name, a in lists.items()}
                y = y.results
            else:
                y = y.reshape(rows.shape)
            named |= {f"branch{i}": y, f"scale{i}": scale}
        named |= {f"following{i}": scale for i, scale in enumerate(following)}
        if outer is not None:
            named["outer"] = outer
        if factor is not None:
            is_second = factor[1].astype(jnp.int32).reshape(-1)
            named |= {"factors": factor[0].astype(x.dtype), "is_second": is_second}
        out = [jax.ShapeDtypeStruct(rows.shape, x.dtype)] * (1 + len(following))
        if is_quantized:
            out[1] = out[1].update(dtype=FP8)
            out.append(jax.ShapeDtypeStruct((len(rows),), jnp.float32))
        out = hopper.kernel(
            functools.partial(_sandwich_norm, names=tuple(named), eps=eps),
            out_type=out,
            grid=(len(rows),),
            grid_names=("row",),
            kernel_name="sandwich_norm",
            interpret=interpret,
        )(*named.values())
        total, *normed = (one.reshape(x.shape) for one in out[: 1 + len(following)])
        if is_quantized:
            normed[0] = Fp8Rows(normed[0], out[-1].reshape(x.shape[:-1]))
        return total, tuple(normed)

    return jax.custom_batching.sequential_vmap(run)(x, branches, following, outer, factor)


def _sandwich_norm(*refs, names, eps):
    """One row, by one warpgroup."""
    given = dict(zip(names, refs, strict=False))
    total, *normed = refs[len(names) :]
    units = [normed.pop()] if len(normed[-1].shape) == 1 else []
    row, (_, D) = jax.lax.axis_index("row"), total.shape
    layout = plgpu.Layout.WG_STRIDED((D,), vec_size=math.gcd(D // _THREADS, _ROUNDED_VECTOR))

    def rounded(values):
        return values.astype(total.dtype).astype(jnp.float32)

    def norm(values, scale):
        return values * jax.lax.rsqrt(jnp.sum(values * values) / D + eps) * scale

    # Start all loads before the first sum, which synchronises the threads.
    factor = None
    if "factors" in given:
        first, second = (given["factors"][i].astype(jnp.float32) for i in range(2))
        factor = jnp.where(given.pop("is_second")[row] != 0, second, first)
        del given["factors"]

    by_row = {name: given.pop(name)[row] for name in names if name.startswith("rows")}
    sums = {}
    for i in [name.removeprefix("place") for name in names if name.startswith("place")]:
        own = (given.pop(f"{name}{i}") for name in ("branch", "place", "weights"))
        results, place, weights = own
        sums[f"branch{i}"] = rounded(weighted(results, place, weights, row, layout))
    at = {
        name: hopper.load(ref.at[row] if len(ref.shape) > 1 else ref, layout).astype(jnp.float32)
        for name, ref in given.items()
    }
    at |= sums
    count = sum(name.startswith("branch") for name in names)
    for i in range(count):
        if f"rows{i}" in by_row:
            whole = at[f"branch{i}"] * by_row[f"rows{i}"] * at[f"columns{i}"]
            at[f"branch{i}"] = rounded(whole)
    each = [rounded(norm(at[f"branch{i}"], at[f"scale{i}"])) for i in range(count)]
    out = functools.reduce(lambda a, b: rounded(a + b), each)
    if "outer" in at:
        out = rounded(norm(out, at["outer"]))
    kept = rounded(at["x"] + out)
    if factor is not None:
        kept = rounded(kept * factor)
    total[row] = kept.astype(total.dtype)
    root = jax.lax.rsqrt(jnp.sum(kept * kept) / D + eps)
    for i, to in enumerate(normed):
        value = kept * root * at[f"following{i}"]
        if i == 0 and units:
            value = rounded(value)
            by, units[0][row] = factors_of_scalar(jnp.max(jnp.abs(value)), value.shape)
            value = value * by
        to[row] = value.astype(to.dtype)


@lowered_once(static_argnames=("interpret",))
def quantize_rows(x: Float[Array, "*M K"], *, interpret: Any = None) -> Fp8Rows:
    """See `api.quantize_rows`."""

    def run(x):
        rows = x.reshape(-1, x.shape[-1])
        values, scales = hopper.kernel(
            _quantize_rows,
            out_type=[
                jax.ShapeDtypeStruct(rows.shape, FP8),
                jax.ShapeDtypeStruct((len(rows),), jnp.float32),
            ],
            grid=(len(rows),),
            grid_names=("row",),
            kernel_name="quantize_rows",
            interpret=interpret,
        )(rows)
        return Fp8Rows(values.reshape(x.shape), scales.reshape(x.shape[:-1]))

    return jax.custom_batching.sequential_vmap(run)(x)


def _quantize_rows(x, values, scales):
    """One row, by one warpgroup."""
    row, (_, K) = jax.lax.axis_index("row"), x.shape
    vector = math.gcd(K // _THREADS, _ROUNDED_VECTOR)
    layout = plgpu.Layout.WG_STRIDED((K,), vec_size=vector)
    kept = hopper.load(x.at[row], layout).astype(jnp.float32)
    factor, unit = factors_of_scalar(jnp.max(jnp.abs(kept)), kept.shape)
    values[row] = (kept * factor).astype(FP8)
    scales[row] = unit
