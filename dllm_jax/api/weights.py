"""Other weights for an engine that has compiled, and weights that leave the device for a while.

A swap has two halves: `stage` reads a folder and checks it, in any thread, while the engine serves;
`replace` puts what was staged in the place of the weights, between two requests. Shapes, types and
places of arrays stay, so no program is compiled. Cached prefixes are of the old weights: all of
them are forgotten. Several processes and drafters are refused: their weights would have to change
together.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.api.snapshot import snapshot_saver
from dllm_jax.loading.model import Model


def stage(llm: Any, load: Callable[[], Model]) -> Model:
    """The model that `load` returns, on the engine's devices and fit to replace its weights.

    Old and new weights are on the device together until `replace`.

    Raises:
        ValueError: It cannot be read, is of another shape, or holds a value that is not finite.
    """
    _check(llm)
    now, new = llm.model, load()
    if new.config != now.config:
        raise ValueError(f"{new.source} is a model of another config; start a server for it")
    old_leaves, tree = jax.tree_util.tree_flatten_with_path((now.params, now.kv_scales))
    new_leaves, new_tree = jax.tree.flatten((new.params, new.kv_scales))
    if new_tree != tree:
        raise ValueError(f"{new.source} has other tensors; convert it as the model that is served")
    placed = []
    for (path, old), leaf in zip(old_leaves, new_leaves, strict=True):
        name = jax.tree_util.keystr(path[1:])
        if (leaf.shape, leaf.dtype) != (old.shape, old.dtype):
            raise ValueError(
                f"{new.source}: {name} is {leaf.dtype}{list(leaf.shape)}, the engine has "
                f"{old.dtype}{list(old.shape)}; give weights of the same sizes and types"
            )
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not _is_finite(leaf):
            raise ValueError(f"{new.source}: {name} holds a value that is not finite; train again")
        placed.append(leaf if leaf.sharding == old.sharding else jax.device_put(leaf, old.sharding))
    params, scales = jax.tree.unflatten(tree, jax.block_until_ready(placed))
    return now.replace(params=params, kv_scales=scales)


@jax.jit
def _is_finite(leaf: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(leaf.astype(jnp.float32)))


def replace(llm: Any, staged: Model) -> None:
    """Serve a staged model from here on; the old weights are deleted.

    Raises:
        RuntimeError: Requests run.
    """
    old = _arrays(llm.model)
    llm.engine.forget_prefixes()
    _adopt(llm, staged)
    for leaf in old:
        leaf.delete()


def sleep(llm: Any) -> list[tuple[np.ndarray, Any]]:
    """Move the weights to the host and free the cache; until `wake` nothing may be asked.

    Returns:
        What `wake` takes: each array, and where it was.

    Raises:
        RuntimeError: Requests run.
        ValueError: There is a drafter, or several hosts share the model.
    """
    _check(llm)
    llm.engine.forget_prefixes()
    llm.engine.runner.free_state()
    held = [(np.array(leaf), leaf.sharding) for leaf in _arrays(llm.model)]
    for leaf in _arrays(llm.model):
        leaf.delete()
    return held


def wake(llm: Any, held: list[tuple[np.ndarray, Any]]) -> None:
    """Bring weights and cache back to the device, as they were before `sleep`."""
    tree = jax.tree.structure((llm.model.params, llm.model.kv_scales))
    leaves = [jax.device_put(array, place) for array, place in held]
    params, scales = jax.tree.unflatten(tree, leaves)
    _adopt(llm, llm.model.replace(params=params, kv_scales=scales))
    llm.engine.runner.reset()


def _check(llm: Any) -> None:
    if llm.engine.runner.device.is_shared or llm.engine.runner.programs.aux:
        raise ValueError(
            "weights stay as they are with a drafter or several hosts; restart instead"
        )


def _arrays(model: Model) -> list[jax.Array]:
    return jax.tree.leaves((model.params, model.kv_scales))


def _adopt(llm: Any, model: Model) -> None:
    """Everything that reads weights reads those of `model`."""
    llm.engine.runner.put_weights(model.params, model.kv_scales)
    llm.model = model
    llm.engine.save_snapshot = snapshot_saver(model, llm.strategy, llm.config)
