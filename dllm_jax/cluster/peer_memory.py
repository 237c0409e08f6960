"""Memory of the devices of one host through which kernels add up what each has of a sum."""

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.kernels import hopper
from dllm_jax.kernels.layer import mosaic_reduce
from dllm_jax.models.sharding import Exchange, Split

MOST_DEVICES = 2  # in whose steps the kernel was measured (docs/adr/0018)


def made(split: Split | None) -> Exchange | None:
    """Inboxes on the devices that share a model, or None where kernels cannot reach them."""
    if split is None or split.mesh.size != split.num_parts:
        return None
    devices = list(split.mesh.devices.flat)
    if hopper.unsupported() or hopper.unsupported_version() or not _reach_each_other(devices):
        return None
    sharding = split.sharding(split.axis)
    count = len(devices)
    inbox = jax.jit(
        lambda: jnp.tile(mosaic_reduce.blank(count)[None], (count, 1)),
        out_shardings=sharding,
    )()
    jax.block_until_ready(inbox)  # blank everywhere before any device sends
    shards = {shard.device: shard.data for shard in inbox.addressable_shards}
    addresses = [shards[device].unsafe_buffer_pointer() for device in devices]
    return Exchange(jax.device_put(mosaic_reduce.peers(addresses), sharding), inbox)


def _reach_each_other(devices: Sequence[Any]) -> bool:
    """Whether each device's kernels can read and write the memory of the others."""
    if not 2 <= len(devices) <= MOST_DEVICES:
        return False
    if any(device.process_index != jax.process_index() for device in devices):
        return False
    driver, answer = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    for one, other in itertools.permutations((d.local_hardware_id for d in devices), 2):
        if driver.cuDeviceCanAccessPeer(ctypes.byref(answer), one, other) or not answer.value:
            return False
    return True
