"""How much goes into a round: decode steps, groups of rows, prefill within what the steps take.

What runs beside the decode steps of most rows may cost nearly as much as they do, so that a step
takes at most twice its time beside a long prompt. Where nobody watches a text grow, that is for
each prompt that waits: the sooner all of them decode, the fewer rounds run half empty. Costs are
predictions of `device.cost`; without them rounds are sized by tokens. Nothing here dispatches.
"""

import functools
import math
from collections import abc
from typing import Protocol

from dllm_jax.engine.layout import NO_LIMIT, EngineLayout
from dllm_jax.engine.scheduler import DECODE, Pass, Scheduler, Sequence

# How long a dispatch should last. Beside its steps each takes 1.6 ms on an H200 (SDAR-1.7B; a model
# of a few layers 0.8): 1.2 in the call, which looks at each of some 300 arrays, 0.25 to update
# command buffers, and the way back. What ends or arrives in a chunk waits for its end.
CHUNK_S = 0.2
CHUNK_S_WATCHED = 0.03  # where somebody watches the text grow
CHUNK_S_WAITING = 0.016  # where somebody waits to decode: sqrt(2 ms x 64 steps x 2 ms a step)
PREFILL_ALONE = 4  # largest prefill buckets of a round in which nothing decodes

# What may run beside the decode steps of most rows, as a share of their time: passes of prefill,
# and steps of rows with much longer contexts. Dispatches cost time that costs do not count: at 0.7
# the 99th percentile of a step on an H200 rose 1.8 to 2.2 times beside a prompt of 32,000 tokens.
BESIDE = 0.5
MINOR = 4  # a group of so many times fewer rows than the largest is one that runs beside it

# Rows of one dispatch, the columns of their page table, and their steps.
Group = tuple[list[Sequence], int, int]


class Dispatched(Protocol):
    """A chunk that is not fetched yet, of so many steps at most."""

    sequences: list[Sequence]
    steps: int


class Cost(Protocol):
    """Predicted seconds of a program."""

    def decode_s(self, rows: int, columns: int) -> float:
        """One decode step of a slot bucket over a page bucket."""
        ...

    def prefill_s(self, size: int, columns: int, kind: str) -> float:
        """One prefill pass."""
        ...


def num_steps(
    step_s: float, scheduler: Scheduler, decoding: list[Sequence], cost: Cost | None
) -> int:
    """Steps of the next chunk: as many as last a while, fewer where somebody waits.

    Args:
        step_s: What a step took lately; 0: nobody knows.
    """
    watched = [sequence for sequence in decoding if sequence.watched]
    if not step_s or any(sequence.owner.request.denoise for sequence in watched):
        return 1
    wanted = CHUNK_S_WATCHED if watched else CHUNK_S
    has_prefix = len(decoding) < len(scheduler.live)
    if scheduler.has_waiting or has_prefix:
        wanted = CHUNK_S_WAITING
    steps = int(wanted / step_s)
    has_minor = len(set(scheduler.columns(decoding))) > 1
    if decoding and cost is not None and (has_prefix or has_minor):
        steps = max(steps, _steps_beside(scheduler, decoding, cost))
    return max(1, min(scheduler.layout.max_steps_per_chunk, steps))


def all_end(
    layout: EngineLayout, in_flight: abc.Sequence[Dispatched], decoding: list[Sequence]
) -> bool:
    """Whether what is in flight ends all texts: a chunk behind it would find nothing to do.

    Where a stop id may end them, that chunk is dispatched all the same: it hides what the host does
    between two chunks, 0.6 ms on an H200, at each of them, and where it finds nothing it takes
    1.9 ms of the next call, once.
    """
    known = all(sequence.in_flight for sequence in decoding)
    return known and all(_ends(layout, chunk) for chunk in in_flight)


def _ends(layout: EngineLayout, chunk: Dispatched) -> bool:
    """Whether a chunk must end all its texts.

    It ends with the first of them: it ends several only where all end in the same step, and none
    may do so sooner.
    """
    left = _steps_left(layout, chunk.sequences[0])
    if left > chunk.steps:
        return False
    return len(chunk.sequences) == 1 or not any(
        _may_stop(sequence) or _steps_left(layout, sequence) != left for sequence in chunk.sequences
    )


def _steps_left(layout: EngineLayout, sequence: Sequence) -> int:
    """The most steps that a text can take from its last fetch on; many where none is known."""
    asked = sequence.placement
    left = asked.max_nfe - sequence.nfe  # a step is a forward at least
    if layout.is_token_causal:  # and writes a token at least
        left = min(left, asked.limit - asked.prompt_len - len(sequence.tokens))
    return left


def _may_stop(sequence: Sequence) -> bool:
    return bool(sequence.placement.stop_ids) or sequence.placement.max_run < NO_LIMIT


def _steps_beside(scheduler: Scheduler, decoding: list[Sequence], cost: Cost) -> int:
    """Steps of most rows beside which a step of each minor group, and a piece of a prefix, fits."""
    sized = groups(scheduler, decoding, 1, cost)
    most, wide, _ = max(sized, key=lambda group: len(group[0]))
    beside = sum(
        _step_s(scheduler, cost, rows, columns)
        for rows, columns, _ in sized
        if _is_minor(rows, most)
    )
    prefix = next((sequence for sequence in scheduler.live if sequence.stage != DECODE), None)
    piece = scheduler.next_pass(prefix, 1) if prefix else None
    if piece is not None and piece.kind != "full":
        columns = scheduler.page_bucket(max(1, piece.end))
        beside += cost.prefill_s(piece.size, columns, piece.kind)
    step_s = _step_s(scheduler, cost, most, wide)
    return math.ceil(beside / (BESIDE * step_s)) if step_s else 1


def groups(
    scheduler: Scheduler, decoding: list[Sequence], steps: int, cost: Cost | None
) -> list[Group]:
    """Rows by page bucket, neighbours merged where one dispatch is cheaper than two.

    So short contexts do not pay for long ones. Groups of few rows run as many steps as fit beside
    those of the largest, at least one; the others all.
    """
    every = scheduler.columns(decoding)
    widths = sorted(set(every))
    if len(widths) == 1:
        return [(decoding, widths[0], steps)]
    apart = [
        ([s for s, columns in zip(decoding, every, strict=True) if columns == width], width)
        for width in widths
    ]
    if cost is None or not apart:
        return [(rows, columns, steps) for rows, columns in apart]
    step_s = functools.partial(_step_s, scheduler, cost)
    merged = apart[:1]
    for rows, columns in apart[1:]:
        before, narrow = merged[-1]
        together = step_s(before + rows, columns)
        if together <= step_s(before, narrow) + step_s(rows, columns):
            merged[-1] = (before + rows, columns)
        else:
            merged.append((rows, columns))
    most, columns = max(merged, key=lambda group: len(group[0]))
    minors = sum(_is_minor(rows, most) for rows, _ in merged)
    share = BESIDE * steps * step_s(most, columns) / max(1, minors)
    return [
        (rows, columns, _within(share, step_s(rows, columns), steps))
        if _is_minor(rows, most)
        else (rows, columns, steps)
        for rows, columns in merged
    ]


def _is_minor(rows: list[Sequence], most: list[Sequence]) -> bool:
    return MINOR * len(rows) <= len(most)


def _step_s(scheduler: Scheduler, cost: Cost, rows: list[Sequence], columns: int) -> float:
    return cost.decode_s(scheduler.slot_bucket(len(rows)), columns)


def _within(seconds: float, step_s: float, steps: int) -> int:
    """How many of the steps fit, at least one."""
    return max(1, min(steps, int(seconds / step_s))) if step_s else steps


def _seconds_beside(
    scheduler: Scheduler, decoding: list[Sequence], steps: int, cost: Cost
) -> float:
    """What is left for prefill beside the decode steps of a round."""
    sized = groups(scheduler, decoding, steps, cost)
    most = max((rows for rows, _, _ in sized), key=len)
    left = 0.0
    for rows, columns, group_steps in sized:
        seconds = group_steps * _step_s(scheduler, cost, rows, columns)
        left += -seconds if _is_minor(rows, most) else BESIDE * seconds
    return left


class Budget:
    """Prefill tokens, and seconds, a round may spend."""

    def __init__(
        self, scheduler: Scheduler, decoding: list[Sequence], steps: int, cost: Cost | None
    ):
        layout = scheduler.layout
        self._scheduler, self._cost = scheduler, cost
        shares = 1
        asked = [sequence.owner.request for sequence in scheduler.live]
        if not any(request.stream or request.denoise for request in asked):
            shares = len(scheduler.live) - len(decoding)
        largest = layout.prefill_buckets[-1]
        self._tokens = max(PREFILL_ALONE, shares) * largest
        self._seconds = None
        if decoding and cost is None:
            self._tokens = shares * largest
        elif decoding and cost is not None:
            self._seconds = shares * _seconds_beside(scheduler, decoding, steps, cost)
        if layout.max_num_batched_tokens is not None:
            self._tokens = min(self._tokens, layout.max_num_batched_tokens)

    def take(self, sequence: Sequence, forced: bool) -> Pass | None:
        """The sequence's next pass, paid for; None where nothing is left to compute or to spend.

        Args:
            forced: Take the smallest piece whatever it costs: a prefix always gets on.
        """
        most = self._tokens
        while (piece := self._scheduler.next_pass(sequence, most)) is not None:
            smallest = self._scheduler.layout.prefill_buckets[0]
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
