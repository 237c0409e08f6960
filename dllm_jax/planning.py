"""How much goes into a round: decode steps, groups of rows, prefill within what the steps take.

What runs beside the decode steps of most rows may cost nearly as much as they do, so that a step
takes at most twice its time beside a long prompt. Costs are predictions of `device.cost`; without
them rounds are sized by tokens. Nothing here dispatches.
"""

import functools
import math
from typing import Protocol

from dllm_jax.scheduler import DECODE, Pass, Sample, Scheduler

# How long a dispatch should last. Each costs about 2 ms on an H200, where XLA updates its command
# buffers on every call, and what ends or arrives in a chunk waits for its end.
CHUNK_S = 0.1
CHUNK_S_WATCHED = 0.03  # where somebody watches the text grow
CHUNK_S_WAITING = 0.016  # where somebody waits to decode: sqrt(2 ms x 64 steps x 2 ms a step)
PREFILL_ALONE = 4  # largest prefill buckets of a round in which nothing decodes

# What may run beside the decode steps of most rows, as a share of their time: passes of prefill,
# and steps of rows with much longer contexts. A little less than 1, so that a step stays below
# twice its time where predictions are a little off.
BESIDE = 0.8

# Rows of one dispatch, the columns of their page table, and their steps.
Group = tuple[list[Sample], int, int]


class Cost(Protocol):
    """Predicted seconds of a program."""

    def decode_s(self, rows: int, columns: int) -> float:
        """One decode step of a slot bucket over a page bucket."""
        ...

    def prefill_s(self, size: int, columns: int, kind: str) -> float:
        """One prefill pass."""
        ...


def num_steps(
    step_s: float, scheduler: Scheduler, decoding: list[Sample], cost: Cost | None
) -> int:
    """Steps of the next chunk: as many as last a while, fewer where somebody waits.

    Args:
        step_s: What a step took lately; 0: nobody knows.
    """
    watched = [sample for sample in decoding if sample.watched]
    if not step_s or any(sample.owner.request.denoise for sample in watched):
        return 1
    wanted = CHUNK_S_WATCHED if watched else CHUNK_S
    has_prefix = len(decoding) < len(scheduler.live)
    if scheduler.has_waiting or has_prefix:
        wanted = CHUNK_S_WAITING
    steps = int(wanted / step_s)
    if has_prefix and decoding and cost is not None:
        steps = max(steps, _steps_beside(scheduler, decoding, cost))
    return max(1, min(scheduler.facts.max_steps_per_chunk, steps))


def _steps_beside(scheduler: Scheduler, decoding: list[Sample], cost: Cost) -> int:
    """Steps that the smallest piece of the first prefix may run beside."""
    prefix = next(sample for sample in scheduler.live if sample.stage != DECODE)
    piece = scheduler.next_pass(prefix, 1)
    if piece is None or piece.kind == "full":
        return 1
    columns = scheduler.page_bucket(max(1, piece.end))
    price = cost.prefill_s(piece.size, columns, piece.kind)
    step_s = max(
        _step_s(scheduler, cost, len(rows), columns)
        for rows, columns, _ in groups(scheduler, decoding, 1, cost)
    )
    return math.ceil(price / (BESIDE * step_s)) if step_s else 1


def groups(
    scheduler: Scheduler, decoding: list[Sample], steps: int, cost: Cost | None
) -> list[Group]:
    """Rows by page bucket, neighbours merged where one dispatch is cheaper than two.

    So short contexts do not pay for long ones. The largest group runs all steps, the others as many
    as fit beside it, at least one.
    """
    every = scheduler.columns(decoding)
    widths = sorted(set(every))
    if len(widths) <= 1:
        return [(decoding, width, steps) for width in widths]
    apart = [
        ([s for s, columns in zip(decoding, every, strict=True) if columns == width], width)
        for width in widths
    ]
    if cost is None:
        return [(rows, columns, steps) for rows, columns in apart]
    step_s = functools.partial(_step_s, scheduler, cost)
    merged = apart[:1]
    for rows, columns in apart[1:]:
        before, narrow = merged[-1]
        together = step_s(len(before) + len(rows), columns)
        if together <= step_s(len(before), narrow) + step_s(len(rows), columns):
            merged[-1] = (before + rows, columns)
        else:
            merged.append((rows, columns))
    main = max(range(len(merged)), key=lambda i: len(merged[i][0]))
    share = BESIDE * steps * step_s(len(merged[main][0]), merged[main][1])
    share /= max(1, len(merged) - 1)
    return [
        (rows, columns, steps if i == main else _within(share, step_s(len(rows), columns), steps))
        for i, (rows, columns) in enumerate(merged)
    ]


def _step_s(scheduler: Scheduler, cost: Cost, rows: int, columns: int) -> float:
    return cost.decode_s(scheduler.slot_bucket(rows), columns)


def _within(seconds: float, step_s: float, steps: int) -> int:
    """How many of the steps fit, at least one."""
    return max(1, min(steps, int(seconds / step_s)))


class Budget:
    """Prefill tokens, and seconds, a round may spend."""

    def __init__(self, scheduler: Scheduler, decoding: list[Sample], steps: int, cost: Cost | None):
        facts = scheduler.facts
        self._scheduler, self._cost = scheduler, cost
        largest = facts.prefill_buckets[-1]
        self._tokens = facts.max_num_batched_tokens or PREFILL_ALONE * largest
        self._seconds = None
        if decoding and cost is None:
            self._tokens = min(self._tokens, largest)
        elif decoding and cost is not None:
            times = [
                group_steps * _step_s(scheduler, cost, len(rows), columns)
                for rows, columns, group_steps in groups(scheduler, decoding, steps, cost)
            ]
            self._seconds = (1 + BESIDE) * max(times) - sum(times)

    def take(self, sample: Sample, forced: bool) -> Pass | None:
        """The sample's next pass, paid for; None where nothing is left to compute or to spend.

        Args:
            forced: Take the smallest piece whatever it costs: a prefix always gets on.
        """
        most = self._tokens
        while (piece := self._scheduler.next_pass(sample, most)) is not None:
            smallest = self._scheduler.facts.prefill_buckets[0]
            indivisible = piece.kind == "full" or piece.size == smallest
            price = self._price(piece)
            fits = piece.size <= self._tokens
            fits &= self._seconds is None or price <= self._seconds
            if fits or (forced and indivisible):
                self._tokens -= piece.size
                if self._seconds is not None:
                    self._seconds -= price
                return piece
            if indivisible:
                return None
            most = piece.size - 1
        return None

    def _price(self, piece: Pass) -> float:
        if self._cost is None:
            return 0.0
        columns = self._scheduler.page_bucket(max(1, piece.end))
        return self._cost.prefill_s(piece.size, columns, piece.kind)
