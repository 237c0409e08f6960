"""Two Pallas Triton kernels for NVIDIA GPUs: gate and up with SiLU, then down.

A program is one tile of rows times some columns of its expert's weights; programs of empty tiles
leave at once. Rows are gathered on the way in and stored by place, so nothing is added up across
programs, and the sum over a row's experts has one order. Float32 is multiplied as TF32 unless JAX's
default matmul precision says "highest", which is slow here.

JAX has deprecated the Triton kind: no public type names it, and removing it is removing this file.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from ..activation import ACTIVATIONS, Activation
from .fp8 import Fp8Experts
from .tiles import TileTable, combine, tile_table

_LEAST_SIDE = 16  # of a Triton product, in every dimension


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """What a program computes at a time; sides are powers of two, cut down to what divides."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int

    def fit(self, columns: int, depth: int) -> "Block":
        """Sides that divide a matrix of that size."""
        return dataclasses.replace(
            self, columns=math.gcd(self.columns, columns), depth=math.gcd(self.depth, depth)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Sizes of both kernels.

    The defaults are within 6 % of the best that was tried on an H200: eight tilings of
    LLaDA2-mini's shapes at 32 and 128 rows, and 16, 64 or 128 rows of a tile of two more models' at
    32, 128 and 1,024 rows (benchmarks/results/expert_ffn_h200.json).
    """

    rows: int = 64
    gate_up: Block = Block(columns=64, depth=64, num_warps=4, num_stages=4)
    down: Block = Block(columns=128, depth=64, num_warps=4, num_stages=4)


def unsupported(x: Array, w_down: Array | Fp8Experts) -> str | None:
    """Why this back end cannot take these arguments here, or None."""
    if jax.default_backend() != "gpu":
        return "needs an NVIDIA GPU"
    return unsupported_arguments(x, w_down)


def unsupported_arguments(x: Array, w_down: Array | Fp8Experts) -> str | None:
    """Why no device can take these arguments, or None."""
    _, F, D = w_down.shape
    if not len(x):
        return "needs at least one row"
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"needs bfloat16, float16 or float32, got {x.dtype}"
    if isinstance(w_down, Fp8Experts):
        return f"needs experts of 16 or 32 bits, got {w_down.dtype}"
    if D % _LEAST_SIDE or F % _LEAST_SIDE:
        return f"needs widths that are multiples of {_LEAST_SIDE}, got {D=} and {F=}"
    return None


@functools.partial(jax.jit, static_argnames=("activation", "tiling", "interpret"))  # lowered once
def expert_ffn(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    w_gate_up: Array,
    w_down: Array,
    *,
    activation: Activation = "silu",
    tiling: Tiling = Tiling(),
    interpret: bool = False,
) -> Array:
    """See `api.expert_ffn`; `interpret` runs the kernels as plain XLA, for tests."""
    table = tile_table(expert_ids, len(w_down), tiling.rows)
    call = functools.partial(_call, table, tiling, interpret)
    k = expert_ids.shape[1]
    F, D = w_down.shape[1:]
    body = functools.partial(_gate_up, k=k, activation=activation)
    w_gate_up = w_gate_up.reshape(-1, D, 2 * F)
    inner = call(body, tiling.gate_up.fit(F, D), (x, w_gate_up), F, x.dtype)
    operands = (inner, expert_weights.reshape(-1), w_down)
    results = call(_down, tiling.down.fit(D, F), operands, D, jnp.float32)
    return combine(results, table.place).astype(x.dtype)


def _call(
    table: TileTable,
    tiling: Tiling,
    interpret: bool,
    body: Callable[..., None],
    block: Block,
    operands: tuple[Array, ...],
    width: int,
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "P F"]:
    """Run `body` over columns x tiles. Places of no expert's pair are not written.

    Neighbouring programs are columns of one tile; neighbours that are tiles at the same columns
    took 2 % longer at 32 rows and 4 % at 128 (`Tiling`'s source, "triton tiles first").
    """
    return pl.pallas_call(
        functools.partial(body, rows=tiling.rows, block=block),
        out_shape=jax.ShapeDtypeStruct((len(table.pair), width), dtype),
        grid=(width // block.columns, len(table.first)),
        compiler_params=pltriton.CompilerParams(
            num_warps=block.num_warps, num_stages=block.num_stages
        ),
        interpret=interpret,
    )(table.pair, table.expert, table.first, table.length, *operands)


def _gate_up(pairs, experts, firsts, lengths, x, w, out, *, k, activation, rows, block):
    """`activation(x Wg) * (x Wu)` of a tile's rows, some columns."""
    tile, column = pl.program_id(1), pl.program_id(0) * block.columns
    length = pltriton.load(lengths.at[tile])

    @pl.when(length > 0)
    def _():
        expert, place, live = _open(experts, firsts, tile, length, rows)
        row = jax.lax.div(pltriton.load(pairs.at[place], mask=live, other=0), jnp.int32(k))
        halves = [pl.ds(start, block.columns) for start in (column, out.shape[1] + column)]

        def step(i, sums):
            depth = i * block.depth
            mine = _load_rows(x, row, depth, block.depth, live)
            gate, up = (
                pltriton.load(w.at[expert, pl.ds(depth, block.depth), half]) for half in halves
            )
            return sums[0] + _dot(mine, gate), sums[1] + _dot(mine, up)

        blank = jnp.zeros((rows, block.columns), jnp.float32)
        gate, up = jax.lax.fori_loop(0, x.shape[1] // block.depth, step, (blank, blank))
        _store_rows(out, place, column, ACTIVATIONS[activation](gate) * up, live)


def _down(pairs, experts, firsts, lengths, x, weights, w, out, *, rows: int, block: Block):
    """`weight * (x Wd)` of a tile's rows, some columns; `x` is by place already."""
    tile, column = pl.program_id(1), pl.program_id(0) * block.columns
    length = pltriton.load(lengths.at[tile])

    @pl.when(length > 0)
    def _():
        expert, place, live = _open(experts, firsts, tile, length, rows)
        columns = pl.ds(column, block.columns)

        def step(i, total):
            depth = i * block.depth
            mine = _load_rows(x, place, depth, block.depth, live)
            return total + _dot(
                mine, pltriton.load(w.at[expert, pl.ds(depth, block.depth), columns])
            )

        blank = jnp.zeros((rows, block.columns), jnp.float32)
        total = jax.lax.fori_loop(0, x.shape[1] // block.depth, step, blank)
        pair = pltriton.load(pairs.at[place], mask=live, other=0)
        weight = pltriton.load(weights.at[pair], mask=live, other=0.0)
        _store_rows(out, place, column, weight[:, None] * total, live)


def _open(experts, firsts, tile, length, rows: int) -> tuple[Array, Array, Array]:
    """The expert of a tile, the places of its rows, and which of them belong to it."""
    lane = jnp.arange(rows, dtype=jnp.int32)
    expert = pltriton.load(experts.at[tile])
    return expert, pltriton.load(firsts.at[tile]) + lane, lane < length


def _dot(rows: Float[Array, "R D"], weights: Float[Array, "D F"]) -> Float[Array, "R F"]:
    return pltriton.dot(rows, weights.astype(rows.dtype))


def _load_rows(ref, row: Array, column: Array, width: int, live: Array) -> Array:
    """A tile of gathered rows; rows without an expert are zeros."""
    where, mask = _cells(row, column, width, live)
    return pltriton.load(ref.at[where], mask=mask, other=0)


def _store_rows(ref, row: Array, column: Array, values: Array, live: Array) -> None:
    where, mask = _cells(row, column, values.shape[1], live)
    pltriton.store(ref.at[where], values.astype(ref.dtype), mask=mask)


def _cells(row: Array, column: Array, width: int, live: Array) -> tuple[tuple[Array, Array], Array]:
    """Indices and mask of `width` columns of the given rows.

    All of the tile's shape: the one form of a gather that Triton and the interpreter both take.
    """
    shape = (len(row), width)
    columns = column + jnp.arange(width, dtype=jnp.int32)
    spread = functools.partial(jnp.broadcast_to, shape=shape)
    return (spread(row[:, None]), spread(columns[None, :])), spread(live[:, None])
