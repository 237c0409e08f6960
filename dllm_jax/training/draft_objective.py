"""The objective of DFlash drafters: many blocks of masks after anchors of one text, in one pass.

Data flow: text -> residual streams of the frozen target -> keys and values of the context, once ->
blocks `(token at the anchor, mask, ..., mask)`, each of which sees itself and the context before
its anchor -> cross entropy of the masked cells, with the largest weight on the first. The rows of a
block equal those of a drafter's pass at that anchor.

Source: DFlash (arXiv 2602.06036, §3); SpecForge (specforge/core/dflash.py) for the mask.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from dllm_jax.loading.model import Model
from dllm_jax.models import dense, dflash, reference
from dllm_jax.models.quantization import is_quantized

GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # decay of the loss weights by block size; arXiv 2602.06036


def gamma_of(block_size: int) -> float:
    """The published decay of a block size, interpolated and extrapolated for other sizes."""
    return GAMMAS.get(block_size, max(1.0, 0.4 * block_size + 0.8))


def draw_anchors(
    key: PRNGKeyArray, prompt_len: Int[Array, " B"], length: Int[Array, " B"], num_anchors: int
) -> tuple[Int[Array, "B N"], Bool[Array, "B N"]]:
    """Draw an anchor with a token after it in each of N equal parts of the response.

    Args:
        length: Tokens of the text, including its end.

    Returns:
        Positions, and which of them count: parts of a response of fewer than N tokens share
        anchors.
    """
    room = jnp.maximum(length - 1 - prompt_len, 0)[:, None].astype(jnp.float32)
    part = jnp.arange(num_anchors, dtype=jnp.float32)[None]
    u = (part + jax.random.uniform(key, (prompt_len.shape[0], num_anchors))) / num_anchors
    anchors = prompt_len[:, None] + jnp.floor(u * room).astype(jnp.int32)
    last = jnp.maximum(length - 2, 0)[:, None]
    valid = jnp.broadcast_to(room > 0, anchors.shape)
    return jnp.clip(anchors, 0, last), valid


def features(
    target: Model, tokens: Int[Array, "B T"], target_layer_ids: tuple[int, ...]
) -> Float[Array, "B T F"]:
    """Residual streams of the target after its layers `target_layer_ids`, joined; no gradient."""
    T = tokens.shape[1]
    visible = reference.visibility("causal", T, 1)[None]
    positions = jnp.broadcast_to(jnp.arange(T), tokens.shape)
    _, taps = target.arch.trunk(
        target.params,
        target.config,
        target.arch.embed(target.params, target.config, tokens),
        positions,
        lambda _, q, k, v: reference.attention(q, k, v, visible),
        tuple(layer + 1 for layer in target_layer_ids),
    )
    return jax.lax.stop_gradient(jnp.concatenate(taps, axis=-1))


def visible(
    cfg: dflash.DFlashConfig, layer: int, anchors: Int[Array, "B N"], num_context: int
) -> Bool[Array, "B NS T+NS"]:
    """The mask of a layer for rows of blocks over (context, all blocks), as in drafting."""
    B, N = anchors.shape
    S, reach, causal = cfg.block_size, cfg.windows[layer], cfg.causal[layer]
    cell = jnp.arange(N * S)
    row = (anchors[:, :, None] + jnp.arange(S)[None, None]).reshape(B, N * S, 1)
    first = jnp.repeat(anchors, S, axis=1)[:, :, None]
    at = jnp.arange(num_context)[None, None]
    context = at < first
    own = jnp.broadcast_to((cell[:, None] // S == cell[None] // S)[None], (B, N * S, N * S))
    ahead = (cell[None] - cell[:, None])[None]
    if causal:
        own = own & (ahead <= 0)
    if reach is not None:
        context, own = context & (row - at < reach), own & (jnp.abs(ahead) < reach)
    return jnp.concatenate([context, own], axis=-1)


def block_logits(
    params: Any,
    cfg: dflash.DFlashConfig,
    target: Model,
    taps: Float[Array, "B T F"],
    tokens: Int[Array, "B T"],
    anchors: Int[Array, "B N"],
) -> Float[Array, "B N S V"]:
    """Logits of every cell of every block; cell 0 is the anchor, whose logits are unused.

    Args:
        params: Weights of the drafter, with embedding and head of the target.
    """
    (B, T), (N, S) = tokens.shape, (anchors.shape[1], cfg.block_size)
    dtype = params["fc"].dtype
    names = ("embed",) if target.config.tie_embeddings else ("embed", "lm_head")
    whole = params | {name: _widened(target.params[name]).astype(dtype) for name in names}
    given = jnp.take_along_axis(tokens, anchors, axis=1)[:, :, None]
    cell = jnp.arange(S)[None, None]
    ids = jnp.where(cell == 0, given, cfg.mask_token_id).reshape(B, N * S)
    positions = (anchors[:, :, None] + cell).reshape(B, N * S)
    at = jnp.broadcast_to(jnp.arange(T), (B, T))
    context = dflash.context_kv(whole, cfg, taps.astype(dtype), at)

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        before_k, before_v = context[layer]
        keys = jnp.concatenate([before_k, k], axis=1)
        values = jnp.concatenate([before_v, v], axis=1)
        return reference.attention(q, keys, values, visible(cfg, layer, anchors, T))

    hidden, _ = dense.trunk(whole, cfg, dflash.embed(whole, cfg, ids), positions, attend)
    return dflash.unembed(whole, cfg, hidden).reshape(B, N, S, -1)


def loss(
    params: Any,
    cfg: dflash.DFlashConfig,
    target: Model,
    tokens: Int[Array, "B T"],
    length: Int[Array, " B"],
    anchors: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    gamma: float,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Cross entropy of cells from 1 on, with weight `exp(-(j - 1) / gamma)` at cell j.

    Args:
        cfg: Config with the `vocab_size` and `tie_embeddings` of the target.
        length: Tokens of each text; cells past its end have no weight.
        valid: Blocks that count.

    Returns:
        The loss and, for the log, the share of correct first cells and the mean accepted length:
        1 plus the number of correct cells before the first wrong one.
    """
    taps = features(target, tokens, cfg.target_layer_ids)
    logits = block_logits(params, cfg, target, taps, tokens, anchors)[:, :, 1:]
    cell = jnp.arange(1, cfg.block_size)
    at = anchors[:, :, None] + cell[None, None]
    counts = valid[:, :, None] & (at < length[:, None, None])
    B = anchors.shape[0]
    inside = jnp.minimum(at, tokens.shape[1] - 1).reshape(B, -1)
    truth = jnp.take_along_axis(tokens, inside, axis=1).reshape(at.shape)
    one_hot = jax.nn.one_hot(truth, logits.shape[-1], dtype=bool)
    right = jnp.sum(jnp.where(one_hot, logits, 0.0), axis=-1)  # the gradient of a gather is slow
    decay = jnp.exp((1 - cell.astype(jnp.float32)) / gamma)[None, None]
    weight = counts.astype(jnp.float32) * decay
    cost = (jax.nn.logsumexp(logits, axis=-1) - right) * weight
    hit = (jnp.argmax(logits, axis=-1) == truth) & counts
    run = jnp.sum(jnp.cumprod(hit.astype(jnp.float32), axis=-1), axis=-1)
    blocks = jnp.maximum(jnp.sum(valid, dtype=jnp.float32), 1.0)
    metrics = {
        "first_accuracy": jnp.sum(hit[..., 0], dtype=jnp.float32) / blocks,
        "accepted": 1.0 + jnp.sum(run) / blocks,
    }
    return jnp.sum(cost) / jnp.maximum(jnp.sum(weight), 1.0), metrics


def _widened(weights: Any) -> Array:
    """An embedding or a head in 16 or 32 bits."""
    if not is_quantized(weights):
        return weights
    return weights.values.astype(jnp.float32) * weights.scales[:, None]
