"""Pallas Triton kernels for NVIDIA GPUs and short windows: one launch an operation.

A launch that moves little takes about 2.5 us whatever it does, so what counts is how many there
are. Roundings to 16 bits are those of the reference, each where it has one.

JAX has deprecated the Triton kind: no public type names it, and removing it is removing this file.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

_LEAST_SIDE = 16  # of a Triton product, in every dimension
_WIDEST = 16384  # row that one program holds
# Rows for each program of `rotate_qkv`, up to so many rows in all and above: at 32 and 128 rows,
# 4 save 1 % of a step against 8, and 2 do not; more rows were measured with 8 only.
_FEW_ROWS, _TOKENS_OF_FEW, _TOKENS = 128, 4, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """What a program of `split_matmul` computes; all but `num_warps` and `num_stages` are sides.

    Attributes:
        depth: Of both operands, a step.
        splits: Programs that share the depth of a tile; the parts they leave are added later.
    """

    rows: int = 64
    columns: int = 64
    depth: int = 64
    splits: int = 4
    num_warps: int = 4
    num_stages: int = 4


def unsupported_type(x: Array) -> str | None:
    """Why the kernels cannot take rows of this type here, or None."""
    if jax.default_backend() != "gpu":
        return "needs an NVIDIA GPU"
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"needs bfloat16, float16 or float32, got {x.dtype}"
    return None if x.size else "needs at least one row"


def unsupported_row(x: Array) -> str | None:
    """Why `add_rms_norm` cannot take such rows, or None."""
    return None if x.shape[-1] <= _WIDEST else f"needs rows of up to {_WIDEST}, got {x.shape[-1]}"


def unsupported_heads(qkv: Array, cos: Array) -> str | None:
    """Why `rotate_qkv` cannot take such heads, or None."""
    half, rest = cos.shape[-1], qkv.shape[-1] - 2 * cos.shape[-1]
    if half & (half - 1) or rest & (rest - 1):
        return f"needs parts of a head that are powers of two, got {half} rotated pairs and {rest}"
    return None


def unsupported_product(x: Array, w: Array, tiling: Tiling) -> str | None:
    """Why `split_matmul` cannot take such operands, or None."""
    K, N = w.shape
    if x.dtype not in (jnp.bfloat16, jnp.float16) or w.dtype != x.dtype:
        return f"needs operands of one 16-bit type, got {x.dtype} and {w.dtype}"
    if K % (tiling.splits * tiling.depth) or N % tiling.columns:
        return f"needs a matrix of whole tiles, {tiling.splits} to its depth, got {K} x {N}"
    return None


@functools.partial(jax.jit, static_argnames=("eps", "num_warps", "interpret"))  # layers lower once
def add_rms_norm(
    x: Array,
    y: Array,
    scale: Array,
    eps: float,
    *,
    num_warps: int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `api.add_rms_norm`; `interpret` runs the kernel as plain XLA, for tests."""
    D = x.shape[-1]
    num_warps = num_warps or (4 if D <= 2048 else 8)  # as measured at 2048 and 4096
    rows = x.reshape(-1, D)
    parts = y.reshape(-1, *rows.shape)
    total, normed = pl.pallas_call(
        functools.partial(_add_rms_norm, eps=eps),
        out_shape=[jax.ShapeDtypeStruct(rows.shape, x.dtype)] * 2,
        grid=(len(rows),),
        compiler_params=pltriton.CompilerParams(num_warps=num_warps),
        interpret=interpret,
    )(rows, parts, scale)
    return total.reshape(x.shape), normed.reshape(x.shape)


def _add_rms_norm(x, parts, scale, total, normed, *, eps: float):
    """One row."""
    D = x.shape[1]
    width = pl.next_power_of_2(D)
    column = jnp.arange(width, dtype=jnp.int32)
    there = column < D
    row = (jnp.broadcast_to(pl.program_id(0), (width,)), column)

    def load(ref, *where):
        return pltriton.load(ref.at[where], mask=there, other=0).astype(jnp.float32)

    added = load(parts, jnp.zeros_like(column), *row)
    for i in range(1, len(parts)):
        added += load(parts, jnp.full_like(column, i), *row)
    kept = (load(x, *row) + added).astype(x.dtype)
    pltriton.store(total.at[row], kept, mask=there)
    kept = kept.astype(jnp.float32)
    kept = kept * jax.lax.rsqrt(jnp.sum(kept * kept) / D + eps)
    scaled = _rounded(kept, x.dtype) * _rounded(load(scale, column), x.dtype)
    pltriton.store(normed.at[row], scaled.astype(x.dtype), mask=there)


def _rounded(x: Array, dtype: jax.typing.DTypeLike) -> Array:
    """`x` rounded to that type, as float32."""
    return x.astype(dtype).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def split_matmul(
    x: Array, w: Array, *, tiling: Tiling, interpret: bool = False
) -> Float[Array, "X ... N"]:
    """The parts of `x @ w` in float32, for `add_rms_norm` to add up."""
    K, N = w.shape
    rows = x.reshape(-1, K)
    M = len(rows)
    out = pl.pallas_call(
        functools.partial(_split_matmul, tiling=tiling),
        out_shape=jax.ShapeDtypeStruct((tiling.splits, M, N), jnp.float32),
        grid=(N // tiling.columns, -(-M // tiling.rows), tiling.splits),
        compiler_params=pltriton.CompilerParams(
            num_warps=tiling.num_warps, num_stages=tiling.num_stages
        ),
        interpret=interpret,
    )(rows, w)
    return out.reshape(tiling.splits, *x.shape[:-1], N)


def _split_matmul(x, w, out, *, tiling: Tiling):
    """A tile of the product over a share of the depth."""
    M, K = x.shape
    split = pl.program_id(2)
    row = pl.program_id(1) * tiling.rows + jnp.arange(tiling.rows, dtype=jnp.int32)
    there = row < M
    columns = pl.ds(pl.program_id(0) * tiling.columns, tiling.columns)
    share = K // tiling.splits

    def step(i, total):
        depth = split * share + i * tiling.depth
        mine = (_across(row, tiling.depth), _along(depth, tiling.depth, tiling.rows))
        mine = pltriton.load(x.at[mine], mask=_across(there, tiling.depth), other=0)
        return total + pltriton.dot(mine, pltriton.load(w.at[pl.ds(depth, tiling.depth), columns]))

    blank = jnp.zeros((tiling.rows, tiling.columns), jnp.float32)
    total = jax.lax.fori_loop(0, share // tiling.depth, step, blank)
    column = _along(columns.start, tiling.columns, tiling.rows)
    where = (jnp.broadcast_to(split, total.shape), _across(row, tiling.columns), column)
    pltriton.store(out.at[where], total, mask=_across(there, tiling.columns))


@functools.partial(jax.jit, static_argnames=("eps", "dtype", "interpret"))
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
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """See `api.rotate_qkv`."""
    G, both, H = qkv.shape[-3:]
    n, R2 = both - 2, cos.shape[-1]
    rows, M = cos.shape[:-1], cos.size // R2
    tokens = _TOKENS_OF_FEW if M <= _FEW_ROWS else _TOKENS
    dtype = dtype or qkv.dtype
    norms = () if q_norm is None or k_norm is None else (q_norm, k_norm)
    extra = (*norms, *(() if bias is None else (bias,)))
    q, k, v = pl.pallas_call(
        functools.partial(
            _rotate_qkv, tokens=tokens, has_norms=bool(norms), has_bias=bias is not None, eps=eps
        ),
        out_shape=[jax.ShapeDtypeStruct((M, heads, H), dtype) for heads in (G * n, G, G)],
        grid=(-(-M // tokens), G),
        compiler_params=pltriton.CompilerParams(num_warps=4),
        interpret=interpret,
    )(qkv.reshape(-1, M, G, both, H), cos.reshape(-1, R2), sin.reshape(-1, R2), *extra)
    return q.reshape(*rows, G * n, H), k.reshape(*rows, G, H), v.reshape(*rows, G, H)


def _rotate_qkv(qkv, cos, sin, *refs, tokens: int, has_norms: bool, has_bias: bool, eps: float):
    """Some tokens of one group of heads, head by head in the spans that rotation makes of it."""
    *extra, q, k, v = refs
    num_parts, M, _, both, H = qkv.shape
    dtype = q.dtype
    n, half = both - 2, cos.shape[1]
    spans = [(0, half), (half, half), *([(2 * half, H - 2 * half)] if 2 * half < H else [])]
    group = pl.program_id(1)
    token = pl.program_id(0) * tokens + jnp.arange(tokens, dtype=jnp.int32)

    def cells(start, width):
        """Row and column indices of a part, and which rows exist."""
        there = _across(token < M, width)
        return _across(token, width), _along(start, width, tokens), there

    def whole(value, like):
        return jnp.broadcast_to(jnp.asarray(value, jnp.int32), like.shape)

    row, column, there = cells(0, half)
    cosine, sine = (pltriton.load(t.at[row, column], mask=there, other=0) for t in (cos, sin))

    def load(head, start, width):
        row, column, there = cells(start, width)
        at = (row, whole(group, row), whole(head, row), column)
        x, *more = (
            pltriton.load(qkv.at[whole(i, row), *at], mask=there, other=0).astype(jnp.float32)
            for i in range(num_parts)
        )
        x = _rounded(sum(more, start=x), dtype)
        if has_bias:
            x = _rounded(x + pltriton.load(extra[-1].at[at[1:]]).astype(jnp.float32), dtype)
        return x

    def scaled(pieces, scale):
        mass = sum(jnp.sum(piece * piece, axis=1) for piece in pieces)
        factor = jax.lax.rsqrt(mass / H + eps)[:, None]
        for piece, (start, width) in zip(pieces, spans, strict=True):
            mine = pltriton.load(scale.at[_along(start, width, tokens)]).astype(jnp.float32)
            yield _rounded(_rounded(piece * factor, dtype) * _rounded(mine, dtype), dtype)

    def keep(ref, head, pieces):
        for piece, (start, width) in zip(pieces, spans, strict=True):
            row, column, there = cells(start, width)
            pltriton.store(
                ref.at[row, whole(head, row), column], piece.astype(ref.dtype), mask=there
            )

    for i in range(both):
        pieces = [load(i, *span) for span in spans]
        if i == n + 1:
            keep(v, group, pieces)
            continue
        if has_norms:
            pieces = list(scaled(pieces, extra[0] if i < n else extra[1]))
        a, b, *rest = pieces
        pieces = [a * cosine - b * sine, b * cosine + a * sine, *rest]
        if i < n:
            keep(q, group * n + i, pieces)
        else:
            keep(k, group, pieces)


def _across(rows: Array, width: int) -> Array:
    """One value a row, over its columns."""
    return jnp.broadcast_to(rows[:, None], (len(rows), width))


def _along(start: Array | int, width: int, rows: int) -> Array:
    """Columns from `start` on, the same in every row."""
    column = start + jnp.arange(width, dtype=jnp.int32)
    return jnp.broadcast_to(column[None, :], (rows, width))
