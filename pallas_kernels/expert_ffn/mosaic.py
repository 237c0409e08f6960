"""Pallas Mosaic kernels for NVIDIA Hopper: four launches, an expert's weights read once a tile.

1. `mosaic_place.py`: each pair (row, expert) gets a place in the list sorted by expert, where its
   row is copied.
2. Gate and up with the activation, and 3. down: `mosaic_product.py`, tiles of rows times columns of
   the weights of their expert.
4. `_combine`: the weighted sum over a row's experts, in the order of its choices; omitted if the
   following norm adds the results up (`RoutedRows`).

8-bit experts are stored as [N K] and multiplied with 8-bit rows. The first launch rounds the input
rows; a fifth one, `mosaic_round.py`, rounds the rows between the products. The scales of row and
column multiply the float32 sums.

A dense half that all rows take may share these launches: its columns count as further experts. Its
rows lie before all other places, once for gate and up, and after that once for each region of its
inner columns. This saves its launches and their gaps, and its weights load while other blocks load
those of experts. Its gate and up are interleaved in shared memory too, so their sums are separated
by column groups; the sums of experts are two halves.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .. import hopper
from ..activation import GELU_CUBE, GELU_SLOPE, Activation
from ..layer.fp8 import DTYPE as FP8
from ..layer.fp8 import Fp8Matrix, Fp8Rows
from ..layer.mosaic_norm import weighted
from ..layer.routed import RoutedRows
from ..lowered import lowered_once
from .fp8 import Fp8Experts
from .mosaic_place import THREADS, Beside, sorted_rows, strided
from .mosaic_product import LINE_BYTES, PAIR, Tiling, product
from .mosaic_round import rounded
from .mosaic_tiles import COLUMNS

_MOST_ROWS = 288  # rows of a tile: leaves four ring buffers; a thread holds three sums of 64 rows

# A dense half: its normed rows (None: those of the experts), gate and up interleaved, and down.
Dense = tuple[Fp8Rows | None, Array | Fp8Matrix, Array | Fp8Matrix]


def unsupported(x: Array, w_down: Array | Fp8Experts) -> str | None:
    """Why this back end cannot take these arguments here, or None."""
    return hopper.unsupported() or unsupported_arguments(x, w_down)


def unsupported_arguments(x: Array, w_down: Array | Fp8Experts) -> str | None:
    """Why no device can take these arguments, or None."""
    _, F, D = w_down.shape
    if reason := hopper.unsupported_version():
        return reason
    if not len(x):
        return "needs at least one row"
    if x.dtype not in (jnp.bfloat16, jnp.float16) or w_down.dtype not in (x.dtype, FP8):
        kinds = f"{x.dtype} and {w_down.dtype}"
        return f"needs rows and weights of one 16-bit type, or weights of 8 bits, got {kinds}"
    wide = THREADS * PAIR if w_down.dtype == FP8 else THREADS
    if D % wide or F % COLUMNS:
        return (
            f"needs a model width that is a multiple of {wide} and an inner one of {COLUMNS}, "
            f"got {D=} and {F=}"
        )
    return None


def choose_tiling(num_pairs: int, w_down: Array | Fp8Experts) -> Tiling:
    """A tiling for `num_pairs` pairs that are spread evenly over the experts.

    Within 3 % of the best tried on an H200 (benchmarks/results/expert_ffn_mosaic_h200.json).
    """
    E, F, D = w_down.shape
    rows, wide = num_pairs / E, 128 if D % 256 else 256
    gated = 128 if F < 128 else 256
    if rows <= 24:  # most experts have fewer rows than a warpgroup takes
        # Narrow tiles spread few experts evenly over the blocks, though they read rows twice.
        is_narrow = F % 128 or rows <= 2 or isinstance(w_down, Fp8Experts)
        return Tiling(groups=1, gate_up=128 if is_narrow else gated, down=wide)
    if rows <= 96:
        return Tiling(groups=2, gate_up=128, down=wide)
    if rows <= 160:  # most experts have some more than the rows of two warpgroups
        return Tiling(groups=3, gate_up=128, down=128)
    if isinstance(w_down, Fp8Experts):
        return Tiling(groups=2, gate_up=128, down=128)
    # With evenly spread rows, one expert in forty exceeds the mean by two square roots.
    most = rows + 2 * math.sqrt(rows)
    each = most / math.ceil(most / _MOST_ROWS)
    return Tiling(groups=2, rows=math.ceil(each / 32) * 32, gate_up=128, down=128)


def unsupported_beside(w_down: Array | Fp8Experts, dense: Dense) -> str | None:
    """Why a dense half cannot share the launches of these experts, or None."""
    rows, w_gate_up, w_out = dense
    _, F, _ = w_down.shape
    inner, turn = w_out.shape[0], w_gate_up.shape[-1]
    if isinstance(w_down, Fp8Experts):
        of_kind = isinstance(rows, Fp8Rows | None)
        of_kind &= isinstance(w_gate_up, Fp8Matrix) and isinstance(w_out, Fp8Matrix)
    else:
        of_kind = rows is None and w_down.dtype == w_gate_up.dtype == w_out.dtype
    if not of_kind:
        return "needs rows and weights of the experts' type; other rows only in 8 bits"
    wide, least, count = F, 1, inner // F
    if isinstance(w_down, Fp8Experts):
        wide, least = w_down.values.shape[-1], THREADS * PAIR
        assert isinstance(w_out, Fp8Matrix)
        if w_out.values.shape[-1] % LINE_BYTES:
            return f"needs inner columns that fill whole lines, got {inner}"
    if wide % least:  # width of the rows between the products
        return f"needs experts whose inner columns fill {least}s, got {wide}"
    if inner % F or -(-inner // wide) != count:
        return f"needs as many regions of {wide} inner columns as of {F}, got {inner}"
    if turn % 8 or COLUMNS % turn:  # column groups of a product and of a tile
        return f"needs turns of 8s that divide {COLUMNS}, got {turn}"
    return None


@lowered_once(static_argnames=("activation", "tiling", "interpret"))
def routed_rows(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    w_gate_up: Array | Fp8Experts,
    w_down: Array | Fp8Experts,
    dense: Dense | None = None,
    *,
    activation: Activation = "silu",
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> tuple[RoutedRows, ...]:
    """See `api.expert_ffn`; `interpret`, an `InterpretGPUParams`, runs it on a CPU, for tests.

    Returns:
        The results of the experts, and those of the dense half if given.
    """
    E, F, D = w_down.shape
    tiling = choose_tiling(expert_ids.size, w_down) if tiling is None else tiling
    if tiling.gate_up > 2 * F or tiling.down > D:
        raise ValueError(f"{tiling=} is wider than its matrices, {F=} and {D=}")
    is_small = isinstance(w_down, Fp8Experts)
    beside, held, more_gate_up, more_down = (None,) * 4
    if dense is not None:
        held, more_gate_up, more_down = dense
        inner = more_down.shape[0]
        if F % (tiling.gate_up // 2):
            raise ValueError(f"{tiling=} begins columns early; the dense half's lie in turns")
        numbers = {"experts": E, "count": inner // F, "inner": inner}
        beside = Beside(**numbers, rows=len(x), tile_rows=tiling.tile_rows)
    rows, place, tiles = sorted_rows(
        x, expert_ids, E, tiling.tile_rows, is_small, interpret, held, beside
    )

    def gated(gate: Array, up: Array) -> Array:
        slope = gate
        if activation == "gelu":
            slope = GELU_SLOPE * (gate + GELU_CUBE * gate * gate * gate)
        root = jax.lax.rsqrt(1 + jnp.exp(-slope))  # one instruction; a division takes about twenty
        return gate * (root * root) * up

    how = {"tiles": tiles, "dtype": x.dtype, "tiling": tiling, "interpret": interpret}
    multiply = functools.partial(product, **how)
    inner = multiply(rows, w_gate_up, more_gate_up, gated, parts=2)
    if is_small:
        inner = rounded(inner, F, interpret, beside)
    results = multiply(inner, w_down, more_down, lambda sums: sums, parts=1)
    routed = RoutedRows(results, place, expert_weights.astype(jnp.float32))
    if beside is None:
        return (routed,)
    at = np.arange(len(x))[:, None] + np.arange(beside.count)[None] * beside.apart
    ones = jnp.ones(at.shape, jnp.float32)
    return routed, RoutedRows(results, jnp.asarray(at, jnp.int32), ones)


@lowered_once(static_argnames=("activation", "tiling", "interpret"))
def expert_ffn(
    x: Array,
    expert_ids: Array,
    expert_weights: Array,
    w_gate_up: Array | Fp8Experts,
    w_down: Array | Fp8Experts,
    *,
    activation: Activation = "silu",
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> Array:
    """The results of `routed_rows`, added up and rounded."""
    given = x, expert_ids, expert_weights, w_gate_up, w_down
    how = {"activation": activation, "tiling": tiling, "interpret": interpret}
    (routed,) = routed_rows.__wrapped__(*given, **how)
    return hopper.kernel(
        _combine,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(len(x),),
        grid_names=("row",),
        kernel_name="expert_ffn_combine",
        interpret=interpret,
    )(routed.results, routed.place, routed.weights)


def _combine(results, place, weights, out):
    """One row: the weighted sum of its experts' results."""
    row, layout = jax.lax.axis_index("row"), strided(results.shape[1], 8)
    out[row] = weighted(results, place, weights, row, layout).astype(out.dtype)
