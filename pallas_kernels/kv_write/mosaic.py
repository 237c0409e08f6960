"""A Pallas Mosaic kernel for NVIDIA Hopper: one launch writes the rows of all layers.

The arrays of pages are mutable to the kernel, so nothing is copied. A program, one warpgroup, takes
one head of one row of some arrays: all its loads first, then all its stores. (All heads in one
program, written out, took 42 s to lower for 56 arrays of 8.)
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .. import hopper

_THREADS = 128
_LOADS = 64  # of a program: in flight at once
_OPERANDS = 400  # pointers of a launch; a kernel's arguments fit in 4 KB


def unsupported(pages: tuple[Array, ...], page: Array, token_last: tuple[bool, ...]) -> str | None:
    """Why this back end cannot write to these pages here, or None."""
    return hopper.unsupported() or unsupported_arguments(pages, page, token_last)


def unsupported_arguments(
    pages: tuple[Array, ...], page: Array, token_last: tuple[bool, ...]
) -> str | None:
    """Why no device can write to these pages, or None."""
    H = pages[0].shape[-1]
    if reason := hopper.unsupported_version():
        return reason
    if any(token_last):
        return "needs pages whose numbers of a token lie side by side, not values of 8 bits"
    if not len(page):
        return "needs at least one row"
    if H % _THREADS:
        return f"needs a head size that is a multiple of {_THREADS}, got {H}"
    if any(mine.shape != pages[0].shape or mine.dtype != pages[0].dtype for mine in pages):
        return "needs pages of one shape and type in every layer"
    return None


@functools.partial(jax.jit, static_argnames=("token_last", "interpret"))
def write_rows(
    pages: tuple[Array, ...],
    rows: tuple[Array, ...],
    page: Array,
    offset: Array,
    token_last: tuple[bool, ...],
    *,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """See `api.write_rows`; `interpret`, an `InterpretGPUParams`, runs it on a CPU, for tests."""
    del token_last  # none is
    most = _OPERANDS // 2
    written = ()
    for first in range(0, len(pages), most):
        mine, new = pages[first : first + most], rows[first : first + most]
        written += _launch(mine, new, page, offset, interpret)
    return written


def _launch(
    pages: tuple[Array, ...], rows: tuple[Array, ...], page: Array, offset: Array, interpret: Any
) -> tuple[Array, ...]:
    flat = [new.reshape(-1, *new.shape[-2:]) for new in rows]
    flat, page, offset = jax.lax.optimization_barrier((flat, page, offset))  # see `hopper.kernel`
    written = [jax.new_ref(mine) for mine in pages]
    plgpu.kernel(
        functools.partial(_write_rows, num_arrays=len(pages)),
        out_type=(),
        grid=(len(page), pages[0].shape[1], -(-len(pages) // _LOADS)),
        grid_names=("row", "head", "arrays"),
        kernel_name="kv_write",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),  # nothing is read back
        interpret=interpret,
    )(*written, *flat, page, offset)
    return tuple(jax.freeze(mine) for mine in written)


def _write_rows(*refs, num_arrays: int):
    """Write one head of one row of some of the arrays."""
    written, rows = refs[:num_arrays], refs[num_arrays : 2 * num_arrays]
    pages, offsets = refs[2 * num_arrays :]
    P, _, _, H = written[0].shape
    row, head = jax.lax.axis_index("row"), jax.lax.axis_index("head")
    page, offset = pages[row], offsets[row]
    layout = plgpu.Layout.WG_STRIDED((H,), vec_size=H // _THREADS)

    for first in range(0, num_arrays, _LOADS):
        mine = range(first, min(first + _LOADS, num_arrays))

        @pl.when((page < P) & (jax.lax.axis_index("arrays") == first // _LOADS))
        def _(mine=mine):
            new = [hopper.load(rows[i].at[row, head], layout) for i in mine]
            for i, values in zip(mine, new, strict=True):
                written[i][page, head, offset] = values.astype(written[i].dtype)
