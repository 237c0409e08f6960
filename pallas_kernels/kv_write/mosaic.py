"""A Pallas Mosaic kernel for NVIDIA Hopper: one launch writes the rows of all layers.

The kernel mutates the arrays of pages, so nothing is copied. A program, one warpgroup, takes one
head of one row of some arrays, and issues all loads of a kind before its stores. (A program that
unrolled all heads took 42 s to lower for 56 arrays of 8 heads.) If values are token-last, 16
consecutive rows for consecutive tokens of a page are written together: each of their 16 programs
writes a 16th of the columns of all 16 rows, so that a warp stores contiguous bytes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .. import hopper
from ..lowered import lowered_once
from . import fp8

_THREADS = 128
_NEIGHBOURS = 16  # rows that write to consecutive tokens
_LOADS = 64  # loads of a program in flight at once
_OPERANDS = 400  # pointers of a launch; a kernel's arguments fit in 4 KB


def unsupported(pages: tuple[Array, ...], page: Array, token_last: tuple[bool, ...]) -> str | None:
    """Why this back end cannot write to these pages here, or None."""
    return hopper.unsupported() or unsupported_arguments(pages, page, token_last)


def unsupported_arguments(
    pages: tuple[Array, ...], page: Array, token_last: tuple[bool, ...]
) -> str | None:
    """Why no device can write to these pages, or None."""
    if reason := hopper.unsupported_version():
        return reason
    _, _, _, H = fp8.by_token_shape(pages[0], token_last[0])
    if not len(page):
        return "needs at least one row"
    if H % _THREADS:
        return f"needs a head size that is a multiple of {_THREADS}, got {H}"
    return fp8.unlike(pages, token_last)


@lowered_once(static_argnames=("token_last", "interpret"))
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
    most = _OPERANDS // 2
    written = ()
    for first in range(0, len(pages), most):
        some = slice(first, first + most)
        written += _launch(pages[some], rows[some], page, offset, token_last[some], interpret)
    return written


def _launch(
    pages: tuple[Array, ...],
    rows: tuple[Array, ...],
    page: Array,
    offset: Array,
    token_last: tuple[bool, ...],
    interpret: Any,
) -> tuple[Array, ...]:
    flat = [new.reshape(-1, *new.shape[-2:]) for new in rows]
    flat, page, offset = jax.lax.optimization_barrier((flat, page, offset))  # see `hopper.kernel`
    written = [jax.new_ref(mine) for mine in pages]
    plgpu.kernel(
        functools.partial(_write_rows, token_last=token_last),
        out_type=(),
        grid=(len(page), pages[0].shape[1], -(-len(pages) // _LOADS)),
        grid_names=("row", "head", "arrays"),
        kernel_name="kv_write",
        compiler_params=hopper.by_lane(unsafe_no_auto_barriers=True),  # nothing is read back
        interpret=interpret,
    )(*written, *flat, page, offset)
    return tuple(jax.freeze(mine) for mine in written)


def _write_rows(*refs, token_last: tuple[bool, ...]):
    """Write one head of one row of some of the arrays."""
    num_arrays = len(token_last)
    written, rows = refs[:num_arrays], refs[num_arrays : 2 * num_arrays]
    pages, offsets = refs[2 * num_arrays :]
    P, H = written[0].shape[0], rows[0].shape[-1]
    row, head = jax.lax.axis_index("row"), jax.lax.axis_index("head")
    page, offset = pages[row], offsets[row]
    side_by_side = plgpu.Layout.WG_STRIDED((H,), vec_size=H // _THREADS)

    def by_row(mine):
        """Write all numbers of the row."""
        layouts = [_apart(is_shared=False) if token_last[i] else side_by_side for i in mine]
        new = [
            hopper.load(rows[i].at[row, head], layout)
            for i, layout in zip(mine, layouts, strict=True)
        ]
        for i, values in zip(mine, new, strict=True):
            where = (slice(None), offset) if token_last[i] else (offset,)
            written[i][page, head, *where] = values.astype(written[i].dtype)

    def together(mine):
        """Write a 16th of the columns of the 16 rows of the row's group."""
        first, share = row - row % _NEIGHBOURS, H // _NEIGHBOURS
        some = pl.ds(row % _NEIGHBOURS * share, share)
        tokens = pl.ds(offset - row % _NEIGHBOURS, _NEIGHBOURS)
        layout = _apart(is_shared=True)
        new = [
            hopper.load(rows[i].at[pl.ds(first, _NEIGHBOURS), head, some].T, layout) for i in mine
        ]
        for i, values in zip(mine, new, strict=True):
            written[i][page, head, some, tokens] = values.astype(written[i].dtype)

    has_groups = any(token_last) and len(pages) >= _NEIGHBOURS
    are_neighbours = _are_neighbours(pages, offsets, row) if has_groups else None
    for first in range(0, num_arrays, _LOADS):
        mine = range(first, min(first + _LOADS, num_arrays))
        is_mine = (page < P) & (jax.lax.axis_index("arrays") == first // _LOADS)
        if are_neighbours is None:
            pl.when(is_mine)(functools.partial(by_row, mine))
            continue
        straight = [i for i in mine if not token_last[i]]
        turned = [i for i in mine if token_last[i]]
        pl.when(is_mine)(functools.partial(by_row, straight))
        pl.when(is_mine & are_neighbours)(functools.partial(together, turned))
        pl.when(is_mine & ~are_neighbours)(functools.partial(by_row, turned))


def _are_neighbours(pages: Any, offsets: Any, row: Array) -> Array:
    """Whether the rows of a row's group go to consecutive tokens of one page."""
    first = row - row % _NEIGHBOURS
    found = first + _NEIGHBOURS <= len(pages)
    first = jnp.minimum(first, len(pages) - _NEIGHBOURS)
    for i in range(1, _NEIGHBOURS):
        found &= pages[first + i] == pages[first]
        found &= offsets[first + i] == offsets[first] + i
    return found


def _apart(is_shared: bool) -> Any:
    """A layout of one number a thread: from one row, or from a few columns of 16 rows."""
    if is_shared:  # a warp takes 4 columns of 8 tokens
        return hopper.tiled(((8, _NEIGHBOURS), (4, 8), (1,)), (-5, -4), (-3, -2))
    return hopper.tiled(((_THREADS,), (32,), (1,)), (-3,), (-2,))
