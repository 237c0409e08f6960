"""A Pallas Triton kernel for NVIDIA GPUs: one launch writes the rows of all layers.

Every array of pages is an operand that is its own result, so nothing is copied. A program takes
some rows of one KV head and a few of the arrays: all their loads first, then all their stores.
Where an array is token-last, neighbouring threads store neighbouring rows, which are side by side
in a page: a store of single bytes then fills sectors of memory together.

JAX has deprecated the Triton kind: no public type names it, and removing it is removing this file.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from .. import triton_offsets
from . import fp8

_ROWS, _WARPS = 8, 2  # of a program
# Where some are token-last; SDAR-1.7B on an H200, 32 and 1,024 rows, us: 5.9 and 59, by row 5.7 and
# 39; two warps 9.6 and 60, 32 rows 7.0 and 48; a row's numbers beside each other 350 (1,024).
_BYTE_ROWS, _BYTE_WARPS = 16, 8
_ARRAYS = 8  # of a program: loads in flight at once
_OPERANDS = 400  # pointers of a launch; a kernel's arguments fit in 4 KB


def unsupported(pages: tuple[Array, ...], page: Array, token_last: tuple[bool, ...]) -> str | None:
    """Why this back end cannot write to these pages here, or None."""
    if jax.default_backend() != "gpu":
        return "needs an NVIDIA GPU"
    return unsupported_arguments(pages, page, token_last)


def unsupported_arguments(
    pages: tuple[Array, ...], page: Array, token_last: tuple[bool, ...]
) -> str | None:
    """Why no device can write to these pages, or None."""
    _, _, _, H = fp8.by_token_shape(pages[0], token_last[0])
    if not len(page):
        return "needs at least one row"
    if H & (H - 1):
        return f"needs a head size that is a power of two, got {H}"
    return fp8.unlike(pages, token_last) or triton_offsets.unsupported(pages[0])


@functools.partial(jax.jit, static_argnames=("token_last", "interpret"))
def write_rows(
    pages: tuple[Array, ...],
    rows: tuple[Array, ...],
    page: Array,
    offset: Array,
    token_last: tuple[bool, ...],
    *,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """See `api.write_rows`; `interpret` runs the kernel as plain XLA, for tests."""
    most = _OPERANDS // 3
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
    interpret: bool,
) -> tuple[Array, ...]:
    G = pages[0].shape[1]
    num_rows, num_warps = (_BYTE_ROWS, _BYTE_WARPS) if any(token_last) else (_ROWS, _WARPS)
    body = functools.partial(_write_rows, num_rows=num_rows, token_last=token_last)
    flat = [new.reshape(-1, *new.shape[-2:]) for new in rows]
    return tuple(
        pl.pallas_call(
            body,
            out_shape=[jax.ShapeDtypeStruct(mine.shape, mine.dtype) for mine in pages],
            grid=(-(-len(page) // num_rows), G, -(-len(pages) // _ARRAYS)),
            input_output_aliases={i: i for i in range(len(pages))},
            compiler_params=pltriton.CompilerParams(num_warps=num_warps),
            interpret=interpret,
        )(*pages, *flat, page, offset)
    )


def _write_rows(*refs, num_rows: int, token_last: tuple[bool, ...]):
    """Write some rows of one head in some of the arrays."""
    num_arrays = len(token_last)
    rows, (pages, offsets), written = (
        refs[num_arrays : 2 * num_arrays],
        refs[2 * num_arrays : 2 * num_arrays + 2],
        refs[2 * num_arrays + 2 :],
    )
    M, _, H = rows[0].shape
    row = pl.program_id(0) * num_rows + jnp.arange(num_rows, dtype=jnp.int32)
    there = row < M
    page = pltriton.load(pages.at[row], mask=there, other=-1)
    offset = pltriton.load(offsets.at[row], mask=there, other=0)
    wanted = (page >= 0) & (page < written[0].shape[0])

    def spread(x):
        return jnp.broadcast_to(x[:, None], (num_rows, H))

    group = jnp.broadcast_to(pl.program_id(1), (num_rows, H))
    column = jnp.broadcast_to(jnp.arange(H, dtype=jnp.int32)[None, :], (num_rows, H))
    source = (spread(row), group, column)
    mask = spread(wanted)
    target = (spread(page), group, spread(offset), column)
    across = (spread(page).T, group.T, column.T, spread(offset).T)

    for first in range(0, num_arrays, _ARRAYS):
        mine = range(first, min(first + _ARRAYS, num_arrays))

        @pl.when(pl.program_id(2) == first // _ARRAYS)
        def _(mine=mine):
            new = [pltriton.load(rows[i].at[source], mask=mask, other=0.0) for i in mine]
            for i, values in zip(mine, new, strict=True):
                values = values.astype(written[i].dtype)
                if token_last[i]:
                    pltriton.store(written[i].at[across], values.T, mask=mask.T)
                else:
                    pltriton.store(written[i].at[target], values, mask=mask)
