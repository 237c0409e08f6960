"""Muon for the matrices of the layers, Adam for everything else, as one optax transformation.

Muon replaces a matrix's momentum by its nearest semi-orthogonal matrix (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/). Fused weights are split first: query, key, value, gate,
up and those of each expert are separate matrices. The training step multiplies by the learning
rate, so that a schedule may follow the clock.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's quintic coefficients
_STEPS = 5


def make_optimizer(
    muon_lr: float, adam_lr: float, decay: float = 0.01
) -> optax.GradientTransformation:
    """Updates at full learning rate, with decoupled decay on the matrices only.

    Args:
        muon_lr: Rate of layer matrices, times `sqrt(max(1, outputs / inputs))`.
        adam_lr: Rate of embeddings, head and norms; betas .9 and .98.
    """
    muon = optax.chain(
        optax.trace(decay=0.95, nesterov=True),
        optax.stateless(lambda updates, _: orthogonalize(updates)),
        optax.add_decayed_weights(decay),
        optax.scale(-muon_lr),
    )
    adam = optax.chain(optax.scale_by_adam(b1=0.9, b2=0.98), optax.scale(-adam_lr))
    return optax.multi_transform({"muon": muon, "adam": adam}, _labels)


def _labels(params: Any) -> Any:
    def label(path: tuple, leaf: Array) -> str:
        is_inner = path[0].key in ("layers", "fc")  # fc: a drafter's projection of hidden states
        return "muon" if is_inner and leaf.ndim > 1 else "adam"

    return jax.tree_util.tree_map_with_path(label, params)


def orthogonalize(updates: Any) -> Any:
    """Make every weight of the layers semi-orthogonal, with equal shapes in one batch."""
    is_masked = lambda leaf: isinstance(leaf, optax.MaskedNode)  # noqa: E731
    leaves, tree = jax.tree_util.tree_flatten_with_path(updates, is_leaf=is_masked)
    groups: dict[tuple[int, ...], list[Array]] = {}
    places = []  # per leaf: its name, then (shape, index in its group) of each of its matrices
    for path, leaf in leaves:
        parts = [] if is_masked(leaf) else _split(path[-1].key, leaf)
        where = []
        for part in parts:
            group = groups.setdefault(part.shape, [])
            where.append((part.shape, len(group)))
            group.append(part)
        places.append((path[-1].key, leaf, where))
    done = {shape: _newton_schulz(jnp.stack(group)) for shape, group in groups.items()}
    new = [
        _join(name, leaf, [done[shape][i] for shape, i in where]) if where else leaf
        for name, leaf, where in places
    ]
    return jax.tree.unflatten(tree, new)


def _split(name: str, w: Array) -> list[Array]:
    if name == "wqkv":  # [D, G, n + 2, H]
        D = w.shape[0]
        return [w[:, :, :-2].reshape(D, -1), w[:, :, -2].reshape(D, -1), w[:, :, -1].reshape(D, -1)]
    if name == "wqk":  # [D, G, n + 1, H]
        D = w.shape[0]
        return [w[:, :, :-1].reshape(D, -1), w[:, :, -1].reshape(D, -1)]
    if name == "w_gate_up":  # [D, C, 2, W]
        return [w[:, :, i].reshape(len(w), -1) for i in range(2)]
    if name == "experts_gate_up":  # [E, D, 2, F]
        return [one[:, i] for one in w for i in range(2)]
    if name == "experts_down":  # [E, F, D]
        return list(w)
    return [w.reshape(-1, w.shape[-1])]  # wo [N, H, D], w_down [F, D]


def _join(name: str, like: Array, parts: list[Array]) -> Array:
    if name == "wqkv":
        D, G, slots, H = like.shape
        q, k, v = parts
        heads = [q.reshape(D, G, slots - 2, H), k.reshape(D, G, 1, H), v.reshape(D, G, 1, H)]
        return jnp.concatenate(heads, axis=2)
    if name == "wqk":
        D, G, slots, H = like.shape
        q, k = parts
        return jnp.concatenate([q.reshape(D, G, slots - 1, H), k.reshape(D, G, 1, H)], axis=2)
    if name == "experts_gate_up":
        D, F = parts[0].shape
        return jnp.stack(parts).reshape(-1, 2, D, F).swapaxes(1, 2)
    if name == "experts_down":
        return jnp.stack(parts)
    if name == "w_gate_up":
        D, C, _, W = like.shape
        return jnp.stack([part.reshape(D, C, W) for part in parts], axis=2)
    return parts[0].reshape(like.shape)


def _newton_schulz(batch: Float[Array, "N I O"]) -> Float[Array, "N I O"]:
    rows, columns = batch.shape[1:]
    x = batch.astype(jnp.bfloat16)
    x = jnp.swapaxes(x, 1, 2) if rows > columns else x
    norm = jnp.linalg.norm(x.astype(jnp.float32), axis=(1, 2), keepdims=True)
    x = x / (norm + 1e-7).astype(x.dtype)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_STEPS):
        gram = x @ jnp.swapaxes(x, 1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = jnp.swapaxes(x, 1, 2) if rows > columns else x
    return x.astype(batch.dtype) * max(1.0, columns / rows) ** 0.5
