"""The write of new keys and values into pages: the interface and its back ends.

Letters: M rows, G KV heads, H head size, P pages in the pool, Z page size.
"""

from typing import Literal, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .. import dispatch
from ..dispatch import BackEnd
from . import fp8, mosaic, reference

Implementation = Literal["xla", "mosaic"]
Keys: TypeAlias = Float[Array, "P G Z H"]
Values: TypeAlias = Float[Array, "P G Z H"] | Float[Array, "P G H Z"]  # `fp8.is_token_last`
Rows: TypeAlias = Float[Array, "*M G H"]


def write_rows(
    pages: tuple[tuple[Keys, Values], ...],
    rows: tuple[tuple[Rows, Rows], ...],
    page: Int[Array, " M"],
    offset: Int[Array, " M"],
    *,
    implementation: Implementation | None = None,
) -> tuple[tuple[Keys, Values], ...]:
    """Write each row to its page; a donated array of pages is updated in place.

    Args:
        pages, rows: The keys and the values of every layer. Layers may differ in shape; those of
            one shape are written together. 8-bit values are token-last.
        page, offset: Target of each row, the same in all arrays. Targets must be distinct and
            pages not negative, since back ends differ otherwise. A row whose page is P or more is
            dropped.
        implementation: "xla" (any device), "mosaic" (Hopper, jax 0.11), or None for the one
            preferred on this device.

    Returns:
        The pages.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, (keys, _) in enumerate(pages):
        groups.setdefault(keys.shape, []).append(i)
    written: dict[int, tuple[Array, Array]] = {}
    for group in groups.values():
        mine, new = (tuple(x for i in group for x in pairs[i]) for pairs in (pages, rows))
        out = _write_alike(mine, new, page, offset, implementation)
        written.update(zip(group, zip(out[::2], out[1::2], strict=True), strict=True))
    return tuple(written[i] for i in range(len(pages)))


def _write_alike(
    pages: tuple[Array, ...],
    rows: tuple[Array, ...],
    page: Array,
    offset: Array,
    implementation: Implementation | None,
) -> tuple[Array, ...]:
    """`write_rows` for layers of one shape; keys and values alternate."""
    token_last = (False, fp8.is_token_last(pages[1])) * (len(pages) // 2)
    rows = tuple(new.reshape(-1, *new.shape[-2:]) for new in rows)  # one kernel a number of rows
    if dispatch.is_plain(implementation):
        return reference.write_rows(pages, rows, page, offset, token_last)
    is_short = pages[0].dtype.itemsize <= 2
    back_ends = {
        "mosaic": BackEnd(mosaic.write_rows, mosaic.unsupported(pages, page, token_last), is_short),
        "xla": BackEnd(reference.write_rows),
    }
    return dispatch.run(implementation, back_ends, pages, rows, page, offset, token_last)


def page_slots(
    page_table: Int[Array, "B C"],
    positions: Int[Array, "B T"],
    where: Bool[Array, "B T"],
    num_pages: int,
    page_size: int,
) -> tuple[Int[Array, " BT"], Int[Array, " BT"]]:
    """Page and offset of each row to write; rows not to be written get a page past the pool.

    Rows past the page table, or on a page of -1, are dropped too. Negative indices would wrap, so
    dropped rows take distinct pages from `num_pages` on: indices stay unique.
    """
    column = positions // page_size
    C = page_table.shape[1]
    page = jnp.take_along_axis(page_table, jnp.clip(column, 0, C - 1), axis=1)
    ok = where & (column < C) & (page >= 0) & (positions >= 0)
    past = num_pages + jnp.arange(positions.size, dtype=jnp.int32).reshape(positions.shape)
    return jnp.where(ok, page, past).reshape(-1), (positions % page_size).reshape(-1)
