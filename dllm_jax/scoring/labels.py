"""Log-probabilities of labels at rows of whole texts: one forward of the network, without a cache.

Logits are made of the rows that are read alone. `api.decide` lays the texts out.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dllm_jax.models import reference
from dllm_jax.models.sharding import partitioned

TOKENS_A_PASS = 512  # rows of a product; more would hardly be faster on a GPU


@jax.jit
def forward(
    model: Any,
    ids: Int[Array, "B T"],
    sizes: Int[Array, "2 B"],
    rows: Int[Array, "2 R"],
    labels: Int[Array, "R L"],
) -> Float[Array, "R L"]:
    """Log-probabilities of labels at rows of right-padded texts.

    Args:
        model: A `loading.model.Model`.
        sizes: Tokens of each text, and of its prompt.
        rows: Text and position of each row.
    """

    def body(params: Any, *args: Array) -> Array:
        return _forward(model.replace(params=params), *args)

    found = partitioned(model.split, body, model.params, ids, sizes, rows, labels)
    if model.split is None:
        return found
    return jax.lax.with_sharding_constraint(found, model.split.sharding())


def _forward(model: Any, ids: Array, sizes: Array, rows: Array, labels: Array) -> Array:
    """See `forward`."""

    def run(texts: tuple[Array, Array]) -> Array:
        ids, sizes = texts
        is_text = jnp.arange(ids.shape[1])[None] < sizes[:, 0, None]
        visible = _visibility(model, sizes[:, 1], ids.shape[1]) & is_text[:, None]
        return reference.dense_rows(model.params, model.config, ids, visible, model.arch)

    # Products of a fixed number of rows for any number of texts: a text's bits are its own.
    count, length = ids.shape
    group = min(count, max(1, TOKENS_A_PASS // length))
    hidden = jax.lax.map(
        run, (ids.reshape(-1, group, length), sizes.T.reshape(-1, group, len(sizes)))
    )
    hidden = hidden.reshape(count, length, hidden.shape[-1])
    logits = model.arch.unembed(model.params, model.config, hidden[rows[0], rows[1]])
    chosen = jnp.take_along_axis(logits, labels, axis=1)
    return chosen - jax.nn.logsumexp(logits, axis=1, keepdims=True)


def _visibility(model: Any, prompt_len: Int[Array, " B"], length: int) -> Array:
    """The keys that each row sees, [B or 1, T, T]."""
    defaults = model.defaults
    if defaults.attention != "d2f":
        return reference.visibility(defaults.attention, length, defaults.block_size)[None]
    # A prompt sees itself alone; blocks after it see it and each other causally.
    blocks = reference.visibility("block_causal", length, defaults.block_size)
    is_prompt = jnp.arange(length)[None] < prompt_len[:, None]
    behind = is_prompt[:, None] | blocks[None]
    return jnp.where(is_prompt[:, :, None], is_prompt[:, None], behind)
