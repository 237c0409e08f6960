"""The results of a chunk of decode steps, on the host."""

import operator
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from dllm_jax.engine.layout import DeviceFailure
from dllm_jax.engine.record import NOTHING_WRITTEN, Write
from dllm_jax.engine.requests import DraftMetrics
from dllm_jax.runner import packing
from dllm_jax.strategies.core.recording import LAW, RAW, STEP, TOP, TOP_IDS

PINNED = "pinned_host"  # memory of the host that a GPU writes


class Fetched:
    """The rows of a decode chunk, on the host.

    Args:
        packed: [R X], `packing.fetched_fields`.
        runner: The `ModelRunner` that made the chunk.
        far: The words of the slots that are still on the device.

    Attributes:
        start: First position of each window = tokens in the cache.
        finish: Codes of `dllm_jax.strategies.core.state`.
        nfe: Forwards after prefill.
        length: Tokens emitted so far, and before this chunk (`before`).
        emitted: Tokens of the output from `before` on, valid up to `length`.
        steps: Decode steps the chunk ran.
    """

    def __init__(self, packed: np.ndarray, runner: Any, far: jax.Array | np.ndarray | None = None):
        self._packed, self._runner, self._far = packed, runner, far
        columns = packed[:, : packing.HEAD.size].T.tolist()
        head: dict[str, list[int]] = dict(zip(packing.HEAD.at, columns, strict=True))
        self.start, self.finish, self.nfe = head["start"], head["finish"], head["nfe"]
        self.length, self.before = head["length"], head["before"]
        self.steps = head["steps"][0]
        most = max(map(operator.sub, self.length, self.before))
        first = packing.HEAD.size
        self.emitted: list[list[int]] = packed[:, first : first + most].tolist()

    def _slot(self, row: int) -> np.ndarray:
        return self._packed[row, packing.fetched_fields(self._runner.layout.most_new).span["slot"]]

    def hold(self) -> bool:
        """Bring the rest of the slots to the host; False: the device failed, and they are lost."""
        far = self._far
        try:
            self._far = None if far is None else self._runner.device.read(lambda: np.asarray(far))
        except (DeviceFailure, jax.errors.JaxRuntimeError):
            return False
        return True

    def saved(self, row: int) -> np.ndarray:
        """The slot as `ModelRunner.restore` takes it; a copy.

        Raises:
            DeviceFailure: It is lost.
        """
        if not self.hold():
            raise DeviceFailure("what a text needs to resume is lost with the device")
        slot, near = self._slot(row), self._runner.num_near_words
        far = () if self._far is None else self._far[row]
        return np.concatenate([slot[:near], far, slot[near:]]).astype(np.int32, copy=False)

    def window(self, row: int, length: int) -> tuple[int | None, ...]:
        """Cells after the first `length` output tokens, None for a hole."""
        return provisional(self._runner.unpack(self._slot(row)), length)

    def written(self, row: int, first: int, count: int) -> list[Write]:
        """What was last written to `count` positions from `first` on."""
        held = self._runner.unpack(self._slot(row))["written"]
        rows = held[(first + np.arange(count)) % len(held)].tolist()
        return [
            Write(
                row[LAW],
                row[RAW],
                dict(zip(map(int, row[TOP_IDS]), row[TOP], strict=True)),
                int(row[STEP]),
            )
            if row[STEP] == row[STEP]
            else NOTHING_WRITTEN
            for row in rows
        ]

    def behind_text(self, row: int, length: int) -> tuple[int, list[int | None], list[Write]]:
        """First position, ids and writes of the cells after the first `length` output tokens.

        An id is None for a hole.
        """
        buffer = self._runner.unpack(self._slot(row))["buffer"]
        start = int(buffer.start)
        first = max(int(buffer.prompt_len) + length, start)
        cells = zip(buffer.tokens.ravel().tolist(), buffer.filled.ravel().tolist(), strict=True)
        ids = [token if filled else None for token, filled in cells][first - start :]
        return first, ids, self.written(row, first, len(ids))

    def behind(self, row: int) -> int:
        """The cell after the emitted tokens of a row whose last fetch is this one."""
        buffer = self._runner.unpack(self._slot(row))["buffer"]
        place = int(buffer.prompt_len) + self.length[row] - int(buffer.start)
        return int(buffer.tokens.reshape(-1)[place])

    def drafted(self, row: int) -> DraftMetrics | None:
        """Draft counts of a request so far; None for a strategy without drafts."""
        return self._runner.drafted(self._slot(row))


def provisional(slot: Mapping[str, Any], length: int) -> tuple[int | None, ...]:
    """The open cells of a fetched slot after `length` tokens of output."""
    buffer = slot["buffer"]
    tokens, filled = buffer.tokens.reshape(-1), buffer.filled.reshape(-1)
    first = int(buffer.prompt_len) + length - int(buffer.start)
    is_open = np.repeat(buffer.status != 0, buffer.tokens.shape[-1])
    end = min(len(tokens), int(buffer.limit) - int(buffer.start))
    return tuple(
        int(tokens[i]) if filled[i] else None for i in range(max(first, 0), end) if is_open[i]
    )


def pinned_of(home: Any) -> Any:
    """Memory of the host into which a GPU copies a result once it is computed.

    None where there is none, or where several devices share the model.
    """
    if home is None:
        return None
    (device,) = home.device_set
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform != "gpu" or PINNED not in kinds:
        return None
    return SingleDeviceSharding(device, memory_kind=PINNED)
