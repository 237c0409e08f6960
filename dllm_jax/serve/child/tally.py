"""Counts of the engine's process: those of its engine, and its own."""

import time
from typing import Any

from dllm_jax.engine.faults import Faults
from dllm_jax.serve.child.served import Served
from dllm_jax.serve.pipe import Counts

COUNTS_PERIOD_S = 0.5
# Not of the engine's `Stats`.
_OWN = ("steps", "devices", "weight_version", "compiled")
_OWN += ("grammar_queries", "grammar_hits", "grammar_stages")


class Tally:
    """What the loop counts.

    Attributes:
        queries, hits: Of automata.
        stages: Of texts with calls.
        compiled: As `Counts.compiled`.
    """

    def __init__(self, served: Served, faults: Faults):
        self._served, self._faults = served, faults
        self.queries = self.hits = self.stages = 0
        self.compiled: list[tuple[str, float, int]] = []
        self._devices: list[tuple[int, int]] = []
        self.look_again()

    def look_again(self) -> None:
        """Let the next counts ask the devices."""
        self._looked_s = -COUNTS_PERIOD_S

    def counts(self, stats: Any, steps: list[tuple[int, float]], num_parked: int) -> Counts:
        """The engine's `Stats` and ours as they are sent.

        Args:
            steps: Decode steps of this turn of the loop, and the seconds it took.
            num_parked: Requests that wait outside the engine.
        """
        names = [name for name in Counts.__struct_fields__ if name not in _OWN]
        named = {name: getattr(stats, name) for name in names}
        named["num_waiting"] += num_parked
        named["num_faults"] = self._faults.count
        if (now := time.monotonic()) - self._looked_s > COUNTS_PERIOD_S:
            self._devices, self._looked_s = self._served.devices(), now
        commands = self._served.commands
        compiled, self.compiled = self.compiled, []
        return Counts(
            **named,
            steps=steps,
            devices=self._devices,
            weight_version=0 if commands is None else commands.version,
            grammar_queries=self.queries,
            grammar_hits=self.hits,
            grammar_stages=self.stages,
            compiled=compiled,
        )
