"""Denoising losses of any masked model that `dj.load` takes: by blocks, and of the whole text.

A batch is tokens and the cells that are learnt, such as those of an answer. Some of these are
hidden, and the loss is the cross entropy of the hidden ones, each divided by the chance that it was
hidden: the evidence bound. Both are differentiable in `model.params`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from dllm_jax.loading.model import Model
from dllm_jax.models import reference
from dllm_jax.scoring import one_rounding
from dllm_jax.scoring.one_rounding import Rounding

_LEAST = 1e-3  # chance that a cell is hidden, of which the loss is divided


def block_loss(
    model: Model,
    tokens: Int[Array, "B T"],
    learnt: Bool[Array, "B T"],
    key: PRNGKeyArray,
    *,
    block_size: int | None = None,
    rounding: Rounding | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Block diffusion: a noisy block sees the clean text before it, and itself.

    One pass over [noisy; clean] rows of 2 T cells. Blocks lie on the absolute grid.

    Args:
        block_size: None: the model's.
        rounding: `LLM.rounding`: rows and logits have the bits of that engine where it writes a
            block at a time, in its blocks; the cells before the first learnt one are the prompt.

    Returns:
        The loss, and `accuracy` of the hidden cells.

    Raises:
        ValueError: The model has no mask, or no rows with such bits.

    Source: Block diffusion (arXiv 2503.09573), section 3; SDAR (arXiv 2510.06303).
    """
    _require_mask(model)
    B, T = tokens.shape
    size = model.defaults.block_size if block_size is None else block_size
    size = size if rounding is None else rounding.block_size
    block = jnp.broadcast_to(jnp.arange(T) // size, (B, T))
    hidden, weight = _hide(key, learnt, block, -(-T // size))
    noisy = jnp.where(hidden, model.config.mask_token_id, tokens)
    if rounding is None:
        ids = jnp.concatenate([noisy, tokens], axis=1)
        positions = jnp.broadcast_to(jnp.arange(2 * T) % T, (B, 2 * T))
        rows = _rows(model, ids, positions, reference.noisy_visibility(T, size))
    else:
        prompt_len = jnp.argmax(learnt, axis=1)
        rows = one_rounding.hidden_rows(model, tokens, rounding, prompt_len, noisy)
    cell = jnp.arange(T)
    if model.config.shift:  # a block's first cell is predicted by the clean row before it
        before = jnp.maximum(cell - 1, 0)
        cell = jnp.where(cell % size == 0, T + before, before)
    return _loss(model, rows[:, cell], tokens, hidden, weight, learnt, rounding is not None)


def full_loss(
    model: Model, tokens: Int[Array, "B T"], learnt: Bool[Array, "B T"], key: PRNGKeyArray
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Masked diffusion of the whole text, in which every cell sees every other.

    Returns, Raises: As of `block_loss`.

    Source: LLaDA (arXiv 2502.09992), equation 5.
    """
    _require_mask(model)
    B, T = tokens.shape
    one = jnp.zeros((B, T), jnp.int32)
    hidden, weight = _hide(key, learnt, one, 1)
    ids = jnp.where(hidden, model.config.mask_token_id, tokens)
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    rows = _rows(model, ids, positions, jnp.ones((T, T), bool))
    if model.config.shift:
        rows = jnp.concatenate([rows[:, :1], rows[:, :-1]], axis=1)
    return _loss(model, rows, tokens, hidden, weight, learnt)


def _require_mask(model: Model) -> None:
    if model.config.mask_token_id < 0:
        raise ValueError(
            f"{model.source!r} has no mask token, so no cell can be hidden; train a masked model"
        )


def _hide(
    key: PRNGKeyArray, learnt: Bool[Array, "B T"], block: Int[Array, "B T"], count: int
) -> tuple[Bool[Array, "B T"], Float[Array, "B T"]]:
    """Cells that are hidden, each block's with a chance of its own, and one over that chance."""
    of_blocks, of_cells = jax.random.split(key)
    chance = jax.random.uniform(of_blocks, (len(block), count), minval=_LEAST)
    chance = jnp.take_along_axis(chance, block, axis=1)
    return learnt & (jax.random.uniform(of_cells, learnt.shape) < chance), 1.0 / chance


def _rows(
    model: Model,
    ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    visible: Bool[Array, "T T"],
) -> Float[Array, "B T D"]:
    """Hidden rows before the head."""
    visible = jnp.broadcast_to(visible, (len(ids), *visible.shape))
    return reference.dense_rows(model.params, model.config, ids, visible, model.arch, positions)


def _loss(
    model: Model,
    rows: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    hidden: Bool[Array, "B T"],
    weight: Float[Array, "B T"],
    learnt: Bool[Array, "B T"],
    is_as_written: bool = False,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Weighted cross entropy of hidden cells for each cell that is learnt; a text at a time."""

    @jax.checkpoint
    def of_text(text: tuple[Array, Array]) -> tuple[Array, Array]:
        rows, tokens = text
        if is_as_written:
            logits = one_rounding.read_logits(model, rows)
        else:
            logits = model.arch.unembed(model.params, model.config, rows[None])[0]
        never = model.forbidden(jnp.arange(logits.shape[-1], dtype=jnp.int32))
        logits = jnp.where(never[None], -jnp.inf, logits)
        own = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(logits, axis=-1) - own, jnp.argmax(logits, axis=-1) == tokens

    cost, right = jax.lax.map(of_text, (rows, tokens))
    number = jnp.maximum(jnp.sum(learnt, dtype=jnp.float32), 1.0)
    loss = jnp.sum(jnp.where(hidden, cost * weight, 0.0)) / number
    among = jnp.maximum(jnp.sum(hidden, dtype=jnp.float32), 1.0)
    return loss, {"accuracy": jnp.sum(right & hidden, dtype=jnp.float32) / among}
