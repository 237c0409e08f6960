"""A Pallas Triton kernel for NVIDIA GPUs: flash attention over pages, then fresh keys.

A program is one tile of rows of one KV head: the query heads that share it are adjacent rows, so
a key is read once for all of them. It walks over tiles of cached keys, without a mask for those
that every row sees, then over the window's fresh keys. Long contexts are split among programs,
whose parts are merged afterwards; a program without live rows reads nothing.

Source: FlashAttention-2 (arXiv 2307.08691), Flash-Decoding for the split of keys. JAX has
deprecated Pallas Triton. No public type names it, so deleting this file removes it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from ..kv_write import fp8
from .mask import WindowMask, facts

_LEAST_SIDE = 16  # least size of each dimension of a Triton product
_ROWS, _KEYS = 64, 64  # of a tile
_PROGRAMS, _SPLITS = 264, 16  # two programs a multiprocessor of an H200; most parts to merge
_SHARE = 32  # key tiles of a program if sequences differ in length
# In that case, with few rows and `_SHARE` key tiles or more, most programs end early. So use more:
# at least 7 tiles each, at most eight programs a multiprocessor and 12 a row.
_FEW_ROWS, _SHORT_SHARE, _MANY_PROGRAMS, _MANY_SPLITS = 28, 7, 1056, 12
_WARPS, _STAGES = 4, 3  # of a program; every stored result was timed with these
_NEVER = -1e30  # below every score; finite, so that differences are finite
_LOG2_E = 1.4426950408889634


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """The work of one program, and the number of programs that share a row.

    Attributes:
        rows: Query rows of a program; the heads of a group are adjacent.
        keys: Keys of one iteration, at most a page.
        splits: Programs that share the context of a row.
    """

    rows: int = 64
    keys: int = 64
    splits: int = 1


def unsupported(q: Array, k_pages: Array, mask: WindowMask) -> str | None:
    """Why this back end cannot take these arguments here, or None."""
    if jax.default_backend() != "gpu":
        return "needs an NVIDIA GPU"
    capability = getattr(jax.devices()[0], "compute_capability", "0.0")
    if k_pages.dtype.itemsize == 1 and float(capability) < 8.9:
        return "needs an NVIDIA GPU of the Ada kind or later for keys in 8 bits"
    return unsupported_arguments(q, k_pages, mask)


def unsupported_arguments(q: Array, k_pages: Array, mask: WindowMask) -> str | None:
    """Why no device can take these arguments, or None."""
    H, Z = q.shape[-1], k_pages.shape[2]
    if mask.rules.orders:
        return "needs rows of one order"
    if mask.by_block and mask.window is not None:
        return "needs a window counted from each row"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {q.dtype}"
    if H & (H - 1) or not _LEAST_SIDE <= H <= 256:
        return f"needs a head size that is a power of two from {_LEAST_SIDE} to 256, got {H}"
    if Z & (Z - 1) or Z < _LEAST_SIDE:
        return f"needs a page size that is a power of two from {_LEAST_SIDE} up, got {Z}"
    # For arrays up to 2**32 bytes Pallas uses signed 32-bit offsets, counted in elements.
    if k_pages.size > 2**31 and k_pages.size * k_pages.dtype.itemsize <= 2**32:
        return f"cannot address an array of 8 bits and 2 to 4 GiB, got {k_pages.size} elements"
    return None


@functools.partial(jax.jit, static_argnames=("scale", "tiling", "interpret"))  # traced once
def attention(
    q: Array,
    k: Array,
    v: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    mask: WindowMask,
    *,
    scale: float | None = None,
    kv_scales: Array | None = None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Array:
    """See `api.paged_attention`; rows that are not live are zeros.

    `interpret` runs the kernel as plain XLA, for tests.
    """
    tiling = choose_tiling(q, k_pages, page_table) if tiling is None else tiling
    visible = None if mask.visible is None else mask.visible.astype(jnp.int8)
    return _run(
        (q, k, v),
        (k_pages, v_pages),
        page_table,
        facts(mask, page_table, k_pages.shape[2]),
        {"visible": visible, "kv_scales": kv_scales},
        block_size=mask.block_size,
        window=mask.window,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        tiling=tiling,
        interpret=interpret,
    )


def choose_tiling(q: Array, k_pages: Array, page_table: Array) -> Tiling:
    """A tile for these shapes: enough programs to fill the chip, few enough to merge cheaply."""
    B, T, N, _ = q.shape
    G, Z = k_pages.shape[1:3]
    rows = T * N // G
    tile = min(_ROWS, max(_LEAST_SIDE, pl.next_power_of_2(rows)))
    keys = min(_KEYS, Z)
    programs = B * G * -(-rows // tile)
    most = page_table.shape[1] * Z // keys + -(-T // keys)  # tiles of keys
    splits = _PROGRAMS // programs
    if B > 1:  # contexts may differ in length: split the longest, so that it does not end last
        splits = max(splits, most // _SHARE)
    if B > 1 and rows <= _FEW_ROWS and most >= _SHARE:
        many = min(_MANY_PROGRAMS // programs, most // _SHORT_SHARE, _MANY_SPLITS)
        splits = max(splits, many)
    splits = max(1, min(splits, _SPLITS, most))
    return Tiling(rows=tile, keys=keys, splits=splits)


@functools.partial(
    jax.jit, static_argnames=("block_size", "window", "scale", "tiling", "interpret")
)
def _run(fresh, pools, page_table, facts, more, *, block_size, window, scale, tiling, interpret):
    """One launch, and a merge if the context is split."""
    q, _, _ = fresh
    B, T, N, H = q.shape
    G, Z = pools[0].shape[1:3]
    splits = tiling.splits
    parts = [jax.ShapeDtypeStruct((B, T, N, H), q.dtype)]
    if splits > 1:
        parts = [
            jax.ShapeDtypeStruct((splits, B, T, N, H), jnp.float32),
            jax.ShapeDtypeStruct((splits, B, T, N), jnp.float32),
        ]
    more = {name: array for name, array in more.items() if array is not None}
    operands = [*fresh, *pools, page_table, facts, *more.values()]
    body = functools.partial(
        _attend,
        num_operands=len(operands),
        extras=tuple(more),
        block_size=block_size,
        window=window,
        scale=scale,
        rows=tiling.rows,
        keys=min(tiling.keys, Z),
        splits=splits,
    )
    out = pl.pallas_call(
        body,
        out_shape=parts,
        grid=(-(-T * (N // G) // tiling.rows), splits, B * G),
        compiler_params=pltriton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=interpret,
    )(*operands)
    return out[0] if splits == 1 else _merge(*out).astype(q.dtype)


def _merge(out: Float[Array, "X B T N H"], log_mass: Float[Array, "X B T N"]) -> Array:
    """Parts weighted by the mass of their keys."""
    weight = jnp.exp2(log_mass - jnp.max(log_mass, axis=0, keepdims=True))
    return jnp.sum(out * weight[..., None], axis=0) / jnp.sum(weight, axis=0)[..., None]


def _attend(*refs, num_operands, extras, block_size, window, scale, rows, keys, splits):
    """One program: a tile of rows of a KV head, over its share of the keys."""
    q, k, v, k_pages, v_pages, table, facts, *given = refs[:num_operands]
    more = dict(zip(extras, given, strict=True))
    visible, kv_scales = more.get("visible"), more.get("kv_scales")
    results = refs[num_operands:]
    _, T, N, H = q.shape
    G, Z = k_pages.shape[1:3]
    n = N // G
    tile, split = pl.program_id(0), pl.program_id(1)
    slot = jax.lax.div(pl.program_id(2), jnp.int32(G))
    g = jax.lax.rem(pl.program_id(2), jnp.int32(G))
    start, first, end, context_len, unmasked, causal, cell_0, b = (
        pltriton.load(facts.at[slot, jnp.int32(i)]) for i in range(8)
    )

    row = tile * rows + jnp.arange(rows, dtype=jnp.int32)
    token, head = row // n, g * n + row % n
    cell = cell_0 + token
    exists = row < T * n
    live = exists & (cell >= first) & (cell < end)
    last_live = jnp.max(jnp.where(live, cell, -1))
    where = _cells(H, b, token, head)
    mine = pltriton.load(q.at[where], mask=_across(exists, H), other=0)

    by_scale = _LOG2_E * scale
    if kv_scales is not None:
        by_scale *= pltriton.load(kv_scales.at[jnp.int32(0), g])

    def look(carry, key, value, seen):
        """Process a tile of keys; `seen` None means that every live row sees all of them."""
        total, peak, mass = carry
        key, value = key.astype(mine.dtype), value.astype(mine.dtype)
        score = pltriton.dot(mine, key.T) * by_scale
        if seen is not None:
            score = jnp.where(seen, score, _NEVER)
        higher = jnp.maximum(peak, jnp.max(score, axis=1))
        weight = jnp.exp2(score - higher[:, None])
        if seen is not None:  # a row that has seen no key yet has the same peak
            weight = jnp.where(seen, weight, 0.0)
        shrink = jnp.exp2(peak - higher)
        total = total * shrink[:, None] + pltriton.dot(weight.astype(value.dtype), value)
        return total, higher, mass * shrink + jnp.sum(weight, axis=1)

    def cached(i, carry, masked):
        j = i * keys
        number = pltriton.load(table.at[b, jax.lax.div(j, jnp.int32(Z))])
        # Triton loads adjacent tokens one at a time unless it knows their alignment.
        first_token = pl.multiple_of(jax.lax.rem(j, jnp.int32(Z)), keys)
        page, tokens = jnp.maximum(number, 0), pl.ds(first_token, keys)
        key = pltriton.load(k_pages.at[page, g, tokens, :])
        if fp8.is_token_last(v_pages):
            value = pltriton.load(v_pages.at[page, g, :, tokens]).astype(mine.dtype).T
        else:
            value = pltriton.load(v_pages.at[page, g, tokens, :])
        seen = None
        if masked:
            j += jnp.arange(keys, dtype=jnp.int32)
            stale = (j >= start + first) & (j < start + end)
            held = (j < context_len) & ~stale & (number >= 0)
            position = (start + cell)[:, None]
            in_order = (causal == 0) | (j[None, :] <= position)
            seen = held[None, :] & in_order & live[:, None]
            if window is not None:
                seen &= jnp.abs(j[None, :] - position) < window
        return look(carry, key, value, seen)

    def fresh(i, carry):
        other = i * width + jnp.arange(width, dtype=jnp.int32)
        their_cell = cell_0 + other
        theirs = (other < T) & (their_cell >= first) & (their_cell < end)
        where = _cells(H, b, other, g)
        key, value = (
            pltriton.load(x.at[where], mask=_across(theirs, H), other=0.0) for x in (k, v)
        )
        in_order = (causal == 0) | (their_cell[None, :] <= cell[:, None])
        seen = live[:, None] & theirs[None, :] & in_order
        if window is not None:
            seen &= jnp.abs(their_cell[None, :] - cell[:, None]) < window
        mine_in, theirs_in = cell // block_size, their_cell // block_size
        if visible is not None:
            K = visible.shape[1]
            mine_in, theirs_in = jnp.clip(mine_in, 0, K - 1), jnp.clip(theirs_in, 0, K - 1)
            spread = functools.partial(jnp.broadcast_to, shape=(rows, width))
            mask_row = jnp.minimum(b, jnp.int32(visible.shape[0] - 1))
            pairs = (spread(mask_row), spread(mine_in[:, None]), spread(theirs_in[None, :]))
            seen &= pltriton.load(visible.at[pairs]) != 0
        else:
            seen &= theirs_in[None, :] <= mine_in[:, None]
        return look(carry, key, value, seen)

    # The key tiles of a tile of rows are those of the context, then those of the window, up to the
    # last that a row may see. Each program takes its share of this list.
    zero = split * 0  # Triton requires loop bounds of one type, so all are traced
    is_used = last_live >= 0
    cached_tiles = jnp.where(is_used, _ceil_div(context_len, keys), zero)
    skipped = zero  # tiles of the context that end before any row's window
    if window is not None:
        first_live = jnp.min(jnp.where(live, cell, jnp.int32(cell_0 + T)))
        nearest = jnp.maximum(start + first_live - jnp.int32(window - 1), 0)
        skipped = jnp.minimum(jax.lax.div(nearest, jnp.int32(keys)), cached_tiles)
        cached_tiles -= skipped
    width = min(keys, max(_LEAST_SIDE, pl.next_power_of_2(T)))
    reach = jnp.where(causal != 0, last_live + 1, (last_live // block_size + 1) * block_size)
    reach = end if visible is not None else jnp.minimum(reach, end)
    reach = jnp.minimum(reach, cell_0 + T) - cell_0
    fresh_first = jax.lax.div(jnp.maximum(first - cell_0, 0), jnp.int32(width))
    fresh_tiles = jnp.where(is_used, jnp.maximum(_ceil_div(reach, width) - fresh_first, 0), zero)
    tiles = cached_tiles + fresh_tiles
    share = _ceil_div(tiles, splits)
    low = jnp.minimum(split * share, tiles)
    high = jnp.minimum(low + share, tiles)
    cached_high = jnp.minimum(high, cached_tiles)
    cached_low = jnp.minimum(low, cached_high)
    if window is None:
        middle = jnp.clip(jax.lax.div(unmasked, jnp.int32(keys)), cached_low, cached_high)
    else:  # rows see different keys
        cached_low, cached_high = cached_low + skipped, cached_high + skipped
        middle = cached_low
    carry = (
        jnp.zeros((rows, H), jnp.float32),
        jnp.full((rows,), _NEVER, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    carry = jax.lax.fori_loop(cached_low, middle, functools.partial(cached, masked=False), carry)
    carry = jax.lax.fori_loop(middle, cached_high, functools.partial(cached, masked=True), carry)
    from_fresh = fresh_first - cached_tiles
    fresh_low = jnp.maximum(low, cached_tiles) + from_fresh
    fresh_high = jnp.maximum(high, cached_tiles) + from_fresh
    total, peak, mass = jax.lax.fori_loop(fresh_low, fresh_high, fresh, carry)

    some = live & (mass > 0)
    mean = jnp.where(some[:, None], total / jnp.where(some, mass, 1.0)[:, None], 0.0)
    if kv_scales is not None:
        mean *= pltriton.load(kv_scales.at[jnp.int32(1), g])
    if splits == 1:
        pltriton.store(results[0].at[where], mean.astype(results[0].dtype), mask=_across(exists, H))
        return
    out, log_mass = results
    pltriton.store(out.at[(_all(split, rows, H), *where)], mean, mask=_across(exists, H))
    log_mass_tile = jnp.where(some, peak + jnp.log2(jnp.where(some, mass, 1.0)), _NEVER)
    pltriton.store(
        log_mass.at[_all(split, rows), _all(b, rows), token, head], log_mass_tile, mask=exists
    )


def _ceil_div(a: Array, b: int) -> Array:
    return jax.lax.div(a + jnp.int32(b - 1), jnp.int32(b))


def _all(value: Array, *shape: int) -> Array:
    return jnp.broadcast_to(value, shape)


def _across(rows: Array, width: int) -> Array:
    """Broadcast one value a row to its columns."""
    return jnp.broadcast_to(rows[:, None], (len(rows), width))


def _cells(width: int, b: Array, token: Array, head: Array) -> tuple[Array, ...]:
    """Indices of rows of a `[B T N H]` array.

    Each has the full shape of the tile: the one form of a gather that both Triton and the
    interpreter support.
    """
    shape = (len(token), width)
    column = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None, :], shape)
    head = jnp.broadcast_to(head, token.shape)
    return _all(b, *shape), _across(token, width), _across(head, width), column
