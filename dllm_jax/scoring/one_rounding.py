"""Whole texts with the bits of an engine that has `batch_invariant` (docs/adr/0035).

Every operation but attention rounds a row alike wherever it stands. In attention the bits of a row
depend on where the tiles of its keys begin: for rows of a prompt, and for those of `ar` and
`dflash`, at multiples of `TILE` positions; for other rows also at the first cell of their block.
So a text is computed in one pass, in windows that begin there, over its own keys in pages.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dllm_jax.kernels import hopper
from dllm_jax.kernels.layer import LayerOps
from dllm_jax.kernels.paged_attention import TILE, WindowMask, paged_attention
from dllm_jax.models import reference
from dllm_jax.models.dense import ONE_ROUNDING, DenseConfig
from dllm_jax.models.moe import MoEConfig
from dllm_jax.models.quantization import is_quantized

ROWS_READ = 16  # of the head's product, which XLA divides by the number of rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounding:
    """The sizes of an engine that decide how it divides sums; see `LLM.rounding`.

    Attributes:
        block_size: S, tokens of a block; 1: rows see the tokens up to their own.
        window: W, cells of a window.
        page_size, num_columns: Of the page table, which holds the longest text.
    """

    block_size: int
    window: int
    page_size: int
    num_columns: int


def rounding_of(layout: Any) -> Rounding:
    """That of an engine's `EngineLayout`.

    Raises:
        ValueError: Without `batch_invariant`, or for a strategy whose prompts are no blocks.
    """
    in_order = layout.token_a_step and layout.is_token_causal
    if not layout.batch_invariant or not (in_order or layout.pass_kinds == ("blocks",)):
        raise ValueError(
            "rounding: only engines with batch_invariant=True have one, of strategies that compute "
            "prompts token by token or in blocks; use LLM(..., batch_invariant=True)"
        )
    return Rounding(
        block_size=1 if in_order else layout.block_size,
        window=layout.window,
        page_size=layout.page_size,
        num_columns=layout.page_buckets[-1],
    )


def network_rules(model: Any) -> tuple[tuple[bool, str], ...]:
    """What a network needs for one rounding, and whether it has that."""
    weights = jax.tree.leaves(model.params, is_leaf=is_quantized)
    has_8_bits = any(map(is_quantized, weights)) or model.kv_scales is not None
    return (
        (not hopper.unsupported(), "an NVIDIA Hopper GPU"),
        (model.split is None, "one device"),
        (model.params["embed"].dtype == jnp.bfloat16, 'weights in bfloat16 (dtype="bfloat16")'),
        (
            type(model.config) in (DenseConfig, MoEConfig)
            and not getattr(model.config, "expert_capacity", 0),
            "a dense network, or one of experts without a capacity",
        ),
        (not has_8_bits, "weights and a cache that are not quantised"),
    )


def hidden_rows(
    model: Any,
    ids: Int[Array, "B T"],
    rounding: Rounding,
    prompt_len: int | Int[Array, " B"] = 0,
    noisy: Int[Array, "B T"] | None = None,
) -> Float[Array, "B U D"]:
    """Rows before the head, each as the window computed it that begins with its block.

    Differentiable in `model.params`: the gradient is that of the same pass in plain XLA, which is
    computed again for it.

    Args:
        prompt_len: Tokens of the prompts, whose whole blocks the engine computed in passes.
        noisy: Other tokens. Rows of a block of these see clean blocks before it, and their block.

    Returns:
        U = T; with `noisy` U = 2 T, theirs first.

    Raises:
        ValueError: Network or device have no such bits, or the text is too long.
    """
    if missing := [text for is_kept, text in network_rules(model) if not is_kept]:
        raise ValueError(f"rounding= needs {'; '.join(missing)}; change that or leave it out")
    try:
        return rows_by(model, ids, rounding, prompt_len, noisy, ops=ONE_ROUNDING)
    except NotImplementedError as error:  # a size that a kernel cannot take
        raise ValueError(f"rounding=: {error}; leave it out") from error


def rows_by(
    model: Any,
    ids: Int[Array, "B T"],
    rounding: Rounding,
    prompt_len: int | Int[Array, " B"],
    noisy: Int[Array, "B T"] | None,
    ops: LayerOps,
) -> Float[Array, "B U D"]:
    """`hidden_rows` by given back ends."""
    T, S, cfg, arch = ids.shape[1], rounding.block_size, model.config, model.arch
    if (most := rounding.page_size * rounding.num_columns) < T:
        raise ValueError(
            f"a text of {T} tokens is longer than the {most} of the engine's page table; give the "
            "rounding of an engine with a larger max_model_len"
        )
    if noisy is not None and S == 1:
        raise ValueError("noisy= needs blocks; an engine that writes token by token has none")

    @jax.custom_vjp
    def rows(params: Any, ids: Array, prompt_len: Array) -> Array:
        return _in_windows(params, cfg, arch, ids, prompt_len, T, rounding, ops)

    def forward(params: Any, ids: Array, prompt_len: Array) -> tuple[Array, Any]:
        return rows(params, ids, prompt_len), (params, ids)

    def backward(saved: Any, slope: Array) -> tuple[Any, None, None]:
        params, ids = saved
        if noisy is None:
            visible = reference.visibility("block_causal", T, S)
        else:
            visible = reference.noisy_visibility(T, S)
        B, U = ids.shape
        visible = jnp.broadcast_to(visible, (B, U, U))
        positions = jnp.broadcast_to(jnp.arange(U, dtype=jnp.int32) % T, (B, U))

        def plain(params: Any) -> Array:
            return reference.dense_rows(params, cfg, ids, visible, arch, positions)

        return jax.vjp(plain, params)[1](slope)[0], None, None

    rows.defvjp(forward, backward)
    both = ids if noisy is None else jnp.concatenate([noisy, ids], axis=1)
    return rows(model.params, both, jnp.broadcast_to(jnp.asarray(prompt_len), (len(ids),)))


def read_logits(model: Any, rows: Float[Array, "*X D"]) -> Float[Array, "*X V"]:
    """Logits of rows with the bits of an engine's log-probabilities."""
    flat = rows.reshape(-1, rows.shape[-1])
    flat = jnp.pad(flat, ((0, -len(flat) % ROWS_READ), (0, 0)))

    def some(rows: Array) -> Array:
        return model.arch.unembed(model.params, model.config, rows)

    found = jax.lax.map(some, flat.reshape(-1, ROWS_READ, flat.shape[-1]))
    found = found.reshape(len(flat), -1)[: math.prod(rows.shape[:-1])]
    return found.reshape(*rows.shape[:-1], -1)


def _in_windows(
    params: Any,
    cfg: Any,
    arch: Any,
    ids: Int[Array, "B U"],
    prompt_len: Int[Array, " B"],
    length: int,
    rounding: Rounding,
    ops: LayerOps,
) -> Float[Array, "B U D"]:
    """All rows in one pass; `length` is T, and the last T rows are those of the clean text."""
    B, S, Z = len(ids), rounding.block_size, rounding.page_size
    piece = math.lcm(TILE, S)  # of a prompt
    P = -(-length // math.lcm(piece, Z)) * math.lcm(piece, Z)
    texts = jnp.pad(ids.reshape(B, -1, length), ((0, 0), (0, 0), (0, P - length)))
    count = texts.shape[1]
    positions = jnp.broadcast_to(jnp.arange(count * P, dtype=jnp.int32) % P, (B, count * P))
    of_prompt = jnp.arange(P)[None] < (prompt_len // S * S)[:, None]
    of_prompt = jnp.pad(of_prompt, ((0, 0), ((count - 1) * P, 0)))[..., None, None]
    pages = jnp.arange(B * P // Z, dtype=jnp.int32).reshape(B, -1)[:, : rounding.num_columns]
    missing = rounding.num_columns - pages.shape[1]
    table = jnp.pad(pages, ((0, 0), (0, missing)), constant_values=-1)

    def windows(size: int, cells: int) -> tuple[WindowMask, Array]:
        """Windows of some cells, of which the first `size` hold tokens, and their pages."""
        start = jnp.tile(jnp.arange(0, P, size, dtype=jnp.int32), B * count)
        live = jnp.clip(length - start, 0, size)
        mask = WindowMask(
            cell=jnp.broadcast_to(jnp.arange(cells, dtype=jnp.int32), (len(start), cells)),
            start=start,
            live=jnp.stack([jnp.zeros_like(live), live], axis=1),
            context_len=start,
            visible=None,
            causal=jnp.full((len(start),), S == 1),
            block_size=cells if S == 1 else S,
            context_is_before=True,
        )
        return mask, jnp.repeat(table, len(start) // B, axis=0)

    by_tile = windows(piece, piece)
    by_block = None if S == 1 else windows(S, rounding.window)

    def attend(_: int, q: Array, k: Array, v: Array) -> Array:
        def pages_of(x: Array) -> Array:
            return x[:, -P:].reshape(B * P // Z, Z, *x.shape[2:]).swapaxes(1, 2)

        attended = functools.partial(_attended, q, k, v, pages_of(k), pages_of(v), ops)
        if by_block is None:
            return attended(*by_tile)
        return jnp.where(of_prompt, attended(*by_tile), attended(*by_block))

    x = arch.embed(params, cfg, texts.reshape(B, -1))
    rows, _ = arch.trunk(params, cfg, x, positions, attend, ops=ops)
    return rows.reshape(B, count, P, -1)[:, :, :length].reshape(*ids.shape, -1)


def _attended(
    q: Float[Array, "B U N H"],
    k: Float[Array, "B U G H"],
    v: Float[Array, "B U G H"],
    k_pages: Float[Array, "P G Z H"],
    v_pages: Float[Array, "P G Z H"],
    ops: LayerOps,
    mask: WindowMask,
    table: Int[Array, "X C"],
) -> Float[Array, "B U N H"]:
    """Attention of rows in X windows that follow one another."""
    count, cells = mask.cell.shape
    size = q.shape[0] * q.shape[1] // count

    def windows(x: Array) -> Array:
        x = x.reshape(count, size, *x.shape[2:])
        return jnp.pad(x, ((0, 0), (0, cells - size), (0, 0), (0, 0)))

    out = paged_attention(
        windows(q),
        windows(k),
        windows(v),
        k_pages,
        v_pages,
        table,
        mask,
        one_rounding=ops.one_rounding,
        implementation="mosaic" if ops.one_rounding else "xla",
    )
    assert isinstance(out, jax.Array)
    return out[:, :size].reshape(q.shape)
