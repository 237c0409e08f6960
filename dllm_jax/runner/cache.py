"""KV pools: one array for K and one for V per layer, and where new rows go in their pages."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dllm_jax.kernels.kv_write import fp8
from dllm_jax.models.sharding import Split, num_local

PAGE_SIZE = 64  # one K tile of 64 x 128 is 16 KB

# K and V of each layer, [P G Z H]; V of 8 bits is [P G H Z].
Pool = tuple[tuple[Array, Array], ...]


def new_pool(
    cfg: Any, num_pages: int, page_size: int, dtype: Any, split: Split | None = None
) -> Pool:
    """An empty pool for every layer of a model; zeros, so that stale rows are finite.

    Args:
        split: The devices that share the model; the pool is then one device's.
    """

    def empty(layer: int) -> tuple[Array, Array]:
        heads, size = cfg.heads(layer)
        keys = jnp.zeros((num_pages, num_local(heads, split), page_size, size), dtype)
        if split is not None:
            keys = jax.lax.pcast(keys, (split.axis,), to="varying")
        return keys, jnp.zeros_like(keys.mT if fp8.is_token_last(keys) else keys)

    return tuple(empty(i) for i in range(cfg.num_layers))


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
