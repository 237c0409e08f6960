"""Pallas Mosaic kernel for NVIDIA Hopper: norms of all heads, values too, and rotation.

A program is a warpgroup with the heads of one group in four rows, or with some of these heads if
rows are few; each warp has a row. Both halves of a head are spread over the lanes alike, so that a
thread holds both numbers of a rotated pair and a norm is a sum over the lanes of a warp. Results
are rounded wherever the reference rounds.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .. import hopper
from .fp8 import Fp8Sums

_ROWS = 4  # rows of a program, one a warp
# Up to this number of programs, the heads of a group are split over several. H200, 256 rows of
# DiffusionGemma: global layers go from 6.6 to 4.8 us; sliding layers, which have this number of
# programs unsplit, are as fast with twice of them.
_PROGRAMS = 512
_LANES = 32
# Numbers that a lane loads before its first store, since loads are not moved across stores. H200,
# DiffusionGemma: 256 rows of the sliding layers take 3.4 us, and 3.8 one head at a time. All nine
# heads of the global layers exceed the registers: 4,096 rows take 61 us, and 48 one at a time.
_AT_ONCE = 32
_MOST_HALF = 256  # components of half a head, eight a lane: one load


def unsupported_heads(qkv: Array, cos: Array) -> str | None:
    """Why `norm_rotate` cannot take such heads, or None."""
    half, H = cos.shape[-1], qkv.shape[-1]
    M = cos.size // half
    if 2 * half != H or half % _LANES or half > _MOST_HALF or M % _ROWS:
        return (
            f"needs heads of a multiple of {2 * _LANES} up to {2 * _MOST_HALF}, rotated whole, and "
            f"a multiple of {_ROWS} rows, got {H}, {2 * half} of them rotated, and {M} rows"
        )
    return None


@functools.partial(jax.jit, static_argnames=("eps", "shares_values", "dtype", "interpret"))
def norm_rotate(  # lowered once
    qkv: Array | Fp8Sums,
    q_norm: Array,
    k_norm: Array,
    cos: Array,
    sin: Array,
    eps: float,
    *,
    shares_values: bool = False,
    dtype: Any = None,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """See `api.norm_rotate`; `interpret`, an `InterpretGPUParams`, runs it on a CPU, for tests."""
    G, both, H = (qkv.sums if isinstance(qkv, Fp8Sums) else qkv).shape[-3:]
    n = both - (1 if shares_values else 2)

    def run(qkv, q_norm, k_norm, cos, sin):
        *rows, half = cos.shape
        M = cos.size // half
        scales = ()
        if isinstance(qkv, Fp8Sums):
            qkv, scales = qkv.sums, (qkv.rows.reshape(M), qkv.columns)
        q, k, v = hopper.kernel(
            functools.partial(_norm_rotate, eps=eps),
            out_type=[
                jax.ShapeDtypeStruct(shape, dtype or qkv.dtype)
                for shape in ((M, G, n, H), (M, G, H), (M, G, H))
            ],
            grid=(M // _ROWS, G, min(both, max(1, _PROGRAMS * _ROWS // (M * G)))),
            grid_names=("rows", "group", "share"),
            kernel_name="norm_rotate",
            # The kernel never reads its own writes, so threads need not wait for their warpgroup.
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
            interpret=interpret,
        )(
            qkv.reshape(M, G, both, H),
            cos.reshape(M, half),
            sin.reshape(M, half),
            q_norm,
            k_norm,
            *scales,
        )
        return q.reshape(*rows, G * n, H), k.reshape(*rows, G, H), v.reshape(*rows, G, H)

    # Mosaic kernels have no batching rule, so vmap runs them one after another.
    return jax.custom_batching.sequential_vmap(run)(qkv, q_norm, k_norm, cos, sin)


def _norm_rotate(qkv, cos, sin, q_norm, k_norm, *refs, eps):
    """One group of four rows, head after head; 8-bit sums have a row and a column scale."""
    *factors, q, k, v = refs
    (both, H), n = qkv.shape[2:], q.shape[2]
    half = H // 2
    tile, halves = (_ROWS, half), (pl.ds(0, half), pl.ds(half, half))
    rows = pl.ds(pl.multiple_of(jax.lax.axis_index("rows") * _ROWS, _ROWS), _ROWS)
    group, layout = jax.lax.axis_index("group"), layout_of_rows(half)

    def load(ref, layout=layout):
        return hopper.load(ref, layout).astype(jnp.float32)

    def load_row(ref):
        return jax.lax.broadcast_in_dim(load(ref, layout.reduce(0)), tile, [1])

    def load_scale(ref):
        return [load_row(ref.at[at]) for at in halves]

    def rounded(values):
        return values.astype(q.dtype).astype(jnp.float32)

    by_row = [
        jax.lax.broadcast_in_dim(load(ref.at[rows], layout.reduce(1)), tile, [0])
        for ref in factors[:1]
    ]

    def load_head(j):
        pieces = [load(qkv.at[rows, group, j, at]) for at in halves]
        if not factors:
            return pieces
        columns = [load_row(factors[1].at[group, j, at]) for at in halves]
        return [rounded(a * by_row[0] * b) for a, b in zip(pieces, columns, strict=True)]

    def store(ref, pieces):
        for piece, at in zip(pieces, halves, strict=True):
            ref[:, at] = piece.astype(ref.dtype)

    cosine, sine = load(cos.at[rows]), load(sin.at[rows])
    scales = {"q": load_scale(q_norm), "k": load_scale(k_norm)}

    def write_head(j, pieces):
        mass = jnp.sum(sum(piece * piece for piece in pieces), axis=1)
        factor = jax.lax.broadcast_in_dim(jax.lax.rsqrt(mass / H + eps), tile, [0])
        normed = [piece * factor for piece in pieces]
        if j == both - 1:  # if keys and values share a head, this is the key's
            store(v.at[rows, group], normed)
        if j <= n:
            by = scales["q" if j < n else "k"]
            a, b = (rounded(piece * scale) for piece, scale in zip(normed, by, strict=True))
            turned = a * cosine - b * sine, b * cosine + a * sine
            store(q.at[rows, group, j] if j < n else k.at[rows, group], turned)

    share, shares = jax.lax.axis_index("share"), jax.lax.axis_size("share")
    for i in range(shares):

        @pl.when(share == i)
        def _(heads=range(i, both, shares)):
            at_once = max(1, _AT_ONCE * _LANES // H)
            for first in range(0, len(heads), at_once):
                for j, pieces in [(j, load_head(j)) for j in heads[first : first + at_once]]:
                    write_head(j, pieces)


def layout_of_rows(width: int) -> Any:
    """A layout of four rows of `width` numbers: a row a warp, adjacent numbers a lane."""
    return hopper.tiled(((_ROWS, width), (width // _LANES,)), (-3,), (-2,))
