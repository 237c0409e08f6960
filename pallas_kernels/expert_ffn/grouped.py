"""Rows sorted by expert, one expert's weights read at a time: plain XLA, any device.

The loop runs over the used tiles of `tiles.py`: an expert without rows costs nothing, and memory
holds the weights of one expert and the results of the pairs. (Where `lax.ragged_dot` has no kernel,
it computes every expert for every row.)
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..activation import ACTIVATIONS, Activation
from .fp8 import Fp8Experts, products
from .tiles import TileTable, combine, tile_table

# On a CPU, reading an expert hides the work of about 16 rows: [R 2048] by [2048 1024] in float32 on
# two cores takes 1.0 ms at R=1, 0.9 at 8, 1.3 at 16, 2.7 at 32, 5.8 at 64. The size is fixed: XLA
# sums products of fewer than 4 rows in another order, so a row's bits would depend on their number.
TILE_ROWS = 16


def expert_ffn(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    w_gate_up: Array | Fp8Experts,
    w_down: Array | Fp8Experts,
    *,
    activation: Activation = "silu",
    tile_rows: int = TILE_ROWS,
) -> Array:
    """See `api.expert_ffn`."""
    if not len(x):
        return x
    table = tile_table(expert_ids, len(w_down), tile_rows)
    matrices = w_gate_up, w_down
    results = _run_tiles(x, expert_weights, table, *matrices, tile_rows, activation)
    return combine(results, table.place).astype(x.dtype)


def _run_tiles(
    x: Array,
    expert_weights: Array,
    table: TileTable,
    w_gate_up: Array | Fp8Experts,
    w_down: Array | Fp8Experts,
    tile_rows: int,
    activation: Activation,
) -> Float[Array, "P_up D"]:
    """Weighted results by place; the next tile overwrites the garbage past a tile's end."""
    k = expert_weights.shape[1]
    pairs = jnp.pad(table.pair, (0, tile_rows))

    def run_tile(i: Array, results: Array) -> Array:
        expert, first = table.expert[i], table.first[i]
        pair = jax.lax.dynamic_slice_in_dim(pairs, first, tile_rows)
        gate, up = jnp.split(_product(x[pair // k], w_gate_up, expert), 2, axis=-1)
        inner = (ACTIVATIONS[activation](gate) * up).astype(x.dtype)
        out = _product(inner, w_down, expert)
        out = expert_weights.reshape(-1, 1)[pair] * out
        return jax.lax.dynamic_update_slice_in_dim(results, out, first, axis=0)

    num_used = (table.length > 0).sum(dtype=jnp.int32)
    blank = jnp.zeros((len(pairs), x.shape[1]), jnp.float32)
    # Results differ between devices, so the initial value must have a varying type as well.
    if axes := jax.typeof(jax.tree.leaves(w_down)[0]).manual_axis_type.varying:
        blank = jax.lax.pcast(blank, tuple(axes), to="varying")
    return jax.lax.fori_loop(0, num_used, run_tile, blank)


def _of_expert(weights: Float[Array, "E ..."], expert: Array) -> Array:
    """The slice of one expert from an array of all experts.

    The barrier keeps jax 0.10 from converting all experts' bfloat16 ahead of the loop on a CPU.
    """
    weights, expert = jax.lax.optimization_barrier((weights, expert))
    return jax.lax.dynamic_index_in_dim(weights, expert, keepdims=False)


def _product(
    rows: Float[Array, "R D"], weights: Float[Array, "E D ..."] | Fp8Experts, expert: Array
) -> Float[Array, "R F"]:
    """Rows times the weights of one expert, accumulated in float32."""
    if isinstance(weights, Fp8Experts):
        flat = weights.flat
        return products(rows, _of_expert(flat.values, expert), _of_expert(flat.scales, expert))
    own = _of_expert(weights.reshape(*weights.shape[:2], -1), expert)
    return jax.lax.dot_general(
        rows,
        own.astype(rows.dtype),
        (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
