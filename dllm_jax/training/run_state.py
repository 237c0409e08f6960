"""The state of a run at one step, and its checkpoints."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import struct
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

from dllm_jax.convert.converted import quiet


class TrainState(struct.PyTreeNode):
    """The arrays on the device that a checkpoint stores."""

    params: Any
    optimizer: Any
    step: Int[Array, ""]


def save(saver: ocp.CheckpointManager, state: TrainState, seconds: float) -> None:
    """Write a checkpoint and wait for it; `seconds` is the duration of the run so far.

    Raises:
        OSError: The checkpoint cannot be written, for example on a full disk.
    """
    # Optimiser states hold empty nodes that a stored tree cannot name, so leaves are numbered.
    leaves = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state.optimizer))}
    tree = {"params": state.params, "optimizer": leaves, "seconds": np.float64(seconds)}
    step = int(state.step)
    try:
        with quiet():
            saver.save(step, args=ocp.args.StandardSave(tree))
            saver.wait_until_finished()
    except Exception as error:  # Orbax raises several types, with long messages
        full = "No space left on device" in str(error)
        reason = "the disk is full" if full else f"{error!s:.200}".splitlines()[0]
        raise OSError(
            f"checkpoint of step {step} cannot be written to {saver.directory} ({reason}); "
            "make room, and the same command continues from the checkpoint before"
        ) from error


def restore(
    saver: ocp.CheckpointManager, like: TrainState, sharding: NamedSharding
) -> tuple[TrainState, float]:
    """The newest checkpoint in the form of `like`, and the duration of the run in seconds.

    Raises:
        ValueError: The checkpoint has weights of other shapes.
    """
    step_id = saver.latest_step()
    leaves, tree = jax.tree.flatten(like.optimizer)

    def shape(leaf: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    wanted = {
        "params": jax.tree.map(shape, like.params),
        "optimizer": {str(i): shape(leaf) for i, leaf in enumerate(leaves)},
        "seconds": np.float64(0),
    }
    try:
        got = saver.restore(step_id, args=ocp.args.StandardRestore(wanted))
    except ValueError as error:
        raise ValueError(
            f"the checkpoint of step {step_id} in {saver.directory} does not hold this model's "
            "weights, or as another version lays them out; begin a run in another folder"
        ) from error
    opt_state = jax.tree.unflatten(tree, [got["optimizer"][str(i)] for i in range(len(leaves))])
    step = jax.device_put(jnp.asarray(step_id, jnp.int32), sharding)
    return TrainState(got["params"], opt_state, step), float(got["seconds"])
