"""What programs take: each is timed on made-up requests before the first real one.

Rounds are planned by these figures (`planning.Cost`). A program is timed as the difference of a
longer and a shorter run, so that what is paid once a dispatch does not count. Pages of the made-up
requests are -1: they read as much as real ones would and write nothing.
"""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dllm_jax.engine.layout import NO_LIMIT, EngineLayout, Placement
from dllm_jax.runner.pass_time import USUAL_TEXT
from dllm_jax.runner.warmup import pass_kinds

SLOW_S = 0.1  # programs slower than this are timed once: one run in ten does not matter to them
REPEATS = 3
BUDGET_S = 10.0  # of all timing; what is left by then is taken from the next larger size
CHOICE_STEP = 4  # numbers of slots whose choices are timed, over USUAL_TEXT, are so far apart
SHORT, LONG = 2, 4  # decode steps, and prefill passes, of the two runs
FEW, MANY = 2, 8  # decode steps of the two runs by which choices are compared


@dataclasses.dataclass(frozen=True)
class MeasuredCost:
    """Seconds of programs by their sizes; sizes that were not timed cost what larger ones do.

    Attributes:
        decode: Of one decode step, by slots and pages.
        prefill: Of one pass, by kind, tokens and pages.
    """

    decode: Mapping[tuple[int, int], float]
    prefill: Mapping[str, Mapping[tuple[int, int], float]]

    def decode_s(self, rows: int, columns: int) -> float:
        """One decode step of a slot bucket over a page bucket."""
        return _nearest(self.decode, rows, columns)

    def prefill_s(self, size: int, columns: int, kind: str) -> float:
        """One prefill pass."""
        times = self.prefill.get(kind) or next(iter(self.prefill.values()), {})
        return _nearest(times, size, columns)


def _nearest(times: Mapping[tuple[int, int], float], size: int, columns: int) -> float:
    """The cheapest of those at least as large; else the largest, scaled by its size."""
    if (size, columns) in times:
        return times[size, columns]
    larger = [s for (n, c), s in times.items() if n >= size and c >= columns]
    if larger:
        return min(larger)
    if not times:
        return 0.0
    n, c = max(times)
    return times[n, c] * max(1.0, size / n) * max(1.0, columns / c)


def calibrate(
    device: Any,
    clock: Callable[[], float] = time.perf_counter,
    budget_s: float = BUDGET_S,
) -> MeasuredCost:
    """Time the programs of a device that holds no request; afterwards it is as it was.

    Args:
        device: `device.Device`, its programs compiled.
        clock: Seconds.
        budget_s: No further program is begun once so much time has gone.
    """
    until = clock() + budget_s
    decode: dict[tuple[int, int], float] = {}
    prefill: dict[str, dict[tuple[int, int], float]] = {}
    for size, columns, kind in _in_order(device.layout):
        times = decode if kind is None else prefill.setdefault(kind, {})
        if clock() < until or not times:
            measure = functools.partial(_step_s if kind is None else _pass_s, device, clock)
            times[size, columns] = _typical(functools.partial(measure, size, columns, kind))
    device.reset()
    return MeasuredCost(decode, prefill)


def of_choices(
    device: Any, clock: Callable[[], float] = time.perf_counter
) -> dict[int, Sequence[float]]:
    """Seconds of one step of each of a strategy's choices, cheap ones first, by slots.

    Some numbers of slots stand in for those below them. Afterwards the device holds no request.

    Args:
        device: As of `calibrate`; its strategy `weighs_costs`. Its `choice_costs` are lost.
    """
    layout: EngineLayout = device.layout
    columns = next((n for n in layout.page_buckets if n * layout.page_size >= USUAL_TEXT), None)
    columns = layout.page_buckets[-1] if columns is None else columns
    taken = {}
    for rows in _some(layout.slot_buckets):
        count = len(device.strategy.choices)
        steps = _Steps(device, rows, columns, count)
        each = [steps.each_s(choice, clock) for choice in range(count)]
        taken[rows] = tuple(itertools.accumulate(each, max))  # a wider choice costs no less
    device.reset()
    return taken


def _some(sizes: Sequence[int]) -> list[int]:
    """The first and the last, and between them such as are several times the one before."""
    some: list[int] = []
    for size in sizes:
        if not some or size >= CHOICE_STEP * some[-1] or size == sizes[-1]:
            some.append(size)
    return some


class _Steps:
    """Slots that decode, and what steps of them take."""

    def __init__(self, device: Any, rows: int, columns: int, num_choices: int):
        self._device, self._num_choices = device, num_choices
        self._slots = np.arange(rows, dtype=np.int32)
        self._pages = np.full((rows, columns), -1, np.int32)
        runs = num_choices * REPEATS
        self._placement = made_up(device.layout, columns, runs * (FEW + MANY))
        self._begin()

    def each_s(self, choice: int, clock: Callable[[], float]) -> float:
        """Seconds of a step where the strategy can but choose this: all else costs too much."""
        costs = [1.0 if one == choice else float("inf") for one in range(self._num_choices)]
        self._device.choice_costs = {len(self._slots): costs}
        self._run(FEW, clock)
        return statistics.median(self._once_s(clock) for _ in range(REPEATS))

    def _once_s(self, clock: Callable[[], float]) -> float:
        taken, ran = zip(*(self._run(steps, clock) for steps in (FEW, MANY)), strict=True)
        if ran != (FEW, MANY):  # the texts ended
            self._begin()
            taken, ran = zip(*(self._run(steps, clock) for steps in (FEW, MANY)), strict=True)
        return _each_s([*taken], [*ran])

    def _run(self, steps: int, clock: Callable[[], float]) -> tuple[float, int]:
        device, rows = self._device, len(self._slots)
        device.wait()
        began = clock()
        fetch = device.fetch(device.decode(self._slots, rows, self._pages, steps, False))
        return clock() - began, fetch.steps

    def _begin(self) -> None:
        for slot in self._slots.tolist():
            self._device.admit(slot, self._placement)
            begin(self._device, slot, self._placement.prompt_len, self._pages[slot])


def _in_order(layout: EngineLayout) -> list[tuple[int, int, str | None]]:
    """Slots or tokens, pages, kind of pass (None: decode), the most important first.

    The largest of each number of pages, which stand in for what is not timed any more; then the
    rest from few pages up, as most texts are short.
    """
    jobs = []
    for kind in (None, *pass_kinds(layout)):
        sizes = layout.slot_buckets if kind is None else layout.prefill_buckets
        for size in sizes:
            for columns in layout.page_buckets:
                is_rest = size != sizes[-1]
                jobs.append(((is_rest, columns if is_rest else -columns), (size, columns, kind)))
    return [job for _, job in sorted(jobs, key=lambda one: one[0])]


def _typical(measure: Callable[[], float]) -> float:
    first = measure()
    if first > SLOW_S:
        return first
    more = [measure() for _ in range(REPEATS - 1)]
    return statistics.median([first, *more])


def _step_s(device: Any, clock: Callable[[], float], rows: int, columns: int, kind: None) -> float:
    """One decode step of so many slots."""
    placement = made_up(device.layout, columns)
    slots = np.arange(rows, dtype=np.int32)
    pages = np.full((rows, columns), -1, np.int32)
    for slot in range(rows):
        device.admit(slot, placement)
        begin(device, slot, placement.prompt_len, pages[slot])
    taken, ran = [], []
    for steps in (SHORT, LONG):
        device.wait()
        began = clock()
        fetch = device.fetch(device.decode(slots, rows, pages, steps, False))
        taken.append(clock() - began)
        ran.append(fetch.steps)
    return _each_s(taken, ran)


def begin(device: Any, slot: int, prompt_len: int, pages: np.ndarray) -> None:
    """Let a slot decode; a causal prompt's last token is computed, which is where it begins."""
    layout: EngineLayout = device.layout
    if layout.prompt_mode != "whole_causal":
        device.begin(slot)
        return
    size = layout.prefill_buckets[0]
    device.prefill(slot, (0,), prompt_len - 1, prompt_len, prompt_len, True, pages, size, "causal")


def _pass_s(device: Any, clock: Callable[[], float], size: int, columns: int, kind: str) -> float:
    """One prefill pass at the far end of what the pages hold."""
    layout: EngineLayout = device.layout
    first = max(0, columns * layout.page_size - size) // layout.block_size * layout.block_size
    first = 0 if kind == "full" else first
    end = first + size
    pages = np.full((columns,), -1, np.int32)
    device.admit(0, made_up(layout, columns))
    taken = []
    for passes in (SHORT, LONG):
        device.wait()
        began = clock()
        for _ in range(passes):
            device.prefill(0, (0,) * size, first, end, end, False, pages, size, kind)
        device.wait()
        taken.append(clock() - began)
    return _each_s(taken, [SHORT, LONG])


def _each_s(taken: list[float], ran: list[int]) -> float:
    """Seconds of one step by a short and a long run.

    By the long run alone where the texts ended before, or the clock cannot tell the runs apart: a
    step that costs nothing would leave prefill nothing.
    """
    if ran[1] > ran[0] and taken[1] > taken[0]:
        return (taken[1] - taken[0]) / (ran[1] - ran[0])
    return taken[1] / max(1, ran[1])


def made_up(layout: EngineLayout, columns: int, steps: int = SHORT + LONG) -> Placement:
    """A request with as much context as the pages hold, and room for steps behind it."""
    most = min(columns * layout.page_size, layout.max_model_len)
    room = steps * layout.window
    prompt_len = max(0, most - room) // layout.block_size * layout.block_size
    if layout.prompt_mode == "in_window" or not prompt_len:
        prompt_len = 1
    return Placement(
        tail=(0,) * (prompt_len - layout.prefill_len(prompt_len)),
        prompt_len=prompt_len,
        limit=min(prompt_len + room, layout.max_model_len),
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        stop_ids=(),
        max_nfe=NO_LIMIT,
        max_run=NO_LIMIT,
        knobs=layout.knob_values,
        seed=0,
        fold=0,
    )
