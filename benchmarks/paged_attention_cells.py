"""Cases, cells, forms and data of `paged_attention_gpu.py`.

A cell is (model, sequences, context, rows); its context may be a name in `LONGEST`. This module
writes and prints nothing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from dllm_jax.kernels.paged_attention import WindowMask, cudnn, mosaic, reference
from dllm_jax.kernels.paged_attention.mask import facts, sees
from dllm_jax.kernels.paged_attention.mosaic_tiling import buffers

BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12  # one H200: copy, dense bfloat16
POOL_NUMBERS = 1 << 29  # of the keys' pool, and of the values': 1 GB each
MOST_LAYERS = 64
PAGE, BLOCK = 64, 32
LONGEST = {"ragged": 8192, "ragged 1k": 1024}  # of lengths drawn log-uniformly
HEADS = {  # query heads, KV heads, head size
    "SDAR-8B": (32, 8, 128),
    "LLaDA-8B": (32, 32, 128),
    "Dream-7B": (28, 4, 128),
    "LLaDA2-mini": (16, 4, 128),
    "wide": (16, 8, 256),
    "SDAR-1.7B": (16, 8, 128),
}
_EVEN = [
    (1, 1024, 4),
    (1, 8192, 32),
    (8, 1024, 32),
    (32, "ragged", 32),
    (1, 1024, 128),
    (8, 8192, 128),
    (1, 32768, 256),
    (128, 1024, 4),
]
_ODD = [
    (8, "ragged", 4),
    (1, 32768, 32),
    (32, 1024, 32),
    (8, 8192, 32),
    (1, 8192, 128),
    (32, 1024, 128),
    (8, 1024, 256),
    (128, 1024, 128),
]
_GRID = {
    "SDAR-8B": _EVEN,
    "LLaDA-8B": _ODD,
    "Dream-7B": _EVEN,
    "LLaDA2-mini": _ODD,
    "wide": _EVEN,
}
_FEW = "1 x1, 1 x2, 1 x4, 1 x8, 2 x2, 2 x4, 2 x8, 1 x2 k128, 1 x4 k128, 2 x2 pp"
_MANY = "1, 2, 2 x2, 2 pp, 1 k128, 2 k128, 2 k128 pp, 1 r132, 2 pp r132, 2 k128 pp r132"
_ONE = "1, 1 k128, 1 r132, 1 k128 r132"
_TWO = "2, 2 pp, 2 k128 pp, 2 pp r132, 2 k128 pp r132"
_LONG = "1 x4, 1 x8, 1 x8 xla, 1 x16 xla, 1 x32 xla, 1 x8 k128 xla, 1 x16 k128 xla"
_RAGGED = "2 x1, 2 x2, 2 x4, 2 x2 k128, 1 x2, 2 r132, 2 k128 r132"
TUNED = {  # cell -> Mosaic tilings, named as `tiling_of` reads them
    ("SDAR-1.7B", 1, 512, 128): _FEW,
    ("SDAR-1.7B", 1, 512, 32): "1 x1, 1 x2, 1 x4, 1 x8, 1 x2 k128, 1 x4 k128, 1 x4 xla",
    ("SDAR-1.7B", 32, 512, 128): _TWO,
    ("SDAR-1.7B", 8, 512, 128): _MANY,
    ("SDAR-1.7B", 1, 8192, 32): _LONG,
    ("SDAR-8B", 1, 512, 128): _FEW,
    ("SDAR-8B", 1, 3584, 512): _MANY,
    ("SDAR-8B", 1, 3072, 1024): _MANY,
    ("SDAR-8B", 1, 8192, 32): "2 x8, 2 x8 xla, 2 x16 xla, 2 x16 k128 xla, 1 x8 xla",
    ("SDAR-8B", 32, "ragged", 32): _RAGGED,
    ("SDAR-8B", 1, 32768, 256): "2, 2 x2, 2 x2 pp, 2 x2 k128, 2 x2 k128 pp",
    ("LLaDA-8B", 8, "ragged", 4): "1, 1 x2, 1 x4",
    ("LLaDA2-mini", 8, "ragged", 4): "1, 1 x2, 1 x4, 1 x8",
    ("SDAR-8B", 8, "ragged", 4): "1, 1 x2, 1 x4, 1 x8",
    ("SDAR-8B", 32, "ragged", 4): "1, 1 x2, 1 x4",
    ("LLaDA-8B", 32, 1024, 32): _ONE,
    ("LLaDA-8B", 32, 1024, 128): _TWO,
    ("LLaDA-8B", 128, 1024, 128): _TWO,
    ("LLaDA2-mini", 32, 1024, 128): _TWO,
    ("LLaDA2-mini", 128, 1024, 128): _TWO,
    ("SDAR-8B", 8, 8192, 128): _TWO,
    ("Dream-7B", 8, 8192, 128): _TWO,
    ("wide", 8, 8192, 128): "1, 2, 1 r132",
    ("SDAR-1.7B", 32, 1024, 32): _ONE,
    ("SDAR-1.7B", 32, "ragged", 32): _ONE,
    ("LLaDA-8B", 32, "ragged", 32): _ONE,
    ("SDAR-8B", 32, 1024, 32): _TWO,
    ("LLaDA2-mini", 32, 1024, 32): _TWO,
    ("SDAR-1.7B", 32, "ragged", 128): _TWO,
    ("SDAR-1.7B", 32, 1024, 128): _TWO,
    ("SDAR-1.7B", 16, 1024, 128): _TWO,
    ("SDAR-8B", 24, 1024, 32): _TWO,
    ("SDAR-8B", 24, "ragged 1k", 32): _TWO,
    ("SDAR-8B", 32, "ragged 1k", 32): _TWO,
    ("SDAR-1.7B", 16, "ragged 1k", 128): _TWO,
    ("SDAR-1.7B", 32, "ragged 1k", 128): _TWO,
    ("SDAR-1.7B", 32, "ragged 1k", 32): _ONE,
    ("LLaDA-8B", 32, "ragged 1k", 32): _ONE,
}
PARTS = {
    "tune": list(TUNED),
    "cells": [(model, *one) for model, grid in _GRID.items() for one in grid],
}
TINY = [("SDAR-1.7B", 1, 128, 32)]

# Of `check`: heads, rows, block size, page size, whether by blocks alone, window.
FEATURES = {
    "blocks": ((4, 2, 128), 32, 8, 64, True, None),
    "visible": ((4, 2, 128), 128, 32, 64, False, None),
    "group of 7": ((14, 2, 128), 48, 16, 64, True, None),
    "window": ((8, 2, 128), 64, 16, 64, True, 70),
    "small pages": ((8, 2, 128), 16, 4, 16, False, None),
    "large pages, long": ((4, 2, 128), 320, 32, 128, True, None),
}


def checked_forms(interpreted=False):
    """Name -> attention of a tiling, for `check`."""
    if interpreted:
        tiling = mosaic.Tiling(consumers=2, stages=2)
        return {"mosaic": _mosaic(tiling, plgpu.InterpretGPUParams())}
    tilings = {
        "1": mosaic.Tiling(),
        "2": mosaic.Tiling(consumers=2),
        "2 ping-pong": mosaic.Tiling(consumers=2, ping_pong=True),
        "1 k128": mosaic.Tiling(keys=128, stages=2),
        "2 k128": mosaic.Tiling(consumers=2, keys=128, stages=2),
        "1 x4 xla": mosaic.Tiling(splits=4, is_cluster=False),
        "1 x2": mosaic.Tiling(splits=2),
        "1 x8": mosaic.Tiling(splits=8),
        "2 x4": mosaic.Tiling(consumers=2, splits=4),
        "2 pp r3": mosaic.Tiling(consumers=2, ping_pong=True, resident=3),
        "2 k128 pp r3": mosaic.Tiling(consumers=2, keys=128, stages=2, ping_pong=True, resident=3),
    }
    return {f"mosaic {name}": _mosaic(one) for name, one in tilings.items()}


def is_checked(form, case):
    """Three tilings see all features; of the others, those that have other code for them."""
    whole = ("mosaic 1", "mosaic 2 ping-pong", "mosaic 1 x8")
    return form in whole or case in ("visible", "large pages, long")


def _mosaic(tiling, interpret=None):
    return functools.partial(mosaic.attention, tiling=tiling, interpret=interpret)


def feature_case(name, seed=0):
    """Arguments of attention with every kind of row: none cached, dead, stale, a missing page."""
    (N, G, H), T, S, Z, by_blocks, window = FEATURES[name]
    rng = np.random.default_rng(seed)
    B, C = 6, max(7, 2 * T // Z)
    K = T // S
    live = np.asarray([[0, T], [0, S], [2, S + 3], [0, 0], [1, T], [S, T]], np.int32)
    start = np.asarray([0, 2 * Z, 3 * Z + 5, 60, C * Z - T - 3, C * Z - T - Z], np.int32)
    cell = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    seen = np.minimum(start + np.asarray([0, 0, 9, 0, 3, 0], np.int32), C * Z)
    table = rng.permutation(B * C + 2)[: B * C].reshape(B, C).astype(np.int32)
    table[0] = -1
    table[4, 1] = -1
    mask = WindowMask(
        cell=jnp.asarray(cell),
        start=jnp.asarray(start),
        live=jnp.asarray(live),
        context_len=jnp.asarray(seen),
        visible=None
        if by_blocks
        else jnp.asarray((rng.random((B, K, K)) < 0.5) | np.eye(K, dtype=bool)),
        causal=jnp.asarray([False, True, False, False, True, False]),
        block_size=S,
        window=window,
    )
    shapes = [(B, T, N, H), *[(B, T, G, H)] * 2, *[(B * C + 2, G, Z, H)] * 2]
    data = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    return (*data, jnp.asarray(table), mask)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A cell's mask, and the tables of each layer."""

    cell: tuple
    lengths: np.ndarray
    tables: np.ndarray  # layers, sequences, pages
    mask: WindowMask
    pool: tuple  # shape of the keys' pool


def draw(cell, is_tiny=False, seed=0):
    """Contexts end inside a page; pages of a layer lie anywhere in the pool."""
    model, B, context, T = cell
    _, G, H = HEADS[model]
    rng = np.random.default_rng(seed)
    if isinstance(context, str):
        longest = LONGEST[context]
        lengths = np.exp(rng.uniform(np.log(64), np.log(longest), B)).astype(np.int32)
    else:
        lengths = context - rng.integers(0, PAGE, B).astype(np.int32)
    held = -(-lengths // PAGE)
    pages = (1 << 17 if is_tiny else POOL_NUMBERS) // (G * PAGE * H)
    layers = int(min(MOST_LAYERS, pages // held.sum()))
    tables = np.full((layers, B, held.max()), -1, np.int32)
    order = rng.permutation(pages).astype(np.int32)
    at = 0
    for layer in range(layers):
        for b in range(B):
            tables[layer, b, : held[b]] = order[at : at + held[b]]
            at += held[b]
    mask = WindowMask(
        cell=jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T)),
        start=jnp.asarray(lengths),
        live=jnp.broadcast_to(jnp.asarray([0, T], jnp.int32), (B, 2)),
        context_len=jnp.asarray(lengths),
        visible=None,
        causal=jnp.zeros((B,), bool),
        block_size=BLOCK,
    )
    return Drawn(cell, lengths, tables, mask, (pages, G, PAGE, H))


class Pools:
    """Random numbers on the device, made once and cut to each cell's shape."""

    def __init__(self, is_tiny=False):
        draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
        size = 1 << 17 if is_tiny else POOL_NUMBERS
        self._flat = [draw(jax.random.key(i), (size,), jnp.bfloat16) for i in range(2)]
        self._shape, self._cut = None, None

    def operands(self, drawn):
        """q, k, v, k_pages, v_pages, tables, mask of a cell."""
        if self._shape != drawn.pool:
            self._cut = None  # before the next ones are made
            used = int(np.prod(drawn.pool))
            self._cut = [flat[:used].reshape(drawn.pool) for flat in self._flat]
            self._shape = drawn.pool
        model, B, _, T = drawn.cell
        N, G, H = HEADS[model]
        rows = [
            self._flat[1][i * 1000 : i * 1000 + B * T * heads * H].reshape(B, T, heads, H)
            for i, heads in enumerate((N, G, G))
        ]
        return (*rows, *self._cut, jnp.asarray(drawn.tables), drawn.mask)


def forms(drawn, part, only):
    """Name -> (what depends on the mask alone, the call, its tiling); the loop's own first."""
    model, B, _, T = drawn.cell
    is_tiny = jax.default_backend() != "gpu"  # the kernels are interpreted
    N, _, H = HEADS[model]
    q = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct(drawn.pool, jnp.bfloat16)
    table = drawn.tables[0]
    found = {"glue": (lambda *_: (), lambda q, *_: q, "")}
    tilings = {}
    if not mosaic.unsupported_arguments(q, pool, drawn.mask):
        tilings["mosaic"] = mosaic.choose_tiling(q, pool, table)
        if part == "tune" and not is_tiny:
            for name in TUNED[drawn.cell].split(", "):
                tilings[f"mosaic {name}"] = tiling_of(name, H)
    measured = set()
    for name, tiling in tilings.items():
        if tiling in measured or (is_tiny and name != "mosaic"):
            continue
        measured.add(tiling)
        interpret = plgpu.InterpretGPUParams() if is_tiny else None
        found[name] = _facts, _kernel(tiling, drawn.mask.rules, interpret), str(tiling)
    if not is_tiny:
        if part == "few" or (part == "tune" and T >= 512):
            found["xla"] = (lambda *_: (), _whole(reference.attention, drawn.mask), "")
        if H <= 128 and (part in ("cells", "few") or T >= 512):
            found["cudnn"] = (_seen, _gathered, "gather, then attention")
        if part == "cells" or T >= 512:
            found["cudnn paged"] = (_seen, _paged, "pages, then the fresh keys, merged")
    return {
        name: form
        for name, form in found.items()
        if only is None or name == "glue" or any(name.startswith(one) for one in only)
    }


def tiling_of(name, head):
    """The tiling of a name: consumers, splits, keys, stages, merge, ping-pong, blocks that stay."""
    consumers, *rest = name.split()
    sizes = {one[0]: int(one[1:]) for one in rest if one[1:].isdigit()}
    keys = sizes.get("k", 64)
    return mosaic.Tiling(
        consumers=int(consumers),
        keys=keys,
        stages=sizes.get("s", buffers(keys, head)),
        splits=sizes.get("x", 1),
        is_cluster="xla" not in rest,
        ping_pong="pp" in rest,
        resident=sizes.get("r", 0),
    )


def _facts(table, mask):
    return facts(mask, table, PAGE)


def _seen(table, mask):
    T = mask.cell.shape[1]
    return sees(mask, table, PAGE, T), mask.context_len, mask.sees_fresh(T)


def _kernel(tiling, rules, interpret):
    """The launches of a kernel, without what a step computes once."""
    rest = {"rules": rules, "interpret": interpret}
    more = {"bits": None, "kv_scales": None}

    def call(q, k, v, k_pages, v_pages, table, numbers):
        settings = {"tiling": tiling, "scale": q.shape[-1] ** -0.5, **rest}
        return mosaic._run((q, k, v), (k_pages, v_pages), table, numbers, more, **settings)

    return call


def _whole(function, mask):
    return lambda q, k, v, k_pages, v_pages, table, _: function(
        q, k, v, k_pages, v_pages, table, mask, scale=q.shape[-1] ** -0.5
    )


def _gathered(q, k, v, k_pages, v_pages, table, prepared):
    """Attention of cuDNN over gathered pages and fresh keys."""
    keys = jnp.concatenate([cudnn._gather_pages(k_pages, table), k], axis=1)
    values = jnp.concatenate([cudnn._gather_pages(v_pages, table), v], axis=1)
    mask = prepared[0][:, None]
    return jax.nn.dot_product_attention(q, keys, values, mask=mask, implementation="cudnn")


def _paged(q, k, v, k_pages, v_pages, table, prepared):
    """Attention of cuDNN over pages, of XLA over the fresh keys, merged by their masses.

    The table is as wide as jax wants it: all pages of the pool, of which the lengths say how many
    are a sequence's.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    _, lengths, fresh = prepared
    B, T, N, H = q.shape
    n, scale = N // k.shape[2], H**-0.5
    pages = jnp.maximum(table, 0)[:, None, :, None]
    rows = jnp.full((B,), T, jnp.int32)
    cached, log_mass = fused.paged_attention(
        q.swapaxes(1, 2),
        k_pages,
        v_pages,
        rows,
        lengths,
        pages,
        pages,
        scale=scale,
        mask_type=fused.MaskType.PADDING,
        qkv_layout="BNTH",
        return_residual=True,
    )
    own = q.reshape(B, T, -1, n, H)
    score = jnp.einsum("btgnh,bugh->bgntu", own, k, preferred_element_type=jnp.float32) * scale
    score = jnp.where(fresh[:, None, None], score, -1e30)
    peak = jnp.max(score, axis=-1, keepdims=True)
    weight = jnp.exp(score - peak)
    mass = jnp.sum(weight, axis=-1, keepdims=True)
    part = jnp.einsum(
        "bgntu,bugh->bgnth", weight.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    part = (part / mass).reshape(B, N, T, H)
    share = jax.nn.sigmoid(log_mass.reshape(B, N, T) - (peak + jnp.log(mass)).reshape(B, N, T))
    out = part + share[..., None] * (cached.astype(jnp.float32) - part)
    return out.astype(q.dtype).swapaxes(1, 2)


def loop_of(prepare, call, layers, unrolled=1):
    """So many turns of a few calls, each over the next layer's pages and the last result's rows."""

    def loop(rounds, q, k, v, k_pages, v_pages, tables, mask):
        prepared = prepare(tables[0], mask)
        if call is _paged:
            spare = len(k_pages) // len(q) - tables.shape[2]
            tables = jnp.pad(tables, ((0, 0), (0, 0), (0, spare)))

        def one(i, last):
            table = jax.lax.optimization_barrier(tables[jax.lax.rem(i, layers)])
            rows = jax.lax.optimization_barrier(q + last * jnp.bfloat16(1e-3))
            # The loop's own form too reads the table, so that it computes what the others do.
            rows += jnp.minimum(table[0, 0], 0).astype(rows.dtype)
            return call(rows, k, v, k_pages, v_pages, table, prepared)

        def turn(i, last):
            for j in range(unrolled):
                last = one(i * unrolled + j, last)
            return last

        return jax.lax.fori_loop(0, rounds, turn, jnp.zeros_like(q))

    return loop


def compiled(drawn, function, *leading):
    """The program for a cell and why there is none, one of them None."""
    model, B, _, T = drawn.cell
    N, G, H = HEADS[model]
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)  # noqa: E731
    arguments = [shape(B, T, heads, H) for heads in (N, G, G)] + [shape(*drawn.pool)] * 2
    tables = jax.ShapeDtypeStruct(drawn.tables.shape, jnp.int32)
    try:
        return jax.jit(function).lower(*leading, *arguments, tables, drawn.mask).compile(), None
    except Exception as error:  # the table says so and goes on
        return None, f"{type(error).__name__}: {error}"[:1500]


def truth(q, k, v, k_pages, v_pages, tables, mask):
    """Float32 results of the first and last sequence over the first layer's pages."""
    last = len(q) - 1
    some = jnp.asarray([0, last] if last else [0])
    q, k, v, table, mask = jax.tree.map(lambda x: x[some], (q, k, v, tables[0], mask))
    pools = [pages[jnp.maximum(table, 0).reshape(-1)] for pages in (k_pages, v_pages)]
    own = jnp.arange(table.size, dtype=jnp.int32).reshape(table.shape)
    table = jnp.where(table >= 0, own, -1)
    as_32 = [x.astype(jnp.float32) for x in (q, k, v, *pools)]
    with jax.default_matmul_precision("highest"):
        return reference.attention(*as_32, table, mask, scale=q.shape[-1] ** -0.5)


def error(out, wanted):
    """The largest deviation, of a result and the root mean square of all."""
    last = len(out) - 1
    got = out[jnp.asarray([0, last] if last else [0])].astype(jnp.float32)
    scale = jnp.sqrt(jnp.mean(jnp.square(wanted)))
    found = float((jnp.abs(got - wanted) / (jnp.abs(wanted) + scale)).max())
    return found if np.isfinite(found) else float("inf")


def floors_us(drawn):
    """The least time of memory and of products, and the bytes of keys and values."""
    model, B, _, T = drawn.cell
    N, G, H = HEADS[model]
    context = int(drawn.lengths.sum())
    ends = np.minimum((np.arange(T) // BLOCK + 1) * BLOCK, T)
    flops = 4 * N * H * (T * context + B * int(ends.sum()))
    kv_bytes = 4 * G * H * (context + B * T)
    moved = kv_bytes + 4 * B * T * N * H
    return moved / BYTES_PER_S * 1e6, flops / FLOPS_PER_S * 1e6, kv_bytes
