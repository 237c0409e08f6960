"""The progress of a run, and its log."""

import json
import math
import time
from collections.abc import Callable
from typing import TextIO

import jax
import numpy as np


class Clock:
    """The progress of a run, in steps and in seconds over all its calls."""

    def __init__(self, num_steps: int, budget_seconds: float | None):
        self._num_steps, self._budget_seconds = num_steps, budget_seconds
        self._started = time.monotonic()
        self.step, self.seconds_before = 0, 0.0

    def seconds(self) -> float:
        """Seconds of the run, including earlier calls."""
        return self.seconds_before + time.monotonic() - self._started

    def progress(self) -> float:
        """Completed share of the run, by its budget of seconds or else by its steps."""
        if self._budget_seconds is not None:
            return min(1.0, self.seconds() / self._budget_seconds)
        return min(1.0, self.step / self._num_steps)

    def is_over(self, max_seconds: float | None) -> bool:
        """Whether this call has lasted `max_seconds`."""
        return max_seconds is not None and self.seconds() - self.seconds_before >= max_seconds


def figures(of: dict) -> str:
    """Names and values on one line, in columns, without nested ones."""
    shown = {name: value for name, value in of.items() if not isinstance(value, dict | list)}
    return "  ".join(
        f"{name.replace('_', ' ')} {value:<9.4g}"
        if isinstance(value, float)
        else f"{name.replace('_', ' ')} {value!s:<5}"
        for name, value in shown.items()
    ).rstrip()


class Log:
    """Writes lines to `metrics.jsonl` and to the terminal."""

    def __init__(self, file: TextIO, say: Callable[[str], None], clock: Clock):
        self._file, self._say, self._clock = file, say, clock
        self._pending: list[dict] = []
        self._from = (clock.step, time.monotonic())
        self.last: dict[str, float] = {}

    def add(self, metrics: dict, factor: float, is_due: bool) -> None:
        """Keep a step's metrics; when due, write the mean of all but the newest few."""
        self._pending.append(metrics)
        if not is_due:
            return
        # The newest few are still being computed; reading them would leave the device idle.
        ready, self._pending = self._pending[:-5] or self._pending, self._pending[-5:]
        read = jax.device_get(ready)
        self.last = {name: float(np.mean([m[name] for m in read])) for name in read[0]}
        step, now = self._clock.step, time.monotonic()
        speed = (step - self._from[0]) / (now - self._from[1])
        self._from = (step, now)
        line = {"step": step, "seconds": self._clock.seconds(), "progress": self._clock.progress()}
        self._write(line | self.last | {"lr_factor": factor, "steps_per_second": speed})
        self._say(
            f"step {step:<6} {100 * self._clock.progress():5.1f} %  {speed:6.1f} steps/s  "
            f"{figures(self.last)}"
        )
        if not math.isfinite(self.last["loss"]):
            raise FloatingPointError(f"loss={self.last['loss']} at {step=}; lower the rates")

    def write_scores(self, scores: list[dict]) -> None:
        """Write the results of an evaluation."""
        for score in scores:
            kept = {name: value for name, value in score.items() if name != "right"}
            self._write({"step": self._clock.step, "eval": kept})
            self._say(figures(kept))

    def _write(self, line: dict) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
