"""Pallas Mosaic kernel for NVIDIA Hopper: norm and rotation of heads in a short launch.

A program is a warpgroup with some heads of one row. A tile of it is the same head of eight groups,
each by 16 lanes, so that a pair lies in one thread, the norm is a sum over the lanes of a head, and
which of query, key or value a tile is, is known when the kernel is written. Roundings to 16 bits
are those of the reference.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

_GROUPS, _LANES = 8, 16  # of a tile, and of a head in it
_HALVES = (32, 64)  # of a head: two or four components to a lane
_HEADS = 2  # of each group, to a program


def unsupported_heads(qkv: Array, cos: Array) -> str | None:
    """Why `rotate_qkv` cannot take such heads, or None."""
    G, _, H = qkv.shape[-3:]
    if 2 * cos.shape[-1] != H or H // 2 not in _HALVES or G % _GROUPS:
        heads = f"a multiple of {_GROUPS} KV heads, of 64 or 128 components, all of them rotated"
        return f"needs {heads}, got {G} of {H}, {2 * cos.shape[-1]} of them rotated"
    return None


@functools.partial(jax.jit, static_argnames=("eps", "dtype", "interpret"))  # layers lower once
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
        body = functools.partial(
            _rotate_qkv, has_norms=bool(norms), has_bias=bias is not None, eps=eps
        )
        shapes = ((M, G, both - 2, H), (M, G, H), (M, G, H))
        q, k, v = plgpu.kernel(
            body,
            out_type=[jax.ShapeDtypeStruct(shape, kind) for shape in shapes],
            grid=(M, G // _GROUPS, -(-both // _HEADS)),
            grid_names=("row", "groups", "heads"),
            kernel_name="rotate_qkv",
            # Nothing reads what is written here, so threads need not wait for their warpgroup.
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
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


def _rotate_qkv(qkv, cos, sin, *refs, has_norms: bool, has_bias: bool, eps: float):
    """Some heads of eight groups, for one row."""
    *extra, q, k, v = refs
    num_parts, _, _, both, H = qkv.shape
    half, dtype = H // 2, q.dtype
    tile = (_GROUPS, half)
    halves = [pl.ds(i * half, half) for i in range(2)]
    row = jax.lax.axis_index("row")
    groups = pl.ds(pl.multiple_of(jax.lax.axis_index("groups") * _GROUPS, _GROUPS), _GROUPS)
    layout = _layout(half)

    def load(ref, layout=layout):
        # jax 0.10 requires an index here.
        found = plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]
        return found.astype(jnp.float32)

    def load_columns(ref):
        return jax.lax.broadcast_in_dim(load(ref, layout.reduce(0)), tile, [1])

    def rounded(values):
        return values.astype(dtype).astype(jnp.float32)

    def work(mine):
        """Heads of these places in their groups; all loads start before the first use."""
        given = [
            [[load(qkv.at[i, row, groups, j, at]) for i in range(num_parts)] for at in halves]
            for j in mine
        ]
        cosine, sine = (load_columns(table.at[row]) for table in (cos, sin))
        norms = extra[:2] if has_norms else []
        scales = [[rounded(load_columns(scale.at[at])) for at in halves] for scale in norms]
        own_bias = extra[2 * has_norms :]
        biases = [
            [rounded(load(ref.at[groups, j, at])) for ref in own_bias for at in halves]
            for j in mine
        ]
        for j, parts, bias in zip(mine, given, biases, strict=True):
            pieces = [rounded(functools.reduce(jnp.add, own)) for own in parts]
            if has_bias:
                pieces = [rounded(piece + own) for piece, own in zip(pieces, bias, strict=True)]
            if has_norms and j < both - 1:
                mass = jnp.sum(sum(piece * piece for piece in pieces), axis=1)
                factor = jax.lax.broadcast_in_dim(jax.lax.rsqrt(mass / H + eps), tile, [0])
                pieces = [
                    rounded(rounded(piece * factor) * scale)
                    for piece, scale in zip(pieces, scales[j == both - 2], strict=True)
                ]
            if j < both - 1:
                a, b = pieces
                pieces = [a * cosine - b * sine, b * cosine + a * sine]
            out = q.at[row, groups, j] if j < both - 2 else (k, v)[j - both + 2].at[row, groups]
            for piece, at in zip(pieces, halves, strict=True):
                out[:, at] = piece.astype(dtype)

    for i, start in enumerate(range(0, both, _HEADS)):
        mine = range(start, min(both, start + _HEADS))
        pl.when(jax.lax.axis_index("heads") == i)(functools.partial(work, mine))


def _layout(half: int) -> Any:
    """Eight rows, two to a warp, one to 16 lanes, each of which has neighbours."""
    from jax.experimental.mosaic.gpu.fragmented_array import Tiling

    return plgpu.Layout.TILED(
        Tiling(((_GROUPS, half), (_GROUPS // 4, half), (half // _LANES,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )
