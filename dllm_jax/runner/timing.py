"""Times of programs, measured on made-up requests at start.

Each time is the difference of a longer and a shorter run, so that the fixed cost of a dispatch
cancels. Made-up requests have page ids of -1: reading them costs as much as reading real pages, and
nothing is written.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dllm_jax.engine.layout import NO_LIMIT, EngineLayout, Placement
from dllm_jax.engine.rounds import Cost

SLOW_S = 0.1  # slower programs are timed once: the spread of one run does not matter there
REPEATS = 3
BUDGET_S = 10.0  # for all timing
SHORT, LONG = 2, 4  # decode steps, or prefill passes, of the two runs


def calibrate(
    runner: Any,
    clock: Callable[[], float] = time.perf_counter,
    budget_s: float = BUDGET_S,
) -> Cost:
    """Time the programs of a runner that holds no request, and reset it.

    Args:
        runner: A `ModelRunner`.
        clock: Seconds.
        budget_s: Once so much time has passed, a program is timed once, not three times.
    """
    layout: EngineLayout = runner.layout
    until = clock() + budget_s

    def timed(measure: Callable[..., float], sizes: Sequence[int], *kind: str):
        found = {}
        for size, columns in itertools.product(sizes, layout.page_buckets):
            is_early = clock() < until
            times = [measure(runner, clock, size, columns, *kind)]
            while is_early and times[0] <= SLOW_S and len(times) < REPEATS:
                times.append(measure(runner, clock, size, columns, *kind))
            found[size, columns] = statistics.median(times)
        return found

    decode = timed(_step_s, layout.slot_buckets)
    prefill = {kind: timed(_pass_s, layout.prefill_buckets, kind) for kind in layout.pass_kinds}
    runner.reset()
    return Cost(decode, prefill)


def _step_s(runner: Any, clock: Callable[[], float], rows: int, columns: int) -> float:
    """One decode step of `rows` slots."""
    slots, pages = np.arange(rows, dtype=np.int32), np.full((rows, columns), -1, np.int32)
    placement = made_up(runner.layout, columns)
    for slot in range(rows):
        runner.admit(slot, placement)
        begin(runner, slot, placement.prompt_len, pages[slot])
    times, counts = [], []
    for steps in (SHORT, LONG):
        runner.wait()
        began = clock()
        fetched = runner.fetch(runner.decode(slots, rows, pages, steps, False))
        times.append(clock() - began)
        counts.append(fetched.steps)
    return _each_s(times, counts)


def _pass_s(runner: Any, clock: Callable[[], float], size: int, columns: int, kind: str) -> float:
    """One prefill pass over the last tokens that the pages hold."""
    layout: EngineLayout = runner.layout
    first = max(0, columns * layout.page_size - size) // layout.block_size * layout.block_size
    first = 0 if kind == "full" else first
    end = first + size
    pages = np.full((columns,), -1, np.int32)
    runner.admit(0, made_up(layout, columns, SHORT + LONG))
    times = []
    for passes in (SHORT, LONG):
        runner.wait()
        began = clock()
        for _ in range(passes):
            runner.prefill(0, (0,) * size, first, end, end, False, pages, size, kind)
        runner.wait()
        times.append(clock() - began)
    return _each_s(times, (SHORT, LONG))


def _each_s(times: Sequence[float], counts: Sequence[int]) -> float:
    """Seconds of one step, from a short and a long run.

    The long run alone decides where the texts ended early or the clock does not separate the runs:
    a step with no cost would leave no time for prefill.
    """
    if counts[1] > counts[0] and times[1] > times[0]:
        return (times[1] - times[0]) / (counts[1] - counts[0])
    return times[1] / max(1, counts[1])


def begin(runner: Any, slot: int, prompt_len: int, pages: np.ndarray) -> None:
    """Let a slot decode; a causal prompt needs a pass over its last token."""
    layout: EngineLayout = runner.layout
    if not layout.is_token_causal:
        runner.begin(slot)
        return
    size = layout.prefill_buckets[0]
    runner.prefill(slot, (0,), prompt_len - 1, prompt_len, prompt_len, True, pages, size, "causal")


def made_up(layout: EngineLayout, columns: int, steps: int = SHORT + LONG) -> Placement:
    """A request with as much context as the pages hold, and room for steps after it."""
    most = min(columns * layout.page_size, layout.max_model_len)
    room = steps * layout.window
    prompt_len = max(0, most - room) // layout.block_size * layout.block_size
    if layout.in_window or not prompt_len:
        prompt_len = 1
    return Placement(
        tail=(0,) * (prompt_len - layout.prefill_len(prompt_len)),
        prompt_len=prompt_len,
        limit=min(prompt_len + room, layout.max_model_len),
        stop_ids=(),
        max_nfe=NO_LIMIT,
        max_run=NO_LIMIT,
        knobs=layout.knob_values,
        seed=0,
        fold=0,
    )
