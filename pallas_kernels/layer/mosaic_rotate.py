"""Pallas Mosaic kernel for NVIDIA Hopper: norm and rotation of heads in a short launch.

A program is a warpgroup with some heads of one row. A tile holds the same head of eight (or four)
groups, with 16 (or 32) lanes to a head. So a thread holds both numbers of a rotated pair, a norm
is a sum over the lanes of a head, and each tile is known at trace time to be query, key or value.
Results are rounded to 16 bits wherever the reference rounds.
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

_GROUPS = (8, 4)  # groups of a tile, in order of preference
_LANES = 128  # threads of a tile
_PIECES = (32, 64)  # rotated pairs, one to four components a lane
_HEADS = 2  # heads of each group in a program


def unsupported_heads(qkv: Array, cos: Array) -> str | None:
    """Why `rotate_qkv` cannot take such heads, or None."""
    G, _, H = qkv.shape[-3:]
    R2 = cos.shape[-1]
    if R2 not in _PIECES or H % R2 or H > 4 * R2 or H < 2 * R2 or G % _GROUPS[-1]:
        heads = f"a multiple of {_GROUPS[-1]} KV heads, 64 or 128 components of each rotated"
        return f"needs {heads}, and of the rest no more, got {G} of {H}, {2 * R2} of them rotated"
    return None


@lowered_once(static_argnames=("eps", "dtype", "interpret"))
def rotate_qkv(
    qkv: Array,
    bias: Array | None,
    q_norm: Array | None,
    k_norm: Array | None,
    cos: Array,
    sin: Array,
    eps: float,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """See `api.rotate_qkv`; `interpret`, an `InterpretGPUParams`, runs it on a CPU, for tests."""
    G, both, H = qkv.shape[-3:]
    norms = () if q_norm is None or k_norm is None else (q_norm, k_norm)

    def run(qkv, bias, norms, cos, sin):
        *rows, R2 = cos.shape
        M = cos.size // R2
        kind = jnp.dtype(dtype or qkv.dtype)
        groups = next(n for n in _GROUPS if G % n == 0)
        body = functools.partial(
            _rotate_qkv, groups=groups, has_norms=bool(norms), has_bias=bias is not None, eps=eps
        )
        shapes = ((M, G, both - 2, H), (M, G, H), (M, G, H))
        q, k, v = hopper.kernel(
            body,
            out_type=[jax.ShapeDtypeStruct(shape, kind) for shape in shapes],
            grid=(M, G // groups, -(-both // _HEADS)),
            grid_names=("row", "groups", "heads"),
            kernel_name="rotate_qkv",
            # The kernel never reads its own writes, so threads need not wait for their warpgroup.
            compiler_params=hopper.by_lane(approx_math=True, unsafe_no_auto_barriers=True),
            interpret=interpret,
        )(
            qkv.reshape(-1, M, G, both, H),
            cos.reshape(M, R2),
            sin.reshape(M, R2),
            *norms,
            *(() if bias is None else (bias,)),
        )
        return q.reshape(*rows, -1, H), k.reshape(*rows, G, H), v.reshape(*rows, G, H)

    # Mosaic kernels have no batching rule, so vmap runs them one after another.
    return jax.custom_batching.sequential_vmap(run)(qkv, bias, norms, cos, sin)


def _rotate_qkv(qkv, cos, sin, *refs, groups, has_norms: bool, has_bias: bool, eps: float):
    """Some heads of some groups of one row, in pieces as wide as the number of rotated pairs."""
    *extra, q, k, v = refs
    num_parts, _, _, both, H = qkv.shape
    width, dtype = cos.shape[-1], q.dtype
    tile = (groups, width)
    pieces_at = [pl.ds(start, width) for start in range(0, H, width)]
    row = jax.lax.axis_index("row")
    first = pl.multiple_of(jax.lax.axis_index("groups") * groups, groups)
    mine_of, layout = pl.ds(first, groups), _layout(*tile)

    def load(ref, layout=layout):
        return hopper.load(ref, layout).astype(jnp.float32)

    def widened(values, axis):
        return plgpu.layout_cast(jax.lax.broadcast_in_dim(values, tile, [axis]), layout)

    def load_columns(ref):
        return widened(load(ref, layout.reduce(0)), 1)

    def rounded(values):
        return values.astype(dtype).astype(jnp.float32)

    def work(mine):
        """Process the heads with these indices in each group; all loads start before a use."""
        given = [
            [[load(qkv.at[i, row, mine_of, j, at]) for i in range(num_parts)] for at in pieces_at]
            for j in mine
        ]
        cosine, sine = (load_columns(table.at[row]) for table in (cos, sin))
        norms = extra[:2] if has_norms else []
        scales = [[rounded(load_columns(scale.at[at])) for at in pieces_at] for scale in norms]
        own_bias = extra[2 * has_norms :]
        biases = [
            [rounded(load(ref.at[mine_of, j, at])) for ref in own_bias for at in pieces_at]
            for j in mine
        ]
        for j, parts, bias in zip(mine, given, biases, strict=True):
            pieces = [rounded(functools.reduce(jnp.add, own)) for own in parts]
            if has_bias:
                pieces = [rounded(piece + own) for piece, own in zip(pieces, bias, strict=True)]
            if has_norms and j < both - 1:
                mass = jnp.sum(sum(piece * piece for piece in pieces), axis=1)
                factor = widened(jax.lax.rsqrt(mass / H + eps), 0)
                pieces = [
                    rounded(rounded(piece * factor) * scale)
                    for piece, scale in zip(pieces, scales[j == both - 2], strict=True)
                ]
            if j < both - 1:
                a, b, *rest = pieces
                pieces = [a * cosine - b * sine, b * cosine + a * sine, *rest]
            out = q.at[row, mine_of, j] if j < both - 2 else (k, v)[j - both + 2].at[row, mine_of]
            for piece, at in zip(pieces, pieces_at, strict=True):
                out[:, at] = piece.astype(dtype)

    for i, start in enumerate(range(0, both, _HEADS)):
        mine = range(start, min(both, start + _HEADS))
        pl.when(jax.lax.axis_index("heads") == i)(functools.partial(work, mine))


def _layout(groups: int, width: int) -> Any:
    """A layout that deals rows evenly to warps; a lane holds adjacent numbers of a row."""
    rows, lane = (groups, width), (width // (_LANES // groups),)
    if groups == 4:  # a row a warp
        return hopper.tiled((rows, lane), (-3,), (-2,))
    return hopper.tiled((rows, (groups // 4, width), lane), (-5,), (-3, -2))
