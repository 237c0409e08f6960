"""Drafters that may be told what to say: `models.drafter` with hints laid over its own guesses.

A hint is looked up by the anchor and its position, both of which every engine gives a drafter, so
it reaches a request in whatever slot it is. What is not hinted the network says, and its context is
computed and cached all the same.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from dllm_jax.loading.model import Model
from dllm_jax.models import dense
from dllm_jax.models.architecture import Architecture
from tests.contract.models import DRAFTER, VOCAB, drafter

POSITIONS = 80
NO_HINT = -1


def no_hints(size: int) -> np.ndarray:
    """[position of the anchor, anchor, cell]: the id that a drafter of `size` cells says there."""
    return np.full((POSITIONS, VOCAB, size), NO_HINT, np.int32)


def hint(table: np.ndarray, text: Sequence[int], first: int) -> None:
    """Tell the table what follows each token of `text` from position `first` on."""
    size = table.shape[2]
    for p in range(first, len(text)):
        follows = list(text[p : p + size])
        table[p, text[p], : len(follows)] = follows


def _trunk(params, cfg, x, positions, attend, hidden_layers=()):
    rows, taps = dense.trunk(params, cfg, x, positions, attend, hidden_layers)
    table = params["embed"]
    hints = params["hints"].astype(jnp.int32)  # who casts a model casts every leaf
    distance = jnp.sum(jnp.square(x[:, :1] - table[None]), axis=-1)
    first = jnp.minimum(positions[:, 0], POSITIONS - 1)
    said = hints[first, jnp.argmin(distance, axis=1)][:, : x.shape[1]]
    said = jnp.pad(said, ((0, 0), (0, x.shape[1] - said.shape[1])), constant_values=NO_HINT)
    heard = said[:, :, None] == jnp.arange(VOCAB)[None, None]
    return jnp.concatenate([rows, heard.astype(rows.dtype)], axis=-1), taps


def _unembed(params, cfg, rows):
    own, heard = rows[..., : cfg.hidden_size], rows[..., cfg.hidden_size :]
    return dense.unembed(params, cfg, own) + 1e4 * heard.astype(jnp.float32)


HINTED = Architecture(
    param_shapes=dense.param_shapes,
    embed=dense.embed,
    trunk=_trunk,
    unembed=_unembed,
    context_kv=DRAFTER.context_kv,
)


def hinted(target: Model, hints: np.ndarray) -> Model:
    """The drafter of `target` that says `hints` where there are any."""
    plain = drafter(target)
    return plain.replace(params=plain.params | {"hints": jnp.asarray(hints)}, arch=HINTED)
