"""Where the arrays of a runner lie: its device, and memory of the host that the device writes."""

from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from dllm_jax.loading.model import Model
from dllm_jax.runner.programs import Programs

PINNED = "pinned_host"  # memory of the host that a GPU writes by itself


def device_of(programs: Programs) -> Any:
    """The device that everything is committed to; None where several share the model.

    JAX compiles a program again for arguments that are committed where those it was lowered from
    were not. A program with exported kernels returns committed ones, whatever it was given.
    """
    if programs.model.split is not None:
        return None
    leaves = jax.tree.leaves(
        (programs.model.params, [other.params for other in programs.aux.values()])
    )
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    arrays.sort(key=lambda leaf: not leaf.committed)
    places = (leaf.sharding for leaf in arrays)
    return next((one for one in places if isinstance(one, SingleDeviceSharding)), None)


def pinned_of(home: Any) -> Any:
    """Memory of the host into which a GPU copies a result behind the program that computes it.

    None where there is none, or where several devices share the model.
    """
    if home is None:
        return None
    (device,) = home.device_set
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform != "gpu" or PINNED not in kinds:
        return None
    return SingleDeviceSharding(device, memory_kind=PINNED)


def check(model: Model) -> None:
    """Refuse weights that every call would move to where its programs expect them."""
    wrong = [] if model.split is None else model.split.misplaced(model.params)
    if wrong:
        raise ValueError(
            f"{len(wrong)} leaves of {model.source!r} do not lie as its mesh says, the first is "
            f"{wrong[0]}; place the model again (dj.load(..., mesh=))"
        )
