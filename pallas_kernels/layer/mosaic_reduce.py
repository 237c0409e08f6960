"""Sums over the devices of one host in one launch, followed by the residual and the norm.

Every thread block stores its rows to the exchange buffers of all devices, and reads the rows of
the others from its own buffer. A buffer holds `NOTHING` until data arrives, so the kernel needs no
flags, no fences and no second launch.

A buffer has three turns. A launch writes and reads turn k, and clears turn k - 1, which the launch
before has read. A peer writes turn k + 2 = k - 1 (mod 3) only after it has received this device's
numbers of turn k + 1, which are sent after the clearing.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from .. import hopper
from ..hopper.peers import (
    BLOCKS,
    HEADER_BYTES,
    SLICE_BYTES,
    THREADS,
    TURNS,
    VECTOR_BYTES,
    exchange,
)
from .fp8 import DTYPE as FP8
from .fp8 import Fp8Rows
from .mosaic_norm import store_normed


def buffer_words(num_devices: int) -> int:
    """Size of a device's buffer in words of 4 bytes."""
    return (HEADER_BYTES + TURNS * num_devices * BLOCKS * SLICE_BYTES) // 4


def blank(num_devices: int) -> Array:
    """A buffer before the first launch."""
    words = jnp.full(buffer_words(num_devices), -1, jnp.int32)
    return words.at[: HEADER_BYTES // 4].set(0)


def peers(addresses: list[int]) -> Int32[np.ndarray, "devices words"]:
    """For each device the address of every buffer, two words each, and the device's own number."""
    words = [word for address in addresses for word in divmod(address, 2**32)[::-1]]
    rows = [[*words, rank] for rank in range(len(addresses))]
    return np.array(rows, np.uint32).view(np.int32)


def num_blocks(rows: int) -> int:
    """Thread blocks of a launch, all with the same number of rows."""
    return next(n for n in range(min(rows, BLOCKS), 0, -1) if rows % n == 0)


def unsupported(x: Array) -> str | None:
    """Why the devices cannot sum rows like `x` here, or None."""
    if reason := hopper.unsupported_version() or hopper.unsupported():
        return reason
    rows, width, itemsize = math.prod(x.shape[:-1]), x.shape[-1], x.dtype.itemsize
    step = THREADS * VECTOR_BYTES // itemsize
    if not jnp.issubdtype(x.dtype, jnp.floating) or itemsize not in (2, 4) or width % step:
        return f"needs rows of a multiple of {step} numbers of 16 or 32 bits, got {x.dtype}{width}"
    if rows // num_blocks(rows) * width * itemsize > SLICE_BYTES:
        return f"needs {SLICE_BYTES} bytes of a thread block at most, got {x.shape}"
    return None


def add_rms_norm(
    x: Array,
    y: Array,
    scale: Array,
    eps: float,
    peers: Array,
    *,
    is_quantized: bool = False,
) -> tuple[Array, Array | Fp8Rows]:
    """`api.add_rms_norm` with `y` summed over the devices."""
    D, num_devices = x.shape[-1], peers.shape[-1] // 2
    rows = x.reshape(-1, D)
    kind = jax.ShapeDtypeStruct(rows.shape, x.dtype)
    out = [kind, kind]
    if is_quantized:
        out = [kind, kind.update(dtype=FP8), jax.ShapeDtypeStruct((len(rows),), jnp.float32)]
    kept, normed, *scales = hopper.kernel(
        functools.partial(_launch, eps=eps, num_devices=num_devices),
        out_type=out,
        grid=(num_blocks(len(rows)),),
        grid_names=("block",),
        kernel_name="reduce_add_rms_norm",
    )(peers, y.reshape(-1, *rows.shape), rows, scale)
    kept, normed = kept.reshape(x.shape), normed.reshape(x.shape)
    return kept, Fp8Rows(normed, scales[0].reshape(x.shape[:-1])) if scales else normed


def total(y: Array, x: Array, peers: Array) -> Array:
    """See `api.reduction`."""
    D, num_devices = x.shape[-1], peers.shape[-1] // 2
    rows = y.reshape(-1, x.size // D, D)
    out = hopper.kernel(
        functools.partial(_launch, eps=0.0, num_devices=num_devices),
        out_type=jax.ShapeDtypeStruct(rows.shape[1:], x.dtype),
        grid=(num_blocks(rows.shape[1]),),
        grid_names=("block",),
        kernel_name="reduce",
    )(peers, rows)
    return out.reshape(x.shape)


def _launch(peers, parts, *refs, eps, num_devices):
    """One thread block: its rows on one device."""
    M = parts.shape[1]
    grid = num_blocks(M)
    block = jax.lax.axis_index("block")
    rows = [block + i * grid for i in range(M // grid)]
    reduce_rows(peers.at[0], parts, refs, rows, block, eps=eps, num_devices=num_devices)


def reduce_rows(
    table: Any,
    parts: Any,
    refs: Sequence[Any],
    rows: list[Array],
    block: Array,
    *,
    eps: float,
    num_devices: int,
) -> None:
    """Sum rows over the devices; if `refs` has more than the sum, add the residual and norm it.

    Args:
        table: This device's row of `peers`, [words].
        parts: This device's terms of the sum, [X M D].
        refs: The sum; or residual, scale, new residual, its norm, and the scales of the norm if it
            has 8 bits.
    """
    X, _, D = parts.shape
    out = refs[0] if len(refs) == 1 else refs[2]
    vec = VECTOR_BYTES // jnp.dtype(out.dtype).itemsize
    layout = plgpu.Layout.WG_STRIDED((D,), vec_size=vec)

    def load(ref):
        return hopper.load(ref, layout).astype(jnp.float32)

    own = [
        functools.reduce(jnp.add, [load(parts.at[i, row]) for i in range(X)]).astype(out.dtype)
        for row in rows
    ]
    sums = exchange(table, own, block, num_devices)
    for row, total in zip(rows, sums, strict=True):
        if len(refs) == 1:
            out[row] = total.astype(out.dtype)
            continue
        x, scale, *stored = refs
        kept = (load(x.at[row]) + total).astype(x.dtype)
        store_normed(kept, load(scale), row, stored, eps)
