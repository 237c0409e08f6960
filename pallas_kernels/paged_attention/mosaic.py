"""A Pallas Mosaic kernel for NVIDIA Hopper: flash attention with a warpgroup that only loads.

A thread block has one or two warpgroups that compute 64 query rows each, and one that loads: first
tiles of cached keys by page, then tiles of the window's fresh keys, through a ring of buffers that
the tensor memory accelerator (TMA) fills. The query heads that share a KV head are rows of one
product. The blocks of a cluster may split a long context; they merge their parts without a second
launch, each computing some columns of the result. If a block has few tiles, its two warpgroups may
have the same rows and alternate tiles. If there are many blocks, they may be resident: each takes
several tiles of rows, and loads the next while it finishes the last (`mosaic_tiling.Tiling`).

Rows come in units of `chunk` adjacent tokens of one query head, one TMA box each. The rows of a
unit and the fresh keys of a tile are whole swizzle tiles of 8. Of fewer than 8 rows TMA reads zeros
past the last one and writes nothing there; other numbers of rows are padded.

Source: FlashAttention-2 and -3 (arXiv 2307.08691, 2407.08608), Flash-Decoding for the split.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from .. import hopper
from ..hopper.operands import BOX
from ..layer.fp8 import DTYPE as FP8
from ..layer.fp8 import Fp8Groups
from ..lowered import lowered_once
from .mask import WindowMask, facts, within_reach
from .mosaic_blocks import attend
from .mosaic_loads import loads_of
from .mosaic_merge import part_transforms
from .mosaic_tiles import LINES, ROWS, whole_tiles
from .mosaic_tiling import LEAST_8_BIT, Tiling, check_tiling, choose_tiling, holds_parts

_LEAST = 16  # least inner side of a product of 16-bit numbers
_MOST_BLOCKS = 32  # blocks of a window whose visibility or token order is one bit each


def unsupported(q: Array, k_pages: Array, mask: WindowMask) -> str | None:
    """Why this back end cannot take these arguments here, or None."""
    return hopper.unsupported() or unsupported_arguments(q, k_pages, mask)


def unsupported_arguments(q: Array, k_pages: Array, mask: WindowMask) -> str | None:
    """Why no device can take these arguments, or None."""
    _, T, _, H = q.shape
    Z = k_pages.shape[2]
    if reason := hopper.unsupported_version():
        return reason
    if q.dtype != jnp.bfloat16:
        return f"needs bfloat16, got {q.dtype}"
    if H not in (64, 128, 256, 512):
        return f"needs a head size of 64, 128, 256 or 512, got {H}"
    if k_pages.dtype.itemsize == 1 and H > 128:
        return f"needs a head size of 64 or 128 for keys in 8 bits, got {H}"
    if k_pages.dtype.itemsize == 1 and Z < LEAST_8_BIT:
        return f"needs a page size of at least {LEAST_8_BIT} for values in 8 bits, got {Z}"
    if not T:
        return "needs at least one row"
    if Z & (Z - 1) or Z < _LEAST:
        return f"needs a page size that is a power of two from {_LEAST} up, got {Z}"
    by_bits = [mask.visible] if mask.visible is not None else []
    by_bits += [mask.causal] if mask.rules.orders else []
    if any(bits.shape[-1] > _MOST_BLOCKS for bits in by_bits):
        return f"needs a window of at most {_MOST_BLOCKS} blocks, got {by_bits[0].shape[-1]}"
    return None


def gives_groups(tiling: Tiling) -> bool:
    """Whether the kernel can round its rows to 8 bits: one launch must see all keys of a row."""
    takes_turns = tiling.resident or tiling.shares_rows or tiling.unsplit_keys
    return not takes_turns and (tiling.splits == 1 or tiling.is_cluster)


@functools.partial(jax.jit, static_argnames=("scale", "is_quantized", "tiling", "interpret"))
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
    is_quantized: bool = False,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> Array | Fp8Groups:
    """See `api.paged_attention`; rows that are not live are zeros.

    `interpret`, an `InterpretGPUParams`, runs it on a CPU for tests. The interpreter supports
    neither operands in registers nor products that accumulate, so weights go through shared memory
    and products are added separately. All other code is the same as on a GPU.
    """
    rows = q.shape[1]
    spare = _spare_rows(rows, k.dtype.itemsize == 1, interpret is not None)
    if spare:
        few = (q,) if mask.keys_from_0 else (q, k, v)
        q, *more = (jnp.pad(x, ((0, 0), (0, spare), (0, 0), (0, 0))) for x in few)
        k, v = more or (k, v)
    mask, page_table = within_reach(mask, page_table, k_pages.shape[2])
    tiling = choose_tiling(q, k_pages, page_table) if tiling is None else tiling
    bits = None
    if mask.visible is not None:  # one bit for each block that a block of rows sees
        place = jnp.arange(mask.visible.shape[-1], dtype=jnp.int32)
        bits = jnp.sum(mask.visible.astype(jnp.int32) << place[None, None], axis=2, dtype=jnp.int32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # Scales of rows are stored in units of `chunk`, so these may not reach past a sequence.
    is_quantized = is_quantized and gives_groups(tiling) and rows % _LEAST == 0
    settings = {"rules": mask.rules, "scale": scale, "tiling": tiling}
    settings["is_quantized"] = is_quantized
    run = functools.partial(_run, **settings, interpret=interpret)
    # Mosaic kernels have no batching rule, so vmap runs them one after another.
    out = jax.custom_batching.sequential_vmap(run)(
        (q, k, v),
        (k_pages, v_pages),
        page_table,
        facts(mask, page_table, k_pages.shape[2]),
        {"bits": bits, "kv_scales": kv_scales},
    )
    return out[:, :rows] if spare else out


def _spare_rows(rows: int, is_8_bit: bool, is_interpreted: bool) -> int:
    """Rows to add, which are not live: their cells are past those of the window."""
    if is_8_bit:  # fresh values are transposed in boxes, and not by TMA
        return -rows % BOX
    # A TMA box may reach past an axis of one swizzle tile; the interpreter's may not.
    return -rows % LINES if rows > LINES or is_interpreted else 0


@lowered_once(static_argnames=("rules", "scale", "is_quantized", "tiling", "interpret"))
def _run(
    fresh,
    pools,
    page_table,
    numbers,
    more,
    *,
    rules,
    scale,
    tiling,
    interpret,
    is_quantized=False,
):
    """One launch, and a merge unless a cluster merges its parts."""
    q, k, _ = fresh
    B, T, N, H = q.shape
    G, Z = pools[0].shape[1:3]
    n = N // G
    most = whole_tiles(T)
    chunk = math.gcd(most, ROWS)
    warpgroups = -(-n * (most // chunk) // (ROWS // chunk))
    splits, is_cluster = tiling.splits, tiling.splits > 1 and tiling.is_cluster
    shared = tiling.shares_keys or tiling.shares_rows
    consumers = tiling.consumers if shared else min(tiling.consumers, warpgroups)
    tiling = dataclasses.replace(tiling, consumers=consumers, is_cluster=is_cluster)
    groups = tiling.row_groups
    blocks = -(-warpgroups // groups)
    is_8_bit = k.dtype.itemsize == 1
    check_tiling(tiling, H, Z, G * blocks, is_8_bit)
    whole = [jax.ShapeDtypeStruct((B, T, N, H), FP8 if is_quantized else q.dtype)]
    of_part = tiling.parts, B * G, blocks * groups, ROWS
    parts = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*of_part, H), of_part)]
    if is_quantized:
        whole.append(jax.ShapeDtypeStruct((N, -(-B * T // ROWS) * ROWS), jnp.float32))
        parts.append(parts[1])
    is_shared = is_cluster and interpret is None and holds_parts(q, tiling, is_8_bit)
    outputs = whole if splits == 1 or is_shared else [*whole, *parts] if is_cluster else parts
    scratch = _scratch(q, k, Z, tiling, whole[0].dtype, is_shared)
    if interpret is not None:
        line, transforms = (consumers, ROWS, tiling.keys), hopper.swizzled(tiling.keys, k.dtype)
        scratch["weights"] = plgpu.SMEM(line, k.dtype, transforms=transforms)
    tiles = B * G * blocks
    # The fewest resident blocks that need no more turns than `tiling.resident` do.
    stay = -(-tiles // -(-tiles // tiling.resident)) if tiling.resident else 0
    more = {name: array for name, array in more.items() if array is not None}
    operands = [*fresh, *pools, page_table, numbers, *more.values()]
    body = functools.partial(
        attend,
        num_operands=len(operands),
        extras=tuple(more),
        names=tuple(scratch),
        rules=rules,
        scale=scale,
        tiling=tiling,
        chunk=chunk,
        places=(tiles, blocks, stay),
    )
    grid = {"sequence": B * G, "split": splits, "block": blocks}
    if tiling.resident:
        grid = {"block": stay}
    cluster = {"split": grid.pop("split")} if is_cluster else {}
    out = hopper.kernel(
        body,
        out_type=outputs,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=tuple(cluster.values()),
        cluster_names=tuple(cluster),
        kernel_name="paged_attention",
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*operands)
    if is_quantized:
        return Fp8Groups(*out[:2])
    if outputs is not parts:
        return out[0]
    return _merge(out[0], out[1], q, G)


def _scratch(
    q: Array, k: Array, Z: int, tiling: Tiling, kind: Any, is_shared: bool
) -> dict[str, Any]:
    """Shared memory and barriers of a thread block.

    Args:
        kind: Type of the resulting rows.
        is_shared: The blocks of a cluster store their parts in each other's shared memory.
    """
    T, H = whole_tiles(q.shape[1]), q.shape[3]
    keys, stages, consumers = tiling.keys, tiling.stages, tiling.consumers
    is_quantized, loads = kind == FP8, loads_of(keys, whole_tiles(k.shape[1]), Z)
    of_keys, value_loads = hopper.swizzled(H, k.dtype), loads
    values, of_values = (keys, H), of_keys
    if k.dtype.itemsize == 1:  # tokens last, page by page
        value_loads, line = keys // min(keys, Z), min(keys, Z)
        values, of_values = (value_loads, H, line), hopper.swizzled(line, k.dtype)
    buffers = tiling.row_groups * 2 if tiling.resident else tiling.row_groups
    users = consumers if tiling.shares_rows else tiling.row_groups
    of_rows = hopper.swizzled(H, q.dtype)
    scratch = {
        "rows": plgpu.SMEM((buffers, ROWS, H), q.dtype, transforms=of_rows),
        "k_ring": plgpu.SMEM((stages, keys, H), k.dtype, transforms=of_keys),
        "v_ring": plgpu.SMEM((stages, *values), k.dtype, transforms=of_values),
        "rows_in": plgpu.Barrier(num_barriers=buffers, num_arrivals=ROWS // math.gcd(T, ROWS)),
        "k_in": plgpu.Barrier(num_barriers=stages, num_arrivals=loads),
        "v_in": plgpu.Barrier(num_barriers=stages, num_arrivals=value_loads),
        "used": plgpu.Barrier(num_barriers=stages, num_arrivals=users),
    }
    if tiling.shares_rows:
        scratch["rows_used"] = plgpu.Barrier(num_barriers=1, num_arrivals=consumers)
        transforms = hopper.swizzled(keys, jnp.float32)
        scratch["halves"] = plgpu.SMEM((2, ROWS, keys), jnp.float32, transforms=transforms)
        scratch["halves_in"] = plgpu.Barrier(num_barriers=1, num_arrivals=consumers)
        scratch["k_used"] = plgpu.Barrier(num_barriers=stages, num_arrivals=users)
    if k.dtype.itemsize == 1:
        scratch["q_8"] = plgpu.SMEM((consumers, 2, ROWS, H), k.dtype, transforms=of_keys)
    if tiling.ping_pong and consumers == 2:
        scratch["turn"] = plgpu.Barrier(num_barriers=1, num_arrivals=2)
    if tiling.is_cluster:
        part, width = (consumers, tiling.parts, ROWS), H // tiling.parts
        scratch["columns"] = plgpu.SMEM((consumers, ROWS, width), kind)
        if is_shared:
            others = (consumers, tiling.parts - 1, ROWS, width)
            scratch["means"] = plgpu.SMEM(others, jnp.float32, transforms=part_transforms())
            scratch["masses"] = plgpu.SMEM(part, jnp.float32)
            if is_quantized:
                scratch["largest"] = plgpu.SMEM(part, jnp.float32)
        scratch["parts_in"] = plgpu.ClusterBarrier(
            collective_axes=("split",), num_barriers=1, num_arrivals=consumers
        )
    if is_quantized:
        scratch["units"] = plgpu.SMEM((consumers, ROWS), jnp.float32)
        if tiling.splits == 1:
            transforms = hopper.swizzled(H, kind)
            scratch["narrow"] = plgpu.SMEM((consumers, ROWS, H), kind, transforms=transforms)
    return scratch


def _merge(
    out: Float[Array, "X S W R H"], log_mass: Float[Array, "X S W R"], q: Array, G: int
) -> Array:
    """Parts weighted by the mass of their keys, as rows like `q` of G KV heads."""
    B, T, N, H = q.shape
    most, n = whole_tiles(T), N // G
    chunk = math.gcd(most, ROWS)
    weight = jnp.exp2(log_mass - jnp.max(log_mass, axis=0, keepdims=True))
    mean = jnp.sum(out * weight[..., None], axis=0) / jnp.sum(weight, axis=0)[..., None]
    rows = mean.reshape(len(mean), -1, H).astype(q.dtype)[:, : n * most]
    rows = rows.reshape(B, G, most // chunk, n, chunk, H)
    return rows.transpose(0, 2, 4, 1, 3, 5).reshape(B, most, N, H)[:, :T]
