"""Acts on a device's state as messages: process 0 sends each one first, others replay it."""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from dllm_jax.cluster.hosts import Follower, Leader
from dllm_jax.runner import grammars, programs
from dllm_jax.runner.calls import Call
from dllm_jax.runner.runner import ModelRunner
from dllm_jax.runner.state import DeviceState


class LeadingDevice:
    """The `DeviceState` of process 0 where several processes share the model.

    Waiting ends with DeviceFailure once one of them is gone.
    """

    is_shared = True

    def __init__(self, device: DeviceState, leader: Leader):
        self._device, self._leader = device, leader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    @property
    def is_stuck(self) -> bool:
        """A process is gone: what was dispatched may never end."""
        return self._leader.gone.done()

    def wait(self, future: Future) -> Any:
        """As `DeviceState.wait`."""
        return self._leader.wait(future)

    def read(self, function: Callable[[], Any]) -> Any:
        """As `DeviceState.read`."""
        return self._leader.call(function)

    def close(self) -> None:
        """As `DeviceState.close`, on every process."""
        self._leader.close()
        self._device.close()

    def reset(self) -> None:
        """As `DeviceState.reset`; so are all that follow."""
        self._leader.send({"what": "reset"})
        self._device.reset()

    def compile(self, call: Call, slots: Sequence[int]) -> None:  # noqa: D102
        self._device.compile(self._sent("compile", call), slots)

    def run(self, call: Call) -> Any:  # noqa: D102
        return self._device.run(self._sent("run", call))

    def _sent(self, what: str, call: Call) -> Call:
        """A call with its arguments computed, once the others have it."""
        call = dataclasses.replace(call, args=self._device.args_of(call))
        head = {
            "what": what,
            "key": call.name,
            "sizes": call.sizes,
            "static": call.static,
            "options": call.options,
            "program": call.program.__name__,
        }
        self._leader.send(head, call.args)
        return call

    def bind(  # noqa: D102
        self, slot: int, sizes: grammars.Sizes, row: Sequence[np.ndarray], at: int
    ) -> None:
        head = {"what": "grammar", "slot": slot, "sizes": sizes, "at": at}
        self._leader.send(head, tuple(row))
        self._device.bind(slot, sizes, row, at)

    def move(self, slot: int, at: int) -> None:  # noqa: D102
        self._leader.send({"what": "move", "slot": slot, "at": at})
        self._device.move(slot, at)

    def read_labels(self, *arrays: np.ndarray) -> jax.Array:  # noqa: D102
        self._leader.send({"what": "labels"}, arrays)
        return self._device.read_labels(*arrays)


def follow(runner: ModelRunner, follower: Follower) -> None:
    """Replay what process 0 calls, until it stops.

    A call that fails here ends the process: the others would wait for its part.

    Raises:
        DeviceFailure: Process 0 is gone.
    """
    while True:
        head, arrays = follower.receive()
        if head["what"] == "stop":
            runner.close()
            return
        _replay(runner, head, arrays).add_done_callback(_end_if_failed)


def _end_if_failed(done: Future) -> None:
    error = done.exception()
    if error is not None:
        print(f"process {jax.process_index()} failed: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _replay(runner: ModelRunner, head: Mapping[str, Any], arrays: list[np.ndarray]) -> Future:
    device = runner.device
    match head["what"]:
        case "reset":
            return runner.submit(device.reset)
        case "labels":
            return runner.submit(device.read_labels, *arrays)
        case "grammar":
            sizes = grammars.Sizes(*head["sizes"])
            return runner.submit(device.bind, head["slot"], sizes, arrays, head["at"])
        case "move":
            return runner.submit(device.move, head["slot"], head["at"])
    sizes = head["sizes"] and grammars.Sizes(*head["sizes"])
    program = getattr(programs, head["program"])
    key, args = tuple(head["key"]), tuple(arrays)
    call = Call(key, program, args, head["static"], sizes, head["options"])
    if head["what"] == "run":
        return runner.submit(device.run, call)
    return runner.submit(device.compile, call, ())
