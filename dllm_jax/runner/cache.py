"""KV pools: one array for K and one for V per layer, and the write of new rows into pages."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dllm_jax.kernels import kv_write

PAGE_SIZE = 64  # one K tile of 64 x 128 is 16 KB

# K and V of each layer, [P G Z H].
Pool = tuple[tuple[Array, Array], ...]


def new_pool(cfg: Any, num_pages: int, page_size: int, dtype: Any) -> Pool:
    """An empty pool for every layer of a model; zeros, so that stale rows are finite."""

    def empty(layer: int) -> Array:
        heads, size = cfg.heads(layer)
        return jnp.zeros((num_pages, heads, page_size, size), dtype)

    return tuple((empty(i), empty(i)) for i in range(cfg.num_layers))


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


def write_rows(
    pool: Pool,
    rows: tuple[tuple[Array, Array], ...],
    slots: tuple[Int[Array, " BT"], Int[Array, " BT"]],
) -> Pool:
    """The pool with K and V rows [B T G H] of every layer at `slots` (from `page_slots`)."""
    pages = kv_write.write_rows(
        tuple(leaf for pair in pool for leaf in pair),
        tuple(leaf for pair in rows for leaf in pair),
        *slots,
    )
    return tuple((pages[2 * i], pages[2 * i + 1]) for i in range(len(pool)))
